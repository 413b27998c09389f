"""The manifest of a token store: written last by every writer, asked first by every reader.

A store is a folder that holds `manifest.json` and the files it lists; or, beside other files, one Parquet file with a
name of its own and `<name>.manifest.json`. Whatever reads a store takes either the folder or the manifest's path.
"""

import json
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale import __version__
from tokenscale.corpus.reader import check_file
from tokenscale.errors import UserError
from tokenscale.files import read_json, sha256_file, write_json
from tokenscale.settings.data import StoreSettings
from tokenscale.tokenizer.base import SPECIAL_TOKEN_POLICY, Tokenizer

VERSION = 1


@dataclass(frozen=True)
class SingleFile:
    """A store that is one file, `<name>.parquet`, in a folder that holds others, too."""

    name: str
    command: str  # what writes it again


def located(where: Path) -> tuple[Path, Path]:
    """(folder, manifest) of a store that is named by either of them.

    >>> [str(path) for path in located(Path("tokens/padded"))]
    ['tokens/padded', 'tokens/padded/manifest.json']
    >>> [str(path) for path in located(Path("data/a_tokenized_padded_snappy.manifest.json"))]
    ['data', 'data/a_tokenized_padded_snappy.manifest.json']
    """
    where = Path(where)
    return (where.parent, where) if where.suffix == ".json" else (where, where / "manifest.json")


def restore(where: Path) -> str:
    """The command that rebuilds a store."""
    folder, manifest = located(where)
    if manifest.name == "manifest.json":
        return f"snakemake -f {manifest}"
    try:
        return json.loads(_build_record(manifest).read_text(encoding="utf-8"))["command"]
    except (OSError, ValueError, KeyError):
        return f"python -m tokenscale pretokenize --input-path … --output-dir {folder} …"


def _build_record(manifest: Path) -> Path:
    """The record of times and machine beside a manifest: `build.json`, `<name>.build.json`."""
    return manifest.with_name(manifest.name.removesuffix("manifest.json") + "build.json")


class StoreWriter:
    """What every format's writer shares: a folder to write into, and what the manifest says for all formats."""

    def __init__(
        self, store: StoreSettings, corpus_directory: Path, tokenizer: Tokenizer, directory: Path, folder: Path
    ):
        self.store, self.tokenizer, self.directory, self.folder = store, tokenizer, directory, folder
        self.corpus_manifest = Path(corpus_directory) / "manifest.json"
        self.manifest: dict[str, Any] | None = None

    def finish(self, names: list[str], facts: dict[str, Any]) -> dict[str, Any]:
        """Describe the files `names` of the folder; `facts` are the format's own counts. Returns the manifest."""
        tokenizer = self.tokenizer
        self.manifest = {
            "schema_version": VERSION,
            "format": self.store.format,
            "options": self.store.options(),
            "split": self.store.split,
            "tokenizer": {"name": tokenizer.name, "kind": tokenizer.kind, "file_sha256": tokenizer.file_sha256},
            "vocabulary_size": tokenizer.vocabulary_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "document_rule": "one BOS, the text" + (", one EOS" if self.store.eos else "; no EOS"),
            "special_token_policy": SPECIAL_TOKEN_POLICY,
            "padding": {"side": "right", "id": tokenizer.pad_id},
            "corpus_manifest_sha256": sha256_file(self.corpus_manifest),
            **facts,
            "fill": round(facts["tokens_useful"] / facts["tokens_total"], 6) if facts["tokens_total"] else 0.0,
            "files": [
                {
                    "name": name,
                    "bytes": (self.folder / name).stat().st_size,
                    "sha256": sha256_file(self.folder / name),
                }
                for name in names
            ],
        }
        return self.manifest


