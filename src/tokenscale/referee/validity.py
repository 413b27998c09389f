"""Judge an experiment's runs from its tables alone, those of other programs included: validity,
reasons, cautions, and values that were not checked.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.analysis import tables
from tokenscale.analysis.recount import Recount, decode
from tokenscale.analysis.run_contents import RunContents, order_as_logged
from tokenscale.analysis.run_record import (
    MALFORMED,
    RunRecord,
    describe_trouble,
    read_settings,
)
from tokenscale.analysis.run_table import find_gaps, read_run_table
from tokenscale.analysis.steps import Steps
from tokenscale.base.errors import UserError
from tokenscale.base.files import check_types, read_record, report_malformed, write_sealed
from tokenscale.referee import clocks, run_values, stated_flops, steadiness  # noqa: F401  # they register
from tokenscale.referee.design import find_cautions
from tokenscale.referee.expectations import Evidence, Findings, judge
from tokenscale.referee.siblings import Siblings, find_copied_logs
from tokenscale.settings.closure import hash_closure

Row = dict[str, Any]

#: tables with one row group a run; and the others that a run is judged by
LARGE = ("steps", "logged", "spans", "records", "recounts")
SMALL = ("events", "attempts")
#: bytes of row groups that are read at once
CHUNK = 1 << 26
#: file of the findings of earlier calls
KEPT = "validity.json"


def judge_tables(
    folder: Path,
    experiment: Path,
    *,
    runs: Path | None = None,
    stores: Sequence[Path] = (),
    corpora: Sequence[Path] = (),
    kept: Path | None = None,
) -> list[Row]:
    """Judge the runs of a folder of tables and write the table `validity`; return its rows.

    `experiment` is the run table, `stores` and `corpora` are manifests: by these the design is
    judged, and by the folder `runs` whether the run table lists all runs of its cells. Findings of
    an earlier call are taken from the folder `kept` where the run's tables and the code that judges
    are the same. Raises UserError for tables that are missing or damaged.
    """
    tables.check_recorded(folder)
    rows = pq.read_table(folder / "runs.parquet").to_pylist()
    before = KeptFindings(kept)
    table = read_run_table(experiment)
    siblings = Siblings(find_gaps(table, path=experiment, runs=runs))
    findings: dict[str, Findings | None] = {}
    for row, (run_id, parts) in zip(rows, _read_runs(folder, rows), strict=True):
        siblings.add(run_id, parts["steps"], parts["events"])
        make = partial(_judge_tables_of_run, folder, row, parts)
        findings[run_id] = before.read(row, parts, make=make)
    before.write()
    others = pq.read_table(folder / "stores.parquet").to_pylist()
    verdicts = siblings.judge(rows, found=findings, stores=others)
    lengths = {row["run_id"]: (row["steps_seen"] or 0) + (row["resumed_at"] or 0) for row in rows}
    cautions = find_cautions(table, stores, corpora, steps=lengths)
    tables.write_verdict(folder, verdicts, cautions=cautions)
    return verdicts


class KeptFindings:
    """Findings of each run from its own tables, kept in a file of the folder. A file that is missing
    or damaged holds none.
    """

    def __init__(self, folder: Path | None):
        self._path = None if folder is None else folder / KEPT
        self._code = hash_closure(__name__)
        self._before: dict[str, Any] = {}
        self._now: dict[str, Any] = {}
        if self._path is not None and self._path.is_file():
            try:
                self._before = read_record(self._path, what="kept findings")
            except UserError:
                return

    def read(
        self, row: Row, parts: Mapping[str, pa.Table], make: Callable[[], Findings | None]
    ) -> Findings | None:
        """Return the findings of a run: the kept ones, or those that `make` returns; None of a run
        without a record.
        """
        key = ""
        if self._path is not None:
            key = _hash(self._code, row, parts)
            kept = self._before.get(row["run_id"])
            if isinstance(kept, dict) and kept.get("key") == key:
                self._now[row["run_id"]] = kept
                return Findings.decode(kept["findings"])
        found = make()
        if found is not None:
            self._now[row["run_id"]] = {"key": key, "findings": found.encode()}
        return found

    def write(self) -> None:
        """Keep the findings of the runs that were read, and no others."""
        if self._path is not None:
            write_sealed(self._path, record=self._now)


def _hash(code: Mapping[str, str], row: Row, parts: Mapping[str, pa.Table]) -> str:
    """Return a digest of the code that judges and of a run's tables."""
    digest = hashlib.sha256(json.dumps([sorted(code.items()), row], sort_keys=True).encode())
    for name, rows in sorted(parts.items()):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as out:
            out.write_table(rows)
        digest.update(name.encode() + sink.getvalue())
    return digest.hexdigest()


