"""Losses, as sums: who divides by what is decided where all ranks are known."""

import torch.nn.functional as F
from torch import Tensor

#: A label that does not count: padding, or the start of a document.
IGNORED = -100


def cross_entropy_sum(logits_btv: Tensor, labels_bt: Tensor) -> Tensor:
    """Sum over the useful labels of -log p(label), in nats, computed in fp32. A scalar; 0 when no label counts."""
    return F.cross_entropy(logits_btv.float().flatten(0, 1), labels_bt.flatten(), ignore_index=IGNORED, reduction="sum")
