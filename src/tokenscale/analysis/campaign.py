"""Runs compared with each other: noise, drift, the order in which they started, and values that should be equal."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokenscale.analysis.clocks import CLOCK_S
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
    """What a value changed by from the first start to the last, as a share, and whether chance alone does that.

    `slope` is the change of its logarithm in a second.
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
        return Drift(sum(map(len, groups)), math.nan, math.nan, 1.0, 1.0)
    used, slope = np.concatenate(groups), float(np.median(slopes))
    p, smallest = _permuted(start, centred, groups)
    return Drift(len(used), slope, float(np.expm1(slope * np.ptp(start[used]))), p, smallest)


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


Row = dict[str, Any]

#: timings of a step that the host's clock gives
TIMED = ("step_s", "data_wait_s", "own_s", "forward_s", "backward_s", "optimizer_s")
#: fewest steps that can show a copy, and the share of them that does
FEWEST, COPIED = 4, 0.5
#: share of a log's timings that must differ from each other, so that equal ones mean something
DISTINCT = 0.9
#: timings kept of each log and field: within a run, and of all runs of an experiment
OF_LOG, OF_RUN = 4096, 256
#: of order digests (data/order/permutation.py)
MODULUS = 1 << 52
#: steps whose counts are compared: all of the first ones, then every `STRIDE`-th
FIRST_STEPS, STRIDE = 256, 64
#: approaches whose batches are equal: the online one and its offline twin
TWINS = {"pretokenized-padded": "padded", "token-list": "padding-free"}
#: standard errors by which a run's share of useful tokens may differ from its store's (of documents whose lengths
#: vary by as much as they are long)
STORE_ERRORS = 6.0


class Timings:
    """Distinct timings of logs, by field, to find logs that repeat another one's.

    Clocks count nanoseconds, so that two logs share hardly any value. Two that share half of the values of any one
    field are copies, whatever was shifted, renumbered or edited in the other fields. A field whose values repeat inside
    a log is too coarse to tell and left out. Of long logs a sample is kept, chosen by the values' bits.
    """

    def __init__(self, size: int, fields: tuple[str, ...] = TIMED):
        self._size, self._fields = size, fields
        self._kept: dict[str, dict[str, np.ndarray]] = {field: {} for field in fields}

    def add(self, name: str, rows: pa.Table) -> None:
        """Add the step rows of one log."""
        for field in self._fields:
            values = np.asarray(rows[field].to_numpy(), dtype=float)
            values = values[np.isfinite(values) & (values > 0)]
            distinct = np.unique(values)
            if len(distinct) < max(FEWEST, DISTINCT * len(values)):
                continue
            every = 1
            while len(distinct) > self._size * every:
                every *= 2
            bits = distinct.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            kept = distinct[(bits >> np.uint64(40)) % np.uint64(every) == 0]
            if len(kept) >= FEWEST:
                self._kept[field][name] = kept

    def find_copies(self) -> dict[tuple[str, str], tuple[str, int, int]]:
        """(log, other log that was added before) → (field, values that both have, values compared)."""
        found: dict[tuple[str, str], tuple[str, int, int]] = {}
        for field, logs in self._kept.items():
            names = list(logs)
            if len(names) < 2:
                continue
            values = np.concatenate([logs[name] for name in names])
            owner = np.repeat(np.arange(len(names)), [len(logs[name]) for name in names])
            order = np.lexsort((owner, values))
            values, owner = values[order], owner[order]
            same = np.flatnonzero(np.diff(values) == 0)
            for (one, other), n in Counter(zip(owner[same + 1].tolist(), owner[same].tolist(), strict=True)).items():
                compared = min(len(logs[names[one]]), len(logs[names[other]]))
                if n >= COPIED * compared:
                    found.setdefault((names[one], names[other]), (field, n, compared))
        return found


def find_copied_logs(logs: Mapping[str, pa.Table]) -> list[str]:
    """Return which logs of one run (name → step rows) repeat the timings of another one, in words."""
    if len(logs) < 2:
        return []
    timings = Timings(OF_LOG)
    for name, rows in logs.items():
        timings.add(name, rows)
    return [
        f"{name} is a copy of {other}: {n} of {compared} values of {field} are equal"
        for (name, other), (field, n, compared) in sorted(timings.find_copies().items())
    ]


