"""The grid of ranks that a layout's degrees span: the one place that makes meshes."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tokenscale.parallel.world import World
from tokenscale.settings.run import LayoutSettings


def mesh_of(layout: LayoutSettings, world: World) -> DeviceMesh:
    """[data, shard] over all ranks, or [shard] where the model is held once. A collective.

    Ranks with neighbouring numbers, which are those of one node, share a model: exchanges of weights stay there, and
    only sums of gradients cross nodes.
    """
    if layout.data == 1:
        return init_device_mesh(world.device.type, (layout.shard,), mesh_dim_names=("shard",))
    return init_device_mesh(world.device.type, (layout.data, layout.shard), mesh_dim_names=("data", "shard"))
