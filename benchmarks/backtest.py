"""Back-test of the scaling model of `predict` on published scaling measurements.

`published/steps.csv` has one row per series and world size, `published/all_reduce.csv` one per message size, each with
its source. The back-test fits every prefix of a series' world sizes (at least two, and at least two nodes) and predicts
all larger sizes. Two guesses without a model are scored beside it.
"""

import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenscale.analysis.scaling_model import (
    BUCKET_BYTES,
    COVERAGE,
    WIDEST_BAND,
    Fit,
    Links,
    Measurement,
    Prediction,
    Workload,
    describe_laws,
    fit,
    predict,
)
from tokenscale.base.errors import unknown
from tokenscale.cli.main import Parser, exit_code
from tokenscale.costs.communication import Link, fit_link


@dataclass(frozen=True)
class PublishedPoint:
    """One published measurement. Tokens/s are of all GPUs, padding included. None: not stated by the source."""

    series: str
    model: str
    parameters: int | None
    gpu: str
    gpus_per_node: int
    method: str
    approach: str
    sequence_length: int | None
    local_batch: int | None
    world_size: int
    tokens_per_s: float
    gradient_bytes: int | None
    tail_bytes: int | None
    source: str
    note: str

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step of all GPUs; one token per GPU if the source does not state its batch."""
        return (self.sequence_length or 1) * (self.local_batch or 1) * self.world_size

    @property
    def step_s(self) -> float:
        """Seconds per step, by the stated or assumed tokens per step."""
        return self.tokens_per_step / self.tokens_per_s


@dataclass(frozen=True)
class Row:
    """One held-out world size of one fit: tokens/s as measured, predicted with a band, and guessed without a model.

    `measure` is the world size to measure first if the model declines to predict, else None.
    """

    series: str
    fitted_to: int  # largest fitted world size
    world_size: int
    measured: float
    predicted: float
    low: float
    high: float
    ideal: float  # throughput per GPU of the smallest fitted size
    constant: float  # throughput per GPU of the largest fitted size
    measure: int | None = None

    @property
    def inside(self) -> bool:
        """Tell whether the measured value lies in the band."""
        return self.low <= self.measured <= self.high

    def residual(self, guess: str = "predicted") -> float:
        """Return `predicted`, `ideal` or `constant` over measured, less one."""
        return getattr(self, guess) / self.measured - 1


@dataclass(frozen=True)
class TestedSeries:
    """Fits to the prefixes of a series, and a row for each held-out world size of each fit."""

    series: str
    method: str
    fits: tuple[Fit, ...]
    rows: tuple[Row, ...]
    sources: tuple[str, ...]


def load_points() -> list[PublishedPoint]:
    """Return all rows of `steps.csv`, in its order."""
    kinds = {name: field.type for name, field in PublishedPoint.__dataclass_fields__.items()}
    return [PublishedPoint(**{name: _parse(row[name], kinds[name]) for name in kinds}) for row in _rows("steps.csv")]


def load_all_reduces() -> list[dict[str, str]]:
    """Return the rows of `all_reduce.csv`: bytes and seconds of one all-reduce."""
    return _rows("all_reduce.csv")


def group_by_series(found: Sequence[PublishedPoint]) -> dict[str, list[PublishedPoint]]:
    """Return series → its points by world size, in the order of the file."""
    series: dict[str, list[PublishedPoint]] = {}
    for point in found:
        series.setdefault(point.series, []).append(point)
    return {name: sorted(group, key=lambda p: p.world_size) for name, group in series.items()}


def split_prefixes(group: Sequence[PublishedPoint]) -> list[tuple[list[PublishedPoint], list[PublishedPoint]]]:
    """Return (points to fit, held-out points) for each prefix that has two sizes and reaches two nodes.

    >>> group = group_by_series(load_points())["8.05B padded"]
    >>> [[p.world_size for p in fitted] for fitted, _ in split_prefixes(group)]
    [[1, 4, 8], [1, 4, 8, 12]]
    """
    cuts = [i for i in range(2, len(group)) if group[i - 1].world_size > group[0].gpus_per_node]
    return [(list(group[:i]), list(group[i:])) for i in cuts]


def explain_skipped(group: Sequence[PublishedPoint], sweep: bool = False) -> str | None:
    """Return why a series cannot be back-tested; None if it can."""
    sizes = ", ".join(str(p.world_size) for p in group)
    if len(group) < 3:
        return f"fewer than three world sizes ({sizes})"
    if not split_prefixes(group):
        return f"no size is left to test beyond the first on two nodes ({sizes})"
    swept = load_all_reduces()[0]
    machine = group[0].gpu, str(group[0].gpus_per_node)
    if sweep and (machine != (swept["gpu"], swept["gpus_per_node"]) or group[0].method != "ddp"):
        return "the published sweep is of another machine or another collective"
    return None


def describe_workload(point: PublishedPoint) -> Workload:
    """Return the workload of a series: weak scaling, an all-reduce of the gradients in buckets of 25 MiB."""
    size_bytes = point.gradient_bytes or BUCKET_BYTES  # not stated: the fitted constants take up the scale
    return Workload(
        ranks_per_node=point.gpus_per_node,
        communicated_bytes=size_bytes,
        tail_bytes=point.tail_bytes or 0,
        messages=max(1, round(size_bytes / BUCKET_BYTES)),
    )


def fit_published_link() -> Link:
    """Fit the link between the source study's nodes to published all-reduces of two nodes; each GPU sends its part."""
    found = load_all_reduces()
    sizes = [int(row["bytes"]) / int(row["gpus_per_node"]) for row in found]
    return fit_link("all_reduce", sizes, [float(row["seconds"]) for row in found], 2, "tree")[0]