class Siblings:
    """What is kept of each run of an experiment while its tables are written, to compare the runs at the end."""

    def __init__(self) -> None:
        self._timings = Timings(OF_RUN, ("step_s", "own_s"))
        self._counts: dict[str, np.ndarray] = {}
        self._totals: dict[str, tuple[int, int, int]] = {}
        self._clocks: dict[str, list[tuple[float, str, float]]] = defaultdict(list)

    def add(self, run_id: str, steps: pa.Table, events: pa.Table) -> None:
        """Add the merged step rows and the events of one run."""
        if len(steps):
            ranks = steps["rank"].to_numpy()
            for rank in np.unique(ranks).tolist():
                self._timings.add(f"{run_id} rank {rank}", steps.filter(pa.array(ranks == rank)))
            self._counts[run_id] = _count_tokens(steps)
            useful, total, rows = (
                pc.sum(steps[name]).as_py() or 0 for name in ("useful_tokens", "total_tokens", "rows")
            )
            self._totals[run_id] = useful, total, rows
        starts = events.filter(pc.equal(events["event"], "run_start"))
        for row in starts.select(["boot", "t_unix_s", "t_mono_s"]).to_pylist():
            if row["boot"] and row["t_unix_s"] is not None and row["t_mono_s"] is not None:
                self._clocks[row["boot"]].append((row["t_mono_s"], run_id, row["t_unix_s"] - row["t_mono_s"]))

    def judge(self, runs: list[Row], stores: Iterable[Row]) -> list[Row]:
        """Return the rows of the table `runs` with validity and reasons after comparison with each other."""
        counted = {row["run_id"]: row for row in runs if row["validity"] in ("valid", "suspect")}
        invalid: dict[str, dict[str, None]] = defaultdict(dict)
        suspect: dict[str, dict[str, None]] = defaultdict(dict)
        for (one, other), (field, n, compared) in sorted(self._timings.find_copies().items()):
            a, b = one.partition(" ")[0], other.partition(" ")[0]
            if a != b:  # of one run's own logs see `find_copied_logs`
                for run_id, of in ((a, b), (b, a)):
                    invalid[run_id][f"a copy of run {of}: {n} of {compared} values of {field} are equal"] = None
        for run_id, text in self._find_other_counts(counted):
            invalid[run_id][text] = None
        for run_id, text in self._find_other_shares(counted, stores):
            invalid[run_id][text] = None
        for run_id, text in self._find_clocks_ahead():
            suspect[run_id][text] = None
        return [_add_reasons(row, [*invalid[row["run_id"]]], [*suspect[row["run_id"]]]) for row in runs]

    def _find_other_counts(self, runs: Mapping[str, Row]) -> list[tuple[str, str]]:
        """Equal order digests are equal samples, which have equal numbers of useful tokens."""
        groups: dict[tuple, list[str]] = defaultdict(list)
        for run_id, row in runs.items():
            if run_id in self._counts and not row["external"]:
                family = TWINS.get(row["approach"], row["approach"])
                storage = "" if row["approach"] in TWINS else row["storage"]
                groups[family, row["factors"], storage, row["science"], row["repeat"]].append(run_id)
        found = []
        for ids in groups.values():
            texts: dict[str, str] = {}
            by_batch: dict[tuple[float, float], dict[str, float]] = defaultdict(dict)
            for run_id in ids:
                for step, digest, useful in self._counts[run_id].tolist():
                    by_batch[step, digest][run_id] = useful
            for (step, _), of in by_batch.items():
                if len(set(of.values())) < 2:
                    continue
                (most, n), *others = Counter(of.values()).most_common()
                alone = not others or n > others[0][1]
                for run_id, useful in of.items():
                    if alone and useful == most:
                        continue
                    other = next(i for i, count in of.items() if count != useful)
                    texts.setdefault(
                        run_id,
                        f"{useful:.0f} useful tokens at step {step:.0f}, where {other} has {of[other]:.0f} in the same "
                        "samples (equal order digest)",
                    )
            found += list(texts.items())
        return found

    def _find_other_shares(self, runs: Mapping[str, Row], stores: Iterable[Row]) -> list[tuple[str, str]]:
        """The share of useful tokens of a run is its store's, as far as so many rows can tell. Targets of pairs are
        a part of what a store counts, so that their share is at most the store's."""
        shares = {
            s["manifest_sha256"]: s["useful_tokens"] / s["total_tokens"]
            for s in stores
            if s.get("manifest_sha256") and s.get("useful_tokens") and s.get("total_tokens")
        }
        found = []
        for run_id, row in runs.items():
            share, counts = shares.get(row["store_sha256"]), self._totals.get(run_id)
            if share is None or counts is None or row["mixture"] or row["objective"] != "causal":
                continue
            useful, total, rows = counts
            excess = useful / total / share - 1 if total else 0.0
            if rows and (excess if row["labels"] == "target" else abs(excess)) > STORE_ERRORS / rows**0.5:
                text = f"{100 * useful / total:.1f} % of its tokens are useful, {100 * share:.1f} % of its store's"
                found.append((run_id, text))
        return found

    def _find_clocks_ahead(self) -> list[tuple[str, str]]:
        """The wall clock of one boot goes ahead of the monotonic one (while the machine sleeps), never back."""
        found = []
        for starts in self._clocks.values():
            least = float("inf")
            for _, run_id, offset in sorted(starts, reverse=True):
                if offset > least + CLOCK_S:
                    found.append(
                        (run_id, f"its wall clock is {offset - least:.4g} s ahead of later runs' on this machine")
                    )
                least = min(least, offset)
        return found


def _count_tokens(steps: pa.Table) -> np.ndarray:
    """(step, order digest, useful tokens) of complete steps, summed over ranks, as rows; only those to be compared."""
    step, world = steps["step"].to_numpy(), steps["world_size"].to_numpy()
    kept = (step < FIRST_STEPS) | (step % STRIDE == 0)
    numbers, place = np.unique(step[kept], return_inverse=True)
    digest = np.zeros(len(numbers), dtype=np.int64)
    useful = np.zeros(len(numbers))
    known = np.ones(len(numbers), dtype=bool)
    ranks = np.bincount(place, minlength=len(numbers))
    for name, into in (("order_digest", digest), ("useful_tokens", useful)):
        column = steps[name].filter(pa.array(kept))
        known[place[np.asarray(column.is_null())]] = False
        np.add.at(into, place, np.asarray(column.fill_null(0).to_numpy(), dtype=into.dtype))
        if name == "order_digest":
            into %= MODULUS
    most = np.zeros(len(numbers))
    np.fmax.at(most, place, world[kept])
    whole = known & (ranks == most)
    return np.column_stack([numbers, digest, useful])[whole]


def _add_reasons(row: Row, invalid: list[str], suspect: list[str]) -> Row:
    if not (invalid or suspect) or row["validity"] == "missing":
        return row
    validity = "invalid" if invalid else "suspect" if row["validity"] == "valid" else row["validity"]
    return row | {"validity": validity, "reasons": "; ".join(filter(None, [row["reasons"], *invalid, *suspect]))}
