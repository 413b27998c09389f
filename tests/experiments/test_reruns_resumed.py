import json
import shutil

import pytest

from tests.once import once
from tests.workflow.conftest import CONFIG, RUNS, Project, copy_of
from tests.workflow.jobs import changed
from tokenscale.analysis.queries import query
from tokenscale.settings import config as configuration
from tokenscale.settings.options import to_dict

pytestmark = [pytest.mark.experiment, pytest.mark.workflow]

FROM_ONE = {"run": {"layout.data": 1}, "step": 2}
CHECKPOINTS = {"every": 2, "keep_last": 3, "keep_resume_state": True}
LEFT = {
    "question": "Does it go on?",
    "runs": RUNS | {"approach": "packed", "checkpoints": CHECKPOINTS, "device": "cpu"},
    "factors": {"layout.data, resume_from": [[1, None], [2, FROM_ONE]]},
    "figures": ["ddp_verification_loss"],
}


def build(built, folder):
    """From the project whose tokens are there."""
    project = copy_of(built, folder)
    for name in ("config/experiments", "results/runs"):
        shutil.rmtree(project.root / name)
    (project.root / "config/experiments").mkdir()
    (project.root / "config/experiments/left.yaml").write_text(json.dumps(LEFT))
    (project.root / "config/config.yaml").write_text(json.dumps(CONFIG | {"experiments": ["left"]}))
    (project.root / "config/claims.yaml").write_text(json.dumps({"documents": {}, "claims": {}}))
    project.snakemake("--cores", "2", "tables")


@pytest.fixture(scope="module")
def left(built, tmp_path_factory) -> Project:
    made = Project(once(tmp_path_factory, "left", lambda folder: build(built, folder)) / "project")
    return copy_of(made, tmp_path_factory.mktemp("left-copy"))


@pytest.fixture(scope="module")
def runs(left):
    return sorted(
        configuration.load_config(root=left.root).runs("left"),
        key=lambda run: run.settings.layout.data,
    )


def planned(project, target="tables"):
    return {rule: count for rule, count in project.planned(target).items() if rule != "left"}


def test_the_rest_has_the_samples_and_the_losses_of_the_run_that_was_not_interrupted(left, runs):
    tables = left.root / "results/tables/left"
    pairs = query("order", tables).query("kind != 'world sizes'")
    assert len(pairs) == 1, query("inventory", tables)[["run_id", "validity", "reasons"]].to_csv()
    (pair,) = pairs.itertuples()
    assert (pair.kind, pair.reference, pair.compared) == (
        "resumed and uninterrupted",
        runs[0].run_id,
        runs[1].run_id,
    )
    assert (pair.steps_compared, pair.steps_equal, pair.same_useful_tokens) == (3, 3, True)
    assert pair.largest_loss_difference < 1e-5
    rows = query("inventory", left.root / "results/tables/left").set_index("run_id")
    row = rows.loc[runs[1].run_id]
    assert (row["resumed_from"], row["resumed_at"], row["validity"]) == (runs[0].run_id, 2, "valid")
    seen = (
        query("loss", left.root / "results/tables/left")
        .groupby("run_id")["useful_tokens_seen"]
        .max()
    )
    assert seen[runs[0].run_id] == seen[runs[1].run_id], "its tokens are counted from the beginning"
    source, rest = runs
    assert (
        to_dict(rest.settings)["resume_from"]
        == f"results/runs/{source.run_id}/checkpoints/step=00000002"
    )
    done = [left.root / f"results/runs/{run.run_id}/done.json" for run in runs]
    assert (
        json.loads(done[0].read_text())["status"]
        == json.loads(done[1].read_text())["status"]
        == "complete"
    )
    log = (done[1].parent / "attempt=00/rank=00000/events.jsonl").read_text()
    assert (
        '"resume"' in log
        and done[0].stat().st_mtime < (done[1].parent / "attempt=00/attempt.json").stat().st_mtime
    )
    assert planned(left) == {}


def test_a_source_that_is_gone_is_trained_again_and_so_is_what_went_on_from_it(
    left, runs, tmp_path
):
    project = copy_of(left, tmp_path)
    source, rest = (project.root / f"results/runs/{run.run_id}" for run in runs)
    rest.rename(tmp_path / "aside")
    assert planned(project, "runs") == {"train": 1}
    (tmp_path / "aside").rename(rest)
    shutil.rmtree(source)
    assert planned(project, "runs") == {"train": 2}


@pytest.mark.parametrize(
    "file, trained", [("train/parallel/ddp.py", 2), ("settings/experiments.py", 0)]
)
def test_an_edit_of_a_trainings_code_reruns_the_source_and_what_resumes_from_it(
    left, file, trained
):
    with changed(left.root / "src/tokenscale" / file):
        assert planned(left).get("train", 0) == trained


@pytest.mark.parametrize(
    "change, trained",
    [
        ({"runs": LEFT["runs"] | {"seed": 1}}, 2),
        ({"factors": {"layout.data, resume_from": [[1, None], [2, FROM_ONE | {"step": 4}]]}}, 1),
        ({"factors": {"layout.data, resume_from": [[1, None], [2, FROM_ONE], [2, None]]}}, 1),
        ({"question": "And now?"}, 0),
    ],
)
def test_a_setting_of_the_source_trains_both_anew_and_another_step_the_rest_alone(
    left, change, trained
):
    with changed(
        left.root / "config/experiments/left.yaml", lambda text: json.dumps(LEFT | change)
    ):
        assert planned(left) == {"run_table": 1, "ingest": 1, "validate": 1} | (
            {"train": trained} if trained else {}
        )
