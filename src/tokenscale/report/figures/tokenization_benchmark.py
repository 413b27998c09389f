"""The data path alone: time a useful token and time a batch, by arm."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import words
from tokenscale.report.style import GREY, dots, figure, jitter, no_data, number, ordered, plain, style

TITLE = "Data path alone: from stored text or tokens to ready batches"
QUERIES = ("benchmark",)
_TIMES = (("us_per_useful_token", "µs / useful token (log scale)"), ("ms_per_batch", "ms / batch (log scale)"))


def data(benchmark: pd.DataFrame) -> pd.DataFrame:
    """One row an arm and round."""
    return benchmark[
        ["benchmark", "arm", "round", "us_per_useful_token", "ms_per_batch", "open_s", "not_useful_share"]
    ].copy()


def draw(benchmark: pd.DataFrame) -> Figure:
    """Two panels on logarithmic axes, one row an arm: every round as a dot; the limit of copying as a line."""
    arms = benchmark[~benchmark["is_limit"].astype(bool)]
    limit = benchmark[benchmark["is_limit"].astype(bool)]
    names = ordered(arms["arm"])[::-1]
    with style():
        made, panels = figure(2, height=1.4 + 0.46 * max(3, len(names)), sharey=True)
        for axes, (column, label) in zip(panels, _TIMES, strict=True):
            axes.set_xlabel(label)
            shown = benchmark[benchmark[column] > 0]
            if shown.empty:
                no_data(axes, "no data: 0 of 0 rounds")
                continue
            axes.set_xscale("log")
            for y, name in enumerate(names):
                values = shown.loc[shown["arm"] == name, column]
                axes.plot(values, [y + o for o in jitter(len(values))], **dots(name))
                if len(values):
                    axes.plot([values.median()] * 2, [y - 0.32, y + 0.32], color=dots(name)["color"], linewidth=2)
            bound = limit.loc[limit[column] > 0, column]
            if len(bound):
                axes.axvline(bound.median(), color=GREY, linestyle=":", linewidth=1.8)
                axes.text(
                    bound.median(),
                    1.01,
                    "memcpy",
                    transform=axes.get_xaxis_transform(),
                    ha="center",
                    va="bottom",
                    fontsize=9,
                )
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(-0.6, len(names) - 0.4)
            axes.set_xlim(shown[column].min() / 1.6, shown[column].max() * 1.6)
            axes.grid(False, axis="y")
            plain(axes.xaxis, log=True)
        return made


def caption(benchmark: pd.DataFrame) -> str:
    """Shape of the batches, rounds, the limit, and how far the arms lie apart."""
    if benchmark.empty:
        return "The data path was not measured alone in this experiment: no benchmark file was given."
    first = benchmark.iloc[0]
    rounds = benchmark.groupby("arm")["round"].nunique()
    n = int(rounds.max())
    text = (
        f"Batches of {first['rows']} × {first['sequence_length']} tokens, {first['batches']} a round, {n} interleaved "
        f"round{'s' * (n != 1)} an arm, {first['cache'] or 'unstated'} file cache, one process, no training; corpus "
        f"{first['corpus']}, tokenizer {first['tokenizer']}. Each dot is a round, each bar the median; opening the "
        "store is not in it. "
    )
    medians = benchmark[~benchmark["is_limit"].astype(bool)].groupby("arm")["us_per_useful_token"].median().dropna()
    if len(medians) > 1 and medians.min() > 0:
        text += (
            f"{medians.idxmin()} is fastest at {number(medians.min())} µs a useful token, {medians.idxmax()} slowest "
            f"at {number(medians.max())}: {number(medians.max() / medians.min())} times as long. "
        )
    if benchmark["is_limit"].any():
        text += "The dotted line is a copy of ready batches in memory. "
    return text + words.kinds(
        [g for _, g in benchmark.groupby("arm")["us_per_useful_token"] if g.notna().all()]
    ).replace("runs a cell", "rounds an arm").replace("One run a cell", "One round an arm")


def alt(benchmark: pd.DataFrame) -> str:
    """The medians, read aloud."""
    medians = benchmark.groupby("arm")["us_per_useful_token"].median()
    texts = [f"{arm} {number(medians[arm])}" for arm in ordered(benchmark["arm"])]
    return f"Dot plot on a logarithmic axis. Median microseconds a useful token: {words.listing(texts) or 'no data'}."
