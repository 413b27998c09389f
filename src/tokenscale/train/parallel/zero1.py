"""ZeRO-1 (Rajbhandari et al. 2020, section 5.1): DDP whose optimizer state is shared out among the ranks by rows."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokenscale.data.order.shares import rows_of
from tokenscale.train.parallel import ddp as data
from tokenscale.train.parallel.collectives import all_gather
from tokenscale.train.parallel.mesh import Mesh
from tokenscale.train.parallel.sharding import Held, Parts, held_of


def apply(objective: nn.Module, mesh: Mesh) -> nn.Module:
    """Wrap as DDP does. Each rank then updates its rows of every parameter, and ranks exchange what they updated."""
    wrapped = data.apply(objective, mesh)
    wrapped.parts = Rows(objective.model, mesh, held_of(objective))
    return wrapped


class Rows(Parts):
    """Equal numbers of rows of every parameter for each rank; where they do not divide, the last ranks have fewer.

    torch's ZeroRedundancyOptimizer gives out whole parameters, so that an embedding is one rank's, and does not pass
    the fused update's `grad_scale` on.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, held: Held):
        self._index, self._count, self._shards = mesh.index("shard"), mesh.size("shard"), mesh.group("shard")
        super().__init__(model, mesh, held)

    def _rows(self, weight: nn.Parameter) -> tuple[Tensor, int, int]:
        mine = rows_of(len(weight), self._index, self._count)
        return weight.detach()[mine.start : mine.stop], mine.start, len(weight)

    def _take(self) -> None:
        """Views: nothing is copied."""
        for name, weight in self.model.named_parameters():
            mine = rows_of(len(weight), self._index, self._count)
            self.of[name].tensor.grad = None if weight.grad is None else weight.grad[mine.start : mine.stop]

    @torch.no_grad()
    def spread(self) -> None:
        """Every rank gets all rows, in place: in one exchange a parameter, or in one a rank where rows are unequal."""
        waited_for = []
        for name, parameter in self.model.named_parameters():
            weight, part = parameter.detach(), self.of[name].tensor
            if len(weight) % self._count == 0:
                waited_for.append(all_gather(weight, part, group=self._shards, async_op=True))
                continue
            for owner in range(self._count):
                if rows := rows_of(len(weight), owner, self._count):
                    values = weight[rows.start : rows.stop]
                    waited_for.append(dist.broadcast(values, group=self._shards, group_src=owner, async_op=True))
        for exchange in waited_for:
            exchange.wait()
