"""Write a token store in parts; the manifest is written last."""

import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tokenscale import __version__
from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    move_files,
    remove_manifest,
    sha256_file,
    utc_now,
    write_json,
)
from tokenscale.data.records import smallest_dtype
from tokenscale.data.stores.documents import Chunk, DocumentRange, Documents, IdsDigest
from tokenscale.data.stores.manifest import VERSION, SingleFile, build_record_path, write_sealed
from tokenscale.data.tokenizers.base import SPECIAL_TOKEN_POLICY
from tokenscale.settings.data import StoreSettings

#: documents per part, a multiple of the digest's groups; for Parquet formats also the rows per shard
PART_DOCUMENTS = 100_000
ENDINGS = (".parquet", ".bin", ".npy")
#: int64 [V], how often each id occurs in a part
OCCURRENCES = "occurrences.npy"


class PartWriter(Protocol):
    """Writer of one part of a store's documents."""

    def add(self, chunk: Chunk) -> None:
        """Add the next documents."""
        ...

    def close(self) -> "FinishedPart":
        """Finish the files."""
        ...


@dataclass
class FinishedPart:
    """One written part, or all of them: names of the files in the folder, and counts that are summed over parts.

    `records` are the entries of records files. `groups` are the groups of `IdsDigest` of the ids that were read back
    from the files, if the format can do so.
    """

    files: list[str]
    counts: dict[str, int]
    records: list[dict[str, Any]] = field(default_factory=list)
    groups: list[bytes] | None = None


class StoreWriter:
    """Part writer and manifest builder, common to all formats."""

    def __init__(self, store: StoreSettings, documents: Documents, folder: Path, part_documents: int | None):
        self.store, self.documents, self.folder = store, documents, folder
        self.manifest: dict[str, Any] | None = None
        self._part_documents = part_documents or max(1, len(documents))
        self._groups: list[bytes] = []
        #: occurrences of each id in the written parts, int64 [V]
        self.occurrences = np.zeros(documents.origin.vocabulary_size, dtype=np.int64)

    def parts(self, open_part: Callable[[int], PartWriter]) -> FinishedPart:
        """Write all documents with `open_part(number)`, and return the files and counts of all parts."""
        found = FinishedPart([], {})
        for number, first in enumerate(range(0, len(self.documents), self._part_documents)):
            part = self._write_part(open_part(number), first, min(first + self._part_documents, len(self.documents)))
            found.files += part.files
            found.records += part.records
            for name, count in part.counts.items():
                found.counts[name] = found.counts.get(name, 0) + count
        return found

    def finish(
        self,
        names: list[str],
        facts: dict[str, Any],
        hashes: dict[str, str] | None = None,
        checks: str | None = None,
        records: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Build and return the manifest of the files `names`.

        `facts` are the format's counts, including `tokens_stored` and `places` (capacity of all rows in tokens,
        including padding). `hashes` are known SHA-256 hashes. `checks` is the file of checksums with which readers
        verify the largest file block by block instead of hashing it at once. `records` are the entries of records
        files.
        """
        self.documents.confirm()
        origin, digest = self.documents.origin, IdsDigest.combine(self._groups)
        part = self.documents if isinstance(self.documents, DocumentRange) else None
        hashes = dict(hashes or {})
        rest = [name for name in names if name not in hashes]
        with ThreadPoolExecutor(2) as pool:
            hashes |= zip(rest, pool.map(lambda name: sha256_file(self.folder / name), rest), strict=True)
        files: list[dict[str, Any]] = [
            {"name": name, "bytes": (self.folder / name).stat().st_size, "sha256": hashes[name]} for name in names
        ]
        if checks is not None:
            files[0]["checked_by"] = checks
        tokens = int(self.occurrences.sum())
        self.manifest = {
            "schema_version": VERSION,
            "format": self.store.format,
            "options": self.store.options(),
            "split": self.store.split,
            "tokenizer": origin.tokenizer,
            "vocabulary_size": origin.vocabulary_size,
            "bos_id": origin.bos_id,
            "eos_id": origin.eos_id,
            "document_rule": "one BOS, the text" + (", one EOS" if self.store.eos else "; no EOS"),
            "special_token_policy": SPECIAL_TOKEN_POLICY,
            "padding": {"side": "right", "id": origin.pad_id},
            **origin.source,
            "documents": len(self.documents),
            "tokens_in_documents": tokens,
            **facts,
            "fill": round(facts["tokens_stored"] / facts["places"], 6),
            "ids_digest": {"algorithm": IdsDigest.ALGORITHM, "value": digest},
            "bits_per_token": measure_bits(files, self.occurrences),
            "files": files,
        }
        if records:
            dtype = smallest_dtype(origin.vocabulary_size).name
            self.manifest["records"] = {"dtype": dtype, "files": records}
        if part is not None:
            path = self.folder / OCCURRENCES
            np.save(path, self.occurrences)
            self.manifest["part"] = {
                "number": part.number,
                "parts": part.parts,
                "first_document": part.first,
                "groups": [group.hex() for group in self._groups],
                "occurrences": {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)},
            }
        return self.manifest

    def _write_part(self, part: PartWriter, first: int, last: int) -> FinishedPart:
        """Write documents [first, last) as one part. Raises UserError for a failed read-back."""
        digest, count = IdsDigest(), len(self.occurrences)
        for chunk in self.documents.chunks(first, last):
            if chunk.ids.size and not 0 <= chunk.ids.min() <= chunk.ids.max() < count:
                raise ValueError(f"ids outside the vocabulary of {count}")
            digest.add(chunk)
            self.occurrences += np.bincount(chunk.ids, minlength=count)
            part.add(chunk)
        digest.close()
        finished = part.close()
        if finished.groups not in (None, digest.groups):
            raise UserError(
                "a part of the token store is not read back as it was written.",
                files=", ".join(finished.files),
                folder=self.folder,
                next="check the disk and the memory of this machine, and build the store again",
            )
        self._groups += digest.groups
        return finished


def measure_bits(files: list[dict[str, Any]], occurrences: np.ndarray) -> dict[str, float]:
    """Return the bits per token of the files, and the entropy of single ids; `occurrences` of each id, int64 [V]."""
    tokens = int(occurrences.sum())
    shares = occurrences[occurrences > 0] / max(1, tokens)
    return {
        "stored": round(8 * sum(file["bytes"] for file in files) / max(1, tokens), 4),
        "order_0_entropy": round(float(-(shares * np.log2(shares)).sum()), 4),
    }


def list_files(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of all files of a store: Parquet or binary, records, and those of a part."""
    more = [manifest["part"]["occurrences"]] if "part" in manifest else []
    return [*manifest["files"], *manifest.get("records", {}).get("files", []), *more]


