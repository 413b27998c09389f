"""Epochs, padding, bits per byte, and the rows of `stores`."""

import math

import pandas as pd
import pytest

from tests import corpora, tables
from tokenscale.analysis.queries import query
from tokenscale.analysis.rows import store_rows
from tokenscale.base.errors import UserError
from tokenscale.base.files import sha256_file, write_json

#: 100 rows of 10 positions: 700 useful, 250 padding, 50 labels that begin a piece
STORE = {
    "corpus": "web",
    "tokenizer": "bpe",
    "store": "packed",
    "format": "packed",
    "split": "train",
    "sequence_length": 10,
    "eos": False,
    "documents": 60,
    "useful_tokens": 700,
    "total_tokens": 1000,
    "padding_tokens": 250,
    "stored_bytes": 3000,
    "text_bytes": 2_000_000,
    "manifest_sha256": "a" * 64,
    "corpus_sha256": "c" * 64,
    "engine": "bpe 1.0",
    "seconds": 20.0,
}


def ask(folder, name, *runs, stored=(STORE,), events=(), steps=None):
    """Rows of a query by run id; each run's (row, seconds a step); eight steps of four rows."""
    rows = [
        step
        for run, seconds in runs
        for step in tables.steps(run["run_id"], 8, run["world_size"], step_s=seconds)
    ]
    listed = [run for run, _ in runs]
    folder = tables.write(
        folder, runs=listed, steps=steps or rows, stores=list(stored), events=list(events)
    )
    return query(name, folder).set_index("run_id")


def test_an_epoch_is_the_rows_of_the_store_over_rows_a_second(tmp_path):
    run = tables.run("a", store_sha256="a" * 64, started_unix_s=50.0, stopped_unix_s=75.0)
    events = [
        tables.validation("a", step, 9.0, duration_s=seconds)
        for step, seconds in ((0, 0.25), (8, 0.5))
    ]
    for event, rank, seconds in (
        ("init_done", 0, 3.0),
        ("init_done", 1, 4.0),
        ("checkpoint", 0, 1.5),
    ):
        events.append(
            {"run_id": "a", "attempt": 0, "rank": rank, "event": event, "duration_s": seconds}
        )
    steps = tables.steps("a", 8, step_s=lambda s, _: 5.0 if s < 3 else 0.5)
    row = ask(tmp_path, "epochs", (run, 1.0), events=events, steps=steps).loc["a"]
    assert (row["training_s"], row["rows"], row["rows_per_s"]) == (17.5, 32, 8.0)
    assert (row["epoch_rows"], row["epoch_useful_tokens"], row["epoch_documents"]) == (100, 700, 60)
    assert (row["epochs"], row["epoch_s"]) == (0.32, 12.5)
    assert (row["validation_s"], row["checkpoint_s"], row["start_s"], row["wall_s"]) == (
        0.75,
        1.5,
        4.0,
        25.0,
    )


def test_an_epoch_online_is_that_of_the_offline_twins_store(tmp_path):
    padded = {**STORE, "format": "padded", "total_tokens": 600}
    like = {"approach": "padded", "tokenizer": "bpe", "corpus_sha256": "c" * 64}
    fields = {
        "a": {},
        "b": {"approach": "padding-free"},
        "c": {"corpus_sha256": "d" * 64},
        "d": {"eos": True},
        "e": {"sequence_length": 20},
        "f": {"tokenizer": "other"},
    }
    runs = [
        (tables.run(name, repeat=n, **like | of), 1.0)
        for n, (name, of) in enumerate(fields.items())
    ]
    lists = {**STORE, "format": "token-list", "sequence_length": None, "total_tokens": 400}
    held_out = {**padded, "split": "validation", "total_tokens": 7}
    found = ask(
        tmp_path,
        "epochs",
        *runs,
        stored=[STORE, padded, {**padded, "store": "zstd"}, lists, held_out],
    )
    assert (
        found.loc[["a", "b"], "epoch_rows"].tolist() == [60, 40]
        and found.loc["a", "epoch_s"] == 15.0
    )
    assert found.loc[["c", "d", "e", "f"], "epoch_s"].isna().all()
    once = (tables.run("g", approach="length-bucketed", store_sha256="a" * 64), 1.0)
    assert ask(tmp_path, "epochs", once).loc["g", "epoch_rows"] == 60, "every document once"
    unlike = ask(tmp_path, "epochs", *runs[:1], stored=[padded, {**padded, "total_tokens": 999}])
    assert pd.isna(unlike.loc["a", "epoch_s"]), "stores that differ in their tokens say nothing"


def test_padding_and_other_ignored_labels_are_told_apart_by_the_store(tmp_path):
    stored = {"store_sha256": "a" * 64}
    fields = (stored, {}, stored | {"objective": "masked"}, stored | {"labels": "target"})
    runs = [(tables.run("abcd"[n], repeat=n, **of), 1.0) for n, of in enumerate(fields)]
    found = ask(tmp_path, "padding", *runs)
    assert found["not_useful_share"].tolist() == [0.25] * 4
    assert (found.loc["a", "padding_share"], found.loc["a", "ignored_share"]) == (0.25, 0.05)
    assert found.loc[["b", "c", "d"], ["padding_share", "ignored_share"]].isna().all(axis=None)


