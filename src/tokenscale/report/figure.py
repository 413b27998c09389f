"""A figure of an experiment: its rows are chosen once, and drawn, described and tabulated from the same values."""

from collections.abc import Mapping
from typing import ClassVar

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions
from tokenscale.report.table import Table


class Figure:
    """Base class of figures. Each frame, the rows of a query, is an attribute with the query's name.

    A subclass sets `title`, `queries` (names of `analysis/sql`, the first with a row per run or point), and `factor`,
    or its own `prepare`. It annotates the frames that it reads by name, and defines `data`, `draw`, `caption` and
    `alt`, and `table` where people read the numbers.
    """

    title: ClassVar[str]
    queries: ClassVar[tuple[str, ...]]
    #: runs are compared along this factor (see `analysis/comparability.py`); empty: no run is left out
    factor: ClassVar[str] = ""

    inventory: pd.DataFrame
    #: rows of the first query of runs that are comparable, and sentences on runs that are not
    rows: pd.DataFrame
    refusals: str

    def __init__(self, *frames: pd.DataFrame):
        """Take the frames in the order of `queries`; nobody writes to them."""
        for query, frame in zip(self.queries, frames, strict=True):
            setattr(self, query, frame)
        self.prepare()

    def prepare(self) -> None:
        """Choose the rows that are shown."""
        self.rows, self.refusals = self.first, ""
        if self.factor:
            self.rows, self.refusals = captions.comparable(self.first, self.inventory, self.factor)

    @property
    def first(self) -> pd.DataFrame:
        """All rows of the first query."""
        return getattr(self, self.queries[0])

    def finding(self) -> str:
        """Return what the figure shows, with its main number; the title where no single number states it."""
        return self.title

    def folded(self) -> str:
        """Return why the figure has nothing to show here, so that the page folds it away; empty where it has."""
        return "" if len(self.data()) else f"{self.title}: no data"

    def data(self) -> pd.DataFrame:
        """Return what is plotted, for the CSV and Parquet files."""
        raise NotImplementedError

    def draw(self) -> matplotlib.figure.Figure:
        """Return a new drawing."""
        raise NotImplementedError

    def caption(self) -> str:
        """Return what is shown, of how many runs, and what the spread is; what a reader needs first comes first."""
        raise NotImplementedError

    def alt(self) -> str:
        """Return the main numbers, read aloud."""
        raise NotImplementedError

    def table(self) -> Table | None:
        """Return the numbers as a table for people, or None."""
        return None

    def counted(self) -> str:
        """Return how many of the listed runs are shown, one row a run."""
        return captions.counted(len(self.rows), self.inventory)

    def crowded(self) -> str:
        """Return a sentence if ranks share cores; nothing where no run is shown."""
        return captions.sentence(captions.crowded(self.inventory) if len(self.rows) else "")

    def refused(self) -> str:
        """Return the sentences on runs that are not comparable, with a space after them."""
        return f"{self.refusals} " if self.refusals else ""


class MeasuresFigure(Figure):
    """Base class of figures with one panel per column. A subclass names the columns and writes its own sentences."""

    #: what is drawn: column → (label with the unit, factor to that unit)
    measures: Mapping[str, tuple[str, float]]
    #: columns of the data
    columns: ClassVar[tuple[str, ...]]
    #: column whose spread the caption names, and which is read aloud with this factor and unit
    main: ClassVar[str]
    unit: ClassVar[tuple[float, str]] = (1.0, "")
    #: the alternative text around the medians
    read: ClassVar[str]

    def data(self) -> pd.DataFrame:
        """Return one row per comparable run."""
        return self.rows[list(self.columns)].reset_index(drop=True)

    def sentences(self) -> str:
        """Return what is counted, each sentence with a space after it."""
        raise NotImplementedError
