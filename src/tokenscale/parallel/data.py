"""Data parallelism: every rank holds the model, gradients are averaged in buckets while backward runs (DDP)."""

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tokenscale.parallel.world import World
from tokenscale.settings.run import LayoutSettings


class BucketReady:
    """Tells whoever asks when a bucket of gradients is complete on this rank, before it is exchanged."""

    def __init__(self) -> None:
        self.tell: Callable[[], None] | None = None


def _exchange(ready: BucketReady, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if ready.tell is not None:
        ready.tell()
    return allreduce_hook(None, bucket)


def apply(model: nn.Module, layout: LayoutSettings, world: World) -> nn.Module:
    """Wrap the model. Averaging over ranks is undone by the loss, which is normalised by the global useful tokens.

    Buffers are constants (rotary tables), so they are not broadcast. Rank 0's weights reach all ranks here.
    """
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; the new name is unknown to torch 2.9
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=layout.bucket_megabytes,
        )
    wrapped.bucket_ready = BucketReady()
    wrapped.register_comm_hook(wrapped.bucket_ready, _exchange)
    return wrapped
