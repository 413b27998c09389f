"""The gradient of one global batch, whatever the number of ranks and micro-steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from tokenscale.data.batches.batch import Batch
from tokenscale.train.memory_probe import Probe
from tokenscale.train.models.attention import Bounds
from tokenscale.train.models.losses import IGNORED
from tokenscale.train.phase_timer import Timer


def backward(
    objective: nn.Module,
    batch: Batch,
    *,
    weight: Tensor,
    micro_batch: int,
    micro_steps: int,
    device: torch.device,
    timer: Timer,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    probe: Probe | None = None,
) -> Tensor:
    """Add the gradient of `weight` x (sum of losses over this rank's rows) to the model's gradients.

    `weight` is a scalar on the device: readers / useful tokens of the global batch, since DDP averages over ranks.
    A rank holds `batch.tokens_bt` [rows, T], at most `micro_batch * micro_steps` rows; every rank runs `micro_steps`
    forward passes, and a pass without rows contributes zero. Gradients are exchanged in the last pass only. Returns
    this rank's sum of losses, a scalar on its device. A pipeline has an order of its own for the passes.
    """

    def rows(k: int) -> tuple[Tensor, Tensor, Bounds | None]:
        return micro(batch, slice(k * micro_batch, (k + 1) * micro_batch), device)

    if (pipeline := getattr(objective, "pipeline", None)) is not None:
        return pipeline.step(
            weight=weight, micro=rows, micro_steps=micro_steps, timer=timer, autocast=autocast, probe=probe
        )
    loss_sum = torch.zeros((), device=device)
    for k in range(micro_steps):
        tokens, labels, bounds = rows(k)
        timer.lap("h2d")
        exchange = k == micro_steps - 1
        ready = getattr(objective, "bucket_ready", None) if exchange else None
        if ready is not None:
            ready.on_ready = lambda: timer.lap("backward")
        with nullcontext() if exchange or not hasattr(objective, "no_sync") else objective.no_sync():
            with autocast(), probe.forward() if probe and k == 0 else nullcontext():
                loss = objective(tokens, labels, bounds)
            timer.lap("forward")
            (loss * weight).backward()
        # the last bucket became ready where backward had nothing left to compute: what came after it was waiting
        timer.lap("backward" if ready is None else "exposed_communication")
        loss_sum += loss.detach()
    return loss_sum


def micro(batch: Batch, rows: slice, device: torch.device) -> tuple[Tensor, Tensor, Bounds | None]:
    """(tokens, labels, bounds) of some rows on the device. Where there are none, one row that counts for nothing: every
    rank must take part in every exchange."""
    tokens, labels = torch.from_numpy(batch.tokens_bt[rows]), torch.from_numpy(batch.labels_bt[rows])
    if len(tokens) == 0:
        tokens = torch.zeros((1, batch.tokens_bt.shape[1]), dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORED)
    bounds = None
    if getattr(batch, "document_ids_bt", None) is not None:
        ids = torch.from_numpy(batch.document_ids_bt[rows])
        ids = ids if len(ids) else torch.zeros(tokens.shape, dtype=ids.dtype)
        bounds = Bounds(ids, device)
    return _sent(tokens, device), _sent(labels, device), bounds


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """On the device. On the way to a GPU through pinned memory: torch keeps that until the copy is done, so that the
    loader may write its buffers anew, and the host need not wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
