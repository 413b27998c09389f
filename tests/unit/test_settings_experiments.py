"""What an experiment asks for beside its runs: going on from a run's state, canaries, texts that
its models write.
"""

import json

import pytest

from tests.unit.test_config import EXPERIMENT
from tests.unit.test_config import project as of_experiment
from tokenscale.cli.plan import plan
from tokenscale.settings.benchmarks import InferenceBenchmarkSettings
from tokenscale.settings.config import Config
from tokenscale.settings.experiments import list_kept_steps
from tokenscale.settings.options import from_json, to_dict
from tokenscale.settings.run import (
    BudgetSettings,
    CheckpointSettings,
    RunSettings,
    parse_run_id,
    start_step,
)

RUNS = EXPERIMENT["runs"] | {
    "budget": {"steps": 24},
    "checkpoints": {"every": 8, "keep_last": 3, "keep_resume_state": True},
}
FROM_ONE = {"run": {"layout.data": 1}, "step": 8}


def project(
    tmp_path, levels, *, runs=RUNS, factor="layout.data, resume_from", factors=None, **more
) -> Config:
    every = {factor: levels} | (factors or {})
    return of_experiment(tmp_path, {"question": "?", "runs": runs, "factors": every, **more})


def by_cell(config: Config) -> dict[tuple, RunSettings]:
    """(level of data, step it begins at, repeat) → run."""
    found = {
        (r.cell["layout.data"], start_step(r.settings), r.repeat): r.settings
        for r in config.runs("e")
    }
    assert len(found) == len(config.runs("e"))
    return found


def test_a_run_goes_on_from_the_state_of_the_named_cell_and_the_same_repeat(tmp_path):
    levels = [[1, None], [2, FROM_ONE], [2, None]]
    runs = by_cell(project(tmp_path, levels, repeats=2))
    other = by_cell(project(tmp_path, levels, runs=RUNS | {"seed": 5}))
    assert (
        other[2, 8, 0].resume_from
        == f"results/runs/{other[1, 0, 0].identity}/checkpoints/step=00000008"
    )
    for repeat in (0, 1):
        source = runs[1, 0, repeat]
        resumed = runs[2, 8, repeat]
        assert resumed.resume_from == f"results/runs/{source.identity}/checkpoints/step=00000008"
        assert (
            parse_run_id(resumed.resume_from) == source.identity and resumed.repeat == source.repeat
        )
        assert to_dict(resumed) | {"resume_from": None} == to_dict(runs[2, 0, repeat]) | {
            "resume_from": None
        }


def test_a_resumed_run_may_be_left_in_turn_and_is_meant_only_where_that_is_said(tmp_path):
    again = {"run": {"layout.data": 2, "resume_from": {"step": 8}}, "step": 16}
    runs = by_cell(project(tmp_path, [[4, again], [1, None], [2, FROM_ONE], [2, None]]))
    assert parse_run_id(runs[4, 16, 0].resume_from) == runs[2, 8, 0].identity
    assert parse_run_id(runs[2, 8, 0].resume_from) == runs[1, 0, 0].identity


def test_factors_that_are_not_named_have_the_same_level_in_both(tmp_path):
    config = project(
        tmp_path, [[1, None], [2, FROM_ONE]], factors={"optimizer.learning_rate": [0.1, 0.2]}
    )
    runs = {r.run_id: r.settings for r in config.runs("e")}
    resumed = [run for run in runs.values() if run.resume_from]
    assert len(resumed) == 2
    for run in resumed:
        assert runs[parse_run_id(run.resume_from)].optimizer == run.optimizer


def test_mappings_of_a_layout_are_named_by_their_settings(tmp_path):
    levels = [
        [{"data": 2}, None],
        [{"shard": 2, "sharding": "zero3"}, {"run": {"layout.data": 2}, "step": 8}],
    ]
    first, second = (
        run.settings for run in project(tmp_path, levels, factor="layout, resume_from").runs("e")
    )
    assert (first.layout.method, second.layout.method) == (
        "ddp",
        "fsdp",
    ) and second.layout.data == 1
    assert parse_run_id(second.resume_from) == first.identity


