"""MDS folders: their bytes, encodings of ids, hashes, compression, inconsistent folders, and streaming itself."""

import hashlib
import json
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.convert.conftest import KNOWN, digest, documents_in, documents_of, ours, refused, run, write_hf
from tokenscale.base.errors import UserError
from tokenscale.data.stores.foreign import reframe, shards

PEER = Path(__file__).with_name("peer_mds.py")


def encode(value, encoding):
    """A value of a column by the documented layout."""
    kind, _, rest = encoding.partition(":")
    if kind == "str":
        return value.encode()
    if kind == "int":
        return struct.pack("<q", value)
    if kind == "bytes":
        return np.array(value, rest or "<i8").tobytes()
    dtype, _, length = rest.partition(":")
    ids = np.array(value, dtype)
    if length:
        return ids.tobytes()
    width = next(width for width in range(4) if len(value) < 1 << 8 * (1 << width))
    return bytes([4 + width]) + len(value).to_bytes(1 << width, "little") + ids.tobytes()


def find_size(encoding):
    """The bytes of a column if all its values have the same size."""
    if encoding == "int":
        return 8
    _, *array = encoding.split(":")
    return np.dtype(array[0]).itemsize * int(array[1]) if len(array) == 2 else None


def write_mds(folder, parts, columns, hashes=(), compression=None, **entry):
    """By hand, from the layout that MDSWriter documents. `parts` are the samples of each shard."""
    folder.mkdir()
    entries = []
    names = sorted(columns)
    encodings = [columns[name] for name in names]
    sizes = [find_size(encoding) for encoding in encodings]
    declared = ["bytes" if e.startswith("bytes") else e for e in encodings]
    config = {"column_encodings": declared, "column_names": names, "column_sizes": sizes, "version": 2, "format": "mds"}
    for number, samples in enumerate(parts):
        items = []
        for sample in samples:
            values = [encode(sample[name], encoding) for name, encoding in zip(names, encodings, strict=True)]
            head = [len(value) for value, size in zip(values, sizes, strict=True) if size is None]
            items.append(np.array(head, "<u4").tobytes() + b"".join(values))
        text = json.dumps(config).encode()
        offsets = np.cumsum([4 * (len(items) + 2) + len(text), *map(len, items)])
        data = np.array([len(items), *offsets], "<u4").tobytes() + text + b"".join(items)
        name = f"shard.{number:05}.mds"
        files = {"raw_data": describe(name, data, hashes), "zip_data": None}
        if compression:
            data = zstandard.ZstdCompressor().compress(data)
            files["zip_data"] = describe(f"{name}.zstd", data, hashes)
            name += ".zstd"
        (folder / name).write_bytes(data)
        entries.append({**config, **files, "compression": compression, "samples": len(items), **entry})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return folder


def describe(name, data, hashes):
    known = {"sha256": hashlib.sha256(data).hexdigest(), "xxh3_64": xxhash.xxh3_64_hexdigest(data), "md5": "unknown"}
    return {"basename": name, "bytes": len(data), "hashes": {algorithm: known[algorithm] for algorithm in hashes}}


def write_tokens(folder, parts, encoding="ndarray:uint16", **options):
    return write_mds(folder, [[{"tokens": ids} for ids in ids_of] for ids_of in parts], {"tokens": encoding}, **options)


def parse(folder):
    """The documents of each shard of a folder that was written by us, read by the documented layout."""
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 2
    found = []
    for entry in index["shards"]:
        data = (folder / entry["raw_data"]["basename"]).read_bytes()
        assert len(data) == entry["raw_data"]["bytes"]
        assert hashlib.sha256(data).hexdigest() == entry["raw_data"]["hashes"]["sha256"]
        number, *offsets = struct.unpack(f"<{entry['samples'] + 2}I", data[: 4 * (entry["samples"] + 2)])
        assert number == entry["samples"] and offsets[-1] == len(data)
        own = json.loads(data[4 * (number + 2) : offsets[0]])
        assert own == {name: value for name, value in entry.items() if name in own}
        dtype = entry["column_encodings"][0].removeprefix("ndarray:")
        documents = []
        for a, b in zip(offsets[:-1], offsets[1:], strict=True):
            assert int.from_bytes(data[a : a + 4], "little") == b - a - 4
            width = 1 << data[a + 4] - 4
            start = a + 5 + width
            documents.append(np.frombuffer(data[start:b], dtype).tolist())
            assert int.from_bytes(data[a + 5 : start], "little") == len(documents[-1])
        found.append(documents)
    return found


