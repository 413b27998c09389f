"""Intervals, permutation tests, and words that promise no more than holds; drift and
steadiness.
"""

import functools
import itertools
import math
import random
import tracemalloc
from collections import Counter
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.benchmarks import verdicts
from tests.operations import count_operations
from tokenscale.analysis import tables
from tokenscale.referee import statistics
from tokenscale.referee.expectations import NotCheckedError, Steps
from tokenscale.referee.statistics import (
    drift,
    holm,
    measure_spread,
    noise_floor,
    order_kept,
    sign_flip_p,
    summarize_pairs,
    summary,
)
from tokenscale.referee.steadiness import LEAST_SPREAD, _distances, find_unsteadiness


@pytest.mark.parametrize("n", range(6, 13))
def test_a_range_of_six_or_more_runs_covers_the_median_as_often_as_stated(n):
    spread = summary(np.random.default_rng(n).permutation(n))
    assert (spread.low, spread.high, spread.kind) == (0, n - 1, "range")
    assert 1 - 2 / 2**n >= 0.968


def test_below_six_pairs_nothing_is_called_an_interval_and_no_number_is_refused():
    for n in range(1, 6):
        assert summarize_pairs(range(1, n + 1), ratios=True) == summary(range(1, n + 1))
        assert summary(range(1, n + 1)).kind == ("single run" if n == 1 else "range")
    assert (
        summarize_pairs(range(1, statistics.fewest_pairs() + 1), ratios=True).kind
        == "95 % interval"
    )
    assert summary([]).n == 0 and math.isnan(summary([]).median)
    with pytest.raises(ValueError, match="not finite"):
        summary([1.0, math.nan])


differences = st.lists(st.floats(-3.0, 3.0), min_size=6, max_size=12)


@hypothesis.given(differences, st.sampled_from(["low", "high"]))
def test_an_interval_has_the_centres_that_the_test_does_not_reject(values, end):
    """The ends themselves are not rejected; what lies beyond them is, unless the median does too."""
    found = summarize_pairs(np.exp(values), ratios=True)
    centre = math.log(getattr(found, end))
    beyond = -1e-6 if end == "low" else 1e-6
    if abs(math.log(found.median) - centre) > 1e-9:
        assert sign_flip_p(np.array(values) - centre)[0] >= 0.05
        assert sign_flip_p(np.array(values) - centre - beyond)[0] < 0.05
    assert found.low <= found.median <= found.high


@pytest.mark.parametrize("n", [6, 9, 14, 17, 30])
def test_the_interval_excludes_one_where_the_test_rejects_equality(n):
    for seed in range(40 if n < 14 else 4):
        values = np.random.default_rng(seed).normal(0.5, 1.0, n)
        found = summarize_pairs(np.exp(values), ratios=True)
        if found.low < found.median < found.high:
            assert (not found.low <= 1 <= found.high) == (sign_flip_p(values)[0] < 0.05)


@pytest.mark.parametrize("n", [6, 7, 8, 11])
def test_an_interval_covers_the_centre_of_equal_pairs_in_95_percent(n):
    random = np.random.default_rng(n)
    covered = 0
    for _ in range(1000):
        found = summarize_pairs(np.exp(random.standard_t(2, n)), ratios=True)
        covered += found.low <= 1 <= found.high
    assert covered >= 950 - 4 * math.sqrt(1000 * 0.05 * 0.95)
    assert covered <= 985


def test_sign_flips_are_all_enumerated():
    differences = [0.3, -0.1, 0.5, 0.2, -0.05]
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product((1, -1), repeat=5)]
    expected = np.mean([s >= abs(sum(differences)) - 1e-12 for s in sums])
    assert sign_flip_p(differences) == (expected, 2 / 32)


