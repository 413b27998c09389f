"""Share of the step time spent waiting for data, by approach and world size."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels
from tokenscale.report.style import number, ordered

TITLE = "Share of the training step spent waiting for data"
QUERIES = ("stalls", "inventory")


def data(stalls: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run."""
    stalls, _ = words.alike(stalls, inventory, "approach")
    return stalls.copy()


def draw(stalls: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """One row an approach and world size: every run as a dot, the median as a bar."""
    label = {"data_stall_share": ("time waiting for the batch / step time (%)", 100.0)}
    made, (axes,) = panels.strips(stalls, inventory, label)
    if len(shown := data(stalls, inventory)):
        axes.set_xlim(0, max(1.0, 110 * shown["data_stall_share"].max()))
    return made


def caption(stalls: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """What the share bounds."""
    stalls, refused = words.alike(stalls, inventory, "approach")
    text = (
        f"Waiting for the batch over step time, slowest rank, after warm-up; {words.counted(len(stalls), inventory)}. "
    )
    if len(stalls):
        worst = stalls.loc[stalls["data_stall_share"].idxmax()]
        text += (
            f"The largest share, {100 * worst['data_stall_share']:.2g} % ({worst['series']}, "
            f"{panels.ranks(int(worst['world_size']))}), bounds what any data format could gain there: at most "
            f"{number(worst['largest_gain'])} times as fast (Amdahl). "
        )
    text += f"{refused} " if refused else ""
    return text + words.kinds([g for _, g in stalls.groupby(["series", "world_size"])["data_stall_share"]])


def alt(stalls: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The medians, read aloud."""
    stalls, _ = words.alike(stalls, inventory, "approach")
    medians = [
        f"{name} {100 * stalls.loc[stalls['series'] == name, 'data_stall_share'].median():.2g} %"
        for name in ordered(stalls["series"])
    ]
    return f"Dot plot of the share of step time spent waiting for data. Medians: {words.listing(medians) or 'no data'}."
