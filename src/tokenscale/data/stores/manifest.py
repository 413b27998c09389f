"""Manifest of a token store: written last by every writer, checked first by every reader.

A store is a folder with `manifest.json` and the files it lists, or `<name>.parquet`,
`<name>.records` and `<name>.manifest.json`. Readers accept the folder or the path of the manifest.
"""

import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    check_relative_path,
    check_types,
    is_sealed,
    pretty_json,
    read_file,
    read_json,
    read_manifest_file,
    report_malformed,
)
from tokenscale.base.manifests import changed_error, check_file
from tokenscale.data.records import Records
from tokenscale.settings.data import LOST, StoreSettings, unknown_format_error
from tokenscale.settings.extensions import load_extension
from tokenscale.settings.options import EXTENSION_NAME
from tokenscale.settings.registry import FORMATS

VERSION = 2
#: field of a manifest with the hash of the rest
SEAL = "self_sha256"


@dataclass(frozen=True)
class SingleFile:
    """Store in a single Parquet file and its records, in a folder that may hold other stores."""

    name: str
    command: str  # command that writes it again

    def list_files(self, folder: Path) -> list[Path]:
        return [
            folder / f"{self.name}{ending}" for ending in (".parquet", ".records", ".manifest.json")
        ]


def resolve_store(where: Path) -> tuple[Path, Path]:
    """Return (folder, manifest) of a store, given either of them.

    >>> [str(path) for path in resolve_store(Path("tokens/padded"))]
    ['tokens/padded', 'tokens/padded/manifest.json']
    >>> [str(path) for path in resolve_store(Path("data/a_tokenized_padded_snappy.manifest.json"))]
    ['data', 'data/a_tokenized_padded_snappy.manifest.json']
    """
    where = Path(where)
    return (where.parent, where) if where.suffix == ".json" else (where, where / "manifest.json")


def rebuild_command(where: Path, file: str = "") -> str:
    """Return the command that rebuilds a store, or the part of it that `file` of its manifest
    belongs to.
    """
    folder, manifest = resolve_store(where)
    if file.startswith("parts/"):
        return f"snakemake -f {(folder / file).parent / 'manifest.json'}"
    with suppress(UserError, ValueError, LookupError, TypeError, AttributeError):
        # of a store without a rule, by whoever wrote it
        command = read_json(build_record_path(manifest))["command"]
        words = shlex.split(command)
        if words[0] == "tokenscale" and shlex.join(words) == command:
            return command
    if manifest.name == "manifest.json":
        return f"snakemake -f {manifest}"
    return f"tokenscale pretokenize --input-path … --output-dir {folder} …"


def build_record_path(manifest: Path) -> Path:
    """Return the path of the build record next to a manifest: `build.json` or
    `<name>.build.json`.
    """
    return manifest.with_name(manifest.name.removesuffix("manifest.json") + "build.json")


