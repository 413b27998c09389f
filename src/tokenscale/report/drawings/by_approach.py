"""Figures with a row per approach and world size: every run is a dot, medians are bars."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import GREY, SKY, figure, look, no_data, number, ordered, plain, style


class ByApproach(Figure):
    """Base class: one panel per column of `measures`."""

    factor = "approach"

    def draw(self) -> matplotlib.figure.Figure:
        """Draw one panel per column, with a sentence over the last one if ranks share cores."""
        drawing, axes = panels.strips(self.first, self.rows, self.refusals, self.inventory, self.measures)
        panels.heading(axes[-1], captions.crowded(self.inventory) if len(self.first) else "", ends=True)
        return drawing


class TokensPerSecondComparison(ByApproach):
    title = "Training throughput by approach"
    queries = ("throughput", "inventory")
    throughput: pd.DataFrame
    measures = {
        "useful_tokens_per_s": ("useful tokens / s", 1.0),
        "total_tokens_per_s": ("total tokens / s (padding included)", 1.0),
    }
    columns = ("series", "repeat", "run_id", *measures, "not_useful_share", "steps", "seconds")
    main = "useful_tokens_per_s"
    read = "Dot plot of tokens per second. Median useful tokens per second: {}."
    words = (
        "One process, after warm-up; {counted}. Each dot is a run, each bar the median of a cell. Open markers "
        "tokenize while training, filled ones read a store. Rates are sums of tokens over sums of seconds. "
    )

    def finding(self) -> str:
        """Return lowest and highest median."""
        return self.extremes("Useful tokens per second:", self.main)

    def prepare(self) -> None:
        """Choose runs on one rank."""
        self.inventory = self.inventory[self.inventory["world_size"] == 1]
        self.throughput = self.throughput[self.throughput["world_size"] == 1]
        super().prepare()

    def numbers(self) -> str:
        """Return the median of each series in words."""
        values = self.rows.groupby("series")[self.main].median()
        return captions.listing([f"{name} {number(values[name])}" for name in ordered(self.rows["series"])])


class DataStallShare(ByApproach):
    title = "Share of the training step spent waiting for data"
    queries = ("stalls", "inventory")
    measures = {"data_stall_share": ("time waiting for the batch / step time (%)", 100.0)}
    columns = (
        *("run_id", "approach", "series", "world_size", "repeat", "data_wait_s", "seconds", "data_stall_share"),
        "largest_gain",
    )
    cores_matter = False  # a share says the same where ranks share cores
    main = "data_stall_share"
    read = "Dot plot of the share of step time spent waiting for data. Medians: {}."

    def finding(self) -> str:
        """Return the largest share of all runs."""
        if self.rows.empty:
            return self.title
        return f"Waiting for data takes at most {100 * self.rows['data_stall_share'].max():.2g} % of a training step"

    def draw(self) -> matplotlib.figure.Figure:
        """Draw the share from 0, of at least 1 %."""
        drawing, (axes,) = panels.strips(self.first, self.rows, self.refusals, self.inventory, self.measures)
        if len(self.rows):
            axes.set_xlim(0, max(1.0, 110 * self.rows["data_stall_share"].max()))
        return drawing

    def sentences(self) -> str:
        """Return what the share bounds."""
        text = f"Time waiting for the batch over step time, of the slowest rank, after warm-up; {self.counted()}. "
        if len(self.rows):
            worst = self.rows.loc[self.rows["data_stall_share"].idxmax()]
            text += (
                f"The largest share, {100 * worst['data_stall_share']:.2g} % ({worst['series']}, "
                f"{panels.ranks(int(worst['world_size']))}), bounds what any data format could gain there: at most "
                f"{number(worst['largest_gain'], 4)}× (Amdahl's law). "
            )
        return text

    def numbers(self) -> str:
        """Return the median of each series in words."""
        values = self.rows.groupby("series")[self.main].median()
        return captions.listing([f"{name} {100 * values[name]:.2g} %" for name in ordered(self.rows["series"])])


_PARTS = {
    "padding_share": (SKY, "padding, in an epoch of the store"),
    "ignored_share": (GREY, "first labels"),
}


class PaddingShare(ByApproach):
    title = "Processed tokens that are not useful"
    queries = ("padding", "inventory")
    measures = {"not_useful_share": ("positions that are not useful / all processed positions (%)", 100.0)}
    cores_matter = False
    main = "not_useful_share"
    unit = (100, " %")
    read = "Dots and bars of the share of positions that train nothing. Medians by world size: {}."
    words = (
        "Dots: share of a run's processed tokens that are not useful, after warm-up, medians as lines; {counted}. "
        "Bars: the same in a whole epoch of the run's store, from its manifest. Approaches that tokenize while "
        "training read no store and have no bar. Padding and first labels are counted apart: a label is ignored where "
        "it begins a document or a piece of one. A few steps read part of an epoch, so dots and bars may differ. "
    )

    def finding(self) -> str:
        """Return smallest and largest median share."""
        return self.extremes("Processed tokens that are not useful:", self.main, " %", factor=100)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw one row per cell: every run a dot; stacked behind them, what its store holds in a whole epoch."""
        made, (axes,) = panels.strips(self.first, self.rows, self.refusals, self.inventory, self.measures)
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


