"""Training objectives: a model and its loss as one module, so that DDP and FSDP wrap both."""

import importlib
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from tokenscale.settings.registry import OBJECTIVES
from tokenscale.train.compilation import compile_function
from tokenscale.train.models.attention import Bounds
from tokenscale.train.models.language_model import KVCache, LanguageModel, OutputHead
from tokenscale.train.models.losses import (
    IGNORED,
    correct_labels,
    head_cross_entropy_sum,
    linear_cross_entropy_sum,
)

if TYPE_CHECKING:
    from tokenscale.train.parallel.tensor import Vocabulary


class Objective(nn.Module):
    """(tokens [B, T], labels [B, T]) → the sum over the useful labels of -log p(label), in nats; a scalar in fp32.

    Labels stand where the model answers: shifted by one already for causal models, at the masked place for masked ones;
    -100 does not count. `model` is one of `models.build`. `loss_chunk`: positions whose logits exist at once; 0: all.
    `compiled`: the output head's products and the loss are compiled as one graph. `correct`: while it is a tensor,
    every pass adds to it how many useful labels have the largest logit.

    Another objective overrides `forward`, and `count` where its loss is not one of labels. A pipeline calls `loss`, and
    tensor parallelism splits what `loss` uses: an objective that needs the whole model has `whole` in the registry.
    """

    def __init__(self, model: LanguageModel, *, loss_chunk: int = 0, compiled: bool = False):
        super().__init__()
        self.model: LanguageModel = model
        self.loss_chunk, self.compiled = loss_chunk, compiled
        self.correct: Tensor | None = None
        #: set by tensor parallelism: the entries of the output head that this rank has
        self.vocabulary: Vocabulary | None = None

    def forward(self, tokens_bt: Tensor, labels_bt: Tensor, bounds: Bounds | None = None) -> Tensor:
        """Return the sum of losses. The trainer divides by the useful tokens of all ranks."""
        return self.loss(self.model.hidden(tokens_bt, bounds), labels_bt)

    @staticmethod
    def count(labels_bt: np.ndarray) -> int:
        """Return the number of labels of held-out rows that count; training batches have it as `useful_tokens`."""
        return int((labels_bt != IGNORED).sum())

    def loss(self, hidden_btd: Tensor, labels_bt: Tensor) -> Tensor:
        """Return the same sum from the input of the output head [B, T, d]."""
        if self.vocabulary is not None:
            hidden_btd = self.vocabulary.gather(hidden_btd)
        if isinstance(self.model.head, OutputHead):
            return self.model.head.read(self._loss_of_head, hidden_btd, labels_bt)
        return self._loss_of_head(hidden_btd, labels_bt)

    def _loss_of_head(self, hidden_btd: Tensor, labels_bt: Tensor) -> Tensor:
        head, chunk, share = self.model.head, self.loss_chunk, self.vocabulary
        if self.correct is not None:
            self.correct += correct_labels(hidden_btd, head, labels_bt, chunk, share=share)
        if chunk == 0 and share is None:
            loss = compile_function(head_cross_entropy_sum) if self.compiled else head_cross_entropy_sum
            return loss(hidden_btd, head.weight, head.bias, labels_bt)
        return linear_cross_entropy_sum(hidden_btd, head, labels_bt, chunk, compiled=self.compiled, share=share)

    def next_logits(self, tokens_bt: Tensor, cache: KVCache | None = None) -> Tensor:
        """[B, T] → [B, V], the logits of the token behind each row; see `LanguageModel.next_logits`."""
        return self.whole_logits(self.model.next_logits(tokens_bt, cache))

    def whole_logits(self, logits_bv: Tensor) -> Tensor:
        """Return the logits of all entries [B, V] from this rank's: under tensor parallelism a collective."""
        if self.vocabulary is None:
            return logits_bv
        whole = logits_bv.new_zeros(len(logits_bv), self.model.settings.vocabulary_size)
        whole[:, self.vocabulary.first : self.vocabulary.first + logits_bv.shape[1]] = logits_bv
        return self.vocabulary.sum(whole)


def objective_of(name: str, model: LanguageModel, *, loss_chunk: int, compiled: bool) -> Objective:
    """Return the objective of this name around a model. Its class is imported by its dotted name, and no other is."""
    goal = OBJECTIVES[name]
    made = Objective if goal.loss is None else getattr(importlib.import_module(goal.module), goal.loss)
    return made(model, loss_chunk=loss_chunk, compiled=compiled)
