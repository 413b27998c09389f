"""The storage benchmark: its design, what it holds stores to, and what it records."""

import json

import numpy as np
import pytest

from tests.corpora import HOSTILE
from tokenscale.base.errors import UserError
from tokenscale.benchmark import storage
from tokenscale.cli.main import main
from tokenscale.data.stores import documents
from tokenscale.data.stores.packed import PackedStore
from tokenscale.data.stores.parquet import PaddedStore, TokenListStore
from tokenscale.settings.benchmarks import StorageBenchmarkSettings
from tokenscale.settings.data import StoreSettings

T = 16
SHORT = StorageBenchmarkSettings(
    dtypes=("int32",),
    codecs=("none", "zstd-22"),
    row_group_rows=(4,),
    sequence_length=T,
    rows=3,
    single_rows=2,
    rounds=2,
)


@pytest.fixture(scope="module")
def held(lab):
    return storage.TokenizedText(lab.corpus, lab.tokenizer, None)


def test_every_format_has_the_options_that_it_knows_and_each_store_once():
    design = StorageBenchmarkSettings(
        dtypes=("int32", "int64", "int32"), row_group_rows=(100, 1000)
    )
    names = [store.directory for store in design.stores]
    assert len(names) == len(set(names)) == 2 * 2 * 7 * 2 + 1
    assert sum(name.startswith("packed") for name in names) == 1
    assert "padded-codec_level=22-dtype=int64-row_group_rows=100" in names
    assert {store.codec_level for store in design.stores} == {1, 3, 9, 22}


def test_only_the_first_documents_are_held(lab, held):
    few = storage.TokenizedText(lab.corpus, lab.tokenizer, 5)
    assert few.chunk.ids.tolist() == held.chunk.part(0, 5).ids.tolist() and len(few) == 5 < len(
        held
    )
    assert few.text_bytes == sum(len(text.encode()) for text in HOSTILE[:5])


@pytest.mark.parametrize("store", SHORT.stores, ids=lambda s: s.directory)
def test_stores_give_back_what_was_written_and_are_removed(held, tmp_path, store):
    record = storage._measure_store(store, held, tmp_path, SHORT)
    assert list(tmp_path.iterdir()) == []
    assert record["shuffled_s"] > 0 and record["single_rows_s"] > 0
    assert record["stored_bytes"] > 0 and record["write_s"] > 0 and record["sequential_s"] > 0
    assert (record["cold_s"] is None) == (record["not_cold"] is not None)
    assert (record["codec"] is None) == (store.format == "packed")
    lengths = held.chunk.lengths
    kept = np.minimum(lengths, T + 1) if store.format == "padded" else lengths
    assert record["useful_tokens"] == int((kept - 1).sum())


@pytest.mark.parametrize(
    ("cls", "method", "form"),  # the last puts a label on padding
    [
        (PaddedStore, "rows", "padded"),
        (TokenListStore, "chunks", "token-list"),
        (PackedStore, "chunks", "packed"),
        (documents, "make_labels", "padded"),
    ],
)
def test_one_wrong_id_or_a_label_on_padding_and_nothing_is_recorded(
    held, tmp_path, monkeypatch, cls, method, form
):
    right = getattr(cls, method)

    def wrong(*arguments, **options):
        if method == "make_labels":
            return right(*arguments, lengths=options["lengths"] + 1)
        found = right(*arguments)
        if method == "rows":
            found[0][0, 1] += 1
            return found
        found = list(found)
        found[-1].ids[-1] ^= 1
        return iter(found)

    monkeypatch.setattr(cls, method, wrong)
    store = StoreSettings(form, **({} if form == "token-list" else {"sequence_length": T}))
    with pytest.raises(UserError, match="does not return the written ids"):
        storage._measure_store(store, held, tmp_path, SHORT)


def test_an_engine_that_is_not_here_not_exact_or_taken_anyway_has_no_arm(lab, monkeypatch):
    asked = ("gigatoken", "tiktoken", "tokenizers")
    pytest.importorskip("gigatoken")
    found, left_out = storage.list_engines(asked, lab.tokenizer, auto="gigatoken")
    assert found == ["tokenizers"] and left_out["gigatoken"] == "auto already uses this engine"
    assert "tiktoken" in left_out["tiktoken"]  # no engine of this kind of tokenizer
    monkeypatch.setattr(
        "tokenscale.data.tokenizers.backends.EngineTokenizer.difference", lambda *a: {"text": "'x'"}
    )
    found, left_out = storage.list_engines(asked, lab.tokenizer, auto="none")
    assert not found and left_out["gigatoken"] == "its ids are not those of the reference"


def test_storage_has_a_record_a_round_for_each_store_and_engine(lab, tmp_path, capsys):
    output = tmp_path / "benchmarks" / "out.json"
    output.parent.mkdir()
    settings = {
        "dtypes": ["int32"],
        "codecs": ["none"],
        "row_group_rows": [4],
        "sequence_length": T,
        "rounds": 2,
    }
    settings |= {"engines": ["tokenizers", "tiktoken"]}
    arguments = ["--settings", json.dumps(settings), "--corpus", str(lab.corpus / "manifest.json")]
    arguments += ["--tokenizer", str(lab.tokenizer / "manifest.json"), "--output", str(output)]
    assert main(["benchmark", "storage", *arguments]) == 0
    result = json.loads(output.read_text())
    printed = capsys.readouterr().out
    stores = [
        "padded-sequence_length=16-codec=none-row_group_rows=4",
        "token-list-codec=none-row_group_rows=4",
    ]
    engines = dict.fromkeys([f"text, {result['engine']}", "text, tokenizers"])
    found = sorted((r["round"], r["store"]) for r in result["records"])
    assert found == sorted(
        (n, s) for n in range(2) for s in [*stores, "packed-sequence_length=16", *engines]
    )
    assert (
        "tiktoken" in result["left_out"]["text, tiktoken"] and "left out: text, tiktoken" in printed
    )
    assert all(name in printed for name in [*stores, *engines])
    assert sorted(path.name for path in output.parent.iterdir()) == ["out.json"]
