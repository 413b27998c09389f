"""Tokens per second by world size: of all ranks, and of one."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels

TITLE = "Tokens per second by world size"
QUERIES = ("throughput", "inventory")
_COLUMNS = {
    "useful_tokens_per_s": ("useful tokens / s, all ranks", 1.0),
    "useful_tokens_per_device_s": ("useful tokens / s of a rank", 1.0),
}


def data(throughput: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run, of those that are like for like at every world size."""
    kept, _ = words.alike(throughput, inventory, "world_size")
    columns = ["series", "world_size", "repeat", "run_id", "steps", "seconds", "total_tokens_per_s"]
    return kept[[*columns, *_COLUMNS]].reset_index(drop=True)


def draw(throughput: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """Two panels over the world size: every run a dot, medians joined."""
    kept, refused = words.alike(throughput, inventory, "world_size")
    made, (left, _) = panels.by_world(kept, inventory, _COLUMNS, refused)
    panels.legend(made, left)
    return made


def caption(throughput: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """What is counted, and whether this is a scaling measurement at all."""
    kept, refused = words.alike(throughput, inventory, "world_size")
    text = words.sentence(words.crowded(inventory) if len(kept) else "") + (
        "Useful tokens over seconds, sum over sum after warm-up; right, the same over the world size: flat where "
        f"scaling is perfect; {words.counted(len(kept), inventory)}. Each dot is a run; medians are joined. "
    )
    text += f"{refused} " if refused else ""
    return text + words.kinds(words.by_cell(kept, "useful_tokens_per_s"))


def alt(throughput: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The medians, read aloud."""
    read = words.medians(data(throughput, inventory), "useful_tokens_per_s")
    return f"Useful tokens per second of all ranks by world size, medians: {read or 'no data'}."
