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


def targets(root, **second) -> Targets:
    (root / "config/experiments").mkdir(parents=True, exist_ok=True)
    for name, more in {"first": {}, "second": second}.items():
        text = json.dumps({"question": "?", "runs": RUNS | more})
        (root / f"config/experiments/{name}.yaml").write_text(text)
    return Targets(Config(CONFIG, root=root, layers=[("", CONFIG), ("", {}), ("--config", {})]))


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
