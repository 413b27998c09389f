"""Runs of an experiment against each other: values that must be equal or must differ, machines,
clocks, run table.
"""

import functools
import itertools
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokenscale.analysis.steps import Steps
from tokenscale.analysis.tables import WARM_UP_STEPS
from tokenscale.referee.clocks import CLOCK_S
from tokenscale.referee.expectations import (
    Evidence,
    Findings,
    NotCheckedError,
    between,
    describe_findings,
    expect,
    judge_together,
)
from tokenscale.referee.statistics import measure_spread
from tokenscale.settings.experiments import format_cell
from tokenscale.settings.run import OURS

Row = dict[str, Any]
Found = Iterator[tuple[str, str]]

#: fields that differ between logs: timings of a step that the host's clock gives, and the loss of
#: runs of other seeds
TIMED = ("step_s", "data_wait_s", "own_s", "forward_s", "backward_s", "optimizer_s")
#: fewest steps that can show a copy, the share of them that does, and the share of values that
#: differ inside a log
FEWEST = 4
COPIED = 0.5
DISTINCT = 0.9
#: relative difference of values that a copy with noise has; values that are compared with each; and
#: steps of the logarithm by which values are sampled
NEAR = 3e-6
NEIGHBOURS = 3
LEADING = 1e-4
#: values kept of each log and field: within a run, and of all runs of an experiment
OF_LOG = 4096
OF_RUN = 256
#: steps whose counts are compared: all of the first ones, then every `STRIDE`-th
FIRST_STEPS = 256
STRIDE = 64
#: probability that the useful tokens of rows drawn from a store lie farther from their mean
CHANCE = 1e-9
#: approaches whose batches are equal: the online one and its offline twin
TWINS = {"pretokenized-padded": "padded", "token-list": "padding-free"}
#: relative difference of losses of the same weights on the same text that another order of sums
#: makes, by precision: 5e-8 was measured in fp32 between parallel layouts
SAME_LOSS = 1e-6
SAME_LOSS_16 = 2e-3
#: how far a run's loss lies from its repeats': so many spreads of theirs, and least ratio
LOSS_SPREADS = 6.5
LOSS_RATIO = 1.1
#: repeats whose spread is believed, and the least ratio beside so many
MANY = 5
LOSS_RATIO_OF_MANY = 1.03
#: steps before and after a validation whose training losses are its witness
NEARBY_STEPS = 16
#: nats a token by which the loss of one token differs from the mean before training, at most; and
#: relative difference of losses on any two texts
TOKEN_SPREAD = 0.5
FIRST_LOSS = 0.01
#: quantity of runs with equal shapes → least ratio to its repeats, and to other approaches
OF_A_SHAPE = {
    "activations_bytes": (1.02, 1.1),
    "memory_peak_bytes": (1.25, 2.0),
    "seconds of computing a token": (4.0, 5.0),
    "processor time a second": (1.15, math.inf),  # approaches may tokenize on other cores
}
#: spreads of its repeats by which a run differs from them at least
SHAPE_SPREADS = 6.5
#: columns of runs with equal shapes
SHAPE = (
    "arm",
    "science_per_rank",
    "global_batch",
    "micro_batch",
    "device",
    "world_size",
    "layout",
    "data",
)
#: times that norms of equal batches differ by more than their losses, at least; and their least
#: difference
NORM_TIMES = 64
LEAST_NORM = 1e-3
#: ratio of losses → what they are in
UNITS = {
    1 / math.log(2): "bits",
    1 / math.log(10): "decimal digits",
    math.log(2): "nats beside bits",
}
#: columns of events that runs are compared by
OF_EVENTS = (
    "run_id",
    "event",
    "attempt",
    "rank",
    "step",
    "boot",
    "t_unix_s",
    "t_mono_s",
    "loss_sum",
    "useful_tokens",
    "activations_bytes",
    "cpu_s",
)
#: above the number of any step or rank: a run's number times it, and that of a step, are one key
STEP_SPAN = 1 << 32
#: relative difference of the memory of two machines of one type
OTHER_MEMORY = 0.005
#: what is said of a run that has no record
MISSING = "not started, or its folder is elsewhere (no run.json)"
#: difference of the share of a text that a run counted as cut, in a sample, from its padded store's:
#: a share of the text, and of the share
CUT_OF_STORE = 0.01
CUT_OF_STORE_SHARE = 0.05
#: seconds that wall clocks of one machine may overlap by without a run having company
WALL_S = 2.0