def test_dropped_text_is_counted_in_the_store_of_the_same_text_or_is_not_known(tmp_path):
    """Of each run the share, in the order of the names: null where nothing at hand counts it, never
    0.
    """
    cut = {"format": "padded", "document_tokens": 1060, "cut_tokens": 750}
    stored = [
        STORE | {"cut_tokens": 0, "document_tokens": 1060},
        STORE | cut | {"store": "padded", "manifest_sha256": "p" * 64},
        STORE | cut | {"store": "padded zstd", "manifest_sha256": "z" * 64},
        STORE
        | cut
        | {
            "corpus": "books",
            "cut_tokens": 100,
            "corpus_sha256": "b" * 64,
            "manifest_sha256": "b" * 64,
        },
        STORE | cut | {"split": "validation", "sequence_length": 20, "manifest_sha256": "v" * 64},
        STORE
        | {"format": "other", "document_tokens": 70, "cut_tokens": 1, "manifest_sha256": "o" * 64},
        STORE
        | {
            "corpus": "old",
            "format": "padded",
            "corpus_sha256": "e" * 64,
            "manifest_sha256": "e" * 64,
        },
    ]
    like = {"tokenizer": "bpe", "corpus": "web"}
    online = like | {"corpus_sha256": "c" * 64}
    mixed = like | {
        "corpus": "mixed",
        "corpus_sha256": "m" * 64,
        "mixture": '{"books":0.5,"code":0.0,"new":0.2,"web":0.3}',
    }
    expected = {
        "packed": ({"store_sha256": "a" * 64}, 0.0),
        "packed without its store": ({"store_sha256": "x" * 64}, 0.0),
        "padding-free": (online | {"approach": "padding-free"}, 0.0),
        "pretokenized-padded": (
            {"approach": "pretokenized-padded", "store_sha256": "p" * 64},
            0.75,
        ),
        "its store is another one now": (
            {"approach": "pretokenized-padded", "store_sha256": "x" * 64},
            None,
        ),
        "padded": (online | {"approach": "padded"}, 0.75),
        "padded, other text": (online | {"approach": "padded", "corpus_sha256": "d" * 64}, None),
        "padded, other length": (online | {"approach": "padded", "sequence_length": 20}, None),
        "padded, other tokenizer": (online | {"approach": "padded", "tokenizer": "other"}, None),
        "padded, eos": (online | {"approach": "padded", "eos": True}, None),
        "padded, counted by the run": (
            online | {"approach": "padded", "eos": True, "text_cut": '{"web":0.25}'},
            0.25,
        ),
        "length-bucketed": (like | {"approach": "length-bucketed", "store_sha256": "a" * 64}, 0.75),
        "a user's format": ({"approach": "other", "store_sha256": "o" * 64}, 0.1),
        "a user's approach": ({"approach": "other"}, None),
        "a manifest without counts": (
            {"approach": "pretokenized-padded", "corpus": "old", "store_sha256": "e" * 64},
            None,
        ),
    }
    runs = [
        tables.run(name, repeat=n, **fields)
        for n, (name, (fields, _)) in enumerate(expected.items())
    ]
    runs.append(tables.run("mixture", repeat=99, approach="padded", **mixed))
    runs.append(tables.run("external", repeat=98, external=True))
    found = ask(tmp_path, "dropped_text", *((run, 1.0) for run in runs), stored=stored)
    mixture = found.loc["mixture"]
    single = found.drop(index="mixture")
    assert mixture.set_index("corpus")["dropped_share"].fillna(-1).to_dict() == {
        "books": 0.1,
        "new": -1,
        "web": 0.75,
    }
    assert single["dropped_share"].fillna(-1).to_dict() == {
        name: -1 if share is None else share for name, (_, share) in expected.items()
    }
    assert single.index[single["counted_by_run"]].tolist() == ["padded, counted by the run"]


def test_bits_per_byte_count_the_text_of_the_validation_store_and_accuracy_the_labels_that_were_counted(
    tmp_path,
):
    """700 useful tokens for 2,000,000 bytes: of 8 ln 2 nats a token, 8 bits. Of its 100 labels 25
    are correct.
    """
    held_out = {**STORE, "split": "validation", "manifest_sha256": "v" * 64}
    fields = {
        "a": ("v", {}),
        "b": ("v", {"objective": "masked", "repeat": 1}),
        "c": ("w", {"repeat": 2}),
    }
    runs = [
        (tables.run(name, validation_store_sha256=64 * of, **more), 1.0)
        for name, (of, more) in fields.items()
    ]
    events = [tables.validation(run["run_id"], 8, 8 * math.log(2)) for run, _ in runs]
    events[0]["correct_tokens"] = 25
    found = ask(tmp_path, "validation", *runs, stored=[held_out], events=events)
    assert found.loc["a", "bits_per_byte"] == pytest.approx(8 * 700 / 2_000_000)
    assert found.loc["a", "perplexity"] == pytest.approx(256.0)
    assert found.loc["a", "accuracy"] == pytest.approx(0.25)
    assert found.loc[["b", "c"], ["bits_per_byte", "accuracy"]].isna().all(axis=None)


