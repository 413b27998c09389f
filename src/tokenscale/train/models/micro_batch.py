"""The inputs of one forward pass, on the device."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tokenscale.train.models.attention import Bounds
from tokenscale.train.models.losses import IGNORED

if TYPE_CHECKING:
    from tokenscale.data.batches.batch import Batch
    from tokenscale.data.batches.held_out import HeldOutSlice


class MicroBatch(NamedTuple):
    """Tokens and labels [B, T] on the device, and the document boundaries where attention stays inside documents."""

    tokens_bt: Tensor
    labels_bt: Tensor
    bounds: Bounds | None = None


def micro_batch(batch: "Batch | HeldOutSlice", rows: slice, device: torch.device) -> MicroBatch:
    """Copy rows of a batch to the device. Without rows: one with ignored labels, as collectives need every rank."""
    tokens, labels = torch.from_numpy(batch.tokens_bt[rows]), torch.from_numpy(batch.labels_bt[rows])
    if len(tokens) == 0:
        tokens = torch.zeros((1, batch.tokens_bt.shape[1]), dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORED)
    bounds = None
    if batch.document_ids_bt is not None:
        ids = torch.from_numpy(batch.document_ids_bt[rows])
        ids = ids if len(ids) else torch.zeros(tokens.shape, dtype=ids.dtype)
        bounds = Bounds(ids, device)
    return MicroBatch(_copy(tokens, device), _copy(labels, device), bounds)


def _copy(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; to a GPU through pinned memory, without waiting. torch keeps that memory until the copy is
    done.
    """
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
