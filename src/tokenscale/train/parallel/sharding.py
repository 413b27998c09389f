"""One rank's part of a model: the mesh, the shards that its optimizer updates, and how gradients
reach other ranks.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from tokenscale.base.errors import UserError
from tokenscale.settings.layout import DEGREES, LayoutSettings, MeshCoordinate
from tokenscale.train.collectives import local
from tokenscale.train.compilation import Compilation
from tokenscale.train.models.objective import KVCache, MicroBatch, Objective
from tokenscale.train.parallel.world import World
from tokenscale.train.phase_timer import HostTimer
from tokenscale.train.profiling import Probe


class Mesh:
    """One rank's view of the mesh [pipeline, data, shard, tensor]. Creating it, or a group with
    `group_by`, is a collective.

    Ranks with neighbouring numbers are those of one node: tensor groups, which exchange in every
    block, lie closest together, then the shards of a copy, then copies; stages, which exchange
    least, lie furthest apart.
    """

    def __init__(self, layout: LayoutSettings, world: World):
        if layout.world_size != world.size:
            raise ValueError(f"a layout of {layout.world_size} ranks in a world of {world.size}")
        self.layout = layout
        self.world = world
        self.place: MeshCoordinate = layout.coordinate(world.rank)
        self._axes = tuple(degree for degree in DEGREES if self.size(degree) > 1)
        self._devices: DeviceMesh | None = None
        if world.size > 1:
            degrees = tuple(self.size(axis) for axis in self._axes)
            self._devices = init_device_mesh(world.device.type, degrees, mesh_dim_names=self._axes)
            if world.timeout is not None:
                for group in self._devices.get_all_groups():
                    _set_pg_timeout(world.timeout, group)
        #: the ranks that hold one copy of the model between them; None where each holds it all
        self.copy: dist.ProcessGroup | None = None
        if layout.world_size > layout.data:
            self.copy = (
                self.group_by(lambda place: place.data) if layout.data > 1 else dist.group.WORLD
            )

    def size(self, axis: str) -> int:
        return getattr(self.layout, axis)

    def index(self, axis: str) -> int:
        return getattr(self.place, axis)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the ranks that differ from this one along `axis` only; None for a degree of 1."""
        if self.size(axis) == 1:
            return None
        assert self._devices is not None  # there are several ranks
        return self._devices.get_group(axis)

    def devices(self, *axes: str) -> DeviceMesh:
        """Return the submesh along those of `axes` whose degree is above 1, at this rank's other
        coordinates.
        """
        assert self._devices is not None  # there are several ranks
        return self._devices[tuple(axis for axis in axes if self.size(axis) > 1)]

    def group_by(self, key: Callable[[MeshCoordinate], object | None]) -> dist.ProcessGroup | None:
        """Return the group of the ranks with this rank's key; None for a key of None. A
        collective.
        """
        found: dict[object, list[int]] = {}
        for rank in range(self.world.size):
            if (value := key(self.layout.coordinate(rank))) is not None:
                found.setdefault(value, []).append(rank)
        # Every rank makes every group. Among its members alone (`use_local_synchronization`) torch
        # names a group by how many each of them has, and ranks that have made unequal numbers of
        # groups wait for each other for ever.
        groups = {
            value: dist.new_group(ranks, timeout=self.world.timeout)
            for value, ranks in found.items()
        }
        return groups.get(key(self.place))


#: values from which on a collective is no longer shared by tensors
BUCKET = 1 << 25


@dataclass(frozen=True)
class LocalShard:
    """The part [offsets, offsets + shape) of a parameter of shape `global_shape`, as a view of this
    rank's memory.

    `first`: no lower rank of the same model replica holds it, too. The first holder writes it into
    checkpoints and counts its gradient in the norm.
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
    """Gradients to sum over the ranks of `group` after backward; `mean`: and to divide by the
    number of ranks.
    """

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

    Layouts that also split parameters by rows (ZeRO, FSDP) use a subclass. Shards are plain
    tensors, so that one update, one norm and one checkpoint format serve all layouts. `replicas`
    ranks hold the same shards; this one is number `replica`.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, sharding: ShardingState):
        self.model = model
        self.reductions = sharding.reductions
        #: whether `reduce_gradients` waits for other ranks
        self.reduces_after_backward = bool(sharding.reductions)
        self.replica = mesh.place.data
        self.replicas = mesh.layout.data
        self.group = mesh.copy
        self.by_name: dict[str, LocalShard] = {}
        for name, weight in model.named_parameters():
            tensor, first_row, rows = self._rows(weight)
            spec = sharding.specs.get(
                name, ShardSpec(dim=0, start=0, global_shape=(rows, *weight.shape[1:]))
            )
            offsets = [0] * weight.dim()
            offsets[spec.dim] = spec.start
            offsets[0] += first_row
            first = name not in sharding.replicated
            self.by_name[name] = LocalShard(
                tensor=tensor,
                offsets=tuple(offsets),
                global_shape=spec.global_shape,
                first=first,
            )
        if mesh.layout.accumulation_format == "fp32":
            self._add_in_fp32()

    def _add_in_fp32(self) -> None:
        """Make gradients fp32 whatever the format of the weights: autograd casts each to it before
        it adds it. Raises UserError where torch is too old.
        """
        if not hasattr(Tensor, "grad_dtype"):
            raise UserError(
                "layout.accumulation_format: fp32 needs a newer torch, with Tensor.grad_dtype.",
                found=f"torch {torch.__version__}",
                next="install torch 2.13, or remove accumulation_format",
            )
        for tensor in (*self.model.parameters(), *self.tensors):
            tensor.grad_dtype = torch.float32

    def _gradient(self, name: str, weight: nn.Parameter) -> Tensor:
        """Return this rank's part of a gradient, after the last backward pass."""
        assert weight.grad is not None  # every weight takes part in the loss
        return local(weight.grad)

    def _rows(self, weight: nn.Parameter) -> tuple[Tensor, int, int]:
        """Return this rank's rows of a module's parameter, the first row's number, and the rows of
        the parameter.
        """
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
        """Before the update: reduce what backward has not reduced, and give each shard its
        gradient. A collective.
        """
        if self.reductions:
            weights = dict(self.model.named_parameters())
            for reduction in self.reductions:
                gradients = {name: self._gradient(name, weights[name]) for name in reduction.names}
                _all_reduce(gradients, reduction)
        self._assign_gradients()

    def _assign_gradients(self) -> None:
        pass

    def held_gradients(self) -> list[Tensor]:
        """Return the gradients that are in this rank's memory between passes."""
        gradients = [weight.grad for weight in self.model.parameters()]
        return [local(gradient) for gradient in gradients if gradient is not None]

    def all_gather_parameters(self) -> None:
        """After the update or a load: give other ranks the updated values that they compute with. A
        collective.
        """


