"""Bytes that one rank holds in a step: parameters, gradients, optimizer state, activations. Counted from the settings,
in the kinds that `training.memory.Probe` measures; what libraries and kernels borrow meanwhile is in none of them.

The first three are the table of Rajbhandari et al. 2020 (figure 1), for AdamW in one number format; activations are
counted in the way of Korthikanti et al. 2022 (section 4), for the operations of `models.decoder`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, NamedTuple

from tokenscale.costs.flops import weights
from tokenscale.costs.pipeline_schedules import assign_stages, build_schedule, max_in_flight
from tokenscale.data.order.shares import micro_steps, rank_slots, shard_rows
from tokenscale.settings.layout import LayoutSettings, MeshCoordinate
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.run import RunSettings

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds; activations are None where they are not predicted."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None

    @property
    def total(self) -> int:
        """Of all that is predicted."""
        return self.parameters + self.gradients + self.optimizer + (self.activations or 0)


class Weight(NamedTuple):
    """One tensor of the model; `layer` is None outside of blocks, `cut` the dimension that a tensor group shares."""

    name: str
    shape: tuple[int, ...]
    cut: int | None
    layer: int | None = None


def memory(run: RunSettings, rank: int, device: Device = "cpu") -> Memory:
    """What a rank holds in a step of a run whose model has its vocabulary (`with_vocabulary`).

    Parameters, gradients, and AdamW's two moments with its count of steps (4 bytes a tensor). Activations are what
    backward needs of one forward pass on full rows, times the passes in flight, and weights that FSDP gathers and
    keeps. Of a rank with several stages (interleaved) it is the first one's pass, as it is for the probe.

    `device` says whose kernels. `cpu`: torch's own, eager, to the byte (tests/distributed/test_memory.py). `cuda`: what
    they leave out on a GPU is left out, and was not measured so far: RMSNorm's normalised copy; of dropout all but a
    byte an element; scores and masks of attention, of which fused kernels keep queries, keys, values, output and a
    log-sum a row. Where `sdpa` has no such kernel (grouped queries in fp32; a mask without flex or varlen) it is more.

    Not predicted: activations under torch.compile, of float8 products, and of models of `transformers`, whose weights
    are taken to divide evenly here.

    >>> from tokenscale.settings.presets import PRESETS
    >>> held = memory(RunSettings(model=PRESETS["llama-8b-nemo"]), rank=0)
    >>> held.parameters == 4 * 8_053_329_920 == held.gradients
    True
    """
    model, layout = run.model.with_positions(run.sequence_length), run.layout
    place, size = layout.coordinate(rank), 2 if run.precision == "bf16-true" else 4
    if model.transformers is not None:
        return _library_memory(model, layout, size)
    held = [
        _shard_weight(weight, layout, place) for weight in _local_weights(model, run.sequence_length, layout, place)
    ]
    mine = [prod(_shard_shape(weight.shape, layout, place)) for weight in held]
    whole = sum(prod(weight.shape) for weight in held) if layout.sharding == "zero1" else sum(mine)
    activations = None
    if not (run.compile or run.float8):
        activations = _Forward(run, model, place, device).held(held)
    return Memory(
        parameters=size * whole,
        gradients=size * whole,
        optimizer=2 * size * sum(mine) + 4 * len(mine),
        activations=activations,
    )


def largest_memory(run: RunSettings, device: Device = "cpu") -> Memory:
    """Of the rank with the most: ranks differ by their stage, and where rows do not divide the first ones have more.

    >>> from tokenscale.settings.presets import PRESETS
    >>> run = RunSettings(model=PRESETS["gpt2-124m"], layout=LayoutSettings(shard=4, sharding="zero1"))
    >>> held = largest_memory(run)
    >>> held.parameters / 124_439_808, round(held.optimizer / 124_439_808, 2)
    (4.0, 2.0)
    """
    layout = run.layout
    places = [rank for rank in range(layout.world_size) if _is_first_reader(layout.coordinate(rank))]
    return max((memory(run, rank, device) for rank in places), key=lambda found: found.total)


def _is_first_reader(place: MeshCoordinate) -> bool:
    """Whether it is the first of the ranks that share rows of a batch and rows of weights: none of them holds more."""
    return place.data == place.shard == place.tensor == 0


def _library_memory(model: ModelSettings, layout: LayoutSettings, size: int) -> Memory:
    count = weights(model).total
    mine = -(-count // layout.shard)
    whole = count if layout.sharding == "zero1" else mine
    return Memory(size * whole, size * whole, 2 * size * mine, None)


def _list_weights(model: ModelSettings) -> Iterator[Weight]:
    """All tensors, by the names of the decoder's parameters."""
    wide, inner, key_value = model.dimension, model.hidden, model.key_value_heads * model.head_dimension

    def norm(name: str, layer: int | None = None) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (wide,), None, layer)
        if model.norm == "layer" and model.biases:
            yield Weight(f"{name}.bias", (wide,), None, layer)

    up = ("gate", "up") if model.activation == "swiglu" else ("up",)
    linears = [("query", wide, wide, 0), ("key", key_value, wide, 0), ("value", key_value, wide, 0)]
    linears += [("output", wide, wide, 1), *((name, inner, wide, 0) for name in up), ("down", wide, inner, 1)]
    yield Weight("embedding", (model.vocabulary_size, wide), 0)
    if model.positions == "learned":
        yield Weight("positions", (model.maximum_positions, wide), None)
    for layer in range(model.layers):
        yield from norm("attention_norm", layer)
        yield from norm("feed_forward_norm", layer)
        for name, outputs, inputs, cut in linears:
            yield Weight(f"{name}.weight", (outputs, inputs), cut, layer)
            if model.biases:
                yield Weight(f"{name}.bias", (outputs,), 0 if cut == 0 else None, layer)
    yield from norm("norm")
    if not model.tied_embeddings:
        yield Weight("head", (model.vocabulary_size, wide), 0)


