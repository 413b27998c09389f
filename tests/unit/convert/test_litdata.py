"""litdata's folders: their bytes, every type of ids, inconsistent folders, and litdata itself."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.convert.conftest import KNOWN, digest, documents_in, documents_of, ours, refused, run, write_hf
from tokenscale.data.stores.foreign import reframe, shards

CODES = {"<u2": "no_header_tensor:20", "<i4": "no_header_tensor:16"}


def write_litdata(folder, chunks, form="no_header_tensor:18", dtype="<i8", **config):
    """By hand, from the layout that litdata's writer documents."""
    folder.mkdir()
    listed = []
    for number, documents in enumerate(chunks):
        items = [np.array(ids, dtype).tobytes() for ids in documents]
        offsets = np.cumsum([4 * (len(items) + 2), *map(len, items)])
        data = np.array([len(items), *offsets], "<u4").tobytes() + b"".join(items)
        name, tokens = f"chunk-0-{number}.bin", sum(map(len, documents))
        (folder / name).write_bytes(data)
        listed.append({"chunk_bytes": len(data), "chunk_size": len(items), "dim": tokens, "filename": name})
    config = {"compression": None, "data_format": [form], "encryption": None, "item_loader": "TokensLoader"} | config
    (folder / "index.json").write_text(json.dumps({"chunks": listed, "config": config}))
    return folder


def parse(folder):
    """The documents of each chunk of a folder, read by the documented layout."""
    index = json.loads((folder / "index.json").read_text())
    dtype = {code: dtype for dtype, code in CODES.items()}[index["config"]["data_format"][0]]
    chunks = []
    for chunk in index["chunks"]:
        data = (folder / chunk["filename"]).read_bytes()
        assert len(data) == chunk["chunk_bytes"]
        offsets = np.frombuffer(data, "<u4", 1 + chunk["chunk_size"], offset=4)
        assert int.from_bytes(data[:4], "little") == chunk["chunk_size"]
        chunks.append(
            [np.frombuffer(data[a:b], dtype).tolist() for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
        )
        assert sum(map(len, chunks[-1])) == chunk["dim"]
    return chunks


def flatten(lists):
    return [value for values in lists for value in values]


def test_the_bytes_of_a_litdata_folder(tmp_path):
    run(write_hf(tmp_path / "hf", input_ids=[[0, 7, 8], [0, 9]]), tmp_path / "l", to="litdata", **KNOWN)
    assert sorted(p.name for p in (tmp_path / "l").iterdir()) == ["chunk-0-0.bin", "index.json", "tokenscale.json"]
    assert (tmp_path / "l/chunk-0-0.bin").read_bytes() == bytes.fromhex(
        "02000000"  # items
        "10000000 16000000 1a000000"  # where each begins, and where the last one ends
        "0000 0700 0800 0000 0900"
    )
    index = json.loads((tmp_path / "l/index.json").read_text())
    assert index["chunks"] == [{"chunk_bytes": 26, "chunk_size": 2, "dim": 5, "filename": "chunk-0-0.bin"}]
    assert index["config"]["data_format"] == ["no_header_tensor:20"]
    assert index["config"]["item_loader"] == "TokensLoader" and index["config"]["chunk_bytes"] == 2**26


def test_equal_documents_give_equal_files(lab, tmp_path):
    for name in ("a", "b"):
        run(ours(lab), tmp_path / name, to="litdata")
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert files[0] == files[1]


@pytest.mark.parametrize(("size", "dtype"), [(65_499, "<u2"), (65_500, "<i4"), (131_072, "<i4")])
def test_ids_of_small_vocabularies_are_uint16_as_in_a_megatron_pair(tmp_path, size, dtype):
    source = write_hf(tmp_path / "hf", input_ids=[[0, size - 1], [0, 3]])
    run(source, tmp_path / "l", to="litdata", vocabulary_size=size, bos_id=0)
    index = json.loads((tmp_path / "l/index.json").read_text())
    assert index["config"]["data_format"] == [CODES[dtype]]
    assert flatten(parse(tmp_path / "l")) == [[0, size - 1], [0, 3]]


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((f"no_header_tensor:{code}", dtype) for code, dtype in [(11, "u1"), (12, "i1"), (13, "<i2"), (14, "<i2")]),
        *((f"no_header_tensor:{code}", dtype) for code, dtype in [(15, "<i4"), (16, "<i4"), (17, "<i8"), (18, "<i8")]),
        *((f"no_header_numpy:{code}", dtype) for code, dtype in [(0, "i1"), (1, "<i2"), (2, "<i4"), (3, "<i8")]),
        *((f"no_header_numpy:{code}", dtype) for code, dtype in [(4, "u1"), (5, "<u2"), (6, "<u4"), (7, "<u8")]),
        ("no_header_tensor:20", "<u2"),
    ],
)
def test_every_integer_type_is_read(tmp_path, form, dtype):
    source = write_litdata(tmp_path / "l", [[[5, 6], [7, 1]], [[], [8]]], form, dtype)
    found = run(source, tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 6], [0, 7], [0], [0, 8]]
    assert f"ids of {np.dtype(dtype).name}" in found


