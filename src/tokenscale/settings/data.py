"""What text, which tokenizer, which store: the settings of everything before a step."""

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from tokenscale.base.errors import UserError, unknown, without_password
from tokenscale.settings.options import NAME, STRICT, default_of, option
from tokenscale.settings.registry import DOWNLOADS, FORMATS, SOURCES, TOKENIZERS

SHA256 = re.compile(r"[0-9a-f]{64}")
#: what names something that is no file here: `s3://…`, `file:…`, `data:…`
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(file|data|javascript):", re.IGNORECASE)


@dataclass(frozen=True)
class LengthSettings:
    """Distribution of document lengths of the dummy source, in numbers (with the tokenizer `numbers`: in tokens)."""

    __pydantic_config__ = STRICT

    distribution: Literal["constant", "uniform", "lognormal"] = option(
        "lognormal", "constant: `mean`; uniform: minimum to maximum; lognormal: of that mean and sigma"
    )
    mean: float = option(512.0, "mean of the constant and of the lognormal, before the bounds", gt=0)
    sigma: float = option(1.0, "standard deviation of the logarithm", ge=0)
    minimum: int = option(1, "shorter lengths become this", ge=1, strict=True)
    maximum: int = option(8192, "longer lengths become this", ge=1, strict=True)


#: options that name files of a source, each with that of the translations, line for line
TARGETS_OF = {"files": "target_files", "validation_files": "validation_target_files"}
FILE_LISTS = (*TARGETS_OF, *TARGETS_OF.values())