def _judge_tables_of_run(folder: Path, row: Row, parts: Mapping[str, pa.Table]) -> Findings | None:
    """Return the findings of a run from its rows of the tables in a folder."""
    with report_malformed(
        folder / "records.parquet",
        what=f"record of the run {row['run_id']} in the tables",
        next=tables.restore_command(folder),
    ):
        entry, contents = read_evidence(row, parts)
    return judge_run(row, entry, contents)


def read_evidence(row: Row, parts: Mapping[str, pa.Table]) -> tuple[Row, RunContents]:
    """Return a run's entry in the run table, and what its folder gave, from its tables."""
    (record,) = parts["records"].to_pylist()
    values = {name: json.loads(record[name]) for name in ("entry", "record", "hashes", "changed")}
    check_types(values, fields={"entry": dict, "hashes": dict, "changed": list})
    steps = parts["steps"]
    logged = parts["logged"]
    recounts = parts["recounts"]
    contents = RunContents(
        found=RunRecord(values["record"], sealed=bool(row["sealed"]), trouble=record["trouble"]),
        columns={},
        parts={
            "raw": logged if len(logged) else order_as_logged(steps),
            **{name: parts[name] for name in ("steps", "spans", "events", "attempts")},
        },
        hashes=values["hashes"],
        changed=tuple(values["changed"]),
        recount=decode(json.loads(recounts["recount"][0].as_py()), rows=recounts.slice(1)),
    )
    return values["entry"], contents


def judge_run(row: Row, entry: Row, contents: RunContents) -> Findings | None:
    """Return the findings of a run with this row of the table `runs`; None of a run without a
    record. A record of another program may hold anything: where the checks fail on it, it counts as
    not readable.
    """
    found = contents.found
    if found.record is None and not found.trouble:
        return None
    try:
        return judge(_build_evidence(row, entry, contents))
    except MALFORMED as error:
        if found.record is None:
            raise
        unreadable = found._replace(record=None, trouble=describe_trouble(error), sealed=False)
        row = row | {"status": "unreadable", "sealed": False}
        return judge(_build_evidence(row, entry, replace(contents, found=unreadable)))


def _build_evidence(row: Row, entry: Row, contents: RunContents) -> Evidence:
    record = contents.found.record or {}
    run = None if row["external"] else read_settings(record.get("run"))
    raw = contents.parts["raw"]
    folders = {
        attempt["attempt"]: attempt["folder"]
        for attempt in contents.parts["attempts"].to_pylist()
        if not attempt["superseded"]
    }
    return Evidence(
        row=row,
        record=record,
        run=run,
        raw=Steps(raw),
        steps=Steps(contents.parts["steps"]),
        events=contents.parts["events"].to_pylist(),
        spans=contents.parts["spans"],
        planned=read_settings(entry.get("run")),
        trouble=contents.found.trouble,
        changed=contents.changed,
        copies=tuple(find_copied_logs(raw, folders, hashes=contents.hashes)),
        recount=contents.recount if run is not None else Recount(),
    )


def _read_runs(folder: Path, rows: Sequence[Row]) -> Iterator[tuple[str, dict[str, pa.Table]]]:
    """Yield (run, its rows by table) of each run, in the order of the table `runs`."""
    small = {
        name: _split_by_run(pq.read_table(folder / f"{name}.parquet", use_threads=False))
        for name in SMALL
    }
    large = {name: _LargeTable(folder / f"{name}.parquet", table=name) for name in LARGE}
    for row in rows:
        run_id = row["run_id"]
        parts = {name: table.read(run_id) for name, table in large.items()}
        for name, of in small.items():
            parts[name] = of.get(run_id, tables.schema(name).empty_table())
        yield run_id, parts


def _split_by_run(rows: pa.Table) -> dict[str, pa.Table]:
    """Return run → its rows, which lie together."""
    runs = rows["run_id"].to_pylist()
    first = [place for place, run in enumerate(runs) if not place or runs[place - 1] != run]
    ends = [*first[1:], len(runs)] if first else []
    return {
        runs[begin]: rows.slice(begin, end - begin) for begin, end in zip(first, ends, strict=True)
    }


class _LargeTable:
    """A file with the rows of runs one after the other, of which some row groups at a time are
    read.
    """

    def __init__(self, path: Path, table: str):
        self._file = pq.ParquetFile(path)
        self._empty = tables.schema(table).empty_table()
        self._next = 0
        self._waiting: dict[str, pa.Table] = {}

    def read(self, run_id: str) -> pa.Table:
        """Return the rows of a run. Runs are asked for in the order of the file; one without rows
        may be left out of it.
        """
        if not self._waiting:
            self._waiting = self._read_chunk()
        return self._waiting.pop(run_id, self._empty)

    def _read_chunk(self) -> dict[str, pa.Table]:
        facts = self._file.metadata
        first = self._next
        size = 0
        while self._next < facts.num_row_groups and size < CHUNK:
            size += facts.row_group(self._next).total_byte_size
            self._next += 1
        if first == self._next:
            return {}
        groups = list(range(first, self._next))
        return _split_by_run(self._file.read_row_groups(groups, use_threads=False))
