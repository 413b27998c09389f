"""Data parallelism: every rank holds the model, gradients are averaged in buckets while backward runs (DDP)."""

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tokenscale.parallel.mesh import Mesh
from tokenscale.parallel.parts import Sum, held_of


class BucketReady:
    """Tells whoever asks when a bucket of gradients is complete on this rank, before it is exchanged."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self.group = group
        self.tell: Callable[[], None] | None = None


def _exchange(ready: BucketReady, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if ready.tell is not None:
        ready.tell()
    return allreduce_hook(ready.group, bucket)


def apply(objective: nn.Module, mesh: Mesh) -> nn.Module:
    """Move to the device and wrap. Averaging over ranks is undone by the loss, which is normalised by the global useful
    tokens. Rank 0's weights reach all ranks here. Buffers are constants (rotary tables), so they are not broadcast.

    A stage of a pipeline is not wrapped, since DDP expects each forward to be followed by its backward: its gradients
    are averaged after its last backward pass.
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
    wrapped.bucket_ready = BucketReady(mesh.group(axis))
    wrapped.register_comm_hook(wrapped.bucket_ready, _exchange)
    return wrapped
