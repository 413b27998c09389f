"""Seconds of a run and of an epoch by world size."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels

TITLE = "Time of a run and of an epoch by world size"
QUERIES = ("epochs", "inventory")
_COLUMNS = {
    "training_s": ("training steps of the run (s)", 1.0),
    "epoch_s": ("an epoch of the corpus (s)", 1.0),
}


def data(epochs: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run, of those that are like for like at every world size."""
    kept, _ = words.alike(epochs, inventory, "world_size")
    columns = ["series", "world_size", "repeat", "run_id", "steps", "rows", "rows_per_s", "epoch_rows"]
    return kept[[*columns, *_COLUMNS]].reset_index(drop=True)


def draw(epochs: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """Two panels over the world size: every run a dot, medians joined."""
    kept, refused = words.alike(epochs, inventory, "world_size")
    made, (left, _) = panels.by_world(kept, inventory, _COLUMNS, refused)
    panels.legend(made, left)
    return made


def caption(epochs: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """What is counted, and whether this is a scaling measurement at all."""
    kept, refused = words.alike(epochs, inventory, "world_size")
    text = words.sentence(words.crowded(inventory) if len(kept) else "") + (
        "Left: the sum of all steps, warm-up included, each as long as its slowest rank's. Right: rows of an epoch "
        "over the run's rows per second after warm-up; an epoch is what the token store of the run holds, and of an "
        f"approach that tokenizes while training, the store of its twin; {words.counted(len(kept), inventory)}. Each "
        "dot is a run; medians are joined. "
    )
    if lacking := int(kept["epoch_s"].isna().sum()):
        text += f"{lacking} run{'s have' if lacking > 1 else ' has'} no epoch: no such store was at hand. "
    text += f"{refused} " if refused else ""
    return text + words.kinds(words.by_cell(kept, "training_s"))


def alt(epochs: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The medians, read aloud."""
    read = words.medians(data(epochs, inventory), "training_s", 1, " s")
    return f"Time of a run by world size. Median seconds of training steps: {read or 'no data'}."