@dataclass(frozen=True)
class SourceSettings:
    """Where text comes from. In config.yaml `kind` may be left out: the other keys say it."""

    __pydantic_config__ = STRICT

    kind: Literal[*SOURCES] = option(
        "docstrings",
        "; ".join(f"{name}: {source.description}" for name, source in SOURCES.items())
        + ". By default what the other keys imply",
    )
    packages: tuple[str, ...] = option(
        ("stdlib", "pydoc_data", "numpy", "pandas", "matplotlib"), "docstrings: packages to read (never imported)"
    )
    files: tuple[str, ...] = option(
        (),
        "files: paths and globs; url: addresses; hub: paths and globs in the repository. `#sha256=…` after an address "
        "or a path of the hub declares its content; where it is not declared, the first download records it",
    )
    validation_files: tuple[str, ...] = option(
        (), "the source's own validation documents, in place of a share of `files`"
    )
    target_files: tuple[str, ...] = option(
        (),
        "text: files with the translations of `files`, line for line (a Moses pair); a document is then two lines",
    )
    validation_target_files: tuple[str, ...] = option((), "the same of `validation_files`")
    format: Literal["auto", "parquet", "jsonl", "tsv", "text"] = option(
        "auto", "auto: by the files' endings (.parquet, .jsonl, .tsv, .txt, … each also .gz or .zst, but for Parquet)"
    )
    text_column: str = option(
        "text",
        "Parquet, JSONL and TSV: the column, or key, that holds a document's text; `translation.de`: the part `de` of "
        'a column of objects; of a TSV without a line of names, the column\'s number ("1" is the first)',
    )
    target_column: str | None = option(
        None,
        "Parquet, JSONL and TSV: the column, or key, of what `text_column` is translated to; a document is then a "
        "pair: source, EOS, target, EOS",
    )
    separator: str | None = option(
        None, 'text: what stands between documents, such as "<|endoftext|>" or "\\n"; null: a file is one document'
    )
    repository: str | None = option(None, "hub: name of the dataset, such as roneneldan/TinyStories")
    revision: str | None = option(
        None, "hub: commit of the dataset (40 hex digits), so that the name stays the same data"
    )
    downloaded: bool | None = option(
        None, "false: nobody has downloaded it with this configuration yet; said by `plan`", science=False
    )
    published_documents: int | None = option(
        None,
        "url, hub: training documents by the word of who published them; before the corpus is built, the price of an "
        "epoch rests on it",
        science=False,
        ge=1,
    )
    documents: int | None = option(None, "dummy, grammar: how many (grammar: for training)", ge=1)
    held_out: int = option(500, "grammar: validation documents, of combinations that no training document has", ge=1)
    vocabulary_size: int = option(50_257, "dummy: numbers are below this", ge=2, strict=True)
    lengths: LengthSettings = option(LengthSettings, "dummy: lengths of documents")
    seed: int = option(0, "dummy: of lengths and numbers; grammar: of the choice of sentences", ge=0, strict=True)
    maximum_documents: int | None = option(None, "stop after so many training documents", ge=1)

    def problems(self) -> list[tuple[str, str]]:
        """(field, what is wrong) for options that do not fit the kind."""
        needed, known = SOURCES[self.kind].needs, SOURCES[self.kind].options
        found = [(name, f"kind {self.kind} needs it") for name in needed if not getattr(self, name)]
        fields = {f.name: f for f in dataclasses.fields(self)}
        for name in fields.keys() - {"kind", "maximum_documents", *needed, *known}:
            if getattr(self, name) != default_of(fields[name]):
                found.append((name, f"has no meaning for kind {self.kind}"))
        if self.kind == "hub" and self.revision and not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            found.append(("revision", f"{self.revision!r} is no commit (40 hex digits); a branch can move"))
        for name in FILE_LISTS:
            found += [(name, text) for f in getattr(self, name) if (text := address_problem(f, self.kind))]
        if self.kind in DOWNLOADS:
            for name in FILE_LISTS:
                hashes = [f.partition("#sha256=")[2] for f in getattr(self, name) if "#sha256=" in f]
                found += [(name, f"{h!r} is no SHA-256 (64 hex digits)") for h in hashes if not SHA256.fullmatch(h)]
        if self.lengths.minimum > self.lengths.maximum:
            found.append(("lengths.minimum", f"{self.lengths.minimum} is more than maximum = {self.lengths.maximum}"))
        return sorted(found + self._pair_problems())

    def _pair_problems(self) -> list[tuple[str, str]]:
        found = []
        if self.target_files and self.target_column is not None:
            found.append(("target_column", "translations stand in a column, or in target_files: leave one out"))
        if self.target_files and self.format not in ("auto", "text"):
            found.append(("target_files", f"format {self.format} holds both texts: name target_column"))
        if self.target_files and self.separator not in (None, "\n"):
            found.append(("separator", "with target_files a line is a document"))
        if bool(self.validation_target_files) != bool(self.target_files and self.validation_files):
            found.append(("validation_target_files", "go with target_files and validation_files, and these with them"))
        return found

    @property
    def pairs(self) -> bool:
        """Whether a document is a text and its translation."""
        return self.target_column is not None or bool(self.target_files) or SOURCES[self.kind].pairs

    @property
    def brings_validation(self) -> bool:
        """Whether the source says itself what is held out."""
        return bool(self.validation_files) or SOURCES[self.kind].validation

    @staticmethod
    def implied_kind(values: dict[str, object]) -> str:
        """The kind that the keys of a source imply.

        >>> SourceSettings.implied_kind({"files": ["data/*.parquet"], "text_column": "body"})
        'files'
        """
        files = values.get("files")
        files = [files] if isinstance(files, str) else files if isinstance(files, (list, tuple)) else []
        if "repository" in values:
            return "hub"
        if any(is_address(str(f)) for f in files):
            return "url"
        if "files" in values:
            return "files"
        if "held_out" in values:
            return "grammar"
        return "dummy" if "documents" in values else "docstrings"


def is_address(file: str) -> bool:
    """Whether a file is named by a web address."""
    return file.lower().startswith(("http://", "https://"))


def address_problem(file: str, kind: str) -> str | None:
    """What is wrong with the name of a file, as a source of that kind has it. Never repeats a password.

    >>> address_problem("https://me:secret@host/a.txt?sig=9f3c", "url").split(",")[0]
    'https://…@host/a.txt?sig=… holds a password or a signature'
    >>> address_problem("file:///etc/passwd", "files")
    'file:///etc/passwd is an address that is not read: a path of this machine, or http(s)'
    """
    shown = without_password(file)
    if kind == "url":
        if not is_address(file):
            return f"{shown!r} is no http address"
        try:
            host = urlsplit(file).hostname
        except ValueError:
            host = None
        if not host or any(ord(c) <= 32 for c in file):
            return f"{shown!r} is no whole address: https://HOST/PATH"
        if shown != file:
            return (
                f"{shown} holds a password or a signature, and would carry it into logs and records: ~/.netrc can hold"
                " a password; a file behind a signed address can be downloaded, and named by its path"
            )
    elif _SCHEME.match(file):
        return f"{shown} is an address that is not read: a path of this machine, or http(s)"
    return None


