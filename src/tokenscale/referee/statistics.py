"""Statistics over repeats of a run. The independent unit is the run; few runs get no false
confidence.

Below six pairs no data can reach p < 0.05 in a sign-flip test, so that no interval is shown.

SciPy has no Holm correction and no interval that inverts a sign-flip test. It has the test itself
(`permutation_test`), with equal p-values: of 16 pairs in 2.2 s where this takes 0.12 s.
"""

import bisect
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

#: level of a test; an interval covers the rest
LEVEL = 0.05
#: ratios of rates inside 1 ± this share count as the same
MARGIN = 0.01
#: share of cases in which a difference is to be shown
POWER = 0.8
#: more pairs than this are tested with random sign flips in place of all of them
EXACT_PAIRS = 16
#: random sign flips
FLIPS = 100_000
#: of a drift: up to so many runs every order is tried, else so many random ones
EXACT_RUNS = 7
DRAWS = 10_000
#: numbers that are drawn at a time: they take 8 MB
NUMBERS = 1 << 20
#: with fewer pairs of runs the other way round than this share, the order was mostly kept
MOSTLY = 0.1


@dataclass(frozen=True)
class Summary:
    """A median with what is known about its spread. `kind` says in words what `low` and `high`
    are.
    """

    n: int
    median: float
    low: float
    high: float
    kind: str


def summary(values: Sequence[float]) -> Summary:
    """Median and range of one value a run; values that are not finite are an error of the caller.

    From six runs on, the range covers the median of any distribution in at least 96.8 % of cases:
    1 - 2 / 2^n (David & Nagaraja, Order Statistics, 7.1).

    >>> summary([3.0, 1.0, 2.0])
    Summary(n=3, median=2.0, low=1.0, high=3.0, kind='range')
    """
    x = np.asarray(list(values), dtype=float)
    if not np.isfinite(x).all():
        raise ValueError("a value is not finite")
    n = len(x)
    if n == 0:
        return Summary(
            n=0,
            median=math.nan,
            low=math.nan,
            high=math.nan,
            kind="no runs",
        )
    return Summary(
        n=n,
        median=float(np.median(x)),
        low=float(x.min()),
        high=float(x.max()),
        kind="single run" if n == 1 else "range",
    )


def measure_spread(values: np.ndarray) -> float:
    """Return the standard deviation of Gaussian values with the same mean absolute deviation from
    the median.
    """
    return math.sqrt(math.pi / 2) * float(np.abs(values - np.median(values)).mean())


def summarize_pairs(values: Sequence[float], ratios: bool) -> Summary:
    """Median of one value a pair, and the 95 % interval that inverts the sign-flip test: the centres
    that `sign_flip_p` does not reject. Fewer than `fewest_pairs` have their range.

    The ends are order statistics of the means of all subsets of the values: between any two
    neighbouring means the centre lies equally often (Hartigan 1969, "Using sample values as typical
    values"). This holds for the subsets of random flips as well. Of ratios, the logarithms are
    tested. The median of very skewed values may lie outside: the interval
    then reaches to it.

    >>> summarize_pairs([1.0, 1.1, 1.2, 1.3, 1.4], ratios=True).kind
    'range'
    >>> found = summarize_pairs([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], ratios=True)
    >>> round(found.low, 3), round(found.high, 3), found.kind
    (1.095, 1.5, '95 % interval')
    """
    spread = summary(values)
    if spread.n < fewest_pairs():
        return spread
    x = np.asarray(list(values), dtype=float)
    low, high = _invert_sign_flips(np.log(x) if ratios else x)
    if ratios:
        low = math.exp(low)
        high = math.exp(high)
    return Summary(
        n=spread.n,
        median=spread.median,
        low=float(np.clip(low, spread.low, spread.median)),
        high=float(np.clip(high, spread.median, spread.high)),
        kind=f"{100 * (1 - LEVEL):g} % interval",
    )


