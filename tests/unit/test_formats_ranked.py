"""The codec of ranked ids: every id comes back, equal ids give equal bytes, no damage crashes."""

import importlib.util
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tokenscale.data.stores import ranked
from tokenscale.data.stores.ranked import MAX_RANKS, NO_RANK, TWO_END, count_ids, pack, rank_ids, unpack

V = 131_072
HEADER = 12
needs_zstandard = pytest.mark.skipif(not importlib.util.find_spec("zstandard"), reason="needs the package zstandard")
LEVELS = [4, *(pytest.param(name, marks=needs_zstandard) for name in ranked.SETTINGS)]


def ranking_of(ids, vocabulary=V):
    counts = np.zeros(vocabulary, dtype=np.int64)
    count_ids(ids, counts)
    return rank_ids(counts)


def everything_ranked(vocabulary):
    """Rank = id, so that a test chooses codes by choosing ids."""
    return rank_ids(np.ones(vocabulary, dtype=np.int64))


def came_back(ids, ids_by_rank, rank_of_id, level=4):
    found = unpack(pack(ids, rank_of_id, level), ids_by_rank, len(ids))
    return found.dtype == np.uint32 and np.array_equal(found, ids)


def some_ids(n=200_000, seed=0):
    """Frequencies as in text: a few ids often, most of them rarely."""
    return (np.random.default_rng(seed).zipf(1.2, size=n) % V).astype(np.uint32)


# Both sides of every border between lengths of codes, and of each byte within.
BORDERS = sorted(
    {max(0, b + d) for b in (0, 128, 128 + 255, TWO_END, TWO_END + 255, TWO_END + 65_280, V - 1) for d in (-1, 0, 1)}
    - {V}
)
IDS = st.one_of(
    arrays(np.uint32, st.integers(0, 300), elements=st.integers(0, V - 1)),
    arrays(np.uint32, st.integers(0, 300), elements=st.sampled_from(BORDERS)),
    arrays(np.uint32, st.integers(0, 300), elements=st.integers(0, V - 1), fill=st.sampled_from(BORDERS)),
)


@settings(deadline=None, max_examples=150)
@given(ids=IDS, chunk=st.sampled_from([1, 2, 3, 7, 8, 64, 1 << 16]))
@example(ids=np.zeros(0, dtype=np.uint32), chunk=1 << 16)
@example(ids=np.array([V - 1], dtype=np.uint32), chunk=1)
@example(ids=np.full(300, 65_536, dtype=np.uint32), chunk=7)
def test_ids_come_back_whatever_their_codes_and_wherever_chunks_end(ids, chunk):
    ranks = everything_ranked(V)
    with pytest.MonkeyPatch.context() as patch:
        data = pack(ids, ranks[1], 4)
        # a code of two bytes must fit into what is looked at together
        patch.setattr(ranked, "_CHUNK", max(chunk, 2))
        assert np.array_equal(unpack(data, ranks[0], len(ids)), ids)
        patch.setattr(ranked, "_CHUNK", chunk)
        assert pack(ids, ranks[1], 4) == data


@settings(deadline=None, max_examples=60)
@given(ids=arrays(np.uint16, st.integers(1, 200), elements=st.integers(0, 999)))
def test_ids_come_back_under_their_own_ranking(ids):
    assert came_back(ids, *ranking_of(ids, vocabulary=1000))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "ids",
    [
        some_ids(),
        np.arange(V, dtype=np.uint32),
        np.arange(V - 1, 65_535, -1, dtype=np.uint32),
        np.full(100_000, 7, dtype=np.uint32),
        np.arange(256, dtype=np.uint8),
        np.zeros(0, dtype=np.uint16),
    ],
    ids=["like text", "each once", "all beyond 65,535", "all equal", "bytes", "none"],
)
def test_ids_come_back_at_every_level(ids, level):
    assert came_back(ids, *ranking_of(ids), level)
    assert came_back(ids, *everything_ranked(V), level)