@contextmanager
def writing(
    store: StoreSettings,
    corpus_directory: Path,
    tokenizer: Tokenizer,
    directory: Path,
    single: SingleFile | None = None,
) -> Iterator[StoreWriter]:
    """Write a store's files to a folder aside; on success they replace the old ones and the manifest follows, last.

    With `single`, the files of other stores in `directory` are left alone.
    """
    directory = Path(directory)
    started = time.time()
    directory.mkdir(parents=True, exist_ok=True)
    folder = directory / (f".{single.name}.building" if single else ".building")
    manifest = directory / (f"{single.name}.manifest.json" if single else "manifest.json")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        writer = StoreWriter(store, corpus_directory, tokenizer, directory, folder)
        yield writer
        if writer.manifest is None:
            raise RuntimeError("a format's writer ended without finish()")
        names = {file["name"] for file in writer.manifest["files"]}
        if single is None:
            manifest.unlink(missing_ok=True)
            for path in directory.iterdir():
                if path.suffix in (".parquet", ".bin", ".npy") and path.name not in names:
                    path.unlink()
        for name in sorted(names):
            (folder / name).replace(directory / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write_json(
        _build_record(manifest),
        {
            "built_unix_s": started,
            "duration_s": time.time() - started,
            "tokenscale": __version__,
            "python": sys.version,
            "numpy": np.__version__,
            "machine": platform.node(),
            "manifest": manifest.name,
            **({"command": single.command} if single else {}),
        },
    )
    write_json(manifest, writer.manifest)


def no_documents(store: StoreSettings, corpus_directory: Path) -> UserError:
    """The error for a split that holds nothing."""
    return UserError(
        f"the corpus has no {store.split} documents to make tokens of.",
        corpus=corpus_directory,
        store=store.directory,
        next="a larger corpus, or a larger corpus.validation_share",
    )


def read_store_manifest(where: Path) -> dict[str, Any]:
    """The manifest of a store. UserError where it is missing, broken, or newer than this code."""
    path = located(where)[1]
    manifest = read_json(path, "manifest of the token store", restore(where))
    version = manifest.get("schema_version", 0)
    if version > VERSION:
        raise UserError(
            "the token store was written by a newer tokenscale.",
            store=path,
            found=f"schema_version {version}",
            expected=f"at most {VERSION}",
            next="upgrade tokenscale, or rebuild: " + restore(where),
        )
    return manifest


def open_store(
    where: Path,
    expected: StoreSettings,
    *,
    asked_by: str = "this command",
    tokenizer_name: str | None = None,
    tokenizer_sha256: str | None = None,
    vocabulary_size: int | None = None,
    corpus_manifest_sha256: str | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """The manifest of a store (its folder, or the path of its manifest) that fits what `asked_by` asks for.

    What is None is not compared; `vocabulary_size` is the most ids that the asker can hold. Files are held against the
    manifest: sizes always, contents unless `verify` is False. Raises UserError with both values and the command that
    rebuilds the store.
    """
    manifest = read_store_manifest(where)

    def compare(name: str, asked: Any, found: Any) -> None:
        if asked is not None and asked != found:
            raise _mismatch(where, asked_by, name, asked, found)

    compare("format", expected.format, manifest["format"])
    for name, value in expected.options().items():
        found = manifest["options"].get(name)
        if value != found:
            raise _mismatch(where, asked_by, name, value, found)
    compare("tokenizer", tokenizer_name, manifest["tokenizer"]["name"])
    compare("tokenizer file, sha256", tokenizer_sha256, manifest["tokenizer"]["file_sha256"])
    compare("corpus manifest, sha256", corpus_manifest_sha256, manifest["corpus_manifest_sha256"])
    if vocabulary_size is not None and vocabulary_size < manifest["vocabulary_size"]:
        raise _mismatch(where, asked_by, "vocabulary of at most", vocabulary_size, manifest["vocabulary_size"])
    for file in manifest["files"]:
        path = located(where)[0] / file["name"]
        check_file(path, file["bytes"], file["sha256"], what="token store", next=restore(where), content=verify)
    return manifest


def _mismatch(where: Path, asked_by: str, name: str, asked: Any, found: Any) -> UserError:
    folder, manifest = located(where)
    single = manifest.name != "manifest.json"
    wants = f"{asked_by} wants {name}"
    has = f"{folder / (manifest.name.removesuffix('.manifest.json') + '.parquet') if single else folder} has"
    width = max(len(wants), len(has))
    # a folder's name states its options, so that rebuilding it mends them; the command of a file repeats them
    next = "wrote it: change its options, or what the run asks for" if single else "rebuilds it"
    return UserError(
        "the token store does not match this run.",
        run=f"{wants:<{width}}  {asked}",
        store=f"{has:<{width}}  {found}  ({manifest.name})",
        next=f"{restore(where)}   {next}",
    )
