"""World size → nodes and ranks a node: a pure function."""

from dataclasses import dataclass

from tokenscale.base.errors import UserError


@dataclass(frozen=True)
class Geometry:
    """How a run's ranks lie on nodes; one rank a GPU, every node used alike."""

    world_size: int
    nodes: int
    ranks_per_node: int

    @property
    def tasks_per_node(self) -> int:
        """What a SLURM job asks for: its plugin for Snakemake takes two tasks or more where we call srun ourselves."""
        return max(2, self.ranks_per_node)

    def cores_per_task(self, cores_per_rank: int | None) -> int:
        """Cores for each of these tasks, so that all of a node hold its ranks' cores; 1 where nobody says."""
        return -(-(cores_per_rank or 1) * self.ranks_per_node // self.tasks_per_node)


def geometry(world_size: int, gpus_per_node: int | None) -> Geometry:
    """The fewest nodes that hold the ranks, filled evenly; one node for any number where nodes are not counted.

    Raises UserError where that does not come out even, naming the nearest world sizes that do.

    >>> [(g.nodes, g.ranks_per_node) for g in (geometry(n, 4) for n in (1, 2, 4, 8, 12, 16))]
    [(1, 1), (1, 2), (1, 4), (2, 4), (3, 4), (4, 4)]
    """
    if gpus_per_node is None:
        return Geometry(world_size, 1, world_size)
    nodes = -(-world_size // gpus_per_node)
    if world_size % nodes:
        fitting = [n for n in range(1, 2 * world_size) if n % -(-n // gpus_per_node) == 0]
        below, above = max(n for n in fitting if n < world_size), min(n for n in fitting if n > world_size)
        raise UserError(
            "the world size does not fill its nodes evenly.",
            world_size=world_size,
            gpus_per_node=gpus_per_node,
            next=f"use {below} or {above}",
        )
    return Geometry(world_size, nodes, world_size // nodes)
