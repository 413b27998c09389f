"""Settings of corpora, tokenizers and token stores."""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal
from urllib.parse import urlsplit

from tokenscale.base.errors import UserError, redact_credentials, unknown
from tokenscale.settings.extensions import require_format
from tokenscale.settings.options import (
    EXTENSION_NAME,
    LARGEST_VOCABULARY,
    MOST,
    NAME_PATTERN,
    REMOVED,
    decode,
    get_default,
    option,
    settings_class,
)
from tokenscale.settings.registry import FORMATS, SOURCES, TOKENIZERS

SHA256 = re.compile(r"[0-9a-f]{64}")
#: prefix of names that are not local files: `s3://…`, `file:…`, `data:…`
_BUCKET = re.compile(r"s3://")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(file|data|javascript):", re.IGNORECASE)


@settings_class
class LengthSettings:
    """Distribution of document lengths of the dummy source, in numbers (tokens with the tokenizer
    `numbers`).
    """

    distribution: Literal["constant", "uniform", "lognormal"] = option(
        "lognormal",
        description="constant: `mean`; uniform: minimum to maximum; lognormal: with `mean` and `sigma`",
    )
    mean: float = option(
        512.0,
        description="mean of constant and lognormal, before clipping to minimum and maximum",
        gt=0,
        le=MOST,
    )
    sigma: float = option(
        1.0,
        description="standard deviation of the logarithm",
        ge=0,
        le=100,
    )
    minimum: int = option(
        1,
        description="shorter lengths are raised to this",
        ge=1,
        le=MOST,
    )
    maximum: int = option(
        8192,
        description="longer lengths are cut to this",
        ge=1,
        le=MOST,
    )


#: option that lists files → option that lists their translations, line for line
TRANSLATION_KEYS = {"files": "target_files", "validation_files": "validation_target_files"}
FILE_LISTS = (*TRANSLATION_KEYS, *TRANSLATION_KEYS.values())
#: count in a manifest: distinct texts of the source's own held-out documents that its training
#: documents also hold; absent if there are none
HELD_OUT_IN_TRAINING = "held_out_in_training"


