"""The definitions of `sql/*.sql`, asked of a folder of tables. One thread: equal tables, equal digits."""

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
