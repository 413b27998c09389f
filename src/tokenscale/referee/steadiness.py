"""Is a run in a steady state after its warm-up?"""

import math
from collections.abc import Iterator

import numpy as np

from tokenscale.analysis.tables import WARM_UP_STEPS
from tokenscale.referee.expectations import TOO_NOISY, Evidence, NotCheckedError, expect
from tokenscale.referee.statistics import measure_spread
from tokenscale.settings.run import READERS

#: fewest measured steps whose course is judged, fewest in a part of them, and least share of them
#: in a part
FEWEST_STEPS = 9
FEWEST_IN_PART = 3
PART = 1 / 8
#: spreads that two parts, or the ends of a trend, lie apart, and least ratio. Simulated noise
#: (Gaussian and Student's t3, lag-1 correlation up to 0.5) passed it in at most 0.2 % of runs (9 to
#: 12 steps: 0.7 %), with a correlation of 0.8 in 0.8 %; none of 170 recorded runs did, of which
#: half shared their cores with other work.
SPREADS = 6.5
TREND_SPREADS = 9.0
LEAST_RATIO = 1.25
#: least spread of log times that is believed
LEAST_SPREAD = 0.02
#: steps that are so many times as long as the median are single ones, which count from this share
#: of all time on
SINGLE_RATIO = 2.0
SINGLE_SHARE = 0.22
#: places at which a part of the steps may begin or end, and steps that are looked at (of longer
#: runs a random sample)
PLACES = 24
SAMPLE = 2400


@expect(
    "time of a step per token",
    must="that of the run's other steps",
    known_from="the run's own steps",
    word="suspect",
    tolerance=(
        f"{SPREADS:g} spreads of its steps and {LEAST_RATIO:g}×; single steps "
        f"{100 * SINGLE_SHARE:.0f} % of the time"
    ),
)
def find_unsteadiness(evidence: Evidence) -> list[str]:
    """Find a part of the steps that is slower or faster than the rest, wherever it lies and however
    long the run is.

    Times are those of the slowest rank for each token that the step computed on. A part is a
    stretch of an eighth to half of the measured steps, or the slower kind of steps, wherever they
    lie (Otsu 1979). Its median is compared with that of the other steps, in units of the mean
    absolute deviation of the log times from their part's median, the larger of both parts. Of a
    trend, the first and the last step on a fitted curve are compared. What is shorter is found
    where it takes a large share of the time. With a spread of 4 % that is 1.3× in any third of the
    steps.
    """
    number, took, log = _measured(evidence)
    if len(log) < FEWEST_STEPS:
        raise NotCheckedError(f"fewer than {FEWEST_STEPS} measured steps")
    parts = _parts(log)
    distances = _distances(log, parts)
    furthest = int(distances.argmax())
    members = parts[furthest]
    ratio = math.exp(np.median(log[members]) - np.median(log[~members]))
    if distances[furthest] > SPREADS and max(ratio, 1 / ratio) > LEAST_RATIO:
        where = f"steps {number[members][0]} to {number[members][-1]} take"
        if furthest == len(parts) - 1:
            where = f"two kinds of steps, {members.sum()} of {len(log)} take"
        return [f"no steady state: {where} {ratio:.2f}× as long as the others"]
    apart, change = max(_trends(log))
    if apart > TREND_SPREADS and abs(change) > math.log(LEAST_RATIO):
        return [
            (
                f"no steady state: from step {number[0]} to {number[-1]} a step comes to take "
                f"{math.exp(change):.2f}×"
            )
        ]
    limit = max(SPREADS * measure_spread(log), math.log(LEAST_RATIO))
    longer = log - np.median(log) > max(limit, math.log(SINGLE_RATIO))
    share = (took[longer] - np.median(took)).sum() / took.sum()
    if evidence.row.get("arm") in READERS:
        raise NotCheckedError("what only reads takes batches from blocks, which it reads at once")
    if share > SINGLE_SHARE:
        first = np.flatnonzero(longer)[0]
        times = f"step {number[first]} is {took[first] / np.median(took):,.0f}× the median"
        hold = f"{longer.sum()} of {len(log)} steps hold {100 * share:.0f} % of the time"
        return [f"no steady state: {hold}, {times}"]
    if limit > math.log(2):
        unseen = f"less than {math.exp(limit):.1f}×" if limit < math.log(10) else "even 10×"
        raise NotCheckedError(f"{TOO_NOISY} that {unseen} in a part of them is not seen")
    return []


