"""What of each parameter one rank's optimizer updates: all of it, or the rows that a sharded layout leaves to it."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tokenscale.parallel.world import World


@dataclass(frozen=True)
class Part:
    """The part [offsets, offsets + shape) of a parameter of the shape `whole`, in that parameter's own memory."""

    tensor: Tensor
    offsets: tuple[int, ...]
    whole: tuple[int, ...]


def rows_of(rows: int, index: int, count: int) -> range:
    """The rows of number `index` of `count` ranks, as torch.chunk and FSDP2 share them out: equal numbers, and fewer or
    none for the last where they do not divide.

    >>> [len(rows_of(10, index, 4)) for index in range(4)]
    [3, 3, 3, 1]
    """
    each = -(-rows // count)
    return range(min(index * each, rows), min((index + 1) * each, rows))


class Parts:
    """One rank's parts by the parameters' names, for layouts that shard nothing: each is the parameter itself.

    A layout that shards puts its own in the attribute `parts` of the module that it makes. Its parts are plain tensors,
    so that one update, one norm and one checkpoint serve all layouts. `group` are the ranks that hold the whole
    between them, None where each rank does; `replicas` ranks hold the same parts, and this is number `replica`.
    """

    def __init__(self, model: nn.Module, world: World):
        self.of = {n: Part(p, (0,) * p.dim(), tuple(p.shape)) for n, p in model.named_parameters()}
        self.group: ProcessGroup | None = None
        self.replica, self.replicas = world.rank, world.size

    @property
    def tensors(self) -> list[Tensor]:
        """What this rank's optimizer updates, in the order of the model's parameters."""
        return [part.tensor for part in self.of.values()]

    def take_gradients(self) -> None:
        """Before the update: each part gets its gradient."""

    def spread(self) -> None:
        """After the update, or after parts have been loaded: what others need of them. A collective."""


def parts_of(objective: nn.Module, model: nn.Module, world: World) -> Parts:
    """The parts that a layout made when it was applied; whole parameters where it shards nothing."""
    return getattr(objective, "parts", None) or Parts(model, world)
