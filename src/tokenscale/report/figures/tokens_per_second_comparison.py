"""Useful and total tokens per second by approach, one process."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import words
from tokenscale.report.style import dots, figure, jitter, no_data, number, ordered, plain, style

TITLE = "Training throughput by approach"
QUERIES = ("throughput", "inventory")
_RATES = (("useful_tokens_per_s", "useful tokens / s"), ("total_tokens_per_s", "total tokens / s (padding included)"))


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
    points, refused = _alike(throughput, inventory)
    single = inventory[inventory["world_size"] == 1]
    names = ordered(single["series"].dropna())[::-1]
    measured = set(throughput.loc[throughput["world_size"] == 1, "series"])
    with style():
        made, panels = figure(2, height=1.3 + 0.46 * max(3, len(names)), sharey=True)
        for axes, (column, label) in zip(panels, _RATES, strict=True):
            axes.set_xlabel(label)
            if points.empty:
                no_data(axes, words.nothing(inventory, refused, len(single)))
                continue
            for y, name in enumerate(names):
                values = points.loc[points["series"] == name, column]
                if values.empty:
                    axes.text(
                        0.02,
                        y,
                        "not like for like" if name in measured else "no data",
                        transform=axes.get_yaxis_transform(),
                        va="center",
                        style="italic",
                        fontsize=9,
                    )
                    continue
                axes.plot(values, [y + o for o in jitter(len(values))], **dots(name))
                axes.plot([values.median()] * 2, [y - 0.32, y + 0.32], color=dots(name)["color"], linewidth=2)
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(-0.6, len(names) - 0.4)
            axes.set_xlim(0, 1.08 * points[column].max())
            axes.xaxis.set_major_locator(_ticks())
            axes.grid(False, axis="y")
            plain(axes.xaxis)
        return made


def _ticks():
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(5, steps=[1, 2, 5, 10])


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
