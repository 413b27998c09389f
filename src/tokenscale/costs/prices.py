"""Estimate of a run's node time, bytes and files, from the settings.

Hours are not measured: FLOPs over an assumed share of the device's peak (`UTILISATION`), plus an
allowance for starting (`STARTING_S`). Print both constants with them. `cli.plan_prices` replaces
them by those of runs that ended here.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from tokenscale.costs.flops import (
    Convention,
    UncountedModelError,
    flops_per_token,
    hardware_flops_per_token,
    weights,
)
from tokenscale.costs.peaks import peak_flops
from tokenscale.costs.pipeline_schedules import bubble_share
from tokenscale.costs.schedule import count_steps
from tokenscale.data.order.permutation import micro_steps
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.layout import geometry
from tokenscale.settings.machine import Machine
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.run import READERS, RunSettings, start_step

#: assumed share of the peak during a step, without pipeline bubbles. The source studies' DDP runs
#: on GH200 (1.4 B weights, bf16) reached 27 to 32 %, their 8 B weights on one GPU 31 to 38 %.
UTILISATION = 0.3
#: assumed seconds from a job's start to its first step: container, imports from a parallel file
#: system, NCCL, weights
STARTING_S = 120.0
#: most seconds a token of a run that only reads, twice: tokenizing in Python took 1.2 to 1.6 µs a
#: token on one core (config/experiments/data_path.yaml); files may be cold, and cores slower
READING_S = 1e-5
#: bytes of a line of steps.jsonl (measured: 590 to 600), of the rest of a rank's logs, and of a
#: run's records and log
LINE_BYTES = 600
RANK_BYTES = 1_000
RUN_BYTES = 25_000
#: done.json, run.json, status.json, .lock, attempt.json and the rule's log; of a rank steps, spans
#: and events
RUN_FILES = 6
RANK_FILES = 3
#: tokenizer.json or its like, and its manifest, which lie in every checkpoint
TOKENIZER_FILES = 2
#: smallest time limit of a training job: a first start from a cold image and file system can take
#: many minutes
SHORTEST_MINUTES = 30
#: assumed least useful share of a text's tokens before its store exists: documents of at least 8
#: tokens on average
USEFUL_SHARE = 7 / 8
#: least share of text in a row: greedy packing leaves no two rows half empty, a stream fills every
#: row
PACKED_FILL = 1 / 2
STREAM_FILL = 1


@dataclass(frozen=True)
class StoreSize:
    """Rows per epoch of a token store (for a stream: tokens over the sequence length) and useful
    tokens per row.

    `bound` is the reason why the store does not exist yet: rows are then an upper, useful tokens a
    lower bound.
    """

    per_epoch: Fraction | float
    useful_tokens: float
    bound: str | None = None


@dataclass(frozen=True)
class Price:
    """Estimated cost of a run. `unknown`: why time or logs are unknown; `bound`: why `seconds` is
    an upper bound.
    """

    ranks: int
    nodes: int
    seconds: float | None
    steps: int | None
    bytes: int
    #: bytes of resume states, which are deleted when the run has ended
    passing_bytes: int
    files: int
    unknown: str | None = None
    bound: str | None = None
    #: whether `seconds` is the time of runs of the same cell on this machine
    measured: bool = False
    #: how many such runs a node has at once
    places: int = 1
    #: floating-point operations of all training steps; None if they are unknown
    flops: float | None = None

    @property
    def node_hours(self) -> float | None:
        """Charged node-hours of the run alone: whole nodes that its ranks occupy."""
        return None if self.seconds is None else self.nodes * self.seconds / 3600

    @property
    def gpu_hours(self) -> float | None:
        return None if self.seconds is None else self.ranks * self.seconds / 3600


@dataclass(frozen=True)
class Total:
    """Sum of prices. Hours include runs of known time; `unknown` is reason → number of the other
    runs, `bounded` of those whose hours are upper bounds. `unlogged` counts runs with an unknown
    number of steps, whose logs are not included. `passing_bytes` is the maximum over runs, as not
    all exist at once.
    """

    runs: int
    node_hours: float
    gpu_hours: float
    bytes: int
    passing_bytes: int
    files: int
    unlogged: int
    unknown: dict[str, int]
    bounded: dict[str, int]
    #: number of runs whose hours are those of finished runs of the same cell
    measured: int = 0

    @property
    def timed(self) -> int:
        return self.runs - sum(self.unknown.values())


def sum_prices(prices: Iterable[Price]) -> Total:
    prices = list(prices)
    names = ("gpu_hours", "bytes", "files", "measured")
    return Total(
        runs=len(prices),
        node_hours=_sum_node_hours(prices),
        **{name: sum(getattr(price, name) or 0 for price in prices) for name in names},
        passing_bytes=max((p.passing_bytes for p in prices), default=0),
        unlogged=sum(p.steps is None for p in prices),
        unknown=dict(Counter(p.unknown or "" for p in prices if p.seconds is None)),
        bounded=dict(Counter(p.bound for p in prices if p.bound is not None)),
    )


def _sum_node_hours(prices: list[Price]) -> float:
    """Return the charged node-hours. A node that runs share is charged until the last one ends."""
    hours: dict[int, list[float]] = {}
    for price in prices:
        hours.setdefault(price.places, []).append(price.node_hours or 0)
    return sum(sum(sorted(of, reverse=True)[::places]) for places, of in hours.items())


def estimate_run(
    run: RunSettings,
    machine: Machine,
    vocabulary_size: int | None = None,
    rows: StoreSize | None = None,
) -> Price:
    """Estimate the cost of a run on a machine. `vocabulary_size` (tokenizer) and `rows` (store) are
    used if known.

    Unknown quantities are not guessed: `unknown` names them, and bytes exclude what depends on
    them. The time limit of a SLURM job bounds the hours of a run that nothing else bounds.
    """
    layout = run.layout
    nodes = geometry(layout.world_size, gpus_per_node=machine.gpus_per_node).nodes
    vocabulary_size = run.model.vocabulary_size or run.tokenizer.vocabulary_size or vocabulary_size
    steps = seconds = unknown = flops = bound = None
    weighs = 0
    if run.arm in READERS:
        steps = run.budget.steps
        unknown = "how fast batches are read is not predicted"
        if machine.starter == "srun":
            tokens = steps * run.global_batch * run.sequence_length
            seconds = STARTING_S + READING_S * tokens
            bound = f"at most {1e6 * READING_S:g} µs to read a token"
    elif vocabulary_size is None:
        unknown = (
            f"the tokenizer {run.tokenizer.name}, which decides the vocabulary, is not built yet"
        )
        steps, _ = _count_steps(run, model=None, rows=rows)
    else:
        model = run.model.with_vocabulary(vocabulary_size).with_positions(run.sequence_length)
        try:
            weighs = weights(model).total
            steps, unknown = _count_steps(run, model, rows=rows)
            row = _count_flops_of_row(run, model)
            if steps is not None:
                flops = steps * run.global_batch * row
            seconds, slow = _estimate_seconds(
                run,
                row,
                machine=machine,
                steps=steps,
            )
            unknown = None if seconds is not None else slow or unknown
        except UncountedModelError:
            unknown = (
                f"the library transformers, which builds {run.model.transformers}, is not installed"
            )
    if run.budget.wall_s is not None and seconds is None:
        seconds = STARTING_S + run.budget.wall_s
        unknown = None
    counted = run.budget.kind in ("epochs", "useful_tokens")
    if counted and rows is not None and seconds is not None:
        bound = rows.bound
    if seconds is None and machine.starter == "srun":
        seconds = 60.0 * machine.minutes
        bound = f"the time limit of their jobs: {unknown}"
        unknown = None
    kept, passing, files = _estimate_checkpoints(run, weighs)
    logs = RUN_BYTES + layout.world_size * (RANK_BYTES + LINE_BYTES * (steps or 0))
    submitted = machine.starter == "srun"  # SLURM's own log is kept as well
    files += RUN_FILES + submitted + layout.world_size * (RANK_FILES + (run.profile.steps > 0))
    return Price(
        ranks=layout.world_size,
        nodes=nodes,
        seconds=seconds,
        steps=steps,
        bytes=logs + kept,
        passing_bytes=passing,
        files=files,
        unknown=unknown,
        bound=bound,
        flops=flops,
    )


def job_minutes(price: Price, machine: Machine) -> int:
    """Return the time limit of a training job in minutes: the estimate times the margin plus
    `signal_s`, rounded up to 10, from `SHORTEST_MINUTES` to the machine's limit, which a run of
    unknown time gets.
    """
    if price.seconds is None:
        return machine.minutes
    needed_s = machine.runtime_margin * price.seconds + machine.signal_s
    return min(machine.minutes, max(SHORTEST_MINUTES, 10 * math.ceil(needed_s / 600)))


def min_useful_tokens(run: RunSettings, streams: bool) -> float | None:
    """Return the least average of useful tokens per row before the store exists; None if it depends
    on documents.
    """
    fill = _least_fill(run, streams)
    return None if fill is None else run.sequence_length * USEFUL_SHARE * fill


def _least_fill(run: RunSettings, streams: bool) -> float | None:
    if not streams and run.approach != "packed":
        return None
    return STREAM_FILL if streams or run.packing == "concatenate" else PACKED_FILL


def max_rows(
    run: RunSettings, streams: bool, documents: int | None, tokens: int | None
) -> float | None:
    """Return an upper bound of the rows per epoch from numbers of documents and tokens; None if
    unknown.
    """
    fill = _least_fill(run, streams)
    if fill is None or tokens is None:
        return documents if fill is None else None
    return tokens / (run.sequence_length * fill) + (0 if streams else 1)


def _count_steps(
    run: RunSettings, model: ModelSettings | None, rows: StoreSize | None
) -> tuple[int | None, str | None]:
    """Return (optimizer steps of this run, None), or (None, what they depend on); the budget as in
    `train.budget`.
    """
    budget = run.budget
    if budget.wall_s is not None:
        return None, None
    if budget.kind == "steps":
        last = budget.steps
    elif budget.flops is not None:
        if model is None:
            return None, None
        row = run.sequence_length * flops_per_token(
            model,
            sequence_length=run.sequence_length,
            convention=Convention.FULL,
            objective=run.objective,
        )
        last = max(1, math.ceil(budget.flops / (row * run.global_batch)))
    elif rows is None:
        what = "an epoch's rows" if budget.kind == "epochs" else "a row's useful tokens"
        return None, f"{what} are not known before the token store is built"
    elif budget.kind == "useful_tokens" and (run.labels != "all" or run.objective != "causal"):
        return None, "how many tokens are predicted is known only where all are"
    else:
        epochs = budget.epochs
        if epochs is None:
            assert budget.useful_tokens is not None  # the only kind left
            epochs = budget.useful_tokens / rows.useful_tokens
        last = count_steps(epochs, rows.per_epoch, run.global_batch)
    return max(0, last - start_step(run)), None


def _count_flops_of_row(run: RunSettings, model: ModelSettings) -> float:
    """Return the floating-point operations that a row of a training step takes."""
    return run.sequence_length * hardware_flops_per_token(
        model,
        sequence_length=run.sequence_length,
        convention=Convention.FULL,
        checkpointing=run.activation_checkpointing,
        objective=run.objective,
    )


def _estimate_seconds(
    run: RunSettings, row: float, machine: Machine, steps: int | None
) -> tuple[float | None, str | None]:
    """Return (seconds from a job's start to its end, None), or (None, reason why they are unknown).
    `row`: FLOPs of a row.

    Steps: `hardware_flops_per_token` over ranks × peak × UTILISATION × (1 − pipeline bubble). A
    validation costs a third of that for its rows. Validations after epochs, checkpoints and data
    stalls are not included.
    """
    if run.device == "cpu":
        return None, "they keep to the CPU (device: cpu)"
    if machine.device is None:
        return None, f"the machine ({machine.name}) states no device"
    peak = peak_flops(machine.device, number=run.number_format)
    if peak is None:
        return None, f"no peak of {machine.device} in {run.number_format} is known"
    # FLOP/s of all ranks
    speed = run.layout.world_size * peak * UTILISATION * (1 - pipeline_bubble(run))
    if run.budget.wall_s is not None:
        training = run.budget.wall_s
        between = 0
    elif steps is None:
        return None, None
    else:
        training = steps * run.global_batch * row / speed
        before = start_step(run)
        every = run.validation.every
        between = (before + steps - 1) // every - before // every if every else 0
    passes = (run.validation.at_start and not start_step(run)) + run.validation.at_end + between
    return STARTING_S + training + passes * run.validation.rows * row / 3 / speed, None


def pipeline_bubble(run: RunSettings) -> float:
    """Return the bubble share of a run's pipeline; 0 without a pipeline."""
    layout = run.layout
    if layout.pipeline == 1:
        return 0.0
    passes = micro_steps(
        run.global_batch, world_size=layout.data_parallel_size, micro_batch=run.micro_batch
    )
    return _cached_bubble(layout.schedule, layout.pipeline, passes, layout.stages_per_rank)


_cached_bubble = cache(bubble_share)


def _estimate_checkpoints(run: RunSettings, weighs: int) -> tuple[int, int, int]:
    """Return (bytes kept, bytes of states deleted at the end, files kept). A resume state adds
    AdamW's two moments.
    """
    requested = run.checkpoints
    size = (2 if run.precision == "bf16-true" else 4) * weighs
    models = requested.final + requested.best
    states = requested.keep_last * requested.keep_resume_state
    # the next state is complete before the oldest is deleted
    written = (
        requested.keep_last + 1
        if requested.every or requested.each_epoch or requested.at_start
        else 0
    )
    files = (models + states) * (1 + 2 * run.layout.world_size + TOKENIZER_FILES)
    return size * (models + 3 * states), max(0, 3 * size * (written - states)), files


def store_bytes(store: StoreSettings, documents: int, tokens: int, vocabulary_size: int) -> int:
    """Estimate the bytes of a token store before compression. Padding counts unless it is
    compressed. Formats of Parquet shards hold the ids again in records files; `lengths` holds none.
    """
    if store.format == "lengths":
        return documents * 4
    smallest = 2 if vocabulary_size <= 1 << 16 else 4
    if "codec" not in store.options():
        return tokens * (smallest if store.format == "packed" else 4)
    width = 8 if store.dtype == "int64" else 4
    shards = (
        documents * (store.sequence_length + 1)
        if store.format == "padded" and store.codec == "none"
        else tokens
    )
    return shards * width + tokens * smallest + documents * 16
