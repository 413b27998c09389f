"""Collectives with one name over releases of torch, and those of a tensor group, which losses and
parallel methods share.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from tokenscale.data.order.permutation import shard_rows

#: [n, …] of each rank → [ranks x n, …], laid end to end (torch 2.13 renames it)
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: [ranks x n, …] of each rank → [n, …], this rank's part of their sum
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def local(tensor: Tensor) -> Tensor:
    """Return a DTensor's own part as a plain tensor in the same memory; any other tensor as it
    is.
    """
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@dataclass
class Ranks:
    """A tensor group, and this rank's number in it."""

    group: dist.ProcessGroup
    index: int
    count: int
    splits_positions: bool = True

    @contextmanager
    def whole_positions(self) -> Iterator[None]:
        """A context in which every rank has all positions between the parts. Without gradients
        only.
        """
        self.splits_positions = False
        try:
            yield
        finally:
            self.splits_positions = True

    def gather(self, x_btd: Tensor) -> Tensor:
        """[B, T / count, d] of each rank → [B, T, d]: all positions. Its gradient is summed, and
        scattered.
        """
        return _Gather.apply(x_btd, self) if self.splits_positions else x_btd

    def scatter(self, x_btd: Tensor) -> Tensor:
        """[B, T, d], a share of a sum over the ranks → this rank's positions of the sum, [B, T /
        count, d].
        """
        if self.splits_positions:
            return _Scatter.apply(x_btd, self)
        dist.all_reduce(x_btd, group=self.group)
        return x_btd

    def mine(self, rows: int) -> range:
        """Return this rank's range of `rows` rows."""
        return shard_rows(rows, index=self.index, count=self.count)


def _gathered(x: Tensor, ranks: Ranks) -> Tensor:
    rows, length, *rest = x.shape
    found = x.new_empty(ranks.count * rows, length, *rest)
    all_gather(found, x.contiguous(), group=ranks.group)
    return (
        found.unflatten(0, (ranks.count, rows))
        .transpose(0, 1)
        .reshape(rows, ranks.count * length, *rest)
    )


def _scattered(x: Tensor, ranks: Ranks) -> Tensor:
    shares = x.unflatten(1, (ranks.count, -1)).transpose(0, 1).contiguous()
    found = torch.empty_like(shares[0])
    reduce_scatter(found, shares.flatten(0, 1), group=ranks.group)
    return found


class _RanksContext(FunctionCtx):
    """What forward keeps for backward."""

    ranks: Ranks


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _RanksContext, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _gathered(x, ranks)

    @staticmethod
    def backward(ctx: _RanksContext, gradient: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradient, ranks=ctx.ranks), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _RanksContext, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _scattered(x, ranks)

    @staticmethod
    def backward(ctx: _RanksContext, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ranks=ctx.ranks), None


@dataclass(frozen=True)
class Vocabulary:
    """This rank's entries of the vocabulary, and reductions over all of it."""

    first: int
    ranks: Ranks

    def gather(self, hidden_btd: Tensor) -> Tensor:
        """[B, T / count, d] of each rank → [B, T, d]: the loss of this rank's entries needs all
        positions.
        """
        return self.ranks.gather(hidden_btd)

    def maximum(self, values: Tensor) -> Tensor:
        """Reduce to the elementwise maximum over all ranks, in place. A collective."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.ranks.group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Reduce to the sum over all ranks, in place. A collective."""
        dist.all_reduce(values, group=self.ranks.group)
        return values