def flatten(lists):
    return [value for values in lists for value in values]


def test_the_bytes_of_an_mds_folder(tmp_path):
    run(write_hf(tmp_path / "hf", input_ids=[[0, 7, 8], [0, 9]]), tmp_path / "m", to="mds", **KNOWN)
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["index.json", "shard.00000.mds", "tokenscale.json"]
    columns = (
        b'{"column_encodings": ["ndarray:uint16"], "column_names": ["tokens"], "column_sizes": [null], '
        b'"compression": null, "format": "mds", "hashes": ["sha256"], "size_limit": 67108864, "version": 2}'
    )
    first = 16 + len(columns)
    data = struct.pack("<4I", 2, first, first + 12, first + 22) + columns
    data += bytes.fromhex("08000000 04 03 0000 0700 0800" + "06000000 04 02 0000 0900")
    assert (tmp_path / "m/shard.00000.mds").read_bytes() == data
    (entry,) = json.loads((tmp_path / "m/index.json").read_text())["shards"]
    assert entry["samples"] == 2 and entry["raw_data"]["bytes"] == len(data) and entry["zip_data"] is None


def test_equal_documents_give_equal_files(lab, tmp_path):
    for name in ("a", "b"):
        run(ours(lab), tmp_path / name, to="mds")
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert files[0] == files[1]


@pytest.mark.parametrize(("size", "dtype"), [(65_499, "uint16"), (65_500, "int32"), (131_072, "int32")])
def test_ids_of_small_vocabularies_are_uint16_as_in_a_megatron_pair(tmp_path, size, dtype):
    long = [0, *[size - 1] * 300]
    run(write_hf(tmp_path / "hf", input_ids=[long, [0, 3]]), tmp_path / "m", to="mds", vocabulary_size=size, bos_id=0)
    (entry,) = json.loads((tmp_path / "m/index.json").read_text())["shards"]
    assert entry["column_encodings"] == [f"ndarray:{dtype}"]
    assert parse(tmp_path / "m") == [[long, [0, 3]]]


@pytest.mark.parametrize("length", [254, 255, 256, 257, 65_535, 65_536])
def test_the_number_of_ids_has_the_smallest_type(tmp_path, length):
    ids = [0, *[5] * (length - 1)]
    run(write_hf(tmp_path / "hf", input_ids=[ids, [0]]), tmp_path / "m", to="mds", **KNOWN)
    assert parse(tmp_path / "m") == [[ids, [0]]]
    run(tmp_path / "m", tmp_path / "s", to="token-list")
    assert documents_of(tmp_path / "s") == [ids, [0]]


TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


@pytest.mark.parametrize("encoding", [*(f"ndarray:{dtype}" for dtype in TYPES), "bytes"])
def test_every_encoding_of_ids_is_read_between_other_columns(tmp_path, encoding):
    columns = {"a": "str", "b": "int", "tokens": encoding, "uid": "str"}
    documents = [[[5, 6], [7, 1]], [], [[8] * 99, [9]]]
    parts = [[{"tokens": ids, "a": "x" * len(ids), "b": 5, "uid": "é"} for ids in part] for part in documents]
    run(write_mds(tmp_path / "m", parts, columns), tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 6], [0, 7], [0, *[8] * 99], [0, 9]]