@cache
def _assign_stages(model: ModelSettings, sequence_length: int, stages: int) -> list[range]:
    return assign_stages(model, sequence_length, stages)


def _local_layers(
    model: ModelSettings, sequence_length: int, layout: LayoutSettings, place: MeshCoordinate
) -> list[range]:
    """The layers of each of this rank's stages."""
    return _assign_stages(model, sequence_length, layout.stages)[place.pipeline :: layout.pipeline]


def _local_weights(
    model: ModelSettings, sequence_length: int, layout: LayoutSettings, place: MeshCoordinate
) -> list[Weight]:
    """The tensors of which this rank holds anything: those of its stages; a tied embedding is on the first and last."""
    layers = {layer for stage in _local_layers(model, sequence_length, layout, place) for layer in stage}
    first, last = place.pipeline == 0, place.pipeline == layout.pipeline - 1
    ends = {"positions"} if first else set()
    if first or (last and model.tied_embeddings):
        ends.add("embedding")
    if last:
        ends |= {"norm.weight", "norm.bias", "head"}
    return [w for w in _list_weights(model) if (w.name in ends if w.layer is None else w.layer in layers)]


def _shard_weight(weight: Weight, layout: LayoutSettings, place: MeshCoordinate) -> Weight:
    """What a rank of a tensor group has of a tensor."""
    if weight.cut is None:
        return weight
    shape = list(weight.shape)
    shape[weight.cut] = len(shard_rows(shape[weight.cut], place.tensor, layout.tensor))
    return weight._replace(shape=tuple(shape))


def _shard_shape(shape: tuple[int, ...], layout: LayoutSettings, place: MeshCoordinate) -> tuple[int, ...]:
    """This rank's rows of what ranks share out."""
    return (len(shard_rows(shape[0], place.shard, layout.shard)), *shape[1:])


