"""A tiny model learns to translate the grammar's sentences, and BLEU of sentences it has not seen says so."""

import json
from dataclasses import replace

import pytest

from tests.corpora import GrammarLab, pairs_source
from tests.unit.test_evaluation_translation import WORLD, make_run
from tokenscale.analysis.ingest import bleu_rows
from tokenscale.settings.data import CorpusSettings, TokenizerSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import BudgetSettings, OptimizerSettings, ScheduleSettings, ValidationSettings
from tokenscale.train.loop import train

pytestmark = pytest.mark.experiment


def bleu_of(run, lab, directory):
    train(run, lab.inputs(run), directory / run.identity, WORLD)
    (path,) = (directory / run.identity).rglob("events.jsonl")
    events = [json.loads(line) | {"attempt": 0} for line in path.read_text().splitlines()]
    return bleu_rows([{"number": None} | event for event in events])[-1]


def test_a_trained_model_translates_unseen_sentences_better_than_an_untrained_one(tmp_path):
    corpus = CorpusSettings(name="made-up", source=pairs_source(1200))
    lab = GrammarLab(tmp_path, corpus, 512)
    tokenizer = TokenizerSettings(name="bpe", kind="bpe", corpus="made-up", vocabulary_size=512)
    run = make_run(
        corpus=corpus, tokenizer=tokenizer, model=PRESETS["gpt2-tiny"], sequence_length=64, global_batch=8,
        micro_batch=8, budget=BudgetSettings(epochs=4), schedule=ScheduleSettings(warmup_steps=20),
        optimizer=OptimizerSettings(learning_rate=0.006), validation=ValidationSettings(rows=8, bleu=40),
    )  # fmt: skip
    untrained = replace(run, budget=BudgetSettings(steps=1), schedule=ScheduleSettings(warmup_steps=1))
    untrained = replace(untrained, optimizer=OptimizerSettings(learning_rate=1e-9))
    before, after = (bleu_of(r, lab, tmp_path / "runs") for r in (untrained, run))
    assert before["bleu_sentences"] == after["bleu_sentences"] == 40
    assert after["bleu"] > 1 and after["bleu_low"] > before["bleu_high"], (before, after)
