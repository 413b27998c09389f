"""One process: nothing to spread."""

from torch import nn

from tokenscale.train.parallel.mesh import Mesh


def apply(objective: nn.Module, mesh: Mesh) -> nn.Module:
    """The model on its device."""
    return objective.to(mesh.world.device)
