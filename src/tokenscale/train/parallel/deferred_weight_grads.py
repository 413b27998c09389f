"""Backward split in two: gradients of inputs at once, gradients of weights later (Qi et al. 2023, zero bubble)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DeferredWeightGrads:
    """Inputs and output gradients of linear layers, stored until their weights' gradients are computed."""

    def __init__(self) -> None:
        self.key: object = None
        self._pending: dict[object, list[tuple[nn.Parameter, nn.Parameter | None, Tensor, Tensor]]] = {}

    def replace_linear_layers(self, module: nn.Module) -> None:
        """Replace the linear layers below a module by layers that leave their weight gradients to this object."""
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, DeferredLinear(child, self))

    def store(self, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, gradient: Tensor) -> None:
        """Store x [..., inputs] and the output gradient [..., outputs] of a layer, under the current `key`."""
        self._pending.setdefault(self.key, []).append((weight, bias, x, gradient))

    @torch.no_grad()
    def accumulate(self, key: object) -> None:
        """Compute the weight gradients stored under a key and add them to the weights' `grad`."""
        for weight, bias, x, gradient in self._pending.pop(key, []):
            rows = gradient.flatten(0, -2)
            _add(weight, rows.T @ x.flatten(0, -2).to(rows.dtype))
            if bias is not None:
                _add(bias, rows.sum(dim=0))


class DeferredLinear(nn.Linear):
    """A linear layer, with another one's parameters, whose backward pass computes the gradient of its input only."""

    def __init__(self, linear: nn.Linear, deferred: DeferredWeightGrads):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias, self._deferred = linear.weight, linear.bias, deferred

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _DeferredProduct.apply(x, weight, bias, self._deferred)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs]."""
        return self.product(x, self.weight, self.bias)


def _add(weight: nn.Parameter, values: Tensor) -> None:
    values = values.to(weight.dtype)
    weight.grad = values if weight.grad is None else weight.grad.add_(values)


class _DeferredProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, deferred: DeferredWeightGrads
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.deferred.store(ctx.weight, ctx.bias, x, gradient)
        return (gradient @ ctx.weight.to(gradient.dtype)).to(x.dtype), None, None, None
