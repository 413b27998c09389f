"""Floating-point operations per second that training achieves, by approach and world size."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels

TITLE = "Achieved TFLOP/s by approach"
QUERIES = ("computing", "inventory")
_COLUMNS = {
    "tflops_per_device_s": ("TFLOP/s of a device", 1.0),
    "tflops_per_s": ("TFLOP/s of all devices together", 1.0),
}


def data(computing: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run, of those that are like for like."""
    kept, _ = words.alike(computing, inventory, "approach")
    columns = ["series", "world_size", "repeat", "run_id", "model", "device", "number_format", "flops_per_token"]
    return kept[[*columns, "total_tokens_per_s", *_COLUMNS]].reset_index(drop=True)


def draw(computing: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """Two panels, one row an approach and world size: every run a dot, medians as bars."""
    made, (_, right) = panels.strips(computing, inventory, _COLUMNS)
    panels.heading(right, words.crowded(inventory) if len(computing) else "", ends=True)
    return made


def caption(computing: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """What counts as an operation, and whose."""
    kept, refused = words.alike(computing, inventory, "approach")
    text = (
        "Processed tokens per second (sum over sum after warm-up, padding included) times the FLOPs that the model "
        "takes for a token, forward and backward, counted from its settings: convention palm, 6 N + 12 L d T "
        "(Chowdhery et al. 2022, appendix B), attention over the full square; "
        f"{words.counted(len(kept), inventory)}. Each dot is a run, each bar the median of a cell. Padding is computed "
        "on like text, so that a high value is no useful work by itself. "
    )
    text = words.sentence(words.crowded(inventory) if len(kept) else "") + text
    text += f"{refused} " if refused else ""
    return text + words.kinds(words.by_cell(kept, "tflops_per_device_s"))


def alt(computing: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The medians, read aloud."""
    read = words.medians(data(computing, inventory), "tflops_per_device_s")
    return f"Dot plot of TFLOP/s. Medians of a device, by approach and world size: {read or 'no data'}."
