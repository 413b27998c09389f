"""Useful tokens per second in the course of a training."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels
from tokenscale.report.style import number

TITLE = "Throughput in the course of a training"
QUERIES = ("loss_curves", "inventory")


def data(loss_curves: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """A row a point of a run, of runs that count and are like for like."""
    kept, _ = _alike(loss_curves, inventory)
    columns = ["series", "world_size", "repeat", "run_id", "step", "steps", "training_s"]
    return kept[[*columns, "useful_tokens_per_s", "total_tokens_per_s"]].reset_index(drop=True)


def _alike(loss_curves: pd.DataFrame, inventory: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """See `words.alike`."""
    kept, refused = words.alike(loss_curves, inventory, "approach")
    kept = kept[~kept["stopped"].astype(bool)]
    return kept.dropna(subset=["useful_tokens_per_s"]), refused


def draw(loss_curves: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """A panel a world size: repeats thin, their median bold."""
    kept, refused = _alike(loss_curves, inventory)
    return panels.over_time(kept, inventory, "useful_tokens_per_s", "useful tokens / s", refused)


def caption(loss_curves: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """What a point is, and how much of the run it is."""
    kept, refused = _alike(loss_curves, inventory)
    runs = kept["run_id"].nunique()
    text = words.sentence(words.crowded(inventory) if runs else "") + (
        "Useful tokens of all ranks over seconds, sum over sum of the steps that a point stands for; at most 100 "
        f"points a run; {words.counted(runs, inventory)}. "
    )
    if runs:
        most = int(kept["steps"].max())
        text += (
            f"A point is {'a step' if most == 1 else f'the mean of up to {most} steps'}; the first "
            "holds the warm-up. Thin lines are repeats, bold ones their median point by point: no interval. "
        )
    return (text + refused).strip()


def alt(loss_curves: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """First and last throughput, read aloud."""
    kept, _ = _alike(loss_curves, inventory)
    texts = []
    for (name, world), group in kept.groupby(["series", "world_size"]):
        middle = group.groupby(panels.points(group))["useful_tokens_per_s"].median()
        texts.append(f"{name} on {world} from {number(middle.iloc[0])} to {number(middle.iloc[-1])}")
    return f"Line plot of useful tokens per second over the time of training. {words.listing(texts) or 'No data'}."
