"""Tekken, the tokenizer of Mistral-Nemo: 131,072 ids, from the file that the mistral_common wheel ships.

The file's ranks and pattern go into `tiktoken`, as mistral_common does itself: the same ids (a test compares), without
importing the whole package while training. Control tokens are no part of tiktoken's table, so their text stays text.

The file of this generation does not list its control tokens; mistral_common's list says `<pad>` = 11, the published
Mistral-Nemo tokenizer says 10. No mask depends on it: padding is known by length.
"""

import base64
import importlib.util
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.errors import UserError
from tokenscale.files import atomic
from tokenscale.settings.data import TokenizerSettings

FILE = "tekken_240718.json"
#: what mistral_common gives control ids where the file does not list them
CONTROL = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 11}


def make(settings: TokenizerSettings, directory: Path, corpus_directory: Path | None) -> tuple[Path, dict[str, Any]]:
    """Copy the file out of the package. Raises UserError where the package, or the file in it, is not there."""
    spec = importlib.util.find_spec("mistral_common")
    source = Path(spec.origin).parent / "data" / FILE if spec is not None and spec.origin else None
    if source is None or not source.exists():
        raise UserError(
            f"the tokenizer {settings.name} needs {FILE} from the package mistral_common.",
            found="no such package" if source is None else f"no file {source}",
            next="install mistral_common (environment.yml names the version)",
        )
    path = directory / FILE
    with atomic(path) as temporary:
        shutil.copyfile(source, temporary)
    data = json.loads(path.read_text(encoding="utf-8"))
    control = _control(data)
    facts = {
        "vocabulary_size": data["config"]["default_vocab_size"],
        "bos_id": control["<s>"],
        "eos_id": control["</s>"],
        "pad_id": control["<pad>"],
        "source": f"mistral_common/data/{FILE}",
    }
    return path, facts


def load(path: Path, manifest: dict[str, Any]) -> "Tekken":
    """The tokenizer of a file that `make` wrote."""
    return Tekken(path, manifest)


def _control(data: dict[str, Any]) -> dict[str, int]:
    listed = data.get("special_tokens")
    return {token["token_str"]: token["rank"] for token in listed} if listed else CONTROL


class Tekken:
    """See `tokenizer.base.Tokenizer`. One thread."""

    def __init__(self, path: Path, manifest: dict[str, Any]):
        try:
            import tiktoken
        except ImportError:
            raise UserError(
                "the tokenizer tekken needs the package tiktoken.",
                file=path,
                next="install mistral-common, which brings it",
            ) from None
        self.name: str = manifest["name"]
        self.kind: str = manifest["kind"]
        self.vocabulary_size: int = manifest["vocabulary_size"]
        self.bos_id: int = manifest["bos_id"]
        self.eos_id: int | None = manifest["eos_id"]
        self.pad_id: int = manifest["pad_id"]
        self.file_sha256: str = manifest["file"]["sha256"]
        data = json.loads(path.read_text(encoding="utf-8"))
        self._control_ids = data["config"]["default_num_special_tokens"]
        self._control_names = {rank: text for text, rank in _control(data).items()}
        ordinary = self.vocabulary_size - self._control_ids
        ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in data["vocab"][:ordinary]}
        self._encoding = tiktoken.Encoding(
            "tekken", pat_str=data["config"]["pattern"], mergeable_ranks=ranks, special_tokens={}
        )

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32, without BOS and EOS."""
        return [np.array(self._encoding.encode_ordinary(text), dtype=np.int32) + self._control_ids for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; control tokens by name."""
        parts: list[bytes] = []
        for i in np.asarray(ids).tolist():
            if i < self._control_ids:
                parts.append(self._control_names.get(i, f"<SPECIAL_{i}>").encode())
            else:
                parts.append(self._encoding.decode_single_token_bytes(i - self._control_ids))
        return b"".join(parts).decode("utf-8", errors="replace")
