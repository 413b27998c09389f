"""Settings of a model."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Literal

from tokenscale.base.errors import UserError
from tokenscale.settings.options import (
    LARGEST_VOCABULARY,
    MOST,
    NAME_PATTERN,
    as_list,
    option,
    settings_class,
)

#: fields that do not apply to a model of `transformers`, which has its own configuration
OWN = [
    "tied_embeddings",
    "rope_theta",
    "norm_epsilon",
    "initial_deviation",
    "norm",
    "positions",
    "activation",
    "biases",
]
OWN += ["attention_biases", "query_key_norm", "head_dim", "rope_scaling", "rope_factor"]

#: linear layers with a bias, by `attention_biases`
ATTENTION_BIASES = {
    None: (),
    "inputs": ("query", "key", "value"),
    "all": ("query", "key", "value", "output"),
}


@settings_class
class ModelSettings:
    """Decoder, or with `transformers` a model of that library.

    The default is Llama's architecture: pre-norm with RMSNorm, rotary positions, SwiGLU, no biases.
    `norm: layer`, `positions: learned`, `activation: gelu` and `biases: true` give GPT-2's.
    """

    name: str = option(
        "custom",
        description="label, such as the name of a preset",
        science=False,
        pattern=NAME_PATTERN,
    )
    dimension: int = option(
        64,
        description="width of the residual stream",
        ge=8,
        le=MOST,
    )
    layers: int = option(
        2,
        description="number of blocks",
        ge=1,
        le=1 << 16,
    )
    heads: int = option(
        4,
        description="query heads per layer",
        ge=1,
        le=MOST,
    )
    key_value_heads: int = option(
        2,
        description="key and value heads per layer; a divisor of `heads`",
        ge=1,
        le=MOST,
    )
    head_dim: int | None = option(
        None,
        description="width of one head; by default dimension / heads",
        ge=1,
        le=MOST,
    )
    hidden: int = option(
        192,
        description="width of the feed-forward layer",
        ge=1,
        le=MOST,
    )
    vocabulary_size: int | None = option(
        None,
        description="embedding rows; else the tokenizer's",
        ge=2,
        le=LARGEST_VOCABULARY,
    )
    tied_embeddings: bool = option(
        False, description="share one matrix between the input embedding and the output head"
    )
    rope_theta: float = option(500_000.0, description="base of the rotary frequencies", gt=0)
    norm_epsilon: float = option(
        1e-5, description="added to the mean square (RMSNorm) or the variance (LayerNorm)", gt=0
    )
    initial_deviation: float = option(
        0.02, description="standard deviation of the initial weights (GPT-2's)", gt=0
    )
    norm: Literal["rms", "layer"] = option(
        "rms", description="rms: RMSNorm; layer: LayerNorm (with a bias if `biases`)"
    )
    positions: Literal["rotary", "learned"] = option(
        "rotary", description="rotary embedding, or learned vectors"
    )
    maximum_positions: int | None = option(
        None,
        description="positions learned: their number; else sequence_length",
        ge=1,
        le=MOST,
    )
    activation: Literal["swiglu", "gelu"] = option(
        "swiglu", description="swiglu: gated feed-forward; gelu: GELU (tanh form)"
    )
    biases: bool = option(False, description="use biases in the linear layers and in LayerNorm")
    attention_biases: Literal["all", "inputs"] | None = option(
        None,
        description=(
            "biases in attention alone; all: its four linear layers; inputs: query, key and value "
            "(Qwen2's)"
        ),
    )
    query_key_norm: bool = option(
        False, description="RMSNorm of each query and key head before the rotation (Qwen3's)"
    )
    dropout: float = option(
        0.0,
        description="dropout of embeddings, attention weights and the output of each sublayer",
        ge=0,
        lt=1,
    )
    rope_scaling: Literal["none", "llama3"] = option(
        "none", description="llama3: scaled rotary frequencies of Llama 3.1 and 3.2"
    )
    rope_factor: float = option(
        32.0,
        description="rope_scaling llama3: divisor of the lowest frequencies; 8 in Llama 3.1",
        ge=1,
    )
    transformers: str | None = option(
        None,
        description="model type of the library `transformers` (distilbert, bert, qwen2, …), built with its "
        "own configuration class "
        "from dimension, layers, heads, key_value_heads, hidden and vocabulary_size; null: this "
        "project's decoder",
        pattern=r"^[a-z0-9][a-z0-9_-]*$",
    )

    @property
    def head_dimension(self) -> int:
        return self.head_dim or self.dimension // self.heads

    @property
    def resolved_vocabulary_size(self) -> int:
        """Vocabulary size of a model `with_vocabulary`. Raises ValueError for one without."""
        if self.vocabulary_size is None:
            raise ValueError("the vocabulary size is not resolved yet")
        return self.vocabulary_size

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dimension

    def has_bias(self, linear: str) -> bool:
        """Return whether a linear layer of a block has a bias, by its name (`query`, `output`,
        `up`, …).
        """
        return self.biases or linear in ATTENTION_BIASES[self.attention_biases]

    @as_list
    def problems(self) -> Iterator[tuple[str, str]]:
        """Violations of rules over several fields, as (field, what is wrong)."""
        odd = self.positions == "rotary" and self.head_dimension % 2
        if self.head_dim is not None and odd:
            yield "head_dim", f"rotary positions need an even width, not {self.head_dim}"
        elif self.head_dim is None and (self.dimension % self.heads or odd):
            yield (
                "heads",
                f"{self.heads} heads do not divide dimension {self.dimension} into even widths",
            )
        if self.biases and self.attention_biases is not None:
            yield "attention_biases", "biases: true covers attention: remove one of the two"
        if self.heads % self.key_value_heads:
            yield "key_value_heads", f"{self.key_value_heads} does not divide heads = {self.heads}"
        yield from self._position_problems()
        if self.transformers is not None:
            yield from self._library_problems()

    def _position_problems(self) -> Iterator[tuple[str, str]]:
        rotary = self.positions == "rotary"
        if self.transformers is None and rotary and self.maximum_positions is not None:
            yield "maximum_positions", "applies to positions: learned only"
        if self.rope_scaling != "none" and not rotary:
            yield "rope_scaling", "applies to positions: rotary only"
        if self.rope_scaling == "none" and self.rope_factor != type(self).rope_factor:
            yield "rope_factor", "applies to rope_scaling: llama3 only"

    def _library_problems(self) -> Iterator[tuple[str, str]]:
        for field in fields(self):
            if field.name in OWN and getattr(self, field.name) != field.default:
                text = f"a model of transformers ({self.transformers}) defines it itself"
                yield field.name, f"{text}: remove it"
                return

    def with_positions(self, sequence_length: int) -> "ModelSettings":
        """Return the model with `maximum_positions` set to the sequence length, if it is needed and
        not set.
        """
        counted = self.maximum_positions is not None or (
            self.positions == "rotary" and self.transformers is None
        )
        return self if counted else replace(self, maximum_positions=sequence_length)

    def check_positions(self, sequence_length: int) -> None:
        """Raise UserError if the model has fewer positions than the sequence."""
        if self.maximum_positions is not None and self.maximum_positions < sequence_length:
            what = "the model has fewer positions than the sequence."
            following = "shorten the sequence, or use another model"
            has = f"{self.name} has maximum_positions {self.maximum_positions}"
            raise UserError(
                what, requested=f"sequence_length {sequence_length}", model=has, next=following
            )

    def with_vocabulary(self, size: int) -> "ModelSettings":
        """Return the model with the tokenizer's vocabulary size, if none is set."""
        return self if self.vocabulary_size is not None else replace(self, vocabulary_size=size)


def aligned_rows(rows: int, device: str) -> int:
    """Return the rows of an output head's products: on GPUs the next multiple of 128, for tensor
    cores, as in llm.c.
    """
    return rows + -rows % 128 if device == "cuda" else rows
