"""What an experiment asks of its models: read from YAML, refused where runs cannot answer, told by `plan`."""

import json

import pytest

from tokenscale.base.errors import UserError
from tokenscale.cli.plan import plan
from tokenscale.settings.benchmarks import InferenceBenchmarkSettings, SamplingSettings
from tokenscale.settings.config import Config
from tokenscale.settings.options import from_json, to_dict

RUNS = {"corpus": "c", "tokenizer": "t", "model": "llama-micro", "sequence_length": 64, "checkpoints": {"final": True}}
ASKED = {"prompts": ["a"], "prompt_tokens": [8], "new_tokens": [8, 16], "sampling": [{"temperature": 0.5, "seed": 3}]}


def project(folder, runs=RUNS, **asked):
    experiment = {"question": "?", "runs": runs, "inference_benchmark": ASKED | asked}
    (folder / "config/experiments").mkdir(parents=True)
    (folder / "config/experiments/e.yaml").write_text(json.dumps(experiment))
    values = {"experiments": ["e"], "corpora": {"c": {"source": {"documents": 9}}}}
    return Config(values | {"tokenizers": {"t": {"kind": "numbers", "vocabulary_size": 99}}}, root=folder)


def test_settings_pass_through_json_as_the_rule_passes_them_on(tmp_path):
    config = project(tmp_path)
    asked = config.experiment("e").inference_benchmark
    assert asked.sampling == (SamplingSettings(temperature=0.5, seed=3),) and asked.rounds == 5
    assert from_json(InferenceBenchmarkSettings, json.dumps(to_dict(asked))) == asked
    assert config.experiment("e").benchmark_files("e") == ["results/benchmarks/inference/e.json"]
    assert config.experiment("e").benchmarks == {}
    assert config.list_corpora(["e"]) == ["c"] and len(config.runs("e")) == 1
    assert any("1 models write 2 cells" in line for line in plan(config, ["e"]))


@pytest.mark.parametrize(
    ("runs", "asked", "words"),
    [
        (RUNS | {"objective": "masked"}, {}, ["a model of objective masked cannot generate text", "e.yaml"]),
        ({**RUNS, "checkpoints": {}}, {}, ["do not save their weights", "checkpoints: {final: true}"]),
        (RUNS, {"new_tokens": [8, 57]}, ["65 prompt and new tokens exceed the sequence length 64"]),
        (RUNS, {"new_tokens": [1]}, ["inference_benchmark.new_tokens", "at least 2"]),
        (RUNS, {"batches": []}, ["inference_benchmark.batches"]),
        (RUNS, {"prompts": []}, ["inference_benchmark.prompts"]),
        (RUNS, {"sampling": [{"top_p": 0}]}, ["inference_benchmark.sampling.0.top_p"]),
    ],
)
def test_what_the_runs_cannot_answer_is_refused_before_anything_runs(tmp_path, runs, asked, words):
    with pytest.raises(UserError) as error:
        project(tmp_path, runs, **asked).runs("e")
    for word in words:
        assert word in str(error.value)