def read_store_manifest(where: Path) -> dict[str, Any]:
    """Read the manifest of a store. Raises UserError for a missing, broken, changed or too new
    manifest.
    """
    path = resolve_store(where)[1]
    manifest = read_manifest_file(
        path,
        what="token store",
        newest=VERSION,
        next=rebuild_command(where),
        oldest=VERSION,
    )
    if not is_sealed(manifest, key=SEAL) or read_file(path) != pretty_json(manifest).encode():
        expected = f"the content of {SEAL}, as it was written"
        next_step = rebuild_command(where)
        raise changed_error(
            "the manifest of the token store",
            file=path,
            expected=expected,
            found="other content",
            next=next_step,
        )
    del manifest[SEAL]
    with report_malformed(path, what="manifest of the token store", next=rebuild_command(where)):
        if manifest["format"] not in FORMATS and not EXTENSION_NAME.fullmatch(manifest["format"]):
            raise unknown_format_error(manifest["format"], store=path)
        for file in manifest["files"]:
            check_types(file, fields={"name": str, "bytes": int, "sha256": str})
            check_relative_path(file["name"])
        check_types(
            manifest.get("text_sample", dict.fromkeys(LOST, 0)),
            fields=dict.fromkeys(LOST, (int, float)),
        )
        for file in manifest.get("records", {}).get("files", []):
            check_types(file, fields={"name": str, "records": int, "bytes": int})
            check_relative_path(file["name"])
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
) -> dict[str, Any]:
    """Check a store (its folder, or the path of its manifest) and return its manifest.

    Parameters that are None are not compared. `vocabulary_size` is the largest vocabulary that the
    reader supports, and `requested_by` is shown in errors. File sizes are checked. Contents are
    verified by the readers of `packed` and of records when they are first read, and here for other
    formats. Raises UserError with both values and the command that rebuilds the store.
    """
    manifest = read_store_manifest(where)
    folder, path = resolve_store(where)
    given = {
        "tokenizer": (tokenizer_name, manifest["tokenizer"]["name"]),
        "tokenizer file, sha256": (tokenizer_sha256, manifest["tokenizer"]["file_sha256"]),
        "corpus manifest, sha256": (corpus_manifest_sha256, manifest.get("corpus_manifest_sha256")),
    }
    facts = {"format": (expected.format, manifest["format"])}
    facts |= {
        name: (value, manifest["options"].get(name)) for name, value in expected.options().items()
    }
    facts |= {name: pair for name, pair in given.items() if pair[0] is not None}
    if vocabulary_size is not None and vocabulary_size < manifest["vocabulary_size"]:
        facts["vocabulary of at most"] = vocabulary_size, manifest["vocabulary_size"]
    for name, (requested, found) in facts.items():
        if requested != found:
            single = path.name != "manifest.json"
            has = (
                f"{folder / (path.name.removesuffix('.manifest.json') + '.parquet') if single else folder} "
                "has"
            )
            wants = f"{requested_by} wants {name}"
            width = max(len(wants), len(has))
            # rebuilding a folder uses the options in its name; the command of a single file
            # contains them
            next_step = (
                "wrote it: change its options, or the settings of the run"
                if single
                else "rebuilds it"
            )
            raise UserError(
                "the token store does not match this run.",
                run=f"{wants:<{width}}  {requested}",
                store=f"{has:<{width}}  {found}  ({path.name})",
                next=f"{rebuild_command(where)}   {next_step}",
            )
    next_step = rebuild_command(where)
    # their readers verify what they read
    read = manifest["format"] == "packed" or "records" in manifest
    for file in (*manifest.get("records", {}).get("files", []), *manifest["files"]):
        restore = rebuild_command(where, file=file["name"]) if "parts" in manifest else next_step
        sha256 = None if read else file.get("sha256")
        check_file(
            folder,
            name=file["name"],
            size=file["bytes"],
            sha256=sha256,
            what="token store",
            next=restore,
        )
    return manifest


def open_records(where: Path, manifest: dict[str, Any]) -> Records:
    """Open the records files of a `padded` or `token-list` store. Raises UserError if it has
    none.
    """
    if "records" not in manifest:
        next_step = rebuild_command(where)
        raise UserError(
            "the token store has no records files, which are read.", store=where, next=next_step
        )
    return Records(
        folder=resolve_store(where)[0],
        entries=manifest["records"]["files"],
        dtype=np.dtype(manifest["records"]["dtype"]).newbyteorder("<"),
        what="token store",
        rebuild=partial(rebuild_command, where),
        vocabulary_size=manifest["vocabulary_size"],
    )


def load_reader(form: str) -> type:
    """Return the reader class of a store format, called with (store, manifest from
    `open_store`).
    """
    if EXTENSION_NAME.fullmatch(form):
        return load_extension(form, "token_format")
    return resolve_name(FORMATS[form].reader)


def load_writer(form: str) -> Callable[..., dict[str, Any]]:
    """Return the writer of a store format, called with (settings, documents, directory)."""
    if EXTENSION_NAME.fullmatch(form):
        return load_extension(form, "token_format", "writer")
    return resolve_name(FORMATS[form].writer)
