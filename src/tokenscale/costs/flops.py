"""Weights and FLOPs of a model, counted from its settings: wrapping and compiling do not change
them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import NamedTuple

from tokenscale.settings.model import ModelSettings
from tokenscale.settings.registry import OBJECTIVES


class Convention(Enum):
    """Convention of counting attention: all pairs of positions, or those within a causal mask."""

    FULL = "full"
    CAUSAL = "causal"


class Weight(NamedTuple):
    """One tensor of the model. `layer` is None outside of blocks; tensor parallelism shards
    dimension `cut`.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None
    layer: int | None = None


@dataclass(frozen=True)
class Weights:
    """Numbers of a model's weights by kind; each weight counts once."""

    total: int
    #: in lookup tables: positions, and the input embedding if it is not tied to the output head
    looked_up: int
    #: in the matrices of linear layers, including the output head
    matrices: int
    #: in the blocks, which activation checkpointing recomputes
    blocks: int


@dataclass(frozen=True)
class CountedModel(ModelSettings):
    """A model of `transformers`, whose weights only the library can count
    (`train.models.library.count_weights`), with the numbers of them.
    """

    counted: Weights | None = None


class UncountedModelError(ValueError):
    """The weights of a model of `transformers` have not been counted."""


def weights(model: ModelSettings) -> Weights:
    """Count the weights of a model. Vocabulary (`with_vocabulary`) and learned positions
    (`with_positions`) must be resolved. Raises UncountedModelError for a model of `transformers`
    that is no `CountedModel`.
    """
    if isinstance(model, CountedModel) and model.counted is not None:
        return model.counted
    if model.transformers is not None:
        raise UncountedModelError(f"the weights of {model.transformers} are not counted")
    found = list(list_weights(replace(model, layers=1)))  # all blocks have equal shapes
    others = {weight.name: prod(weight.shape) for weight in found if weight.layer is None}
    block = [weight.shape for weight in found if weight.layer is not None]
    blocks = model.layers * sum(map(prod, block))
    matrices = model.layers * sum(prod(shape) for shape in block if len(shape) == 2)
    looked_up = others.get("positions", 0) + (0 if model.tied_embeddings else others["embedding"])
    return Weights(
        total=sum(others.values()) + blocks,
        looked_up=looked_up,
        matrices=matrices + others["embedding"],
        blocks=blocks,
    )


def list_weights(model: ModelSettings) -> Iterator[Weight]:
    """Yield all weights of a model in the order of its definition."""
    wide = model.dimension
    inner = model.hidden
    key_value = model.key_value_heads * model.head_dimension

    def norm(name: str, layer: int | None = None) -> Iterator[Weight]:
        yield Weight(
            name=f"{name}.weight",
            shape=(wide,),
            cut=None,
            layer=layer,
        )
        if model.norm == "layer" and model.biases:
            yield Weight(
                name=f"{name}.bias",
                shape=(wide,),
                cut=None,
                layer=layer,
            )

    up = ("gate", "up") if model.activation == "swiglu" else ("up",)
    heads = model.attention_width
    linears = [
        ("query", heads, wide, 0),
        ("key", key_value, wide, 0),
        ("value", key_value, wide, 0),
    ]
    linears += [
        ("output", wide, heads, 1),
        *((name, inner, wide, 0) for name in up),
        ("down", wide, inner, 1),
    ]
    yield Weight(name="embedding", shape=(model.resolved_vocabulary_size, wide), cut=0)
    if model.positions == "learned":
        if model.maximum_positions is None:
            raise ValueError("the number of positions is not resolved yet")
        yield Weight(name="positions", shape=(model.maximum_positions, wide), cut=None)
    for layer in range(model.layers):
        yield from norm("attention_norm", layer)
        yield from norm("feed_forward_norm", layer)
        if model.query_key_norm:
            yield Weight(
                name="query_norm.weight",
                shape=(model.head_dimension,),
                cut=None,
                layer=layer,
            )
            yield Weight(
                name="key_norm.weight",
                shape=(model.head_dimension,),
                cut=None,
                layer=layer,
            )
        for name, outputs, inputs, cut in linears:
            yield Weight(
                name=f"{name}.weight",
                shape=(outputs, inputs),
                cut=cut,
                layer=layer,
            )
            if model.has_bias(name):
                yield Weight(
                    name=f"{name}.bias",
                    shape=(outputs,),
                    cut=0 if cut == 0 else None,
                    layer=layer,
                )
    yield from norm("norm")
    if not model.tied_embeddings:
        yield Weight(name="head", shape=(model.resolved_vocabulary_size, wide), cut=0)


def parameters(model: ModelSettings) -> int:
    return weights(model).total


def flops_per_token(
    model: ModelSettings, sequence_length: int, convention: Convention, objective: str = "causal"
) -> float:
    """Return training FLOPs per token (forward and backward), without recomputation.

    6 N + 12 L d T (PaLM, Chowdhery et al. 2022, appendix B): N counts all weights except lookup
    tables (including norms and biases, as in the source studies), d = heads x head width, T is the
    sequence length. `CAUSAL` halves the attention term; objective `masked` has no causal mask, so
    both conventions count attention in full.
    """
    count = weights(model)
    whole = 6 * (count.total - count.looked_up) + 3 * _attention(
        model,
        sequence_length,
        convention=convention,
        objective=objective,
    )
    return OBJECTIVES[objective].flops * whole


def hardware_flops_per_token(
    model: ModelSettings,
    sequence_length: int,
    convention: Convention,
    checkpointing: str,
    objective: str = "causal",
) -> float:
    """Return the FLOPs per token that are computed, for HFU: training FLOPs plus recomputation.

    `block` recomputes the forward pass of each block (8 N instead of 6 N in the blocks: Korthikanti
    et al. 2022); the output head is outside of the blocks. `selective` keeps matrix products and
    attention, and adds nothing. By convention, recomputation inside attention kernels does not
    count.
    """
    trained = flops_per_token(
        model,
        sequence_length,
        convention=convention,
        objective=objective,
    )
    if checkpointing != "block":
        return trained
    return (
        trained
        + 2 * weights(model).blocks
        + _attention(
            model,
            sequence_length,
            convention=convention,
            objective=objective,
        )
    )


def _attention(
    model: ModelSettings, sequence_length: int, convention: Convention, objective: str
) -> float:
    full = 4 * model.layers * model.attention_width * sequence_length
    return (
        full / 2
        if convention is Convention.CAUSAL and OBJECTIVES[objective].causal
        else float(full)
    )
