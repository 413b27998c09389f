"""The scaling model recovers planted constants, its predictions are positive and ordered, and its bands cover."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenscale.analysis import scaling_model
from tokenscale.analysis.scaling_model import (
    ASSUMED_NOISE,
    COVERAGE,
    DRIFT,
    WIDEST_BAND,
    Links,
    Measurement,
    Pipeline,
    Workload,
    describe_laws,
    find_obstacle,
    fit,
    predict,
)
from tokenscale.base.errors import UserError
from tokenscale.costs.communication import Link, collective_s, expected_maximum, fit_link, solve_nonnegative
from tokenscale.costs.pipeline_schedules import bubble_share

NODES_OF_4 = Workload(ranks_per_node=4, communicated_bytes=2.8e9, messages=100)
FLAT = Workload(ranks_per_node=1, communicated_bytes=1e8)
INTER_NODE = Link(alpha_s=1e-4, beta_s_per_byte=5e-11, latency="tree")


def step_s(workload, n, compute, intra_node=0.0, inter_node=0.0, latency_ring=0.0, straggler=0.0):
    """Independent implementation of the model's sum."""
    g, nodes = min(n, workload.ranks_per_node), -(-n // workload.ranks_per_node)
    rows = 1.0 if workload.global_rows is None else -(-workload.global_rows // n) / workload.global_rows
    communication = intra_node * workload.communicated_bytes * 2 * (g - 1) / g
    communication += inter_node * workload.communicated_bytes / g * 2 * (nodes - 1) / nodes
    communication += latency_ring * workload.messages * 2 * (n - 1)
    return compute * rows + communication + straggler * rows * expected_maximum(n)


def fit_steps(step, sizes, workload, links=Links()):  # noqa: B008 - frozen
    return fit([Measurement(n, step(n)) for n in sizes], workload, links)


def candidate_of(found, *terms):
    (candidate,) = [c for c in found.candidates if set(c.constants) == set(terms)]
    return candidate.constants


PLANTED = {
    "nodes": (NODES_OF_4, {"compute": 0.4, "intra_node": 2e-12, "inter_node": 3e-11}),
    "one link": (FLAT, {"compute": 0.1, "inter_node": 1e-10, "latency_ring": 2e-3}),
    "strong scaling": (replace(FLAT, global_rows=64), {"compute": 2.0, "inter_node": 1e-9, "latency_ring": 1e-2}),
    "no growth": (NODES_OF_4, {"compute": 0.4}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_constants_are_recovered_and_the_band_contains_a_larger_size(name):
    workload, planted = PLANTED[name]
    found = fit_steps(lambda n: step_s(workload, n, **planted), [1, 2, 4, 8, 12, 16], workload)
    assert candidate_of(found, *planted) == pytest.approx(planted, rel=1e-6)
    (far,) = predict(found, [32])
    assert far.low_s < step_s(workload, 32, **planted) < far.high_s


def test_a_sweep_leaves_the_exposed_share_to_be_fitted():
    workload, exposed, tail = replace(NODES_OF_4, tail_bytes=5e8), 0.25, 5e8

    def measured(n):
        nodes, overlapped = max(1, n // 4), workload.communicated_bytes - tail
        messages = round(100 * overlapped / workload.communicated_bytes)
        whole = messages * collective_s("all_reduce", overlapped / messages / 4, nodes, INTER_NODE)
        return 0.4 + exposed * whole + 18 * collective_s("all_reduce", tail / 18 / 4, nodes, INTER_NODE)

    found = fit_steps(measured, (4, 8, 16), workload, Links(inter_node=INTER_NODE))
    assert candidate_of(found, "compute", "exposed") == pytest.approx({"compute": 0.4, "exposed": exposed}, rel=1e-6)
    (far,) = predict(found, [32])
    assert far.low_s < measured(32) < far.high_s


def test_communication_that_exceeds_the_sweep_is_exposed_in_full_and_the_rest_is_another_term():
    growth = 4 * NODES_OF_4.communicated_bytes * INTER_NODE.beta_s_per_byte / 4
    found = fit([Measurement(4, 0.4), Measurement(8, 0.4 + growth)], NODES_OF_4, Links(inter_node=INTER_NODE))
    in_full = [c for c in found.candidates if "exposed" in c.fixed]
    assert in_full and all(c.constants["straggler"] > 0 for c in in_full)
    assert all(c.constants.get("exposed", 0.0) <= 1 for c in found.candidates)


def test_a_pipeline_bubble_follows_from_its_schedule():
    pipeline = Pipeline(ranks=2, schedule="1f1b", micro_batch=1)
    workload = replace(FLAT, global_rows=16, ranks_per_replica=2, pipeline=pipeline)
    steps = {2: 1 / (1 - bubble_share("1f1b", 2, 16)), 4: 0.5 / (1 - bubble_share("1f1b", 2, 8))}
    found = fit_steps(steps.get, steps, workload)
    assert candidate_of(found, "compute") == pytest.approx({"compute": 1})
    (eight,) = predict(found, [8])
    assert eight.step_s == pytest.approx(0.25 / (1 - bubble_share("1f1b", 2, 4)), rel=0.02)


def test_data_wait_is_added_and_shrinks_with_the_rows():
    workload = replace(FLAT, global_rows=8)
    found = fit([Measurement(1, 1.2, data_wait_s=0.2), Measurement(2, 0.6, data_wait_s=0.1)], workload)
    assert candidate_of(found, "compute") == pytest.approx({"compute": 1})
    (four,) = predict(found, [4])
    assert four.step_s == pytest.approx(0.25 + 0.05, rel=0.02)


def test_nonnegative_least_squares_meets_the_kuhn_tucker_conditions():
    """The gradient is zero where a constant is above zero, and nonnegative elsewhere."""
    random = np.random.default_rng(7)
    bound = 0
    for _ in range(50):
        columns, targets = random.normal(size=(6, 4)), random.normal(size=6)
        found = solve_nonnegative(columns, targets)
        gradient = columns.T @ (columns @ found - targets)
        assert (found >= 0).all() and gradient[found == 0].min(initial=0.0) >= -1e-9
        assert np.abs(gradient[found > 0]).max(initial=0.0) < 1e-9
        bound += 0 < (found == 0).sum() < 4
    assert bound > 20
    many = solve_nonnegative(columns, np.stack([targets, 2 * targets], axis=1))
    assert many.T == pytest.approx(np.stack([found, 2 * found]))


def test_alpha_and_beta_of_a_link_are_recovered_from_a_sweep():
    sizes = [4096 * 4**n for n in range(8)]
    seconds = [collective_s("all_reduce", s, 2, INTER_NODE) for s in sizes]
    link, residuals = fit_link("all_reduce", sizes, seconds, 2, "tree")
    assert (link.alpha_s, link.beta_s_per_byte) == pytest.approx((1e-4, 5e-11))
    assert residuals == pytest.approx([0] * 8, abs=1e-9)
    with pytest.raises(UserError, match="one message size cannot separate"):
        fit_link("all_reduce", [4096, 4096], [1e-3, 1e-3], 2, "tree")


# -- bands


@st.composite
def fits(draw):
    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 8, 16, 64]), min_size=2, max_size=4, unique=True))
    seconds = st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=3)
    waits = st.sampled_from([0.0, 0.0, 0.3, 0.99])
    runs = [Measurement(n, step, step * draw(waits)) for n in sizes for step in draw(seconds)]
    workload = Workload(
        ranks_per_node=draw(st.sampled_from([1, 4])),
        global_rows=draw(st.sampled_from([None, 4096])),
        communicated_bytes=1e9,
        tail_bytes=draw(st.sampled_from([0, 5e8, 1e9])),
        messages=40,
    )
    links = st.sampled_from([Links(), Links(inter_node=INTER_NODE), Links(Link(1e-5, 1e-11, "tree"), INTER_NODE)])
    return fit(runs, workload, draw(links))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(fits())
