"""Throughput by micro-batch and approach."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels
from tokenscale.report.style import figure, look, no_data, number, ordered, plain, style

TITLE = "Training throughput by micro-batch"
QUERIES = ("throughput", "inventory")


def data(throughput: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run at the smallest world size, of those that are like for like."""
    kept, _ = _alike(throughput, inventory)
    columns = ["series", "micro_batch", "world_size", "repeat", "run_id", "useful_tokens_per_s", "total_tokens_per_s"]
    return kept[[*columns, "not_useful_share", "sequence_length"]].reset_index(drop=True)


def _alike(throughput: pd.DataFrame, inventory: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Runs at the smallest world size that may be compared along micro-batches of an approach, and along approaches of
    a micro-batch; series are named without their micro-batch."""
    smallest = inventory["world_size"].min()
    listed = inventory[inventory["world_size"] == smallest]
    kept, along = words.alike(throughput[throughput["world_size"] == smallest], listed, "micro_batch")
    kept, across = words.alike(kept, listed, "approach")
    shape = inventory[["run_id", "micro_batch", "sequence_length"]]
    kept = kept.merge(shape, on="run_id").assign(series=lambda rows: words.without(rows["series"], "micro_batch"))
    return kept.dropna(subset=["micro_batch"]), " ".join(dict.fromkeys(filter(None, (along, across))))


def draw(throughput: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """Left: useful tokens/s, right: processed tokens/s; every run a dot, medians joined, a line an approach."""
    kept, refused = _alike(throughput, inventory)
    with style():
        made, both = figure(2, height=4.0)
        for axes, column, label in zip(
            both,
            ("useful_tokens_per_s", "total_tokens_per_s"),
            ("useful tokens / s", "processed tokens / s (padding included)"),
            strict=True,
        ):
            axes.set_xlabel("micro-batch (rows of a forward pass)")
            axes.set_ylabel(label)
            if kept.empty:
                no_data(axes, words.nothing(inventory, refused))
                continue
            sizes = sorted(int(size) for size in kept["micro_batch"].unique())
            names = ordered(kept["series"])
            for name, shift in zip(names, panels.shifts(len(names)), strict=True):
                panels.joined(axes, kept[kept["series"] == name], column, 1, name, shift, "micro_batch")
                axes.plot([], [], **look(name), label=name)
            panels.doublings(axes, sizes)
            axes.set_ylim(0, 1.06 * kept[column].max())
            plain(axes.yaxis)
        panels.legend(made, both[0])
        return made


def caption(throughput: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """At which world size and sequence length, and what else changes with the micro-batch."""
    kept, refused = _alike(throughput, inventory)
    smallest = inventory[inventory["world_size"] == inventory["world_size"].min()]
    text = (
        "Tokens per second, sum over sum after warm-up, at the smallest world size; a global batch is taken in as many "
        "micro-batches as it holds, so that the learning rate and the number of steps do not change along the axis; "
        f"{words.counted(len(kept), smallest)}. Each dot is a run; medians are joined. "
    )
    if len(kept):
        lengths = sorted(int(n) for n in kept["sequence_length"].dropna().unique())
        if lengths:
            text += f"Sequence length {words.listing([number(n, 9) for n in lengths])}. "
        if kept["micro_batch"].nunique() == 1:
            text += f"All runs have one micro-batch, {int(kept['micro_batch'].iloc[0])}: no trend is to be seen. "
    text += f"{refused} " if refused else ""
    groups = [g for _, g in kept.groupby(["series", "micro_batch"])["useful_tokens_per_s"]]
    return text + words.kinds(groups)


def alt(throughput: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The medians, read aloud."""
    found = data(throughput, inventory).groupby(["series", "micro_batch"])["useful_tokens_per_s"].median()
    texts = [f"{name} at {int(size)}: {number(value)}" for (name, size), value in found.items()]
    return f"Median useful tokens per second by micro-batch. {words.listing(texts) or 'No data'}."
