"""ZeRO-1 (Rajbhandari et al. 2020, section 5.1): DDP whose optimizer state is shared out among the ranks by rows."""

import torch
import torch.distributed as dist
from torch import nn

from tokenscale.parallel import data
from tokenscale.parallel.parts import Part, Parts, rows_of
from tokenscale.parallel.world import World
from tokenscale.settings.run import LayoutSettings


def apply(objective: nn.Module, layout: LayoutSettings, world: World) -> nn.Module:
    """Wrap as DDP does. Each rank then updates its rows of every parameter, and ranks exchange what they updated."""
    wrapped = data.apply(objective, layout, world)
    wrapped.parts = Rows(objective.model, world)
    return wrapped


class Rows(Parts):
    """Equal numbers of rows of every parameter for each rank; where they do not divide, the last ranks have fewer.

    torch's ZeroRedundancyOptimizer gives out whole parameters, so that an embedding is one rank's, and does not pass
    the fused update's `grad_scale` on.
    """

    def __init__(self, model: nn.Module, world: World):
        super().__init__(model, world)
        self.group, self.replica, self.replicas = dist.group.WORLD, 0, 1
        self._weights, self._size = dict(model.named_parameters()), world.size
        for name, weight in self._weights.items():
            mine = rows_of(len(weight), world.rank, world.size)
            offsets = (mine.start, *(0,) * (weight.dim() - 1))
            self.of[name] = Part(weight.detach()[mine.start : mine.stop], offsets, tuple(weight.shape))

    def take_gradients(self) -> None:
        """Views: nothing is copied."""
        for name, part in self.of.items():
            gradient, first = self._weights[name].grad, part.offsets[0]
            part.tensor.grad = None if gradient is None else gradient[first : first + len(part.tensor)]

    @torch.no_grad()
    def spread(self) -> None:
        """Every rank gets all rows, in place: in one exchange a parameter, or in one a rank where rows are unequal."""
        waited_for = []
        for name, part in self.of.items():
            weight = self._weights[name].detach()
            if len(weight) % self._size == 0:
                waited_for.append(dist.all_gather_into_tensor(weight, part.tensor, async_op=True))
                continue
            for owner in range(self._size):
                if rows := rows_of(len(weight), owner, self._size):
                    waited_for.append(dist.broadcast(weight[rows.start : rows.stop], src=owner, async_op=True))
        for exchange in waited_for:
            exchange.wait()
