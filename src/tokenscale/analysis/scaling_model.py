"""How a training's step time grows with its ranks: a model with few constants, fitted to small world sizes.

    step(N) = compute share(N) / (1 - bubble(N)) + exposed exchange(N) + straggler + waiting for data

Each term is a known law of N times a constant that is at least zero:

| term | law | what the constant is |
|---|---|---|
| compute | the largest share of rows of a rank, over 1 - bubble | seconds on one rank |
| inside | bytes x 2 (g - 1) / g, g ranks of a node | exposed seconds a byte |
| between | bytes / g x 2 (n - 1) / n, n nodes | exposed seconds a byte |
| latency | messages x hops | exposed seconds a hop |
| straggler | expected maximum of N normal values x share of rows | standard deviation of a rank's step, seconds |
| exchange | of a sweep's alpha and beta: the whole exchange but its tail | the part that backward does not hide |

Step times alone cannot tell a slow link from an exchange that backward hides badly: only the product is seen, so that
`inside` and `between` are *exposed* seconds. A sweep (`benchmark collectives`) measures the link; then `exchange` is
the part that is not hidden, and the tail (what is exchanged after backward has ended) is known and not fitted.
Two world sizes identify at most two parameters: terms are taken in the order above as long as the fitted sizes can tell
them apart. The other sets of terms that fit as well are not forgotten, they make the band.

What is hidden is a constant part of the exchange, not what fits beside backward: where backward shrinks, as in strong
scaling, less is hidden than the model has it. Tiers of a network beyond the fitted sizes are not in it.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.costs.communication import (
    Latency,
    Link,
    bus_factor,
    collective_s,
    expected_maximum,
    hops,
    split_hierarchy,
)
from tokenscale.costs.pipeline_schedules import bubble_share

#: relative standard deviation of a run's step time where no repeats tell it. The source study's replicate by another
#: group differed by 0.5 %, its steps by 0.15 to 1.8 % (their coefficient of variation).
ASSUMED_NOISE = 0.01
#: the band holds this share of runs, if one of the sets of terms is right
COVERAGE = 0.9
#: draws of the noise for each set of terms, from a fixed seed
DRAWS = 2000
#: a term is told apart from others where its column leaves their span by this sine
APART = 0.1
#: fewer degrees of freedom than this say too little of the noise
LEAST_FREEDOM = 2
#: what each constant is, in words
UNITS = {
    "compute": "s on one rank",
    "inside": "exposed s a byte",
    "between": "exposed s a byte",
    "latency": "exposed s a hop",
    "straggler": "s, standard deviation of a rank",
    "exchange": "of the sweep's exchange exposed",
}


@dataclass(frozen=True)
class Pipeline:
    """Ranks that share the layers, and the schedule whose bubble follows from it."""

    ranks: int
    schedule: str
    micro_batch: int
    chunks: int = 1


@dataclass(frozen=True)
class Links:
    """What a sweep measured; None where none did, and step times have to tell."""

    inside: Link | None = None
    between: Link | None = None


@dataclass(frozen=True)
class Work:
    """What a step is made of at each world size: stated, not fitted.

    `global_rows` None is weak scaling, where a rank's work stays; else so many rows are shared out among the replicas.
    `exchanged_bytes` go through an all-reduce in so many `messages`; `tail_bytes` of them after backward has ended.
    `model_ranks` are those that share one copy of the model, which exchange nothing of this with each other.
    `threads` of a rank by world size, on CPUs where they differ: half of them are taken to compute half as fast. World
    sizes that it does not name have those of the largest that it does.
    """

    ranks_per_node: int = 1
    global_rows: int | None = None
    exchanged_bytes: float = 1.0
    tail_bytes: float = 0.0
    messages: int = 1
    latency: Latency = "ring"
    model_ranks: int = 1
    pipeline: Pipeline | None = None
    threads: Mapping[int, int] = field(default_factory=dict)

    def replicas(self, world_size: int) -> int:
        """Copies of the model."""
        return world_size // self.model_ranks

    def rows(self, world_size: int) -> int | None:
        """Rows of the replica that has most; None in weak scaling."""
        return None if self.global_rows is None else -(-self.global_rows // self.replicas(world_size))

    def share(self, world_size: int) -> float:
        """Work of a rank, as a part of what it would be on one replica."""
        rows = self.rows(world_size)
        return 1.0 if rows is None else rows / self.global_rows

    def slower(self, world_size: int) -> float:
        """How much longer a rank computes than with the threads of the largest world size that `threads` names."""
        last = self.threads[max(self.threads)] if self.threads else 1
        return last / self.threads.get(world_size, last)

    def bubble(self, world_size: int) -> float:
        """Share of time that a rank of the pipeline waits, by its schedule."""
        rows = self.rows(world_size)
        if self.pipeline is None or rows is None:
            return 0.0
        micro = -(-rows // self.pipeline.micro_batch)
        if self.pipeline.schedule == "interleaved":
            micro = -(-micro // self.pipeline.ranks) * self.pipeline.ranks
        return bubble_share(self.pipeline.schedule, self.pipeline.ranks, micro, self.pipeline.chunks)

    def legs(self, world_size: int) -> tuple[int, int]:
        """(replicas of a node, nodes) of the exchange."""
        return split_hierarchy(self.replicas(world_size), max(1, self.ranks_per_node // self.model_ranks))


@dataclass(frozen=True)
class Point:
    """One run: mean seconds of its step, and those of them that it waited for data."""

    world_size: int
    step_s: float
    waited_s: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """A step of one world size: seconds with the band, and the seconds of each term. A model, not a measurement."""

    world_size: int
    step_s: float
    low_s: float
    high_s: float
    parts_s: dict[str, float]


@dataclass(frozen=True)
class Fit:
    """Constants with what they were fitted to. `noise` is relative; `noise_from` says in words where it is from."""

    work: Work
    links: Links
    points: tuple[Point, ...]
    constants: dict[str, float]
    left_out: dict[str, str]
    residuals: tuple[float, ...]  # predicted over measured - 1, of each point
    noise: float
    noise_from: str
    freedom: int | None  # degrees of freedom of the noise; None where it is assumed
    others: tuple[tuple[str, ...], ...]  # sets of terms that fit as well
    waited_s: float = field(default=0.0)  # for data, of a rank with all rows

    @property
    def world_sizes(self) -> list[int]:
        """Those fitted, ascending."""
        return sorted({p.world_size for p in self.points})


def nonnegative(columns: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Least squares with no constant below zero, exactly: every set of columns is tried, the best feasible one taken.

    `columns` [points, terms], `targets` [points] or [points, draws]; returns [terms] or [terms, draws]. For the few
    columns of this model that is quicker to check than an active-set method (Lawson & Hanson 1974, chapter 23).
    """
    wanted = targets.reshape(len(targets), -1)
    terms = columns.shape[1]
    scale = np.linalg.norm(columns, axis=0)
    best, found = (wanted**2).sum(axis=0), np.zeros((terms, wanted.shape[1]))
    for size in range(1, terms + 1):
        for chosen in itertools.combinations(np.flatnonzero(scale), size):
            part = columns[:, chosen] / scale[list(chosen)]
            constants = np.linalg.lstsq(part, wanted, rcond=None)[0]
            error = ((part @ constants - wanted) ** 2).sum(axis=0)
            better = (constants >= 0).all(axis=0) & (error < best * (1 - 1e-12))
            best = np.where(better, error, best)
            full = np.zeros((terms, wanted.shape[1]))
            full[list(chosen)] = constants / scale[list(chosen), None]
            found = np.where(better, full, found)
    return found[:, 0] if targets.ndim == 1 else found


