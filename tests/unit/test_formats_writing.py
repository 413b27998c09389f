"""How a store is written: again from the start after an interruption, and never with ids that are not exact."""

import json

import numpy as np
import pyarrow as pa
import pytest

from tests.corpora import make_corpus, make_tokenizer
from tests.unit.conftest import TEXTS, T, files_of
from tokenscale.base.errors import UserError
from tokenscale.data.stores import writing
from tokenscale.data.stores.documents import Chunk, IdsDigest, frame_documents
from tokenscale.data.stores.manifest import open_store
from tokenscale.data.stores.packed import PackedStore
from tokenscale.data.stores.parquet import TokenListStore
from tokenscale.data.stores.text import TextDocuments
from tokenscale.data.stores.writing import write_store
from tokenscale.data.tokenizers import backends as gate
from tokenscale.data.tokenizers.backends import EngineTokenizer
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.settings.data import StoreSettings

STORES = [
    StoreSettings("padded", sequence_length=T),
    StoreSettings("token-list"),
    StoreSettings("packed", sequence_length=T),
    StoreSettings("packed", sequence_length=T, packing="concatenate"),
]


class Interrupted(BaseException):
    """As a signal is."""


@pytest.mark.parametrize("store", STORES, ids=lambda s: s.format)
@pytest.mark.parametrize("killed", [False, True])
def test_an_interrupted_writer_starts_over_and_gives_the_same_bytes(
    large_lab, tmp_path, monkeypatch, small_parts, store, killed
):
    whole, other = tmp_path / "whole", tmp_path / "other"
    write_store(store, large_lab.corpus, large_lab.tokenizer, whole)

    def interrupt(documents, utf8_bytes):
        read.append(documents)
        if sum(read) > 30:
            raise Interrupted

    read = []
    with monkeypatch.context() as patched:
        if killed:
            patched.setattr(writing.shutil, "rmtree", lambda folder, **_: None)
        with pytest.raises(Interrupted):
            write_store(store, large_lab.corpus, large_lab.tokenizer, other, interrupt, batch_documents=5)
    assert not (other / "manifest.json").exists() and (other / ".building").exists() == killed
    write_store(store, large_lab.corpus, large_lab.tokenizer, other)
    assert files_of(other) == files_of(whole)
    assert not (other / ".building").exists()


# ------------------------------------------------------------------------------------------------------------- engines


class Wrong:
    """An engine that is right but for texts that hold a certain word."""

    def __init__(self, engine, word):
        self.version, self._engine, self._word = engine.version, engine, word

    def encode(self, texts):
        ids, lengths = self._engine.encode(texts)
        held = [self._word in str(text) for text in texts]
        if any(held):
            ids = ids.copy()
            ids[np.cumsum(lengths)[held.index(True)] - 1] += 1
        return ids, lengths


@pytest.fixture
def wrong(monkeypatch):
    def make(word):
        real = gate.ENGINES["gigatoken"]
        monkeypatch.setitem(gate.ENGINES, "gigatoken", lambda *a: Wrong(real(*a), word))

    pytest.importorskip("gigatoken")
    return make


def test_an_engine_that_is_wrong_on_hostile_text_is_passed_over_when_it_is_loaded(tmp_path, wrong):
    corpus = make_corpus(tmp_path / "c", TEXTS)
    wrong("日本")
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "t", corpus, 262))
    assert tokenizer.engine == "tokenizers" and "its ids differ" in tokenizer.notes[0]
    record = json.loads((tmp_path / "t/build.json").read_text())["engines"]["gigatoken"]
    assert record["exact"] is False and "text" in record["first_difference"]


def test_an_engine_that_is_wrong_on_this_text_costs_time_and_no_id(tmp_path, wrong):
    """Right on all hostile texts, wrong on a word of the corpus: the gate's sample finds it in time."""
    texts = [f"document {i} says hello to the world" for i in range(60)]
    corpus = make_corpus(tmp_path / "c", texts)
    folder = make_tokenizer(tmp_path / "t", corpus, 300)
    write_store(STORES[2], corpus, folder, tmp_path / "right", engine="tokenizers")
    wrong("hello")
    said = []
    write_store(STORES[2], corpus, folder, tmp_path / "auto", log=said.append)
    assert files_of(tmp_path / "auto") == files_of(tmp_path / "right")
    assert "gigatoken gives other ids" in said[1] and "starting over with tokenizers" in said[1]
    assert json.loads((tmp_path / "auto/build.json").read_text())["engine"].startswith("tokenizers ")
    with pytest.raises(UserError, match="gives other ids than tokenizers"):
        write_store(STORES[2], corpus, folder, tmp_path / "asked", engine="gigatoken")
    assert not (tmp_path / "asked/manifest.json").exists()


