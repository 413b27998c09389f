"""Corpora built in parts: one job for each group of source files, and one job that merges the parts.

A part is a folder `parts/NNNNN` with shards, a manifest and, for each split, the table `SPLIT.documents` (Parquet,
`COLUMNS`): hash and lengths of each document, in order.

Merging reads the tables, not the texts. It finds documents that occur in several parts, and rewrites only the shards
that lose documents, to `deduplicated/`. The corpus then has the documents, the splits and the `text_sha256` of a corpus
that is built in one part; only the shard boundaries differ. Memory holds the table of one part, and `MEMORY`.
"""

import glob
import hashlib
import shutil
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError, first_line
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
)
from tokenscale.base.processes import map_processes
from tokenscale.data.corpus.build import (
    SCHEMA,
    SPLITS,
    VERSION,
    Document,
    SourceFiles,
    SplitWriter,
    building_folder,
    describe_corpus,
    open_shard,
    open_source,
    summarize_lengths,
    write_manifest,
    write_splits,
)
from tokenscale.data.corpus.files import too_many_parts_error
from tokenscale.data.corpus.raw_text import check_file, rebuild_command
from tokenscale.data.records import part_folder, remove_other_parts
from tokenscale.settings.data import FILE_LISTS, HELD_OUT_IN_TRAINING, CorpusSettings
from tokenscale.settings.options import to_dict

#: columns of a table of documents, uint64: the SHA-256 of each, in four parts; then its lengths, uint32
HASH = ("high", "low", "third", "fourth")
COLUMNS = [*HASH, "characters", "utf8_bytes"]
#: main memory in which duplicates are found
MEMORY = "1GB"


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
    sources = SourceFiles(settings, part)
    description, documents, validation = open_source(settings, downloads, part)
    if not description.get("files"):
        raise too_many_parts_error(settings, len(open_source(settings, downloads)[0].get("files", [])))
    with building_folder(directory) as building:
        counts, entries = write_splits(_PartWriter, building, settings, documents, validation, report)
        facts = {"files": sources.describe(description), "content": content}
        remove_manifest(directory / "manifest.json")
        for path in directory.iterdir():
            if path.is_file() and path.suffix in (".json", ".parquet", ".documents"):
                path.unlink()
        move_files(building, directory, sorted(path.name for path in building.iterdir()))
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
    # without the files of all parts, which the hash of the settings includes
    lists: dict[str, Any] = dict.fromkeys(FILE_LISTS, ())
    own = replace(settings, source=replace(settings.source, **lists))
    write_manifest(directory, manifest, own, started, **facts)
    return manifest