def test_predictions_are_positive_and_lie_inside_their_bands(found):
    """Whatever the runs: scattered by orders of magnitude, or mostly waiting for data."""
    sizes = [n for n in (*found.world_sizes, 128, 1024) if find_obstacle(found, n) is None]
    for p in predict(found, sizes):
        assert 0 < p.low_s <= p.step_s <= p.high_s < np.inf


def test_noisy_repeats_give_a_positive_band_and_ask_for_repeats():
    """These runs gave steps of -0.7 s and a throughput band inverted through zero."""
    runs = [Measurement(n, s) for n, s in ((1, 1.0), (1, 1.9), (2, 0.7), (2, 2.6))]
    for p in predict(fit(runs, FLAT), [1, 4, 256]):
        assert 0 < p.low_s < p.step_s < p.high_s and p.measure == 2


def test_laws_that_the_sizes_cannot_separate_are_averaged():
    found = fit([Measurement(4, 0.40), Measurement(8, 0.42)], NODES_OF_4)
    weights = {
        next(t for t in c.constants if t != "compute"): c.weight for c in found.candidates if len(c.constants) > 1
    }
    assert set(weights) == {"inter_node", "latency_tree", "latency_ring", "straggler"}  # intra_node is constant here
    assert list(weights.values()) == pytest.approx([weights["straggler"]] * 4)
    alone = replace(found, candidates=tuple(c for c in found.candidates if "inter_node" in c.constants))
    (averaged,), (single,) = predict(found, [16]), predict(alone, [16])
    assert averaged.high_s > 1.02 * single.high_s and "inter_node" in describe_laws(found)


def test_the_data_choose_among_laws_that_three_sizes_separate():
    found = fit_steps(lambda n: step_s(FLAT, n, 0.1, latency_ring=2e-3), [2, 4, 8], FLAT)
    assert set(found.candidates[0].constants) == {"compute", "latency_ring"} and found.candidates[0].weight > 0.5