@settings_class
class SourceSettings:
    """Source of a corpus's text. In config.yaml `kind` can be left out: the other keys imply it."""

    kind: Literal[*SOURCES] = option(  # type: ignore[valid-type]
        "docstrings",
        description="; ".join(f"{name}: {source.description}" for name, source in SOURCES.items())
        + ". By default what the other keys imply",
    )
    packages: tuple[str, ...] = option(
        ("stdlib", "pydoc_data", "numpy", "pandas", "matplotlib"),
        description="docstrings: packages to read (never imported)",
    )
    files: tuple[str, ...] = option(
        (),
        description="files: paths and globs; url: addresses; bucket: s3://BUCKET/PATH, also globs; hub: "
        "paths and globs in the "
        "repository. `#sha256=…` after an address or hub path declares its content; without it, "
        "the first download "
        "records the hash",
        path=True,
    )
    validation_files: tuple[str, ...] = option(
        (), description="files of validation documents, not a share of `files`", path=True
    )
    target_files: tuple[str, ...] = option(
        (),
        description=(
            "text: files with the translations of `files`, line by line (Moses format); a document "
            "is then a pair of lines"
        ),
        path=True,
    )
    validation_target_files: tuple[str, ...] = option(
        (), description="translations of `validation_files`, line by line", path=True
    )
    format: Literal["auto", "parquet", "jsonl", "tsv", "csv", "text", "mds", "litdata"] = option(
        "auto",
        description="auto: by file extension (.parquet, .jsonl, .csv, .tsv, .txt, .py, .mds, .bin of litdata, …; all "
        "except Parquet also with "
        ".gz or .zst)",
    )
    text_column: str = option(
        "text",
        description="Parquet, JSONL, CSV and TSV: column, or key, of a document's text; `translation.de`: field "
        "`de` of a column of "
        'objects; without a header, the number of the column ("1" is the first)',
    )
    target_column: str | None = option(
        None,
        description="Parquet, JSONL, CSV and TSV: column, or key, of the translation; a document is then a pair: "
        "source, EOS, target, "
        "EOS",
    )
    separator: str | None = option(
        None,
        description=(
            'text: separator of documents, such as "<|endoftext|>" or "\\n"; null: each file is '
            "one "
            "document"
        ),
        min_length=1,
    )
    repository: str | None = option(
        None, description="hub, stream: name of the dataset; stream: also a folder", path=True
    )
    revision: str | None = option(
        None, description="hub, stream: commit of the dataset (40 hex digits), which fixes the data"
    )
    subset: str | None = option(None, description="stream: configuration of the dataset")
    split: str = option("train", description="stream: split of the training documents")
    validation_split: str | None = option(
        None, description="stream: split of validation documents, not a share of `split`"
    )
    downloaded: bool | None = option(
        None,
        description="false: not yet downloaded with this configuration (`plan`)",
        science=False,
    )
    published_documents: int | None = option(
        None,
        description="url, hub: number of training documents as published; used to estimate the cost of an "
        "epoch before the corpus "
        "is built",
        science=False,
        ge=1,
    )
    documents: int | None = option(None, description="dummy: number of documents", ge=1)
    vocabulary_size: int = option(
        50_257,
        description="dummy: all numbers are below this",
        ge=2,
        le=LARGEST_VOCABULARY,
    )
    lengths: LengthSettings = option(LengthSettings, description="dummy: lengths of documents")
    seed: int = option(0, description="dummy: seed of lengths and numbers", ge=0)
    maximum_documents: int | None = option(
        None, description="stop after this number of training documents", ge=1
    )

    def problems(self) -> list[tuple[str, str]]:
        """Options that do not fit the kind, as (field, what is wrong)."""
        spec = SOURCES[self.kind]
        fields = {f.name: f for f in dataclasses.fields(self)}
        found = [
            (name, f"kind {self.kind} needs it") for name in spec.needs if not getattr(self, name)
        ]
        without_meaning = fields.keys() - {
            "kind",
            "maximum_documents",
            *spec.needs,
            *spec.options,
        }
        found += [
            (name, f"has no meaning for kind {self.kind}")
            for name in without_meaning
            if getattr(self, name) != get_default(fields[name])
        ]
        commit = re.fullmatch(r"[0-9a-f]{40}", self.revision or "")
        if self.kind in ("hub", "stream") and self.revision and not commit:
            found.append(("revision", f"{self.revision!r} is not a commit (40 hex digits)"))
        for key in FILE_LISTS:
            for file in getattr(self, key):
                found += [(key, text) for text in self._find_file_problems(file)]
        shortest = self.lengths.minimum
        longest = self.lengths.maximum
        if shortest > longest:
            found.append(("lengths.minimum", f"{shortest} is more than maximum = {longest}"))
        found += self._find_target_problems()
        return sorted(found)

    def _find_file_problems(self, file: str) -> Iterator[str]:
        if text := find_address_problem(file, kind=self.kind):
            yield text
        _, sign, sha256 = file.partition("#sha256=")
        if SOURCES[self.kind].downloaded and sign and not SHA256.fullmatch(sha256):
            yield f"{sha256!r} is not a SHA-256 hash (64 hex digits)"

    def _find_target_problems(self) -> Iterator[tuple[str, str]]:
        """What is wrong with the files of translations."""
        if bool(self.validation_target_files) != bool(self.target_files and self.validation_files):
            text = "needs target_files and validation_files, and vice versa"
            yield "validation_target_files", text
        if not self.target_files:
            return
        if self.target_column is not None:
            text = "translations come from a column or from target_files: remove one"
            yield "target_column", text
        if self.format not in ("auto", "text"):
            text = f"format {self.format} holds both texts: use target_column instead"
            yield "target_files", text
        if self.separator not in (None, "\n"):
            yield "separator", "with target_files every line is a document: remove separator"

    @property
    def pairs(self) -> bool:
        """Whether a document is a text and its translation."""
        return self.target_column is not None or bool(self.target_files)

    @property
    def has_own_validation(self) -> bool:
        """Whether the source defines its own validation documents."""
        return bool(self.validation_files or self.validation_split)

    @staticmethod
    def infer_kind(values: dict[str, object]) -> str:
        """Infer the kind of a source from its keys.

        >>> SourceSettings.infer_kind({"files": ["data/*.parquet"], "text_column": "body"})
        'files'
        """
        files = values.get("files")
        if isinstance(files, str):
            files = [files]
        elif not isinstance(files, (list, tuple)):
            files = []
        if {"subset", "split", "validation_split"} & values.keys():
            return "stream"
        if "repository" in values:
            return "hub"
        if any(is_address(str(f)) for f in files):
            return "url"
        if any(_BUCKET.match(str(f)) for f in files):
            return "bucket"
        if "files" in values:
            return "files"
        return "dummy" if "documents" in values else "docstrings"


