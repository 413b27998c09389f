"""What a line fitted to the smaller world sizes of weak scaling predicts for larger ones, beside
measurements.
"""

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes

from tokenscale.base.errors import UserError
from tokenscale.referee.projection import Projection, measured_runs, project_series
from tokenscale.referee.scaling_model import COVERAGE, Prediction
from tokenscale.report import captions, panels
from tokenscale.report.figure import Drawing, Figure
from tokenscale.report.style import GREY, format_ticks, looks, number, order_series


@dataclass(frozen=True)
class ScalingSeries:
    """Runs of one series (`measured_runs`), the fitted world sizes, and the model or an
    obstacle.
    """

    name: str
    runs: pd.DataFrame
    fitted: tuple[int, ...]
    model: Projection | None
    obstacle: str

    @property
    def predictions(self) -> list[tuple[Prediction, tuple[float, float, float, float]]]:
        """Each prediction that is an answer, and its useful tokens/s."""
        return (
            [(p, self.model.throughput(p)) for p in self.model.predictions if not p.measure]
            if self.model
            else []
        )


def _draw_panel(axes: Axes, series: ScalingSeries, options: dict) -> None:
    colour = options["color"]
    marker = {"color": options["color"], "marker": options["marker"], "linestyle": "none"}
    fitted = series.runs["world_size"].isin(series.fitted)
    sizes = sorted({int(w) for w in series.runs["world_size"]})
    if series.predictions:
        worlds = [p.world_size for p, _ in series.predictions]
        rates, lows, highs, stays = zip(*(rate for _, rate in series.predictions), strict=True)
        axes.fill_between(worlds, lows, highs, color=colour, alpha=0.18)
        axes.plot(worlds, rates, color=colour, linewidth=1.4)
        axes.plot(worlds, stays, color=GREY, linestyle=":", linewidth=0.9)
        sizes = sorted({*sizes, *worlds})
    for chosen, face in ((fitted, colour), (~fitted, "none")):
        rows = series.runs[chosen]
        axes.plot(
            rows["world_size"],
            rows["useful_tokens_per_s"],
            **marker,
            markersize=5,
            markerfacecolor=face,
        )
    panels.scale_by_doublings(axes, sizes=sizes[:: 1 + len(sizes) // 7])
    axes.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.4)
    axes.set_yscale("log")
    format_ticks(axes.yaxis, log=True)


def _describe_residuals(series: ScalingSeries, model: Projection) -> str:
    """Return predicted over measured at the world sizes that were held out, in words."""
    # no measurement of scaling
    shared_cores = series.runs["oversubscribed"].fillna(False).astype(bool)
    held_out = series.runs[~series.runs["world_size"].isin(series.fitted) & ~shared_cores]
    medians = held_out.groupby("world_size")["useful_tokens_per_s"].median()
    texts = []
    for p, (rate, low, high, _) in series.predictions:
        if (median := medians.get(p.world_size)) is not None:
            inside = "inside" if low <= median <= high else "outside"
            texts.append(
                f"at {p.world_size} predicted over measured is {number(rate / median)}, {inside} "
                "the band"
            )
    first = next((p for p in model.predictions if p.measure), None)
    if first:
        texts.append(
            f"{first.world_size} ranks cannot be predicted from these sizes: measure "
            f"{first.measure}"
        )
    return captions.listing(texts)


class ScalingModel(Figure):
    title = "A model of weak scaling, and what was measured"
    queries = ("throughput", "inventory")
    factor = "world_size"
    read = "A model of useful tokens per second by world size. Predicted: {}."

    def prepare(self) -> None:
        super().prepare()
        runs = measured_runs(self.inventory, throughput=self.rows)
        runs = runs[~runs["external"]]
        self.series = []
        for name in order_series(runs["series"]):
            own = runs[runs["series"] == name]
            sizes = sorted(int(w) for w in own["world_size"].unique())
            fitted = tuple(sizes[:-1] if len(sizes) > 2 else sizes)  # the largest is held out
            model = None
            obstacle = ""
            try:
                if len(sizes) > 1:
                    model = project_series(
                        name, runs=own[own["world_size"].isin(fitted)], held_out=sizes
                    )
            except UserError as error:
                obstacle = error.what
            if len(sizes) > 1:
                self.series += [
                    ScalingSeries(
                        name=name,
                        runs=own,
                        fitted=fitted,
                        model=model,
                        obstacle=obstacle,
                    )
                ]

    def data(self) -> pd.DataFrame:
        """Return measured runs, then predictions with the ends of the band and if efficiency stays
        (column `kind`).
        """
        rows = []
        for series in self.series:
            for run in series.runs.itertuples():
                kind = (
                    "measured, fitted"
                    if run.world_size in series.fitted
                    else "measured, not fitted"
                )
                rows.append(
                    [
                        series.name,
                        kind,
                        run.world_size,
                        run.run_id,
                        run.useful_tokens_per_s,
                        None,
                        None,
                        None,
                    ]
                )
            rows += [
                [series.name, "model", p.world_size, "", *rates] for p, rates in series.predictions
            ]
        columns = "series kind world_size run_id useful_tokens_per_s low high if_efficiency_stays"
        return pd.DataFrame(rows, columns=columns.split())

    def draw(self) -> Drawing:
        """Draw a panel per series with a model: band, fitted runs filled, others open; dotted:
        efficiency stays.
        """
        shown = [series for series in self.series if series.model] or self.series
        made, every = panels.make_grid(
            len(shown),
            height=2.9,
            x="world size (ranks)",
            y="useful tokens / s",
        )
        if not shown:
            return self.no_data(made)
        found = looks([series.name for series in shown])
        for panel, series, name in zip(
            every, shown, panels.shorten_names(list(found)), strict=True
        ):
            _draw_panel(panel, series, options=found[series.name])
            panels.write_heading(panel, text=f"{name}: {'a model' if series.model else 'no model'}")
        return made

    def caption(self) -> str:
        """Return what was fitted, the residual at the held-out world size, and the limits of the
        model.
        """
        shown = sum(len(series.runs) for series in self.series)
        text = captions.as_sentence(
            captions.caution_crowding(self.inventory) if self.series else ""
        ) + (
            "A model, not a measurement: the step time as a line over log2 of the ranks, fitted "
            "to the filled runs; "
            f"open runs were not fitted, and test it. The band is for {100 * COVERAGE:g} % of "
            "further runs and widens "
            "with the distance from the fitted sizes; "
            f"{captions.count_shown(shown, self.inventory)}. Dotted: the "
            "efficiency of the largest fitted size stays. "
        )
        for series in self.series:
            if series.model is None:
                text += f"No model of {series.name}: {series.obstacle} "
                continue
            sizes = ", ".join(map(str, series.model.fit.world_sizes))
            text += f"{series.name}: fitted at {sizes}, noise {series.model.fit.noise_source}"
            text += (
                f"; {residuals}. "
                if (residuals := _describe_residuals(series, model=series.model))
                else ". "
            )
        return (text + self.refusals).strip()

    def numbers(self) -> str:
        last = [
            (series.name, *series.predictions[-1]) for series in self.series if series.predictions
        ]
        return captions.listing(
            [
                f"{name} on {p.world_size} {number(r[0])} ({number(r[1])} to {number(r[2])})"
                for name, p, r in last
            ]
        )
