"""Run the queries of `sql/` on an experiment's tables.

One thread: equal tables give equal digits.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from tokenscale.analysis import tables
from tokenscale.analysis.tables import WARM_UP_STEPS
from tokenscale.base.errors import unknown

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


def query_rows(connection: duckdb.DuckDBPyConnection, name: str) -> list[dict[str, Any]]:
    """The rows of a query with its default parameters, as dictionaries."""
    result = connection.execute(sql(name), PARAMETERS[name] or None)
    names = [column[0] for column in result.description]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]