class Values:
    """Distinct values of logs, by field, to find logs that repeat another one's.

    Clocks count nanoseconds, so that two logs share hardly any value. Two that share half of the
    values of any one field are copies, whatever was shifted, renumbered or edited in the other
    fields; so are two with values that differ by `NEAR` of them, as a copy with noise has them. A
    field whose values repeat inside a log is too coarse to tell and left out. Of long logs a sample
    is kept, chosen by the values' leading digits.
    """

    def __init__(self, size: int, fields: tuple[str, ...] = TIMED, fewest: int = FEWEST):
        self._size = size
        self._fewest = fewest
        self._kept: dict[str, dict[str, np.ndarray]] = {field: {} for field in fields}

    def add(self, rows: pa.Table, logs: np.ndarray, names: Sequence[str]) -> None:
        """Add step rows. `logs` has the place in `names` of each row's log, or -1 for a row that is
        left out.
        """
        for field, kept in self._kept.items():
            values = np.asarray(rows[field].to_numpy(), dtype=float)
            known = np.isfinite(values) & (values > 0) & (logs >= 0)
            values, owner = _sort_distinct(values[known], logs[known])
            number = np.bincount(logs[known], minlength=len(names))
            distinct = np.bincount(owner, minlength=len(names))
            telling = distinct >= np.maximum(self._fewest, DISTINCT * number)
            doublings = np.ceil(np.log2(np.maximum(distinct / self._size, 1)))
            every = (2**doublings).astype(np.uint64)
            leading = np.floor(np.log(values) / LEADING).astype(np.int64)
            bits = leading.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            chosen = telling[owner] & ((bits >> np.uint64(40)) % every[owner] == 0)
            values = values[chosen]
            owner = owner[chosen]
            ends = np.cumsum(np.bincount(owner, minlength=len(names)))
            for log, of_log in enumerate(np.split(values, ends[:-1])):
                if len(of_log) >= self._fewest:
                    kept[names[log]] = of_log

    def find_copies(self, field: str) -> Iterator[tuple[str, str, str]]:
        """(log, other log that was added before, words) of the logs that share values of a
        field.
        """
        logs = self._kept[field]
        names = list(logs)
        values = np.log(np.concatenate([*logs.values(), np.ones(0)]))
        owner = np.repeat(np.arange(len(names)), [len(logs[name]) for name in names])
        order = np.lexsort((owner, values))
        values, owner = values[order], owner[order]
        equal: Counter[tuple[int, int]] = Counter()
        near: Counter[tuple[int, int]] = Counter()
        for lag in range(1, NEIGHBOURS + 1):
            apart = values[lag:] - values[:-lag]
            for limit, pairs in ((0.0, equal), (NEAR, near)):
                close = np.flatnonzero((apart <= limit) & (owner[lag:] != owner[:-lag]))
                ends = np.sort([owner[close + lag], owner[close]], axis=0)
                pairs.update(zip(ends[1].tolist(), ends[0].tolist(), strict=True))
        for (one, other), n in sorted(near.items()):
            compared = min(len(logs[names[one]]), len(logs[names[other]]))
            enough = max(2, COPIED * compared)
            if (found := equal[one, other]) >= enough:
                yield names[one], names[other], f"{found} of {compared} values of {field} are equal"
            elif n >= min(compared, max(enough, 2 * FEWEST)):
                words = f"{n} of {compared} values of {field} differ by {NEAR:g} at most"
                yield names[one], names[other], words


def find_copied_logs(
    raw: pa.Table, folders: Mapping[int, str], hashes: Mapping[str, str]
) -> list[str]:
    """Return which logs of steps of one run are the same file as another one, or repeat its timings,
    in words.

    `raw` are the steps by attempt and rank, `folders` are attempt → its folder, and `hashes` are
    file → SHA-256.
    """
    first: dict[str, str] = {}
    copies = []
    names: list[str] = []
    logs = np.full(len(raw), -1)
    for attempt, rank, place in Steps(raw).logs():
        name = f"{folders[attempt]}/rank={rank:05d}/steps.jsonl"
        if (other := first.setdefault(hashes[name], name)) != name:
            copies.append(f"{name} is a copy of {other}")
        else:
            logs[place] = len(names)
            names.append(name)
    values = Values(OF_LOG)
    values.add(raw, logs, names)
    found = {
        (one, other): words
        for field in reversed(TIMED)
        for one, other, words in values.find_copies(field)
    }
    return copies + [
        f"{one} is a copy of {other}: {words}" for (one, other), words in sorted(found.items())
    ]


