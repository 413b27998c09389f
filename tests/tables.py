"""Tables made by hand, as ingest writes them; for tests of the definitions in SQL."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.analysis import tables
from tokenscale.analysis.queries import RECORDED_RUNS, query
from tokenscale.base.files import read_json, write_json

Row = dict[str, Any]


def connect(recorded: Mapping[str, pa.Table]) -> duckdb.DuckDBPyConnection:
    """Return a connection with tables as `ingest` records them."""
    connection = duckdb.connect(":memory:")
    connection.execute("SET threads = 1")
    for name, rows in recorded.items():
        connection.register(RECORDED_RUNS if name == "runs" else name, rows)
    return connection


def run(run_id: str, **fields: Any) -> Row:
    """A row of `runs`: a valid run of approach packed on one rank, where `fields` do not say
    otherwise.
    """
    row = {
        "experiment": "demo",
        "run_id": run_id,
        "repeat": 0,
        "approach": "packed",
        "factors": "",
        "storage": "",
        "layout": "",
        "world_size": 1,
        "method": "single",
        "sequence_length": 10,
        "global_batch": 4,
        "micro_batch": 2,
        "objective": "causal",
        "labels": "all",
        "eos": False,
        "science": "s",
        "science_per_rank": "p",
        "steps_asked": 8,
        "status": "complete",
        "validity": "valid",
    } | fields
    return {"series": row["approach"], **row}


def steps(run_id: str, count: int, world_size: int = 1, **fields: Any) -> list[Row]:
    """Rows of `steps`, from step 0; a field may be a function of (step, rank)."""
    values = {
        "step_s": 1.0,
        "useful_tokens": 30,
        "total_tokens": 40,
        "rows": 4,
        "loss_sum": 60.0,
        "order_digest": 1,
    }
    values |= fields
    return [
        {
            "run_id": run_id,
            "attempt": 0,
            "rank": rank,
            "world_size": world_size,
            "attempt_step": step,
            "step": step,
        }
        | {name: value(step, rank) if callable(value) else value for name, value in values.items()}
        for step in range(count)
        for rank in range(world_size)
    ]


def validation(run_id: str, step: int, loss: float, **fields: Any) -> Row:
    """A row of `events`: the loss of a slice of a hundred useful tokens."""
    row = {
        "run_id": run_id,
        "attempt": 0,
        "rank": 0,
        "event": "validation",
        "step": step,
        "loss_sum": 100 * loss,
    }
    return row | {"useful_tokens": 100, "duration_s": 0.5} | fields


def write(folder: Path, experiment: Row | None = None, **rows: list[Row]) -> Path:
    """Every table of the folder, those that are not named empty, with the experiment's description
    and the manifest.
    """
    for table in tables.RECORDED:
        tables.write(folder / f"{table}.parquet", table, rows.get(table, []))
    return describe(folder, experiment or {}, rows.get("runs", []))


def describe(folder: Path, experiment: Row, runs: list[Row]) -> Path:
    """Write the experiment's description beside tables, their manifest, and what the rows of `runs`
    have of the columns of `validity`.
    """
    write_json(folder / tables.EXPERIMENT, experiment)
    tables.write_manifest(folder)
    tables.write_verdict(folder, runs, cautions=experiment.get("cautions") or [])
    return folder


def renew_manifests(folder: Path) -> None:
    """Write the manifests of a folder anew, as a hand does that changed its files and puts the
    hashes right.
    """
    verdicts = pq.read_table(folder / f"{tables.JUDGED}.parquet").to_pylist()
    cautions = read_json(folder / tables.VERDICT)["cautions"]
    tables.write_manifest(folder)
    tables.write_verdict(folder, verdicts, cautions)


def query_row(name: str, folder: Path, **parameters: Any) -> Row:
    """The only row of a query."""
    (row,) = query(name, folder, **parameters).to_dict("records")
    return row
