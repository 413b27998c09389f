"""Pipelines: how long their ranks wait, and their speed over model parallelism."""

import pandas as pd

from tokenscale.costs.pipeline_schedules import bubble_share
from tokenscale.report import captions, panels
from tokenscale.report.figure import Drawing, Figure
from tokenscale.report.style import SCHEDULES, figure, number
from tokenscale.report.table import Table, columns

_KEYS = ["pipeline", "schedule", "stages_per_rank", "micro_batches"]
_MEASURES = {"bubble_share": ("time spent waiting (%)", 100), "speed_up": ("speed, × naive", 1)}


def _name(schedule: str, chunks: int) -> str:
    """The schedule, with its stages where there are several a rank."""
    return schedule + (f", {chunks} stages a rank" if chunks > 1 else "")


def _predict(ranks: int, schedule: str, chunks: int, micro_batches: int) -> dict[str, float]:
    """Share of the time that ranks wait, and speed over naive, where nothing but the schedule makes them wait."""
    waiting, naive = (bubble_share(name, ranks, micro_batches, v) for name, v in ((schedule, chunks), ("naive", 1)))
    return {"bubble_share": waiting, "speed_up": (1 - waiting) / (1 - naive)}


def _oversubscribed(pipeline: pd.DataFrame) -> bool:
    cpu = pipeline["device_kind"] == "cpu"
    return bool((cpu & pipeline["oversubscribed"].fillna(False).astype(bool)).any())


class PipelineBubble(Figure):
    title = "Pipelines: waiting, and speed over model parallelism"
    queries = ("pipeline", "inventory")
    factor, main, by = "layout", "bubble_share", ("label",)
    unit = (100, " %")

    def prepare(self) -> None:
        """Find the cells, (ranks, schedule, stages a rank, micro-batches) → runs, in the order of the legend."""
        super().prepare()
        each = zip(*(self.rows[key] for key in _KEYS), strict=True)
        labels = [f"{_name(s, v)} with {captions.count(m, 'micro-batch')} on {panels.ranks(p)}" for p, s, v, m in each]
        self.rows = self.rows.assign(label=labels)
        found = [((int(p), str(s), int(v), int(m)), rows) for (p, s, v, m), rows in self.rows.groupby(_KEYS)]
        self.cells = dict(sorted(found, key=lambda cell: (cell[0][0], list(SCHEDULES).index(cell[0][1]), *cell[0][2:])))

    def data(self) -> pd.DataFrame:
        """Return one row per cell: medians over all its runs with the ends of their spread, and predictions."""
        names = "ranks schedule stages_per_rank micro_batches micro_batch runs bubble_measured bubble_low".split()
        names += (
            "bubble_high bubble_predicted useful_tokens_per_s speed_up_over_naive speed_up_low speed_up_high".split()
        )
        names += "largest_loss_difference oversubscribed speed_up_predicted".split()
        rows = [
            [*key, group["micro_batch"].max(), len(group), *captions.ends(group["bubble_share"])]
            + [_predict(*key)["bubble_share"], group["useful_tokens_per_s"].median(), *captions.ends(group["speed_up"])]
            + [group["largest_loss_difference"].max(), _oversubscribed(group), _predict(*key)["speed_up"]]
            for key, group in self.cells.items()
        ]
        return pd.DataFrame(rows, columns=names)

    def draw(self) -> Drawing:
        """Draw waiting and speed over micro-batches, per length of pipeline: lines predicted, points measured."""
        sizes = sorted({key[0] for key in self.cells})
        made, axes_of = figure(2, rows=max(1, len(sizes)), height=0.9 + 3.0 * max(1, len(sizes)))
        for axes, (label, _) in zip(axes_of, [*_MEASURES.values()] * max(1, len(sizes)), strict=True):
            axes.set_xlabel("micro-batches a step")
            axes.set_ylabel(label)
        if not sizes:
            return self.no_data(made)
        series = list(dict.fromkeys(key[1:3] for key in self.cells))
        for place, axes in enumerate(axes_of):
            ranks, (column, (_, factor)) = sizes[place // 2], list(_MEASURES.items())[place % 2]
            for (schedule, chunks), shift in zip(series, panels.shifts(len(series)), strict=True):
                rows = {key[3]: key for key in self.cells if key[:3] == (ranks, schedule, chunks)}
                (colour, marker, dash), predicted = SCHEDULES[schedule], [_predict(*key) for key in rows.values()]
                look: dict = {"color": colour, "markerfacecolor": "none", "markeredgewidth": 1.4, "markersize": 5}
                line: dict = {"color": colour, "linestyle": dash, "linewidth": 1.4}
                axes.plot(list(rows), [factor * values[column] for values in predicted], **line)
                axes.plot([], [], **look | line, marker=marker, label=_name(schedule, chunks))
                for count, key in rows.items():
                    values = factor * self.cells[key][column].dropna().astype(float)
                    axes.plot([count * shift] * len(values), values, marker, **look)
            panels.from_zero(axes, sorted({key[3] for key in self.cells if key[0] == ranks}))
            if len(sizes) > 1:
                panels.heading(axes, f"{ranks} ranks in the pipeline")
        panels.legend(made, axes_of, order=[_name(*key) for key in series])
        if _oversubscribed(self.rows):
            panels.heading(axes_of[0], captions.OVERSUBSCRIBED)
        return made

    def crowded(self) -> str:
        return captions.sentence(captions.OVERSUBSCRIBED if _oversubscribed(self.rows) else "")

    def sentences(self) -> str:
        text = (
            "Left: share of time that ranks wait. Right: speed over the naive run of the same repeat and number of "
            "micro-batches; naive is model parallelism, where one stage works and the others wait. Lines: predicted, "
            f"with equal stages, a backward pass of twice a forward pass, and free transfers. Points: measured, one "
            f"per run; {self.counted()}. With p ranks, m micro-batches and v stages a rank, the predicted share is "
            "(p − 1) / (m + p − 1) for gpipe and 1f1b, whose lines coincide, (p − 1) / (v m + p − 1) for interleaved, "
            "and (p − 1) / p for naive; the predicted speed is (1 − share) / (1 − naive's share). Measured is waiting "
            "over waiting plus passes, summed over ranks and steps. "
        )
        largest = self.rows["largest_loss_difference"].max()
        against = f"Against naive with the fewest micro-batches, losses differ by at most {largest:.2g} nats at any "
        return text if pd.isna(largest) else f"{text}{against}step. "

    def table(self) -> Table:
        """Return the same as people read it."""
        heads = columns("schedule", ">ranks", ">micro-batches", ">runs", ">bubble, measured (%)", ">predicted (%)")
        heads += columns(">useful tokens / s", ">speed, × naive", ">predicted (×)", ">largest loss difference (nats)")
        rows = []
        for key, group in self.cells.items():
            alike, predicted = group[group.index.isin(self.common.index)], _predict(*key)
            difference = group["largest_loss_difference"].max()
            rows.append(
                [_name(*key[1:3]), str(key[0]), str(key[3]), str(len(group)), captions.spread(100 * alike[self.main])]
                + [number(100 * predicted["bubble_share"]), captions.spread(alike["useful_tokens_per_s"])]
                + [captions.spread(alike["speed_up"].dropna()), number(predicted["speed_up"])]
                + ["–" if pd.isna(difference) else f"{difference:.2g}"]
            )
        text = (
            f"Spread in brackets. {self.over()}Speed is against naive with as many "
            "micro-batches of the same repeat; the loss difference is the largest of all steps and repeats, against "
            "naive with the fewest of them."
        )
        return Table(heads, rows, text)
