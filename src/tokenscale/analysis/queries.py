"""The definitions of `sql/*.sql`, asked of a folder of tables. One thread: equal tables, equal digits."""

from importlib import resources
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd

from tokenscale.analysis.tables import TABLES
from tokenscale.errors import UserError, unknown
from tokenscale.files import read_json

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
#: queries that others ask, in the order they are made
VIEWS = ("steps_global", "validation")


def sql(name: str) -> str:
    """The text of a query, with its definition as the comment at its head."""
    if name not in PARAMETERS:
        raise unknown("query", name, PARAMETERS)
    return resources.files("tokenscale.analysis").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


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
    two million steps a query needs a few columns."""
    tables = Path(tables)
    connection = duckdb.connect(":memory:")
    connection.execute("SET threads = 1")
    for table in TABLES:
        path = tables / f"{table}.parquet"
        if not path.is_file():
            connection.close()
            raise UserError(
                "a table is missing.", path=path, next="python -m tokenscale ingest --experiment … --runs … --output …"
            )
        file = str(path).replace("'", "''")
        connection.execute(f"CREATE VIEW {table} AS FROM read_parquet('{file}')")
    connection.execute("SET VARIABLE target_loss = ?::DOUBLE", [_target_loss(tables)])  # of time_to_target.sql
    for view in VIEWS:  # whoever asks a view gives its rows an order
        connection.execute(f"CREATE VIEW {view} AS {sql(view).rpartition('ORDER BY')[0]}")
    return connection


def _target_loss(tables: Path) -> float | None:
    """The validation loss whose time the experiment asks for; None where it says none."""
    path = tables / "experiment.json"
    return read_json(path, "experiment's description").get("target_loss") if path.is_file() else None


def query(name: str, source: str | Path | duckdb.DuckDBPyConnection, **parameters: Any) -> pd.DataFrame:
    """The rows of a query as a DataFrame. `source` is a folder of tables or a connection made by `connect`.

    >>> PARAMETERS["throughput"]
    {'warmup_steps': 3}
    """
    text = sql(name)
    for key in parameters:
        if key not in PARAMETERS[name]:
            raise unknown(f"parameter of query {name}", key, PARAMETERS[name])
    values = PARAMETERS[name] | parameters
    if isinstance(source, duckdb.DuckDBPyConnection):
        return source.execute(text, values or None).df()
    connection = connect(source)
    try:
        return connection.execute(text, values or None).df()
    finally:
        connection.close()
