"""Figure → the module that draws it (dotted names: nothing is imported until asked for).

A figure's module holds `TITLE`, `QUERIES` (names of `analysis/sql`; their DataFrames, in this order, are the arguments
of the functions), `draw(*frames) -> Figure`, `caption(*frames) -> str`, `alt(*frames) -> str` and
`data(*frames) -> DataFrame`; one whose numbers are to be read, too, has `table(*frames) -> report.table.Table`.
"""

import importlib
from types import ModuleType

from tokenscale.base.errors import unknown
from tokenscale.settings.registry import FIGURES


def module(name: str) -> ModuleType:
    """The module of a figure. Raises UserError for a name that is none."""
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    return importlib.import_module(FIGURES[name])