def fit_link(
    collective: str, sizes: Sequence[float], seconds: Sequence[float], ranks: int, latency: Latency
) -> tuple[Link, list[float]]:
    """(link, residuals) of a sweep over sizes in bytes: alpha and beta of `collective_s`, by relative least squares.

    Residuals are predicted over measured - 1. Raises UserError with fewer than two sizes.
    """
    if len(set(sizes)) < 2:
        raise UserError(
            "one size cannot tell latency from bandwidth.",
            found=f"{len(set(sizes))} size",
            expected="two",
            next="measure a second message size",
        )
    measured = np.asarray(seconds, dtype=float)
    laws = [[hops(collective, ranks, latency), bus_factor(collective, ranks) * size] for size in sizes]
    columns = np.asarray(laws) / measured[:, None]
    constants = nonnegative(columns, np.ones(len(measured)))
    first, second = map(float, constants)
    return Link(first, second, latency), [float(r) for r in columns @ constants - 1]


def fit(points: Sequence[Point], work: Work, links: Links = Links()) -> Fit:  # noqa: B008 - frozen
    """Fit the constants to runs of at least two world sizes.

    Raises UserError where there are fewer, where a time makes no sense, and for a world size that is no multiple of the
    ranks of one copy of the model.
    """
    points = tuple(sorted(points, key=lambda p: (p.world_size, p.step_s)))
    _check(points, work)
    found = _fit(points, work, links)
    if found.constants.get("exchange", 0.0) <= 1:
        return found
    # more than all of it cannot be exposed: then it is known, and another term has to say what is left
    found = _fit(points, replace(work, tail_bytes=work.exchanged_bytes), links)
    return replace(found, left_out={"exchange": "all of it is exposed"} | found.left_out)


