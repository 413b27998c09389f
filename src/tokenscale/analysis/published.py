"""Published points of scaling, and what the model of `scaling_model` would have said of them: the back-test.

`published/steps.csv` has one row a point, `published/all_reduce.csv` one a message size, each with its source. A series
is tested where it has at least three world sizes at one local batch: the model is fitted to the smaller ones and
predicts the others. Beside it stand two guesses that need no model.
"""

import csv
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from tokenscale.analysis.scaling_model import (
    COVERAGE,
    Fit,
    Links,
    Point,
    Prediction,
    Work,
    constants,
    fit,
    fit_link,
    predict,
)
from tokenscale.base.errors import unknown
from tokenscale.costs.communication import Latency, Link

#: DDP's all-reduce has trees in NCCL; all-gather and reduce-scatter, which sharding takes, are rings
LATENCY: dict[str, Latency] = {"ddp": "tree", "fsdp": "ring"}


@dataclass(frozen=True)
class Published:
    """One point. Tokens/s are of all GPUs, padding included; MFU as printed there and as it should be, or None."""

    series: str
    model: str
    parameters: int
    gpu: str
    gpus_per_node: int
    method: str
    approach: str
    sequence_length: int
    local_batch: int
    world_size: int
    tokens_per_s: float
    mfu_reported_percent: float | None
    mfu_corrected_percent: float | None
    gradient_bytes: int
    tail_bytes: int | None
    source: str
    note: str

    @property
    def step_s(self) -> float:
        """Seconds of a step: tokens of a step of all GPUs over tokens/s."""
        return self.sequence_length * self.local_batch * self.world_size / self.tokens_per_s


@dataclass(frozen=True)
class Row:
    """One world size of one series: tokens/s measured, by the model (with its band), and by guesses without one."""

    series: str
    world_size: int
    fitted: bool
    measured: float
    predicted: float
    low: float
    high: float
    perfect: float  # every GPU as fast as at the smallest size
    kept: float  # every GPU as fast as at the largest fitted size

    @property
    def inside(self) -> bool:
        """Does the measured value lie in the band?"""
        return self.low <= self.measured <= self.high

    def residual(self, by: str = "predicted") -> float:
        """What was predicted (`predicted`, `perfect`, `kept`) over what was measured, less one."""
        return getattr(self, by) / self.measured - 1


@dataclass(frozen=True)
class Tested:
    """A series with its fit and its rows by world size."""

    series: str
    method: str
    fit: Fit
    rows: tuple[Row, ...]
    sources: tuple[str, ...]


def points() -> list[Published]:
    """All rows of `steps.csv`, in its order."""
    kinds = {name: field.type for name, field in Published.__dataclass_fields__.items()}
    return [Published(**{name: _typed(row[name], kinds[name]) for name in kinds}) for row in _rows("steps.csv")]


def all_reduces() -> list[dict[str, str]]:
    """Rows of `all_reduce.csv`: bytes and seconds of one all-reduce of so many GPUs."""
    return list(_rows("all_reduce.csv"))


def by_series(found: Sequence[Published]) -> dict[str, list[Published]]:
    """Series → its points by world size, in the order of the file."""
    series: dict[str, list[Published]] = {}
    for point in found:
        series.setdefault(point.series, []).append(point)
    return {name: sorted(group, key=lambda p: p.world_size) for name, group in series.items()}


def untestable(group: Sequence[Published], sweep: bool = False) -> str | None:
    """Why a series cannot be back-tested; None where it can."""
    sizes = [p.world_size for p in group]
    if len(sizes) < 3:
        return f"world size{'s' * (len(sizes) > 1)} {', '.join(map(str, sizes))}: two to fit and one to test are needed"
    if fitted_sizes(group) == sizes:
        return f"world sizes {', '.join(map(str, sizes))}: none is left to test beyond the first on two nodes"
    swept = all_reduces()[0]
    machine = group[0].gpu, str(group[0].gpus_per_node)
    if sweep and (machine != (swept["gpu"], swept["gpus_per_node"]) or group[0].method != "ddp"):
        return "the published sweep is of another machine or another exchange"
    return None


