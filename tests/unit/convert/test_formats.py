"""What is special to one format: the bytes of its files, its own kinds of damage; BOS and ends put
on and taken off.
"""

import bz2
import gzip
import io
import json
import lzma
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.convert.conftest import (
    KNOWN,
    digest,
    documents_of,
    refused,
    run,
    write_hf,
    write_megatron,
)
from tests.unit.convert.layouts import flatten, parse, write_litdata, write_mds, write_tokens
from tokenscale.base.errors import UserError
from tokenscale.cli.main import main
from tokenscale.data.stores.documents import Chunk
from tokenscale.data.stores.foreign import reframe, shards


def test_the_bytes_of_a_megatron_pair(tmp_path):
    run(
        write_hf(tmp_path / "hf", input_ids=[[0, 7, 8], [0, 9]]),
        tmp_path / "m",
        to="megatron",
        **KNOWN,
    )
    assert (tmp_path / "m.bin").read_bytes() == bytes.fromhex("0000 0700 0800 0000 0900")
    assert (tmp_path / "m.idx").read_bytes() == bytes.fromhex(
        "4d4d494449445800 00"  # MMIDIDX, two zeros
        "0100000000000000 08"  # version 1, uint16
        "0200000000000000 0300000000000000"  # two sequences, three document bounds
        "03000000 02000000"  # lengths
        "0000000000000000 0600000000000000"  # where they begin
        "0000000000000000 0100000000000000 0200000000000000"  # documents
    )


@pytest.mark.parametrize(
    ("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")]
)
def test_every_integer_type_of_megatron_is_read_and_sequences_join_to_documents(
    tmp_path, code, dtype
):
    source = write_megatron(
        tmp_path / "m", [[5], [6, 7], [8], [9, 1]], code, dtype, bounds=[0, 2, 2, 4]
    )
    for path in (source, tmp_path / "m.bin", tmp_path / "m.idx"):
        run(path, tmp_path / f"s{path.suffix}", to="token-list", **KNOWN)
        assert documents_of(tmp_path / f"s{path.suffix}") == [[0, 5, 6, 7], [0], [0, 8, 9]]


def test_every_truncation_of_an_index_half_a_pair_and_a_multimodal_one_are_refused(tmp_path):
    write_megatron(tmp_path / "m", [[5, 6], [7]])
    whole = (tmp_path / "m.idx").read_bytes()
    for length in range(34 + 2 * 12 + 3 * 8):
        (tmp_path / "m.idx").write_bytes(whole[:length])
        text = refused(
            tmp_path / "m", tmp_path / "s", to="token-list", from_format="megatron", **KNOWN
        )
        assert all(word in text for word in ("m.idx", "found", "expected", "next")), length
    (tmp_path / "m.idx").write_bytes(whole + b"\0\1")
    assert "multimodal" in refused(tmp_path / "m", tmp_path / "s", to="token-list", **KNOWN)
    (tmp_path / "m.bin").unlink()
    assert "a file of the pair is missing" in refused(
        tmp_path / "m", tmp_path / "s", to="token-list", **KNOWN
    )


