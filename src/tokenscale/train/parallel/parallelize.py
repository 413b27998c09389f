"""Split a model over the ranks of a layout: the order of the methods, and what they return."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from tokenscale.settings.registry import PARALLEL
from tokenscale.train.compilation import Compilation, checkpoint_blocks, compile_blocks
from tokenscale.train.models.objective import MicroBatch, Objective
from tokenscale.train.parallel.sharding import LocalShards, Mesh, ShardingState

if TYPE_CHECKING:
    from tokenscale.train.parallel.pipeline import Pipeline


@dataclass
class BucketListener:
    """Called each time DDP has a bucket of gradients complete on this rank, before the bucket is reduced."""

    on_ready: Callable[[], None] | None = None


@dataclass
class ParallelModel:
    """One rank's part of a model, and how a training step uses it. Every parallel method takes one and returns one."""

    #: the plain objective: model and loss; its model's parameters have the names of checkpoints
    objective: Objective
    #: what computes the loss: the objective, a pipeline stage, or DDP or FSDP around one of them
    module: nn.Module
    #: what pipeline and tensor parallelism have split, and which gradients to reduce after backward
    sharding: ShardingState = field(default_factory=ShardingState)
    #: the parts of the parameters that this rank's optimizer updates
    shards: LocalShards | None = None
    pipeline: "Pipeline | None" = None
    #: context of backward passes that reduce no gradients; the pass after it reduces the sum
    no_sync: Callable[[], AbstractContextManager] = nullcontext
    bucket_listener: BucketListener | None = None
    #: context of forward passes in which every rank of a tensor group has all positions between blocks
    whole_positions: Callable[[], AbstractContextManager] = nullcontext
    #: ranks that gather weights from each other in forward, so that all must run equally many forward passes
    lockstep: dist.ProcessGroup | None = None
    #: counts of graphs and eager blocks; None where nothing is compiled
    compilation: Compilation | None = None

    def loss(self, inputs: MicroBatch) -> Tensor:
        """Return the sum of losses of some rows. A collective where the layout communicates in forward."""
        return self.pipeline(inputs) if self.pipeline is not None else self.module(*inputs)


def parallelize(
    objective: Objective, mesh: Mesh, *, activation_checkpointing: str = "none", compiled: bool = False
) -> ParallelModel:
    """Split a model over the ranks of a mesh, in place. Every rank must have built it with the same weights, or without
    storage (torch's meta device): each rank then gets storage for its own parts, with unset values.

    The order is that of torchtitan: each step works on what the one before has left to this rank, and DDP or FSDP come
    last because they register their hooks on the final modules.
    """
    *splits, data_parallel = mesh.layout.methods
    parallel = ParallelModel(objective, objective)

    # 1. pipeline: keep this rank's layers; 2. tensor: keep this rank's part of each matrix
    for method in splits:
        parallel = _apply(method, parallel, mesh)
    blocks = [block for block in objective.model.blocks if block is not None]

    # 3. activation checkpointing, inside what is compiled
    checkpoint_blocks(blocks, activation_checkpointing)

    # 4. compile block by block: equal blocks share one compilation
    if compiled:
        parallel.compilation = compile_blocks(blocks)

    # 5. single device, DDP, ZeRO-1, FSDP or HSDP
    parallel = _apply(data_parallel, parallel, mesh)
    if parallel.shards is None:
        parallel.shards = LocalShards(objective.model, mesh, parallel.sharding)
    return parallel


def _apply(method: str, parallel: ParallelModel, mesh: Mesh) -> ParallelModel:
    """Apply one method of `registry.PARALLEL`. Only the modules of the layout's own methods are imported."""
    return importlib.import_module(PARALLEL[method]).apply(parallel, mesh)
