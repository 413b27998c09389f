"""Writing with a trained model, with a cache of keys and values and without: tokens per second, time per token."""

from collections.abc import Mapping

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import PALETTE, figure, legend_columns, no_data, number, plain, style
from tokenscale.report.table import Table

_CELL = ["model", "run_id", "batch", "prompt_tokens", "new_tokens"]


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


def _texts(cell: pd.DataFrame) -> str:
    if cell["same_text"].all():
        return "equal"
    return f"differ from position {int(cell['first_difference'].min())}"


def _colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def _look(colour: str, cached: bool) -> dict:
    options = {"color": colour, "marker": "o" if cached else "s", "markeredgecolor": colour, "markersize": 4.5}
    return options | {"markerfacecolor": colour if cached else "none"}


def _grid(count: int, height: float) -> tuple[matplotlib.figure.Figure, list[Axes]]:
    """A figure of two columns with so many panels, at least one, each with its height; further ones are hidden."""
    columns = min(2, max(1, count))
    lines = -(-max(1, count) // columns)
    made, every = figure(columns, rows=lines, height=1.2 + height * lines)
    for axes in every[max(1, count) :]:
        axes.set_visible(False)
    if not count:
        no_data(every[0], "no data: 0 of 0 rounds")
    return made, every


def _legend(made: matplotlib.figure.Figure, axes: Axes, looks: Mapping[str, dict]) -> None:
    for label, look in looks.items():
        axes.plot([], [], **look, label=label)
    columns = legend_columns(list(looks), 4)
    made.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns)


def _line(axes, rows: pd.DataFrame, colour: str, cached: bool) -> None:
    same = rows[rows["same_text"]]
    axes.plot(same["new_tokens"], same["tokens_per_s"], **_look(colour, cached), linestyle="none")
    middle = same.groupby("new_tokens")["tokens_per_s"].median()
    axes.plot(middle.index, middle, color=colour, linestyle="-" if cached else "--", linewidth=1.2)
    others = rows[~rows["same_text"]]
    axes.plot(others["new_tokens"], others["tokens_per_s"], color=colour, marker="x", linestyle="none")


def _gained(shown: pd.DataFrame) -> str:
    compared = shown.dropna(subset=["speed_up"])
    if compared.empty:
        return ""
    longest = (compared["prompt_tokens"] + compared["new_tokens"]).max()
    at = compared[compared["prompt_tokens"] + compared["new_tokens"] == longest]
    called = names(shown)
    middle = at.groupby(["run_id", "batch"])["speed_up"].median()
    parts = [f"{called[run]} with {batch} at once {number(value)} times" for (run, batch), value in middle.items()]
    return f"At {longest} positions the cache makes writing faster: {captions.listing(parts)}. "


def _differing(shown: pd.DataFrame) -> str:
    out = shown[~shown["same_text"]].drop_duplicates(_CELL)
    if out.empty:
        return "With the cache and without it the texts are the same, token by token. "
    called = names(shown)
    parts = [f"{called[r.run_id]}, {r.batch} at once, {r.prompt_tokens} + {r.new_tokens}" for r in out.itertuples()]
    return f"Texts differ with the cache, so that nothing is compared (crosses): {'; '.join(parts)}. "


def _curve(axes, rows: pd.DataFrame, colour: str, dash: str) -> None:
    for _, one in rows.groupby("round"):
        axes.plot(one["position"], one["ms_per_token"], color=colour, linestyle=dash, linewidth=0.7, alpha=0.45)
    middle = rows.groupby("position")["ms_per_token"].median()
    axes.plot(middle.index, middle, color=colour, linestyle=dash, linewidth=1.8, marker="o", markersize=3)