def _fit(points: tuple[Point, ...], work: Work, links: Links) -> Fit:
    laws = _laws(work, links)
    sizes = sorted({p.world_size for p in points})
    terms, left_out = _primary(laws, sizes)
    columns, targets = _relative(laws, terms, points, _offset(work, links))
    constants = nonnegative(columns, targets)
    noise, noise_from, freedom = _noise(points)
    waited = float(np.mean([p.waited_s / work.share(p.world_size) for p in points]))
    residuals = tuple(float(r) for r in columns @ constants - targets)
    others = _others(laws, sizes, points, _offset(work, links), terms, residuals, noise)
    named = dict(zip(terms, map(float, constants), strict=True))
    return Fit(
        work, links, points, named, left_out, residuals, noise, noise_from, freedom, tuple(others), waited
    )  # fmt: skip


def predict(fitted: Fit, world_sizes: Sequence[int], coverage: float = COVERAGE) -> list[Prediction]:
    """Step times of these world sizes, each with a band.

    The band is that of a further run of that size, over all sets of terms which fit as well: for each set the constants
    are fitted again to the points with noise drawn anew, and what comes out gets noise of its own; the band goes from
    the lowest to the highest quantile of any set. It covers `coverage` of runs where one of the sets is right, and
    knows nothing of what no small world size shows (another network tier, a congested machine).

    Raises UserError for sizes below the smallest fitted one, or with more replicas than rows.
    """
    work, offset = fitted.work, _offset(fitted.work, fitted.links)
    laws = _laws(work, fitted.links)
    for size in world_sizes:
        if (reason := why_not(fitted, size)) is not None:
            raise reason
    random = np.random.default_rng(0)
    spread = np.full(DRAWS, fitted.noise)
    if fitted.freedom is not None:  # the noise is known no better than its own estimate
        spread = spread * np.sqrt(fitted.freedom / random.chisquare(fitted.freedom, DRAWS))
    around: dict[int, list[np.ndarray]] = {size: [] for size in world_sizes}
    for terms in (tuple(fitted.constants), *fitted.others):
        columns, targets = _relative(laws, terms, fitted.points, offset)
        drawn = nonnegative(columns, targets[:, None] + spread * random.standard_normal((len(targets), DRAWS)))
        for size in world_sizes:
            steps = np.array([laws[t](size) for t in terms]) @ drawn + offset(size) + _waited(fitted, size)
            steps = steps * (1 + spread * random.standard_normal(DRAWS))
            around[size].append(np.quantile(steps, [(1 - coverage) / 2, (1 + coverage) / 2]))
    return [_prediction(fitted, laws, offset, size, np.array(around[size])) for size in world_sizes]


def constants(found: Fit) -> str:
    """The constants of a fit with their units.

    >>> constants(fit([Point(1, 1.0), Point(2, 1.1)], Work()))
    'compute 1 s on one rank, between 0.1 exposed s a byte'
    """
    return ", ".join(f"{term} {value:.3g} {UNITS[term]}" for term, value in found.constants.items())


