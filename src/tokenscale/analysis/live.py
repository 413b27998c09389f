"""The definitions of `sql/` over a run's JSONL logs: while it trains, at its end, and step by step for trackers."""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from tokenscale.analysis.queries import PARAMETERS, create_views, sql
from tokenscale.analysis.tables import ARROW, TABLES
from tokenscale.runs.records.provenance import read_sealed
from tokenscale.runs.records.schema import FIELDS

#: bytes read at the end of each rank's log for the current throughput: about a hundred steps
TAIL_BYTES = 50_000
_RATES = """
SELECT sum(loss_sum) / nullif(sum(useful_tokens), 0), tokens_per_s(useful_tokens, step_s),
    tokens_per_s(total_tokens, step_s), sum(data_wait_s) / nullif(sum(step_s), 0)
FROM rows GROUP BY number ORDER BY number
"""
_SUMS = ("loss_sum", "useful_tokens", "total_tokens", "data_wait_s", "step_s")


def run_summary(directory: Path) -> dict[str, Any] | None:
    """Return what a sealed run came to: status, steps, last finite loss and held-out loss (nats per useful token),
    useful and total tokens per second as the report defines them (None for a run that ends within the warm-up steps).

    None for a run that is not sealed.
    """
    record = read_sealed(directory / "run.json")
    if record is None:
        return None
    found = {"status": record["outcome"]["status"], "steps": record["outcome"]["steps"]}
    with closing(connect_logs(directory, record["attempt"])) as connection:
        losses = [row["loss"] for row in _rows(connection, "loss") if row["loss"] is not None]
        held_out = _rows(connection, "validation")
        mixed = bool(record.get("run", {}).get("mixture"))
        sources = [row for row in _rows(connection, "source_validation") if row["last"]] if mixed else []
        speed = next(iter(_rows(connection, "throughput")), {})
    return found | {
        "loss": losses[-1] if losses else None,
        "held_out_loss": held_out[-1]["loss"] if held_out else None,
        "held_out_loss_by_corpus": {row["source"]: row["loss"] for row in sources},
        "useful_tokens_per_s": speed.get("useful_tokens_per_s"),
        "total_tokens_per_s": speed.get("total_tokens_per_s"),
    }


def summary_lines(directory: Path) -> list[str]:
    """Return `run_summary` as lines for a terminal."""
    found = run_summary(directory)
    if found is None:
        return [f"run    {directory}  not sealed"]
    held_out = f", held out {found['held_out_loss']:.4f}" if found["held_out_loss"] is not None else ""
    lines = [f"run    {directory}  {found['status']} after {found['steps']} steps"]
    if found["loss"] is not None:
        lines.append(f"loss   {found['loss']:.4f} in the last step{held_out}  (nats per useful token)")
    if by_corpus := found["held_out_loss_by_corpus"]:
        lines.append(
            f"       held out by corpus: {', '.join(f'{name} {loss:.4f}' for name, loss in by_corpus.items())}"
        )
    if found["useful_tokens_per_s"] is not None:
        useful, total = found["useful_tokens_per_s"], found["total_tokens_per_s"]
        lines.append(f"speed  {useful:,.0f} useful tokens/s, {total:,.0f} total tokens/s  (warm-up steps left out)")
    else:
        lines.append("speed  not measured: all steps are warm-up")
    return lines


def current_throughput(attempt: Path) -> dict[str, float] | None:
    """Return `step_s` (median) and `useful_tokens_per_s` of the steps at the end of a running attempt's logs.

    None before all ranks have logged a step after the warm-up.
    """
    rows = [row for path in sorted(attempt.glob("rank=*/steps.jsonl")) for row in _tail(path)]
    if not rows:
        return None
    with closing(_connect()) as connection:
        steps = _insert(connection, rows)
        if not steps:
            return None
        speed = next(iter(_rows(connection, "throughput")), None)
    return speed and {"step_s": speed["median_step_s"], "useful_tokens_per_s": speed["useful_tokens_per_s"]}


def step_rates(steps: Iterable[dict[str, float]]) -> list[dict[str, float | None]]:
    """Return loss, tokens per second and share of data waiting of each step, from its sums over all ranks."""
    columns = [{name: step.get(name) for name in _SUMS} for step in steps]
    if not columns:
        return []
    table = pa.Table.from_pylist(columns, schema=pa.schema([(name, pa.float64()) for name in _SUMS]))
    with closing(_connect()) as connection:
        connection.register("rows", table.append_column("number", pa.array(range(len(columns)))))
        found = connection.execute(_RATES).fetchall()
    names = ("loss", "useful_tokens_per_s", "total_tokens_per_s", "data_wait_share")
    return [dict(zip(names, row, strict=True)) for row in found]


