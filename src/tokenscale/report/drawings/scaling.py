"""Strong and weak scaling: throughput and efficiency by world size."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import number, ordered

QUERIES = ("scaling", "scaling_weak", "inventory")


def efficiency_finding(rows: pd.DataFrame, warning: str = "") -> str:
    """The range of median efficiencies at the largest world size, as a sentence; nothing without any.

    With a `warning` that the runs are no scaling measurement, the sentence says so.
    """
    above = rows[(rows["world_size"] > rows["base_world_size"]) & rows["efficiency"].notna()]
    if above.empty:
        return ""
    world = int(above["world_size"].max())
    medians = 100 * above[above["world_size"] == world].groupby("series")["efficiency"].median()
    text = f"Efficiency at world size {world}: {captions.extremes(medians, ' %').split(' (')[0]}"
    return f"{text}; no scaling measurement" if warning else text


class Scaling(Figure):
    """Base class. Left: useful tokens/s, medians joined, the ideal dotted. Right: efficiency of each pair of runs."""

    factor = "world_size"

    def data(self) -> pd.DataFrame:
        """Return one row per run that is comparable at every world size."""
        return self.rows.reset_index(drop=True)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw both panels."""
        return panels.scaling(self.rows, self.inventory, self.refusals, self.warning())

    def folded(self) -> str:
        """Return that ranks share cores: the figure cannot answer how training scales."""
        return super().folded() or captions.sentence(self.warning()).strip(". ")

    def finding(self) -> str:
        """Return the range of median efficiencies at the largest world size."""
        return efficiency_finding(self.rows, self.warning()) or self.title

    def warning(self) -> str:
        """Return why this is no scaling measurement, or nothing."""
        raise NotImplementedError

    def not_compared(self) -> str:
        """Return sentences on runs that have no efficiency."""
        return "".join(
            f"{len(rows)} run{'s have' if len(rows) > 1 else ' has'} no efficiency: {reason}. "
            for reason, rows in self.rows.groupby("not_compared")
        )


class ScalingThroughput(Scaling):
    """Strong scaling: throughput and efficiency by world size at a fixed global batch."""

    title = "Throughput and efficiency by world size"
    queries = ("scaling", "inventory")

    def warning(self) -> str:
        """Return why this is no scaling measurement, or nothing."""
        return captions.caution(self.rows)

    def caption(self) -> str:
        """Return the reference with its absolute value, and whether this is a scaling measurement at all."""
        at_one = set(_bases(self.rows)) <= {1}
        text = captions.sentence(self.warning()) + (
            f"Strong scaling at a fixed global batch, useful tokens per second over all ranks; {self.counted()}. "
            "Efficiency is of each run against the run of the same repeat at "
            f"{'world size 1' if at_one else 'N0, the smallest world size measured'}. "
        )
        base = [
            f"{name}{'' if size == 1 else f' (N0 = {size})'} {captions.spread(rates['useful_tokens_per_s'])}"
            for name in ordered(self.rows["series"])
            for size in _bases(self.rows[self.rows["series"] == name])
            if len(rates := panels.at(self.rows, (name, size)))
        ]
        text += self.refused()
        text += f"T({'1' if at_one else 'N0'}) in useful tokens / s: {captions.listing(base)}. " if base else ""
        text += self.not_compared()
        groups = [group for _, group in self.rows.groupby(["series", "world_size"])["useful_tokens_per_s"]]
        return text + captions.kinds(groups)

    def alt(self) -> str:
        """Return medians of throughput, read aloud."""
        medians = self.rows.groupby(["series", "world_size"])["useful_tokens_per_s"].median()
        texts = [f"{name} on {world}: {number(value)}" for (name, world), value in medians.items()]
        read = captions.listing(texts) or "No data"
        return f"Throughput by world size, median useful tokens per second. {read}. {self.warning()}".strip()


def _bases(rows: pd.DataFrame) -> list[int]:
    """Return the world sizes that efficiencies are against."""
    return sorted(int(size) for size in rows["base_world_size"].unique())


class ScalingWeak(Scaling):
    """Weak scaling: throughput and efficiency by world size at a fixed batch per rank."""

    title = "Weak scaling: throughput and efficiency by world size"
    queries = ("scaling_weak", "inventory")

    def prepare(self) -> None:
        """Name series without their global batch; leave out lines of one world size."""
        super().prepare()
        rows = self.rows.assign(series=captions.without(self.rows["series"], "global_batch"))
        line = ["series", "rows_per_rank", "base_world_size"]
        self.rows = rows[rows.groupby(line)["world_size"].transform("nunique") > 1]

    def warning(self) -> str:
        """Return why this is no scaling measurement, or nothing."""
        return captions.crowded(self.inventory)

    def caption(self) -> str:
        """Return the reference with its absolute value, and the rows of a rank."""
        rows = sorted(self.rows["rows_per_rank"].unique())
        text = self.crowded() + (
            "Weak scaling: the batch per rank is the same at every world size"
            + (f" ({captions.listing([number(n) for n in rows])})" if rows else "")
            + ", so the global batch grows. Useful tokens per second of all ranks; "
            f"{self.counted()}. Efficiency is of each run against the run of the same repeat at N0, "
            "the smallest world size measured. "
        )
        base = [
            f"{name} (N0 = {int(size)}) {captions.spread(group['base_useful_tokens_per_s'].dropna().drop_duplicates())}"
            for name in ordered(self.rows["series"])
            for size, group in self.rows[self.rows["series"] == name].groupby("base_world_size")
        ]
        text += f"T(N0) in useful tokens / s: {captions.listing(base)}. " if base else ""
        text += self.not_compared() + self.refused()
        return text + captions.kinds(captions.by_cell(self.rows, "useful_tokens_per_s"))

    def alt(self) -> str:
        """Return medians of throughput, read aloud."""
        read = captions.medians(self.rows, "useful_tokens_per_s")
        return f"Weak scaling, median useful tokens per second by world size: {read or 'no data'}."
