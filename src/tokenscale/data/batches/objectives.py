"""What a run predicts: objectives and choices of labels, as changes of the rows of any approach."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.data.batches.batch import Inputs, RowChange
from tokenscale.data.order.permutation import mix64
from tokenscale.data.stores.documents import IGNORED
from tokenscale.data.tokenizers.base import read_tokenizer_manifest
from tokenscale.settings import registry
from tokenscale.settings.extensions import load_extension
from tokenscale.settings.run import RunSettings

#: shares of the chosen tokens that become the mask token and a random token; the rest is unchanged
MASKED = 0.8
RANDOM = 0.1
_HALF = 1 << 32
_ALL = (1 << 64) - 1
#: seed for held-out rows, so that every run predicts the same positions
HELD_OUT_SEED = 0x6D61736B


def open_masked(run: RunSettings, inputs: Inputs, held_out: bool) -> RowChange:
    """Mask rows for a masked language model (BERT, Devlin et al. 2019). Special ids come from the
    tokenizer's manifest.

    Without a mask token, its id is the first one after the vocabulary. Raises UserError if no
    tokenizer is given.
    """
    manifest = read_tokenizer_manifest(inputs.require("tokenizer", run, "objective masked"))
    size = manifest["vocabulary_size"]
    mask_id = size if manifest.get("mask_id") is None else manifest["mask_id"]
    apply = partial(
        mask_tokens,
        seed=HELD_OUT_SEED if held_out else run.effective_seed,
        vocabulary_size=size,
        mask_id=mask_id,
        special_ids=sorted({manifest[name] for name in ("bos_id", "eos_id", "pad_id")} - {None}),
        share=run.masking.share,
    )
    return RowChange(apply, vocabulary_size=max(size, mask_id + 1))


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
    """Return (inputs, labels) of a masked-LM batch, new arrays int64 [n, T]; labels are −100 except
    where chosen.

    `tokens_bt` and `labels_bt` [n, T] come from any batch. Each useful token (not padding, BOS or a
    token repeated from the previous piece, as the labels show) is chosen with probability `share`,
    and in a row where that chooses none, one of them. Of the chosen tokens 80 % become `mask_id`,
    10 % a uniformly drawn token, and 10 % stay. Special ids and `mask_id` are neither chosen nor
    drawn. `mask_id` may equal `vocabulary_size` (one more embedding) if the tokenizer has no mask
    token.

    `samples` [n] numbers the rows. The choice depends on (seed, sample, position) alone, not on
    batch, rank or world size. With positions in the endless global order (step * global_batch +
    slot) each epoch masks anew (RoBERTa, Liu et al. 2019); with row numbers all epochs mask
    equally.
    """
    n, T = tokens_bt.shape
    special = np.unique([*special_ids, mask_id]).astype(np.int64)
    useful = np.zeros((n, T), dtype=bool)
    useful[:, 1:] = labels_bt[:, :-1] != IGNORED  # label t is token t + 1
    useful &= ~np.isin(tokens_bt, special)

    key = mix64(
        np.asarray(samples, dtype=np.int64).astype(np.uint64)
        ^ mix64(np.array([seed & _ALL], dtype=np.uint64))
    )
    bits = mix64(key[:, None] ^ mix64(np.arange(T, dtype=np.uint64))[None, :])
    draws = bits >> np.uint64(32)
    chosen = useful & (draws < np.uint64(round(share * _HALF)))
    (empty,) = np.nonzero(useful.any(axis=1) & ~chosen.any(axis=1))
    chosen[empty, np.where(useful[empty], draws[empty], _HALF).argmin(axis=1)] = True
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

    inputs = tokens_bt.astype(np.int64)
    inputs[rows, columns] = changed
    labels = np.full((n, T), IGNORED, dtype=np.int64)
    labels[rows, columns] = originals
    return inputs, labels


def ignore_sources(tokens_bt: np.ndarray, labels_bt: np.ndarray, bos_id: int, eos_id: int) -> None:
    """Set labels of sources and of their EOS to −100, in place; int64 [n, T]. A row without BOS
    begins in a target.
    """
    positions = np.arange(tokens_bt.shape[1])
    begun = np.maximum.accumulate(np.where(tokens_bt == bos_id, positions, -1), axis=1)
    ended = np.maximum.accumulate(np.where(tokens_bt == eos_id, positions, -1), axis=1)
    labels_bt[begun > ended] = IGNORED


def _read_ids(manifest: dict[str, Any], run: RunSettings) -> tuple[int, int]:
    """Return (BOS id, EOS id). Raises UserError for documents that are not pairs, or one id for BOS
    and EOS.
    """
    if not manifest.get("document_parts"):
        facts = {"run": run.identity, "corpus": run.corpus.name, "key": "labels"}
        next_step = "set `target_column` or `target_files` of the corpus' source, or labels: all"
        raise UserError(
            "labels: target needs pairs, but the documents are not pairs.", **facts, next=next_step
        )
    if manifest["bos_id"] == manifest["eos_id"]:
        what = (
            "labels: target needs different ids for BOS and EOS, but the tokenizer has one for "
            "both."
        )
        next_step = "use another tokenizer (kind bpe trains one on the corpus), or labels: all"
        name = run.tokenizer.name
        raise UserError(
            what, run=run.identity, tokenizer=f"{name}, id {manifest['bos_id']}", next=next_step
        )
    return manifest["bos_id"], manifest["eos_id"]


#: objective → function that opens its change of rows; other objectives change nothing
OBJECTIVES: dict[str, Callable[[RunSettings, Inputs, bool], RowChange]] = {
    "masked": open_masked,
}
UNCHANGED = RowChange(lambda tokens_bt, labels_bt, numbers: (tokens_bt, labels_bt))


def _open_own_change(run: RunSettings, inputs: Inputs, held_out: bool) -> RowChange:
    """Return the change of rows of the run's objective."""
    if run.objective in OBJECTIVES:
        return OBJECTIVES[run.objective](run, inputs, held_out)
    if registry.OBJECTIVES[run.objective].rows is None:
        return UNCHANGED
    return load_extension(run.objective, "objective", "rows")(run, inputs, held_out)


def open_change(
    run: RunSettings, inputs: Inputs, manifests: Sequence[dict[str, Any]], *, held_out: bool = False
) -> RowChange:
    """Return the change that the run's objective and its choice of labels make in rows; `UNCHANGED`
    if there is none.

    With `labels: target`, a causal language model predicts only the target tokens of translation
    pairs. A pair is one document: BOS + source + EOS + target + EOS. Text never becomes a control
    id, so rows of every format show where a target begins: after the first EOS that follows a BOS.
    `manifests`, of the stores or with their keys document_parts, bos_id and eos_id, are only read
    then. Raises UserError for documents that are not pairs, one id for BOS and EOS, or a missing
    tokenizer.
    """
    change = _open_own_change(run, inputs, held_out)
    if run.labels != "target":
        return change
    (ids,) = {_read_ids(manifest, run) for manifest in manifests}

    def apply(
        tokens_bt: np.ndarray, labels_bt: np.ndarray, numbers: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        ignore_sources(tokens_bt, labels_bt, *ids)
        return change.apply(tokens_bt, labels_bt, numbers)

    return replace(change, apply=apply)
