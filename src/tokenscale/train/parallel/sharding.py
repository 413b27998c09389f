"""Which part of each parameter this rank's optimizer updates, and how gradients and updates reach the other ranks."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokenscale.train.parallel.mesh import Mesh

#: values that are summed in one all-reduce
BUCKET = 1 << 25


@dataclass(frozen=True)
class LocalShard:
    """The part [offsets, offsets + shape) of a parameter of shape `global_shape`, as a view of this rank's memory.

    `first`: no lower rank of the same model replica holds it, too. The first holder writes it into checkpoints and
    counts its gradient in the norm.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    first: bool = True


@dataclass(frozen=True)
class ShardSpec:
    """A parameter of which this rank's module holds the part from `start` along `dim`."""

    dim: int
    start: int
    global_shape: tuple[int, ...]


@dataclass(frozen=True)
class GradReduction:
    """Gradients to sum over the ranks of `group` after backward; `mean`: and to divide by the number of ranks."""

    names: tuple[str, ...]
    group: dist.ProcessGroup
    mean: bool = False


@dataclass
class ShardingState:
    """What pipeline and tensor parallelism have done to the parameters of this rank's model."""

    #: parameters of which this rank's module holds a part
    specs: dict[str, ShardSpec] = field(default_factory=dict)
    #: parameters that a lower rank of the same replica holds, too
    replicated: set[str] = field(default_factory=set)
    reductions: list[GradReduction] = field(default_factory=list)


class LocalShards:
    """One rank's shards by parameter name. In this class each is the module's whole parameter.

    Layouts that also split parameters by rows (ZeRO, FSDP) use a subclass. Shards are plain tensors, so that one
    update, one norm and one checkpoint format serve all layouts. `replicas` ranks hold the same shards; this one is
    number `replica`.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, sharding: ShardingState):
        self.model, self.reductions = model, sharding.reductions
        self.replica, self.replicas = mesh.place.data, mesh.layout.data
        self.group = mesh.copy
        self.by_name: dict[str, LocalShard] = {}
        for name, weight in model.named_parameters():
            tensor, first_row, rows = self._rows(weight)
            spec = sharding.specs.get(name, ShardSpec(0, 0, (rows, *weight.shape[1:])))
            offsets = [0] * weight.dim()
            offsets[spec.dim] = spec.start
            offsets[0] += first_row
            first = name not in sharding.replicated
            self.by_name[name] = LocalShard(tensor, tuple(offsets), spec.global_shape, first)

    def _rows(self, weight: nn.Parameter) -> tuple[Tensor, int, int]:
        """Return this rank's rows of a module's parameter, the first row's number, and the rows of the parameter."""
        return weight, 0, len(weight)

    @property
    def tensors(self) -> list[Tensor]:
        """What this rank's optimizer updates, in the order of the model's parameters."""
        return [shard.tensor for shard in self.by_name.values()]

    @property
    def counted(self) -> list[Tensor]:
        """The shards whose gradients make the norm, each once among the ranks of a replica."""
        return [shard.tensor for shard in self.by_name.values() if shard.first]

    def reduce_gradients(self) -> None:
        """Before the update: reduce what backward has not reduced, and give each shard its gradient. A collective."""
        if self.reductions:
            weights = dict(self.model.named_parameters())
            for reduction in self.reductions:
                _all_reduce([local(weights[name].grad) for name in reduction.names], reduction)
        self._assign_gradients()

    def _assign_gradients(self) -> None:
        pass

    def all_gather_parameters(self) -> None:
        """After the update or a load: give other ranks the updated values that they compute with. A collective."""


def materialise(module: nn.Module, device: torch.device) -> None:
    """Move a module to its device, with unset storage for those of the meta device. Tied parameters stay tied."""
    for weight in list(module.parameters()):
        if weight.is_meta:
            storage = nn.Parameter(torch.empty_like(weight, device=device), weight.requires_grad)
            torch.utils.swap_tensors(weight, storage)
    module.to(device)  # FSDP notes here where its parameters are now


def local(tensor: Tensor) -> Tensor:
    """Return a DTensor's own part as a plain tensor in the same memory; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _all_reduce(gradients: list[Tensor], reduction: GradReduction) -> None:
    """Reduce in place; small gradients share one all-reduce."""
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
