"""Predict the step time of a training on more ranks from runs on fewer ranks.

    step(N) = (compute(N) + communication(N) x contention(N) + straggler(N)) x lognormal noise + data wait(N)

Each term is a known function of the number of ranks N times one constant, which is at least zero:

| term | function of N | constant |
|---|---|---|
| compute | largest share of the rows of a replica, over 1 - pipeline bubble | seconds on one replica |
| intra_node | bytes x 2 (g - 1) / g, with g ranks per node | exposed seconds per byte |
| inter_node | bytes / g x 2 (n - 1) / n, with n nodes | exposed seconds per byte |
| latency_tree | messages x 2 log2 N | exposed seconds per hop |
| latency_ring | messages x 2 (N - 1) | exposed seconds per hop |
| straggler | expected maximum of N normal values x share of rows | standard deviation of a rank's step, seconds |
| exposed | seconds of the collectives over links that a sweep measured | share that backward does not hide, at most 1 |

**Choice of terms.** Two world sizes identify at most two constants, so the data rarely decide which terms matter. Every
set of terms that the fitted sizes identify is fitted to the logarithm of the step times. The sets are averaged with
weights exp(-BIC / 2) (Raftery 1995, Sociological Methodology 25; Hoeting et al. 1999, Statistical Science 14).

**Beyond the largest fitted size** N0, effects occur that no fitted run shows. Both widen the band with log(N / N0):

- Contention on a higher tier of the network makes communication (N / N0)^k times as slow. In half of the draws k is 0
  (a non-blocking network), in the other half it is uniform between 0 and 1 (1: one link that all nodes share).
  The prediction itself is without contention; the band includes it.
- Other effects change the step by a factor whose logarithm has the standard deviation DRIFT for each doubling.

A band whose ends differ by more than WIDEST_BAND is no answer. `Prediction.measure` then names the world size to
measure first.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.costs.communication import (
    Link,
    bus_factor,
    collective_s,
    expected_maximum,
    hops,
    solve_nonnegative,
    split_hierarchy,
)
from tokenscale.costs.pipeline_schedules import bubble_share

#: log standard deviation of a run's step time without repeats. The source study's replicate by another group differed
#: by 0.5 %, its steps by 0.15 to 1.8 % (coefficient of variation)
ASSUMED_NOISE = 0.01
#: log standard deviation for each doubling beyond the fitted sizes. Assumed, not fitted: without it and without
#: contention, 37 of the 41 held-out points of the back-test lie in the band, with both all 41
DRIFT = 0.02
#: bytes of a bucket of DDP (its default), which is one message
BUCKET_BYTES = 25 * 2**20
#: share of further runs that the band contains
COVERAGE = 0.9
#: largest ratio between the ends of a band that counts as a prediction
WIDEST_BAND = 2.0
#: draws for each set of terms, from a fixed seed
DRAWS = 1000
#: repeats estimate the noise from this many degrees of freedom on
LEAST_FREEDOM = 2
#: limits of the log standard deviation of runs. Few repeats can be equal by chance; noise above the upper limit makes
#: any band too wide, and the limit keeps draws finite
LEAST_NOISE, LARGEST_NOISE = 0.001, 2.0
#: a term is identified if the sine between its column and the span of the other columns is at least this
LEAST_SINE = 0.1
#: computation takes at least this share of the shortest step, so that no draw ends at zero
LEAST_COMPUTE = 0.01
#: sets of terms with a smaller weight are left out
LEAST_WEIGHT = 1e-3
#: terms that contention slows down; `tail` is communication after backward over measured links
COMMUNICATION = ("intra_node", "inter_node", "latency_tree", "latency_ring", "exposed", "tail")

Law = Callable[[int], float]


@dataclass(frozen=True)
class Pipeline:
    """Ranks that share the layers of a replica, and their schedule."""

    ranks: int
    schedule: str
    micro_batch: int
    chunks: int = 1


@dataclass(frozen=True)
class Links:
    """Measured links within and between nodes; None where no sweep measured the link."""

    intra_node: Link | None = None
    inter_node: Link | None = None


@dataclass(frozen=True)
class Workload:
    """Declared work and communication of a step.

    `global_rows` None is weak scaling: the rows per rank are constant. `communicated_bytes` go through an all-reduce in
    `messages` messages; `tail_bytes` of them after backward has ended. `ranks_per_replica` ranks share one copy of the
    model and do not reduce gradients with each other.
    """

    ranks_per_node: int = 1
    global_rows: int | None = None
    communicated_bytes: float = 1.0
    tail_bytes: float = 0.0
    messages: int = 1
    ranks_per_replica: int = 1
    pipeline: Pipeline | None = None

    def replicas(self, world_size: int) -> int:
        """Return the number of copies of the model."""
        return world_size // self.ranks_per_replica

    def rows(self, world_size: int) -> int | None:
        """Return the rows of the replica with the most rows; None in weak scaling."""
        return None if self.global_rows is None else -(-self.global_rows // self.replicas(world_size))

    def row_share(self, world_size: int) -> float:
        """Return the rows of a replica as a share of those of a single replica; 1 in weak scaling."""
        return 1.0 if self.global_rows is None else self.rows(world_size) / self.global_rows

    def bubble(self, world_size: int) -> float:
        """Return the share of time that a pipeline rank is idle, by its schedule."""
        rows = self.rows(world_size)
        if self.pipeline is None or rows is None:
            return 0.0
        micro_batches = -(-rows // self.pipeline.micro_batch)
        if self.pipeline.schedule == "interleaved":
            micro_batches = -(-micro_batches // self.pipeline.ranks) * self.pipeline.ranks
        return bubble_share(self.pipeline.schedule, self.pipeline.ranks, micro_batches, self.pipeline.chunks)

    def hierarchy(self, world_size: int) -> tuple[int, int]:
        """Return (replicas per node, nodes) of the all-reduce."""
        return split_hierarchy(self.replicas(world_size), max(1, self.ranks_per_node // self.ranks_per_replica))


@dataclass(frozen=True)
class Measurement:
    """Mean step time of one run in seconds, and the part of it that the step waited for data."""

    world_size: int
    step_s: float
    data_wait_s: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """Predicted step time of one world size with the ends of its band, in seconds.

    `measure` is None for an answer. Otherwise the band is too wide, and it is the world size to measure first: larger
    than the fitted ones, or the largest fitted one where the runs are too noisy.
    """

    world_size: int
    step_s: float
    low_s: float
    high_s: float
    measure: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A set of terms that fits: term → constant, and the weight in the average. `fixed` terms have the constant 1."""

    constants: dict[str, float]
    fixed: tuple[str, ...]
    weight: float


