"""One process: nothing to spread."""

from torch import nn

from tokenscale.parallel.world import World
from tokenscale.settings.run import LayoutSettings


def apply(model: nn.Module, layout: LayoutSettings, world: World) -> nn.Module:
    """The model as it is."""
    return model
