"""Judge an experiment's runs from its tables alone, those of other programs included: validity,
reasons, cautions, and values that were not checked.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tokenscale.analysis import tables
from tokenscale.analysis.kept_file import read_kept, write_kept
from tokenscale.analysis.queries import open_tables
from tokenscale.analysis.recount import Recount
from tokenscale.analysis.run_contents import RunContents, decode_contents
from tokenscale.analysis.run_record import (
    MALFORMED,
    describe_trouble,
    read_settings,
)
from tokenscale.analysis.run_table import find_gaps, read_run_table
from tokenscale.analysis.steps import Steps
from tokenscale.analysis.tables import Tables
from tokenscale.base.files import check_types, naming, report_malformed
from tokenscale.referee import clocks, run_values, stated_flops, steadiness  # noqa: F401  # they register
from tokenscale.referee.design import find_cautions
from tokenscale.referee.expectations import Evidence, Findings, judge
from tokenscale.referee.siblings import Siblings, find_copied_logs
from tokenscale.settings.closure import hash_closure

Row = dict[str, Any]
Found = dict[str, Findings | None]

#: tables that a run is judged by beside `runs`, with their rows in its order
OF_RUNS = ("steps", "logged", "spans", "records", "recounts", "events", "attempts")
#: tables that runs are compared by
COMPARED = ("runs", "steps", "events", "stores")
#: file of the findings of earlier calls
KEPT = "findings.kept"


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
    rows = _read_table(folder / "runs.parquet").to_pylist()
    before = KeptFindings(kept)
    table = read_run_table(experiment)
    siblings = Siblings(find_gaps(table, path=experiment, runs=runs))
    findings: Found = {}
    for block, parts in _read_blocks(folder, rows):
        of_run = tables.split_by_run(parts, [row["run_id"] for row in block])
        siblings.add(parts["steps"], parts["events"])
        findings |= before.read(block, parts, make=partial(_judge_block, folder, block, of_run))
    before.write()
    with closing(open_tables(folder, COMPARED)) as connection:
        verdicts = siblings.judge(connection, findings)
    lengths = {row["run_id"]: (row["steps_seen"] or 0) + (row["resumed_at"] or 0) for row in rows}
    cautions = find_cautions(table, stores, corpora, steps=lengths)
    tables.write_verdict(folder, verdicts, cautions=cautions)
    return verdicts


class KeptFindings:
    """Findings of each run from its own tables, kept in a file of the folder by blocks of runs. A file
    that is missing or damaged holds none.
    """

    def __init__(self, folder: Path | None):
        self._path = None if folder is None else folder / KEPT
        self._code = hash_closure(__name__)
        self._before: Mapping[str, Any] = {}
        self._now: dict[str, str] = {}
        if self._path is not None:
            self._before, _ = read_kept(self._path)

    def read(self, block: Sequence[Row], parts: Tables, make: Callable[[], Found]) -> Found:
        """Return run → findings of a block of runs, kept findings or else what `make` returns; None for
        a run without a record.
        """
        if self._path is None:
            return make()
        key = _hash(self._code, block, parts)
        text = self._before.get(key)
        if isinstance(text, str):
            found = {
                run_id: None if values is None else Findings.decode(values)
                for run_id, values in json.loads(text).items()
            }
        else:
            found = make()
            text = json.dumps({run_id: of and of.encode() for run_id, of in found.items()})
        self._now[key] = text
        return found

    def write(self) -> None:
        """Keep the findings of the runs that were read, and no others."""
        if self._path is not None:
            write_kept(self._path, head=self._now, rows={})


def _hash(code: Mapping[str, str], block: Sequence[Row], parts: Tables) -> str:
    """Return a digest of the code that judges, and of the tables of a block of runs."""
    digest = hashlib.sha256(json.dumps([sorted(code.items()), block], sort_keys=True).encode())
    for name, rows in sorted(parts.items()):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as out:
            out.write_table(rows)
        digest.update(name.encode() + sink.getvalue())
    return digest.hexdigest()


def _judge_block(folder: Path, block: Sequence[Row], of_run: Mapping[str, Tables]) -> Found:
    """Return run → findings, from the rows of the tables in a folder."""
    return {
        row["run_id"]: _judge_tables_of_run(folder, row, of_run[row["run_id"]]) for row in block
    }


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
    contents = decode_contents(parts, sealed=bool(row["sealed"]))
    entry = json.loads(parts["records"]["entry"][0].as_py())
    check_types({"entry": entry}, fields={"entry": dict})
    return entry, contents


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


def _read_blocks(folder: Path, rows: Sequence[Row]) -> Iterator[tuple[Sequence[Row], Tables]]:
    """Yield (rows of the table `runs`, their rows of the other tables) by the row groups of the table
    `records`, in the order of the table `runs`. Raises UserError for tables in another order.
    """
    run_ids = pa.array([row["run_id"] for row in rows], pa.string())
    with report_malformed(
        folder / "records.parquet",
        what="order of runs in the tables",
        next=tables.restore_command(folder),
    ):
        _check_order(folder, run_ids)
    files = {name: _RowsOfRuns(folder / f"{name}.parquet") for name in OF_RUNS}
    first = 0
    for count in files["records"].group_sizes():
        of_block = run_ids.slice(first, count)
        yield (
            rows[first : first + count],
            {name: file.take(of_block) for name, file in files.items()},
        )
        first += count


def _read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    with naming(path):
        return pq.read_table(path, columns=columns)


def _check_order(folder: Path, run_ids: pa.Array) -> None:
    """Raise ValueError for tables whose rows are not in the order of these runs, or of others."""
    wrong = []
    for name in OF_RUNS:
        column = _read_table(folder / f"{name}.parquet", columns=["run_id"])["run_id"]
        places = pc.fill_null(pc.index_in(column, value_set=run_ids), -1).to_numpy()
        if name == "records":  # which has a row for each run
            in_order = np.array_equal(places, np.arange(len(run_ids)))
        else:
            in_order = bool((places >= 0).all() and (np.diff(places) >= 0).all())
        if not in_order:
            wrong.append(f"{name}.parquet")
    if wrong:
        raise ValueError(f"runs are in another order than in runs.parquet: {', '.join(wrong)}")


class _RowsOfRuns:
    """A file with the rows of runs one after the other, of which some row groups at a time are
    read.
    """

    def __init__(self, path: Path):
        self._file = pq.ParquetFile(path)
        self._next = 0
        self._waiting = self._file.schema_arrow.empty_table()

    def group_sizes(self) -> list[int]:
        """Return the numbers of rows of the row groups."""
        facts = self._file.metadata
        return [facts.row_group(group).num_rows for group in range(facts.num_row_groups)]

    def take(self, run_ids: pa.Array) -> pa.Table:
        """Return the next rows of the file as long as they are of these runs."""
        taken = [self._waiting.slice(0, 0)]
        while not len(self._waiting) or len(taken) == 1:
            if not len(self._waiting):
                if self._next == self._file.metadata.num_row_groups:
                    break
                self._waiting = self._file.read_row_group(self._next, use_threads=False)
                self._next += 1
            of_others = pc.invert(pc.is_in(self._waiting["run_id"], value_set=run_ids))
            stop = pc.index(of_others, True).as_py()
            count = len(self._waiting) if stop < 0 else stop
            taken.append(self._waiting.slice(0, count))
            self._waiting = self._waiting.slice(count)
        return pa.concat_tables(taken).combine_chunks()