def test_arrays_of_one_length_have_no_numbers_of_ids(tmp_path):
    source = write_tokens(tmp_path / "m", [[[5, 6, 7], [8, 9, 1]]], "ndarray:int32:3")
    run(source, tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 6, 7], [0, 8, 9]]


def test_bytes_are_int64_unless_a_flag_gives_their_type(tmp_path):
    source = write_tokens(tmp_path / "m", [[[5, 6], [7, 8, 9, 4]]], "bytes:<i4")
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert "outside the vocabulary" in text and "bytes read as int64: --dtype int32" in text
    run(source, tmp_path / "s", to="token-list", dtype="int32", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 6], [0, 7, 8, 9, 4]]
    source = write_tokens(tmp_path / "odd", [[[5, 6], [7]]], "bytes:<i4")
    text = refused(source, tmp_path / "t", to="token-list", **KNOWN)
    assert "whole ids of int64" in text and "--dtype int32" in text and "sample  1 of 2" in text


def test_a_flag_that_contradicts_the_type_of_a_column_is_refused(tmp_path):
    source = write_tokens(tmp_path / "m", [[[5, 6]]])
    assert "--dtype contradicts" in refused(source, tmp_path / "s", to="token-list", dtype="int32", **KNOWN)
    run(source, tmp_path / "s", to="token-list", dtype="uint16", **KNOWN)


@pytest.mark.parametrize(
    ("columns", "flag", "chosen"),
    [
        ({"tokens": "ndarray:uint16", "input_ids": "ndarray:uint16"}, None, "tokens"),
        ({"tokens": "ndarray:uint16", "input_ids": "ndarray:uint16"}, "input_ids", "input_ids"),
        ({"other": "ndarray:uint16", "input_ids": "bytes"}, None, "input_ids"),
        ({"other": "ndarray:int64", "name": "str"}, None, "other"),
        ({"some": "bytes", "name": "str"}, "some", "some"),
    ],
)
def test_the_column_of_ids_is_chosen(tmp_path, columns, flag, chosen):
    sample = {name: "x" if encoding == "str" else [5 if name == chosen else 6] for name, encoding in columns.items()}
    source = write_mds(tmp_path / "m", [[sample]], columns)
    run(source, tmp_path / "s", to="token-list", column=flag, **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5]]


@pytest.mark.parametrize(
    ("columns", "flag", "words"),
    [
        ({"a": "ndarray:uint16", "b": "ndarray:uint16"}, None, "several columns of integers"),
        ({"text": "str"}, None, "no column of ids"),
        ({"some": "bytes"}, None, "no column of ids"),
        ({"tokens": "str"}, None, "holds no ids"),
        ({"tokens": "ndarray:uint16", "name": "str"}, "name", "holds no ids"),
        ({"tokens": "ndarray:uint16"}, "tokns", "did you mean 'tokens'"),
        ({"tokens": "ndarray:uint16", "attention_mask": "ndarray:uint16"}, None, "padded"),
    ],
)
def test_a_folder_without_one_column_of_ids_is_refused(tmp_path, columns, flag, words):
    sample = {name: "x" if encoding == "str" else [5] for name, encoding in columns.items()}
    source = write_mds(tmp_path / "m", [[sample]], columns)
    text = refused(source, tmp_path / "s", to="token-list", column=flag, **KNOWN)
    assert words in text and "index.json" in text and "next" in text


@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:float32", "pkl", "ndarray:int32:2,3", "json"])
def test_other_encodings_are_refused(tmp_path, encoding):
    source = write_tokens(tmp_path / "m", [[[5, 6]]], column_encodings=[encoding])
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert "holds no ids" in text and encoding in text and "index.json" in text


def test_shards_with_other_columns_are_refused(tmp_path):
    source = write_tokens(tmp_path / "m", [[[5, 6]], [[7]]])
    index = json.loads((source / "index.json").read_text())
    index["shards"][1]["column_encodings"] = ["ndarray:int32"]
    (source / "index.json").write_text(json.dumps(index))
    assert "two shards of the folder hold other columns" in refused(source, tmp_path / "s", to="token-list", **KNOWN)


