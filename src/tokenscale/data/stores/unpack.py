"""Unpack an archive into a `packed` store, byte-identical to the store written from the text."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import lock_folder
from tokenscale.data.stores import packed
from tokenscale.data.stores.archive import ArchiveDocuments
from tokenscale.data.stores.manifest import open_store
from tokenscale.settings.data import StoreSettings

Report = Callable[[int, int], None]


def unpack(archive: Path, store: StoreSettings, directory: Path, report: Report | None = None) -> dict[str, Any]:
    """Write the packed store to `directory` and return its manifest.

    `archive` is its folder or its manifest; `report(documents, bytes of ids)` is called for each block. Raises
    UserError for an archive of other documents and for a changed archive; no store is written then.
    """
    return packed.write(store, _open_archive(archive, store, report), directory)


def unpack_once(archive: Path, store: StoreSettings, folder: Path, report: Report | None = None) -> tuple[Path, bool]:
    """Unpack into `folder` unless an earlier job has done so. Returns (manifest of the store, whether it was unpacked).

    For the local disk of a node. Waits for another process that is unpacking. Raises as `unpack` does.
    """
    documents = _open_archive(archive, store, report)
    words = ["--archive", archive, "--store", store.directory, "--local-disk", folder]
    command = shlex.join(["python", "-m", "tokenscale", "unpack", *map(str, words)])
    documents.origin = replace(documents.origin, command=command)
    directory = Path(folder) / store.directory
    with lock_folder(directory, f"the store {store.directory}", wait=True):
        made = not _is_unpacked(directory, store, documents.manifest)
        if made:
            packed.write(store, documents, directory)
    return directory / "manifest.json", made


def _open_archive(archive: Path, store: StoreSettings, report: Report | None) -> ArchiveDocuments:
    documents = ArchiveDocuments(archive, report)
    found = replace(documents.settings, level=store.archive.level)
    if store.format != "packed" or found != store.archive:
        raise UserError(
            f"{store.directory} cannot be made from this archive.",
            archive=archive,
            expected=f"{store.archive.directory}  (for a packed store)",
            found=found.directory,
            next="use another archive, or a packed store with the archive's split and eos",
        )
    return documents


def _is_unpacked(directory: Path, store: StoreSettings, archive: dict[str, Any]) -> bool:
    """Return whether the store is complete and has the archive's ids and origin."""
    try:
        found = open_store(directory, store)
    except UserError:
        return False
    return all(found.get(key) == archive[key] for key in ("ids_digest", "tokenizer", *archive["origin"]["source"]))
