"""Validation loss and accuracy."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from tokenscale.data.batches.held_out import HeldOutSlice
from tokenscale.data.order.permutation import micro_steps
from tokenscale.train.models.micro_batch import micro_batch
from tokenscale.train.parallel.mesh import Mesh
from tokenscale.train.parallel.parallelize import ParallelModel


@dataclass(frozen=True)
class ValidationSums:
    """Sums over the held-out slice: loss (nats), useful labels, and labels with the largest logit (or None)."""

    loss_sum: float
    useful_tokens: int
    correct_tokens: int | None


def add_sums(sums: Sequence[ValidationSums]) -> ValidationSums:
    """Return the sums over several slices."""
    correct = [found.correct_tokens for found in sums if found.correct_tokens is not None]
    return ValidationSums(
        sum(found.loss_sum for found in sums),
        sum(found.useful_tokens for found in sums),
        sum(correct) if len(correct) == len(sums) else None,
    )


@torch.no_grad()
def validate(
    parallel: ParallelModel,
    data: HeldOutSlice,
    micro_batch_size: int,
    mesh: Mesh,
    autocast: Callable[[], AbstractContextManager],
    *,
    accuracy: bool = False,
) -> ValidationSums:
    """Return the sums over the whole slice, on every rank. A collective: every rank must call it.

    All ranks run equally many forward passes, since some layouts communicate in each. Ranks that read the same rows all
    compute their loss, and one of them counts it. `accuracy` costs the products of the output head once more.
    """
    world, objective = mesh.world, parallel.objective
    total, useful = torch.zeros((), dtype=torch.float64, device=world.device), 0
    objective.correct = torch.zeros((), dtype=torch.int64, device=world.device) if accuracy else None
    parallel.module.eval()
    passes = micro_steps(data.global_rows, mesh.layout.data_parallel_size, micro_batch_size)
    for start in range(0, passes * micro_batch_size, micro_batch_size):
        rows = slice(start, start + micro_batch_size)
        with autocast():
            total += parallel.loss(micro_batch(data, rows, world.device))
        useful += objective.count(data.labels_bt[rows])
    parallel.module.train()
    correct, objective.correct = objective.correct, None
    if accuracy and parallel.pipeline is not None:
        parallel.pipeline.broadcast_from_last(correct)
    counts = mesh.place.is_group_leader
    sums = [total.item() * counts, float(useful * counts), float(correct.item() * counts) if accuracy else 0.0]
    loss_sum, useful_tokens, correct_tokens = world.sum(*sums)
    return ValidationSums(loss_sum, int(useful_tokens), int(correct_tokens) if accuracy else None)
