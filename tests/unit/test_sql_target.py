"""Time to a loss, from tables made by hand: 30 useful tokens a step, a second each where nothing else is said."""

import math

import pandas as pd

from tests import tables
from tokenscale.analysis.queries import query

INF = math.inf


def validated(folder, *runs, steps=8, **fields):
    """Tables of runs (run id, losses by step validated, fields of the run)."""
    listed = [tables.run(run_id, **own) for run_id, _, own in runs]
    rows = [row for run_id, _, _ in runs for row in tables.steps(run_id, steps, **fields)]
    events = [tables.validation(run_id, step, loss) for run_id, losses, _ in runs for step, loss in losses.items()]
    return tables.write(folder, runs=listed, steps=rows, events=events)


def row(name, folder, **parameters):
    (found,) = query(name, folder, **parameters).to_dict("records")
    return found


def test_the_first_validation_at_the_target_counts_with_what_was_trained_before_it(tmp_path):
    losses = {0: 9.0, 2: 5.0, 4: 3.0, 8: 2.0}
    folder = validated(tmp_path, ("a", losses, {}), step_s=lambda step, _: 1.0 + step)
    found = row("time_to_target", folder, target=3.0)
    assert (found["step"], found["seconds"], found["useful_tokens"]) == (4, 1 + 2 + 3 + 4, 4 * 30)
    assert (found["seconds_before"], found["loss"], found["target"]) == (1 + 2, 3.0, 3.0)
    assert bool(found["reached"]) and found["validations"] == 1


def test_a_loss_that_rises_again_inside_the_window_does_not_count(tmp_path):
    folder = validated(tmp_path, ("a", {0: 9.0, 2: 2.9, 4: 3.1, 6: 2.8, 8: 2.7}, {}))
    assert row("time_to_target", folder, target=3.0)["step"] == 2
    assert row("time_to_target", folder, target=3.0, window_tokens=59)["step"] == 2
    found = row("time_to_target", folder, target=3.0, window_tokens=60)  # two steps of 30: step 4 is inside
    assert (found["step"], found["validations"], bool(found["whole_window"])) == (6, 2, True)
    cut = row("time_to_target", folder, target=3.0, window_tokens=61)
    assert (cut["step"], cut["validations"], bool(cut["whole_window"])) == (6, 2, False)


def test_unreached_is_infinite_and_the_cell_says_how_many_reached_it(tmp_path):
    good, bad = {0: 9.0, 4: 2.0, 8: 2.0}, {0: 9.0, 8: 4.0}
    late = {0: 9.0, 8: 2.0}
    runs = [("a", good, {}), ("b", late, {"repeat": 1}), ("c", bad, {"repeat": 2})]
    other = [("d", good, {"world_size": 2}), ("e", bad, {"world_size": 2, "repeat": 1})]
    none = [(name, bad, {"world_size": 4, "repeat": n}) for n, name in enumerate("fg")]
    found = query("time_to_target", validated(tmp_path, *runs, *other, *none), target=3.0).set_index("run_id")
    assert found["seconds"].tolist() == [4.0, 8.0, INF, 4.0, INF, INF, INF]
    assert found["useful_tokens"].tolist() == [120.0, 240.0, INF, 120.0, INF, INF, INF]
    assert found["reached"].tolist() == [True, True, False, True, False, False, False]
    assert found.loc["f", ["reached_of_cell", "runs_of_cell", "median_s_of_cell"]].tolist() == [0, 2, INF]
    assert found.loc["a", ["reached_of_cell", "runs_of_cell", "median_s_of_cell"]].tolist() == [2, 3, 8.0]
    assert found.loc["d", ["reached_of_cell", "runs_of_cell", "median_s_of_cell"]].tolist() == [1, 2, INF]


def test_the_target_of_the_experiments_file_is_taken_and_one_that_is_asked_for_before_it(tmp_path):
    runs = [("a", {0: 9.0, 4: 5.0, 8: 3.0}, {}), ("b", {0: 9.0, 4: 4.0, 8: 3.5}, {"repeat": 1})]
    folder = validated(tmp_path, *runs)
    found = query("time_to_target", folder)  # without a target the highest loss that a run ended with
    assert set(found["target"]) == {3.5} and found["reached"].all() and found["step"].tolist() == [8, 8]
    assert not found["target_stated"].any()
    tables.describe(folder, {"target_loss": 3.2})
    found = query("time_to_target", folder)
    assert set(found["target"]) == {3.2} and found["target_stated"].all() and found["reached"].tolist() == [True, False]
    assert set(query("time_to_target", folder, target=4.5)["target"]) == {4.5}


def test_only_runs_that_count_and_validate_are_listed(tmp_path):
    runs = [("a", {0: 9.0}, {}), ("b", {0: 1.0}, {"validity": "invalid", "repeat": 1}), ("c", {}, {"repeat": 2})]
    assert query("time_to_target", validated(tmp_path, *runs), target=5.0)["run_id"].tolist() == ["a"]
    without = validated(tmp_path, ("a", {}, {}), loss_sum=None)
    assert len(query("time_to_target", without, target=1.0)) == 0, "a run without a loss is not unreached"


def test_steps_between_validations_add_up_whatever_their_distances(tmp_path):
    """Validated after 3, 4 and 7 of 8 steps, on two ranks, of which the slower one sets the time."""
    folder = validated(tmp_path, ("a", {0: 5.0, 3: 4.0, 4: 3.0, 7: 2.0}, {"world_size": 2}), steps=0)
    rows = tables.steps("a", 8, 2, useful_tokens=lambda s, _: 10 + s, step_s=lambda s, rank: 1.0 + s * rank)
    events = [tables.validation("a", s, loss) for s, loss in {0: 5.0, 3: 4.0, 4: 3.0, 7: 2.0}.items()]
    tables.write(folder, runs=[tables.run("a", world_size=2)], steps=rows, events=events)
    found = query("validation", folder)
    assert found["useful_tokens_seen"].tolist() == [0, 66, 92, 182]  # twice the sum of 10 + step
    assert found["training_s"].tolist() == [0.0, 1 + 2 + 3, 1 + 2 + 3 + 4, 1 + 2 + 3 + 4 + 5 + 6 + 7]


def test_nothing_before_the_first_validation_is_known(tmp_path):
    found = row("time_to_target", validated(tmp_path, ("a", {4: 1.0}, {})), target=2.0)
    assert pd.isna(found["seconds_before"]) and found["seconds"] == 4.0
