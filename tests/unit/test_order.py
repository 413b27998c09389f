"""The global order is pure, complete and the same for every world size; packing drops nothing."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operations import count_operations
from tokenscale.data.order.packing import best_fit_decreasing, concatenate, pack, split_documents
from tokenscale.data.order.permutation import (
    MODULUS,
    SHUFFLED,
    get_samples,
    micro_steps,
    permute,
    rank_slots,
    row_digest,
    shard_rows,
)

#: and the sizes around powers of two, where the network has another one to walk in
sizes = st.integers(1, 3000) | st.builds(
    lambda bits, more: 2**bits + more, st.integers(1, 11), st.integers(-1, 1)
)


@given(sizes, st.integers(-(2**70), 2**70), st.integers(0, 2**40))
@settings(max_examples=120)
def test_the_permutation_is_a_bijection(n, seed, epoch):
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


def test_the_permutation_works_at_large_sizes():
    for n in (2**31 - 1, 2**40, 2**40 + 1, 2**62):
        index = np.unique(np.random.default_rng(0).integers(0, n, 2000))
        found = permute(index, n, 5)
        assert found.min() >= 0 and n // 2 < found.max() < n and len(np.unique(found)) == len(index)


def test_the_permutation_is_pinned():
    """Golden values: a changed order would silently make old runs irreproducible."""
    assert permute(np.arange(8), 1000, seed=0).tolist() == [187, 648, 346, 904, 667, 892, 766, 790]
    assert permute(np.arange(8), 64, seed=0).tolist() == [57, 43, 31, 50, 2, 21, 29, 6]
    assert permute(np.arange(8), 1024, seed=0).tolist() == [187, 648, 346, 904, 667, 892, 766, 790]
    assert permute(np.arange(8), 1025, seed=0).tolist() == [519, 874, 581, 776, 551, 6, 317, 652]
    assert permute(np.arange(8), 1000, seed=0, epoch=1).tolist() == [
        777,
        94,
        174,
        22,
        916,
        881,
        791,
        485,
    ]
    assert get_samples(np.arange(98, 104), 100, 7).tolist() == [84, 22, 11, 63, 91, 9]
    assert row_digest(3, range(8), np.arange(100, 108)) == 4157173186050314
    assert row_digest(0, range(2, 4), np.arange(2), np.arange(2)) == 2813490987593071


@pytest.mark.parametrize("epochs", [[0, 1, 1], [1, 1, 1]])
def test_one_epoch_for_each_index(epochs):
    index = np.array([3, 3, 4])
    epochs = np.array(epochs)
    expected = [int(permute(i, 50, 9, int(e))[0]) for i, e in zip(index, epochs, strict=True)]
    assert permute(index, 50, 9, epochs).tolist() == expected


def test_seeds_and_epochs_give_unlike_orders():
    orders = [permute(np.arange(500), 500, seed, epoch) for seed in range(4) for epoch in range(4)]
    for i, a in enumerate(orders):
        for b in orders[i + 1 :]:
            assert np.count_nonzero(a == b) < 15  # one expected by chance


def test_positions_are_spread_evenly():
    """Mean rank correlation of index and image over seeds is near zero: no drift along the
    epoch.
    """
    index = np.arange(1000)
    found = [np.corrcoef(index, permute(index, 1000, seed))[0, 1] for seed in range(40)]
    assert abs(np.mean(found)) < 0.03 and np.max(np.abs(found)) < 0.15


def chi_square_per_degree(counts, expected, degrees):
    """Return chi-square / degrees of freedom, and its deviation from 1 in standard deviations
    (Wilson & Hilferty 1931).
    """
    per_degree = float(((counts - expected) ** 2).sum() / expected / degrees)
    spread = 2 / (9 * degrees)
    return per_degree, (per_degree ** (1 / 3) - (1 - spread)) / spread**0.5


def draw_orders(n, epochs):
    index = np.tile(np.arange(n), epochs)
    return permute(index, n, seed=11, epoch=np.repeat(np.arange(epochs), n)).reshape(epochs, n)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
def test_every_order_of_few_is_equally_likely(n):
    """Chi-square over all n! orders, per degree of freedom, for 100 n! epochs of n = 2 … 7: 4.5,
    1.3, 1.5, 0.93, 1.03, 0.98 (deviations: 1.9, 0.6, 1.6, -0.5, 0.6, -1.1). With a Feistel
    network alone 3.0, 4.9 and 32 for n = 5, 6 and 7: deviations of 10, 40 and 327.
    """
    epochs = 100 * math.factorial(n)
    numbers = (draw_orders(n, epochs) * n ** np.arange(n)).sum(axis=1)
    counts = np.unique(numbers, return_counts=True)[1]
    assert len(counts) == math.factorial(n)
    assert chi_square_per_degree(counts, 100, degrees=len(counts) - 1)[1] < 4


def test_each_of_few_is_at_each_place_equally_often():
    """Chi-square of (index, place) for every n from 2 to 64, in 4,000 epochs each, divided by n (n - 1):
    0.97 on average, from 0.48 (n = 2) to 1.13 (n = 15), 2.7 standard deviations from 1 at most.
    """
    found = {}
    for n in range(2, SHUFFLED + 1):
        orders = draw_orders(n, epochs=4000)
        counts = np.bincount((orders + n * np.arange(n)).ravel(), minlength=n * n)
        found[n] = chi_square_per_degree(counts, 4000 / n, degrees=n * (n - 1))
    assert max(deviation for _, deviation in found.values()) < 4, found


def test_orders_of_few_are_odd_as_often_as_even():
    """A Feistel network over a power of two of indices has even permutations alone."""
    for n in (16, 64):
        odd = 0
        for order in draw_orders(n, epochs=200):
            above = np.triu(order[:, None] > order[None, :])
            odd += int(above.sum()) % 2
        assert 70 < odd < 130


def test_indices_and_ranks_outside_are_bugs():
    for index, n in ((5, 5), (-1, 5), (0, 0), ([], 0), (0, 2**62 + 1)):
        with pytest.raises(ValueError, match="outside|range"):
            permute(index, n, 0)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank {rank} is outside"):
            rank_slots(8, rank, 2)


def test_shares_cover_the_batch_and_differ_by_at_most_one():
    for batch, world_size in itertools.product((1, 5, 8, 12), (1, 2, 3, 4, 5, 7, 12)):
        shares = [rank_slots(batch, rank, world_size) for rank in range(world_size)]
        assert [slot for s in shares for slot in s] == list(range(batch))
        sizes = [len(s) for s in shares]
        assert max(sizes) - min(sizes) <= 1
        for micro_batch in (1, 2, 3):
            assert micro_steps(batch, world_size, micro_batch) == max(
                -(-size // micro_batch) for size in sizes
            )


def test_shards_are_those_of_chunk():
    for rows, sizes in ((8, [3, 3, 2]), (4, [2, 2, 0]), (2, [1, 1, 0]), (9, [3, 3, 3])):
        shards = [shard_rows(rows, index, 3) for index in range(3)]
        assert [len(shard) for shard in shards] == sizes and [
            row for s in shards for row in s
        ] == list(range(rows))


def test_digests_of_ranks_add_up():
    rows = np.arange(100, 108)
    whole = row_digest(3, range(8), rows, rows + 1)
    for world_size in (1, 2, 3, 4, 5, 7, 12):
        parts = [rank_slots(8, rank, world_size) for rank in range(world_size)]
        found = [row_digest(3, s, rows[list(s)], rows[list(s)] + 1) for s in parts]
        assert sum(found) % MODULUS == whole and 0 <= whole < MODULUS


def test_digests_tell_step_slot_and_rows_apart():
    rows = np.arange(8)
    digests = {
        row_digest(0, range(8), rows),
        row_digest(1, range(8), rows),
        row_digest(0, range(1, 9), rows),
        row_digest(0, range(8), rows[::-1].copy()),
        row_digest(0, range(8), rows, rows * 0),
        row_digest(0, range(8), np.where(rows == 3, 4, rows)),
    }
    assert len(digests) == 6


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
def test_packing_holds_every_piece_once_and_is_best_fit(lengths, capacity):
    pieces, rows = best_fit_decreasing(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(pieces.tolist()) == list(range(len(lengths)))
    sums = [
        int(np.array(lengths)[pieces[a:b]].sum()) for a, b in zip(rows[:-1], rows[1:], strict=True)
    ]
    assert all(0 < s <= capacity for s in sums)
    assert len(sums) == naive(lengths, capacity)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 20))
def test_cutting_keeps_every_label_and_makes_no_lone_overlap(lengths, t):
    documents, starts, sizes = split_documents(np.array(lengths), t)
    assert int((sizes - 1).sum()) == sum(n - 1 for n in lengths)
    assert sizes.max() <= t + 1
    for d, n in enumerate(lengths):
        mine = [
            (s, s + z) for s, z in zip(starts[documents == d], sizes[documents == d], strict=True)
        ]
        assert mine[0][0] == 0 and mine[-1][1] == n
        # overlap of exactly one token
        assert all(a[1] - 1 == b[0] for a, b in zip(mine, mine[1:], strict=False))
        assert len(mine) == 1 if n <= t + 1 else all(b - a >= 2 for a, b in mine)


def test_packing_is_deterministic_and_full():
    lengths = np.minimum(
        np.random.default_rng(0).lognormal(6, 1.2, 100_000).astype(np.int64) + 1, 2049
    )
    pieces, rows = best_fit_decreasing(lengths, 2049)
    again, _ = best_fit_decreasing(lengths, 2049)
    assert np.array_equal(pieces, again)

    assert lengths.sum() / ((len(rows) - 1) * 2049) > 0.999


def test_packing_twice_the_pieces_takes_twice_the_operations():
    lengths = np.random.default_rng(0).integers(1, 2049, 4000)
    few, many = (
        count_operations(lambda n=n: best_fit_decreasing(lengths[:n], 2049)) for n in (2000, 4000)
    )
    assert many < 2.2 * few


def test_windows_are_packed_one_after_the_other():
    def listed(pieces, rows):
        return [row.tolist() for row in np.split(pieces, rows[1:-1])]

    lengths = np.random.default_rng(0).integers(1, 41, 50)
    windows = [(i, listed(*best_fit_decreasing(lengths[i : i + 7], 40))) for i in range(0, 50, 7)]
    assert listed(*pack(lengths, 40, 7)) == [
        [i + piece for piece in row] for i, rows in windows for row in rows
    ]
    assert listed(*pack(lengths, 40)) == listed(*best_fit_decreasing(lengths, 40))


def test_pieces_that_fit_no_row_are_bugs_and_none_make_no_row():
    for lengths in ([0, 3], [3, 6]):
        with pytest.raises(ValueError, match="not within 1 … 5"):
            best_fit_decreasing(lengths, 5)
    for packing in (best_fit_decreasing, pack):
        pieces, rows = packing(np.zeros(0, dtype=np.int64), 5)
        assert len(pieces) == 0 and rows.tolist() == [0]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_concatenated_rows_are_the_stream_cut_at_every_row(lengths, sequence_length, chance):
    order = list(range(len(lengths)))
    chance.shuffle(order)
    stream = [(d, t) for d in order for t in range(lengths[d])]
    document, start, length, rows = concatenate(np.array(lengths), sequence_length, np.array(order))
    found = [
        [(d, s + k) for k in range(n)] for d, s, n in zip(document, start, length, strict=True)
    ]
    rebuilt = [sum(found[a:b], []) for a, b in zip(rows[:-1], rows[1:], strict=True)]
    T = sequence_length
    expected = [stream[r * T : r * T + T + 1] for r in range(max(1, -(-(len(stream) - 1) // T)))]
    assert rebuilt == expected and (length >= 1).all()
