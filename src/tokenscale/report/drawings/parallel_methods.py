"""Parallel methods beside each other: throughput, memory of a device, and the table of both."""

import matplotlib.figure
import pandas as pd
from matplotlib.ticker import MaxNLocator

from tokenscale.analysis.statistics import summary
from tokenscale.report import captions, text_layout
from tokenscale.report.figure import Figure
from tokenscale.report.style import BLUE, GREY, ORANGE, PURPLE, SKY, figure, jitter, no_data, number, plain, style
from tokenscale.report.table import Table

QUERIES = ("parallelism", "inventory")
#: what fills a device, as it is stacked
_PARTS = {"parameters": BLUE, "gradients": SKY, "optimizer": ORANGE, "activations": PURPLE}
#: what efficiencies of a cell are worth, in the words of a table
_MEASURES = {
    "": "yes",
    captions.OVERSUBSCRIBED: "no: oversubscribed CPU",
    captions.SHARED_CORES: "no: shares the single rank's cores",
}


def cells(parallelism: pd.DataFrame) -> list[tuple[str, int, pd.DataFrame]]:
    """(method, ranks, its repeats), in the order of the query; other factors are named where they vary."""
    further = ["approach", "factors", "storage"]
    several = [column for column in further if parallelism[column].nunique() > 1]
    grouped = parallelism.groupby([*further, "world_size", "method", "layout"], sort=False)
    return [
        (", ".join([key[4], *filter(None, (key[further.index(column)] for column in several))]), int(key[3]), rows)
        for key, rows in grouped
    ]


def _measure(world: int, group: pd.DataFrame) -> str:
    """Does the efficiency of a cell say how the method scales?"""
    if world == 1:
        return "reference"
    if group["efficiency"].isna().all():
        return "no: no run on one rank"
    if (reason := captions.caution(group)) == "" and (group["device_kind"] == "cpu").all():
        return "yes, if idle"  # nobody records what else ran
    return _MEASURES[reason]


def _same(group: pd.DataFrame) -> str:
    known = group["same_data"].dropna()
    return "–" if known.empty else "yes" if known.astype(bool).all() else "no"


def _spreads(parallelism: pd.DataFrame) -> str:
    return captions.kinds([group["useful_tokens_per_s"] for _, _, group in cells(parallelism)])


def _warning(shown: list[tuple[str, int, pd.DataFrame]]) -> str:
    """Why cells are no scaling measurement, with their numbers of ranks; or nothing."""
    worlds: dict[str, set[int]] = {}
    for _, world, group in shown:
        if reason := captions.caution(group):
            worlds.setdefault(reason, set()).add(world)
    texts = [f"{captions.listing([str(n) for n in sorted(found)])} ranks, {why}" for why, found in worlds.items()]
    return "; ".join(texts)