@dataclass(frozen=True)
class CleaningSettings:
    """What happens to each document before it is split. Everything removed or changed is counted in the manifest."""

    __pydantic_config__ = STRICT

    nfc: bool = option(False, "compose characters (Unicode normalisation form C)")
    collapse: bool = option(
        False, "one space for each run of spaces and tabs, at most one empty line between lines, no space at their ends"
    )
    strip: bool = option(True, "remove white space at both ends")
    minimum_characters: int = option(1, "drop shorter documents", ge=0, strict=True)
    maximum_characters: int | None = option(None, "drop longer documents (never cut)", ge=1)
    deduplicate: bool = option(True, "drop exact duplicates; the first one stays")


@dataclass(frozen=True)
class CorpusSettings:
    """One corpus: `results/corpus/<name>/`."""

    __pydantic_config__ = STRICT

    name: str = option("docstrings", "folder below results/corpus", science=False, pattern=NAME)
    source: SourceSettings = option(SourceSettings, "where the text comes from")
    cleaning: CleaningSettings = option(CleaningSettings, "what is dropped and changed")
    validation_share: float = option(
        0.05,
        "share of documents held out, by document hash; unused where the source has validation files",
        ge=0,
        lt=1,
    )
    row_group_rows: int = option(1000, "documents a Parquet row group", ge=1, strict=True)

    @property
    def download(self) -> "CorpusSettings":
        """What a download depends on: how its text is read, cleaned and split later is not of it."""
        wanted = ("kind", *FILE_LISTS, "repository", "revision")
        source = SourceSettings(**{name: getattr(self.source, name) for name in wanted})
        return CorpusSettings(name=self.name, source=source)


@dataclass(frozen=True)
class TokenizerSettings:
    """One tokenizer: `results/tokenizers/<name>/`."""

    __pydantic_config__ = STRICT

    name: str = option("tekken", "folder below results/tokenizers", science=False, pattern=NAME)
    kind: Literal[*TOKENIZERS, "unknown"] = option(
        "tekken", "which family; unknown: that of a converted store, of which only the ids are known"
    )
    source: str | None = option(None, "huggingface: hub name, or a folder that holds tokenizer.json")
    revision: str | None = option(None, "huggingface: commit of the hub repository")
    bos: str | None = option(None, "huggingface: text of the begin-of-document token, where the file does not say")
    eos: str | None = option(None, "huggingface: text of the end-of-document token, where the file does not say")
    corpus: str | None = option(None, "bpe: the corpus whose training split it learns from", science=False)
    learnt_from: CorpusSettings | None = option(None, "filled in: the settings of that corpus")
    vocabulary_size: int | None = option(
        None, "bpe: size, control tokens included; numbers: control tokens and numbers", ge=5
    )

    @property
    def from_hub(self) -> bool:
        """Whether making it needs the network: a Hugging Face name that is no folder here."""
        return self.kind == "huggingface" and not os.path.isdir(self.source or "")

    def problems(self) -> list[tuple[str, str]]:
        """(field, what is wrong) for options that do not fit the kind."""
        # a converted store's own tokenizer is known by its size alone
        needs, options = TOKENIZERS[self.kind][1:] if self.kind in TOKENIZERS else (("vocabulary_size",), ())
        found = [(name, f"kind {self.kind} needs it") for name in needs if getattr(self, name) is None]
        for name in ("source", "revision", "bos", "eos", "corpus", "vocabulary_size"):
            if getattr(self, name) is not None and name not in (*needs, *options):
                found.append((name, f"has no meaning for kind {self.kind}"))
        if self.kind == "bpe" and self.vocabulary_size is not None and self.vocabulary_size < 259:
            found.append(("vocabulary_size", "256 bytes and 3 control tokens need at least 259"))
        return found


