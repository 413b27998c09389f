"""Masked-language-model batches (BERT, Devlin et al. 2019) from the batches of any approach, by the sample alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.data.batches.batch import Batch, Batches
from tokenscale.data.order.permutation import mix64
from tokenscale.data.order.shares import share
from tokenscale.data.stores.labels import IGNORED
from tokenscale.data.tokenizers.manifest import read_manifest
from tokenscale.settings.run import RunSettings

#: of the chosen tokens, the share that becomes the mask token, and the share that becomes any token; the rest stays
MASKED, RANDOM = 0.8, 0.1
_HALF, _ALL = 1 << 32, (1 << 64) - 1
#: of the held-out slice: every run predicts the same places, whatever its own seed
HELD_OUT_SEED = 0x6D61736B


@dataclass(frozen=True)
class Special:
    """What masking has to know of a tokenizer: the id that masks, its own or one behind all of its ids; ids that are
    never predicted or drawn; and the size of its vocabulary."""

    mask_id: int
    ids: tuple[int, ...]
    tokenizer_size: int

    @property
    def vocabulary_size(self) -> int:
        """Ids that occur in masked batches: what the model's embedding must hold."""
        return max(self.tokenizer_size, self.mask_id + 1)


def special_of(run: RunSettings, tokenizer_directory: Path | None) -> Special:
    """From the tokenizer's manifest. Raises UserError where it is not given."""
    if tokenizer_directory is None:
        raise UserError(
            "the objective masked needs the tokenizer, which was not given.",
            run=run.identity,
            next=f"name the folder results/tokenizers/{run.tokenizer.name}",
        )
    manifest = read_manifest(tokenizer_directory)
    size, mask = manifest["vocabulary_size"], manifest.get("mask_id")
    ids = {manifest[name] for name in ("bos_id", "eos_id", "pad_id")} - {None}
    return Special(size if mask is None else mask, tuple(sorted(ids)), size)


class MaskedBatches:
    """See `batch.Batches`: the same rows, masked by their places in the endless global order, so anew in each epoch and
    alike at every world size. `useful_tokens` are the places that are predicted."""

    def __init__(self, batches: Batches, run: RunSettings, special: Special, rank: int, world_size: int):
        self.vocabulary_size = special.vocabulary_size
        self._batches, self._run, self._special = batches, run, special
        self._slots = np.array(share(run.global_batch, rank, world_size), dtype=np.int64)

    def rows_per_epoch(self) -> float:
        """See `batch.Batches`."""
        return self._batches.rows_per_epoch()

    def next(self) -> Batch:
        """This rank's share of the next global batch. Its arrays are its own, but for the document ids."""
        samples = self._batches.state()["step"] * self._run.global_batch + self._slots
        batch = self._batches.next()
        tokens, labels = _masked(
            batch.tokens_bt, batch.labels_bt, samples, self._run, self._special, self._run.effective_seed
        )
        useful = int(np.count_nonzero(labels != IGNORED))
        return replace(batch, tokens_bt=tokens, labels_bt=labels, useful_tokens=useful)

    def state(self) -> dict[str, Any]:
        """See `batch.Batches`."""
        return self._batches.state()

    def seek(self, state: dict[str, Any]) -> None:
        """See `batch.Batches`."""
        self._batches.seek(state)


def of_batches(
    batches: Batches, run: RunSettings, tokenizer_directory: Path | None, rank: int, world_size: int
) -> MaskedBatches:
    """The batches of a masked run, from those of its approach."""
    return MaskedBatches(batches, run, special_of(run, tokenizer_directory), rank, world_size)


def of_rows(
    tokens_bt: np.ndarray,
    labels_bt: np.ndarray,
    numbers: np.ndarray,
    run: RunSettings,
    tokenizer_directory: Path | None,
) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, labels) of held-out rows, masked by their numbers in the store."""
    return _masked(tokens_bt, labels_bt, numbers, run, special_of(run, tokenizer_directory), HELD_OUT_SEED)


def _masked(
    tokens_bt: np.ndarray, labels_bt: np.ndarray, samples: np.ndarray, run: RunSettings, special: Special, seed: int
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
    """(inputs, labels) of a masked-LM batch, int64 [n, T], in memory of their own; labels are −100 but where chosen.

    `tokens_bt` and `labels_bt` [n, T] are those of any batch. A useful token (no padding, no BOS, no token repeated
    from the piece before: what the labels already say) is chosen with probability `share`; of the chosen, 80 % become
    `mask_id`, 10 % a token drawn evenly from the vocabulary, 10 % stay. Special ids and `mask_id` are neither chosen
    nor drawn. `mask_id` may be `vocabulary_size`, one embedding more, where the tokenizer has no such token.

    `samples` [n] numbers the rows: what is chosen depends on (seed, sample, position) alone, not on the batch, the rank
    or the world size. With the position in the endless global order (step * global_batch + slot) each epoch masks anew
    (RoBERTa, Liu et al. 2019); with the number of the stored row, all epochs mask alike.
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
    for id in special.tolist():  # in rising order: what is left of the vocabulary has no holes to fall into
        drawn += drawn >= id
    changed = np.where(kind < round((MASKED + RANDOM) * _HALF), drawn, originals)
    changed = np.where(kind < round(MASKED * _HALF), mask_id, changed)

    inputs, labels = tokens_bt.astype(np.int64), np.full((n, T), IGNORED, dtype=np.int64)
    inputs[rows, columns], labels[rows, columns] = changed, originals
    return inputs, labels
