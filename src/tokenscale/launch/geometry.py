"""World size → nodes and ranks a node: a pure function."""

from dataclasses import dataclass

from tokenscale.errors import UserError


@dataclass(frozen=True)
class Geometry:
    """How a run's ranks lie on nodes; one rank a GPU, every node used alike."""

    world_size: int
    nodes: int
    ranks_per_node: int


def geometry(world_size: int, gpus_per_node: int = 4) -> Geometry:
    """The fewest nodes that hold the ranks, filled evenly.

    Raises UserError where that does not come out even, naming the nearest world sizes that do.

    >>> [(g.nodes, g.ranks_per_node) for g in map(geometry, (1, 2, 4, 8, 12, 16))]
    [(1, 1), (1, 2), (1, 4), (2, 4), (3, 4), (4, 4)]
    """
    nodes = -(-world_size // gpus_per_node)
    if world_size < 1 or world_size % nodes:
        below = world_size // gpus_per_node * gpus_per_node
        raise UserError(
            "the world size does not fill its nodes evenly.",
            world_size=world_size,
            gpus_per_node=gpus_per_node,
            next=f"use {below} or {below + gpus_per_node}" if below else f"use 1 to {gpus_per_node}",
        )
    return Geometry(world_size, nodes, world_size // nodes)
