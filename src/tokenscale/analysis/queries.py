"""The definitions of `sql/*.sql`, asked of a folder of tables. One thread, in memory: equal tables, equal digits."""

from importlib import resources
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd

from tokenscale.analysis.tables import TABLES
from tokenscale.errors import UserError, unknown

#: query → default of each parameter
PARAMETERS: dict[str, dict[str, Any]] = {
    "steps_global": {},
    "throughput": {"warmup_steps": 3},
    "loss": {},
    "validation": {},
    "stalls": {"warmup_steps": 3},
    "benchmark": {},
    "scaling": {"warmup_steps": 3},
    "parallelism": {"warmup_steps": 3},
    "pipeline": {"warmup_steps": 3},
    "memory": {},
    "order": {},
    "inventory": {},
}


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
    """An in-memory connection with every table of the folder, and `steps_global`."""
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
        connection.execute(f"CREATE TABLE {table} AS SELECT * FROM read_parquet(?)", [str(path)])
    connection.execute(f"CREATE TABLE steps_global AS {sql('steps_global')}")
    return connection


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