@pytest.mark.parametrize("size", [300, 400, 4096])
def test_documents_are_distributed_to_shards_of_the_given_size(lab, tmp_path, monkeypatch, small_blocks, size):
    monkeypatch.setattr(shards, "SHARD_BYTES", size)
    run(ours(lab), tmp_path / "pair", to="megatron")  # which is read in blocks smaller than a shard
    run(tmp_path / "pair", tmp_path / "m", to="mds")
    found = parse(tmp_path / "m")
    assert flatten(found) == documents_of(ours(lab, "token-list"))
    sizes = [p.stat().st_size for p in sorted((tmp_path / "m").glob("*.mds"))]
    assert all(bytes_ <= size or len(part) == 1 for bytes_, part in zip(sizes, found, strict=True))
    for bytes_, following in zip(sizes, found[1:], strict=False):  # each shard is as full as it can be
        length = len(following[0])
        assert bytes_ + 4 + 4 + (2 if length < 256 else 3) + 2 * length > size
    run(tmp_path / "m", tmp_path / "back", to="packed-sequence_length=16")
    assert digest(tmp_path / "back") == digest(ours(lab))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(2, 99), max_size=300), min_size=1, max_size=20),
    st.sampled_from(["ndarray:uint16", "ndarray:int64", "bytes"]),
    st.sampled_from([None, "zstd"]),
    st.integers(300, 3000),
    st.integers(1, 600),
)
def test_any_documents_are_written_and_read(documents, encoding, compression, shard_bytes, block):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        folder = Path(name)
        patched.setattr(shards, "SHARD_BYTES", shard_bytes)
        patched.setattr(reframe, "BLOCK_TOKENS", block)
        parts = [documents[:3], documents[3:]]
        source = write_tokens(folder / "theirs", parts, encoding, compression=compression)
        run(source, folder / "m", to="mds", bos="keep", **KNOWN)
        assert flatten(parse(folder / "m")) == [[0, *ids] for ids in documents]
        run(source, folder / "plain", to="mds", **KNOWN)  # without the BOS that the source has not
        assert flatten(parse(folder / "plain")) == documents
        run(folder / "m", folder / "s", to="token-list")
        assert documents_of(folder / "s") == [[0, *ids] for ids in documents]


def test_a_document_beyond_the_offsets_is_refused():
    assert shards.pack_offsets(np.array([1 << 31, (1 << 31) - 17]), 0, "x").tolist()[-1] == (1 << 32) - 1
    with pytest.raises(UserError, match="a document is too long for x"):
        shards.pack_offsets(np.array([1 << 31, (1 << 31) - 16]), 0, "x")


# ---------------------------------------------------------------------------------------- compression, hashes, folders


def test_compressed_shards_are_read(tmp_path):
    parts = [[[5, 6], [7]], [[8], [9]]]
    source = write_tokens(tmp_path / "m", parts, compression="zstd:7", hashes=["sha256", "xxh3_64"])
    run(source, tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 6], [0, 7], [0, 8], [0, 9]]


def test_a_shard_that_was_decompressed_in_the_folder_is_read(tmp_path):
    source = write_tokens(tmp_path / "m", [[[5, 6], [7]], [[8], [9]]], compression="zstd")
    zipped = source / "shard.00001.mds.zstd"
    (source / "shard.00001.mds").write_bytes(zstandard.ZstdDecompressor().decompress(zipped.read_bytes()))
    zipped.unlink()
    run(source, tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 6], [0, 7], [0, 8], [0, 9]]


@pytest.mark.parametrize("name", ["gz", "br:11", "snappy", "bz2"])
def test_another_compression_is_refused(tmp_path, name):
    source = write_tokens(tmp_path / "m", [[[5, 6]]], compression=name)
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert "a compression that is not read here" in text and name in text and "shard.00000.mds.zstd" in text