def is_address(file: str) -> bool:
    return file.lower().startswith(("http://", "https://"))


def find_address_problem(file: str, kind: str) -> str | None:
    """Return what is wrong with a file name for this kind of source, or None. Passwords are never
    shown.
    """
    shown = redact_credentials(file)
    if kind == "url":
        if not is_address(file):
            return f"{shown!r} is not an http(s) address"
        try:
            host = urlsplit(file).hostname
        except ValueError:
            host = None
        if not host or any(ord(c) <= 32 for c in file):
            return f"{shown!r} is not a complete address: https://HOST/PATH"
        if shown != file:
            return (
                f"{shown} holds a password or signature: put it into ~/.netrc, or download the "
                "file and use its path"
            )
    elif kind == "bucket":
        bucket, _, path = file.partition("#sha256=")[0][len("s3://") :].partition("/")
        if not _BUCKET.match(file) or not bucket or not path:
            return f"{shown!r} is not an address in a bucket: s3://BUCKET/PATH"
        if "@" in bucket or ":" in bucket or "?" in bucket:
            return (
                f"s3://…/{path}: a bucket's name has no password or options: put credentials "
                "into AWS_PROFILE"
            )
    elif _SCHEME.match(file):
        return f"{shown} is not a path of this machine, an http(s) address or an s3 address"
    return None


#: share of documents that are duplicates from which on commands state it
STATED_DUPLICATES = 0.01


def state_cleaning(manifest: dict[str, Any]) -> list[str]:
    """Return sentences on the cleaning of a corpus: held-out texts that also occur in the training
    text, and dropped duplicates from `STATED_DUPLICATES` on. Empty for a manifest without counts.
    """
    return list(filter(None, (state_held_out(manifest), _state_duplicates(manifest))))


def _state_duplicates(manifest: dict[str, Any]) -> str:
    counts = manifest.get("cleaning", {}).get("documents", {})
    dropped = counts.get("duplicates", 0)
    if dropped < STATED_DUPLICATES * max(1, counts.get("read", 0)):
        return ""
    name = manifest["name"]
    return (
        f"corpus {name}: {dropped:,} of {counts['read']:,} documents "
        f"({dropped / counts['read']:.1%}) were dropped as duplicates; "
        f"corpora.{name}.cleaning.deduplicate: false keeps them"
    )


def state_held_out(manifest: dict[str, Any]) -> str:
    """Return a sentence on held-out texts that the training text of a corpus also holds; "" if
    there are none.
    """
    cleaning = manifest.get("cleaning", {})
    count = cleaning.get("documents", {}).get(HELD_OUT_IN_TRAINING, 0)
    if not count:
        return ""
    name = manifest["name"]
    what = f"{count:,} distinct held-out texts also occur in the training text and were"
    if cleaning["deduplicate"]:
        rest = f"{manifest['splits']['validation']['rows']:,} held-out documents remain"
        return f"corpus {name}: {what} dropped; {rest}"
    hint = f"corpora.{name}.cleaning.deduplicate: true drops them"
    return f"corpus {name}: {what} kept, so losses on them are too low; {hint}"