def connect_logs(directory: Path, last_attempt: int) -> duckdb.DuckDBPyConnection:
    """Open a connection whose tables `steps`, `runs` and `events` hold one run's logs up to an attempt.

    Of steps that several attempts logged, the last attempt's count, as in `ingest`.
    """
    connection = _connect()
    steps, events = [], []
    for number in range(last_attempt + 1):
        attempt = directory / f"attempt={number:02d}"
        steps += _read(connection, attempt, "steps")
        events += _read(connection, attempt, "events")
    _insert(connection, steps, events)
    return connection


def _read(connection: duckdb.DuckDBPyConnection, attempt: Path, kind: str) -> list[dict[str, Any]]:
    files = [str(path) for path in sorted(attempt.glob(f"rank=*/{kind}.jsonl"))]
    if not files:
        return []
    columns = FIELDS[kind]
    rows = _dicts(
        connection.execute(
            "FROM read_json(?, columns = ?, format = 'newline_delimited', ignore_errors = true, filename = true)",
            [files, columns],
        )
    )
    for row in rows:
        row["attempt"], row["rank"] = map(int, re.findall(r"(?:attempt|rank)=(\d+)", row.pop("filename"))[-2:])
    return rows


def _connect() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:")
    connection.execute("SET threads = 1")
    connection.execute("SET VARIABLE target_loss = NULL::DOUBLE")
    for table, fields in TABLES.items():
        typed = ", ".join(f'"{name}" {kind}' for name, kind in fields.items())
        connection.execute(f"CREATE TABLE {table} ({typed})")
    create_views(connection)
    return connection


def _insert(
    connection: duckdb.DuckDBPyConnection, steps: list[dict[str, Any]], events: Sequence[dict[str, Any]] = ()
) -> int:
    """Fill the tables with the log lines of one run; return the number of steps."""
    latest: dict[int, int] = {}
    first: dict[int, int] = {}
    ranks: dict[int, set[int]] = {}
    for row in steps:
        latest[row["step"]] = max(latest.get(row["step"], 0), row["attempt"])
        first[row["attempt"]] = min(first.get(row["attempt"], row["step"]), row.get("first_step", row["step"]))
        ranks.setdefault(row["attempt"], set()).add(row["rank"])
    world = {attempt: len(found) for attempt, found in ranks.items()}
    world |= {event["attempt"]: event["world_size"] for event in events if event.get("world_size")}
    kept = [row for row in steps if latest[row["step"]] == row["attempt"] and not row.get("nonfinite")]
    for row in kept:
        row |= {"run_id": "run", "attempt_step": row["step"] - first[row["attempt"]]}
        row["world_size"] = world[row["attempt"]]
    for event in events:
        event["run_id"] = "run"
    size = world[max(world)] if world else 1
    for table, rows in (
        ("steps", kept), ("events", list(events)),
        ("runs", [{"run_id": "run", "world_size": size, "validity": "valid"}]),
    ):  # fmt: skip
        schema = pa.schema([(name, ARROW[kind]) for name, kind in TABLES[table].items()])
        connection.register("incoming", pa.Table.from_pylist(rows, schema=schema))
        connection.execute(f"INSERT INTO {table} FROM incoming")
    return len(kept)


def _rows(connection: duckdb.DuckDBPyConnection, name: str) -> list[dict[str, Any]]:
    return _dicts(connection.execute(sql(name), PARAMETERS[name] or None))


def _dicts(result: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    names = [column[0] for column in result.description]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


def _tail(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines at the end of a rank's log that state a step, its time and its tokens."""
    try:
        with path.open("rb") as file:
            first = _parse(file.readline())
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    rank, attempt = int(path.parent.name[5:]), int(path.parent.parent.name[8:])
    known = {"rank": rank, "attempt": attempt} | ({"first_step": first["step"]} if first else {})
    return [row | known for row in map(_parse, lines[size > TAIL_BYTES : -1]) if row]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        counts = {name: int(row[name]) for name in ("step", "useful_tokens")}
        others = {name: row.get(name) for name in ("total_tokens", "nonfinite")}
        return counts | others | {"step_s": float(row["step_s"])}
    except (ValueError, KeyError, TypeError):
        return None
