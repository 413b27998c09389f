"""What a model, fitted to the smaller world sizes, predicts for larger ones, beside what was measured there."""

from dataclasses import dataclass

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes

from tokenscale.analysis import projection
from tokenscale.analysis.scaling_model import COVERAGE, Prediction
from tokenscale.base.errors import UserError
from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import GREY, figure, looks, no_data, number, ordered, plain, style


@dataclass(frozen=True)
class ScalingSeries:
    """Runs of one series (seconds per step, useful tokens/s), the fitted world sizes, and the model or an obstacle."""

    name: str
    runs: pd.DataFrame
    fitted: tuple[int, ...]
    model: projection.Projection | None
    obstacle: str

    @property
    def predictions(self) -> list[Prediction]:
        """Predictions whose band is narrow enough to be an answer."""
        return [p for p in self.model.predictions if p.measure is None] if self.model else []


def _fit_series(name: str, runs: pd.DataFrame) -> ScalingSeries | None:
    """Return the series with its model; None for one world size. Of three sizes or more the largest is held out."""
    runs = runs.sort_values(["world_size", "repeat", "run_id"])
    sizes = sorted(int(w) for w in runs["world_size"].unique())
    if len(sizes) < 2:
        return None
    fitted = tuple(sizes[:-1] if len(sizes) > 2 else sizes)
    try:
        model = projection.project_series(name, runs[runs["world_size"].isin(fitted)], [], None, None)
    except UserError as error:
        return ScalingSeries(name, runs, fitted, None, error.what)
    return ScalingSeries(name, runs, fitted, model, "")


