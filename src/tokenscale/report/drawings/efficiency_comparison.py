"""Strong-scaling efficiency by approach and world size."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels
from tokenscale.report import text_layout as fits
from tokenscale.report.style import GREY, ordered, style

TITLE = "Strong-scaling efficiency by approach"
QUERIES = ("scaling", "inventory")


def data(scaling: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run above the base that has an efficiency, of those that are like for like."""
    kept, _ = _alike(scaling, inventory)
    columns = ["series", "world_size", "repeat", "run_id", "global_batch", "base_world_size"]
    columns += ["base_useful_tokens_per_s", "useful_tokens_per_s", "speed_up", "efficiency"]
    return kept[columns].reset_index(drop=True)


def _alike(scaling: pd.DataFrame, inventory: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """See `words.alike`; at the base itself efficiency is 1 by definition, and not shown."""
    kept, refused = words.alike(scaling, inventory, "world_size")
    return kept[(kept["world_size"] > kept["base_world_size"]) & kept["efficiency"].notna()], refused


def draw(scaling: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """One row an approach and world size above the base: every run a dot, medians as bars, the ideal a line."""
    kept, _ = _alike(scaling, inventory)
    fewest = panels.cells(inventory)
    above = {cell for cell in fewest if cell[1] > min(world for name, world in fewest if name == cell[0])}
    label = {"efficiency": ("efficiency T(N) / (N / N0 × T(N0)) (%)", 100.0)}
    made, (axes,) = panels.strips(kept, inventory, label, keep=above.__contains__)
    if len(kept):
        with style():
            axes.axvline(100, color=GREY, linestyle=":", linewidth=1.2)
        axes.set_xlim(0, max(110.0, 105 * kept["efficiency"].max()))
        texts = [f"{n}, {panels.ranks(w)}" for n, w in fewest[::-1] if (n, w) in above]
        axes.set_yticks(axes.get_yticks(), fits.names(texts))
        panels.heading(axes, words.caution(scaling))
    return made


def caption(scaling: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The base with its absolute value, and whether this is a scaling measurement at all."""
    kept, refused = _alike(scaling, inventory)
    expected = inventory[inventory["world_size"] > inventory.groupby("series")["world_size"].transform("min")]
    text = words.sentence(words.caution(scaling) if len(kept) else "") + (
        "Useful tokens/s T(N) of a run over N / N0 times those of the run of the same repeat at N0, the smallest world "
        f"size of its approach, at one global batch; {words.counted(len(kept), expected)}. Each dot is a run, each bar "
        "the median of a cell, the dotted line the ideal. "
    )
    base = [
        f"{name} {words.spread(rates)} (N0 = {size})"
        for name in ordered(kept["series"])
        for size, group in kept[kept["series"] == name].groupby("base_world_size")
        if len(rates := group.drop_duplicates("repeat")["base_useful_tokens_per_s"])
    ]
    text += f"T(N0) in useful tokens / s: {words.listing(base)}. " if base else ""
    text += f"{refused} " if refused else ""
    return text + words.kinds(words.by_cell(kept, "efficiency"))


def alt(scaling: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The medians, read aloud."""
    read = words.medians(data(scaling, inventory), "efficiency", 100, " %")
    return f"Dot plot of strong-scaling efficiency. Medians by approach and world size: {read or 'no data'}."