def test_frames_larger_than_zstds_window_come_back():
    """Their headers are laid out differently."""
    ids = np.random.default_rng(0).integers(0, V, size=400_000).astype(np.uint32)
    assert pack(ids, everything_ranked(V)[1], 1)[HEADER + 4] & 0x20 == 0
    assert came_back(ids, *everything_ranked(V), level=1)


def test_the_last_rank_of_all_comes_back_and_one_more_id_is_refused():
    ids = np.array([MAX_RANKS - 1, 0, MAX_RANKS - 2], dtype=np.uint32)
    assert came_back(ids, *everything_ranked(MAX_RANKS))
    with pytest.raises(ValueError, match="292,614 different ids"):
        everything_ranked(MAX_RANKS + 1)


@pytest.mark.parametrize("level", LEVELS)
def test_equal_ids_give_equal_bytes(level):
    ids = some_ids()
    rank_of_id = ranking_of(ids)[1]
    copy = np.concatenate([ids, ids])[::-1][: len(ids)][::-1]  # other memory, other strides
    assert pack(copy, rank_of_id, level) == pack(ids, rank_of_id, level)


def test_the_layout_is_the_one_that_is_documented():
    ids_by_rank, rank_of_id = everything_ranked(V)
    data = pack(np.array([5, 128, 31_492, 31_493 + 65_280 + 2 * 255 + 1, 127], dtype=np.uint32), rank_of_id, 4)
    codes, thirds, frame = struct.unpack_from("<III", data)
    assert (codes, thirds, frame) == (8, 1, len(data) - HEADER)
    content = pa.Codec("zstd").decompress(data[HEADER:], decompressed_size=9, asbytes=True)
    assert list(content) == [5, 128, 0, 250, 254, 252, 1, 127, 2]


def test_ranks_follow_the_counts_and_ties_the_ids():
    ids_by_rank, rank_of_id = rank_ids(np.array([3, 0, 7, 3, 7, 1]))
    assert ids_by_rank.tolist() == [2, 4, 0, 3, 5]
    assert rank_of_id.tolist() == [2, NO_RANK, 0, 3, 1, 4]
    counts = np.random.default_rng(1).integers(1, 9, size=5000)
    assert rank_ids(counts)[0].tolist() == sorted(range(5000), key=lambda i: (-counts[i], i))


def test_counts_add_up_over_pieces():
    ids = some_ids(n=700_000)
    counts = np.zeros(V, dtype=np.int64)
    for piece in np.array_split(ids, 3):
        count_ids(piece, counts)
    assert np.array_equal(counts, np.bincount(ids, minlength=V))


def test_ids_like_text_take_little_more_than_their_entropy():
    ids = some_ids()
    p = np.bincount(ids)[np.bincount(ids) > 0] / len(ids)
    assert len(pack(ids, ranking_of(ids)[1], 4)) * 8 < 1.1 * len(ids) * -(p * np.log2(p)).sum()


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (np.array([1, 2]), "uint32"),
        (np.array([1.0], dtype=np.float32), "uint32"),
        (np.array([1], dtype=np.uint64), "uint32"),
        (np.array([[1]], dtype=np.uint32), "uint32"),
        (np.array([10], dtype=np.uint32), "id 10 in a vocabulary of 10"),
        (np.array([1, 3, 1], dtype=np.uint32), "id 3 has no rank"),
    ],
)
def test_ids_that_cannot_be_packed_are_refused(ids, match):
    with pytest.raises(ValueError, match=match):
        pack(ids, ranking_of(np.array([1, 2], dtype=np.uint8), vocabulary=10)[1], 4)


def test_an_id_beyond_the_vocabulary_is_not_counted():
    with pytest.raises(ValueError, match="id 10 in a vocabulary of 10"):
        count_ids(np.array([10], dtype=np.uint32), np.zeros(10, dtype=np.int64))


@pytest.fixture(scope="module")
def small():
    """A block with codes of every length: (data, ids_by_rank, ids)."""
    ids = np.array([*BORDERS, *range(64), *BORDERS, *range(100, 400, 7)], dtype=np.uint32)
    ids_by_rank, rank_of_id = everything_ranked(V)
    return pack(ids, rank_of_id, 4), ids_by_rank, ids


