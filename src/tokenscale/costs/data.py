"""Padding and cut text of data-loading strategies.

Lengths are tokens of whole documents including BOS: a document of n tokens has n − 1 useful labels.
A row of sequence length T has T + 1 tokens and trains on T positions.
"""

import numpy as np

#: widths of the rows of length-bucketed are multiples of this, which bounds the number of shapes
BUCKET_MULTIPLE = 64


def measure_quantiles(lengths: np.ndarray) -> tuple[float, float, float]:
    """Return the median, the 95 % quantile and the largest of lengths."""
    median, most, largest = np.quantile(lengths, [0.5, 0.95, 1.0]).tolist()
    return median, most, largest


def padding_share(lengths: np.ndarray, sequence_length: int) -> float:
    """Return the share of padding with one document per row: 1 − Σ min(n − 1, T) / (documents ·
    T).
    """
    return float(1 - np.minimum(np.asarray(lengths) - 1, sequence_length).mean() / sequence_length)


def cut_share(lengths: np.ndarray, sequence_length: int) -> float:
    """Return the share of useful tokens cut off with one document per row: Σ max(n − 1 − T, 0) / Σ
    (n − 1).
    """
    useful = np.asarray(lengths) - 1
    return float(np.maximum(useful - sequence_length, 0).mean() / (useful.mean() or 1.0))


def cut_documents_share(lengths: np.ndarray, sequence_length: int) -> float:
    """Return the share of documents that are cut with one document per row."""
    return float((np.asarray(lengths) - 1 > sequence_length).mean())


def fill_share(lengths: np.ndarray, sequence_length: int, rows: int) -> float:
    """Return the share of positions with a useful label in packed rows, Σ (n − 1) / (rows · T)."""
    return float((np.asarray(lengths) - 1).sum() / (rows * sequence_length))


def bucketed_share(lengths: np.ndarray, sequence_length: int, batch: int, multiple: int) -> float:
    """Return the share of positions with a useful label where documents of similar length share a
    batch, whose rows are as long as its longest document, rounded up to `multiple`.
    """
    useful = np.sort(np.minimum(np.asarray(lengths) - 1, sequence_length))
    ends = np.append(np.arange(batch, len(useful), batch), len(useful))
    rows = np.diff(ends, prepend=0)
    widths = np.maximum(multiple, -(-useful[ends - 1] // multiple) * multiple)
    widths = np.minimum(widths, sequence_length)
    return float(useful.sum() / (rows * widths).sum())
