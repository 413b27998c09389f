"""Objectives from end to end through the workflow: raw text in, sealed runs out, losses on held-out rows that fell."""

import json
import shutil

import pytest

from tests.workflow.conftest import RUNS

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20), pytest.mark.workflow]

LEARNING = RUNS | {
    "approach": "packed",
    "budget": {"steps": 12},
    "global_batch": 8,
    "optimizer": {"learning_rate": 0.01},
    "validation": {"rows": 8},
}
EXPERIMENTS = {
    "ways": {
        "question": "Do both objectives learn inside documents?",
        "runs": LEARNING | {"document_mask": True, "precision": "bf16", "loss_chunk": 100},
        "factors": {"objective": ["causal", "masked"]},
    },
    "ranks": {
        "question": "Does a model of transformers?",
        "runs": LEARNING | {"objective": "masked", "model": "distilbert-tiny", "layout": {"data": 2}},
    },
}


def test_causal_and_masked_runs_learn(copy):
    pytest.importorskip("transformers")
    shutil.rmtree(copy.root / "results/runs")
    for name, experiment in EXPERIMENTS.items():
        (copy.root / f"config/experiments/{name}.yaml").write_text(json.dumps(experiment))
    copy.snakemake("--cores", "2", "runs")
    records = [json.loads(path.read_text()) for path in sorted(copy.root.glob("results/runs/*/run.json"))]
    assert [r["outcome"]["status"] for r in records] == ["complete"] * 3
    assert sorted(r["run"].get("objective", "causal") for r in records) == ["causal", "masked", "masked"]
    for path in copy.root.glob("results/runs/*/attempt=00/rank=00000/events.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        first, last = (e["loss_sum"] / e["useful_tokens"] for e in events if e["event"] == "validation")
        assert last < 0.9 * first, path
