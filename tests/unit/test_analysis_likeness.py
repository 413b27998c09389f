"""Runs that are not like for like are found, and what tells them apart is named."""

import json

import pandas as pd
import pytest

from tests import logs
from tokenscale.analysis.comparability import refusals, refused, sentences
from tokenscale.analysis.ingest import ingest

#: a run as the table `runs` has it
ROW = {
    "validity": "valid", "corpus": "web", "tokenizer": "tekken", "model": "llama-8b", "sequence_length": 2048,
    "global_batch": 8, "micro_batch": 2, "precision": "bf16", "steps_asked": 100, "world_size": 1, "device": "GH200",
    "cpu": "Grace", "cores": 72, "threads_per_rank": 72, "oversubscribed": False, "machine": "alps", "share": 1,
    "versions": '{"torch":"2.13.0"}', "science": "s", "code_digest": "c",
}  # fmt: skip


def table(*runs) -> pd.DataFrame:
    """Rows of (approach, changes); `further` is a factor of the cell beside approach and data-parallel degree."""
    rows = []
    for number, (approach, changes) in enumerate(runs):
        row = {**ROW, "repeat": 0, **changes, "approach": approach, "run_id": f"run-{number}"}
        further = "".join(f", {key}={row[key]}" for key in row.pop("further", ()))
        row["series"] = f"{approach}{further}"
        row["cell"] = f"approach={approach}, layout.data={row['world_size']}{further}"
        row["seed"] = row.get("seed", row["repeat"])
        rows.append(row)
    return pd.DataFrame(rows)


def study() -> pd.DataFrame:
    """The ETH study's four approaches at local batch 1 and 2: one run was at another sequence length (1.8, no. 1)."""
    runs = [
        (approach, {"micro_batch": batch, "global_batch": batch, "science": f"{batch}", "further": ("micro_batch",)})
        for batch in (1, 2)
        for approach in ("padded", "pretokenized-padded", "padding-free", "token-list")
    ]
    runs[2][1].update(sequence_length=4096, science="other")
    return table(*runs)


def test_the_studys_sequence_length_mix_up_is_named():
    (found,) = refusals(study(), "approach")
    assert found.run_ids == ("run-2",)
    assert "padding-free at layout.data=1, micro_batch=1" in found.sentence
    assert "sequence_length 4096 vs 2048" in found.sentence


def test_the_studys_trend_over_batch_sizes_is_refused_for_what_it_rests_on():
    runs = study()
    (found,) = refusals(runs[runs["approach"] == "padding-free"].assign(global_batch=2), "micro_batch")
    assert set(found.run_ids) == {"run-2", "run-6"}
    assert "sequence_length 4096 (micro_batch=1) vs 2048 (micro_batch=2)" in found.sentence


def test_the_mix_up_is_found_in_logs_as_well(tmp_path):
    runs = [
        logs.settings(a, micro_batch=b, sequence_length=4096 if (a, b) == ("padding-free", 1) else 2048)
        for a in ("padding-free", "token-list")
        for b in (1, 2)
    ]
    for run in runs:
        logs.write_run(tmp_path / "runs", run)
    ingest(logs.write_table(tmp_path / "t.json", runs, further=("micro_batch",)), tmp_path / "runs", tmp_path / "out")
    (found,) = refusals(pd.read_parquet(tmp_path / "out/runs.parquet"), "approach")
    assert set(found.run_ids) == {run.identity for run in runs if run.micro_batch == 1}
    assert "sequence_length 4096 (padding-free) vs 2048 (token-list)" in found.sentence


def test_runs_that_differ_in_the_factor_alone_are_compared():
    runs = table(("padded", {}), ("packed", {"store_sha256": "x"}), ("packed", {"code_digest": "d", "world_size": 2}))
    assert refusals(runs, "approach") == [] and refusals(runs, "world_size") == []
    assert sentences([]) == "" and refused([]) == set()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"share": 2}, "runs at once on its node 2 vs 1"),
        ({"machine": "other"}, "machine other vs alps"),
        ({"device": "A100"}, "device A100 vs GH200"),
        ({"oversubscribed": True}, "oversubscribed True vs False"),
        ({"versions": '{"torch":"2.12.0"}'}, "torch 2.12.0 vs 2.13.0"),
        ({"environment": '{"OMP_NUM_THREADS":"1"}'}, "environment variable OMP_NUM_THREADS 1 vs 2"),
        ({"environment": '{"MALLOC_ARENA_MAX":"1","OMP_NUM_THREADS":"2"}'}, "MALLOC_ARENA_MAX 1 vs not set"),
        ({"environment": '{"NCCL_ALGO":"Ring"}'}, "OMP_NUM_THREADS not set vs 2"),
        ({"environment": "{}"}, "OMP_NUM_THREADS not set vs 2"),
        ({"model": "llama-1b"}, "model llama-1b vs llama-8b"),
        ({"steps_asked": 200, "science": "t"}, "positions trained on 3,276,800 vs 1,638,400"),
        ({"seed": 5, "science": "t"}, "seed 5 vs 0"),
        ({"tokenizer_sha256": "b" * 64}, "content of the tokenizer bbbbbbbbbbbb vs aaaaaaaaaaaa"),
    ],
)
def test_what_tells_a_run_apart_is_named(change, words):
    same = {"tokenizer_sha256": "a" * 64, "environment": '{"OMP_NUM_THREADS":"2"}'}
    runs = table(("padded", same), ("packed", same), ("token-list", same | change))
    (found,) = refusals(runs, "approach")
    assert found.run_ids == ("run-2",)
    assert words in found.sentence


