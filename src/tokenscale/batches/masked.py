"""Masked-language-model batches (BERT, Devlin et al. 2019) from the batches of any approach, by the sample alone."""

from collections.abc import Sequence

import numpy as np

from tokenscale.formats.labels import IGNORED
from tokenscale.order.permutation import mix64

#: of the chosen tokens, the share that becomes the mask token, and the share that becomes any token; the rest stays
MASKED, RANDOM = 0.8, 0.1
_HALF, _ALL = 1 << 32, (1 << 64) - 1


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
