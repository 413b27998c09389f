"""Every figure as a function of a DataFrame, for notebooks: `figures.scaling_throughput(df)` is a matplotlib Figure.

>>> from tokenscale.report import figures
>>> "scaling_throughput" in dir(figures)
True

`df` holds the rows of the first of the figure's queries (`tokenscale.analysis.queries.query`); the frames of its
further queries may be given by name. Nothing is drawn, and matplotlib not imported, before a figure is asked for.
"""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pandas as pd

from tokenscale.analysis.tables import ARROW, TABLES
from tokenscale.base.errors import UserError, unknown
from tokenscale.settings.registry import FIGURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: column of a query → key of a cell, where the rows name no series
_KEYS = {"approach": "approach", "method": "layout.method", "schedule": "layout.schedule", "micro_batch": "micro_batch"}


def __getattr__(name: str) -> Callable[..., "Figure"]:
    """The function of a figure, by its name."""
    if name not in FIGURES:
        raise AttributeError(f"tokenscale.report.figures has no figure {name!r}; there are {', '.join(FIGURES)}")
    return _function(name)


def __dir__() -> list[str]:
    return sorted([*FIGURES, *(name for name in globals() if name.startswith("__"))])


@functools.cache
def _function(name: str) -> Callable[..., "Figure"]:
    """The function `NAME(df, **frames)`, with the words of its figure as docstring."""
    from tokenscale.report import registry

    kind = registry.figure_class(name)
    first, *others = kind.queries

    def figure(df: pd.DataFrame, **frames: pd.DataFrame) -> "Figure":
        for key in frames:
            if key not in others:
                raise unknown(f"frame of figure {name}", key, others)
        given = {first: df, **frames}
        for query, frame in given.items():
            _check(name, query, frame)
        drawn = kind(*(given[q] if q in given else _stands_for(q, df) for q in kind.queries)).draw()
        drawn.set_layout_engine("constrained")  # whoever adds to it wants room for that
        return drawn

    figure.__name__ = figure.__qualname__ = name
    figure.__doc__ = (
        f"{kind.title}.\n\n{kind.__doc__}\n\n"
        f'`df` holds the rows of `tokenscale.analysis.queries.query("{first}", tables)`, where `tables` is a folder '
        f"like `results/tables/demo`.{_optional(others)}\n\n"
        "Returns a matplotlib Figure. Raises UserError for a DataFrame that is not of that query."
    )
    return figure


def _optional(others: list[str]) -> str:
    if not others:
        return ""
    text = f" Frames of further queries, by name: {', '.join(others)}."
    if "inventory" in others:
        text += " Without `inventory`, all runs of `df` are taken to be valid and alike in all that `df` does not tell."
    return text


def _check(name: str, query: str, frame: Any) -> None:
    """Raises UserError where a frame lacks columns of its query."""
    if not isinstance(frame, pd.DataFrame):
        raise UserError(
            f"figure {name} is drawn from a pandas DataFrame.",
            frame=query,
            found=type(frame).__name__,
            next=_query(query),
        )
    missing = [column for column in columns(query) if column not in frame]
    if missing:
        raise UserError(
            f"this DataFrame is not one of the query {query}.",
            figure=name,
            missing=", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else ""),
            next=_query(query),
        )


def _query(query: str) -> str:
    return f'tokenscale.analysis.queries.query("{query}", "results/tables/NAME")'


@functools.cache
def columns(query: str) -> dict[str, Any]:
    """Column → type of a query's result, asked of tables without a row."""
    import duckdb

    from tokenscale.analysis.queries import PARAMETERS, create_views, sql

    connection = duckdb.connect(":memory:")
    try:
        for table, fields in TABLES.items():
            typed = ", ".join(f'"{key}" {kind}' for key, kind in fields.items())
            connection.execute(f"CREATE TABLE {table} ({typed})")
        create_views(connection)
        rows = connection.execute(sql(query), PARAMETERS[query] or None).df()
    finally:
        connection.close()
    return dict(rows.dtypes)


def _stands_for(query: str, df: pd.DataFrame) -> pd.DataFrame:
    """What is drawn where a frame is not given: an inventory of the runs of `df`, else a frame without rows."""
    if query != "inventory" or "run_id" not in df:
        return pd.DataFrame({key: pd.Series(dtype=kind) for key, kind in columns(query).items()})
    runs = df.drop_duplicates("run_id").reset_index(drop=True)
    absent = {kind: pd.Series(math.nan, runs.index, object if kind == "VARCHAR" else float) for kind in ARROW}
    made = pd.DataFrame({key: runs.get(key, absent[kind]) for key, kind in TABLES["runs"].items()})
    return made.assign(cell=_cells(runs), external=False, validity="valid", sealed=True)


def _cells(runs: pd.DataFrame) -> list[str]:
    """Levels of each run, as the table `runs` names them: its series, or what its query tells; its world size."""
    keys = {"series": "approach"} if "series" in runs else {k: v for k, v in _KEYS.items() if k in runs}
    keys |= {"world_size": "layout.data"} if "world_size" in runs else {}
    rows = runs[list(keys)].itertuples(index=False)
    return [", ".join(f"{key}={value}" for key, value in zip(keys.values(), row, strict=True)) for row in rows]