def run_backtest(series: str | None = None, *, sweep: bool = False) -> tuple[list[TestedSeries], dict[str, str]]:
    """Return (tested series, series → why it was skipped).

    With `sweep` the link between nodes is taken from published all-reduces, for the DDP series of that machine only.
    Raises UserError for an unknown series.
    """
    groups = group_by_series(load_points())
    if series is not None and series not in groups:
        raise unknown("published series", series, groups)
    groups = {name: group for name, group in groups.items() if series in (None, name)}
    skipped = {name: why for name, group in groups.items() if (why := explain_skipped(group, sweep))}
    links = Links(inter_node=fit_published_link()) if sweep else Links()
    return [_test(name, group, links) for name, group in groups.items() if name not in skipped], skipped


def _test(series: str, group: Sequence[PublishedPoint], links: Links) -> TestedSeries:
    fits, rows = [], []
    for seen, held_out in split_prefixes(group):
        found = fit([Measurement(p.world_size, p.step_s) for p in seen], describe_workload(group[0]), links)
        fits.append(found)
        predictions = predict(found, [p.world_size for p in held_out])
        rows += [_row(point, p, seen) for point, p in zip(held_out, predictions, strict=True)]
    sources = tuple(dict.fromkeys(p.source for p in group))
    return TestedSeries(series, group[0].method, tuple(fits), tuple(rows), sources)


def _row(point: PublishedPoint, prediction: Prediction, seen: Sequence[PublishedPoint]) -> Row:
    tokens = point.tokens_per_step
    first, last = (p.tokens_per_s / p.world_size * point.world_size for p in (seen[0], seen[-1]))
    return Row(
        *(point.series, seen[-1].world_size, point.world_size, point.tokens_per_s),
        *(tokens / prediction.step_s, tokens / prediction.high_s, tokens / prediction.low_s),
        *(first, last, prediction.measure),
    )


#: guesses by their names in `Row`
GUESSES = {"predicted": "model", "ideal": "ideal scaling", "constant": "constant throughput per GPU"}


@dataclass(frozen=True)
class Score:
    """Absolute residuals of one guess over held-out points."""

    points: int
    median: float
    mean: float
    largest: float


def score(rows: Sequence[Row], guess: str = "predicted") -> Score:
    """Score one guess."""
    errors = [abs(row.residual(guess)) for row in rows]
    return Score(len(errors), statistics.median(errors), statistics.fmean(errors), max(errors))


def collect_rows(tested: Sequence[TestedSeries]) -> list[Row]:
    """Return the rows of several series."""
    return [row for one in tested for row in one.rows]