class Siblings:
    """What is kept of each run of an experiment while its tables are written, to compare the runs
    at the end.
    """

    def __init__(self, gaps: Sequence[str] = ()) -> None:
        #: what the run table lacks, in words
        self.gaps = gaps
        self.values = Values(
            OF_RUN, fields=("step_s", "own_s", "loss_sum", "grad_norm", "order_digest")
        )
        self.validations = Values(size=OF_RUN, fields=("loss_sum",), fewest=2)
        #: run → rows of (step, order digest, useful tokens, loss, gradient norm)
        self.counts: dict[str, np.ndarray] = {}
        #: run → mean loss of its last third of steps; step → run → loss of the validation there
        self.losses: dict[str, float] = {}
        self.validated: dict[int, dict[str, float]] = defaultdict(dict)
        #: step of a validation → run → mean loss of the training steps near it
        self.nearby: dict[int, dict[str, float]] = defaultdict(dict)
        #: runs whose training step 0 has another loss than the validation before it
        self.contradicting: set[str] = set()
        #: quantity → run → value that runs of equal shapes share, within the limits of `OF_A_SHAPE`
        self.of_a_shape: dict[str, dict[str, float]] = {name: {} for name in OF_A_SHAPE}
        #: boot → (monotonic start, run, wall clock ahead of it)
        self.clocks: dict[str, list[tuple[float, str, float]]] = defaultdict(list)
        #: run → (boot, begin, end on its monotonic clock), and its begin and end on the wall clock
        self.times: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
        #: rows of the tables `runs`, of valid and suspect runs, and `stores`, by the SHA-256 of
        #: their manifests
        self.rows: dict[str, Row] = {}
        self.stores: dict[str, Row] = {}

    def add(self, steps: pa.Table, events: pa.Table) -> None:
        """Add the merged step rows and the events of some runs, which lie together."""
        validated = pc.and_(pc.equal(events["event"], "validation"), pc.greater(events["step"], 0))
        later = events.filter(validated)
        first_losses = self._add_steps(steps, later) if len(steps) else {}
        codes, names = _number_runs(later)
        self.validations.add(later, codes, names)
        of_run: dict[str, list[Row]] = defaultdict(list)
        for row in events.select(OF_EVENTS).to_pylist():
            of_run[row["run_id"]].append(row)
        for row in _find_last_times(steps):
            of_run[row["run_id"]].append(row)
        for run_id, rows in of_run.items():
            self._add_events(run_id, rows)
            if run_id in first_losses and _find_other_loss(*first_losses[run_id], rows):
                self.contradicting.add(run_id)
            self._add_times(run_id, rows)

    def _add_steps(self, steps: pa.Table, validations: pa.Table) -> dict[str, tuple[float, float]]:
        """Add values, counts, the loss of the last third of steps and near validations, and what runs
        of equal shapes share. Return run → (summed loss, useful tokens) of step 0.
        """
        codes, names = _number_runs(steps)
        rows = Steps(steps, keys=codes * STEP_SPAN + steps["step"].to_numpy())
        logs, log_of_row = np.unique(codes * STEP_SPAN + rows["rank"], return_inverse=True)
        log_names = [
            f"{names[int(log // STEP_SPAN)]} rank {int(log % STEP_SPAN)}" for log in logs.tolist()
        ]
        self.values.add(steps, log_of_row, log_names)
        runs, step = np.divmod(rows.numbers, STEP_SPAN)
        begins = np.searchsorted(runs, np.arange(len(names)))
        ends = np.append(begins[1:], len(runs))
        self._add_counts(rows, step, runs, names)
        last = 2 * (step[ends - 1] + 1) // 3
        in_last_third = rows["step"] >= last[codes]
        loss, useful = (
            np.bincount(codes, np.where(in_last_third, values, 0.0))
            for values in (rows["loss_sum"], np.nan_to_num(rows["useful_tokens"]))
        )
        peak = rows.largest("memory_peak_bytes")[ends - 1]
        computing = rows.largest("step_s") - np.nan_to_num(rows.largest("data_wait_s"))
        each = computing / np.maximum(rows.sums("total_tokens"), 1)
        for code, run_id in enumerate(names):
            if loss[code] > 0 and useful[code] > 0:
                self.losses[run_id] = float(loss[code] / useful[code])
            if peak[code] > 0:
                self.of_a_shape["memory_peak_bytes"][run_id] = float(peak[code])
            counted = each[begins[code] + WARM_UP_STEPS : ends[code]]
            if len(counted) and (middle := float(np.median(counted))) > 0:
                self.of_a_shape["seconds of computing a token"][run_id] = middle
        sums = np.column_stack([rows.sums("loss_sum"), rows.sums("useful_tokens")])
        self._add_nearby_losses(rows.numbers, sums, names, validations)
        return {
            run_id: tuple(sums[begin].tolist())
            for run_id, begin in zip(names, begins.tolist(), strict=True)
            if step[begin] == 0
        }

    def _add_nearby_losses(
        self, numbers: np.ndarray, sums: np.ndarray, names: Sequence[str], validations: pa.Table
    ) -> None:
        """Add the mean training loss near each validation. `numbers`: code of the run × `STEP_SPAN` +
        step, ascending; `sums`: (summed loss, useful tokens) of each.
        """
        codes = {run_id: code for code, run_id in enumerate(names)}
        known = np.isfinite(sums).all(axis=1, keepdims=True)
        before = np.vstack([[0.0, 0.0], np.where(known, sums, 0.0).cumsum(axis=0)])
        at = set(zip(*(validations[name].to_pylist() for name in ("run_id", "step")), strict=True))
        for run_id, step in at:
            if run_id not in codes:
                continue
            begin = codes[run_id] * STEP_SPAN
            window = begin + max(step - NEARBY_STEPS, 0), begin + step + NEARBY_STEPS
            first, last = np.searchsorted(numbers, window)
            loss, useful = (before[last] - before[first]).tolist()
            if loss > 0 and useful > 0:
                self.nearby[step][run_id] = loss / useful

    def _add_counts(
        self, rows: Steps, step: np.ndarray, runs: np.ndarray, names: Sequence[str]
    ) -> None:
        """Add (step, order digest, useful tokens, loss, gradient norm) of complete steps, over all
        ranks; only those to be compared.
        """
        unknown = np.isnan(rows["order_digest"]) | np.isnan(rows["useful_tokens"])
        known = np.bincount(rows.place, weights=unknown, minlength=len(step)) == 0
        compared = (step < FIRST_STEPS) | (step % STRIDE == 0)
        chosen = compared & known & rows.whole()
        sums = [rows.sums(name) for name in ("useful_tokens", "loss_sum")]
        found = np.column_stack([step, rows.digests(), *sums, rows.largest("grad_norm")])[chosen]
        ends = np.searchsorted(runs[chosen], np.arange(1, len(names)))
        self.counts |= zip(names, np.split(found, ends), strict=True)

    def _add_events(self, run_id: str, rows: list[Row]) -> None:
        """Add the losses of validations, and the memory of activations."""
        for row in rows:
            if row["event"] == "validation" and row["loss_sum"] and row["useful_tokens"]:
                self.validated[row["step"]][run_id] = row["loss_sum"] / row["useful_tokens"]
        # each attempt measures anew: a rank's latest counts
        measured = {
            row["rank"]: row["activations_bytes"]
            for row in sorted(rows, key=lambda row: row["attempt"] or 0)
            if row["activations_bytes"]
        }
        if measured:
            self.of_a_shape["activations_bytes"][run_id] = sum(measured.values())
        if busy := _measure_processor_time(rows):
            self.of_a_shape["processor time a second"][run_id] = busy

    def _add_times(self, run_id: str, rows: list[Row]) -> None:
        """Add when the run was on which boot, by its events and the last step of each rank."""
        boots = {
            (row["attempt"], row["rank"]): row["boot"]
            for row in rows
            if row["event"] == "run_start"
        }
        spans: dict[tuple[int, str], list[float]] = defaultdict(list)
        for row in rows:
            if (boot := boots.get((row["attempt"], row["rank"]))) and row["t_mono_s"] is not None:
                spans[row["attempt"], boot].append(row["t_mono_s"])
                if row["event"] == "run_start" and row["t_unix_s"] is not None:
                    self.clocks[boot].append(
                        (row["t_mono_s"], run_id, row["t_unix_s"] - row["t_mono_s"])
                    )
        self.times[run_id] = [(boot, min(times), max(times)) for (_, boot), times in spans.items()]

    def judge(
        self, runs: Sequence[Row], found: Mapping[str, Findings | None], stores: Iterable[Row]
    ) -> list[Row]:
        """Return the rows of the table `validity`: what was `found` of each run alone (None of one
        that is missing), and by comparison with the others. `runs` and `stores` are rows of these
        tables.
        """
        alone = {run_id: of for run_id, of in found.items() if of is not None}
        self.rows = {
            row["run_id"]: row
            for row in runs
            if row["run_id"] in alone and not alone[row["run_id"]].sentences["invalid"]
        }
        self.stores = {
            store["manifest_sha256"]: store for store in stores if store.get("manifest_sha256")
        }
        together = judge_together(self, run_ids=[row["run_id"] for row in runs])
        return [
            describe_findings(run_id, [alone[run_id], together[run_id]])
            if run_id in alone
            else {"run_id": run_id, "validity": "missing", "reasons": MISSING}
            for run_id in together
        ]

    def groups(self, *columns: str) -> Iterator[list[str]]:
        """Ids of our own counted runs, by what their rows have in these columns."""
        found: dict[tuple, list[str]] = defaultdict(list)
        for run_id, row in self.rows.items():
            if not row["external"]:
                found[tuple(row[column] for column in columns)].append(run_id)
        yield from found.values()

    def find_copies(self, field: str) -> Iterator[tuple[str, str, str]]:
        """(run, other run, words) of runs with logs that share values; of one run's own see
        `find_copied_logs`.
        """
        for one, other, words in self.values.find_copies(field):
            a = one.partition(" ")[0]
            b = other.partition(" ")[0]
            if a != b:
                yield a, b, words

    def are_ours(self, *run_ids: str) -> bool:
        """Whether all are counted runs of ours."""
        return all(run_id in self.rows and not self.rows[run_id]["external"] for run_id in run_ids)

    def have_clocks(self, *run_ids: str) -> bool:
        """Whether all logs have a clock. Times that another trainer printed may be equal by their few
        digits.
        """
        return not any(
            run_id in self.rows and self.rows[run_id]["started_unix_s"] is None
            for run_id in run_ids
        )

    def family(self, run_id: str) -> tuple:
        """What runs share whose batches are equal: the approach or its twin, and the storage of one
        without a twin.
        """
        row = self.rows[run_id]
        twin = TWINS.get(row["approach"], row["approach"])
        return twin, "" if row["approach"] in TWINS else row["storage"]

    def have_equal_samples(self, one: str, other: str) -> bool:
        """Whether two runs train on equal samples: by seed and family, or by order digest and useful
        tokens of each step, as of an own approach that reads what another one does.
        """
        (seed, family), (other_seed, other_family) = (
            (self.rows[run_id]["seed"], self.family(run_id)[0]) for run_id in (one, other)
        )
        if seed != other_seed or family == other_family:
            return seed == other_seed
        if one not in self.counts or other not in self.counts:
            return False
        known, expected = (self.counts[run_id][:, :3] for run_id in (one, other))
        return len(known) > 0 and np.array_equal(known, expected)