def sign_flip_p(differences: Iterable[float]) -> tuple[float, float]:
    """(two-sided p, smallest p that so many pairs can give) of the paired sign-flip permutation
    test on the mean.

    Exact over all 2^n flips up to `EXACT_PAIRS` pairs, else over `FLIPS` random ones with a fixed
    seed.

    >>> sign_flip_p([1.0, 2.0, 3.0])
    (0.25, 0.25)
    >>> sign_flip_p([])
    (1.0, 1.0)
    """
    d = np.asarray(list(differences), dtype=float)
    n = len(d)
    if n == 0:
        return 1.0, 1.0
    observed = abs(d.sum())
    tolerance = 1e-12 * max(1.0, np.abs(d).sum())
    extreme = sum(
        int((np.abs(signs @ d) >= observed - tolerance).sum()) for signs in _sign_flips(n)
    )
    if n <= EXACT_PAIRS:
        return extreme / 2**n, 2 / 2**n
    return (1 + extreme) / (1 + FLIPS), 1 / (1 + FLIPS)


def _sign_flips(n: int) -> Iterator[np.ndarray]:
    """Yield all flips of n signs, or `FLIPS` random ones, as rows of 1 and -1."""
    if n <= EXACT_PAIRS:
        yield 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return
    random = np.random.default_rng(0)
    for size in _chunks(FLIPS, columns=n):
        yield 1 - 2 * random.integers(0, 2, size=(size, n), dtype=np.int8)


def _invert_sign_flips(x: np.ndarray) -> tuple[float, float]:
    """Return the lowest and the highest centre of x at which `sign_flip_p` is not below `LEVEL`.

    Below the mean of x, an assignment of signs is as extreme as the data if the mean of its
    positive values, or the mean of its negative values, is at most the centre. An assignment
    without positive or without negative values is extreme at every centre.
    """
    found = []
    for signs in _sign_flips(len(x)):
        for chosen in (signs > 0, signs < 0):
            sizes = chosen.sum(axis=1)
            found.append((chosen[sizes > 0] @ x) / sizes[sizes > 0])
    means = np.sort(np.concatenate(found))
    if len(x) <= EXACT_PAIRS:
        flips = 2 ** len(x)
        extreme = math.ceil(LEVEL * flips)
    else:
        flips = FLIPS
        extreme = math.ceil(LEVEL * (1 + flips)) - 1  # the data is counted beside random flips
    empty = 2 * flips - len(means)
    place = extreme - empty
    return float(means[place - 1]), float(means[-place])


def _chunks(rows: int, columns: int) -> Iterator[int]:
    """Split rows so that a chunk has about `NUMBERS` numbers. All chunks but the last have a
    multiple of four rows: a random generator then yields the numbers that it yields for all rows
    at once, as it makes four of eight bits from one word.

    >>> list(_chunks(10, columns=NUMBERS))
    [4, 4, 2]
    """
    size = max(4, NUMBERS // columns // 4 * 4)
    for begin in range(0, rows, size):
        yield min(size, rows - begin)


@dataclass(frozen=True)
class Comparison:
    """One cell against a baseline, paired by repeat: ratio of medians, and the spread of the ratios
    of the pairs. `effect` is the spread of what is tested: those ratios, or differences.
    """

    ratio: float
    spread: Summary
    effect: Summary
    p: float
    smallest_p: float


def compare_pairs(
    values: Mapping[object, float], baseline: Mapping[object, float], ratios: bool = True
) -> Comparison:
    """Compare two cells given as repeat → value (> 0, higher is faster); repeats that both have
    form the pairs.

    The p-values are those of the exact sign-flip test on log ratios, or on differences, without a
    correction. Raises ValueError for values that are not above zero.
    """
    pairs = sorted(values.keys() & baseline.keys(), key=str)
    a = np.array([values[k] for k in pairs], dtype=float)
    b = np.array([baseline[k] for k in pairs], dtype=float)
    if pairs and not (
        np.isfinite(a).all() and np.isfinite(b).all() and (a > 0).all() and (b > 0).all()
    ):
        raise ValueError("ratios need values above zero")
    ratio = float(np.median(a) / np.median(b)) if pairs else math.nan
    spread = summarize_pairs(a / b, ratios=True)
    p, smallest_p = sign_flip_p(np.log(a / b) if ratios else a - b)
    return Comparison(
        ratio=ratio,
        spread=spread,
        effect=spread if ratios else summarize_pairs(a - b, ratios=False),
        p=p,
        smallest_p=smallest_p,
    )


def verdict(
    effect: Summary,
    p: float,
    smallest_p: float,
    equality: float,
    margin: float | None,
) -> str:
    """The word for the spread of an effect, which is `equality` between equal cells, and its p
    (after Holm's correction where there is a family).

    It is `higher` or `lower` where the exact test rejects equality (`… by less than the margin`
    where the median is within `equality` ± `margin`, the smallest effect that matters),
    `equivalent` where the whole interval is (Schuirmann 1987: two one-sided tests, here at 2.5 %
    each), `too few runs` where no data could reach the level, else `no difference shown`. Without
    a margin nothing is equivalent.
    """
    if smallest_p >= LEVEL:
        return "too few runs"
    ends = (effect.low, effect.median, effect.high)
    low, median, high = (
        margin is not None and _is_within(x, equality, margin=margin) for x in ends
    )
    if low and high:
        return "equivalent"
    small = " by less than the margin" if median else ""
    if p < LEVEL and effect.low > equality:
        return f"higher{small}"
    if p < LEVEL and effect.high < equality:
        return f"lower{small}"
    return "no difference shown"


def _is_within(x: float, equality: float, margin: float) -> bool:
    return equality - margin <= x <= equality + margin


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down correction of a family of p-values, in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(ps, kind="stable")
    adjusted = [0.0] * len(ps)
    largest = 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(ps) - place) * ps[i]))
        adjusted[i] = largest
    return adjusted


