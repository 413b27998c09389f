"""The scaling model recovers planted lines; its bands cover and widen; beyond its reach it names a
size to measure.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenscale.base.errors import UserError
from tokenscale.referee.scaling_model import (
    ASSUMED_NOISE,
    COVERAGE,
    LEAST_NOISE,
    REACH,
    WIDEST_BAND,
    fit,
    predict,
)


def line(n, a=1.0, b=0.05, smallest=1):
    return a + b * np.log2(n / smallest)


def fit_line(sizes, repeats=1, **options):
    return fit([(n, line(n)) for n in sizes for _ in range(repeats)], **options)


@pytest.mark.parametrize("sizes", [(1, 2), (4, 8, 16), (4, 12, 20)])
@pytest.mark.parametrize("slope", [0.0, 0.01, 0.3])
def test_a_planted_line_is_recovered_and_continued(sizes, slope):
    found = fit([(n, line(n, 0.4, slope, sizes[0])) for n in sizes])
    assert (found.start_s, found.slope_s) == pytest.approx((0.4, slope), abs=1e-9)
    p = predict(found, 2 * sizes[-1])
    assert p.step_s == pytest.approx(line(2 * sizes[-1], 0.4, slope, sizes[0]))
    assert p.low_s < p.step_s < p.high_s and p.stays_s == pytest.approx(
        line(sizes[-1], 0.4, slope, sizes[0])
    )


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 12, 64]), st.floats(1e-4, 1e4)), min_size=3, max_size=9
    ),
    st.booleans(),
)
def test_predictions_are_positive_and_lie_inside_their_bands(runs, sharded):
    if len({n for n, _ in runs}) < 2:
        return
    found = fit(runs, sharded)
    for size in (*found.world_sizes, 128, 10**9):
        p = predict(found, size)
        assert 0 < p.low_s <= min(p.step_s, p.high_s) <= max(p.step_s, p.low_s) <= p.high_s < np.inf
        assert p.measure is not None or p.high_s <= WIDEST_BAND * p.low_s


def test_bands_widen_with_distance_noise_and_full_sharding():
    def widths(found, sizes):
        return [np.log(p.high_s / p.low_s) for p in (predict(found, n) for n in sizes)]

    near = widths(fit_line((1, 2, 4)), [2, 4, 8, 16, 32])
    assert near == sorted(near) and near[2] > near[1] + 0.1
    noisy = fit([(n, line(n) * f) for n in (1, 2, 4) for f in (0.9, 1.0, 1.1)])
    assert widths(noisy, [8])[0] > 1.5 * near[2]
    assert widths(fit_line((1, 2, 4), fully_sharded=True), [8])[0] > near[2] + 0.2


@pytest.mark.parametrize("sharded", [False, True])
def test_beyond_its_reach_it_names_a_size_from_which_the_target_can_be_predicted(sharded):
    runs = [(n, line(n, 1.0, 0.01)) for n in (1, 2, 4)]
    for target in (4 * 2 ** REACH[sharded] + 1, 256, 8192):
        p = predict(fit(runs, sharded), target)
        assert 4 < p.measure < target
        longer = fit(
            [*runs, *((n, line(n, 1.0, 0.01)) for n in (p.measure // 2, p.measure))], sharded
        )
        assert predict(longer, target).measure is None


def test_noisy_runs_ask_for_repeats_and_steep_ones_for_the_next_size():
    noisy = fit([(1, 1.0), (1, 1.9), (2, 0.7), (2, 2.6)])
    assert [predict(noisy, n).measure for n in (1, 4, 256)] == [1, 2, 2]
    assert [predict(fit([(1, 1.0), (2, 3.0)]), n).measure for n in (4, 64)] == [4, 8]
    shorter = fit([(1, 1.0), (2, 0.98), (4, 0.97)])  # noise, and no trend
    assert shorter.slope_s == 0 and predict(shorter, 8).step_s == pytest.approx(0.983, abs=0.001)


def test_noise_is_estimated_from_repeats_or_stated_as_assumed():
    single = fit_line((1, 2))
    repeated = fit([(n, s * f) for n, s in ((1, 1.0), (2, 1.1)) for f in (0.97, 1.0, 1.03)])
    assert single.noise == ASSUMED_NOISE and "assumed" in single.noise_source
    assert repeated.noise == pytest.approx(0.03, rel=0.02) and "repeats, 4" in repeated.noise_source
    assert fit_line((1, 2), repeats=2).noise == LEAST_NOISE, "equal by chance"
    assert repeated.quantile == pytest.approx(2.132, rel=0.02) and single.quantile == pytest.approx(
        1.645, rel=1e-3
    )
    assert fit([(1, 1.0), (2, 1.0), (2, 1.3)]).noise == pytest.approx(np.log(1.3) / 2**0.5), (
        "one pair that differs"
    )
    bent = fit([(1, 1.0), (2, 1.0), (4, 1.5)])
    assert bent.noise > 0.1 and "misses" in bent.noise_source


@pytest.mark.parametrize(
    ("sizes", "repeats", "noise"), [((1, 2), 2, 0.01), ((1, 2), 3, 0.04), ((4, 8, 16), 2, 0.04)]
)
def test_the_band_covers_at_least_as_often_as_stated(sizes, repeats, noise):
    random = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        runs = [
            (n, line(n) * np.exp(noise * random.standard_normal()))
            for n in sizes
            for _ in range(repeats)
        ]
        p = predict(fit(runs), 2 * sizes[-1])
        inside += (
            p.low_s <= line(p.world_size) * np.exp(noise * random.standard_normal()) <= p.high_s
        )
    assert inside / 200 >= COVERAGE - 0.03


@pytest.mark.parametrize(
    "runs, message",
    [
        ([], "at least two world sizes"),
        ([(2, 1.0), (2, 1.1)], "world size 2"),
        *(
            ([(1, seconds), (2, 1.0)], "impossible step time")
            for seconds in (0.0, -1.0, float("nan"), float("inf"))
        ),
    ],
)
def test_runs_that_cannot_be_fitted_are_refused(runs, message):
    with pytest.raises(UserError, match=message):
        fit(runs)
