"""What a model, fitted to the smaller world sizes, predicts for larger ones, beside what was measured there."""

from dataclasses import dataclass

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes

from tokenscale.analysis import projection
from tokenscale.analysis.scaling_model import COVERAGE
from tokenscale.base.errors import UserError
from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import GREY, figure, looks, no_data, number, ordered, plain, style

QUERIES = ("throughput", "stalls", "inventory")


@dataclass(frozen=True)
class Line:
    """A series: its runs (seconds of a step, useful tokens/s), the world sizes fitted, and the model or why not."""

    series: str
    runs: pd.DataFrame
    fitted: tuple[int, ...]
    model: projection.Projection | None
    why_not: str


def _line(name: str, runs: pd.DataFrame) -> Line | None:
    """Return the series with its model; None for one world size. Of three sizes or more the largest is not fitted."""
    runs = runs.sort_values(["world_size", "repeat", "run_id"])
    worlds = sorted(int(w) for w in runs["world_size"].unique())
    if len(worlds) < 2:
        return None
    fitted = tuple(worlds[:-1] if len(worlds) > 2 else worlds)
    try:
        model = projection.project_line(name, runs[runs["world_size"].isin(fitted)], [], None, None)
    except UserError as error:
        return Line(name, runs, fitted, None, error.what)
    return Line(name, runs, fitted, model, "")