@dataclass(frozen=True)
class Fit:
    """Fitted sets of terms, largest weight first. `noise` is the log standard deviation of a run's step time."""

    workload: Workload
    links: Links
    measurements: tuple[Measurement, ...]
    candidates: tuple[Candidate, ...]
    noise: float
    noise_source: str
    freedom: int | None  # degrees of freedom of the noise; None if it is assumed

    @property
    def world_sizes(self) -> list[int]:
        """Fitted world sizes, ascending."""
        return sorted({m.world_size for m in self.measurements})

    @property
    def data_wait_s(self) -> float:
        """Mean seconds that a replica with all rows waits for data."""
        return float(np.mean([m.data_wait_s / self.workload.row_share(m.world_size) for m in self.measurements]))


def fit(measurements: Sequence[Measurement], workload: Workload, links: Links = Links()) -> Fit:  # noqa: B008 - frozen
    """Fit every identified set of terms to runs of at least two world sizes.

    Raises UserError for fewer world sizes, for a step time that is not positive and finite, for a data wait outside the
    step, and for a world size that is not a multiple of `ranks_per_replica`.
    """
    measurements = tuple(sorted(measurements, key=lambda m: (m.world_size, m.step_s)))
    _check(measurements, workload)
    laws = _laws(workload, links)
    sizes = [m.world_size for m in measurements]
    fitted = []
    for fixed, optional in _variants(laws):
        for terms in _identified_sets(laws, optional, sorted(set(sizes))):
            constants, error = _fit_terms(laws, terms, fixed, measurements)
            redundant = any(constants[term] <= 0 for term in terms[1:])  # equal to the set without that term
            if not redundant and constants.get("exposed", 0.0) <= 1:
                fitted.append((constants, fixed, error))
    noise, source, freedom = _estimate_noise(measurements)
    spare = [(error, len(sizes) - len(constants)) for constants, _, error in fitted if 2 <= len(constants) < len(sizes)]
    misfit = min((math.sqrt(error / count) for error, count in spare), default=0.0)
    if misfit > noise:
        noise, source = misfit, f"{source}; the best laws miss the runs by {100 * misfit:.2g} %"
    scores = np.array([-error / (2 * noise**2) - len(c) / 2 * math.log(len(sizes)) for c, _, error in fitted])
    weights = np.exp(scores - scores.max())
    weights = np.where(weights < LEAST_WEIGHT * weights.sum(), 0.0, weights)
    weights /= weights.sum()
    candidates = [Candidate(c, fixed, float(w)) for (c, fixed, _), w in zip(fitted, weights, strict=True) if w > 0]
    candidates.sort(key=lambda c: -c.weight)
    return Fit(workload, links, measurements, tuple(candidates), min(noise, LARGEST_NOISE), source, freedom)


