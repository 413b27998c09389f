"""The scaling model: planted constants come back, limits hold, the band covers, and what cannot be known is refused."""

from dataclasses import replace

import numpy as np
import pytest

from tokenscale.analysis.scaling_model import (
    ASSUMED_NOISE,
    COVERAGE,
    Links,
    Pipeline,
    Point,
    Work,
    constants,
    fit,
    fit_link,
    nonnegative,
    predict,
)
from tokenscale.base.errors import UserError
from tokenscale.costs.communication import Link, collective_s, expected_maximum
from tokenscale.costs.pipeline_schedules import bubble_share

NODES_OF_4 = Work(ranks_per_node=4, exchanged_bytes=2.8e9, messages=100, latency="tree")
FLAT = Work(ranks_per_node=1, exchanged_bytes=1e8)
BETWEEN = Link(alpha_s=1e-4, beta_s_per_byte=5e-11, latency="tree")


def step_s(work, n, compute, inside=0.0, between=0.0, latency=0.0, straggler=0.0):
    """The model's sum, written out once more."""
    g, nodes = min(n, work.ranks_per_node), -(-n // work.ranks_per_node)
    rows = 1.0 if work.global_rows is None else -(-work.global_rows // n) / work.global_rows
    turns = 2 * np.log2(n) if work.latency == "tree" else 2 * (n - 1)
    exchanged = inside * work.exchanged_bytes * 2 * (g - 1) / g
    exchanged += between * work.exchanged_bytes / g * 2 * (nodes - 1) / nodes
    return compute * rows + exchanged + latency * work.messages * turns + straggler * rows * expected_maximum(n)


PLANTED = {
    "nodes": (NODES_OF_4, {"compute": 0.4, "inside": 2e-12, "between": 3e-11}),
    "one link": (FLAT, {"compute": 0.1, "between": 1e-10, "latency": 2e-3}),
    "shared out": (replace(FLAT, global_rows=64), {"compute": 2.0, "between": 1e-9, "latency": 1e-2}),
    "nothing grows": (NODES_OF_4, {"compute": 0.4}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_constants_come_back_and_larger_sizes_are_predicted(name):
    work, planted = PLANTED[name]
    sizes = [1, 2, 4, 8, 12, 16]
    found = fit([Point(n, step_s(work, n, **planted)) for n in sizes], work)
    for term, constant in found.constants.items():
        assert constant == pytest.approx(planted.get(term, 0.0), rel=1e-6, abs=1e-12 * planted["compute"])
    (far,) = predict(found, [64])
    assert far.step_s == pytest.approx(step_s(work, 64, **planted), rel=1e-6)
    assert far.low_s < far.step_s < far.high_s and sum(far.parts_s.values()) == pytest.approx(far.step_s)


def test_a_sweep_leaves_only_the_exposed_part_of_the_exchange_to_be_fitted():
    work = replace(NODES_OF_4, tail_bytes=5e8)
    exposed, tail = 0.25, 5e8

    def measured(n):
        nodes, bytes_left = max(1, n // 4), work.exchanged_bytes - tail
        messages = round(100 * bytes_left / work.exchanged_bytes)
        whole = messages * collective_s("all_reduce", bytes_left / messages / 4, nodes, BETWEEN)
        last = 18 * collective_s("all_reduce", tail / 18 / 4, nodes, BETWEEN)
        return 0.4 + exposed * whole + last

    found = fit([Point(n, measured(n)) for n in (4, 8, 16)], work, Links(between=BETWEEN))
    assert found.constants["exchange"] == pytest.approx(exposed, rel=1e-6)
    (far,) = predict(found, [256])
    assert far.step_s == pytest.approx(measured(256), rel=1e-6)
    assert far.parts_s["tail"] == pytest.approx(18 * collective_s("all_reduce", tail / 18 / 4, 64, BETWEEN))


def test_stragglers_are_told_from_an_exchange_that_a_sweep_knows():
    links = Links(inside=Link(1e-5, 3e-12, "tree"), between=BETWEEN)

    def measured(n):
        inside, nodes = min(n, 4), max(1, n // 4)
        whole = 100 * collective_s("all_reduce", 2.8e7, inside, links.inside)
        whole += 100 * collective_s("all_reduce", 2.8e7 / inside, nodes, links.between)
        return 0.4 + 0.5 * whole + 0.02 * expected_maximum(n)

    found = fit([Point(n, measured(n)) for n in (1, 2, 4, 8, 16)], NODES_OF_4, links)
    assert found.constants == pytest.approx({"compute": 0.4, "exchange": 0.5, "straggler": 0.02}, rel=1e-6)


def test_more_than_the_whole_exchange_is_never_exposed():
    grown = 4 * NODES_OF_4.exchanged_bytes * BETWEEN.beta_s_per_byte / 4
    found = fit([Point(4, 0.4), Point(8, 0.4 + grown)], NODES_OF_4, Links(between=BETWEEN))
    assert "exchange" not in found.constants and found.left_out["exchange"] == "all of it is exposed"
    assert found.constants["straggler"] > 0
    (eight,) = predict(found, [8])
    assert eight.step_s == pytest.approx(0.4 + grown)
    assert eight.parts_s["tail"] == pytest.approx(100 * collective_s("all_reduce", 2.8e9 / 400, 2, BETWEEN))


@pytest.mark.parametrize("rows", [None, 64])
def test_one_rank_computes_and_does_nothing_else(rows):
    work = replace(NODES_OF_4, global_rows=rows)
    found = fit([Point(n, step_s(work, n, 0.4, 2e-12, 3e-11)) for n in (1, 4, 8)], work)
    (one,) = predict(found, [1])
    assert one.parts_s == {"compute": pytest.approx(0.4)} and one.step_s == found.constants["compute"]


def test_steps_never_get_shorter_with_more_ranks_of_the_same_work_and_the_links_part_is_bounded():
    found = fit([Point(n, step_s(NODES_OF_4, n, 0.4, 2e-12, 3e-11)) for n in (1, 4, 8)], NODES_OF_4)
    steps = [p.step_s for p in predict(found, [2**n for n in range(11)])]
    assert steps == sorted(steps)
    assert steps[-1] < 0.4 + 2.8e9 * 2 * 2e-12 + 2.8e9 / 4 * 2 * 3e-11


def test_a_pipelines_bubble_follows_from_its_schedule():
    line = Pipeline(ranks=2, schedule="1f1b", micro_batch=1)
    work = replace(FLAT, global_rows=16, model_ranks=2, pipeline=line)
    found = fit(
        [Point(2, 1 / (1 - bubble_share("1f1b", 2, 16))), Point(4, 0.5 / (1 - bubble_share("1f1b", 2, 8)))], work
    )
    assert found.constants["compute"] == pytest.approx(1) and found.constants["between"] == pytest.approx(0, abs=1e-12)
    (eight,) = predict(found, [8])
    assert eight.parts_s["bubble"] / eight.step_s == pytest.approx(bubble_share("1f1b", 2, 4)) == pytest.approx(1 / 5)


def test_waiting_for_data_is_known_and_shrinks_with_the_rows():
    work = replace(FLAT, global_rows=8)
    points = [Point(1, 1.2, waited_s=0.2), Point(2, 0.6, waited_s=0.1)]
    found = fit(points, work)
    assert found.constants["compute"] == pytest.approx(1)
    (four,) = predict(found, [4])
    assert four.parts_s == {"compute": pytest.approx(0.25), "data": pytest.approx(0.05)}


def test_ranks_with_half_of_the_threads_compute_half_as_fast():
    work = replace(FLAT, global_rows=8, threads={1: 2, 2: 1})
    found = fit([Point(1, 1.0), Point(2, 1.0)], work)
    assert [p.step_s for p in predict(found, [1, 2, 4])] == pytest.approx([1.0, 1.0, 0.5])


def test_least_squares_without_negative_constants_meets_its_conditions():
    """Kuhn and Tucker's: the gradient is zero where a constant is above zero, and does not point below elsewhere."""
    random = np.random.default_rng(7)
    hit = 0
    for _ in range(50):
        columns, targets = random.normal(size=(6, 4)), random.normal(size=6)
        found = nonnegative(columns, targets)
        gradient = columns.T @ (columns @ found - targets)
        assert (found >= 0).all() and gradient[found == 0].min(initial=0.0) >= -1e-9
        assert np.abs(gradient[found > 0]).max(initial=0.0) < 1e-9
        hit += 0 < (found == 0).sum() < 4
    assert hit > 20  # the bound mattered
    many = nonnegative(columns, np.stack([targets, 2 * targets], axis=1))
    assert many.T == pytest.approx(np.stack([found, 2 * found]))


def test_a_links_alpha_and_beta_come_back_from_a_sweep():
    sizes = [4096 * 4**n for n in range(8)]
    link, residuals = fit_link(
        "all_reduce", sizes, [collective_s("all_reduce", s, 2, BETWEEN) for s in sizes], 2, "tree"
    )
    assert (link.alpha_s, link.beta_s_per_byte) == pytest.approx((1e-4, 5e-11))
    assert residuals == pytest.approx([0] * 8, abs=1e-9)
    with pytest.raises(UserError, match="one size cannot tell"):
        fit_link("all_reduce", [4096, 4096], [1e-3, 1e-3], 2, "tree")


# -- what so few sizes can tell


def test_two_sizes_bear_two_constants_and_what_else_fits_makes_the_band():
    found = fit([Point(4, 0.40), Point(8, 0.42)], NODES_OF_4)
    assert list(found.constants) == ["compute", "between"]
    assert found.left_out["inside"].startswith("not told apart from compute")
    assert found.left_out["latency"] == found.left_out["straggler"] == "2 world sizes bear 2 constants"
    assert set(found.others) == {("compute", "latency"), ("compute", "straggler")}
    (alone,), (among) = predict(replace(found, others=()), [64]), predict(found, [64])
    assert among[0].high_s > 1.02 * alone.high_s and among[0].low_s <= alone.low_s * 1.01
    assert "between 2.86e-11 exposed s a byte" in constants(found)


def test_a_link_whose_exchange_hardly_grows_any_more_is_not_fitted():
    work = Work(ranks_per_node=8, exchanged_bytes=1e10, messages=300)
    found = fit([Point(128, 1.0), Point(256, 1.03)], work)
    assert list(found.constants) == ["compute", "latency"]
    assert "between" in found.left_out


def test_noise_is_that_of_repeats_where_there_are_some_and_else_stated_as_assumed():
    single = fit([Point(1, 1.0), Point(2, 1.1)], FLAT)
    assert single.noise == ASSUMED_NOISE and single.noise_from == "assumed: 1 %" and single.freedom is None
    repeated = fit([Point(n, s * f) for n, s in ((1, 1.0), (2, 1.1)) for f in (0.97, 1.0, 1.03)], FLAT)
    assert repeated.freedom == 4 and repeated.noise == pytest.approx(0.03, rel=0.02)


def hits(work, planted, sizes, repeats, far, noise, trials, others):
    """Share of further runs at `far` that lie in the band."""
    random, inside = np.random.default_rng(1), 0

    def run(n):
        return step_s(work, n, **planted) * (1 + noise * random.standard_normal())

    for _ in range(trials):
        found = fit([Point(n, run(n)) for n in sizes for _ in range(repeats)], work)
        (p,) = predict(found if others else replace(found, others=()), [far])
        inside += p.low_s <= run(far) <= p.high_s
    return inside / trials


@pytest.mark.parametrize("repeats", [2, 5])
def test_the_band_of_the_right_terms_covers_as_often_as_it_says(repeats):
    planted = {"compute": 0.4, "inside": 8e-12, "between": 8e-11}
    share = hits(NODES_OF_4, planted, (1, 4, 8), repeats, 32, noise=0.02, trials=300, others=False)
    assert COVERAGE - 0.05 <= share <= COVERAGE + 0.05  # 300 trials: a standard error of 0.017


def test_with_the_other_terms_that_fit_the_band_covers_at_least_as_often():
    planted = {"compute": 0.4, "between": 8e-11}
    share = hits(NODES_OF_4, planted, (4, 8), 3, 32, noise=0.02, trials=150, others=True)
    assert share >= COVERAGE - 0.02


# -- users' mistakes

STRONG = replace(FLAT, global_rows=8)


@pytest.mark.parametrize(
    "points, work, said",
    [
        ([], FLAT, "at least two world sizes"),
        ([Point(2, 1.0), Point(2, 1.1)], FLAT, "world size 2"),
        ([Point(1, 0.0), Point(2, 1.0)], FLAT, "times make no sense"),
        ([Point(1, float("nan")), Point(2, 1.0)], FLAT, "times make no sense"),
        ([Point(1, float("inf")), Point(2, 1.0)], FLAT, "times make no sense"),
        ([Point(1, 1.0, waited_s=1.5), Point(2, 1.0)], FLAT, "times make no sense"),
        ([Point(1, 1.0), Point(2, 1.0)], replace(FLAT, model_ranks=2), "a multiple of 2"),
    ],
)
def test_runs_that_cannot_be_fitted_are_refused(points, work, said):
    with pytest.raises(UserError, match=said):
        fit(points, work)


@pytest.mark.parametrize(
    "points, work, size, said",
    [
        ([Point(4, 1.0), Point(8, 1.1)], NODES_OF_4, 2, "below the smallest fitted one"),
        ([Point(1, 1.0), Point(4, 1.1)], NODES_OF_4, 8, "what lies between nodes is unknown"),
        ([Point(1, 1.0), Point(2, 0.6)], STRONG, 16, "more replicas than rows"),
        ([Point(2, 1.0), Point(4, 0.6)], replace(STRONG, model_ranks=2), 5, "a multiple of 2"),
    ],
)
def test_a_world_size_that_the_fit_says_nothing_of_is_refused(points, work, size, said):
    with pytest.raises(UserError, match=said):
        predict(fit(points, work), [size])


def test_a_sweep_between_nodes_reaches_where_no_run_has_been():
    found = fit([Point(1, 1.0), Point(4, 1.1)], NODES_OF_4, Links(between=BETWEEN))
    (eight,) = predict(found, [8])
    assert eight.step_s >= 1.1
