"""Tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022) and
a shared vocabulary.

The ranks of a group read the same rows. Each has some heads, some of the feed-forward's hidden
units and some rows of the vocabulary, and between those parts, for norms, dropout and residual
sums, an equal run of positions of every row:

    tokens ─ embedding ┬─ norm ─ gather ─ query, key, value, attention, output ─ scatter ─┬─ norm ─
             gather ─ … + scatter └───────────────────────────── +
             ──────────────────────────────────┘

`gather` collects all positions, and its backward pass sums and scatters gradients; `scatter` sums
what the ranks have computed of all positions and leaves each its run, and its backward pass
gathers. The logits of all entries never stand together anywhere: the loss needs their maximum,
their sum and the label's own (section 3 of the first paper).

Rows that grow by one position at a time cannot be shared out by positions. While text is generated
every rank has all positions (`Ranks.whole_positions`), as in the first paper: `gather` does
nothing, and `scatter` sums.
"""

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenscale.train.collectives import Ranks, Vocabulary
from tokenscale.train.models.decoder import Block, Decoder
from tokenscale.train.parallel.pipeline import DeferredLinear
from tokenscale.train.parallel.sharding import GradReduction, Mesh, ParallelModel, ShardSpec


def apply_tensor(parallel: ParallelModel, mesh: Mesh) -> ParallelModel:
    """Keep this rank's part of each matrix, in place; parameters keep their names.

    Norms, positions and the biases of layers that write into the residual stream are replicated.
    Each rank computes some positions only, so their gradients are summed over the group.
    """
    group = mesh.group("tensor")
    assert group is not None  # the degree is above 1
    ranks = Ranks(group=group, index=mesh.index("tensor"), count=mesh.size("tensor"))
    model = cast(Decoder, parallel.objective.model)
    sharding = parallel.sharding
    specs: dict[str, ShardSpec] = {}
    for number, block in enumerate(model.blocks):
        if block is not None:  # else another stage's
            _split_part(
                cast(Block, block).attention,
                name=f"blocks.{number}.attention",
                ranks=ranks,
                specs=specs,
                last="output",
            )
            _split_part(
                cast(Block, block).feed_forward,
                name=f"blocks.{number}.feed_forward",
                ranks=ranks,
                specs=specs,
                last="down",
            )
    vocabulary = Vocabulary(ranks.mine(model.settings.resolved_vocabulary_size).start, ranks)
    if model.embedding is not None:
        _split(
            model.embedding,
            name="embedding",
            kind="weight",
            dim=0,
            ranks=ranks,
            specs=specs,
        )
        model.embedding = VocabularyParallelEmbedding(model.embedding, vocabulary)
    if model.head is not None:
        if model.settings.tied_embeddings:
            model.head.weight = model.embedding.weight
        else:
            _split(
                model.head,
                name="head",
                kind="weight",
                dim=0,
                ranks=ranks,
                specs=specs,
            )
        parallel.objective.vocabulary = vocabulary
    if getattr(model, "positions", None) is not None:
        model.positions.register_forward_hook(partial(_own_positions, ranks))
    replicated = tuple(name for name, _ in model.named_parameters() if name not in specs)
    sharding.specs |= specs
    parallel.whole_positions = ranks.whole_positions
    if replicated:
        sharding.reductions.append(GradReduction(replicated, group=ranks.group))
    if ranks.index:
        sharding.replicated.update(replicated)
    return parallel


class RowParallelLinear(nn.Linear):
    """A linear layer of which each rank has some inputs: [B, T, d / count] → this rank's positions
    [B, T / count, d].

    It takes over a layer whose weight is split already. The bias is added once, to the sum.
    """

    def __init__(self, linear: nn.Linear, ranks: Ranks):
        super().__init__(
            linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta"
        )
        self.weight = linear.weight
        self.bias = linear.bias
        self._ranks = ranks
        #: another product where weight gradients are deferred
        self._product = linear.product if isinstance(linear, DeferredLinear) else F.linear

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, sum over the ranks and scatter by positions."""
        y = self._ranks.scatter(self._product(x, self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabularyParallelEmbedding(nn.Embedding):
    """An embedding of which each rank has some rows: tokens [B, T] → this rank's positions [B, T /
    count, d].
    """

    def __init__(self, embedding: nn.Embedding, vocabulary: Vocabulary):
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, device="meta")
        self.weight = embedding.weight
        self._vocabulary = vocabulary

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Look up this rank's rows, sum over the ranks and scatter by positions."""
        rows = tokens_bt - self._vocabulary.first
        others = (rows < 0) | (rows >= len(self.weight))
        x = F.embedding(rows.masked_fill(others, 0), self.weight)
        return self._vocabulary.ranks.scatter(x.masked_fill(others[..., None], 0))


def _split_part(
    part: nn.Module, name: str, ranks: Ranks, specs: dict[str, ShardSpec], last: str
) -> None:
    """Split attention or feed-forward: layers by outputs (whole heads, hidden units), the `last`
    one by inputs.
    """
    for child, linear in list(part.named_children()):
        if not isinstance(linear, nn.Linear):
            continue  # norms of queries and keys, which every rank applies to its own heads
        if child == last:
            _split(
                linear,
                name=f"{name}.{child}",
                kind="weight",
                dim=1,
                ranks=ranks,
                specs=specs,
            )
            setattr(part, child, RowParallelLinear(linear, ranks))
            continue
        _split(
            linear,
            name=f"{name}.{child}",
            kind="weight",
            dim=0,
            ranks=ranks,
            specs=specs,
        )
        if linear.bias is not None:
            _split(
                linear,
                name=f"{name}.{child}",
                kind="bias",
                dim=0,
                ranks=ranks,
                specs=specs,
            )
    part.register_forward_pre_hook(partial(_gather_inputs, ranks))


def _split(
    module: nn.Module, name: str, kind: str, dim: int, ranks: Ranks, specs: dict[str, ShardSpec]
) -> None:
    weight = getattr(module, kind)
    mine = ranks.mine(weight.shape[dim])
    setattr(module, kind, nn.Parameter(weight.detach().narrow(dim, mine.start, len(mine)).clone()))
    specs[f"{name}.{kind}"] = ShardSpec(dim=dim, start=mine.start, global_shape=tuple(weight.shape))


def _gather_inputs(ranks: Ranks, module: nn.Module, arguments: tuple) -> tuple:
    """Before attention and feed-forward: gather all positions, in the format that products will
    have.
    """
    x, *rest = arguments
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return ranks.gather(x), *rest


def _own_positions(ranks: Ranks, module: nn.Module, arguments: tuple, y: Tensor) -> Tensor:
    """[..., T, d] → this rank's positions of it."""
    if not ranks.splits_positions:
        return y
    return y.unflatten(-2, (ranks.count, -1)).select(-3, ranks.index)
