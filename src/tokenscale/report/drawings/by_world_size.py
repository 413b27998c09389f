"""Figures over the world size: every run is a dot, the medians of a series are joined."""

from typing import ClassVar

import matplotlib.figure

from tokenscale.report import captions, panels
from tokenscale.report.drawings.mfu_comparison import no_peak
from tokenscale.report.figure import MeasuresFigure

QUERIES = ("throughput", "epochs", "computing", "inventory")


class ByWorldSize(MeasuresFigure):
    """Base class: two panels. A subclass names the columns and writes its own sentences."""

    factor = "world_size"

    def draw(self) -> matplotlib.figure.Figure:
        """Draw both panels."""
        drawing, axes = panels.by_world(self.rows, self.inventory, self.measures, self.refusals)
        panels.legend(drawing, axes[0])
        return drawing

    def caption(self) -> str:
        """Return what is counted, and whether this is a scaling measurement at all."""
        spread = captions.kinds(captions.by_cell(self.rows, self.main))
        return self.crowded() + self.sentences() + self.refused() + spread

    def alt(self) -> str:
        """Return the medians, read aloud."""
        return self.read.format(captions.medians(self.data(), self.main, *self.unit) or "no data")


class TokensPerSecond(ByWorldSize):
    """Tokens per second by world size: of all ranks, and of one."""

    title = "Tokens per second by world size"
    queries = ("throughput", "inventory")
    measures = {
        "useful_tokens_per_s": ("useful tokens / s, all ranks", 1.0),
        "useful_tokens_per_device_s": ("useful tokens / s of a rank", 1.0),
    }
    columns = ("series", "world_size", "repeat", "run_id", "steps", "seconds", "total_tokens_per_s", *measures)
    main = "useful_tokens_per_s"
    read = "Useful tokens per second of all ranks by world size, medians: {}."

    def sentences(self) -> str:
        """Return what is counted."""
        return (
            "Useful tokens per second after warm-up: of all ranks (left) and per rank (right, flat under ideal "
            f"scaling); {self.counted()}. Each dot is a run; medians are joined. Rates are sums over sums. "
        )


class TrainingTime(ByWorldSize):
    """Seconds of a run and of an epoch by world size."""

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


class ScalingMfu(ByWorldSize):
    """Model FLOPs utilisation by world size; without a known peak, achieved TFLOP/s."""

    title = "Model FLOPs utilisation by world size"
    queries = ("computing", "inventory")
    shares: ClassVar[panels.Columns] = {
        "mfu_palm": ("MFU, convention palm (%)", 100.0),
        "mfu_useful": ("MFU of useful tokens alone (%)", 100.0),
    }
    rates: ClassVar[panels.Columns] = {
        "tflops_per_device_s": ("achieved TFLOP/s of a device", 1.0),
        "tflops_per_s": ("achieved TFLOP/s of all devices", 1.0),
    }
    columns = ("series", "world_size", "repeat", "run_id", "device", "number_format", "peak_flops", *shares, *rates)
    main = "tflops_per_device_s"

    def folded(self) -> str:
        """Return that no peak is known."""
        return super().folded() or ("" if self.known else no_peak(self.rows))

    def prepare(self) -> None:
        """Choose the rows, and shares or rates."""
        super().prepare()
        self.known = bool(self.rows["mfu_palm"].notna().any())
        self.measures = self.shares if self.known else self.rates

    def draw(self) -> matplotlib.figure.Figure:
        """Draw both panels; say why there is no utilisation."""
        drawing, axes = panels.by_world(self.rows, self.inventory, self.measures, self.refusals)
        if len(self.rows) and not self.known:
            panels.heading(axes[1], no_peak(self.rows))
        panels.legend(drawing, axes[0])
        return drawing

    def sentences(self) -> str:
        """Return the conventions, and the peaks with their sources."""
        if self.known:
            peaks = self.rows.dropna(subset=["peak_flops"]).drop_duplicates(["device", "peak_source"])
            sources = captions.listing([f"{r.device} ({r.peak_source})" for r in peaks.itertuples()])
            text = (
                "Left: processed tokens/s times 6 N + 12 L d T FLOPs a token (Chowdhery et al. 2022, appendix B) over "
                f"the peak of all devices. Right: the same for useful tokens alone. Peaks of {sources}; "
            )
        else:
            text = captions.sentence(no_peak(self.rows))
            text += "Processed tokens/s times 6 N + 12 L d T FLOPs a token (Chowdhery et al. 2022, appendix B); "
        return text + f"{self.counted()}. Each dot is a run; medians are joined. "

    def alt(self) -> str:
        """Return the medians, read aloud."""
        if self.known:
            read = captions.medians(self.rows, "mfu_palm", 100, " %")
            return f"MFU under convention palm by world size, medians: {read}."
        read = captions.medians(self.rows, "tflops_per_device_s")
        return f"Achieved TFLOP/s of a device by world size, no peak being known, medians: {read or 'no data'}."