@settings_class
class CleaningSettings:
    """Cleaning of each document before the split. The manifest counts everything removed or
    changed.
    """

    nfc: bool = option(False, description="compose characters (Unicode normalisation form C)")
    collapse: bool = option(
        False,
        description="replace runs of blanks by one, keep at most one empty line, strip ends of lines",
    )
    strip: bool = option(True, description="remove white space at both ends")
    minimum_characters: int = option(1, description="drop shorter documents", ge=0)
    maximum_characters: int | None = option(
        None, description="drop longer documents (they are never cut)", ge=1
    )
    deduplicate: bool = option(True, description="drop exact duplicates after the first")


@settings_class
class CorpusSettings:
    """Settings of a corpus, which is built in `results/corpus/<name>/`."""

    name: str = option(
        "docstrings",
        description="folder below results/corpus",
        science=False,
        pattern=NAME_PATTERN,
    )
    source: SourceSettings = option(SourceSettings, description="source of the text")
    cleaning: CleaningSettings = option(CleaningSettings, description="cleaning of the documents")
    validation_share: float = option(
        0.05,
        description="share of documents for validation, if the source has none",
        ge=0,
        lt=1,
    )
    row_group_rows: int = option(
        1000,
        description="documents per Parquet row group",
        ge=1,
        le=MOST,
    )
    parts: int = option(
        1,
        description="files, url, hub: number of groups of source files, each built by a job of its own; the "
        "stores of the formats "
        "token-list, padded and packed are then also written in so many parts",
        ge=1,
        le=100_000,
    )

    def problems(self) -> list[tuple[str, str]]:
        """Options that do not fit together, as (field, what is wrong)."""
        found = [(f"source.{field}", text) for field, text in self.source.problems()]
        if self.parts > 1 and not SOURCES[self.source.kind].splittable:
            found.append(("parts", f"kind {self.source.kind} is built in one part"))
        if self.parts > 1 and self.source.maximum_documents is not None:
            found.append(("parts", "source.maximum_documents needs one part"))
        return found

    @property
    def download(self) -> "CorpusSettings":
        """Settings that the download depends on; reading, cleaning and splitting are left out."""
        wanted = ("kind", *FILE_LISTS, "repository", "revision")
        source = SourceSettings(**{name: getattr(self.source, name) for name in wanted})
        return CorpusSettings(name=self.name, source=source)


#: share of a text's bytes lost by its tokenizer from which on the log and the report caution
LOSS_CAUTION = 0.001
#: shares of a text that its tokenizer loses, as in manifests of stores
LOST = ("lost", "unknown")


@settings_class
class TokenizerSettings:
    """Settings of a tokenizer, which is built in `results/tokenizers/<name>/`."""

    name: str = option(
        "tekken",
        description="folder below results/tokenizers",
        science=False,
        pattern=NAME_PATTERN,
    )
    kind: Literal[*TOKENIZERS, "unknown"] = option(  # type: ignore[valid-type]
        "tekken",
        description=(
            "family of the tokenizer; unknown: tokenizer of a converted store, of which only the "
            "ids "
            "are known"
        ),
    )
    source: str | None = option(
        None, description="huggingface: hub name, or a folder with tokenizer.json", path=True
    )
    revision: str | None = option(None, description="huggingface: commit of the hub repository")
    bos: str | None = option(
        None,
        description="huggingface: text of the begin-of-document token, if the file does not define it",
    )
    eos: str | None = option(
        None,
        description="huggingface: text of the end-of-document token, if the file does not define it",
    )
    corpus: str | None = option(
        None,
        description="bpe: corpus whose training split the tokenizer is trained on",
        science=False,
    )
    learnt_from: CorpusSettings | None = option(
        None, description="settings of that corpus, filled in automatically"
    )
    vocabulary_size: int | None = option(
        None,
        description="bpe, numbers: size with control tokens",
        ge=5,
        le=LARGEST_VOCABULARY,
    )
    accepted_loss: float = option(
        0.05,
        description="largest share of a text's bytes that may be lost",
        science=False,
        ge=0,
        le=1,
    )

    @property
    def from_hub(self) -> bool:
        """Whether building it needs the network: a Hugging Face name that is not a local folder."""
        return self.kind == "huggingface" and not os.path.isdir(self.source or "")

    def problems(self) -> list[tuple[str, str]]:
        """Options that do not fit the kind, as (field, what is wrong)."""
        # a converted store's own tokenizer is known by its size alone
        needs, options = (
            TOKENIZERS[self.kind][:2] if self.kind in TOKENIZERS else (("vocabulary_size",), ())
        )
        found = [
            (name, f"kind {self.kind} needs it") for name in needs if getattr(self, name) is None
        ]
        found += [
            (name, f"has no meaning for kind {self.kind}")
            for name in ("source", "revision", "bos", "eos", "corpus", "vocabulary_size")
            if getattr(self, name) is not None and name not in (*needs, *options)
        ]
        if self.kind == "bpe" and self.vocabulary_size is not None and self.vocabulary_size < 259:
            found.append(("vocabulary_size", "256 bytes and 3 control tokens need at least 259"))
        return found