class ParallelMethods(Figure):
    """Parallel methods beside each other: throughput, memory of a device, and the table of both."""

    title = "Parallel methods: throughput and memory"
    queries = QUERIES
    factor = "layout"

    def finding(self) -> str:
        """Return the range of memory at the most ranks."""
        rows = self.rows.dropna(subset=["memory_bytes"])
        rows = rows[rows["world_size"] == rows["world_size"].max()]
        if rows["method"].nunique() < 2:
            return self.title
        memory = 1e-6 * rows.groupby("method")["memory_bytes"].median()
        return f"Memory of the fullest of {int(rows['world_size'].iloc[0])} ranks: {captions.extremes(memory, ' MB')}"

    def data(self) -> pd.DataFrame:
        """Return the table as numbers: one row per cell, medians over its runs with the ends of their spread."""
        columns = [
            "gpus",
            "method",
            "runs",
            "useful_tokens_per_s",
            "useful_tokens_per_s_low",
            "useful_tokens_per_s_high",
        ]
        columns += [
            "memory_bytes",
            *(f"{part}_bytes" for part in _PARTS),
            "efficiency",
            "efficiency_low",
            "efficiency_high",
        ]
        columns += ["scaling_measurement", "final_loss", "largest_loss_difference", "same_data", "layout"]
        rows = []
        for name, world, group in cells(self.rows):
            speed, share = summary(group["useful_tokens_per_s"]), summary(group["efficiency"].dropna())
            rows.append(
                [world, name, len(group), speed.median, speed.low, speed.high]
                + [group[f"{part}_bytes"].max() for part in ("memory", *_PARTS)]
                + [share.median, share.low, share.high, _measure(world, group), group["final_loss"].median()]
                + [group["largest_loss_difference"].max(), _same(group), group["layout"].iloc[0]]
            )
        return pd.DataFrame(rows, columns=columns)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw one row per cell. Left: useful tokens/s, medians as bars. Right: memory of the fullest rank."""
        shown = cells(self.rows)
        with style():
            made, (left, right) = figure(2, height=1.6 + 0.3 * max(4, len(shown)), sharey=True)
            left.set_xlabel("useful tokens / s, all ranks together")
            right.set_xlabel("memory of the fullest rank (MB)")
            if not shown:
                for axes in (left, right):
                    no_data(axes, captions.nothing(self.inventory, self.refusals))
                return made
            held = False
            for y, (_, world, group) in enumerate(shown):
                colour = GREY if world == 1 else BLUE
                face = "none" if captions.caution(group) else colour
                speeds = group["useful_tokens_per_s"]
                left.plot(
                    speeds, [y + o for o in jitter(len(speeds))], "o", color=colour, markerfacecolor=face, markersize=5
                )
                left.plot([speeds.median()] * 2, [y - 0.36, y + 0.36], color=colour, linewidth=2)
                begin = 0.0
                fullest = group.loc[group["memory_bytes"].idxmax()] if group["memory_bytes"].notna().any() else None
                if fullest is None:
                    right.text(
                        0.02, y, "not measured", transform=right.get_yaxis_transform(), va="center", style="italic"
                    )
                    continue
                held = True
                for part, filled in _PARTS.items():
                    width = 1e-6 * fullest[f"{part}_bytes"]
                    right.barh(y, width, left=begin, height=0.66, color=filled)
                    begin += width
            worlds = [world for _, world, _ in shown]
            for y in range(1, len(shown)):
                if worlds[y] != worlds[y - 1]:
                    for axes in (left, right):
                        axes.axhline(y - 0.5, color=GREY, linewidth=0.7, linestyle=":")
            texts = [f"{name}, {world}" if world > 1 else name for name, world, _ in shown]
            left.set_yticks(range(len(shown)), text_layout.names(texts))
            left.set_ylim(len(shown) - 0.4, -0.6)
            left.set_xlim(left=0)
            left.set_ylabel("method, ranks")
            for axes in (left, right):
                axes.grid(False, axis="y")
                axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
                plain(axes.xaxis)
            right.set_xlim(left=0)
            if held:
                for part, filled in _PARTS.items():
                    right.barh([0], [0], color=filled, label=part)
                made.legend(loc="outside upper right", ncols=len(_PARTS), handlelength=1.2)
            if _warning(shown):
                left.set_title("open: no scaling measurement", fontsize=9)
            return made

    def caption(self) -> str:
        """Return what is compared, whether it is a scaling measurement, and whether the losses agree."""
        text = (
            "The same training under each parallel method: global batch, learning rate and steps are equal; "
            f"{self.counted()}. Each dot is a run, each bar the median of a cell. "
        )
        if warning := _warning(cells(self.rows)):
            text += f"Open dots: {warning}. "
        several = self.rows[self.rows["world_size"] > 1]
        if several["largest_loss_difference"].notna().any():
            text += (
                "Against the run on one rank of the same repeat, losses differ by at most "
                f"{several['largest_loss_difference'].max():.2g} nats at any step. "
            )
        text += self.refused()
        return text + _spreads(self.rows)

    def alt(self) -> str:
        """Return medians, read aloud."""
        texts = [
            f"{name} on {world}: {number(group['useful_tokens_per_s'].median())}"
            for name, world, group in cells(self.rows)
        ]
        read = captions.listing(texts) or "No data"
        warning = _warning(cells(self.rows))
        return f"Dot plot and bars by parallel method, median useful tokens per second. {read}. {warning}".strip()

    def table(self) -> Table:
        """Return the same as people read it."""
        columns = [("GPUs (ranks)", True), ("method", False), ("runs", True), ("useful tokens / s", True)]
        columns += [("memory per device (MB)", True), ("efficiency (%)", True), ("a scaling measurement?", False)]
        columns += [("final loss", True), ("largest loss difference (nats)", True), ("same data", False)]
        rows = []
        for name, world, group in cells(self.rows):
            difference = group["largest_loss_difference"].max()
            rows.append(
                [
                    str(world),
                    name,
                    str(len(group)),
                    captions.spread(group["useful_tokens_per_s"]),
                    number(1e-6 * group["memory_bytes"].max()),
                    captions.spread(100 * group["efficiency"].dropna()),
                    _measure(world, group),
                    captions.spread(group["final_loss"], 5),
                    "reference" if world == 1 else "–" if pd.isna(difference) else f"{difference:.2g}",
                    _same(group),
                ]
            )
        text = (
            "A rank is a GPU where there are GPUs. Medians over runs, their spread in brackets; efficiency is T(N) / "
            "(N × T(1)), against the run on one rank of the same repeat. Memory: what the fullest rank holds of "
            "parameters, gradients, optimizer state and activations. The loss difference is the largest of all steps "
            "and repeats, the last step included, against the run on one rank."
        )
        return Table(columns, rows, f"{text} {_spreads(self.rows)}".strip())
