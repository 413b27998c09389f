"""Time of a new token against its position: it grows without a cache of keys and values, and hardly with one."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels
from tokenscale.report.drawings.inference_tokens_per_second import names
from tokenscale.report.style import PALETTE, figure, legend_columns, no_data, number, plain, style

TITLE = "Time of a new token against its position"
QUERIES = ("inference_steps",)


def data(inference_steps: pd.DataFrame) -> pd.DataFrame:
    """One row a model, batch, cache or none, round and stretch of positions."""
    return inference_steps.drop(columns=["benchmark"]).copy()


def draw(inference_steps: pd.DataFrame) -> Figure:
    """A panel a model: each round thin, the median bold; solid with the cache, dashed without, a colour a batch."""
    called = names(inference_steps)
    columns = min(2, max(1, len(called)))
    lines = -(-max(1, len(called)) // columns)
    with style():
        made, every = figure(columns, rows=lines, height=1.2 + 2.7 * lines)
        if not called:
            no_data(every[0], "no data: 0 of 0 rounds")
            return made
        batches = sorted(int(n) for n in inference_steps["batch"].unique())
        for axes, (run, name) in zip(every, called.items(), strict=False):
            here = inference_steps[inference_steps["run_id"] == run]
            for number_of, batch in enumerate(batches):
                for cached in (True, False):
                    rows = here[(here["batch"] == batch) & (here["cached"].astype(bool) == cached)]
                    _curve(axes, rows, PALETTE[number_of % len(PALETTE)], "-" if cached else "--")
            panels.heading(axes, name)
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            panels.steps_of(axes.xaxis)
            plain(axes.yaxis)
            axes.set_xlabel("position")
            axes.set_ylabel("ms / new token")
        for axes in every[len(called) :]:
            axes.set_visible(False)
        labels = []
        for number_of, batch in enumerate(batches):
            for cached in (True, False):
                labels.append(f"{batch} prompt{'s' * (batch > 1)}, {'cache' if cached else 'no cache'}")
                look = {"color": PALETTE[number_of % len(PALETTE)], "linestyle": "-" if cached else "--"}
                every[0].plot([], [], **look, label=labels[-1])
        made.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=legend_columns(labels, 4))
        return made


def _curve(axes, rows: pd.DataFrame, colour: str, dash: str) -> None:
    for _, one in rows.groupby("round"):
        axes.plot(one["position"], one["ms_per_token"], color=colour, linestyle=dash, linewidth=0.7, alpha=0.45)
    middle = rows.groupby("position")["ms_per_token"].median()
    axes.plot(middle.index, middle, color=colour, linestyle=dash, linewidth=1.8, marker="o", markersize=3)


def caption(inference_steps: pd.DataFrame) -> str:
    """What a point is, and how much longer the last positions take than the first."""
    if inference_steps.empty:
        return "No model has answered prompts in this experiment: no benchmark file was given."
    first, n = inference_steps.iloc[0], int(inference_steps["round"].nunique())
    text = (
        f"New tokens behind a prompt of {first['prompt_tokens']}, in stretches of positions: seconds of a stretch over "
        f"its tokens, for all prompts at once; {n} round{'s' * (n != 1)}, each a thin line, their median bold. "
    )
    called, parts = names(inference_steps), []
    for (run, batch, cached), rows in inference_steps.groupby(["run_id", "batch", "cached"]):
        middle = rows.groupby("position")["ms_per_token"].median()
        if len(middle) > 1 and middle.iloc[0] > 0:
            how = "with" if cached else "without"
            parts.append(f"{called[run]}, {batch} at once, {how}: {number(middle.iloc[-1] / middle.iloc[0])}")
    if parts:
        text += f"The last stretch over the first, with the cache and without: {'; '.join(parts)}. "
    if not inference_steps["same_text"].astype(bool).all():
        text += "Some texts differ with the cache: see the figure of tokens per second. "
    return text


def alt(inference_steps: pd.DataFrame) -> str:
    """First and last stretch, read aloud."""
    called, parts = names(inference_steps), []
    for (run, batch, cached), rows in inference_steps.groupby(["run_id", "batch", "cached"]):
        middle = rows.groupby("position")["ms_per_token"].median()
        how = "cache" if cached else "no cache"
        parts.append(f"{called[run]}, {batch} at once, {how} {number(middle.iloc[0])} to {number(middle.iloc[-1])}")
    return f"Lines of milliseconds a new token over its position: {words.listing(parts) or 'no data'}."
