"""What a run predicts: objectives and choices of labels, applied to the batches of any approach."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.data.batches.batch import Batch, Batches, Inputs, WrappedBatches
from tokenscale.data.batches.stored import corpus_manifest
from tokenscale.data.batches.streams import list_sources
from tokenscale.data.corpus.raw_text import read_corpus_manifest
from tokenscale.data.order.permutation import mix64, rank_slots
from tokenscale.data.stores.documents import IGNORED
from tokenscale.data.stores.manifest import read_store_manifest
from tokenscale.data.tokenizers.base import read_tokenizer_manifest
from tokenscale.settings.run import RunSettings

#: shares of the chosen tokens that become the mask token and a random token; the rest is unchanged
MASKED, RANDOM = 0.8, 0.1
_HALF, _ALL = 1 << 32, (1 << 64) - 1
#: seed for the held-out slice, so that every run predicts the same positions
HELD_OUT_SEED = 0x6D61736B


@dataclass(frozen=True)
class SpecialIds:
    """Special ids of a tokenizer, which are never predicted or drawn. Without a mask token, `mask_id` is the first id
    after the vocabulary.
    """

    mask_id: int
    ids: tuple[int, ...]
    tokenizer_size: int

    @property
    def vocabulary_size(self) -> int:
        """Vocabulary size of masked batches, which the model's embedding must cover."""
        return max(self.tokenizer_size, self.mask_id + 1)


def load_special_ids(run: RunSettings, tokenizer_directory: Path | None) -> SpecialIds:
    """Load special ids from the tokenizer's manifest. Raises UserError if no tokenizer is given."""
    if tokenizer_directory is None:
        raise UserError(
            "objective masked needs the tokenizer, but none was given.",
            run=run.identity,
            next=f"pass the folder results/tokenizers/{run.tokenizer.name}",
        )
    manifest = read_tokenizer_manifest(tokenizer_directory)
    size, mask = manifest["vocabulary_size"], manifest.get("mask_id")
    ids = {manifest[name] for name in ("bos_id", "eos_id", "pad_id")} - {None}
    return SpecialIds(size if mask is None else mask, tuple(sorted(ids)), size)


class MaskedBatches(WrappedBatches):
    """Batches of a masked language model (BERT, Devlin et al. 2019).

    Masking depends on the position in the endless global order: it differs between epochs and is the same at every
    world size. `useful_tokens` counts the predicted positions.
    """

    def __init__(self, batches: Batches, run: RunSettings, inputs: Inputs):
        super().__init__(batches)
        self._run, self._special = run, load_special_ids(run, inputs.tokenizer)
        self.vocabulary_size = self._special.vocabulary_size
        self._slots = np.array(rank_slots(run.global_batch, inputs.rank, inputs.world_size), dtype=np.int64)

    def next(self) -> Batch:
        """Return this rank's share of the next global batch. Arrays are copies, except for the document ids."""
        samples = self._batches.state()["step"] * self._run.global_batch + self._slots
        batch = self._batches.next()
        tokens, labels = _mask_batch(
            batch.tokens_bt, batch.labels_bt, samples, self._run, self._special, self._run.effective_seed
        )
        useful = int(np.count_nonzero(labels != IGNORED))
        return replace(batch, tokens_bt=tokens, labels_bt=labels, useful_tokens=useful)


def wrap_masked(batches: Batches, run: RunSettings, inputs: Inputs) -> MaskedBatches:
    """Wrap the batches of an approach for the objective masked."""
    return MaskedBatches(batches, run, inputs)


