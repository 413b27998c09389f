"""Model FLOPs utilisation by approach and world size, under each named convention."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels
from tokenscale.report.style import BLUE, GREEN, ORANGE, RED, figure, number, style

TITLE = "Model FLOPs utilisation by approach"
QUERIES = ("computing", "inventory")
#: column → name of the convention, colour, marker
CONVENTIONS = {
    "hfu": ("hardware: with what backward computes again (HFU)", ORANGE, "s"),
    "mfu_palm": ("palm: attention over the full square", BLUE, "o"),
    "mfu_causal": ("causal: half of the square", GREEN, "^"),
    "mfu_useful": ("useful: palm, without padding", RED, "D"),
}


def data(computing: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run, of those that are like for like: shares of 1, empty where no peak is known."""
    kept, _ = words.alike(computing, inventory, "approach")
    columns = ["series", "world_size", "repeat", "run_id", "device", "number_format", "peak_flops", "peak_source"]
    return kept[[*columns, *CONVENTIONS, "tflops_per_device_s"]].reset_index(drop=True)


def draw(computing: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """One row a cell, a marker a convention: every run and its median. Without a peak: achieved TFLOP/s of a device."""
    kept, _ = words.alike(computing, inventory, "approach")
    if kept["mfu_palm"].dropna().empty:
        label = {"tflops_per_device_s": ("achieved TFLOP/s of a device", 1.0)}
        made, (axes,) = panels.strips(computing, inventory, label)
        panels.heading(axes, no_peak(kept))
        return made
    listed = panels.cells(inventory)[::-1]
    with style():
        made, (axes,) = figure(height=1.6 + 0.44 * max(4, len(listed)))
        axes.set_xlabel("FLOP/s of the model / peak FLOP/s of its devices (%)")
        for y, cell in enumerate(listed):
            here = panels.at(kept, cell)
            if here["mfu_palm"].dropna().empty:
                panels.write_note(axes, y, "no peak known" if len(here) else "no data")
            for place, (column, (_, colour, marker)) in enumerate(CONVENTIONS.items()):
                values, height = 100 * here[column].dropna(), y + 0.27 - 0.18 * place
                options = {"color": colour, "marker": marker, "markersize": 5, "linestyle": "none"}
                axes.plot(values, [height] * len(values), **options, markerfacecolor="none", clip_on=False)
                axes.plot([values.median()] * 2, [height - 0.08, height + 0.08], color=colour, linewidth=2)
        panels.name_rows(axes, panels.names(listed))
        axes.set_xlim(0, 108 * kept[list(CONVENTIONS)].max().max())
        panels.steps_of(axes.xaxis)
        for label, colour, marker in CONVENTIONS.values():
            axes.plot([], [], color=colour, marker=marker, linestyle="none", markerfacecolor="none", label=label)
        panels.legend(made, axes, 2)
        return made


def no_peak(computing: pd.DataFrame) -> str:
    """Why there is no utilisation: devices whose peak nobody knows; nothing where there are no runs."""
    devices = sorted(computing["device"].dropna().unique())
    return f"no peak known of {words.listing(devices)}: achieved TFLOP/s, no utilisation" if devices else ""


def caption(computing: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The conventions, and the peak with its source."""
    kept, refused = words.alike(computing, inventory, "approach")
    known = kept.dropna(subset=["peak_flops"])
    text = words.sentence(words.crowded(inventory) if len(kept) else "")
    if known.empty:
        text += words.sentence(no_peak(kept))
        text += "Processed tokens per second times 6 N + 12 L d T FLOPs a token (Chowdhery et al. 2022, appendix B); "
    else:
        text += (
            "Operations of the model per second over the peak of its devices. palm: processed tokens/s times 6 N + "
            "12 L d T (Chowdhery et al. 2022, appendix B); causal: the attention term halved; useful: palm for useful "
            "tokens alone; hardware (HFU): palm and what backward computes again. Peaks: "
        )
        peaks = known.drop_duplicates(["device", "number_format", "peak_flops"])
        text += "; ".join(
            f"{r.device} {number(1e-12 * r.peak_flops, 4)} TFLOP/s in {r.number_format} ({r.peak_source})"
            for r in peaks.itertuples()
        )
        text += "; "
    text += f"{words.counted(len(kept), inventory)}. Each marker is a run, each bar the median of a cell. "
    text += f"{refused} " if refused else ""
    return text + words.kinds(words.by_cell(kept, "tflops_per_device_s"))


def alt(computing: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The medians, read aloud."""
    kept = data(computing, inventory)
    if kept["mfu_palm"].dropna().empty:
        read = words.medians(kept, "tflops_per_device_s") or "no data"
        return f"Dot plot of achieved TFLOP/s of a device, no peak being known. Medians by world size: {read}."
    read = words.medians(kept, "mfu_palm", 100, " %")
    return f"Dot plot of model FLOPs utilisation. Medians under convention palm, by approach and world size: {read}."
