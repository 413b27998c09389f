"""Order statistics, permutation tests, and words that promise no more than holds."""

import itertools
import math

import numpy as np
import pytest

from tokenscale.analysis.statistics import holm, order_statistic_rank, ratio_of_medians, sign_flip_p, summary


@pytest.mark.parametrize(
    ("n", "k", "coverage"),
    # Conover, Practical Nonparametric Statistics; binomial tables with p = 1/2
    [
        (6, 1, 0.96875),
        (8, 1, 0.9921875),
        (9, 2, 0.9609375),
        (10, 2, 0.978515625),
        (12, 3, 0.96142578125),
        (20, 6, 0.9586105),
    ],
)
def test_ranks_are_those_of_published_tables(n, k, coverage):
    rank, covered = order_statistic_rank(n)
    assert rank == k
    assert covered == pytest.approx(coverage, abs=1e-6)


@pytest.mark.parametrize("n", range(1, 6))
def test_below_six_runs_nothing_is_called_an_interval(n):
    kind = summary(range(1, n + 1)).kind
    assert order_statistic_rank(n) is None
    assert "%" not in kind
    assert kind == ("single run" if n == 1 else "range, not an interval")


def test_no_runs_give_no_number():
    assert summary([]).n == 0
    assert math.isnan(summary([]).median)


@pytest.mark.parametrize("n", [6, 9, 15])
@pytest.mark.parametrize("draw", ["normal", "lognormal"])
def test_intervals_cover_the_median_as_often_as_they_say(n, draw):
    random = np.random.default_rng(n)
    samples = np.sort(getattr(random, draw)(size=(4000, n)), axis=1)
    k, coverage = order_statistic_rank(n)
    median = 0.0 if draw == "normal" else 1.0
    covered = ((samples[:, k - 1] <= median) & (median <= samples[:, n - k])).mean()
    assert covered == pytest.approx(coverage, abs=4 * math.sqrt(coverage * (1 - coverage) / 4000))


def test_sign_flips_are_all_enumerated():
    differences = [0.3, -0.1, 0.5, 0.2, -0.05]
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=5)
    ]
    expected = np.mean([s >= abs(sum(differences)) - 1e-12 for s in sums])
    assert sign_flip_p(differences) == (expected, 2 / 32)


@pytest.mark.parametrize(("n", "reaches"), [(5, False), (6, True)])
def test_six_pairs_are_the_fewest_that_can_reach_five_percent(n, reaches):
    p, smallest = sign_flip_p([1.0] * n)
    assert p == smallest
    assert (p < 0.05) is reaches


def test_many_pairs_are_tested_by_chance_with_one_seed():
    differences = np.linspace(-0.1, 0.5, 30)
    assert sign_flip_p(differences) == sign_flip_p(differences)
    assert sign_flip_p(differences)[0] < 0.001


def cells(ratio, n=8, noise=0.004):
    noise = noise * np.cos(np.arange(n))
    return {i: 100.0 * ratio * math.exp(noise[i]) for i in range(n)}, {i: 100.0 for i in range(n)}


@pytest.mark.parametrize(
    ("ratio", "n", "noise", "word"),
    [
        (1.2, 8, 0.004, "faster"),
        (0.8, 8, 0.004, "slower"),
        (1.0, 8, 0.004, "same within 1 %"),
        (1.0, 8, 0.2, "no difference shown"),
        (2.0, 5, 0.0, "too few runs"),
        (2.0, 1, 0.0, "too few runs"),
    ],
)
def test_verdicts(ratio, n, noise, word):
    assert ratio_of_medians(*cells(ratio, n, noise)).verdict == word


def test_only_repeats_that_both_have_are_paired():
    found = ratio_of_medians({0: 2.0, 1: 4.0, 7: 9.0}, {0: 1.0, 1: 2.0, 8: 1.0})
    assert (found.n, found.ratio, found.paired) == (2, 2.0, 2.0)


def test_nothing_to_pair_is_too_few():
    assert ratio_of_medians({0: 1.0}, {1: 1.0}).verdict == "too few runs"


def test_holm_keeps_the_order_and_never_falls():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        summary([1.0, math.nan])
