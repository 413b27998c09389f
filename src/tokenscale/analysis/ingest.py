"""Logs of an experiment's runs → typed Parquet. Equal logs give equal bytes: no clock, no absolute
path enters.
"""

import json
import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tokenscale.analysis import tables
from tokenscale.analysis.kept_tables import Block, KeptTables, Made, split_into_blocks
from tokenscale.analysis.recount import Recount, encode
from tokenscale.analysis.rows import benchmark_rows, certificate_rows, store_rows
from tokenscale.analysis.run_contents import RunContents, is_disordered
from tokenscale.analysis.run_folder import InputsAtHand, read_contents
from tokenscale.analysis.run_record import (
    MALFORMED,
    RunRecord,
    describe_trouble,
    read_run_record,
)
from tokenscale.analysis.run_table import list_entries, read_run_table
from tokenscale.analysis.runs import grouping, run_row
from tokenscale.analysis.steps import Steps
from tokenscale.analysis.tables import Tables
from tokenscale.base.errors import UserError
from tokenscale.base.facts import list_unknown
from tokenscale.base.files import (
    read_json,
    report_malformed,
    sha256_file,
    write_json,
)
from tokenscale.settings.experiments import digest_design

Row = dict[str, Any]

#: tables beside `runs` that a run has rows in
OF_RUNS = ("steps", "spans", "events", "attempts", "bleu", "quarantine")
#: large tables, written one row group per block of runs; the others are written at once
STREAMED = ("steps", "logged", "spans", "records", "recounts")
#: keys of the run table that the report reads from `experiment.json`
DESCRIBED = (
    *(
        "experiment",
        "question",
        "scale",
        "factors",
        "left_out",
        "repeats",
        "cell_repeats",
        "primary",
        "note",
    ),
    *("original", "target_loss", "figures"),
)
#: columns of a run without a record
MISSING = {
    "sealed": False,
    "steps_seen": 0,
    "attempts": 0,
    "overlap_rows": 0,
    "quarantined": 0,
    "quarantined_benign": 0,
}
#: kinds of files beside the run table
KINDS = ("benchmarks", "stores", "corpora", "certificates")


def ingest(
    experiment: Path,
    runs: Path,
    output: Path,
    benchmarks: Sequence[Path] = (),
    *,
    stores: Sequence[Path] = (),
    corpora: Sequence[Path] = (),
    certificates: Sequence[Path] = (),
    kept: Path | None = None,
    threads: int = 1,
) -> dict[str, int]:
    """Write every table of `tables.TABLES` as `<output>/<table>.parquet`, `experiment.json`, and
    last the manifest with the SHA-256 of each file; return row counts. `experiment.json` names the
    inputs relative to the parent of `runs`.

    All logs are read on every call, or those of runs whose tables are not in the folder `kept`, which
    is this experiment's alone. A run without logs is listed as missing; a broken line goes to
    quarantine. Raises UserError only where the experiment's own table, a benchmark file or a
    manifest cannot be read, or where the table lists two runs as the same repeat.
    """
    table = read_run_table(experiment)
    listed = list_entries(table, path=experiment)
    # refused before anything is written
    others = benchmark_rows(list(benchmarks)) | {
        "stores": store_rows(list(stores), corpora=list(corpora))
    }
    others["certificates"] = certificate_rows(certificates)

    manifests = {sha256_file(path): path for path in (*stores, *corpora)}
    at_hand = InputsAtHand(manifests, project=runs.absolute().parents[1])
    blocks = split_into_blocks(listed, runs)
    kept_tables = KeptTables(kept, table["experiment"], at_hand)

    def make(entry: Row, contents: RunContents | None) -> Made:
        return one_run(entry, table["experiment"], runs, at_hand=at_hand, contents=contents)

    def read(block: Block) -> Tables:
        return kept_tables.read(block, make)

    # Close the generator here. If it were collected while a thread starts, both would wait for each
    # other.
    with closing(_work_ahead(read, items=blocks, threads=threads)) as blocks_rows:
        counts, rows = _write_tables(
            output,
            blocks=blocks_rows,
            others=others,
            experiment=experiment,
        )
    kept_tables.finish(blocks)
    files = zip(KINDS, (benchmarks, stores, corpora, certificates), strict=True)
    inputs: Row = {
        kind: sorted(os.path.relpath(path, runs.parent) for path in paths) for kind, paths in files
    }
    inputs["table"] = os.path.relpath(experiment, runs.parent)
    described = {key: table.get(key) for key in DESCRIBED} | {"inputs": inputs}
    described["design_sha256"] = digest_design(table)
    described["unknown"] = count_unknown(rows, manifests=[*stores, *corpora])
    write_json(output / tables.EXPERIMENT, value={"schema": 1, **described})
    tables.write_manifest(output)
    return counts