def _panel(axes: Axes, line: Line, options: dict) -> None:
    colour, marker = options["color"], {"color": options["color"], "marker": options["marker"], "linestyle": "none"}
    fitted = line.runs["world_size"].isin(line.fitted)
    sizes = sorted({int(w) for w in line.runs["world_size"]})
    if line.model:
        predictions = line.model.predictions
        worlds = [p.world_size for p in predictions]
        rates = [line.model.rate(p) for p in predictions]
        axes.fill_between(worlds, [low for _, low, _ in rates], [high for *_, high in rates], color=colour, alpha=0.18)
        axes.plot(worlds, [rate for rate, *_ in rates], color=colour, linewidth=1.4)
        axes.plot(worlds, [rates[0][0] * w / worlds[0] for w in worlds], color=GREY, linestyle=":", linewidth=0.9)
        sizes = sorted({*sizes, *worlds})
    for chosen, face in ((fitted, colour), (~fitted, "none")):
        rows = line.runs[chosen]
        axes.plot(rows["world_size"], rows["useful_tokens_per_s"], **marker, markersize=5, markerfacecolor=face)
    panels.doublings(axes, sizes[:: 1 + len(sizes) // 7])
    axes.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.4)
    axes.set_yscale("log")
    plain(axes.yaxis, log=True)


def _missed(line: Line) -> str:
    """How far the prediction lies from the runs that were not fitted, in words."""
    predicted = {p.world_size: line.model.rate(p) for p in line.model.predictions}
    texts = []
    crowded = line.runs["oversubscribed"].fillna(False).astype(bool)  # the model knows nothing of that
    for world, rows in line.runs[~line.runs["world_size"].isin(line.fitted) & ~crowded].groupby("world_size"):
        if world in predicted:
            rate, low, high = predicted[world]
            middle = rows["useful_tokens_per_s"].median()
            inside = "inside" if low <= middle <= high else "outside"
            texts.append(f"at {world} predicted over measured is {number(rate / middle)}, {inside} the band")
    return captions.listing(texts)


class ScalingModel(Figure):
    """What a model, fitted to the smaller world sizes, predicts for larger ones, beside what was measured there."""

    title = "A model of scaling, and what was measured"
    queries = QUERIES
    factor = "world_size"
    stalls: pd.DataFrame

    def prepare(self) -> None:
        """Fit a model to each series with several world sizes."""
        super().prepare()
        kept = self.rows
        means = pd.DataFrame(
            {
                "run_id": kept["run_id"],
                "step_s": kept["seconds"] / kept["steps"],
                "useful_tokens": kept["useful_tokens"] / kept["steps"],
                "useful_tokens_per_s": kept["useful_tokens_per_s"],
            }
        ).merge(self.stalls[["run_id", "data_wait_s"]], on="run_id", how="left")
        means = means.merge(kept[["run_id", "steps"]], on="run_id")
        means["waited_s"] = (means["data_wait_s"] / means["steps"]).fillna(0.0)
        runs = self.inventory.merge(means.drop(columns=["data_wait_s", "steps"]), on="run_id")
        runs = runs[runs["parameters"].notna() & ~runs["external"].fillna(False).astype(bool)]
        runs = projection.lines_of(runs.assign(external=False)) if len(runs) else runs
        lines = (_line(name, runs[runs["series"] == name]) for name in ordered(runs["series"]))
        self.lines = [line for line in lines if line is not None]

    def data(self) -> pd.DataFrame:
        """Return measured runs, and below them what is predicted with the ends of the band (`kind` says which)."""
        columns = ["series", "kind", "world_size", "run_id", "useful_tokens_per_s", "low", "high"]
        rows = []
        for line in self.lines:
            for run in line.runs.itertuples():
                kind = "measured, fitted" if run.world_size in line.fitted else "measured, not fitted"
                rows.append([line.series, kind, run.world_size, run.run_id, run.useful_tokens_per_s, None, None])
            for prediction in line.model.predictions if line.model else ():
                rate, low, high = line.model.rate(prediction)
                rows.append([line.series, "model", prediction.world_size, "", rate, low, high])
        return pd.DataFrame(rows, columns=columns)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw a panel per series with a model: its band, fitted runs filled, others open, the ideal dotted."""
        lines = self.lines
        lines = [line for line in lines if line.model] or lines
        columns = min(3, max(1, len(lines)))
        rows = -(-max(1, len(lines)) // columns)
        with style():
            made, axes = figure(columns, rows=rows, height=0.8 + 2.9 * rows)
            for panel in axes:
                panel.set_xlabel("world size (ranks)")
                panel.set_visible(False)
            for panel in axes[::columns]:
                panel.set_ylabel("useful tokens / s")
            axes[0].set_visible(True)
            if not lines:
                no_data(axes[0], captions.nothing(self.inventory, self.refusals))
                return made
            found = looks([line.series for line in lines])
            for panel, line, name in zip(axes, lines, panels.short(list(found)), strict=False):
                panel.set_visible(True)
                _panel(panel, line, found[line.series])
                panels.heading(panel, f"{name}: {'a model' if line.model else 'no model'}")
            return made

    def caption(self) -> str:
        """Return what was fitted to what, how far the held-out world size lies off, and what the model cannot know."""
        lines = self.lines
        shown = sum(len(line.runs) for line in lines)
        text = captions.sentence(captions.crowded(self.inventory) if lines else "") + (
            "A model, not a measurement: compute, exposed communication, latency and stragglers, each a known law of "
            "the world size times a constant fitted to the filled runs; open ones were not fitted, and test it. The "
            f"band holds {100 * COVERAGE:g} % of further runs if one of the sets of terms that fit is right, which no "
            f"fit to few world sizes can know; {captions.counted(shown, self.inventory)}. Dotted: the ideal. "
        )
        for line in lines:
            if line.model is None:
                text += f"No model of {line.series}: {line.why_not} "
                continue
            at = ", ".join(map(str, line.model.fit.world_sizes))
            text += f"{line.series}: fitted at {at}, noise {line.model.fit.noise_from}"
            text += f"; {missed}. " if (missed := _missed(line)) else ". "
        return (text + self.refusals).strip()

    def alt(self) -> str:
        """Return the largest predictions, read aloud."""
        texts = []
        for line in self.lines:
            if line.model:
                last = line.model.predictions[-1]
                rate, low, high = map(number, line.model.rate(last))
                texts.append(f"{line.series} on {last.world_size} {rate} ({low} to {high})")
        return f"A model of useful tokens per second by world size. Predicted: {captions.listing(texts) or 'no data'}."
