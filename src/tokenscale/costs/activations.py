"""Activations of one rank in a step: what forward passes save for backward, counted from the
settings.

Terms follow Korthikanti et al. 2022 (section 4). `costs.memory` adds them to the rest.
"""

from functools import cache
from math import prod
from typing import Literal

from tokenscale.costs.flops import Weight, list_weights
from tokenscale.costs.pipeline_schedules import (
    Action,
    assign_stages,
    build_schedule,
    max_in_flight,
)
from tokenscale.data.order.permutation import micro_steps, rank_slots, shard_rows
from tokenscale.settings.layout import MeshCoordinate
from tokenscale.settings.model import aligned_rows
from tokenscale.settings.run import RunSettings

Device = Literal["cpu", "cuda"]

_assign_stages = cache(assign_stages)


def local_layers(run: RunSettings, coordinate: MeshCoordinate) -> list[range]:
    model = run.model.with_positions(run.sequence_length)
    return _assign_stages(model, run.sequence_length, run.layout.stages)[
        coordinate.pipeline :: run.layout.pipeline
    ]


def local_weights(run: RunSettings, coordinate: MeshCoordinate) -> list[Weight]:
    """Return the tensors of this rank's stages, in its tensor group's shards. A tied embedding is
    on the first and the last stage.
    """
    model = run.model.with_positions(run.sequence_length)
    layout = run.layout
    layers = {layer for stage in local_layers(run, coordinate) for layer in stage}

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


def gradient_bytes(run: RunSettings) -> int:
    """Return the bytes of an element of a gradient between micro-steps."""
    narrow = run.precision == "bf16-true" and run.layout.accumulation_format == "stored"
    return 2 if narrow else 4


def padded_elements(weight: Weight, shards: int) -> int:
    """Elements of a weight with equal numbers of rows on all shards."""
    return -(-weight.shape[0] // shards) * shards * prod(weight.shape[1:])


class Forward:
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
        self.stages = local_layers(run, coordinate)
        self.weights = local_weights(run, coordinate)
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
        #: bytes per element of a gradient between micro-steps
        self.sum_size = gradient_bytes(run)
        self.product = 4 if run.precision == "fp32" else 2  # bytes per element of a product
        narrow = run.precision == "bf16-true" or layout.gather == "bf16"
        # bytes per element of residual stream and gathered weights
        self.stream = 2 if narrow else 4
        # products save only their inputs
        self.deferred = layout.pipeline > 1 and layout.schedule == "zero-bubble"
        self.checkpointing = run.activation_checkpointing
        #: whether backward needs autocast's copies of the blocks' matrices, which forward has made
        self.keeps_copies = not self.deferred and (self.checkpointing == "none" or self.fused)
        self.keeps_scores = bool(model.dropout) and not self.fused
        entries = shard_rows(
            model.resolved_vocabulary_size, index=coordinate.tensor, count=layout.tensor
        )
        #: whether operations of RMSNorm are separate ones
        self.unfused_norms = model.norm == "rms" and not self.fused
        #: whether the loss makes its gradients in forward, by chunks of positions
        self.chunks = bool(run.loss_chunk) or layout.tensor > 1
        #: rows of this rank's output head, as products have them
        self.vocabulary_rows = aligned_rows(len(entries), device=device)
        self.score_rows = self.all * model.heads // layout.tensor

    def actions(self) -> list[Action]:
        """Return the passes of a step in this rank's order. Without a pipeline a first one, one
        between and a last one stand for all.
        """
        if self.layout.pipeline == 1:
            return build_schedule("naive", rank=0, ranks=1, micro_batches=min(self.steps, 3))
        return build_schedule(
            self.layout.schedule,
            rank=self.coordinate.pipeline,
            ranks=self.layout.pipeline,
            micro_batches=self.steps,
            chunks=self.layout.stages_per_rank,
        )

    def has_loss(self, chunk: int) -> bool:
        """Return whether this rank's stage number `chunk` is the last stage."""
        return self.last and chunk == len(self.stages) - 1

    def total_bytes(self, weights: list[Weight]) -> int:
        """Return the bytes of all passes in flight, plus the weights that FSDP keeps gathered,
        once.
        """
        passes = max_in_flight(self.actions())
        saved = self.pass_bytes(0) + (self.rotary_bytes() if self.checkpointing == "none" else 0)
        saved += self.loss_bytes() if self.has_loss(0) else 0
        return (
            passes * saved
            + self.message_bytes(passes, stages=len(self.stages))
            + self.gathered_bytes(weights)
        )

    def pass_bytes(self, chunk: int) -> int:
        """Return the bytes that the blocks of a stage save, and the embedding before them."""
        layers = self.stages[chunk]
        saved = len(layers) * self.kept_bytes()
        return saved + (self.embedding_bytes() if self.first and chunk == 0 else 0)

    def rotary_bytes(self) -> int:
        """Return the bytes of cosines and sines."""
        rotary = self.model.positions == "rotary"
        return 4 * self.run.sequence_length * self.model.head_dimension if rotary else 0

    def copy_bytes(self) -> int:
        """Return the bytes of autocast's copies of a block's matrices."""
        if not self.autocast:
            return 0
        block = [w for w in self.weights if w.layer == self.stages[0][0]]
        return 2 * sum(prod(w.shape) for w in block if len(w.shape) == 2)

    def kept_bytes(self) -> int:
        """Return the bytes that a block saves in its forward pass."""
        by_mode = {
            "none": self.block_bytes,
            "block": self.input_bytes,
            "selective": self.selective_bytes,
        }
        return by_mode[self.checkpointing]() + (self.copy_bytes() if self.keeps_copies else 0)

    def deferred_bytes(self) -> int:
        """Return the bytes of a block's products that a zero-bubble schedule keeps between a
        backward pass and that of weight gradients: their inputs and output gradients.
        """
        if not self.deferred:
            return 0
        width = self.model.dimension
        inner = self.inner * (2 if self.model.activation == "swiglu" else 1)
        gradients = self.wide + 2 * self.key_value + inner + 2 * width
        inputs = 2 * self.product_input_bytes(3)
        return inputs + self.product * self.all * (gradients + self.wide + self.inner)

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
        elements = sum(padded_elements(w, shards=layout.shard) for w in stay)
        if layout.reshard_to:
            elements += (
                sum(padded_elements(w, shards=layout.shard) for w in weights if w.layer is not None)
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
        if self.model.activation == "swiglu":
            # gate, SiLU(gate), up and the input of down
            return found + self.product_input_bytes(2) + 4 * inner
        # up and GELU(up)
        return found + self.product_input_bytes(1) + 2 * inner

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
        vocabulary = self.vocabulary_rows
        if self.chunks:
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
