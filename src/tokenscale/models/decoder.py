"""A Llama-style decoder, top to bottom. It knows nothing of parallelism, precision or loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenscale.settings.model import ModelSettings


class RMSNorm(nn.Module):
    """Root-mean-square layer norm (Zhang & Sennrich 2019), computed in fp32."""

    def __init__(self, dimension: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dimension))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] → [..., d]."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.epsilon).to(x.dtype)


def rotary_tables(length: int, head_dimension: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, head_dimension / 2] of rotary position embedding (Su et al. 2021)."""
    frequencies = theta ** (-torch.arange(0, head_dimension, 2, dtype=torch.float64) / head_dimension)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of x [B, heads, T, d] by each position's angles (Llama in transformers)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with grouped queries (Ainslie et al. 2023) and rotary positions."""

    def __init__(self, model: ModelSettings):
        super().__init__()
        self.heads, self.key_value_heads, self.head_dimension = model.heads, model.key_value_heads, model.head_dimension
        width = model.key_value_heads * model.head_dimension
        self.query = nn.Linear(model.dimension, model.dimension, bias=False)
        self.key = nn.Linear(model.dimension, width, bias=False)
        self.value = nn.Linear(model.dimension, width, bias=False)
        self.output = nn.Linear(model.dimension, model.dimension, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[B, T, d] → [B, T, d]."""
        rows, length, dimension = x.shape

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(rows, length, heads, self.head_dimension).transpose(1, 2)

        query = rotate(split(self.query(x), self.heads), cosine, sine)
        key = rotate(split(self.key(x), self.key_value_heads), cosine, sine)
        value = split(self.value(x), self.key_value_heads)
        grouped = self.heads != self.key_value_heads
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.output(y.transpose(1, 2).reshape(rows, length, dimension))


class SwiGLU(nn.Module):
    """Gated feed-forward (Shazeer 2020)."""

    def __init__(self, model: ModelSettings):
        super().__init__()
        self.gate = nn.Linear(model.dimension, model.hidden, bias=False)
        self.up = nn.Linear(model.dimension, model.hidden, bias=False)
        self.down = nn.Linear(model.hidden, model.dimension, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] → [B, T, d]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, model: ModelSettings):
        super().__init__()
        self.attention_norm = RMSNorm(model.dimension, model.norm_epsilon)
        self.attention = Attention(model)
        self.feed_forward_norm = RMSNorm(model.dimension, model.norm_epsilon)
        self.feed_forward = SwiGLU(model)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[B, T, d] → [B, T, d]."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Token ids [B, T] → logits [B, T, V], for rows of at most `sequence_length` positions.

    The vocabulary size must be resolved (`ModelSettings.with_vocabulary`).
    """

    def __init__(self, model: ModelSettings, sequence_length: int):
        super().__init__()
        if model.vocabulary_size is None:
            raise ValueError("the vocabulary size is not resolved yet")
        self.settings = model
        self.embedding = nn.Embedding(model.vocabulary_size, model.dimension)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = RMSNorm(model.dimension, model.norm_epsilon)
        self.head = nn.Linear(model.dimension, model.vocabulary_size, bias=False)
        if model.tied_embeddings:
            self.head.weight = self.embedding.weight
        cosine, sine = rotary_tables(sequence_length, model.head_dimension, model.rope_theta)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """[B, T] → [B, T, V]."""
        length = tokens_bt.shape[1]
        cosine, sine = self.cosine[:length], self.sine[:length]
        x = self.embedding(tokens_bt)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return self.head(self.norm(x))


def initialise(model: Decoder, seed: int) -> None:
    """Set every weight from the seed alone, the same on any rank, device and thread count.

    Normal with `initial_deviation`; what writes into the residual stream is scaled by 1/sqrt(2 layers) (GPT-2,
    Radford et al. 2019). Norms stay at one.
    """
    generator = torch.Generator().manual_seed(seed)
    deviation, layers = model.settings.initial_deviation, model.settings.layers
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                continue
            residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            scale = deviation / (2 * layers) ** 0.5 if residual else deviation
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