@pytest.mark.parametrize("change", ["truncated", "no zstd", "smaller", "larger", "huge"])
def test_broken_compressed_shards_are_refused(tmp_path, change):
    source = write_tokens(tmp_path / "m", [[[5, 6] * 99]], compression="zstd")
    file, index = source / "shard.00000.mds.zstd", json.loads((source / "index.json").read_text())
    (entry,) = index["shards"]
    data = file.read_bytes()
    if change in ("smaller", "larger", "huge"):
        entry["raw_data"]["bytes"] += {"smaller": -1, "larger": 1, "huge": 1 << 50}[change]
    else:
        file.write_bytes(data[:-9] if change == "truncated" else b"x" * len(data))
        entry["zip_data"]["bytes"] = file.stat().st_size
    (source / "index.json").write_text(json.dumps(index))
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert file.name in text and "next" in text
    assert ("is not zstd data" if change == "no zstd" else "another size when it is decompressed") in text


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_64"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_hash_of_the_index_is_verified(tmp_path, algorithm, compression):
    source = write_tokens(tmp_path / "m", [[[5, 6], [7]]], hashes=[algorithm], compression=compression)
    run(source, tmp_path / "ok", to="token-list", **KNOWN)
    for kind in ["raw_data", *(["zip_data"] if compression else [])]:
        index = json.loads((source / "index.json").read_text())
        index["shards"][0][kind]["hashes"][algorithm] = "0" * 16
        (tmp_path / kind).mkdir()
        for file in source.iterdir():
            (tmp_path / kind / file.name).write_bytes(file.read_bytes())
        (tmp_path / kind / "index.json").write_text(json.dumps(index))
        text = refused(tmp_path / kind, tmp_path / "s", to="token-list", **KNOWN)
        assert "has changed" in text and "shard.00000.mds" in text and algorithm in text


def test_unknown_hashes_are_ignored(tmp_path):
    source = write_tokens(tmp_path / "m", [[[5, 6], [7]]], hashes=["md5"])
    run(source, tmp_path / "s", to="token-list", **KNOWN)


def test_a_changed_id_of_a_folder_of_ours_is_found(lab, tmp_path):
    run(ours(lab), tmp_path / "m", to="mds")
    data = bytearray((tmp_path / "m/shard.00000.mds").read_bytes())
    data[-1] ^= 1
    (tmp_path / "m/shard.00000.mds").write_bytes(data)
    assert "has changed" in refused(tmp_path / "m", tmp_path / "s", to="token-list")


def test_a_merged_index_of_folders_is_read(tmp_path):
    """As streaming's `merge_index` writes it: shards of several folders, with equal names."""
    (tmp_path / "m").mkdir()
    entries = []
    for number, documents in enumerate([[[5, 6]], [[7], [8]]]):
        write_tokens(tmp_path / f"m/{number}", [documents])
        (entry,) = json.loads((tmp_path / f"m/{number}/index.json").read_text())["shards"]
        entry["raw_data"]["basename"] = f"{number}/shard.00000.mds"
        entries.append(entry)
    (tmp_path / "m/index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    run(tmp_path / "m", tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 6], [0, 7], [0, 8]]
    files = json.loads((tmp_path / "s/manifest.json").read_text())["converted_from"]["files"]
    assert [file["name"] for file in files] == ["index.json", "0/shard.00000.mds", "1/shard.00000.mds"]
    assert len({file["sha256"] for file in files}) == 3
    text = refused(tmp_path / "s", tmp_path / "m", to="mds", force=True)  # their folders may hold other files
    assert "more than an MDS folder" in text


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: b""])
def test_a_shard_of_another_size_than_the_index_says_is_refused(tmp_path, change):
    source = write_tokens(tmp_path / "m", [[[5, 6], [7]], [[8], [9]]])
    shard = source / "shard.00001.mds"
    shard.write_bytes(change(shard.read_bytes()))
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert "another size than its index says" in text and shard.name in text and "expected" in text
    shard.unlink()
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert "is missing" in text and shard.name in text


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, 3, "another number of items"),
        (4, 12, "outside of the file"),
        (8, 1, "offsets that decrease"),
        (8, 1 << 20, "offsets that decrease"),
        (12, 1 << 20, "outside of the file"),
        (8, -2, "ends inside the sizes of its columns"),  # a second sample of two bytes
        (-18, 7, "sizes of its columns"),  # the size of the first sample's column
        (-18, 1 << 31, "sizes of its columns"),
    ],
)
def test_a_wrong_number_of_a_shard_is_refused(tmp_path, at, value, words):
    source = write_tokens(tmp_path / "m", [[[5, 6], [7]]])  # samples of 4 + 2 + 4 and 4 + 2 + 2 bytes
    data = bytearray((source / "shard.00000.mds").read_bytes())
    at %= len(data)
    data[at : at + 4] = (value if value >= 0 else len(data) + value).to_bytes(4, "little")
    (source / "shard.00000.mds").write_bytes(data)
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert words in text and "shard.00000.mds" in text and "next" in text


