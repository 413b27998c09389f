"""What data cost: the formulas against counting, one row after another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenscale.costs import data as costs
from tokenscale.data.order.packing import best_fit_decreasing, split_documents

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40).map(np.array)
T = st.integers(1, 20)


@given(LENGTHS, T)
def test_padding_and_cut_as_counted_row_by_row(lengths, t):
    padding = positions = cut_tokens = useful = cut_documents = 0
    for length in lengths:
        row = ["bos" if i == 0 else "token" for i in range(length)][: t + 1]
        labels = row[1:] + ["pad"] * (t + 1 - len(row))
        positions += len(labels)
        padding += labels.count("pad")
        useful += length - 1
        cut_tokens += length - len(row)
        cut_documents += length > len(row)
    assert costs.padding_share(lengths, t) == pytest.approx(padding / positions)
    assert costs.cut_share(lengths, t) == pytest.approx(cut_tokens / useful if useful else 0)
    assert costs.cut_documents_share(lengths, t) == pytest.approx(cut_documents / len(lengths))


@given(LENGTHS, T)
def test_fill_counts_every_label_once(lengths, t):
    _, starts, sizes = split_documents(lengths, t)
    pieces, rows = best_fit_decreasing(sizes, t + 1)
    useful = sum(int(size) - 1 for size in sizes[pieces])  # a piece's first token is nobody's label in its row
    assert costs.fill_share(lengths, t, len(rows) - 1) == pytest.approx(useful / ((len(rows) - 1) * t))
