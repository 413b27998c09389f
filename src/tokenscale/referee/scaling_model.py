"""Predict the step time of weak scaling on more ranks: step(N) = a + b log2(N / N0), with a and b
of at least zero.

N0 is the smallest fitted world size; a and b follow from relative least squares. The band is for
COVERAGE of further runs. It reaches from the faster to the slower of the prediction and of
"efficiency stays as at the largest size". Each end is moved out by the spread of a prediction from
a line, quantile x noise x sqrt(1 + 1/n + (x - mean)^2 / Sxx), the slow end also by SLOWDOWN for
each doubling beyond the fitted sizes: larger worlds meet limits that no run shows. The constants
were chosen by the back-test on published series (tests/benchmarks/backtest.py, table in
docs/parallelism.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.costs.communication import solve_nonnegative

#: share of further runs that the band contains
COVERAGE = 0.9
#: log standard deviation of a run's step time without repeats, and the least with repeats: those of
#: one session are closer to each other than to a run of another day
ASSUMED_NOISE = 0.03
LEAST_NOISE = 0.01
#: limit of the noise, at which any band is too wide and its ends are still finite
LARGEST_NOISE = 2.0
#: repeats estimate the noise from this many degrees of freedom on
LEAST_FREEDOM = 2
#: weights sharded over all ranks → log slow-down of the slow end for each doubling beyond the
#: fitted sizes
SLOWDOWN = {False: 0.08, True: 0.3}
#: the same → doublings beyond the fitted sizes at which the back-test answers at least ten points
REACH = {False: 3, True: 1}
#: `a` is at least this share of the shortest step, so that every prediction is positive
LEAST_START = 0.01
#: largest ratio between the ends of a band that counts as a prediction
WIDEST_BAND = 2.0


@dataclass(frozen=True)
class Fit:
    """Line through step times: `start_s` at the smallest world size, `slope_s` more for each
    doubling.

    `last_s` is the mean step time at the largest size, `noise` the log standard deviation of a
    run's step time.
    """

    sizes: tuple[int, ...]  # of each run, ascending
    start_s: float
    slope_s: float
    last_s: float
    noise: float
    quantile: float  # of the noise, for one end of the band
    noise_source: str
    fully_sharded: bool

    @property
    def world_sizes(self) -> list[int]:
        """Fitted world sizes, ascending."""
        return sorted(set(self.sizes))


@dataclass(frozen=True)
class Prediction:
    """Predicted step time of one world size with the ends of its band, and if efficiency stays, in
    seconds.

    `measure` is None for a prediction. Otherwise it is the world size to measure first, and the
    times are no answer.
    """

    world_size: int
    step_s: float
    low_s: float
    high_s: float
    stays_s: float
    measure: int | None = None


def fit(runs: Sequence[tuple[int, float]], fully_sharded: bool = False) -> Fit:
    """Fit runs (world size, mean seconds of a step) of weak scaling.

    Raises UserError for fewer than two world sizes and for a step time that is not positive and
    finite.
    """
    groups: dict[int, list[float]] = {}
    for size, seconds in sorted(runs):
        if not 0 < seconds < math.inf:
            run = f"world size {size}: {seconds:g} s"
            next_step = "exclude this run, or measure it again"
            raise UserError("a run has an impossible step time.", run=run, next=next_step)
        groups.setdefault(size, []).append(seconds)
    sizes = np.array([size for size, group in groups.items() for _ in group])
    if len(groups) < 2:
        found = f"world size {sizes[0]}" if groups else "no runs"
        next_step = (
            f"measure {2 * sizes[0] if groups else 'two sizes'}: add it to the factors "
            "(`layout.data`), and run"
        )
        raise UserError(
            "a prediction needs runs of at least two world sizes.", found=found, next=next_step
        )
    steps = np.concatenate(list(groups.values()))
    columns = np.stack([np.ones(len(sizes)), np.log2(sizes / sizes[0])], axis=1)
    a, b = map(float, solve_nonnegative(columns / steps[:, None], targets=np.ones(len(sizes))))
    a = max(a, LEAST_START * float(steps.min()))
    noise, quantile, source = _estimate_noise(list(groups.values()))
    misfit = 0.0
    if len(groups) > 2:
        misfit = math.sqrt(
            float((np.log(steps / (columns @ [a, b])) ** 2).sum()) / (len(sizes) - 2)
        )
    if misfit > noise:
        noise = misfit
        source = f"{100 * misfit:.2g} % (the line misses the runs)"
    last_s = math.exp(np.log(list(groups.values())[-1]).mean())
    return Fit(
        sizes=tuple(map(int, sizes)),
        start_s=a,
        slope_s=b,
        last_s=last_s,
        noise=min(noise, LARGEST_NOISE),
        quantile=quantile,
        noise_source=source,
        fully_sharded=fully_sharded,
    )


def _estimate_noise(groups: list[list[float]]) -> tuple[float, float, str]:
    """Return (log standard deviation of a run, quantile of one end, source) from the step times of
    each world size.
    """
    z = NormalDist().inv_cdf((1 + COVERAGE) / 2)
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum(float(((np.log(group) - np.log(group).mean()) ** 2).sum()) for group in groups)
    noise = math.sqrt(squares / max(1, freedom))
    if freedom < LEAST_FREEDOM:
        noise = max(noise, ASSUMED_NOISE)
        return (
            noise,
            z,
            (
                f"{100 * noise:.2g} % (assumed: at least {100 * ASSUMED_NOISE:g} % with so few "
                "repeats)"
            ),
        )
    noise = max(noise, LEAST_NOISE)
    # quantile of Student's t, expanded about the normal one (Abramowitz & Stegun 1964, 26.7.5)
    student = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return noise, student, f"{100 * noise:.2g} % (repeats, {freedom} degrees of freedom)"


def predict(found: Fit, world_size: int) -> Prediction:
    """Predict a world size of at least the smallest fitted one."""
    x = np.log2(found.sizes)
    at = math.log2(world_size)
    largest = found.sizes[-1]
    doublings = max(0.0, at - x[-1])
    leverage = 1 / len(x) + (at - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
    spread = found.quantile * found.noise * math.sqrt(1 + leverage)
    step_s = found.start_s + found.slope_s * (at - float(x[0]))
    stays_s = found.last_s if doublings else step_s
    low = min(step_s, stays_s) * math.exp(-spread)
    high = max(step_s, stays_s) * math.exp(spread + SLOWDOWN[found.fully_sharded] * doublings)
    measure = None
    if doublings > REACH[found.fully_sharded] or high > WIDEST_BAND * low:
        measure = min(
            world_size, largest * 2 ** max(1, math.ceil(doublings - REACH[found.fully_sharded]))
        )
        if world_size > largest and predict(found, world_size=largest).measure:
            measure = largest  # its runs are too noisy: they need repeats
    return Prediction(
        world_size=world_size,
        step_s=step_s,
        low_s=low,
        high_s=high,
        stays_s=found.last_s,
        measure=measure,
    )
