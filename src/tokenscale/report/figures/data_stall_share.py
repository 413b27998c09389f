"""Share of the step time spent waiting for data, by approach and world size."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import words
from tokenscale.report.style import dots, figure, jitter, no_data, number, ordered, style

TITLE = "Share of the training step spent waiting for data"
QUERIES = ("stalls", "inventory")


def data(stalls: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run."""
    stalls, _ = words.alike(stalls, inventory, "approach")
    return stalls.copy()


def draw(stalls: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """One row an approach and world size: every run as a dot, the median as a bar."""
    stalls, refused = words.alike(stalls, inventory, "approach")
    listed = inventory.dropna(subset=["series", "world_size"])
    cells = [
        (name, int(world))
        for name in ordered(listed["series"])
        for world in sorted(listed.loc[listed["series"] == name, "world_size"].unique())
    ][::-1]
    several = len({world for _, world in cells}) > 1
    with style():
        made, (axes,) = figure(height=1.2 + 0.36 * max(4, len(cells)))
        axes.set_xlabel("time waiting for the batch / step time (%)")
        if stalls.empty:
            no_data(axes, words.nothing(inventory, refused))
            return made
        for y, (name, world) in enumerate(cells):
            here = stalls[(stalls["series"] == name) & (stalls["world_size"] == world)]
            values = 100 * here["data_stall_share"]
            if values.empty:
                axes.text(
                    0.01, y, "no data", transform=axes.get_yaxis_transform(), va="center", style="italic", fontsize=9
                )
                continue
            axes.plot(values, [y + o for o in jitter(len(values))], **dots(name), clip_on=False)
            axes.plot([values.median()] * 2, [y - 0.32, y + 0.32], color=dots(name)["color"], linewidth=2)
        axes.set_yticks(range(len(cells)), [f"{n}, {_ranks(w)}" if several else n for n, w in cells])
        axes.set_ylim(-0.6, len(cells) - 0.4)
        axes.set_xlim(0, max(1.0, 110 * stalls["data_stall_share"].max()))
        axes.grid(False, axis="y")
        return made


def _ranks(world: int) -> str:
    return f"{world} rank{'s' * (world > 1)}"


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
            f"{_ranks(int(worst['world_size']))}), bounds what any data format could gain there: at most "
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
