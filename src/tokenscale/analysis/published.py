"""Published points of scaling, and what the model of `scaling_model` would have said of them: the back-test.

`published/steps.csv` has one row a point, `published/all_reduce.csv` one a message size, each with its source. A series
is tested where it has at least three world sizes at one local batch: the model is fitted to the smaller ones and
predicts the others. Beside it stand two guesses that need no model.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from tokenscale.analysis.scaling_model import Fit, Links, Point, Prediction, Work, fit, fit_link, predict
from tokenscale.costs.communication import Link
from tokenscale.errors import unknown

#: DDP's all-reduce has trees in NCCL; all-gather and reduce-scatter, which sharding takes, are rings
LATENCY = {"ddp": "tree", "fsdp": "ring"}


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
    """A series with its fit and its rows, fitted sizes first."""

    series: str
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
    swept = all_reduces()[0]
    if sweep and (group[0].gpu, group[0].gpus_per_node, group[0].method) != (
        swept["gpu"],
        int(swept["gpus_per_node"]),
        "ddp",
    ):
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
    return Tested(series, found, tuple(rows), tuple(dict.fromkeys(p.source for p in group)))


def _row(point: Published, prediction: Prediction, fitted: bool, first: float, last: float) -> Row:
    tokens = point.sequence_length * point.local_batch * point.world_size
    return Row(
        *(point.series, point.world_size, fitted, point.tokens_per_s),
        *(tokens / prediction.step_s, tokens / prediction.high_s, tokens / prediction.low_s),
        *(first * point.world_size, last * point.world_size),
    )


def _rows(name: str) -> list[dict[str, str]]:
    text = resources.files("tokenscale.analysis").joinpath("published", name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _typed(text: str, kind: object) -> object:
    if kind in (int, float, str):
        return kind(text)
    return (int if kind == int | None else float)(text) if text else None
