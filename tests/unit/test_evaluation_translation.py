"""Translations of held-out pairs, from a model in training to BLEU in the tables."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import logs
from tests.corpora import GrammarLab, Lab, pairs_source
from tokenscale.analysis.bleu import bleu, bleu_rows
from tokenscale.analysis.queries import query
from tokenscale.base.errors import UserError
from tokenscale.cli.evaluate import evaluate
from tokenscale.settings.data import CorpusSettings, TokenizerSettings
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.manifests import list_manifests
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import (
    BudgetSettings,
    CheckpointSettings,
    RunSettings,
    ScheduleSettings,
    ValidationSettings,
)
from tokenscale.train.evaluation.generation import Pair, held_out_pairs, translate
from tokenscale.train.loop import train
from tokenscale.train.models.objective import LanguageModel
from tokenscale.train.parallel.world import World

CORPUS = CorpusSettings(name="made-up", source=pairs_source(500))
WORLD = World(0, 1, 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return GrammarLab(tmp_path_factory.mktemp("pairs"), CORPUS, 400)


def make_run(**changes) -> RunSettings:
    """A model of two steps that reads pairs, and translates five."""
    steps = {"budget": BudgetSettings(steps=2), "schedule": ScheduleSettings(warmup_steps=1)}
    text = {
        "corpus": CORPUS,
        "eos": True,
        "labels": "target",
        "validation": ValidationSettings(rows=4, bleu=5),
    }
    text |= {
        "tokenizer": TokenizerSettings(
            name="bpe", kind="bpe", corpus="made-up", vocabulary_size=400
        )
    }
    shape = {
        "model": PRESETS["gpt2-micro"],
        "sequence_length": 128,
        "global_batch": 4,
        "micro_batch": 4,
    }
    return RunSettings(**{"approach": "packed"} | steps | text | shape | changes)


class Copier(LanguageModel):
    """Says the source again, behind its EOS, and then EOS; of a vocabulary in which ids are
    bytes.
    """

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Identity()

    def hidden(self, tokens_bt, bounds=None):
        logits = torch.zeros(*tokens_bt.shape, 256)
        for number, row in enumerate(tokens_bt.tolist()):
            end = row.index(1)
            said = len(row) - end - 1
            logits[number, -1, row[1 + said] if 1 + said < end else 1] = 1
        return logits


BYTES = SimpleNamespace(
    bos_id=0, eos_id=1, vocabulary_size=256, decode=lambda ids: bytes(ids).decode()
)


def prompts_of(pairs):
    return [np.array([0, *pair.source.encode(), 1]) for pair in pairs]


def test_a_translation_is_what_stands_between_the_two_ends_and_a_model_that_never_ends_is_stopped():
    pairs = [
        Pair(3, "ein Haus", "a house"),
        Pair(4, "x" * 40, "long"),
        Pair(5, "y" * 64, "no room"),
    ]
    found = list(translate(Copier(), pairs, prompts_of(pairs), BYTES, 64, torch.device("cpu")))
    assert [t.hypothesis for t in found] == ["ein Haus", "x" * (64 - 42), ""]
    assert [t.pair.number for t in found] == [3, 4, 5]
    endless = Copier()
    endless.hidden = lambda tokens_bt, bounds=None: torch.nn.functional.one_hot(
        tokens_bt * 0 + 65, 256
    ).float()
    pairs = [Pair(0, "abc", "")]
    (found,) = translate(endless, pairs, prompts_of(pairs), BYTES, 1000, torch.device("cpu"))
    assert found.hypothesis == "A" * (2 * 3 + 16)


def test_sources_of_one_length_are_translated_together_whatever_rank_reads_them(monkeypatch):
    texts = [f"{n:02d}" for n in range(40)] + ["abc", "d", "e"]
    pairs = [Pair(n, text, "") for n, text in enumerate(texts)]
    seen = []
    model = Copier()
    hidden = model.hidden
    model.hidden = lambda tokens_bt: (seen.append(len(tokens_bt)), hidden(tokens_bt))[1]
    found = list(translate(model, pairs, prompts_of(pairs), BYTES, 64, torch.device("cpu")))
    assert {t.pair.number: t.hypothesis for t in found} == dict(enumerate(texts))
    assert set(seen) == {2, 16, 8, 1}, "d and e; 40 in batches of 16; abc"
    alone = set(seen)
    seen[:] = []
    shares = [
        list(translate(model, pairs, prompts_of(pairs), BYTES, 64, torch.device("cpu"), rank, 3))
        for rank in range(3)
    ]
    assert sorted(t.pair.number for share in shares for t in share) == list(range(43))
    assert min(map(len, shares)) > 0 and set(seen) == alone


HALF = ["the cat sat on a mat", "a dog barks at noon", "nothing of it is right here"]


def test_bleu_is_that_of_the_paper_with_an_interval():
    references = ["the cat sat on the mat", "a dog barks at night", "he reads a long book today"]
    same = bleu(references, references)
    half = bleu(HALF, references)
    assert (
        same.score == pytest.approx(100) and same.low == pytest.approx(100) and same.sentences == 3
    )
    # found, by hand, in the three sentences: 5+4+0 words of 17, 3+3 pairs of 14, 2+2 of 11, 1+1 of
    # 8; both are as long
    assert half.score == pytest.approx(100 * (9 / 17 * 6 / 14 * 4 / 11 * 2 / 8) ** 0.25, rel=1e-3)
    assert half.low < half.score < half.high and half == bleu(HALF, references)
    assert "tok:13a" in half.signature and "seed:" in half.signature


def test_the_first_held_out_pairs_are_translated_and_texts_without_pairs_are_not(lab, tmp_path):
    pairs = held_out_pairs(lab.corpus, 7)
    assert [pair.number for pair in pairs] == list(range(7)) and all(
        pair.reference[-1] == "." for pair in pairs
    )
    assert len(held_out_pairs(lab.corpus, 1000)) == 500
    other = Lab(tmp_path, ["no pairs at all"])
    with pytest.raises(UserError, match="the corpus holds no pairs"):
        held_out_pairs(other.corpus, 3)


def test_a_training_logs_its_translations_and_the_command_scores_the_same(lab, tmp_path):
    run = make_run(checkpoints=CheckpointSettings(final=True))
    assert train(run, lab.inputs(run), tmp_path / run.identity, WORLD).training
    events = [
        json.loads(line) for line in next(tmp_path.rglob("events.jsonl")).read_text().splitlines()
    ]
    told = sorted(
        (e for e in events if e["event"] == "translation"), key=lambda event: event["number"]
    )
    assert [event["number"] for event in told] == [0, 1, 2, 3, 4] and events[-1][
        "event"
    ] == "run_stop"
    assert [event["reference"] for event in told] == [
        pair.reference for pair in held_out_pairs(lab.corpus, 5)
    ]
    checkpoint = tmp_path / run.identity / "checkpoints/final"
    score = bleu([event["hypothesis"] for event in told], [event["reference"] for event in told])
    text = evaluate(checkpoint, corpus=str(lab.corpus), bleu=5)
    assert str(score) in text and score.signature in text
    with pytest.raises(UserError, match="--bleu cannot be combined"):
        evaluate(checkpoint, corpus=str(lab.corpus), bleu=5, rows=3)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"data": 2},
        {"shard": 2, "sharding": "zero1"},
        {"shard": 2},
        {"tensor": 2},
        {"pipeline": 2},
    ],
)
def test_runs_of_every_layout_translate_and_need_the_text_and_the_tokenizer(layout):
    run = make_run(layout=LayoutSettings(**layout))
    assert not [text for field, text in run.problems() if field == "validation.bleu"]
    assert {"corpus", "tokenizer", "store"} <= list_manifests(run).keys()
    assert "corpus" not in list_manifests(replace(run, validation=ValidationSettings(rows=4)))
    without, none = (
        replace(run, validation=ValidationSettings(**given)) for given in ({}, {"bleu": 0})
    )
    assert without.identity == none.identity


def test_runs_that_cannot_translate_are_refused():
    fields = "validation.bleu", "validation.bleu_each_epoch", "eos"
    for changes, says in [
        ({"corpus": CorpusSettings()}, "are not pairs"),
        ({"eos": False, "labels": "all"}, "set eos"),
        ({"float8": True}, "float8"),
        ({"validation": ValidationSettings(bleu_each_epoch=True)}, "nothing is translated"),
    ]:
        assert any(
            field in fields and says in text for field, text in make_run(**changes).problems()
        )


def test_of_a_sentence_that_two_attempts_translated_the_newest_counts():
    reference = "the cat sat on the mat"
    old, new = (
        {
            "event": "translation",
            "number": 0,
            "attempt": n,
            "hypothesis": text,
            "reference": reference,
        }
        for n, text in enumerate(("nothing like it", reference))
    )
    (found,) = bleu_rows([new, old, {"event": "run_stop"}])
    assert found["bleu"] == pytest.approx(100)
    assert bleu_rows([old])[0]["bleu"] < 10 and bleu_rows([{"event": "run_stop"}]) == []


def test_tables_and_their_query_have_the_bleu_of_a_run(tmp_path):
    """Of the second run after an epoch, too; the file's order is no order of steps."""
    validations = [ValidationSettings(bleu=2, bleu_each_epoch=each) for each in (False, True)]
    runs = [
        logs.settings(steps=6, repeat=repeat, validation=validation)
        for repeat, validation in enumerate(validations)
    ]
    references = ["the cat sat on the mat", "a dog barks at night"]
    for run, last in zip(runs, (HALF[:2], references), strict=True):
        path = logs.write_run(tmp_path / "runs", run)
        for step, texts in [(6, last), (3, ["none of it"] * 2)][: run.repeat + 1]:
            for n, (text, reference) in enumerate(zip(texts, references, strict=True)):
                logs.add_event(
                    path, "translation", step=step, number=n, hypothesis=text, reference=reference
                )
    logs.ingested(tmp_path, runs)
    found = query("translation", tmp_path / "tables").set_index("repeat")
    expected = bleu(HALF[:2], references)
    assert found.loc[0, ["bleu", "bleu_high"]].tolist() == pytest.approx(
        [expected.score, expected.high]
    )
    assert found.loc[1, "bleu"] == pytest.approx(100) and found.loc[0, "bleu_sentences"] == 2
    assert found.loc[1, "bleu_by_epoch"] == "0.0, 100.0" and found[
        "bleu_by_epoch"
    ].notna().tolist() == [False, True]
    speed = query("throughput", tmp_path / "tables").set_index("repeat")
    assert found["target_tokens_per_s"].tolist() == speed["useful_tokens_per_s"].tolist()
    assert found["positions_per_s"].tolist() == speed["total_tokens_per_s"].tolist()
