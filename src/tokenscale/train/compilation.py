"""torch.compile and recomputation of blocks, with counts of graphs, graph breaks, recompiles and
eager blocks.

Dynamo gives up silently: a block that it cannot trace, or that it has compiled too often, runs
eagerly from then on. What a run records is therefore counted, not requested.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

#: graphs and recompiles of this process
_compiled: Counter[str] = Counter()


def compile_blocks(blocks: Iterable[nn.Module]) -> "Compilation":
    """Compile each block: equal blocks share one graph. Return the counts from here on."""
    compilation = Compilation(blocks)
    for block in compilation.blocks:
        replace_forward(block, make=_observed)
        block.compile(backend=_inductor)
    return compilation


@functools.cache
def compile_function(
    function: Callable[..., Any], *, dynamic: bool | None = None
) -> Callable[..., Any]:
    """Return the function, compiled once per process. `dynamic=False`: one graph for each shape."""
    return torch.compile(function, backend=_inductor, dynamic=dynamic)


class Compilation:
    """Counts of one rank's compiled blocks, and of all graphs that its process has compiled
    since.
    """

    def __init__(self, blocks: Iterable[nn.Module]):
        self.blocks = list(blocks)
        self._before = _counts()

    def counts(self) -> dict[str, int]:
        """Return `graphs`, `recompiles`, `graph_breaks`, `blocks` and `eager_blocks`, which ran
        outside of any graph in training, if only once.
        """
        found = {name: count - self._before[name] for name, count in _counts().items()}
        eager = sum(getattr(block, "ran_eagerly", False) for block in self.blocks)
        return {**found, "blocks": len(self.blocks), "eager_blocks": eager}


def describe_compilation(counts: dict[str, int]) -> str:
    """Return a line for the log of a run: what was compiled, and a caution where blocks ran
    eagerly.

    >>> counts = {"graphs": 9, "recompiles": 7, "graph_breaks": 0, "blocks": 32, "eager_blocks": 24}
    >>> print(describe_compilation(counts))
    compiled 8 of 32 blocks: 9 graphs, 7 recompiles, 0 graph breaks
      caution  24 blocks run eagerly although the run asks for compile: TORCH_LOGS=recompiles,graph_breaks shows why
    """
    compiled = counts["blocks"] - counts["eager_blocks"]
    text = (
        f"compiled {compiled} of {counts['blocks']} blocks: {counts['graphs']} graphs, "
        f"{counts['recompiles']} "
        f"recompiles, {counts['graph_breaks']} graph breaks"
    )
    if not counts["eager_blocks"]:
        return text
    return (
        f"{text}\n  caution  {counts['eager_blocks']} blocks run eagerly although the run asks "
        "for compile: "
        "TORCH_LOGS=recompiles,graph_breaks shows why"
    )


def _counts() -> dict[str, int]:
    from torch._dynamo.utils import counters

    breaks = sum(counters["graph_break"].values())
    return {
        "graphs": _compiled["graphs"],
        "recompiles": _compiled["recompiles"],
        "graph_breaks": breaks,
    }


def replace_forward(block: nn.Module, make: Callable[[type[nn.Module]], Callable]) -> None:
    """Give a block the `forward` that `make` returns for its class.

    The block becomes an instance of a subclass, as FSDP2 does it: its parameters keep their names,
    and torch.compile traces the new `forward`, which it does not do through a patched one.
    """
    block.__class__ = _subclass(type(block), make)  # type: ignore[arg-type]


@functools.cache
def _subclass(
    block_class: type[nn.Module], make: Callable[[type[nn.Module]], Callable]
) -> type[nn.Module]:
    """Return one class for equal blocks, so that they share a graph."""
    return type(
        f"{make.__name__.strip('_').title()}{block_class.__name__}",
        (block_class,),
        {"forward": make(block_class)},
    )


def _observed(block_class: type[nn.Module]) -> Callable:
    """Note that a block ran eagerly in training. In a graph the first condition is constant."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and self.training:
            self.ran_eagerly = True
        return block_class.forward(self, *args, **kwargs)

    return forward


def _inductor(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile a graph with torch's default backend, and count it."""
    from torch._dynamo.backends.registry import lookup_backend
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    _compiled["graphs"] += 1
    _compiled["recompiles"] += bool(compile_id is not None and compile_id.frame_compile_id)
    return lookup_backend("inductor")(graph, inputs)


#: operations whose outputs `selective` stores, because recomputing them costs most: matrix products
#: and attention. By name: torch registers varlen's operation on import, which takes seconds, and
#: flash-attn may be missing. FlexAttention is one operation inside a compiled block only: with
#: `compile: false` it is a compiled function, and is recomputed.
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
    """Make each block recompute its activations in backward. `mode`: "none", "block" or
    "selective".
    """
    if mode == "none":
        return
    for block in blocks:
        replace_forward(block, make=_selective if mode == "selective" else _checkpointed)


def _checkpointed(block_class: type[nn.Module], **contexts: Any) -> Callable:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            block_class.forward, self, *args, use_reentrant=False, **contexts, **kwargs
        )

    return forward


def _selective(block_class: type[nn.Module]) -> Callable:
    return _checkpointed(
        block_class, context_fn=lambda: create_selective_checkpoint_contexts(_policy)
    )


def _policy(
    context: object, operation: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if str(operation) in STORED
        else CheckpointPolicy.PREFER_RECOMPUTE
    )
