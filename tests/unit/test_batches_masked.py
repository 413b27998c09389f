"""Masked-LM batches: the same sample is masked alike wherever it is, and only what counts is masked."""

import numpy as np
import pytest

from tests.corpora import HOSTILE, Lab, make_run, texts_around
from tokenscale.batches.masked import mask_tokens
from tokenscale.formats.labels import IGNORED
from tokenscale.settings.run import APPROACHES

V, BOS, EOS, PAD, MASK = 1000, 0, 1, 2, 1000
OPTIONS = dict(vocabulary_size=V, mask_id=MASK, special_ids=(BOS, EOS, PAD))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"), [*HOSTILE, *texts_around(16)], vocabulary_size=262)


def plain(n, T, seed=0):
    """Rows of ordinary tokens, one BOS at the front, nothing padded: (tokens, labels)."""
    rows = np.random.default_rng(seed).integers(3, V, (n, T + 1))
    rows[:, 0] = BOS
    return rows[:, :-1], rows[:, 1:]


def test_a_sample_is_masked_alike_in_every_batch():
    tokens, labels = plain(40, 64)
    samples = np.arange(40) * 7919
    whole = mask_tokens(tokens, labels, samples, seed=3, **OPTIONS)
    order = np.random.default_rng(1).permutation(40)
    for part in np.array_split(order, 7):
        found = mask_tokens(tokens[part], labels[part], samples[part], seed=3, **OPTIONS)
        assert all(np.array_equal(a, b[part]) for a, b in zip(found, whole, strict=True))


@pytest.mark.parametrize("change", [dict(seed=4), dict(samples=np.arange(1, 41)), dict(seed=-1), dict(seed=1 << 70)])
def test_another_seed_or_sample_masks_otherwise(change):
    tokens, labels = plain(40, 64)
    one = mask_tokens(tokens, labels, **dict(seed=3, samples=np.arange(40)), **OPTIONS)[1] != IGNORED
    other = mask_tokens(tokens, labels, **(dict(seed=3, samples=np.arange(40)) | change), **OPTIONS)[1] != IGNORED
    overlap = (one & other).sum() / one.sum()
    assert 0.05 < overlap < 0.25  # chance: 0.15


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.15, 0.4])
def test_shares_are_those_stated(seed, share):
    tokens, labels = plain(200, 512, seed)
    inputs, targets = mask_tokens(tokens, labels, np.arange(200), seed=seed, share=share, **OPTIONS)
    chosen = targets != IGNORED
    useful = tokens[:, 1:].size

    def within(found, n, p):
        return abs(found - n * p) < 4.5 * (n * p * (1 - p)) ** 0.5

    count = chosen.sum()
    drawn = chosen & (inputs != MASK) & (inputs != tokens)
    assert within(count, useful, share)
    assert within((inputs == MASK).sum(), count, 0.8)
    assert within(drawn.sum(), count, 0.1 * (1 - 1 / (V - 3)))  # a draw may give the same token
    by_position = chosen.sum(axis=0)[1:]
    assert abs(by_position - 200 * share).max() < 5 * (200 * share * (1 - share)) ** 0.5
    assert np.array_equal(targets[chosen], tokens[chosen])
    assert np.array_equal(inputs[~chosen], tokens[~chosen])


def test_draws_come_from_all_of_the_vocabulary_but_special_ids():
    for special, mask_id in (((), 12), ((0, 1, 2), 12), ((5, 11, 3, 3), 0), ((7,), 4)):
        tokens = np.full((400, 64), 6)
        inputs, _ = mask_tokens(
            tokens, tokens, np.arange(400), seed=0, vocabulary_size=12, mask_id=mask_id, special_ids=special, share=1.0
        )
        assert set(np.unique(inputs)) == (set(range(12)) - set(special)) | {mask_id}
        counts = np.bincount(inputs[inputs != mask_id], minlength=12)
        counts = np.array([c for i, c in enumerate(counts) if i not in {*special, mask_id, 6}])
        assert counts.min() > 0.75 * counts.mean()


@pytest.mark.parametrize("approach", APPROACHES)
def test_padding_bos_and_eos_are_never_masked(lab, approach):
    """On real batches, with all of what counts chosen: exactly the labels that count, and no EOS."""
    batches = lab.batches(make_run(approach, sequence_length=16, eos=True, global_batch=6))
    special = (BOS, EOS, PAD)
    for step in range(30):
        batch = batches.next().copy()
        tokens, labels = batch.tokens_bt, batch.labels_bt
        samples = step * 6 + np.arange(6)
        inputs, targets = mask_tokens(
            tokens, labels, samples, seed=0, vocabulary_size=262, mask_id=262, special_ids=special, share=1.0
        )
        counted = np.zeros_like(tokens, dtype=bool)
        counted[:, 1:] = labels[:, :-1] != IGNORED
        assert np.array_equal(targets != IGNORED, counted & (tokens != EOS))
        assert not np.isin(targets, special).any()
        assert np.array_equal(inputs[~counted], tokens[~counted])
        assert inputs.dtype == targets.dtype == np.int64


def test_a_batch_without_rows_stays_one():
    nothing = np.zeros((0, 8), dtype=np.int64)
    inputs, labels = mask_tokens(nothing, nothing, np.zeros(0, dtype=np.int64), seed=0, **OPTIONS)
    assert inputs.shape == labels.shape == (0, 8)
