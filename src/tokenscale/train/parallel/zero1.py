"""ZeRO-1 (Rajbhandari et al. 2020, section 5.1): DDP whose optimizer state is sharded over the ranks by rows."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokenscale.data.order.permutation import shard_rows
from tokenscale.train.parallel import ddp
from tokenscale.train.parallel.parallelize import ParallelModel
from tokenscale.train.parallel.sharding import LocalShards, Mesh, ShardingState
from tokenscale.train.parallel.world import all_gather


def apply(parallel: ParallelModel, mesh: Mesh) -> ParallelModel:
    """Wrap as DDP does. Each rank then updates its rows of every parameter, and ranks gather the updated rows."""
    parallel = ddp.apply(parallel, mesh)
    parallel.shards = RowShards(parallel.objective.model, mesh, parallel.sharding)
    return parallel


class RowShards(LocalShards):
    """Equal numbers of rows of every parameter for each rank; where they do not divide, the last ranks have fewer.

    torch's ZeroRedundancyOptimizer assigns whole parameters, so that an embedding is one rank's, and does not pass
    the fused update's `grad_scale` on.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, sharding: ShardingState):
        self._index, self._count, self._group = mesh.index("shard"), mesh.size("shard"), mesh.group("shard")
        super().__init__(model, mesh, sharding)

    def _rows(self, weight: nn.Parameter) -> tuple[Tensor, int, int]:
        mine = shard_rows(len(weight), self._index, self._count)
        return weight.detach()[mine.start : mine.stop], mine.start, len(weight)

    def _assign_gradients(self) -> None:
        for name, weight in self.model.named_parameters():
            mine = shard_rows(len(weight), self._index, self._count)
            self.by_name[name].tensor.grad = None if weight.grad is None else weight.grad[mine.start : mine.stop]

    @torch.no_grad()
    def all_gather_parameters(self) -> None:
        """Give every rank all rows, in place: one all-gather a parameter, or one broadcast a rank for unequal rows."""
        pending = []
        for name, parameter in self.model.named_parameters():
            weight, shard = parameter.detach(), self.by_name[name].tensor
            if len(weight) % self._count == 0:
                pending.append(all_gather(weight, shard, group=self._group, async_op=True))
                continue
            for owner in range(self._count):
                if rows := shard_rows(len(weight), owner, self._count):
                    values = weight[rows.start : rows.stop]
                    pending.append(dist.broadcast(values, group=self._group, group_src=owner, async_op=True))
        for work in pending:
            work.wait()
