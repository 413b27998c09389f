"""Data parallelism: every rank holds the model; gradients are averaged in buckets while backward
runs (DDP).
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tokenscale.data.order.permutation import shard_rows
from tokenscale.train.collectives import all_gather, reduce_scatter
from tokenscale.train.compilation import replace_forward
from tokenscale.train.parallel.sharding import (
    BUCKET,
    BucketListener,
    GradReduction,
    LocalShards,
    Mesh,
    ParallelModel,
    ShardingState,
    fill_buckets,
    materialise,
)

#: reduces a complete bucket of gradients; the future is what DDP waits for after backward
BucketHook = Callable[[dist.ProcessGroup, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def apply_ddp(parallel: ParallelModel, mesh: Mesh) -> ParallelModel:
    """Move to the device and wrap in DDP. Rank 0's weights reach all ranks here, unless none are
    set yet.

    DDP averages over ranks; the loss is normalised by the global number of useful tokens, which
    undoes that. Buffers are constants (rotary tables), so they are not broadcast.

    A pipeline stage is not wrapped, since DDP expects each forward to be followed by its backward:
    its gradients are averaged after its last backward pass. So are gradients in fp32 of weights in
    bf16 (`accumulation_format`): DDP's buckets have the format of the weights. `static_graph` is
    left out: with it torch 2.13's reducer fails in the first of several micro-steps, which reduces
    nothing.
    """
    group = mesh.group("data")
    if not mesh.layout.keeps_gradients:
        materialise(parallel.module, device=mesh.world.device)
        assert group is not None  # DDP has several copies
        names = tuple(name for name, _ in parallel.objective.model.named_parameters())
        parallel.sharding.reductions.append(GradReduction(names=names, group=group, mean=True))
        return parallel
    hook = _reduce_in_bf16 if mesh.layout.compression == "bf16" else allreduce_hook
    return _wrap(parallel, mesh, group=group, hook=hook)


def _wrap(
    parallel: ParallelModel, mesh: Mesh, group: dist.ProcessGroup | None, hook: BucketHook
) -> ParallelModel:
    """Move to the device and wrap in DDP, which calls `hook` with each bucket that is complete."""
    unset = any(weight.is_meta for weight in parallel.module.parameters())
    materialise(parallel.module, device=mesh.world.device)
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; the new name is unknown to torch 2.9
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        wrapped = DistributedDataParallel(
            parallel.module,
            device_ids=[mesh.world.device.index] if mesh.world.device.type == "cuda" else None,
            process_group=group,
            broadcast_buffers=False,
            init_sync=not unset,
            gradient_as_bucket_view=True,
            bucket_cap_mb=mesh.layout.bucket_megabytes,
        )
    if parallel.compilation is not None:
        replace_forward(wrapped, make=_whole_graphs)
    listener = BucketListener()
    # of torch's fake process group, whose futures never complete
    is_fake = dist.get_backend(group) == "fake"

    def reduce_bucket(
        group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        if listener.on_ready is not None:
            listener.on_ready()
        reduced = hook(group, bucket)
        return noop_hook(None, bucket) if is_fake else reduced

    wrapped.register_comm_hook(group, reduce_bucket)
    parallel.module = wrapped
    parallel.accumulate = wrapped.no_sync
    parallel.bucket_listener = listener
    return parallel


def _whole_graphs(ddp: type[nn.Module]) -> Callable:
    """Compile blocks as they are. DDP splits graphs at the borders of its buckets, so that
    gradients are reduced while others are computed; blocks are small enough for that, and a graph
    for each matrix has nothing left to fuse.
    """

    def forward(self: nn.Module, *args: Any) -> Tensor:
        with torch._dynamo.config.patch(optimize_ddp=False):  # read when a graph is compiled
            return ddp.forward(self, *args)

    return forward


def _reduce_in_bf16(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average over the group. torch's own bf16_compress_hook requires NCCL."""
    gradients = bucket.buffer()
    # the sum has the range of one gradient
    compressed = (gradients / dist.get_world_size(group)).to(torch.bfloat16)
    future = dist.all_reduce(compressed, group=group, async_op=True).get_future()
    return future.then(lambda done: gradients.copy_(done.value()[0]))


def apply_zero1(parallel: ParallelModel, mesh: Mesh) -> ParallelModel:
    """Shard the optimizer state. Each rank gets the mean gradient of its rows of every parameter
    alone, in DDP's buckets during backward; it updates these rows, and ranks gather them. Without
    such buckets (`LayoutSettings.keeps_gradients`) gradients are reduced after the last backward
    pass.
    """
    scatter = RowScatter(
        group=mesh.group("shard"),
        index=mesh.index("shard"),
        ranks=mesh.size("shard"),
        in_bf16=mesh.layout.compression == "bf16",
    )
    if not mesh.layout.keeps_gradients:
        materialise(parallel.module, device=mesh.world.device)
    else:
        _wrap(parallel, mesh, group=mesh.group("shard"), hook=scatter.reduce_bucket)
    parallel.shards = RowShards(
        scatter=scatter,
        model=parallel.objective.model,
        mesh=mesh,
        sharding=parallel.sharding,
    )
    return parallel


@dataclass
class _Scattering:
    """A reduce-scatter under way. `sent` [ranks x n] and `received` [n] hold every gradient's rows,
    padded to as many on each rank; they must exist until it has ended.
    """

    work: dist.Work
    sent: Tensor
    received: Tensor
    gradients: list[Tensor]