def test_sign_flips_of_many_pairs_are_drawn_with_one_seed():
    many = [1.0] * 25 + [-1.0] * 15
    exact = sum(math.comb(40, ups) for ups in range(41) if abs(2 * ups - 40) >= 10) / 2**40
    p, smallest = sign_flip_p(many)
    assert p == pytest.approx(exact, abs=5 * math.sqrt(exact / 100_000)) and smallest == 1 / 100_001
    assert sign_flip_p(many) == (p, smallest)
    # no random flip is as extreme as forty equal signs: the data alone is
    assert sign_flip_p([1.0] * 40) == (smallest, smallest)


@pytest.mark.parametrize(("low", "high"), [(0.8, 0.9), (1.1, 1.2)], ids=["below", "above"])
@pytest.mark.parametrize("margin", [None, 0.01])
def test_an_interval_alone_decides_nothing_where_the_corrected_p_does_not(low, high, margin):
    effect = statistics.Summary(n=6, median=(low + high) / 2, low=low, high=high, kind="")
    one = functools.partial(
        statistics.verdict, effect=effect, smallest_p=0.01, equality=1.0, margin=margin
    )
    assert one(p=0.03) == ("lower" if high < 1 else "higher")
    assert one(p=0.06) == "no difference shown"


def test_sign_flips_of_few_pairs_are_all_counted():
    n = statistics.EXACT_PAIRS
    assert sign_flip_p([1.0] * n) == (2 / 2**n, 2 / 2**n)


@pytest.mark.parametrize("scale", [1 / 7, 1e3 / 7, 1e9 / 7])
def test_flips_that_are_as_extreme_but_for_rounding_count(scale):
    """0.1 + 0.2 - 0.3 is not 0 in floating point."""
    values = np.array([0.1, 0.2, -0.3, 0.1, 0.2, 0.3])
    as_integers = np.array([1, 2, -3, 1, 2, 3])
    assert sign_flip_p(scale * values) == sign_flip_p(as_integers)


def test_differences_of_rounding_are_none():
    assert sign_flip_p([1e-9] * 8)[0] == 2 / 256 and sign_flip_p([1e-14] * 8)[0] == 1


def cells(ratio, n=8, noise=0.004):
    noise = noise * np.cos(np.arange(n))
    return {i: 100.0 * ratio * math.exp(noise[i]) for i in range(n)}, dict.fromkeys(range(n), 100.0)


def judge(values, baseline):
    found = statistics.compare_pairs(values, baseline)
    return statistics.verdict(
        effect=found.effect,
        p=found.p,
        smallest_p=found.smallest_p,
        equality=1.0,
        margin=statistics.MARGIN,
    )


