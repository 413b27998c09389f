"""Fully sharded data parallelism (FSDP2; ZeRO-2 and ZeRO-3 of Rajbhandari et al. 2020), and its hybrid with copies."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tokenscale.parallel.mesh import mesh_of
from tokenscale.parallel.parts import Part, Parts, rows_of
from tokenscale.parallel.world import World
from tokenscale.settings.run import LayoutSettings


def apply(objective: nn.Module, layout: LayoutSettings, world: World) -> nn.Module:
    """Shard each block, then the rest with the root; in place, so that parameters keep their names.

    `zero3` gives a block's weights back after its forward pass and gathers them again in backward; `zero2` keeps them
    until then. The rest (embeddings, last norm, head) is whole from the objective's forward to its backward in both: it
    is needed first and last, and the chunked loss reads the head's weight outside the head. With `layout.data` > 1
    gradients are also averaged over the copies (HSDP, Zhao et al. 2023, section 3.2.2).

    Products are in the format that autocast says, as in every other layout, so that methods compare: weights are
    gathered as they are stored, and no MixedPrecisionPolicy rounds norms and embeddings. Autocast's own 16-bit copies
    of weights last until backward, unless blocks are computed again. Every rank must have built the same weights.
    """
    mesh, gives_back = mesh_of(layout, world), layout.sharding == "zero3"
    for block in objective.model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=gives_back)
    fully_shard(objective, mesh=mesh, reshard_after_forward=False)
    objective.no_sync = partial(_no_sync, objective, keep_weights=not gives_back)
    objective.parts = Shards(objective.model, mesh, world)
    return objective


@contextmanager
def _no_sync(objective: nn.Module, *, keep_weights: bool) -> Iterator[None]:
    """Backward passes in here add up whole gradients on each rank and exchange nothing; the next one outside does.

    Weights that need not be given back stay for the next micro-step.
    """
    objective.set_requires_gradient_sync(False)
    objective.set_reshard_after_backward(not keep_weights)
    try:
        yield
    finally:
        objective.set_requires_gradient_sync(True)
        objective.set_reshard_after_backward(True)


class Shards(Parts):
    """This rank's rows of every parameter: the local tensors of FSDP2's DTensors, as plain tensors.

    The fused update takes its `grad_scale` with plain tensors only; nothing is copied.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, world: World):
        super().__init__(model, world)
        self.group = mesh.get_group("shard")
        self.replica, self.replicas = (mesh.get_local_rank("data"), mesh.size(0)) if mesh.ndim == 2 else (0, 1)
        self._weights = dict(model.named_parameters())
        for name, weight in self._weights.items():
            first = rows_of(len(weight), mesh.get_local_rank("shard"), mesh.size(mesh.ndim - 1)).start
            offsets = (first, *(0,) * (weight.dim() - 1))
            self.of[name] = Part(weight.to_local().detach(), offsets, tuple(weight.shape))

    def take_gradients(self) -> None:
        """Views: nothing is copied."""
        for name, part in self.of.items():
            gradient = self._weights[name].grad
            part.tensor.grad = None if gradient is None else gradient.to_local()