@settings_class
class StorageSettings:
    """Storage options of the Parquet formats. The defaults correct those of the studies (int32,
    zstd-3).
    """

    codec: Literal["none", "snappy", "lz4", "zstd"] = option(
        "zstd", description="Parquet compression"
    )
    codec_level: int = option(
        3,
        description="level of zstd",
        ge=1,
        le=22,
    )
    dtype: Literal["int32", "int64", "uint32"] = option(
        "int32", description="integer type of token ids"
    )
    row_group_rows: int = option(
        1000,
        description="rows per Parquet row group",
        ge=1,
        le=MOST,
    )


@settings_class
class StoreSettings:
    """Settings of a token store: a format and its options, encoded in its directory name,
    `padded-sequence_length=2048`.
    """

    format: Literal[*FORMATS] = option(extensions=True)  # type: ignore[valid-type]
    split: Literal["train", "validation"] = "train"
    sequence_length: int = option(1024, ge=1, le=MOST)
    eos: bool = False
    codec: Literal["none", "snappy", "lz4", "zstd"] = "zstd"
    codec_level: int = option(3, ge=1, le=22)
    dtype: Literal["int32", "int64", "uint32"] = "int32"
    row_group_rows: int = option(1000, ge=1, le=MOST)
    packing: Literal["best-fit", "concatenate"] = "best-fit"

    def options(self) -> dict[str, object]:
        """Return the options of this format with their values."""
        return {name: getattr(self, name) for name in FORMATS[self.format].options}

    @property
    def directory(self) -> str:
        """Name of the store's folder: the format and the options that differ from their defaults.

        >>> StoreSettings("padded", sequence_length=2048).directory
        'padded-sequence_length=2048'
        >>> StoreSettings("packed").directory
        'packed'
        """
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        text = {True: "true", False: "false"}
        changed = [
            f"{k}={text[v] if isinstance(v, bool) else v}"
            for k, v in self.options().items()
            if v != defaults[k]
        ]
        return "-".join([self.format, *changed])

    @classmethod
    def parse(cls, directory: str) -> "StoreSettings":
        """Parse the name of a store's folder, the inverse of `directory`.

        >>> StoreSettings.parse("token-list-codec=none").codec
        'none'
        """
        if own := EXTENSION_NAME.match(directory):
            require_format(own[0])
        store_format = next(
            (f for f in FORMATS if directory == f or directory.startswith(f + "-")), None
        )
        if store_format is None:
            raise unknown_format_error(directory.split("-", maxsplit=1)[0], store=directory)
        items = (
            item.partition("=")
            for item in filter(None, directory[len(store_format) :].lstrip("-").split("-"))
        )
        values = {"format": store_format, **{key: text for key, _, text in items}}
        store: StoreSettings = decode(
            cls,
            values,
            form="strings",
            store=directory,
        )
        if store.directory != directory:
            what = "the store's name is not in canonical form."
            raise UserError(
                what, store=directory, expected=store.directory, next="use the expected name"
            )
        return store


def unknown_format_error(name: str, allowed: Iterable[str] = FORMATS, **facts: object) -> UserError:
    """Return the error for a store format that does not exist, or no longer."""
    if name in REMOVED:
        return UserError(f"the format {name} no longer exists.", **facts, next=REMOVED[name])
    return unknown(
        "format",
        word=name,
        words=allowed,
        **facts,
    )
