"""Count what torch.compile makes of a training step: graphs, graph breaks, recompiles, and blocks
that run eagerly.

Graphs are run as they are: what is counted is Dynamo's part, which is the same on any device. A
layout of several ranks needs no other process: rank 0 of a fake process group, whose collectives
return at once, traces what it would trace among real ones.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.backends import registry
from torch._dynamo.utils import counters
from torch._guards import CompileContext

from tokenscale.data.batches.batch import Batch
from tokenscale.data.order.permutation import rank_slots
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import RunSettings
from tokenscale.train import compilation
from tokenscale.train.fake_world import fake_world
from tokenscale.train.models.decoder import Block
from tokenscale.train.parallel.world import World
from tokenscale.train.phase_timer import HostTimer
from tokenscale.train.trainer import Trainer

#: more blocks than torch's limit of 8 recompilations, on each stage of a pipeline: fewer would hide
#: it
LAYERS = 12
LENGTH = 16
VOCABULARY = 97
SHAPE = replace(
    PRESETS["llama-micro"], layers=LAYERS, dimension=32, hidden=64, heads=4, key_value_heads=2
)
LAYOUTS = {
    "single": LayoutSettings(),
    "ddp": LayoutSettings(data=2, bucket_megabytes=1),
    "zero1": LayoutSettings(shard=2, sharding="zero1", bucket_megabytes=1),
    "zero2": LayoutSettings(shard=2, sharding="zero2"),
    "zero3": LayoutSettings(shard=2),
    "hsdp": LayoutSettings(data=2, shard=2),
    "tp": LayoutSettings(tensor=2),
    "tp-ddp": LayoutSettings(tensor=2, data=2),
    "tp-zero3": LayoutSettings(tensor=2, shard=2),
    "1f1b": LayoutSettings(pipeline=2),
    "gpipe": LayoutSettings(pipeline=2, schedule="gpipe"),
    "interleaved": LayoutSettings(pipeline=2, schedule="interleaved", stages_per_rank=2),
    "1f1b-tp": LayoutSettings(pipeline=2, tensor=2),
    "1f1b-zero3": LayoutSettings(pipeline=2, shard=2),
}
CHECKPOINTING = ("none", "block", "selective")
#: attention over whole rows, and inside documents by three kernels
MASKS = ("row", "sdpa", "flex", "varlen")
PRECISIONS = ("fp32", "bf16", "fp16", "bf16-true")
CASES = tuple(itertools.product(LAYOUTS, CHECKPOINTING, MASKS, PRECISIONS))


def run_of(layout: str, checkpointing: str, mask: str, precision: str) -> RunSettings:
    degrees = LAYOUTS[layout]
    # blocks of more than one gradient bucket, where a layout has buckets
    wide = {"dimension": 192, "hidden": 384} if degrees.bucket_megabytes == 1 else {}
    return RunSettings(
        model=replace(SHAPE, layers=LAYERS * degrees.pipeline, **wide).with_vocabulary(VOCABULARY),
        sequence_length=LENGTH,
        global_batch=4 * degrees.data_parallel_size,
        micro_batch=2,
        layout=degrees,
        precision=precision,
        document_mask=mask != "row",
        activation_checkpointing=checkpointing,
        compile=True,
    )


def batch_of(run: RunSettings, seed: int) -> Batch:
    rows = len(rank_slots(run.global_batch, 0, run.layout.data_parallel_size))
    random = np.random.default_rng(seed)
    tokens, labels = random.integers(0, VOCABULARY, (2, rows, LENGTH))
    labels[:, -3:] = -100
    batch = Batch.from_arrays(tokens, labels, 0)
    if run.document_mask:
        batch = replace(
            batch, document_ids_bt=np.sort(random.integers(0, 3, (rows, LENGTH))).astype(np.int32)
        )
    return batch


@contextmanager
def inductor_replaced(backend: Callable) -> Iterator[None]:
    """Compile with another backend where Inductor would be used, from nothing."""
    torch._dynamo.reset()
    counters.clear()
    compilation.compile_function.cache_clear()
    lookup = registry.lookup_backend
    with patch.object(
        registry, "lookup_backend", lambda name: backend if name == "inductor" else lookup(name)
    ):
        yield
    torch._dynamo.reset()
    compilation.compile_function.cache_clear()


@contextmanager
def counting_backend() -> Iterator[Counter]:
    """Compile with a backend that runs graphs as they are, and count them and their calls."""
    found: Counter = Counter()

    def backend(graph: torch.fx.GraphModule, inputs: list) -> object:
        found["graphs"] += 1
        found["recompiles"] += CompileContext.current_compile_id().frame_compile_id > 0

        def call(*arguments: object) -> object:
            found["calls"] += 1
            return graph(*arguments)

        return call

    with inductor_replaced(backend):
        yield found


def count(
    run: RunSettings, kernel: str, world: World, steps: int = 2
) -> tuple[dict[str, int], int]:
    """What the record of a run must state of its graphs, and the calls of graphs in a forward pass,
    blocks and loss together.

    `recompiles` and `graph_breaks` are as Dynamo counts them; `eager_blocks` ran outside of a
    graph.
    """
    eager = set()
    forward = Block.forward

    def observed(block: Block, *arguments: object) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            eager.add(id(block))
        return forward(block, *arguments)

    with ExitStack() as stack:
        found = stack.enter_context(counting_backend())
        stack.enter_context(patch.object(Block, "forward", observed))
        # FlexAttention has no backward pass for a CPU's compiled code
        stack.enter_context(patch("tokenscale.train.models.attention._varlen", _varlen))
        stack.enter_context(
            patch("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
        )
        trainer = Trainer(run, run.model, world, kernel)
        for step in range(steps):
            found["calls"] = 0
            batch = batch_of(run, step)
            trainer.step(batch, torch.tensor(float(batch.useful_tokens)), 1e-3, HostTimer())
        blocks = [block for block in trainer.model.blocks if block is not None]
        counts = {
            "graphs": found["graphs"],
            "recompiles": found["recompiles"],
            "blocks": len(blocks),
        }
        counts |= {"graph_breaks": sum(counters["graph_break"].values())}
        counts |= {"eager_blocks": sum(id(block) in eager for block in blocks)}
        assert trainer.parallel.compilation.counts() == counts, "the run's own record"
        return counts, found["calls"] // trainer.micro_steps


@torch.library.custom_op("tokenscale_tests::varlen", mutates_args=())
def varlen(query: Tensor, key: Tensor, value: Tensor, cut: Tensor, longest: int) -> Tensor:
    """A stand-in for varlen's kernel, which a CPU lacks: one operation of the same arguments."""
    return query.clone()


@varlen.register_fake
def _(query, key, value, cut, longest):
    return torch.empty_like(query)


varlen.register_autograd(lambda context, gradient: (gradient, None, None, None, None))


def _varlen(query, key, value, cut, longest, causal):
    return varlen(query, key, value, cut, longest)


def count_case(
    layout: str, checkpointing: str, mask: str, precision: str
) -> tuple[dict[str, int], int]:
    run = run_of(layout, checkpointing, mask, precision)
    with fake_world(run.layout.world_size) as world:
        # flex, whose graph makes all scores on a CPU, is slow: two micro-batches show what two
        # steps would
        return count(
            run, "sdpa" if mask == "row" else mask, world, steps=1 if mask == "flex" else 2
        )
