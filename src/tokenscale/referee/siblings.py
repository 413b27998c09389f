"""Runs of an experiment against each other: values that must be equal or must differ, machines,
clocks, run table.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokenscale.analysis import queries, tables
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
from tokenscale.settings.experiments import format_cell
from tokenscale.settings.run import OURS

FILES = ("siblings.sql",)
QUERIES = ("steps_global",)
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
#: ratio of losses → what they are in
UNITS = {
    1 / math.log(2): "bits",
    1 / math.log(10): "decimal digits",
    math.log(2): "nats beside bits",
}
#: columns of steps whose values runs do not share; and a row for two runs that do
FIELDS = ("step_s", "own_s", "loss_sum", "grad_norm", "order_digest")
COPIES = pa.schema([(name, pa.string()) for name in ("compared", "run_id", "other", "words")])
#: how a sentence on a first loss begins
FIRST_LOSS_DIFFERS = "the loss of training step 0 is"
#: macro of `siblings.sql` → limit
LIMITS: dict[str, Any] = {
    # steps whose counts are compared: all of the first ones, then every `stride`-th
    "first_steps": 256,
    "stride": 64,
    "warmup_steps": WARM_UP_STEPS,
    # steps before and after a validation whose training losses are its witness
    "nearby_steps": 16,
    # relative difference of losses of the same weights on the same text that another order of sums
    # makes, by precision: 5e-8 was measured in fp32 between parallel layouts
    "same_loss": 1e-6,
    "same_loss_16": 2e-3,
    # how far a run's loss lies from its repeats': so many spreads of theirs, and least ratio
    "loss_spreads": 6.5,
    "loss_ratio": 1.1,
    # repeats whose spread is believed, and the least ratio beside so many
    "many": 5,
    "loss_ratio_of_many": 1.03,
    # share of a loss's distance from its repeats' that its witness does not have, at least
    "told_alone": 0.5,
    "first_loss_differs": FIRST_LOSS_DIFFERS,
    # spreads of its repeats by which a run of their shape differs from them at least
    "shape_spreads": 6.5,
    # times that norms of equal batches differ by more than their losses, at least; and their least
    # difference
    "norm_times": 64,
    "least_norm": 1e-3,
    # relative difference of the memory of two machines of one type
    "other_memory": 0.005,
    # difference of the share of a text that a run counted as cut, in a sample, from its padded
    # store's: a share of the text, and of the share
    "cut_of_store": 0.01,
    "cut_of_store_share": 0.05,
    # probability that the useful tokens of rows drawn from a store lie farther from their mean
    "chance": 1e-9,
    "clock_s": CLOCK_S,
    # seconds that wall clocks of one machine may overlap by without a run having company
    "wall_s": 2.0,
}
#: above any rank: a run's number times it, and that of a rank, are one key
STEP_SPAN = 1 << 32
#: what is said of a run that has no record
MISSING = "not started, or its folder is elsewhere (no run.json)"


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
    """Runs of an experiment that are compared with each other: by values of their steps, while the
    tables are read, and by queries over the tables (`siblings.sql`). `gaps` is in words what the run
    table lacks.
    """

    def __init__(self, gaps: Sequence[str] = ()) -> None:
        self._gaps = gaps
        self._values = Values(OF_RUN, fields=FIELDS)
        self._validations = Values(size=OF_RUN, fields=("loss_sum",), fewest=2)

    def add(self, steps: pa.Table, events: pa.Table) -> None:
        """Add the merged step rows and the events of some runs, which lie together."""
        runs, names = _number_runs(steps)
        logs, log_of_row = np.unique(
            runs * STEP_SPAN + steps["rank"].to_numpy(), return_inverse=True
        )
        log_names = [
            f"{names[int(log // STEP_SPAN)]} rank {int(log % STEP_SPAN)}" for log in logs.tolist()
        ]
        self._values.add(steps, log_of_row, log_names)
        validated = pc.and_(pc.equal(events["event"], "validation"), pc.greater(events["step"], 0))
        later = events.filter(validated)
        self._validations.add(later, *_number_runs(later))

    def connect(self, connection: duckdb.DuckDBPyConnection, judged: Iterable[Row]) -> None:
        """Compare the runs, whose tables the connection has (`queries.open_tables`). `judged` are rows of
        the table `validity`, of what was found of each run alone.
        """
        names = ("quantity", "of_repeats", "of_approaches")
        limits = [dict(zip(names, (name, *of), strict=True)) for name, of in OF_A_SHAPE.items()]
        units = [{"factor": factor, "unit": unit} for factor, unit in UNITS.items()]
        connection.register(tables.JUDGED, tables.of_rows(tables.JUDGED, judged))
        connection.register("copies", pa.Table.from_pylist([*self._find_copies()], schema=COPIES))
        connection.register("shape_limits", pa.Table.from_pylist(limits))
        connection.register("loss_units", pa.Table.from_pylist(units))
        connection.register("gaps", pa.table({"gap": pa.array(self._gaps, pa.string())}))
        for name, limit in LIMITS.items():
            connection.execute(f"CREATE MACRO {name}() AS {limit!r}")
        queries.create_views(connection)
        connection.execute((Path(__file__).parent / FILES[0]).read_text(encoding="utf-8"))
        self._connection = connection

    def find(self, table: str, condition: str = "true") -> Found:
        """Yield what `siblings.sql` found in one of its tables. Raises NotCheckedError."""
        rows = self._connection.execute(f"SELECT run_id, sentence FROM {table} WHERE {condition}")
        for run_id, sentence in rows.fetchall():
            if run_id is None:
                raise NotCheckedError(sentence)
            yield run_id, sentence

    def judge(
        self, connection: duckdb.DuckDBPyConnection, found: Mapping[str, Findings | None]
    ) -> list[Row]:
        """Return the rows of the table `validity`: what was `found` of each run alone (None of one
        that is missing), and by comparison with the others, whose tables are those of the connection.
        """
        alone = {run_id: of for run_id, of in found.items() if of is not None}
        self.connect(connection, [describe_findings(run_id, [of]) for run_id, of in alone.items()])
        together = judge_together(self, run_ids=found)
        return [
            describe_findings(run_id, [alone[run_id], together[run_id]])
            if run_id in alone
            else {"run_id": run_id, "validity": "missing", "reasons": MISSING}
            for run_id in together
        ]

    def _find_copies(self) -> Iterator[Row]:
        """Yield rows of the table `copies`; of one run's own logs see `find_copied_logs`."""
        compared = [("validations", self._validations, "loss_sum")]
        compared += [(field, self._values, field) for field in FIELDS]
        for name, values, field in compared:
            for one, other, words in values.find_copies(field):
                run_id = one.partition(" ")[0]
                other_run = other.partition(" ")[0]
                if run_id != other_run:
                    row = (name, run_id, other_run, words)
                    yield dict(zip(COPIES.names, row, strict=True))


