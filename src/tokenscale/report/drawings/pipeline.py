"""Pipelines: how long their ranks wait, and their speed over model parallelism."""

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes

from tokenscale.analysis.statistics import summary
from tokenscale.costs.pipeline_schedules import bubble_share
from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import SCHEDULES, figure, legend_columns, no_data, number, plain, style
from tokenscale.report.table import Table


def cells(pipeline: pd.DataFrame) -> list[tuple[tuple[int, str, int, int], pd.DataFrame]]:
    """((ranks of the pipeline, schedule, stages a rank, micro-batches), its runs), in the order of the legend."""
    keys = ["pipeline", "schedule", "stages_per_rank", "micro_batches"]
    found = [((int(p), str(s), int(v), int(m)), rows) for (p, s, v, m), rows in pipeline.groupby(keys)]
    return sorted(found, key=lambda cell: (cell[0][0], list(SCHEDULES).index(cell[0][1]), *cell[0][2:]))


def predicted(ranks: int, schedule: str, chunks: int, micro_batches: int) -> float:
    """Share of the time that a schedule leaves its ranks waiting, where nothing but the schedule makes them wait."""
    return bubble_share(schedule, ranks, micro_batches, chunks)


def _name(schedule: str, chunks: int) -> str:
    """The schedule, with its stages where there are several a rank."""
    return schedule + (f", {chunks} stages a rank" if chunks > 1 else "")


def _oversubscribed(pipeline: pd.DataFrame) -> bool:
    cpu = pipeline["device_kind"] == "cpu"
    return bool((cpu & pipeline["oversubscribed"].fillna(False).astype(bool)).any())


class Pipeline(Figure):
    """Base class: runs of pipelines that are comparable along the layout."""

    queries = ("pipeline", "inventory")
    factor = "layout"

    def crowded(self) -> str:
        """Return a sentence if ranks share the cores of a CPU."""
        return captions.sentence(captions.OVERSUBSCRIBED if _oversubscribed(self.rows) else "")

    def groups(self) -> list[pd.Series]:
        """Return the values of each cell whose spread the caption names."""
        return [group[self.main] for _, group in cells(self.rows)]