def format_backtest(tested: Sequence[TestedSeries], skipped: dict[str, str]) -> str:
    """Return the back-test as plain text: each series with its residuals, the scores, and the skipped series."""
    lines = [
        "Back-test of the scaling model: fitted to every prefix of the world sizes of each series, larger sizes are",
        "predicted. The laws were chosen with these tables at hand; the constants are fitted to the prefix alone.",
        "Tokens/s of all GPUs, padding included. Residual: predicted over measured - 1.",
        f"Band: {100 * COVERAGE:g} % of runs. If its ends differ by more than a factor of {WIDEST_BAND:g}, there is no",
        "prediction: the size to measure is given.",
    ]
    for one in tested:
        lines += ["", one.series]
        lines += [f"  fitted to {', '.join(map(str, f.world_sizes))}: {describe_laws(f)}" for f in one.fits]
        lines.append(
            f"  {'fitted to':>9} {'GPUs':>5} {'measured':>11} {'model':>11} {'band':>23} {'residual':>9} {'ideal':>9} "
            f"{'constant':>9}"
        )
        for row in one.rows:
            verdict = ("inside" if row.inside else "OUTSIDE") + (f"; measure {row.measure}" if row.measure else "")
            lines.append(
                f"  {row.fitted_to:>9} {row.world_size:>5} {row.measured:>11,.0f} {row.predicted:>11,.0f} "
                f"{f'{row.low:,.0f}-{row.high:,.0f}':>23} {_percent(row.residual()):>9} "
                f"{_percent(row.residual('ideal')):>9} {_percent(row.residual('constant')):>9}  {verdict}"
            )
    lines += ["", *_format_scores(tested)] if tested else []
    lines += ["", *(f"not tested: {name}: {why}" for name, why in skipped.items())] if skipped else []
    return "\n".join(lines)


def _format_scores(tested: Sequence[TestedSeries]) -> list[str]:
    groups = {
        method: [one for one in tested if one.method == method] for method in dict.fromkeys(t.method for t in tested)
    }
    if len(groups) > 1:
        groups["all"] = list(tested)
    lines = ["Held-out points, absolute residuals:"]
    for name, group in groups.items():
        rows = collect_rows(group)
        answered = [row for row in rows if row.measure is None]
        lines.append(
            f"  {name}: {len(rows)} points of {len(group)} series, {sum(r.inside for r in rows)} inside the band; "
            f"{len(answered)} predicted, {sum(r.inside for r in answered)} of them inside; "
            f"{len(rows) - len(answered)} answered by the size to measure"
        )
        for title, chosen in (("all", rows), ("predicted", answered)):
            for guess, label in GUESSES.items() if chosen else ():
                found = score(chosen, guess)
                lines.append(
                    f"    {title:<9} {label:<27} median {100 * found.median:4.1f} %, mean {100 * found.mean:4.1f} %, "
                    f"largest {100 * found.largest:4.1f} %"
                )
    return lines


def backtest_to_json(tested: Sequence[TestedSeries], skipped: dict[str, str]) -> dict[str, Any]:
    """Return the back-test as JSON values."""
    rows = collect_rows(tested)
    return {
        "kind": "model",
        "band": COVERAGE,
        "widest_band": WIDEST_BAND,
        "series": [
            {
                **{"series": one.series, "sources": list(one.sources)},
                "fits": [
                    {"world_sizes": f.world_sizes, "candidates": [asdict(c) for c in f.candidates]} for f in one.fits
                ],
                "rows": [{**asdict(row), "inside": row.inside, "residual": row.residual()} for row in one.rows],
            }
            for one in tested
        ],
        "scores": {guess: asdict(score(rows, guess)) for guess in GUESSES} if rows else {},
        "not_tested": skipped,
    }


def _percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f} %"  # no -0.0


def _rows(name: str) -> list[dict[str, str]]:
    with open(Path(__file__).parent / "published" / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _parse(text: str, kind: object) -> Any:
    if kind in (int, float, str):
        return kind(text)
    return (int if kind == int | None else float)(text) if text else None


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and print the back-test. Return the exit code."""
    parser = Parser(prog="python benchmarks/backtest.py", description=__doc__)
    parser.add_argument("--series", metavar="NAME", help="only this series")
    parser.add_argument("--sweep", action="store_true", help="take the link from published all-reduces")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)

    def run() -> None:
        found = run_backtest(parsed.series, sweep=parsed.sweep)
        print(json.dumps(backtest_to_json(*found)) if parsed.json else format_backtest(*found))

    return exit_code(run, f"{parser.prog} --help")


if __name__ == "__main__":
    raise SystemExit(main())