@pytest.mark.parametrize(("size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_nanogpt_ids_are_uint16_where_they_fit(tmp_path, size, dtype):
    source = write_hf(tmp_path / "hf", input_ids=[[0, size - 1], [0, 3, 1], [0]])
    told = run(source, tmp_path / "n.bin", to="nanogpt", vocabulary_size=size, bos_id=0, eos_id=1)
    assert np.fromfile(tmp_path / "n.bin", dtype).tolist() == [size - 1, 1, 3, 1, 1]
    assert ("uint32: nanoGPT's train.py reads uint16" in told) == (dtype == "<u4")
    run(tmp_path / "n.bin", tmp_path / "s", to="token-list")
    assert documents_of(tmp_path / "s") == [[0, size - 1], [0, 3], [0]]


def test_an_end_inside_a_document_or_none_cannot_leave_for_nanogpt(tmp_path):
    run(
        write_hf(tmp_path / "hf", tokens=[[5, 6], [7, 9, 8]]),
        tmp_path / "s",
        to="token-list",
        **KNOWN,
    )
    text = refused(tmp_path / "s", tmp_path / "n.bin", to="nanogpt", document_end=9)
    assert "lies inside one" in text and "1 of 2" in text
    assert "outside the vocabulary" in refused(
        tmp_path / "s", tmp_path / "n.bin", to="nanogpt", document_end=100
    )
    run(tmp_path / "hf", tmp_path / "t", to="token-list", **{**KNOWN, "eos_id": None})
    assert "--document-end ID" in refused(tmp_path / "t", tmp_path / "n.bin", to="nanogpt")
    run(tmp_path / "t", tmp_path / "n.bin", to="nanogpt", document_end=99)
    run(tmp_path / "n.bin", tmp_path / "back", to="token-list")
    assert digest(tmp_path / "back") == digest(tmp_path / "t")


def test_a_stream_that_is_cut_is_refused_at_every_length_and_a_folder_of_splits_names_them(
    tmp_path,
):
    folder = write_hf(tmp_path / "hf", input_ids=[[5, 6], [7], [8], [9, 9, 9], [8]])
    file = folder / "data-00001-of-00002.arrow"
    whole = file.read_bytes()
    for length in range(0, len(whole), 8):
        file.write_bytes(whole[:length])
        text = refused(folder, tmp_path / "s", to="token-list", **KNOWN)
        assert "not a complete Arrow stream" in text and file.name in text
    file.unlink()
    assert file.name in refused(folder, tmp_path / "s", to="token-list", **KNOWN)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert "train, test" in refused(tmp_path / "d", tmp_path / "s", to="token-list", **KNOWN)


def test_rows_that_lead_out_of_an_arrow_file_are_refused(tmp_path):
    folder = write_hf(tmp_path / "hf", input_ids=[[5, 6], [7], [8], [9, 9, 9], [8]])
    file = next(
        file
        for file in folder.glob("*.arrow")
        if np.int32([0, 2, 3]).tobytes() in file.read_bytes()
    )
    for ends in ([0, 2, 10**6], [0, -4, 3], [7, 2, 3]):
        whole = file.read_bytes()
        file.write_bytes(whole.replace(np.int32([0, 2, 3]).tobytes(), np.int32(ends).tobytes()))
        assert "hf" in refused(folder, tmp_path / "s", to="token-list", **KNOWN)
        file.write_bytes(whole)


@pytest.mark.parametrize("length", [254, 255, 256, 257, 65_535, 65_536])
def test_the_number_of_ids_has_the_smallest_type(tmp_path, length):
    ids = [0, *[5] * (length - 1)]
    run(write_hf(tmp_path / "hf", input_ids=[ids, [0]]), tmp_path / "m", to="mds", **KNOWN)
    assert parse("mds", tmp_path / "m") == ("<u2", [[ids, [0]]])
    run(tmp_path / "m", tmp_path / "s", to="token-list")
    assert documents_of(tmp_path / "s") == [ids, [0]]


def test_a_document_beyond_the_offsets_is_refused():
    assert (
        shards.pack_offsets(np.array([1 << 31, (1 << 31) - 17]), 0, "x").tolist()[-1]
        == (1 << 32) - 1
    )
    with pytest.raises(UserError, match="a document is too long for x"):
        shards.pack_offsets(np.array([1 << 31, (1 << 31) - 16]), 0, "x")


def test_a_shard_that_was_decompressed_in_the_folder_is_read(tmp_path):
    source = write_tokens(tmp_path / "m", [[[5, 6], [7]], [[8], [9]]], compression="zstd")
    zipped = source / "shard.00001.mds.zstd"
    (source / "shard.00001.mds").write_bytes(
        zstandard.ZstdDecompressor().decompress(zipped.read_bytes())
    )
    zipped.unlink()
    run(source, tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 6], [0, 7], [0, 8], [0, 9]]


@pytest.mark.parametrize(
    ("bytes_", "change", "words"),
    [
        (-1, None, "another size"),
        (1, None, "another size"),
        (1 << 50, None, "another size"),
        (0, lambda data: data[:-9], "damaged"),
        (0, lambda data: b"x" * len(data), "another compression"),
    ],
)
def test_broken_compressed_shards_are_refused(tmp_path, bytes_, change, words):
    source = write_tokens(tmp_path / "m", [[[5, 6] * 99]], compression="zstd")
    file = source / "shard.00000.mds.zstd"
    index = json.loads((source / "index.json").read_text())
    if change:
        file.write_bytes(change(file.read_bytes()))
    index["shards"][0]["raw_data"]["bytes"] += bytes_
    index["shards"][0]["zip_data"]["bytes"] = file.stat().st_size
    (source / "index.json").write_text(json.dumps(index))
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert file.name in text and "next" in text and words in text


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_64"])
@pytest.mark.parametrize("kind", ["raw_data", "zip_data"])
def test_a_hash_of_the_index_is_verified(tmp_path, algorithm, kind):
    source = write_tokens(tmp_path / "m", [[[5, 6], [7]]], hashes=[algorithm], compression="zstd")
    run(source, tmp_path / "ok", to="token-list", **KNOWN)
    index = json.loads((source / "index.json").read_text())
    index["shards"][0][kind]["hashes"][algorithm] = "0" * 16
    (source / "index.json").write_text(json.dumps(index))
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert "has changed" in text and "shard.00000.mds" in text and algorithm in text


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
    assert [file["name"] for file in files] == [
        "index.json",
        "0/shard.00000.mds",
        "1/shard.00000.mds",
    ]
    assert len({file["sha256"] for file in files}) == 3
    # their folders may hold other files
    text = refused(tmp_path / "s", tmp_path / "m", to="mds", force=True)
    assert "more than an MDS folder" in text


DOCUMENTS = st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=8)


