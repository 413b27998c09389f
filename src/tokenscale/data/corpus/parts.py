"""Corpora built in parts: jobs that build a range of parts, each from its group of source files, and
one job that merges the parts.

A part is a folder `parts/NNNNN` with shards, a manifest and, for each split, the table
`SPLIT.documents` (Parquet, `COLUMNS`): hash and lengths of each document, in order.

Merging reads the tables, not the texts. It finds documents that occur in several parts, and
rewrites only the shards that lose documents, to `deduplicated/`. The corpus then has the documents,
the splits and the `text_sha256` of a corpus that is built in one part; only the shard boundaries
differ. Memory holds the table of one part, and `MEMORY`.
"""

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError, first_line
from tokenscale.base.files import (
    canonical_json,
    check_types,
    read_manifest_file,
    report_malformed,
    sha256_file,
    sha256_text,
    sync,
)
from tokenscale.base.manifests import check_file, open_checked
from tokenscale.base.processes import map_processes
from tokenscale.data.corpus.build import (
    SCHEMA,
    SPLITS,
    VERSION,
    Document,
    Report,
    SplitWriter,
    building_folder,
    describe_corpus,
    describe_split,
    open_shard,
    open_source,
    replace_files,
    write_corpus,
    write_manifest,
)
from tokenscale.data.corpus.files import too_many_parts_error
from tokenscale.data.corpus.raw_text import rebuild_command
from tokenscale.data.parts import part_folder
from tokenscale.settings.data import FILE_LISTS, HELD_OUT_IN_TRAINING, CorpusSettings
from tokenscale.settings.options import to_dict

#: columns of a table of documents, uint64: the SHA-256 of each, in four parts; then its lengths,
#: uint32
HASH = ("high", "low", "third", "fourth")
COLUMNS = [*HASH, "characters", "utf8_bytes"]
#: main memory in which duplicates are found
MEMORY = "1GB"


def build_part(
    settings: CorpusSettings,
    number: int,
    directory: Path,
    report: Report | None = None,
    downloads: Path | None = None,
    content: str = "",
) -> dict[str, Any]:
    """Build part `number` of `settings.parts` in `directory`, the folder of the part, and return
    its manifest.

    Duplicates within the part are dropped. Arguments and errors as of `build.build`. A part without
    training documents is allowed, but not one without files.
    """
    source = open_source(settings, downloads, part=(number, settings.parts))
    if not source.description.get("files"):
        raise too_many_parts_error(
            settings, files=len(open_source(settings, downloads).description.get("files", []))
        )

    def describe(
        own: CorpusSettings, description: dict, counts: dict, splits: dict, directory: Path
    ) -> dict[str, Any]:
        return {
            "schema_version": VERSION,
            "name": settings.name,
            "part": number,
            "parts": settings.parts,
            "settings_sha256": _hash_settings(settings),
            "source": description,
            "documents": counts,
            "splits": splits,
        }

    # recorded without the files of all parts, which the hash of the settings includes
    lists: dict[str, Any] = dict.fromkeys(FILE_LISTS, ())
    own = replace(settings, source=replace(settings.source, **lists))
    return write_corpus(
        source,
        settings=own,
        directory=directory,
        report=report,
        content=content,
        writer=_PartWriter,
        describe=describe,
    )