def compare(table: str, condition: str = "true", **expectation: Any) -> None:
    """Register the expectation that a table of `siblings.sql` is empty."""
    between(**expectation)(lambda siblings: siblings.find(table, condition))


compare(
    "copied_runs",
    value="timings, norms and losses of steps",
    must="not those of another run",
    known_from="other runs",
    word="invalid",
    tolerance="half of them",
)
compare(
    "other_shares",
    value="useful tokens of all steps",
    must="as near the share of the store as rows drawn from it are, but for a chance of "
    f"{LIMITS['chance']:g}",
    known_from="store manifest",
    word="invalid",
)
compare(
    "other_counts",
    value="useful tokens of a step",
    must="those of a run with its samples",
    known_from="other runs",
    word="invalid",
)
compare(
    "other_orders",
    value="order digest of a step",
    must="that of runs which read the same text in the same order",
    known_from="other runs",
    word="suspect",
)
compare(
    "other_validation_tokens",
    value="useful tokens of validations",
    must="those of runs which validated on the same rows",
    known_from="other runs",
    word="suspect",
)
compare(
    "other_losses_of_samples",
    value="loss and gradient norm of a step",
    must="those of a run with its samples",
    known_from="other runs",
    word="suspect",
    tolerance="as between sums in another order: 4e-6 at first in fp32 (query `order`)",
)


def _describe_limits(own: float, other: float) -> str:
    of_approaches = f"; of approaches {other:g}×" if other < math.inf else ""
    return f"of repeats {LIMITS['shape_spreads']:g} spreads and {own:g}×{of_approaches}"


for _quantity, _limits in OF_A_SHAPE.items():
    compare(
        "other_shapes",
        condition=f"quantity = '{_quantity}'",
        value=f"{_quantity} beside other runs",
        must="as in runs of equal shapes",
        known_from="other runs",
        word="caution",
        tolerance=_describe_limits(*_limits),
    )
compare(
    "repeated_orders",
    value="order of samples",
    must="another one in each step and each repeat",
    known_from="other runs",
    word="suspect",
)
compare(
    "other_first_validations",
    value="validation before step 0",
    must="equal in all approaches of a repeat",
    known_from="other runs",
    word="suspect",
    tolerance=f"{LIMITS['same_loss']:g} in fp32, {LIMITS['same_loss_16']:g} in 16-bit formats",
)
compare(
    "outlying_losses",
    value="loss in the last third of the steps, and of the last validation",
    must="near that of its repeats",
    known_from="other runs",
    word="suspect",
    tolerance=f"{LIMITS['loss_spreads']:g} spreads of theirs and {LIMITS['loss_ratio']:g}×",
)


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
    loss = float(steps.sums("loss_sum")[0])
    useful = float(steps.sums("useful_tokens")[0])
    for event in evidence.named("validation"):
        held_out = event["loss_sum"] or 0
        tokens = event["useful_tokens"] or 0
        if event["step"] or min(loss, useful, held_out, tokens) <= 0:
            continue
        ratio = (loss / useful) / (held_out / tokens)
        if abs(math.log(ratio)) > FIRST_LOSS + TOKEN_SPREAD / math.sqrt(min(useful, tokens)):
            yield (
                f"{FIRST_LOSS_DIFFERS} {ratio:.3g} × that of the validation before it, of the same "
                "weights"
            )
            return


compare(
    "other_cuts",
    value="text_cut",
    must="that of runs which read the same text in rows of this length, and of its padded store",
    known_from="other runs, store manifest",
    word="suspect",
    tolerance=f"between runs none, of a store {LIMITS['cut_of_store']:g} and {100 * LIMITS['cut_of_store_share']:g} %",
)
compare(
    "training_splits",
    value="validation",
    must="on held-out text",
    known_from="store manifest",
    word="invalid",
)


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


compare(
    "clocks_ahead",
    value="wall clock",
    must="not ahead of later runs' on one boot",
    known_from="other runs",
    word="suspect",
    tolerance=f"{CLOCK_S:g} s",
)
compare(
    "overlapping_runs",
    value="time of a run",
    must="no other run of the experiment on its machine",
    known_from="other runs",
    word="suspect",
)
compare(
    "other_machines",
    value="boot and memory of the machine",
    must="those of the other runs",
    known_from="other runs",
    word="caution",
    tolerance=f"{100 * LIMITS['other_memory']:g} %",
)


compare(
    "lacking_runs",
    value="run table",
    must="all runs of its design",
    known_from="the plan",
    word="caution",
)


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
