"""How long a run takes: its steps, and all of it."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels

TITLE = "Time of a training by approach"
QUERIES = ("epochs", "inventory")
_COLUMNS = {
    "training_s": ("seconds of training steps", 1.0),
    "wall_s": ("seconds from first event to last", 1.0),
}


def data(epochs: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run, of those that are like for like; `training_s` holds neither validation nor checkpoints."""
    kept, _ = words.alike(epochs, inventory, "approach")
    columns = ["series", "world_size", "repeat", "run_id", "steps", *_COLUMNS, "start_s", "validation_s"]
    return kept[[*columns, "checkpoint_s"]].reset_index(drop=True)


def draw(epochs: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """Two panels, one row an approach and world size: every run a dot, medians as bars."""
    made, (_, right) = panels.strips(epochs, inventory, _COLUMNS)
    panels.heading(right, words.crowded(inventory) if len(epochs) else "", ends=True)
    return made


def caption(epochs: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """What is counted, for how many steps."""
    kept, refused = words.alike(epochs, inventory, "approach")
    text = words.sentence(words.crowded(inventory) if len(kept) else "") + (
        "Left: the sum of all steps, warm-up included, each as long as its slowest rank's, without validation and "
        "checkpoints. Right: from the first event to the last, with start, validation, checkpoints and whatever lay "
        f"between attempts; {words.counted(len(kept), inventory)}. Each dot is a run, each bar the median of a cell. "
    )
    if len(kept):
        low, high = int(kept["steps"].min()), int(kept["steps"].max())
        text += f"Runs took {low if low == high else f'{low} to {high}'} steps. "
        text += "Approaches with more padding train on fewer useful tokens in as many steps. "
    text += f"{refused} " if refused else ""
    return text + words.kinds(words.by_cell(kept, "training_s"))


def alt(epochs: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The medians, read aloud."""
    read = words.medians(data(epochs, inventory), "training_s", 1, " s")
    return f"Dot plot of the time of a training. Median seconds of steps by world size: {read or 'no data'}."