@pytest.mark.parametrize("kind", [list, pa.Array])
def test_the_gate_asks_in_both_ways_that_are_used(large_lab, kind):
    """An engine that is wrong only for documents one by one, or only for a store's Arrow arrays."""
    right = load_tokenizer(large_lab.tokenizer, "tokenizers")._engine

    class WrongOneWay:
        def encode(self, texts):
            ids, lengths = right.encode(texts)
            return (ids + 1 if isinstance(texts, kind) else ids), lengths

    assert gate.find_difference(right, right, TEXTS) is None and gate.find_difference(right, right, []) is None
    assert gate.find_difference(WrongOneWay(), right, TEXTS)["text"] == repr(" ")


def test_equal_ids_give_an_equal_manifest_whatever_the_engine(large_lab, tmp_path):
    pytest.importorskip("gigatoken")
    for engine in ("gigatoken", "tokenizers"):
        write_store(STORES[2], large_lab.corpus, large_lab.tokenizer, tmp_path / engine, engine=engine)
    assert files_of(tmp_path / "gigatoken") == files_of(tmp_path / "tokenizers")


def test_an_engine_that_is_not_here_says_so_and_the_next_one_serves(large_lab, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gigatoken", None)
    tokenizer = load_tokenizer(large_lab.tokenizer)
    assert isinstance(tokenizer, EngineTokenizer)
    assert tokenizer.engine == "tokenizers" and "no package gigatoken" in tokenizer.notes[0]
    with pytest.raises(UserError, match="engine gigatoken cannot be used"):
        load_tokenizer(large_lab.tokenizer, "gigatoken")
    with pytest.raises(UserError, match="did you mean 'tokenizers'"):
        load_tokenizer(large_lab.tokenizer, "tokenizer")


def test_ids_outside_the_vocabulary_are_a_bug(large_lab, tmp_path, monkeypatch):
    monkeypatch.setattr(TextDocuments, "chunks", lambda *a: iter([Chunk(np.array([0, 999], np.int32), np.array([2]))]))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        write_store(STORES[1], large_lab.corpus, large_lab.tokenizer, tmp_path / "store")


# ------------------------------------------------------------------------------------------------- ids, digest, chunks


@pytest.mark.parametrize("sizes", [[24], [1] * 24, [7, 0, 10, 3, 4], [10, 10, 4], [11, 13]])
def test_the_digest_does_not_depend_on_how_documents_come(monkeypatch, sizes):
    monkeypatch.setattr("tokenscale.data.stores.documents.GROUP_DOCUMENTS", 10)
    lengths = np.arange(24, dtype=np.int64) % 5 + 1
    chunk = Chunk(np.arange(lengths.sum(), dtype=np.int32), lengths)
    whole, parts = IdsDigest(), IdsDigest()
    whole.add(chunk)
    first = 0
    for size in sizes:
        parts.add(chunk.part(first, first + size))
        first += size
    whole.close()
    parts.close()
    assert whole.groups == parts.groups and len(whole.groups) == 3


def test_the_digest_sees_bounds_and_order():
    def digest(ids, lengths):
        found = IdsDigest()
        found.add(Chunk(np.array(ids, np.int32), np.array(lengths, np.int64)))
        found.close()
        return IdsDigest.combine(found.groups)

    assert len({digest([1, 2, 3], [1, 2]), digest([1, 2, 3], [2, 1]), digest([1, 3, 2], [1, 2])}) == 3


def test_documents_are_framed_by_hand():
    ids, lengths = np.array([7, 8, 9], np.int32), np.array([0, 2, 1], np.int64)
    assert frame_documents(ids, lengths, 1, None).ids.tolist() == [1, 1, 7, 8, 1, 9]
    with_eos = frame_documents(ids, lengths, 1, 2)
    assert with_eos.ids.tolist() == [1, 2, 1, 7, 8, 2, 1, 9, 2] and with_eos.lengths.tolist() == [2, 4, 3]


@pytest.mark.parametrize("store", STORES[1:], ids=lambda s: s.format)
@pytest.mark.parametrize(("first", "last"), [(0, None), (0, 0), (3, 4), (5, 30)])
def test_stores_give_their_documents_back(large_lab, store, first, last):
    reader = {"token-list": TokenListStore, "packed": PackedStore}[store.format]
    path = large_lab.store(store)
    last = len(TEXTS) if last is None else last
    found = [d.tolist() for c in reader(path, open_store(path, store)).chunks(first, last) for d in c.documents()]
    tokenizer = load_tokenizer(large_lab.tokenizer)
    assert found == [[0, *ids.tolist()] for ids in tokenizer.encode_batch(TEXTS[first:last])]
