"""Tokenize a text file into one Parquet file for each requested format, the first step of the
source studies.

The text goes through a temporary corpus without cleaning and without held-out documents, so that
row i is document i of the file. No workflow rule uses this module; it is imported by name, so that
no store depends on it.
"""

import argparse
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.base.files import lock_folder, remove_tree, sync, sync_tree
from tokenscale.base.progress import Progress
from tokenscale.data.corpus.build import build
from tokenscale.data.corpus.read import COMPRESSION, ENDINGS, read_first
from tokenscale.data.stores.manifest import SingleFile, read_store_manifest
from tokenscale.data.stores.writing import describe_store, write_store
from tokenscale.data.tokenizers.base import read_tokenizer_manifest as read_tokenizer
from tokenscale.data.tokenizers.huggingface import BUILT, ResolvedTokenizer, resolve_tokenizer
from tokenscale.data.tokenizers.load import build as build_tokenizer
from tokenscale.settings import flags
from tokenscale.settings.data import (
    CleaningSettings,
    CorpusSettings,
    SourceSettings,
    StorageSettings,
    StoreSettings,
)
from tokenscale.settings.options import option, settings_class

Log = Callable[[str], None]
#: name that no column has, so that the error of a missing column lists the columns of a file
NO_COLUMN = "\ufffd"


@settings_class
class TextOptions:
    """Options of commands that tokenize text files."""

    tokenizer_name: str = option(
        "tekken",
        description=f"a folder, a name below {BUILT}, tekken, or NAME@COMMIT of the Hugging Face hub",
        metavar="NAME",
        path=True,
    )
    text_column: str | None = option(
        None,
        description="column or key of the text (default: text, else the only one that holds text)",
        metavar="NAME",
    )
    separator: str | None = option(
        None,
        description=(
            r"text between the documents of a text file, such as '<|endoftext|>' or '\n' (default: "
            r"it is one)"
        ),
        min_length=1,
    )

    @property
    def unescaped_separator(self) -> str | None:
        return None if self.separator is None else unescape(self.separator)


@settings_class
class FileSettings(TextOptions):
    """Settings for tokenizing a file, with the source studies' names."""

    input_path: str = option(
        "",
        description="Parquet, .jsonl or text; the last two also .gz, .zst",
        metavar="FILE",
        path=True,
    )
    output_dir: str = option(
        "",
        description="folder of the token files",
        metavar="DIR",
        path=True,
    )
    max_length: int = option(
        2048,
        description="padded: positions per row (it stores one more token, the last label)",
        ge=8,
    )
    batch_size: int = option(100, description="documents per call of the tokenizer", ge=1)
    format: tuple[Literal["padded", "token-list", "packed"], ...] = option(
        ("padded", "token-list"),
        description="one file for each; packed is not Parquet, the workflow makes it",
    )
    compression: Literal["none", "snappy", "lz4", "zstd"] = option(
        "snappy", description="codec of the Parquet files"
    )
    compression_level: int | None = option(
        None,
        description="level of zstd (default 3)",
        ge=1,
        le=22,
    )
    dtype: Literal["int32", "int64", "uint32"] = option(
        "int32", description="dtype of token ids; the studies had int64"
    )
    row_group_rows: int = option(1000, description="rows per Parquet row group", ge=1)
    eos: bool = option(False, description="end each document with EOS, beside its one BOS")