@pytest.mark.parametrize(("at", "value"), [(14, 8), (14, 0), (14, 5), (14, 7), (13, 3), (13, 1), (4, 1)])
def test_a_wrong_byte_of_an_array_is_refused(tmp_path, at, value):
    """Of the first sample the byte of the axes is the 14th from the end, and the number of ids the 13th."""
    source = write_tokens(tmp_path / "m", [[[5, 6], [7]]])
    data = bytearray((source / "shard.00000.mds").read_bytes())
    assert data[-14:-12] == b"\x04\x02" and data[-4:-2] == b"\x04\x01"
    data[-at] = value
    (source / "shard.00000.mds").write_bytes(data)
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert "one-dimensional array of uint16 in the column tokens" in text and "shard.00000.mds" in text


@pytest.mark.parametrize("values", [[], [7], [4], [4, 1], [5, 1]])
def test_an_array_that_ends_early_is_refused(tmp_path, values):
    source = write_tokens(tmp_path / "m", [[values]], "bytes:u1", column_encodings=["ndarray:uint16"])
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert "one-dimensional array of uint16 in the column tokens" in text and "shard.00000.mds" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 1}, "another number of items"),
        ({"samples": -1}, "ends inside its offsets"),
        ({"samples": 10**12}, "ends inside its offsets"),
        ({"samples": None}, "expected content"),
        ({"version": 1}, "not an MDS shard"),
        ({"format": "csv"}, "not an MDS shard"),
        ({"column_sizes": [4]}, "sizes of its columns"),
        ({"column_sizes": []}, "expected content"),
        ({"column_names": [5]}, "expected content"),
        ({"raw_data": None}, "expected content"),
        ({"raw_data": {"basename": "../m/shard.00000.mds", "bytes": 100}}, "expected content"),
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": "100"}}, "expected content"),
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": 100}}, "another size"),
        ({"zip_data": {"basename": "x", "bytes": 5}}, "expected content"),
    ],
)
def test_a_wrong_entry_of_the_index_is_refused(tmp_path, change, words):
    source = write_tokens(tmp_path / "m", [[[5, 6], [7]]], **change)
    text = refused(source, tmp_path / "s", to="token-list", from_format="mds", **KNOWN)
    assert words in text and "next" in text and ("index.json" in text or "shard.00000.mds" in text)


