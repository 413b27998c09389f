"""Strong and weak scaling, from tables made by hand: 120 useful tokens a step, so T = 120 / seconds a step."""

import pandas as pd
import pytest

from tests import tables
from tokenscale.analysis.queries import query


def ask(folder, name, *runs):
    """Rows of a query over runs (run id, fields, seconds a step); all ranks share the 120 useful tokens."""
    listed, steps = [], []
    for run_id, fields, seconds in runs:
        world = fields.get("world_size", 1)
        listed.append(tables.run(run_id, **fields))
        steps += tables.steps(run_id, 6, world, useful_tokens=120 // world, step_s=seconds)
    return query(name, tables.write(folder, runs=listed, steps=steps))


def of(frame, run_id):
    (row,) = frame[frame["run_id"] == run_id].to_dict("records")
    return row


def test_the_base_is_the_smallest_world_size_with_its_absolute_throughput(tmp_path):
    runs = [("b", {"world_size": 4}, 0.6), ("a", {"world_size": 2}, 1.0), ("c", {"world_size": 8}, 0.5)]
    found = ask(tmp_path, "scaling", *runs)
    assert found["base_world_size"].tolist() == [2, 2, 2]
    assert found["base_useful_tokens_per_s"].tolist() == [120.0] * 3
    assert found["speed_up"].tolist() == pytest.approx([1.0, 1 / 0.6, 2.0])
    assert found["efficiency"].tolist() == pytest.approx([1.0, 1 / 0.6 / 2, 0.5])
    assert found["not_compared"].isna().all()
    found = ask(tmp_path, "scaling", *(("ab"[n], {"world_size": 2, "repeat": n}, 1.0) for n in range(2)))
    assert found["efficiency"].isna().all(), "one world size shows no scaling"
    assert set(found["not_compared"]) == {"no other world size of its series was measured"}
    runs = [("a", {"world_size": 2, "global_batch": 8}, 1.0), ("b", {"world_size": 4, "global_batch": 16}, 1.0)]
    found = ask(tmp_path, "scaling_weak", *runs)
    assert found["base_world_size"].tolist() == [2, 2]
    assert found["efficiency"].tolist() == [1.0, 0.5], "as many useful tokens from twice the ranks"


NO_OTHER = "no other world size was measured with {} rows a rank"


@pytest.mark.parametrize(
    ("name", "other", "reason"),
    [
        ("scaling", {"global_batch": 8}, "global batch 8, at world size 1 4"),
        ("scaling", {"micro_batch": 1}, "micro-batch 1, at world size 1 2"),
        ("scaling", {"science": "t"}, "other settings than at world size 1"),
        ("scaling", {"repeat": 1}, "no run of its repeat was measured at world size 1"),
        ("scaling_weak", {"science_per_rank": "q"}, NO_OTHER.format(4)),
        ("scaling_weak", {"micro_batch": 4}, NO_OTHER.format(4)),
        ("scaling_weak", {"layout": "layout.tensor=2"}, NO_OTHER.format(4)),
        ("scaling_weak", {"global_batch": 6}, NO_OTHER.format(3)),
        ("scaling_weak", {"science_per_rank": None}, "its settings are not known"),
        ("scaling_weak", {"repeat": 1}, "no run of its repeat was measured at world size 1"),
    ],
)
def test_runs_that_are_not_alike_are_not_compared_and_it_says_why(tmp_path, name, other, reason):
    fields = {"world_size": 2} | ({"global_batch": 8} if name == "scaling_weak" else {}) | other
    found = ask(tmp_path, name, ("a", {}, 1.0), ("b", fields, 0.5))
    assert name == "scaling_weak" or of(found, "a")["efficiency"] == 1.0
    alone = of(found, "b")
    assert alone["not_compared"] == reason
    assert all(pd.isna(alone[n]) for n in ("efficiency", "speed_up", "base_useful_tokens_per_s"))
    assert pd.isna(alone.get("single_threads_per_rank"))


def test_weak_scaling_compares_equal_rows_a_rank(tmp_path):
    """Four rows a rank: 4, 8 and 16 rows in as many seconds, and a bit; useful tokens grow with them."""
    listed, steps = [], []
    for n, seconds in ((1, 1.0), (2, 1.25), (4, 1.6)):
        fields = {"world_size": n, "global_batch": 4 * n, "science": f"s{n}", "factors": f"global_batch={4 * n}"}
        listed.append(tables.run(f"w{n}", series=f"packed, global_batch={4 * n}", **fields))
        steps += tables.steps(f"w{n}", 6, n, useful_tokens=120, step_s=seconds)
    listed.append(tables.run("strong", world_size=4, global_batch=4, science="s1", series="packed, global_batch=4"))
    steps += tables.steps("strong", 6, 4, useful_tokens=30, step_s=0.5)
    tables.write(tmp_path, runs=listed, steps=steps)
    found = query("scaling_weak", tmp_path)
    weak = found[found["run_id"] != "strong"]
    assert weak["rows_per_rank"].tolist() == [4.0] * 3 and weak["base_world_size"].tolist() == [1] * 3
    assert weak["base_useful_tokens_per_s"].tolist() == [120.0] * 3
    assert weak["speed_up"].tolist() == pytest.approx([1.0, 2 / 1.25, 4 / 1.6])
    assert weak["efficiency"].tolist() == pytest.approx([1.0, 0.8, 0.625])
    other = of(found, "strong")
    assert pd.isna(other["efficiency"])
    assert other["not_compared"] == "no other world size was measured with 1 rows a rank"
    strong = of(query("scaling", tmp_path), "strong")
    assert strong["efficiency"] == pytest.approx(2 / 4), "the same runs, held against an equal global batch"


def test_of_two_budgets_the_base_has_the_runs_own(tmp_path):
    runs = [("a", {"steps_asked": 8}, 1.0), ("b", {"steps_asked": 6}, 2.0)]
    runs += [("c", {"steps_asked": 6, "world_size": 2, "global_batch": 8}, 1.0)]
    found = ask(tmp_path, "scaling_weak", *runs)
    assert of(found, "c")["base_useful_tokens_per_s"] == 60.0
    assert of(found, "a")["efficiency"] == of(found, "b")["efficiency"] == 1.0


def test_waiting_is_over_the_passes_of_the_same_steps(tmp_path):
    """A step whose passes were not logged counts neither as waiting nor as computing."""
    fields = {"world_size": 2, "pipeline": 2, "schedule": "gpipe"}
    times = {"bubble_s": 0.4, "forward_s": 0.2, "backward_s": 0.4}
    for missing in ("forward_s", "backward_s"):
        steps = tables.steps("a", 8, 2, micro_steps=4, **times)
        steps = [row | ({missing: None} if row["step"] == 5 else {}) for row in steps]
        found = query("pipeline", tables.write(tmp_path, runs=[tables.run("a", **fields)], steps=steps))
        assert found["bubble_share"].tolist() == pytest.approx([0.4])
