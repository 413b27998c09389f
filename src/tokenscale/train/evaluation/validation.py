"""Validation of a model: loss and accuracy on held-out sequences, and the scores of evaluate."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tokenscale.data.batches.open import HeldOutSlice
from tokenscale.data.order.permutation import micro_steps
from tokenscale.data.stores.documents import IGNORED
from tokenscale.train.models.attention import Bounds
from tokenscale.train.models.losses import linear_scores
from tokenscale.train.models.objective import LanguageModel, micro_batch
from tokenscale.train.parallel.sharding import Mesh, ParallelModel


@dataclass(frozen=True)
class ValidationSums:
    """Sums over the held-out slice: loss (nats), useful labels, and labels with the largest logit
    (or None).
    """

    loss_sum: float
    useful_tokens: int
    correct_tokens: int | None


def add_sums(sums: Sequence[ValidationSums]) -> ValidationSums:
    """Return the sums over several slices."""
    correct = [found.correct_tokens for found in sums if found.correct_tokens is not None]
    return ValidationSums(
        loss_sum=sum(found.loss_sum for found in sums),
        useful_tokens=sum(found.useful_tokens for found in sums),
        correct_tokens=sum(correct) if len(correct) == len(sums) else None,
    )


@torch.no_grad()
def validate(
    parallel: ParallelModel,
    data: HeldOutSlice,
    micro_batch_size: int,
    mesh: Mesh,
    autocast: Callable[[], AbstractContextManager],
    *,
    accuracy: bool = False,
) -> ValidationSums:
    """Return the sums over the whole slice, on every rank. A collective: every rank must call it.

    All ranks run equally many forward passes, since some layouts communicate in each. Ranks that
    read the same rows all compute their loss, and one of them counts it. `accuracy` costs the
    products of the output head once more.
    """
    world = mesh.world
    objective = parallel.objective
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    useful = 0
    objective.correct = (
        torch.zeros((), dtype=torch.int64, device=world.device) if accuracy else None
    )
    parallel.module.eval()
    passes = micro_steps(
        data.global_rows, world_size=mesh.layout.data_parallel_size, micro_batch=micro_batch_size
    )
    for start in range(0, passes * micro_batch_size, micro_batch_size):
        rows = slice(start, start + micro_batch_size)
        with autocast():
            total += parallel.loss(micro_batch(data, rows, device=world.device))
        useful += data.count(data.labels_bt[rows])
    parallel.module.train()
    correct = objective.correct
    objective.correct = None
    if correct is not None and parallel.pipeline is not None:
        parallel.pipeline.broadcast_from_last(correct)
    counts = mesh.place.is_group_leader
    sums = [
        total.item() * counts,
        float(useful * counts),
        float(correct.item() * counts) if correct is not None else 0.0,
    ]
    loss_sum, useful_tokens, correct_tokens = world.sum(*sums)
    return ValidationSums(
        loss_sum=loss_sum,
        useful_tokens=int(useful_tokens),
        correct_tokens=int(correct_tokens) if accuracy else None,
    )


#: windows that are sorted by length before they are put into batches: few positions are then
#: padding
BLOCK_WINDOWS = 1024
#: positions whose logits exist at once
CHUNK = 1024


@dataclass(frozen=True)
class Rows:
    """Rows to be scored: tokens and labels int64 [n, T], -100 where a label does not count; where
    attention stays inside documents, document ids int32 [n, T]; and the rows' numbers in what they
    come from.
    """

    tokens_bt: np.ndarray
    labels_bt: np.ndarray
    document_ids_bt: np.ndarray | None = None
    numbers: np.ndarray | None = None


@dataclass
class Scores:
    """Sums over the scored rows. `text_bytes` are the UTF-8 bytes of the text that the useful
    tokens spell, where they were counted, `text_sample` what the tokenizer loses of it
    (`tokenizers.losses.measure`).
    """

    loss_sum: float = 0.0
    useful_tokens: int = 0
    correct: int = 0
    rows: int = 0
    text_bytes: int | None = None
    text_sample: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def loss(self) -> float:
        """Return the mean of -log p(label) in nats per useful token."""
        return self.loss_sum / self.useful_tokens

    @property
    def perplexity(self) -> float:
        """Return exp(loss) (Jelinek et al. 1977); it depends on the tokenizer."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Return the text's total bits per byte of text, comparable between tokenizers (The Pile,
        Gao et al. 2020, section 3.1). None where bytes are not known.
        """
        return None if self.text_bytes is None else self.loss_sum / math.log(2) / self.text_bytes

    @property
    def accuracy(self) -> float:
        """Return the share of the useful labels that have the largest logit."""
        return self.correct / self.useful_tokens


@torch.no_grad()
def scores(
    model: LanguageModel,
    batches: Iterable[Rows],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    report: Callable[[int], None] | None = None,
) -> Scores:
    """Score every row of the batches by a model of `models.build`; logits exist for a chunk of
    positions at a time.

    `report` hears of the rows that are done. Dropout is off meanwhile.
    """
    found = Scores()
    training = model.training
    model.eval()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for batch in batches:
        tokens = torch.from_numpy(batch.tokens_bt).to(device)
        labels = torch.from_numpy(batch.labels_bt).to(device)
        ids = batch.document_ids_bt
        bounds = None if ids is None else Bounds(torch.from_numpy(ids), device)
        with autocast():
            loss, right = linear_scores(
                model.hidden(tokens, bounds),
                head=model.head,
                labels_bt=labels,
                chunk=CHUNK,
            )
        loss_sum += loss
        correct += right
        found.useful_tokens += int(np.count_nonzero(batch.labels_bt != IGNORED))
        found.rows += len(batch.tokens_bt)
        if report is not None:
            report(found.rows)
    model.train(training)
    found.loss_sum = loss_sum.item()
    found.correct = int(correct.item())
    return found


def windows(document: np.ndarray, sequence_length: int) -> Iterator[np.ndarray]:
    """The pieces of a document [n], at most `sequence_length` + 1 tokens each: they overlap by one,
    so that each token but the first is predicted once. As packed rows cut it.

    >>> [window.tolist() for window in windows(np.arange(6), 2)]
    [[0, 1, 2], [2, 3, 4], [4, 5]]
    """
    for begin in range(0, max(len(document) - 1, 0), sequence_length):
        yield document[begin : begin + sequence_length + 1]


def rows_of_documents(
    documents: Iterable[np.ndarray], sequence_length: int, rows: int, *, padded: bool = True
) -> Iterator[Rows]:
    """Batches of at most `rows` windows, each a row of its own; nothing is left out. Windows of
    about a length come together, padded on the right, which causal attention does not see. Not
    `padded`: only windows of one length do.
    """
    block: list[tuple[int, np.ndarray]] = []
    number = 0
    for document in documents:
        for window in windows(document, sequence_length):
            block.append((number, window))
            number += 1
        if len(block) >= BLOCK_WINDOWS:
            yield from _batched(block, rows, padded=padded)
            block = []
    yield from _batched(block, rows, padded=padded)


def _batched(block: list[tuple[int, np.ndarray]], rows: int, padded: bool) -> Iterator[Rows]:
    block.sort(key=lambda item: -len(item[1]))
    begin = 0
    while begin < len(block):
        width = len(block[begin][1])
        part = [item for item in block[begin : begin + rows] if padded or len(item[1]) == width]
        tokens = np.zeros((len(part), width - 1), dtype=np.int64)
        labels = np.full_like(tokens, IGNORED)
        for row, (_, window) in enumerate(part):
            tokens[row, : len(window) - 1] = window[:-1]
            labels[row, : len(window) - 1] = window[1:]
        yield Rows(
            tokens_bt=tokens, labels_bt=labels, numbers=np.array([number for number, _ in part])
        )
        begin += len(part)
