"""The gradient of one global batch, whatever the number of ranks and micro-steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from tokenscale.batches.batch import Batch
from tokenscale.models.losses import IGNORED, cross_entropy_sum
from tokenscale.parallel.world import World


def autocast_of(precision: str, device: torch.device) -> Callable[[], AbstractContextManager]:
    """A fresh autocast context for each use: bf16 over fp32 weights, or none."""
    if precision == "fp32":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


def backward(
    model: nn.Module,
    batch: Batch,
    *,
    micro_batch: int,
    micro_steps: int,
    world: World,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> Tensor:
    """Add the gradient of (sum of losses over the global batch) / (its useful tokens) to the model's gradients.

    Each rank holds `batch.tokens_bt` [rows, T], at most `micro_batch * micro_steps` rows; every rank runs `micro_steps`
    forward passes, and a pass without rows contributes zero. DDP averages over ranks, so the loss is scaled by the
    world size; gradients are exchanged in the last pass only. Returns this rank's sum of losses, on its device.
    """
    useful = torch.tensor(float(batch.useful_tokens), device=world.device)
    if world.size > 1:
        torch.distributed.all_reduce(useful)
    scale = world.size / useful.clamp(min=1)
    loss_sum = torch.zeros((), device=world.device)
    for k in range(micro_steps):
        rows = slice(k * micro_batch, (k + 1) * micro_batch)
        tokens, labels = torch.from_numpy(batch.tokens_bt[rows]), torch.from_numpy(batch.labels_bt[rows])
        if len(tokens) == 0:  # every rank must take part in every exchange
            tokens = torch.zeros((1, batch.tokens_bt.shape[1]), dtype=torch.int64)
            labels = torch.full_like(tokens, IGNORED)
        tokens, labels = tokens.to(world.device, non_blocking=True), labels.to(world.device, non_blocking=True)
        exchange = k == micro_steps - 1
        with nullcontext() if exchange or not hasattr(model, "no_sync") else model.no_sync():
            with autocast():
                loss = cross_entropy_sum(model(tokens), labels)
            (loss * scale).backward()
        loss_sum += loss.detach()
    return loss_sum
