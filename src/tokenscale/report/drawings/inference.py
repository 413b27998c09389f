"""Generation with a trained model, with a cache of keys and values and without: tokens per second,
time per token.
"""

import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Drawing, Figure
from tokenscale.report.style import PALETTE, figure, format_ticks, no_data, number
from tokenscale.report.table import Table, columns

_CELL = ["model", "run_id", "batch", "prompt_tokens", "new_tokens"]


def names(rows: pd.DataFrame) -> dict[str, str]:
    """Run → what it is called: its model, and its id where several runs have that model."""
    runs = rows[["run_id", "model"]].drop_duplicates()
    alone = runs["model"].value_counts() == 1
    return {
        r.run_id: r.model if alone[r.model] else f"{r.model} ({r.run_id[-10:]})"
        for r in runs.itertuples()
    }


def _cache(cached: bool) -> str:
    return "cache" if cached else "no cache"


class InferenceTokensPerSecond(Figure):
    title = "Generation with and without a KV cache"
    queries = ("inference", "inference_steps")
    columns = (
        *_CELL,
        "cached",
        "round",
        "prefill_s",
        "prefill_tokens_per_s",
        "tokens_per_s",
        "ms_per_token",
        "speed_up",
        "same_text",
        "first_difference",
        "cache_bytes",
        "formula_bytes",
        "peak_bytes",
    )
    main = "tokens_per_s"
    unit = (1, " tokens/s")
    by = ("label",)
    inference_steps: pd.DataFrame

    def prepare(self) -> None:
        rows = self.first[self.first["left_out"].isna()]
        # of numbers beside those that are left out
        counts = ["batch", "prompt_tokens", "new_tokens", "round"]
        rows = rows.astype({"cached": bool, "same_text": bool, **dict.fromkeys(counts, int)})
        self.called = names(rows)
        cells = [
            f"{self.called[i]}, {b} at once, {p} + {n}"
            for _, i, b, p, n in rows[_CELL].itertuples(index=False)
        ]
        labels = [
            f"{cell} tokens, {_cache(cached)}"
            for cell, cached in zip(cells, rows["cached"], strict=True)
        ]
        self.rows = rows.assign(cell=cells, label=labels, repeat=rows["round"])
        self.refusals = ""

    def data(self) -> pd.DataFrame:
        """Return one row per cell and round; below them, with a `position`, one per stretch of
        positions.
        """
        steps = self.inference_steps.drop(columns="benchmark")
        return (
            pd.concat([self.rows[list(self.columns)], steps], ignore_index=True)
            if len(steps)
            else super().data()
        )

    def draw(self) -> Drawing:
        """Draw two panels per model and batch: tokens/s over new tokens, time of a token over its
        position.

        Filled and solid with the cache, open and dashed without; a colour per length of prompt.
        Left, every round is a dot, medians are joined, and texts that differ are crosses. Right,
        rounds are thin and their median bold.
        """
        shown = [
            tuple(cell)
            for cell in self.rows[["run_id", "batch"]].drop_duplicates().sort_values("batch").values
        ]
        shown = [cell for run in self.called for cell in shown if cell[0] == run]
        made, every = figure(2, rows=max(1, len(shown)), height=1.2 + 2.3 * max(1, len(shown)))
        for place, axes in enumerate(every):
            axes.set_xlabel("position" if place % 2 else "new tokens")
            axes.set_ylabel("ms / new token" if place % 2 else "tokens / s\n(log scale)")
            if not shown:
                no_data(axes, text="no data: 0 of 0 rounds")
        colours = {
            n: PALETTE[i % len(PALETTE)]
            for i, n in enumerate(sorted(self.rows["prompt_tokens"].unique()))
        }
        for place, (run, batch) in enumerate(shown):
            left, right = every[2 * place : 2 * place + 2]
            for frame, draw, axes in (
                (self.rows, _draw_rates, left),
                (self.inference_steps, _draw_times, right),
            ):
                here = frame[(frame["run_id"] == run) & (frame["batch"] == batch)]
                for (prompt, cached), rows in here.groupby(["prompt_tokens", "cached"]):
                    draw(axes, rows, _look(colours[prompt], cached))
            panels.write_heading(
                left, text=f"{self.called[run]}, {captions.count(batch, 'prompt')} at once"
            )
            panels.scale_by_doublings(
                left, sizes=sorted(self.rows.loc[self.rows["run_id"] == run, "new_tokens"].unique())
            )
            left.set_yscale("log")
            format_ticks(left.yaxis, log=True)
            right.set_xlim(left=0)
            right.set_ylim(bottom=0)
            panels.steps_of(right.xaxis)
            format_ticks(right.yaxis)
        for prompt, colour in colours.items():
            for cached in (True, False):
                every[0].plot(
                    [], [], **_look(colour, cached), label=f"prompt of {prompt}, {_cache(cached)}"
                )
        panels.draw_legend(made, axes=every[0], most=4)
        return made

    def caption(self) -> str:
        if self.rows.empty:
            return "No inference benchmark was given for this experiment."
        first = self.rows.iloc[0]
        n = int(self.rows["round"].nunique())
        counts = sorted(self.rows["threads"].dropna().unique())
        threads = captions.listing([captions.count(int(t), "thread") for t in counts])
        where = (
            f"{first['cpu'] or 'a CPU'} with {threads}"
            if first["device"] == "cpu"
            else str(first["device"])
        )
        text = (
            f"Greedy generation with the final weights on {where}, each cell once in each of "
            f"{captions.count(n, 'interleaved round')}. Left: tokens per second behind the first "
            "new token of each "
            "prompt, whose time is in the table. Right: time per new token against its position, "
            "of the longest text "
            "behind the shortest prompt, for all prompts at once; positions are grouped, seconds "
            "of a group over its "
            "tokens. EOS does not end a text. "
        )
        if out := list(dict.fromkeys(self.rows.loc[~self.rows["same_text"], "cell"])):
            text += (
                "Texts differ with the cache, so that nothing is compared (crosses): "
                f"{'; '.join(out)}. "
            )
        else:
            text += "With the cache and without it the texts are the same, token by token. "
        text += captions.explain_left_out(
            self.first[self.first["left_out"].notna()], column="model"
        )
        return text + captions.describe_spread(self.groups(), one="round")

    def numbers(self) -> str:
        longest = self.rows["new_tokens"] == self.rows.groupby("run_id")["new_tokens"].transform(
            "max"
        )
        return captions.describe_medians(
            self.rows[self.rows["same_text"] & longest], self.main, *self.unit, self.by
        )

    def table(self) -> Table:
        """Return medians as people read them, a row per cell. Cells whose texts differ have no
        speed-up.
        """
        heads = columns(
            *(
                "model",
                ">prompts at once",
                ">prompt",
                ">new",
                ">first token (ms)",
                ">tokens/s, cache",
            ),
            *(
                ">tokens/s, none",
                ">speed-up",
                ">cache (KiB)",
                ">by formula (KiB)",
                ">peak (MiB)",
                "texts",
            ),
        )
        rows = []
        for (_, run_id, batch, prompt, new), cell in self.rows.groupby(_CELL):
            kept = cell[cell["cached"]]
            without = cell[~cell["cached"]]
            same = (
                "equal"
                if cell["same_text"].all()
                else f"differ from position {int(cell['first_difference'].min())}"
            )
            rows.append(
                [
                    self.called[run_id],
                    str(batch),
                    str(prompt),
                    str(new),
                    captions.format_spread(1e3 * kept["prefill_s"]),
                ]
                + [
                    captions.format_spread(kept["tokens_per_s"]),
                    captions.format_spread(without["tokens_per_s"]),
                ]
                + [
                    captions.format_spread(kept["speed_up"].astype(float).dropna()),
                    number(kept["cache_bytes"].max() / 1024),
                ]
                + [
                    number(kept["formula_bytes"].max() / 1024),
                    number(kept["peak_bytes"].astype(float).max() / 2**20),
                ]
                + [same]
            )
        caption = (
            "Medians over rounds, their spread in brackets. A speed-up is of two texts of one "
            "round. The cache's bytes "
            "are those of its tensors, beside 2 × layers × key-value heads × head width × "
            "positions × bytes of a "
            "number × prompts. Peak: allocated beside the weights, on devices that count it."
        )
        return Table(columns=heads, rows=rows, caption=caption)


