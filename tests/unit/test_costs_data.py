"""What data cost: the formulas against counting, one row and one step after another; intervals against many samples."""

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
    assert costs.fill_share(lengths, t, len(rows) - 1) <= costs.bound_fill(lengths, t) + 1e-9


@given(LENGTHS, T, st.data())
def test_weights_are_repeated_documents(lengths, t, data):
    weights = np.array(data.draw(st.lists(st.integers(0, 4), min_size=len(lengths), max_size=len(lengths))))
    weights[0] += weights.sum() == 0
    repeated = np.repeat(lengths, weights)
    for function in (costs.padding_share, costs.cut_share, costs.cut_documents_share):
        found = function(lengths, t, np.array([weights, weights]))
        assert found == pytest.approx(np.full(2, function(repeated, t)))


def test_stalls_as_a_clock_would_show_them():
    rate, tokenizer, tokens = 40_000.0, 160_000.0, 1e6
    computing, tokenizing = tokens / rate, tokens / tokenizer
    assert costs.stall_share(rate, tokenizer) == pytest.approx(tokenizing / (computing + tokenizing))
    assert costs.core_share(rate, tokenizer) == pytest.approx(tokenizing / computing)
    for share in (0.01, 0.1, 0.5):
        assert costs.stall_share(costs.rate_at_stall(share, tokenizer), tokenizer) == pytest.approx(share)


def test_a_unit_is_drawn_whole():
    units = np.array([0, 0, 1, 2, 2, 2])
    weights = costs.bootstrap_weights(units, 4, 50, seed=1)  # a fourth unit holds no document
    assert weights.shape == (50, 6)
    assert (weights[:, 0] == weights[:, 1]).all() and (weights[:, 3] == weights[:, 5]).all()
    assert (costs.bootstrap_weights(np.arange(6), 6, 50, seed=1).sum(axis=1) == 6).all()
    assert (weights == costs.bootstrap_weights(units, 4, 50, seed=1)).all()


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """Of 200 samples of 400 documents, log-normal lengths; 95 % is what they say."""
    generator = np.random.default_rng(0)
    everything = np.maximum(1, generator.lognormal(6, 1, 200_000).astype(int))
    truth = [float(f(everything, 512)) for f in (costs.padding_share, costs.cut_share)]
    held = np.zeros(2)
    for number in range(200):
        lengths = generator.choice(everything, 400)
        weights = costs.bootstrap_weights(np.arange(400), 400, 200, seed=number)
        for i, function in enumerate((costs.padding_share, costs.cut_share)):
            low, high = costs.interval(function(lengths, 512, weights))
            held[i] += low <= truth[i] <= high
    assert (held / 200 > 0.90).all() and (held / 200 < 0.99).all()


def test_of_a_rare_thing_there_may_be_more():
    """Poisson counts: in 39 of 40 the bound is above the mean."""
    generator = np.random.default_rng(0)
    for mean in (1.0, 3.0, 10.0, 25.0):
        bounds = [costs.bound_count(int(k)) for k in generator.poisson(mean, 4000)]
        assert np.mean(np.array(bounds) >= mean) > 0.965


def test_a_sample_without_long_documents_does_not_say_that_there_are_none():
    """In 19 of 20 samples at least, the bound holds the share of documents that the sample missed."""
    generator = np.random.default_rng(0)
    missed = 0
    for share in (0.001, 0.005, 0.02):
        for _ in range(200):
            long = generator.random(300) < share
            if not long.any():
                missed += costs.bound_unseen_cut(np.full(300, 50))[0] < share
    assert missed / 600 < 0.05
