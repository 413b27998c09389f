"""Scaling and time to a loss, from tables made by hand: 120 useful tokens a step, so T = 120 /
seconds a step.
"""

import math

import pandas as pd
import pytest

from tests import tables
from tokenscale.analysis.queries import query
from tokenscale.analysis.tables import EXPERIMENT
from tokenscale.base.files import write_json


def ask(folder, name, *runs):
    """Rows of a query over runs (run id, fields, seconds a step); all ranks share the 120 useful
    tokens.
    """
    listed = []
    steps = []
    for run_id, fields, seconds in runs:
        world = fields.get("world_size", 1)
        listed.append(tables.run(run_id, **fields))
        steps += tables.steps(run_id, 6, world, useful_tokens=120 // world, step_s=seconds)
    return query(name, tables.write(folder, runs=listed, steps=steps))


def of(frame, run_id):
    (row,) = frame[frame["run_id"] == run_id].to_dict("records")
    return row


def test_the_base_is_the_smallest_world_size_with_its_absolute_throughput(tmp_path):
    runs = [
        ("b", {"world_size": 4}, 0.6),
        ("a", {"world_size": 2}, 1.0),
        ("c", {"world_size": 8}, 0.5),
    ]
    found = ask(tmp_path, "scaling", *runs)
    assert found["base_world_size"].tolist() == [2, 2, 2]
    assert found["base_useful_tokens_per_s"].tolist() == [120.0] * 3
    assert found["speed_up"].tolist() == pytest.approx([1.0, 1 / 0.6, 2.0])
    assert found["efficiency"].tolist() == pytest.approx([1.0, 1 / 0.6 / 2, 0.5])
    assert found["not_compared"].isna().all()
    found = ask(
        tmp_path, "scaling", *(("ab"[n], {"world_size": 2, "repeat": n}, 1.0) for n in range(2))
    )
    assert found["efficiency"].isna().all(), "one world size shows no scaling"
    assert set(found["not_compared"]) == {"no other world size of its series was measured"}
    runs = [
        ("a", {"world_size": 2, "global_batch": 8}, 1.0),
        ("b", {"world_size": 4, "global_batch": 16}, 1.0),
    ]
    found = ask(tmp_path, "scaling_weak", *runs)
    assert found["base_world_size"].tolist() == [2, 2]
    assert found["efficiency"].tolist() == [1.0, 0.5], "as many useful tokens from twice the ranks"


NO_OTHER = "no other world size was measured with {} rows a rank"
#: why a run on two ranks is not held against the one on one rank, by its fields and what it is
#: called then
UNLIKE = {
    "scaling": [
        ({"global_batch": 8}, "global batch 8, at world size 1 4"),
        ({"micro_batch": 1}, "micro-batch 1, at world size 1 2"),
        ({"science": "t"}, "other settings than at world size 1"),
        ({"repeat": 1}, "no run of its repeat was measured at world size 1"),
    ],
    "scaling_weak": [
        ({"science_per_rank": "q"}, NO_OTHER.format(4)),
        ({"micro_batch": 4}, NO_OTHER.format(4)),
        ({"layout": "layout.tensor=2"}, NO_OTHER.format(4)),
        ({"global_batch": 6}, NO_OTHER.format(3)),
        ({"science_per_rank": None}, "its settings are not known"),
        ({"repeat": 1}, "no run of its repeat was measured at world size 1"),
    ],
}


@pytest.mark.parametrize("name", UNLIKE)
def test_runs_that_are_not_alike_are_not_compared_and_it_says_why(tmp_path, name):
    runs = []
    two = {"world_size": 2} | ({"global_batch": 8} if name == "scaling_weak" else {})
    for n, (fields, _) in enumerate(UNLIKE[name]):
        own = {"series": f"series {n}", "approach": f"approach {n}"}
        runs += [(f"one {n}", own, 1.0), (f"two {n}", two | own | fields, 0.5)]
    found = ask(tmp_path, name, *runs)
    for n, (_, reason) in enumerate(UNLIKE[name]):
        assert name == "scaling_weak" or of(found, f"one {n}")["efficiency"] == 1.0
        alone = of(found, f"two {n}")
        assert alone["not_compared"] == reason
        assert all(
            pd.isna(alone.get(key))
            for key in ("efficiency", "speed_up", "base_useful_tokens_per_s")
        )
        assert pd.isna(alone.get("single_threads_per_rank"))


def test_weak_scaling_compares_equal_rows_a_rank(tmp_path):
    """Four rows a rank: 4, 8 and 16 rows in as many seconds, and a bit; useful tokens grow with
    them.
    """
    listed = []
    steps = []
    for n, seconds in ((1, 1.0), (2, 1.25), (4, 1.6)):
        fields = {
            "world_size": n,
            "global_batch": 4 * n,
            "science": f"s{n}",
            "factors": f"global_batch={4 * n}",
        }
        listed.append(tables.run(f"w{n}", series=f"packed, global_batch={4 * n}", **fields))
        steps += tables.steps(f"w{n}", 6, n, useful_tokens=120, step_s=seconds)
    listed.append(
        tables.run(
            "strong", world_size=4, global_batch=4, science="s1", series="packed, global_batch=4"
        )
    )
    steps += tables.steps("strong", 6, 4, useful_tokens=30, step_s=0.5)
    tables.write(tmp_path, runs=listed, steps=steps)
    found = query("scaling_weak", tmp_path)
    weak = found[found["run_id"] != "strong"]
    assert (
        weak["rows_per_rank"].tolist() == [4.0] * 3 and weak["base_world_size"].tolist() == [1] * 3
    )
    assert weak["base_useful_tokens_per_s"].tolist() == [120.0] * 3
    assert weak["speed_up"].tolist() == pytest.approx([1.0, 2 / 1.25, 4 / 1.6])
    assert weak["efficiency"].tolist() == pytest.approx([1.0, 0.8, 0.625])
    other = of(found, "strong")
    assert pd.isna(other["efficiency"])
    assert other["not_compared"] == "no other world size was measured with 1 rows a rank"
    strong = of(query("scaling", tmp_path), "strong")
    assert strong["efficiency"] == pytest.approx(2 / 4), (
        "the same runs, held against an equal global batch"
    )


def test_of_two_budgets_the_base_has_the_runs_own(tmp_path):
    runs = [("a", {"steps_asked": 8}, 1.0), ("b", {"steps_asked": 6}, 2.0)]
    runs += [("c", {"steps_asked": 6, "world_size": 2, "global_batch": 8}, 1.0)]
    found = ask(tmp_path, "scaling_weak", *runs)
    assert of(found, "c")["base_useful_tokens_per_s"] == 60.0
    assert of(found, "a")["efficiency"] == of(found, "b")["efficiency"] == 1.0


# -- time to a loss: 30 useful tokens a step, a second each where nothing else is said


def validated(folder, *runs, steps=8, **fields):
    """Tables of runs (run id, losses by step validated, fields of the run)."""
    listed = [tables.run(run_id, **own) for run_id, _, own in runs]
    rows = [row for run_id, _, _ in runs for row in tables.steps(run_id, steps, **fields)]
    events = [
        tables.validation(run_id, step, loss)
        for run_id, losses, _ in runs
        for step, loss in losses.items()
    ]
    return tables.write(folder, runs=listed, steps=rows, events=events)


def test_the_first_validation_at_the_target_counts_with_what_was_trained_before_it(tmp_path):
    losses = {0: 9.0, 2: 5.0, 4: 3.0, 8: 2.0}
    folder = validated(tmp_path, ("a", losses, {}), step_s=lambda step, _: 1.0 + step)
    found = tables.query_row("time_to_target", folder, target=3.0)
    assert (found["step"], found["seconds"], found["useful_tokens"]) == (4, 1 + 2 + 3 + 4, 4 * 30)
    assert (found["seconds_before"], found["loss"], found["target"]) == (1 + 2, 3.0, 3.0)
    assert bool(found["reached"]) and found["validations"] == 1
    found = tables.query_row("time_to_target", validated(tmp_path, ("a", {4: 1.0}, {})), target=2.0)
    assert pd.isna(found["seconds_before"]) and found["seconds"] == 4.0, (
        "nothing is known before the first validation"
    )


def test_a_loss_that_rises_again_inside_the_window_does_not_count(tmp_path):
    folder = validated(tmp_path, ("a", {0: 9.0, 2: 2.9, 4: 3.1, 6: 2.8, 8: 2.7}, {}))
    assert tables.query_row("time_to_target", folder, target=3.0)["step"] == 2
    assert tables.query_row("time_to_target", folder, target=3.0, window_tokens=59)["step"] == 2
    for window, whole in ((60, True), (61, False)):  # two steps of 30: step 4 is inside
        found = tables.query_row("time_to_target", folder, target=3.0, window_tokens=window)
        assert (found["step"], found["validations"], bool(found["whole_window"])) == (6, 2, whole)


def test_unreached_is_infinite_and_the_cell_says_how_many_reached_it(tmp_path):
    good = {0: 9.0, 4: 2.0, 8: 2.0}
    bad = {0: 9.0, 8: 4.0}
    late = {0: 9.0, 8: 2.0}
    runs = [("a", good, {}), ("b", late, {"repeat": 1}), ("c", bad, {"repeat": 2})]
    other = [("d", good, {"world_size": 2}), ("e", bad, {"world_size": 2, "repeat": 1})]
    none = [(name, bad, {"world_size": 4, "repeat": n}) for n, name in enumerate("fg")]
    found = query(
        "time_to_target", validated(tmp_path, *runs, *other, *none), target=3.0
    ).set_index("run_id")
    assert found["seconds"].tolist() == [4.0, 8.0, math.inf, 4.0, math.inf, math.inf, math.inf]
    assert found["useful_tokens"].tolist() == [
        120.0,
        240.0,
        math.inf,
        120.0,
        math.inf,
        math.inf,
        math.inf,
    ]
    assert found["reached"].tolist() == [True, True, False, True, False, False, False]
    assert found.loc["f", ["reached_of_cell", "runs_of_cell", "median_s_of_cell"]].tolist() == [
        0,
        2,
        math.inf,
    ]
    assert found.loc["a", ["reached_of_cell", "runs_of_cell", "median_s_of_cell"]].tolist() == [
        2,
        3,
        8.0,
    ]
    assert found.loc["d", ["reached_of_cell", "runs_of_cell", "median_s_of_cell"]].tolist() == [
        1,
        2,
        math.inf,
    ]


def test_the_target_of_the_experiments_file_is_taken_and_one_that_is_asked_for_before_it(tmp_path):
    runs = [("a", {0: 9.0, 4: 5.0, 8: 3.0}, {}), ("b", {0: 9.0, 4: 4.0, 8: 3.5}, {"repeat": 1})]
    folder = validated(tmp_path, *runs)
    # without a target the highest loss that a run ended with
    found = query("time_to_target", folder)
    assert (
        set(found["target"]) == {3.5}
        and found["reached"].all()
        and found["step"].tolist() == [8, 8]
    )
    assert not found["target_stated"].any()
    write_json(folder / EXPERIMENT, {"target_loss": 3.2})
    tables.renew_manifests(folder)
    found = query("time_to_target", folder)
    assert (
        set(found["target"]) == {3.2}
        and found["target_stated"].all()
        and found["reached"].tolist() == [True, False]
    )
    assert set(query("time_to_target", folder, target=4.5)["target"]) == {4.5}


def test_only_runs_that_count_and_validate_are_listed(tmp_path):
    runs = [
        ("a", {0: 9.0}, {}),
        ("b", {0: 1.0}, {"validity": "invalid", "repeat": 1}),
        ("c", {}, {"repeat": 2}),
    ]
    assert query("time_to_target", validated(tmp_path, *runs), target=5.0)["run_id"].tolist() == [
        "a"
    ]
    without = validated(tmp_path, ("a", {}, {}), loss_sum=None)
    assert len(query("time_to_target", without, target=1.0)) == 0, (
        "a run without a loss is not unreached"
    )


def test_steps_between_validations_add_up_whatever_their_distances(tmp_path):
    """Validated after 3, 4 and 7 of 8 steps, on two ranks, of which the slower one sets the
    time.
    """
    run = ("a", {0: 5.0, 3: 4.0, 4: 3.0, 7: 2.0}, {"world_size": 2})
    times = {
        "useful_tokens": lambda step, _: 10 + step,
        "step_s": lambda step, rank: 1.0 + step * rank,
    }
    found = query("validation", validated(tmp_path, run, world_size=2, **times))
    assert found["useful_tokens_seen"].tolist() == [0, 66, 92, 182]  # twice the sum of 10 + step
    assert found["training_s"].tolist() == [
        0.0,
        1 + 2 + 3,
        1 + 2 + 3 + 4,
        1 + 2 + 3 + 4 + 5 + 6 + 7,
    ]
