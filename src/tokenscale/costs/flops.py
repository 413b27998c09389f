"""Weights and FLOPs of a model, counted from its settings: wrapping and compiling do not change them."""

import importlib
from dataclasses import dataclass
from enum import Enum

from tokenscale.settings.model import ModelSettings
from tokenscale.settings.registry import OBJECTIVES


class Convention(Enum):
    """Convention of counting attention: all pairs of positions, or those within a causal mask."""

    FULL = "full"
    CAUSAL = "causal"


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


def weights(model: ModelSettings) -> Weights:
    """Count the weights of a model. Vocabulary (`with_vocabulary`) and learned positions (`with_positions`) must be
    resolved. A model of `transformers` is built on the meta device and counted.
    """
    if model.transformers is not None:
        return importlib.import_module("tokenscale.train.models.library").weights(model)  # a layer above: by name
    if model.vocabulary_size is None:
        raise ValueError("the vocabulary size is not resolved yet")
    if model.positions == "learned" and model.maximum_positions is None:
        raise ValueError("the number of positions is not resolved yet")
    wide, inner, key_value = model.dimension, model.hidden, model.key_value_heads * model.head_dimension
    feeding = 3 if model.activation == "swiglu" else 2
    matrices = 2 * wide * model.attention_width + 2 * wide * key_value + feeding * wide * inner
    outputs = {"query": model.attention_width, "key": key_value, "value": key_value, "output": wide}
    biases = sum(width for name, width in outputs.items() if model.has_bias(name))
    biases += wide + (feeding - 1) * inner if model.biases else 0  # down, and up with its gate
    head_norms = 2 * model.head_dimension if model.query_key_norm else 0
    norm = 2 * wide if model.norm == "layer" and model.biases else wide
    blocks = model.layers * (matrices + biases + head_norms + 2 * norm)
    embedding = model.vocabulary_size * wide
    positions = model.maximum_positions * wide if model.positions == "learned" else 0
    untied = 0 if model.tied_embeddings else embedding
    return Weights(
        total=embedding + untied + positions + blocks + norm,
        looked_up=untied + positions,
        matrices=model.layers * matrices + embedding,
        blocks=blocks,
    )


def parameters(model: ModelSettings) -> int:
    return weights(model).total


def flops_per_token(
    model: ModelSettings, sequence_length: int, convention: Convention, objective: str = "causal"
) -> float:
    """Return training FLOPs per token (forward and backward), without recomputation.

    6 N + 12 L d T (PaLM, Chowdhery et al. 2022, appendix B): N counts all weights except lookup tables (including norms
    and biases, as in the source studies), d = heads x head width, T is the sequence length. `CAUSAL` halves the
    attention term; objective `masked` has no causal mask, so both conventions count attention in full.
    """
    count = weights(model)
    whole = 6 * (count.total - count.looked_up) + 3 * _attention(model, sequence_length, convention, objective)
    return OBJECTIVES[objective].flops * whole


def hardware_flops_per_token(
    model: ModelSettings, sequence_length: int, convention: Convention, checkpointing: str, objective: str = "causal"
) -> float:
    """Return the FLOPs per token that are computed, for HFU: training FLOPs plus recomputation.

    `block` recomputes the forward pass of each block (8 N instead of 6 N in the blocks: Korthikanti et al. 2022); the
    output head is outside of the blocks. `selective` keeps matrix products and attention, and adds nothing. By
    convention, recomputation inside attention kernels does not count.
    """
    trained = flops_per_token(model, sequence_length, convention, objective)
    if checkpointing != "block":
        return trained
    return trained + 2 * weights(model).blocks + _attention(model, sequence_length, convention, objective)


def _attention(model: ModelSettings, sequence_length: int, convention: Convention, objective: str) -> float:
    full = 4 * model.layers * model.attention_width * sequence_length
    return full / 2 if convention is Convention.CAUSAL and OBJECTIVES[objective].causal else float(full)
