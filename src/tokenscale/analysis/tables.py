"""The typed tables between logs and report: names, columns, Parquet files with equal bytes for
equal logs.

A folder of tables has two manifests with the SHA-256 of every file: of what `ingest` read, and of
what the referee judged by it. Each is written last; every reader checks both.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    LOOK_AT_DISK,
    atomic,
    canonical_json,
    check_types,
    open_file,
    read_record,
    report_malformed,
    sha256_file,
    sha256_text,
    write_sealed,
)
from tokenscale.runs.records.events import FIELDS

MANIFEST = "manifest.json"
#: the manifest of what the referee judged
VERDICT = "validity.json"
#: the experiment's description beside the tables
EXPERIMENT = "experiment.json"

#: steps at the beginning of each attempt that no rate counts (`warmup_steps` of the queries)
WARM_UP_STEPS = 3

#: SQL type → Arrow type
ARROW = {
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "DOUBLE": pa.float64(),
    "VARCHAR": pa.string(),
    "BOOLEAN": pa.bool_(),
}
#: Arrow type → encoding in the files, where a dictionary of the values would be as long as the
#: column
ENCODINGS = {pa.float64(): "BYTE_STREAM_SPLIT", pa.int64(): "DELTA_BINARY_PACKED"}

FILES = ("tables.sql",)
_DEFINED = re.sub(" *--.*", "", (Path(__file__).parent / FILES[0]).read_text(encoding="utf-8"))
#: table → another one, whose log lines it has
LIKE = {"logged": "steps"}
#: table → column → SQL type
TABLES: dict[str, dict[str, str]] = {
    table: dict(re.findall(r"(\w+) ([A-Z]+)", columns)) | FIELDS.get(LIKE.get(table, table), {})
    for table, columns in re.findall(r"CREATE TABLE (\w+) \((.*?)\);", _DEFINED, re.DOTALL)
}
#: the table that the referee writes; and all others
JUDGED = "validity"
RECORDED = tuple(table for table in TABLES if table != JUDGED)

#: the column, and the file, that stores and texts at hand give beside the logs
UNCHECKED = "unchecked"
RECOUNTS = "recounts.parquet"

Row = dict[str, Any]
Tables = dict[str, pa.Table]


def schema(table: str) -> pa.Schema:
    return pa.schema([(name, ARROW[sql]) for name, sql in TABLES[table].items()])


def of_rows(table: str, rows: Iterable[Row]) -> pa.Table:
    """Rows as they are written: every column of the table, null where a row lacks it."""
    columns = schema(table)
    rows = list(rows)
    arrays = [pa.array([row.get(field.name) for row in rows], field.type) for field in columns]
    return pa.Table.from_arrays(arrays, schema=columns)


def split_by_run(rows: Tables, run_ids: Iterable[str]) -> dict[str, Tables]:
    """Return run → its rows by table, which lie together in each."""
    of_run = {name: _split_table(table) for name, table in rows.items()}
    empty = {name: table.slice(0, 0) for name, table in rows.items()}
    return {
        run_id: {name: found.get(run_id, empty[name]) for name, found in of_run.items()}
        for run_id in run_ids
    }


def _split_table(rows: pa.Table) -> dict[str, pa.Table]:
    runs = rows["run_id"].to_pylist()
    first = [place for place, run in enumerate(runs) if not place or runs[place - 1] != run]
    ends = [*first[1:], len(runs)] if first else []
    return {
        runs[begin]: rows.slice(begin, end - begin) for begin, end in zip(first, ends, strict=True)
    }


@contextmanager
def writer(path: Path, table: str) -> Iterator[Callable[[pa.Table], None]]:
    """A function that appends rows (one call, one row group); the file appears whole at the end."""
    columns = schema(table)
    # measured on steps: four times faster to write than dictionaries for everything, and a quarter
    # smaller
    plain = {f.name: ENCODINGS[f.type] for f in columns if f.type in ENCODINGS}
    options = {
        "use_dictionary": [f.name for f in columns if f.name not in plain],
        "column_encoding": plain,
    }
    with (
        atomic(path) as temporary,
        pq.ParquetWriter(
            temporary, columns, compression="zstd", compression_level=1, **options
        ) as out,
    ):

        def add(rows: pa.Table) -> None:
            if len(rows):
                out.write_table(rows, row_group_size=len(rows))

        yield add


def write(path: Path, table: str, rows: Iterable[Row]) -> None:
    with writer(path, table) as add:
        add(of_rows(table, rows))


def column_digest() -> str:
    """Return 16 hex digits that stand for the names and types of all columns of this version."""
    return sha256_text(
        canonical_json({table: list(columns.items()) for table, columns in TABLES.items()})
    )[:16]


def file_names() -> list[str]:
    """Return the names of all files of a folder of tables, without the manifests."""
    return [*recorded_files(), f"{JUDGED}.parquet"]


def recorded_files() -> list[str]:
    """Return the names of the files that `ingest` writes, without the manifest."""
    return [*(f"{table}.parquet" for table in RECORDED), EXPERIMENT]


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder whose recorded files are complete; equal files give equal
    bytes.
    """
    files = [_describe_file(folder / name) for name in recorded_files()]
    write_sealed(folder / MANIFEST, record={"columns": column_digest(), "files": files})


