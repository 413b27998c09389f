"""Useful and total tokens per second by approach, one process."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels
from tokenscale.report.style import number, ordered

TITLE = "Training throughput by approach"
QUERIES = ("throughput", "inventory")
_RATES = {
    "useful_tokens_per_s": ("useful tokens / s", 1.0),
    "total_tokens_per_s": ("total tokens / s (padding included)", 1.0),
}


def data(throughput: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """The plotted points: one row a run at world size 1, of those that are like for like."""
    columns = [
        "series",
        "repeat",
        "run_id",
        "useful_tokens_per_s",
        "total_tokens_per_s",
        "not_useful_share",
        "steps",
        "seconds",
    ]
    kept, _ = _alike(throughput, inventory)
    return kept[columns].reset_index(drop=True)


def _alike(throughput: pd.DataFrame, inventory: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """See `words.alike`."""
    single = inventory[inventory["world_size"] == 1]
    return words.alike(throughput[throughput["world_size"] == 1], single, "approach")


def draw(throughput: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """Two panels, one row an approach: every run as a dot, the median as a bar."""
    single = inventory[inventory["world_size"] == 1]
    made, _ = panels.strips(throughput[throughput["world_size"] == 1], single, _RATES)
    return made


def caption(throughput: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """What is shown, of how many runs, and what the spread is."""
    points, refused = _alike(throughput, inventory)
    single = inventory[inventory["world_size"] == 1]
    text = (
        f"Tokens per second at world size 1, sum over sum after warm-up; {words.counted(len(points), single)}. "
        "Each dot is a run, each bar the median of a cell; open markers tokenize while training, filled ones read a "
        "store. "
    )
    text += f"{refused} " if refused else ""
    return text + words.kinds([group for _, group in points.groupby("series")["useful_tokens_per_s"]])


def alt(throughput: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The medians, read aloud."""
    points = data(throughput, inventory)
    medians = [
        f"{name} {number(points.loc[points['series'] == name, 'useful_tokens_per_s'].median())}"
        for name in ordered(points["series"])
    ]
    return f"Dot plot of tokens per second. Median useful tokens per second: {words.listing(medians) or 'no data'}."
