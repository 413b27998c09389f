"""Figures with a row per approach and world size: every run is a dot, medians are bars."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels, text_layout
from tokenscale.report.drawings.scaling import efficiency_finding, no_peak
from tokenscale.report.figure import Figure, MeasuresFigure
from tokenscale.report.style import GREY, SKY, figure, look, no_data, number, ordered, plain, style


class ByApproach(MeasuresFigure):
    """Base class: one panel per column. A subclass names the columns and writes its own sentences."""

    factor = "approach"

    def draw(self) -> matplotlib.figure.Figure:
        """Draw one panel per column, with a sentence over the last one if ranks share cores."""
        drawing, axes = panels.strips(self.first, self.rows, self.refusals, self.inventory, self.measures)
        panels.heading(axes[-1], captions.crowded(self.inventory) if len(self.first) else "", ends=True)
        return drawing

    def caption(self) -> str:
        """Return what is counted, of how many runs, and what the spread is."""
        return self.crowded() + self.sentences() + self.refused() + captions.kinds(self.groups())

    def groups(self) -> list[pd.Series]:
        """Return the values of each cell whose spread the caption names."""
        return captions.by_cell(self.rows, self.main)

    def alt(self) -> str:
        """Return the medians, read aloud."""
        return self.read.format(self.medians() or "no data")

    def medians(self) -> str:
        """Return the median of each cell in words."""
        return captions.medians(self.data(), self.main, *self.unit)


class TokensPerSecondComparison(ByApproach):
    """Useful and total tokens per second by approach, one process."""

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

    def finding(self) -> str:
        """Return lowest and highest median."""
        medians = self.rows.groupby("series")[self.main].median().dropna()
        return f"Useful tokens per second: {captions.extremes(medians)}" if len(medians) else self.title

    def prepare(self) -> None:
        """Choose runs on one rank."""
        self.inventory = self.inventory[self.inventory["world_size"] == 1]
        self.throughput = self.throughput[self.throughput["world_size"] == 1]
        super().prepare()

    def crowded(self) -> str:
        """Return nothing: one rank shares its cores with no other."""
        return ""

    def draw(self) -> matplotlib.figure.Figure:
        """Draw one panel per column."""
        drawing, _ = panels.strips(self.first, self.rows, self.refusals, self.inventory, self.measures)
        return drawing

    def sentences(self) -> str:
        """Return what is shown, of how many runs."""
        return (
            f"One process, after warm-up; {self.counted()}. Each dot is a run, each bar the median of a cell. Open "
            "markers tokenize while training, filled ones read a store. Rates are sums of tokens over sums of seconds. "
        )

    def groups(self) -> list[pd.Series]:
        """Return the values of each series."""
        return [group for _, group in self.rows.groupby("series")[self.main]]

    def medians(self) -> str:
        """Return the median of each series in words."""
        values = self.rows.groupby("series")[self.main].median()
        return captions.listing([f"{name} {number(values[name])}" for name in ordered(self.rows["series"])])


class DataStallShare(ByApproach):
    """Share of the step time spent waiting for data, by approach and world size."""

    title = "Share of the training step spent waiting for data"
    queries = ("stalls", "inventory")
    measures = {"data_stall_share": ("time waiting for the batch / step time (%)", 100.0)}
    main = "data_stall_share"
    read = "Dot plot of the share of step time spent waiting for data. Medians: {}."

    def finding(self) -> str:
        """Return the largest share of all runs."""
        if self.rows.empty:
            return self.title
        return f"Waiting for data takes at most {100 * self.rows['data_stall_share'].max():.2g} % of a training step"

    def data(self) -> pd.DataFrame:
        """Return one row per comparable run."""
        return self.rows.copy()

    def crowded(self) -> str:
        """Return nothing: a share says the same where ranks share cores."""
        return ""

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

    def groups(self) -> list[pd.Series]:
        """Return the values of each cell."""
        return [group for _, group in self.rows.groupby(["series", "world_size"])[self.main]]

    def medians(self) -> str:
        """Return the median of each series in words."""
        values = self.rows.groupby("series")[self.main].median()
        return captions.listing([f"{name} {100 * values[name]:.2g} %" for name in ordered(self.rows["series"])])


class TflopsComparison(ByApproach):
    """Floating-point operations per second that training achieves, by approach and world size."""

    title = "Achieved TFLOP/s by approach"
    queries = ("computing", "inventory")
    measures = {
        "tflops_per_device_s": ("TFLOP/s of a device", 1.0),
        "tflops_per_s": ("TFLOP/s of all devices together", 1.0),
    }
    columns = (
        *("series", "world_size", "repeat", "run_id", "model", "device", "number_format", "flops_per_token"),
        *("total_tokens_per_s", *measures),
    )
    main = "tflops_per_device_s"
    read = "Dot plot of TFLOP/s. Medians of a device, by approach and world size: {}."

    def folded(self) -> str:
        """Return that no peak is known: without one, these rates repeat tokens per second."""
        return super().folded() or (no_peak(self.rows) if self.rows["peak_flops"].isna().all() else "")

    def sentences(self) -> str:
        """Return what counts as an operation, and whose."""
        return (
            "Processed tokens per second times the FLOPs of the model per token, forward and backward; "
            f"{self.counted()}. Each dot is a run, each bar the median of a cell. Padding costs FLOPs like text, so a "
            "high value is not useful work by itself. Rates are sums over sums after warm-up, padding included. FLOPs "
            "follow the convention palm: 6 N + 12 L d T (Chowdhery et al. 2022, appendix B), attention over the full "
            "square. "
        )


class TotalTrainingTime(ByApproach):
    """How long a run takes: its steps, and all of it."""

    title = "Time of a training by approach"
    queries = ("epochs", "inventory")
    measures = {
        "training_s": ("seconds of training steps", 1.0),
        "wall_s": ("seconds from first event to last", 1.0),
    }
    columns = (
        *("series", "world_size", "repeat", "run_id", "steps", *measures, "start_s", "validation_s", "checkpoint_s"),
    )
    main = "training_s"
    unit = (1, " s")

    def finding(self) -> str:
        """Return shortest and longest median, of the smallest world size."""
        rows = self.rows[self.rows["world_size"] == self.rows["world_size"].min()]
        medians = rows.groupby("series")[self.main].median().dropna()
        return f"Training steps take {captions.extremes(medians, ' s')}" if len(medians) else self.title

    read = "Dot plot of the time of a training. Median seconds of steps by world size: {}."

    def sentences(self) -> str:
        """Return what is counted, for how many steps."""
        text = (
            "Left: the sum of all steps, warm-up included, without validation and checkpoints. Right: from the first "
            "event to the last, with start, validation, checkpoints and the time between attempts; "
            f"{self.counted()}. Each dot is a run, each bar the median of a cell. A step takes as long as on its "
            "slowest rank. "
        )
        if len(self.rows):
            low, high = int(self.rows["steps"].min()), int(self.rows["steps"].max())
            text += f"Runs took {low if low == high else f'{low} to {high}'} steps. "
            text += "Approaches with more padding train on fewer useful tokens in the same number of steps. "
        return text


class EfficiencyComparison(ByApproach):
    """Strong-scaling efficiency by approach and world size."""

    title = "Strong-scaling efficiency by approach"
    queries = ("scaling", "inventory")
    factor = "world_size"
    scaling: pd.DataFrame
    measures = {"efficiency": ("efficiency T(N) / (N / N0 × T(N0)) (%)", 100.0)}
    columns = (
        *("series", "world_size", "repeat", "run_id", "global_batch", "base_world_size"),
        *("base_useful_tokens_per_s", "useful_tokens_per_s", "speed_up", "efficiency"),
    )
    main = "efficiency"
    unit = (100, " %")

    def finding(self) -> str:
        """Return the range of medians at the largest world size."""
        return efficiency_finding(self.rows, self.crowded()) or self.title

    read = "Dot plot of strong-scaling efficiency. Medians by approach and world size: {}."

    def prepare(self) -> None:
        """Leave out the base itself, where efficiency is 1 by definition."""
        super().prepare()
        self.rows = self.rows[
            (self.rows["world_size"] > self.rows["base_world_size"]) & self.rows["efficiency"].notna()
        ]

    def draw(self) -> matplotlib.figure.Figure:
        """Draw a row per cell above the base, and the ideal as a line."""
        fewest = panels.cells(self.inventory)
        above = {cell for cell in fewest if cell[1] > min(world for name, world in fewest if name == cell[0])}
        shown, refusals = captions.comparable(self.rows, self.inventory, "approach")
        drawing, (axes,) = panels.strips(
            self.rows, shown, refusals, self.inventory, self.measures, keep=above.__contains__
        )
        if len(self.rows):
            with style():
                axes.axvline(100, color=GREY, linestyle=":", linewidth=1.2)
            axes.set_xlim(0, max(110.0, 105 * self.rows["efficiency"].max()))
            texts = [f"{name}, {panels.ranks(world)}" for name, world in fewest[::-1] if (name, world) in above]
            axes.set_yticks(axes.get_yticks(), text_layout.names(texts))
            panels.heading(axes, captions.caution(self.scaling))
        return drawing

    def crowded(self) -> str:
        """Return a sentence if the runs are no scaling measurement."""
        return captions.sentence(captions.caution(self.scaling) if len(self.rows) else "")

    def sentences(self) -> str:
        """Return the base with its absolute value."""
        fewest = self.inventory.groupby("series")["world_size"].transform("min")
        expected = self.inventory[self.inventory["world_size"] > fewest]
        text = (
            "Efficiency T(N) / (N / N0 × T(N0)) at a fixed global batch, where T is useful tokens per second and N0 "
            f"the smallest world size; {captions.counted(len(self.rows), expected)}. Each dot is a run against the run "
            "of the same repeat at N0, each bar the median of a cell, the dotted line the ideal. "
        )
        base = [
            f"{name} {captions.spread(rates)} (N0 = {size})"
            for name in ordered(self.rows["series"])
            for size, group in self.rows[self.rows["series"] == name].groupby("base_world_size")
            if len(rates := group.drop_duplicates("repeat")["base_useful_tokens_per_s"])
        ]
        return text + (f"T(N0) in useful tokens / s: {captions.listing(base)}. " if base else "")


_PARTS = {
    "padding_share": (SKY, "padding, in an epoch of the store"),
    "ignored_share": (GREY, "first labels"),
}


class PaddingShare(Figure):
    """What processed positions do not train on: padding, and labels that begin a document."""

    title = "Processed tokens that are not useful"
    queries = ("padding", "inventory")
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


class BatchSizeComparison(Figure):
    """Throughput by micro-batch and approach."""

    title = "Training throughput by micro-batch"
    queries = ("throughput", "inventory")
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

    def data(self) -> pd.DataFrame:
        """Return one row per run at the smallest world size, of those that are like for like."""
        columns = [
            "series",
            "micro_batch",
            "world_size",
            "repeat",
            "run_id",
            "useful_tokens_per_s",
            "total_tokens_per_s",
        ]
        return self.rows[[*columns, "not_useful_share", "sequence_length"]].reset_index(drop=True)

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

    def caption(self) -> str:
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
        text += self.refused()
        groups = [g for _, g in self.rows.groupby(["series", "micro_batch"])["useful_tokens_per_s"]]
        return text + captions.kinds(groups)

    def alt(self) -> str:
        """Return the medians, read aloud."""
        found = self.data().groupby(["series", "micro_batch"])["useful_tokens_per_s"].median()
        texts = [f"{name} at {int(size)}: {number(value)}" for (name, size), value in found.items()]
        return f"Median useful tokens per second by micro-batch. {captions.listing(texts) or 'No data'}."
