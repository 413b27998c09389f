"""One process: nothing to split."""

from tokenscale.train.parallel.parallelize import ParallelModel
from tokenscale.train.parallel.sharding import Mesh, materialise


def apply(parallel: ParallelModel, mesh: Mesh) -> ParallelModel:
    materialise(parallel.module, mesh.world.device)
    return parallel
