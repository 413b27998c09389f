"""The definitions of `sql/*.sql`, asked of a folder of tables. One thread: equal tables, equal digits."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.analysis.tables import ARROW, TABLES
from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import read_json

if TYPE_CHECKING:
    import pandas as pd

WARM_UP = {"warmup_steps": 3}
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
    "time_to_training_loss": TARGET,
    "stalls": WARM_UP,
    "communication": WARM_UP,
    "pretokenization": {},
    "storage": {},
    "break_even": WARM_UP,
    "benchmark": {},
    "storage_benchmark": {},
    "inference": {},
    "inference_steps": {},
    "generations": {},
    "scaling": WARM_UP,
    "scaling_weak": WARM_UP,
    "parallelism": WARM_UP,
    "pipeline": WARM_UP,
    "memory": {},
    "order": {},
    "phases": WARM_UP,
    "loss_difference": {"points": 100},
    "step_times": WARM_UP,
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


def connect(tables: str | Path) -> duckdb.DuckDBPyConnection:
    """An in-memory connection with every table of the folder, and `VIEWS`. Nothing is read before it is asked for: of
    two million steps a query needs a few columns. Raises UserError for a table that is missing or damaged."""
    tables = Path(tables)
    for table in TABLES:
        path = tables / f"{table}.parquet"
        if not path.exists():
            raise UserError("a table is missing.", path=path, next=_restoring(tables))
    target_loss = _target_loss(tables)  # of time_to_target.sql
    connection = duckdb.connect(":memory:")
    connection.execute("SET threads = 1")
    connection.execute("SET VARIABLE target_loss = ?::DOUBLE", [target_loss])
    connection.execute("SET VARIABLE tables = ?", [str(tables)])
    with damage_reported(connection):
        for table in TABLES:
            file = str(tables / f"{table}.parquet").replace("'", "''")
            connection.execute(f"CREATE VIEW {table} AS FROM read_parquet('{file}')")
        create_views(connection)
    return connection


@contextmanager
def damage_reported(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Around queries: raise a UserError that names the table's file where a query fails because of that file."""
    try:
        yield
    except duckdb.Error:
        (tables,) = connection.execute("SELECT getvariable('tables')").fetchone()
        errors = (_damage(Path(tables), table) for table in TABLES)
        error = next(filter(None, errors), None)
        if error is None:
            raise
        raise error from None


def _damage(tables: Path, table: str) -> UserError | None:
    """The error for a table that cannot be read to its end, or lacks columns of this version; None for a good one."""
    path = tables / f"{table}.parquet"
    try:
        schema = pq.read_table(path).schema
    except (OSError, pa.ArrowException) as error:
        return _damaged(path, error)
    wrong = [
        f"{name} ({kind})" for name, kind in TABLES[table].items()
        if name not in schema.names or schema.field(name).type != ARROW[kind]
    ]  # fmt: skip
    if not wrong:
        return None
    return UserError(
        "a table does not have the columns that this version writes.",
        path=path,
        missing=", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""),
        next=_restoring(tables),
    )


def _damaged(path: Path, error: Exception) -> UserError:
    denied = isinstance(error, PermissionError)
    return UserError(
        "a table may not be read by this user." if denied else "a table is damaged.",
        path=path,
        reason="it is a folder" if path.is_dir() else str(error).splitlines()[0],
        next=f"chmod u+r {path}" if denied else _restoring(path.parent, remove=path if path.is_dir() else None),
    )


def _restoring(tables: Path, remove: Path | None = None) -> str:
    """The command that makes an experiment's tables again from its logs."""
    folder = Path(os.path.relpath(tables))
    if folder.parts[:-1] == ("results", "tables"):
        command = f"snakemake -f {folder}/runs.parquet --cores 2"
    else:  # a copy of an experiment's tables
        command = f"python -m tokenscale ingest --experiment results/experiments/NAME/runs.json --output {tables}"
    return f"rm -r {remove} && {command}" if remove else command


def _target_loss(tables: Path) -> float | None:
    """The validation loss whose time the experiment asks for; None where it says none."""
    path = tables / "experiment.json"
    return read_json(path, "experiment's description").get("target_loss") if path.is_file() else None


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