@between(
    "timings, norms and losses of steps",
    "not those of another run",
    "other runs",
    "invalid",
    "half of them",
)
def _find_copied_runs(siblings: Siblings) -> Found:
    """Runs of one seed and one family of batches may have equal losses; equal timings no two runs
    have.
    """
    for a, b, words in siblings.validations.find_copies("loss_sum"):
        if siblings.are_ours(a, b) and siblings.rows[a]["seed"] != siblings.rows[b]["seed"]:
            yield a, f"its validations are a copy of those of run {b}: {words}"
            yield b, f"its validations are a copy of those of run {a}: {words}"
    for field in ("step_s", "own_s", "loss_sum", "grad_norm"):
        for a, b, words in siblings.find_copies(field):
            if (field.endswith("_s") and siblings.have_clocks(a, b)) or (
                siblings.are_ours(a, b) and not siblings.have_equal_samples(a, b)
            ):
                yield a, f"a copy of run {b}: {words}"
                yield b, f"a copy of run {a}: {words}"


@between(
    "useful tokens of all steps",
    f"as near the share of the store as rows drawn from it are, but for a chance of {CHANCE:g}",
    "store manifest",
    "invalid",
)
def _find_other_shares(siblings: Siblings) -> Found:
    """The share of a row lies between 0 and 1, so that Hoeffding's bound (1963) holds whatever the
    rows are; it holds without replacement, too.
    """
    for run_id, row in siblings.rows.items():
        store = siblings.stores.get(row["store_sha256"], {})
        counts = siblings.counts.get(run_id, np.zeros((0, 5)))
        of_text = (row["objective"], row["labels"]) == ("causal", "all")
        if not len(counts) or not of_text or row["approach"] not in ("packed", *TWINS):
            continue
        if store.get("format") not in ("padded", "packed"):
            continue
        rows = len(counts) * row["global_batch"]
        share = float(counts[:, 2].sum()) / (rows * row["sequence_length"])
        expected = store["useful_tokens"] / store["total_tokens"]
        both = ((share, expected), (1 - share, 1 - expected))
        if rows * sum(p * math.log(p / q) for p, q in both if p > 0) > -math.log(CHANCE):
            words = f"of its store {100 * expected:.3g} %"
            yield run_id, f"{100 * share:.3g} % of its positions have a useful token, {words}"


@between("useful tokens of a step", "those of a run with its samples", "other runs", "invalid")
def _find_other_counts(siblings: Siblings) -> Found:
    """Equal order digests are equal samples, which have equal numbers of useful tokens."""
    for ids in siblings.groups("factors", "science", "repeat"):
        by_batch: dict[tuple, dict[str, float]] = defaultdict(dict)
        for run_id in ids:
            for step, digest, useful, *_ in siblings.counts.get(run_id, np.zeros((0, 5))).tolist():
                by_batch[siblings.family(run_id), step, digest][run_id] = useful
        named = set()
        for (_, step, _), of in by_batch.items():
            most = _find_majority(of.values())
            for run_id, useful in of.items():
                if run_id in named or useful == most:
                    continue
                named.add(run_id)
                other = next(i for i, count in of.items() if count != useful)
                words = (
                    f"useful tokens at step {step:.0f}, where {other} has {of[other]:.0f} in the "
                    "same samples"
                )
                yield run_id, f"{useful:.0f} {words} (equal order digest)"