class InferenceTokensPerSecond(Figure):
    title = "Generation with and without a KV cache: tokens per second"
    queries = ("inference",)
    columns = (
        *(*_CELL, "cached", "round", "prefill_s", "prefill_tokens_per_s", "tokens_per_s", "ms_per_token", "speed_up"),
        *("same_text", "first_difference", "cache_bytes", "formula_bytes", "peak_bytes"),
    )
    read = "Dot plots on logarithmic axes. Median tokens per second: {}."
    inference: pd.DataFrame

    def prepare(self) -> None:
        """Leave out rows without a measurement."""
        self.rows = _timed(self.inference)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw a panel per model and batch: every round a dot over the new tokens, medians joined.

        Filled and solid with the cache, open and dashed without; a colour per length of prompt. Cells whose texts
        differ are crosses that no line joins.
        """
        called = names(self.rows)
        cells = [
            (run, batch) for run in called for batch in sorted({*self.rows.loc[self.rows["run_id"] == run, "batch"]})
        ]
        with style():
            made, every = _grid(len(cells), 2.5)
            if not cells:
                return made
            prompts = sorted(int(n) for n in self.rows["prompt_tokens"].unique())
            for axes, (run, batch) in zip(every, cells, strict=False):
                here = self.rows[(self.rows["run_id"] == run) & (self.rows["batch"] == batch)]
                for n, prompt in enumerate(prompts):
                    for cached in (True, False):
                        rows = here[(here["prompt_tokens"] == prompt) & (here["cached"] == cached)]
                        _line(axes, rows, _colour(n), cached)
                panels.heading(axes, f"{called[run]}, {batch} prompt{'s' * (batch > 1)} at once")
                axes.set_yscale("log")
                plain(axes.yaxis, log=True)
                panels.doublings(axes, sorted(int(n) for n in here["new_tokens"].unique()))
                axes.set_xlabel("new tokens")
                axes.set_ylabel("tokens / s\n(log scale)")
            looks = {
                f"prompt of {prompt}, {'cache' if cached else 'no cache'}": _look(_colour(n), cached)
                | {"linestyle": "-" if cached else "--"}
                for n, prompt in enumerate(prompts)
                for cached in (True, False)
            }
            _legend(made, every[0], looks)
            return made

    def caption(self) -> str:
        """Return what was written, what the cache gains at the longest text, whose texts differ, what was left out."""
        if self.rows.empty:
            return "No inference benchmark was given for this experiment."
        first, n = self.rows.iloc[0], int(self.rows["round"].nunique())
        threads = (
            f" with {captions.listing([str(int(t)) for t in sorted(self.rows['threads'].dropna().unique())])} thread"
        )
        where = f"{first['cpu'] or 'a CPU'}{threads}" if first["device"] == "cpu" else str(first["device"])
        text = (
            f"Greedy generation with the final weights on {where}, each cell once in each of {n} interleaved "
            f"round{'s' * (n != 1)}. Each point is a round, lines join medians. Tokens per second exclude the first "
            "new token of each prompt, whose time is in the table. EOS does not end a text. "
        )
        text += _gained(self.rows) + _differing(self.rows)
        text += captions.reasons(self.inference[self.inference["left_out"].notna()], "model")
        return text + captions.rounds([g for _, g in self.rows.groupby([*_CELL, "cached"])["tokens_per_s"]], "a cell")

    def numbers(self) -> str:
        """Return the median of each cell of the longest answers in words."""
        called = names(self.rows)
        longest = self.rows["new_tokens"] == self.rows.groupby("run_id")["new_tokens"].transform("max")
        middle = self.rows[self.rows["same_text"] & longest].groupby([*_CELL, "cached"])["tokens_per_s"].median()
        parts = [
            f"{called[run]}, {batch} at once, {prompt} + {new} tokens, {'cache' if cached else 'no cache'} "
            f"{number(value)}"
            for (_, run, batch, prompt, new, cached), value in middle.items()
        ]
        return captions.listing(parts)

    def table(self) -> Table:
        """Return medians as people read them, a row per cell. Cells whose texts differ have no speed-up."""
        columns = [
            ("model", False),
            ("prompts at once", True),
            ("prompt", True),
            ("new", True),
            ("first token (ms)", True),
        ]
        columns += [("tokens/s, cache", True), ("tokens/s, none", True), ("speed-up", True), ("cache (KiB)", True)]
        columns += [("by formula (KiB)", True), ("peak (MiB)", True), ("texts", False)]
        rows = []
        called = names(self.rows)
        for (_, run_id, batch, prompt, new), cell in self.rows.groupby(_CELL):
            kept, without = cell[cell["cached"]], cell[~cell["cached"]]
            peak = kept["peak_bytes"].astype(float).max() / 2**20
            rows.append(
                [called[run_id], str(batch), str(prompt), str(new), captions.spread(1e3 * kept["prefill_s"])]
                + [captions.spread(kept["tokens_per_s"]), captions.spread(without["tokens_per_s"])]
                + [captions.spread(kept["speed_up"].astype(float).dropna()), number(kept["cache_bytes"].max() / 1024)]
                + [number(kept["formula_bytes"].max() / 1024), number(peak), _texts(cell)]
            )
        caption = (
            "Medians over rounds, their spread in brackets. Tokens per second are those behind the first new token, "
            "of all prompts at once; the cache's bytes are those of its tensors, beside 2 × layers × key-value heads "
            "× head width × positions × bytes of a number × prompts. Peak: allocated beside the weights, on devices "
            "that count it."
        )
        return Table(columns, rows, caption)


class InferenceStepTime(Figure):
    title = "Time per new token by position"
    queries = ("inference_steps",)
    read = "Lines of milliseconds a new token over its position: {}."
    inference_steps: pd.DataFrame

    def data(self) -> pd.DataFrame:
        """Return one row per model, batch, cache or none, round and stretch of positions."""
        return self.inference_steps.drop(columns=["benchmark"]).copy()

    def draw(self) -> matplotlib.figure.Figure:
        """Draw a panel per model: each round thin, the median bold; dashed without the cache, a colour per batch."""
        called = names(self.inference_steps)
        with style():
            made, every = _grid(len(called), 2.7)
            if not called:
                return made
            batches = sorted(int(n) for n in self.inference_steps["batch"].unique())
            for axes, (run, name) in zip(every, called.items(), strict=False):
                here = self.inference_steps[self.inference_steps["run_id"] == run]
                for number_of, batch in enumerate(batches):
                    for cached in (True, False):
                        rows = here[(here["batch"] == batch) & (here["cached"].astype(bool) == cached)]
                        _curve(axes, rows, _colour(number_of), "-" if cached else "--")
                panels.heading(axes, name)
                axes.set_xlim(left=0)
                axes.set_ylim(bottom=0)
                panels.steps_of(axes.xaxis)
                plain(axes.yaxis)
                axes.set_xlabel("position")
                axes.set_ylabel("ms / new token")
            looks = {
                f"{batch} prompt{'s' * (batch > 1)}, {'cache' if cached else 'no cache'}": {
                    "color": _colour(number_of),
                    "linestyle": "-" if cached else "--",
                }
                for number_of, batch in enumerate(batches)
                for cached in (True, False)
            }
            _legend(made, every[0], looks)
            return made

    def caption(self) -> str:
        """Return what a point is, and how much longer the last positions take than the first."""
        if self.inference_steps.empty:
            return "No inference benchmark was given for this experiment."
        first, n = self.inference_steps.iloc[0], int(self.inference_steps["round"].nunique())
        text = (
            f"Time per new token against its position, after a prompt of {first['prompt_tokens']} tokens; "
            f"{n} round{'s' * (n != 1)}, each a thin line, their median bold. Positions are grouped: seconds of a "
            "group over its tokens, for all prompts at once. "
        )
        called, parts = names(self.inference_steps), []
        for (run, batch, cached), rows in self.inference_steps.groupby(["run_id", "batch", "cached"]):
            middle = rows.groupby("position")["ms_per_token"].median()
            if len(middle) > 1 and middle.iloc[0] > 0:
                how = "with" if cached else "without"
                parts.append(f"{called[run]}, {batch} at once, {how}: {number(middle.iloc[-1] / middle.iloc[0])}")
        if parts:
            text += f"Time of the last group over the first, with and without the cache: {'; '.join(parts)}. "
        if not self.inference_steps["same_text"].astype(bool).all():
            text += "Some texts differ with the cache: see the figure of tokens per second. "
        return text

    def numbers(self) -> str:
        """Return the first and last stretch of each line in words."""
        called, parts = names(self.inference_steps), []
        for (run, batch, cached), rows in self.inference_steps.groupby(["run_id", "batch", "cached"]):
            middle = rows.groupby("position")["ms_per_token"].median()
            how = "cache" if cached else "no cache"
            parts.append(f"{called[run]}, {batch} at once, {how} {number(middle.iloc[0])} to {number(middle.iloc[-1])}")
        return captions.listing(parts)
