"""The mask rule, in one place, for every approach."""

import numpy as np

IGNORED = -100


def labels_of(rows: np.ndarray, starts: np.ndarray | None = None, lengths: np.ndarray | None = None) -> np.ndarray:
    """Labels [n, T], int64, of rows [n, T + 1]: label t is token t + 1, or −100 where that token

    - begins a document or a piece: `starts` [n, T + 1] is true there (BOS, or a token repeated from the piece before);
    - is padding: it lies at or behind `lengths` [n], in tokens of the row. Ids are never compared, so that a pad id
      that a document also uses hides nothing.

    `starts` None: only the first token of a row begins anything. `lengths` None: all rows are full. So a document of
    n tokens adds n − 1 labels in every approach that holds it whole.
    """
    labels = rows[:, 1:].astype(np.int64)
    if starts is not None:
        labels[starts[:, 1:]] = IGNORED
    if lengths is not None:
        positions = np.arange(1, rows.shape[1])
        labels[positions[None, :] >= np.asarray(lengths)[:, None]] = IGNORED
    return labels