class RowScatter:
    """Reduce-scatter of whole gradients: afterwards this rank's rows hold the mean over the ranks,
    and the other rows numbers that nobody reads.

    A bucket is under way while backward fills the next one, as in FSDP2, so that there is one copy
    of a bucket at a time. DDP's own futures are not used: gloo's reduce-scatter has none.
    """

    def __init__(self, group: dist.ProcessGroup | None, index: int, ranks: int, in_bf16: bool):
        self._group = group
        self._index = index
        self._ranks = ranks
        self._in_bf16 = in_bf16
        self.under_way: list[_Scattering] = []

    def reduce_bucket(
        self, group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start with a bucket of DDP. The future is complete: `finish` waits in its place."""
        self.start(bucket.gradients())
        return noop_hook(None, bucket)

    @torch.no_grad()
    def start(self, gradients: list[Tensor]) -> None:
        """Start with some gradients. A large one whose rows divide is sent as it lies in memory,
        the others from one copy.
        """
        self.finish()
        copied = []
        for gradient in gradients:
            divides = len(gradient) % self._ranks == 0
            if gradient.numel() >= BUCKET and divides and gradient.is_contiguous():
                self._send(gradient.view(self._ranks, -1), [gradient])
            else:
                copied.append(gradient)
        if not copied:
            return
        parts = []
        for gradient in copied:
            values = gradient.flatten()
            missing = self._size(gradient) * self._ranks - len(values)
            parts.append((F.pad(values, (0, missing)) if missing else values).view(self._ranks, -1))
        self._send(torch.cat(parts, dim=1), copied)

    def _send(self, rows: Tensor, gradients: list[Tensor]) -> None:
        rows.div_(self._ranks)  # the sum has the range of one gradient
        sent = rows.to(torch.bfloat16) if self._in_bf16 else rows
        received = sent.new_empty(sent.shape[1])
        work = reduce_scatter(received, sent.view(-1), group=self._group, async_op=True)
        self.under_way.append(_Scattering(work, sent, received=received, gradients=gradients))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for what is under way, if anything, and write this rank's rows."""
        for ended in self.under_way:
            ended.work.wait()
            sizes = [self._size(gradient) for gradient in ended.gradients]
            for gradient, rows in zip(ended.gradients, ended.received.split(sizes), strict=True):
                mine = shard_rows(len(gradient), index=self._index, count=self._ranks)
                own = gradient[mine.start : mine.stop]
                own.copy_(rows[: own.numel()].view_as(own))
        self.under_way.clear()

    def _size(self, gradient: Tensor) -> int:
        """Return the elements of a rank's rows; the last ranks may have fewer."""
        return -(-len(gradient) // self._ranks) * math.prod(gradient.shape[1:])


class RowShards(LocalShards):
    """Equal numbers of rows of every parameter for each rank; where they do not divide, the last
    ranks have fewer.

    torch's ZeroRedundancyOptimizer assigns whole parameters, so that an embedding is one rank's,
    and does not pass the fused update's `grad_scale` on.
    """

    def __init__(self, scatter: RowScatter, model: nn.Module, mesh: Mesh, sharding: ShardingState):
        self.scatter = scatter
        self._index = mesh.index("shard")
        self._count = mesh.size("shard")
        self._group = mesh.group("shard")
        super().__init__(model, mesh, sharding)
        self.reduces_after_backward = True
        self._in_backward = mesh.layout.keeps_gradients

    def reduce_gradients(self) -> None:
        if not self._in_backward:
            weights = dict(self.model.named_parameters())
            for names in fill_buckets(weights):
                gradients = [weights[name].grad for name in names]
                self.scatter.start([gradient for gradient in gradients if gradient is not None])
        self.scatter.finish()
        super().reduce_gradients()

    def _rows(self, weight: nn.Parameter) -> tuple[Tensor, int, int]:
        mine = shard_rows(len(weight), index=self._index, count=self._count)
        return weight.detach()[mine.start : mine.stop], mine.start, len(weight)

    def _assign_gradients(self) -> None:
        for name, weight in self.model.named_parameters():
            mine = shard_rows(len(weight), index=self._index, count=self._count)
            self.by_name[name].tensor.grad = (
                None if weight.grad is None else weight.grad[mine.start : mine.stop]
            )

    @torch.no_grad()
    def all_gather_parameters(self) -> None:
        """Give every rank all rows. Large parameters are gathered in place, the others share
        all-gathers.

        The copies are no larger than a bucket and a parameter, when activations are no longer
        there.
        """
        weights = {name: weight.detach() for name, weight in self.model.named_parameters()}
        for name, weight in list(weights.items()):
            if weight.numel() >= BUCKET and len(weight) % self._count == 0:
                all_gather(weights.pop(name), self.by_name[name].tensor, group=self._group)
        for names in fill_buckets(weights):
            # as many rows of each rank, of which the last ranks may fill fewer
            shapes = [
                (-(-len(weights[name]) // self._count), *weights[name].shape[1:]) for name in names
            ]
            sizes = [math.prod(shape) for shape in shapes]
            own = [self.by_name[name].tensor.flatten() for name in names]
            mine = torch.cat(
                [F.pad(rows, (0, size - len(rows))) for rows, size in zip(own, sizes, strict=True)]
            )
            every = mine.new_empty(self._count, len(mine))
            all_gather(every.view(-1), mine, group=self._group)
            for name, part, shape in zip(names, every.split(sizes, dim=1), shapes, strict=True):
                weights[name].copy_(part.reshape(-1, *shape[1:])[: len(weights[name])])
