"""Throughput and efficiency by world size at a fixed batch a rank."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels
from tokenscale.report.style import number, ordered

TITLE = "Weak scaling: throughput and efficiency by world size"
QUERIES = ("scaling_weak", "inventory")


def data(scaling_weak: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run, of lines with several world sizes that are like for like."""
    return _alike(scaling_weak, inventory)[0].reset_index(drop=True)


def _alike(scaling_weak: pd.DataFrame, inventory: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """See `words.alike`. A line has one series, whatever its global batches; lines of one world size scale nowhere."""
    kept, refused = words.alike(scaling_weak, inventory, "world_size")
    kept = kept.assign(series=words.without(kept["series"], "global_batch"))
    line = ["series", "rows_per_rank", "base_world_size"]
    return kept[kept.groupby(line)["world_size"].transform("nunique") > 1], refused


def draw(scaling_weak: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """Left: useful tokens/s, every run a dot, medians joined, ideal dotted. Right: efficiency of each pair of runs."""
    kept, refused = _alike(scaling_weak, inventory)
    return panels.scaling(kept, inventory, refused, words.crowded(inventory))


def caption(scaling_weak: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The reference with its absolute value, and the rows of a rank."""
    kept, refused = _alike(scaling_weak, inventory)
    rows = sorted(kept["rows_per_rank"].unique())
    text = words.sentence(words.crowded(inventory) if len(kept) else "") + (
        "Weak scaling: every rank has as many rows at every world size"
        + (f" ({words.listing([number(n) for n in rows])})" if rows else "")
        + ", so that the global batch grows, useful tokens per second over all ranks; "
        f"{words.counted(len(kept), inventory)}. Efficiency is of each run against the run of the same repeat at N0, "
        "the smallest world size measured. "
    )
    base = [
        f"{name} (N0 = {int(size)}) {words.spread(group['base_useful_tokens_per_s'].dropna().drop_duplicates())}"
        for name in ordered(kept["series"])
        for size, group in kept[kept["series"] == name].groupby("base_world_size")
    ]
    text += f"T(N0) in useful tokens / s: {words.listing(base)}. " if base else ""
    for reason, group in kept.groupby("not_compared"):
        text += f"{len(group)} run{'s have' if len(group) > 1 else ' has'} no efficiency: {reason}. "
    text += f"{refused} " if refused else ""
    return text + words.kinds(words.by_cell(kept, "useful_tokens_per_s"))


def alt(scaling_weak: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """Medians of throughput, read aloud."""
    read = words.medians(data(scaling_weak, inventory), "useful_tokens_per_s")
    return f"Weak scaling, median useful tokens per second by world size: {read or 'no data'}."