def _prediction(fitted: Fit, laws: "Laws", offset: "Law", size: int, bands: np.ndarray) -> Prediction:
    parts = {term: constant * laws[term](size) for term, constant in fitted.constants.items()}
    parts["bubble"] = parts["compute"] * fitted.work.bubble(size)
    parts["compute"] -= parts["bubble"]
    parts |= {"tail": offset(size), "data": _waited(fitted, size)}
    low, high = float(bands[:, 0].min()), float(bands[:, 1].max())
    return Prediction(size, sum(parts.values()), low, high, {t: s for t, s in parts.items() if s})


Law = Callable[[int], float]
Laws = dict[str, Law]


def _laws(work: Work, links: Links) -> Laws:
    """Term → its law of the world size, in the order in which they are taken."""
    overlapped = work.exchanged_bytes - work.tail_bytes
    laws: Laws = {"compute": lambda n: work.share(n) * work.slower(n) / (1 - work.bubble(n))}
    if links != Links() and overlapped > 0:
        laws["exchange"] = lambda n: _known_s(work, links, overlapped, n)
    if links.inside is None and work.ranks_per_node > work.model_ranks:
        laws["inside"] = lambda n: work.exchanged_bytes * bus_factor("all_reduce", work.legs(n)[0])
    if links.between is None:
        laws["between"] = lambda n: work.exchanged_bytes / work.legs(n)[0] * bus_factor("all_reduce", work.legs(n)[1])
        laws["latency"] = lambda n: work.messages * hops("all_reduce", work.replicas(n), work.latency)
    laws["straggler"] = lambda n: expected_maximum(n) * work.share(n) * work.slower(n)
    return laws


def _known_s(work: Work, links: Links, size_bytes: float, world_size: int) -> float:
    """Seconds of an all-reduce over the links that a sweep measured: first inside nodes, then between them."""
    inside, nodes = work.legs(world_size)
    messages = max(1, round(work.messages * size_bytes / work.exchanged_bytes))
    seconds = 0.0
    if links.inside is not None:
        seconds += messages * collective_s("all_reduce", size_bytes / messages, inside, links.inside)
    if links.between is not None:
        seconds += messages * collective_s("all_reduce", size_bytes / messages / inside, nodes, links.between)
    return seconds


def _offset(work: Work, links: Links) -> Law:
    """Seconds that are known beforehand: the exchange of the tail, where a sweep measured a link."""
    if links == Links() or not work.tail_bytes:
        return lambda n: 0.0
    return lambda n: _known_s(work, links, work.tail_bytes, n)


def _waited(fitted: Fit, world_size: int) -> float:
    return fitted.waited_s * fitted.work.share(world_size)


def _relative(laws: Laws, terms: Sequence[str], points: Sequence[Point], offset: Law) -> tuple[np.ndarray, np.ndarray]:
    """Columns [points, terms] and targets [points], each point over its step time: errors count by their share."""
    columns = np.array([[laws[t](p.world_size) / p.step_s for t in terms] for p in points])
    targets = np.array([(p.step_s - p.waited_s - offset(p.world_size)) / p.step_s for p in points])
    return columns, targets