def flat(documents):
    return np.array(flatten(documents), np.int64), np.array(list(map(len, documents)), np.int64)


@given(DOCUMENTS, st.sampled_from([0, 1, None]))
def test_documents_are_trimmed_as_python_lists_are(documents, end):
    """BOS 0; the end is 1, or BOS itself, or there is none."""
    ids, lengths = flat(documents)
    first, last = reframe.find_texts(ids, lengths, 0, end)
    for document, start, a, b in zip(
        documents, np.cumsum(lengths) - lengths, first, last, strict=True
    ):
        right = list(document)
        while right and right[-1] == end:
            right.pop()
        while right and right[0] == 0:
            right.pop(0)
        assert ids[a:b].tolist() == right and start <= a <= b


@given(DOCUMENTS, st.booleans(), st.sampled_from([1, None]))
def test_documents_leave_as_python_lists_do(documents, keep_bos, end):
    documents = [[0, *document] for document in documents]
    ids, lengths = flat(documents)
    count = reframe.ExportCounts()
    found = reframe.export_chunk(
        Chunk(ids.astype(np.int32), lengths), reframe.ExportFraming(keep_bos, end), count
    )
    right = [d if keep_bos else d[1:] for d in documents]
    added = [end is not None and d[-1:] != [end] for d in right]
    right = [d + [end] * more for d, more in zip(right, added, strict=True)]
    assert [d.tolist() for d in found.documents()] == right
    assert (count.document_ends_added, count.tokens) == (sum(added), sum(map(len, right)))


def nanogpt(data, dtype="<u2"):
    return lambda path: (path.write_bytes(np.array(data, dtype).tobytes()), path)[1]


def hf(**columns):
    return lambda path: write_hf(path, **columns)


def litdata(*chunks, **options):
    return lambda path: write_litdata(path, chunks, **options)


def mds(*parts, encoding="ndarray:uint16", **options):
    return lambda path: write_tokens(path, parts, encoding, **options)


def columns(chosen=None, **encodings):
    sample = {
        name: "x" if kind == "str" else [6 - (name == chosen)] for name, kind in encodings.items()
    }
    return lambda path: write_mds(path, [[sample]], encodings)


def mixed(encoding):
    """Two MDS shards and an empty one, whose ids lie between other columns."""
    parts = [
        [{"tokens": i, "a": "x" * len(i), "b": 5, "uid": "é"} for i in ids]
        for ids in ([[5, 6], [7, 1]], [], LAST)
    ]
    return lambda path: write_mds(
        path, parts, {"a": "str", "b": "int", "tokens": encoding, "uid": "str"}
    )


