"""Memory of one rank in a step: parameters, gradients, optimizer state and activations, counted
from the settings.

Kinds are those of `train.profiling.Probe`; workspaces of libraries are not included. States follow
Rajbhandari et al. 2020 (figure 1) for AdamW in one number format, activations Korthikanti et al.
2022 (section 4).
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal

from tokenscale.costs.communication import bus_factor
from tokenscale.costs.flops import Weight, list_weights, weights
from tokenscale.costs.pipeline_schedules import assign_stages, build_schedule, max_in_flight
from tokenscale.data.order.permutation import micro_steps, rank_slots, shard_rows
from tokenscale.settings.layout import MeshCoordinate
from tokenscale.settings.model import aligned_rows
from tokenscale.settings.run import RunSettings

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. `activations` is None if it is not predicted."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + (self.activations or 0)


def exchanged_bytes(run: RunSettings) -> int:
    """Return the bytes that a rank sends in a step to keep weights equal over `data` and `shard`,
    as rings send them.

    DDP reduces all gradients. zero1 scatters their sums, and gathers the updated weights. FSDP scatters the sums of
    gradients in every micro-step, and ranks of replicas (HSDP) then reduce their shards of them;
    with `accumulation: unsharded` both happen once a step. zero2 gathers weights once a step; zero3
    gathers a block's weights for every forward and every backward pass, and the rest for every
    micro-step.
    """
    layout = run.layout
    weights = _local_weights(run, coordinate=layout.coordinate(0))
    elements = sum(prod(w.shape) for w in weights)
    size = 2 if run.precision == "bf16-true" else 4
    reduced = 2 if layout.compression == "bf16" else size
    if layout.shard == 1:
        return round(bus_factor("all_reduce", ranks=layout.data) * reduced * elements)
    half = bus_factor("all_gather", ranks=layout.shard)
    padded = sum(_padded(w, shards=layout.shard) for w in weights)
    if layout.sharding == "zero1":
        return round(half * (reduced + size) * padded)
    passes = micro_steps(
        run.global_batch, world_size=layout.data_parallel_size, micro_batch=run.micro_batch
    )
    reductions = passes if layout.accumulation == "sharded" else 1
    gathered = float(padded)
    if layout.sharding == "zero3":
        blocks = sum(_padded(w, shards=layout.shard) for w in weights if w.layer is not None)
        again = (
            half if layout.reshard_to is None else bus_factor("all_gather", ranks=layout.reshard_to)
        )
        gathered = passes * (padded + blocks * again / half)
    replicas = bus_factor("all_reduce", ranks=layout.data) * size * padded / layout.shard
    gathers = half * (2 if layout.gather == "bf16" else size) * gathered
    return round(gathers + reductions * (half * size * padded + replicas))


def _padded(weight: Weight, shards: int) -> int:
    """Elements of a weight with equal numbers of rows on all shards."""
    return -(-weight.shape[0] // shards) * shards * prod(weight.shape[1:])


def memory(run: RunSettings, rank: int, device: Device = "cpu") -> Memory:
    """Return the memory of a rank in a step. The run's model must have its vocabulary size
    (`with_vocabulary`).

    The optimizer state is AdamW's two moments and its step count (4 bytes per tensor). Activations
    are the tensors that one forward pass of the first stage on full rows saves for backward, times
    the passes in flight, plus weights that FSDP gathers and keeps, plus the messages that a
    pipeline holds until they are sent. Gradients are those between micro-steps, or in the update
    where these are more: with `accumulation: unsharded` FSDP holds the whole model's, (1 - 1/shard)
    of its weights more than the shard that is updated.

    `device` selects the kernels. `cpu`: eager PyTorch, exact to the byte
    (tests/experiments/test_memory.py). `cuda`, not measured so far: excludes RMSNorm's normalised
    copy, all but one byte per element of dropout, and the scores and masks of attention, since
    fused kernels save queries, keys, values, output and one log-sum per row. If `sdpa` has no fused
    kernel (grouped queries in fp32, or a mask without flex or varlen), memory is larger.

    Not included: what stands for a moment in backward, such as buckets and buffers of collectives,
    and weights and whole gradients of the FSDP group that is computed (without `head_group`
    embedding and head are one group, whose gradients stand until the end).

    Not predicted: activations under torch.compile, of float8 products, and of models of
    `transformers`, whose weights are assumed to divide evenly.
    """
    layout = run.layout
    size = 2 if run.precision == "bf16-true" else 4
    activations = None
    if run.model.transformers is not None:
        count = weights(run.model.with_positions(run.sequence_length)).total
        mine = [-(-count // layout.shard)]
        unsharded = count
        whole = unsharded if layout.sharding == "zero1" else sum(mine)
        scalars = 0
    else:
        coordinate = layout.coordinate(rank)
        local = _local_weights(run, coordinate)
        mine = [
            len(shard_rows(w.shape[0], index=coordinate.shard, count=layout.shard))
            * prod(w.shape[1:])
            for w in local
        ]
        unsharded = sum(prod(w.shape) for w in local)
        whole = unsharded if layout.sharding == "zero1" else sum(mine)
        scalars = len(mine)
        if not (run.compile or run.float8):
            activations = _Forward(run=run, coordinate=coordinate, device=device).total_bytes(local)
    moment = 4 if run.optimizer.moments == "fp32" else size
    passes = micro_steps(
        run.global_batch, world_size=layout.data_parallel_size, micro_batch=run.micro_batch
    )
    holds_all = layout.accumulation == "unsharded" and passes > 1
    return Memory(
        parameters=size * whole,
        gradients=size * (unsharded if holds_all else whole),
        optimizer=2 * moment * sum(mine) + 4 * scalars,
        activations=activations,
    )


def largest_memory(run: RunSettings, device: Device = "cpu") -> Memory:
    """Return the memory of the rank with the most. Stages differ, and of uneven shards the first
    are larger.
    """
    places = [(rank, run.layout.coordinate(rank)) for rank in range(run.layout.world_size)]
    firsts = [rank for rank, place in places if place.data == place.shard == place.tensor == 0]
    return max((memory(run, rank, device=device) for rank in firsts), key=lambda found: found.total)


_assign_stages = cache(assign_stages)


def _local_layers(run: RunSettings, coordinate: MeshCoordinate) -> list[range]:
    model = run.model.with_positions(run.sequence_length)
    return _assign_stages(model, run.sequence_length, run.layout.stages)[
        coordinate.pipeline :: run.layout.pipeline
    ]


def _local_weights(run: RunSettings, coordinate: MeshCoordinate) -> list[Weight]:
    """Return the tensors of this rank's stages, in its tensor group's shards. A tied embedding is
    on the first and the last stage.
    """
    model = run.model.with_positions(run.sequence_length)
    layout = run.layout
    layers = {layer for stage in _local_layers(run, coordinate) for layer in stage}

    def tensor_rows(rows: int) -> range:
        return shard_rows(rows, index=coordinate.tensor, count=layout.tensor)

    first = coordinate.pipeline == 0
    last = coordinate.pipeline == layout.pipeline - 1
    ends = {"positions"} if first else set()
    if first or (last and model.tied_embeddings):
        ends.add("embedding")
    if last:
        ends |= {"norm.weight", "norm.bias", "head"}
    return [
        w._replace(
            shape=tuple(len(tensor_rows(n)) if w.cut == i else n for i, n in enumerate(w.shape))
        )
        for w in list_weights(model)
        if (w.name in ends if w.layer is None else w.layer in layers)
    ]


class _Forward:
    """Bytes that one forward pass of a rank's first stage saves for backward.

    Each term is one storage that autograd saves, in the order of the model.
    """

    def __init__(self, run: RunSettings, coordinate: MeshCoordinate, device: Device):
        layout = run.layout
        model = run.model.with_positions(run.sequence_length)
        self.run = run
        self.model = model
        self.layout = layout
        self.coordinate = coordinate
        self.device = device
        self.fused = device == "cuda"
        self.first = coordinate.pipeline == 0
        self.last = coordinate.pipeline == layout.pipeline - 1
        self.steps = micro_steps(
            run.global_batch, world_size=layout.data_parallel_size, micro_batch=run.micro_batch
        )
        self.rows = len(
            rank_slots(
                run.global_batch, rank=coordinate.data_rank, world_size=layout.data_parallel_size
            )
        )
        # a rank without rows computes an ignored one
        rows = max(1, min(run.micro_batch, self.rows))
        self.all = rows * run.sequence_length  # positions in attention and feed-forward
        self.own = self.all // layout.tensor  # positions between them
        self.wide = self.model.attention_width // layout.tensor  # this rank's heads
        self.key_value = model.key_value_heads * model.head_dimension // layout.tensor
        self.inner = model.hidden // layout.tensor
        self.autocast = run.autocasts
        self.product = 4 if run.precision == "fp32" else 2  # bytes per element of a product
        narrow = run.precision == "bf16-true" or layout.gather == "bf16"
        # bytes per element of residual stream and gathered weights
        self.stream = 2 if narrow else 4
        # products save only their inputs
        self.deferred = layout.pipeline > 1 and layout.schedule == "zero-bubble"
        self.checkpointing = run.activation_checkpointing
        self.keeps_scores = bool(model.dropout) and not self.fused
        self.score_rows = self.all * model.heads // layout.tensor

    def total_bytes(self, weights: list[Weight]) -> int:
        """Return the bytes of all passes in flight, plus the weights that FSDP keeps gathered,
        once.
        """
        run = self.run
        layout = self.layout
        place = self.coordinate.pipeline
        stages = _local_layers(run, coordinate=self.coordinate)
        passes = 1
        if layout.pipeline > 1:
            order = build_schedule(
                layout.schedule,
                rank=place,
                ranks=layout.pipeline,
                micro_batches=self.steps,
                chunks=layout.stages_per_rank,
            )
            passes = max_in_flight(order)
        layers = stages[0]
        by_mode = {
            "none": self.block_bytes,
            "block": self.input_bytes,
            "selective": self.selective_bytes,
        }
        saved = len(layers) * by_mode[self.checkpointing]()
        copies = [w for w in weights if w.layer in layers and len(w.shape) == 2]
        if self.autocast and not self.deferred and (self.checkpointing == "none" or self.fused):
            # autocast's copies of the blocks' matrices
            saved += 2 * sum(prod(w.shape) for w in copies)
        if self.model.positions == "rotary" and self.checkpointing == "none":
            saved += 4 * run.sequence_length * self.model.head_dimension  # cosines and sines
        saved += self.embedding_bytes() if self.first else 0
        saved += self.loss_bytes() if self.last and len(stages) == 1 else 0
        return (
            passes * saved
            + self.message_bytes(passes, stages=len(stages))
            + self.gathered_bytes(weights)
        )

    def message_bytes(self, passes: int, stages: int) -> int:
        """Return the bytes of a pipeline's messages: on a GPU the outputs of the passes in flight;
        on a CPU all activations and gradients of the step, since gloo reports no completion.
        """
        if self.layout.pipeline == 1:
            return 0
        if self.fused:
            return 0 if self.last and stages == 1 else passes * self.input_bytes()
        # a pass without rows computes an ignored one
        sent = self.rows + max(0, self.steps - -(-self.rows // self.run.micro_batch))
        positions = sent * self.run.sequence_length // self.layout.tensor
        return (
            (2 * stages - self.first - self.last) * self.stream * positions * self.model.dimension
        )

    def gathered_bytes(self, weights: list[Weight]) -> int:
        """Return the bytes of weights that stay gathered between forward and backward, padded to
        equal shards.
        """
        layout = self.layout
        if layout.shard == 1 or layout.sharding == "zero1":
            return 0
        stay = [w for w in weights if w.layer is None or layout.sharding == "zero2"]
        if layout.embedding_group:
            stay = [w for w in stay if w.name != "embedding"]
        elements = sum(_padded(w, shards=layout.shard) for w in stay)
        if layout.reshard_to:
            elements += (
                sum(_padded(w, shards=layout.shard) for w in weights if w.layer is not None)
                // layout.reshard_to
            )
        return self.stream * elements

    def embedding_bytes(self) -> int:
        """Return the bytes of token and position ids, and of the mask of other ranks' ids in a
        sharded vocabulary.
        """
        found = (
            8 * self.all
            + (self.all if self.layout.tensor > 1 else 0)
            + self.dropout_bytes(self.stream)
        )
        if self.model.positions == "learned":
            found += 8 * (self.all if self.run.document_mask else self.run.sequence_length)
        return found

    def input_bytes(self) -> int:
        return self.stream * self.own * self.model.dimension

    def selective_bytes(self) -> int:
        """Return the bytes of a selectively checkpointed block (`train.compilation.STORED`)."""
        products = self.wide + 2 * self.key_value + 2 * self.model.dimension
        products += self.inner * (2 if self.model.activation == "swiglu" else 1)
        attention = self.product * self.all * self.wide + 4 * self.score_rows
        # scores [rows x heads, T, T] and their product with the values, both in fp32
        if self.keeps_scores:
            attention = 4 * (self.score_rows * self.run.sequence_length + self.all * self.wide)
        return self.input_bytes() + self.product * self.all * products + attention

    def block_bytes(self) -> int:
        found = 2 * self.norm_bytes() + 2 * self.dropout_bytes(self.product)
        found += self.product_input_bytes(3) + self.attention_bytes()
        inner = self.product * self.all * self.inner
        swiglu = self.model.activation == "swiglu"
        # gate, SiLU(gate), up and the input of down; or up and GELU(up)
        return found + self.product_input_bytes(2 if swiglu else 1) + inner * (4 if swiglu else 2)

    def norm_bytes(self) -> int:
        """Return the bytes of a norm: input, one or two numbers per position, and unfused RMSNorm's
        normalised copy.
        """
        elements = self.own * self.model.dimension
        if self.model.norm == "layer":
            return self.stream * elements + 2 * (4 if self.fused else self.stream) * self.own
        found = 4 * elements * (1 if self.fused else 2) + 4 * self.own
        return found + (4 * self.model.dimension if self.stream == 2 else 0)  # its weight in fp32

    def head_norm_bytes(self) -> int:
        """Return the bytes of the norms of queries and keys: as `norm_bytes`, with a number per
        head and position.
        """
        if not self.model.query_key_norm:
            return 0
        elements = self.all * (self.wide + self.key_value)
        heads = self.all * (self.wide + self.key_value) // self.model.head_dimension
        weights = 8 * self.model.head_dimension if self.stream == 2 else 0
        return 4 * elements * (1 if self.fused else 2) + 4 * heads + weights

    def product_input_bytes(self, count: int) -> int:
        """Return the bytes of the input of `count` products. Autocast casts it for each; before a
        gather, once.
        """
        elements = self.all * self.model.dimension
        if not self.autocast:
            return self.product * elements
        if self.layout.tensor > 1:
            return 2 * elements
        return 4 * elements if self.deferred else 2 * count * elements

    def attention_bytes(self) -> int:
        """Return the bytes of queries, keys, values and the result by heads and for the output
        product; and of materialised scores, their softmax and dropout mask.
        """
        model = self.model
        result = self.product * self.all * self.wide
        if self.keeps_scores:
            scores = self.score_rows * self.run.sequence_length
            return 4 * (3 * self.all * self.wide + 3 * scores) + result + self.head_norm_bytes()
        found = (
            result
            + self.product * self.all * (self.wide + 2 * self.key_value)
            + 4 * self.score_rows
        )
        found += self.head_norm_bytes()
        if model.positions == "rotary" and model.heads > self.layout.tensor:
            # rotated queries are laid out by head, and so is the result: copied for the product
            found += result
        if self.run.document_mask and not self.fused:
            found += self.product * self.all * self.run.sequence_length
        return found

    def loss_bytes(self) -> int:
        """Return the bytes of the last norm, and of log-probabilities and labels, or a chunked
        loss's gradients.
        """
        model = self.model
        elements = self.all * self.model.dimension
        entries = len(
            shard_rows(
                model.resolved_vocabulary_size,
                index=self.coordinate.tensor,
                count=self.layout.tensor,
            )
        )
        vocabulary = aligned_rows(entries, device=self.device)
        if self.run.loss_chunk or self.layout.tensor > 1:
            return self.norm_bytes() + self.stream * (elements + vocabulary * model.dimension)
        copy = 2 * vocabulary * model.dimension if self.autocast else 0
        return (
            self.norm_bytes() + self.product * elements + copy + self.all * (4 * vocabulary + 8) + 4
        )

    def dropout_bytes(self, size: int) -> int:
        """Return the bytes of dropout's factors, or of its mask on a GPU. `size` is the bytes per
        factor.
        """
        if not self.model.dropout:
            return 0
        return self.own * self.model.dimension * (1 if self.fused else size)
