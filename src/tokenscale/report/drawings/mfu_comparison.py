"""Model FLOPs utilisation by approach and world size, under each named convention."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import BLUE, GREEN, ORANGE, RED, figure, number, style

QUERIES = ("computing", "inventory")
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
    """Model FLOPs utilisation by approach and world size, under each named convention."""

    title = "Model FLOPs utilisation by approach"
    queries = QUERIES
    factor = "approach"
    computing: pd.DataFrame

    def finding(self) -> str:
        """Return smallest and largest median under the convention palm."""
        medians = 100 * self.rows.groupby("series")["mfu_palm"].median().dropna()
        return f"MFU (palm): {captions.extremes(medians, ' %').split(' (')[0]}" if len(medians) else self.title

    def folded(self) -> str:
        """Return that no peak is known."""
        return super().folded() or (no_peak(self.rows) if self.rows["mfu_palm"].isna().all() else "")

    def data(self) -> pd.DataFrame:
        """Return one row per run, of those that are like for like: shares of 1, empty where no peak is known."""
        columns = ["series", "world_size", "repeat", "run_id", "device", "number_format", "peak_flops", "peak_source"]
        return self.rows[[*columns, *CONVENTIONS, "tflops_per_device_s"]].reset_index(drop=True)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw one row per cell, a marker per convention: runs and medians; without a peak, achieved TFLOP/s."""
        if self.rows["mfu_palm"].dropna().empty:
            label = {"tflops_per_device_s": ("achieved TFLOP/s of a device", 1.0)}
            made, (axes,) = panels.strips(self.computing, self.rows, self.refusals, self.inventory, label)
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

    def caption(self) -> str:
        """Return the conventions, and the peak with its source."""
        known = self.rows.dropna(subset=["peak_flops"])
        text = self.crowded()
        if known.empty:
            text += captions.sentence(no_peak(self.rows))
            text += (
                "Processed tokens per second times 6 N + 12 L d T FLOPs a token (Chowdhery et al. 2022, appendix B); "
            )
        else:
            text += (
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
        text += f"{self.counted()}. Each marker is a run, each bar the median of a cell. "
        text += self.refused()
        return text + captions.kinds(captions.by_cell(self.rows, "tflops_per_device_s"))

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
