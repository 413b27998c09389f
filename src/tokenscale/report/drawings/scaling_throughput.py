"""Throughput and efficiency by world size."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels
from tokenscale.report.style import number, ordered

TITLE = "Throughput and efficiency by world size"
QUERIES = ("scaling", "inventory")


def data(scaling: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run, of those that are like for like at every world size."""
    return _alike(scaling, inventory)[0].reset_index(drop=True)


def _alike(scaling: pd.DataFrame, inventory: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """See `words.alike`."""
    return words.alike(scaling, inventory, "world_size")


def draw(scaling: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """Left: useful tokens/s, every run a dot, medians joined, ideal dotted. Right: efficiency of each pair of runs."""
    scaling, refused = _alike(scaling, inventory)
    return panels.scaling(scaling, inventory, refused, words.caution(scaling))


def caption(scaling: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The reference with its absolute value, and whether this is a scaling measurement at all."""
    scaling, refused = _alike(scaling, inventory)
    bases = _bases(scaling)
    text = (
        "Strong scaling at a fixed global batch, useful tokens per second over all ranks; "
        f"{words.counted(len(scaling), inventory)}. "
        "Efficiency is of each run against the run of the same repeat at "
        f"{'world size 1' if set(bases) <= {1} else 'N0, the smallest world size measured'}. "
    )
    base = [
        f"{name}{'' if size == 1 else f' (N0 = {size})'} {words.spread(rates['useful_tokens_per_s'])}"
        for name in ordered(scaling["series"])
        for size in _bases(scaling[scaling["series"] == name])
        if len(rates := scaling[(scaling["series"] == name) & (scaling["world_size"] == size)])
    ]
    text += f"{refused} " if refused else ""
    if base:
        text += f"T({'1' if set(bases) <= {1} else 'N0'}) in useful tokens / s: {words.listing(base)}. "
    for reason, rows in scaling.groupby("not_compared"):
        text += f"{len(rows)} run{'s have' if len(rows) > 1 else ' has'} no efficiency: {reason}. "
    if warning := words.caution(scaling):
        text = f"{warning[0].upper()}{warning[1:]}. " + text
    return text + words.kinds([g for _, g in scaling.groupby(["series", "world_size"])["useful_tokens_per_s"]])


def _bases(scaling: pd.DataFrame) -> list[int]:
    """World sizes that efficiencies are against."""
    return sorted(int(size) for size in scaling["base_world_size"].unique())


def alt(scaling: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """Medians of throughput, read aloud."""
    scaling = data(scaling, inventory)
    medians = scaling.groupby(["series", "world_size"])["useful_tokens_per_s"].median()
    texts = [f"{name} on {world}: {number(value)}" for (name, world), value in medians.items()]
    medians_read = words.listing(texts) or "No data"
    return (
        f"Throughput by world size, median useful tokens per second. {medians_read}. {words.caution(scaling)}".strip()
    )
