"""How a store is written, at once and in parts, interrupted or by an engine that is wrong; its
documents.
"""

import json
import os
import random
import shutil
import sys
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from tests.corpora import documents_of, flip_bit, make_corpus, make_store, make_tokenizer
from tests.unit.conftest import TEXTS, Interrupted, T, files_of
from tokenscale.base.errors import UserError
from tokenscale.data.parts import part_folder
from tokenscale.data.stores import packed, writing
from tokenscale.data.stores.documents import Chunk, IdsDigest, frame_documents
from tokenscale.data.stores.manifest import load_reader, open_store, read_store_manifest
from tokenscale.data.stores.packed import PackedStore
from tokenscale.data.stores.text import TextDocuments
from tokenscale.data.stores.writing import merge_store, write_store
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


@pytest.mark.parametrize("store", STORES, ids=lambda s: s.format)
@pytest.mark.parametrize("killed", [False, True])
def test_an_interrupted_writer_starts_over_and_gives_the_same_bytes(
    large_lab, tmp_path, monkeypatch, small_parts, store, killed
):
    whole = tmp_path / "whole"
    other = tmp_path / "other"
    write_store(store, large_lab.corpus, large_lab.tokenizer, whole)

    def interrupt(documents, utf8_bytes):
        read.append(documents)
        if sum(read) > 30:
            raise Interrupted

    read = []
    with monkeypatch.context() as patched:
        if killed:
            patched.setattr(writing, "remove_tree", lambda folder: None)
        with pytest.raises(Interrupted):
            write_store(
                store, large_lab.corpus, large_lab.tokenizer, other, interrupt, batch_documents=5
            )
    assert not (other / "manifest.json").exists() and (other / ".building").exists() == killed
    write_store(store, large_lab.corpus, large_lab.tokenizer, other)
    assert files_of(other) == files_of(whole)
    assert not (other / ".building").exists()


class Wrong:
    def __init__(self, engine, word):
        self.version = engine.version
        self._engine = engine
        self._word = word

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
    return lambda word: monkeypatch.setitem(
        gate.ENGINES, "gigatoken", lambda *a: Wrong(real(*a), word)
    )


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
    assert json.loads((tmp_path / "auto/build.json").read_text())["engine"].startswith(
        "tokenizers "
    )
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

    assert (
        gate.find_difference(right, right, TEXTS) is None
        and gate.find_difference(right, right, []) is None
    )
    assert gate.find_difference(WrongOneWay(), right, TEXTS)["text"] == repr(" ")


def test_equal_ids_give_an_equal_manifest_whatever_the_engine(large_lab, tmp_path):
    pytest.importorskip("gigatoken")
    for engine in ("gigatoken", "tokenizers"):
        write_store(
            STORES[2], large_lab.corpus, large_lab.tokenizer, tmp_path / engine, engine=engine
        )
    assert files_of(tmp_path / "gigatoken") == files_of(tmp_path / "tokenizers")


