"""What pipeline schedules gain over model parallelism, where one stage works at a time."""

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes

from tokenscale.costs.pipeline_schedules import bubble_share
from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import SCHEDULES, figure, no_data, number, plain, style

QUERIES = ("pipeline", "inventory")


def _predicted(run) -> float:
    """Speed over naive with as many micro-batches, where nothing but the schedule makes ranks wait."""
    naive = 1 - bubble_share("naive", run.pipeline, run.micro_batches, 1)
    return (1 - bubble_share(run.schedule, run.pipeline, run.micro_batches, run.stages_per_rank)) / naive


def _named(pipeline: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Schedule, with its stages where there are several a rank → its runs."""
    return {
        f"{schedule}, {stages} stages a rank" if stages > 1 else schedule: rows
        for (schedule, stages), rows in pipeline.groupby(["schedule", "stages_per_rank"])
    }


def _lines(axes: Axes, pipeline: pd.DataFrame, column: str) -> None:
    counts = sorted(int(m) for m in pipeline["micro_batches"].unique())
    found = _named(pipeline.dropna(subset=[column]))
    for (name, rows), shift in zip(found.items(), panels.shifts(len(found)), strict=True):
        colour, marker, dash = SCHEDULES[rows["schedule"].iloc[0]]
        look: dict = dict(color=colour, marker=marker, markersize=5, markerfacecolor="none", markeredgewidth=1.4)
        axes.plot(rows["micro_batches"] * shift, rows[column], **look, linestyle="none")
        middle = rows.groupby("micro_batches")[column].median()
        axes.plot(middle.index * shift, middle, color=colour, linestyle=dash, linewidth=1.2)
        axes.plot([], [], **look, linestyle=dash, label=name)
        if "predicted" in rows:
            allowed = rows.groupby("micro_batches")["predicted"].first()
            axes.plot(allowed.index, allowed, color=colour, linestyle=":", linewidth=1.4)
    panels.doublings(axes, counts)
    axes.set_ylim(bottom=0)
    plain(axes.yaxis)


def _oversubscribed(pipeline: pd.DataFrame) -> bool:
    cpu = pipeline["device_kind"] == "cpu"
    return bool((cpu & pipeline["oversubscribed"].fillna(False).astype(bool)).any())


class PipelineVsModelParallel(Figure):
    """What pipeline schedules gain over model parallelism, where one stage works at a time."""

    title = "Pipeline against model parallelism"
    queries = QUERIES
    factor = "layout"

    def data(self) -> pd.DataFrame:
        """Return one row per run, of those that are like for like, with what its schedule allows at most."""
        columns = ["schedule", "pipeline", "stages_per_rank", "micro_batches", "micro_batch", "repeat", "run_id"]
        return self.rows[[*columns, "useful_tokens_per_s", "speed_up"]].assign(
            predicted_speed_up=[_predicted(row) for row in self.rows.itertuples()]
        )

    def draw(self) -> matplotlib.figure.Figure:
        """Draw two panels per length of pipeline. Left: useful tokens/s over micro-batches, medians joined.

        Right: speed over naive, which is model parallelism; dotted, what the schedule allows.
        """
        sizes = sorted(int(p) for p in self.rows["pipeline"].unique())
        with style():
            made, axes = figure(2, rows=max(1, len(sizes)), height=0.9 + 3.0 * max(1, len(sizes)))
            for place, panel in enumerate(axes):
                panel.set_xlabel("micro-batches a step")
                panel.set_ylabel("speed, × naive" if place % 2 else "useful tokens / s")
            if not sizes:
                for panel in axes:
                    no_data(panel, captions.nothing(self.inventory, self.refusals))
                return made
            for row, size in enumerate(sizes):
                here = self.rows[self.rows["pipeline"] == size]
                left, right = axes[2 * row : 2 * row + 2]
                _lines(left, here, "useful_tokens_per_s")
                _lines(right, here.assign(predicted=[_predicted(run) for run in here.itertuples()]), "speed_up")
                right.axhline(1, color=SCHEDULES["naive"][0], linewidth=0.9)
                if len(sizes) > 1:
                    panels.heading(left, f"{size} ranks in the pipeline")
            order = [name for schedule in SCHEDULES for name in _named(self.rows) if name.split(",")[0] == schedule]
            panels.legend(made, axes, order=order)
            if _oversubscribed(self.rows):
                panels.heading(axes[0], captions.OVERSUBSCRIBED)
            return made

    def caption(self) -> str:
        """Return what naive is, what the dotted lines are, and how the runs compare."""
        text = captions.sentence(captions.OVERSUBSCRIBED if _oversubscribed(self.rows) else "") + (
            "Schedule naive is model parallelism: one stage works, the others wait. Right: speed-up over the naive run "
            f"of the same repeat and number of micro-batches; {self.counted()}. Each marker is a run; medians are "
            "joined. The dotted line is the limit of the schedule, (1 − its bubble) / (1 − naive's), with equal "
            "stages, a backward pass of twice a forward pass, and free transfers. "
        )
        others = self.rows[(self.rows["schedule"] != "naive") & self.rows["speed_up"].notna()]
        if len(others):
            middle = others.groupby(["schedule", "micro_batches"])["speed_up"].median()
            (low, at_low), (high, at_high) = middle.idxmin(), middle.idxmax()
            text += (
                f"Medians lie from {number(middle.min())}× ({low}, {at_low} micro-batches) to {number(middle.max())}× "
                f"({high}, {at_high}). "
            )
        text += self.refused()
        keys = ["pipeline", "schedule", "stages_per_rank", "micro_batches"]
        return text + captions.kinds([group for _, group in self.rows.groupby(keys)["useful_tokens_per_s"]])

    def alt(self) -> str:
        """Return medians over naive, read aloud."""
        found = self.data().dropna(subset=["speed_up"])
        middle = found.groupby(["schedule", "pipeline", "micro_batches"])["speed_up"].median()
        texts = [
            f"{name} with {m} micro-batches on {p} ranks {number(value)}" for (name, p, m), value in middle.items()
        ]
        return f"Speed of pipeline schedules over naive. Medians: {captions.listing(texts) or 'no data'}."
