"""Corpora built in parts: one job for each group of source files, and one job that merges the parts.

A part is a folder `parts/NNNNN` with shards, a manifest and two tables for each split:

- `SPLIT.documents`: `DOCUMENT` [documents], hash and lengths of each document, in order;
- `SPLIT.sorted`: uint64 [BUCKETS + 1], the first row of each bucket, then `SORTED` [documents], the documents by hash.
  A bucket has the hashes with equal first `BUCKET_BITS` bits.

Merging reads the tables, not the texts. It finds documents that occur in several parts, and rewrites only the shards
that lose documents, to `deduplicated/`. The corpus then has the documents, the splits and the `text_sha256` of a corpus
that is built in one part; only the shard boundaries differ. Memory holds the tables of one part, and one group of
buckets of all parts.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    canonical_json,
    check_types,
    move_files,
    read_manifest_file,
    remove_manifest,
    report_malformed,
    sha256_file,
    sha256_text,
    sync_tree,
    write_json,
)
from tokenscale.base.processes import map_processes
from tokenscale.data.corpus.build import (
    SCHEMA,
    SPLITS,
    VERSION,
    Document,
    SplitWriter,
    describe_corpus,
    find_source,
    open_shard,
    summarize_lengths,
    write_build_record,
    write_splits,
)
from tokenscale.data.corpus.files import list_files, too_many_parts_error
from tokenscale.data.corpus.raw_text import check_file, rebuild_command
from tokenscale.data.records import part_folder, remove_other_parts
from tokenscale.settings.data import FILE_LISTS, CorpusSettings
from tokenscale.settings.options import to_dict

#: a document's SHA-256, its characters and its UTF-8 bytes
DOCUMENT = np.dtype([("sha256", "V32"), ("characters", "<u4"), ("utf8_bytes", "<u4")])
#: the first 128 bits of a document's SHA-256, and its number in the split of the part
SORTED = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<u4")])
BUCKET_BITS = 12
BUCKETS = 1 << BUCKET_BITS
#: documents whose hashes are compared at once
COMPARED_DOCUMENTS = 1 << 20


def build_part(
    settings: CorpusSettings,
    number: int,
    directory: Path,
    report: Callable[[int, int], None] | None = None,
    downloads: Path | None = None,
    content: str = "",
) -> dict[str, Any]:
    """Build part `number` of `settings.parts` in `directory`, the folder of the part, and return its manifest.

    Duplicates within the part are dropped. `content` is the fingerprint of the source files at planning, which is
    recorded. Raises UserError as `build.build` does, and for a source file that changes while it is read. A part
    without training documents is allowed, but not one without files.
    """
    started = time.monotonic()
    directory, part = Path(directory), (number, settings.parts)
    source = find_source(settings.source.kind)
    stamps = _list_stamps(settings, part)
    description = source.describe(settings.source, downloads, part)
    if not description.get("files"):
        raise too_many_parts_error(settings, len(source.describe(settings.source, downloads).get("files", [])))
    own = settings.source.has_own_validation
    validation = source.validation_documents(settings.source, downloads, part) if own else None
    documents = source.documents(settings.source, downloads, part)
    building = directory / ".building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        splits: dict[str, SplitWriter] = {name: _PartWriter(building, name, settings.row_group_rows) for name in SPLITS}
        counts = write_splits(splits, settings, documents, validation, report)
        entries = {name: split.close() for name, split in splits.items()}
        if (now := _list_stamps(settings, part)) != stamps:
            raise UserError(
                "a source file changed while it was read.",
                files=", ".join(file["name"] for file in now if file not in stamps) or "the list of files",
                part=directory,
                next="run this command again when the files are complete",
            )
        remove_manifest(directory / "manifest.json")
        for path in directory.iterdir():
            if path.is_file() and path.suffix in (".json", ".parquet", ".documents", ".sorted"):
                path.unlink()
        move_files(building, directory, sorted(path.name for path in building.iterdir()))
    finally:
        shutil.rmtree(building, ignore_errors=True)
    manifest = {
        "schema_version": VERSION,
        "name": settings.name,
        "part": number,
        "parts": settings.parts,
        "settings_sha256": _hash_settings(settings),
        "source": description,
        "documents": counts,
        "splits": entries,
    }
    hashes = {key: {file["name"]: file["sha256"] for file in description.get(key, [])} for key in FILE_LISTS}
    files = [stamp | {"sha256": hashes[stamp["key"]][stamp["name"]]} for stamp in stamps]
    write_build_record(directory, manifest, settings, started, files=files, content=content)
    write_json(directory / "manifest.json", manifest)
    return manifest


def _list_stamps(settings: CorpusSettings, part: tuple[int, int]) -> list[dict[str, Any]]:
    if settings.source.kind != "files":
        return []
    found = []
    for key in FILE_LISTS:
        for name, path in list_files(settings.source, key, part):
            stat = path.stat()
            found.append({"key": key, "name": name, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns})
    return found


class _PartWriter(SplitWriter):
    """Writer of the shards and tables of one split of a part. Holds 40 bytes per document in memory."""

    def __init__(self, directory: Path, name: str, row_group_rows: int):
        super().__init__(directory, name, row_group_rows)
        self._hashes, self._utf8_bytes = bytearray(), np.zeros(1024, dtype="<u4")
        self._documents = 0

    def add(self, document: Document) -> None:
        super().add(document)
        if self._documents == len(self._utf8_bytes):
            self._utf8_bytes = np.concatenate([self._utf8_bytes, np.zeros_like(self._utf8_bytes)])
        self._utf8_bytes[self._documents] = len(document.encoded)
        self._documents += 1
        self._hashes += document.sha256

    def close(self) -> dict[str, Any]:
        entry = super().close()
        table = np.zeros(self._documents, dtype=DOCUMENT)
        table["sha256"] = np.frombuffer(bytes(self._hashes), dtype="V32") if self._hashes else table["sha256"]
        table["characters"] = np.array(self.characters, dtype=np.uint32)
        table["utf8_bytes"] = self._utf8_bytes[: self._documents]
        write_tables(self.directory, self.name, table)
        names = [f"{self.name}.documents", f"{self.name}.sorted"]
        entry["tables"] = [
            {"name": n, "bytes": (self.directory / n).stat().st_size, "sha256": sha256_file(self.directory / n)}
            for n in names
        ]
        return entry


def write_tables(directory: Path, split: str, table: np.ndarray) -> None:
    """Write the two tables of a split from `DOCUMENT` [documents]."""
    table.tofile(directory / f"{split}.documents")
    halves = np.ascontiguousarray(table["sha256"]).view(">u8").reshape(-1, 4)[:, :2].astype("<u8")
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal hashes stay in the order of documents
    found = np.zeros(len(table), dtype=SORTED)
    found["high"], found["low"], found["document"] = halves[order, 0], halves[order, 1], order
    buckets = (found["high"] >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
    first_rows = np.searchsorted(buckets, np.arange(BUCKETS + 1)).astype("<u8")
    with open(directory / f"{split}.sorted", "wb") as file:
        file.write(first_rows.tobytes())
        file.write(found.tobytes())


class SortedTable:
    """Documents of one split of a part, by hash, read one range of buckets at a time."""

    def __init__(self, path: Path):
        self.path = path
        self.first_rows = np.fromfile(path, dtype="<u8", count=BUCKETS + 1).astype(np.int64)

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the documents of buckets [first, last), `SORTED` [n]."""
        start, end = self.first_rows[first], self.first_rows[last]
        if start == end:
            return np.zeros(0, dtype=SORTED)
        offset = (BUCKETS + 1) * 8 + int(start) * SORTED.itemsize
        return np.fromfile(self.path, dtype=SORTED, count=int(end - start), offset=offset)