def count_unknown(rows: Iterable[Row], manifests: Iterable[Path]) -> list[Row]:
    """Count the facts that could not be had when runs were recorded and these manifests were
    written, by name and reason. `rows` are those of the table `runs`.
    """
    found = Counter(
        tuple(fact) for row in rows for fact in json.loads(row["unknown_facts"] or "[]")
    )
    for path in manifests:
        found.update(set(list_unknown(read_json(path))))
    return [
        {"fact": fact, "why": why, "records": number}
        for (fact, why), number in sorted(found.items())
    ]


@dataclass(frozen=True)
class TableInputs:
    """What an experiment's tables are made of beside the logs of its runs, as paths below the
    folder of results.

    `table` is the run table, which holds the resolved settings of every run; by default the one of
    the workflow.
    """

    experiment: str
    benchmarks: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()  # manifests; so the next
    corpora: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()
    table: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", self.table or f"experiments/{self.experiment}/runs.json")

    def names(self) -> tuple[str, ...]:
        """Return the paths of all inputs."""
        return (self.table, *self.benchmarks, *self.stores, *self.corpora, *self.certificates)

    def ingest(self, results: Path, output: Path) -> None:
        """Write the tables of the logs and files below `results` to the folder `output`."""
        files: dict[str, Any] = {kind: self.paths(results, kind) for kind in KINDS}
        ingest(
            results / self.table,
            runs=results / "runs",
            output=output,
            threads=2,
            **files,
        )

    def paths(self, results: Path, kind: str) -> list[Path]:
        """Return where the files of a kind lie below `results`."""
        return [results / name for name in getattr(self, kind)]


def read_inputs(folder: Path) -> TableInputs:
    """Return the inputs of which `ingest` made an experiment's tables."""
    with report_malformed(
        folder / tables.EXPERIMENT,
        what="experiment's description",
        next=tables.restore_command(folder),
    ):
        return TableInputs(folder.name, **tables.read_description(folder).get("inputs", {}))


def _write_tables(
    output: Path,
    blocks: Iterator[Tables],
    others: dict[str, list[Row]],
    experiment: Path,
) -> tuple[dict[str, int], list[Row]]:
    """Write the tables of all blocks and the others; return row counts, and the rows of the table
    `runs` with what could not be had.
    """
    counts: Counter[str] = Counter()
    places: dict[tuple, str] = {}
    small: dict[str, list[pa.Table]] = {
        name: [tables.schema(name).empty_table()] for name in tables.RECORDED
    }
    with ExitStack() as stack:
        add = {
            name: stack.enter_context(tables.writer(output / f"{name}.parquet", table=name))
            for name in tables.RECORDED
        }
        for found in blocks:
            _check_places(found["runs"], places, experiment)
            for name, rows in found.items():
                counts[name] += len(rows)
                if name not in STREAMED:
                    small[name].append(rows)
                elif len(rows):
                    add[name](rows)
        runs_rows = pa.concat_tables(small["runs"]).select(["unknown_facts"]).to_pylist()
        for name, rows in others.items():
            small[name].append(tables.of_rows(name, rows))
            counts[name] = len(rows)
        for name in tables.RECORDED:
            if name not in STREAMED:
                add[name](pa.concat_tables(small[name]).combine_chunks())
    return {name: counts[name] for name in tables.RECORDED}, runs_rows


def _check_places(runs: pa.Table, places: dict[tuple, str], experiment: Path) -> None:
    """Add the places of runs to (series, world size, repeat) → run, by which all is grouped. Raises
    UserError for two runs of one place, which would count as one, or as two repeats.
    """
    for row in runs.select(["run_id", "series", "world_size", "repeat"]).to_pylist():
        run_id = row["run_id"]
        other = places.setdefault((row["series"], row["world_size"], row["repeat"]), run_id)
        if other != run_id:
            cell = f"{row['series']}, world size {row['world_size']}, repeat {row['repeat']}"
            raise UserError(
                "two runs of the table are the same repeat of the same cell.",
                path=experiment,
                cell=cell,
                runs=f"{other}, {run_id}",
                next="name what tells them apart as a factor, or as repeats",
            )