def predict(fitted: Fit, world_sizes: Sequence[int]) -> list[Prediction]:
    """Predict step times with the band of a further run of each world size.

    For each set of terms the constants are fitted again to step times with noise drawn anew. The draws of all sets,
    by their weights, with noise, drift and contention, give the band. The prediction is the median of the draws
    without contention. They are half of all draws, so that it lies between the quartiles and always in the band.

    Raises UserError for the world sizes that `find_obstacle` names.
    """
    for size in world_sizes:
        if (obstacle := find_obstacle(fitted, size)) is not None:
            raise obstacle
    predictions = _predict_bands(fitted, world_sizes)
    too_wide = [p.world_size for p in predictions if _is_too_wide(p)]
    measure = _sizes_to_measure(fitted, too_wide) if too_wide else {}
    return [replace(p, measure=measure.get(p.world_size)) for p in predictions]


def describe_laws(fitted: Fit) -> str:
    """Return the sets of terms with their weights, from 5 % on.

    >>> describe_laws(fit([Measurement(1, 1.0), Measurement(2, 1.3)], Workload()))
    'compute + inter_node 25 %, compute + latency_tree 25 %, compute + latency_ring 25 %, compute + straggler 25 %'
    """
    shown = [c for c in fitted.candidates if c.weight >= 0.05]
    return ", ".join(f"{' + '.join([*c.constants, *c.fixed])} {100 * c.weight:.0f} %" for c in shown)


# -- laws


def _laws(workload: Workload, links: Links) -> dict[str, Law]:
    """Return term → law of the world size."""
    overlapped = workload.communicated_bytes - workload.tail_bytes
    laws: dict[str, Law] = {"compute": lambda n: workload.row_share(n) / (1 - workload.bubble(n))}
    if links != Links():
        laws["exposed"] = lambda n: _collectives_s(workload, links, overlapped, n)
        laws["tail"] = lambda n: _collectives_s(workload, links, workload.tail_bytes, n)
    if links.intra_node is None and workload.ranks_per_node > workload.ranks_per_replica:
        laws["intra_node"] = lambda n: workload.communicated_bytes * bus_factor("all_reduce", workload.hierarchy(n)[0])
    if links.inter_node is None:
        laws["inter_node"] = lambda n: (
            workload.communicated_bytes / workload.hierarchy(n)[0] * bus_factor("all_reduce", workload.hierarchy(n)[1])
        )
        laws["latency_tree"] = lambda n: workload.messages * hops("all_reduce", workload.replicas(n), "tree")
        laws["latency_ring"] = lambda n: workload.messages * hops("all_reduce", workload.replicas(n), "ring")
    laws["straggler"] = lambda n: expected_maximum(n) * workload.row_share(n)
    return laws