def _primary(laws: Laws, sizes: Sequence[int]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Terms in order, as many as the sizes can tell apart; and why the others are left out."""
    taken, left_out = ["compute"], {}
    for term in list(laws)[1:]:
        values = {laws[term](n) for n in sizes}
        if values == {0.0}:
            left_out[term] = "nothing of it at the fitted world sizes"
        elif len(taken) == len(sizes):
            left_out[term] = f"{len(sizes)} world sizes bear {len(sizes)} constants"
        elif not _apart(laws, [*taken, term], sizes):
            left_out[term] = f"not told apart from {', '.join(taken)} at the fitted world sizes"
        else:
            taken.append(term)
    return tuple(taken), left_out


def _apart(laws: Laws, terms: Sequence[str], sizes: Sequence[int]) -> bool:
    """Does the last term's column leave the span of the others by enough to be seen through noise?"""
    columns = np.array([[laws[t](n) for t in terms] for n in sizes]) / [[laws["compute"](n)] for n in sizes]
    *others, last = columns.T
    if not last.any() or len(terms) > len(sizes):
        return False
    span = np.array(others).T
    rest = last - span @ np.linalg.lstsq(span, last, rcond=None)[0]
    return bool(np.linalg.norm(rest) >= APART * np.linalg.norm(last))


def _others(
    laws: Laws, sizes: Sequence[int], points: Sequence[Point], offset: Law, primary: tuple[str, ...],
    residuals: Sequence[float], noise: float,
) -> list[tuple[str, ...]]:  # fmt: skip
    """Other sets of terms, compute among them, whose residuals are as small as noise allows."""
    allowed = max(2 * noise, 1.5 * _rms(residuals))
    found = []
    for count in range(min(len(laws), len(sizes))):
        for chosen in itertools.combinations(list(laws)[1:], count):
            terms = ("compute", *chosen)
            if terms == primary or not all(_apart(laws, terms[: i + 1], sizes) for i in range(1, len(terms))):
                continue
            columns, targets = _relative(laws, terms, points, offset)
            if _rms(columns @ nonnegative(columns, targets) - targets) <= allowed:
                found.append(terms)
    return found


def _noise(points: Sequence[Point]) -> tuple[float, str, int | None]:
    """(relative standard deviation of runs, where it is from, degrees of freedom) of repeats at one world size."""
    groups = [[math.log(p.step_s) for p in points if p.world_size == n] for n in {p.world_size for p in points}]
    freedom = sum(len(group) - 1 for group in groups)
    if freedom < LEAST_FREEDOM:
        return ASSUMED_NOISE, f"assumed: {100 * ASSUMED_NOISE:g} %", None
    squares = sum((value - np.mean(group)) ** 2 for group in groups for value in group)
    noise = float(math.sqrt(squares / freedom))
    return noise, f"repeats: {100 * noise:.2g} %, {freedom} degrees of freedom", freedom


def _rms(values: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _check(points: Sequence[Point], work: Work) -> None:
    sizes = sorted({p.world_size for p in points})
    if len(sizes) < 2:
        raise UserError(
            "the scaling model needs runs of at least two world sizes.",
            found=f"world size {sizes[0]}" if sizes else "no runs",
            next="run the experiment at a second world size (`layout.data` among its factors)",
        )
    for p in points:
        if not 0 <= p.waited_s < p.step_s < math.inf:
            raise UserError(
                "a run's times make no sense.",
                run=f"world size {p.world_size}: a step of {p.step_s:g} s, {p.waited_s:g} s of it waiting for data",
                expected="a step above 0 s, and less waiting than that",
                next="leave this run out, or measure it again",
            )
        if p.world_size % work.model_ranks:
            raise UserError(
                "a world size is no multiple of the ranks that share one copy of the model.",
                found=f"world size {p.world_size}",
                expected=f"a multiple of {work.model_ranks}",
                next=f"choose a multiple of {work.model_ranks} ranks",
            )


def why_not(fitted: Fit, size: int) -> UserError | None:
    """Why a world size cannot be predicted from this fit; None where it can."""
    work, least = fitted.work, fitted.world_sizes[0]
    if size < least:
        return UserError(
            "a world size below the smallest fitted one cannot be predicted: what that exchanges is in its compute.",
            requested=f"world size {size}",
            expected=f"at least {least}",
            next=f"predict {least} ranks or more",
        )
    if size % work.model_ranks:
        return UserError(
            "a world size is no multiple of the ranks that share one copy of the model.",
            requested=f"world size {size}",
            expected=f"a multiple of {work.model_ranks}",
            next=f"choose a multiple of {work.model_ranks} ranks",
        )
    crossing = work.legs(size)[1] > 1 and all(work.legs(n)[1] == 1 for n in fitted.world_sizes)
    if crossing and fitted.links.between is None:
        return UserError(
            "no fitted run goes beyond one node, and no sweep does: what lies between nodes is unknown.",
            requested=f"world size {size} on nodes of {work.ranks_per_node}",
            fitted=", ".join(map(str, fitted.world_sizes)),
            next="a run on two nodes, or `benchmark collectives` over two nodes and --collectives",
        )
    if work.global_rows is not None and work.replicas(size) > work.global_rows:
        return UserError(
            "there are more replicas than rows in a global batch: some would have nothing to do.",
            requested=f"world size {size}, {work.replicas(size)} replicas",
            rows=work.global_rows,
            next="a larger global batch, or smaller world sizes",
        )
    return None