@dataclass
class BucketListener:
    """Called each time DDP has a bucket of gradients complete on this rank, before the bucket is
    reduced.
    """

    on_ready: Callable[[], None] | None = None


class PipelineSteps(Protocol):
    """What a training step and the generation of text call of a pipeline (`pipeline.Pipeline`)."""

    def __call__(self, inputs: MicroBatch) -> Tensor: ...

    def step(
        self,
        inputs: Callable[[int], MicroBatch],
        *,
        weight: Tensor,
        micro_steps: int,
        timer: HostTimer,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        accumulate: Callable[[], AbstractContextManager] = nullcontext,
        probe: Probe | None = None,
    ) -> Tensor: ...

    def next_logits(self, tokens_bt: Tensor, cache: KVCache | None) -> Tensor: ...

    def broadcast_from_last(self, value: Tensor) -> Tensor: ...


@dataclass
class ParallelModel:
    """One rank's part of a model, and how a training step uses it. Every parallel method takes one
    and returns one.
    """

    #: the plain objective: model and loss; its model's parameters have the names of checkpoints
    objective: Objective
    #: what computes the loss: the objective, a pipeline stage, or DDP or FSDP around one of them
    module: nn.Module
    #: what pipeline and tensor parallelism have split, and which gradients to reduce after backward
    sharding: ShardingState = field(default_factory=ShardingState)
    #: the parts of the parameters that this rank's optimizer updates
    shards: LocalShards | None = None
    pipeline: PipelineSteps | None = None
    #: context of all backward passes of a step but the last
    accumulate: Callable[[], AbstractContextManager] = nullcontext
    bucket_listener: BucketListener | None = None
    #: context of forward passes in which every rank of a tensor group has all positions between
    #: blocks
    whole_positions: Callable[[], AbstractContextManager] = nullcontext
    #: ranks that gather weights from each other in forward, so that all must run equally many
    #: forward passes
    lockstep: dist.ProcessGroup | None = None
    #: counts of graphs and eager blocks; None where nothing is compiled
    compilation: Compilation | None = None

    def loss(self, inputs: MicroBatch) -> Tensor:
        """Return the sum of losses of some rows. A collective where the layout communicates in
        forward.
        """
        return self.pipeline(inputs) if self.pipeline is not None else self.module(*inputs)


def materialise(module: nn.Module, device: torch.device) -> None:
    """Move a module to its device, with unset storage for those of the meta device. Tied parameters
    stay tied.
    """
    for weight in list(module.parameters()):
        if weight.is_meta:
            storage = nn.Parameter(torch.empty_like(weight, device=device), weight.requires_grad)
            torch.utils.swap_tensors(weight, storage)
    module.to(device)  # FSDP notes here where its parameters are now


def fill_buckets(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names in their order, in groups of at least `BUCKET` values, the last one
    excepted.
    """
    buckets: list[list[str]] = []
    values = BUCKET
    for name, tensor in tensors.items():
        if values >= BUCKET:
            buckets.append([])
            values = 0
        buckets[-1].append(name)
        values += tensor.numel()
    return buckets


def _all_reduce(gradients: dict[str, Tensor], reduction: GradReduction) -> None:
    """Reduce in place; small gradients share one all-reduce."""
    for names in fill_buckets(gradients):
        bucket = [gradients[name] for name in names]
        flat = (
            torch.cat([values.flatten() for values in bucket])
            if len(bucket) > 1
            else bucket[0].contiguous()
        )
        dist.all_reduce(flat, group=reduction.group)
        if reduction.mean:
            flat /= dist.get_world_size(reduction.group)
        if flat is not bucket[0]:
            for values, summed in zip(
                bucket, flat.view(-1).split([values.numel() for values in bucket]), strict=True
            ):
                values.copy_(summed.view_as(values))