@between(
    "order digest of a step",
    "that of runs which read the same text in the same order",
    "other runs",
    "suspect",
)
def _find_other_orders(siblings: Siblings) -> Found:
    """The samples of a step follow from text and seed alone, whatever the layout."""
    for ids in siblings.groups("science", "repeat", "arm"):
        by_step: dict[tuple, dict[str, float]] = defaultdict(dict)
        for run_id in ids:
            for step, digest, *_ in siblings.counts.get(run_id, np.zeros((0, 5))).tolist():
                by_step[siblings.family(run_id), step][run_id] = digest
        named = set()
        for (_, step), of in by_step.items():
            most = _find_majority(of.values())
            for run_id, digest in of.items():
                if run_id not in named and digest != most:
                    named.add(run_id)
                    other = next(i for i, value in of.items() if value != digest)
                    words = f"its order digest at step {step:.0f} is {digest:.0f}"
                    yield run_id, f"{words}, that of {other} {of[other]:.0f}"


def _find_majority(values: Iterable[float]) -> float | None:
    """Return the value that occurs most; None where two of them occur as often."""
    (most, n), *others = Counter(values).most_common()
    return None if others and others[0][1] == n else most


@between(
    "useful tokens of validations",
    "those of runs which validated on the same rows",
    "other runs",
    "suspect",
)
def _find_other_validation_tokens(siblings: Siblings) -> Found:
    """Labels of held-out rows follow from store and settings alone."""
    for ids in siblings.groups("science", "repeat", "arm", "validation_store_sha256"):
        counts = {
            i: siblings.rows[i]["validation_tokens"]
            for i in ids
            if siblings.rows[i]["validation_tokens"] is not None
        }
        most = _find_majority(counts.values()) if counts else None
        for run_id, count in counts.items():
            if count != most and len(set(counts.values())) > 1:
                other = next(i for i, value in counts.items() if value != count)
                words = f"{count} useful tokens, {other} on {counts[other]} of the same rows"
                yield run_id, f"it validated on {words}"


@between(
    "loss and gradient norm of a step",
    "those of a run with its samples",
    "other runs",
    "suspect",
    "as between sums in another order: 4e-6 at first in fp32 (query `order`)",
)
def _find_other_losses_of_samples(siblings: Siblings) -> Found:
    """Equal weights and samples have equal losses and gradients in every layout, within the rounding
    of each. Which of two is wrong, their own validation may know. Where gradients are rounded, weights
    differ after the first step, and norms by more than losses.
    """
    for ids in siblings.groups("factors", "science", "repeat", "arm", "resumed_from"):
        by_batch: dict[tuple, dict[str, list[float]]] = defaultdict(dict)
        for run_id in ids:
            for step, digest, _, *values in siblings.counts.get(run_id, np.zeros((0, 5))).tolist():
                by_batch[siblings.family(run_id), step, digest][run_id] = values
        named = set()
        rounded = {i for i in ids if siblings.rows[i]["compression"] == "bf16"}
        least_trusted = rounded | siblings.contradicting
        for (_, step, _), of in by_batch.items():
            limits = {
                i: _find_loss_tolerance(
                    "bf16" if i in rounded else siblings.rows[i]["precision"], step
                )
                for i in of
            }
            for place, name in enumerate(("loss", "gradient norm")):
                skipped = rounded if place and step > 0 else set()
                known = {
                    i: values[place]
                    for i, values in of.items()
                    if values[place] > 0 and i not in skipped
                }
                trusted = [i for i in known if i not in least_trusted] or list(known)
                if len(known) < 2:
                    continue
                middle = statistics.median(known[i] for i in trusted)
                for run_id, value in known.items():
                    least = limits[run_id]
                    if place:
                        least = max(LEAST_NORM, NORM_TIMES * least)
                    if run_id not in named and abs(value / middle - 1) > least / 2:
                        named.add(run_id)
                        words = f"{value:.6g}, beside {middle:.6g} of the same samples"
                        yield run_id, f"its {name} at step {step:.0f} is {words}"


def _find_loss_tolerance(precision: str | None, step: float) -> float:
    """Relative difference of losses that another order of sums makes (`loss_tolerance` of the
    queries).
    """
    first, last = (-18, -8) if precision == "fp32" else (-9, -5)
    return 2.0 ** min(last, first + max(0.0, step - 19) / 5)


def _find_other_shape(siblings: Siblings, quantity: str) -> Found:
    """Approaches with rows of one length compute and hold the same. Each approach has one voice,
    however many repeats it has; of two, nobody knows which is wrong.
    """
    limits = OF_A_SHAPE[quantity]
    for ids in siblings.groups(*SHAPE):
        values = {i: v for i, v in siblings.of_a_shape[quantity].items() if i in ids}
        cells: dict[str, list[float]] = defaultdict(list)
        for run_id, value in values.items():
            if siblings.rows[run_id]["approach"] != "length-bucketed":
                cells[siblings.rows[run_id]["series"]].append(math.log(value))
        middles = {cell: statistics.median(found) for cell, found in cells.items()}
        for run_id, value in values.items():
            cell = siblings.rows[run_id]["series"]
            if cell not in cells:
                continue
            beside = []
            if len(cells[cell]) > 2:
                others = np.array(cells[cell])
                others = np.delete(others, np.flatnonzero(others == math.log(value))[0])
                least = max(math.log(limits[0]), SHAPE_SPREADS * measure_spread(others))
                beside.append((least, float(np.median(others)), "repeats"))
            if len(cells) > 1:
                middle = statistics.median(middles.values())
                beside.append((math.log(limits[1]), middle, "approaches"))
            for limit, middle, of in beside:
                apart = math.log(value) - middle
                if abs(apart) > limit:
                    ratio = f"{math.exp(apart):.3g} × that of other {of}"
                    yield run_id, f"its {quantity} is {ratio}"
                    break


