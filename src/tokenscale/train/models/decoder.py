"""The decoder family, top to bottom: Llama's shape and GPT-2's from one config. It knows nothing of
parallelism, precision or loss.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenscale.settings.model import ModelSettings
from tokenscale.train.models.attention import Bounds, attend
from tokenscale.train.models.initial_values import fill_normal
from tokenscale.train.models.objective import KVCache, LanguageModel, LayerKVCache, OutputHead

#: Cosines and sines [T, head width / 2] of the positions of a forward pass; None where positions
#: are learned.
Rotation = tuple[Tensor, Tensor] | None

#: `rope_scaling: llama3` with the numbers of Llama 3.1 and 3.2 (their config.json): positions of
#: the original context, and between how many turns over that context a frequency changes from
#: slowed to kept.
LLAMA3 = {"original_positions": 8192, "low_turns": 1.0, "high_turns": 4.0}


def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """Return a linear layer with unset weights: `initialise` sets them, and billions of numbers are
    not drawn twice.
    """
    return nn.utils.skip_init(
        nn.Linear, inputs, outputs, bias=bias, device=torch.get_default_device()
    )


def new_embedding(rows: int, dimension: int) -> nn.Embedding:
    return nn.utils.skip_init(nn.Embedding, rows, dimension, device=torch.get_default_device())


class RMSNorm(nn.Module):
    """Root-mean-square layer norm (Zhang & Sennrich 2019), computed in fp32."""

    def __init__(self, dimension: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dimension))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] → [..., d]."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.epsilon).to(x.dtype)


def norm_of(model: ModelSettings) -> nn.Module:
    """Return the norm that precedes each part of a block and the output head."""
    if model.norm == "rms":
        return RMSNorm(model.dimension, model.norm_epsilon)
    return nn.LayerNorm(model.dimension, model.norm_epsilon, bias=model.biases)


def rotary_frequencies(model: ModelSettings) -> Tensor:
    """Return the radians per position of each pair in a head [head_dimension / 2] (Su et al. 2021),
    fp64.

    `rope_scaling: llama3` slows the low frequencies down by `rope_factor`, so that positions beyond
    the original context get angles that were seen in it (Llama 3.1, Dubey et al. 2024, section 3.4;
    constants in LLAMA3).
    """
    width = model.head_dimension
    frequencies = model.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if model.rope_scaling == "llama3":
        turns = LLAMA3["original_positions"] * frequencies / (2 * math.pi)
        kept = (turns - LLAMA3["low_turns"]) / (LLAMA3["high_turns"] - LLAMA3["low_turns"])
        kept = kept.clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / model.rope_factor)
    return frequencies


def rotary_tables(length: int, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, head_dimension / 2] of rotary position embedding, fp32 from fp64
    angles.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of x [B, heads, T, d] by each position's angles (Llama in
    transformers).
    """
    # as chunk, whose backward pass fills zeros first
    first, second = x.float().unflatten(-1, (2, -1)).unbind(-2)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(
        x.dtype
    )


class Attention(nn.Module):
    """Attention with grouped queries (Ainslie et al. 2023), causal or over the whole row."""

    def __init__(self, model: ModelSettings, causal: bool, kernel: str):
        super().__init__()
        self.head_dimension = model.head_dimension
        self.dropout = model.dropout
        self.causal = causal
        self.kernel = kernel
        width = model.attention_width
        shared = model.key_value_heads * model.head_dimension
        self.query = linear(model.dimension, outputs=width, bias=model.has_bias("query"))
        self.key = linear(model.dimension, outputs=shared, bias=model.has_bias("key"))
        self.value = linear(model.dimension, outputs=shared, bias=model.has_bias("value"))
        self.output = linear(width, outputs=model.dimension, bias=model.has_bias("output"))
        if model.query_key_norm:
            self.query_norm = RMSNorm(model.head_dimension, model.norm_epsilon)
            self.key_norm = RMSNorm(model.head_dimension, model.norm_epsilon)
        self.query_key_norm = model.query_key_norm

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        bounds: Bounds | None = None,
        past: LayerKVCache | None = None,
    ) -> Tensor:
        """[B, T, d] → [B, T, d]."""
        rows, length, _ = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(rows, length, -1, self.head_dimension).transpose(1, 2)

        query = split(self.query(x))
        key = split(self.key(x))
        value = split(self.value(x))
        if self.query_key_norm:
            query = self.query_norm(query)
            key = self.key_norm(key)
        if rotation is not None:
            query = rotate(query, *rotation)
            key = rotate(key, *rotation)
        if past is not None:
            key, value = past.extend(key, value)
        # one position behind others sees them all; in a prompt each sees those before it
        causal = self.causal and length > 1
        dropout = self.dropout if self.training else 0.0
        y = attend(
            query,
            key,
            value=value,
            bounds=bounds,
            causal=causal,
            kernel=self.kernel,
            dropout=dropout,
        )
        return self.output(y.transpose(1, 2).reshape(rows, length, -1))


