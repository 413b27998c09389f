"""Tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022) and a shared vocabulary.

The ranks of a group read the same rows. Each has some heads, some of the feed-forward's hidden units and some rows of
the vocabulary, and between those parts, for norms, dropout and residual sums, an equal run of positions of every row:

    tokens ─ embedding ┬─ norm ─ gather ─ query, key, value, attention, output ─ scatter ─┬─ norm ─ gather ─ …
             + scatter └───────────────────────────── + ──────────────────────────────────┘

`gather` collects all positions, and its backward pass sums and scatters gradients; `scatter` sums what the ranks have
computed of all positions and leaves each its run, and its backward pass gathers. The logits of all entries never stand
together anywhere: the loss needs their maximum, their sum and the label's own (section 3 of the first paper).
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from tokenscale.data.order.shares import rows_of
from tokenscale.train.models.losses import correct_labels, linear_cross_entropy_sum
from tokenscale.train.parallel.collectives import all_gather, reduce_scatter
from tokenscale.train.parallel.mesh import Mesh
from tokenscale.train.parallel.sharding import Cut, Sum, held_of


@dataclass(frozen=True)
class Ranks:
    """A tensor group, and this rank's number in it."""

    group: dist.ProcessGroup
    index: int
    count: int

    def gather(self, x_btd: Tensor) -> Tensor:
        """[B, T / count, d] of each rank → [B, T, d]: all positions. Its gradient is summed, and scattered."""
        return _Gather.apply(x_btd, self)

    def scatter(self, x_btd: Tensor) -> Tensor:
        """[B, T, d], a share of a sum over the ranks → this rank's positions of the sum, [B, T / count, d]."""
        return _Scatter.apply(x_btd, self)

    def mine(self, rows: int) -> range:
        """This rank's of so many rows."""
        return rows_of(rows, self.index, self.count)


def _gathered(x: Tensor, ranks: Ranks) -> Tensor:
    rows, length, *rest = x.shape
    found = x.new_empty(ranks.count * rows, length, *rest)
    all_gather(found, x.contiguous(), group=ranks.group)
    return found.unflatten(0, (ranks.count, rows)).transpose(0, 1).reshape(rows, ranks.count * length, *rest)


def _scattered(x: Tensor, ranks: Ranks) -> Tensor:
    shares = x.unflatten(1, (ranks.count, -1)).transpose(0, 1).contiguous()
    found = torch.empty_like(shares[0])
    reduce_scatter(found, shares.flatten(0, 1), group=ranks.group)
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _gathered(x, ranks)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradient, ctx.ranks), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _scattered(x, ranks)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.ranks), None


@dataclass(frozen=True)
class Vocabulary:
    """This rank's entries of a vocabulary, and how ranks agree about all of it (`models.losses.Share`)."""

    first: int
    ranks: Ranks

    def maximum(self, values: Tensor) -> Tensor:
        """Of all ranks, in place. A collective."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.ranks.group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Over all ranks, in place. A collective."""
        dist.all_reduce(values, group=self.ranks.group)
        return values


def apply(objective: nn.Module, mesh: Mesh) -> nn.Module:
    """Leave this rank its part of each matrix, in place; parameters keep their names.

    Norms, positions and the biases of what writes into the residual stream are on every rank, which sees some positions
    only: their gradients are summed over the group. Every rank must have built the same weights.
    """
    ranks = Ranks(mesh.group("tensor"), mesh.index("tensor"), mesh.size("tensor"))
    model, held = objective.model, held_of(objective)
    cuts: dict[str, Cut] = {}
    for number, block in enumerate(model.blocks):
        if block is not None:  # else another stage's
            _cut_part(block.attention, f"blocks.{number}.attention", ranks, cuts, "output")
            _cut_part(block.feed_forward, f"blocks.{number}.feed_forward", ranks, cuts, "down")
    vocabulary = Vocabulary(ranks.mine(model.settings.vocabulary_size).start, ranks)
    tied = model.settings.tied_embeddings
    if model.embedding is not None:
        _cut(model.embedding, "embedding", "weight", 0, ranks, cuts)
        model.embedding.forward = partial(_look_up, model.embedding, vocabulary)
    if model.head is not None:
        if tied:
            model.head.weight = model.embedding.weight
        else:
            _cut(model.head, "head", "weight", 0, ranks, cuts)
        objective.loss = partial(_loss, objective, vocabulary)
    if getattr(model, "positions", None) is not None:
        model.positions.register_forward_hook(partial(_own_positions, ranks))
    repeated = tuple(name for name, _ in model.named_parameters() if name not in cuts)
    held.cuts |= cuts
    if repeated:
        held.sums.append(Sum(repeated, ranks.group))
    if ranks.index:
        held.repeated.update(repeated)
    return objective


