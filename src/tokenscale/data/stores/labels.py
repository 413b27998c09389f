"""The mask rule, in one place, for every approach."""

from collections.abc import Iterable

import numpy as np

IGNORED = -100


def make_labels(
    rows: np.ndarray, starts: Iterable[np.ndarray] | None = None, lengths: np.ndarray | None = None
) -> np.ndarray:
    """Labels [n, T], int64, of rows [n, T + 1]: label t is token t + 1, or −100 where that token

    - begins a document or a piece (BOS, or a token repeated from the piece before): `starts` gives, row by row, the
      positions of such tokens, the row's first token (which is no label) left out or not;
    - is padding: it lies at or behind `lengths` [n], in tokens of the row. Ids are never compared, so that a pad id
      that a document also uses hides nothing.

    `starts` None: only the first token of a row begins anything. `lengths` None: all rows are full. So a document of
    n tokens adds n − 1 labels in every approach that holds it whole.
    """
    labels = rows.astype(np.int64)
    if starts is not None:
        for row, positions in zip(labels, starts, strict=True):
            row[positions] = IGNORED
    if lengths is not None:
        for row, length in zip(labels, np.asarray(lengths).tolist(), strict=True):
            row[length:] = IGNORED
    return labels[:, 1:]