#: required ones first
FLAGS = sorted(
    flags.build_flags(FileSettings), key=lambda flag: flag.key not in ("input_path", "output_dir")
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_flags(
        parser.add_argument_group("tokenize a text file into one Parquet file for each format"),
        flags=FLAGS,
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the files, each with its manifest beside it.

    The tokenizer is copied to `<output_dir>/tokenizers/<name>/`, from where `train` copies it
    beside the weights. Raise UserError for wrong flags, for an unreadable or empty input, for an
    existing file that this command did not write with these settings, and while another process
    writes there.
    """
    settings = FileSettings(**flags.parse_flags(arguments, flags=FLAGS))
    for name in ("input_path", "output_dir"):
        if not getattr(settings, name):
            raise UserError(
                f"{flags.spell(name)} is missing.", next="tokenscale pretokenize --help"
            )
    if "packed" in settings.format:
        store = StoreSettings("packed", sequence_length=settings.max_length).directory
        next_step = f"results/tokens/CORPUS/TOKENIZER/{store}/manifest.json"
        next_step = f"name the corpus in config/config.yaml, then: snakemake {next_step}"
        what = "packed rows are memory-mapped: they cannot be a Parquet file."
        raise UserError(what, flag="--format", allowed="padded, token-list", next=next_step)
    if settings.compression_level is not None and settings.compression != "zstd":
        what = f"the codec {settings.compression} has no level."
        raise UserError(what, flag="--compression-level", next="--compression zstd")
    source = Path(settings.input_path)
    directory = Path(settings.output_dir)
    tokenizer = resolve_tokenizer(settings.tokenizer_name)
    if source.is_dir():
        raise UserError(
            "the input is a folder.",
            flag="--input-path",
            folder=source,
            next="name one of its files",
        )
    check_present(source, flag="--input-path")
    new = not directory.exists()
    aside = directory / f".{strip_extensions(source)}.building"
    try:
        with lock_folder(aside, what=f"the tokens of {source}"):
            try:
                _write(
                    settings,
                    source,
                    aside=aside,
                    tokenizer=tokenizer,
                )
            finally:
                remove_tree(aside)
    except BaseException:
        if new and directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
        raise


def _write(settings: FileSettings, source: Path, aside: Path, tokenizer: ResolvedTokenizer) -> None:
    directory = aside.parent
    corpus = _build_corpus(settings, source, directory=aside / "corpus")
    left_out = corpus["cleaning"]["documents"]
    if left_out["read"] > left_out["kept"]:
        print(
            f"{left_out['read'] - left_out['kept']} of {left_out['read']:,} rows hold no text "
            "and are skipped"
        )
    if left_out["read"] == 1:
        print(f"{source} is one document; for a text file, --separator splits it into several")
    if tokenizer.note:
        print(tokenizer.note)
    kept = directory / "tokenizers" / tokenizer.settings.name
    folder = tokenizer.directory or kept
    if not (folder / "manifest.json").is_file():
        folder = aside / "tokenizer"
        build_tokenizer(tokenizer.settings, directory=folder)
    same: dict[str, Any] = {
        name: getattr(settings, name) for name in ("eos", "dtype", "row_group_rows")
    }
    same |= {"sequence_length": settings.max_length, "codec": settings.compression}
    same["codec_level"] = settings.compression_level or StorageSettings().codec_level
    stores = {}
    for form in dict.fromkeys(settings.format):
        store = StoreSettings(form, **same)
        name = f"{strip_extensions(source)}_tokenized_{form}_{settings.compression}"
        single = SingleFile(name, command=_command_line(settings, store))
        _check_free(single.list_files(directory), store, tokenizer=read_tokenizer(folder))
        stores[single] = store
    folder = _copy_tokenizer(folder, kept)
    if "token-list" in settings.format:
        print("token-list: documents are kept whole; the studies cut theirs at --max-length")
    for single, store in stores.items():
        progress = Progress(single.name, total=corpus["splits"]["train"]["rows"])
        batch: dict[str, Any] = {"batch_documents": settings.batch_size, "single": single}
        manifest = write_store(
            store,
            corpus_directory=aside / "corpus",
            tokenizer_directory=folder,
            directory=directory,
            report=progress,
            **batch,
        )
        progress.close()
        path = single.list_files(directory)[0]
        print(
            f"{progress.line()}; {describe_store(manifest)}\n  {path}  {path.stat().st_size:,} "
            "bytes"
        )


def _copy_tokenizer(folder: Path, kept: Path) -> Path:
    """Copy a tokenizer beside the tokens and return its folder there. Another tokenizer of its name
    is not replaced.
    """
    sha256 = read_tokenizer(folder)["file"]["sha256"]
    if (kept / "manifest.json").is_file() and read_tokenizer(kept)["file"]["sha256"] != sha256:
        kept = kept.with_name(f"{kept.name}-{sha256[:6]}")
    if not (kept / "manifest.json").is_file():
        partial = kept.with_name(f".{kept.name}.partial")
        remove_tree(partial)
        shutil.copytree(folder, partial, ignore=shutil.ignore_patterns(".lock"))
        sync_tree(partial)
        partial.rename(kept)
        sync(kept.parent)
    return kept


def strip_extensions(path: Path) -> str:
    """Return a file's name without its format and compression extensions.

    >>> strip_extensions(Path("data/owt_train.txt.gz")), strip_extensions(Path("train_data.parquet"))
    ('owt_train', 'train_data')
    """
    name = path.name
    for endings in (COMPRESSION, [ending for known in ENDINGS.values() for ending in known]):
        name = next((name[: -len(e)] for e in endings if name.lower().endswith(e)), name)
    return name


def check_present(path: Path, flag: str) -> None:
    """Raise UserError for a missing file, with the nearest name in its folder, and for an empty
    one.
    """
    if not path.is_file():
        near = find_nearest(
            path.name, words=[p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        )
        next_step = f"did you mean {path.parent / near}?" if near else "correct the path"
        raise UserError("the input file is missing.", flag=flag, requested=path, next=next_step)
    if path.stat().st_size == 0:
        raise UserError("the input file is empty.", flag=flag, file=path, next="name another file")


def _build_corpus(settings: FileSettings, source: Path, directory: Path) -> dict[str, Any]:
    """Build a corpus from the file's documents, in order, and return its manifest."""
    progress = Progress(f"reading {source.name}")
    try:
        read = SourceSettings(
            kind="files", files=(str(source),), separator=settings.unescaped_separator
        )
        corpus = CorpusSettings(
            name=make_corpus_name(strip_extensions(source)),
            source=choose_text_column(
                source,
                source=read,
                given=settings.text_column,
                log=print,
            ),
            cleaning=CleaningSettings(strip=False, minimum_characters=0, deduplicate=False),
            validation_share=0.0,
        )
        return build(corpus, directory, report=progress)
    except UserError as error:
        if error.facts.get("corpus") == str(directory):
            facts = {
                "flag": "--input-path",
                "file": source,
                "documents": error.facts.get("documents"),
            }
            raise UserError(
                "the input file holds no documents.", **facts, next="name another"
            ) from None
        raise reword_for_flags(error) from None
    finally:
        progress.close()


def make_corpus_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-") or "text"


def reword_for_flags(error: UserError) -> UserError:
    """Reword an error about a source in terms of flags: the user wrote no configuration for it."""
    facts = {
        "flag" if label == "key" else label: text
        for label, text in error.facts.items()
        if text != "source.files"
    }
    for key in ("text_column", "target_column"):
        if facts.get("flag") == f"source.{key}":
            facts["flag"] = flags.spell(key)
            facts["next"] = (
                facts["next"]
                if "did you mean" in facts.get("next", "")
                else f"{facts['flag']} NAME"
            )
    return UserError(error.what, **facts)


def choose_text_column(
    path: Path, source: SourceSettings, given: str | None, log: Log
) -> SourceSettings:
    """Return the source with the given text column; by default `text` or, if it is missing, the
    only one with text.

    `log` receives its name in this case. What is wrong with the file is left to its readers.
    """
    if given is not None:
        return replace(source, text_column=given)
    names = list_columns(path, source)
    if source.text_column in names:
        return source
    found = []
    for name in names:
        other = replace(source, text_column=name)
        with suppress(UserError):
            if isinstance(read_first(path, other), str):
                found.append(other)
    if len(found) == 1:
        log(f"text column: {found[0].text_column}, the only one that holds text")
        return found[0]
    return source


def list_columns(path: Path, source: SourceSettings) -> list[str]:
    """Return the columns of a table, the keys of its first row in JSON lines; of a file without
    columns, and of one that cannot be read, none.
    """
    try:
        read_first(path, replace(source, text_column=NO_COLUMN))
    except UserError as error:
        if error.facts.get("key") == "source.text_column":
            return error.facts.get("has", "").split(", ")
    return []


def unescape(text: str) -> str:
    r"""Replace `\n` and `\t` in a separator from the shell by the characters.

    >>> unescape(r"\n\n")
    '\n\n'
    """
    return text.replace(r"\n", "\n").replace(r"\t", "\t")


def _check_free(files: list[Path], store: StoreSettings, tokenizer: dict[str, Any]) -> None:
    """Refuse to overwrite files that this command did not write with the same settings; the
    manifest is the last.
    """
    there = [path for path in files if path.exists()]
    if not there:
        return
    if files[-1] not in there:
        what = "the output file exists, but has no manifest: this command did not write it."
        raise UserError(what, file=there[0], next="choose another --output-dir, or remove the file")
    found = read_store_manifest(files[-1])
    made = found["tokenizer"]
    has = {**found["options"], "tokenizer": made["name"], "tokenizer file": made["file_sha256"]}
    requested = {
        **store.options(),
        "tokenizer": tokenizer["name"],
        "tokenizer file": tokenizer["file"]["sha256"],
    }
    if differing := next((key for key in requested if requested[key] != has.get(key)), ""):
        facts = {
            "has": f"{differing} {has.get(differing)}",
            "requested": f"{differing} {requested[differing]}",
        }
        following = "choose another --output-dir, or remove the file and its manifest"
        what = "the output file exists and was made with other settings."
        raise UserError(what, file=there[0], **facts, next=following)


def _command_line(settings: FileSettings, store: StoreSettings) -> str:
    words = ["tokenscale", "pretokenize"]
    for flag in FLAGS:
        value = store.format if flag.key == "format" else getattr(settings, flag.key)
        if value != flag.default:
            words += [flag.name, str(value).lower() if isinstance(value, bool) else str(value)]
    return shlex.join(words)
