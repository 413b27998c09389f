"""Figures over the world size: strong and weak scaling, throughput, time, and FLOPs utilisation."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import BLUE, GREEN, ORANGE, RED, figure, number, ordered, style


def efficiency_finding(rows: pd.DataFrame, warning: str = "") -> str:
    """The range of median efficiencies at the largest world size, as a sentence; nothing without any.

    With a `warning` that the runs are no scaling measurement, the sentence says so.
    """
    above = rows[(rows["world_size"] > rows["base_world_size"]) & rows["efficiency"].notna()]
    if above.empty:
        return ""
    world = int(above["world_size"].max())
    medians = 100 * above[above["world_size"] == world].groupby("series")["efficiency"].median()
    text = f"Efficiency at world size {world}: {captions.extremes(medians, ' %')}"
    return f"{text}; no scaling measurement" if warning else text


class Scaling(Figure):
    """Base class. Left: useful tokens/s, medians joined, the ideal dotted. Right: efficiency of each pair of runs."""

    factor = "world_size"
    main = "useful_tokens_per_s"

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
        return captions.caution(self.rows)

    def crowded(self) -> str:
        """Return the same as a sentence; nothing where no run is shown."""
        return captions.sentence(self.warning() if len(self.rows) else "")

    def not_compared(self) -> str:
        """Return sentences on runs that have no efficiency."""
        return "".join(
            f"{len(rows)} run{'s have' if len(rows) > 1 else ' has'} no efficiency: {reason}. "
            for reason, rows in self.rows.groupby("not_compared")
        )


class ScalingThroughput(Scaling):
    title = "Throughput and efficiency by world size"
    queries = ("scaling", "inventory")
    read = "Throughput by world size, median useful tokens per second. {}."

    def caption(self) -> str:
        """Return the reference with its absolute value, and whether this is a scaling measurement at all."""
        at_one = set(_bases(self.rows)) <= {1}
        text = self.crowded() + (
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
        return text + captions.kinds(self.groups())

    def alt(self) -> str:
        """Return medians of throughput, read aloud."""
        return f"{super().alt()} {self.warning()}".strip()


def _bases(rows: pd.DataFrame) -> list[int]:
    """Return the world sizes that efficiencies are against."""
    return sorted(int(size) for size in rows["base_world_size"].unique())


class ScalingWeak(Scaling):
    title = "Weak scaling: throughput and efficiency by world size"
    queries = ("scaling_weak", "inventory")
    read = "Weak scaling, median useful tokens per second by world size: {}."

    def prepare(self) -> None:
        """Name series without their global batch; leave out lines of one world size."""
        super().prepare()
        rows = self.rows.assign(series=captions.without(self.rows["series"], "global_batch"))
        line = ["series", "rows_per_rank", "base_world_size"]
        self.rows = rows[rows.groupby(line)["world_size"].transform("nunique") > 1]

    def warning(self) -> str:
        """Return why this is no scaling measurement, or nothing."""
        return captions.crowded(self.inventory)

    def sentences(self) -> str:
        """Return the reference with its absolute value, and the rows of a rank."""
        rows = sorted(self.rows["rows_per_rank"].unique())
        text = (
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
        return text + self.not_compared()


#: column → name of the convention, colour, marker
CONVENTIONS = {
    "hfu": ("hardware: with what backward computes again (HFU)", ORANGE, "s"),
    "mfu_palm": ("palm: attention over the full square", BLUE, "o"),
    "mfu_causal": ("causal: half of the square", GREEN, "^"),
    "mfu_useful": ("useful: palm, without padding", RED, "D"),
}


def no_peak(computing: pd.DataFrame) -> str:
    """Why there is no utilisation: devices without a known peak; nothing where there are no runs."""
    devices = sorted(computing["device"].dropna().unique())
    return f"no known peak of {captions.listing(devices)}: achieved TFLOP/s, no utilisation" if devices else ""


class MfuComparison(Figure):
    title = "Model FLOPs utilisation by approach"
    queries = ("computing", "inventory")
    factor = "approach"
    columns = (
        *("series", "world_size", "repeat", "run_id", "device", "number_format", "peak_flops", "peak_source"),
        *(*CONVENTIONS, "tflops_per_device_s"),
    )
    main = "tflops_per_device_s"

    def finding(self) -> str:
        """Return smallest and largest median under the convention palm."""
        return self.extremes("MFU (palm):", "mfu_palm", " %", factor=100)

    def folded(self) -> str:
        """Return that no peak is known."""
        return super().folded() or (no_peak(self.rows) if self.rows["mfu_palm"].isna().all() else "")

    def draw(self) -> matplotlib.figure.Figure:
        """Draw one row per cell, a marker per convention: runs and medians; without a peak, achieved TFLOP/s."""
        if self.rows["mfu_palm"].dropna().empty:
            label = {"tflops_per_device_s": ("achieved TFLOP/s of a device", 1.0)}
            made, (axes,) = panels.strips(self.first, self.rows, self.refusals, self.inventory, label)
            panels.heading(axes, no_peak(self.rows))
            return made
        listed = panels.cells(self.inventory)[::-1]
        with style():
            made, (axes,) = figure(height=1.6 + 0.44 * max(4, len(listed)))
            axes.set_xlabel("FLOP/s of the model / peak FLOP/s of its devices (%)")
            for y, cell in enumerate(listed):
                here = panels.at(self.rows, cell)
                if here["mfu_palm"].dropna().empty:
                    panels.write_note(axes, y, "no peak known" if len(here) else "no data")
                for place, (column, (_, colour, marker)) in enumerate(CONVENTIONS.items()):
                    values, height = 100 * here[column].dropna(), y + 0.27 - 0.18 * place
                    options: dict = {"color": colour, "marker": marker, "markersize": 5, "linestyle": "none"}
                    axes.plot(values, [height] * len(values), **options, markerfacecolor="none", clip_on=False)
                    axes.plot([values.median()] * 2, [height - 0.08, height + 0.08], color=colour, linewidth=2)
            panels.name_rows(axes, panels.names(listed))
            axes.set_xlim(0, 108 * self.rows[list(CONVENTIONS)].max().max())
            panels.steps_of(axes.xaxis)
            for text, colour, marker in CONVENTIONS.values():
                axes.plot([], [], color=colour, marker=marker, linestyle="none", markerfacecolor="none", label=text)
            panels.legend(made, axes, 2)
            return made

    def sentences(self) -> str:
        """Return the conventions, and the peak with its source."""
        known = self.rows.dropna(subset=["peak_flops"])
        if known.empty:
            text = captions.sentence(no_peak(self.rows)) + (
                "Processed tokens per second times 6 N + 12 L d T FLOPs a token (Chowdhery et al. 2022, appendix B); "
            )
        else:
            text = (
                "Operations of the model per second over the peak of its devices. palm: processed tokens/s times 6 N "
                "+ 12 L d T (Chowdhery et al. 2022, appendix B); causal: the attention term halved; useful: palm for "
                "useful tokens alone; hardware (HFU): palm and what backward computes again. Peaks: "
            )
            peaks = known.drop_duplicates(["device", "number_format", "peak_flops"])
            text += "; ".join(
                f"{r.device} {number(1e-12 * r.peak_flops, 4)} TFLOP/s in {r.number_format} ({r.peak_source})"
                for r in peaks.itertuples()
            )
            text += "; "
        return f"{text}{self.counted()}. Each marker is a run, each bar the median of a cell. "

    def alt(self) -> str:
        """Return the medians, read aloud."""
        kept = self.data()
        if kept["mfu_palm"].dropna().empty:
            read = captions.medians(kept, "tflops_per_device_s") or "no data"
            return f"Dot plot of achieved TFLOP/s of a device, no peak being known. Medians by world size: {read}."
        read = captions.medians(kept, "mfu_palm", 100, " %")
        return (
            f"Dot plot of model FLOPs utilisation. Medians under convention palm, by approach and world size: {read}."
        )


class ByWorldSize(Figure):
    """Base class: two panels, one per column of `measures`."""

    factor = "world_size"

    def draw(self) -> matplotlib.figure.Figure:
        """Draw both panels."""
        drawing, axes = panels.by_world(self.rows, self.inventory, self.measures, self.refusals)
        panels.legend(drawing, axes[0])
        return drawing


class TrainingTime(ByWorldSize):
    title = "Time of a run and of an epoch by world size"
    queries = ("epochs", "inventory")
    measures = {
        "training_s": ("training steps of the run (s)", 1.0),
        "epoch_s": ("an epoch of the corpus (s)", 1.0),
    }
    columns = ("series", "world_size", "repeat", "run_id", "steps", "rows", "rows_per_s", "epoch_rows", *measures)
    main = "training_s"
    unit = (1, " s")
    read = "Time of a run by world size. Median seconds of training steps: {}."

    def sentences(self) -> str:
        """Return what is counted, and how many runs have no epoch."""
        text = (
            "Left: the sum of all steps, warm-up included. Right: rows of an epoch over the run's rows per second "
            f"after warm-up; {self.counted()}. Each dot is a run; medians are joined. A step takes as long as on its "
            "slowest rank. An epoch is the content of the run's token store; for an approach that tokenizes while "
            "training, of its offline twin's store. "
        )
        if lacking := int(self.rows["epoch_s"].isna().sum()):
            text += f"{lacking} run{'s have' if lacking > 1 else ' has'} no epoch, because that store is missing. "
        return text
