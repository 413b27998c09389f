"""Validation loss and accuracy."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from tokenscale.data.batches.held_out import Slice
from tokenscale.data.order.shares import micro_steps
from tokenscale.train.parallel.mesh import Mesh
from tokenscale.train.step import micro


@dataclass(frozen=True)
class Held:
    """Sums over the slice: of the loss in nats, useful labels, and those with the largest logit (None: not asked)."""

    loss_sum: float
    useful_tokens: int
    correct_tokens: int | None


@torch.no_grad()
def loss(
    objective: nn.Module,
    data: Slice,
    micro_batch: int,
    mesh: Mesh,
    autocast: Callable[[], AbstractContextManager],
    *,
    accuracy: bool = False,
) -> Held:
    """The sums over the whole slice, on every rank. A collective: every rank must call it.

    All ranks run as many forward passes, for some layouts exchange weights in each. Ranks that share their rows all
    have their loss, and one of them counts it. `accuracy` costs the products of the output head once more.
    """
    world, pipeline = mesh.world, getattr(objective, "pipeline", None)
    forward, plain = pipeline or objective, getattr(objective, "module", objective)
    total, useful = torch.zeros((), dtype=torch.float64, device=world.device), 0
    plain.correct = torch.zeros((), dtype=torch.int64, device=world.device) if accuracy else None
    objective.eval()
    for start in range(0, micro_steps(data.global_rows, mesh.layout.readers, micro_batch) * micro_batch, micro_batch):
        tokens, labels, bounds = micro(data, slice(start, start + micro_batch), world.device)
        with autocast():
            total += forward(tokens, labels, bounds)
        useful += plain.count(data.labels_bt[start : start + micro_batch])
    objective.train()
    correct, plain.correct = plain.correct, None
    if accuracy and pipeline is not None:
        pipeline.broadcast_from_last(correct)
    counts = mesh.place.counts
    sums = [total.item() * counts, float(useful * counts), float(correct.item() * counts) if accuracy else 0.0]
    loss_sum, useful_tokens, correct_tokens = world.sum(*sums)
    return Held(loss_sum, int(useful_tokens), int(correct_tokens) if accuracy else None)
