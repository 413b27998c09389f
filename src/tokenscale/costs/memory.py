"""Memory of one rank in a step: parameters, gradients, optimizer state and activations, counted
from the settings.

Kinds are those of `train.profiling.Probe`. States follow Rajbhandari et al. 2020 (figure 1) for
AdamW in one number format.
"""

from dataclasses import dataclass
from math import prod

from tokenscale.costs.activations import (
    Device,
    Forward,
    gradient_bytes,
    local_weights,
)
from tokenscale.costs.flops import weights
from tokenscale.costs.peak_memory import Peak
from tokenscale.data.order.permutation import micro_steps, shard_rows
from tokenscale.settings.run import RunSettings


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank: the most of each part, and the most at one time (`peak`). The last two are
    None if they are not predicted.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None
    peak: int | None

    @property
    def parts(self) -> dict[str, int | None]:
        """Return the parts by name, as a training measures them in its first step."""
        names = ("parameters", "gradients", "optimizer", "activations")
        return {name: getattr(self, name) for name in names}

    @property
    def standing(self) -> int:
        """Bytes between the micro-steps of a step, without gathered weights."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def sum_of_parts(self) -> int:
        """The sum of the parts. Not all gradients exist while all activations do, if there is one
        micro-step.
        """
        return self.standing + (self.activations or 0)

    @property
    def transient(self) -> int:
        """Bytes by which the peak exceeds the sum of the parts: what backward makes for a moment."""
        return max(0, (self.peak or 0) - self.sum_of_parts)

    @property
    def total(self) -> int:
        """The bytes that a rank must have: the sum of the parts, or the peak if it is larger."""
        return self.sum_of_parts + self.transient


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

    The peak (`costs.peak_memory`) includes what exists for a moment: logits and their gradients,
    buckets and copies that collectives send, gathered weights, and whole gradients of FSDP's groups.
    Workspaces of libraries are not included.

    Not predicted: activations and peak under torch.compile, of float8 products, and of models of
    `transformers`, whose weights are assumed to divide evenly.
    """
    layout = run.layout
    size = 2 if run.precision == "bf16-true" else 4
    forward = None
    if run.model.transformers is not None:
        count = weights(run.model.with_positions(run.sequence_length)).total
        mine = [-(-count // layout.shard)]
        unsharded = count
        whole = unsharded if layout.sharding == "zero1" else sum(mine)
        scalars = 0
    else:
        coordinate = layout.coordinate(rank)
        local = local_weights(run, coordinate)
        mine = [
            len(shard_rows(w.shape[0], index=coordinate.shard, count=layout.shard))
            * prod(w.shape[1:])
            for w in local
        ]
        unsharded = sum(prod(w.shape) for w in local)
        whole = unsharded if layout.sharding == "zero1" else sum(mine)
        scalars = len(mine)
        if not (run.compile or run.float8):
            forward = Forward(run=run, coordinate=coordinate, device=device)
    moment = 4 if run.optimizer.moments == "fp32" else size
    passes = micro_steps(
        run.global_batch, world_size=layout.data_parallel_size, micro_batch=run.micro_batch
    )
    holds_all = layout.accumulation == "unsharded" and passes > 1
    parameters = size * whole
    gradients = gradient_bytes(run) * (unsharded if holds_all else whole)
    optimizer = 2 * moment * sum(mine) + 4 * scalars
    activations = None
    peak = None
    if forward is not None:
        activations = forward.total_bytes(local)
        peak = Peak(forward, local, parameters + optimizer, gradients).largest()
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        peak=peak,
    )


def fullest_rank(run: RunSettings, device: Device = "cpu") -> int:
    """Return the rank with the most memory. Stages differ, and of uneven shards the first are
    larger.
    """
    places = [(rank, run.layout.coordinate(rank)) for rank in range(run.layout.world_size)]
    firsts = [rank for rank, place in places if place.data == place.shard == place.tensor == 0]
    return max(firsts, key=lambda rank: memory(run, rank, device=device).total)


def largest_memory(run: RunSettings, device: Device = "cpu") -> Memory:
    """Return the memory of the rank with the most."""
    return memory(run, fullest_rank(run, device), device=device)