def _measured(evidence: Evidence) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(step, seconds, log of seconds per token) of complete steps after the warm-up: against those
    expected for as many tokens where they compute on unequally many, and against steps of the same
    world size.
    """
    steps = evidence.steps
    if not len(steps):
        return np.zeros(0), np.zeros(0), np.zeros(0)
    took = steps.largest("step_s")
    tokens = steps.sums("total_tokens")
    world = steps.largest("world_size")
    used = np.flatnonzero(
        steps.whole() & (steps.largest("attempt_step") >= WARM_UP_STEPS) & (took > 0) & (tokens > 0)
    )
    if len(used) > SAMPLE:
        used = np.sort(np.random.default_rng(0).choice(used, SAMPLE, replace=False))
    log = np.log(took[used])
    size = np.log(tokens[used])
    slope = np.polyfit(size, log, 1)[0] if len(used) and np.ptp(size) > 0.05 else 1.0
    log -= slope * size
    for ranks in np.unique(world[used]):
        log[world[used] == ranks] -= np.median(log[world[used] == ranks])
    return steps.numbers[used], took[used], log


def _parts(log: np.ndarray) -> np.ndarray:
    """Which steps belong to each part that is compared with the rest: a boolean row for each
    stretch, and a last one for the slower kind of steps.
    """
    n = len(log)
    least = max(FEWEST_IN_PART, math.ceil(PART * n))
    places = np.unique(np.linspace(0, n, min(n, PLACES) + 1).round().astype(int))
    begins, ends = (grid.ravel() for grid in np.meshgrid(places, places, indexing="ij"))
    used = (ends >= begins + least) & (ends <= begins + n / 2)
    index = np.arange(n)
    stretches = (index >= begins[used, None]) & (index < ends[used, None])
    order = np.argsort(log, kind="stable")
    count = np.arange(least, n - least + 1)
    sums = np.cumsum(log[order])
    below = sums[count - 1]
    between = count * (n - count) * (below / count - (sums[-1] - below) / (n - count)) ** 2
    slower = np.isin(index, order[count[np.argmax(between)] :])
    return np.vstack([stretches, slower])


def _trends(log: np.ndarray) -> Iterator[tuple[float, float]]:
    """(distance in spreads, change of log times) from the first to the last step on a line, and on
    a decay to it.
    """
    n = len(log)
    for time in (np.linspace(0, 1, n), np.exp(-np.linspace(0, 6, n))):
        slope, start = np.polyfit(time, log, 1)
        spread = max(
            measure_spread(log - start - slope * time) * math.sqrt(n / (n - 5)), LEAST_SPREAD
        )
        change = float(slope * (time[-1] - time[0]))
        yield abs(change) / spread, change


def _distances(log: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Distance between the medians of each part (a row of `parts`) and of the rest, in spreads.

    The steps are sorted once for all parts.
    """
    order = np.argsort(log)
    members = parts[:, order]
    median, spread = _describe_parts(log[order], parts=members)
    median_of_rest, spread_of_rest = _describe_parts(log[order], parts=~members)
    spread = np.maximum(np.maximum(spread, spread_of_rest), LEAST_SPREAD)
    return np.abs(median - median_of_rest) / spread


def _describe_parts(ascending: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(median, spread) of each part of ascending values; see `measure_spread`."""
    counted = parts.cumsum(axis=1)
    count = counted[:, -1:]
    lower = (counted > (count - 1) // 2).argmax(axis=1)
    upper = (counted > count // 2).argmax(axis=1)
    median = (ascending[lower] + ascending[upper]) / 2
    deviations = np.abs(ascending - median[:, None])
    total = np.where(parts, deviations, 0.0).sum(axis=1)
    return median, math.sqrt(math.pi / 2) * total / count[:, 0]
