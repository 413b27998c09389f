"""The interface that every model offers to the trainer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokenscale.settings.model import ModelSettings
from tokenscale.train.models.attention import Bounds


@dataclass
class LayerKVCache:
    """Keys and values [B, key_value_heads, T, head width] of one layer, of which `length` positions are filled."""

    keys: Tensor
    values: Tensor
    length: int

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the next positions' keys and values in place; return all so far, as views."""
        end = self.length + key.shape[2]
        self.keys[:, :, self.length : end] = key
        self.values[:, :, self.length : end] = value
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass
class KVCache:
    """Keys and values of all positions read so far: [layers, B, heads, T, head width]. `layers` are their numbers."""

    keys: Tensor
    values: Tensor
    layers: tuple[int, ...]
    length: int = 0

    def of(self, layer: int) -> LayerKVCache:
        index = self.layers.index(layer)
        return LayerKVCache(self.keys[index], self.values[index], self.length)


class OutputHead(nn.Linear):
    """The output head [.., d] → [.., V], whose weight is also read by losses that compute product and loss together."""

    def read(self, function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        """Call a function that reads the weight. FSDP gathers the weight of a head in its own group for this call."""
        return function(*arguments)


class LanguageModel(nn.Module):
    """Token ids [B, T] → logits [B, T, V]: the project's own decoder, or a model of the library `transformers`."""

    #: the shape, with nothing left open
    settings: ModelSettings
    sequence_length: int
    #: equal blocks, one after another
    blocks: nn.ModuleList
    #: the output head
    head: nn.Linear

    def hidden(self, tokens_bt: Tensor, bounds: Bounds | None = None) -> Tensor:
        """[B, T] → [B, T, d], the input of the output head."""
        raise NotImplementedError

    def forward(self, tokens_bt: Tensor, bounds: Bounds | None = None) -> Tensor:
        """[B, T] → [B, T, V]."""
        return self.head(self.hidden(tokens_bt, bounds))

    def new_cache(self, rows: int, length: int, device: torch.device) -> KVCache | None:
        """Return an empty cache for `length` positions of `rows` rows; None where a model reads every row anew."""
        return None

    def next_logits(self, tokens_bt: Tensor, cache: KVCache | None = None) -> Tensor:
        """[B, T] → [B, V], the logits of the token behind each row."""
        return self.head(self.hidden(tokens_bt)[:, -1])

    def any_unfinished(self, unfinished: bool) -> bool:
        """Return whether this rank, or one whose forward passes need this rank's, still has text to generate."""
        return unfinished
