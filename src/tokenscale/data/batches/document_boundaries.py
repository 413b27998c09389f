"""Where documents begin in a batch, in the two forms that attention kernels ask for.

Both take `starts` of `formats.packed.PackedStore`: bool [n, T], True where a piece of a document begins; the first
position of a row always does. A row's padding is a piece of its own: attention over whole pieces, as masked-language
models have it, must not see it, and under a causal mask it makes no difference.
"""

import numpy as np


def document_ids(starts_bt: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Which piece of its row each token belongs to, counted from 0; int32 [n, T], written to `out` where it is given.

    Numbers are those of the row, not of the corpus: tokens see each other where row and number are equal.

    >>> document_ids(np.array([[True, False, True], [True, True, True]])).tolist()
    [[0, 0, 1], [0, 1, 2]]
    """
    _check(starts_bt)
    ids = np.cumsum(starts_bt, axis=1, dtype=np.int32, out=out)
    ids -= 1
    return ids


def cu_seqlens(starts_bt: np.ndarray) -> tuple[np.ndarray, int]:
    """(cumulative lengths of the pieces of the batch flattened to n * T tokens, int32 [pieces + 1]; the longest piece).

    FlashAttention's convention for `flash_attn_varlen_func`: the first is 0, the last n * T, piece i is tokens
    [cu[i], cu[i + 1]); no piece goes on in the next row.

    >>> bounds, longest = cu_seqlens(np.array([[True, False, True], [True, False, False]]))
    >>> bounds.tolist(), longest
    ([0, 2, 3, 6], 3)
    """
    _check(starts_bt)
    if starts_bt.size > np.iinfo(np.int32).max:
        raise ValueError(f"{starts_bt.size:,} tokens are more than int32 bounds can say")
    bounds = np.append(np.flatnonzero(starts_bt), starts_bt.size).astype(np.int32)
    return bounds, int(np.diff(bounds).max(initial=0))


def _check(starts_bt: np.ndarray) -> None:
    if starts_bt.dtype != bool or not starts_bt[:, :1].all():
        raise ValueError("starts are bool [n, T], and every row begins with one")