def _look(colour: str, cached: bool) -> dict:
    marker, dash, face = ("o", "-", colour) if cached else ("s", "--", "none")
    look = {
        "color": colour,
        "marker": marker,
        "linestyle": dash,
        "markeredgecolor": colour,
        "markerfacecolor": face,
    }
    return look | {"markersize": 4.5, "linewidth": 1.2}


def _draw_rates(axes, rows: pd.DataFrame, look: dict) -> None:
    same = rows[rows["same_text"]]
    others = rows[~rows["same_text"]]
    axes.plot(same["new_tokens"], same["tokens_per_s"], **look | {"linestyle": "none"})
    axes.plot(same.groupby("new_tokens")["tokens_per_s"].median(), **look | {"marker": ""})
    axes.plot(
        others["new_tokens"],
        others["tokens_per_s"],
        color=look["color"],
        marker="x",
        linestyle="none",
    )


def _draw_times(axes, rows: pd.DataFrame, look: dict) -> None:
    for _, one in rows.groupby("round"):
        axes.plot(
            one["position"],
            one["ms_per_token"],
            **look | {"marker": "", "linewidth": 0.7, "alpha": 0.45},
        )
    axes.plot(
        rows.groupby("position")["ms_per_token"].median(),
        **look | {"linewidth": 1.8, "markersize": 3},
    )