def prepare_masked(
    tokens_bt: np.ndarray,
    labels_bt: np.ndarray,
    numbers: np.ndarray,
    run: RunSettings,
    tokenizer_directory: Path | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (inputs, labels) of held-out rows, masked by their row numbers."""
    return _mask_batch(tokens_bt, labels_bt, numbers, run, load_special_ids(run, tokenizer_directory), HELD_OUT_SEED)


def _mask_batch(
    tokens_bt: np.ndarray, labels_bt: np.ndarray, samples: np.ndarray, run: RunSettings, special: SpecialIds, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    return mask_tokens(
        tokens_bt,
        labels_bt,
        samples,
        seed=seed,
        vocabulary_size=special.tokenizer_size,
        mask_id=special.mask_id,
        special_ids=special.ids,
        share=run.masking.share,
    )


def mask_tokens(
    tokens_bt: np.ndarray,
    labels_bt: np.ndarray,
    samples: np.ndarray,
    *,
    seed: int,
    vocabulary_size: int,
    mask_id: int,
    special_ids: Sequence[int] = (),
    share: float = 0.15,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (inputs, labels) of a masked-LM batch, new arrays int64 [n, T]; labels are −100 except where chosen.

    `tokens_bt` and `labels_bt` [n, T] come from any batch. Each useful token (not padding, BOS or a token repeated from
    the previous piece, as the labels show) is chosen with probability `share`. Of the chosen tokens 80 % become
    `mask_id`, 10 % a uniformly drawn token, and 10 % stay. Special ids and `mask_id` are neither chosen nor drawn.
    `mask_id` may equal `vocabulary_size` (one more embedding) if the tokenizer has no mask token.

    `samples` [n] numbers the rows. The choice depends on (seed, sample, position) alone, not on batch, rank or world
    size. With positions in the endless global order (step * global_batch + slot) each epoch masks anew (RoBERTa, Liu et
    al. 2019); with row numbers all epochs mask equally.
    """
    n, T = tokens_bt.shape
    special = np.unique([*special_ids, mask_id]).astype(np.int64)
    useful = np.zeros((n, T), dtype=bool)
    useful[:, 1:] = labels_bt[:, :-1] != IGNORED  # label t is token t + 1
    useful &= ~np.isin(tokens_bt, special)

    key = mix64(np.asarray(samples, dtype=np.int64).astype(np.uint64) ^ mix64(np.array([seed & _ALL], dtype=np.uint64)))
    bits = mix64(key[:, None] ^ mix64(np.arange(T, dtype=np.uint64))[None, :])
    chosen = useful & ((bits >> np.uint64(32)) < np.uint64(round(share * _HALF)))
    rows, columns = np.nonzero(chosen)
    bits = bits[rows, columns]
    kind = bits & np.uint64(_HALF - 1)

    originals = tokens_bt[rows, columns].astype(np.int64)
    special = special[special < vocabulary_size]
    drawn = (bits % np.uint64(vocabulary_size - len(special))).astype(np.int64)
    for id in special.tolist():  # in ascending order, to skip each special id once
        drawn += drawn >= id
    changed = np.where(kind < round((MASKED + RANDOM) * _HALF), drawn, originals)
    changed = np.where(kind < round(MASKED * _HALF), mask_id, changed)

    inputs, labels = tokens_bt.astype(np.int64), np.full((n, T), IGNORED, dtype=np.int64)
    inputs[rows, columns], labels[rows, columns] = changed, originals
    return inputs, labels


def ignore_sources(tokens_bt: np.ndarray, labels_bt: np.ndarray, bos_id: int, eos_id: int) -> None:
    """Set the labels of sources and of the EOS after them to −100, in place; int64 [n, T]. A row that begins inside a
    document longer than a row is assumed to begin with a target.
    """
    positions = np.arange(tokens_bt.shape[1])
    begun = np.maximum.accumulate(np.where(tokens_bt == bos_id, positions, -1), axis=1)
    ended = np.maximum.accumulate(np.where(tokens_bt == eos_id, positions, -1), axis=1)
    labels_bt[begun > ended] = IGNORED


class TargetBatches(WrappedBatches):
    """Batches of translation pairs in which only target tokens are predicted, by a causal language model.

    A pair is one document: BOS + source + EOS + target + EOS. Text never becomes a control id, so rows of every format
    show where a target begins: after the first EOS that follows a BOS.
    """

    def __init__(self, batches: Batches, bos_id: int, eos_id: int):
        super().__init__(batches)
        self._ids = bos_id, eos_id

    def next(self) -> Batch:
        """Return this rank's share of the next global batch."""
        batch = self._batches.next()
        ignore_sources(batch.tokens_bt, batch.labels_bt, *self._ids)
        return replace(batch, useful_tokens=int(np.count_nonzero(batch.labels_bt != IGNORED)))


def wrap_target(batches: Batches, run: RunSettings, inputs: Inputs) -> TargetBatches:
    """Wrap the batches of an approach for `labels: target`. Raises UserError as `prepare_target` does."""
    if run.store is not None:
        manifests = [read_store_manifest(where) for where in list_sources(run, inputs.store)]
    else:
        corpora = [read_corpus_manifest(corpus_manifest(where).parent) for where in list_sources(run, inputs.corpus)]
        tokenizer = read_tokenizer_manifest(inputs.tokenizer)
        manifests = [tokenizer | {"document_parts": corpus.get("pairs")} for corpus in corpora]
    (ids,) = {_read_ids(manifest, run) for manifest in manifests}
    return TargetBatches(batches, *ids)


def prepare_target(tokens_bt: np.ndarray, labels_bt: np.ndarray, manifest: dict[str, Any], run: RunSettings) -> None:
    """Ignore the labels of sources in held-out rows, in place. Raises UserError for documents that are not pairs, or
    one id for BOS and EOS.
    """
    ignore_sources(tokens_bt, labels_bt, *_read_ids(manifest, run))


def _read_ids(manifest: dict[str, Any], run: RunSettings) -> tuple[int, int]:
    """Return (BOS id, EOS id). Raises UserError as `prepare_target` does."""
    if not manifest.get("document_parts"):
        raise UserError(
            "labels: target needs pairs, but the documents are not pairs.",
            run=run.identity,
            corpus=run.corpus.name,
            key="labels",
            next="set `target_column` or `target_files` of the corpus' source, or labels: all",
        )
    if manifest["bos_id"] == manifest["eos_id"]:
        raise UserError(
            "labels: target needs different ids for BOS and EOS, but the tokenizer has one for both.",
            run=run.identity,
            tokenizer=f"{run.tokenizer.name}, id {manifest['bos_id']}",
            next="use another tokenizer (kind bpe trains one on the corpus), or labels: all",
        )
    return manifest["bos_id"], manifest["eos_id"]


Rows = tuple[np.ndarray, np.ndarray]
#: objective → functions that change the batches of an approach, and held-out rows; others leave both unchanged
OBJECTIVES: dict[
    str,
    tuple[
        Callable[[Batches, RunSettings, Inputs], Batches],
        Callable[[np.ndarray, np.ndarray, np.ndarray, RunSettings, Path | None], Rows],
    ],
] = {
    "masked": (wrap_masked, prepare_masked),
}
