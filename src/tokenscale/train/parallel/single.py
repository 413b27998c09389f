"""One process: nothing to split."""

from tokenscale.train.parallel.mesh import Mesh
from tokenscale.train.parallel.parallelize import ParallelModel


def apply(parallel: ParallelModel, mesh: Mesh) -> ParallelModel:
    """Move the model to its device."""
    parallel.module.to(mesh.world.device)
    return parallel
