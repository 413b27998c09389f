"""Activation checkpointing: recompute activations in backward instead of storing them (Chen et al. 2016)."""

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

#: operations whose outputs `selective` stores, because recomputing them costs most: matrix products and attention. By
#: name: torch registers varlen's operation on import, which takes seconds, and flash-attn may be missing. FlexAttention
#: is one operation inside a compiled block only: with `compile: false` it is a compiled function, and is recomputed.
STORED = frozenset(
    {
        "aten._scaled_mm.default",
        "aten.mm.default",
        "aten.addmm.default",
        "aten.bmm.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "flex_attention",
        "torch_attn._varlen_attn.default",
        "flash_attn._flash_attn_forward.default",
        "flash_attn._flash_attn_varlen_forward.default",
    }
)


def checkpoint_blocks(blocks: Iterable[nn.Module], mode: str) -> None:
    """Make each block recompute its activations in backward. `mode`: "none", "block" or "selective".

    A block becomes an instance of a subclass whose `forward` is checkpointed, as FSDP2 does it: the names of its
    parameters stay, and torch.compile traces the checkpoint, which it does not do through a patched `forward`.
    """
    if mode == "none":
        return
    for block in blocks:
        block.__class__ = _checkpointed(type(block), mode == "selective")  # type: ignore[arg-type]


@functools.cache
def _checkpointed(block_class: type[nn.Module], selective: bool) -> type[nn.Module]:
    contexts: dict[str, Any] = {"context_fn": _selective_contexts} if selective else {}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(block_class.forward, self, *args, use_reentrant=False, **contexts, **kwargs)

    return type(f"Checkpointed{block_class.__name__}", (block_class,), {"forward": forward})


def _selective_contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if str(operation) in STORED else CheckpointPolicy.PREFER_RECOMPUTE