def test_an_engine_that_is_not_here_says_so_and_the_next_one_serves(
    large_lab, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    tokenizer = load_tokenizer(large_lab.tokenizer)
    assert isinstance(tokenizer, EngineTokenizer)
    assert tokenizer.engine == "tokenizers" and "no package gigatoken" in tokenizer.notes[0]
    with pytest.raises(UserError, match="engine gigatoken cannot be used"):
        load_tokenizer(large_lab.tokenizer, "gigatoken")
    with pytest.raises(UserError, match="did you mean 'tokenizers'"):
        load_tokenizer(large_lab.tokenizer, "tokenizer")


def test_ids_outside_the_vocabulary_are_a_bug(large_lab, tmp_path, monkeypatch):
    monkeypatch.setattr(
        TextDocuments,
        "chunks",
        lambda *a: iter([Chunk(np.array([0, 999], np.int32), np.array([2]))]),
    )
    with pytest.raises(ValueError, match="outside the vocabulary"):
        write_store(STORES[1], large_lab.corpus, large_lab.tokenizer, tmp_path / "store")


def digest(*chunks):
    found = IdsDigest()
    for chunk in chunks:
        found.add(chunk)
    found.close()
    return found.groups


@pytest.mark.parametrize("sizes", [[24], [1] * 24, [7, 0, 10, 3, 4], [10, 10, 4], [11, 13]])
def test_the_digest_does_not_depend_on_how_documents_come_but_on_bounds_and_order(
    monkeypatch, sizes
):
    monkeypatch.setattr("tokenscale.data.stores.documents.GROUP_DOCUMENTS", 10)
    lengths = np.arange(24, dtype=np.int64) % 5 + 1
    chunk = Chunk(np.arange(lengths.sum(), dtype=np.int32), lengths)
    ends = np.cumsum([0, *sizes])
    whole = digest(chunk)
    assert (
        whole == digest(*(chunk.part(a, b) for a, b in pairwise(ends.tolist()))) and len(whole) == 3
    )
    others = [([1, 2, 3], [1, 2]), ([1, 2, 3], [2, 1]), ([1, 3, 2], [1, 2])]
    found = {
        IdsDigest.combine(digest(Chunk(np.array(i, np.int32), np.array(n, np.int64))))
        for i, n in others
    }
    assert len(found) == 3


def test_documents_are_framed_by_hand():
    ids = np.array([7, 8, 9], np.int32)
    lengths = np.array([0, 2, 1], np.int64)
    assert frame_documents(ids, lengths, 1, None).ids.tolist() == [1, 1, 7, 8, 1, 9]
    with_eos = frame_documents(ids, lengths, 1, 2)
    assert with_eos.ids.tolist() == [1, 2, 1, 7, 8, 2, 1, 9, 2] and with_eos.lengths.tolist() == [
        2,
        4,
        3,
    ]


@pytest.fixture(scope="module")
def documents(large_lab):
    return [ids.tolist() for ids in documents_of(large_lab)]


@pytest.mark.parametrize("store", STORES[2:], ids=lambda s: s.packing)
@pytest.mark.parametrize("tokens", [1, 100, 1 << 20])
def test_documents_come_back_whole_and_in_order_from_any_of_them_on(
    large_lab, documents, monkeypatch, store, tokens
):
    monkeypatch.setattr(packed, "CHUNK_TOKENS", tokens)
    path = large_lab.store(store)
    count = len(TEXTS)
    reader = PackedStore(path, open_store(path, store))
    for first, last in [(0, count), (0, 1), (7, 40), (count - 1, count), (5, 5)]:
        chunks = list(reader.chunks(first, last))
        assert [d.tolist() for chunk in chunks for d in chunk.documents()] == documents[first:last]
        assert all(len(chunk.ids) <= max(tokens, *map(len, documents)) for chunk in chunks)
        # no smaller than they need to be
        assert all(len(a.ids) + len(b.ids) > tokens for a, b in pairwise(chunks))


PACKED = "packed-sequence_length=16"
TOKEN_LIST = StoreSettings("token-list")


@pytest.fixture(scope="module")
def corpus_of_80(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    rng = random.Random(5)
    texts = [
        " ".join(rng.choices(["alpha", "beta", "gamma", "delta"], k=rng.randrange(1, 30)))
        for _ in range(80)
    ]
    make_corpus(folder / "c", [f"{i} {text}" for i, text in enumerate(texts)])
    make_tokenizer(folder / "t", folder / "c")
    return folder


@pytest.fixture
def made(corpus_of_80, monkeypatch):
    """Groups of 10 documents, so that 80 documents can be cut into parts."""
    monkeypatch.setattr("tokenscale.data.stores.documents.GROUP_DOCUMENTS", 10)
    return corpus_of_80


def write_in_parts(made, store, directory, parts, order=None):
    settings = StoreSettings.parse(store)
    for number in order or range(parts):
        write_store(
            settings, made / "c", made / "t", part_folder(directory, number), part=(number, parts)
        )
    return merge_store(settings, made / "c", directory, parts)


def open_reader(directory, store):
    return load_reader(store.split("-sequence")[0])(
        directory, open_store(directory, StoreSettings.parse(store))
    )


@pytest.mark.parametrize("store", ["token-list", "padded-sequence_length=16", PACKED])
@pytest.mark.parametrize("parts", [3, 12])
def test_parts_have_the_ids_of_the_whole(made, tmp_path, store, parts):
    path = make_store(tmp_path, made / "c", made / "t", store)
    whole = read_store_manifest(path)
    order = random.Random(parts).sample(range(parts), parts)
    merged = write_in_parts(made, store, tmp_path / "many", parts, order)
    same = [
        "ids_digest",
        "documents",
        "tokens_in_documents",
        "text_sha256",
        "tokenizer",
        "tokens_useful",
        "options",
    ]
    assert {key: merged[key] for key in same} == {key: whole[key] for key in same}
    assert merged["bits_per_token"]["order_0_entropy"] == whole["bits_per_token"]["order_0_entropy"]
    assert sum(part["documents"] for part in merged["parts"]) == 80 and len(merged["parts"]) == min(
        parts, 8
    )
    one = open_reader(path, store)
    many = open_reader(tmp_path / "many", store)
    if store == "token-list":
        assert all((one.document(i) == many.document(i)).all() for i in range(80))
        assert (one.lengths == many.lengths).all()
    elif store != PACKED:
        assert all(
            (a == b).all()
            for a, b in zip(one.rows(np.arange(80)), many.rows(np.arange(80)), strict=True)
        )
    for first, last in (
        [(0, 80), (3, 11), (9, 10), (17, 71), (79, 80), (5, 5)] if hasattr(one, "chunks") else ()
    ):
        found, expected = (
            [d.tolist() for c in s.chunks(first, last) for d in c.documents()] for s in (many, one)
        )
        assert found == expected and len(found) == last - first


def test_packed_rows_of_parts_and_of_stores_are_read_one_after_the_other_in_any_order(
    made, tmp_path
):
    """As the stores of a mixture, one of them in parts: rows, document boundaries and documents are
    those of each.
    """
    whole = make_store(tmp_path, made / "c", made / "t", PACKED)
    merged = write_in_parts(made, PACKED, tmp_path / "many", 5)
    assert merged["rows_packed_within"] == "part"
    many = open_reader(tmp_path / "many", PACKED)
    # tables of a part are opened when one of its rows is read
    many.rows(np.array([merged["parts"][0]["rows"]]))
    assert ["pieces" in vars(part) for part in many._parts] == [False, True, False, False, False]
    with pytest.raises(IndexError):
        many.plan(np.array([[len(many)]]))
    many.plan(np.zeros((0, 4), dtype=np.int64))
    parts = [open_reader(part_folder(tmp_path / "many", number), PACKED) for number in range(5)]
    readers = [*parts, open_reader(whole, PACKED), *parts]
    tokens, labels = (
        np.concatenate(each)
        for each in zip(*(r.rows(np.arange(len(r))) for r in readers), strict=True)
    )
    settings = StoreSettings.parse(PACKED)
    opened = [
        (folder, open_store(folder, settings))
        for folder in (tmp_path / "many", whole, tmp_path / "many")
    ]
    joined = PackedStore(*opened[0], others=opened[1:])
    assert joined.sizes == [len(many), len(readers[5]), len(many)] and len(joined) == len(tokens)
    assert np.array_equal(
        joined.starts(np.arange(len(joined))),
        np.concatenate([r.starts(np.arange(len(r))) for r in readers]),
    )
    for size in (1, 8, len(joined)):
        rows = (
            np.random.default_rng(7)
            .permutation(len(joined))[: len(joined) // size * size]
            .reshape(-1, size)
        )
        plan = joined.plan(rows)
        buffers = joined.buffers(size)
        joined._resident = 1000 * (size == 8)  # also as where the files are in the page cache
        for batch, indices in enumerate(rows):
            joined.read(plan, batch, buffers)
            assert np.array_equal(buffers.tokens_bt, tokens[indices])
            assert np.array_equal(buffers.labels_bt, labels[indices])
    assert not joined._is_unseen(rows).any()
    found = np.concatenate([chunk.ids for chunk in joined.chunks(30, 200)])
    several = [many.chunks(30, 80), readers[5].chunks(0, 80), many.chunks(0, 40)]
    assert np.array_equal(
        found, np.concatenate([chunk.ids for chunks in several for chunk in chunks])
    )


@pytest.mark.parametrize(
    ("store", "name"),
    [
        *((PACKED, name) for name in ("tokens.bin", "pieces.npy", "checksums.npy")),
        *((name, "shard-00000.bin") for name in ("token-list", "padded-sequence_length=16")),
    ],
)
def test_a_damaged_file_is_named_with_the_command_of_its_part(made, tmp_path, store, name):
    write_in_parts(made, store, tmp_path / "many", 5)
    flip_bit(part_folder(tmp_path / "many", 3) / name, 4 if name.endswith(".bin") else -1)
    with pytest.raises(UserError) as caught:
        reader = open_reader(tmp_path / "many", store)
        [
            reader.document(i) if store == "token-list" else reader.rows(np.array([i]))
            for i in range(len(reader))
        ]
    assert caught.value.facts["next"] == f"snakemake -f {tmp_path}/many/parts/00003/manifest.json"


WRONG = {
    "missing": lambda part, made: shutil.rmtree(part),
    "manifest": lambda part, made: flip_bit(part / "manifest.json", 20),
    "file gone": lambda part, made: os.remove(part / "shard-00000.parquet"),
    "occurrences": lambda part, made: flip_bit(part / "occurrences.npy"),
    "of another number": lambda part, made: write_store(
        TOKEN_LIST, made / "c", made / "t", part, part=(2, 5)
    ),
    "of another corpus": lambda part, made: None,
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_part_is_refused_and_the_store_stays(made, tmp_path, what):
    write_in_parts(made, "token-list", tmp_path / "many", 4)
    before = (tmp_path / "many/manifest.json").read_bytes()
    WRONG[what](part_folder(tmp_path / "many", 2), made)
    other = what == "of another corpus"
    corpus = make_corpus(tmp_path / "c2", ["other", "texts"]) if other else made / "c"
    with pytest.raises(UserError) as caught:
        merge_store(TOKEN_LIST, corpus, tmp_path / "many", 4)
    part = "00000" if other else "00002"
    assert caught.value.facts["next"] == f"snakemake -f {tmp_path}/many/parts/{part}/manifest.json"
    assert (tmp_path / "many/manifest.json").read_bytes() == before
    write_in_parts(made, "token-list", tmp_path / "many", 4, order=[2])
    assert (tmp_path / "many/manifest.json").read_bytes() == before