def _work_ahead(
    work: Callable[[Block], Tables], items: list[Block], threads: int
) -> Generator[Tables, None, None]:
    """Yield the result of `work` for each item in order, computed on this number of threads. At most
    twice as many results are in memory.
    """
    with ThreadPoolExecutor(max(threads, 1)) as pool:
        waiting: deque[Future[Tables]] = deque()
        try:
            for item in [*items, None]:
                if item is not None:
                    waiting.append(pool.submit(work, item))
                while len(waiting) > (0 if item is None else 2 * threads):
                    yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def one_run(
    entry: Row,
    experiment: str,
    runs: Path,
    at_hand: InputsAtHand | None = None,
    contents: RunContents | None = None,
) -> Made:
    """Make all rows of one run, of `contents` or else of what its folder gives. A record of other
    hands may hold anything: what no row can be made of counts as one that cannot be read, and says
    why.
    """
    run_id = entry["run_id"]
    folder = runs / run_id
    inputs = at_hand or InputsAtHand({}, project=runs.absolute().parents[1])
    record = contents.found if contents else read_run_record(folder / "run.json")
    try:
        contents = contents or read_contents(folder, found=record, at_hand=inputs)
        row = tables.of_rows("runs", [record_run(entry, experiment, contents=contents)])
    except MALFORMED as error:
        if record.record is None:
            raise
        trouble = describe_trouble(error)
        contents = read_contents(folder, found=RunRecord(None, trouble=trouble), at_hand=inputs)
        row = tables.of_rows("runs", [record_run(entry, experiment, contents=contents)])
    as_json = {
        "entry": entry,
        "record": contents.found.record,
        "hashes": contents.hashes,
        "changed": contents.changed,
    }
    recorded: Row = {name: json.dumps(value, sort_keys=True) for name, value in as_json.items()}
    recorded |= {"run_id": run_id, "trouble": contents.found.trouble}
    rows = {
        "runs": row,
        "logged": contents.parts["raw"].slice(0, None if is_disordered(contents) else 0),
        "records": tables.of_rows("records", [recorded]),
        "recounts": _list_recount(run_id, contents.recount),
        **{name: contents.parts[name] for name in OF_RUNS},
    }
    return Made(rows=rows, contents=contents)


def _list_recount(run_id: str, recount: Recount) -> pa.Table:
    """Return the rows of the table `recounts` of a run."""
    head, counted = encode(recount)
    first = tables.of_rows(
        "recounts", [{"run_id": run_id, "recount": json.dumps(head, sort_keys=True)}]
    )
    of = counted.add_column(0, "run_id", pa.repeat(run_id, len(counted)))
    of = of.append_column("recount", pa.nulls(len(counted), pa.string()))
    return pa.concat_tables([first, of.cast(first.schema)])


def record_run(entry: Row, experiment: str, contents: RunContents) -> Row:
    """Return the row of the table `runs` of one run, from its entry in the run table and what its
    files gave.
    """
    found = contents.found
    row = run_row(entry, experiment, record=found.record)
    row |= grouping(row.get("approach"), cell=entry.get("cell") or {})
    if row["external"]:
        row["series"] += " (external)"  # what every figure and table calls it
    row |= contents.columns
    if found.record is None and not found.trouble:
        return row | MISSING
    steps = Steps(contents.parts["steps"])
    events = contents.parts["events"].to_pylist()
    row["status"] = "unreadable" if found.trouble else _find_status(row["status"], events)
    row["sealed"] = found.sealed
    row["steps_seen"] = int(steps.whole().sum()) if len(steps) else 0
    return row | _find_last_bleu(contents.parts["bleu"].to_pylist())


def _find_last_bleu(translated: list[Row]) -> Row:
    """Columns of the newest score of translations; none without one."""
    if not translated:
        return {}
    return {column: value for column, value in translated[-1].items() if column.startswith("bleu")}


def _find_status(recorded: str, events: list[Row]) -> str:
    """Return the record's status; `nonfinite` for a run that stopped at a loss that is no number
    before its record was sealed.
    """
    stopped = [event["status"] for event in events if event["event"] == "run_stop"]
    return "nonfinite" if recorded == "running" and "nonfinite" in stopped else recorded
