"""The most bytes that a rank holds at any time of a step, from the settings.

A step is largest at one of a few moments: in the loss, whose logits exist twice more; in the
backward pass of a block, while most activations still exist; where embedding and head get their
gradients and FSDP reduces them; or in the update. Each moment is a sum of what stands, of the
activations that are left, and of what exists for that moment alone.
"""

from collections.abc import Iterable
from math import prod

from tokenscale.costs.activations import Forward, padded_elements
from tokenscale.costs.flops import Weight

#: values from which on a collective is no longer shared by tensors (`train.parallel.sharding`)
BUCKET = 1 << 25


class Peak:
    """Moments of a step at which a rank's memory may be largest.

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
        self.activations = forward.total_bytes(weights)
        self.gathered = forward.gathered_bytes(weights)
        #: bytes per element of weights
        self.size = 2 if run.precision == "bf16-true" else 4
        self.sum_size = forward.sum_size
        #: bytes per element of the gradients that FSDP reduces
        self.reduced_size = 4 if layout.gather == "bf16" else self.size
        #: whether FSDP gathers weights, and reshards those of blocks after each pass
        self.sharded = layout.shard > 1 and layout.sharding != "zero1"
        self.resharded = self.sharded and layout.sharding == "zero3"
        #: whether gradients stand when backward begins
        self.stands = forward.steps > 1 or layout.keeps_gradients
        #: whether backward allocates new gradients: else it adds to those of earlier micro-steps
        reduced = self.sharded and layout.accumulation == "sharded"
        self.makes_gradients = reduced or not self.stands
        layers = sorted({weight.layer for weight in weights if weight.layer is not None})
        self.block = [weight for weight in weights if weight.layer == layers[-1]]
        self.rest = [weight for weight in weights if weight.layer is None]
        tied = run.model.tied_embeddings
        self.head = [w for w in self.rest if w.name == ("embedding" if tied else "head")]
        if not forward.last:
            self.head = []
        self.embedding = [w for w in self.rest if w.name == "embedding" and forward.first]

    def largest(self) -> int:
        """Return the bytes of the largest moment."""
        return self.states + max(self.moments().values())

    def moments(self) -> dict[str, int]:
        """Return moment → its bytes beside parameters and optimizer state."""
        forward = self.forward
        before = self.gradients if self.stands else 0
        left = self.activations
        found = {}
        if forward.last:
            found["loss"] = before + left + self.loss_bytes()
            left -= forward.loss_bytes()
        head = self.head_bytes()
        found["last block"] = before + left + head + self.block_bytes()
        kept = forward.kept_bytes()
        copy = 0
        if self.sharded:
            # FSDP reduces a copy of a block's gradients, which stands until the next block's do
            copy = self.padded_bytes(self.block, self.reduced_size)
            if self.stands and self.makes_gradients:
                copy += copy // self.layout.shard  # the sum, before it is added
            whole = self.gradient_bytes(self.block) if self.makes_gradients else 0
            found["reduction"] = before + left - kept + head + whole + copy
            found["reduction"] += self.prefetched_bytes()
            found["block before"] = before + left - kept + head + self.block_bytes() + copy
        # gradients grow while activations go: the first block may be larger
        made = self.gradients
        if not self.stands:
            made -= self.gradient_bytes([*self.embedding, *self.block])
        one = forward.first_block_bytes() + self.gathered
        found["first block"] = made + one + self.block_bytes() + copy
        found["rest"] = self.gradients + self.rest_bytes()
        found["update"] = self.gradients + self.update_bytes()
        return found

    def loss_bytes(self) -> int:
        """Return what the loss makes for a moment beside what it saves, in its forward or its
        backward pass.
        """
        forward = self.forward
        entries = forward.vocabulary_rows
        width = forward.model.dimension
        # autocast's copies of the blocks' matrices, until the forward pass ends
        copies = 0 if forward.keeps_copies else forward.copy_bytes(self.weights)
        # what FSDP has gathered last, before it is copied; in backward the last block's weights
        before = backward = self.prefetched_bytes()
        if self.sharded and self.layout.head_group:
            before = self.padded_bytes(self.head, forward.stream)
        elif self.sharded and not self.stands:
            before = self.padded_bytes(self.block, forward.stream)
        if not (self.run.loss_chunk or self.layout.tensor > 1):
            # logits and fp32 logits beside log-probabilities; then gradients by the last two
            logits = (6 if forward.product == 2 else 4) * forward.all * entries
            return max(before + copies + logits, backward + 8 * forward.all * entries)
        chunk = min(self.run.loss_chunk or forward.all, forward.all)
        matrix = entries * width
        # hidden states, and their gradient by a chunk
        states = forward.stream * forward.all * width + forward.product * chunk * width
        if forward.product == 4:
            # logits, and those of the chunk before
            logits = 4 * chunk * entries * (2 if chunk < forward.all else 1)
        else:
            # fp32 logits and rounded ones, also of the chunk before; or the weight's gradient by a
            # chunk, beside the weight in 16 bits or the sum in fp32 of what is kept in 16 bits
            logits = max(8 * chunk * entries, 2 * chunk * entries + 2 * matrix) + 2 * matrix
        # backward scales the saved gradients of head and hidden states, those in 16 bits in fp32 by
        # parts of 4,096 rows
        scaled = forward.stream * (forward.all * width + matrix)
        if forward.stream == 2:
            scaled += 8 * min(entries, 4096) * width
        return max(before + copies + states + logits, backward + scaled)

    def head_bytes(self) -> int:
        """Return the gradient of the output head that exists in the last block's backward pass,
        beside those that stand.
        """
        if self.layout.head_group and self.sharded:
            # reduced already: its copy for the reduction exists, its gathered weights do not
            copy = self.padded_bytes(self.head, self.reduced_size)
            return (
                copy + copy // self.layout.shard - self.padded_bytes(self.head, self.forward.stream)
            )
        return self.gradient_bytes(self.head) if self.makes_gradients else 0

    def block_bytes(self) -> int:
        """Return what the backward pass of the last block makes beside its activations: at the last
        product of its feed-forward part, or behind it.
        """
        forward = self.forward
        positions = forward.product * forward.all * forward.inner
        down = [weight for weight in self.block if "down" in weight.name]
        product = positions + forward.product * sum(prod(weight.shape) for weight in down)
        behind = positions * (2 if forward.model.activation == "swiglu" else 1)
        if self.makes_gradients:
            behind += self.gradient_bytes(down)
        found = forward.input_bytes() + max(product, behind) + self.recomputed_bytes()
        if self.resharded:
            # gathered weights of this block, and those of the next one on their way
            found += self.padded_bytes(self.block, forward.stream) + self.prefetched_bytes()
        return found

    def recomputed_bytes(self) -> int:
        """Return the activations of a block that checkpointing computes again."""
        forward = self.forward
        if forward.checkpointing == "none":
            return 0
        found = forward.block_bytes() - forward.kept_bytes()
        return found + (0 if forward.keeps_copies else forward.copy_bytes(self.block))

    def prefetched_bytes(self) -> int:
        return self.padded_bytes(self.block, self.forward.stream) if self.resharded else 0

    def rest_bytes(self) -> int:
        """Return what exists beside all gradients when the embedding, and with FSDP the weights of
        its group, get theirs.
        """
        if self.layout.sharding == "zero1" and self.layout.keeps_gradients:
            return self.gradient_bytes(self.embedding) + self.bucket_bytes()
        if not self.sharded:
            return self.gradient_bytes(self.embedding) if self.stands else 0
        found = 0
        for group in self.groups():
            # whole gradients, and their copy that is reduced to a shard
            reduced = self.padded_bytes(group, self.reduced_size)
            whole = self.gradient_bytes(group) if self.makes_gradients else 0
            shard = 0 if self.stands else reduced // self.layout.shard
            found = max(found, whole + reduced - shard)
        # weights of zero2 stay gathered between micro-steps
        stays = not self.resharded and self.forward.steps > 1
        return found + (self.gathered if stays else 0)

    def groups(self) -> list[list[Weight]]:
        """Return the weights outside of blocks as FSDP reduces them together."""
        own = [self.embedding] if self.layout.embedding_group else []
        own += [self.head] if self.layout.head_group else []
        alone = [weight for group in own for weight in group]
        return [*own, [weight for weight in self.rest if weight not in alone]]

    def bucket_bytes(self) -> int:
        """Return the bytes of zero1's copy of a bucket, and of this rank's rows of its sum."""
        elements = [padded_elements(weight, self.layout.shard) for weight in self.weights]
        limit = BUCKET
        if self.layout.keeps_gradients:
            limit = (self.layout.bucket_megabytes << 20) // self.size
        shared = [count for count in elements if count < BUCKET]
        largest = min(sum(shared), max([limit, *shared]))
        size = 2 if self.layout.compression == "bf16" else self.sum_size
        return size * (largest + largest // self.layout.shard)

    def update_bytes(self) -> int:
        """Return what exists beside all gradients between backward and forward: one weight and its
        gradient in fp32 where only moments are, or a bucket of zero1's gathered weights.
        """
        found = 0
        if self.size == 2 and self.run.optimizer.moments == "fp32":
            found = 8 * max(prod(weight.shape) for weight in self.weights) // self.layout.shard
        if self.layout.shard > 1 and self.layout.sharding == "zero1":
            found = max(found, self.bucket_bytes())
        if self.layout.keeps_gradients:
            found = max(found, self.gradients)  # DDP's buckets after the first step, in a new order
        return found

    def gradient_bytes(self, weights: Iterable[Weight]) -> int:
        """Return the bytes of whole gradients, as autograd makes them."""
        size = 2 if self.layout.gather == "bf16" else self.size
        if not self.sharded:
            size = self.sum_size
        return size * sum(prod(weight.shape) for weight in weights)

    def padded_bytes(self, weights: Iterable[Weight], size: int) -> int:
        return size * sum(padded_elements(weight, self.layout.shard) for weight in weights)
