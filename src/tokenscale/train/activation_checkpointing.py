"""Activation checkpointing: what backward computes again, so that forward need not keep it (Chen et al. 2016)."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

#: what `selective` keeps, because computing it again costs most: products and attention by torch's own kernels (flex,
#: varlen and flash-attn's operators are computed again)
KEPT = {
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def apply(blocks: nn.ModuleList, mode: str) -> None:
    """Wrap the forward of each block, in place: names of parameters stay as they are."""
    if mode == "none":
        return
    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if mode == "selective" else {}
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **contexts)


def _policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
