"""Tokenizers by their command-line name: a folder, the name of a built tokenizer, or a name of the hub."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.base.files import read_json, sha256_file
from tokenscale.data.tokenizers.base import read_tokenizer_manifest
from tokenscale.settings.data import TokenizerSettings
from tokenscale.settings.registry import TOKENIZERS

#: folder of the tokenizers built by the workflow
BUILT = Path("results/tokenizers")
#: lower-case names on the hub with the vocabulary of Tekken: 131,072 entries, equal ids for equal text
NEMO = (
    "unsloth/mistral-nemo-base-2407-bnb-4bit",
    "mistralai/mistral-nemo-base-2407",
    "mistralai/mistral-nemo-instruct-2407",
)


@dataclass(frozen=True)
class ResolvedTokenizer:
    """Settings of a tokenizer, its folder if it is already built, and an optional note for the user."""

    settings: TokenizerSettings
    directory: Path | None = None
    note: str | None = None


def resolve_tokenizer(text: str, built: Path = BUILT) -> ResolvedTokenizer:
    """Resolve the value of `--tokenizer-name`.

    Tries in order: a folder with a tokenscale manifest; a name below `built`; `tekken` and the names of Mistral-Nemo,
    which uses Tekken; a folder with tokenizer.json; `org/name@revision` of the Hugging Face hub. The names of the last
    two end in a part of the file hash or revision. Raises UserError for anything else.
    """
    for folder in (Path(text), built / text):
        path = folder / "manifest.json"
        if path.is_file() and "kind" in read_json(path, "manifest"):  # corpora and stores also have manifests
            manifest = read_tokenizer_manifest(folder)
            return ResolvedTokenizer(
                make_settings(manifest["name"], manifest["kind"], manifest["vocabulary_size"], manifest), folder
            )
    if text.lower() == "tekken":
        return ResolvedTokenizer(TokenizerSettings(name="tekken", kind="tekken"))
    if text.lower() in NEMO:
        note = f"{text}: the same vocabulary as Tekken, which is read offline from the package mistral_common"
        return ResolvedTokenizer(TokenizerSettings(name="tekken", kind="tekken"), note=note)
    if (Path(text) / "tokenizer.json").is_file():
        name = f"{_make_name(Path(text).resolve().name)}-{sha256_file(Path(text) / 'tokenizer.json')[:6]}"
        return ResolvedTokenizer(TokenizerSettings(name=name, kind="huggingface", source=text))
    if Path(text).is_dir():
        raise UserError(
            "the tokenizer's folder holds neither tokenizer.json nor a manifest of tokenscale.",
            flag="--tokenizer-name",
            folder=text,
            next="name a folder of a fast tokenizer (transformers' save_pretrained writes one)",
        )
    source, at, revision = text.partition("@")
    if at and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) and revision:
        name = f"{_make_name(source.rsplit('/')[-1])}-{_make_name(revision)[:6]}"
        return ResolvedTokenizer(TokenizerSettings(name=name, kind="huggingface", source=source, revision=revision))
    known = sorted({"tekken", *(path.parent.name for path in built.glob("*/manifest.json"))})
    near = find_nearest(text, known)
    hub = f"a name of the hub needs its revision: --tokenizer-name {source}@COMMIT"
    other = "name one of them, or a folder with tokenizer.json, or NAME@COMMIT of the Hugging Face hub"
    raise UserError(
        f"there is no tokenizer {text!r}.",
        flag="--tokenizer-name",
        known=", ".join(known),
        next=f"did you mean {near!r}?" if near else hub if "/" in text else other,
    )


def find_store_tokenizer(manifest: Path, sha256: str | None) -> Path | None:
    """Return the folder of the tokenizer with file hash `sha256` that made a store, or None if it is not found.

    Searches beside the store (where `pretokenize` puts it), in the results that hold the store, and below `BUILT`.
    """
    folders = [manifest.parent, *manifest.resolve().parents[4:5], BUILT.parent]
    for path in (path for folder in folders for path in sorted((folder / "tokenizers").glob("*/manifest.json"))):
        try:
            found = read_tokenizer_manifest(path.parent)
        except UserError:  # malformed or of another version: not the tokenizer of this store
            continue
        if sha256 is not None and found["file"]["sha256"] == sha256:
            return path.parent
    return None


def make_settings(name: str, kind: str, vocabulary_size: int, facts: dict[str, Any] | None = None) -> TokenizerSettings:
    """Return the settings of a built tokenizer from its manifest, for the identity of a run.

    `facts` may hold `source` and `revision` of a tokenizer from the hub. If the source is unknown, the name replaces
    it; the manifests that a run reads pin the contents by hash.
    """
    facts = facts or {}
    if kind == "huggingface":
        source = facts.get("source")
        source = name if source in (None, "folder") else source
        return TokenizerSettings(name=name, kind=kind, source=source, revision=facts.get("revision"))
    if kind == "bpe":
        return TokenizerSettings(name=name, kind=kind, corpus=name, vocabulary_size=vocabulary_size)
    if kind not in TOKENIZERS or "vocabulary_size" in TOKENIZERS[kind].needs:
        return TokenizerSettings(name=name, kind=kind, vocabulary_size=vocabulary_size)
    return TokenizerSettings(name=name, kind=kind)


def _make_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-") or "tokenizer"
