"""Split a model over the ranks of a layout: the methods, and the order in which they apply."""

from collections.abc import Callable

from tokenscale.train.compilation import checkpoint_blocks, compile_blocks
from tokenscale.train.models.objective import Objective
from tokenscale.train.parallel.ddp import apply_ddp, apply_zero1
from tokenscale.train.parallel.fsdp import apply_fsdp
from tokenscale.train.parallel.pipeline import apply_pipeline
from tokenscale.train.parallel.sharding import LocalShards, Mesh, ParallelModel, materialise
from tokenscale.train.parallel.tensor import apply_tensor


def apply_single(parallel: ParallelModel, mesh: Mesh) -> ParallelModel:
    """Move to the device: one rank holds all that the other methods have left, and nothing is split
    further.
    """
    materialise(parallel.module, device=mesh.world.device)
    return parallel


#: parallel method of a layout (`LayoutSettings.methods`) → function that applies it
METHODS: dict[str, Callable[[ParallelModel, Mesh], ParallelModel]] = {
    "pp": apply_pipeline,
    "tp": apply_tensor,
    "single": apply_single,
    "ddp": apply_ddp,
    "zero1": apply_zero1,
    "fsdp": apply_fsdp,
    "hsdp": apply_fsdp,
}


def parallelize(
    objective: Objective,
    mesh: Mesh,
    *,
    activation_checkpointing: str = "none",
    compiled: bool = False,
) -> ParallelModel:
    """Split a model over the ranks of a mesh, in place. Every rank must have built it with the same
    weights, or without storage (torch's meta device): each rank then gets storage for its own
    parts, with unset values.

    The order is that of torchtitan: each step works on what the one before has left to this rank,
    and DDP or FSDP come last because they register their hooks on the final modules.
    """
    *splits, data_parallel = mesh.layout.methods
    parallel = ParallelModel(objective, module=objective)

    # 1. pipeline: keep this rank's layers; 2. tensor: keep this rank's part of each matrix
    for method in splits:
        parallel = METHODS[method](parallel, mesh)
    blocks = [block for block in objective.model.blocks if block is not None]

    # 3. activation checkpointing, inside what is compiled
    checkpoint_blocks(blocks, mode=activation_checkpointing)

    # 4. compile block by block: equal blocks share one compilation
    if compiled:
        parallel.compilation = compile_blocks(blocks)

    # 5. single device, DDP, ZeRO-1, FSDP or HSDP
    parallel = METHODS[data_parallel](parallel, mesh)
    if parallel.shards is None:
        parallel.shards = LocalShards(model=objective.model, mesh=mesh, sharding=parallel.sharding)
    return parallel