LAST = [[8] * 9, [9]]
LISTS = [
    pa.list_(pa.int64()),
    pa.large_list(pa.int32()),
    pa.list_(pa.uint16()),
    pa.list_(pa.int32(), 3),
]
INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
#: code of litdata's tensors and arrays → dtype
TENSORS = {
    11: "u1",
    12: "i1",
    13: "<i2",
    14: "<i2",
    15: "<i4",
    16: "<i4",
    17: "<i8",
    18: "<i8",
    20: "<u2",
}
ARRAYS = dict(enumerate(["i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8"]))
FORMS = [
    (f"no_header_{kind}:{n}", d)
    for kind, of in (("tensor", TENSORS), ("numpy", ARRAYS))
    for n, d in of.items()
]
GPT2 = {"vocabulary_size": 50257, "bos_id": 50256, "eos_id": 50256}
TWO = [[5, 6], [7]], [[8], [9]]
#: source, flags, its documents, parts of what is said
READ = [
    *(
        (
            hf(text=["a"] * 3, tokens=pa.array([[0, 5, 6], [0, 7, 1], [0, 8, 9]], kind)),
            {},
            [[5, 6], [7], [8, 9]],
            [],
        )
        for kind in LISTS
    ),
    # padding is left out by its mask and never by its id
    (
        hf(input_ids=[[0, 5, 3, 3], [0, 3, 1, 3]], attention_mask=[[1, 1, 1, 0]] * 2),
        {},
        [[5, 3], [3]],
        ["its attention mask: 2 ids"],
    ),
    (
        hf(input_ids=[[0, 0, 5], [0, 6, 1, 1]]),
        {},
        [[5], [6]],
        ["3 of BOS 0 (2 documents)", "2 of id 1 (2 documents)"],
    ),
    *(
        (
            litdata([[5, 6], [7, 1]], [[], [8]], form=form, dtype=dtype),
            {},
            [[5, 6], [7], [], [8]],
            [f"ids of {np.dtype(dtype).name}"],
        )
        for form, dtype in FORMS
    ),
    *(
        (mixed(encoding), {}, [[5, 6], [7], *LAST], [])
        for encoding in [*(f"ndarray:{i}" for i in INTEGERS), "bytes"]
    ),
    (mds([[5, 6, 7], [8, 9, 1]], encoding="ndarray:int32:3"), {}, [[5, 6, 7], [8, 9]], []),
    (
        mds([[5, 6], [7, 8, 9, 4]], encoding="bytes:<i4"),
        {"dtype": "int32"},
        [[5, 6], [7, 8, 9, 4]],
        [],
    ),
    (mds([[5, 6]]), {"dtype": "uint16"}, [[5, 6]], []),
    (
        mds(*TWO, compression="zstd:7", hashes=["sha256", "xxh3_64"]),
        {},
        [[5, 6], [7], [8], [9]],
        [],
    ),
    (mds(*TWO, hashes=["md5"]), {}, [[5, 6], [7], [8], [9]], []),
    (columns("tokens", tokens="ndarray:uint16", input_ids="ndarray:uint16"), {}, [[5]], []),
    (
        columns("input_ids", tokens="ndarray:uint16", input_ids="ndarray:uint16"),
        {"column": "input_ids"},
        [[5]],
        [],
    ),
    (columns("input_ids", other="ndarray:uint16", input_ids="bytes"), {}, [[5]], []),
    (columns("other", other="ndarray:int64", name="str"), {}, [[5]], []),
    (columns("some", some="bytes", name="str"), {"column": "some"}, [[5]], []),
    # as prepare.py of nanoGPT writes it: BOS, EOS and the end of a document are one id
    (
        nanogpt([5, 6, 50256, 7, 50256, 50256]),
        GPT2,
        [[5, 6], [7], []],
        ["3 of id 50256", "documents without text tokens: 1"],
    ),
    (nanogpt([1, 5, 6, 1, 7]), {}, [[5, 6], [7]], ["before each document"]),
]


@pytest.mark.parametrize(("write", "settings", "documents", "said"), READ)
def test_every_kind_of_source_is_read(tmp_path, write, settings, documents, said):
    settings = {**KNOWN, **settings}
    told = run(write(tmp_path / "x.bin"), tmp_path / "s", to="token-list", **settings)
    assert documents_of(tmp_path / "s") == [[settings["bos_id"], *ids] for ids in documents]
    assert all(part in told for part in said), told


