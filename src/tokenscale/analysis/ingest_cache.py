"""What the last ingest of a folder of tables was made of, so that the next one reads only what has changed."""

import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tokenscale.analysis.tables import TABLES
from tokenscale.base.errors import UserError
from tokenscale.base.files import aside, canonical_json, read_json, sha256_text, write_json
from tokenscale.settings.closure import code_of

#: written a row group a run, for they can be large; the others at once
STREAMED = ("steps", "spans")
#: parts of a run's folder that say nothing to a table
NO_LOG = ("checkpoints",)


@cache
def code() -> str:
    """Digest of the code that makes tables, and of the library that writes them."""
    digest = hashlib.sha256(pa.__version__.encode())
    for path in code_of("ingest"):
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def made_of(folder: Path, metadata: Any) -> str:
    """Digest of what is `said` of a run and of the names, sizes and times of its files. None is opened."""
    files = sorted((str(path.relative_to(folder)), *_stamp(path)) for path in _files(folder))
    return sha256_text(canonical_json([metadata, files]))


def stamps(paths: list[Path]) -> str:
    """The same of single files, of which some may not be there."""
    return sha256_text(canonical_json([(str(path), *(_stamp(path) if path.is_file() else ())) for path in paths]))


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in NO_LOG]
        read = (name for name in names if name in ("run.json", "attempt.json") or name.endswith(".jsonl"))
        yield from (Path(root) / name for name in read)


class Kept:
    """Tables of the last ingest, in a folder that nothing else writes; empty where there are none, or of other code."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self._record: dict[str, Any] = {}
        self._small: dict[str, pa.Table] = {}
        self._streamed: dict[str, pq.ParquetFile] = {}
        self._lock = threading.Lock()
        if folder is None or not (folder / "made_of.json").is_file():
            return
        try:
            record = read_json(folder / "made_of.json", "record of the last ingest")
            whole = record["code"] == code() and all(self._size(t) == size for t, size in record["sizes"].items())
        except (UserError, KeyError, TypeError, AttributeError):
            return
        if whole:
            self._record = record

    def _path(self, table: str) -> Path:
        return self.folder / f"{table}.parquet"

    def _size(self, table: str) -> int | None:
        path = self._path(table)
        return path.stat().st_size if path.is_file() else None

    def is_of(self, runs: dict[str, str], others: str) -> bool:
        """Are these tables made of just this?"""
        known = {run_id: run["of"] for run_id, run in self._record.get("runs", {}).items()}
        return bool(self._record) and self._record["others"] == others and known == runs

    def run(self, run_id: str, of: str) -> dict[str, pa.Table] | None:
        """A run's rows of every table, if they were made of this."""
        known = self._record.get("runs", {}).get(run_id)
        if known is None or known["of"] != of:
            return None
        names = [table for table, columns in TABLES.items() if "run_id" in columns]
        with self._lock:
            return {table: self._rows(table, run_id, known["groups"].get(table)) for table in names}

    def _rows(self, table: str, run_id: str, group: int | None) -> pa.Table:
        if table in STREAMED:
            if table not in self._streamed:
                self._streamed[table] = pq.ParquetFile(self._path(table))
            file = self._streamed[table]
            return file.schema_arrow.empty_table() if group is None else file.read_row_group(group)
        if table not in self._small:
            self._small[table] = pq.read_table(self._path(table))
        return self._small[table].filter(pc.field("run_id") == run_id)

    def counts(self) -> dict[str, int]:
        """Rows of every table."""
        return {table: pq.read_metadata(self._path(table)).num_rows for table in TABLES}

    def give(self, output: Path) -> None:
        """Every table as it is to `output`."""
        output.mkdir(parents=True, exist_ok=True)
        for table in TABLES:
            _link(self._path(table), output / f"{table}.parquet")
            os.utime(output / f"{table}.parquet")  # newer than what it was made of, or it would be made again and again

    def take(self, output: Path, runs: dict[str, dict[str, Any]], others: str) -> None:
        """Keep the tables in `output`. `runs`: id → {"of": digest, "groups": table → number of its row group}."""
        for file in self._streamed.values():
            file.close()
        if self.folder is None:
            return
        (self.folder / "made_of.json").unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        for table in TABLES:
            _link(output / f"{table}.parquet", self._path(table))
        sizes = {table: self._size(table) for table in TABLES}
        write_json(self.folder / "made_of.json", {"code": code(), "sizes": sizes, "others": others, "runs": runs})


def _link(source: Path, target: Path) -> None:
    """The same file under another name: a table is never written in place. A copy where links cannot be made."""
    temporary = aside(target)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)
    temporary.unlink(missing_ok=True)  # both were one file already: nothing was renamed