# -- the rows of `stores`


def write_store(folder, corpus=None, build=None, **changes):
    """A store's manifest, as a writer leaves it, and the record of its build."""
    manifest = {
        "format": "packed",
        "options": {"sequence_length": 10, "eos": True, "split": "train"},
        "split": "train",
        "tokenizer": {"name": "bpe"},
        "documents": 60,
        "tokens_useful": 700,
        "tokens_total": 1000,
        "tokens_stored": 850,
        "vocabulary_size": 1000,
        "places": 1100,
        "corpus_manifest_sha256": corpus,
        "bits_per_token": {"stored": 28.2353, "order_0_entropy": 8.0},
        "files": [{"name": "tokens.bin", "bytes": 2000}, {"name": "rows.npy", "bytes": 1000}],
    }
    write_json(folder / "manifest.json", manifest | changes)
    if build is not None:
        write_json(folder / "build.json", build)
    return folder / "manifest.json"


def test_a_store_says_what_it_holds_and_what_it_took(tmp_path):
    corpus = tmp_path / "corpus.json"
    cleaning = {"documents": {"held_out_in_training": 3}, "deduplicate": True}
    write_json(corpus, {"splits": {"train": {"utf8_bytes": 5000}}, "cleaning": cleaning})
    sha = sha256_file(corpus)
    counts = {"tokens_in_documents": 900, "tokens_cut": 50}
    path = write_store(
        tmp_path / "web/bpe/packed", sha, {"duration_s": 2.5, "engine": "bpe"}, **counts
    )
    (row,) = store_rows([path], [corpus])
    same = (
        "corpus",
        "tokenizer",
        "store",
        "format",
        "split",
        "sequence_length",
        "documents",
        "useful_tokens",
        "total_tokens",
        "padding_tokens",
        "stored_bytes",
    )
    assert row == {key: STORE[key] for key in same} | {
        "eos": True,
        "documents_cut": 0,
        "text_bytes": 5000,
        "held_out_in_training": 3,
        "held_out_dropped": True,
        "manifest_sha256": sha256_file(path),
        "corpus_sha256": sha,
        "ids": 850,
        "document_tokens": 900,
        "cut_tokens": 50,
        "vocabulary_size": 1000,
        "entropy_bits": 8.0,
        "dropped": '{"duplicates":0,"empty or short":0,"too long":0}',
        "engine": "bpe",
        "seconds": 2.5,
    }
    (row,) = store_rows([write_store(tmp_path / "web/bpe/lost", "0" * 64)], [corpus])
    assert row.get("seconds") is row["text_bytes"] is row["cut_tokens"] is None, (
        "not recorded is not 0"
    )


@pytest.mark.parametrize("text", ["[]", '{"format": "padded"}', "no json"])
def test_a_file_that_is_no_manifest_is_named(tmp_path, text):
    path = write_store(tmp_path / "web/bpe/packed")
    path.write_text(text)
    with pytest.raises(UserError, match="manifest"):
        store_rows([path])


def test_a_store_that_was_really_written_is_read(tmp_path):
    corpus = corpora.make_corpus(tmp_path / "corpus/web", corpora.texts_around(16))
    tokenizer = corpora.make_tokenizer(tmp_path / "tokenizers", corpus, 259)
    names = ("packed-sequence_length=16", "padded-sequence_length=16", "token-list")
    for name in names:
        corpora.make_store(tmp_path / "tokens/web/bpe", corpus, tokenizer, name)
    manifests = sorted((tmp_path / "tokens").glob("*/*/*/manifest.json"))
    found = store_rows(manifests, [corpus / "manifest.json"])
    assert [row["store"] for row in found] == list(names)
    packed, padded, lists = found
    assert padded["padding_tokens"] == padded["total_tokens"] - padded["useful_tokens"] > 0, (
        "rows begin with their BOS"
    )
    assert (
        lists["padding_tokens"] == 0
        and lists["total_tokens"] - lists["useful_tokens"] == lists["documents"]
    )
    assert (
        packed["useful_tokens"]
        == lists["useful_tokens"]
        == padded["useful_tokens"] + padded["cut_tokens"]
    )
    assert padded["cut_tokens"] > packed["cut_tokens"] == lists["cut_tokens"] == 0
    assert len({row["document_tokens"] for row in found}) == 1
    assert all(
        row["text_bytes"] > 0 and row["seconds"] > 0 and row["eos"] is False for row in found
    )
    assert (packed["sequence_length"], lists["sequence_length"]) == (16, None)
