"""Backward cut in two: gradients by what came in at once, gradients by weights later (Qi et al. 2023, zero bubble)."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


class Deferred:
    """Keeps what the weights' gradients need until somebody has time for them."""

    def __init__(self) -> None:
        self.key: object = None
        self._waiting: dict[object, list[tuple[nn.Parameter, nn.Parameter | None, Tensor, Tensor]]] = {}

    def take_over(self, module: nn.Linear) -> None:
        """From now on this layer's backward pass leaves its weight's gradient here, under `key`."""
        module.product = self.product
        module.forward = partial(_forward, module)

    def product(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None = None) -> Tensor:
        """`F.linear`, whose backward pass gives the gradient by `x` only."""
        return _Product.apply(x, weight, bias, self)

    def put(self, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, gradient: Tensor) -> None:
        """x [..., inputs], and the gradient by what was made of it [..., outputs]."""
        self._waiting.setdefault(self.key, []).append((weight, bias, x, gradient))

    @torch.no_grad()
    def work_off(self, key: object) -> None:
        """Add the gradients that were left under a key to those of the weights."""
        for weight, bias, x, gradient in self._waiting.pop(key, []):
            rows = gradient.flatten(0, -2)
            _add(weight, rows.T @ x.flatten(0, -2).to(rows.dtype))
            if bias is not None:
                _add(bias, rows.sum(dim=0))


def _add(weight: nn.Parameter, values: Tensor) -> None:
    values = values.to(weight.dtype)
    weight.grad = values if weight.grad is None else weight.grad.add_(values)


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return module.product(x, module.weight, module.bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, deferred: Deferred
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.deferred.put(ctx.weight, ctx.bias, x, gradient)
        return (gradient @ ctx.weight.to(gradient.dtype)).to(x.dtype), None, None, None