@pytest.mark.parametrize("size", [40, 100, 4096])
def test_documents_are_distributed_to_chunks_of_the_given_size(lab, tmp_path, monkeypatch, small_blocks, size):
    monkeypatch.setattr(shards, "SHARD_BYTES", size)
    run(ours(lab), tmp_path / "pair", to="megatron")  # which is read in blocks smaller than a chunk
    run(tmp_path / "pair", tmp_path / "l", to="litdata")
    chunks = parse(tmp_path / "l")
    assert flatten(chunks) == documents_of(ours(lab, "token-list"))
    sizes = [8 + sum(4 + 2 * len(ids) for ids in chunk) for chunk in chunks]
    assert all(found <= size or len(chunk) == 1 for found, chunk in zip(sizes, chunks, strict=True))
    for found, following in zip(sizes, chunks[1:], strict=False):  # each chunk is as full as it can be
        assert found + 4 + 2 * len(following[0]) > size
    run(tmp_path / "l", tmp_path / "back", to="packed-sequence_length=16")
    assert digest(tmp_path / "back") == digest(ours(lab))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(2, 99), max_size=30), min_size=1, max_size=20),
    st.integers(16, 300),
    st.integers(1, 60),
)
def test_any_documents_are_written_and_read(documents, chunk_bytes, block):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        folder = Path(name)
        patched.setattr(shards, "SHARD_BYTES", chunk_bytes)
        patched.setattr(reframe, "BLOCK_TOKENS", block)
        source = write_litdata(folder / "theirs", [documents[:3], documents[3:]])
        run(source, folder / "l", to="litdata", bos="keep", **KNOWN)
        assert flatten(parse(folder / "l")) == [[0, *ids] for ids in documents]
        run(source, folder / "plain", to="litdata", **KNOWN)  # without the BOS that the source has not
        assert flatten(parse(folder / "plain")) == documents
        run(folder / "l", folder / "s", to="token-list")
        assert documents_of(folder / "s") == [[0, *ids] for ids in documents]


def test_a_folder_whose_documents_do_not_end_gets_a_note(lab, tmp_path):
    assert "--document-end 1 puts one" in run(ours(lab), tmp_path / "l", to="litdata")
    assert "--document-end" not in run(ours(lab, eos=True), tmp_path / "with", to="litdata")
    run(ours(lab), tmp_path / "ended", to="litdata", document_end=1, bos="drop")
    assert flatten(parse(tmp_path / "ended")) == [[*ids[1:], 1] for ids in documents_of(ours(lab, "token-list"))]
    run(tmp_path / "ended", tmp_path / "back", to="token-list")
    assert digest(tmp_path / "back") == digest(ours(lab))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"compression": "zstd"}, "are compressed"),
        ({"encryption": {"level": "chunk"}}, "are encrypted"),
        ({"item_loader": "PyTreeLoader"}, "not arrays of ids"),
        ({"data_format": ["no_header_tensor:1"]}, "not arrays of ids"),
        ({"data_format": ["tensor:18"]}, "not arrays of ids"),
        ({"data_format": ["int"]}, "not arrays of ids"),
        ({"data_format": ["no_header_tensor:18", "int"]}, "not arrays of ids"),
        ({"data_format": []}, "not arrays of ids"),
        ({"data_format": None}, "expected content"),
    ],
)
def test_folders_of_other_items_are_refused(tmp_path, config, words):
    source = write_litdata(tmp_path / "l", [[[5, 6], [7]]], **config)
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert words in text and "index.json" in text and "next" in text


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d[:-8], lambda d: d + b"\0" * 8, lambda d: b""])
def test_a_chunk_of_another_size_than_the_index_says_is_refused(tmp_path, change):
    source = write_litdata(tmp_path / "l", [[[5, 6], [7]], [[8], [9]]])
    chunk = source / "chunk-0-1.bin"
    chunk.write_bytes(change(chunk.read_bytes()))
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert "another size than its index says" in text and chunk.name in text and "expected" in text and "next" in text
    chunk.unlink()
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert "is missing" in text and chunk.name in text


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, 3, "another number of items"),
        (0, 1, "another number of items"),
        (1, 8, "outside of the file"),
        (1, 24, "does not hold the ids"),
        (2, 12, "offsets that decrease"),
        (2, 48, "offsets that decrease"),
        (2, 33, "does not hold the ids"),
        (3, 32, "outside of the file"),
        (3, 48, "outside of the file"),
    ],
)
def test_a_wrong_number_at_the_beginning_of_a_chunk_is_refused(tmp_path, at, value, words):
    source = write_litdata(tmp_path / "l", [[[5, 6], [7]]])  # 2, 16, 32, 40
    data = bytearray((source / "chunk-0-0.bin").read_bytes())
    data[4 * at : 4 * at + 4] = value.to_bytes(4, "little")
    (source / "chunk-0-0.bin").write_bytes(data)
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert words in text and "chunk-0-0.bin" in text and "expected" in text and "next" in text


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("chunk_size", 1, "another number of items"),
        ("chunk_size", -1, "ends inside its offsets"),
        ("chunk_size", 10**12, "ends inside its offsets"),
        ("chunk_size", "2", "expected content"),
        ("dim", 4, "does not hold the ids"),
        ("dim", None, "expected content"),
        ("chunk_bytes", 41, "another size"),
        ("filename", "../chunk-0-0.bin", "expected content"),
        ("filename", None, "expected content"),
    ],
)
def test_a_wrong_entry_of_the_index_is_refused(tmp_path, name, value, words):
    source = write_litdata(tmp_path / "l", [[[5, 6], [7]]])
    index = json.loads((source / "index.json").read_text())
    index["chunks"][0][name] = value
    (source / "index.json").write_text(json.dumps(index))
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert words in text and "next" in text and ("index.json" in text or "chunk-0-0.bin" in text)


