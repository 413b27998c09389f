"""Labels of token rows: the only definition of ignored labels, for every approach."""

from collections.abc import Iterable

import numpy as np

IGNORED = -100


def make_labels(
    rows: np.ndarray, starts: Iterable[np.ndarray] | None = None, lengths: np.ndarray | None = None
) -> np.ndarray:
    """Return labels [n, T], int64, of rows [n, T + 1]: label t is token t + 1, or −100 if that token

    - begins a document or a piece (BOS, or a token repeated from the previous piece). `starts` has the positions of
      such tokens for each row, with or without the row's first token, which is never a label;
    - is padding: at or after `lengths` [n], in tokens of the row. Ids are not compared, so a pad id that also occurs in
      documents remains a label there.

    `starts` None: only the first token of a row begins a document. `lengths` None: all rows are full. A document of n
    tokens has n − 1 labels in every approach that keeps it whole.
    """
    labels = rows.astype(np.int64)
    if starts is not None:
        for row, positions in zip(labels, starts, strict=True):
            row[positions] = IGNORED
    if lengths is not None:
        for row, length in zip(labels, np.asarray(lengths).tolist(), strict=True):
            row[length:] = IGNORED
    return labels[:, 1:]
