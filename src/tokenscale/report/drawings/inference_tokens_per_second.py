"""Tokens that a trained model writes a second, with a cache of keys and values and without, by length of the answer."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels
from tokenscale.report.style import PALETTE, figure, legend_columns, no_data, number, plain, style
from tokenscale.report.table import Table

TITLE = "Writing with a cache of keys and values and without: tokens per second"
QUERIES = ("inference",)
_CELL = ["model", "run_id", "batch", "prompt_tokens", "new_tokens"]


def data(inference: pd.DataFrame) -> pd.DataFrame:
    """One row a model, batch, length of prompt and answer, cache or none, and round."""
    columns = [*_CELL, "cached", "round", "prefill_s", "prefill_tokens_per_s", "tokens_per_s", "ms_per_token"]
    columns += ["speed_up", "same_text", "first_difference", "cache_bytes", "formula_bytes", "peak_bytes"]
    return _timed(inference)[columns].reset_index(drop=True)


def _timed(inference: pd.DataFrame) -> pd.DataFrame:
    kept = inference[inference["left_out"].isna()].copy()
    kept[["cached", "same_text"]] = kept[["cached", "same_text"]].astype(bool)
    counts = ["batch", "prompt_tokens", "new_tokens", "round"]  # of numbers beside those that are left out
    return kept.astype(dict.fromkeys(counts, int))


def names(rows: pd.DataFrame) -> dict[str, str]:
    """Run → what it is called: its model, and its id where several runs have that model."""
    runs = rows[["run_id", "model"]].drop_duplicates()
    alone = runs["model"].value_counts() == 1
    return {r.run_id: r.model if alone[r.model] else f"{r.model} ({r.run_id[-10:]})" for r in runs.itertuples()}


def table(inference: pd.DataFrame) -> Table:
    """Medians as people read them, a row a cell. Cells whose texts differ have no speed-up."""
    columns = [("model", False), ("prompts at once", True), ("prompt", True), ("new", True), ("first token (ms)", True)]
    columns += [("tokens/s, cache", True), ("tokens/s, none", True), ("speed-up", True), ("cache (KiB)", True)]
    columns += [("by formula (KiB)", True), ("peak (MiB)", True), ("texts", False)]
    rows = []
    shown = _timed(inference)
    called = names(shown)
    for (_, run_id, batch, prompt, new), cell in shown.groupby(_CELL):
        kept, without = cell[cell["cached"]], cell[~cell["cached"]]
        peak = kept["peak_bytes"].astype(float).max() / 2**20
        rows.append(
            [called[run_id], str(batch), str(prompt), str(new), words.spread(1e3 * kept["prefill_s"])]
            + [words.spread(kept["tokens_per_s"]), words.spread(without["tokens_per_s"])]
            + [words.spread(kept["speed_up"].astype(float).dropna()), number(kept["cache_bytes"].max() / 1024)]
            + [number(kept["formula_bytes"].max() / 1024), number(peak), _texts(cell)]
        )
    caption = (
        "Medians over rounds, their spread in brackets. Tokens per second are those behind the first new token, of all "
        "prompts at once; the cache's bytes are those of its tensors, beside 2 × layers × key-value heads × head width "
        "× positions × bytes of a number × prompts. Peak: allocated beside the weights, on devices that count it."
    )
    return Table(columns, rows, caption)


def _texts(cell: pd.DataFrame) -> str:
    if cell["same_text"].all():
        return "equal"
    return f"differ from position {int(cell['first_difference'].min())}"


def draw(inference: pd.DataFrame) -> Figure:
    """A panel a model and batch: every round a dot over the new tokens, medians joined. Filled and solid with the
    cache, open and dashed without; a colour a length of prompt. Cells whose texts differ are crosses that nothing
    joins."""
    shown = _timed(inference)
    called = names(shown)
    cells = [(run, batch) for run in called for batch in sorted({*shown.loc[shown["run_id"] == run, "batch"]})]
    columns = min(2, max(1, len(cells)))
    lines = -(-max(1, len(cells)) // columns)
    with style():
        made, every = figure(columns, rows=lines, height=1.2 + 2.5 * lines)
        if not cells:
            no_data(every[0], "no data: 0 of 0 rounds")
            return made
        prompts = sorted(int(n) for n in shown["prompt_tokens"].unique())
        for axes, (run, batch) in zip(every, cells, strict=False):
            here = shown[(shown["run_id"] == run) & (shown["batch"] == batch)]
            for prompt, colour in zip(prompts, _colours(prompts), strict=True):
                for cached in (True, False):
                    _line(axes, here[(here["prompt_tokens"] == prompt) & (here["cached"] == cached)], colour, cached)
            panels.heading(axes, f"{called[run]}, {batch} prompt{'s' * (batch > 1)} at once")
            axes.set_yscale("log")
            plain(axes.yaxis, log=True)
            panels.doublings(axes, sorted(int(n) for n in here["new_tokens"].unique()))
            axes.set_xlabel("new tokens")
            axes.set_ylabel("tokens / s\n(log scale)")
        for axes in every[len(cells) :]:
            axes.set_visible(False)
        labels = []
        for prompt, colour in zip(prompts, _colours(prompts), strict=True):
            for cached in (True, False):
                labels.append(f"prompt of {prompt}, {'cache' if cached else 'no cache'}")
                every[0].plot([], [], **_look(colour, cached), linestyle="-" if cached else "--", label=labels[-1])
        made.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=legend_columns(labels, 4))
        return made


def _colours(prompts: list[int]) -> list[str]:
    return [PALETTE[i % len(PALETTE)] for i in range(len(prompts))]


def _look(colour: str, cached: bool) -> dict:
    options = {"color": colour, "marker": "o" if cached else "s", "markeredgecolor": colour, "markersize": 4.5}
    return options | {"markerfacecolor": colour if cached else "none"}


def _line(axes, rows: pd.DataFrame, colour: str, cached: bool) -> None:
    same = rows[rows["same_text"]]
    axes.plot(same["new_tokens"], same["tokens_per_s"], **_look(colour, cached), linestyle="none")
    middle = same.groupby("new_tokens")["tokens_per_s"].median()
    axes.plot(middle.index, middle, color=colour, linestyle="-" if cached else "--", linewidth=1.2)
    others = rows[~rows["same_text"]]
    axes.plot(others["new_tokens"], others["tokens_per_s"], color=colour, marker="x", linestyle="none")


def caption(inference: pd.DataFrame) -> str:
    """What was written, what the cache gains at the longest text, whose texts differ, and what was left out."""
    shown = _timed(inference)
    if shown.empty:
        return "No model has answered prompts in this experiment: no benchmark file was given."
    first, n = shown.iloc[0], int(shown["round"].nunique())
    threads = f" with {words.listing([str(int(t)) for t in sorted(shown['threads'].dropna().unique())])} thread"
    where = f"{first['cpu'] or 'a CPU'}{threads}" if first["device"] == "cpu" else str(first["device"])
    text = (
        f"Greedy text of final weights on {where}, each cell once in each of {n} interleaved round{'s' * (n != 1)}; no "
        "EOS ends a text. Tokens per second count those behind the first new token, of all prompts at once; what comes "
        "before is in the table. Each point is a round, lines join medians. "
    )
    text += _gained(shown) + _differing(shown)
    left_out = inference[inference["left_out"].notna()]
    if len(left_out):
        text += f"Left out: {'; '.join(f'{r.model} ({r.left_out})' for r in left_out.itertuples())}. "
    groups = [g for _, g in shown.groupby([*_CELL, "cached"])["tokens_per_s"]]
    return text + words.kinds(groups).replace("runs a cell", "rounds a cell").replace("One run a", "One round a")


def _gained(shown: pd.DataFrame) -> str:
    compared = shown.dropna(subset=["speed_up"])
    if compared.empty:
        return ""
    longest = (compared["prompt_tokens"] + compared["new_tokens"]).max()
    at = compared[compared["prompt_tokens"] + compared["new_tokens"] == longest]
    called = names(shown)
    middle = at.groupby(["run_id", "batch"])["speed_up"].median()
    parts = [f"{called[run]} with {batch} at once {number(value)} times" for (run, batch), value in middle.items()]
    return f"At {longest} positions the cache makes writing faster: {words.listing(parts)}. "


def _differing(shown: pd.DataFrame) -> str:
    out = shown[~shown["same_text"]].drop_duplicates(_CELL)
    if out.empty:
        return "With the cache and without it the texts are the same, token by token. "
    called = names(shown)
    parts = [f"{called[r.run_id]}, {r.batch} at once, {r.prompt_tokens} + {r.new_tokens}" for r in out.itertuples()]
    return f"Texts differ with the cache, so that nothing is compared (crosses): {'; '.join(parts)}. "


def alt(inference: pd.DataFrame) -> str:
    """The medians, read aloud."""
    shown = _timed(inference)
    called = names(shown)
    longest = shown["new_tokens"] == shown.groupby("run_id")["new_tokens"].transform("max")
    middle = shown[shown["same_text"] & longest].groupby([*_CELL, "cached"])["tokens_per_s"].median()
    parts = [
        f"{called[run]}, {batch} at once, {prompt} + {new} tokens, {'cache' if cached else 'no cache'} {number(value)}"
        for (_, run, batch, prompt, new, cached), value in middle.items()
    ]
    return f"Dot plots on logarithmic axes. Median tokens per second: {words.listing(parts) or 'no data'}."
