"""Order statistics, permutation tests, and words that promise no more than holds."""

import itertools
import math

import numpy as np
import pytest
from benchmarks import verdicts

from tokenscale.analysis import statistics
from tokenscale.analysis.statistics import holm, order_statistic_rank, sign_flip_p, summary

#: Conover, Practical Nonparametric Statistics; binomial tables with p = 1/2: runs, rank, coverage
PUBLISHED = [(6, 1, 0.96875), (8, 1, 0.9921875), (9, 2, 0.9609375), (10, 2, 0.978515625), (12, 3, 0.961425781)]


@pytest.mark.parametrize(("n", "k", "coverage"), [*PUBLISHED, (20, 6, 0.9586105)])
def test_ranks_are_those_of_published_tables(n, k, coverage):
    assert order_statistic_rank(n) == (k, pytest.approx(coverage, abs=1e-6))


def test_below_six_runs_nothing_is_called_an_interval_and_no_number_is_refused():
    for n in range(1, 6):
        assert order_statistic_rank(n) is None
        assert summary(range(1, n + 1)).kind == ("single run" if n == 1 else "range, not an interval")
    assert summary([]).n == 0 and math.isnan(summary([]).median)
    with pytest.raises(ValueError, match="not finite"):
        summary([1.0, math.nan])


@pytest.mark.parametrize("n", range(6, 21, 2))
@pytest.mark.parametrize(("name", "median"), [("normal", 0.0), ("lognormal", 1.0)])
def test_intervals_cover_the_median_as_often_as_they_say(n, name, median):
    samples = getattr(np.random.default_rng(n), name)(size=(4000, n))
    spreads = [summary(sample) for sample in samples[:5]]
    k, coverage = order_statistic_rank(n)
    ordered = np.sort(samples, axis=1)
    assert [(s.low, s.high) for s in spreads] == [(x[k - 1], x[n - k]) for x in ordered[:5]]
    covered = ((ordered[:, k - 1] <= median) & (median <= ordered[:, n - k])).mean()
    assert covered == pytest.approx(coverage, abs=4 * math.sqrt(coverage * (1 - coverage) / 4000))
    assert 0.95 <= coverage <= 0.996


def test_sign_flips_are_all_enumerated():
    differences = [0.3, -0.1, 0.5, 0.2, -0.05]
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product((1, -1), repeat=5)]
    expected = np.mean([s >= abs(sum(differences)) - 1e-12 for s in sums])
    assert sign_flip_p(differences) == (expected, 2 / 32)
    many = np.linspace(-0.1, 0.5, 30)  # by chance, with one seed
    assert sign_flip_p(many) == sign_flip_p(many) and sign_flip_p(many)[0] < 0.001


def cells(ratio, n=8, noise=0.004):
    noise = noise * np.cos(np.arange(n))
    return {i: 100.0 * ratio * math.exp(noise[i]) for i in range(n)}, {i: 100.0 for i in range(n)}


def judge(values, baseline):
    found = statistics.compare_pairs(values, baseline)
    return statistics.verdict(found.spread, found.p, found.smallest_p)


@pytest.mark.parametrize(
    ("ratio", "n", "noise", "word"),
    [
        (1.2, 8, 0.004, "faster"),
        (0.8, 8, 0.004, "slower"),
        (1.0, 8, 0.004, "equivalent"),
        (1.0, 8, 0.2, "no difference shown"),
        (2.0, 5, 0.0, "too few runs"),
        (2.0, 1, 0.0, "too few runs"),
        (1.004, 8, 0.001, "equivalent"),  # within the margin
        (1.006, 8, 0.0055, "faster by less than 1 %"),
        (1 / 1.006, 8, 0.0055, "slower by less than 1 %"),
        (1.004, 5, 0.001, "too few runs"),
    ],
)
def test_verdicts(ratio, n, noise, word):
    assert judge(*cells(ratio, n, noise)) == word


def test_only_repeats_that_both_have_are_paired():
    found = statistics.compare_pairs({0: 2.0, 1: 4.0, 7: 9.0}, {0: 1.0, 1: 2.0, 8: 1.0})
    assert (found.spread.n, found.ratio, found.spread.median) == (2, 2.0, 2.0)
    assert judge({0: 1.0}, {1: 1.0}) == "too few runs"


def test_holm_keeps_the_order_and_never_falls():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@pytest.mark.parametrize("family", [1, 2, 4, 10])
def test_the_fewest_pairs_are_those_that_holm_leaves_a_chance(family):
    n = statistics.fewest_pairs(family)
    assert holm([sign_flip_p([1.0] * n)[0]] * family)[0] < 0.05
    assert n == 6 or holm([sign_flip_p([1.0] * (n - 1))[0]] * family)[0] >= 0.05


@pytest.mark.parametrize("drift", [0.0, 0.25])
@pytest.mark.parametrize("noise", verdicts.NOISE)
@pytest.mark.parametrize(("family", "n"), [(1, 6), (1, 9), (3, 7)])
def test_equal_cells_are_rarely_called_different_and_as_often_faster_as_slower(family, n, noise, drift):
    """In the order of the design; cells share one baseline, as packed and padded rows do."""
    faster, slower = verdicts.simulate(family, n, noise, 0.02, drift, 200)
    assert faster + slower <= 0.05 + 3.5 * math.sqrt(0.05 * 0.95 / 200)
    assert max(faster, slower) <= 0.025 + 3.5 * math.sqrt(0.025 * 0.975 / 200)
