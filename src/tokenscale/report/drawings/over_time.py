"""Figures over the seconds of a training: a panel per world size, repeats thin, their median bold."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.drawings.mfu_comparison import no_peak
from tokenscale.report.figure import Figure
from tokenscale.report.style import number

QUERIES = ("loss_curves", "inventory")
COLUMNS = ("series", "world_size", "repeat", "run_id", "step", "steps", "training_s")


class OverTime(Figure):
    """Base class. `prepare` sets the `points` that are drawn, their column `y` and its `label`."""

    queries = QUERIES
    factor = "approach"
    points: pd.DataFrame
    y: str
    label: str

    def prepare(self) -> None:
        """Leave out runs that stopped."""
        super().prepare()
        self.rows = self.rows[~self.rows["stopped"].astype(bool)]

    def draw(self) -> matplotlib.figure.Figure:
        """Draw a panel per world size."""
        return panels.over_time(self.points, self.inventory, self.y, self.label, self.refusals)

    def caption(self) -> str:
        """Return what a point is, and how much of the run it stands for."""
        runs = self.points["run_id"].nunique()
        text = captions.sentence(captions.crowded(self.inventory) if runs else "")
        return (text + self.sentences(runs) + self.refusals).strip()

    def sentences(self, runs: int) -> str:
        """Return what is counted for so many runs, each sentence with a space after it."""
        raise NotImplementedError

    def endpoints(self) -> str:
        """Return the first and last median of each cell, read aloud."""
        texts = []
        for (name, world), group in self.points.groupby(["series", "world_size"]):
            middle = group.groupby(panels.points(group))[self.y].median()
            texts.append(f"{name} on {world} from {number(middle.iloc[0])} to {number(middle.iloc[-1])}")
        return captions.listing(texts) or "No data"


class TokensPerSecondOverTime(OverTime):
    """Useful tokens per second in the course of a training."""

    title = "Throughput in the course of a training"
    y, label = "useful_tokens_per_s", "useful tokens / s"

    def prepare(self) -> None:
        """Leave out points without throughput."""
        super().prepare()
        self.rows = self.points = self.rows.dropna(subset=[self.y])

    def data(self) -> pd.DataFrame:
        """Return one row per point of a comparable run."""
        return self.rows[[*COLUMNS, "useful_tokens_per_s", "total_tokens_per_s"]].reset_index(drop=True)

    def sentences(self, runs: int) -> str:
        """Return what a point stands for."""
        text = (
            f"Useful tokens per second of all ranks; {captions.counted(runs, self.inventory)}. A run has at most 100 "
            "points. "
        )
        if runs:
            most = int(self.rows["steps"].max())
            text += (
                f"A point is {'a step' if most == 1 else f'the mean of up to {most} steps'}; the first includes the "
                "warm-up. Thin lines are repeats, bold ones their median point by point, which is no interval. "
            )
        return text

    def alt(self) -> str:
        """Return first and last throughput, read aloud."""
        return f"Line plot of useful tokens per second over the time of training. {self.endpoints()}."


class MfuOverTime(OverTime):
    """Model FLOPs utilisation in the course of a training; without a known peak, achieved TFLOP/s."""

    title = "Model FLOPs utilisation in the course of a training"
    y = "shown"

    def folded(self) -> str:
        """Return that no peak is known."""
        return super().folded() or ("" if self.known else no_peak(self.rows))

    def prepare(self) -> None:
        """Compute FLOPs from the costs and peaks of the inventory; choose shares or rates."""
        super().prepare()
        costs = self.inventory[["run_id", "flops_per_token", "peak_flops", "peak_source", "device", "number_format"]]
        rows = self.rows.merge(costs, on="run_id", how="left")
        flops = rows["total_tokens_per_s"] * rows["flops_per_token"] / rows["world_size"]
        rows = rows.assign(tflops_per_device_s=1e-12 * flops, mfu=flops / rows["peak_flops"].astype(float))
        self.rows = rows.dropna(subset=["tflops_per_device_s"])
        known = self.rows[self.rows["mfu"].notna()]
        if len(known):
            self.points, self.label = known.assign(shown=100 * known["mfu"]), "MFU, convention palm (%)"
        else:
            self.points = self.rows.assign(shown=self.rows["tflops_per_device_s"])
            self.label = "achieved TFLOP/s of a device"
        self.known = bool(len(known))

    def data(self) -> pd.DataFrame:
        """Return one row per point of a comparable run; `mfu` is empty where no peak is known."""
        return self.rows[[*COLUMNS, "total_tokens_per_s", "tflops_per_device_s", "mfu"]].reset_index(drop=True)

    def sentences(self, runs: int) -> str:
        """Return the convention, the peaks with their sources, and what a point is."""
        text = "" if self.known else captions.sentence(no_peak(self.rows))
        text += "Processed tokens/s times 6 N + 12 L d T FLOPs a token (Chowdhery et al. 2022, appendix B)"
        if self.known:
            peaks = self.points.drop_duplicates(["device", "number_format"])
            sources = [
                f"{r.device}, {number(1e-12 * r.peak_flops, 4)} TFLOP/s ({r.peak_source})" for r in peaks.itertuples()
            ]
            text += f" over the peak of the devices: {captions.listing(sources)}"
        text += (
            f"; {captions.counted(runs, self.inventory)}. A point is the sum over sum of its steps; a run has at most "
            "100 points. "
        )
        if runs:
            text += (
                "The first point includes the warm-up. Thin lines are repeats, bold ones their median: no interval. "
            )
        elif len(self.inventory) and self.inventory["flops_per_token"].isna().all():
            text += "FLOPs a token are not known of any run. "
        return text

    def alt(self) -> str:
        """Return first and last values, read aloud."""
        return f"Line plot over the time of training, {self.label}. {self.endpoints()}."
