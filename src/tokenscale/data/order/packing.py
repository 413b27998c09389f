"""Pack documents into sequences of one length: split long documents, then best-fit-decreasing or
concatenation.
"""

import numpy as np


def split_documents(
    lengths: np.ndarray, sequence_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split documents into pieces of at most `sequence_length` + 1 tokens: (document, start,
    length), each int64.

    With T = `sequence_length`, piece k covers tokens [k*T, k*T + T + 1) of its document.
    Neighbouring pieces overlap by one token, so that every label appears once. A document of up to
    T + 1 tokens is one piece.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    counts = np.maximum(1, -(-(lengths - 1) // sequence_length))
    documents = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(documents), dtype=np.int64) - first) * sequence_length
    return documents, starts, np.minimum(lengths[documents] - starts, sequence_length + 1)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack pieces greedily into few rows: longest first, each into the fullest row that has room
    for it.

    Returns (pieces, rows) in compressed sparse row format, int64: row r holds
    pieces[rows[r]:rows[r+1]]. Deterministic. Open rows are kept in one stack per remaining space,
    and a bit set finds the tightest fit: about 1 us per piece. (Johnson 1973; Ding et al. 2024,
    "Fewer Truncations Improve Language Modeling", for its use here.)
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.size and (lengths.min() < 1 or lengths.max() > capacity):
        raise ValueError(f"the length of a piece is not within 1 … {capacity}")
    decreasing = np.argsort(-lengths, kind="stable")
    by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = 0  # bit s is set where by_space[s] holds a row
    rows = 0
    assigned = []
    for length in lengths[decreasing].tolist():
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space = capacity
            row = rows
            rows += 1
        space -= length
        if space:
            by_space[space].append(row)
            spaces |= 1 << space
        assigned.append(row)
    row_of = np.array(assigned, dtype=np.int64)
    order = np.argsort(row_of, kind="stable")
    return decreasing[order], np.concatenate(([0], np.cumsum(np.bincount(row_of, minlength=rows))))


def pack(
    lengths: np.ndarray, capacity: int, window: int = 1 << 18
) -> tuple[np.ndarray, np.ndarray]:
    """Apply `best_fit_decreasing` to windows of pieces, in order, so that memory is bounded."""
    pieces = []
    rows = [np.zeros(1, dtype=np.int64)]
    before = 0
    for first in range(0, len(lengths), window):
        found, pointers = best_fit_decreasing(lengths[first : first + window], capacity)
        pieces.append(found + first)
        rows.append(pointers[1:] + before)
        before += int(pointers[-1])
    return (np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)), np.concatenate(rows)


def concatenate(
    lengths: np.ndarray, sequence_length: int, order: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Concatenate documents in `order` and cut after every `sequence_length` tokens.

    Returns (document, start, length) of each piece, int64, row by row, and rows as
    `best_fit_decreasing` does. With T = `sequence_length`, row r holds tokens [r*T, r*T + T + 1) of
    the concatenation: neighbouring rows overlap by one token, so that every label appears once.
    """
    T = sequence_length
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64)[order])
    begins = ends - lengths[order]
    total = int(ends[-1])
    first_tokens = np.arange(max(1, -(-(total - 1) // T)), dtype=np.int64) * T
    last_tokens = np.minimum(first_tokens + T + 1, total)
    first = np.searchsorted(ends, first_tokens, side="right")
    counts = np.searchsorted(ends, last_tokens - 1, side="right") - first + 1
    pointers = np.concatenate(([0], np.cumsum(counts)))
    row = np.repeat(np.arange(len(counts)), counts)
    position = first[row] + np.arange(pointers[-1]) - pointers[row]
    starts = np.maximum(begins[position], first_tokens[row])
    stops = np.minimum(ends[position], last_tokens[row])
    return np.asarray(order)[position], starts - begins[position], stops - starts, pointers
