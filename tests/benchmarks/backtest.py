"""Back-test of the scaling model of `predict` on published measurements of weak scaling.

`published/weak_scaling.csv` has a row per series and number of devices, with its source: throughput
of one device, in the source's unit or relative to the series' smallest size. Every prefix of a
series' sizes (at least two, and at least two nodes) is fitted, and all larger sizes are predicted.
Three predictors without a model get the same band around their value. All are scored where the
model answers: by the error of the throughput, and by the interval score (Gneiting & Raftery 2007,
J. Am. Stat. Assoc. 102, eq. 43) of the band of the log step time: its width, plus 2 / (1 -
COVERAGE) times the distance of a measurement outside of it. Lower is better.
"""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tokenscale.base.errors import unknown
from tokenscale.cli.main import Parser, exit_code
from tokenscale.referee.scaling_model import COVERAGE, Prediction, fit, predict

#: how a line of the results reads
LINE = "{:<34} {:>6} {:>8} {:>7} {:>7} {:>8} {:>9} {:>9}"
#: predictors without a model: their seconds of a step at x = log2 N, from fitted points (x,
#: seconds)
TRIVIAL = {
    "last efficiency stays": lambda points, x: points[-1][1],
    "ideal: throughput of the smallest": lambda points, x: points[0][1],
    "line through the last two sizes": lambda points, x: (
        points[-1][1] + max(0.0, _slope(*points[-2:])) * (x - points[-1][0])
    ),
}


class Point(NamedTuple):
    """Published throughput of one device, and the seconds of a step up to a factor of the
    series.
    """

    series: str
    devices: int
    devices_per_node: int
    method: str
    throughput: float
    source: str

    @property
    def step_s(self) -> float:
        """Seconds of a step in which each device has one unit of work."""
        return 1 / self.throughput


@dataclass(frozen=True)
class Row:
    """A held-out size of one fit: measured seconds of a step, the prediction, and the bands of all
    predictors.
    """

    series: str
    method: str
    fitted_to: int  # largest fitted size
    devices: int
    measured_s: float
    prediction: Prediction
    bands: dict[str, tuple[float, float, float]]  # predictor → low, middle, high in seconds

    def inside(self, predictor: str = "model") -> bool:
        """Tell whether the measured value lies in the band."""
        low, _, high = self.bands[predictor]
        return low <= self.measured_s <= high

    def error(self, predictor: str = "model") -> float:
        """Return the throughput, predicted over measured, less one."""
        return self.measured_s / self.bands[predictor][1] - 1

    def interval_score(self, predictor: str = "model") -> float:
        """Return the interval score of the band of the log step time."""
        low, _, high = map(math.log, self.bands[predictor])
        x = math.log(self.measured_s)
        return high - low + 2 / (1 - COVERAGE) * (max(0.0, low - x) + max(0.0, x - high))


def _slope(one: tuple[float, float], two: tuple[float, float]) -> float:
    return (two[1] - one[1]) / (two[0] - one[0])


def load_series() -> dict[str, list[Point]]:
    """Return series → its points by size, in the order of the file."""
    series: dict[str, list[Point]] = {}
    with open(
        Path(__file__).parent / "published/weak_scaling.csv", encoding="utf-8", newline=""
    ) as file:
        for name, devices, per_node, method, throughput, source in list(csv.reader(file))[1:]:
            point = Point(name, int(devices), int(per_node), method, float(throughput), source)
            series.setdefault(name, []).append(point)
    return {name: sorted(points, key=lambda p: p.devices) for name, points in series.items()}


def run_backtest(series: str | None = None) -> list[Row]:
    """Return a row for each fit and held-out size of one or all series. Raises UserError for an
    unknown series.
    """
    groups = load_series()
    if series is not None and series not in groups:
        raise unknown("published series", series, groups)
    rows = []
    for points in [groups[series]] if series else groups.values():
        for count in range(2, len(points)):
            if points[count - 1].devices > points[0].devices_per_node:
                rows += [_test(points[:count], held_out) for held_out in points[count:]]
    return rows