class _Forward:
    """What backward needs of one forward pass of a rank's first stage, in bytes: each term one storage that autograd
    saves, in the order of the model."""

    def __init__(self, run: RunSettings, model: ModelSettings, place: MeshCoordinate, device: Device):
        layout = run.layout
        self.run, self.model, self.layout, self.place, self.fused = run, model, layout, place, device == "cuda"
        rows = len(rank_slots(run.global_batch, place.data_rank, layout.data_parallel_size))
        self.rows = max(1, min(run.micro_batch, rows))  # a rank without rows computes one that counts for nothing
        self.all = self.rows * run.sequence_length  # positions in attention and feed-forward
        self.own = self.all // layout.tensor  # positions between them
        self.wide = self.model.dimension // layout.tensor  # this rank's heads
        self.key_value = model.key_value_heads * model.head_dimension // layout.tensor
        self.inner = model.hidden // layout.tensor
        self.autocast = run.precision in ("bf16", "fp16")
        self.product = 4 if run.precision == "fp32" else 2  # bytes of an element that a product gives
        self.stream = 2 if run.precision == "bf16-true" else 4  # of the residual stream, and of weights
        self.deferred = layout.pipeline > 1 and layout.schedule == "zero-bubble"  # products save only what went in
        self.again = run.activation_checkpointing

    def held(self, weights: list[Weight]) -> int:
        """Of all passes in flight; weights that FSDP has gathered and not given back are held once."""
        run, layout, place = self.run, self.layout, self.place
        stages = _local_layers(self.model, run.sequence_length, layout, place)
        passes = 1
        if layout.pipeline > 1:
            steps = micro_steps(run.global_batch, layout.data_parallel_size, run.micro_batch)
            actions = build_schedule(layout.schedule, place.pipeline, layout.pipeline, steps, layout.stages_per_rank)
            passes = max_in_flight(actions)
        layers = stages[0]
        first, last = place.pipeline == 0, place.pipeline == layout.pipeline - 1 and len(stages) == 1
        block = {"none": self.block, "block": self.input, "selective": self.kept}[self.again]()
        saved = len(layers) * block
        copies = [w for w in weights if w.layer in layers and len(w.shape) == 2]
        if self.autocast and not self.deferred and (self.again == "none" or self.fused):
            saved += 2 * sum(prod(w.shape) for w in copies)  # autocast's of the blocks' matrices
        if self.model.positions == "rotary" and self.again == "none":
            saved += 4 * run.sequence_length * self.model.head_dimension  # cosines and sines
        saved += (self.embedding() if first else 0) + (self.loss() if last else 0)
        return passes * saved + self.gathered(weights)

    def gathered(self, weights: list[Weight]) -> int:
        """Weights that are whole between forward and backward, in equal shares: the last ones are filled up."""
        shards = self.layout.shard
        if shards == 1 or self.layout.sharding == "zero1":
            return 0
        stay = [w for w in weights if w.layer is None or self.layout.sharding == "zero2"]
        return self.stream * sum(-(-w.shape[0] // shards) * shards * prod(w.shape[1:]) for w in stay)

    def embedding(self) -> int:
        """Ids, and those of positions; of a shared vocabulary also which entries are others'."""
        model, learned = self.model, 0
        if model.positions == "learned":
            learned = 8 * (self.all if self.run.document_mask else self.run.sequence_length)
        ids = 8 * self.all + (self.all if self.layout.tensor > 1 else 0)
        return ids + learned + self.dropped(self.stream)

    def input(self) -> int:
        """A block's: all that is kept of one that is computed again."""
        return self.stream * self.own * self.model.dimension

    def kept(self) -> int:
        """The products of a block, and attention's result (`train.activation_checkpointing.STORED`)."""
        products = self.wide + 2 * self.key_value + 2 * self.model.dimension
        products += self.inner * (2 if self.model.activation == "swiglu" else 1)
        attention = self.product * self.all * self.wide + 4 * self._rows_of_scores()
        if self._scores():  # [rows x heads, T, T], and their product with the values, both in fp32
            attention = 4 * (self._squares() + self.all * self.wide)
        return self.input() + self.product * self.all * products + attention

    def block(self) -> int:
        """All of a block."""
        found = 2 * self.norm() + 2 * self.dropped(self.product)
        found += self.into_products(3) + self.attention()
        inner = self.product * self.all * self.inner
        swiglu = self.model.activation == "swiglu"
        # gate, its SiLU, up, and what goes down; or up and its GELU
        return found + self.into_products(2 if swiglu else 1) + inner * (4 if swiglu else 2)

    def norm(self) -> int:
        """What it is given, one or two numbers a position, and RMSNorm's normalised copy where it is not fused."""
        elements = self.own * self.model.dimension
        if self.model.norm == "layer":
            number = 4 if self.fused else self.stream
            return self.stream * elements + 2 * number * self.own
        found = 4 * elements * (1 if self.fused else 2) + 4 * self.own
        return found + (4 * self.model.dimension if self.stream == 2 else 0)  # its weight in fp32

    def into_products(self, count: int) -> int:
        """What `count` products are made of. Autocast rounds it for each anew, but where ranks gather it: before."""
        elements = self.all * self.model.dimension
        if not self.autocast:
            return self.product * elements
        if self.layout.tensor > 1:
            return 2 * elements
        return 4 * elements if self.deferred else 2 * count * elements

    def attention(self) -> int:
        """Queries, keys, values and their result, in heads and laid out for the output product; with scores, where
        they are made: their softmax, what is dropped, and what is left."""
        model, result = self.model, self.product * self.all * self.wide
        if self._scores():
            return 4 * (3 * self.all * self.wide + 3 * self._squares()) + result
        found = result + self.product * self.all * (self.wide + 2 * self.key_value) + 4 * self._rows_of_scores()
        if model.positions == "rotary" and model.heads > self.layout.tensor:
            found += result  # turned queries lie head by head, and so does what attention gives: copied for the product
        if self.run.document_mask and not self.fused:
            found += self.product * self.all * self.run.sequence_length
        return found

    def loss(self) -> int:
        """Last norm, and log-probabilities with labels; or the gradients that a loss in chunks has already."""
        model, elements = self.model, self.all * self.model.dimension
        vocabulary = len(shard_rows(model.vocabulary_size, self.place.tensor, self.layout.tensor))
        if self.run.loss_chunk or self.layout.tensor > 1:
            return self.norm() + self.stream * (elements + vocabulary * model.dimension)
        copy = 2 * vocabulary * model.dimension if self.autocast else 0
        return self.norm() + self.product * elements + copy + self.all * (4 * vocabulary + 8) + 4

    def dropped(self, size: int) -> int:
        """What dropout multiplied with, or on a GPU which elements stayed."""
        if not self.model.dropout:
            return 0
        return self.own * self.model.dimension * (1 if self.fused else size)

    def _scores(self) -> bool:
        """Whether attention has them in full: on a CPU with dropout."""
        return bool(self.model.dropout) and not self.fused

    def _rows_of_scores(self) -> int:
        return self.all * self.model.heads // self.layout.tensor

    def _squares(self) -> int:
        return self._rows_of_scores() * self.run.sequence_length
