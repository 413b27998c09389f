"""Validation loss."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from tokenscale.batches.held_out import Slice
from tokenscale.order.shares import micro_steps
from tokenscale.parallel.mesh import Mesh
from tokenscale.training.step import micro


@torch.no_grad()
def loss(
    objective: nn.Module, data: Slice, micro_batch: int, mesh: Mesh, autocast: Callable[[], AbstractContextManager]
) -> tuple[float, int]:
    """(sum of the loss in nats, useful labels) over the whole slice. A collective: every rank must call it.

    All ranks run as many forward passes, for some layouts exchange weights in each. Ranks that share their rows all
    have their loss, and one of them counts it.
    """
    world, forward = mesh.world, getattr(objective, "pipeline", objective)
    total, useful = torch.zeros((), dtype=torch.float64, device=world.device), 0
    objective.eval()
    for start in range(0, micro_steps(data.global_rows, mesh.layout.readers, micro_batch) * micro_batch, micro_batch):
        tokens, labels, bounds = micro(data, slice(start, start + micro_batch), world.device)
        with autocast():
            total += forward(tokens, labels, bounds)
        useful += int((data.labels_bt[start : start + micro_batch] >= 0).sum())
    objective.train()
    counts = mesh.place.counts
    loss_sum, count = world.sum(total.item() * counts, float(useful * counts))
    return loss_sum, int(count)