def fewest_pairs(family: int = 1, level: float = LEVEL) -> int:
    """The fewest pairs that can reach a verdict: their smallest p, after Holm over such a family,
    is below the level.

    >>> fewest_pairs(), fewest_pairs(4)
    (6, 8)
    """
    n = 1
    while family * 2 / 2**n >= level:
        n += 1
    return n


def least_shown(effects: Sequence[float], pairs: int) -> float:
    """Return the difference that the fewest pairs of a verdict show in `POWER` of all cases, if theirs
    scatter as these effects do, as Gaussian ones: all of them must have one sign.

    >>> round(least_shown([-1.0, 0.0, 1.0], pairs=6), 2)
    1.79
    """
    return NormalDist().inv_cdf(POWER ** (1 / pairs)) * float(np.std(effects, ddof=1))


def noise_floor(values: Sequence[float]) -> Summary:
    """Differences of neighbouring runs of equal settings, in the order of their starts, as shares
    of the slower one.

    Each run is in one pair. Smaller differences between cells are noise. Raises ValueError for
    values ≤ 0.

    >>> found = noise_floor([100.0, 101.0, 100.0, 102.0])
    >>> found.n, round(found.median, 6), round(found.high, 6)
    (2, 0.015, 0.02)
    """
    x = _positive(values)
    return summary([max(a / b, b / a) - 1 for a, b in zip(x[::2], x[1::2], strict=False)])


@dataclass(frozen=True)
class Drift:
    """Change of a value from first to last start, as a share; `slope` is that of its logarithm in a
    second.
    """

    n: int
    slope: float
    share: float
    p: float
    smallest_p: float

    @property
    def verdict(self) -> str:
        """`drift`, `no drift shown` or `too few runs`."""
        if self.smallest_p >= LEVEL:
            return "too few runs"
        return "drift" if self.p < LEVEL else "no drift shown"


