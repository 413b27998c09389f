"""Each objective trains: held-out loss falls with every kind of model, mask and number format, and
BLEU rises.
"""

import json
import math
from dataclasses import replace

import pytest
import torch

from tests.corpora import GrammarLab, make_run, pairs_source, sentence_lab, small_run
from tests.unit.test_evaluation_translation import make_run as make_translation
from tokenscale.analysis.bleu import bleu_rows
from tokenscale.base.files import read_json
from tokenscale.settings.data import CorpusSettings, TokenizerSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import (
    BudgetSettings,
    OptimizerSettings,
    ScheduleSettings,
    ValidationSettings,
)
from tokenscale.train.loop import train
from tokenscale.train.parallel.world import World

pytestmark = pytest.mark.experiment

T = 32
WORLD = World(0, 1, 0, torch.device("cpu"))
MICRO = PRESETS["llama-micro"]
CASES = {
    "causal": {},
    "causal, document mask, learned positions": {
        "document_mask": True,
        "model": replace(MICRO, positions="learned", norm="layer", activation="gelu", biases=True),
    },
    "causal, document mask, bf16, loss in chunks": {
        "document_mask": True,
        "precision": "bf16",
        "loss_chunk": 50,
    },
    "causal, document mask, fp16, loss in chunks": {
        "document_mask": True,
        "precision": "fp16",
        "loss_chunk": 50,
    },
    "masked, document mask, loss in chunks": {
        "objective": "masked",
        "document_mask": True,
        "loss_chunk": 50,
    },
    "masked, padded, tokenized while training, bf16": {
        "objective": "masked",
        "approach": "padded",
        "precision": "bf16",
    },
    "masked, fp16": {"objective": "masked", "precision": "fp16"},
    "masked, DistilBERT, loss in chunks, read ahead": {
        "objective": "masked",
        "model": replace(
            PRESETS["distilbert-tiny"], dimension=32, heads=2, key_value_heads=2, hidden=64
        ),
        "loss_chunk": 50,
        "prefetch": True,
    },
}

#: both objectives, a mask and a number format; others are long tests
GATE = {
    "causal, document mask, bf16, loss in chunks",
    "masked, document mask, loss in chunks",
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return sentence_lab(tmp_path_factory.mktemp("lab"), 200, 99)


def read_events(folder):
    (path,) = folder.rglob("events.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in GATE else pytest.mark.long) for case in CASES]
)
def test_validation_loss_falls(lab, tmp_path, case):
    if "BERT" in case:
        pytest.importorskip("transformers")
    settings = {
        "global_batch": 8,
        "micro_batch": 4,
        "masking": replace(make_run("packed", T).masking, share=0.15),
    }
    settings |= {
        "schedule": ScheduleSettings(warmup_steps=3),
        "optimizer": OptimizerSettings(learning_rate=1e-2),
    }
    run = small_run(steps=30, validation=ValidationSettings(rows=16), **settings | CASES[case])
    assert run.problems() == []
    train(run, lab.inputs(run), tmp_path, WORLD)
    record = read_json(tmp_path / "run.json", "record")
    assert record["outcome"]["status"] == "complete" and record["kernel"] == "sdpa"
    found = [event for event in read_events(tmp_path) if event["event"] == "validation"]
    first, last = (event["loss_sum"] / event["useful_tokens"] for event in found)
    vocabulary = read_json(lab.tokenizer / "manifest.json", "manifest")["vocabulary_size"]
    assert abs(first - math.log(vocabulary)) < 0.6  # a model that knows nothing
    assert last < 0.75 * first


def bleu_of(run, lab, directory):
    train(run, lab.inputs(run), directory / run.identity, WORLD)
    return bleu_rows(
        [{"attempt": 0, "number": None} | event for event in read_events(directory / run.identity)]
    )[-1]


def test_a_trained_model_translates_unseen_sentences_better_than_an_untrained_one(tmp_path):
    corpus = CorpusSettings(name="made-up", source=pairs_source(1200))
    lab = GrammarLab(tmp_path, corpus, 512)
    tokenizer = TokenizerSettings(name="bpe", kind="bpe", corpus="made-up", vocabulary_size=512)
    run = make_translation(
        corpus=corpus,
        tokenizer=tokenizer,
        model=PRESETS["gpt2-tiny"],
        sequence_length=64,
        global_batch=8,
        micro_batch=8,
        budget=BudgetSettings(epochs=4),
        schedule=ScheduleSettings(warmup_steps=20),
        optimizer=OptimizerSettings(learning_rate=0.006),
        validation=ValidationSettings(rows=8, bleu=40),
    )
    untrained = replace(
        run, budget=BudgetSettings(steps=1), schedule=ScheduleSettings(warmup_steps=1)
    )
    untrained = replace(untrained, optimizer=OptimizerSettings(learning_rate=1e-9))
    before, after = (bleu_of(r, lab, tmp_path / "runs") for r in (untrained, run))
    assert before["bleu_sentences"] == after["bleu_sentences"] == 40
    assert after["bleu"] > 1 and after["bleu_low"] > before["bleu_high"], (before, after)