def _describe_limits(own: float, other: float) -> str:
    of_approaches = f"; of approaches {other:g}×" if other < math.inf else ""
    return f"of repeats {SHAPE_SPREADS:g} spreads and {own:g}×{of_approaches}"


for _quantity, _limits in OF_A_SHAPE.items():
    between(
        f"{_quantity} beside other runs",
        must="as in runs of equal shapes",
        known_from="other runs",
        word="caution",
        tolerance=_describe_limits(*_limits),
    )(functools.partial(_find_other_shape, quantity=_quantity))


def _measure_processor_time(events: Iterable[Row]) -> float | None:
    """Return the seconds that processes were on cores in a second of the newest attempt, over all
    ranks; None where no rank logs them.
    """
    begun: dict[tuple[int, int], float] = {}
    spent: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        log = event["attempt"], event["rank"]
        if event["event"] == "init_done" and event["t_mono_s"] is not None:
            begun[log] = event["t_mono_s"]
        elif event["event"] == "run_stop" and event["cpu_s"] and log in begun:
            spent[event["attempt"]].append((event["cpu_s"], event["t_mono_s"] - begun[log]))
    if not spent:
        return None
    computed, took = map(sum, zip(*spent[max(spent)], strict=True))
    return computed / took if took > 0 and computed > 0 else None


@between("order of samples", "another one in each step and each repeat", "other runs", "suspect")
def _find_repeated_orders(siblings: Siblings) -> Found:
    """A digest is made from the step and the samples of its slots: no two steps of a run have the
    same.
    """
    known = {
        i: counts for i, counts in siblings.counts.items() if i in siblings.rows and len(counts)
    }
    if not known:
        raise NotCheckedError("no log holds order digests")
    for run_id, counts in known.items():
        if repeated := len(counts) - len(np.unique(counts[:, 1])):
            yield (
                run_id,
                (
                    f"{repeated} of {len(counts)} steps have the samples of another step (equal "
                    "order digest)"
                ),
            )
    for a, b, words in siblings.find_copies("order_digest"):
        if a in known and b in known and siblings.rows[a]["seed"] != siblings.rows[b]["seed"]:
            for run_id, other in ((a, b), (b, a)):
                yield (
                    run_id,
                    f"it trained on the samples of run {other}, which has another seed: {words}",
                )