def _collectives_s(workload: Workload, links: Links, size_bytes: float, world_size: int) -> float:
    """Return the seconds of an all-reduce over measured links: first within nodes, then between them."""
    if size_bytes <= 0:
        return 0.0
    ranks, nodes = workload.hierarchy(world_size)
    messages = max(1, round(workload.messages * size_bytes / workload.communicated_bytes))
    seconds = 0.0
    if links.intra_node is not None:
        seconds += messages * collective_s("all_reduce", size_bytes / messages, ranks, links.intra_node)
    if links.inter_node is not None:
        seconds += messages * collective_s("all_reduce", size_bytes / messages / ranks, nodes, links.inter_node)
    return seconds


def _variants(laws: dict[str, Law]) -> list[tuple[tuple[str, ...], list[str]]]:
    """Return (terms with the constant 1, optional terms): with measured links, communication is exposed in part or in
    full."""
    optional = [term for term in laws if term not in ("compute", "exposed", "tail")]
    if "exposed" not in laws:
        return [((), optional)]
    return [(("tail",), ["exposed", *optional]), (("exposed", "tail"), optional)]


def _identified_sets(laws: dict[str, Law], optional: list[str], sizes: list[int]) -> list[tuple[str, ...]]:
    """Return the sets of terms, each with compute, whose constants these world sizes identify."""
    largest = min(len(optional), len(sizes) - 1)
    chosen = (("compute", *c) for count in range(largest + 1) for c in itertools.combinations(optional, count))
    return [terms for terms in chosen if all(_is_identified(laws, terms[: i + 1], sizes) for i in range(1, len(terms)))]


def _is_identified(laws: dict[str, Law], terms: tuple[str, ...], sizes: list[int]) -> bool:
    """Tell whether the last term's column leaves the span of the others by enough to be seen through noise."""
    columns = _columns(laws, terms, sizes) / _columns(laws, ("compute",), sizes)
    others, last = columns[:, :-1], columns[:, -1]
    if not last.any():
        return False
    rest = last - others @ np.linalg.lstsq(others, last, rcond=None)[0]
    return bool(np.linalg.norm(rest) >= LEAST_SINE * np.linalg.norm(last))


def _columns(laws: dict[str, Law], terms: Sequence[str], sizes: Sequence[int]) -> np.ndarray:
    """Return the laws as [sizes, terms]."""
    return np.array([[laws[t](n) for t in terms] for n in sizes]).reshape(len(sizes), len(terms))


# -- fit in log space


