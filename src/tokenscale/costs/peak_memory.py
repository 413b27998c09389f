"""The most bytes that a rank holds at any time of a step, from the settings.

`Peak` goes through a rank's step as its schedule orders it, and adds up what each pass makes and
frees: activations of the passes in flight, messages of a pipeline, gathered weights, gradients, and
what exists for a moment alone. Without a pipeline passes alternate.
"""

from collections.abc import Iterable
from math import prod

from tokenscale.costs.activations import Forward, padded_elements
from tokenscale.costs.flops import Weight
from tokenscale.costs.pipeline_schedules import Action

#: values from which on a collective is no longer shared by tensors (`train.parallel.sharding`)
BUCKET = 1 << 25


class Peak:
    """A rank's memory during a step.

    `forward` has the activations, `weights` are this rank's before sharding, `states` are the bytes
    of parameters and optimizer state, and `gradients` those between micro-steps.
    """

    def __init__(self, forward: Forward, weights: list[Weight], states: int, gradients: int):
        run = forward.run
        layout = run.layout
        self.forward = forward
        self.run = run
        self.layout = layout
        self.weights = weights
        self.states = states
        self.gradients = gradients
        #: bytes per element of weights
        self.size = 2 if run.precision == "bf16-true" else 4
        self.sum_size = forward.sum_size
        #: bytes per element of the gradients that FSDP reduces
        self.reduced_size = 4 if layout.gather == "bf16" else self.size
        #: whether FSDP gathers weights, and reshards those of blocks after each pass
        self.sharded = layout.shard > 1 and layout.sharding != "zero1"
        self.resharded = self.sharded and layout.sharding == "zero3"
        #: whether FSDP reduces gradients in each pass
        self.reduces = self.sharded and layout.accumulation == "sharded"
        layers = sorted({weight.layer for weight in weights if weight.layer is not None})
        self.block = [weight for weight in weights if weight.layer == layers[-1]]
        self.rest = [weight for weight in weights if weight.layer is None]
        self.tied = run.model.tied_embeddings
        self.head = [w for w in self.rest if w.name == ("embedding" if self.tied else "head")]
        if not forward.last:
            self.head = []
        self.embedding = [w for w in self.rest if w.name == "embedding" and forward.first]
        #: a block's gathered weights
        self.gathered_block = self.padded_bytes(self.block, forward.stream) if self.sharded else 0
        #: bytes at the time, and the most so far
        self.now = states + forward.rotary_bytes() + forward.gathered_bytes(weights)
        self.most = 0
        #: stages whose gradients stand
        self.stand: set[int] = set()
        #: sums that FSDP keeps until a pass ends
        self.reduced = 0

    def largest(self) -> int:
        """Return the most bytes at one time."""
        if self.layout.keeps_gradients:
            self.now += self.gradients
            self.stand = set(range(len(self.forward.stages)))
        actions = self.forward.actions()
        for action in actions:
            if action.kind == "F":
                self._forward(action)
            elif action.kind == "B":
                self._backward(action, last=action == actions[-1])
            else:
                self._weight_gradients(action)
        self.now = self.states + self.forward.rotary_bytes() + self.gradients
        self._see(self.update_bytes())
        return self.most

    def _see(self, size: int) -> None:
        """Take into account what exists for a moment."""
        self.most = max(self.most, self.now + size)

    def _forward(self, action: Action) -> None:
        forward = self.forward
        if self.resharded:
            # at the first block FSDP still has all of the rest as it was sent, too
            sent = self.padded_bytes(self.groups(action.chunk)[-1], forward.stream)
            self._see(sent + 2 * self.gathered_block + forward.input_bytes())
        self.now += forward.pass_bytes(action.chunk)
        # autocast's copies of matrices, until the pass ends
        blocks = sum(len(stage) for stage in forward.stages)
        made = 0 if forward.keeps_copies else blocks * forward.copy_bytes()
        # FSDP frees what it has gathered last when it gathers again
        if self.layout.head_group and self.sharded and forward.has_loss(action.chunk):
            made += self.padded_bytes(self.head, forward.stream)
        elif self.resharded or action.micro == 0:
            made += self.gathered_block
        if forward.has_loss(action.chunk):
            self.now += forward.loss_bytes()
            self._see(made + self.loss_forward_bytes())
        else:
            # the output, which is sent, and that of the last product
            self.now += forward.input_bytes()
            self._see(made + forward.product * forward.own * forward.model.dimension)

    def _backward(self, action: Action, last: bool) -> None:
        forward = self.forward
        chunk = action.chunk
        stands = chunk in self.stand
        first = forward.first and chunk == 0
        whole = 0  # the head's gradient until FSDP reduces it, or less its weight that it reshards
        copy = 0
        if forward.has_loss(chunk):
            self._see((self.gathered_block if self.resharded else 0) + self.loss_backward_bytes())
            self._see(self.head_product_bytes())
            self.now -= forward.loss_bytes()
            if self.layout.head_group and self.sharded:
                whole = -self._freed_bytes(self.head, last)
                copy = self._settle(self.head, stands, last, beside=whole)
            elif self._makes(stands) or self.tied and first:
                whole = self.gradient_bytes(self.head)
        self.now += whole + forward.input_bytes()  # and the gradient of the stage's output
        for below in reversed(range(len(forward.stages[chunk]))):
            # FSDP gathers the next block's weights beside those of this one
            gathered = self.gathered_block if self.resharded else 0
            ahead = gathered if below else 0
            self._see(gathered + ahead + copy + self.down_bytes(stands))
            self._see(gathered + ahead + copy + self.query_bytes(stands))
            self.now -= forward.kept_bytes() - forward.deferred_bytes()
            if not forward.deferred:
                copy = self._settle(self.block, stands, last, beside=ahead)
            if last and not self.resharded:
                self.now -= self.gathered_block
        if first:
            self.now -= forward.embedding_bytes()
            self._see(copy + self.gradient_bytes(self.embedding))
        self.now -= whole
        *own, rest = self.groups(chunk)
        for group in own:
            self._settle(group, stands, last)
        self._settle(rest, stands, last, beside=-self._freed_bytes(rest, last))
        if first or forward.fused:
            self.now -= forward.input_bytes()
        if forward.fused and not forward.has_loss(chunk):
            self.now -= forward.input_bytes()  # has been sent
        self.stand.add(chunk)
        self.now -= self.reduced
        self.reduced = 0

    def _weight_gradients(self, action: Action) -> None:
        """The deferred gradients of a pass in a zero-bubble schedule, whose inputs are freed after
        the last one.
        """
        layers = len(self.forward.stages[action.chunk])
        if action.micro:
            self._see(self.product_bytes(self.block))
        else:
            self.now += layers * self.sum_size * sum(prod(w.shape) for w in self.block)
            self._see(0)
        self.now -= layers * self.forward.deferred_bytes()

    def _makes(self, stands: bool) -> bool:
        """Return whether backward makes whole gradients, instead of adding each weight's to those
        that stand.
        """
        return self.reduces or not stands or self.layout.gather == "bf16"

    def _settle(self, weights: list[Weight], stands: bool, last: bool, beside: int = 0) -> int:
        """Replace what backward has made of some gradients by what stands after it. Return the bytes
        of the copy that FSDP reduces, which stays until the next reduction.
        """
        whole = self.gradient_bytes(weights) if self.reduces or not stands else 0
        elements = sum(prod(weight.shape) for weight in weights)
        if not self.sharded or not (self.reduces or last):
            self.now += 0 if stands else self.sum_size * elements
            return 0
        copy = self.padded_bytes(weights, self.reduced_size)
        self._see(whole + copy + beside)
        shard = copy // self.layout.shard
        if stands and not self.reduces:
            self.now -= self.sum_size * elements
        if not stands or not self.reduces:
            self.now += shard * self.sum_size // self.reduced_size
        elif self.layout.data > 1:
            # replicas reduce the sum, which FSDP keeps until the pass ends
            self.now += shard
            self.reduced += shard
        return copy

    def _freed_bytes(self, gathered: list[Weight], last: bool) -> int:
        """Return what FSDP frees of weights before it copies their gradients."""
        return self.padded_bytes(gathered, self.forward.stream) if self.resharded or last else 0

    def loss_forward_bytes(self) -> int:
        """Return what the loss makes in forward beside what it saves."""
        forward = self.forward
        entries = forward.vocabulary_rows
        width = forward.model.dimension
        if not forward.chunks:
            # logits, and the same in fp32
            return (6 if forward.product == 2 else 4) * forward.all * entries
        chunk = min(self.run.loss_chunk or forward.all, forward.all)
        matrix = entries * width
        # hidden states, and their gradient by a chunk
        states = forward.stream * forward.all * width + forward.product * chunk * width
        if forward.product == 4:
            # logits, and those of the chunk before
            return states + 4 * chunk * entries * (2 if chunk < forward.all else 1)
        # fp32 logits and rounded ones, also of the chunk before; or the weight's gradient by a
        # chunk, beside the weight in 16 bits or the sum in fp32 of what is kept in 16 bits
        return states + max(8 * chunk * entries, 2 * chunk * entries + 2 * matrix) + 2 * matrix

    def loss_backward_bytes(self) -> int:
        """Return what the loss makes in backward: gradients by logits and by log-probabilities."""
        forward = self.forward
        entries = forward.vocabulary_rows
        width = forward.model.dimension
        if not forward.chunks:
            return 8 * forward.all * entries
        # the saved gradients of head and hidden states, scaled; those in 16 bits in fp32 by parts of
        # 4,096 rows
        scaled = forward.stream * (forward.all + entries) * width
        return scaled + (8 * min(entries, 4096) * width if forward.stream == 2 else 0)

    def head_product_bytes(self) -> int:
        """Return what the backward pass of the head's product makes: log-probabilities are gone."""
        forward = self.forward
        if forward.chunks:
            return 0
        logits = (forward.product - 4) * forward.all * forward.vocabulary_rows
        by_hidden = forward.product * forward.all * forward.model.dimension
        return logits + by_hidden + self.product_bytes(self.head)

    def down_bytes(self, stands: bool) -> int:
        """Return what the backward pass of a block makes beside its activations: at the last product
        of its feed-forward part, or behind it.
        """
        forward = self.forward
        positions = forward.product * forward.all * forward.inner
        down = [weight for weight in self.block if "down" in weight.name]
        product = positions + self.recomputed_bytes()
        behind = product + (positions if forward.model.activation == "swiglu" else 0)
        if forward.autocast or self.layout.tensor > 1:
            # the output's gradient, as the product has it
            product += forward.product * forward.all * forward.model.dimension
        if forward.deferred:
            return max(product, behind + positions)  # the product's input stays
        if self._makes(stands):
            behind += self.gradient_bytes(down)
        return max(product + self.product_bytes(down), behind)

    def query_bytes(self, stands: bool) -> int:
        """Return what exists at the end of a block's backward pass, at the product of its queries,
        beyond its activations.
        """
        forward = self.forward
        norm = forward.norm_bytes() - forward.kept_bytes()
        width = forward.product * forward.all * forward.model.dimension
        # gradients inside an unfused RMSNorm
        inside = 16 * forward.own * forward.model.dimension * forward.unfused_norms
        if forward.deferred:
            return norm + forward.deferred_bytes() + max(width, inside)
        # two gradients of the product's input, and that of its output
        behind = 2 * width + forward.product * forward.all * forward.wide
        behind += forward.product_input_bytes(3)
        if self._makes(stands):
            return norm + self.gradient_bytes(self.block) + max(behind, inside)
        queries = self.product_bytes([w for w in self.block if "query" in w.name])
        return norm + max(behind + queries, inside)

    def product_bytes(self, weights: list[Weight]) -> int:
        """Return the bytes of the largest gradient of some matrices as a product makes it, and in
        the format of the weights.
        """
        size = self.forward.product
        if self.forward.autocast:  # the weight's copy is gone when its gradient is in fp32
            size = 6 if self.forward.deferred else 4
        return size * max((prod(weight.shape) for weight in weights), default=0)

    def recomputed_bytes(self) -> int:
        """Return the activations of a block that checkpointing computes again."""
        forward = self.forward
        if forward.checkpointing == "none":
            return 0
        return forward.block_bytes() + forward.copy_bytes() - forward.kept_bytes()

    def groups(self, chunk: int) -> list[list[Weight]]:
        """Return the weights outside of blocks that a stage uses, as FSDP reduces them together."""
        mine = [w for w in self.rest if w.name in ("embedding", "positions") and chunk == 0]
        if self.forward.has_loss(chunk):
            mine += [w for w in self.rest if w not in mine and w.name != "positions"]
        own = [self.embedding] if self.layout.embedding_group else []
        alone = [weight for group in own for weight in group]
        alone += self.head if self.layout.head_group else []
        return [*own, [weight for weight in mine if weight not in alone]]

    def bucket_bytes(self) -> int:
        """Return the bytes of a copied bucket of gradients, and of this rank's rows of its sum."""
        elements = [padded_elements(weight, self.layout.shard) for weight in self.weights]
        limit = BUCKET
        if self.layout.keeps_gradients:
            limit = (self.layout.bucket_megabytes << 20) // self.size
        shared = [count for count in elements if count < BUCKET]
        largest = min(sum(shared), max([limit, *shared]))
        size = 2 if self.layout.compression == "bf16" else self.sum_size
        return size * (largest + (largest // self.layout.shard if self.layout.shard > 1 else 0))

    def update_bytes(self) -> int:
        """Return what exists beside all gradients between backward and forward: one weight and its
        gradient in fp32 where only moments are, or a bucket of gradients or of zero1's weights.
        """
        found = 0
        if self.size == 2 and self.run.optimizer.moments == "fp32":
            found = 8 * max(prod(weight.shape) for weight in self.weights) // self.layout.shard
        if self.layout.keeps_gradients:
            found = max(found, self.gradients)  # DDP's buckets after the first step, in a new order
        if self.layout.shard > 1 and not self.sharded:
            largest = self.size * max(prod(weight.shape) for weight in self.weights)
            found = max(found, self.bucket_bytes() + min(largest, self.size * BUCKET))
        elif self.layout.data > 1 and not (self.sharded or self.layout.keeps_gradients):
            found = max(found, self.bucket_bytes())
        return found

    def gradient_bytes(self, weights: Iterable[Weight]) -> int:
        """Return the bytes of whole gradients, as autograd makes them."""
        size = 2 if self.layout.gather == "bf16" else self.size
        if not self.sharded:
            size = self.sum_size
        return size * sum(prod(weight.shape) for weight in weights)

    def padded_bytes(self, weights: Iterable[Weight], size: int) -> int:
        return size * sum(padded_elements(weight, self.layout.shard) for weight in weights)
