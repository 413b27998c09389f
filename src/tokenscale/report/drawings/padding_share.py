"""What processed positions do not train on: padding, and labels that begin a document."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels
from tokenscale.report.style import GREY, SKY, number, style

TITLE = "Processed positions that train nothing"
QUERIES = ("padding", "inventory")
_PARTS = {
    "padding_share": (SKY, "padding, in an epoch of the store"),
    "ignored_share": (GREY, "first labels"),
}


def data(padding: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run, of those that are like for like."""
    kept, _ = words.alike(padding, inventory, "approach")
    return kept.drop(columns="approach").reset_index(drop=True)


def draw(padding: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """One row a cell: every run a dot, and behind them, stacked, what the store of the run holds in a whole epoch."""
    kept, _ = words.alike(padding, inventory, "approach")
    label = {"not_useful_share": ("positions that are not useful / all processed positions (%)", 100.0)}
    made, (axes,) = panels.strips(padding, inventory, label)
    if kept.empty:
        return made
    with style():
        for y, cell in enumerate(panels.cells(inventory)[::-1]):
            begin, here = 0.0, panels.at(kept, cell).dropna(subset=list(_PARTS))
            for column, (colour, _) in _PARTS.items() if len(here) else ():
                width = 100 * here[column].median()
                axes.barh(y, width, left=begin, height=0.62, color=colour, alpha=0.55, zorder=0.5)
                begin += width
        if kept["padding_share"].notna().any():
            for colour, text in _PARTS.values():
                axes.barh([0], [0], color=colour, alpha=0.55, label=text)
            panels.legend(made, axes)
        axes.set_xlim(0, 100 if 100 * kept["not_useful_share"].max() > 60 else None)
    return made


def caption(padding: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """What is measured, and what the bars are."""
    kept, refused = words.alike(padding, inventory, "approach")
    text = (
        "Dots: 1 − useful over processed tokens of a run's steps after warm-up, medians as lines; "
        f"{words.counted(len(kept), inventory)}. Bars: what the manifest of the run's store counts in a whole epoch, "
        "padding and apart from it labels that are ignored because they begin a document or a piece of one; approaches "
        "that tokenize while training read no store, and have none. A few steps see a part of an epoch, so that dots "
        "and bars need not agree. "
    )
    worst = kept.sort_values("not_useful_share").tail(1)
    for r in worst.itertuples():
        text += f"The largest share is {number(100 * r.not_useful_share)} % ({r.series}). "
    text += f"{refused} " if refused else ""
    return text + words.kinds(words.by_cell(kept, "not_useful_share"))


def alt(padding: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The medians, read aloud."""
    read = words.medians(data(padding, inventory), "not_useful_share", 100, " %")
    return f"Dots and bars of the share of positions that train nothing. Medians by world size: {read or 'no data'}."
