"""Model FLOPs utilisation by world size."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels
from tokenscale.report.drawings.mfu_comparison import no_peak

TITLE = "Model FLOPs utilisation by world size"
QUERIES = ("computing", "inventory")
_SHARES = {
    "mfu_palm": ("MFU, convention palm (%)", 100.0),
    "mfu_useful": ("MFU of useful tokens alone (%)", 100.0),
}
_RATES = {
    "tflops_per_device_s": ("achieved TFLOP/s of a device", 1.0),
    "tflops_per_s": ("achieved TFLOP/s of all devices", 1.0),
}


def data(computing: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run, of those that are like for like at every world size."""
    kept, _ = words.alike(computing, inventory, "world_size")
    columns = ["series", "world_size", "repeat", "run_id", "device", "number_format", "peak_flops"]
    return kept[[*columns, *_SHARES, *_RATES]].reset_index(drop=True)


def _known(computing: pd.DataFrame) -> bool:
    return bool(computing["mfu_palm"].notna().any())


def draw(computing: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """Two panels over the world size: every run a dot, medians joined. Without a known peak: achieved TFLOP/s."""
    kept, refused = words.alike(computing, inventory, "world_size")
    made, (left, right) = panels.by_world(kept, inventory, _SHARES if _known(kept) else _RATES, refused)
    if len(kept) and not _known(kept):
        panels.heading(right, no_peak(kept))
    panels.legend(made, left)
    return made


def caption(computing: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The conventions, and whether this is a scaling measurement at all."""
    kept, refused = words.alike(computing, inventory, "world_size")
    text = words.sentence(words.crowded(inventory) if len(kept) else "")
    if _known(kept):
        peaks = kept.dropna(subset=["peak_flops"]).drop_duplicates(["device", "peak_source"])
        sources = words.listing([f"{r.device} ({r.peak_source})" for r in peaks.itertuples()])
        text += (
            "Left: processed tokens/s times 6 N + 12 L d T FLOPs a token (Chowdhery et al. 2022, appendix B) over the "
            f"peak of all devices. Right: the same for useful tokens alone. Peaks of {sources}; "
        )
    else:
        text += words.sentence(no_peak(kept))
        text += "Processed tokens/s times 6 N + 12 L d T FLOPs a token (Chowdhery et al. 2022, appendix B); "
    text += f"{words.counted(len(kept), inventory)}. Each dot is a run; medians are joined. "
    text += f"{refused} " if refused else ""
    return text + words.kinds(words.by_cell(kept, "tflops_per_device_s"))


def alt(computing: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The medians, read aloud."""
    kept = data(computing, inventory)
    if _known(kept):
        return f"MFU under convention palm by world size, medians: {words.medians(kept, 'mfu_palm', 100, ' %')}."
    read = words.medians(kept, "tflops_per_device_s")
    return f"Achieved TFLOP/s of a device by world size, no peak being known, medians: {read or 'no data'}."
