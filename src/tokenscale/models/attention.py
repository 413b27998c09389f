"""Attention by one of several kernels."""

import torch.nn.functional as F
from torch import Tensor


class Bounds:
    """Where documents begin in the rows of a micro-batch."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bounds: Bounds | None = None,
    causal: bool = True,
    kernel: str = "sdpa",
    dropout: float = 0.0,
) -> Tensor:
    """query [B, H, T, D], key and value [B, Hkv, S, D] → [B, H, T, D]."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=causal, enable_gqa=grouped)
