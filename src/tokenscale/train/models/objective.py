"""Training objectives: a model and its loss as one module, so that DDP and FSDP wrap both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from tokenscale.settings.model import ModelSettings
from tokenscale.train.collectives import Vocabulary
from tokenscale.train.compilation import compile_function
from tokenscale.train.models.attention import Bounds
from tokenscale.train.models.losses import (
    IGNORED,
    correct_labels,
    head_cross_entropy_sum,
    linear_cross_entropy_sum,
)

if TYPE_CHECKING:
    from tokenscale.data.batches.batch import Batch
    from tokenscale.data.batches.open import HeldOutSlice


@dataclass
class LayerKVCache:
    """Keys and values [B, key_value_heads, T, head width] of one layer, of which `length` positions
    are filled.
    """

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
    """Keys and values of all positions read so far: [layers, B, heads, T, head width]. `layers` are
    their numbers.
    """

    keys: Tensor
    values: Tensor
    layers: tuple[int, ...]
    length: int = 0

    def of(self, layer: int) -> LayerKVCache:
        index = self.layers.index(layer)
        return LayerKVCache(keys=self.keys[index], values=self.values[index], length=self.length)


class OutputHead(nn.Linear):
    """The output head [.., d] → [.., V], whose weight is also read by losses that compute product
    and loss together.
    """

    def read(self, function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        """Call a function that reads the weight. FSDP gathers the weight of a head in its own group
        for this call.
        """
        return function(*arguments)


class LanguageModel(nn.Module):
    """Token ids [B, T] → logits [B, T, V]: the project's own decoder, or a model of the library
    `transformers`.
    """

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
        """Return an empty cache for `length` positions of `rows` rows; None where a model reads
        every row anew.
        """
        return None

    def next_logits(self, tokens_bt: Tensor, cache: KVCache | None = None) -> Tensor:
        """[B, T] → [B, V], the logits of the token behind each row."""
        return self.head(self.hidden(tokens_bt)[:, -1])

    def any_unfinished(self, unfinished: bool) -> bool:
        """Return whether this rank, or one whose forward passes need this rank's, still has text to
        generate.
        """
        return unfinished


class Objective(nn.Module):
    """(tokens [B, T], labels [B, T]) → the sum over the useful labels of -log p(label), in nats; a
    scalar in fp32.

    Labels stand where the model answers: shifted by one already for causal models, at the masked
    place for masked ones; -100 does not count. `model` is one of `models.build`. `loss_chunk`:
    positions whose logits exist at once; 0: all. `compiled`: the output head's products and the
    loss are compiled as one graph. `correct`: while it is a tensor, every pass adds to it how many
    useful labels have the largest logit.

    Another objective overrides `forward`; what its loss is a sum of, `RowChange.count` counts. A
    pipeline calls `loss`, and tensor parallelism splits what `loss` uses: an objective that needs
    the whole model has `whole` in the registry.
    """

    def __init__(self, model: LanguageModel, *, loss_chunk: int = 0, compiled: bool = False):
        super().__init__()
        self.model: LanguageModel = model
        self.loss_chunk = loss_chunk
        self.compiled = compiled
        self.correct: Tensor | None = None
        #: set by tensor parallelism: the entries of the output head that this rank has
        self.vocabulary: Vocabulary | None = None

    def forward(self, tokens_bt: Tensor, labels_bt: Tensor, bounds: Bounds | None = None) -> Tensor:
        """Return the sum of losses. The trainer divides by the useful tokens of all ranks."""
        return self.loss(self.model.hidden(tokens_bt, bounds), labels_bt)

    def loss(self, hidden_btd: Tensor, labels_bt: Tensor) -> Tensor:
        """Return the same sum from the input of the output head [B, T, d]."""
        if self.vocabulary is not None:
            hidden_btd = self.vocabulary.gather(hidden_btd)
        if isinstance(self.model.head, OutputHead):
            return self.model.head.read(self._loss_of_head, hidden_btd, labels_bt)
        return self._loss_of_head(hidden_btd, labels_bt)

    def _loss_of_head(self, hidden_btd: Tensor, labels_bt: Tensor) -> Tensor:
        head = self.model.head
        chunk = self.loss_chunk
        share = self.vocabulary
        if self.correct is not None:
            self.correct += correct_labels(
                hidden_btd,
                head,
                labels_bt=labels_bt,
                chunk=chunk,
                share=share,
            )
        if chunk == 0 and share is None:
            loss = (
                compile_function(head_cross_entropy_sum)
                if self.compiled
                else head_cross_entropy_sum
            )
            return loss(hidden_btd, head.weight, head.bias, labels_bt)
        return linear_cross_entropy_sum(
            hidden_btd,
            head,
            labels_bt=labels_bt,
            chunk=chunk,
            compiled=self.compiled,
            share=share,
        )

    def next_logits(self, tokens_bt: Tensor, cache: KVCache | None = None) -> Tensor:
        """[B, T] → [B, V], the logits of the token behind each row; see
        `LanguageModel.next_logits`.
        """
        return self.whole_logits(self.model.next_logits(tokens_bt, cache))

    def whole_logits(self, logits_bv: Tensor) -> Tensor:
        """Return the logits of all entries [B, V] from this rank's: under tensor parallelism a
        collective.
        """
        if self.vocabulary is None:
            return logits_bv
        whole = logits_bv.new_zeros(len(logits_bv), self.model.settings.resolved_vocabulary_size)
        whole[:, self.vocabulary.first : self.vocabulary.first + logits_bv.shape[1]] = logits_bv
        return self.vocabulary.sum(whole)


class MicroBatch(NamedTuple):
    """Tokens and labels [B, T] on the device, and the document boundaries where attention stays
    inside documents.
    """

    tokens_bt: Tensor
    labels_bt: Tensor
    bounds: Bounds | None = None


def micro_batch(batch: "Batch | HeldOutSlice", rows: slice, device: torch.device) -> MicroBatch:
    """Copy rows of a batch to the device. Without rows: one with ignored labels, as collectives
    need every rank.
    """
    tokens = torch.from_numpy(batch.tokens_bt[rows])
    labels = torch.from_numpy(batch.labels_bt[rows])
    if len(tokens) == 0:
        tokens = torch.zeros((1, batch.tokens_bt.shape[1]), dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORED)
    bounds = None
    if batch.document_ids_bt is not None:
        ids = torch.from_numpy(batch.document_ids_bt[rows])
        ids = ids if len(ids) else torch.zeros(tokens.shape, dtype=ids.dtype)
        bounds = Bounds(ids, device)
    return MicroBatch(
        tokens_bt=_copy(tokens, device), labels_bt=_copy(labels, device), bounds=bounds
    )


def _copy(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; to a GPU through pinned memory, without waiting. torch keeps that memory
    until the copy is done.
    """
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
