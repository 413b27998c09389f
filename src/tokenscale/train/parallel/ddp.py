"""Data parallelism: every rank holds the model, gradients are averaged in buckets while backward runs (DDP)."""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tokenscale.train.parallel.mesh import Mesh
from tokenscale.train.parallel.sharding import Sum, held_of


class BucketReady:
    """Tells whoever asks when a bucket of gradients is complete on this rank, before it is exchanged."""

    def __init__(self, group: dist.ProcessGroup, compression: str) -> None:
        self.group, self.compression = group, compression
        self.on_ready: Callable[[], None] | None = None


def _exchange(ready: BucketReady, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if ready.on_ready is not None:
        ready.on_ready()
    if ready.compression == "none":
        return allreduce_hook(ready.group, bucket)
    # torch's own bf16_compress_hook asks for NCCL; dividing first keeps the sum in the range of one gradient
    gradients = bucket.buffer()
    sent = (gradients / dist.get_world_size(ready.group)).to(torch.bfloat16)
    future = dist.all_reduce(sent, group=ready.group, async_op=True).get_future()
    return future.then(lambda done: gradients.copy_(done.value()[0]))


def apply(objective: nn.Module, mesh: Mesh) -> nn.Module:
    """Move to the device and wrap. Averaging over ranks is undone by the loss, which is normalised by the global useful
    tokens. Rank 0's weights reach all ranks here. Buffers are constants (rotary tables), so they are not broadcast.

    A stage of a pipeline is not wrapped, since DDP expects each forward to be followed by its backward: its gradients
    are averaged after its last backward pass. `static_graph` is left out: with it torch 2.13's reducer fails in the
    first of several micro-steps, which exchanges nothing.
    """
    objective.to(mesh.world.device)
    axis = "data" if mesh.size("data") > 1 else "shard"
    if mesh.size("pipeline") > 1:
        held, names = held_of(objective), tuple(name for name, _ in objective.model.named_parameters())
        held.sums.append(Sum(names, mesh.group(axis), mean=True))
        return objective
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; the new name is unknown to torch 2.9
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        wrapped = DistributedDataParallel(
            objective,
            device_ids=[mesh.world.device.index] if mesh.world.device.type == "cuda" else None,
            process_group=mesh.group(axis),
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=mesh.layout.bucket_megabytes,
        )
    wrapped.bucket_ready = BucketReady(mesh.group(axis), mesh.layout.compression)
    wrapped.register_comm_hook(wrapped.bucket_ready, _exchange)
    return wrapped