class _PartWriter(SplitWriter):
    """Writer of the shards and the table of one split of a part. Holds 40 bytes per document in
    memory.
    """

    compares_splits = False  # merging does, of all parts

    def __init__(self, directory: Path, name: str, row_group_rows: int):
        super().__init__(directory, name, row_group_rows)
        self._hashes = bytearray()
        self._characters = array("I")
        self._utf8_bytes = array("I")

    def add(self, document: Document) -> None:
        super().add(document)
        self._hashes += document.sha256
        self._characters.append(len(document.text))
        self._utf8_bytes.append(len(document.encoded))

    def close(self) -> dict[str, Any]:
        hashes = np.frombuffer(self._hashes, dtype=np.uint8).reshape(-1, 32)
        path = self.directory / f"{self.name}.documents"
        write_table(
            path,
            hashes,
            characters=np.array(self._characters, "<u4"),
            utf8_bytes=np.array(self._utf8_bytes, "<u4"),
        )
        table = {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
        return super().close() | {"tables": [table]}


def write_table(
    path: Path, hashes: np.ndarray, characters: np.ndarray, utf8_bytes: np.ndarray
) -> None:
    """Write the table of a split: SHA-256 of each document, uint8 [documents, 32], and its lengths,
    uint32 [documents].

    The hash is stored as four numbers, which are compared faster than bytes.
    """
    numbers = hashes.view(">u8").astype("<u8")
    columns = dict(zip(HASH, numbers.T, strict=True)) | {
        "characters": characters,
        "utf8_bytes": utf8_bytes,
    }
    pq.write_table(
        pa.table({n: np.ascontiguousarray(c) for n, c in columns.items()}),
        path,
        use_dictionary=False,
    )


class Duplicates:
    """Documents of several tables whose text an earlier table, or an earlier row of the same table,
    holds already.

    The first 128 bits of the hashes are compared. DuckDB holds at most `MEMORY` in main memory, the
    rest in `folder`.
    """

    def __init__(self, tables: Iterable[pa.Table], folder: Path, threads: int = 1):
        import duckdb  # only merging needs it

        limits: dict[str, Any] = {"memory_limit": MEMORY, "threads": min(8, threads)}
        limits["temp_directory"] = str(folder / "duckdb")
        self._database = duckdb.connect(config=limits)
        self._folder = folder
        self._error = duckdb.Error
        self._execute("SET enable_progress_bar = false")
        self._execute(
            "CREATE TEMP TABLE hashes (number INTEGER, document BIGINT, high UBIGINT, low UBIGINT)"
        )
        for number, table in enumerate(tables):
            documents = pa.array(np.arange(len(table)))
            self._database.register("part", table.append_column("document", documents))
            query = "INSERT INTO hashes SELECT ?, document, high, low FROM part"
            self._execute(query, parameters=[number])
            self._database.unregister("part")
        query = """CREATE TEMP TABLE dropped AS
            SELECT number, document FROM hashes
            QUALIFY row_number() OVER (PARTITION BY high, low ORDER BY number, document) > 1
            ORDER BY ALL"""
        self._execute(query)

    def _execute(self, query: str, parameters: object = None) -> Any:
        try:
            return self._database.execute(query, parameters)
        except self._error as error:
            what = "duplicates cannot be found."
            next_step = "free space on the disk of this folder, and try again"
            raise UserError(
                what, folder=self._folder, reason=first_line(error), next=next_step
            ) from None

    def read(self, number: int) -> np.ndarray:
        """Return the documents to drop from a table, int64 [n], ascending."""
        query = "SELECT document FROM dropped WHERE number = ? ORDER BY ALL"
        return self._execute(query, parameters=[number]).fetchnumpy()["document"]

    def count_shared(self, first: int) -> int:
        """Return how many distinct hashes of the tables from `first` on are also in a table before
        it.
        """
        query = """SELECT count(*) FROM (
            SELECT 1 FROM hashes GROUP BY high, low
            HAVING min(number) < $first AND max(number) >= $first)"""
        return self._execute(query, parameters={"first": first}).fetchone()[0]


def list_part_files(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of the files of a part."""
    splits = manifest["splits"].values()
    return [file for split in splits for file in (*split["files"], *split["tables"])]


def merge_parts(settings: CorpusSettings, directory: Path, processes: int = 1) -> dict[str, Any]:
    """Merge the parts in `directory`, the folder of the corpus, and return the manifest of the
    corpus.

    Shards that lose documents are written again by `processes` processes. Raises UserError for a
    missing, changed or foreign part, and if there are no training documents.
    """
    started = time.monotonic()
    directory = Path(directory)
    parts = [_read_part(settings, directory, number=number) for number in range(settings.parts)]
    of_splits = {split: [part["splits"][split] for part in parts] for split in SPLITS}
    tables = [
        partial(_read_table, part_folder(directory, number), split["tables"][0])
        for splits in of_splits.values()
        for number, split in enumerate(splits)
    ]
    counts = {
        name: sum(part["documents"][name] for part in parts) for name in parts[0]["documents"]
    }
    own = settings.source.has_own_validation
    deduplicate = settings.cleaning.deduplicate
    with building_folder(directory) as building:
        (building / "deduplicated").mkdir()
        dropped: Iterable[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(tables)
        if deduplicate or own:
            hashes = (read(HASH[:2]) for read in tables)
            duplicates = Duplicates(tables=hashes, folder=building, threads=processes)
            if own and (shared := duplicates.count_shared(len(parts))):
                counts[HELD_OUT_IN_TRAINING] = shared
            if deduplicate:
                dropped = map(duplicates.read, range(len(tables)))
        rewrites: list[_Rewrite] = []
        given = zip(tables, dropped, strict=True)
        splits = {
            name: _merge_split(of_parts, given, rewrites=rewrites)
            for name, of_parts in of_splits.items()
        }
        jobs = [(directory, building, *job) for job in rewrites]
        for job, written in zip(
            rewrites, map_processes(_rewrite_shard, jobs, processes=processes), strict=True
        ):
            job.entry.update(written)
        lost = counts["kept"] - sum(split["rows"] for split in splits.values())
        counts["duplicates"] += lost
        counts["kept"] -= lost
        manifest = describe_corpus(
            settings,
            description=_merge_sources(parts),
            counts=counts,
            splits=splits,
            directory=directory,
        )
        manifest["parts"] = settings.parts
        for job in rewrites:  # `replace_files` writes the folder with their names
            sync(building / job.entry["name"])
        replace_files(
            building,
            directory,
            names=["deduplicated"] if rewrites else [],
            parts=settings.parts,
        )
    write_manifest(
        directory,
        manifest,
        settings=settings,
        started=started,
        dropped_while_merging=lost,
    )
    return manifest


class _Rewrite(NamedTuple):
    """A shard that loses documents: its entry, to be completed, its name in a part, and its rows to
    drop.
    """

    entry: dict[str, Any]
    name: str
    number: int
    dropped: np.ndarray


def _read_table(folder: Path, entry: dict[str, Any], columns: Sequence[str] = COLUMNS) -> pa.Table:
    """Return columns of the table of a part's split, uint64 and uint32 [documents]. Raises UserError
    for a missing or changed table.
    """
    opened = open_checked(
        folder,
        name=entry["name"],
        size=entry["bytes"],
        sha256=entry["sha256"],
        what="corpus",
        next=rebuild_command(folder),
    )
    with opened as table:
        return pq.read_table(table, columns=[*columns])


def _merge_split(
    parts: list[dict[str, Any]],
    given: Iterator[tuple[Callable[[], pa.Table], np.ndarray]],
    rewrites: list[_Rewrite],
) -> dict[str, Any]:
    """Return the entry of one split of all parts, and add the shards to write again to `rewrites`.

    `given` yields how to read the table of each part, and its documents to drop, int64 [n],
    ascending.
    """
    digest = hashlib.sha256()
    lengths = Counter[int]()
    files = list[dict[str, Any]]()
    rows = 0
    utf8_bytes = 0
    for number, split in enumerate(parts):
        read_table, lost = next(given)
        columns = {n: c.to_numpy() for n, c in zip(COLUMNS, read_table().columns, strict=True)}
        kept = np.delete(np.arange(len(columns["high"])), lost)
        digest.update(
            np.stack([columns[name][kept] for name in HASH], axis=1).astype(">u8").tobytes()
        )
        rows += len(kept)
        utf8_bytes += int(columns["utf8_bytes"][kept].sum(dtype=np.int64))
        distinct, times = np.unique(columns["characters"][kept], return_counts=True)
        lengths.update(dict(zip(distinct.tolist(), times.tolist(), strict=True)))
        first = 0
        for file in split["files"]:
            begin, end = np.searchsorted(lost, [first, first + file["rows"]])
            entry = {**file, "name": f"{part_folder(Path(), number)}/{file['name']}"}
            if begin < end < begin + file["rows"]:
                entry["name"] = f"deduplicated/{number:05d}-{file['name']}"
                rewrites.append(
                    _Rewrite(
                        entry=entry,
                        name=file["name"],
                        number=number,
                        dropped=lost[begin:end] - first,
                    )
                )
            if end < begin + file["rows"]:
                files.append(entry)
            first += file["rows"]
    return describe_split(
        rows,
        utf8_bytes,
        text_sha256=digest.hexdigest(),
        lengths=lengths,
        files=files,
    )


def _rewrite_shard(
    directory: Path,
    building: Path,
    entry: dict[str, Any],
    name: str,
    number: int,
    dropped: np.ndarray,
) -> dict[str, Any]:
    """Write a shard of a part without some of its rows, and return its rows, bytes and hash."""
    folder = part_folder(directory, number)
    target = building / entry["name"]
    kept = np.ones(entry["rows"], dtype=bool)
    kept[dropped] = False
    first = 0
    source = open_checked(
        folder,
        name=name,
        size=entry["bytes"],
        sha256=entry["sha256"],
        what="corpus",
        next=rebuild_command(folder),
    )
    with source as opened, open_shard(target) as writer:
        file = pq.ParquetFile(opened, pre_buffer=False)
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, use_threads=False)
            table = table.filter(pa.array(kept[first : first + len(table)])).cast(SCHEMA)
            first += file.metadata.row_group(group).num_rows
            if len(table):
                writer.write_table(table.combine_chunks(), row_group_size=len(table))
    return {"rows": int(kept.sum()), "bytes": target.stat().st_size, "sha256": sha256_file(target)}


def _read_part(settings: CorpusSettings, directory: Path, number: int) -> dict[str, Any]:
    """Read the manifest of a part. Raises UserError for a missing part, or one of another corpus or
    other settings.
    """
    path = part_folder(directory, number) / "manifest.json"
    next_step = rebuild_command(part_folder(directory, number))
    manifest = read_manifest_file(
        path,
        what="part of the corpus",
        newest=VERSION,
        next=next_step,
        oldest=VERSION,
    )
    with report_malformed(path, what="manifest of the part", next=next_step):
        check_types(
            manifest,
            fields={"part": int, "parts": int, "documents": dict, "splits": dict, "source": dict},
        )
        facts = [
            ("part", f"{manifest['part']} of {manifest['parts']}", f"{number} of {settings.parts}"),
            ("settings, sha256", manifest["settings_sha256"], _hash_settings(settings)),
        ]
        for name, found, expected in facts:
            if found != expected:
                what = "a part does not belong to the corpus."
                wanted = f"{name}: {expected}"
                raise UserError(
                    what,
                    part=path.parent,
                    expected=wanted,
                    found=f"{name}: {found}",
                    next=next_step,
                )
        for file in list_part_files(manifest):  # their readers compare the hashes
            check_file(
                path.parent,
                name=file["name"],
                size=file["bytes"],
                what="corpus",
                next=next_step,
            )
    return manifest


def _hash_settings(settings: CorpusSettings) -> str:
    return sha256_text(canonical_json(to_dict(settings)))


def _merge_sources(parts: list[dict[str, Any]]) -> dict[str, Any]:
    facts = [{k: v for k, v in part["source"].items() if k not in FILE_LISTS} for part in parts]
    for number, found in enumerate(facts):
        if found != facts[0]:
            what = "parts of the corpus come from different versions of the source."
            next_step = "rm -r the folder `parts` of the corpus, and build it again"
            raise UserError(what, parts=f"00000 and {number:05d}", next=next_step)
    lists = {
        key: [file for part in parts for file in part["source"].get(key, [])] for key in FILE_LISTS
    }
    return facts[0] | {key: files for key, files in lists.items() if files}
