"""One process: nothing to split."""

from tokenscale.train.parallel.mesh import Mesh
from tokenscale.train.parallel.parallelize import ParallelModel
from tokenscale.train.parallel.sharding import materialise


def apply(parallel: ParallelModel, mesh: Mesh) -> ParallelModel:
    materialise(parallel.module, mesh.world.device)
    return parallel