def test_a_truncated_block_is_refused_at_every_length(small):
    data, ids_by_rank, ids = small
    for length in range(len(data)):
        with pytest.raises(ValueError):
            unpack(data[:length], ids_by_rank, len(ids))


def test_trailing_bytes_are_refused(small):
    data, ids_by_rank, ids = small
    skippable = b"\x50\x2a\x4d\x18\x00\x00\x00\x00"  # zstd itself would read over it
    for more in (b"\0", data, skippable):
        with pytest.raises(ValueError, match="frame of"):
            unpack(data + more, ids_by_rank, len(ids))


def test_every_changed_byte_is_refused_or_gives_as_many_known_ids(small):
    data, ids_by_rank, ids = small
    refused = 0
    for at in range(len(data)):
        for flip in (*(1 << bit for bit in range(8)), 0xFF):
            changed = bytearray(data)
            changed[at] ^= flip
            try:
                found = unpack(bytes(changed), ids_by_rank, len(ids))
            except ValueError:
                refused += 1
            else:
                assert at >= HEADER and found.shape == ids.shape and found.max() < V
    assert refused > 9 * HEADER


def test_another_number_of_ids_is_refused(small):
    data, ids_by_rank, ids = small
    for n in (0, 1, len(ids) - 1, len(ids) + 1, 2 * len(ids), 1 << 40):
        with pytest.raises(ValueError):
            unpack(data, ids_by_rank, n)


def block(codes, thirds=b"", said=None):
    content = bytes(codes) + bytes(thirds)
    frame = pa.Codec("zstd", 1).compress(content, asbytes=True)
    return struct.pack("<III", *(said or (len(codes), len(thirds))), len(frame)) + frame


@pytest.mark.parametrize(
    ("data", "n", "match"),
    [
        (block([1, 200]), 2, "cut"),
        (block([1, 2, 3, 200]), 3, "cut, or not 3"),
        (block([1, 2, 3, 4]), 3, "not 3 of them"),
        (block([128, 1, 128, 1]), 3, "2 ids"),
        (block([252, 0]), 1, "third bytes are missing"),
        (block([1, 252, 0], [0, 0]), 2, "cannot be 2 ids"),
        (block([1, 128, 1, 2], [0]), 3, "expected 3 with 1"),
        (block([130, 0]), 1, "a rank that none"),
        (block([128, 12]), 1, "a rank that none"),
        (block([251, 0], [0]), 1, "rank 31493 of 140"),
        (block([254, 254], [255]), 1, "rank 292612 of 140"),
        (block([255, 0], [0]), 1, "a byte 255"),
        (block([251, 255], [0]), 1, "a byte 255"),
        (block([1, 2], said=(3, 0)), 3, "not a zstd frame of 3 bytes"),
        (block([1, 2, 3], said=(2, 0)), 2, "not a zstd frame of 2 bytes"),
        (block([1], said=(0xFFFFFFFF, 0)), 1, "cannot be 1 ids"),
        (block([1], said=(1, 0xFFFFFFFF)), 1, "cannot be 1 ids"),
    ],
    ids=lambda value: "block" if isinstance(value, bytes) else str(value),
)
def test_well_formed_frames_with_impossible_codes_are_refused(data, n, match):
    with pytest.raises(ValueError, match=match):
        unpack(data, np.arange(140, dtype=np.uint32), n)


@settings(deadline=None, max_examples=300)
@given(
    codes=st.binary(max_size=60), thirds=st.binary(max_size=4), n=st.integers(0, 40), ranks=st.sampled_from([0, 140, V])
)
def test_any_codes_at_all_are_refused_or_known_ids(codes, thirds, n, ranks):
    try:
        found = unpack(block(codes, thirds), np.arange(ranks, dtype=np.uint32), n)
    except ValueError:
        return
    assert len(found) == n and (n == 0 or found.max() < ranks)