class PipelineBubble(Pipeline):
    title = "Waiting in a pipeline, measured and predicted"
    main = "bubble_share"
    read = "Share of time that ranks of a pipeline wait, over micro-batches. {}."

    def data(self) -> pd.DataFrame:
        """Return the table as numbers: one row per cell, medians over its runs with the ends of their spread."""
        columns = ["ranks", "schedule", "stages_per_rank", "micro_batches", "micro_batch", "runs"]
        columns += ["bubble_measured", "bubble_low", "bubble_high", "bubble_predicted", "useful_tokens_per_s"]
        columns += ["speed_up_over_naive", "speed_up_low", "speed_up_high", "largest_loss_difference", "oversubscribed"]
        rows = []
        for (ranks, name, chunks, count), group in cells(self.rows):
            share, speed = summary(group["bubble_share"]), summary(group["speed_up"].dropna())
            rows.append(
                [ranks, name, chunks, count, group["micro_batch"].max(), len(group)]
                + [share.median, share.low, share.high, predicted(ranks, name, chunks, count)]
                + [group["useful_tokens_per_s"].median(), speed.median, speed.low, speed.high]
                + [group["largest_loss_difference"].max(), _oversubscribed(group)]
            )
        return pd.DataFrame(rows, columns=columns)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw a panel per length of pipeline: share of waiting by micro-batches; lines predicted, points measured."""
        sizes = sorted(int(p) for p in self.rows["pipeline"].unique())
        with style():
            made, panels = figure(max(1, len(sizes)), height=4.0, sharey=True)
            for axes in panels:
                axes.set_xlabel("micro-batches a step")
            panels[0].set_ylabel("time spent waiting (%)")
            if not sizes:
                no_data(panels[0], captions.nothing(self.inventory, self.refusals))
                return made
            shown, labels = cells(self.rows), []
            highest = [max(predicted(*key), group["bubble_share"].max()) for key, group in shown]
            series = list(dict.fromkeys((name, chunks) for (_, name, chunks, _), _ in shown))
            for axes, ranks in zip(panels, sizes, strict=True):
                here = [(key, group) for key, group in shown if key[0] == ranks]
                counts = sorted({key[3] for key, _ in here})
                for number_of, (name, chunks) in enumerate(series):
                    colour, marker, dash = SCHEDULES[name]
                    rows = {key[3]: group for key, group in here if key[1:3] == (name, chunks)}
                    line = [100 * predicted(ranks, name, chunks, count) for count in rows]
                    axes.plot(list(rows), line, color=colour, linestyle=dash, linewidth=1.4)
                    shift = 1 + 0.035 * (number_of - (len(series) - 1) / 2)  # parts points that would hide each other
                    for count, group in rows.items():
                        axes.plot(
                            [count * shift] * len(group),
                            100 * group["bubble_share"],
                            color=colour,
                            marker=marker,
                            markersize=5,
                            linestyle="none",
                            markerfacecolor="none",
                            markeredgewidth=1.4,
                        )
                axes.set_xscale("log", base=2)
                axes.set_xticks(counts, [str(c) for c in counts])
                axes.minorticks_off()
                axes.set_xlim(counts[0] / 1.25, counts[-1] * 1.25)
                axes.set_ylim(0, min(100.0, 115 * max(highest)))
                plain(axes.yaxis)
                if len(sizes) > 1:
                    axes.set_title(f"{ranks} ranks in the pipeline")
            for name, chunks in series:
                colour, marker, dash = SCHEDULES[name]
                labels.append(_name(name, chunks))
                options: dict = {"marker": marker, "markerfacecolor": "none", "markeredgewidth": 1.4, "markersize": 5}
                panels[0].plot([], [], color=colour, linestyle=dash, linewidth=1.4, label=labels[-1], **options)
            made.legend(loc="outside upper left", ncols=legend_columns(labels, 5), handlelength=3)
            if _oversubscribed(self.rows):
                panels[0].set_title(captions.OVERSUBSCRIBED, fontsize=9)
            return made

    def sentences(self) -> str:
        """Return what lines and points are, the closed forms, and whether the losses agree."""
        text = (
            "Lines: predicted share of time that ranks wait under each schedule. Points: measured, one per run; "
            f"{self.counted()}. The prediction assumes equal stages, a backward pass of twice a forward pass, and free "
            "transfers. With p ranks, m micro-batches and v stages a rank it is (p − 1) / (m + p − 1) for gpipe and "
            "1f1b, whose lines coincide, (p − 1) / (v m + p − 1) for interleaved, and (p − 1) / p for naive, which is "
            "model parallelism. Measured is waiting over waiting plus passes, summed over ranks and steps. "
        )
        if self.rows["largest_loss_difference"].notna().any():
            text += (
                "Against naive with the fewest micro-batches, losses differ by at most "
                f"{self.rows['largest_loss_difference'].max():.2g} nats at any step. "
            )
        return text

    def numbers(self) -> str:
        """Return the measured and predicted share of each cell in words."""
        texts = [
            f"{name} with {count} micro-batches on {ranks} ranks: {number(100 * rows['bubble_share'].median())} % "
            f"measured, {number(100 * predicted(ranks, name, chunks, count))} % predicted"
            for (ranks, name, chunks, count), rows in cells(self.rows)
        ]
        return captions.listing(texts)

    def table(self) -> Table:
        """Return the same as people read it."""
        columns = [("schedule", False), ("ranks", True), ("micro-batches", True), ("runs", True)]
        columns += [("bubble, measured (%)", True), ("predicted (%)", True), ("useful tokens / s", True)]
        columns += [("speed, × naive", True), ("largest loss difference (nats)", True)]
        rows = []
        for (ranks, name, chunks, count), group in cells(self.rows):
            difference = group["largest_loss_difference"].max()
            rows.append(
                [
                    _name(name, chunks),
                    str(ranks),
                    str(count),
                    str(len(group)),
                    captions.spread(100 * group["bubble_share"]),
                    number(100 * predicted(ranks, name, chunks, count)),
                    captions.spread(group["useful_tokens_per_s"]),
                    captions.spread(group["speed_up"].dropna()),
                    "–" if pd.isna(difference) else f"{difference:.2g}",
                ]
            )
        text = (
            "Medians over runs, their spread in brackets. Speed is against naive with as many micro-batches of the "
            "same repeat; the loss difference is the largest of all steps and repeats, against naive with the fewest "
            "of them."
        )
        return Table(columns, rows, f"{text} {captions.kinds(self.groups())}".strip())


def _predicted(run) -> float:
    """Speed over naive with as many micro-batches, where nothing but the schedule makes ranks wait."""
    naive = 1 - bubble_share("naive", run.pipeline, run.micro_batches, 1)
    return (1 - bubble_share(run.schedule, run.pipeline, run.micro_batches, run.stages_per_rank)) / naive


def _named(pipeline: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Name of a schedule → its runs."""
    return {_name(*key): rows for key, rows in pipeline.groupby(["schedule", "stages_per_rank"])}


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


class PipelineVsModelParallel(Pipeline):
    title = "Pipeline against model parallelism"
    main = "useful_tokens_per_s"
    read = "Speed of pipeline schedules over naive. Medians: {}."

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

    def sentences(self) -> str:
        """Return what naive is, what the dotted lines are, and how the runs compare."""
        text = (
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
        return text

    def numbers(self) -> str:
        """Return the median speed over naive of each cell in words."""
        found = self.data().dropna(subset=["speed_up"])
        middle = found.groupby(["schedule", "pipeline", "micro_batches"])["speed_up"].median()
        texts = [
            f"{name} with {m} micro-batches on {p} ranks {number(value)}" for (name, p, m), value in middle.items()
        ]
        return captions.listing(texts)
