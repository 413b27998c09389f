"""The global order: pure, complete, the same for every world size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenscale.data.order.permutation import (
    MODULUS,
    get_samples,
    micro_steps,
    permute,
    rank_slots,
    row_digest,
    shard_rows,
)


@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
@settings(deadline=None, max_examples=60)
def test_the_permutation_is_a_bijection(n, seed, epoch):
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@pytest.mark.parametrize("n", [2**31 - 1, 2**40, 2**40 + 1, 2**62])
def test_the_permutation_works_at_large_sizes(n):
    index = np.unique(np.random.default_rng(0).integers(0, n, 2000))
    found = permute(index, n, 5)
    assert found.min() >= 0 and found.max() < n and len(np.unique(found)) == len(index)
    assert found.max() > n // 2  # it reaches the upper half


def test_the_permutation_is_pinned():
    """Golden values: a changed order would silently make old runs irreproducible."""
    assert permute(np.arange(8), 1000, seed=0).tolist() == [187, 648, 346, 904, 667, 892, 766, 790]
    assert permute(np.arange(8), 1000, seed=0, epoch=1).tolist() == [777, 94, 174, 22, 916, 881, 791, 485]
    assert get_samples(np.arange(98, 104), 100, 7).tolist() == [84, 22, 11, 63, 91, 9]
    assert row_digest(3, range(8), np.arange(100, 108)) == 4157173186050314
    assert row_digest(0, range(2, 4), np.arange(2), np.arange(2)) == 2813490987593071


def test_one_epoch_for_each_index():
    index, epochs = np.array([3, 3, 4]), np.array([0, 1, 1])
    expected = [int(permute(i, 50, 9, int(e))[0]) for i, e in zip(index, epochs, strict=True)]
    assert permute(index, 50, 9, epochs).tolist() == expected


def test_seeds_and_epochs_give_unlike_orders():
    orders = [permute(np.arange(500), 500, seed, epoch) for seed in range(4) for epoch in range(4)]
    for i, a in enumerate(orders):
        for b in orders[i + 1 :]:
            assert np.count_nonzero(a == b) < 15  # one expected by chance


def test_positions_are_spread_evenly():
    """Mean rank correlation of index and image over seeds is near zero: no drift along the epoch."""
    index = np.arange(1000)
    found = [np.corrcoef(index, permute(index, 1000, seed))[0, 1] for seed in range(40)]
    assert abs(np.mean(found)) < 0.03 and np.max(np.abs(found)) < 0.15


@pytest.mark.parametrize(("index", "n"), [(5, 5), (-1, 5), (0, 0), (0, 2**62 + 1)])
def test_indices_outside_are_bugs(index, n):
    with pytest.raises(ValueError, match="outside|range"):
        permute(index, n, 0)
    with pytest.raises(ValueError, match="rank 2 is outside"):
        rank_slots(8, 2, 2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 12])
@pytest.mark.parametrize("batch", [1, 5, 8, 12])
def test_shares_cover_the_batch_and_differ_by_at_most_one(batch, world_size):
    shares = [rank_slots(batch, rank, world_size) for rank in range(world_size)]
    assert [slot for s in shares for slot in s] == list(range(batch))
    sizes = [len(s) for s in shares]
    assert max(sizes) - min(sizes) <= 1
    for micro_batch in (1, 2, 3):
        assert micro_steps(batch, world_size, micro_batch) == max(-(-size // micro_batch) for size in sizes)


@pytest.mark.parametrize("rows, sizes", [(8, [3, 3, 2]), (4, [2, 2, 0]), (2, [1, 1, 0]), (9, [3, 3, 3])])
def test_shards_are_those_of_chunk(rows, sizes):
    shards = [shard_rows(rows, index, 3) for index in range(3)]
    assert [len(shard) for shard in shards] == sizes and [row for s in shards for row in s] == list(range(rows))


def test_a_rank_outside_the_world_is_a_bug():
    with pytest.raises(ValueError, match="rank 2 is outside"):
        rank_slots(8, 2, 2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 12])
def test_digests_of_ranks_add_up(world_size):
    rows = np.arange(100, 108)
    whole = row_digest(3, range(8), rows, rows + 1)
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
