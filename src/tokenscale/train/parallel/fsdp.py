"""Fully sharded data parallelism (FSDP2; ZeRO-2 and ZeRO-3 of Rajbhandari et al. 2020), and its hybrid with copies."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tokenscale.data.order.shares import rows_of
from tokenscale.train.parallel.mesh import Mesh
from tokenscale.train.parallel.sharding import Held, Parts, held_of


def apply(objective: nn.Module, mesh: Mesh) -> nn.Module:
    """Shard each block, then the rest with the root; in place, so that parameters keep their names. What is not on the
    device yet gets there a block at a time.

    `zero3` gives a block's weights back after its forward pass and gathers them again in backward; `zero2` keeps them
    until then. The rest (embeddings, last norm, head) is whole from the objective's forward to its backward in both: it
    is needed first and last, and the chunked loss reads the head's weight outside the head. With `layout.data` > 1
    gradients are also averaged over the copies (HSDP, Zhao et al. 2023, section 3.2.2).

    Products are in the format that autocast says, as in every other layout, so that methods compare: weights are
    gathered as they are stored, and no MixedPrecisionPolicy rounds norms and embeddings. Autocast's own 16-bit copies
    of weights last until backward, unless blocks are computed again. Every rank must have built the same weights.
    """
    devices, gives_back = mesh.devices("data", "shard"), mesh.layout.sharding == "zero3"
    for block in objective.model.blocks:
        if block is not None:  # another stage's
            fully_shard(block, mesh=devices, reshard_after_forward=gives_back)
    fully_shard(objective, mesh=devices, reshard_after_forward=False)
    objective.no_sync = partial(_no_sync, objective, keep_weights=not gives_back)
    objective.parts = Shards(objective.model, mesh, held_of(objective))
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

    def __init__(self, model: nn.Module, mesh: Mesh, held: Held):
        self._index, self._count = mesh.index("shard"), mesh.size("shard")
        super().__init__(model, mesh, held)

    def _rows(self, weight: nn.Parameter) -> tuple[Tensor, int, int]:
        return weight.to_local().detach(), rows_of(len(weight), self._index, self._count).start, len(weight)

    def _take(self) -> None:
        """Views: nothing is copied."""
        for name, weight in self.model.named_parameters():
            self.of[name].tensor.grad = None if weight.grad is None else weight.grad.to_local()
