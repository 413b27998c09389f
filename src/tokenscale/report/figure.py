"""A figure of an experiment: its rows are chosen once, and drawn, described and tabulated from the
same values.
"""

import importlib
from collections.abc import Mapping
from typing import ClassVar

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from tokenscale.base.errors import UserError, unknown
from tokenscale.report import captions
from tokenscale.report.style import no_data, style
from tokenscale.report.table import Table
from tokenscale.settings.extensions import load_figure
from tokenscale.settings.registry import ALIASES, FIGURES, OWN_FIGURE

#: sentences of several figures, word for word: a page prints once what it has several times
DOTS = "Each dot is a run, each bar the median of a cell. "
JOINED = "Each dot is a run; medians are joined. "
CURVES = "Thin lines are repeats, bold ones their median point by point: no interval. "
POINTS = "A run has at most 100 points. "
RATES = "Rates are all tokens over all seconds after the warm-up. "
SLOWEST = "A step takes as long as on its slowest rank. "
FLOPS = (
    "FLOPs a token: 6 N + 12 L d T, attention over the full square (Chowdhery et al. 2022, "
    "appendix B). "
)


def figure_class(name: str) -> type["Figure"]:
    """Return the class of a figure or an alias. Raises UserError for a name that is none, and for an
    own figure whose module cannot be used.
    """
    if OWN_FIGURE.fullmatch(name):
        found = load_figure(name.replace(".", ":"))
        if issubclass(found, Figure):
            return found
        raise UserError(
            "an own figure is no subclass of Figure.",
            figure=name,
            next="derive it from tokenscale.report.figure.Figure",
        )
    if (figure := ALIASES.get(name, name)) not in FIGURES:
        raise unknown("figure", word=name, words=(*FIGURES, *ALIASES))
    return getattr(importlib.import_module(FIGURES[figure]), figure.title().replace("_", ""))


class Figure:
    """Base class of figures. Each frame, the rows of a query, is an attribute with the query's
    name.

    A figure is a row of data: `title`, `queries` (names of `analysis/sql`, the first with a row per
    run or point), `factor`, `measures`, `main` and `words`. Where these do not say it, a subclass
    has its own `prepare`, `sentences`, `draw` or `table`. It annotates the frames that it reads by
    name.
    """

    title: ClassVar[str]
    queries: ClassVar[tuple[str, ...]]
    #: runs are compared along this factor (see `referee/comparability.py`); empty: no run is left
    #: out
    factor: ClassVar[str] = ""
    #: columns of the data; empty: all but the approach
    columns: ClassVar[tuple[str, ...]] = ()
    #: sentences of the caption, each with a space after it; `{counted}` stands for the number of
    #: runs
    words: ClassVar[str]
    #: the caption and the panels say if ranks share cores
    cores_matter: ClassVar[bool] = True
    #: column whose spread the caption names (empty: none), and whose medians are read aloud with
    #: this factor and unit
    main: str = ""
    unit: tuple[float, str] = (1.0, "")
    #: columns of the rows that name a cell
    by: ClassVar[tuple[str, ...]] = ("series", "world_size")
    #: words before the smallest and largest median of `main` in the finding; empty: the finding is
    #: the title
    found: str = ""
    #: the alternative text around the medians; empty: the title, and the label of `main` if it is
    #: drawn
    read: ClassVar[str] = ""
    #: what is drawn, one panel per column: column → (label with the unit, factor to that unit)
    measures: Mapping[str, tuple[str, float]] = {}

    inventory: pd.DataFrame
    #: all rows of the first query
    first: pd.DataFrame
    #: rows of the first query of runs that are comparable, and sentences on runs that are not
    rows: pd.DataFrame
    refusals: str

    def __init__(self, *frames: pd.DataFrame):
        """Take the frames in the order of `queries`; figures do not change them."""
        for query, frame in zip(self.queries, frames, strict=True):
            setattr(self, query, frame)
        self.first = frames[0]
        self.prepare()

    def __init_subclass__(cls) -> None:
        """Draw in the report's style."""
        if "draw" in vars(cls):
            cls.draw = style()(cls.draw)  # type: ignore[method-assign]

    def prepare(self) -> None:
        """Choose the rows that are shown."""
        self.rows = self.first
        self.refusals = ""
        if self.factor:
            self.rows, self.refusals = captions.select_comparable(
                self.first, self.inventory, self.factor
            )

    def finding(self) -> str:
        """Return the smallest and largest median of the series; the title without."""
        text = self.found and captions.median_extremes(
            self.rows,
            column=self.main,
            unit=self.unit[1],
            factor=self.unit[0],
        )
        return f"{self.found} {text}" if text else self.title

    def folded(self) -> str:
        """Return why the figure has nothing to show here, so that the page folds it away; empty
        where it has.
        """
        return "" if len(self.data()) else f"{self.title}: no data"

    def data(self) -> pd.DataFrame:
        """Return what is plotted, for the CSV and Parquet files."""
        rows = self.rows[list(self.columns)] if self.columns else self.rows.drop(columns="approach")
        return rows.reset_index(drop=True)

    def draw(self) -> Drawing:
        """Return a new drawing."""
        raise NotImplementedError

    def no_data(self, drawing: Drawing, *panels: Axes) -> Drawing:
        """Say in some panels, or all, that no run is there, or that those there are may not be
        compared.
        """
        for axes in panels or drawing.axes:
            no_data(axes, text=captions.explain_absence(self.inventory, refused=self.refusals))
        return drawing

    def caption(self) -> str:
        """Return what is shown, of how many runs, and what the spread is; what a reader needs first
        comes first.
        """
        text = self.crowded() + self.sentences() + (self.refusals and f"{self.refusals} ")
        return text + captions.describe_spread(self.groups()) if self.main else text.strip()

    def sentences(self) -> str:
        """Return what is shown, each sentence with a space after it."""
        return self.words.format(counted=self.counted())

    def groups(self) -> list[pd.Series]:
        """Return the values of each cell whose spread the caption names."""
        return captions.group_by_cell(self.rows, column=self.main, by=self.by)

    def alt(self) -> str:
        """Return the main numbers, read aloud."""
        label = self.measures[self.main][0].partition(" (")[0] if self.main in self.measures else ""
        read = self.read or f"{self.title}. {label and f'Median {label}: '}{{}}."
        return read.format(self.numbers() or ("No data" if ". {}" in read else "no data"))

    def numbers(self) -> str:
        """Return the numbers that are read aloud, the median of each cell; nothing without any."""
        return captions.describe_medians(self.rows, self.main, *self.unit, self.by)

    def table(self) -> Table | None:
        """Return the numbers as a table for people, or None."""
        return None

    def counted(self) -> str:
        """Return how many of the listed runs are shown, one row a run."""
        return captions.count_shown(len(self.rows), runs=self.inventory)

    def crowded(self) -> str:
        """Return a sentence if ranks share cores; nothing where no run is shown."""
        return captions.as_sentence(
            captions.caution_crowding(self.inventory)
            if self.cores_matter and len(self.rows)
            else ""
        )
