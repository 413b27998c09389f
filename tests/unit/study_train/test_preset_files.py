"""Preset files: what they become, and what goes before them."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from tests.unit.study_train.conftest import PRESET, asked
from tokenscale.settings import source_studies
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS


@pytest.mark.parametrize("name, weights", [("small", "study-small"), ("medium", "study-medium")])
def test_the_shipped_preset_files_are_the_studys(name, weights):
    file = source_studies.load_preset_file(str(Path(__file__).parents[3] / f"config/presets/{name}_model.yaml"))
    model = file.model_settings("x")
    assert dataclasses.replace(model, vocabulary_size=None) == PRESETS[weights] and model.vocabulary_size == 50_257
    assert file.values()["precision"] == "bf16" and file.values()["sequence_length"] == 1024
    assert file.training.batch_size * file.training.gradient_accumulation_steps == 32


def test_the_preset_of_fsdp_shares_one_replica_over_all_ranks(here):
    preset = str(Path(__file__).parents[3] / "config/presets/fsdp_config.yaml")

    def layout(ranks, *words):
        run = asked(
            "--config", preset, "--model-size", "medium", "--dataset", "dummy", "--world-size", ranks, *words
        ).run
        assert run.activation_checkpointing == "block" and run.model == PRESETS["study-medium"]
        assert run.global_batch == 4 * 8 * run.layout.data_parallel_size and run.precision == "bf16"
        return run.layout

    assert layout("4") == LayoutSettings(shard=4) and layout("1") == LayoutSettings()
    assert layout("4", "--layout.shard", "2") == LayoutSettings(data=2, shard=2), "flags go before it"
    assert layout("4", "--layout.tensor", "2") == LayoutSettings(shard=2, tensor=2)


def test_a_preset_file_becomes_settings(here):
    """`6e-4` and `no` are a text and a boolean to YAML 1.1."""
    assert yaml.safe_load(PRESET)["training"]["learning_rate"] == "6e-4"
    run = asked("--config", "preset.yaml", "--dataset", "web.parquet", "--world-size", "2").run
    assert (run.optimizer.learning_rate, run.budget.steps, run.schedule.warmup_steps) == (6e-4, 20, 4)
    assert (run.micro_batch, run.global_batch, run.sequence_length, run.precision) == (2, 12, 32, "fp32")
    assert (run.model.name, run.model.hidden, run.model.tied_embeddings) == ("preset", 128, True)
    assert run.tokenizer.kind == "bpe" and run.tokenizer.vocabulary_size == 300, "as many as the model states"
    assert run.tokenizer.learnt_from == run.corpus


def test_flags_go_before_the_preset_file(here):
    words = "--learning-rate 1e-3 --training-steps 9 --sequence-length 64 --precision bf16".split()
    run = asked("--config", "preset.yaml", *words).run
    assert (run.optimizer.learning_rate, run.budget.steps, run.sequence_length) == (1e-3, 9, 64)
    assert run.precision == "bf16" and run.schedule.warmup_steps == 4
    assert asked("--config", "preset.yaml", "--batch-size", "5").run.global_batch == 15
    assert asked("--config", "preset.yaml", "--global-batch", "7").run.global_batch == 7
    narrow = asked("--config", "preset.yaml", "--micro-batch", "1").run
    assert (narrow.micro_batch, narrow.global_batch) == (1, 6), "smaller passes, the same step"
    assert asked("--config", "preset.yaml", "--model", "llama-micro").run.model == PRESETS["llama-micro"]


def test_the_backend_is_the_devices_and_said_so(here):
    (here / "preset.yaml").write_text(PRESET.replace("gloo", "nccl"))
    import torch

    expected = not torch.cuda.is_available()
    assert any("nccl is requested" in note for note in asked("--config", "preset.yaml").notes) == expected
