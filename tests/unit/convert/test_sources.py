"""Sources as other programs write them: each kind is read, or refused with what is wrong."""

import numpy as np
import pyarrow as pa
import pytest

from tests.unit.convert.conftest import KNOWN, documents_of, refused, run, write_hf
from tests.unit.convert.layouts import write_litdata, write_mds, write_tokens


def nanogpt(data, dtype="<u2"):
    return lambda path: (path.write_bytes(np.array(data, dtype).tobytes()), path)[1]


def hf(**columns):
    return lambda path: write_hf(path, **columns)


def litdata(*chunks, **options):
    return lambda path: write_litdata(path, chunks, **options)


def mds(*parts, encoding="ndarray:uint16", **options):
    return lambda path: write_tokens(path, parts, encoding, **options)


def columns(chosen=None, **encodings):
    sample = {name: "x" if kind == "str" else [6 - (name == chosen)] for name, kind in encodings.items()}
    return lambda path: write_mds(path, [[sample]], encodings)


def mixed(encoding):
    """Two MDS shards and an empty one, whose ids lie between other columns."""
    parts = [
        [{"tokens": i, "a": "x" * len(i), "b": 5, "uid": "é"} for i in ids] for ids in ([[5, 6], [7, 1]], [], LAST)
    ]
    return lambda path: write_mds(path, parts, {"a": "str", "b": "int", "tokens": encoding, "uid": "str"})


LAST = [[8] * 9, [9]]
LISTS = [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint16()), pa.list_(pa.int32(), 3)]
INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
#: code of litdata's tensors and arrays → dtype
TENSORS = {11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"}
ARRAYS = dict(enumerate(["i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8"]))
FORMS = [(f"no_header_{kind}:{n}", d) for kind, of in (("tensor", TENSORS), ("numpy", ARRAYS)) for n, d in of.items()]
GPT2 = {"vocabulary_size": 50257, "bos_id": 50256, "eos_id": 50256}
TWO = [[5, 6], [7]], [[8], [9]]
#: source, flags, its documents, parts of what is said
READ = [
    *((hf(text=["a"] * 3, tokens=pa.array([[0, 5, 6], [0, 7, 1], [0, 8, 9]], kind)), {}, [[5, 6], [7], [8, 9]], [])
      for kind in LISTS),
    # padding is left out by its mask and never by its id
    (hf(input_ids=[[0, 5, 3, 3], [0, 3, 1, 3]], attention_mask=[[1, 1, 1, 0]] * 2), {}, [[5, 3], [3]],
     ["its attention mask: 2 ids"]),
    (hf(input_ids=[[0, 0, 5], [0, 6, 1, 1]]), {}, [[5], [6]], ["3 of BOS 0 (2 documents)", "2 of id 1 (2 documents)"]),
    *((litdata([[5, 6], [7, 1]], [[], [8]], form=form, dtype=dtype), {}, [[5, 6], [7], [], [8]],
       [f"ids of {np.dtype(dtype).name}"]) for form, dtype in FORMS),
    *((mixed(encoding), {}, [[5, 6], [7], *LAST], []) for encoding in [*(f"ndarray:{i}" for i in INTEGERS), "bytes"]),
    (mds([[5, 6, 7], [8, 9, 1]], encoding="ndarray:int32:3"), {}, [[5, 6, 7], [8, 9]], []),
    (mds([[5, 6], [7, 8, 9, 4]], encoding="bytes:<i4"), {"dtype": "int32"}, [[5, 6], [7, 8, 9, 4]], []),
    (mds([[5, 6]]), {"dtype": "uint16"}, [[5, 6]], []),
    (mds(*TWO, compression="zstd:7", hashes=["sha256", "xxh3_64"]), {}, [[5, 6], [7], [8], [9]], []),
    (mds(*TWO, hashes=["md5"]), {}, [[5, 6], [7], [8], [9]], []),
    (columns("tokens", tokens="ndarray:uint16", input_ids="ndarray:uint16"), {}, [[5]], []),
    (columns("input_ids", tokens="ndarray:uint16", input_ids="ndarray:uint16"), {"column": "input_ids"}, [[5]], []),
    (columns("input_ids", other="ndarray:uint16", input_ids="bytes"), {}, [[5]], []),
    (columns("other", other="ndarray:int64", name="str"), {}, [[5]], []),
    (columns("some", some="bytes", name="str"), {"column": "some"}, [[5]], []),
    # as prepare.py of nanoGPT writes it: BOS, EOS and the end of a document are one id
    (nanogpt([5, 6, 50256, 7, 50256, 50256]), GPT2, [[5, 6], [7], []],
     ["3 of id 50256", "documents without text tokens: 1"]),
    (nanogpt([1, 5, 6, 1, 7]), {}, [[5, 6], [7]], ["before each document"]),
]  # fmt: skip


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
    *((litdata([[5, 6], [7]], data_format=form), {}, NO_LISTS)
      for form in (["no_header_tensor:1"], ["tensor:18"], ["int"], ["no_header_tensor:18", "int"], [])),
    (litdata([[5, 6], [7]], data_format=None), {}, ["expected content", "index.json"]),
    (columns(a="ndarray:uint16", b="ndarray:uint16"), {}, ["no column of ids, or several", "index.json"]),
    (columns(text="str"), {}, ["no column of ids", "index.json"]),
    (columns(some="bytes"), {}, ["no column of ids", "index.json"]),
    (columns(tokens="str"), {}, NO_LISTS),
    (columns(tokens="ndarray:uint16", name="str"), {"column": "name"}, NO_LISTS),
    (columns(tokens="ndarray:uint16"), {"column": "tokns"}, ["did you mean 'tokens'", "index.json"]),
    (columns(tokens="ndarray:uint16", attention_mask="ndarray:uint16"), {}, ["padded", "index.json"]),
    *((mds([[5, 6]], column_encodings=[other]), {}, [*NO_LISTS, other])
      for other in ("ndarray", "ndarray:float32", "pkl", "ndarray:int32:2,3", "json")),
    *((mds([[5, 6]], compression=name), {}, ["a compression that is not read here", name, "shard.00000.mds.zstd"])
      for name in ("gz", "br:11", "snappy", "bz2")),
    *((mds([values], encoding="bytes:u1", column_encodings=["ndarray:uint16"]), {},
       ["one-dimensional array of uint16 in the column tokens", "shard.00000.mds"])
      for values in ([], [7], [4], [4, 1], [5, 1])),
    (mds([[5, 6], [7, 8, 9, 4]], encoding="bytes:<i4"), {}, ["outside the vocabulary", "as int64: --dtype int32"]),
    (mds([[5, 6], [7]], encoding="bytes:<i4"), {}, ["whole ids of int64", "--dtype int32", "1 of 2 in this shard"]),
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
]  # fmt: skip


@pytest.mark.parametrize(("write", "settings", "words"), REFUSED)
def test_what_a_source_contradicts_is_refused(tmp_path, write, settings, words):
    text = refused(write(tmp_path / "x.bin"), tmp_path / "s", **{"to": "token-list", **KNOWN, **settings})
    assert all(word in text for word in words) and "next" in text, text
