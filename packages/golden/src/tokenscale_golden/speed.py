"""Whether the time of a step moved between two runs, apart from drift within a run."""

import math
from dataclasses import dataclass

import numpy as np

# steps with a time in each run; change that counts, for repeated runs differ by it
FEWEST = 12
SMALLEST = 0.01
OUTLIER = 3.0  # robust standard deviations from the line where a step no longer counts


@dataclass
class Speed:
    """Relative change of a step's time in the middle of the run, its 95 % interval, and the drift
    within both runs.
    """

    change: float
    interval: tuple[float, float]
    drifts: tuple[float, float]
    # beyond chance in the same direction at both ends of the runs, so that no drift explains it
    moved: bool

    def __str__(self) -> str:
        numbers = [f"{100 * value:+.1f}" for value in (self.change, *self.interval, *self.drifts)]
        return "{} % [{}, {}]; drift within OLD {} %, within NEW {} %".format(*numbers)


def compare_speed(old: np.ndarray, new: np.ndarray) -> Speed | None:
    """Compare the seconds of steps [n], [m] of two runs; None where fewer than FEWEST are known."""
    if (a := _fit_line(old)) is None or (b := _fit_line(new)) is None:
        return None
    change = b[0] - a[0]
    drift = b[1] - a[1]
    error = math.hypot(a[2], b[2])
    # 97.5 % quantile of Student's t, by the series of Cornish and Fisher
    z = 1.959964
    df = min(a[3], b[3])
    width = error * (z + (z**3 + z) / 4 / df + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / df**2)
    # the error at an end is twice that in the middle; at both a test on one side at 5 %
    moved = abs(change) - abs(drift) / 2 > (0.84 - 0.27 / df) * 2 * width and abs(change) > SMALLEST
    low, high, *drifts = (
        math.expm1(value) for value in (change - width, change + width, a[1], b[1])
    )
    return Speed(
        change=math.expm1(change),
        interval=(low, high),
        drifts=(drifts[0], drifts[1]),
        moved=moved,
    )


def _fit_line(values: np.ndarray) -> tuple[float, float, float, float] | None:
    """Return log time in the middle, drift, standard error (for autocorrelated noise), and degrees
    of freedom.
    """
    at = np.flatnonzero(np.isfinite(values) & (values > 0))
    if len(at) < FEWEST:
        return None
    x = (at - at.mean()) / (at[-1] - at[0])
    y = np.log(values[at])
    slope = 0.0
    level = float(np.median(y))
    for _ in range(8):  # Tukey's biweight
        rest = y - level - slope * x
        keep = np.clip(1 - (rest / (OUTLIER * 1.4826 * np.median(np.abs(rest)) + 1e-9)) ** 2, 0, 1)
        slope, level = np.polyfit(x, y, 1, w=keep)
    pull = keep**2 * (y - level - slope * x)
    n = len(x)
    r = float(pull[1:] @ pull[:-1] / max(pull @ pull, 1e-30))
    r = min(0.95, max(0.0, r + (1 + 3 * r) / n))  # without its bias in a short series
    effective = max(3.0, n * (1 - r) / (1 + r))
    share = max(0.1, float(np.mean(keep * (5 * keep - 4))))
    return (
        level,
        slope,
        math.sqrt(pull @ pull / (n - 2) / effective) / share,
        max(1.5, effective - 2),
    )
