"""What of each parameter one rank's optimizer updates: all of it, or the part that a layout leaves to it."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokenscale.train.parallel.mesh import Mesh


@dataclass(frozen=True)
class Part:
    """The part [offsets, offsets + shape) of a parameter of the shape `whole`, in that parameter's own memory.

    `first`: no rank before this one, of those that hold a copy of the model between them, holds it, too. The first one
    writes it into checkpoints, and counts its gradient in the norm.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    first: bool = True


@dataclass(frozen=True)
class Cut:
    """A parameter of which this rank's module has the part from `start` along `dim`."""

    dim: int
    start: int
    whole: tuple[int, ...]


@dataclass(frozen=True)
class Sum:
    """Gradients that are summed over the ranks of `group` after backward; `mean`: and divided by their number."""

    names: tuple[str, ...]
    group: dist.ProcessGroup
    mean: bool = False


@dataclass
class Held:
    """What methods that cut the model itself (tensor, pipeline) leave this rank with, for those that come after."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    #: names of what an earlier rank of this copy of the model holds, too
    repeated: set[str] = field(default_factory=set)
    sums: list[Sum] = field(default_factory=list)


def held_of(objective: nn.Module) -> Held:
    """What has been cut off from an objective's model so far; one object, to be added to."""
    if not hasattr(objective, "held"):
        objective.held = Held()
    return objective.held


class Parts:
    """One rank's parts by the parameters' names, for layouts that share out no rows: each is the module's parameter.

    A layout that shards puts its own in the attribute `parts` of the module that it makes. Its parts are plain tensors,
    so that one update, one norm and one checkpoint serve all layouts. `replicas` ranks hold the same parts, and this is
    number `replica`.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, held: Held):
        self.model, self.sums = model, held.sums
        self.replica, self.replicas = mesh.place.data, mesh.layout.data
        self.group = mesh.copy
        self.of: dict[str, Part] = {}
        for name, weight in model.named_parameters():
            tensor, first_row, rows = self._rows(weight)
            cut = held.cuts.get(name, Cut(0, 0, (rows, *weight.shape[1:])))
            offsets = [0] * weight.dim()
            offsets[cut.dim] = cut.start
            offsets[0] += first_row
            self.of[name] = Part(tensor, tuple(offsets), cut.whole, first=name not in held.repeated)

    def _rows(self, weight: nn.Parameter) -> tuple[Tensor, int, int]:
        """(what of a module's parameter is this rank's; its first row there; rows of the module's parameter)."""
        return weight, 0, len(weight)

    @property
    def tensors(self) -> list[Tensor]:
        """What this rank's optimizer updates, in the order of the model's parameters."""
        return [part.tensor for part in self.of.values()]

    @property
    def counted(self) -> list[Tensor]:
        """Those whose gradients make the norm, each once among the ranks that hold a copy."""
        return [part.tensor for part in self.of.values() if part.first]

    def take_gradients(self) -> None:
        """Before the update: each part gets its gradient, summed over those who have a share of it. A collective."""
        if self.sums:
            weights = dict(self.model.named_parameters())
            for reduction in self.sums:
                _add_up([local(weights[name].grad) for name in reduction.names], reduction)
        self._take()

    def _take(self) -> None:
        pass

    def spread(self) -> None:
        """After the update, or after parts have been loaded: what others need of them. A collective."""


def local(tensor: Tensor) -> Tensor:
    """A DTensor's own part, as a plain tensor in the same memory; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


#: values that are summed in one exchange
BUCKET = 1 << 25


def _add_up(gradients: list[Tensor], reduction: Sum) -> None:
    """In place; small gradients go together."""
    bucket: list[Tensor] = []
    for number, gradient in enumerate(gradients):
        bucket.append(gradient)
        if sum(map(Tensor.numel, bucket)) < BUCKET and number + 1 < len(gradients):
            continue
        flat = torch.cat([values.flatten() for values in bucket]) if len(bucket) > 1 else bucket[0].contiguous()
        dist.all_reduce(flat, group=reduction.group)
        if reduction.mean:
            flat /= dist.get_world_size(reduction.group)
        if len(bucket) > 1 or flat is not bucket[0]:
            for values, summed in zip(bucket, flat.split([values.numel() for values in bucket]), strict=True):
                values.copy_(summed.view_as(values))
        bucket = []


def parts_of(objective: nn.Module, model: nn.Module, mesh: Mesh, held: Held) -> Parts:
    """The parts that a layout made when it was applied; the module's parameters where it shards no rows."""
    return getattr(objective, "parts", None) or Parts(model, mesh, held)
