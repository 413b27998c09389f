"""A figure as files: SVG, PDF and PNG with equal bytes for equal tables, its data, and its words."""

from dataclasses import asdict
from pathlib import Path

import duckdb
import pandas as pd
from matplotlib.figure import Figure

from tokenscale.analysis.queries import query
from tokenscale.files import atomic, write_json, write_text
from tokenscale.report import registry
from tokenscale.report.style import style

#: no date, no version of the program that drew it
_METADATA = {
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


def frames(name: str, connection: duckdb.DuckDBPyConnection) -> list[pd.DataFrame]:
    """The DataFrames that a figure's functions take, in order."""
    return [query(q, connection) for q in registry.module(name).QUERIES]


def save(name: str, connection: duckdb.DuckDBPyConnection, output: Path) -> list[Path]:
    """Write `<output>.{svg,pdf,png,csv,json}`; returns their paths."""
    made = registry.module(name)
    rows = frames(name, connection)
    figure = made.draw(*rows)
    paths = [output.with_name(f"{output.name}.{kind}") for kind in (*_METADATA, "csv", "json")]
    for path, (kind, metadata) in zip(paths, _METADATA.items(), strict=False):
        _save(figure, path, kind, metadata)
    write_text(paths[3], csv(made.data(*rows)))
    words = {"title": made.TITLE, "caption": made.caption(*rows), "alt": made.alt(*rows), "queries": list(made.QUERIES)}
    if hasattr(made, "table"):
        words["table"] = asdict(made.table(*rows))
    write_json(paths[4], {"schema": 1, "figure": name, **words})
    return paths


def _save(figure: Figure, path: Path, kind: str, metadata: dict) -> None:
    with style(), atomic(path) as temporary:
        background = {"facecolor": "white"} if kind == "png" else {}
        figure.savefig(temporary, format=kind, metadata=metadata, **background)


def csv(rows: pd.DataFrame) -> str:
    """Comma-separated values, ten significant digits, one way of ending lines."""
    return rows.to_csv(index=False, lineterminator="\n", float_format="%.10g")
