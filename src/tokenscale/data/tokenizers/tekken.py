"""Tekken, the tokenizer of Mistral-Nemo: 131,072 ids, from the file shipped in the mistral_common
wheel.

Two files beside it are derived from its ranks for other engines: a tokenizer.json and a list of
ranks in tiktoken's format. None of these tables holds control tokens, so their text stays text.

This generation of the file does not list its control tokens. mistral_common lists `<pad>` = 11, the
published Mistral-Nemo tokenizer 10. No mask depends on it: padding is identified by length.
"""

import base64
import binascii
import importlib.util
import json
import shutil
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import atomic, canonical_json, read_file, sha256_file, write_text
from tokenscale.data.tokenizers.backends import RANKS, EngineTokenizer
from tokenscale.data.tokenizers.base import read_tokenizer_file
from tokenscale.settings.data import TokenizerSettings

FILE = "tekken_240718.json"
#: control ids of mistral_common; the file lists none
CONTROL = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 11}


def make(
    settings: TokenizerSettings, directory: Path, corpus_directory: Path | None
) -> tuple[Path, dict[str, Any]]:
    """Copy the file from the package, derive the other two, and return (file, facts). Raises
    UserError if it is missing.
    """
    spec = importlib.util.find_spec("mistral_common")
    source = Path(spec.origin).parent / "data" / FILE if spec is not None and spec.origin else None
    if source is None or not source.exists():
        what = f"the tokenizer {settings.name} needs {FILE} from the package mistral_common."
        next_step = "install mistral_common (environment.yml names the version)"
        raise UserError(
            what, found="no such package" if source is None else f"no file {source}", next=next_step
        )
    path = directory / FILE
    with atomic(path) as temporary:
        shutil.copyfile(source, temporary)
    data = json.loads(read_file(path))
    write_text(directory / "tokenizer.json", text=canonical_json(make_fast_tokenizer(data)))
    lines = [f"{token['token_bytes']} {token['rank']}\n" for token in _list_entries(data)]
    write_text(directory / RANKS, text="".join(lines))
    derived = [directory / "tokenizer.json", directory / RANKS]
    facts = {
        "vocabulary_size": data["config"]["default_vocab_size"],
        "bos_id": CONTROL["<s>"],
        "eos_id": CONTROL["</s>"],
        "pad_id": CONTROL["<pad>"],
        "control_ids": data["config"]["default_num_special_tokens"],
        "source": f"mistral_common/data/{FILE}",
        "derived": [
            {"name": p.name, "bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in derived
        ],
    }
    return path, facts


class Tekken(EngineTokenizer):
    """Tokenizer of a file written by `make`."""

    @cached_property
    def _parts(self) -> list[bytes]:
        """Bytes of each id."""
        names = control_names(self.manifest["control_ids"])
        lines = read_tokenizer_file(self.path.parent, self.manifest, name=RANKS).splitlines()
        return [
            *(name.encode() for name in names),
            *(binascii.a2b_base64(line.partition(b" ")[0]) for line in lines),
        ]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        parts = self._parts
        return b"".join([parts[i] for i in np.asarray(ids).tolist()]).decode(
            "utf-8", errors="replace"
        )


def control_names(count: int) -> list[str]:
    """Return a name for each of the first `count` ids; those without a name become `<SPECIAL_17>`
    and the like.
    """
    named = {i: text for text, i in CONTROL.items()}
    return [named.get(i, f"<SPECIAL_{i}>") for i in range(count)]


def make_fast_tokenizer(data: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json with Tekken's ids: one merge per token, in the order of ranks.

    The merge of a token joins the last two parts left when the token alone is merged by ranks,
    lowest first, as in tiktoken. A token in a text leaves the same two parts, because no merge
    crosses its ends, so no other merge is needed. The build compares the result with the other
    engines (`backends.compare_engines`).
    """
    first = data["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in _list_entries(data)}
    letters = _byte_letters()
    encoded = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merged_tokens = (token for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1)
    merges = [[encoded[part] for part in _split_token(token, ranks)] for token in merged_tokens]
    pattern = {"Regex": data["config"]["pattern"]}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    bytes_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_level]},
        "decoder": bytes_level,
        "model": {
            "type": "BPE",
            **dict.fromkeys(
                ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
            ),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": {encoded[token]: rank + first for token, rank in ranks.items()},
            "merges": merges,
        },
    }


def _split_token(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the last two parts of a token when its bytes are merged by ranks, lowest first."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _list_entries(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries in the vocabulary. The file holds more."""
    config = data["config"]
    return data["vocab"][: config["default_vocab_size"] - config["default_num_special_tokens"]]


def _byte_letters() -> dict[int, str]:
    """Return {byte: letter} of GPT-2 (Radford et al. 2019): printable bytes map to themselves,
    others to 256 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + n) for n, byte in enumerate(others)
    }