class SwiGLU(nn.Module):
    """Gated feed-forward (Shazeer 2020)."""

    def __init__(self, model: ModelSettings):
        super().__init__()
        self.gate = linear(model.dimension, outputs=model.hidden, bias=model.biases)
        self.up = linear(model.dimension, outputs=model.hidden, bias=model.biases)
        self.down = linear(model.hidden, outputs=model.dimension, bias=model.biases)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] → [B, T, d]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GELU(nn.Module):
    """Feed-forward with the Gaussian error linear unit, tanh approximation (Hendrycks & Gimpel
    2016; GPT-2).
    """

    def __init__(self, model: ModelSettings):
        super().__init__()
        self.up = linear(model.dimension, outputs=model.hidden, bias=model.biases)
        self.down = linear(model.hidden, outputs=model.dimension, bias=model.biases)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] → [B, T, d]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, model: ModelSettings, causal: bool, kernel: str):
        super().__init__()
        self.dropout = model.dropout
        self.attention_norm = norm_of(model)
        self.attention = Attention(model=model, causal=causal, kernel=kernel)
        self.feed_forward_norm = norm_of(model)
        self.feed_forward = SwiGLU(model) if model.activation == "swiglu" else GELU(model)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        bounds: Bounds | None = None,
        past: LayerKVCache | None = None,
    ) -> Tensor:
        """[B, T, d] → [B, T, d]."""
        x = x + self._dropped(self.attention(self.attention_norm(x), rotation, bounds, past))
        return x + self._dropped(self.feed_forward(self.feed_forward_norm(x)))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Decoder(LanguageModel):
    """Token ids [B, T] → logits [B, T, V], for rows of at most `sequence_length` positions.

    Weights are unset until `initialise`, or until others are loaded. `causal=False` makes an
    encoder of it, for masked-language modelling: each position sees the whole row. `kernel` is one
    of `models.attention`. The vocabulary must be resolved (`ModelSettings.with_vocabulary`). Raises
    UserError where learned positions are fewer than the sequence is long.
    """

    def __init__(
        self,
        model: ModelSettings,
        sequence_length: int,
        *,
        causal: bool = True,
        kernel: str = "sdpa",
    ):
        super().__init__()
        self.settings = model = model.with_positions(sequence_length)
        self.sequence_length = sequence_length
        self.causal = causal
        self.kernel = kernel
        self.embedding = new_embedding(model.resolved_vocabulary_size, dimension=model.dimension)
        if model.positions == "learned":
            model.check_positions(sequence_length)
            assert model.maximum_positions is not None  # at least those of the sequence
            self.positions = new_embedding(model.maximum_positions, dimension=model.dimension)
        self.blocks = nn.ModuleList(
            Block(model=model, causal=causal, kernel=kernel) for _ in range(model.layers)
        )
        self.norm = norm_of(model)
        device = torch.get_default_device()
        self.head = nn.utils.skip_init(
            OutputHead, model.dimension, model.vocabulary_size, bias=False, device=device
        )
        if model.tied_embeddings:
            self.head.weight = self.embedding.weight
        # Not a buffer: `to(torch.bfloat16)` would round it, `to_empty` would lose it.
        self._rotation: Rotation = None

    def hidden(
        self, tokens_bt: Tensor, bounds: Bounds | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """[B, T] → [B, T, d], the input of the output head. With document boundaries, a row gives
        what its documents give alone.

        With a cache, positions go on from its length, and what is read is added to it: a prompt
        first, then one position at a time.
        """
        start = cache.length if cache else 0
        length = tokens_bt.shape[1]
        if start and length > 1:
            raise ValueError("after the prompt a cache takes one position at a time")
        if start + length > (cache.keys.shape[3] if cache else self.sequence_length):
            raise ValueError(f"{start + length} positions are more than there is room for")
        if bounds is not None:  # here, once, and not in blocks that torch.compile looks into
            bounds.prepare(self.kernel, self.causal)
        x = self.run_blocks(
            self.embed(tokens_bt, bounds, start),
            length,
            bounds,
            cache=cache,
        )
        if cache:
            cache.length += length
        return self.norm(x)

    def embed(self, tokens_bt: Tensor, bounds: Bounds | None = None, start: int = 0) -> Tensor:
        """[B, T] → [B, T, d], the input of the first block; rows begin at position `start`."""
        x = self.embedding(tokens_bt)
        if self.settings.positions == "learned":
            # inside documents positions are those of the document, as if it were a row of its own
            counted = torch.arange(start, start + tokens_bt.shape[1], device=x.device)
            x = x + self.positions(counted if bounds is None else bounds.positions())
        if self.settings.dropout:
            x = F.dropout(x, self.settings.dropout, self.training)
        return x

    def run_blocks(
        self,
        x: Tensor,
        length: int,
        bounds: Bounds | None = None,
        cache: KVCache | None = None,
        layers: range | None = None,
    ) -> Tensor:
        """[B, T, d] → [B, T, d], by all blocks or by those of `layers`; rows have `length`
        positions.
        """
        rotation = self.rotation(cache.length if cache else 0, length, x.device)
        for layer in range(len(self.blocks)) if layers is None else layers:
            x = self.blocks[layer](x, rotation, bounds, cache.of(layer) if cache else None)
        return x

    def rotation(self, start: int, length: int, device: torch.device) -> Rotation:
        """Return cosines and sines of the positions start … start + length − 1; None where
        positions are learned.
        """
        model = self.settings
        if model.positions == "learned":
            return None
        if self._rotation is None or self._rotation[0].device != device:
            tables = rotary_tables(self.sequence_length, frequencies=rotary_frequencies(model))
            self._rotation = (tables[0].to(device), tables[1].to(device))
        return self._rotation[0][start : start + length], self._rotation[1][start : start + length]

    def new_cache(self, rows: int, length: int, device: torch.device) -> KVCache:
        """Return an empty cache for `length` positions of `rows` rows, at most the model's sequence
        length.

        It holds the layers and key-value heads that this model has: all of them, or a rank's.
        """
        if length > self.sequence_length:
            raise ValueError(
                f"the decoder was built for {self.sequence_length} positions, not {length}"
            )
        layers = tuple(layer for layer, block in enumerate(self.blocks) if block is not None)
        weight = cast(Block, self.blocks[layers[0]]).attention.key.weight
        width = self.settings.head_dimension
        shape = (len(layers), rows, weight.shape[0] // width, length, width)
        keys, values = (torch.zeros(shape, dtype=weight.dtype, device=device) for _ in range(2))
        return KVCache(keys=keys, values=values, layers=layers)

    def next_logits(self, tokens_bt: Tensor, cache: KVCache | None = None) -> Tensor:
        """[B, T] → [B, V], the logits of the token behind each row. With a cache, rows continue
        from its positions.
        """
        return self.head(self.hidden(tokens_bt, cache=cache)[:, -1])


def initialise(model: Decoder, seed: int) -> None:
    for name, weight in model.named_parameters():
        initialise_part(
            model.settings,
            seed,
            name=name,
            into=weight,
            offsets=(0,) * weight.dim(),
            whole=tuple(weight.shape),
        )


@torch.no_grad()
def initialise_part(
    model: ModelSettings,
    seed: int,
    name: str,
    into: Tensor,
    offsets: tuple[int, ...],
    whole: tuple[int, ...],
) -> None:
    """Set `into`, the part [offsets, offsets + shape) of a parameter of shape `whole`, from seed
    and name alone: the same values on any rank and device and in any layout.

    Matrices and embeddings: normal with `initial_deviation`; what writes into the residual stream
    is scaled by 1/sqrt(2 layers) (GPT-2, Radford et al. 2019). Norms are one, biases zero.
    """
    if into.dim() < 2:
        into.fill_(0 if name.endswith("bias") else 1)
        return
    residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
    scale = (2 * model.layers) ** -0.5 if residual else 1.0
    fill_normal(
        into,
        seed,
        name=name,
        deviation=model.initial_deviation * scale,
        offsets=offsets,
        whole=whole,
    )
