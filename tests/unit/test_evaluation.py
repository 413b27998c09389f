"""Scores of a checkpoint are those of its training, and of texts what a plain calculation gives."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from tests.corpora import Lab, small_run, texts_of
from tokenscale.base.errors import UserError
from tokenscale.cli.evaluate import evaluate_store, evaluate_text
from tokenscale.cli.main import main
from tokenscale.data.stores.text import encode_documents
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.run import CheckpointSettings, MaskingSettings, ValidationSettings
from tokenscale.train.checkpoint_models import open_checkpoint
from tokenscale.train.evaluation.validation import rows_of_documents, windows
from tokenscale.train.loop import train
from tokenscale.train.parallel.world import World

pytestmark = pytest.mark.slow(20)

T = 32
WORDS = [
    "what",
    "a",
    "model",
    "has",
    "learnt",
    "shows",
    "in",
    "what",
    "it",
    "expects",
    "of",
    "a",
    "text",
    "that",
    "it",
    "has",
    "never",
    "seen",
    "before",
    "é",
    "漢",
]
WORLD = World(0, 1, 0, torch.device("cpu"))
CASES = {
    "causal": {"eos": True},
    "document mask": {"document_mask": True},
    "bf16": {"precision": "bf16", "loss_chunk": 10},
    "masked": {"objective": "masked", "masking": MaskingSettings(share=0.3), "document_mask": True},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    pick = random.Random(0)
    texts = [" ".join(pick.choices(WORDS, k=pick.choice([0, 3, 10, 30, 90]))) for _ in range(120)]
    return Lab(tmp_path_factory.mktemp("lab"), texts, validation_share=0.3)


@pytest.fixture(scope="module", params=CASES)
def trained(lab, tmp_path_factory, request):
    options = {
        "validation": ValidationSettings(rows=10),
        "checkpoints": CheckpointSettings(final=True),
    }
    run = small_run(steps=4, **options, **CASES[request.param])
    folder = tmp_path_factory.mktemp("run")
    train(run, lab.inputs(run), folder, WORLD)
    events = map(
        json.loads, (folder / "attempt=00/rank=00000/events.jsonl").read_text().splitlines()
    )
    return run, folder / "checkpoints/final", [e for e in events if e["event"] == "validation"][-1]


CAUSAL = pytest.mark.parametrize("trained", ["causal"], indirect=True)


def plainly(opened, documents):
    """(loss, labels, hits), each document's windows alone and logits in full."""
    loss = labels = hits = 0
    for document in documents:
        for begin in range(0, len(document) - 1, T):
            window = torch.from_numpy(document[begin : begin + T + 1].astype(np.int64))
            with (
                torch.no_grad(),
                torch.autocast("cpu", torch.bfloat16, enabled=opened.run.precision == "bf16"),
            ):
                logits = opened.model(window[None, :-1])[0].float()
            loss += F.cross_entropy(logits, window[1:], reduction="sum").item()
            hits += int((logits.argmax(-1) == window[1:]).sum())
            labels += len(window) - 1
    return loss, labels, hits


def test_the_rows_of_a_validation_score_what_the_training_saw(lab, trained):
    run, checkpoint, validation = trained
    opened, found = evaluate_store(
        checkpoint, lab.store(run.validation_store), rows=run.validation.rows
    )
    assert found.useful_tokens == validation["useful_tokens"] and found.rows == run.validation.rows
    assert found.loss_sum == pytest.approx(validation["loss_sum"], rel=1e-5)
    assert 0 < found.correct < found.useful_tokens
    assert found.perplexity == pytest.approx(
        math.exp(validation["loss_sum"] / validation["useful_tokens"]), rel=1e-4
    )
    assert found.bits_per_byte is None and opened.run == run


def test_a_corpus_scores_its_documents_each_for_itself(lab, trained):
    run, checkpoint, _ = trained
    opened, found = evaluate_text(checkpoint, str(lab.corpus))
    texts = texts_of(lab.corpus, "validation")
    documents = encode_documents(load_tokenizer(lab.tokenizer), texts, run.eos)
    assert (
        found.rows
        == sum(len(list(windows(d, T))) for d in documents)
        > len(documents) - texts.count("")
    )
    if run.objective == "masked":
        assert (
            0.2 < found.useful_tokens / sum(map(len, documents)) < 0.4
            and found.bits_per_byte is None
        )
        return
    loss, labels, hits = plainly(opened, documents)
    assert (found.useful_tokens, found.correct) == (labels, hits) and labels == sum(
        len(d) - 1 for d in documents
    )
    assert found.loss_sum == pytest.approx(loss, rel=3e-3 if run.precision == "bf16" else 1e-5)
    size = sum(len(text.encode()) for text in texts)
    assert found.text_bytes == size
    assert found.bits_per_byte == pytest.approx(found.loss_sum / math.log(2) / size)


