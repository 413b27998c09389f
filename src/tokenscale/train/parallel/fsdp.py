"""Fully sharded data parallelism (FSDP2; ZeRO-2 and ZeRO-3 of Rajbhandari et al. 2020), and hybrid
sharding (HSDP).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from tokenscale.data.order.permutation import shard_rows
from tokenscale.train.collectives import local
from tokenscale.train.parallel.sharding import (
    LocalShards,
    Mesh,
    ParallelModel,
    ShardingState,
    materialise,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def apply_fsdp(parallel: ParallelModel, mesh: Mesh) -> ParallelModel:
    """Shard each block, then the rest with the root; in place, so that parameters keep their names.
    Parameters without storage get only this rank's rows; others are moved to the device a block at
    a time.

    `zero3` reshards a block's weights after its forward pass and gathers them again in backward;
    `zero2` keeps them until then. The rest (embeddings, last norm, head) stays gathered from the
    root's forward to its backward in both: it is needed first and last. With `layout.data` > 1
    gradients are also averaged over the replicas (HSDP, Zhao et al. 2023, section 3.2.2).

    By default products are in autocast's format, as in every other layout, so that methods compare:
    weights are gathered as they are stored, and no MixedPrecisionPolicy rounds norms and
    embeddings. Autocast's own 16-bit copies of weights last until backward, unless blocks are
    recomputed.

    Gradients are reduced in every micro-step, as in torchtitan, so that a rank holds its shard of
    them; with `accumulation: unsharded` in the last one, and each rank holds the whole model's
    until then.

    `layout.gather`, `reshard_to`, `embedding_group` and `head_group` are how others run it
    (torchtitan). With `gather: bf16` there is no autocast, and rotary tables stay in fp32
    (`cast_forward_inputs`). A head in its own group is gathered while the last block computes, and
    its gradient is reduced while that block goes backward.
    """
    # half a second, which other layouts do not wait for
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    layout = mesh.layout
    model = cast(Any, parallel.objective.model)
    devices = mesh.devices("data", "shard")
    reshards = layout.sharding == "zero3"
    policy = MixedPrecisionPolicy()
    if layout.gather == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    shard = partial(fully_shard, mesh=devices, mp_policy=policy)
    if layout.embedding_group and model.embedding is not None:
        shard(model.embedding, reshard_after_forward=True)
        model.embedding.set_unshard_in_backward(False)  # a lookup's gradient needs no weights
    if layout.head_group:
        shard(model.head, reshard_after_forward=False)  # backward begins with it
        register_fsdp_forward_method(model.head, "read")
    for block in model.blocks:
        if block is not None:  # another stage's
            shard(block, reshard_after_forward=(layout.reshard_to or True) if reshards else False)
    root = shard(parallel.module, reshard_after_forward=False)
    register_fsdp_forward_method(parallel.module, "next_logits")
    materialise(parallel.module, device=mesh.world.device)
    parallel.lockstep = mesh.group("shard")
    parallel.accumulate = partial(
        _accumulate,
        root,
        reduces=layout.accumulation == "sharded",
        keeps_weights=not reshards,
    )
    parallel.shards = FSDPShards(
        root=parallel.module,
        model=parallel.objective.model,
        mesh=mesh,
        sharding=parallel.sharding,
    )
    return parallel


@contextmanager
def _accumulate(root: "FSDPModule", *, reduces: bool, keeps_weights: bool) -> Iterator[None]:
    """Accumulate gradients: each rank its shard of them, or without `reduces` those of the whole
    model. `keeps_weights`: weights stay gathered for the next micro-step.
    """
    root.set_requires_gradient_sync(reduces)
    root.set_reshard_after_backward(not keeps_weights)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)
        root.set_reshard_after_backward(True)


class FSDPShards(LocalShards):
    """This rank's rows of every parameter: the local tensors of FSDP2's DTensors, as plain tensors.

    The fused update takes its `grad_scale` with plain tensors only; nothing is copied.
    """

    def __init__(self, root: nn.Module, model: nn.Module, mesh: Mesh, sharding: ShardingState):
        self._root = root
        self._index = mesh.index("shard")
        self._count = mesh.size("shard")
        self._adds_in_fp32 = mesh.layout.accumulation_format == "fp32"
        super().__init__(model, mesh, sharding)

    def _add_in_fp32(self) -> None:
        """Add what FSDP reduces in a pass to this rank's gradient in fp32: FSDP itself adds in the
        format of the weights.
        """
        for name, weight in self.model.named_parameters():
            shard = self.by_name[name].tensor
            shard.grad_dtype = torch.float32
            weight.register_post_accumulate_grad_hook(partial(_move_gradient, shard))

    def _gradient(self, name: str, weight: nn.Parameter) -> Tensor:
        gradient = self.by_name[name].tensor.grad
        return gradient if gradient is not None else super()._gradient(name, weight)

    def _rows(self, weight: Any) -> tuple[Tensor, int, int]:
        return (
            weight.to_local().detach(),
            shard_rows(len(weight), index=self._index, count=self._count).start,
            len(weight),
        )

    def held_gradients(self) -> list[Tensor]:
        """Shards of gradients and unsharded gradients. FSDP2 has no public name for those of
        weights that are in the other state at the moment.
        """
        parameters: list[Any] = []
        for module in self._root.modules():
            if hasattr(module, "_get_fsdp_state"):
                group = cast(Any, module)._get_fsdp_state()._fsdp_param_group
                parameters += group.fsdp_params if group is not None else []
        found = [parameter.sharded_param.grad for parameter in parameters]
        found += [parameter.unsharded_accumulated_grad for parameter in parameters]
        found += [
            parameter._unsharded_param.grad
            for parameter in parameters
            if hasattr(parameter, "_unsharded_param")  # set by the first gather
        ]
        if self._adds_in_fp32:
            found += [shard.grad for shard in self.tensors]
        return [local(gradient) for gradient in found if gradient is not None]

    def _assign_gradients(self) -> None:
        if self._adds_in_fp32:
            return  # they are there
        for name, weight in self.model.named_parameters():
            self.by_name[name].tensor.grad = None if weight.grad is None else local(weight.grad)


def _move_gradient(shard: Tensor, weight: nn.Parameter) -> None:
    """Add a weight's gradient to that of `shard`, in fp32, and remove it."""
    assert weight.grad is not None  # FSDP has reduced it
    gradient = local(weight.grad)
    shard.grad = gradient.float() if shard.grad is None else shard.grad.add_(gradient)
    weight.grad = None