def write_verdict(folder: Path, rows: Iterable[Row], cautions: Sequence[Row]) -> None:
    """Write the table `validity`, and its manifest with the cautions of the design."""
    write(folder / f"{JUDGED}.parquet", table=JUDGED, rows=rows)
    record = {
        "columns": column_digest(),
        "manifest_sha256": sha256_file(folder / MANIFEST),
        "files": [_describe_file(folder / f"{JUDGED}.parquet")],
        "cautions": list(cautions),
    }
    write_sealed(folder / VERDICT, record=record)


def _describe_file(path: Path) -> Row:
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder of tables: `columns`, and `files` with `name`, `bytes` and
    `sha256`.

    Raises UserError for a missing or damaged manifest, and for tables with the columns of another
    version.
    """
    path = folder / MANIFEST
    next_step = restore_command(folder)
    if not path.is_file():
        if not any((folder / name).is_file() for name in recorded_files()):
            raise UserError("there are no tables in this folder.", path=folder, next=next_step)
        reason = "an older version of tokenscale wrote them, or ingest was interrupted"
        raise UserError(
            "the tables have no manifest with their hashes.",
            path=path,
            reason=reason,
            next=next_step,
        )
    manifest = _read_files(path, what="manifest of the tables", next_step=next_step)
    if manifest["columns"] != column_digest():
        what = "the tables have the columns of another version of tokenscale."
        expected = f"columns {column_digest()}"
        raise UserError(
            what,
            path=folder,
            found=f"columns {manifest['columns']}",
            expected=expected,
            next=next_step,
        )
    if [file["name"] for file in manifest["files"]] != recorded_files():
        raise UserError(
            "the manifest does not list the tables of this version.", path=path, next=next_step
        )
    return manifest


def read_verdict(folder: Path) -> dict[str, Any]:
    """Return the manifest of the table `validity`: its `files`, and the `cautions` of the
    design.

    Raises UserError where it is missing or damaged, and where other tables were judged.
    """
    path = folder / VERDICT
    next_step = judge_command(folder)
    if not path.is_file():
        raise UserError("the runs of these tables were not judged.", path=path, next=next_step)
    verdict = _read_files(path, what="record of the judgement", next_step=next_step)
    with report_malformed(path, what="record of the judgement", next=next_step):
        check_types(verdict, fields={"manifest_sha256": str, "cautions": list})
        if [file["name"] for file in verdict["files"]] != [f"{JUDGED}.parquet"]:
            raise ValueError(f"it does not list {JUDGED}.parquet alone")
    if verdict["manifest_sha256"] != sha256_file(folder / MANIFEST):
        raise UserError(
            "the validity in this folder is of other tables.", path=path, next=next_step
        )
    return verdict


def digest(folder: Path) -> str:
    """Return a digest of all that the logs give, and of what was judged by it. Whether stores and
    texts were at hand does not change it.
    """
    files = read_manifest(folder)["files"]
    verdict = read_verdict(folder)
    hashes = {file["name"]: file["sha256"] for file in (*files, *verdict["files"])}
    del hashes[RECOUNTS]
    return sha256_text(canonical_json([hashes, verdict["cautions"]]))


def _read_files(path: Path, what: str, next_step: str) -> dict[str, Any]:
    """Return a record with `columns` and a list of `files`."""
    record = read_record(path, what=what, next=next_step)
    with report_malformed(path, what=what, next=next_step):
        check_types(record, fields={"columns": str, "files": list})
        for file in record["files"]:
            check_types(file, fields={"name": str, "bytes": int, "sha256": str})
    return record


def check(folder: Path, *names: str) -> None:
    """Compare the files with these names (by default all) with the manifests.

    Raises UserError for the first file that is missing, unreadable or not the one that was written,
    and for tables that were not judged.
    """
    check_recorded(folder, *names)
    for file in read_verdict(folder)["files"]:
        if not names or file["name"] in names:
            _check_file(folder / file["name"], size=file["bytes"], sha256=file["sha256"])


def check_recorded(folder: Path, *names: str) -> None:
    """Compare what `ingest` wrote, by default all of it, with its manifest. DuckDB then opens the
    files by their paths. Raises UserError as `check` does.
    """
    for file in read_manifest(folder)["files"]:
        if not names or file["name"] in names:
            _check_file(folder / file["name"], size=file["bytes"], sha256=file["sha256"])


def _check_file(path: Path, size: int, sha256: str) -> None:
    next_step = restore_command(path.parent)
    try:
        with open(open_file(path), "rb") as file:
            there = os.fstat(file.fileno()).st_size
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise UserError("a table is missing.", path=path, next=next_step) from None
    except PermissionError:
        raise UserError(
            "a table may not be read by this user.", path=path, next=f"chmod u+r {path}"
        ) from None
    except OSError as error:
        raise UserError(
            "a table cannot be read.", path=path, reason=error.strerror, next=LOOK_AT_DISK
        ) from None
    except UserError:
        remove = f"rm -r {path} && " if path.is_dir() else ""
        reason = "it is not a regular file"
        raise UserError(
            "a table cannot be read.", path=path, reason=reason, next=remove + next_step
        ) from None
    if (found, there) != (sha256, size):
        expected = f"sha256 {sha256}, {size:,} bytes  ({MANIFEST})"
        now = f"sha256 {found}, {there:,} bytes"
        what = "a table has changed since it was written."
        raise UserError(what, path=path, expected=expected, found=now, next=next_step)


def read_experiment(folder: Path) -> dict[str, Any]:
    """Return the experiment's description that lies beside its tables, with the referee's
    `cautions`. Raises UserError where `check` does.
    """
    return read_description(folder) | {"cautions": read_verdict(folder)["cautions"]}


def read_description(folder: Path) -> dict[str, Any]:
    """Return the experiment's description as `ingest` wrote it."""
    check_recorded(folder, EXPERIMENT)
    return json.loads((folder / EXPERIMENT).read_text(encoding="utf-8"))