class BatchSizeComparison(Figure):
    title = "Training throughput by micro-batch"
    queries = ("throughput", "inventory")
    columns = (
        *("series", "micro_batch", "world_size", "repeat", "run_id", "useful_tokens_per_s", "total_tokens_per_s"),
        *("not_useful_share", "sequence_length"),
    )
    cores_matter = False
    main = "useful_tokens_per_s"
    read = "Median useful tokens per second by micro-batch. {}."
    throughput: pd.DataFrame

    def prepare(self) -> None:
        """Choose runs at the smallest world size that are comparable along micro-batches and along approaches.

        Series are named without their micro-batch.
        """
        smallest = self.inventory["world_size"].min()
        listed = self.inventory[self.inventory["world_size"] == smallest]
        kept, along = captions.comparable(
            self.throughput[self.throughput["world_size"] == smallest], listed, "micro_batch"
        )
        kept, across = captions.comparable(kept, listed, "approach")
        shape = self.inventory[["run_id", "micro_batch", "sequence_length"]]
        kept = kept.merge(shape, on="run_id").assign(
            series=lambda rows: captions.without(rows["series"], "micro_batch")
        )
        self.rows, self.refusals = (
            kept.dropna(subset=["micro_batch"]),
            " ".join(dict.fromkeys(filter(None, (along, across)))),
        )

    def draw(self) -> matplotlib.figure.Figure:
        """Draw useful tokens/s (left) and processed tokens/s (right): runs as dots, medians joined per approach."""
        with style():
            made, both = figure(2, height=4.0)
            for axes, column, label in zip(
                both,
                ("useful_tokens_per_s", "total_tokens_per_s"),
                ("useful tokens / s", "processed tokens / s (padding included)"),
                strict=True,
            ):
                axes.set_xlabel("micro-batch (rows of a forward pass)")
                axes.set_ylabel(label)
                if self.rows.empty:
                    no_data(axes, captions.nothing(self.inventory, self.refusals))
                    continue
                sizes = sorted(int(size) for size in self.rows["micro_batch"].unique())
                names = ordered(self.rows["series"])
                for name, shift in zip(names, panels.shifts(len(names)), strict=True):
                    panels.joined(axes, self.rows[self.rows["series"] == name], column, 1, name, shift, "micro_batch")
                    axes.plot([], [], **look(name), label=name)
                panels.doublings(axes, sizes)
                axes.set_ylim(0, 1.06 * self.rows[column].max())
                plain(axes.yaxis)
            panels.legend(made, both[0])
            return made

    def sentences(self) -> str:
        """Return at which world size and sequence length, and what else changes with the micro-batch."""
        smallest = self.inventory[self.inventory["world_size"] == self.inventory["world_size"].min()]
        text = (
            "Tokens per second after warm-up, at the smallest world size and a fixed global batch; "
            f"{captions.counted(len(self.rows), smallest)}. Each dot is a run; medians are joined. Gradient "
            "accumulation keeps the global batch, so learning rate and number of steps do not change along the axis. "
        )
        if len(self.rows):
            lengths = sorted(int(n) for n in self.rows["sequence_length"].dropna().unique())
            if lengths:
                text += f"Sequence length {captions.listing([number(n, 9) for n in lengths])}. "
            if self.rows["micro_batch"].nunique() == 1:
                text += (
                    f"All runs have the micro-batch {int(self.rows['micro_batch'].iloc[0])}, so no trend can be seen. "
                )
        return text

    def groups(self) -> list[pd.Series]:
        """Return the values of each series at each micro-batch."""
        return [group for _, group in self.rows.groupby(["series", "micro_batch"])[self.main]]

    def numbers(self) -> str:
        """Return the median of each series at each micro-batch in words."""
        found = self.rows.groupby(["series", "micro_batch"])[self.main].median()
        return captions.listing([f"{name} at {int(size)}: {number(value)}" for (name, size), value in found.items()])
