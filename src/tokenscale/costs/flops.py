"""Floating-point operations of a decoder, counted from its settings: never from a module, so that wrapping or compiling
cannot change them."""

from enum import Enum

from tokenscale.settings.model import ModelSettings


class Convention(Enum):
    """How attention is counted: over the full square of positions, or only over those a causal mask leaves."""

    FULL = "full"
    CAUSAL = "causal"


def parameters(model: ModelSettings) -> int:
    """All weights of the decoder, embeddings included. The vocabulary must be known (`with_vocabulary`).

    >>> from tokenscale.settings.presets import PRESETS
    >>> parameters(PRESETS["llama-8b-nemo"])
    8053329920
    """
    embeddings = (1 if model.tied_embeddings else 2) * _vocabulary(model) * model.dimension
    norms = (2 * model.layers + 1) * model.dimension
    return embeddings + norms + model.layers * _block(model)


def matmul_parameters(model: ModelSettings) -> int:
    """Weights that enter a matrix product for each token: blocks and output head, not the input embedding or norms."""
    return model.layers * _block(model) + _vocabulary(model) * model.dimension


def _block(model: ModelSettings) -> int:
    key_value = model.key_value_heads * model.head_dimension
    return 2 * model.dimension**2 + 2 * model.dimension * key_value + 3 * model.dimension * model.hidden


def _vocabulary(model: ModelSettings) -> int:
    if model.vocabulary_size is None:
        raise ValueError("the vocabulary size is not resolved yet")
    return model.vocabulary_size


def flops_per_token(model: ModelSettings, sequence_length: int, convention: Convention) -> float:
    """Training FLOPs per token (forward and backward), without recomputation.

    6 N + 12 L d T (PaLM, Chowdhery et al. 2022, appendix B): N are all weights but the input embedding (norms
    included, as the source studies count them), d = heads x head width, T the sequence length. `CAUSAL` halves the
    attention term.

    >>> from tokenscale.settings.presets import PRESETS
    >>> round(flops_per_token(PRESETS["llama-8b-nemo"], 2048, Convention.FULL) / 1e9, 2)
    48.32
    >>> round(flops_per_token(PRESETS["llama-1.4b-nemo"], 2048, Convention.FULL) / 1e9, 2)
    7.65
    """
    counted = matmul_parameters(model) + (2 * model.layers + 1) * model.dimension
    attention = 12 * model.layers * model.dimension * sequence_length
    return 6 * counted + (attention if convention is Convention.FULL else attention / 2)
