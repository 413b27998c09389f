"""An archive → a `packed` store, the same byte for byte as from the text, without tokenizer or text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenscale.errors import UserError
from tokenscale.formats import packed
from tokenscale.formats.archive import ArchiveDocuments
from tokenscale.formats.manifest import open_store
from tokenscale.settings.data import StoreSettings


def unpack(
    archive: Path, sequence_length: int, directory: Path, report: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Write the store to `directory` and return its manifest.

    `archive` is its folder or its manifest; `report(documents, bytes of ids)` hears of each block. Raises UserError for
    an archive that is not what its manifest says, in which case no store is written.
    """
    documents = ArchiveDocuments(archive, report)
    return packed.write(_store(documents, sequence_length), documents, directory)


def unpack_once(
    archive: Path, sequence_length: int, folder: Path, report: Callable[[int, int], None] | None = None
) -> tuple[Path, bool]:
    """(The manifest of a store in `folder`, named by its options, that holds this archive; whether it was made now.)

    For the disk of a node, where a job before may have left it.
    """
    documents = ArchiveDocuments(archive, report)
    store = _store(documents, sequence_length)
    directory = Path(folder) / store.directory
    made = not _holds(directory, store, documents.manifest)
    if made:
        packed.write(store, documents, directory)
    return directory / "manifest.json", made


def _store(documents: ArchiveDocuments, sequence_length: int) -> StoreSettings:
    if sequence_length < 1:
        raise UserError(f"{sequence_length} is no sequence length.", next="--sequence-length 1024, for example")
    of = documents.settings
    return StoreSettings("packed", split=of.split, sequence_length=sequence_length, eos=of.eos)


def _holds(directory: Path, store: StoreSettings, archive: dict[str, Any]) -> bool:
    """Whether the store is there, whole, with the archive's ids and origin."""
    try:
        found = open_store(directory, store)
    except UserError:
        return False
    return all(found.get(key) == archive[key] for key in ("ids_digest", "tokenizer", *archive["origin"]["source"]))
