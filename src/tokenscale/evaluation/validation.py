"""Validation loss."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from tokenscale.batches.held_out import Slice
from tokenscale.models.losses import cross_entropy_sum
from tokenscale.parallel.world import World


@torch.no_grad()
def loss(
    model: nn.Module, data: Slice, micro_batch: int, world: World, autocast: Callable[[], AbstractContextManager]
) -> tuple[float, int]:
    """(sum of the loss in nats, useful labels) over the whole slice. A collective: every rank must call it."""
    total, useful = 0.0, 0
    for start in range(0, len(data.tokens_bt), micro_batch):
        tokens = torch.from_numpy(data.tokens_bt[start : start + micro_batch]).to(world.device)
        labels = torch.from_numpy(data.labels_bt[start : start + micro_batch]).to(world.device)
        with autocast():
            total += cross_entropy_sum(model(tokens), labels).item()
        useful += int((data.labels_bt[start : start + micro_batch] >= 0).sum())
    loss_sum, count = world.sum(total, float(useful))
    return loss_sum, int(count)