def test_more_ranks_have_fewer_threads_each_and_that_is_no_difference():
    one, two = ({"environment": f'{{"OMP_NUM_THREADS":"{threads}"}}', "world_size": 2 // threads} for threads in (2, 1))
    assert refusals(table(("packed", one), ("packed", two)), "world_size") == []
    set_ = two | {"environment": '{"MALLOC_ARENA_MAX":"1"}'}
    assert "MALLOC_ARENA_MAX" in sentences(refusals(table(("packed", one), ("packed", set_)), "world_size"))
    assert refusals(table(("padded", one), ("packed", {})), "approach") == []  # not recorded


def test_variables_of_communication_are_compared_where_there_is_any():
    """One rank sets none; of several they are among what makes a difference."""

    def ranks(number, **variables):
        return ("packed", {"world_size": number, "environment": json.dumps(variables)})

    assert refusals(table(ranks(1), ranks(2, NCCL_ALGO="Ring"), ranks(4, NCCL_ALGO="Ring")), "world_size") == []
    found = sentences(refusals(table(ranks(1), ranks(2, NCCL_ALGO="Ring"), ranks(4, FI_PROVIDER="cxi")), "world_size"))
    assert "NCCL_ALGO" in found and "FI_PROVIDER" in found


def test_settings_without_a_column_are_found_by_their_digest():
    (found,) = refusals(table(("padded", {}), ("packed", {"science": "t"})), "approach")
    assert set(found.run_ids) == {"run-0", "run-1"} and "does not name" in found.sentence


def test_repeats_of_other_code_are_not_put_together():
    runs = table(("padded", {}), ("packed", {}), ("packed", {"repeat": 1, "code_digest": "d"}))
    (found,) = refusals(runs, "approach")
    assert set(found.run_ids) == {"run-1", "run-2"} and "different code or inputs" in found.sentence


def test_another_release_with_the_same_code_is_no_difference():
    ours = [
        (a, {"versions": f'{{"torch":"2.13.0","tokenscale":"{v}"}}'}) for a, v in (("padded", "1"), ("packed", "2"))
    ]
    assert refusals(table(*ours), "approach") == []


def test_repeats_have_seeds_of_their_own():
    runs = [(a, {"repeat": k, "science": f"{k}"}) for a in ("padded", "packed") for k in range(3)]
    assert refusals(table(*runs), "approach") == []


def test_of_two_parts_of_one_size_none_stays():
    share = [("padded", {}), ("packed", {}), ("padding-free", {"share": 2}), ("token-list", {"share": 2})]
    (found,) = refusals(table(*share), "approach")
    assert len(found.run_ids) == 4
    assert "runs at once on its node 1 (padded, packed) vs 2 (padding-free, token-list)" in found.sentence


def test_one_repeat_that_shared_its_node_is_left_out_alone():
    runs = [(a, {"repeat": k, "science": f"{k}"}) for a in ("padded", "packed") for k in range(3)]
    runs[4][1]["share"] = 4
    (found,) = refusals(table(*runs), "approach")
    assert found.run_ids == ("run-4",)


def test_a_single_cell_is_compared_with_none_but_its_repeats_are_alike():
    runs = table(*[("packed", {"repeat": k, "science": f"{k}", "share": 1 + (k == 2)}) for k in range(3)])
    assert refused(refusals(runs, "approach")) == {"run-2"}


def test_what_a_run_does_not_record_does_not_part_it():
    runs = table(("padded", {"machine": None, "share": None, "versions": None}), ("packed", {}))
    assert refusals(runs, "approach") == []


def test_what_a_run_does_not_record_is_as_with_most_others():
    runs = table(("padded", {}), ("packed", {}), ("token-list", {"device": None}), ("padding-free", {"device": "A100"}))
    assert refused(refusals(runs, "approach")) == {"run-3"}


def test_more_repeats_do_not_make_one_approach_the_measure_of_another():
    runs = [("padded", {"repeat": k, "science": f"{k}"}) for k in range(3)]
    runs += [("packed", {"repeat": k, "science": f"{k}", "share": 2}) for k in range(2)]
    assert len(refused(refusals(table(*runs), "approach"))) == 5


def test_invalid_runs_are_not_asked():
    assert refusals(table(("padded", {}), ("packed", {"share": 3, "validity": "invalid"})), "approach") == []


@pytest.mark.parametrize("weak", [True, False])
def test_a_batch_that_grows_with_the_world_size_is_weak_scaling(weak):
    runs = table(*[
        ("packed", {"world_size": n, "global_batch": 8 * n if weak or n < 4 else 20, "science": f"{n}", "cores": n})
        for n in (1, 2, 4)
    ])  # fmt: skip
    found = refusals(runs, "world_size")
    assert (found == []) is weak
    assert weak or "global_batch" in sentences(found)


def test_a_budget_in_tokens_takes_each_approach_its_own_steps():
    assert refusals(table(("padded", {"steps_asked": 300}), ("packed", {"steps_asked": 120})), "approach") == []


def test_another_programs_run_beside_a_budget_in_tokens_refuses_none_of_ours():
    ours = [("padded", {"external": False, "steps_asked": 300}), ("packed", {"external": False, "steps_asked": 120})]
    assert refusals(table(*ours, ("mine", {**THEIRS, "steps_asked": 300})), "approach") == []


def test_another_programs_budget_is_held_against_ours_where_ours_are_equal():
    ours = [("padded", {"external": False}), ("packed", {"external": False})]
    assert refused(refusals(table(*ours, ("mine", {**THEIRS, "steps_asked": 300})), "approach")) == {"run-2"}


def test_rows_put_together_from_several_tables_are_told_apart():
    runs = table(("padded", {}), ("packed", {}), ("token-list", {"share": 2}))
    assert refused(refusals(runs.set_axis([0, 0, 1]), "approach")) == {"run-2"}
    assert refused(refusals(runs.set_axis([0, 1, 1]), "approach")) == {"run-2"}


def test_lengths_of_a_sequence_at_equal_steps_are_unequal_budgets():
    runs = table(
        *[("packed", {"sequence_length": n, "science": f"{n}", "further": ("sequence_length",)}) for n in (512, 1024)]
    )
    (found,) = refusals(runs, "sequence_length")
    assert found.differs == ("positions trained on 409,600 (sequence_length=512) vs 819,200 (sequence_length=1024)",)
    assert refusals(runs.assign(steps_asked=[200, 100]), "sequence_length") == []


def test_layouts_may_differ_in_their_ranks_and_in_nothing_else():
    degrees = {"further": ("layout.tensor",)}
    runs = [
        ("packed", {**degrees, "world_size": n, "cores": n, "layout.tensor": t}) for n, t in ((1, 1), (2, 2), (4, 2))
    ]
    assert refusals(table(*runs), "layout") == []
    runs[2][1]["science"] = "t"
    (found,) = refusals(table(*runs), "layout")
    assert "does not name" in found.sentence


THEIRS = {"external": True, "science": "external-1", "code_digest": None, "versions": '{"torch":"2.9.0"}', "seed": 7}


def test_another_programs_run_stands_beside_ours_and_refuses_none_of_them():
    runs = table(
        ("padded", {"external": False}), ("packed", {"external": False}), ("packed", {**THEIRS, "cores": None})
    )
    assert refusals(runs, "approach") == refusals(runs, "world_size") == refusals(runs, "layout") == []


@pytest.mark.parametrize(
    ("change", "words"),
    [({"sequence_length": 512}, "sequence_length 512 vs 2048"), ({"world_size": 4}, "world size 4 vs 1")],
)
def test_another_programs_run_has_to_be_like_ours(change, words):
    runs = table(("padded", {"external": False}), ("packed", {"external": False}), ("packed", {**THEIRS, **change}))
    runs["cell"] = [f"approach={a}, layout.data=1" for a in runs["approach"]]
    (found,) = refusals(runs, "approach")
    assert found.run_ids == ("run-2",) and words in found.sentence and "packed (external)" in found.sentence


def test_another_programs_scaling_is_a_line_of_its_own():
    runs = table(("packed", {"external": False}), ("packed", {**THEIRS, "sequence_length": 512, "further": ()}))
    assert refusals(runs, "world_size") == refusals(runs, "layout") == []
    assert len(refused(refusals(runs, "approach"))) == 2
