"""Data parallelism: every rank holds the model; gradients are averaged in buckets while backward runs (DDP)."""

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tokenscale.train.parallel.parallelize import BucketListener, ParallelModel
from tokenscale.train.parallel.sharding import GradReduction, Mesh, materialise


def apply(parallel: ParallelModel, mesh: Mesh) -> ParallelModel:
    """Move to the device and wrap in DDP. Rank 0's weights reach all ranks here, unless none are set yet.

    DDP averages over ranks; the loss is normalised by the global number of useful tokens, which undoes that. Buffers
    are constants (rotary tables), so they are not broadcast.

    A pipeline stage is not wrapped, since DDP expects each forward to be followed by its backward: its gradients are
    averaged after its last backward pass. `static_graph` is left out: with it torch 2.13's reducer fails in the first
    of several micro-steps, which reduces nothing.
    """
    unset = any(weight.is_meta for weight in parallel.module.parameters())
    materialise(parallel.module, mesh.world.device)
    group = mesh.group("data" if mesh.size("data") > 1 else "shard")
    if mesh.size("pipeline") > 1:
        names = tuple(name for name, _ in parallel.objective.model.named_parameters())
        parallel.sharding.reductions.append(GradReduction(names, group, mean=True))
        return parallel
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
    listener = BucketListener()
    wrapped.register_comm_hook(_HookState(group, mesh.layout.compression, listener), _reduce_bucket)
    parallel.module, parallel.no_sync, parallel.bucket_listener = wrapped, wrapped.no_sync, listener
    return parallel


@dataclass(frozen=True)
class _HookState:
    group: dist.ProcessGroup
    compression: str
    listener: BucketListener


def _reduce_bucket(state: _HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the group, in bf16 where the layout compresses."""
    if state.listener.on_ready is not None:
        state.listener.on_ready()
    if state.compression == "none":
        return allreduce_hook(state.group, bucket)
    # torch's own bf16_compress_hook requires NCCL; dividing first keeps the sum in the range of one gradient
    gradients = bucket.buffer()
    compressed = (gradients / dist.get_world_size(state.group)).to(torch.bfloat16)
    future = dist.all_reduce(compressed, group=state.group, async_op=True).get_future()
    return future.then(lambda done: gradients.copy_(done.value()[0]))
