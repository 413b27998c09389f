"""Run the queries of `sql/` on an experiment's tables, or on logs of runs that still train.

One thread: equal tables give equal digits.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from tokenscale.analysis import tables
from tokenscale.analysis.logs import NEWER, merge, read_run
from tokenscale.analysis.tables import TABLES, WARM_UP_STEPS
from tokenscale.base.errors import UserError, unknown
from tokenscale.runs.records.provenance import read_sealed

if TYPE_CHECKING:
    import pandas as pd

WARM_UP = {"warmup_steps": WARM_UP_STEPS}

_DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("throughput", "computing", "epochs", "padding", "translation", "stalls", "scaling"),
        WARM_UP,
    ),
    **dict.fromkeys(
        ("scaling_weak", "parallelism", "frameworks", "pipeline", "phases", "step_times"), WARM_UP
    ),
    **dict.fromkeys(("loss_curves", "loss_difference"), {"points": 100}),
    "time_to_target": {"target": None, "window_tokens": None},
    "stragglers": {**WARM_UP, "window": 20, "excess": 0.1},
}
_NAMES = """
steps_global throughput computing epochs padding dropped_text loss loss_curves validation source_validation
translation time_to_target stalls storage benchmark storage_benchmark inference inference_steps generations scaling
scaling_weak parallelism frameworks certificates pipeline memory order phases loss_difference step_times stragglers
energy inventory training_loss
"""
#: query → default of each parameter
PARAMETERS = {name: _DEFAULTS.get(name, {}) for name in _NAMES.split()}
#: queries that other queries read, in the order in which they are created
VIEWS = ("steps_global", "validation")
#: rows of the file `runs.parquet`; queries read `runs`, which has the columns of `validity`, too
RECORDED_RUNS = "recorded_runs"


def sql(name: str) -> str:
    """Return the text of a query. Its definition is the comment at its head."""
    if name not in PARAMETERS:
        raise unknown("query", word=name, words=PARAMETERS)
    return read_file(f"sql/{name}.sql")


def read_file(name: str) -> str:
    """Return the text of a file below `analysis`."""
    return resources.files("tokenscale.analysis").joinpath(name).read_text(encoding="utf-8")


def create_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the views and macros that queries use, over the tables of a connection."""
    connection.execute(
        f"CREATE VIEW runs AS FROM {RECORDED_RUNS} LEFT JOIN {tables.JUDGED} USING (run_id)"
    )
    for view in VIEWS:  # a query that reads a view orders its own rows
        connection.execute(f"CREATE VIEW {view} AS {sql(view).rpartition('ORDER BY')[0]}")
    connection.execute(read_file("sql/macros.sql"))


def definition(name: str) -> str:
    """What a query means, in words: the comment at the head of its file, parameters filled with
    their defaults.
    """
    head = itertools.takewhile(lambda line: line.startswith("--"), sql(name).splitlines())
    text = " ".join(line[2:].strip() for line in head)
    for key, value in PARAMETERS[name].items():
        text = text.replace(f"${key}", str(value))
    return text


def connect(folder: str | Path) -> duckdb.DuckDBPyConnection:
    """Return an in-memory connection with every table of the folder, and `VIEWS`.

    All files are first compared with their manifest. Rows are read when a query needs them: of two
    million steps a query needs a few columns. Raises UserError for a table that is missing,
    changed, or of another version.
    """
    folder = Path(folder)
    tables.check(folder)
    target_loss = tables.read_experiment(folder).get("target_loss")  # of time_to_target.sql
    connection = open_tables(folder, names=tables.TABLES)
    connection.execute("SET VARIABLE target_loss = ?::DOUBLE", [target_loss])
    with damage_reported(connection):
        create_views(connection)
    return connection


def open_tables(folder: Path, names: Iterable[str]) -> duckdb.DuckDBPyConnection:
    """Return an in-memory connection with these tables of the folder, which were checked before."""
    connection = duckdb.connect(":memory:")
    connection.execute("SET threads = 1")
    connection.execute("SET VARIABLE tables = ?", [str(folder)])
    with damage_reported(connection):
        for table in names:
            file = str(folder / f"{table}.parquet").replace("'", "''")
            name = RECORDED_RUNS if table == "runs" else table
            connection.execute(f"CREATE VIEW {name} AS FROM read_parquet('{file}')")
    return connection


@contextmanager
def damage_reported(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Around queries: raise a UserError that names the table where a query fails because a file
    changed meanwhile.
    """
    try:
        yield
    except duckdb.Error:
        [(folder,)] = connection.execute("SELECT getvariable('tables')").fetchall()
        tables.check(Path(folder))
        raise


def query(
    name: str, source: str | Path | duckdb.DuckDBPyConnection, **parameters: Any
) -> "pd.DataFrame":
    """The rows of a query as a DataFrame. `source` is a folder of tables or a connection made by
    `connect`.

    >>> PARAMETERS["throughput"]
    {'warmup_steps': 3}
    """
    text = sql(name)
    for key in parameters:
        if key not in PARAMETERS[name]:
            raise unknown(f"parameter of query {name}", word=key, words=PARAMETERS[name])
    values = PARAMETERS[name] | parameters
    if not isinstance(source, duckdb.DuckDBPyConnection):
        with closing(connect(source)) as connection:
            return query(name, source=connection, **parameters)
    with damage_reported(source):
        return source.execute(text, values or None).df()


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


def query_rows(connection: duckdb.DuckDBPyConnection, name: str) -> list[dict[str, Any]]:
    """The rows of a query with its default parameters, as dictionaries."""
    result = connection.execute(sql(name), PARAMETERS[name] or None)
    names = [column[0] for column in result.description]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


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
