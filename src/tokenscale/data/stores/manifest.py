"""The manifest of a token store: written last by every writer, asked first by every reader.

A store is a folder that holds `manifest.json` and the files it lists; or, beside other files, one Parquet file with a
name of its own and `<name>.manifest.json`. Whatever reads a store takes either the folder or the manifest's path.
"""

import importlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    canonical_json,
    check_types,
    plain_name,
    pretty_json,
    read_manifest_file,
    sha256_text,
    understood,
    write_json,
)
from tokenscale.data.corpus.raw_text import check_file
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.registry import FORMATS

VERSION = 2


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
    with suppress(OSError, ValueError, KeyError, TypeError):  # no rule makes what a command wrote: it left its words
        return json.loads(build_record(manifest).read_text(encoding="utf-8"))["command"]
    if manifest.name == "manifest.json":
        return f"snakemake -f {manifest}"
    return f"python -m tokenscale pretokenize --input-path … --output-dir {folder} …"


def build_record(manifest: Path) -> Path:
    """The record of times and machine beside a manifest: `build.json`, `<name>.build.json`."""
    return manifest.with_name(manifest.name.removesuffix("manifest.json") + "build.json")


def seal(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with a hash of itself: a byte that is changed later is found."""
    write_json(path, manifest | {"self_sha256": sha256_text(canonical_json(manifest))})


def read_store_manifest(where: Path) -> dict[str, Any]:
    """The manifest of a store. UserError where it is missing, broken, or newer than this code."""
    path = located(where)[1]
    manifest = read_manifest_file(path, "token store", VERSION, restore(where), oldest=VERSION)
    stated = manifest.pop("self_sha256", None)
    if stated != (found := sha256_text(canonical_json(manifest))) or path.read_text(encoding="utf-8") != pretty_json(
        manifest | {"self_sha256": stated}
    ):
        raise UserError(
            "the manifest of the token store has changed.",
            file=path,
            expected=f"sha256 {stated}  (self_sha256)",
            found=f"sha256 {found}",
            next=restore(where),
        )
    with understood(path, "manifest of the token store", restore(where)):
        for file in manifest["files"]:
            check_types(file, {"name": str, "bytes": int, "sha256": str})
            plain_name(file["name"])
    return manifest


def open_store(
    where: Path,
    expected: StoreSettings,
    *,
    requested_by: str = "this command",
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

    def compare(name: str, requested: Any, found: Any) -> None:
        if requested is not None and requested != found:
            raise _mismatch(where, requested_by, name, requested, found)

    compare("format", expected.format, manifest["format"])
    for name, value in expected.options().items():
        found = manifest["options"].get(name)
        if value != found:
            raise _mismatch(where, requested_by, name, value, found)
    compare("tokenizer", tokenizer_name, manifest["tokenizer"]["name"])
    compare("tokenizer file, sha256", tokenizer_sha256, manifest["tokenizer"]["file_sha256"])
    compare("corpus manifest, sha256", corpus_manifest_sha256, manifest.get("corpus_manifest_sha256"))
    if vocabulary_size is not None and vocabulary_size < manifest["vocabulary_size"]:
        raise _mismatch(where, requested_by, "vocabulary of at most", vocabulary_size, manifest["vocabulary_size"])
    for file in manifest["files"]:
        path = located(where)[0] / file["name"]
        whole = verify and "checked_by" not in file  # else the reader checks what it reads
        check_file(path, file["bytes"], file["sha256"], what="token store", next=restore(where), content=whole)
    return manifest


def changed(
    where: Path, file: Path, what: str, number: int, count: int, byte: int, right: int, found: int, checks: str
) -> UserError:
    """For a part of a store's largest file (`what`: a row, a block) whose XXH3 is not the one in the file `checks`."""
    return UserError(
        f"a {what} of the token store has changed.",
        file=file,
        **{what: f"{number:,} of {count:,}, byte {byte:,} on"},
        expected=f"XXH3 {right:016x}  ({checks})",
        found=f"XXH3 {found:016x}",
        next=restore(where),
    )


def outside(where: Path, file: Path, found: int, vocabulary_size: int) -> UserError:
    """For an id that no tokenizer of the manifest's makes: whatever wrote it put its hash right, too."""
    return UserError(
        "the token store holds ids outside of its vocabulary.",
        file=file,
        expected=f"below {vocabulary_size:,}  (vocabulary_size of the manifest)",
        found=f"{found:,}",
        next=restore(where),
    )


def _mismatch(where: Path, requested_by: str, name: str, requested: Any, found: Any) -> UserError:
    folder, manifest = located(where)
    single = manifest.name != "manifest.json"
    wants = f"{requested_by} wants {name}"
    has = f"{folder / (manifest.name.removesuffix('.manifest.json') + '.parquet') if single else folder} has"
    width = max(len(wants), len(has))
    # a folder's name states its options, so that rebuilding it mends them; the command of a file repeats them
    next = "wrote it: change its options, or what the run asks for" if single else "rebuilds it"
    return UserError(
        "the token store does not match this run.",
        run=f"{wants:<{width}}  {requested}",
        store=f"{has:<{width}}  {found}  ({manifest.name})",
        next=f"{restore(where)}   {next}",
    )


def module_of(form: str) -> ModuleType:
    """The module whose `write` makes stores of this format."""
    return importlib.import_module(FORMATS[form].module)


def reader_of(form: str) -> type:
    """The class that reads its stores, from (folder or manifest's path, manifest that `open_store` checked)."""
    return getattr(module_of(form), FORMATS[form].reader)
