"""Two cells whose runs are not paired, as those of two reports: exact test and interval.

SciPy has the p-value of a rank-sum test, but no public distribution of its statistic, which the interval needs.
It has the permutation test, with equal p-values: of 9 runs against 9 in 2.4 s where this takes 0.06 s.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenscale.analysis.statistics import COVERAGE, LEVEL, MARGIN, Summary

#: up to so many ways to part the runs all are tried, else so many random ones
EXACT_WAYS, DRAWS = 200_000, 100_000


@dataclass(frozen=True)
class Unpaired:
    """One cell against another. `ratio` is the ratio of medians; `low`, `high` and `kind` belong to `shift`, the median
    of the ratios of every run with every other (Hodges & Lehmann 1963, on logarithms)."""

    n: tuple[int, int]
    ratio: float
    shift: float
    low: float
    high: float
    kind: str
    p: float
    smallest_p: float


def compare(values: Sequence[float], baseline: Sequence[float]) -> Unpaired:
    """Compare two cells by the values of their runs (> 0). Raises ValueError for others, and for an empty cell.

    >>> found = compare([2.0, 2.2, 2.1, 2.3], [1.0, 1.1, 1.2, 1.05])
    >>> round(found.ratio, 2), round(found.p, 3), found.kind
    (2.0, 0.029, 'rank-sum 97.1 % interval')
    """
    a, b = (np.asarray(list(x), dtype=float) for x in (values, baseline))
    for x in (a, b):
        if not len(x) or not np.isfinite(x).all() or not (x > 0).all():
            raise ValueError("ratios need values above zero")
    spread = ratios(a, b)
    p, smallest = permutation_p(np.log(a), np.log(b))
    ratio = float(np.median(a) / np.median(b))
    return Unpaired((len(a), len(b)), ratio, spread.median, spread.low, spread.high, spread.kind, p, smallest)


def ratios(a: np.ndarray, b: np.ndarray) -> Summary:
    """Median of all ratios a / b with the interval that inverts the rank-sum test, or their range if runs are few.

    The interval [r_(k), r_(nm+1-k)] covers the ratio at least so often where one cell is the other times a constant,
    with k from the exact distribution of the Mann-Whitney statistic (Lehmann 1975, Nonparametrics, 2.6).
    """
    every = np.sort((a[:, None] / b[None, :]).ravel())
    found = rank(len(a), len(b))
    median = float(np.median(every))
    if found is None:
        kind = "single runs" if len(every) == 1 else "range of all ratios, not an interval"
        return Summary(len(every), median, float(every[0]), float(every[-1]), kind)
    k, covered = found
    kind = f"rank-sum {math.floor(1000 * covered) / 10:g} % interval"
    return Summary(len(every), median, float(every[k - 1]), float(every[-k]), kind)


@functools.cache
def rank(n: int, m: int, coverage: float = COVERAGE) -> tuple[int, float] | None:
    """(k, coverage) of the narrowest interval [r_(k), r_(nm+1-k)] of the n × m ratios, None where none is wide enough.

    Coverage is 1 - 2 P(U < k), U the Mann-Whitney statistic.

    >>> rank(3, 3)
    >>> rank(4, 4)
    (1, 0.9714285714285714)
    """
    counts = _mann_whitney(n, m)
    total, below, best = sum(counts), 0, None
    for k, count in enumerate(counts[: n * m // 2], 1):
        below += count
        covered = 1 - 2 * below / total
        if covered < coverage:
            break
        best = (k, covered)
    return best


def _mann_whitney(n: int, m: int) -> list[int]:
    """Ways to reach each value of U: coefficients of the Gaussian binomial (Mann & Whitney 1947)."""
    counts = [1] + [0] * (n * m)
    for j in range(1, n + 1):
        for u in range(n * m, m + j - 1, -1):
            counts[u] -= counts[u - m - j]
        for u in range(j, n * m + 1):
            counts[u] += counts[u - j]
    return counts


def permutation_p(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """(two-sided p, smallest p that so many runs can give) of the permutation test on the difference of means.

    Exact over all ways to part the runs up to `EXACT_WAYS`, else over random ones with a fixed seed.
    """
    n, pooled = len(a), np.concatenate([a, b])
    ways = math.comb(len(pooled), n)
    centred = pooled - pooled.mean()
    observed = abs(centred[:n].sum())
    tolerance = 1e-12 * max(1.0, np.abs(centred).sum())
    if ways <= EXACT_WAYS:
        chosen = np.fromiter(itertools.chain.from_iterable(itertools.combinations(range(len(pooled)), n)), int)
        sums = np.abs(centred[chosen.reshape(ways, n)].sum(axis=1))
        return float((sums >= observed - tolerance).mean()), (2 if n == len(b) else 1) / ways
    random = np.random.default_rng(0)
    sums = np.array([abs(centred[random.permutation(len(pooled))[:n]].sum()) for _ in range(DRAWS)])
    return float((1 + (sums >= observed - tolerance).sum()) / (1 + DRAWS)), 1 / (1 + DRAWS)


def verdict(found: Unpaired, p: float, smallest_p: float, *, level: float = LEVEL, margin: float = MARGIN) -> str:
    """`higher`, `lower`, `equivalent` (the whole interval within 1 ± `margin`), `no difference shown`, `too few runs`.

    `p` and `smallest_p` are those after Holm's correction, where there is a family.
    """
    if smallest_p >= level or rank(*found.n) is None:
        return "too few runs"
    if 1 - margin <= found.low and found.high <= 1 + margin:
        return "equivalent"
    if p < level and found.low > 1:
        return "higher"
    if p < level and found.high < 1:
        return "lower"
    return "no difference shown"