def fitted_sizes(group: Sequence[Published]) -> list[int]:
    """The sizes that the model sees: the smaller half, and at least as many as reach a second node.

    >>> group = by_series(points())["8.05B padded"]
    >>> [p.world_size for p in group], fitted_sizes(group)
    ([1, 4, 8, 12, 16], [1, 4, 8])
    """
    sizes = [p.world_size for p in group]
    half = -(-len(sizes) // 2)
    crossing = next((i + 1 for i, n in enumerate(sizes) if n > group[0].gpus_per_node), 2)
    return sizes[: max(2, half, crossing)]


def work_of(point: Published) -> Work:
    """What a step of a series is made of: weak scaling, an all-reduce of the gradients in buckets of 25 MiB."""
    return Work(
        ranks_per_node=point.gpus_per_node,
        exchanged_bytes=point.gradient_bytes,
        tail_bytes=point.tail_bytes or 0,
        messages=max(1, round(point.gradient_bytes / (25 * 2**20))),
        latency=LATENCY[point.method],
    )


def link_between() -> Link:
    """What joins the studies' nodes, by the published all-reduces over two of them: each GPU sends its part of S."""
    found = all_reduces()
    sizes = [int(row["bytes"]) / int(row["gpus_per_node"]) for row in found]
    return fit_link("all_reduce", sizes, [float(row["seconds"]) for row in found], 2, "tree")[0]


def backtest(series: str | None = None, *, sweep: bool = False) -> tuple[list[Tested], dict[str, str]]:
    """(series that were tested, series → why it was not). With `sweep` the link between nodes is not fitted but taken
    from the published all-reduces, for the series of DDP on those machines; the others are not tested then.

    Raises UserError for a series that is not there.
    """
    groups = by_series(points())
    if series is not None and series not in groups:
        raise unknown("published series", series, groups)
    groups = {name: group for name, group in groups.items() if series in (None, name)}
    skipped = {name: why for name, group in groups.items() if (why := untestable(group, sweep))}
    links = Links(between=link_between()) if sweep else Links()
    return [_test(name, group, links) for name, group in groups.items() if name not in skipped], skipped


def _test(series: str, group: Sequence[Published], links: Links) -> Tested:
    sizes = fitted_sizes(group)
    seen = [Point(p.world_size, p.step_s) for p in group if p.world_size in sizes]
    found = fit(seen, work_of(group[0]), links)
    predictions = predict(found, [p.world_size for p in group])
    per_gpu = {p.world_size: p.tokens_per_s / p.world_size for p in group}
    rows = [
        _row(point, prediction, point.world_size in sizes, per_gpu[sizes[0]], per_gpu[sizes[-1]])
        for point, prediction in zip(group, predictions, strict=True)
    ]
    return Tested(series, group[0].method, found, tuple(rows), tuple(dict.fromkeys(p.source for p in group)))


def _row(point: Published, prediction: Prediction, fitted: bool, first: float, last: float) -> Row:
    tokens = point.sequence_length * point.local_batch * point.world_size
    return Row(
        *(point.series, point.world_size, fitted, point.tokens_per_s),
        *(tokens / prediction.step_s, tokens / prediction.high_s, tokens / prediction.low_s),
        *(first * point.world_size, last * point.world_size),
    )


#: guesses by their names in `Row`, and what they say
GUESSES = {"predicted": "model", "perfect": "perfect scaling", "kept": "last efficiency kept"}


@dataclass(frozen=True)
class Score:
    """How far one guess was from the sizes that no fit saw: share of the measured value, without its sign."""

    points: int
    median: float
    mean: float
    largest: float


def score(tested: Sequence[Tested], by: str) -> Score:
    """Of one guess over all rows that were not fitted."""
    errors = sorted(abs(row.residual(by)) for one in tested for row in one.rows if not row.fitted)
    return Score(len(errors), statistics.median(errors), statistics.fmean(errors), errors[-1])


def words(tested: Sequence[Tested], skipped: dict[str, str]) -> str:
    """The back-test as plain text: each series with its residuals, the scores, and what was not tested."""
    lines = [
        "Back-test of the scaling model, fitted to the small world sizes; the others are predicted. No blind test: its",
        "laws were chosen with these tables at hand, its constants were not. Tokens/s of all GPUs, padding included;",
        f"residual: predicted over measured - 1; band: {100 * COVERAGE:g} % of runs, if terms that fit are right.",
    ]
    for one in tested:
        sizes = ", ".join(map(str, one.fit.world_sizes))
        lines += ["", one.series, f"  fitted to {sizes}: {constants(one.fit)}; noise {one.fit.noise_from}"]
        lines.append(
            f"  {'GPUs':>5} {'measured':>11} {'model':>11} {'band':>23} {'residual':>9}    {'perfect':>8} {'kept':>8}"
        )
        for row in one.rows:
            verdict = "fitted" if row.fitted else "inside" if row.inside else "OUTSIDE"
            lines.append(
                f"  {row.world_size:>5} {row.measured:>11,.0f} {row.predicted:>11,.0f} "
                f"{f'{row.low:,.0f}-{row.high:,.0f}':>23} {_percent(row.residual()):>9}    "
                f"{_percent(row.residual('perfect')):>8} {_percent(row.residual('kept')):>8}  {verdict}"
            )
    if tested:
        lines += ["", *_scores(tested)]
    lines += ["", *(f"not tested: {name}: {why}" for name, why in skipped.items())] if skipped else []
    return "\n".join(lines)


def _scores(tested: Sequence[Tested]) -> list[str]:
    methods = list(dict.fromkeys(one.method for one in tested))
    groups = {method: [one for one in tested if one.method == method] for method in methods}
    if len(groups) > 1:
        groups["all"] = list(tested)
    lines = ["Points that no fit saw, residuals without sign:"]
    for name, group in groups.items():
        rows = [row for one in group for row in one.rows if not row.fitted]
        inside = sum(row.inside for row in rows)
        lines.append(f"  {name}: {len(rows)} points of {len(group)} series, {inside} inside the band")
        for by, guess in GUESSES.items():
            found = score(group, by)
            closer = sum(abs(row.residual()) < abs(row.residual(by)) for row in rows)
            lines.append(
                f"    {guess:<21} median {100 * found.median:4.1f} %, mean {100 * found.mean:4.1f} %, largest "
                f"{100 * found.largest:4.1f} %" + (f"; the model is closer at {closer}" if by != "predicted" else "")
            )
    return lines


def facts(tested: Sequence[Tested], skipped: dict[str, str]) -> dict[str, Any]:
    """The back-test as JSON values."""
    return {
        "kind": "model",
        "band": COVERAGE,
        "series": [
            {
                **{"series": one.series, "fitted_world_sizes": one.fit.world_sizes, "sources": list(one.sources)},
                **{"constants": one.fit.constants, "left_out": one.fit.left_out},
                "rows": [{**asdict(row), "inside": row.inside, "residual": row.residual()} for row in one.rows],
            }
            for one in tested
        ],
        "scores": {by: asdict(score(tested, by)) for by in GUESSES} if tested else {},
        "not_tested": skipped,
    }


def _percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f} %"  # no -0.0


def _rows(name: str) -> list[dict[str, str]]:
    text = resources.files("tokenscale.analysis").joinpath("published", name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _typed(text: str, kind: object) -> Any:
    if kind in (int, float, str):
        return kind(text)
    return (int if kind == int | None else float)(text) if text else None
