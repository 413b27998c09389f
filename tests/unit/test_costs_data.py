"""What exchanges and data cost, against published values, a ring carried out step by step, and
counting rows.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenscale.base.errors import UserError
from tokenscale.costs import data as costs
from tokenscale.costs.card import TextCard, compare_approaches
from tokenscale.costs.communication import bus_factor, fit_link, hops, solve_nonnegative
from tokenscale.data.order.packing import best_fit_decreasing, split_documents


def test_a_ring_of_n_ranks_takes_2_n_minus_2_turns_of_a_chunk_each_and_a_tree_of_many_fewer_hops():
    assert [bus_factor("all_reduce", ranks) for ranks in (1, 2, 8)] == [0, 1, 2 * 7 / 8]
    assert hops("all_reduce", 2, "tree") == hops("all_reduce", 2, "ring") == 2
    assert hops("all_reduce", 1024, "tree") == 20 and hops("all_reduce", 1024, "ring") == 2046
    assert hops("all_gather", 1024, "tree") == 1023


def test_nonnegative_least_squares_meets_the_kuhn_tucker_conditions():
    """The gradient is zero where a constant is above zero, and nonnegative elsewhere."""
    random = np.random.default_rng(7)
    bound = 0
    for _ in range(50):
        columns = random.normal(size=(6, 4))
        targets = random.normal(size=6)
        found = solve_nonnegative(columns, targets)
        gradient = columns.T @ (columns @ found - targets)
        assert (found >= 0).all() and gradient[found == 0].min(initial=0.0) >= -1e-9
        assert np.abs(gradient[found > 0]).max(initial=0.0) < 1e-9
        bound += 0 < (found == 0).sum() < 4
    assert bound > 20


def test_alpha_and_beta_of_a_link_are_recovered_from_a_sweep():
    sizes = [4096 * 4**n for n in range(8)]
    link, residuals = fit_link(
        "all_reduce", sizes, [2e-4 + 5e-11 * size for size in sizes], 2, "tree"
    )
    assert (link.alpha_s, link.beta_s_per_byte) == pytest.approx((1e-4, 5e-11))
    assert residuals == pytest.approx([0] * 8, abs=1e-9)
    with pytest.raises(UserError, match="one message size cannot separate"):
        fit_link("all_reduce", [4096, 4096], [1e-3, 1e-3], 2, "tree")


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
    # a piece's first token is nobody's label in its row
    useful = sum(int(size) - 1 for size in sizes[pieces])
    assert costs.fill_share(lengths, t, len(rows) - 1) == pytest.approx(
        useful / ((len(rows) - 1) * t)
    )


def test_buckets_pad_to_the_longest_of_documents_of_similar_length():
    lengths = np.array([65, 5, 129, 3])  # with BOS: 64, 4, 128 and 2 labels
    assert costs.bucketed_share(lengths, 256, batch=2, multiple=64) == (4 + 2 + 64 + 128) / (
        2 * 64 + 2 * 128
    )
    assert costs.bucketed_share(lengths, 100, batch=2, multiple=64) == (4 + 2 + 64 + 100) / (
        2 * 64 + 2 * 100
    )


@given(LENGTHS, T)
def test_the_card_of_a_text_counts_rows_of_each_approach(lengths, t):
    found = compare_approaches(lengths, t)
    assert set(found) == {"packed", "token-list", "length-bucketed", "pretokenized-padded"}
    capacity = t + 1
    pieces = split_documents(lengths, t)[2]
    packed, pointers = best_fit_decreasing(pieces, capacity)
    rows = len(pointers) - 1
    padding = rows * capacity - pieces.sum()
    assert found["packed"]["padding"] == pytest.approx(padding / (rows * t), abs=1e-9)
    padded = found["pretokenized-padded"]
    assert padded["useful"] + padded["padding"] == pytest.approx(1)
    for approach in ("packed", "token-list"):
        assert found[approach]["cut"] == 0
    assert padded["cut"] == found["length-bucketed"]["cut"] == costs.cut_share(lengths, t)


def test_the_card_of_a_text_shows_little_of_it_and_what_was_dropped():
    card = TextCard(
        documents=3,
        text_bytes=30,
        dropped={"duplicates": 7, "empty": 0},
        lengths=np.array([2, 3, 10]),
        samples=["secret " * 9, "two\nlines"],
    )
    dropped, document, begin = card.describe()
    assert dropped == "dropped: 7 duplicates"
    assert document.startswith("a document: 3 tokens in the median, 95 % at most 9, the largest 10")
    assert document.endswith("; 0.500 tokens a byte")
    assert begin == f"begin: {('secret ' * 9)[:40]}… | two lines"
    assert card.describe_rows(4).endswith("pretokenized-padded cuts 41.7% and pads 41.7%")
