"""Write a token store in parts that survive interruptions; the manifest is written last."""

import json
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
from xxhash import xxh3_128

from tokenscale import __version__
from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    canonical_json,
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
    """One written part: names of its files in the folder, and counts that are summed over parts.

    `records` is the entry of its records file, if it has one. `groups` are the groups of `IdsDigest` of the ids that
    were read back from the files, if the format can do so.
    """

    files: list[str]
    counts: dict[str, int]
    records: dict[str, Any] | None = None
    groups: list[bytes] | None = None


@dataclass
class FinishedParts:
    """Files and total counts of all parts."""

    files: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    resumed: int = 0


class StoreWriter:
    """Part writer and manifest builder, common to all formats."""

    def __init__(self, store: StoreSettings, documents: Documents, folder: Path, part_documents: int | None):
        self.store, self.documents, self.folder = store, documents, folder
        self.manifest: dict[str, Any] | None = None
        self.resumed = 0
        self._part_documents = part_documents or max(1, len(documents))
        self._groups: list[bytes] = []
        #: occurrences of each id in the written parts, int64 [V]
        self.occurrences = np.zeros(documents.origin.vocabulary_size, dtype=np.int64)

    def parts(self, open_part: Callable[[int], PartWriter]) -> FinishedParts:
        """Write all documents with `open_part(number)`, reusing finished parts of an interrupted writer."""
        found = FinishedParts()
        for number, first in enumerate(range(0, len(self.documents), self._part_documents)):
            record = self.folder / f"part-{number:05d}.json"
            facts = self._load_finished_part(record)
            if facts is None:
                last = min(first + self._part_documents, len(self.documents))
                facts = self._write_part(open_part(number), first, last)
                write_json(record, facts)
            else:
                found.resumed += 1
            found.files += facts["names"]
            found.records += [facts["records"]] if facts["records"] else []
            for name, count in facts["counts"].items():
                found.counts[name] = found.counts.get(name, 0) + count
            self._groups += [bytes.fromhex(group) for group in facts["groups"]]
            self.occurrences += np.load(self._occurrences_path(record))
        self.resumed = found.resumed
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

    def _write_part(self, part: PartWriter, first: int, last: int) -> dict[str, Any]:
        """Write documents [first, last) as one part. Returns its record; raises UserError for a failed read-back."""
        digest, occurrences = IdsDigest(), np.zeros_like(self.occurrences)
        for chunk in self.documents.chunks(first, last):
            if chunk.ids.size and not 0 <= chunk.ids.min() <= chunk.ids.max() < len(occurrences):
                raise ValueError(f"ids outside the vocabulary of {len(occurrences)}")
            digest.add(chunk)
            occurrences += np.bincount(chunk.ids, minlength=len(occurrences))
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
        files = finished.files + ([finished.records["name"]] if finished.records else [])
        path = self._occurrences_path(self.folder / f"part-{first // self._part_documents:05d}.json")
        np.save(path, occurrences)
        files.append(path.name)
        return {
            "engine": self.documents.origin.engine,
            "names": finished.files,
            "files": [{"name": name, "xxh3": _xxh3(self.folder / name)} for name in files],
            "records": finished.records,
            "counts": finished.counts,
            "groups": [group.hex() for group in digest.groups],
        }

    def _load_finished_part(self, record: Path) -> dict[str, Any] | None:
        """Return the record of a finished part if its files are unchanged, or None."""
        try:
            facts = json.loads(record.read_text(encoding="utf-8"))
            same = facts["engine"] == self.documents.origin.engine
            same = same and all(_xxh3(self.folder / file["name"]) == file["xxh3"] for file in facts["files"])
        except (OSError, ValueError, KeyError):
            return None
        return facts if same else None

    @staticmethod
    def _occurrences_path(record: Path) -> Path:
        return record.with_suffix(".occurrences.npy")


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

    The temporary folder survives interruptions: the next writer of the same store reuses its finished parts. With
    `single`, the store is one file, written in one part, and other stores in `directory` are not touched. Raises
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
    part_documents = None if single else PART_DOCUMENTS
    _clear_other_plan(folder, _hash_plan(store, documents, part_documents))
    writer = StoreWriter(store, documents, folder, part_documents)
    try:
        yield writer
    except BaseException:
        if single is not None:  # a single part cannot be resumed
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
    write_build_record(manifest, time.monotonic() - started, documents.origin.engine, writer.resumed, **facts)
    write_sealed(manifest, writer.manifest)


def write_build_record(manifest: Path, duration_s: float | None, engine: str, resumed: int, **facts: Any) -> None:
    """Write the build record of a store: when, where and with which versions it was written, and `facts`.

    `duration_s` is null if unknown; `resumed` parts of an interrupted writer were reused."""
    write_json(
        build_record_path(manifest),
        {
            "created_utc": utc_now(),
            "duration_s": duration_s,
            "engine": engine,
            "parts_taken_over": resumed,
            "tokenscale": __version__,
            "python": sys.version,
            "numpy": np.__version__,
            "machine": platform.node(),
            "manifest": manifest.name,
            **facts,
        },
    )


def _hash_plan(store: StoreSettings, documents: Documents, part_documents: int | None) -> str:
    """Hash everything that must be equal to reuse another writer's parts."""
    origin = documents.origin
    plan = {
        "version": VERSION,
        "store": store.directory,
        "part_documents": part_documents,
        "tokenizer": origin.tokenizer,
        "source": origin.source,
        "part": [documents.number, documents.parts] if isinstance(documents, DocumentRange) else None,
    }
    return canonical_json(plan)


def _clear_other_plan(folder: Path, plan: str) -> None:
    """Empty the folder if its parts were written with another plan."""
    note = folder / "plan.json"
    try:
        known = note.read_text(encoding="utf-8")
    except (OSError, ValueError):
        known = None
    if known != plan:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        note.write_text(plan, encoding="utf-8")


def _xxh3(path: Path) -> str:
    digest = xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
