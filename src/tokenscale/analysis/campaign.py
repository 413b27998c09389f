"""What a campaign of runs says of its own noise: A/A pairs, drift, and whether the planned order was kept."""

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from tokenscale.analysis.statistics import LEVEL, Summary, spread_of_pairs, summary

#: up to so many runs every order is tried, else so many random ones
EXACT_RUNS, DRAWS = 7, 10_000
#: with fewer pairs of runs the other way round than this share, the order was mostly kept
MOSTLY = 0.1


@dataclass(frozen=True)
class Noise:
    """What two runs of equal settings differ by: shares of the slower one's value, and the spread of log ratios."""

    pairs: int
    difference: Summary
    spread: float


def noise_floor(values: Sequence[float]) -> Noise:
    """Of runs with equal settings, in the order of their starts: neighbours are the A/A pairs, each run in one.

    A difference between cells below this is one that nothing but noise makes. Raises ValueError for values ≤ 0.

    >>> found = noise_floor([100.0, 101.0, 100.0, 102.0])
    >>> found.pairs, round(found.difference.median, 6), round(found.difference.high, 6)
    (2, 0.015, 0.02)
    """
    x = _positive(values)
    pairs = [(x[i], x[i + 1]) for i in range(0, len(x) - 1, 2)]
    ratios = [a / b for a, b in pairs]
    return Noise(len(pairs), summary([max(r, 1 / r) - 1 for r in ratios]), spread_of_pairs(ratios))


@dataclass(frozen=True)
class Drift:
    """What a value changed by from the first start to the last, as a share, and whether chance alone does that."""

    n: int
    share: float
    p: float
    smallest_p: float

    @property
    def verdict(self) -> str:
        """`drift`, `no drift shown` or `too few runs`."""
        if self.smallest_p >= LEVEL:
            return "too few runs"
        return "drift" if self.p < LEVEL else "no drift shown"


def drift(started_s: Sequence[float], values: Sequence[float], cells: Sequence[Hashable] | None = None) -> Drift:
    """The trend of values over the time they were measured at; those of a cell are divided by the cell's median first.

    The slope of the logarithms is Theil and Sen's (Sen 1968), the median of the slopes of pairs within a cell; the test
    is a permutation test on the covariance with the start, orders being exchanged within cells: all of them for one
    cell of up to `EXACT_RUNS` runs, else `DRAWS` random ones with a fixed seed. Runs of a cell of their own say nothing
    and are left out; runs that all started at the same time as the others of their cell show nothing. Raises ValueError
    for values ≤ 0 and for starts that are not finite.
    """
    start, log = np.asarray(started_s, dtype=float), np.log(_positive(values))
    members: dict[Hashable, list[int]] = {}
    for i, cell in enumerate([0] * len(log) if cells is None else cells):
        members.setdefault(cell, []).append(i)
    if not np.isfinite(start).all():
        raise ValueError("a start is not finite")
    groups = [np.array(m) for m in members.values() if len(m) > 1]
    centred = np.zeros_like(log)
    slopes = []
    for group in groups:
        centred[group] = log[group] - np.median(log[group])
        for i, j in itertools.combinations(group, 2):
            if start[i] != start[j]:
                slopes.append((log[j] - log[i]) / (start[j] - start[i]))
    if not slopes:
        return Drift(sum(map(len, groups)), math.nan, 1.0, 1.0)
    used = np.concatenate(groups)
    campaign = np.ptp(start[used])
    p, smallest = _permuted(start, centred, groups)
    return Drift(len(used), float(np.expm1(np.median(slopes) * campaign)), p, smallest)


def _permuted(start: np.ndarray, centred: np.ndarray, groups: list[np.ndarray]) -> tuple[float, float]:
    """(two-sided p, smallest p that so many runs at even distances can give) of the covariance within groups."""
    times = [start[g] - start[g].mean() for g in groups]
    parts = [centred[g] for g in groups]
    observed = abs(sum(t @ v for t, v in zip(times, parts, strict=True)))
    tolerance = 1e-12 * max(1.0, observed)
    orders = math.prod(math.factorial(len(g)) for g in groups)
    if len(groups) == 1 and len(parts[0]) <= EXACT_RUNS:
        every = np.array(list(itertools.permutations(parts[0])))
        return float((np.abs(every @ times[0]) >= observed - tolerance).mean()), 2 / orders
    random = np.random.default_rng(0)
    sums = np.zeros(DRAWS)
    for t, v in zip(times, parts, strict=True):
        sums += random.permuted(np.tile(v, (DRAWS, 1)), axis=1) @ t
    as_large = int((np.abs(sums) >= observed - tolerance).sum())
    return (1 + as_large) / (1 + DRAWS), max(2 / orders, 1 / (1 + DRAWS))


@dataclass(frozen=True)
class OrderKept:
    """How far runs were started in the order of their positions."""

    n: int
    pairs: int
    inversions: int

    @property
    def verdict(self) -> str:
        """In words."""
        if self.pairs == 0:
            return "order not known"
        if self.inversions == 0:
            return "in the planned order"
        return f"{'mostly ' if self.inversions < MOSTLY * self.pairs else 'not '}in the planned order"


def order_kept(positions: Sequence[float], started_s: Sequence[float]) -> OrderKept:
    """Compare the planned places of runs with when they were started; runs without one of both are left out.

    Blocks in random order keep what drifts with time apart from the factors only where they were run in that order.
    Inversions are pairs of runs of which the later one began first (Kendall 1938).

    >>> order_kept([0, 1, 2], [10.0, 30.0, 20.0])
    OrderKept(n=3, pairs=3, inversions=1)
    """
    known = [(p, t) for p, t in zip(positions, started_s, strict=True) if math.isfinite(p) and math.isfinite(t)]
    started = [t for _, t in sorted(known)]
    inversions = sum(a > b for a, b in itertools.combinations(started, 2))
    return OrderKept(len(known), math.comb(len(known), 2), inversions)


def _positive(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(list(values), dtype=float)
    if not (np.isfinite(x).all() and (x > 0).all()):
        raise ValueError("values above zero are wanted")
    return x
