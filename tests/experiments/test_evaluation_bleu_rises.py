"""A tiny model learns to translate the grammar's sentences, and BLEU of sentences it has not seen says so."""

import json
from dataclasses import replace

import pytest
import torch

from tests.corpora import GrammarLab, pairs_source
from tokenscale.analysis.ingest import bleu_rows
from tokenscale.settings.data import CorpusSettings, TokenizerSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import BudgetSettings, OptimizerSettings, RunSettings, ScheduleSettings, ValidationSettings
from tokenscale.train.loop import train
from tokenscale.train.parallel.world import World

pytestmark = pytest.mark.experiment

WORLD = World(0, 1, 0, torch.device("cpu"))
CORPUS = CorpusSettings(name="made-up", source=pairs_source(1200))


def bleu_of(run, lab, directory):
    train(run, lab.inputs(run), directory / run.identity, WORLD)
    (path,) = (directory / run.identity).rglob("events.jsonl")
    events = [json.loads(line) | {"attempt": 0} for line in path.read_text().splitlines()]
    return bleu_rows([{"number": None} | event for event in events])[-1]


def test_a_trained_model_translates_unseen_sentences_better_than_an_untrained_one(tmp_path):
    lab = GrammarLab(tmp_path, CORPUS, 512)
    run = RunSettings(
        corpus=CORPUS,
        tokenizer=TokenizerSettings(name="bpe", kind="bpe", corpus="made-up", vocabulary_size=512),
        model=PRESETS["gpt2-tiny"],
        approach="packed",
        sequence_length=64,
        global_batch=8,
        micro_batch=8,
        eos=True,
        labels="target",
        budget=BudgetSettings(epochs=4),
        schedule=ScheduleSettings(warmup_steps=20),
        optimizer=OptimizerSettings(learning_rate=0.006),
        validation=ValidationSettings(rows=8, bleu=40),
    )
    untrained = replace(run, budget=BudgetSettings(steps=1), schedule=ScheduleSettings(warmup_steps=1))
    untrained = replace(untrained, optimizer=OptimizerSettings(learning_rate=1e-9))
    before, after = (bleu_of(r, lab, tmp_path / "runs") for r in (untrained, run))
    assert before["bleu_sentences"] == after["bleu_sentences"] == 40
    assert after["bleu"] > 1 and after["bleu_low"] > before["bleu_high"], (before, after)
