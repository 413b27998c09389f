"""Bytes that ranks send in a training step, by layout: weights and gradients, positions between the
ranks of a tensor group, and messages between the stages of a pipeline.
"""

from math import ceil, prod

from tokenscale.costs.activations import (
    gradient_bytes,
    local_layers,
    local_weights,
    padded_elements,
)
from tokenscale.costs.communication import bus_factor
from tokenscale.costs.flops import Weight
from tokenscale.data.order.permutation import micro_steps, rank_slots
from tokenscale.settings.layout import MeshCoordinate
from tokenscale.settings.run import RunSettings

#: gathers and scatters of a block's two parts, forward and backward
OF_BLOCK = 8
#: those of the embedding's sum, and of the loss
OF_END = 2
#: numbers that the loss reduces a position: the maximum; the sum, and the label's logit
OF_LOSS = 3


def is_predicted(run: RunSettings) -> bool:
    """Whether what ranks send is predicted: not of a tensor group or a pipeline whose rows differ in
    length, or that computes activations again, nor of models of `transformers`.
    """
    moves_positions = run.layout.tensor > 1 or run.layout.pipeline > 1
    again = run.layout.tensor > 1 and run.activation_checkpointing != "none"
    of_unequal_rows = moves_positions and run.approach == "length-bucketed"
    return run.model.transformers is None and not again and not of_unequal_rows


def most_exchanged_bytes(run: RunSettings) -> int | None:
    """Return the bytes that the rank that sends most sends in a step; None where they are not
    predicted.
    """
    if not is_predicted(run):
        return None
    places = [(rank, run.layout.coordinate(rank)) for rank in range(run.layout.world_size)]
    firsts = [rank for rank, place in places if place.data == place.shard == 0]
    return max(exchanged_bytes(run, rank) for rank in firsts)


def exchanged_bytes(run: RunSettings, rank: int = 0) -> int:
    """Return the bytes that a rank sends in a step, collectives as rings send them.

    The run's model must have its vocabulary size (`with_vocabulary`), and `is_predicted`. Not
    counted: single numbers, such as losses and norms.
    """
    place = run.layout.coordinate(rank)
    return round(
        _replica_bytes(run, place) + _tensor_bytes(run, place) + _pipeline_bytes(run, place)
    )


def _replica_bytes(run: RunSettings, place: MeshCoordinate) -> float:
    """Bytes that keep weights equal over `data` and `shard`.

    DDP reduces all gradients. zero1 scatters their sums, and gathers the updated weights. FSDP scatters the sums of
    gradients in every micro-step, and ranks of replicas (HSDP) then reduce their shards of them;
    with `accumulation: unsharded` both happen once a step. zero2 gathers weights once a step; zero3
    gathers a block's weights for every forward and every backward pass, and the rest for every
    micro-step.
    """
    layout = run.layout
    weights = local_weights(run, coordinate=place)
    elements = sum(prod(w.shape) for w in weights)
    size = _weight_bytes(run)
    reduced = 2 if layout.compression == "bf16" else gradient_bytes(run)
    if layout.shard == 1:
        return bus_factor("all_reduce", ranks=layout.data) * reduced * elements
    half = bus_factor("all_gather", ranks=layout.shard)
    padded = sum(padded_elements(w, shards=layout.shard) for w in weights)
    if layout.sharding == "zero1":
        return half * (reduced + size) * padded
    passes = micro_steps(
        run.global_batch, world_size=layout.data_parallel_size, micro_batch=run.micro_batch
    )
    reductions = passes if layout.accumulation == "sharded" else 1
    gathered = float(padded)
    if layout.sharding == "zero3":
        blocks = sum(
            padded_elements(w, shards=layout.shard) for w in weights if w.layer is not None
        )
        again = (
            half if layout.reshard_to is None else bus_factor("all_gather", ranks=layout.reshard_to)
        )
        gathered = passes * (padded + blocks * again / half)
    replicas = bus_factor("all_reduce", ranks=layout.data) * size * padded / layout.shard
    gathers = half * (2 if layout.gather == "bf16" else size) * gathered
    return gathers + reductions * (half * size * padded + replicas)


def _tensor_bytes(run: RunSettings, place: MeshCoordinate) -> float:
    """Bytes between the ranks of a tensor group: positions, the loss, and the gradients of the
    weights that all of them have. Under autocast positions between the parts of blocks are in 16
    bits, at the ends in the weights' format.
    """
    layout = run.layout
    if layout.tensor == 1:
        return 0.0
    half = bus_factor("all_gather", ranks=layout.tensor)
    is_last = place.pipeline == layout.pipeline - 1
    layers = sum(len(stage) for stage in local_layers(run, place))
    in_blocks = OF_BLOCK * layers * (4 if run.precision == "fp32" else 2)
    at_ends = OF_END * ((place.pipeline == 0) + is_last) * _weight_bytes(run)
    of_position = (in_blocks + at_ends) * run.model.dimension + 2 * 4 * OF_LOSS * is_last
    repeated = [w for w in local_weights(run, place) if w.cut is None]
    of_gradients = 2 * gradient_bytes(run) * _held_elements(run, repeated)
    return half * (of_position * _positions(run, place) + of_gradients)


def _pipeline_bytes(run: RunSettings, place: MeshCoordinate) -> float:
    """Bytes to the next stages and to those before, and of a tied embedding's gradient."""
    layout = run.layout
    if layout.pipeline == 1:
        return 0.0
    is_first = place.pipeline == 0
    is_last = place.pipeline == layout.pipeline - 1
    messages = 2 * layout.stages_per_rank - is_first - is_last
    sent = messages * _positions(run, place) // layout.tensor * run.model.dimension
    tied = 0
    if run.model.tied_embeddings and (is_first or is_last):
        embedding = [w for w in local_weights(run, place) if w.name == "embedding"]
        tied = _held_elements(run, embedding)
    return sent * _weight_bytes(run) + tied * gradient_bytes(run)


def _held_elements(run: RunSettings, weights: list[Weight]) -> int:
    """Elements of the gradients of some weights that a rank holds when all passes have ended."""
    shards = 1 if run.layout.sharding == "zero1" else run.layout.shard
    return sum(padded_elements(w, shards=shards) // shards for w in weights)


def _weight_bytes(run: RunSettings) -> int:
    return 2 if run.precision == "bf16-true" else 4


def _positions(run: RunSettings, place: MeshCoordinate) -> int:
    """Positions of a rank's rows in a step. A pass for which no rows are left has one all the same."""
    ranks = run.layout.data_parallel_size
    rows = len(rank_slots(run.global_batch, rank=place.data_rank, world_size=ranks))
    passes = micro_steps(run.global_batch, world_size=ranks, micro_batch=run.micro_batch)
    empty = passes - ceil(rows / run.micro_batch)
    return (rows + empty) * run.sequence_length