NO_LISTS = ["holds no lists of ids", "index.json"]
#: source, flags, parts of the message
REFUSED = [
    (hf(input_ids=[[0, 5, 0, 6], [0, 7]]), {}, ["BOS lies inside"]),
    (hf(input_ids=[[0, 5, 1, 6], [0, 7]]), {}, ["an id that ends documents lies inside"]),
    (hf(input_ids=[[0, 5], [7]]), {}, ["some documents begin with BOS and others do not"]),
    (hf(input_ids=[[5], None]), {}, ["holds a null"]),
    (hf(input_ids=[[5], [None]]), {}, ["holds a null"]),
    (hf(input_ids=[[0.5], [1.0]]), {}, ["no lists of ids"]),
    (hf(input_ids=[5, 6]), {}, ["no lists of ids"]),
    (hf(text=["a", "b"]), {}, ["no column of ids"]),
    (hf(ids=[[5], [6]]), {"column": "id"}, ["did you mean 'ids'"]),
    (hf(input_ids=[[5], [6]], attention_mask=[[1], [1, 1]]), {}, ["other lengths"]),
    (hf(input_ids=[[5], [6]]), {"eos": True, "eos_id": None}, ["no EOS"]),
    (hf(input_ids=[[5], [6]]), {"eos_id": 100}, ["--eos-id is outside"]),
    (hf(input_ids=[[5], [6]]), {"dtype": "uint16"}, ["--dtype does not apply from hf-datasets"]),
    (hf(input_ids=[[5], [6]]), {"bos": "drop"}, ["--bos does not apply"]),
    (hf(input_ids=[[5], [6]]), {"sequence_length": 8}, ["no rows of one length"]),
    (hf(input_ids=[[5], [6]]), {"tokenizer": "nowhere"}, ["tokenizer 'nowhere'"]),
    (litdata([[5, 6], [7]], compression="zstd"), {}, ["compression zstd", "index.json"]),
    (litdata([[5, 6], [7]], encryption={"level": "chunk"}), {}, ["encryption", "index.json"]),
    (litdata([[5, 6], [7]], item_loader="PyTreeLoader"), {}, NO_LISTS),
    *(
        (litdata([[5, 6], [7]], data_format=form), {}, NO_LISTS)
        for form in (
            ["no_header_tensor:1"],
            ["tensor:18"],
            ["int"],
            ["no_header_tensor:18", "int"],
            [],
        )
    ),
    (litdata([[5, 6], [7]], data_format=None), {}, ["expected content", "index.json"]),
    (
        columns(a="ndarray:uint16", b="ndarray:uint16"),
        {},
        ["no column of ids, or several", "index.json"],
    ),
    (columns(text="str"), {}, ["no column of ids", "index.json"]),
    (columns(some="bytes"), {}, ["no column of ids", "index.json"]),
    (columns(tokens="str"), {}, NO_LISTS),
    (columns(tokens="ndarray:uint16", name="str"), {"column": "name"}, NO_LISTS),
    (
        columns(tokens="ndarray:uint16"),
        {"column": "tokns"},
        ["did you mean 'tokens'", "index.json"],
    ),
    (
        columns(tokens="ndarray:uint16", attention_mask="ndarray:uint16"),
        {},
        ["padded", "index.json"],
    ),
    *(
        (mds([[5, 6]], column_encodings=[other]), {}, [*NO_LISTS, other])
        for other in ("ndarray", "ndarray:float32", "pkl", "ndarray:int32:2,3", "json")
    ),
    *(
        (
            mds([[5, 6]], compression=name),
            {},
            ["a compression that is not read here", name, "shard.00000.mds.zstd"],
        )
        for name in ("gz", "br:11", "snappy", "bz2")
    ),
    *(
        (
            mds([values], encoding="bytes:u1", column_encodings=["ndarray:uint16"]),
            {},
            ["one-dimensional array of uint16 in the column tokens", "shard.00000.mds"],
        )
        for values in ([], [7], [4], [4, 1], [5, 1])
    ),
    (
        mds([[5, 6], [7, 8, 9, 4]], encoding="bytes:<i4"),
        {},
        ["outside the vocabulary", "as int64: --dtype int32"],
    ),
    (
        mds([[5, 6], [7]], encoding="bytes:<i4"),
        {},
        ["whole ids of int64", "--dtype int32", "1 of 2 in this shard"],
    ),
    (mds([[5, 6]]), {"dtype": "int32"}, ["--dtype contradicts"]),
    (nanogpt(list(b"\x05\x00\x01"), "u1"), {}, ["cut short"]),
    (nanogpt([]), {}, ["cut short"]),
    (nanogpt([5, 1, 6]), {}, ["does not end"]),
    (nanogpt([5, 6, 6]), {}, ["no document ends"]),
    (nanogpt([5, 100, 1]), {}, ["outside the vocabulary"]),
    (nanogpt([5, 0, 6, 1]), {}, ["BOS lies inside a document"]),
    (nanogpt([5, 1]), {"eos_id": None}, ["which id ends a document"]),
    (nanogpt([5, 1]), {"document_end": 100}, ["--document-end is outside"]),
    (nanogpt([5, 1]), {"bos_id": 100}, ["--bos-id is outside"]),
    (nanogpt([5, 1]), {"vocabulary_size": None, "eos_id": None}, ["--vocabulary-size N"]),
    (nanogpt([20240520, 1, 5, 1], "<i4"), {"dtype": "uint32"}, ["has a header"]),
    (nanogpt([5, 1, 6, 1], "<u4"), {"dtype": "uint16"}, ["does not end"]),
]