def first_difference(path: Path, other: Path) -> str:
    """Name the first row and column in which a table differs from one made again; empty if all rows
    are equal.

    Files with equal rows differ in bytes where other releases of pyarrow wrote them. What was not
    checked is left out: stores and texts may have been at hand then, and not now.
    """
    try:
        found, again = (pq.read_table(file, use_threads=False) for file in (path, other))
    except (OSError, pa.ArrowException) as error:
        return f"it cannot be read: {str(error).splitlines()[0]}"
    if found.schema != again.schema:
        return "its columns are others"
    for column in (name for name in found.column_names if name != UNCHECKED):
        pairs = enumerate(zip(found[column].to_pylist(), again[column].to_pylist(), strict=False))
        for row, (a, b) in pairs:
            if a != b and not (a != a and b != b):
                run = f" of {found['run_id'][row]}" if "run_id" in found.column_names else ""
                return f"row {row + 1:,}{run} has {column} {a!r} where the logs give {b!r}"
    return (
        ""
        if len(found) == len(again)
        else f"{len(found):,} rows where the logs give {len(again):,}"
    )


def restore_command(folder: Path) -> str:
    """Return the command that makes an experiment's tables again from its logs, and judges them."""
    shown = Path(os.path.relpath(folder))
    if shown.parts[:-1] == ("results", "tables"):
        return f"snakemake -f {shown}/runs.parquet {shown}/{JUDGED}.parquet"
    results = shown.parent.parent
    if not (results / "runs").is_dir():
        return "name the tables of an experiment: results/tables/EXPERIMENT"
    table = results / "experiments" / shown.name / "runs.json"
    of = f"--experiment {table} --runs {results / 'runs'}"
    return f"tokenscale ingest {of} --output {shown} && {judge_command(folder)}"


def judge_command(folder: Path) -> str:
    """Return the command that judges an experiment's tables."""
    shown = Path(os.path.relpath(folder))
    if shown.parts[:-1] == ("results", "tables"):
        return f"snakemake -f {shown}/{JUDGED}.parquet"
    results = shown.parent.parent
    table = results / "experiments" / shown.name / "runs.json"
    return f"tokenscale validate --experiment {table} --runs {results / 'runs'} --tables {shown}"
