"""Statistics over repeats of a run. The independent unit is the run; few runs get no false confidence.

Below six runs no distribution-free 95 % interval of a median exists (the range of five covers it in 93.75 % of cases),
so none is shown. What a whole campaign says of its noise is in `campaign.py`.

SciPy has no Holm correction and no exact interval of a median with its coverage. It has the sign-flip test
(`permutation_test`), with equal p-values: of 16 pairs in 2.2 s where this takes 0.12 s.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: wanted coverage of an interval; level of a test
COVERAGE, LEVEL = 0.95, 0.05
#: effects inside ± this share count as the same
MARGIN = 0.01
#: more pairs than this are tested with random sign flips in place of all of them
EXACT_PAIRS = 16


@dataclass(frozen=True)
class Summary:
    """A median with what is known about its spread. `kind` says in words what `low` and `high` are."""

    n: int
    median: float
    low: float
    high: float
    kind: str


@functools.cache
def order_statistic_rank(n: int) -> tuple[int, float] | None:
    """(k, coverage) of the narrowest interval [x_(k), x_(n+1-k)] that covers a median at least so often, or None.

    Coverage is 1 - 2 P(Bin(n, 1/2) < k), whatever the distribution (David & Nagaraja, Order Statistics, 7.1).

    >>> order_statistic_rank(5)
    >>> order_statistic_rank(6)
    (1, 0.96875)
    """
    best, below = None, 0
    for k in range(1, (n + 1) // 2 + 1):
        below += math.comb(n, k - 1)
        covered = 1 - 2 * below / 2**n
        if covered < COVERAGE:
            break
        best = (k, covered)
    return best


def summary(values: Sequence[float]) -> Summary:
    """Median and spread of one value a run; values that are not finite are an error of the caller.

    >>> summary([3.0, 1.0, 2.0])
    Summary(n=3, median=2.0, low=1.0, high=3.0, kind='range, not an interval')
    """
    x = np.sort(np.asarray(list(values), dtype=float))
    if not np.isfinite(x).all():
        raise ValueError("a value is not finite")
    n = len(x)
    if n == 0:
        return Summary(0, math.nan, math.nan, math.nan, "no runs")
    median = float(np.median(x))
    if n == 1:
        return Summary(1, median, median, median, "single run")
    found = order_statistic_rank(n)
    if found is None:
        return Summary(n, median, float(x[0]), float(x[-1]), "range, not an interval")
    k, covered = found
    percent = math.floor(1000 * covered) / 10  # no more is promised than holds
    return Summary(n, median, float(x[k - 1]), float(x[n - k]), f"order-statistic {percent:g} % interval")


def sign_flip_p(differences: Iterable[float]) -> tuple[float, float]:
    """(two-sided p, smallest p that so many pairs can give) of the paired sign-flip permutation test on the mean.

    Exact over all 2^n flips up to `EXACT_PAIRS` pairs, else over 100 000 random ones with a fixed seed.

    >>> sign_flip_p([1.0, 2.0, 3.0])
    (0.25, 0.25)
    """
    d = np.asarray(list(differences), dtype=float)
    n = len(d)
    if n == 0:
        return 1.0, 1.0
    observed = abs(d.sum())
    tolerance = 1e-12 * max(1.0, np.abs(d).sum())
    if n <= EXACT_PAIRS:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float((np.abs(signs @ d) >= observed - tolerance).mean()), 2 / 2**n
    draws = 100_000
    signs = 1 - 2 * np.random.default_rng(0).integers(0, 2, size=(draws, n), dtype=np.int8)
    return float((1 + (np.abs(signs @ d) >= observed - tolerance).sum()) / (1 + draws)), 1 / (1 + draws)


@dataclass(frozen=True)
class Comparison:
    """One cell against a baseline, paired by repeat: ratio of medians, and the spread of the ratios of the pairs."""

    ratio: float
    spread: Summary
    p: float
    smallest_p: float


def compare_pairs(values: Mapping[object, float], baseline: Mapping[object, float]) -> Comparison:
    """Compare two cells given as repeat → value (> 0, higher is faster); repeats that both have form the pairs.

    The p-values are those of the exact sign-flip test on log ratios, without a correction. Raises ValueError for values
    that are not above zero.
    """
    pairs = sorted(values.keys() & baseline.keys(), key=str)
    a = np.array([values[k] for k in pairs], dtype=float)
    b = np.array([baseline[k] for k in pairs], dtype=float)
    if len(pairs) and not (np.isfinite(a).all() and np.isfinite(b).all() and (a > 0).all() and (b > 0).all()):
        raise ValueError("ratios need values above zero")
    ratio = float(np.median(a) / np.median(b)) if len(pairs) else math.nan
    return Comparison(ratio, summary(a / b), *sign_flip_p(np.log(a / b)))


def verdict(spread: Summary, p: float, smallest_p: float) -> str:
    """The word for a spread of ratios and its p (after Holm's correction where there is a family).

    It is `faster` or `slower` where the exact test and the interval agree (`… by less than 1 %` where the median is
    within 1 ± `MARGIN`, the smallest effect that matters), `equivalent` where the whole interval lies within
    1 ± `MARGIN` (Schuirmann 1987: two one-sided tests, here at 2.5 % each), `too few runs` where no data could reach
    the level, else `no difference shown`.
    """
    if smallest_p >= LEVEL or order_statistic_rank(spread.n) is None:
        return "too few runs"
    if 1 - MARGIN <= spread.low and spread.high <= 1 + MARGIN:
        return "equivalent"
    if p < LEVEL and not spread.low <= 1 <= spread.high:
        word = "faster" if spread.low > 1 else "slower"
        return word if abs(spread.median - 1) > MARGIN else f"{word} by less than {100 * MARGIN:g} %"
    return "no difference shown"


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down correction of a family of p-values, in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(ps, kind="stable")
    adjusted, largest = [0.0] * len(ps), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(ps) - place) * ps[i]))
        adjusted[i] = largest
    return adjusted


def fewest_pairs(family: int = 1, level: float = LEVEL) -> int:
    """The fewest pairs that can reach a verdict: their smallest p, after Holm over such a family, is below the level.

    >>> fewest_pairs(), fewest_pairs(4)
    (6, 8)
    """
    n = 1
    while order_statistic_rank(n) is None or family * 2 / 2**n >= level:
        n += 1
    return n


def spread_of_pairs(ratios: Sequence[float]) -> float:
    """Standard deviation of the logarithms of ratios, of pairs of runs; nan where there are fewer than two."""
    x = np.log(np.asarray(list(ratios), dtype=float))
    return float(x.std(ddof=1)) if len(x) > 1 else math.nan


def listing(words: Iterable[object]) -> str:
    """Words as a sentence has them: `a, b and c`."""
    *most, last = [str(word) for word in words] or [""]
    return f"{', '.join(most)} and {last}" if most else last
