"""Run the queries of `sql/` on an experiment's tables, or on logs of runs that still train.

One thread: equal tables give equal digits.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from tokenscale.analysis import tables
from tokenscale.analysis.log_values import WARM_UP_STEPS
from tokenscale.base.errors import unknown

if TYPE_CHECKING:
    import pandas as pd
import json
import re
from collections.abc import Iterable, Sequence

import pyarrow as pa

from tokenscale.analysis.tables import ARROW, TABLES
from tokenscale.runs.records.events import FIELDS
from tokenscale.runs.records.provenance import read_sealed

WARM_UP = {"warmup_steps": WARM_UP_STEPS}
TARGET = {"target": None, "window_tokens": None}

#: query → default of each parameter
PARAMETERS: dict[str, dict[str, Any]] = {
    "steps_global": {},
    "throughput": WARM_UP,
    "computing": WARM_UP,
    "epochs": WARM_UP,
    "padding": WARM_UP,
    "loss": {},
    "loss_curves": {"points": 100},
    "validation": {},
    "source_validation": {},
    "translation": WARM_UP,
    "time_to_target": TARGET,
    "stalls": WARM_UP,
    "storage": {},
    "benchmark": {},
    "storage_benchmark": {},
    "inference": {},
    "inference_steps": {},
    "generations": {},
    "scaling": WARM_UP,
    "scaling_weak": WARM_UP,
    "parallelism": WARM_UP,
    "frameworks": WARM_UP,
    "certificates": {},
    "pipeline": WARM_UP,
    "memory": {},
    "order": {},
    "phases": WARM_UP,
    "loss_difference": {"points": 100},
    "step_times": WARM_UP,
    "stragglers": {**WARM_UP, "window": 20, "excess": 0.1},
    "energy": {},
    "inventory": {},
}
#: queries that other queries read, in the order in which they are created
VIEWS = ("steps_global", "validation")


def sql(name: str) -> str:
    """Return the text of a query. Its definition is the comment at its head."""
    if name not in PARAMETERS:
        raise unknown("query", name, PARAMETERS)
    return _file(name)


def _file(name: str) -> str:
    return resources.files("tokenscale.analysis").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


def create_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the views and macros that queries use, over the tables `steps`, `runs` and `events` of a connection."""
    for view in VIEWS:  # a query that reads a view orders its own rows
        connection.execute(f"CREATE VIEW {view} AS {sql(view).rpartition('ORDER BY')[0]}")
    connection.execute(_file("macros"))


def definition(name: str) -> str:
    """What a query means, in words: the comment at the head of its file, parameters filled with their defaults."""
    lines = []
    for line in sql(name).splitlines():
        if not line.startswith("--"):
            break
        lines.append(line[2:].strip())
    text = " ".join(lines)
    for key, value in PARAMETERS[name].items():
        text = text.replace(f"${key}", str(value))
    return text


def connect(folder: str | Path) -> duckdb.DuckDBPyConnection:
    """Return an in-memory connection with every table of the folder, and `VIEWS`.

    All files are first compared with their manifest. Rows are read when a query needs them: of two million steps a
    query needs a few columns. Raises UserError for a table that is missing, changed, or of another version.
    """
    folder = Path(folder)
    tables.check(folder)
    target_loss = tables.read_experiment(folder).get("target_loss")  # of time_to_target.sql
    connection = duckdb.connect(":memory:")
    connection.execute("SET threads = 1")
    connection.execute("SET VARIABLE target_loss = ?::DOUBLE", [target_loss])
    connection.execute("SET VARIABLE tables = ?", [str(folder)])
    with damage_reported(connection):
        for table in tables.TABLES:
            file = str(folder / f"{table}.parquet").replace("'", "''")
            connection.execute(f"CREATE VIEW {table} AS FROM read_parquet('{file}')")
        create_views(connection)
    return connection


@contextmanager
def damage_reported(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Around queries: raise a UserError that names the table where a query fails because a file changed meanwhile."""
    try:
        yield
    except duckdb.Error:
        (folder,) = connection.execute("SELECT getvariable('tables')").fetchone()
        tables.check(Path(folder))
        raise


def query(name: str, source: str | Path | duckdb.DuckDBPyConnection, **parameters: Any) -> "pd.DataFrame":
    """The rows of a query as a DataFrame. `source` is a folder of tables or a connection made by `connect`.

    >>> PARAMETERS["throughput"]
    {'warmup_steps': 3}
    """
    text = sql(name)
    for key in parameters:
        if key not in PARAMETERS[name]:
            raise unknown(f"parameter of query {name}", key, PARAMETERS[name])
    values = PARAMETERS[name] | parameters
    if not isinstance(source, duckdb.DuckDBPyConnection):
        with closing(connect(source)) as connection:
            return query(name, connection, **parameters)
    with damage_reported(source):
        return source.execute(text, values or None).df()


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