@dataclass(frozen=True)
class StorageSettings:
    """How the Parquet formats lie on disk. The defaults are the repaired ones (int32, zstd-3, no dictionary)."""

    __pydantic_config__ = STRICT

    codec: Literal["none", "snappy", "lz4", "zstd"] = option("zstd", "Parquet compression")
    codec_level: int = option(3, "level of zstd", ge=1, le=22, strict=True)
    dtype: Literal["int32", "int64", "uint32"] = option("int32", "integer type of token ids")
    row_group_rows: int = option(1000, "rows a Parquet row group", ge=1, strict=True)


@dataclass(frozen=True)
class StoreSettings:
    """One token store: a format and its options. Its directory name says all of it (`padded-sequence_length=2048`)."""

    format: Literal[*FORMATS]
    split: Literal["train", "validation"] = "train"
    sequence_length: int = 1024
    eos: bool = False
    codec: Literal["none", "snappy", "lz4", "zstd"] = "zstd"
    codec_level: int = 3
    dtype: Literal["int32", "int64", "uint32"] = "int32"
    row_group_rows: int = 1000
    level: Literal["fast", "small", "smallest"] = "fast"
    packing: Literal["best-fit", "concatenate"] = "best-fit"

    #: which options mean something for which format
    OPTIONS = {name: form.options for name, form in FORMATS.items()}

    def options(self) -> dict[str, object]:
        """The options of this format with their values."""
        return {name: getattr(self, name) for name in self.OPTIONS[self.format]}

    @property
    def directory(self) -> str:
        """Name of the store's folder: the format, then each option that differs from its default.

        >>> StoreSettings("padded", sequence_length=2048).directory
        'padded-sequence_length=2048'
        >>> StoreSettings("packed").directory
        'packed'
        """
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        changed = [f"{k}={_text(v)}" for k, v in self.options().items() if v != defaults[k]]
        return "-".join([self.format, *changed])

    @property
    def archive(self) -> "StoreSettings":
        """The archive that holds the same documents.

        >>> StoreSettings("packed", split="validation", sequence_length=2048).archive.directory
        'archive-split=validation'
        """
        return StoreSettings("archive", split=self.split, eos=self.eos)

    @classmethod
    def parse(cls, directory: str) -> "StoreSettings":
        """The settings that a folder's name states; the opposite of `directory`.

        >>> StoreSettings.parse("token-list-codec=none").codec
        'none'
        """
        form = next((f for f in cls.OPTIONS if directory == f or directory.startswith(f + "-")), None)
        if form is None:
            raise unknown("format", directory.split("-")[0], cls.OPTIONS, store=directory)
        values: dict[str, object] = {}
        for item in filter(None, directory[len(form) :].lstrip("-").split("-")):
            key, _, text = item.partition("=")
            if key not in cls.OPTIONS[form]:
                raise unknown(f"option of format {form}", key, cls.OPTIONS[form], store=directory)
            values[key] = _parse(key, text, directory)
        store = cls(form, **values)
        if store.directory != directory:
            raise UserError(
                "the store's name is not written the one way.",
                store=directory,
                expected=store.directory,
                next="use that name",
            )
        return store


_WORDS = {
    "split": ("train", "validation"),
    "codec": ("none", "snappy", "lz4", "zstd"),
    "dtype": ("int32", "int64", "uint32"),
    "level": ("fast", "small", "smallest"),
    "packing": ("best-fit", "concatenate"),
}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse(key: str, text: str, store: str) -> object:
    if key in _WORDS:
        if text not in _WORDS[key]:
            raise unknown(f"value of {key}", text, _WORDS[key], store=store)
        return text
    if key == "eos" and text in ("true", "false"):
        return text == "true"
    if key != "eos" and text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise UserError(
        f"{key} has no value {text!r}.",
        store=store,
        expected="true or false" if key == "eos" else "a positive integer",
        next="correct the name of the store",
    )
