"""Shapes of decoders."""

from dataclasses import dataclass, fields, replace
from typing import Literal

from tokenscale.base.errors import UserError
from tokenscale.settings.options import NAME, STRICT, option

#: fields that mean nothing for a model of `transformers`: its own configuration decides
OWN = (
    "tied_embeddings",
    "rope_theta",
    "norm_epsilon",
    "initial_deviation",
    "norm",
    "positions",
    "activation",
    "biases",
    "rope_scaling",
)


@dataclass(frozen=True)
class ModelSettings:
    """A decoder. By default Llama's: RMSNorm before each part, rotary positions, SwiGLU, no biases; with `norm: layer`,
    `positions: learned`, `activation: gelu` and `biases` GPT-2's. By `transformers`, a model of that library."""

    __pydantic_config__ = STRICT

    name: str = option("custom", "label; a preset's name", science=False, pattern=NAME)
    dimension: int = option(64, "width of the residual stream", ge=8, strict=True)
    layers: int = option(2, "number of blocks", ge=1, strict=True)
    heads: int = option(4, "query heads a layer", ge=1, strict=True)
    key_value_heads: int = option(2, "key and value heads a layer; divides `heads`", ge=1, strict=True)
    hidden: int = option(192, "width of the feed-forward part", ge=1, strict=True)
    vocabulary_size: int | None = option(None, "rows of the embedding; by default the tokenizer's size", ge=2)
    tied_embeddings: bool = option(False, "one matrix for the input embedding and the output head")
    rope_theta: float = option(500_000.0, "base of the rotary frequencies", gt=0)
    norm_epsilon: float = option(1e-5, "added to the mean square, or to the variance, in a norm", gt=0)
    initial_deviation: float = option(0.02, "standard deviation of the initial weights (GPT-2's)", gt=0)
    norm: Literal["rms", "layer"] = option("rms", "RMSNorm, or LayerNorm (with a bias where `biases`)")
    positions: Literal["rotary", "learned"] = option(
        "rotary", "rotary embedding of queries and keys, or a learned vector a position"
    )
    maximum_positions: int | None = option(
        None, "learned: rows of the table; by default the sequence length", ge=1, strict=True
    )
    activation: Literal["swiglu", "gelu"] = option("swiglu", "gated feed-forward, or GELU (tanh approximation)")
    biases: bool = option(False, "biases in the linear layers and in LayerNorm")
    dropout: float = option(0.0, "share dropped of the embeddings, of attention's weights and of each part", ge=0, lt=1)
    rope_scaling: Literal["none", "llama3"] = option("none", "llama3: the slowed frequencies of Llama 3.2 (factor 32)")
    transformers: str | None = option(
        None,
        "a model type of the library `transformers` (distilbert, bert, qwen2, …), built by its own configuration from "
        "dimension, layers, heads, key_value_heads, hidden and vocabulary_size; null: the decoder of this project",
        pattern=r"^[a-z0-9][a-z0-9_-]*$",
    )

    @property
    def head_dimension(self) -> int:
        """Width of one head."""
        return self.dimension // self.heads

    def problems(self) -> list[tuple[str, str]]:
        """(field, what is wrong) for every rule that two fields break together."""
        found = []
        if self.dimension % self.heads or (self.positions == "rotary" and self.head_dimension % 2):
            found.append(("heads", f"{self.heads} heads do not cut dimension {self.dimension} into even, equal widths"))
        if self.heads % self.key_value_heads:
            found.append(("key_value_heads", f"{self.key_value_heads} does not divide heads = {self.heads}"))
        rotary = self.positions == "rotary"
        if self.transformers is None and rotary and self.maximum_positions is not None:
            found.append(("maximum_positions", "rotary positions have no table"))
        if self.rope_scaling != "none" and not rotary:
            found.append(("rope_scaling", "learned positions do not turn"))
        if self.transformers is not None:
            stated = next((f.name for f in fields(self) if f.name in OWN and getattr(self, f.name) != f.default), None)
            if stated is not None:
                found.append((stated, f"a model of transformers ({self.transformers}) has its own: leave it out"))
        return found

    def with_positions(self, sequence_length: int) -> "ModelSettings":
        """The same shape with a table of positions as long as the sequence, where learned ones are not counted."""
        counted = self.maximum_positions is not None or (self.positions == "rotary" and self.transformers is None)
        return self if counted else replace(self, maximum_positions=sequence_length)

    def check_positions(self, sequence_length: int) -> None:
        """Raise UserError where a table of positions is shorter than the sequence."""
        if self.maximum_positions is not None and self.maximum_positions < sequence_length:
            raise UserError(
                "the model has fewer positions than the sequence is long.",
                model=f"{self.name} has maximum_positions {self.maximum_positions}",
                requested=f"sequence_length {sequence_length}",
                next="shorten the sequence, or raise model.maximum_positions",
            )

    def with_vocabulary(self, size: int) -> "ModelSettings":
        """The same shape with the tokenizer's vocabulary where none was stated."""
        return self if self.vocabulary_size is not None else replace(self, vocabulary_size=size)