@pytest.mark.parametrize(("write", "settings", "words"), REFUSED)
def test_what_a_source_contradicts_is_refused(tmp_path, write, settings, words):
    text = refused(
        write(tmp_path / "x.bin"), tmp_path / "s", **{"to": "token-list", **KNOWN, **settings}
    )
    assert all(word in text for word in words) and "next" in text, text


BEGINNINGS = {
    "HDF5": b"\x89HDF\r\n\x1a\n",
    "GGUF": b"GGUF\x03\0\0\0",
    "SQLite": b"SQLite format 3\0",
    "PNG": b"\x89PNG\r\n\x1a\n",
    "PDF": b"%PDF-1.7\n",
    "ELF": b"\x7fELF\x02\x01\x01\0",
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "HTML": b"<!DOCTYPE html>\n",
}


def write_foreign(kind: str, ids: np.ndarray) -> bytes:
    """The ids as the library of a kind of file writes them."""
    raw = ids.tobytes()
    target = io.BytesIO()
    table = pa.table({"ids": ids})
    if kind == "NumPy":
        np.save(target, ids)
    elif kind == "zip":
        np.savez(target, ids)
    elif kind == "Parquet":
        pq.write_table(table, target)
    elif kind == "Arrow":
        with pa.ipc.new_file(target, table.schema) as writer:
            writer.write_table(table)
    elif kind.startswith("pickle"):
        pickle.dump(ids.tolist(), target, protocol=int(kind[-1]))
    elif kind in BEGINNINGS:
        target.write(BEGINNINGS[kind] + raw)
    elif kind == "safetensors":
        target.write(safetensors.numpy.save({"ids": ids}))
    else:
        compress = {
            "gzip": gzip.compress,
            "zstd": zstandard.compress,
            "xz": lzma.compress,
            "bzip2": bz2.compress,
        }
        target.write(compress[kind](raw))
    return target.getvalue()


FOREIGN = ["NumPy", "zip", "Parquet", "Arrow", *(f"pickle, protocol {n}" for n in range(2, 6))]
FOREIGN += ["safetensors", "gzip", "zstd", "xz", "bzip2", *BEGINNINGS]


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("seed", range(4))
def test_a_header_of_another_format_is_not_read_as_ids(kind, seed, tmp_path, capsys):
    draw = np.random.default_rng(seed)
    ids = draw.integers(2, 50257, size=draw.integers(1, 400), dtype=np.uint16)
    content = write_foreign(kind, ids)
    # whole ids, and a document that ends
    (tmp_path / "ids.bin").write_bytes(content + b"\0" * (len(content) % 2) + b"\x01\x00")
    facts = [
        "--tokenizer-name",
        "x",
        "--vocabulary-size",
        "50257",
        "--bos-id",
        "0",
        "--eos-id",
        "1",
    ]
    words = ["convert", tmp_path / "ids.bin", tmp_path / "out", "--from", "nanogpt", *facts]
    assert main([*map(str, words), "--to", "token-list"]) == 2
    assert f"begins as a {kind.partition(',')[0]} file does" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