@pytest.mark.parametrize(
    ("ratio", "n", "noise", "word"),
    [
        (1.2, 8, 0.004, "higher"),
        (0.8, 8, 0.004, "lower"),
        (1.0, 8, 0.004, "equivalent"),
        (1.0, 8, 0.2, "no difference shown"),
        (2.0, 5, 0.0, "too few runs"),
        (2.0, 1, 0.0, "too few runs"),
        (1.004, 8, 0.001, "equivalent"),  # within the margin
        (1.006, 8, 0.007, "higher by less than the margin"),
        (1 / 1.008, 8, 0.007, "lower by less than the margin"),
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


@pytest.fixture
def coarse_drift(monkeypatch):
    """Of each campaign's order, a hundredth of the random ones: its p-value has a coarser grid."""
    monkeypatch.setattr(statistics, "DRAWS", statistics.DRAWS // 100)


@pytest.mark.usefixtures("coarse_drift")
def test_more_repeats_find_a_difference_more_often():
    power = [
        verdicts.simulate(
            family=1,
            repeats=repeats,
            noise="normal",
            scale=0.03,
            drift=0.0,
            campaigns=200,
            effect=1.05,
        )[0]
        for repeats in (6, 8, 10)
    ]
    assert power == sorted(power) and power[-1] > 0.75


@pytest.mark.usefixtures("coarse_drift")
@pytest.mark.parametrize("change", [0.0, 0.25])
@pytest.mark.parametrize("noise", verdicts.NOISE)
@pytest.mark.parametrize(("family", "n"), [(1, 6), (3, 7)])
def test_equal_cells_are_rarely_called_different_and_as_often_faster_as_slower(
    family, n, noise, change
):
    """In the order of the design; cells share one baseline, as packed and padded rows do."""
    faster, slower = verdicts.simulate(family, n, noise, 0.02, change, 200)
    assert faster + slower <= 0.05 + 3.5 * math.sqrt(0.05 * 0.95 / 200)
    assert max(faster, slower) <= 0.025 + 3.5 * math.sqrt(0.025 * 0.975 / 200)


@pytest.mark.usefixtures("coarse_drift")
@pytest.mark.parametrize(
    ("repeats", "settings", "most"),
    [
        (8, {"looks": (6,)}, 0.05),
        (10, {"looks": (6, 7, 8, 9)}, 0.05),
        (8, {"carry_over": 0.05}, 0.06),
        (13, {"carry_over": 0.05, "canary": True}, 0.05),
    ],
)
def test_looks_and_what_a_run_leaves_to_the_next_make_few_false_verdicts(repeats, settings, most):
    """The first run of all has none before it, so that a little of a carry-over stays."""
    campaigns = 150
    found = verdicts.simulate(
        family=1,
        repeats=repeats,
        noise="normal",
        scale=0.03,
        drift=0.0,
        campaigns=campaigns,
        **settings,
    )
    assert sum(found) <= most + 3 * math.sqrt(most * (1 - most) / campaigns)


@hypothesis.given(repeats=st.integers(2, 13), order_seed=st.integers(0, 1000))
def test_behind_a_canary_both_cells_get_as_much_from_the_runs_before_them(repeats, order_seed):
    """Whichever cell leaves something to the next run, as many runs of each cell follow it."""
    order = [cell for cell, _ in verdicts.draw_order(1, repeats, order_seed, canary=True)]
    follows = Counter(itertools.pairwise(order[:-1]))  # the last canary is in no pair
    assert all(follows[before, 0] == follows[before, 1] for before in range(2))


@hypothesis.given(
    cells=st.integers(2, 5),
    repeats=st.integers(2, 12),
    order_seed=st.integers(0, 1000),
)
def test_each_cell_follows_each_about_as_often(cells, repeats, order_seed):
    order = [cell for cell, _ in verdicts.draw_order(cells - 1, repeats, order_seed)]
    assert sorted(order) == sorted([*range(cells)] * repeats)
    follows = Counter(itertools.pairwise(order))
    counts = [follows[pair] for pair in itertools.product(range(cells), repeat=2)]
    assert max(counts) - min(counts) <= (1 if cells == 2 else 2 + repeats // 4)


@pytest.mark.parametrize("n", [17, 50, 333])
def test_many_pairs_and_runs_are_drawn_in_chunks_that_change_no_digit(n, monkeypatch):
    random = np.random.default_rng(n)
    values = random.normal(0.1, 1.0, n)
    start = random.integers(0, n // 2, n)  # some at once
    cells = random.integers(0, 3, n).tolist()

    def measure():
        drifts = (drift(start, np.exp(values), of) for of in (None, cells))
        return sign_flip_p(values), *drifts

    monkeypatch.setattr(statistics, "NUMBERS", 10**9)
    whole = measure()
    monkeypatch.setattr(statistics, "NUMBERS", 123 * n)
    assert measure() == whole
    pairs = [p for p in itertools.combinations(range(n), 2) if start[p[0]] != start[p[1]]]
    logs = np.log(np.exp(values))
    slopes = [(logs[j] - logs[i]) / (start[j] - start[i]) for i, j in pairs]
    assert whole[1].slope == np.median(slopes)


def test_memory_does_not_grow_with_pairs_and_runs():
    values = np.random.default_rng(0).normal(0.1, 1.0, 1000)
    tracemalloc.start()
    sign_flip_p(values)
    drift(np.arange(1000), np.exp(values))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60e6  # 900 MB where all flips are drawn at once


# -- drift over a campaign, the planned order, and steadiness within a run


def test_neighbours_of_equal_settings_say_what_noise_makes():
    found = noise_floor(1000 * np.exp(np.random.default_rng(0).normal(0, 0.01, 400)))
    assert found.n == 200
    # |N(0, s)| has its median at 0.6745 s
    assert found.median == pytest.approx(0.6745 * math.sqrt(2) * 0.01, rel=0.3)
    few = noise_floor([100.0, 101.0, 99.0])
    assert (few.n, few.kind, noise_floor([100.0]).kind) == (1, "single run", "no runs")


def test_a_drift_of_five_percent_is_found_and_named():
    start = np.linspace(0, 3600, 12)
    values = (
        1000 * (1 + 0.05 * start / 3600) * np.exp(np.random.default_rng(1).normal(0, 0.003, 12))
    )
    found = drift(start, values)
    assert found.share == pytest.approx(0.05, abs=0.01)
    assert found.verdict == "drift" and found.p < 0.001


def test_cells_are_compared_with_themselves_alone():
    """A cell twice as fast that was run later is no drift; both growing slower is one."""
    start = np.arange(12.0)
    fast = np.array([100.0] * 6 + [200.0] * 6)
    cells = ["slow"] * 6 + ["fast"] * 6
    noise = np.exp(0.001 * np.cos(7 * start))
    assert drift(start, fast * noise, cells).verdict == "no drift shown"
    assert drift(start, fast * noise * (1 - 0.02 * start), cells).verdict == "drift"
    assert drift(start, fast * noise).verdict == "drift"  # without cells the factor looks like one


def test_the_p_of_few_runs_is_enumerated():
    start = [0.0, 1.0, 3.0, 4.0, 9.0]
    values = [100.0, 103.0, 101.0, 104.0, 106.0]
    t = np.array(start) - np.mean(start)
    v = np.log(values)
    sums = [abs(t @ np.array(order)) for order in itertools.permutations(v)]
    assert drift(start, values).p == pytest.approx(np.mean([s >= abs(t @ v) - 1e-12 for s in sums]))


def test_noise_is_called_a_drift_as_often_as_the_level_says():
    random = np.random.default_rng(2)
    found = [drift(range(6), np.exp(random.normal(0, 0.01, 6))).verdict for _ in range(400)]
    assert found.count("drift") / 400 == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 400))


@pytest.mark.filterwarnings("error")
def test_few_runs_or_runs_that_started_together_show_no_drift():
    for n in (0, 1, 4):
        assert drift(range(n), [100.0 + 10 * i for i in range(n)]).verdict == "too few runs"
    assert drift(range(9), np.linspace(1, 2, 9), list("abcdefghi")).verdict == "too few runs", (
        "of many cells"
    )
    found = drift([1.0, 1.0, 5.0, 5.0], [1.0, 2.0, 3.0, 4.0], ["a", "a", "b", "b"])
    assert (found.n, found.p, found.verdict) == (4, 1.0, "too few runs") and math.isnan(found.share)


def test_runs_out_of_order_are_counted_and_those_that_were_not_started_have_no_place():
    assert order_kept(range(5), [1.0, 2.0, 3.0, 4.0, 5.0]).verdict == "in the planned order"
    assert order_kept(range(5), [5.0, 4.0, 3.0, 2.0, 1.0]).verdict == "not in the planned order"
    swapped = order_kept(range(20), [*range(18), 19.0, 18.0])
    assert (swapped.inversions, swapped.verdict) == (1, "mostly in the planned order")
    found = order_kept([0, math.nan, 1, 2], [1.0, 0.0, math.nan, 2.0])
    assert (found.pairs, found.verdict) == (1, "in the planned order")
    assert order_kept([3], [1.0]).verdict == "order not known"


def test_inversions_are_counted_as_by_all_pairs_of_runs():
    chance = random.Random(57)
    for _ in range(200):
        count = chance.randint(0, 12)
        positions = [chance.choice([*range(6), math.nan]) for _ in range(count)]
        started_s = [chance.choice([1.0, 2.0, 2.5, 7.0, math.inf]) for _ in range(count)]
        runs = zip(positions, started_s, strict=True)
        known = [(p, s) for p, s in runs if math.isfinite(p) and math.isfinite(s)]
        pairs = list(itertools.combinations(sorted(known), 2))
        found = order_kept(positions, started_s)
        assert found.pairs == len(pairs)
        assert found.inversions == sum(first > second for (_, first), (_, second) in pairs)


def test_the_order_of_many_runs_is_checked_without_their_pairs():
    def count(runs: int) -> int:
        return count_operations(lambda: order_kept(range(runs), [-float(n) for n in range(runs)]))

    assert count(800) < 5 * count(200)


def test_what_is_no_speed_and_no_start_is_refused():
    with pytest.raises(ValueError, match="above zero"):
        noise_floor([1.0, 0.0])
    with pytest.raises(ValueError, match="above zero"):
        drift([0, 1], [1.0, math.nan])
    with pytest.raises(ValueError, match="a start is not finite"):
        drift([1.0, math.nan, 3.0], [1.0, 2.0, 3.0])


def find(seconds, tokens=1024, world=1, arm="tokenscale"):
    n = len(seconds)
    columns = np.broadcast_arrays(np.arange(n), world, seconds, tokens)
    rows = [
        {
            "step": step,
            "attempt_step": step,
            "world_size": ranks,
            "step_s": s,
            "total_tokens": total,
            "rank": rank,
        }
        for step, ranks, s, total in zip(*(column.tolist() for column in columns), strict=True)
        for rank in range(ranks)
    ]
    steps = Steps(tables.of_rows("steps", rows))
    return find_unsteadiness(SimpleNamespace(steps=steps, row={"arm": arm}))


@pytest.mark.parametrize("n", [9, 10, 57])
def test_distances_of_parts_are_those_of_each_part_alone(n):
    random = np.random.default_rng(n)
    log = random.normal(0, 0.1, n).round(2)  # with ties
    parts = random.random((40, n)) < random.uniform(0.3, 0.7, 40)[:, None]
    parts[:, :2] = True, False
    expected = [
        abs(np.median(log[part]) - np.median(log[~part]))
        / max(measure_spread(log[part]), measure_spread(log[~part]), LEAST_SPREAD)
        for part in parts
    ]
    np.testing.assert_allclose(_distances(log, parts), expected, rtol=1e-12)


def noise(n, spread, seed, correlation=0.4):
    """Log times that are heavy-tailed (Student's t with 4 degrees of freedom) and correlated with
    the step before.
    """
    random = np.random.default_rng(seed)
    x = random.standard_t(4, n) / math.sqrt(2)
    for k in range(1, n):
        x[k] = correlation * x[k - 1] + math.sqrt(1 - correlation**2) * x[k]
    return np.exp(spread * x)


def test_blocks_that_a_reader_reads_at_once_are_no_unsteadiness():
    seconds = noise(400, spread=0.05, seed=0)
    seconds[64::64] *= 200
    assert "hold" in find(seconds)[0]
    with pytest.raises(NotCheckedError, match="blocks"):
        find(seconds, arm="reader")


@pytest.mark.parametrize("n", [12, 200, 5000])
@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_honest_noise_is_not_found(n, correlation):
    for seed in range(20 if n < 1000 else 2):
        assert find(noise(n, 0.05, seed, correlation)) == []


def test_steps_of_unequal_size_and_world_sizes_are_honest():
    tokens = np.random.default_rng(0).choice([256, 1024, 4096], 60)
    assert find(noise(60, 0.03, 0) * (50 + tokens), tokens) == []
    world = np.repeat([1, 2], 30)
    assert find(noise(60, 0.03, 0) / world, world=world) == []


@pytest.mark.parametrize(
    ("n", "spread", "words"), [(8, 0.01, "fewer than"), (24, 0.6, "vary so much")]
)
def test_what_cannot_be_decided_is_said(n, spread, words):
    with pytest.raises(NotCheckedError, match=words):
        find(noise(n, spread, 1))
