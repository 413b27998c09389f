"""Is a run in a steady state after its warm-up?"""

import math

import numpy as np

from tokenscale.analysis.expectations import WARM_UP_STEPS, Evidence, expect

#: fewest measured steps whose course is judged
FEWEST_STEPS = 12
#: one step's share of all measured time from which on it decides the rate, and its least length in seconds
ONE_STEP_SHARE, ONE_STEP_S = 0.5, 1.0
#: ratio of the last third's median step to the middle third's: of few steps, and of many if their rank sums differ
TREND_FEW, TREND_MANY, MANY_STEPS, TREND_Z = 10.0, 1.25, 60, 5.0
#: two kinds of steps: ratio of their medians, share of the rarer kind, share of the variance that they explain
MODES_RATIO, MODES_SHARE, MODES_VARIANCE = 1.5, 0.2, 0.97


@expect(
    "time of a step per token", "steady after the warm-up", "the run's own steps", "suspect", "by medians and ranks"
)
def find_unsteadiness(evidence: Evidence) -> list[str]:
    """Is the run in a steady state after its warm-up? Three ways not to be, each decided by medians and ranks.

    Times are those of the slowest rank for each token that the step computed on, as batches of unequal size take
    unequally long. One step: a compilation or a pause that holds most of the measured time. Trend: the last third of
    the steps is slower (throttling) or faster (still warming up) than the middle third; of many steps a rank-sum test
    (Mann & Whitney 1947) has to agree. Two kinds of steps: a split of the logarithms into two classes (Otsu 1979)
    explains nearly all variance. On two cores that other work shares (load average 5 to 11), honest runs of 20 to 24
    steps had trends up to 5.2 × and splits that explain up to 0.97, hence the limits and `MANY_STEPS`.
    """
    steps = evidence.steps
    if not len(steps):
        return []
    took, tokens = steps.largest("step_s"), steps.sums("total_tokens")
    used = steps.whole() & (steps.largest("attempt_step") >= WARM_UP_STEPS) & (took > 0) & (tokens > 0)
    number, took, tokens = steps.numbers[used], took[used], tokens[used]
    if len(took) < FEWEST_STEPS:
        return []
    longest = int(np.argmax(took))
    if took[longest] > ONE_STEP_S and took[longest] > ONE_STEP_SHARE * took.sum():
        return [
            f"no steady state: step {number[longest]} took {took[longest]:.3g} s of {took.sum():.3g} s in all, "
            f"{took[longest] / np.median(took):,.0f}× the median step"
        ]
    rate = np.log(took / tokens)
    third = len(rate) // 3
    middle, last = rate[-2 * third : -third], rate[-third:]
    ratio = math.exp(np.median(last) - np.median(middle))
    change = max(ratio, 1 / ratio)
    if change > TREND_FEW or (len(rate) >= MANY_STEPS and change > TREND_MANY and _rank_sum_z(middle, last) > TREND_Z):
        what = "slower (throttled, or disturbed?)" if ratio > 1 else "faster (warm-up had not ended?)"
        return [f"no steady state: the last third of its steps is {change:.2f}× {what} than the third before"]
    if len(rate) < MANY_STEPS:
        return []
    low, high, explained = _split_in_two(rate)
    ratio = math.exp(np.median(high) - np.median(low))
    rarer = min(len(low), len(high)) / len(rate)
    if explained > MODES_VARIANCE and ratio > MODES_RATIO and rarer > MODES_SHARE:
        return [
            f"no steady state: two kinds of steps, {len(high)} of {len(rate)} take {ratio:.2f}× as long as the others"
        ]
    return []


def _rank_sum_z(a: np.ndarray, b: np.ndarray) -> float:
    """Absolute normal score of the rank sum of `b` among both (Mann & Whitney 1947), ties broken by place."""
    ranks = np.argsort(np.argsort(np.concatenate([a, b]))) + 1.0
    n, m = len(a), len(b)
    return abs(ranks[n:].sum() - m * (n + m + 1) / 2) / math.sqrt(n * m * (n + m + 1) / 12)


def _split_in_two(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """(lower, upper, share of the variance between them) of the split that explains most (Otsu 1979)."""
    x = np.sort(values)
    n = np.arange(1, len(x))
    total, sums = x.sum(), np.cumsum(x)[:-1]
    between = n * (len(x) - n) * (sums / n - (total - sums) / (len(x) - n)) ** 2 / len(x) ** 2
    at = int(np.argmax(between)) + 1
    return x[:at], x[at:], float(between[at - 1] / x.var()) if x.var() > 0 else 0.0