@contextmanager
def open_store_writer(
    store: StoreSettings, documents: Documents, directory: Path, single: SingleFile | None = None
) -> Iterator[StoreWriter]:
    """Yield a writer into a temporary folder; on success its files replace the old ones, the manifest last.

    With `single`, the store is one file, written in one part, and other stores in `directory` are not touched. Raises
    UserError if there are no documents.
    """
    directory = Path(directory)
    if len(documents) == 0:
        raise UserError(
            f"the corpus has no {store.split} documents.",
            store=store.directory,
            directory=directory,
            next="use a larger corpus, or a larger corpus.validation_share",
        )
    started = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    folder = directory / (f".{single.name}.building" if single else ".building")
    manifest = directory / (f"{single.name}.manifest.json" if single else "manifest.json")
    shutil.rmtree(folder, ignore_errors=True)  # of a killed writer
    folder.mkdir()
    writer = StoreWriter(store, documents, folder, None if single else PART_DOCUMENTS)
    try:
        yield writer
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if writer.manifest is None:
        raise RuntimeError("a format's writer ended without finish()")
    names = {file["name"] for file in list_files(writer.manifest)}
    remove_manifest(manifest)
    if single is None:
        for path in directory.iterdir():
            if path.suffix in ENDINGS and path.name not in names:
                path.unlink()
        shutil.rmtree(directory / "parts", ignore_errors=True)  # of an earlier store in parts
    move_files(folder, directory, sorted(names))
    shutil.rmtree(folder, ignore_errors=True)
    command = single.command if single else documents.origin.command
    facts = {"command": command} if command else {}
    write_build_record(manifest, time.monotonic() - started, documents.origin.engine, **facts)
    write_sealed(manifest, writer.manifest)


def write_build_record(manifest: Path, duration_s: float | None, engine: str, **facts: Any) -> None:
    """Write the build record of a store: when, where and with which versions it was written, and `facts`."""
    write_json(
        build_record_path(manifest),
        {
            "created_utc": utc_now(),
            "duration_s": duration_s,
            "engine": engine,
            "tokenscale": __version__,
            "python": sys.version,
            "numpy": np.__version__,
            "machine": platform.node(),
            "manifest": manifest.name,
            **facts,
        },
    )
