"""Packing: nothing dropped, nothing doubled, only too-long documents cut."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenscale.data.order.packing import best_fit_decreasing, concatenate, pack, split_documents


def naive(lengths: list[int], capacity: int) -> int:
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        if fitting:
            spaces.remove(min(fitting))
            spaces.append(min(fitting) - length)
        else:
            spaces.append(capacity - length)
    return len(spaces)


@given(st.lists(st.integers(1, 20), max_size=200), st.integers(20, 40))
@settings(deadline=None)
def test_packing_holds_every_piece_once_and_is_best_fit(lengths, capacity):
    pieces, rows = best_fit_decreasing(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(pieces.tolist()) == list(range(len(lengths)))
    sums = [int(np.array(lengths)[pieces[a:b]].sum()) for a, b in zip(rows[:-1], rows[1:], strict=True)]
    assert all(0 < s <= capacity for s in sums)
    assert len(sums) == naive(lengths, capacity)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 20))
@settings(deadline=None)
def test_cutting_keeps_every_label_and_makes_no_lone_overlap(lengths, t):
    documents, starts, sizes = split_documents(np.array(lengths), t)
    assert int((sizes - 1).sum()) == sum(n - 1 for n in lengths)
    assert sizes.max() <= t + 1
    for d, n in enumerate(lengths):
        mine = [(s, s + z) for s, z in zip(starts[documents == d], sizes[documents == d], strict=True)]
        assert mine[0][0] == 0 and mine[-1][1] == n
        assert all(a[1] - 1 == b[0] for a, b in zip(mine, mine[1:], strict=False))  # overlap of exactly one token
        assert len(mine) == 1 if n <= t + 1 else all(b - a >= 2 for a, b in mine)


def test_packing_is_deterministic_full_and_fast():
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1.2, 100_000).astype(np.int64) + 1, 2049)
    start = time.perf_counter()
    pieces, rows = best_fit_decreasing(lengths, 2049)
    assert time.perf_counter() - start < 5  # 0.1 s here; a quadratic search needs minutes
    again, _ = best_fit_decreasing(lengths, 2049)
    assert np.array_equal(pieces, again)
    assert best_fit_decreasing(lengths[:0], 5)[1].tolist() == [0], "nothing to pack"
    assert lengths.sum() / ((len(rows) - 1) * 2049) > 0.999


def test_windows_are_packed_one_after_the_other():
    def listed(pieces, rows):
        return [row.tolist() for row in np.split(pieces, rows[1:-1])]

    lengths = np.random.default_rng(0).integers(1, 41, 50)
    windows = [(i, listed(*best_fit_decreasing(lengths[i : i + 7], 40))) for i in range(0, 50, 7)]
    assert listed(*pack(lengths, 40, 7)) == [[i + piece for piece in row] for i, rows in windows for row in rows]
    assert listed(*pack(lengths, 40)) == listed(*best_fit_decreasing(lengths, 40))


@pytest.mark.parametrize("lengths", [[0, 3], [3, 6]])
def test_pieces_that_fit_no_row_are_bugs(lengths):
    with pytest.raises(ValueError, match="not within 1 … 5"):
        best_fit_decreasing(lengths, 5)


def test_nothing_to_pack():
    for packing in (best_fit_decreasing, pack):
        pieces, rows = packing(np.zeros(0, dtype=np.int64), 5)
        assert len(pieces) == 0 and rows.tolist() == [0]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 12), st.randoms(use_true_random=False))
def test_concatenated_rows_are_the_stream_cut_at_every_row(lengths, sequence_length, chance):
    order = list(range(len(lengths)))
    chance.shuffle(order)
    stream = [(d, t) for d in order for t in range(lengths[d])]
    document, start, length, rows = concatenate(np.array(lengths), sequence_length, np.array(order))
    found = [[(d, s + k) for k in range(n)] for d, s, n in zip(document, start, length, strict=True)]
    rebuilt = [sum(found[a:b], []) for a, b in zip(rows[:-1], rows[1:], strict=True)]
    T = sequence_length
    expected = [stream[r * T : r * T + T + 1] for r in range(max(1, -(-(len(stream) - 1) // T)))]
    assert rebuilt == expected and (length >= 1).all()