@between(
    "validation before step 0",
    "equal in all approaches of a repeat",
    "other runs",
    "suspect",
    f"{SAME_LOSS:g} in fp32, {SAME_LOSS_16:g} in 16-bit formats",
)
def _find_other_first_validations(siblings: Siblings) -> Found:
    """Equal weights have equal losses on equal text."""
    for ids in siblings.groups(
        "science",
        "arm",
        "precision",
        "validation_store_sha256",
        "validation_attention",
        "validation_tokens",
    ):
        losses = {i: siblings.validated[0][i] for i in ids if i in siblings.validated[0]}
        if not losses:
            continue
        limit = SAME_LOSS if siblings.rows[ids[0]]["precision"] == "fp32" else SAME_LOSS_16
        ascending = sorted(losses.values())
        # which of two is right, nobody knows
        median = sum(ascending) / 2 if len(losses) == 2 else ascending[len(losses) // 2]
        for run_id, loss in losses.items():
            if abs(loss / median - 1) > limit / 2:
                other = min(
                    (i for i in losses if i != run_id), key=lambda i: abs(losses[i] - median)
                )
                yield (
                    run_id,
                    (
                        f"its validation before step 0 gave {loss:.6g}, that of {other} "
                        f"{losses[other]:.6g}"
                    ),
                )


@between(
    "loss in the last third of the steps, and of the last validation",
    "near that of its repeats",
    "other runs",
    "suspect",
    f"{LOSS_SPREADS:g} spreads of theirs and {LOSS_RATIO:g}×",
)
def _find_outlying_losses(siblings: Siblings) -> Found:
    """A loss in other units, below what any repeat reached, or diverged. Two runs do not say which
    is wrong. Runs whose first loss contradicts their own validation are no measure of others.

    Honest losses have spikes: what training and validation say alike happened in the run. A
    validation is named where it leaves the training near it as well.
    """
    trained = "in the last third of the steps"
    compared = [
        (trained, siblings.losses, siblings.validated.get(max(siblings.validated, default=0), {}))
    ]
    compared += [
        (f"in the validation at step {step}", losses, siblings.nearby[step])
        for step, losses in sorted(siblings.validated.items())
        if step
    ]
    for ids in siblings.groups(
        "factors", "approach", "storage", "science_per_rank", "global_batch", "steps_asked"
    ):
        for (where, losses, beside), run_id in itertools.product(compared, ids):
            others = [i for i in ids if i not in {run_id, *siblings.contradicting}]
            ratio = _find_outlying_ratio(losses, run_id, others)
            is_far = where == trained and abs(math.log(ratio)) > math.log(LOSS_RATIO)
            if ratio == 1 or not (is_far or _leaves_beside(losses, beside, run_id, others)):
                continue
            unit = next(
                (
                    f", as in {unit}"
                    for factor, unit in UNITS.items()
                    if abs(ratio / factor - 1) < 0.03
                ),
                "",
            )
            words = (
                "below what any of its repeats reached"
                if ratio < 1
                else "above that of its repeats (diverged?)"
            )
            yield run_id, f"its loss is {words}: {ratio:.3g} × theirs {where}{unit}"


def _find_outlying_ratio(losses: Mapping[str, float], run_id: str, repeats: Sequence[str]) -> float:
    """Return the run's loss over the median of its repeats; 1 within the limits, and where fewer
    than two repeats are known.
    """
    others = np.log([losses[other] for other in repeats if other in losses])
    if run_id not in losses or len(others) < 2:
        return 1.0
    ratio = losses[run_id] / math.exp(float(np.median(others)))
    least = math.log(LOSS_RATIO if len(others) < MANY else LOSS_RATIO_OF_MANY)
    within = abs(math.log(ratio)) <= max(LOSS_SPREADS * measure_spread(others), least)
    return 1.0 if within else ratio


def _leaves_beside(
    losses: Mapping[str, float],
    beside: Mapping[str, float],
    run_id: str,
    repeats: Sequence[str],
) -> bool:
    """Whether the run's loss over the one beside it in the same run lies beyond those of all repeats,
    on the side where its loss lies; so too where a run lacks the one beside it.
    """
    known = [i for i in (run_id, *repeats) if i in losses and i in beside]
    if run_id not in known or len(known) < 2:
        return True
    own, *others = [losses[i] / beside[i] for i in known]
    above = losses[run_id] > float(np.median([losses[i] for i in known[1:]]))
    return own > max(others) if above else own < min(others)


@expect(
    "loss of training step 0",
    must="that of the validation before it, of the same weights, which know no text yet",
    known_from="logs",
    word="suspect",
    tolerance=f"{100 * FIRST_LOSS:g} %, and {TOKEN_SPREAD:g} nats over the root of the tokens",
)
def _find_other_first_loss(evidence: Evidence) -> Iterator[str]:
    """Both losses are near the logarithm of the vocabulary's size, on any text. Weights of another
    run know some texts better than others.
    """
    steps = evidence.steps
    if evidence.settings.resume_from or not len(steps) or steps.numbers[0] != 0:
        return
    loss, useful = (float(steps.sums(name)[0]) for name in ("loss_sum", "useful_tokens"))
    if ratio := _find_other_loss(loss, useful, evidence.events):
        yield (
            f"the loss of training step 0 is {ratio:.3g} × that of the validation before it, of the "
            "same weights"
        )


def _find_other_loss(loss: float, useful: float, events: Iterable[Row]) -> float | None:
    """Return the ratio of the loss of training step 0, of so many useful tokens, to that of the
    validation before it; None where they agree, or one is missing.
    """
    for event in events:
        if event["event"] != "validation" or event["step"] or loss <= 0 or useful <= 0:
            continue
        if (event["loss_sum"] or 0) > 0 and (event["useful_tokens"] or 0) > 0:
            validated = event["loss_sum"] / event["useful_tokens"]
            ratio = loss / useful / validated
            few = min(useful, event["useful_tokens"])
            if abs(math.log(ratio)) > FIRST_LOSS + TOKEN_SPREAD / math.sqrt(few):
                return ratio
    return None


@between(
    "text_cut",
    "that of runs which read the same text in rows of this length, and of its padded store",
    "other runs, store manifest",
    "suspect",
    f"between runs none, of a store {CUT_OF_STORE:g} and {100 * CUT_OF_STORE_SHARE:g} %",
)
def _find_other_cuts(siblings: Siblings) -> Found:
    """A run counts in a sample of its documents, which is the same in each run of this text."""
    stored = {
        (store["corpus"], store["tokenizer"], store["sequence_length"]): store["cut_tokens"]
        / (store["document_tokens"] - store["documents"])
        for store in siblings.stores.values()
        if store["format"] == "padded" and store["split"] == "train" and store["document_tokens"]
    }
    for ids in siblings.groups("corpus", "tokenizer", "sequence_length", "approach", "code_digest"):
        texts = [siblings.rows[run_id]["text_cut"] for run_id in ids]
        most, _ = Counter(texts).most_common(1)[0]
        row = siblings.rows[ids[0]]
        for run_id, text in zip(ids, texts, strict=True):
            if text != most:
                yield run_id, f"it counted {text} of its text as cut, other runs {most}"
            for corpus, share in json.loads(text or "{}").items():
                expected = stored.get((corpus, row["tokenizer"], row["sequence_length"]), share)
                if abs(share - expected) > CUT_OF_STORE + CUT_OF_STORE_SHARE * expected:
                    yield (
                        run_id,
                        f"it counted {share:.4g} of {corpus} as cut, its padded store {expected:.4g}",
                    )


@between("validation", "on held-out text", "store manifest", "invalid")
def _find_training_splits(siblings: Siblings) -> Found:
    """The rows validated on are those of a store of another split than the training's."""
    for run_id, row in siblings.rows.items():
        sha256 = row["validation_store_sha256"]
        if sha256 and (
            sha256 == row["store_sha256"] or siblings.stores.get(sha256, {}).get("split") == "train"
        ):
            yield run_id, "it validated on text of the training split"


@expect(
    "validation loss",
    must="not that of a step beside it or of another validation",
    known_from="logs",
    word="invalid",
    tolerance="1e-9",
)
def _find_training_losses(evidence: Evidence) -> Iterator[str]:
    """After step 0, where a model that knows nothing may have the same loss on any text; and not of
    other programs, which log rounded losses.
    """
    steps = evidence.steps
    run = evidence.settings
    seen: dict[float, int] = {}
    if not len(steps):
        return
    loss, useful = (steps.sums(name) for name in ("loss_sum", "useful_tokens"))
    mean = dict(zip(steps.numbers.tolist(), (loss / np.maximum(useful, 1)).tolist(), strict=True))
    exact = run.arm == OURS and run.precision != "bf16-true"  # whose updates may be rounded away
    changes = np.nan_to_num(steps["learning_rate"]) * ~(steps["skipped"] > 0)
    for event in evidence.named("validation"):
        if event["step"] is None or not (event["loss_sum"] and event["useful_tokens"]):
            continue
        earlier = seen.setdefault(event["loss_sum"], event["step"])
        if exact and changes[(steps["step"] >= earlier) & (steps["step"] < event["step"])].any():
            yield (
                f"the validations at steps {earlier} and {event['step']} have one loss, though "
                "weights changed"
            )
            return
        value = event["loss_sum"] / event["useful_tokens"]
        for step in (event["step"] - 1, event["step"]) if event["step"] else ():
            if abs(mean.get(step, math.inf) / value - 1) < 1e-9:
                yield (
                    f"the validation loss at step {event['step']} is the training loss of step "
                    f"{step}"
                )
                return


@between(
    "wall clock", "not ahead of later runs' on one boot", "other runs", "suspect", f"{CLOCK_S:g} s"
)
def _find_clocks_ahead(siblings: Siblings) -> Found:
    """The wall clock of one boot goes ahead of the monotonic one (while the machine sleeps), never
    back.
    """
    for starts in siblings.clocks.values():
        least = float("inf")
        for _, run_id, offset in sorted(starts, reverse=True):
            if offset > least + CLOCK_S:
                yield (
                    run_id,
                    (
                        f"its wall clock is {offset - least:.4g} s ahead of later runs' on this "
                        "machine"
                    ),
                )
            least = min(least, offset)


@between("time of a run", "no other run of the experiment on its machine", "other runs", "suspect")
def _find_overlaps(siblings: Siblings) -> Found:
    """Runs of one boot by its monotonic clock; of nodes that state no boot by the wall clock. Runs
    that the launcher lets share a node are no surprise, and what runs of other experiments did at
    the time is not known here.
    """
    spans: dict[tuple[str, str], list[tuple[float, float, str]]] = defaultdict(list)
    for run_id, row in siblings.rows.items():
        for boot, begin, end in siblings.times.get(run_id, []):
            spans["boot", boot].append((begin, end, run_id))
        started = row.get("started_unix_s")
        stopped = row.get("stopped_unix_s")
        if not siblings.times.get(run_id) and started is not None and stopped is not None:
            for node in filter(None, (row.get("node_names") or "").split(", ")):
                spans["node", node].append((started, stopped - WALL_S, run_id))
    if not spans:
        raise NotCheckedError("no log states the boot or the node that it was written on")
    most: dict[str, tuple[float, str]] = {}
    for of in spans.values():
        running: list[tuple[float, str]] = []
        for begin, end, run_id in sorted(of):
            running = [(until, other) for until, other in running if until > begin]
            for until, other in running:
                shared = min((siblings.rows[i].get("share") or 1) for i in (run_id, other)) > 1
                if other != run_id and not shared:
                    overlap = min(until, end) - begin
                    most[run_id] = max(most.get(run_id, (0.0, "")), (overlap, other))
                    most[other] = max(most.get(other, (0.0, "")), (overlap, run_id))
            running.append((end, run_id))
    for run_id, (seconds, other) in most.items():
        yield (
            run_id,
            (
                f"overlaps run {other} by {seconds:.3g} s on one machine: its times are not "
                "those of "
                "a run alone"
            ),
        )


@between(
    "boot and memory of the machine",
    "those of the other runs",
    "other runs",
    "caution",
    f"{100 * OTHER_MEMORY:g} %",
)
def _find_other_machines(siblings: Siblings) -> Found:
    """Times of two machines of one type, or of one machine before and after a restart, may
    differ.
    """
    boots = {
        run_id: of[0][0] for run_id, of in siblings.times.items() if of and run_id in siblings.rows
    }
    memory = {
        i: row["machine_memory_bytes"]
        for i, row in siblings.rows.items()
        if row["machine_memory_bytes"]
    }
    both: tuple[dict[str, Any], ...] = (boots, memory)
    for of in filter(None, both):
        ((most, _),) = Counter(of.values()).most_common(1)
        other = next((run_id for run_id, value in of.items() if value == most), None)
        for run_id, value in of.items():
            if of is memory and abs(value / most - 1) > OTHER_MEMORY:
                yield (
                    run_id,
                    (
                        f"its machine has {value / 1e9:.5g} GB of memory, that of {other} "
                        f"{most / 1e9:.5g} GB"
                    ),
                )
            elif of is boots and value != most:
                yield (
                    run_id,
                    f"it ran on another machine than {other}, or after a restart (other boot)",
                )


@between("run table", "all runs of its design", "the plan", "caution")
def _find_gaps(siblings: Siblings) -> Found:
    """Runs that somebody removed from the table may be those with unwelcome results."""
    for run_id in siblings.rows if siblings.gaps else ():
        yield run_id, f"the run table {', '.join(siblings.gaps)}"


@expect(
    "repeat and levels of a cell",
    must="those of the run's settings",
    known_from="the plan",
    word="invalid",
)
def _find_other_levels(evidence: Evidence) -> Iterator[str]:
    """The run table says which cell a run belongs to, its settings say what it did."""
    if evidence.run is None or evidence.row.get("external"):
        return
    repeat = evidence.row["repeat"]
    if repeat is not None and repeat != evidence.run.repeat:
        yield f"the run table calls it repeat {repeat}, its settings repeat {evidence.run.repeat}"
    for key, level in (
        part.partition("=")[::2] for part in (evidence.row["cell"] or "").split(", ")
    ):
        value: Any = evidence.run
        for name in key.split("."):
            value = getattr(value, name, None)
        if (
            isinstance(value, (int, float, str))
            and level != format_cell({key: value}).partition("=")[2]
        ):
            yield f"the run table calls it {key}={level}, its settings have {value}"


def _number_runs(rows: pa.Table) -> tuple[np.ndarray, list[str]]:
    """Return the number of each row's run, and the runs by number, in the order of the rows."""
    encoded = rows["run_id"].combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _sort_distinct(values: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values of each owner, by owner and value, and their owners."""
    order = np.lexsort((values, owner))
    values = values[order]
    owner = owner[order]
    first = np.ones(len(values), dtype=bool)
    first[1:] = (values[1:] != values[:-1]) | (owner[1:] != owner[:-1])
    return values[first], owner[first]


def _find_last_times(steps: pa.Table) -> list[Row]:
    """Return the last time of each rank's steps in each attempt, on its monotonic clock, as events."""
    of = ["run_id", "attempt", "rank"]
    last = steps.group_by(of, use_threads=False).aggregate([("t_mono_s", "max")])
    nothing = dict.fromkeys(OF_EVENTS)
    return [
        nothing
        | {name: row[name] for name in of}
        | {"event": "step", "t_mono_s": row["t_mono_s_max"]}
        for row in last.to_pylist()
        if row["t_mono_s_max"] is not None
    ]
