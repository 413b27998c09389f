"""Each objective trains: the loss on the held-out slice falls, with every kind of model, mask and number format."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch

from tests.corpora import Lab, make_run, small_run
from tokenscale.base.files import read_json
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import OptimizerSettings, ScheduleSettings, ValidationSettings
from tokenscale.train.loop import train
from tokenscale.train.parallel.world import World

pytestmark = pytest.mark.experiment

T = 32
WORDS = "a model learns which word comes next because the same words come again in the same order".split()
WORLD = World(0, 1, 0, torch.device("cpu"))
MICRO = PRESETS["llama-micro"]
CASES = {
    "causal": {},
    "causal, document mask, learned positions": {
        "document_mask": True,
        "model": replace(MICRO, positions="learned", norm="layer", activation="gelu", biases=True),
    },
    "causal, document mask, bf16, loss in chunks": {"document_mask": True, "precision": "bf16", "loss_chunk": 50},
    "causal, document mask, fp16, loss in chunks": {"document_mask": True, "precision": "fp16", "loss_chunk": 50},
    "masked, document mask, loss in chunks": {"objective": "masked", "document_mask": True, "loss_chunk": 50},
    "masked, padded, tokenized while training, bf16": {
        "objective": "masked",
        "approach": "padded",
        "precision": "bf16",
    },
    "masked, fp16": {"objective": "masked", "precision": "fp16"},
    "masked, DistilBERT, loss in chunks, read ahead": {
        "objective": "masked",
        "model": replace(PRESETS["distilbert-tiny"], dimension=32, heads=2, key_value_heads=2, hidden=64),
        "loss_chunk": 50,
        "prefetch": True,
    },
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Documents that begin anywhere in one sentence said again and again: what a tiny model learns in a few steps."""
    pick = random.Random(0)
    texts = [" ".join((WORDS * 9)[(start := pick.randrange(16)) : start + pick.randrange(2, 99)]) for _ in range(200)]
    return Lab(tmp_path_factory.mktemp("lab"), texts, validation_share=0.2)


@pytest.mark.parametrize("case", CASES)
def test_validation_loss_falls(lab, tmp_path, case):
    if "BERT" in case:
        pytest.importorskip("transformers")
    settings = {"global_batch": 8, "micro_batch": 4, "masking": replace(make_run("packed", T).masking, share=0.15)}
    settings |= {"schedule": ScheduleSettings(warmup_steps=3), "optimizer": OptimizerSettings(learning_rate=1e-2)}
    run = small_run(steps=30, validation=ValidationSettings(rows=16), **settings | CASES[case])
    assert run.problems() == []
    train(run, lab.inputs(run), tmp_path, WORLD)
    record = read_json(tmp_path / "run.json", "record")
    assert record["outcome"]["status"] == "complete" and record["kernel"] == "sdpa"
    lines = (tmp_path / "attempt=00/rank=00000/events.jsonl").read_text().splitlines()
    found = [event for event in map(json.loads, lines) if event["event"] == "validation"]
    first, last = (event["loss_sum"] / event["useful_tokens"] for event in found)
    vocabulary = read_json(lab.tokenizer / "manifest.json", "manifest")["vocabulary_size"]
    assert abs(first - math.log(vocabulary)) < 0.6  # a model that knows nothing
    assert last < 0.75 * first