def _cut_part(part: nn.Module, name: str, ranks: Ranks, cuts: dict[str, Cut], last: str) -> None:
    """Attention or feed-forward: its layers by outputs (whole heads, hidden units), the `last` one by inputs."""
    for child, linear in part.named_children():
        if child == last:
            _cut(linear, f"{name}.{child}", "weight", 1, ranks, cuts)
            linear.forward = partial(_rows, linear, ranks)
            continue
        _cut(linear, f"{name}.{child}", "weight", 0, ranks, cuts)
        if linear.bias is not None:
            _cut(linear, f"{name}.{child}", "bias", 0, ranks, cuts)
    part.register_forward_pre_hook(partial(_collect, ranks))


def _cut(module: nn.Module, name: str, kind: str, dim: int, ranks: Ranks, cuts: dict[str, Cut]) -> None:
    weight = getattr(module, kind)
    mine = ranks.mine(weight.shape[dim])
    setattr(module, kind, nn.Parameter(weight.detach().narrow(dim, mine.start, len(mine)).clone()))
    cuts[f"{name}.{kind}"] = Cut(dim, mine.start, tuple(weight.shape))


def _collect(ranks: Ranks, module: nn.Module, arguments: tuple) -> tuple:
    """Before attention and feed-forward: all positions, in the format that products will have."""
    x, *rest = arguments
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return ranks.gather(x), *rest


def _rows(module: nn.Linear, ranks: Ranks, x_btd: Tensor) -> Tensor:
    """A linear layer of which each rank has some inputs. Its bias is added once, to the sum."""
    product = getattr(module, "product", F.linear)  # another one, where gradients by weights wait (see `deferred`)
    y = ranks.scatter(product(x_btd, module.weight))
    return y if module.bias is None else y + module.bias.to(y.dtype)


def _look_up(module: nn.Embedding, vocabulary: Vocabulary, tokens_bt: Tensor) -> Tensor:
    """This rank's positions [B, T / count, d], each from the rank that has the token's row."""
    rows = tokens_bt - vocabulary.first
    others = (rows < 0) | (rows >= len(module.weight))
    x = F.embedding(rows.masked_fill(others, 0), module.weight)
    return vocabulary.ranks.scatter(x.masked_fill(others[..., None], 0))


def _own_positions(ranks: Ranks, module: nn.Module, arguments: tuple, y: Tensor) -> Tensor:
    """[..., T, d] → this rank's positions of it."""
    return y.unflatten(-2, (ranks.count, -1)).select(-3, ranks.index)


def _loss(objective: nn.Module, vocabulary: Vocabulary, hidden_btd: Tensor, labels_bt: Tensor) -> Tensor:
    """The loss of all positions, the same on every rank; from the logits of `loss_chunk` at a time, or of all."""
    hidden = vocabulary.ranks.gather(hidden_btd)
    head, chunk = objective.model.head, objective.loss_chunk
    if objective.correct is not None:
        objective.correct += correct_labels(hidden, head, labels_bt, chunk, share=vocabulary)
    return linear_cross_entropy_sum(hidden, head, labels_bt, chunk, compiled=objective.compiled, share=vocabulary)