def drift(
    started_s: Sequence[float], values: Sequence[float], cells: Sequence[Hashable] | None = None
) -> Drift:
    """The trend of values over the time they were measured at; those of a cell are divided by the
    cell's median first.

    The slope of the logarithms is Theil and Sen's (Sen 1968), the median of the slopes of pairs
    within a cell; the test is a permutation test on the covariance with the start, orders being
    exchanged within cells: all of them for one cell of up to `EXACT_RUNS` runs, else `DRAWS` random
    ones with a fixed seed. Runs alone in their cell are left out; cells whose runs all started at
    once show nothing. Raises ValueError for values ≤ 0 and starts that are not finite.
    """
    start = np.asarray(started_s, dtype=float)
    log = np.log(_positive(values))
    members: dict[Hashable, list[int]] = {}
    for i, cell in enumerate([0] * len(log) if cells is None else cells):
        members.setdefault(cell, []).append(i)
    if not np.isfinite(start).all():
        raise ValueError("a start is not finite")
    groups = [np.array(m) for m in members.values() if len(m) > 1]
    slopes = np.concatenate([np.zeros(0), *(_slopes(start[g], log=log[g]) for g in groups)])
    if not len(slopes):
        return Drift(
            n=sum(map(len, groups)),
            slope=math.nan,
            share=math.nan,
            p=1.0,
            smallest_p=1.0,
        )
    slope = float(np.median(slopes))
    times = [start[g] - start[g].mean() for g in groups]
    parts = [log[g] - np.median(log[g]) for g in groups]
    observed = abs(sum(t @ v for t, v in zip(times, parts, strict=True)))
    tolerance = 1e-12 * max(1.0, observed)
    smallest = 2 / math.prod(math.factorial(len(g)) for g in groups)
    if len(groups) == 1 and len(parts[0]) <= EXACT_RUNS:
        sums = np.array(list(itertools.permutations(parts[0]))) @ times[0]
        p = float((np.abs(sums) >= observed - tolerance).mean())
    else:
        random = np.random.default_rng(0)
        sums = np.zeros(DRAWS)
        for t, v in zip(times, parts, strict=True):
            chunks = _chunks(DRAWS, columns=len(v))
            sums += np.concatenate(
                [random.permuted(np.tile(v, (size, 1)), axis=1) @ t for size in chunks]
            )
        p = (1 + int((np.abs(sums) >= observed - tolerance).sum())) / (1 + DRAWS)
        smallest = max(smallest, 1 / (1 + DRAWS))
    used = start[np.concatenate(groups)]
    with np.errstate(over="ignore"):
        share = float(np.expm1(slope * np.ptp(used)))
    return Drift(
        n=len(used),
        slope=slope,
        share=share,
        p=p,
        smallest_p=smallest,
    )


def _slopes(start: np.ndarray, log: np.ndarray) -> np.ndarray:
    """Slopes of all pairs of points that have different starts."""
    found = [np.zeros(0)]
    for i in range(len(start) - 1):
        apart = start[i + 1 :] - start[i]
        change = log[i + 1 :] - log[i]
        found.append(change[apart != 0] / apart[apart != 0])
    return np.concatenate(found)


@dataclass(frozen=True)
class OrderKept:
    """How far runs were started in the order of their positions."""

    pairs: int
    inversions: int

    @property
    def verdict(self) -> str:
        """In words."""
        if self.pairs == 0:
            return "order not known"
        if self.inversions == 0:
            return "in the planned order"
        return (
            f"{'mostly ' if self.inversions < MOSTLY * self.pairs else 'not '}in the planned order"
        )


def order_kept(positions: Sequence[float], started_s: Sequence[float]) -> OrderKept:
    """Compare the planned places of runs with when they were started; runs without one of both are
    left out.

    Blocks in random order keep what drifts with time apart from the factors only where they were
    run in that order. Inversions are pairs of runs of which the later one began first (Kendall
    1938).

    >>> order_kept([0, 1, 2], [10.0, 30.0, 20.0])
    OrderKept(pairs=3, inversions=1)
    """
    known = sorted(
        (p, t)
        for p, t in zip(positions, started_s, strict=True)
        if math.isfinite(p) and math.isfinite(t)
    )
    earlier: list[float] = []
    inversions = 0
    for _, started in known:
        place = bisect.bisect_right(earlier, started)
        inversions += len(earlier) - place
        earlier.insert(place, started)
    return OrderKept(math.comb(len(known), 2), inversions)


def _positive(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(list(values), dtype=float)
    if not (np.isfinite(x).all() and (x > 0).all()):
        raise ValueError("values above zero are wanted")
    return x
