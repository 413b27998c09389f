"""AdamW with decay on matrices only, and clipping that really clips."""

import torch
from torch import nn

from tokenscale.settings.run import OptimizerSettings


def adamw(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019), fused; matrices decay, vectors (norms) do not."""
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in weights if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), eps=settings.epsilon, fused=True
    )


def clip(model: nn.Module, limit: float | None) -> tuple[float, float]:
    """Scale the gradients in place to a global L2 norm of at most `limit`. Returns the norm (before, after).

    A generator handed to two calls is empty for the second; the list here is what makes clipping happen.
    """
    weights = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in weights])
    if limit is not None:
        torch.nn.utils.clip_grads_with_norm_(weights, limit, norm)
    before = norm.item()
    return before, before if limit is None or before != before else min(before, before * limit / (before + 1e-6))