class _PartWriter(SplitWriter):
    """Writer of the shards and the table of one split of a part. Holds 40 bytes per document in memory."""

    compares_splits = False  # merging does, of all parts

    def __init__(self, directory: Path, name: str, row_group_rows: int):
        super().__init__(directory, name, row_group_rows)
        self._hashes, self._utf8_bytes = bytearray(), array("I")

    def add(self, document: Document) -> None:
        super().add(document)
        self._hashes += document.sha256
        self._utf8_bytes.append(len(document.encoded))

    def close(self) -> dict[str, Any]:
        hashes = np.frombuffer(self._hashes, dtype=np.uint8).reshape(-1, 32)
        path = self.directory / f"{self.name}.documents"
        write_table(path, hashes, np.array(self.characters, "<u4"), np.array(self._utf8_bytes, "<u4"))
        table = {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
        return super().close() | {"tables": [table]}


def write_table(path: Path, hashes: np.ndarray, characters: np.ndarray, utf8_bytes: np.ndarray) -> None:
    """Write the table of a split: SHA-256 of each document, uint8 [documents, 32], and its lengths, uint32 [documents].

    The hash is stored as four numbers, which are compared faster than bytes.
    """
    numbers = hashes.view(">u8").astype("<u8")
    columns = dict(zip(HASH, numbers.T, strict=True)) | {"characters": characters, "utf8_bytes": utf8_bytes}
    pq.write_table(pa.table({n: np.ascontiguousarray(c) for n, c in columns.items()}), path, use_dictionary=False)


class Duplicates:
    """Documents of several tables whose text an earlier table, or an earlier row of the same table, holds already.

    The first 128 bits of the hashes are compared. DuckDB holds at most `MEMORY` in main memory, the rest in `folder`.
    """

    def __init__(self, tables: Sequence[Path], folder: Path, threads: int = 1):
        import duckdb  # only merging needs it

        limits: dict[str, Any] = {
            "memory_limit": MEMORY,
            "temp_directory": str(folder / "duckdb"),
            "threads": min(8, threads),
        }
        self._database, self._folder, self._error = duckdb.connect(config=limits), folder, duckdb.Error
        self._execute("SET enable_progress_bar = false")
        self._execute("SET VARIABLE tables = ?", [[glob.escape(str(table)) for table in tables]])
        self._execute(
            """CREATE TEMP TABLE dropped AS
            SELECT file_index AS number, file_row_number AS document
            FROM read_parquet(getvariable('tables'), file_row_number = true)
            QUALIFY row_number() OVER (PARTITION BY high, low ORDER BY file_index, file_row_number) > 1
            ORDER BY ALL"""
        )

    def _execute(self, query: str, parameters: Any = None) -> Any:
        try:
            return self._database.execute(query, parameters)
        except self._error as error:
            what, next = "duplicates cannot be found.", "free space on the disk of this folder, and try again"
            raise UserError(what, folder=self._folder, reason=first_line(error), next=next) from None

    def read(self, number: int) -> np.ndarray:
        """Return the documents to drop from a table, int64 [n], ascending."""
        query = "SELECT document FROM dropped WHERE number = ? ORDER BY ALL"
        return self._execute(query, [number]).fetchnumpy()["document"]

    def count_shared(self, first: int) -> int:
        """Return how many distinct hashes of the tables from `first` on are also in a table before it."""
        query = """SELECT count(*) FROM (
            SELECT 1 FROM read_parquet(getvariable('tables')) GROUP BY high, low
            HAVING min(file_index) < $first AND max(file_index) >= $first)"""
        return self._execute(query, {"first": first}).fetchone()[0]


def merge_parts(settings: CorpusSettings, directory: Path, processes: int = 1) -> dict[str, Any]:
    """Merge the parts in `directory`, the folder of the corpus, and return the manifest of the corpus.

    Shards that lose documents are written again by `processes` processes. Raises UserError for a missing, changed or
    foreign part, and if there are no training documents.
    """
    started = time.monotonic()
    directory = Path(directory)
    parts = [_read_part(settings, directory, number) for number in range(settings.parts)]
    with building_folder(directory) as building:
        (building / "deduplicated").mkdir()
        keys = [(split, number) for split in SPLITS for number in range(len(parts))]
        tables = [_check_table(directory, parts[number], split) for split, number in keys]
        counts = {name: sum(part["documents"][name] for part in parts) for name in parts[0]["documents"]}
        own = settings.source.has_own_validation
        duplicates = Duplicates(tables, building, processes) if settings.cleaning.deduplicate or own else None
        if own and (shared := duplicates.count_shared(len(parts))):
            counts[HELD_OUT_IN_TRAINING] = shared
        merged = {name: _MergedSplit() for name in SPLITS}
        rewrites = []
        for table, (split, number) in enumerate(keys):
            dropped = duplicates.read(table) if settings.cleaning.deduplicate else np.zeros(0, dtype=np.int64)
            rewrites += merged[split].add(parts[number]["splits"][split], number, tables[table], dropped)
        jobs = [(directory, building, *job) for job in rewrites]
        for job, written in zip(rewrites, map_processes(_rewrite_shard, jobs, processes), strict=True):
            job[0].update(written)
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
    write_manifest(directory, manifest, settings, started, dropped_while_merging=dropped_documents)
    return manifest


class _MergedSplit:
    """One split of all parts."""

    def __init__(self) -> None:
        self.rows = self.utf8_bytes = self.dropped = 0
        self._files: list[dict[str, Any]] = []
        self._digest = hashlib.sha256()
        self._lengths, self._counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)

    def add(
        self, split: dict[str, Any], number: int, table: Path, dropped: np.ndarray
    ) -> list[tuple[dict[str, Any], str, int, np.ndarray]]:
        """Add the split of the next part.

        Returns (entry to complete, name, part, rows to drop) of the shards to write again."""
        columns = {n: c.to_numpy() for n, c in zip(COLUMNS, pq.read_table(table, columns=COLUMNS).columns, strict=True)}
        kept = np.ones(len(columns["high"]), dtype=bool)
        kept[dropped] = False
        self._digest.update(np.stack([columns[name][kept] for name in HASH], axis=1).astype(">u8").tobytes())
        self.rows += int(kept.sum())
        self.dropped += len(dropped)
        self.utf8_bytes += int(columns["utf8_bytes"][kept].sum(dtype=np.int64))
        lengths, counts = np.unique(columns["characters"][kept].astype(np.int64), return_counts=True)
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
                rewrites.append((entry, file["name"], number, dropped[bounds[0] : bounds[1]] - first))
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
    next = rebuild_command(part_folder(directory, number))
    check_file(source, entry["bytes"], entry["sha256"], what="corpus", next=next, content=True)
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
                what, wanted = "a part does not belong to the corpus.", f"{name}: {expected}"
                raise UserError(what, part=path.parent, expected=wanted, found=f"{name}: {found}", next=next)
        for split in SPLITS:
            for file in manifest["splits"][split]["files"]:
                shard = path.parent / file["name"]
                check_file(shard, file["bytes"], file["sha256"], what="corpus", next=next, content=False)
    return manifest


def _hash_settings(settings: CorpusSettings) -> str:
    return sha256_text(canonical_json(to_dict(settings)))


def _check_table(directory: Path, part: dict[str, Any], split: str) -> Path:
    """Return the path of a part's table. Raises UserError if its content has changed."""
    (file,) = part["splits"][split]["tables"]
    folder = part_folder(directory, part["part"])
    next = rebuild_command(folder)
    check_file(folder / file["name"], file["bytes"], file["sha256"], what="corpus", next=next, content=True)
    return folder / file["name"]


def _merge_sources(parts: list[dict[str, Any]]) -> dict[str, Any]:
    merged = dict(parts[0]["source"])
    for part in parts[1:]:
        facts = {key: value for key, value in part["source"].items() if key not in FILE_LISTS}
        if facts != {key: value for key, value in merged.items() if key not in FILE_LISTS}:
            what = "parts of the corpus come from different versions of the source."
            next = "rm -r the folder `parts` of the corpus, and build it again"
            raise UserError(what, parts=f"00000 and {part['part']:05d}", next=next)
    for key in FILE_LISTS:
        if files := [file for part in parts for file in part["source"].get(key, [])]:
            merged[key] = files
    return merged
