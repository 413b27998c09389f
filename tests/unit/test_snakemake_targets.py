"""What rules of the workflow read, of a small configuration."""

import json

from tokenscale.cli.snakemake.targets import Targets
from tokenscale.settings.config import Config
from tokenscale.settings.manifests import done_file

CONFIG = {
    "experiments": ["first", "second"],
    "corpora": {"own": {"source": {"files": "texts/*.txt"}}},
    "tokenizers": {"bpe": {"kind": "bpe", "corpus": "own", "vocabulary_size": 300}},
}
RUNS = {
    "corpus": "own",
    "tokenizer": "bpe",
    "sequence_length": 32,
    "global_batch": 4,
    "budget": {"steps": 20},
}


def targets(root, job_runs=(), **second) -> Targets:
    (root / "config/experiments").mkdir(parents=True, exist_ok=True)
    for name, more in {"first": {}, "second": second}.items():
        text = json.dumps({"question": "?", "runs": RUNS | more})
        (root / f"config/experiments/{name}.yaml").write_text(text)
    layers = [("", CONFIG), ("", {}), ("--config", {})]
    return Targets(Config(CONFIG, root=root, layers=layers), job_runs=job_runs)


def test_a_run_reads_its_store_and_what_provides_the_state_that_it_resumes_from(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (run_id,) = targets(tmp_path).runs
    inputs = targets(tmp_path).run_inputs(run_id)
    assert (
        inputs["store"].startswith("results/tokens/own/bpe/packed") and inputs["resume_from"] == []
    )
    own = f"results/runs/{run_id}/checkpoints/step=5"
    for state, provider in ((own, done_file(run_id)), ("/c", "/c/checkpoint.json")):
        resumed = targets(tmp_path, resume_from=state)
        (resumed_id,) = resumed.runs.keys() - {run_id}
        assert resumed.run_inputs(resumed_id)["resume_from"] == [provider]


def test_the_job_of_a_run_builds_only_this_run_and_those_it_resumes_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (first,) = targets(tmp_path).runs
    resume = {"resume_from": f"results/runs/{first}/checkpoints/step=5"}
    planned = targets(tmp_path, **resume)
    assert planned.runs.keys() > {first}
    (second,) = planned.runs.keys() - {first}
    assert targets(tmp_path, [first], **resume).runs == planned.runs  # there is no index
    planned.write_index(needed=True)
    job = targets(tmp_path, [first], **resume)
    assert job.runs == {first: planned.runs[first]}
    job = targets(tmp_path, [second], **resume)
    assert job.runs == planned.runs
    assert job.run_inputs(second) == planned.run_inputs(second)


def test_a_job_does_not_follow_the_index_of_other_experiments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned = targets(tmp_path, seed=1)
    planned.write_index(needed=True)
    _, second = planned.runs
    edited = targets(tmp_path, [second], seed=2)
    assert len(edited.runs) == 2
    assert second not in edited.runs
