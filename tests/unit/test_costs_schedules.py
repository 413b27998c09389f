"""Orders of a pipeline's passes: complete, free of deadlock, and as good as their papers say."""

from itertools import combinations
from random import Random

import pytest

from tokenscale.costs import pipeline_schedules
from tokenscale.costs.pipeline_schedules import Action, bubble_share, build_schedule
from tokenscale.settings.presets import PRESETS

NAMES = ("naive", "gpipe", "1f1b", "zero-bubble")
SIZES = [(2, 1), (2, 3), (3, 2), (4, 4), (4, 9), (8, 16)]


@pytest.mark.parametrize("ranks, micro_batches", SIZES)
def test_each_rank_does_everything_once_in_an_order_that_can_be_and_holds_few_micro_batches(
    ranks, micro_batches
):
    for rank in range(ranks):
        held = {}
        for name in NAMES:
            kinds = "FBW" if name == "zero-bubble" else "FB"
            actions = build_schedule(name, rank, ranks, micro_batches)
            held[name] = pipeline_schedules.max_in_flight(actions)
            assert sorted(actions) == sorted(
                Action(kind, micro) for kind in kinds for micro in range(micro_batches)
            )
            for micro in range(micro_batches):
                assert [a.kind for a in actions if a.micro == micro] == list(kinds)
            backwards = [a.micro for a in actions if a.kind == "B"]
            assert backwards == sorted(backwards), (
                "gradients are added up in the order of one process"
            )
        assert (held["naive"], held["gpipe"]) == (1, micro_batches)
        assert held["1f1b"] == min(ranks - rank, micro_batches)
        assert held["zero-bubble"] <= min(ranks, micro_batches), "the memory of 1f1b's first rank"


@pytest.mark.parametrize(
    "ranks, micro_batches, chunks", [(2, 2, 2), (2, 6, 2), (4, 8, 2), (4, 4, 3)]
)
def test_interleaving_does_everything_once_in_whole_rounds(ranks, micro_batches, chunks):
    everything = sorted(
        Action(k, m, c) for k in "FB" for m in range(micro_batches) for c in range(chunks)
    )
    for rank in range(ranks):
        assert (
            sorted(build_schedule("interleaved", rank, ranks, micro_batches, chunks)) == everything
        )
    with pytest.raises(ValueError, match="not a multiple"):
        build_schedule("interleaved", 0, ranks, micro_batches + 1, chunks)


@pytest.mark.parametrize("ranks, micro_batches", SIZES)
def test_the_bubble_is_that_of_the_papers(ranks, micro_batches):
    p = ranks
    m = micro_batches
    assert bubble_share("naive", p, m) == pytest.approx((p - 1) / p)
    assert (
        bubble_share("gpipe", p, m)
        == bubble_share("1f1b", p, m)
        == pytest.approx((p - 1) / (m + p - 1))
    )
    if m % p == 0:
        for v in (2, 3):
            assert bubble_share("interleaved", p, m, v) == pytest.approx((p - 1) / (v * m + p - 1))
    if m >= p:  # ZB-H1, table 2: (p - 1)(F + B - W), of three equal parts
        assert bubble_share("zero-bubble", p, m) == pytest.approx((p - 1) / (3 * m + p - 1))


def test_orders_that_wait_for_each_other_are_found(monkeypatch):
    monkeypatch.setattr(
        pipeline_schedules, "build_schedule", lambda *_, **__: [Action("B", 0), Action("F", 0)]
    )
    with pytest.raises(RuntimeError, match="each waits for another"):
        bubble_share("turned round", 2, 1)


def test_stages_have_all_layers_and_the_last_one_fewest():
    # models of transformers cannot be split
    own = [shape for shape in PRESETS.values() if shape.transformers is None]
    for shape in own:
        if not shape.vocabulary_size or shape.layers < 4:
            continue
        stages = pipeline_schedules.assign_stages(shape.with_positions(1024), 1024, 4)
        assert [layer for stage in stages for layer in stage] == list(range(shape.layers))
        assert all(stages) and len(stages[-1]) == min(map(len, stages)), (
            "the output head is work, too"
        )


def test_a_partition_is_the_best_of_all():
    pick = Random(0)
    for _ in range(50):
        costs = [pick.randint(1, 9) for _ in range(pick.randint(3, 8))]
        stages = pick.randint(1, len(costs))
        most = max(
            sum(costs[i] for i in part)
            for part in pipeline_schedules.partition_costs(costs, stages)
        )
        cuts = combinations(range(1, len(costs)), stages - 1)
        ways = ([0, *cut, len(costs)] for cut in cuts)
        assert most == min(
            max(sum(costs[a:b]) for a, b in zip(w, w[1:], strict=False)) for w in ways
        )