def find_duplicates(tables: Sequence[SortedTable], folder: Path) -> Iterator[tuple[int, Path]]:
    """Find duplicates of documents in earlier tables, and in earlier rows of the same table.

    Writes the numbers of the documents to drop to a file for each table in `folder`, uint32, in no order, and yields
    (number of the table, file). Memory does not depend on the number of documents: about 60 bytes for each of
    `COMPARED_DOCUMENTS` or for the largest bucket, and 32 KiB for each table.
    """
    sizes = np.zeros(BUCKETS, dtype=np.int64)
    for table in tables:
        sizes += np.diff(table.first_rows)
    files: dict[int, Path] = {}
    first, ends = 0, np.cumsum(sizes)
    while first < BUCKETS:
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + COMPARED_DOCUMENTS, side="right")))
        for number, documents in _compare_buckets(tables, first, last):
            files.setdefault(number, folder / f"{number:05d}.drop")
            with open(files[number], "ab") as file:
                file.write(documents.astype("<u4").tobytes())
        first = last
    yield from sorted(files.items())


def _compare_buckets(tables: Sequence[SortedTable], first: int, last: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (table, documents to drop) of a range of buckets."""
    slices = [table.read(first, last) for table in tables]
    of_table = np.repeat(np.arange(len(tables), dtype=np.uint32), [len(part) for part in slices])
    rows = np.concatenate(slices) if slices else np.zeros(0, dtype=SORTED)
    # stable sorting keeps the order of tables and of documents among equal hashes
    order = np.lexsort((rows["low"], rows["high"]))
    high, low = rows["high"][order], rows["low"][order]
    again = order[1:][(high[1:] == high[:-1]) & (low[1:] == low[:-1])]
    for number in np.unique(of_table[again]).tolist():
        yield number, rows["document"][again[of_table[again] == number]]


def merge_parts(settings: CorpusSettings, directory: Path, processes: int = 1) -> dict[str, Any]:
    """Merge the parts in `directory`, the folder of the corpus, and return the manifest of the corpus.

    Shards that lose documents are written again by `processes` processes. Raises UserError for a missing, changed or
    foreign part, and if there are no training documents.
    """
    started = time.monotonic()
    directory = Path(directory)
    parts = [_read_part(settings, directory, number) for number in range(settings.parts)]
    building = directory / ".building"
    shutil.rmtree(building, ignore_errors=True)
    (building / "deduplicated").mkdir(parents=True)
    try:
        keys = [(split, number) for split in SPLITS for number in range(len(parts))]
        drops: dict[tuple[str, int], Path] = {}
        if settings.cleaning.deduplicate:
            for split, number in keys:
                _check_table(directory, parts[number], split, "sorted")
            tables = [SortedTable(part_folder(directory, number) / f"{split}.sorted") for split, number in keys]
            drops = {keys[table]: path for table, path in find_duplicates(tables, building)}
        merged = {name: _MergedSplit() for name in SPLITS}
        rewrites = []
        for split, number in keys:
            _check_table(directory, parts[number], split, "documents")
            dropped = np.zeros(0, dtype="<u4")
            if (split, number) in drops:
                dropped = np.sort(np.fromfile(drops[split, number], dtype="<u4"))
            table = np.fromfile(part_folder(directory, number) / f"{split}.documents", dtype=DOCUMENT)
            rewrites += merged[split].add(parts[number]["splits"][split], number, table, dropped)
        jobs = [(directory, building, *job) for job in rewrites]
        for entry, written in zip(
            [job[0] for job in rewrites], map_processes(_rewrite_shard, jobs, processes), strict=True
        ):
            entry.update(written)
        counts = {name: sum(part["documents"][name] for part in parts) for name in parts[0]["documents"]}
        dropped_documents = sum(split.dropped for split in merged.values())
        counts["duplicates"] += dropped_documents
        counts["kept"] -= dropped_documents
        splits = {name: split.close() for name, split in merged.items()}
        manifest = describe_corpus(settings, _merge_sources(parts), counts, splits, directory)
        manifest["parts"] = settings.parts
        remove_manifest(directory / "manifest.json")
        shutil.rmtree(directory / "deduplicated", ignore_errors=True)
        if rewrites:
            sync_tree(building / "deduplicated")
            (building / "deduplicated").replace(directory / "deduplicated")
        for path in directory.glob("*.parquet"):  # of an earlier build in one part
            path.unlink()
        remove_other_parts(directory, settings.parts)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    write_build_record(directory, manifest, settings, started, dropped_while_merging=dropped_documents)
    write_json(directory / "manifest.json", manifest)
    return manifest


class _MergedSplit:
    """One split of all parts."""

    def __init__(self) -> None:
        self.rows = self.utf8_bytes = self.dropped = 0
        self._files: list[dict[str, Any]] = []
        self._digest = hashlib.sha256()
        self._lengths, self._counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)

    def add(
        self, split: dict[str, Any], number: int, table: np.ndarray, dropped: np.ndarray
    ) -> list[tuple[dict[str, Any], str, int, np.ndarray]]:
        """Add the split of the next part.

        Returns (entry to complete, name, part, rows to drop) of the shards to write again."""
        kept = np.ones(len(table), dtype=bool)
        kept[dropped] = False
        table = table[kept]
        self._digest.update(np.ascontiguousarray(table["sha256"]).tobytes())
        self.rows += len(table)
        self.dropped += len(dropped)
        self.utf8_bytes += int(table["utf8_bytes"].sum(dtype=np.int64))
        lengths, counts = np.unique(table["characters"].astype(np.int64), return_counts=True)
        self._lengths, inverse = np.unique(np.concatenate([self._lengths, lengths]), return_inverse=True)
        summed = np.zeros(len(self._lengths), dtype=np.int64)
        np.add.at(summed, inverse, np.concatenate([self._counts, counts]))
        self._counts = summed
        rewrites, first = [], 0
        for file in split["files"]:
            bounds = np.searchsorted(dropped, [first, first + file["rows"]])
            entry = {**file, "name": f"{part_folder(Path(), number)}/{file['name']}"}
            if (lost := int(bounds[1] - bounds[0])) == 0:
                self._files.append(entry)
            elif lost < file["rows"]:
                entry["name"] = f"deduplicated/{number:05d}-{file['name']}"
                rewrites.append((entry, file["name"], number, dropped[bounds[0] : bounds[1]].astype(np.int64) - first))
                self._files.append(entry)
            first += file["rows"]
        return rewrites

    def close(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "utf8_bytes": self.utf8_bytes,
            "text_sha256": self._digest.hexdigest(),
            "characters": summarize_lengths(self._lengths, self._counts),
            "files": self._files,
        }


def _rewrite_shard(
    directory: Path, building: Path, entry: dict[str, Any], name: str, number: int, dropped: np.ndarray
) -> dict[str, Any]:
    """Write a shard of a part without some of its rows, and return its rows, bytes and hash."""
    source, target = part_folder(directory, number) / name, building / entry["name"]
    check_file(
        source,
        entry["bytes"],
        entry["sha256"],
        what="corpus",
        next=rebuild_command(part_folder(directory, number)),
        content=True,
    )
    kept = np.ones(entry["rows"], dtype=bool)
    kept[dropped] = False
    file, first = pq.ParquetFile(source, pre_buffer=False), 0
    with open_shard(target) as writer:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, use_threads=False)
            table = table.filter(pa.array(kept[first : first + len(table)])).cast(SCHEMA)
            first += file.metadata.row_group(group).num_rows
            if len(table):
                writer.write_table(table.combine_chunks(), row_group_size=len(table))
    return {"rows": int(kept.sum()), "bytes": target.stat().st_size, "sha256": sha256_file(target)}


def _read_part(settings: CorpusSettings, directory: Path, number: int) -> dict[str, Any]:
    """Read the manifest of a part. Raises UserError for a missing part, or one of another corpus or other settings."""
    path, next = part_folder(directory, number) / "manifest.json", rebuild_command(part_folder(directory, number))
    manifest = read_manifest_file(path, "part of the corpus", VERSION, next, oldest=VERSION)
    with report_malformed(path, "manifest of the part", next):
        check_types(manifest, {"part": int, "parts": int, "documents": dict, "splits": dict, "source": dict})
        facts = [
            ("part", f"{manifest['part']} of {manifest['parts']}", f"{number} of {settings.parts}"),
            ("settings, sha256", manifest["settings_sha256"], _hash_settings(settings)),
        ]
        for name, found, expected in facts:
            if found != expected:
                raise UserError(
                    "a part does not belong to the corpus.",
                    part=path.parent,
                    expected=f"{name}: {expected}",
                    found=f"{name}: {found}",
                    next=next,
                )
        for split in SPLITS:
            for file in manifest["splits"][split]["files"]:
                shard = path.parent / file["name"]
                check_file(shard, file["bytes"], file["sha256"], what="corpus", next=next, content=False)
    return manifest


def _hash_settings(settings: CorpusSettings) -> str:
    return sha256_text(canonical_json(to_dict(settings)))


def _check_table(directory: Path, part: dict[str, Any], split: str, ending: str) -> None:
    (file,) = (file for file in part["splits"][split]["tables"] if file["name"] == f"{split}.{ending}")
    path = part_folder(directory, part["part"]) / file["name"]
    next = rebuild_command(part_folder(directory, part["part"]))
    check_file(path, file["bytes"], file["sha256"], what="corpus", next=next, content=True)


def _merge_sources(parts: list[dict[str, Any]]) -> dict[str, Any]:
    merged = dict(parts[0]["source"])
    for part in parts[1:]:
        facts = {key: value for key, value in part["source"].items() if key not in FILE_LISTS}
        if facts != {key: value for key, value in merged.items() if key not in FILE_LISTS}:
            raise UserError(
                "parts of the corpus come from different versions of the source.",
                parts=f"00000 and {part['part']:05d}",
                next="rm -r the folder `parts` of the corpus, and build it again",
            )
    for key in FILE_LISTS:
        if files := [file for part in parts for file in part["source"].get(key, [])]:
            merged[key] = files
    return merged