def test_runs_come_after_those_whose_states_they_go_on_from(tmp_path):
    again = {"run": {"layout.data": 2, "resume_from": {"step": 8}}, "step": 16}
    levels = [[4, again], [2, FROM_ONE], [1, None], [2, None], [4, None]]
    for seed in range(5):
        places = {
            r.run_id: r.position for r in project(tmp_path, levels, order_seed=seed).runs("e")
        }
        for run in project(tmp_path, levels, order_seed=seed).runs("e"):
            if run.settings.resume_from:
                assert places[parse_run_id(run.settings.resume_from)] < run.position


def test_a_level_stands_over_what_all_runs_go_on_from_and_a_folder_stays_a_folder(tmp_path):
    runs = RUNS | {"resume_from": {"run": {"layout.data": 9}, "step": 1}}
    folder = "elsewhere/checkpoints/step=00000100"
    found = by_cell(project(tmp_path, [[1, None], [2, FROM_ONE], [2, folder]], runs=runs))
    assert start_step(found[2, 8, 0]) == 8
    assert found[2, 100, 0].resume_from == folder and parse_run_id(folder) is None


def test_a_run_that_begins_by_itself_keeps_its_identity(tmp_path):
    without = project(tmp_path / "a", [1, 2], factor="layout.data").runs("e")
    among = project(tmp_path / "b", [[1, None], [2, None], [2, FROM_ONE]]).runs("e")
    assert {run.run_id for run in without} < {run.run_id for run in among}


@pytest.mark.parametrize(
    "checkpoints, steps",
    [
        ({}, []),
        ({"keep_resume_state": True}, [24]),
        ({"every": 8, "keep_last": 9, "keep_resume_state": True}, [8, 16, 24]),
        ({"every": 9, "keep_last": 2, "keep_resume_state": True}, [18, 24]),
        ({"every": 12, "keep_last": 9, "keep_resume_state": True, "at_start": True}, [0, 12, 24]),
        ({"every": 8, "keep_last": 9}, []),
        ({"every": 8, "keep_last": 9, "keep_resume_state": True, "each_epoch": True}, []),
    ],
)
def test_states_that_are_kept_are_those_that_a_run_writes_and_does_not_delete(checkpoints, steps):
    run = RunSettings(
        budget=BudgetSettings(steps=24), checkpoints=CheckpointSettings(**checkpoints)
    )
    assert list_kept_steps(run) == steps


def test_a_canary_stands_first_last_and_between_and_changes_no_other_run(tmp_path):
    plain = of_experiment(tmp_path / "a").runs("e")
    canary = {"cell": {"approach": "packed", "layout.data": 1}, "every": 3}
    runs = of_experiment(tmp_path / "b", {**EXPERIMENT, "canary": canary}).runs("e")
    places = [r.position for r in runs if r.repeat >= EXPERIMENT["repeats"]]
    assert [r.position for r in runs] == list(range(len(runs))) and len(runs) == 8 + 4
    assert places == [0, 4, 8, 11]
    assert {(r.cell["approach"], r.cell["layout.data"]) for r in runs if r.position in places} == {
        ("packed", 1)
    }
    assert [r.repeat for r in runs if r.position in places] == [2, 3, 4, 5]
    others = {r.run_id for r in runs if r.repeat < EXPERIMENT["repeats"]}
    assert others == {r.run_id for r in plain}
    assert len({r.run_id for r in runs}) == len(runs)


def test_settings_of_texts_pass_through_json_as_the_rule_passes_them_on(tmp_path):
    texts = {"prompts": ["a"], "prompt_tokens": [8], "new_tokens": [8, 16]}
    texts |= {"sampling": [{"temperature": 0.5, "seed": 3}]}
    runs = EXPERIMENT["runs"] | {"checkpoints": {"final": True}}
    config = of_experiment(tmp_path, {"question": "?", "runs": runs, "inference_benchmark": texts})
    asked = config.experiment("e").inference_benchmark
    assert texts.items() <= to_dict(asked).items()
    assert from_json(InferenceBenchmarkSettings, json.dumps(to_dict(asked))) == asked
    assert config.experiment("e").benchmark_files("e") == ["results/benchmarks/inference/e.json"]
    assert any("1 models write 2 cells" in line for line in plan(config, ["e"]))
