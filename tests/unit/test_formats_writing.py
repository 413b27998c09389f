"""How a store is written, interrupted or by an engine that is wrong; and documents out of packed rows."""

import json
import shutil
import sys
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from tests.corpora import make_corpus, make_tokenizer
from tests.unit.conftest import TEXTS, T, files_of
from tokenscale.base.errors import UserError
from tokenscale.data.stores import packed, writing
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


class Wrong:
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
    real = pytest.importorskip("gigatoken") and gate.ENGINES["gigatoken"]
    return lambda word: monkeypatch.setitem(gate.ENGINES, "gigatoken", lambda *a: Wrong(real(*a), word))


def test_an_engine_that_is_wrong_on_hostile_text_is_passed_over_when_it_is_loaded(tmp_path, wrong):
    corpus = make_corpus(tmp_path / "c", TEXTS)
    wrong("日本")
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "t", corpus, 262))
    assert tokenizer.engine == "tokenizers" and "its ids differ" in tokenizer.notes[0]
    record = json.loads((tmp_path / "t/build.json").read_text())["engines"]["gigatoken"]
    assert record["exact"] is False and "text" in record["first_difference"]


def test_an_engine_that_is_wrong_on_this_text_costs_time_and_no_id(tmp_path, wrong):
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
    monkeypatch.setitem(sys.modules, "gigatoken", None)
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


def digest(*chunks):
    found = IdsDigest()
    for chunk in chunks:
        found.add(chunk)
    found.close()
    return found.groups


@pytest.mark.parametrize("sizes", [[24], [1] * 24, [7, 0, 10, 3, 4], [10, 10, 4], [11, 13]])
def test_the_digest_does_not_depend_on_how_documents_come_but_on_bounds_and_order(monkeypatch, sizes):
    monkeypatch.setattr("tokenscale.data.stores.documents.GROUP_DOCUMENTS", 10)
    lengths = np.arange(24, dtype=np.int64) % 5 + 1
    chunk, ends = Chunk(np.arange(lengths.sum(), dtype=np.int32), lengths), np.cumsum([0, *sizes])
    whole = digest(chunk)
    assert whole == digest(*(chunk.part(a, b) for a, b in pairwise(ends.tolist()))) and len(whole) == 3
    others = [([1, 2, 3], [1, 2]), ([1, 2, 3], [2, 1]), ([1, 3, 2], [1, 2])]
    found = {IdsDigest.combine(digest(Chunk(np.array(i, np.int32), np.array(n, np.int64)))) for i, n in others}
    assert len(found) == 3


def test_documents_are_framed_by_hand():
    ids, lengths = np.array([7, 8, 9], np.int32), np.array([0, 2, 1], np.int64)
    assert frame_documents(ids, lengths, 1, None).ids.tolist() == [1, 1, 7, 8, 1, 9]
    with_eos = frame_documents(ids, lengths, 1, 2)
    assert with_eos.ids.tolist() == [1, 2, 1, 7, 8, 2, 1, 9, 2] and with_eos.lengths.tolist() == [2, 4, 3]


PACKINGS = STORES[2:]


@pytest.fixture(scope="module")
def documents(large_lab):
    store = StoreSettings("token-list")
    reader = TokenListStore(large_lab.store(store), open_store(large_lab.store(store), store))
    return [d.tolist() for chunk in reader.chunks(0, len(TEXTS)) for d in chunk.documents()]


def opened(large_lab, store, path=None):
    path = path or large_lab.store(store)
    return PackedStore(path, open_store(path, store))


@pytest.mark.parametrize("store", PACKINGS, ids=lambda s: s.packing)
@pytest.mark.parametrize("tokens", [1, 100, 1 << 20])
def test_documents_come_back_whole_and_in_order_from_any_of_them_on(large_lab, documents, monkeypatch, store, tokens):
    monkeypatch.setattr(packed, "CHUNK_TOKENS", tokens)
    reader, count = opened(large_lab, store), len(TEXTS)
    for first, last in [(0, count), (0, 1), (7, 40), (count - 1, count), (5, 5)]:
        chunks = list(reader.chunks(first, last))
        assert [d.tolist() for chunk in chunks for d in chunk.documents()] == documents[first:last]
        longest = max((len(d) for d in documents), default=0)
        assert all(len(chunk.ids) <= max(tokens, longest) and chunk.ids.dtype == np.int32 for chunk in chunks)
        assert all(len(a.ids) + len(b.ids) > tokens for a, b in pairwise(chunks))  # no smaller than they need to be


@pytest.mark.parametrize("store", PACKINGS, ids=lambda s: s.packing)
def test_a_row_that_has_changed_gives_no_documents(large_lab, tmp_path, store):
    path = tmp_path / "store"
    shutil.copytree(large_lab.store(store), path)
    tokens = path / "tokens.bin"
    for at in np.linspace(0, tokens.stat().st_size - 1, 10).astype(int).tolist():
        content = bytearray((large_lab.store(store) / "tokens.bin").read_bytes())
        content[at] ^= 1
        tokens.write_bytes(content)
        with pytest.raises(UserError, match="a row of the token store has changed"):
            list(opened(large_lab, store, path).chunks(0, len(TEXTS)))