def test_a_broken_or_missing_index_is_refused(tmp_path):
    source = write_litdata(tmp_path / "l", [[[5, 6], [7]]])
    for text in ("{", "[]", "{}", '{"chunks": {}, "config": {}}', '{"chunks": []}'):
        (source / "index.json").write_text(text)
        assert "format of the source is unknown" in refused(source, tmp_path / "s", to="packed", **KNOWN)
        assert "index" in refused(source, tmp_path / "s", to="token-list", from_format="litdata", **KNOWN)
    (source / "index.json").unlink()
    assert "is missing" in refused(source, tmp_path / "s", to="token-list", from_format="litdata", **KNOWN)
    (source / "index.json").write_text('{"chunks": [], "config": {"data_format": ["no_header_tensor:18"]}}')
    assert "holds no documents" in refused(source, tmp_path / "s", to="token-list", **KNOWN)


def test_an_id_outside_of_the_vocabulary_names_its_chunk_and_document(tmp_path):
    for wrong in (100, -1, 2**40):
        source = write_litdata(tmp_path / f"l{wrong}", [[[5, 6], [7]], [[8], [9, wrong]]])
        text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
        assert f"found     id {wrong}" in text and "chunk-0-1.bin" in text and "document  3 of 4, token 1 of 2" in text


def test_a_folder_with_other_files_is_not_replaced(lab, tmp_path):
    run(ours(lab), tmp_path / "l", to="litdata")
    run(ours(lab), tmp_path / "l", to="litdata", force=True)
    (tmp_path / "l/notes.txt").write_text("precious")
    text = refused(ours(lab), tmp_path / "l", to="litdata", force=True)
    assert "more than a litdata folder" in text and "notes.txt" in text


# ------------------------------------------------------------------------------------------------------ litdata itself


@pytest.mark.experiment
@pytest.mark.slow(55)
def test_litdata_reads_what_is_written(lab, tmp_path, monkeypatch, peers):
    monkeypatch.setattr(shards, "SHARD_BYTES", 700)
    source = write_hf(tmp_path / "hf", input_ids=[[0, 70_000, 5], [0, 6]])
    run(source, tmp_path / "int32", to="litdata", vocabulary_size=1 << 17, bos_id=0)
    run(ours(lab), tmp_path / "uint16", to="litdata")
    for name in ("uint16", "int32"):
        chunks = [flatten(chunk) for chunk in parse(tmp_path / name)]
        for block in (1, 7) if name == "uint16" else (1,):
            found = peers.run(PEER, do="read", folder=str(tmp_path / name), block=block)
            blocks = (ids[at : at + block] for ids in chunks for at in range(0, len(ids) - block + 1, block))
            assert found == list(blocks)
    assert len(parse(tmp_path / "uint16")) > 3
    assert flatten(flatten(parse(tmp_path / "uint16"))) == flatten(documents_of(ours(lab, "token-list")))


@pytest.mark.experiment
@pytest.mark.slow(55)
@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_what_litdata_writes_is_read(lab, tmp_path, peers, dtype):
    documents = documents_of(ours(lab, "token-list"))
    peers.run(PEER, do="write", folder=str(tmp_path / "l"), documents=documents, dtype=dtype, chunk_bytes=500)
    assert len(list((tmp_path / "l").glob("chunk-*.bin"))) > 3
    assert documents_in(tmp_path / "l", tmp_path / "s") == documents
    run(tmp_path / "l", tmp_path / "back", to="token-list", tokenizer=str(lab.tokenizer))
    assert digest(tmp_path / "back") == digest(ours(lab))


@pytest.mark.experiment
@pytest.mark.slow(55)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compression": "zstd", "compression_level": "chunk"}, "are compressed"),
        ({"loader": False}, "not arrays of ids"),
    ],
)
def test_other_folders_of_litdata_are_refused(tmp_path, peers, options, words):
    options = {"chunk_bytes": 500} | options
    peers.run(PEER, do="write", folder=str(tmp_path / "l"), documents=[[5, 6], [7]], **options)
    assert words in refused(tmp_path / "l", tmp_path / "s", to="token-list", **KNOWN)


PEER = Path(__file__).with_name("peer_litdata.py")