def _draw_panel(axes: Axes, series: ScalingSeries, options: dict) -> None:
    colour, marker = options["color"], {"color": options["color"], "marker": options["marker"], "linestyle": "none"}
    fitted = series.runs["world_size"].isin(series.fitted)
    sizes = sorted({int(w) for w in series.runs["world_size"]})
    if series.model and series.predictions:
        worlds = [p.world_size for p in series.predictions]
        rates = [series.model.throughput(p) for p in series.predictions]
        axes.fill_between(worlds, [low for _, low, _ in rates], [high for *_, high in rates], color=colour, alpha=0.18)
        axes.plot(worlds, [rate for rate, *_ in rates], color=colour, linewidth=1.4)
        axes.plot(worlds, [rates[0][0] * w / worlds[0] for w in worlds], color=GREY, linestyle=":", linewidth=0.9)
        sizes = sorted({*sizes, *worlds})
    for chosen, face in ((fitted, colour), (~fitted, "none")):
        rows = series.runs[chosen]
        axes.plot(rows["world_size"], rows["useful_tokens_per_s"], **marker, markersize=5, markerfacecolor=face)
    panels.doublings(axes, sizes[:: 1 + len(sizes) // 7])
    axes.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.4)
    axes.set_yscale("log")
    plain(axes.yaxis, log=True)


def _describe_residuals(series: ScalingSeries, model: projection.Projection) -> str:
    """Return predicted over measured at the world sizes that were held out, in words."""
    predicted = {p.world_size: model.throughput(p) for p in series.predictions}
    texts = []
    shared_cores = series.runs["oversubscribed"].fillna(False).astype(bool)  # no measurement of scaling
    held_out = ~series.runs["world_size"].isin(series.fitted) & ~shared_cores
    for world, rows in series.runs[held_out].groupby("world_size"):
        if world in predicted:
            rate, low, high = predicted[world]
            median = rows["useful_tokens_per_s"].median()
            inside = "inside" if low <= median <= high else "outside"
            texts.append(f"at {world} predicted over measured is {number(rate / median)}, {inside} the band")
    if unpredictable := [p for p in model.predictions if p.measure is not None]:
        first = unpredictable[0]
        texts.append(f"{first.world_size} ranks cannot be predicted from these sizes: measure {first.measure}")
    return captions.listing(texts)


class ScalingModel(Figure):
    title = "A model of scaling, and what was measured"
    queries = ("throughput", "stalls", "inventory")
    factor = "world_size"
    read = "A model of useful tokens per second by world size. Predicted: {}."
    stalls: pd.DataFrame

    def prepare(self) -> None:
        """Fit a model to each series with several world sizes."""
        super().prepare()
        kept = self.rows
        means = pd.DataFrame(
            {
                "run_id": kept["run_id"],
                "steps": kept["steps"],
                "step_s": kept["seconds"] / kept["steps"],
                "useful_tokens": kept["useful_tokens"] / kept["steps"],
                "useful_tokens_per_s": kept["useful_tokens_per_s"],
            }
        ).merge(self.stalls[["run_id", "data_wait_s"]], on="run_id", how="left")
        means["data_wait_s"] = (means["data_wait_s"] / means["steps"]).fillna(0.0)
        runs = self.inventory.merge(means.drop(columns="steps"), on="run_id")
        runs = runs[runs["parameters"].notna() & ~runs["external"].fillna(False).astype(bool)]
        runs = projection.merge_scaling_series(runs.assign(external=False)) if len(runs) else runs
        found = (_fit_series(name, runs[runs["series"] == name]) for name in ordered(runs["series"]))
        self.series = [series for series in found if series is not None]

    def data(self) -> pd.DataFrame:
        """Return measured runs, then predictions with the ends of the band (column `kind`)."""
        columns = ["series", "kind", "world_size", "run_id", "useful_tokens_per_s", "low", "high"]
        rows = []
        for series in self.series:
            for run in series.runs.itertuples():
                kind = "measured, fitted" if run.world_size in series.fitted else "measured, not fitted"
                rows.append([series.name, kind, run.world_size, run.run_id, run.useful_tokens_per_s, None, None])
            if series.model:
                for prediction in series.predictions:
                    rate, low, high = series.model.throughput(prediction)
                    rows.append([series.name, "model", prediction.world_size, "", rate, low, high])
        return pd.DataFrame(rows, columns=columns)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw a panel per series with a model: its band, fitted runs filled, others open, the ideal dotted."""
        shown = [series for series in self.series if series.model] or self.series
        columns = min(3, max(1, len(shown)))
        rows = -(-max(1, len(shown)) // columns)
        with style():
            made, axes = figure(columns, rows=rows, height=0.8 + 2.9 * rows)
            for panel in axes:
                panel.set_xlabel("world size (ranks)")
                panel.set_visible(False)
            for panel in axes[::columns]:
                panel.set_ylabel("useful tokens / s")
            axes[0].set_visible(True)
            if not shown:
                no_data(axes[0], captions.nothing(self.inventory, self.refusals))
                return made
            found = looks([series.name for series in shown])
            for panel, series, name in zip(axes, shown, panels.short(list(found)), strict=False):
                panel.set_visible(True)
                _draw_panel(panel, series, found[series.name])
                panels.heading(panel, f"{name}: {'a model' if series.model else 'no model'}")
            return made

    def caption(self) -> str:
        """Return what was fitted, the residual at the held-out world size, and the limits of the model."""
        shown = sum(len(series.runs) for series in self.series)
        text = captions.sentence(captions.crowded(self.inventory) if self.series else "") + (
            "A model, not a measurement: compute, exposed communication, latency and stragglers, each a known law of "
            "the world size times a constant fitted to the filled runs, averaged over the sets of laws that fit; open "
            f"runs were not fitted, and test it. The band is for {100 * COVERAGE:g} % of further runs and widens with "
            f"the distance from the fitted sizes; {captions.counted(shown, self.inventory)}. Dotted: the ideal. "
        )
        for series in self.series:
            if series.model is None:
                text += f"No model of {series.name}: {series.obstacle} "
                continue
            sizes = ", ".join(map(str, series.model.fit.world_sizes))
            text += f"{series.name}: fitted at {sizes}, noise {series.model.fit.noise_source}"
            text += f"; {residuals}. " if (residuals := _describe_residuals(series, series.model)) else ". "
        return (text + self.refusals).strip()

    def numbers(self) -> str:
        """Return the largest prediction of each series in words."""
        texts = []
        for series in self.series:
            if series.model and series.predictions:
                last = series.predictions[-1]
                rate, low, high = map(number, series.model.throughput(last))
                texts.append(f"{series.name} on {last.world_size} {rate} ({low} to {high})")
        return captions.listing(texts)
