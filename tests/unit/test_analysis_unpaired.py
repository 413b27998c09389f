"""Two samples that are not paired: exact numbers by enumeration, coverage by simulation, words."""

import itertools
import math

import numpy as np
import pytest

from tokenscale.analysis import statistics
from tokenscale.analysis.statistics import Unpaired, compare, compare_unpaired, permutation_p, rank


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (3, 3), (4, 4), (3, 5), (6, 2)])
def test_the_distribution_of_the_rank_sum_is_that_of_all_orders(n, m):
    counts = [0] * (n * m + 1)
    for places in itertools.combinations(range(n + m), n):
        counts[sum(places) - n * (n - 1) // 2] += 1
    assert statistics._mann_whitney(n, m) == counts


@pytest.mark.parametrize(("n", "m"), [(4, 4), (3, 5), (5, 5), (6, 9)])
def test_the_interval_is_the_narrowest_that_covers_often_enough(n, m):
    counts, total = statistics._mann_whitney(n, m), math.comb(n + m, n)
    k, covered = rank(n, m)
    assert covered == pytest.approx(1 - 2 * sum(counts[:k]) / total) and covered >= 0.95
    assert 1 - 2 * sum(counts[: k + 1]) / total < 0.95


def test_the_interval_leaves_out_as_many_ratios_above_as_below():
    random = np.random.default_rng(2)
    a, b = random.uniform(1, 2, 5), random.uniform(1, 2, 6)
    every = sorted(x / y for x in a for y in b)
    found, (k, _) = compare(a, b), rank(5, 6)
    assert k > 1 and (found.low, found.high) == pytest.approx((every[k - 1], every[30 - k]))


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 9), (2, 2), (3, 3), (3, 4)])
def test_too_few_runs_have_no_interval(n, m):
    assert rank(n, m) is None
    found = compare(np.linspace(2, 2.1, n), np.linspace(1, 1.1, m))
    assert "%" not in found.kind
    assert compare_unpaired(found, found.p, found.smallest_p) == "too few runs"


def test_the_interval_covers_the_true_ratio_as_often_as_it_says():
    random = np.random.default_rng(1)
    within = 0
    for _ in range(2000):
        found = compare(1.3 * np.exp(random.standard_t(3, 5) * 0.1), np.exp(random.standard_t(3, 6) * 0.1))
        within += found.low <= 1.3 <= found.high
    covered = rank(5, 6)[1]
    assert abs(within / 2000 - covered) < 3 * math.sqrt(covered * (1 - covered) / 2000)


def test_the_test_is_exact():
    a, b = np.log([1.0, 1.4, 1.3]), np.log([1.1, 0.9, 1.2, 0.8])
    pooled = np.concatenate([a, b])
    observed = abs(a.mean() - b.mean())
    sums = []
    for places in itertools.combinations(range(7), 3):
        rest = [i for i in range(7) if i not in places]
        sums.append(abs(pooled[list(places)].mean() - pooled[rest].mean()))
    assert permutation_p(a, b)[0] == pytest.approx(np.mean(np.array(sums) >= observed - 1e-12))


def test_many_runs_are_tested_with_random_ways(monkeypatch):
    monkeypatch.setattr(statistics, "EXACT_WAYS", 10)
    monkeypatch.setattr(statistics, "DRAWS", 5000)
    a, b = np.log([1.0, 1.4, 1.3, 1.2]), np.log([1.1, 0.9, 1.2, 0.8])
    random = permutation_p(a, b)[0]
    assert random == permutation_p(a, b)[0]
    monkeypatch.undo()
    assert random == pytest.approx(permutation_p(a, b)[0], abs=0.02)


@pytest.mark.parametrize(
    ("low", "high", "p", "word"),
    [
        (1.02, 1.3, 0.01, "higher"),
        (0.7, 0.98, 0.01, "lower"),
        (0.995, 1.005, 0.01, "equivalent"),
        (0.98, 1.3, 0.3, "no difference shown"),
        (1.02, 1.3, 0.06, "no difference shown"),
    ],
)
def test_words(low, high, p, word):
    assert compare_unpaired(Unpaired((5, 5), 1.0, 1.0, low, high, "", p, 0.01), p, 0.01) == word
    assert compare_unpaired(Unpaired((5, 5), 1.0, 1.0, low, high, "", p, 0.06), p, 0.06) == "too few runs"


@pytest.mark.parametrize(("a", "b"), [([1.0, 0.0], [1.0]), ([1.0], [math.nan]), ([], [1.0]), ([-1.0], [1.0])])
def test_ratios_need_values_above_zero(a, b):
    with pytest.raises(ValueError, match="above zero"):
        compare(a, b)