def _system(
    laws: dict[str, Law], terms: Sequence[str], fixed: tuple[str, ...], measurements: Sequence[Measurement]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Return (columns [runs, terms], known seconds [runs], measured seconds without data wait [runs], least compute).

    The known seconds contain the fixed terms and the least compute.
    """
    sizes = [m.world_size for m in measurements]
    columns = _columns(laws, terms, sizes)
    targets = np.array([m.step_s - m.data_wait_s for m in measurements])
    least = LEAST_COMPUTE * float((targets / columns[:, 0]).min())
    return columns, _columns(laws, fixed, sizes).sum(axis=1) + least * columns[:, 0], targets, least


def _fit_terms(
    laws: dict[str, Law], terms: tuple[str, ...], fixed: tuple[str, ...], measurements: Sequence[Measurement]
) -> tuple[dict[str, float], float]:
    """Return (term → constant, sum of squared log residuals), by damped Gauss-Newton from relative least squares."""
    columns, known, targets, least = _system(laws, terms, fixed, measurements)

    def error(constants: np.ndarray) -> float:
        return float((np.log((columns @ constants + known) / targets) ** 2).sum())

    constants = solve_nonnegative(columns / targets[:, None], 1 - known / targets)
    for _ in range(30):
        model = columns @ constants + known
        proposed = solve_nonnegative(columns / model[:, None], 1 - known / model + np.log(targets / model))
        steps = (constants + 0.5**halvings * (proposed - constants) for halvings in range(8))
        better = next((c for c in steps if error(c) < error(constants) * (1 - 1e-9)), None)
        if better is None:
            break
        constants = better
    found = dict(zip(terms, map(float, constants), strict=True))
    return found | {"compute": found["compute"] + least}, error(constants)


def _estimate_noise(measurements: Sequence[Measurement]) -> tuple[float, str, int | None]:
    """Return (log standard deviation of runs, its source, degrees of freedom), from repeats of a world size."""
    groups: dict[int, list[float]] = {}
    for m in measurements:
        groups.setdefault(m.world_size, []).append(math.log(m.step_s))
    freedom = sum(len(group) - 1 for group in groups.values())
    if freedom < LEAST_FREEDOM:
        return ASSUMED_NOISE, f"assumed: {100 * ASSUMED_NOISE:g} %", None
    squares = sum((value - np.mean(group)) ** 2 for group in groups.values() for value in group)
    noise = max(float(math.sqrt(squares / freedom)), LEAST_NOISE)
    return noise, f"repeats: {100 * noise:.2g} %, {freedom} degrees of freedom", freedom


# -- predictions


def _predict_bands(fitted: Fit, sizes: Sequence[int]) -> list[Prediction]:
    """Predict without judging the width of the bands. All sets of terms and all sizes share the random numbers."""
    laws = _laws(fitted.workload, fitted.links)
    random = np.random.default_rng(0)
    spread = np.full(DRAWS, fitted.noise)
    if fitted.freedom is not None:  # the noise is an estimate itself
        spread *= np.sqrt(fitted.freedom / random.chisquare(fitted.freedom, DRAWS))
    spread = np.minimum(spread, LARGEST_NOISE)
    scatter = np.exp(spread * random.standard_normal((len(fitted.measurements), DRAWS)))
    noise, drift = np.exp(spread * random.standard_normal(DRAWS)), random.standard_normal(DRAWS)
    contention = random.uniform(size=DRAWS) * (np.arange(DRAWS) % 2)  # none in every second draw
    growth = {size: max(1.0, size / fitted.world_sizes[-1]) for size in sizes}
    steps: dict[int, list[np.ndarray]] = {size: [] for size in sizes}
    for candidate in fitted.candidates:
        terms = list(candidate.constants)
        columns, known, targets, least = _system(laws, terms, candidate.fixed, fitted.measurements)
        drawn = solve_nonnegative(columns / targets[:, None], scatter - (known / targets)[:, None])
        constants = dict.fromkeys(candidate.fixed, np.ones(DRAWS)) | dict(zip(terms, drawn, strict=True))
        constants["compute"] = constants["compute"] + least
        if "exposed" in terms:
            constants["exposed"] = np.minimum(constants["exposed"], 1.0)
        for size in steps:
            slowdown = growth[size] ** contention
            seconds = [laws[t](size) * c * (slowdown if t in COMMUNICATION else 1.0) for t, c in constants.items()]
            steps[size].append(np.sum(seconds, axis=0) * noise * np.exp(DRIFT * math.log2(growth[size]) * drift))
    weights = np.repeat([c.weight for c in fitted.candidates], DRAWS).reshape(-1, DRAWS)
    ends = [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2]
    predictions = []
    for size in sizes:
        draws = np.array(steps[size]) + fitted.data_wait_s * fitted.workload.row_share(size)
        (middle,) = _weighted_quantiles(draws[:, ::2], weights[:, ::2], [0.5])
        low, high = _weighted_quantiles(draws, weights, ends)
        predictions.append(Prediction(size, middle, low, high))
    return predictions


def _weighted_quantiles(values: np.ndarray, weights: np.ndarray, shares: list[float]) -> list[float]:
    quantiles = np.quantile(values.ravel(), shares, weights=weights.ravel(), method="inverted_cdf")
    return [float(q) for q in quantiles]


def _sizes_to_measure(fitted: Fit, targets: list[int]) -> dict[int, int]:
    """Return target → smallest doubling of the largest fitted size whose measurement would narrow the band enough.

    A measurement is tried at its predicted step time. If none smaller than the target suffices, the target itself is
    the size to measure. If even the largest fitted size has too wide a band, that size is: its runs need repeats.
    """
    largest = fitted.world_sizes[-1]
    if _is_too_wide(_predict_bands(fitted, [largest])[0]):
        return dict.fromkeys(targets, largest)
    doublings = [largest * 2**n for n in range(1, max(targets).bit_length()) if largest * 2**n < max(targets)]
    measure = {target: target for target in targets}
    for tried in _predict_bands(fitted, [n for n in doublings if find_obstacle(fitted, n) is None])[::-1]:
        wait_s = fitted.data_wait_s * fitted.workload.row_share(tried.world_size)
        added = Measurement(tried.world_size, tried.step_s, wait_s)
        longer = fit([*fitted.measurements, added], fitted.workload, fitted.links)
        for p in _predict_bands(longer, [t for t in targets if t > tried.world_size]):
            if not _is_too_wide(p):
                measure[p.world_size] = tried.world_size
    return measure


def _is_too_wide(prediction: Prediction) -> bool:
    return prediction.high_s > WIDEST_BAND * prediction.low_s


# -- mistakes


def _check(measurements: Sequence[Measurement], workload: Workload) -> None:
    sizes = sorted({m.world_size for m in measurements})
    if len(sizes) < 2:
        raise UserError(
            "the scaling model needs runs of at least two world sizes.",
            found=f"world size {sizes[0]}" if sizes else "no runs",
            next="run the experiment at a second world size (`layout.data` among its factors)",
        )
    for m in measurements:
        if not 0 <= m.data_wait_s < m.step_s < math.inf:
            raise UserError(
                "a run has an impossible step time.",
                run=f"world size {m.world_size}: a step of {m.step_s:g} s, of which {m.data_wait_s:g} s wait for data",
                expected="a step time above 0 s, and a shorter wait for data",
                next="exclude this run, or measure it again",
            )
        if m.world_size < 1 or m.world_size % workload.ranks_per_replica:
            raise _not_a_multiple(workload, found=f"world size {m.world_size}")


def _not_a_multiple(workload: Workload, **facts: str) -> UserError:
    return UserError(
        "a world size is not a multiple of the ranks that share one copy of the model.",
        **facts,
        expected=f"a multiple of {workload.ranks_per_replica}",
        next=f"choose a multiple of {workload.ranks_per_replica} ranks",
    )


def find_obstacle(fitted: Fit, size: int) -> UserError | None:
    """Return why this fit cannot be applied to a world size; None if it can."""
    workload, smallest = fitted.workload, fitted.world_sizes[0]
    if size < smallest:
        return UserError(
            "a world size below the smallest fitted one cannot be predicted.",
            requested=f"world size {size}",
            expected=f"at least {smallest}",
            next=f"predict {smallest} ranks or more",
        )
    if size % workload.ranks_per_replica:
        return _not_a_multiple(workload, requested=f"world size {size}")
    several_nodes = any(workload.hierarchy(n)[1] > 1 for n in fitted.world_sizes)
    if workload.hierarchy(size)[1] > 1 and not several_nodes and fitted.links.inter_node is None:
        two_nodes = 2 * workload.ranks_per_node
        return UserError(
            f"cannot be predicted from these sizes: no fitted run uses two nodes; measure {two_nodes}.",
            requested=f"world size {size} on nodes of {workload.ranks_per_node} ranks",
            fitted=", ".join(map(str, fitted.world_sizes)),
            next=f"run {two_nodes} ranks, or `benchmark collectives` on two nodes and --collectives",
        )
    if workload.global_rows is not None and workload.replicas(size) > workload.global_rows:
        return UserError(
            "there are more replicas than rows in a global batch.",
            requested=f"world size {size}, {workload.replicas(size)} replicas",
            rows=workload.global_rows,
            next="choose a larger global batch or smaller world sizes",
        )
    return None