@CAUSAL
def test_files_score_as_the_corpus_of_their_texts(lab, trained, tmp_path):
    _, checkpoint, _ = trained
    expected = evaluate_text(checkpoint, str(lab.corpus), split="train")[1]
    texts = texts_of(lab.corpus, "train")
    pq.write_table(pa.table({"body": texts}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"body": t}) + "\n" for t in texts), encoding="utf-8"
    )
    for name in ("a.parquet", "a.jsonl"):
        assert evaluate_text(checkpoint, str(tmp_path / name), text_column="body")[1] == expected


@CAUSAL
def test_it_stops_behind_the_document_that_completes_the_rows(lab, trained):
    _, checkpoint, _ = trained
    opened, found = evaluate_text(checkpoint, str(lab.corpus), rows=7)
    texts = texts_of(lab.corpus, "validation")
    counts = [
        len(list(windows(d, T)))
        for d in encode_documents(load_tokenizer(lab.tokenizer), texts, opened.run.eos)
    ]
    size = next(n for n in range(len(texts)) if sum(counts[:n]) >= 7)
    assert found.rows == sum(counts[:size])
    assert found.text_bytes == sum(len(text.encode()) for text in texts[:size])


@pytest.mark.parametrize("padded", [True, False])
def test_windows_of_documents_are_batched_and_none_is_left_out(padded):
    lengths = np.random.default_rng(0).integers(1, 100, 3000)
    documents = [np.arange(n) + 7 * n for n in lengths]
    found = []
    rows = 0
    padding = 0
    for batch in rows_of_documents(documents, 16, 5, padded=padded):
        assert batch.tokens_bt.shape == batch.labels_bt.shape and 0 < len(batch.tokens_bt) <= 5
        useful = batch.labels_bt >= 0
        assert padded or useful.all()
        found += list(
            zip(batch.tokens_bt[useful].tolist(), batch.labels_bt[useful].tolist(), strict=True)
        )
        rows += len(batch.tokens_bt)
        padding += np.count_nonzero(~useful)
    expected = [
        pair for d in documents for pair in zip(d[:-1].tolist(), d[1:].tolist(), strict=True)
    ]
    assert sorted(found) == sorted(expected)
    assert rows == sum(-(-(n - 1) // 16) for n in lengths) and padding < 0.02 * len(found)


@pytest.mark.parametrize("trained", ["causal", "masked"], indirect=True)
def test_the_verb_prints_the_scores(lab, trained, capsys, monkeypatch):
    run, checkpoint, _ = trained
    monkeypatch.chdir(lab.directory)
    Path("results/corpus").mkdir(parents=True, exist_ok=True)
    if not Path("results/corpus/docstrings").exists():  # the run's corpus has the default's name
        Path("results/corpus/docstrings").symlink_to(lab.corpus)
    assert main(["evaluate", "--checkpoint", str(checkpoint)]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    found = evaluate_text(checkpoint, "docstrings")[1]
    assert lines["perplexity"].strip() == f"{found.perplexity:,.2f}"
    kind = "masked" if run.objective == "masked" else "next"
    assert lines[f"{kind}-token accuracy"].strip() == f"{found.accuracy:.2%}"
    assert run.identity in lines["checkpoint"]
    assert ("not defined" in lines["bits per byte"]) == (run.objective == "masked")


@CAUSAL
def test_what_cannot_be_evaluated_is_said(lab, trained, tmp_path):
    run, checkpoint, _ = trained
    with pytest.raises(UserError, match="only packed stores"):
        evaluate_store(checkpoint, lab.store(StoreSettings("padded", sequence_length=T)))
    (tmp_path / "none.jsonl").write_text('{"text": null}')
    for name, words in (
        ("nothing", "unknown corpus or file"),
        (str(tmp_path / "none.jsonl"), "no tokens to predict"),
    ):
        with pytest.raises(UserError, match=words):
            evaluate_text(checkpoint, name)
    moved = (checkpoint / "tokenizer").rename(tmp_path / "moved")
    try:
        with pytest.raises(UserError, match="holds no tokenizer"):
            open_checkpoint(checkpoint)
        assert open_checkpoint(checkpoint, tokenizer=moved).run == run
    finally:
        moved.rename(checkpoint / "tokenizer")
