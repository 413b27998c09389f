"""MDS folders: their bytes, encodings of ids, hashes, compression, inconsistent folders."""

import json
import struct

import numpy as np
import pytest
import zstandard

from tests.unit.convert.conftest import KNOWN, documents_of, refused, run, write_hf
from tests.unit.convert.layouts import parse, write_mds, write_tokens
from tokenscale.base.errors import UserError
from tokenscale.data.stores.foreign import shards


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


@pytest.mark.parametrize("length", [254, 255, 256, 257, 65_535, 65_536])
def test_the_number_of_ids_has_the_smallest_type(tmp_path, length):
    ids = [0, *[5] * (length - 1)]
    run(write_hf(tmp_path / "hf", input_ids=[ids, [0]]), tmp_path / "m", to="mds", **KNOWN)
    assert parse("mds", tmp_path / "m") == ("<u2", [[ids, [0]]])
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
    assert "whole ids of int64" in text and "--dtype int32" in text and "1 of 2 in this shard" in text


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
        ({"a": "ndarray:uint16", "b": "ndarray:uint16"}, None, "no column of ids, or several"),
        ({"text": "str"}, None, "no column of ids"),
        ({"some": "bytes"}, None, "no column of ids"),
        ({"tokens": "str"}, None, "holds no lists of ids"),
        ({"tokens": "ndarray:uint16", "name": "str"}, "name", "holds no lists of ids"),
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
    assert "holds no lists of ids" in text and encoding in text and "index.json" in text


def test_shards_with_other_columns_are_refused(tmp_path):
    source = write_tokens(tmp_path / "m", [[[5, 6]], [[7]]])
    index = json.loads((source / "index.json").read_text())
    index["shards"][1]["column_encodings"] = ["ndarray:int32"]
    (source / "index.json").write_text(json.dumps(index))
    assert "the same columns in all shards" in refused(source, tmp_path / "s", to="token-list", **KNOWN)


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
    said = {"truncated": "damaged", "no zstd": "another compression"}
    assert said.get(change, "another size") in text


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


@pytest.mark.parametrize("values", [[], [7], [4], [4, 1], [5, 1]])
def test_an_array_that_ends_early_is_refused(tmp_path, values):
    source = write_tokens(tmp_path / "m", [[values]], "bytes:u1", column_encodings=["ndarray:uint16"])
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert "one-dimensional array of uint16 in the column tokens" in text and "shard.00000.mds" in text
