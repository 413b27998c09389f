"""What processed positions do not train on: padding, and labels that begin a document."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import GREY, SKY, style

QUERIES = ("padding", "inventory")
_PARTS = {
    "padding_share": (SKY, "padding, in an epoch of the store"),
    "ignored_share": (GREY, "first labels"),
}


class PaddingShare(Figure):
    """What processed positions do not train on: padding, and labels that begin a document."""

    title = "Processed tokens that are not useful"
    queries = QUERIES
    factor = "approach"
    padding: pd.DataFrame

    def finding(self) -> str:
        """Return smallest and largest median share."""
        medians = 100 * self.rows.groupby("series")["not_useful_share"].median().dropna()
        if medians.empty:
            return self.title
        return f"Processed tokens that are not useful: {captions.extremes(medians, ' %').split(' (')[0]}"

    def data(self) -> pd.DataFrame:
        """Return one row per run, of those that are like for like."""
        return self.rows.drop(columns="approach").reset_index(drop=True)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw one row per cell: every run a dot; stacked behind them, what its store holds in a whole epoch."""
        label = {"not_useful_share": ("positions that are not useful / all processed positions (%)", 100.0)}
        made, (axes,) = panels.strips(self.padding, self.rows, self.refusals, self.inventory, label)
        if self.rows.empty:
            return made
        with style():
            for y, cell in enumerate(panels.cells(self.inventory)[::-1]):
                begin, here = 0.0, panels.at(self.rows, cell).dropna(subset=list(_PARTS))
                for column, (colour, _) in _PARTS.items() if len(here) else ():
                    width = 100 * here[column].median()
                    axes.barh(y, width, left=begin, height=0.62, color=colour, alpha=0.55, zorder=0.5)
                    begin += width
            if self.rows["padding_share"].notna().any():
                for colour, text in _PARTS.values():
                    axes.barh([0], [0], color=colour, alpha=0.55, label=text)
                panels.legend(made, axes)
            axes.set_xlim(0, 100 if 100 * self.rows["not_useful_share"].max() > 60 else None)
        return made

    def caption(self) -> str:
        """Return what is measured, and what the bars are."""
        text = (
            "Dots: share of a run's processed tokens that are not useful, after warm-up, medians as lines; "
            f"{self.counted()}. Bars: the same in a whole epoch of the run's store, from its manifest. Approaches that "
            "tokenize while training read no store and have no bar. Padding and first labels are counted apart: a "
            "label is ignored where it begins a document or a piece of one. A few steps read part of an epoch, so dots "
            "and bars may differ. "
        )
        text += self.refused()
        return text + captions.kinds(captions.by_cell(self.rows, "not_useful_share"))

    def alt(self) -> str:
        """Return the medians, read aloud."""
        read = captions.medians(self.data(), "not_useful_share", 100, " %")
        return (
            f"Dots and bars of the share of positions that train nothing. Medians by world size: {read or 'no data'}."
        )
