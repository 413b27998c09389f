"""Tokenizers with a tokenizer.json: of a folder, of the hub by name and revision, or trained on a
corpus.

The file is copied into the tokenizer's folder, so that stores can be rebuilt without the hub. BOS
and EOS come from `bos` and `eos` of the settings, then from tokenizer_config.json or
special_tokens_map.json, then from `CUSTOMARY`.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.base.files import (
    atomic,
    read_file,
    read_json,
    report_malformed,
    sha256_file,
    write_json,
    write_text,
)
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.data.tokenizers import backends
from tokenscale.data.tokenizers.backends import import_library
from tokenscale.data.tokenizers.base import (
    Tokenizer,
    read_tokenizer_file,
    read_tokenizer_manifest,
)
from tokenscale.data.tokenizers.tekken import control_names
from tokenscale.settings.data import TokenizerSettings
from tokenscale.settings.registry import TOKENIZERS

#: tokens tried in order if neither the settings nor the source files name one
CUSTOMARY = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
    "mask": ("[MASK]", "<mask>"),
}
#: a vocabulary may have ids up to twice its entries, and up to this number
LEAST_GAP = 1 << 16
#: printable characters, and the most that a normalizer may make of them: none makes ten of one
ASCII = "".join(map(chr, range(32, 127)))
LONGEST_NORMAL = 10 * len(ASCII)
#: a text on which patterns with nested repetitions try all ways to part it
PROSE = "words of a line without an end " * 8
#: characters of a word that training of BPE looks at in one piece
WORD_CHARACTERS = 1000
#: white space between words in Unicode, without the control characters that only Python counts, and
#: other characters
SPACE = re.compile(r"[^\S\x1c-\x1f]")
OTHER = re.compile(r"[\S\x1c-\x1f]")


def make(
    settings: TokenizerSettings, directory: Path, corpus_directory: Path | None
) -> tuple[Path, dict[str, Any]]:
    """Read or download the tokenizer, write it to `directory`, and return (file, manifest facts).

    Raises UserError if the source is unavailable or unreadable, a configured token is not in the
    vocabulary, or no BOS token is known.
    """
    tokenizer, token_names = _fetch(settings)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    ids = _choose_ids(settings, token_names, vocabulary=vocabulary)
    if "bos" not in ids:
        what = f"nothing says which token begins a document of tokenizer {settings.name}."
        next_step = (
            "set `bos` to the text of that token; many tokenizers without one use their "
            "end-of-text token"
        )
        raise UserError(what, source=settings.source, key="tokenizer.bos", next=next_step)
    unknown = backends.find_unknown(json.loads(tokenizer.model.__getstate__()))
    names = {role: tokenizer.id_to_token(i) for role, i in ids.items()}
    for role in ("pad", "mask"):
        if role in ids and (ids[role] == unknown or len(names[role]) == 1):
            del ids[role]  # it stands for text: CLIP pads with "!"
    for role in ("bos", "eos"):
        if names.get(role, "text").isspace():
            raise UserError(
                f"the token {names[role]!r} of tokenizer {settings.name} is white space of a "
                "text, so no document can "
                "begin or end with it.",
                key=f"tokenizer.{role}",
                source=settings.source,
                next=f"set `{role}` to another token, one that stands for no text",
            )
    path = directory / "tokenizer.json"
    with atomic(path) as temporary:
        temporary.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    off = {"dropout": getattr(tokenizer.model, "dropout", None)}
    off |= {"truncation": tokenizer.truncation, "padding": tokenizer.padding}
    assert settings.source is not None  # the kind needs it
    facts = {
        "vocabulary_size": max(vocabulary.values()) + 1,
        "bos_id": ids["bos"],
        "eos_id": ids.get("eos"),
        # padding is identified by length, so another control id serves if the tokenizer has no pad
        # token
        "pad_id": ids.get("pad", ids.get("eos", ids["bos"])),
        **({"mask_id": ids["mask"]} if "mask" in ids else {}),
        "source": "folder" if Path(settings.source).is_dir() else settings.source,
        "revision": settings.revision,
        "notes": [
            f"{name} is switched off (set in its tokenizer.json)"
            for name, value in off.items()
            if value
        ],
    }
    return path, facts


def train_bpe(
    settings: TokenizerSettings, directory: Path, corpus_directory: Path | None
) -> tuple[Path, dict[str, Any]]:
    """Train a byte-level BPE on all documents of the training split, in order, and return (file,
    manifest facts).

    The alphabet holds every byte, so any text can be encoded and decoded. Ids 0, 1, 2 are `<s>`,
    `</s>`, `<pad>`. (Sennrich et al. 2016; bytes as in GPT-2, Radford et al. 2019.) Equal texts
    give equal files. A small corpus may give fewer entries than `settings.vocabulary_size`; the
    manifest records the actual number. Words of more than `WORD_CHARACTERS` are cut into pieces of
    so many, because the time of training grows with the square of their length. Raises UserError
    without a corpus.
    """
    if corpus_directory is None:
        what = (
            f"the tokenizer {settings.name} of kind bpe is trained on a corpus, and --corpus is "
            "missing."
        )
        raise UserError(what, next=f"--corpus results/corpus/{settings.corpus}/manifest.json")
    tokenizers = import_library("bpe")
    text = RawText(corpus_directory, split="train")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=settings.vocabulary_size,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    cuts: list[int] = []
    pieces = (
        [
            piece
            for document in documents
            for piece in _cut_words(document, pre_tokenizer=words, cuts=cuts)
        ]
        for documents in text.batches()
    )
    tokenizer.train_from_iterator(pieces, trainer=trainer, length=len(text))
    path = directory / "tokenizer.json"
    with atomic(path) as temporary:
        temporary.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    facts = {
        "vocabulary_size": tokenizer.get_vocab_size(),
        "bos_id": tokenizer.token_to_id("<s>"),
        "eos_id": tokenizer.token_to_id("</s>"),
        "pad_id": tokenizer.token_to_id("<pad>"),
        "corpus_manifest_sha256": sha256_file(Path(corpus_directory) / "manifest.json"),
    }
    if cuts:
        note = (
            f"words longer than {WORD_CHARACTERS:,} characters were cut for its training, "
            f"{len(cuts):,} times"
        )
        facts["notes"] = [note]
    return path, facts


def _cut_words(text: str, pre_tokenizer: Any, cuts: list[int]) -> list[str]:
    """Cut a document within its words of more than `WORD_CHARACTERS`. Appends the places to `cuts`.

    Other words stay as they are, so ordinary text trains the same tokenizer as without this.
    """
    half = WORD_CHARACTERS // 2
    # a longer word fills one of these windows, or leaves it blank
    for first in range(0, len(text) - half, half):
        if not (
            SPACE.search(text, first, first + half) and OTHER.search(text, first, first + half)
        ):
            break
    else:
        return [text]
    places = [0]
    for _, (first, last) in pre_tokenizer.pre_tokenize_str(text):
        places += range(first + WORD_CHARACTERS, last, WORD_CHARACTERS)
    cuts += places[1:]
    return [text[first:last] for first, last in pairwise([*places, len(text)])]


class JsonTokenizer(backends.EngineTokenizer):
    """Tokenizer of a tokenizer.json without its template, truncation and padding."""

    @cached_property
    def _library(self) -> Any:
        """The file as the package `tokenizers` reads it, with a decoder that joins the bytes which
        the file makes.
        """
        tokenizers = import_library(self.kind)
        tokenizer = tokenizers.Tokenizer.from_buffer(self.read())
        decoders = tokenizers.decoders
        decoder = repr(tokenizer.decoder)
        makes_bytes = "ByteLevel" in f"{tokenizer.normalizer!r} {tokenizer.pre_tokenizer!r}"
        if makes_bytes and "ByteLevel" not in decoder:
            tokenizer.decoder = decoders.ByteLevel()
        elif (
            backends.parse_fast_json(self.read())["model"].get("byte_fallback")
            and "ByteFallback" not in decoder
        ):
            tokenizer.decoder = decoders.Sequence(
                [decoders.ByteFallback(), tokenizer.decoder or decoders.Fuse()]
            )
        return tokenizer

    @cached_property
    def unknown_id(self) -> int | None:  # type: ignore[override]
        return backends.find_unknown(backends.parse_fast_json(self.read())["model"])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        with backends.report_panics("tokenizers", self.path):
            return self._library.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def normalize(self, text: str) -> str:
        normalizer = self._library.normalizer
        with backends.report_panics("tokenizers", self.path):
            normal = normalizer.normalize_str(text) if normalizer else text
        return self._library.decoder.decode([normal]) if "ByteLevel" in repr(normalizer) else normal

    def token_name(self, number: int) -> str:
        """Return the name of an id in the vocabulary."""
        return self._library.id_to_token(number)


def _fetch(settings: TokenizerSettings) -> tuple[Any, dict[str, str]]:
    """Return the `tokenizers.Tokenizer` and {role: token text} from the files of the source."""
    tokenizers = import_library("huggingface")
    assert settings.source is not None  # the kind needs it
    folder = Path(settings.source)
    if not folder.is_dir():
        folder = _download_folder(settings)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise _folder_error("holds no tokenizer.json", key="tokenizer.source", folder=folder)
    names = _read_token_names(folder)
    try:
        with backends.report_panics("tokenizers", path):
            tokenizer = tokenizers.Tokenizer.from_buffer(read_file(path))
            _check_bounds(tokenizer, path)
            # a pattern that backtracks panics once here, not once in each of many texts
            if tokenizer.pre_tokenizer is not None:
                tokenizer.pre_tokenizer.pre_tokenize_str(PROSE)
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            "the tokenizer's file cannot be read.", file=path, reason=error, next="replace it"
        ) from None
    return tokenizer, names


def _check_bounds(tokenizer: Any, path: Path) -> None:
    """Raise UserError for ids that would need a vocabulary far larger than its entries, for an id
    of two entries, and for a normalizer that makes long texts of short ones.
    """
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    most = max(LEAST_GAP, 2 * len(ids))
    twice = next((a for a, b in pairwise(ids) if a == b), None)
    normal = ""
    if tokenizer.normalizer is not None:
        normal = tokenizer.normalizer.normalize_str(ASCII)
    for problem, expected in (
        (f"the id {ids[-1]:,}" if ids and ids[-1] >= most else "", f"ids below {most:,}"),
        (f"the id {twice} of two entries" if twice is not None else "", "an id for each entry"),
        (
            f"{len(normal):,} characters of {len(ASCII)}" if len(normal) > LONGEST_NORMAL else "",
            f"a normalizer that makes at most {LONGEST_NORMAL:,}",
        ),
    ):
        if problem:
            raise UserError(
                "the tokenizer's file has values that no tokenizer needs.",
                file=path,
                found=problem,
                expected=expected,
                next="correct the file, or use another tokenizer",
            )


def _folder_error(problem: str, **facts: object) -> UserError:
    next_step = "name a folder of a fast tokenizer (transformers' save_pretrained writes one)"
    return UserError(f"the tokenizer's folder {problem}.", **facts, next=next_step)


def _download_folder(settings: TokenizerSettings) -> Path:
    """Download the tokenizer's files at its revision and return their folder in the hub's cache."""
    if settings.revision is None:
        what = (
            f"the tokenizer {settings.source!r} is no folder, and a hub name needs a pinned "
            "revision."
        )
        next_step = (
            "set `revision` to a commit of the hub repository, so that the same name stays the "
            "same tokenizer"
        )
        raise UserError(what, key="tokenizer.revision", next=next_step)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    assert settings.source is not None  # the kind needs it
    for name in ("special_tokens_map.json", "tokenizer_config.json", "tokenizer.json"):
        try:
            path = hf_hub_download(settings.source, name, revision=settings.revision)
        except EntryNotFoundError as error:
            if name == "tokenizer.json":
                raise _download_error(settings, error) from None
        except Exception as error:  # network or name: the client's errors have no other common base
            raise _download_error(settings, error) from None
    return Path(path).parent


def _download_error(settings: TokenizerSettings, error: Exception) -> UserError:
    return UserError(
        (
            f"the tokenizer {settings.source!r} is unavailable: no such folder, and its download "
            "failed."
        ),
        key="tokenizer.source",
        revision=settings.revision,
        reason=(str(error).strip().splitlines() or [type(error).__name__])[0],
        next=(
            "check the name and the network, or download it elsewhere and set `source` to its "
            "folder"
        ),
    )


def _read_token_names(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        values = (
            read_json(path, what="tokenizer's file", next="replace it") if path.exists() else {}
        )
        with report_malformed(path, what="tokenizer's file", next="replace it"):
            named = {role: values.get(f"{role}_token") for role in CUSTOMARY}
        texts = {
            role: value.get("content") if isinstance(value, dict) else value
            for role, value in named.items()
        }
        found |= {role: text for role, text in texts.items() if isinstance(text, str)}
    return found


def _choose_ids(
    settings: TokenizerSettings, token_names: dict[str, str], vocabulary: dict[str, int]
) -> dict[str, int]:
    """Return {role: id}, by the token that the settings, the source files or `CUSTOMARY` name, as
    far as there is one.

    Raises UserError for a token of the settings that is not in the vocabulary.
    """
    found: dict[str, int] = {}
    for role, customary in CUSTOMARY.items():
        configured = getattr(settings, role, None)
        if configured is not None and configured not in vocabulary:
            what = (
                f"the token {configured!r} is not in the vocabulary of tokenizer {settings.name}."
            )
            raise UserError(
                what,
                key=f"tokenizer.{role}",
                source=settings.source,
                next="name a token that it holds",
            )
        known = [
            text for text in (configured, token_names.get(role), *customary) if text in vocabulary
        ]
        if known:
            found[role] = vocabulary[known[0]]
    return found


#: folder of the tokenizers built by the workflow
BUILT = Path("results/tokenizers")
#: lower-case names on the hub with the vocabulary of Tekken: 131,072 entries, equal ids for equal
#: text
NEMO = (
    "unsloth/mistral-nemo-base-2407-bnb-4bit",
    "mistralai/mistral-nemo-base-2407",
    "mistralai/mistral-nemo-instruct-2407",
)


@dataclass(frozen=True)
class ResolvedTokenizer:
    """Settings of a tokenizer, its folder if it is already built, and an optional note for the
    user.
    """

    settings: TokenizerSettings
    directory: Path | None = None
    note: str | None = None


def resolve_tokenizer(text: str, built: Path = BUILT) -> ResolvedTokenizer:
    """Resolve the value of `--tokenizer-name`.

    Tries in order: a folder with a tokenscale manifest; a name below `built`; `tekken` and the
    names of Mistral-Nemo, which uses Tekken; a folder with tokenizer.json; `org/name@revision` of
    the Hugging Face hub. The names of the last two end in a part of the file hash or revision.
    Raises UserError for anything else.
    """
    for folder in (Path(text), built / text):
        path = folder / "manifest.json"
        # corpora and stores also have manifests
        if path.is_file() and "kind" in read_json(path, what="manifest"):
            manifest = read_tokenizer_manifest(folder)
            return ResolvedTokenizer(
                make_settings(
                    manifest["name"],
                    kind=manifest["kind"],
                    vocabulary_size=manifest["vocabulary_size"],
                    facts=manifest,
                ),
                directory=folder,
            )
    if text.lower() == "tekken":
        return ResolvedTokenizer(TokenizerSettings(name="tekken", kind="tekken"))
    if text.lower() in NEMO:
        note = (
            f"{text}: the same vocabulary as Tekken, which is read offline from the package "
            "mistral_common"
        )
        return ResolvedTokenizer(TokenizerSettings(name="tekken", kind="tekken"), note=note)
    if (Path(text) / "tokenizer.json").is_file():
        name = f"{_make_name(Path(text).resolve().name)}-{sha256_file(Path(text) / 'tokenizer.json')[:6]}"
        return ResolvedTokenizer(TokenizerSettings(name=name, kind="huggingface", source=text))
    if Path(text).is_dir():
        problem = "holds neither tokenizer.json nor a manifest of tokenscale"
        raise _folder_error(problem, flag="--tokenizer-name", folder=text)
    source, at, revision = text.partition("@")
    if at and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) and revision:
        name = f"{_make_name(source.rsplit('/')[-1])}-{_make_name(revision)[:6]}"
        return ResolvedTokenizer(
            TokenizerSettings(name=name, kind="huggingface", source=source, revision=revision)
        )
    known = sorted({"tekken", *(path.parent.name for path in built.glob("*/manifest.json"))})
    near = find_nearest(text, words=known)
    hub = f"a name of the hub needs its revision: --tokenizer-name {source}@COMMIT"
    other = (
        "name one of them, or a folder with tokenizer.json, or NAME@COMMIT of the Hugging Face hub"
    )
    if near:
        next_step = f"did you mean {near!r}?"
    elif "/" in text:
        next_step = hub
    else:
        next_step = other
    raise UserError(
        f"there is no tokenizer {text!r}.",
        flag="--tokenizer-name",
        known=", ".join(known),
        next=next_step,
    )


def find_store_tokenizer(manifest: Path, sha256: str | None) -> Path | None:
    """Return the folder of the tokenizer with file hash `sha256` that made a store, or None if it
    is not found.

    Searches beside the store (where `pretokenize` puts it), in the results that hold the store, and
    below `BUILT`.
    """
    folders = [manifest.parent, *manifest.resolve().parents[4:5], BUILT.parent]
    for path in (
        path
        for folder in folders
        for path in sorted((folder / "tokenizers").glob("*/manifest.json"))
    ):
        try:
            found = read_tokenizer_manifest(path.parent)
        except UserError:  # malformed or of another version: not the tokenizer of this store
            continue
        if sha256 is not None and found["file"]["sha256"] == sha256:
            return path.parent
    return None


def make_settings(
    name: str, kind: str, vocabulary_size: int, facts: dict[str, Any] | None = None
) -> TokenizerSettings:
    """Return the settings of a built tokenizer from its manifest, for the identity of a run.

    `facts` may hold `source` and `revision` of a tokenizer from the hub. If the source is unknown,
    the name replaces it; the manifests that a run reads pin the contents by hash.
    """
    facts = facts or {}
    if kind == "huggingface":
        source = facts.get("source")
        source = name if source in (None, "folder") else source
        return TokenizerSettings(
            name=name, kind=kind, source=source, revision=facts.get("revision")
        )
    if kind == "bpe":
        return TokenizerSettings(name=name, kind=kind, corpus=name, vocabulary_size=vocabulary_size)
    if kind not in TOKENIZERS or "vocabulary_size" in TOKENIZERS[kind].needs:
        return TokenizerSettings(name=name, kind=kind, vocabulary_size=vocabulary_size)
    return TokenizerSettings(name=name, kind=kind)


def _make_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-") or "tokenizer"


def export_tokenizer(
    tokenizer: Tokenizer, directory: Path, folder: Path, sequence_length: int, masked: bool = False
) -> dict[str, int | None]:
    """Write both files to `folder` and return the ids of bos, eos and pad, and of mask for a masked
    model.

    `tokenizer` is the one in `directory`, of any kind but `numbers`, whose ids are not text. The
    written file is loaded and compared with it on fuzz texts. Raises ValueError for different ids.
    """
    directory = Path(directory)
    data = _load_json(directory)
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    if masked:
        ids["mask"] = _add_mask(directory, data)
    names = {
        i: text
        for text, i in import_library(tokenizer.kind)
        .Tokenizer.from_str(json.dumps(data))
        .get_vocab()
        .items()
    }
    tokens = {role: names[i] for role, i in ids.items() if i is not None}
    data |= {
        "truncation": None,
        "padding": None,
        "post_processor": _bos_template(tokens["bos"], number=tokenizer.bos_id),
    }
    write_text(folder / "tokenizer.json", text=json.dumps(data, ensure_ascii=False) + "\n")
    write_json(
        folder / "tokenizer_config.json",
        value={
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{role}_token": text for role, text in tokens.items()},
            "model_max_length": sequence_length,
            "padding_side": "right",
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": not masked,  # the mask token occurs in the text
        },
    )
    _compare(tokenizer, path=folder / "tokenizer.json", control=list(tokens.values()))
    return ids


def _load_json(directory: Path) -> dict[str, Any]:
    """Read the tokenizer.json of a folder, flag its control tokens, and add those that its table
    lacks (Tekken).
    """
    manifest = read_tokenizer_manifest(directory)
    content = read_tokenizer_file(directory, manifest, name="tokenizer.json")
    data = backends.parse_fast_json(content)
    if "control_ids" in manifest:
        names = control_names(manifest["control_ids"])
        data["model"]["vocab"] |= {name: i for i, name in enumerate(names)}
        data["added_tokens"] = [_special_token(i, text=name) for i, name in enumerate(names)]
    else:
        plain = backends.remove_control(data, manifest)
        control = backends.find_control(data, manifest)
        added = {i: _special_token(i, text) for i, text in control.items()}
        added |= {
            token["id"]: token | {"special": token["id"] in control}
            for token in data["added_tokens"]
        }
        data["added_tokens"] = [token for _, token in sorted(added.items())]
        if "merges" in data["model"]:
            data["model"]["merges"] = plain["model"]["merges"]
    return data


def _add_mask(directory: Path, data: dict[str, Any]) -> int:
    """Return the id of the mask token. Without one, add a token after all ids, as masked training
    does.
    """
    manifest = read_tokenizer_manifest(directory)
    if "mask_id" in manifest:
        return manifest["mask_id"]
    used_names = {*data["model"]["vocab"], *(token["content"] for token in data["added_tokens"])}
    name = next(name for name in ("[MASK]", "<mask>", "<|mask|>") if name not in used_names)
    data["added_tokens"].append(_special_token(manifest["vocabulary_size"], text=name))
    return manifest["vocabulary_size"]


def _special_token(number: int, text: str) -> dict[str, Any]:
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {"id": number, "content": text, **flags}


def _bos_template(token: str, number: int) -> dict[str, Any]:
    """Return the template that puts BOS before a text and before each text of a pair."""

    def part(name: str, kind: int) -> list[dict[str, Any]]:
        return [
            {"SpecialToken": {"id": token, "type_id": kind}},
            {"Sequence": {"id": name, "type_id": kind}},
        ]

    return {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": part("A", 0) + part("B", 1),
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _compare(tokenizer: Tokenizer, path: Path, control: list[str]) -> None:
    """Compare the exported file with the tokenizer on fuzz texts. Only BPE keeps the text of
    control tokens as text.
    """
    exported = import_library(tokenizer.kind).Tokenizer.from_buffer(read_file(path))
    exported.encode_special_tokens = True
    texts = backends.make_fuzz_texts(control)
    if not type(exported.model).__name__.endswith("BPE"):
        texts = [text for text in texts if not any(name in text for name in control)]
    found = [encoded.ids for encoded in exported.encode_batch(texts)]
    for text, ids, expected in zip(texts, found, tokenizer.encode_batch(texts), strict=True):
        if not np.array_equal(ids, [tokenizer.bos_id, *expected]):
            raise ValueError(
                f"the exported tokenizer gives other ids for {text!r}: {ids} for "
                f"{expected.tolist()}"
            )
