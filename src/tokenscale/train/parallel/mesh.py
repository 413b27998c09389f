"""The device mesh that a layout's degrees span; the only place that creates process groups."""

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tokenscale.settings.layout import DEGREES, LayoutSettings, MeshCoordinate
from tokenscale.train.parallel.world import World


class Mesh:
    """One rank's view of the mesh [pipeline, data, shard, tensor]. Creating it, or a group with `group_by`, is a
    collective.

    Ranks with neighbouring numbers are those of one node: tensor groups, which exchange in every block, lie closest
    together, then the shards of a copy, then copies; stages, which exchange least, lie furthest apart.
    """

    def __init__(self, layout: LayoutSettings, world: World):
        if layout.world_size != world.size:
            raise ValueError(f"a layout of {layout.world_size} ranks in a world of {world.size}")
        self.layout, self.world = layout, world
        self.place: MeshCoordinate = layout.coordinate(world.rank)
        self._axes = tuple(degree for degree in DEGREES if self.size(degree) > 1)
        self._devices: DeviceMesh | None = None
        if world.size > 1:
            degrees = tuple(self.size(axis) for axis in self._axes)
            self._devices = init_device_mesh(world.device.type, degrees, mesh_dim_names=self._axes)
        #: the ranks that hold one copy of the model between them; None where each holds it all
        self.copy: dist.ProcessGroup | None = None
        if layout.world_size > layout.data:
            self.copy = self.group_by(lambda place: place.data) if layout.data > 1 else dist.group.WORLD

    def size(self, axis: str) -> int:
        return getattr(self.layout, axis)

    def index(self, axis: str) -> int:
        return getattr(self.place, axis)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the ranks that differ from this one along `axis` only; None for a degree of 1."""
        return self._devices.get_group(axis) if self.size(axis) > 1 else None

    def devices(self, *axes: str) -> DeviceMesh:
        """Return the submesh along those of `axes` whose degree is above 1, at this rank's other coordinates."""
        return self._devices[tuple(axis for axis in axes if self.size(axis) > 1)]

    def group_by(self, key: Callable[[MeshCoordinate], object | None]) -> dist.ProcessGroup | None:
        """Return the group of the ranks with this rank's key; None for a key of None. A collective."""
        found: dict[object, list[int]] = {}
        for rank in range(self.world.size):
            if (value := key(self.layout.coordinate(rank))) is not None:
                found.setdefault(value, []).append(rank)
        # Every rank makes every group. Among its members alone (`use_local_synchronization`) torch names a group by how
        # many each of them has, and ranks that have made unequal numbers of groups wait for each other for ever.
        groups = {value: dist.new_group(ranks) for value, ranks in found.items()}
        return groups.get(key(self.place))
