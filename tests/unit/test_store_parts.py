"""Stores written in parts have the ids of stores written at once, and the same rows where rows are documents."""

import os
import random
import shutil

import numpy as np
import pytest

from tests.corpora import make_corpus, make_store, make_tokenizer
from tokenscale.base.errors import UserError
from tokenscale.data.records import part_folder
from tokenscale.data.stores import documents as documents_module
from tokenscale.data.stores.manifest import load_reader, open_store, read_store_manifest
from tokenscale.data.stores.packed import PackedStore
from tokenscale.data.stores.writing import merge_store, write_store
from tokenscale.settings.data import StoreSettings

STORES = ["token-list", "padded-sequence_length=16", "packed-sequence_length=16"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    rng = random.Random(5)
    texts = [" ".join(rng.choices(["alpha", "beta", "gamma", "delta"], k=rng.randrange(1, 30))) for _ in range(240)]
    make_corpus(folder / "c", [f"{i} {text}" for i, text in enumerate(texts)])
    make_tokenizer(folder / "t", folder / "c")
    return folder


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Groups of 10 documents, so that 240 documents can be cut into parts."""
    monkeypatch.setattr(documents_module, "GROUP_DOCUMENTS", 10)


def write_in_parts(made, store, directory, parts, order=None):
    settings = StoreSettings.parse(store)
    for number in order or range(parts):
        write_store(settings, made / "c", made / "t", part_folder(directory, number), part=(number, parts))
    return merge_store(settings, made / "c", directory, parts)


def open_reader(directory, store, **options):
    return load_reader(store.split("-sequence")[0])(
        directory, open_store(directory, StoreSettings.parse(store)), **options
    )


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("parts", [2, 5, 24, 40])
def test_parts_have_the_ids_of_the_whole(made, tmp_path, store, parts):
    make_store(tmp_path, made / "c", made / "t", store)
    whole = read_store_manifest(tmp_path / StoreSettings.parse(store).directory)
    order = random.Random(parts).sample(range(parts), parts)
    merged = write_in_parts(made, store, tmp_path / "many", parts, order)
    assert merged["ids_digest"] == whole["ids_digest"]
    same = ["documents", "tokens_in_documents", "text_sha256", "tokenizer", "tokens_useful", "options"]
    assert {key: merged[key] for key in same} == {key: whole[key] for key in same}
    assert merged["bits_per_token"]["order_0_entropy"] == whole["bits_per_token"]["order_0_entropy"]
    assert sum(part["documents"] for part in merged["parts"]) == 240 and len(merged["parts"]) == min(parts, 24)
    one, many = (open_reader(tmp_path / name, store) for name in (StoreSettings.parse(store).directory, "many"))
    if store == "token-list":
        assert all((one.document(i) == many.document(i)).all() for i in range(240))
        assert (one.lengths == many.lengths).all()
    elif store.startswith("padded"):
        for a, b in zip(one.rows(np.arange(240)), many.rows(np.arange(240)), strict=True):
            assert (a == b).all()
    if hasattr(one, "chunks"):
        for first, last in [(0, 240), (3, 11), (9, 10), (57, 203), (239, 240), (5, 5)]:
            ids = [np.concatenate([c.ids for c in s.chunks(first, last)] or [[]]) for s in (one, many)]
            lengths = [np.concatenate([c.lengths for c in s.chunks(first, last)] or [[]]) for s in (one, many)]
            assert (ids[0] == ids[1]).all() and (lengths[0] == lengths[1]).all()


def test_packed_rows_of_parts_are_those_of_the_parts_in_any_order(made, tmp_path):
    store = "packed-sequence_length=16"
    merged = write_in_parts(made, store, tmp_path / "many", 5)
    assert merged["rows_packed_within"] == "part"
    many = open_reader(tmp_path / "many", store)
    many.rows(np.array([merged["parts"][0]["rows"]]))  # tables of a part are opened when one of its rows is read
    assert ["pieces" in vars(part) for part in many._parts] == [False, True, False, False, False]
    expected = []
    for number in range(5):
        part = open_reader(part_folder(tmp_path / "many", number), store)
        expected += list(zip(*part.rows(np.arange(len(part))), strict=True))
    rng = np.random.default_rng(7)
    for size in (1, 8, len(many)):
        indices = rng.permutation(len(many))[: len(many) // size * size].reshape(-1, size)
        fresh = open_reader(tmp_path / "many", store)
        plan, buffers = fresh.plan(indices), fresh.buffers(size)
        for batch in range(len(indices)):
            fresh.read(plan, batch, buffers)
            for row, tokens, labels in zip(indices[batch].tolist(), buffers.tokens_bt, buffers.labels_bt, strict=True):
                assert (tokens == expected[row][0]).all() and (labels == expected[row][1]).all()
        assert not fresh._is_unseen(indices).any()
    assert (many.starts(np.arange(len(many)))[:, 0]).all()
    with pytest.raises(IndexError):
        many.plan(np.array([[len(many)]]))
    many.plan(np.zeros((0, 4), dtype=np.int64))


def damage(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("store", "name"),
    [
        *(("packed-sequence_length=16", name) for name in ("tokens.bin", "pieces.npy", "checksums.npy")),
        *((name, "shard-00000.bin") for name in ("token-list", "padded-sequence_length=16")),
    ],
)
def test_a_damaged_file_is_named_with_the_command_of_its_part(made, tmp_path, store, name):
    write_in_parts(made, store, tmp_path / "many", 5)
    damage(part_folder(tmp_path / "many", 3) / name, 4 if name.endswith(".bin") else -1)
    with pytest.raises(UserError) as caught:
        reader = open_reader(tmp_path / "many", store)
        if store == "token-list":
            [reader.document(i) for i in range(240)]
        else:
            reader.rows(np.arange(len(reader)))
    assert caught.value.facts["next"] == f"snakemake -f {tmp_path}/many/parts/00003/manifest.json"


WRONG = {
    "missing": lambda part, made: shutil.rmtree(part),
    "manifest": lambda part, made: damage(part / "manifest.json", 20),
    "file gone": lambda part, made: os.remove(part / "shard-00000.parquet"),
    "occurrences": lambda part, made: damage(part / "occurrences.npy"),
    "of another number": lambda part, made: write_store(
        StoreSettings("token-list"), made / "c", made / "t", part, part=(2, 5)
    ),
    "of another corpus": lambda part, made: None,
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_part_is_refused_and_the_store_stays(made, tmp_path, what):
    store = "token-list"
    write_in_parts(made, store, tmp_path / "many", 4)
    before = (tmp_path / "many/manifest.json").read_bytes()
    part, corpus = part_folder(tmp_path / "many", 2), made / "c"
    WRONG[what](part, made)
    if what == "of another corpus":
        corpus = make_corpus(tmp_path / "c2", ["other", "texts"])
    with pytest.raises(UserError) as caught:
        merge_store(StoreSettings.parse(store), corpus, tmp_path / "many", 4)
    number = "00000" if what == "of another corpus" else "00002"
    assert caught.value.facts["next"] == f"snakemake -f {tmp_path}/many/parts/{number}/manifest.json"
    assert (tmp_path / "many/manifest.json").read_bytes() == before
    write_in_parts(made, store, tmp_path / "many", 4, order=[2])
    assert (tmp_path / "many/manifest.json").read_bytes() == before


def test_an_interrupted_part_starts_over_and_finished_parts_stay(made, tmp_path):
    settings, folder = StoreSettings.parse("token-list"), part_folder(tmp_path / "many", 1)

    def report(documents, size):
        raise KeyboardInterrupt

    write_store(settings, made / "c", made / "t", part_folder(tmp_path / "many", 0), part=(0, 2))
    with pytest.raises(KeyboardInterrupt):
        write_store(settings, made / "c", made / "t", folder, report, part=(1, 2), batch_documents=10)
    write_store(settings, made / "c", made / "t", folder, part=(1, 2), batch_documents=10)
    make_store(tmp_path, made / "c", made / "t", "token-list")
    merged = merge_store(settings, made / "c", tmp_path / "many", 2)
    assert merged["ids_digest"] == read_store_manifest(tmp_path / "token-list")["ids_digest"]


def test_packed_stores_and_parts_are_read_one_after_the_other(made, tmp_path):
    """As the stores of a mixture: rows, document boundaries and documents are those of each store."""
    store = "packed-sequence_length=16"
    make_store(tmp_path, made / "c", made / "t", store)
    write_in_parts(made, store, tmp_path / "many", 5)
    whole = tmp_path / StoreSettings.parse(store).directory
    folders = [tmp_path / "many", whole, tmp_path / "many"]
    opened = [(folder, open_store(folder, StoreSettings.parse(store))) for folder in folders]
    readers = [PackedStore(*each) for each in opened]
    joined = PackedStore(*opened[0], others=opened[1:])
    assert joined.sizes == [len(reader) for reader in readers] and len(joined) == sum(joined.sizes)
    rows = np.random.default_rng(1).permutation(len(joined))
    firsts = np.cumsum([0, *joined.sizes])
    tokens, labels = joined.rows(rows)
    starts = joined.starts(rows)
    for n, row in enumerate(rows.tolist()):
        source = int(np.searchsorted(firsts, row, side="right")) - 1
        own = np.array([row - firsts[source]])
        expected = *(values[0] for values in readers[source].rows(own)), readers[source].starts(own)[0]
        for found, right in zip((tokens[n], labels[n], starts[n]), expected, strict=True):
            assert np.array_equal(found, right)
    ids = np.concatenate([chunk.ids for chunk in joined.chunks(100, 600)])
    parts = [readers[0].chunks(100, 240), readers[1].chunks(0, 240), readers[2].chunks(0, 120)]
    assert np.array_equal(ids, np.concatenate([chunk.ids for part in parts for chunk in part]))