def test_bands_widen_with_the_distance_from_the_fitted_sizes(monkeypatch):
    flat = fit_steps(lambda n: 1.0, [1, 2, 4, 8], FLAT)
    grown = fit_steps(lambda n: step_s(FLAT, n, 0.8, inter_node=1e-9), [4, 8, 16], FLAT)

    def widths(found, sizes):
        return [np.log(p.high_s / p.low_s) for p in predict(found, sizes)]

    with_all = widths(grown, [16, 32, 64])
    assert with_all == sorted(with_all) and widths(flat, [512])[0] > 6 * 1.6 * DRIFT
    monkeypatch.setattr(scaling_model, "COMMUNICATION", ())
    assert with_all[-1] > 1.5 * widths(grown, [64])[0]  # contention


def test_a_band_that_is_too_wide_names_the_size_to_measure():
    found = fit_steps(lambda n: step_s(FLAT, n, 0.2, inter_node=1e-9), [1, 2], FLAT)
    (far,) = predict(found, [64])
    assert far.high_s > WIDEST_BAND * far.low_s and 2 < far.measure <= 64
    measured = fit([*found.measurements, Measurement(far.measure, predict(found, [far.measure])[0].step_s)], FLAT)
    assert predict(measured, [64])[0].measure is None


def test_noise_is_estimated_from_repeats_or_stated_as_assumed():
    single = fit([Measurement(1, 1.0), Measurement(2, 1.1)], FLAT)
    assert single.noise == ASSUMED_NOISE and single.noise_source == "assumed: 1 %" and single.freedom is None
    repeated = fit([Measurement(n, s * f) for n, s in ((1, 1.0), (2, 1.1)) for f in (0.97, 1.0, 1.03)], FLAT)
    assert repeated.freedom == 4 and repeated.noise == pytest.approx(0.03, rel=0.02)


@pytest.mark.parametrize("planted", [{"inter_node": 8e-11}, {"latency_ring": 1e-4}, {"straggler": 0.01}])
@pytest.mark.parametrize("repeats", [1, 3])
def test_the_band_covers_at_least_as_often_as_stated(planted, repeats):
    random, inside, noise = np.random.default_rng(1), 0, ASSUMED_NOISE

    def run(n):
        return step_s(NODES_OF_4, n, 0.4, **planted) * np.exp(noise * random.standard_normal())

    for _ in range(60):
        found = fit([Measurement(n, run(n)) for n in (4, 8, 16) for _ in range(repeats)], NODES_OF_4)
        (p,) = predict(found, [32])
        inside += p.low_s <= run(32) <= p.high_s
    assert inside / 60 >= COVERAGE - 0.07  # standard error 0.04


# -- mistakes

STRONG = replace(FLAT, global_rows=8)


@pytest.mark.parametrize(
    "runs, workload, message",
    [
        ([], FLAT, "at least two world sizes"),
        ([Measurement(2, 1.0), Measurement(2, 1.1)], FLAT, "world size 2"),
        ([Measurement(1, 0.0), Measurement(2, 1.0)], FLAT, "impossible step time"),
        ([Measurement(1, -1.0), Measurement(2, 1.0)], FLAT, "impossible step time"),
        ([Measurement(1, float("nan")), Measurement(2, 1.0)], FLAT, "impossible step time"),
        ([Measurement(1, float("inf")), Measurement(2, 1.0)], FLAT, "impossible step time"),
        ([Measurement(1, 1.0, data_wait_s=1.5), Measurement(2, 1.0)], FLAT, "impossible step time"),
        ([Measurement(1, 1.0), Measurement(2, 1.0)], replace(FLAT, ranks_per_replica=2), "a multiple of 2"),
    ],
)
def test_runs_that_cannot_be_fitted_are_refused(runs, workload, message):
    with pytest.raises(UserError, match=message):
        fit(runs, workload)


@pytest.mark.parametrize(
    "runs, workload, size, message",
    [
        ([Measurement(4, 1.0), Measurement(8, 1.1)], NODES_OF_4, 2, "below the smallest fitted one"),
        (
            [Measurement(1, 1.0), Measurement(4, 1.1)],
            NODES_OF_4,
            16,
            "cannot be predicted from these sizes.* measure 8",
        ),
        ([Measurement(1, 1.0), Measurement(2, 0.6)], STRONG, 16, "more replicas than rows"),
        ([Measurement(2, 1.0), Measurement(4, 0.6)], replace(STRONG, ranks_per_replica=2), 5, "a multiple of 2"),
    ],
)
def test_world_sizes_to_which_the_fit_does_not_apply_are_refused(runs, workload, size, message):
    with pytest.raises(UserError, match=message):
        predict(fit(runs, workload), [size])


def test_a_sweep_between_nodes_replaces_runs_on_two_nodes():
    found = fit([Measurement(1, 1.0), Measurement(4, 1.1)], NODES_OF_4, Links(inter_node=INTER_NODE))
    (eight,) = predict(found, [8])
    assert eight.high_s >= 1.1
