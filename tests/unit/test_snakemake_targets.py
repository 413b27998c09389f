"""The files of the workflow's targets, and what rules read, of a small configuration."""

import json

import pytest

from tokenscale.base.errors import UserError
from tokenscale.cli.snakemake_targets import Targets
from tokenscale.settings.config import Config
from tokenscale.settings.manifests import done_file

RUNS = {"corpus": "own", "tokenizer": "bpe", "sequence_length": 32, "global_batch": 4, "budget": {"steps": 20}}
CONFIG = {
    "experiments": ["first", "second"],
    "corpora": {"own": {"source": {"files": "texts/*.txt"}, "parts": 2}, "docs": {"source": {"kind": "docstrings"}}},
    "tokenizers": {"bpe": {"kind": "bpe", "corpus": "own", "vocabulary_size": 300}},
}
LAYERS = [("config/config.yaml", CONFIG), ("", {}), ("--config", {})]
FIRST = {
    "question": "?",
    "runs": RUNS,
    "factors": {"approach": ["packed", "padding-free"]},
    "figures": ["loss_over_time"],
}
SECOND = {"question": "?", "runs": RUNS, "factors": {"layout.data": [1, 2]}, "figures": []}


def config_of(root) -> Config:
    (root / "config/experiments").mkdir(parents=True, exist_ok=True)
    for name, experiment in {"first": FIRST, "second": SECOND, "wrong": {"question": 3}}.items():
        (root / f"config/experiments/{name}.yaml").write_text(json.dumps(experiment))
    return Config(CONFIG, root=root, layers=LAYERS)


@pytest.fixture
def targets(tmp_path, monkeypatch) -> Targets:
    monkeypatch.chdir(tmp_path)
    return Targets(config_of(tmp_path))


def test_a_shared_run_is_a_file_once_and_only_existing_ones_of_a_report_of_what_is_there(targets, tmp_path):
    files = targets.run_files(["first", "second"])
    assert len(files) == len(set(files)) == 3
    there = tmp_path / files[1]
    there.parent.mkdir(parents=True)
    there.touch()
    now = Targets(config_of(tmp_path), existing_only=True)
    assert now.run_files(["first", "second"]) == [files[1]]
    assert now.table_inputs("second")["stores"] == [] != targets.table_inputs("second")["stores"]


def test_a_run_reads_its_store_and_the_run_that_it_resumes_from(targets, tmp_path):
    run_id = next(name for name in targets.runs if name.startswith("packed"))
    inputs = targets.run_inputs(run_id)
    assert inputs["store"].startswith("results/tokens/own/bpe/packed") and inputs["resume_from"] == []
    for name, state in {
        f"results/runs/{run_id}/checkpoints/step=5": done_file(run_id),
        "/c": "/c/checkpoint.json",
    }.items():
        given = FIRST | {"runs": RUNS | {"resume_from": name}, "factors": {"approach": ["packed"]}}
        (tmp_path / "config/experiments/second.yaml").write_text(json.dumps(given))
        resumed = Targets(Config(CONFIG, root=tmp_path, layers=LAYERS))
        ids = [name for name, run in resumed.runs.items() if run.settings.resume_from]
        assert resumed.run_inputs(ids[0])["resume_from"] == [state]
    with pytest.raises(UserError) as error:
        targets.run_of(f"{run_id[:-1]}x")
    assert run_id in error.value.facts["next"]


def test_parts_and_source_files_of_a_corpus(targets, tmp_path):
    assert targets.part_manifests("results/corpus/own", "own")[1] == "results/corpus/own/parts/00001/manifest.json"
    with pytest.raises(UserError):
        targets.corpus_inputs("own")
    assert targets.corpus_inputs("docs") == [] and targets.content_of("docs") == ""
    assert targets.tokenizer_inputs("bpe") == {"corpus": ["results/corpus/own/manifest.json"], "source": []}