def test_a_broken_or_missing_index_is_refused(tmp_path):
    source = write_tokens(tmp_path / "m", [[[5, 6], [7]]])
    for text in ("{", "[]", "{}", '{"shards": {}}', '{"shards": [5]}', '{"shards": [{"format": "json"}]}'):
        (source / "index.json").write_text(text)
        assert "format of the source is unknown" in refused(source, tmp_path / "s", to="packed", **KNOWN)
        assert "index" in refused(source, tmp_path / "s", to="token-list", from_format="mds", **KNOWN)
    (source / "index.json").unlink()
    assert "is missing" in refused(source, tmp_path / "s", to="token-list", from_format="mds", **KNOWN)
    (source / "index.json").write_text('{"shards": []}')
    assert "holds no documents" in refused(source, tmp_path / "s", to="token-list", **KNOWN)


def test_an_id_outside_of_the_vocabulary_names_its_shard_and_document(tmp_path):
    for wrong in (100, -1, 2**40):
        source = write_tokens(tmp_path / f"m{wrong}", [[[5, 6], [7]], [[8], [9, wrong]]], "ndarray:int64")
        text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
        assert (
            f"found     id {wrong}" in text and "shard.00001.mds" in text and "document  3 of 4, token 1 of 2" in text
        )


def test_a_folder_with_other_files_is_not_replaced(lab, tmp_path):
    run(ours(lab), tmp_path / "m", to="mds")
    run(ours(lab), tmp_path / "m", to="mds", force=True)
    (tmp_path / "m/notes.txt").write_text("precious")
    text = refused(ours(lab), tmp_path / "m", to="mds", force=True)
    assert "more than an MDS folder" in text and "notes.txt" in text


# ---------------------------------------------------------------------------------------------------- streaming itself


@pytest.mark.experiment
@pytest.mark.slow(55)
@pytest.mark.parametrize("kind", ["StreamingDataset", "LocalDataset"])
def test_streaming_reads_what_is_written(lab, tmp_path, monkeypatch, peers, kind):
    monkeypatch.setattr(shards, "SHARD_BYTES", 900)
    source = write_hf(tmp_path / "hf", input_ids=[[0, *[70_000] * 300], [0, 6]])
    run(source, tmp_path / "int32", to="mds", vocabulary_size=1 << 17, bos_id=0)
    assert peers.run(PEER, do="read", folder=str(tmp_path / "int32"), kind=kind) == flatten(parse(tmp_path / "int32"))
    run(ours(lab), tmp_path / "uint16", to="mds")
    assert len(parse(tmp_path / "uint16")) > 3
    found = peers.run(PEER, do="read", folder=str(tmp_path / "uint16"), kind=kind)
    assert found == documents_of(ours(lab, "token-list"))
    run(ours(lab), tmp_path / "empty", to="mds", bos="drop")  # MDSWriter writes no empty arrays, but they are read
    documents = peers.run(PEER, do="read", folder=str(tmp_path / "empty"), kind=kind)
    assert documents == [ids[1:] for ids in found] and [] in documents


@pytest.mark.experiment
@pytest.mark.slow(55)
@pytest.mark.parametrize(
    ("columns", "dtype", "options"),
    [
        ({"tokens": "ndarray:uint16", "number": "int", "uid": "str"}, "uint16", {"hashes": ["sha256", "xxh3_64"]}),
        ({"tokens": "ndarray:int32"}, "int32", {"compression": "zstd", "hashes": ["xxh3_64"]}),
        ({"tokens": "bytes"}, "int64", {"compression": "zstd:19"}),
        ({"tokens": "ndarray:uint32"}, "uint32", {}),
    ],
)
def test_what_streaming_writes_is_read(lab, tmp_path, peers, columns, dtype, options):
    documents = documents_of(ours(lab, "token-list"))
    options = {"columns": columns, "dtype": dtype, "size_limit": 2000, **options}
    peers.run(PEER, do="write", folder=str(tmp_path / "m"), documents=documents, **options)
    assert len(list((tmp_path / "m").glob("shard.*"))) > 3
    assert documents_in(tmp_path / "m", tmp_path / "s") == documents
    run(tmp_path / "m", tmp_path / "back", to="token-list", tokenizer=str(lab.tokenizer))
    assert digest(tmp_path / "back") == digest(ours(lab))