def _test(seen: Sequence[Point], held_out: Point) -> Row:
    found = fit([(p.devices, p.step_s) for p in seen], held_out.method == "fsdp")
    p = predict(found, held_out.devices)
    bands = {"model": (p.low_s, p.step_s, p.high_s)}
    down = min(p.step_s, p.stays_s) / p.low_s
    up = p.high_s / max(p.step_s, p.stays_s)
    points = [(math.log2(point.devices), point.step_s) for point in seen]
    for name, guess in TRIVIAL.items():
        seconds = guess(points, math.log2(held_out.devices))
        bands[name] = (seconds / down, seconds, seconds * up)
    return Row(
        held_out.series,
        held_out.method,
        seen[-1].devices,
        held_out.devices,
        held_out.step_s,
        p,
        bands,
    )


def format_scores(rows: Sequence[Row]) -> list[str]:
    """Return a table: all predictors where the model answers, then the model by method and by
    distance.
    """
    answered = [row for row in rows if row.prediction.measure is None]
    lines = [
        LINE.format("", "points", "answered", "inside", "mean", "median", "largest", "interval")
    ]
    lines += [_score(name, rows, answered, name) for name in ("model", *TRIVIAL)]
    for method in dict.fromkeys(row.method for row in rows):
        lines.append(
            _score(
                f"model, {method}",
                *([r for r in s if r.method == method] for s in (rows, answered)),
            )
        )
    for low, high in ((1, 2), (2, 4), (4, 8), (8, math.inf)):
        near = [[r for r in s if low < r.devices / r.fitted_to <= high] for s in (rows, answered)]
        lines.append(_score(f"model, {low} to {high} times the largest", *near))
    return [line.rstrip() for line in lines]


def _score(
    title: str, rows: Sequence[Row], answered: Sequence[Row], predictor: str = "model"
) -> str:
    if not answered:
        return LINE.format(title, len(rows), 0, *[""] * 5)
    errors = [abs(row.error(predictor)) for row in answered]
    shares = [
        sum(row.inside(predictor) for row in answered) / len(answered),
        statistics.fmean(errors),
    ]
    percent = [
        f"{100 * value:.1f} %" for value in (*shares, statistics.median(errors), max(errors))
    ]
    score = statistics.fmean(row.interval_score(predictor) for row in answered)
    return LINE.format(title, len(rows), len(answered), *percent, f"{score:.3f}")


def format_rows(rows: Sequence[Row]) -> list[str]:
    """Return a line per held-out size, by series: what was measured over predicted, and the ends of
    the band.
    """
    lines = []
    for series in dict.fromkeys(row.series for row in rows):
        lines += [
            "",
            f"{series}: step time over the predicted one: measured, and the ends of the band",
        ]
        for row in (row for row in rows if row.series == series):
            low, middle, high = row.bands["model"]
            said = f"measure {row.prediction.measure}" if row.prediction.measure else ""
            inside = "" if row.inside() else "OUTSIDE "
            lines.append(
                f"  fitted to {row.fitted_to:>5}, {row.devices:>5} devices: "
                f"{row.measured_s / middle:.3f}, "
                f"{low / middle:.3f}-{high / middle:.3f}  {inside}{said}".rstrip()
            )
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and print the back-test. Return the exit code."""
    parser = Parser(prog="python tests/benchmarks/backtest.py", description=__doc__)
    parser.add_argument("--series", metavar="NAME", help="only this series")
    parser.add_argument("--rows", action="store_true", help="print every held-out size")
    parsed = parser.parse_args(arguments)

    def run() -> None:
        rows = run_backtest(parsed.series)
        print("\n".join([*format_scores(rows), *(format_rows(rows) if parsed.rows else [])]))

    return exit_code(run, f"{parser.prog} --help")


if __name__ == "__main__":
    raise SystemExit(main())
