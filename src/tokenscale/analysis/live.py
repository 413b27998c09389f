"""Run the queries of `sql/` on the logs of one run, also while it trains."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from tokenscale.analysis import tables
from tokenscale.analysis.logs import NEWER, merge, read_run
from tokenscale.analysis.queries import RECORDED_RUNS, create_views, query_rows
from tokenscale.analysis.tables import TABLES
from tokenscale.base.errors import UserError
from tokenscale.runs.records.provenance import read_sealed

#: what a run is called whose logs alone are read
RUN_ID = "run"
#: bytes read at the end of each rank's log for the current throughput: about a hundred steps
TAIL_BYTES = 50_000


def run_summary(directory: Path) -> dict[str, Any] | None:
    """Return what a sealed run came to: status, steps, last finite loss and held-out loss (nats per
    useful token), useful and total tokens per second as the report defines them (None for a run
    that ends within the warm-up steps).

    None for a run that is not sealed.
    """
    record = read_sealed(directory / "run.json")
    if record is None:
        return None
    found = {"status": record["outcome"]["status"], "steps": record["outcome"]["steps"]}
    with closing(connect_logs(directory)) as connection:
        losses = [
            row["loss"] for row in query_rows(connection, name="loss") if row["loss"] is not None
        ]
        held_out = query_rows(connection, name="validation")
        mixed = bool(record.get("run", {}).get("mixture"))
        sources = (
            [row for row in query_rows(connection, name="source_validation") if row["last"]]
            if mixed
            else []
        )
        speed = next(iter(query_rows(connection, name="throughput")), {})
    found |= {name: speed.get(name) for name in ("useful_tokens_per_s", "total_tokens_per_s")}
    found |= {
        "loss": losses[-1] if losses else None,
        "held_out_loss": held_out[-1]["loss"] if held_out else None,
    }
    return found | {"held_out_loss_by_corpus": {row["source"]: row["loss"] for row in sources}}


def summary_lines(directory: Path) -> list[str]:
    """Return `run_summary` as lines for a terminal."""
    found = run_summary(directory)
    if found is None:
        return [f"run    {directory}  not sealed"]
    held_out = (
        f", held out {found['held_out_loss']:.4f}" if found["held_out_loss"] is not None else ""
    )
    lines = [f"run    {directory}  {found['status']} after {found['steps']} steps"]
    if found["loss"] is not None:
        lines.append(
            f"loss   {found['loss']:.4f} in the last step{held_out}  (nats per useful token)"
        )
    if by_corpus := [
        f"{name} {loss:.4f}" for name, loss in found["held_out_loss_by_corpus"].items()
    ]:
        lines.append(f"       held out by corpus: {', '.join(by_corpus)}")
    if found["useful_tokens_per_s"] is not None:
        useful = found["useful_tokens_per_s"]
        total = found["total_tokens_per_s"]
        lines.append(
            f"speed  {useful:,.0f} useful tokens/s, {total:,.0f} total tokens/s  (warm-up steps "
            "left out)"
        )
    else:
        lines.append("speed  not measured: all steps are warm-up")
    return lines


def current_throughput(attempt: Path) -> dict[str, float] | None:
    """Return `step_s` (median) and `useful_tokens_per_s` of the steps at the end of a running
    attempt's logs.

    None before all ranks have logged a step after the warm-up.
    """
    rows = [row for path in sorted(attempt.glob("rank=*/steps.jsonl")) for row in _tail(path)]
    if not rows:
        return None
    with closing(
        _connect(merge(tables.of_rows("steps", rows), events=[]), events=[])
    ) as connection:
        speed = next(iter(query_rows(connection, name="throughput")), None)
    return speed and {
        "step_s": speed["median_step_s"],
        "useful_tokens_per_s": speed["useful_tokens_per_s"],
    }


def connect_logs(directory: Path) -> duckdb.DuckDBPyConnection:
    """Open a connection whose tables `steps`, `runs` and `events` hold one run's logs, also while
    the run trains, as `ingest` reads and merges them.

    Raises UserError for logs of a newer version.
    """
    log = read_run(directory, run_id=RUN_ID, digest=None)
    if newer := [broken["reason"] for broken in log.quarantine if NEWER in broken["reason"]]:
        what = "this run's logs were written by a newer tokenscale."
        raise UserError(what, path=directory, found=newer[0], next="upgrade tokenscale")
    return _connect(merge(log.steps, events=log.events), events=log.events)


def _connect(steps: pa.Table, events: list[dict[str, Any]]) -> duckdb.DuckDBPyConnection:
    """Open a connection to the merged steps and the events of one run.

    A step that is not finite is in `latest_steps` alone.
    """
    connection = duckdb.connect(":memory:")
    connection.execute("SET threads = 1")
    connection.execute("SET VARIABLE target_loss = NULL::DOUBLE")
    for table, fields in TABLES.items():
        if table not in ("steps", "events"):
            typed = ", ".join(f'"{name}" {kind}' for name, kind in fields.items())
            name = RECORDED_RUNS if table == "runs" else table
            connection.execute(f"CREATE TABLE {name} ({typed})")
    connection.register("latest_steps", steps)
    connection.execute(
        "CREATE VIEW steps AS FROM latest_steps WHERE nonfinite IS DISTINCT FROM true"
    )
    lines = pa.array(range(len(events)), pa.int64())
    connection.register("events", tables.of_rows("events", events).append_column("line", lines))
    connection.execute(
        f"INSERT INTO {RECORDED_RUNS} BY NAME SELECT ? AS run_id, "
        "coalesce(max_by(world_size, attempt), 1) AS world_size FROM latest_steps",
        [RUN_ID],
    )
    connection.execute(
        f"INSERT INTO {tables.JUDGED} (run_id, validity) VALUES (?, 'valid')", [RUN_ID]
    )
    create_views(connection)
    return connection


def _tail(path: Path) -> list[dict[str, Any]]:
    """Return the first line and the whole lines at the end of a rank's log that state a step, its
    time and tokens.
    """
    try:
        with path.open("rb") as file:
            first = file.readline()
            start = max(len(first), file.seek(0, 2) - TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return []
    place = {
        "run_id": RUN_ID,
        "rank": int(path.parent.name[5:]),
        "attempt": int(path.parent.parent.name[8:]),
    }
    return [row | place for row in map(_parse, [first, *lines[start > len(first) : -1]]) if row]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        counts = {name: int(row[name]) for name in ("step", "useful_tokens")}
        others = {name: row.get(name) for name in ("total_tokens", "nonfinite")}
        return counts | others | {"step_s": float(row["step_s"])}
    except (ValueError, KeyError, TypeError):
        return None
