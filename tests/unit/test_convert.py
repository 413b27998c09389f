"""`convert`: our stores from and to the formats of others, and everything it refuses."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import HOSTILE, Lab, texts_around
from tokenscale.cli import main
from tokenscale.commands.convert import ConvertSettings, convert
from tokenscale.errors import UserError
from tokenscale.files import canonical_json
from tokenscale.formats import writing
from tokenscale.formats.documents import Chunk
from tokenscale.formats.foreign import hf_datasets, nanogpt, reframe
from tokenscale.formats.manifest import open_store, read_store_manifest
from tokenscale.formats.token_list import TokenListStore
from tokenscale.settings.data import StoreSettings

T = 16
TEXTS = [*HOSTILE, *texts_around(T)] * 3
FOREIGN = ["megatron", "nanogpt", "hf-datasets"]
KNOWN = {"vocabulary_size": 100, "bos_id": 0, "eos_id": 1}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"), TEXTS, vocabulary_size=262)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(reframe, "BLOCK_TOKENS", 50)
    monkeypatch.setattr(nanogpt, "BLOCK_TOKENS", 50)


def ours(lab, form="packed", eos=False):
    return lab.store(StoreSettings(form, **({"sequence_length": T} if form != "token-list" else {}), eos=eos))


def run(source, target, **settings):
    said = []
    convert(ConvertSettings(**settings), Path(source), Path(target), said.append)
    return "\n".join(said)


def refused(source, target, **settings):
    """The message; nothing may lie at the target that did not before."""
    before = sorted(Path(target).parent.rglob("*"))
    with pytest.raises(UserError) as error:
        run(source, target, **settings)
    assert sorted(Path(target).parent.rglob("*")) == before
    return str(error.value)


def digest(store):
    return read_store_manifest(store)["ids_digest"]["value"]


def documents_of(store):
    manifest = open_store(store, StoreSettings("token-list"))
    return [d.tolist() for c in TokenListStore(store, manifest).chunks(0, manifest["documents"]) for d in c.documents()]


def write_megatron(prefix, documents, code=8, dtype="<u2", bounds=None):
    """By hand, from the layout that Megatron-LM documents."""
    lengths = [len(d) for d in documents]
    starts = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    bounds = list(range(len(documents) + 1)) if bounds is None else bounds
    index = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + bytes([code])
    index += np.array([len(documents), len(bounds)], "<u8").tobytes()
    index += np.array(lengths, "<i4").tobytes() + starts.astype("<i8").tobytes() + np.array(bounds, "<i8").tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    prefix.with_name(prefix.name + ".bin").write_bytes(
        np.concatenate([np.array(d, dtype) for d in documents]).tobytes()
    )
    return prefix


def write_hf(folder, **columns):
    """As `Dataset.save_to_disk` does it, in two files."""
    folder.mkdir()
    table = pa.table(columns)
    half = table.num_rows // 2
    parts = [table.slice(0, half), table.slice(half)]
    names = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    for name, part in zip(names, parts, strict=True):
        with pa.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(part, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


# ---------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("eos", [False, True], ids=["bos", "bos+eos"])
@pytest.mark.parametrize("form", ["packed", "token-list"])
def test_a_store_comes_back_equal_through_each_format_and_no_flag_is_needed(
    lab, tmp_path, small_blocks, foreign, form, eos
):
    store = ours(lab, form, eos)
    run(store, tmp_path / "theirs.bin", to=foreign)
    run(tmp_path / "theirs.bin", tmp_path / "back", to="token-list")
    assert digest(tmp_path / "back") == digest(store)
    made, back = read_store_manifest(store), read_store_manifest(tmp_path / "back")
    same = ("tokenizer", "vocabulary_size", "bos_id", "eos_id", "padding", "documents", "tokens_in_documents")
    assert [made[name] for name in same] == [back[name] for name in same]
    assert back["options"]["eos"] is eos and back["converted_from"]["format"] == foreign


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("part", [1, 7, 1000])
def test_parts_of_a_source_are_read_from_any_document_on(lab, tmp_path, small_blocks, monkeypatch, foreign, part):
    """A store's writer asks for a part of the documents at a time, and goes on in the middle after an interruption."""
    run(ours(lab, "token-list"), tmp_path / "x.bin", to=foreign)
    monkeypatch.setattr(writing, "PART_DOCUMENTS", part)
    monkeypatch.setattr("tokenscale.formats.documents.GROUP_DOCUMENTS", part)
    run(tmp_path / "x.bin", tmp_path / "back", to="token-list")
    assert len(list((tmp_path / "back").glob("*.parquet"))) == -(-len(TEXTS) // part)
    assert documents_of(tmp_path / "back") == documents_of(ours(lab, "token-list"))


@pytest.mark.parametrize("middle", FOREIGN)
@pytest.mark.parametrize("foreign", FOREIGN)
def test_foreign_formats_become_one_another(lab, tmp_path, small_blocks, foreign, middle):
    store = ours(lab)
    run(store, tmp_path / "first.bin", to=foreign)
    run(tmp_path / "first.bin", tmp_path / "second.bin" / "x.bin", to=middle)
    run(tmp_path / "second.bin" / "x.bin", tmp_path / "back", to=f"packed-sequence_length={T}")
    assert digest(tmp_path / "back") == digest(store)


@pytest.mark.parametrize("form", ["packed", "token-list", "padded"])
def test_a_store_becomes_another_store(lab, tmp_path, form):
    source = ours(lab, "packed" if form == "token-list" else "token-list")
    run(source, tmp_path / "new", to=form, **({"sequence_length": T} if form != "token-list" else {}))
    right, found = read_store_manifest(ours(lab, form)), read_store_manifest(tmp_path / "new")
    if form != "packed":  # the date of the text, which Parquet files hold and their manifests do not, is lost
        for manifest in (right, found):
            del manifest["files"], manifest["bits_per_token"]["stored"]
    assert found == right


def test_eos_is_added_and_taken_off(lab, tmp_path):
    with_eos = ours(lab, "token-list", eos=True)
    assert "EOS 1 added to each document" in run(ours(lab, "packed"), tmp_path / "with", to="token-list", eos=True)
    assert "EOS 1 taken off each document" in run(with_eos, tmp_path / "without", to="token-list", eos=False)
    assert digest(tmp_path / "with") == digest(with_eos)
    assert digest(tmp_path / "without") == digest(ours(lab, "token-list"))


def test_one_parquet_file_can_be_written_and_read(lab, tmp_path):
    run(ours(lab), tmp_path / "one.parquet", to="token-list")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.build.json", "one.manifest.json", "one.parquet"]
    run(tmp_path / "one.parquet", tmp_path / "again", to=f"packed-sequence_length={T}")
    assert digest(tmp_path / "again") == digest(ours(lab))


def test_the_manifest_says_what_was_converted(lab, tmp_path):
    source = write_megatron(tmp_path / "m", [[5, 6, 1], [7, 1]])
    run(source, tmp_path / "s", to="token-list", tokenizer_name="theirs", **KNOWN)
    found = read_store_manifest(tmp_path / "s")
    origin = found["converted_from"]
    assert [file["name"] for file in origin["files"]] == ["m.bin", "m.idx"]
    assert all(re.fullmatch("[0-9a-f]{64}", file["sha256"]) for file in origin["files"])
    assert (origin["document_ends_stripped"], origin["bos_stripped"], origin["documents"]) == (2, 0, 2)
    assert found["tokenizer"] == {"name": "theirs", "kind": "unknown", "file_sha256": None}
    assert "makers" in found["special_token_policy"] and str(tmp_path) not in canonical_json(found)
    with pytest.raises(UserError, match="corpus manifest"):  # a run that asks for a corpus is refused
        open_store(tmp_path / "s", StoreSettings("token-list"), corpus_manifest_sha256="0" * 64)


# ------------------------------------------------------------------------------------------------------------ megatron


def test_the_bytes_of_a_megatron_pair(tmp_path):
    """Documents [7, 8] and [9] behind BOS 0, as Megatron-LM's reader wants them."""
    run(write_hf(tmp_path / "hf", input_ids=[[0, 7, 8], [0, 9]]), tmp_path / "m", to="megatron", **KNOWN)
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
    ("size", "code", "dtype"), [(65_499, 8, "<u2"), (65_500, 4, "<i4"), (65_536, 4, "<i4"), (131_072, 4, "<i4")]
)
def test_megatron_ids_are_uint16_below_65500_ids(tmp_path, size, code, dtype):
    source = write_hf(tmp_path / "hf", input_ids=[[0, size - 1], [0, 3]])
    run(source, tmp_path / "m", to="megatron", vocabulary_size=size, bos_id=0)
    assert (tmp_path / "m.idx").read_bytes()[17] == code
    assert np.fromfile(tmp_path / "m.bin", dtype).tolist() == [0, size - 1, 0, 3]


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_every_integer_type_of_megatron_is_read_and_sequences_join_to_documents(tmp_path, code, dtype):
    source = write_megatron(tmp_path / "m", [[5], [6, 7], [8], [9, 1]], code, dtype, bounds=[0, 2, 2, 4])
    for path in (source, tmp_path / "m.bin", tmp_path / "m.idx"):
        run(path, tmp_path / f"s{path.suffix}", to="token-list", **KNOWN)
        assert documents_of(tmp_path / f"s{path.suffix}") == [[0, 5, 6, 7], [0], [0, 8, 9]]


@pytest.mark.parametrize("length", range(0, 34 + 2 * 12 + 3 * 8))
def test_every_truncation_of_an_index_is_refused(tmp_path, length):
    write_megatron(tmp_path / "m", [[5, 6], [7]])
    (tmp_path / "m.idx").write_bytes((tmp_path / "m.idx").read_bytes()[:length])
    text = refused(tmp_path / "m", tmp_path / "s", to="token-list", from_format="megatron", **KNOWN)
    assert "m.idx" in text and "found" in text and "expected" in text and "next" in text


@pytest.mark.parametrize(
    ("at", "change", "words"),
    [
        (0, b"MMIDIDY", "no Megatron index"),
        (9, b"\x02", "another version"),
        (17, b"\x06", "no integers"),
        (17, b"\x00", "no integers"),
        (18, b"\xff" * 8, "another size than its header says"),
        (18, b"\x03", "another size than its header says"),
        (26, b"\x02", "another size than its header says"),
        (34, b"\xff\xff\xff\xff", "negative length"),
        (34, b"\x01", "points elsewhere"),
        (50, b"\x06", "points elsewhere"),
        (42, b"\x02", "points elsewhere"),
        (58, b"\x01", "out of order"),
        (66, b"\x03", "out of order"),
        (74, b"\x01", "out of order"),
    ],
)
def test_a_wrong_byte_of_an_index_is_refused(tmp_path, at, change, words):
    write_megatron(tmp_path / "m", [[5, 6], [7]])
    index = bytearray((tmp_path / "m.idx").read_bytes())
    index[at : at + len(change)] = change
    (tmp_path / "m.idx").write_bytes(index)
    text = refused(tmp_path / "m", tmp_path / "s", to="token-list", from_format="megatron", **KNOWN)
    assert words in text and "m.idx" in text and "expected" in text


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"\0\0", lambda b: b""])
def test_a_bin_of_another_size_than_its_index_says_is_refused(tmp_path, change):
    write_megatron(tmp_path / "m", [[5, 6], [7]])
    (tmp_path / "m.bin").write_bytes(change((tmp_path / "m.bin").read_bytes()))
    text = refused(tmp_path / "m", tmp_path / "s", to="token-list", **KNOWN)
    assert "another size than its index says" in text and "6 bytes" in text


def test_half_a_pair_and_a_multimodal_one_are_refused(tmp_path):
    write_megatron(tmp_path / "m", [[5, 6], [7]])
    (tmp_path / "m.idx").write_bytes((tmp_path / "m.idx").read_bytes() + b"\0\1")
    assert "multimodal" in refused(tmp_path / "m", tmp_path / "s", to="token-list", **KNOWN)
    (tmp_path / "m.bin").unlink()
    assert "a file of the pair is missing" in refused(tmp_path / "m", tmp_path / "s", to="token-list", **KNOWN)


def test_a_pair_whose_documents_do_not_end_says_how_they_would(lab, tmp_path):
    assert "--document-end 1 puts one" in run(ours(lab), tmp_path / "m", to="megatron")
    assert "--document-end" not in run(ours(lab, eos=True), tmp_path / "with", to="megatron")
    told = run(ours(lab), tmp_path / "ended", to="megatron", document_end=1, bos="drop")
    assert "put behind documents" in told and "--document-end" not in told
    ids = np.fromfile(tmp_path / "ended.bin", "<u2")
    assert ids[-1] == 1 and np.count_nonzero(ids == 1) == len(TEXTS) and 0 not in ids
    run(tmp_path / "ended", tmp_path / "back", to="token-list")
    assert digest(tmp_path / "back") == digest(ours(lab))


# ------------------------------------------------------------------------------------------------------------- nanogpt


@pytest.mark.parametrize(("size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_nanogpt_ids_are_uint16_where_they_fit(tmp_path, size, dtype):
    source = write_hf(tmp_path / "hf", input_ids=[[0, size - 1], [0, 3, 1], [0]])
    told = run(source, tmp_path / "n.bin", to="nanogpt", vocabulary_size=size, bos_id=0, eos_id=1)
    assert np.fromfile(tmp_path / "n.bin", dtype).tolist() == [size - 1, 1, 3, 1, 1]
    assert ("uint32: nanoGPT's train.py reads uint16" in told) == (dtype == "<u4")
    run(tmp_path / "n.bin", tmp_path / "s", to="token-list")
    assert documents_of(tmp_path / "s") == [[0, size - 1], [0, 3], [0]]


def test_gpt2s_one_id_for_all_purposes(tmp_path):
    """As prepare.py of nanoGPT writes it: BOS, EOS and the end of a document are 50256."""
    np.array([5, 6, 50256, 7, 50256, 50256], "<u2").tofile(tmp_path / "train.bin")
    told = run(tmp_path / "train.bin", tmp_path / "s", to="token-list", **_gpt2())
    assert documents_of(tmp_path / "s") == [[50256, 5, 6], [50256, 7], [50256]]
    assert "3 of id 50256" in told and "without a token of text: 1" in told


def _gpt2():
    return {"vocabulary_size": 50257, "bos_id": 50256, "eos_id": 50256}


def test_an_id_in_front_of_each_document_is_understood(tmp_path):
    np.array([1, 5, 6, 1, 7], "<u2").tofile(tmp_path / "train.bin")
    told = run(tmp_path / "train.bin", tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 6], [0, 7]] and "before each document" in told


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        (b"\x05\x00\x01", KNOWN, "cut short"),
        (b"", KNOWN, "cut short"),
        (np.array([5, 1, 6], "<u2").tobytes(), KNOWN, "does not end"),
        (np.array([5, 6, 6], "<u2").tobytes(), KNOWN, "no document ends"),
        (np.array([5, 100, 1], "<u2").tobytes(), KNOWN, "outside the vocabulary"),
        (np.array([5, 0, 6, 1], "<u2").tobytes(), KNOWN, "BOS lies inside a document"),
        (np.array([5, 1], "<u2").tobytes(), {"vocabulary_size": 100, "bos_id": 0}, "which id ends a document"),
        (np.array([5, 1], "<u2").tobytes(), {**KNOWN, "document_end": 100}, "--document-end lies outside"),
        (np.array([5, 1], "<u2").tobytes(), {**KNOWN, "bos_id": 100}, "--bos-id lies outside"),
        (np.array([5, 1], "<u2").tobytes(), {"bos_id": 0}, "--vocabulary-size N"),
        (np.array([20240520, 1, 5, 1], "<i4").tobytes(), {**KNOWN, "dtype": "uint32"}, "has a header"),
        (np.array([5, 1, 6, 1], "<u4").tobytes(), {**KNOWN, "dtype": "uint16"}, "does not end"),
    ],
)
def test_what_a_nanogpt_file_contradicts_is_refused(tmp_path, data, settings, words):
    (tmp_path / "train.bin").write_bytes(data)
    text = refused(tmp_path / "train.bin", tmp_path / "s", to="token-list", **settings)
    assert words in text and "next" in text


def test_an_end_inside_a_document_cannot_leave_for_nanogpt(tmp_path):
    run(write_hf(tmp_path / "hf", tokens=[[5, 6], [7, 9, 8]]), tmp_path / "s", to="token-list", **KNOWN)
    text = refused(tmp_path / "s", tmp_path / "n.bin", to="nanogpt", document_end=9)
    assert "lies inside one" in text and "1 of 2" in text
    assert "outside the vocabulary" in refused(tmp_path / "s", tmp_path / "n.bin", to="nanogpt", document_end=100)


def test_a_tokenizer_without_an_end_needs_one_for_nanogpt(tmp_path):
    facts = {"vocabulary_size": 100, "bos_id": 0}
    run(write_hf(tmp_path / "hf", tokens=[[5, 6], [7]]), tmp_path / "s", to="token-list", **facts)
    assert "--document-end ID" in refused(tmp_path / "s", tmp_path / "n.bin", to="nanogpt")
    run(tmp_path / "s", tmp_path / "n.bin", to="nanogpt", document_end=99)
    run(tmp_path / "n.bin", tmp_path / "back", to="token-list")
    assert digest(tmp_path / "back") == digest(tmp_path / "s")


# -------------------------------------------------------------------------------------------------------------- framing

DOCUMENTS = st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=8)


def flat(documents):
    return np.array([i for d in documents for i in d], np.int64), np.array([len(d) for d in documents], np.int64)


@given(DOCUMENTS, st.sampled_from([0, 1, None]))
def test_documents_are_trimmed_as_python_lists_are(documents, end):
    """BOS 0; the end is 1, or BOS itself, or there is none."""
    ids, lengths = flat(documents)
    first, last = reframe.trimmed(ids, lengths, 0, end)
    for document, start, a, b in zip(documents, np.cumsum(lengths) - lengths, first, last, strict=True):
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
    count = reframe.Written()
    found = reframe.leaving(Chunk(ids.astype(np.int32), lengths), reframe.Rule(keep_bos, end), count)
    right = [d if keep_bos else d[1:] for d in documents]
    added = [end is not None and d[-1:] != [end] for d in right]
    right = [d + [end] * more for d, more in zip(right, added, strict=True)]
    assert [d.tolist() for d in found.documents()] == right
    assert (count.document_ends_added, count.tokens) == (sum(added), sum(map(len, right)))


# ------------------------------------------------------------------------------------------------------- hf datasets


def lists(kind, *documents):
    return pa.array(documents, kind)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint16()), pa.list_(pa.int32(), 3)]
)
def test_every_kind_of_list_is_read(tmp_path, kind):
    source = write_hf(tmp_path / "hf", text=["a", "b", "c"], tokens=lists(kind, [0, 5, 6], [0, 7, 1], [0, 8, 9]))
    run(source, tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 6], [0, 7], [0, 8, 9]]


def test_padding_is_left_out_by_its_mask_and_never_by_its_id(tmp_path):
    ids, mask = [[0, 5, 3, 3], [0, 3, 1, 3]], [[1, 1, 1, 0], [1, 1, 1, 0]]
    told = run(write_hf(tmp_path / "hf", input_ids=ids, attention_mask=mask), tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 3], [0, 3]] and "its attention mask: 2 ids" in told


def test_double_bos_and_double_ends_are_one(tmp_path):
    told = run(write_hf(tmp_path / "hf", input_ids=[[0, 0, 5], [0, 6, 1, 1]]), tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5], [0, 6]]
    assert "3 of BOS 0 (2 documents)" in told and "2 of id 1 (2 documents)" in told


@pytest.mark.parametrize(
    ("columns", "settings", "words"),
    [
        ({"input_ids": [[0, 5, 0, 6], [0, 7]]}, {}, "BOS lies inside"),
        ({"input_ids": [[0, 5, 1, 6], [0, 7]]}, {}, "an id that ends documents lies inside"),
        ({"input_ids": [[0, 5], [7]]}, {}, "some documents begin with BOS and others do not"),
        ({"input_ids": [[5], [-1]]}, {}, "found     id -1"),
        ({"input_ids": [[5], [100]]}, {}, "document  1 of 2, token 0 of 1"),
        ({"input_ids": [[5], [2**40]]}, {}, "outside the vocabulary"),
        ({"input_ids": [[5], None]}, {}, "is null"),
        ({"input_ids": [[5], [None]]}, {}, "is null"),
        ({"input_ids": [[0.5], [1.0]]}, {}, "no lists of ids"),
        ({"input_ids": [5, 6]}, {}, "no lists of ids"),
        ({"text": ["a", "b"]}, {}, "no column of ids"),
        ({"ids": [[5], [6]]}, {"column": "id"}, "did you mean 'ids'"),
        ({"input_ids": [[5], [6]], "attention_mask": [[1], [1, 1]]}, {}, "other lengths"),
        ({"input_ids": [[5], [6]]}, {"eos": True, "eos_id": None}, "no EOS"),
        ({"input_ids": [[5], [6]]}, {"eos_id": 100}, "--eos-id lies outside"),
        ({"input_ids": [[5], [6]]}, {"dtype": "uint16"}, "--dtype means nothing from hf-datasets"),
        ({"input_ids": [[5], [6]]}, {"bos": "drop"}, "--bos means nothing"),
        ({"input_ids": [[5], [6]]}, {"sequence_length": 8}, "no rows of one length"),
        ({"input_ids": [[5], [6]]}, {"tokenizer": "nowhere"}, "tokenizer 'nowhere'"),
    ],
)
def test_what_a_data_set_contradicts_is_refused(tmp_path, columns, settings, words):
    source = write_hf(tmp_path / "hf", **columns)
    assert words in refused(source, tmp_path / "s", **{"to": "token-list", **KNOWN, **settings})


def test_a_stream_that_is_cut_is_refused_at_every_length(tmp_path):
    folder = write_hf(tmp_path / "hf", input_ids=[[5, 6], [7], [8], [9, 9, 9], [8]])
    file = folder / "data-00001-of-00002.arrow"
    whole = file.read_bytes()
    for length in range(0, len(whole), 8):
        file.write_bytes(whole[:length])
        text = refused(folder, tmp_path / "s", to="token-list", **KNOWN)
        assert "no whole Arrow stream" in text and file.name in text
    file.unlink()
    assert "a file of the data set is missing" in refused(folder, tmp_path / "s", to="token-list", **KNOWN)


def test_a_folder_of_splits_names_them(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert "train, test" in refused(tmp_path / "d", tmp_path / "s", to="token-list", **KNOWN)


@pytest.fixture
def many_files(lab, tmp_path, monkeypatch):
    """A store that becomes a data set of several files."""
    monkeypatch.setattr(hf_datasets, "SHARD_TOKENS", 500)
    run(ours(lab), tmp_path / "store", to="token-list-row_group_rows=5")
    run(tmp_path / "store", tmp_path / "hf", to="hf-datasets")
    assert len(list((tmp_path / "hf").glob("data-*-of-*.arrow"))) > 2
    return tmp_path / "hf"


def test_a_data_set_of_many_files_comes_back(lab, tmp_path, many_files):
    run(many_files, tmp_path / "back", to="token-list")
    assert digest(tmp_path / "back") == digest(ours(lab))


def test_datasets_itself_reads_what_is_written_and_writes_what_is_read(lab, tmp_path, many_files):
    datasets = pytest.importorskip("datasets")
    data = datasets.load_from_disk(str(many_files))
    assert data["input_ids"][:] == documents_of(ours(lab, "token-list"))
    data.select(range(3, 10)).save_to_disk(str(tmp_path / "theirs"))
    run(tmp_path / "theirs", tmp_path / "back", to="token-list", tokenizer=str(lab.tokenizer))
    assert documents_of(tmp_path / "back") == documents_of(ours(lab, "token-list"))[3:10]


# --------------------------------------------------------------------------------------------------- records and ways


def test_a_record_of_other_bytes_is_refused_and_a_renamed_pair_is_not(lab, tmp_path):
    run(ours(lab), tmp_path / "m", to="megatron")
    for name in ("bin", "idx", "tokenscale.json"):
        (tmp_path / f"m.{name}").rename(tmp_path / f"n.{name}")
    run(tmp_path / "n", tmp_path / "ok", to="token-list")
    data = bytearray((tmp_path / "n.bin").read_bytes())
    data[0] ^= 2
    (tmp_path / "n.bin").write_bytes(data)
    text = refused(tmp_path / "n", tmp_path / "s", to="token-list")
    assert "not what its record describes" in text and "n.bin" in text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"vocabulary_size": 999}, "--vocabulary-size contradicts the source's record"),
        ({"bos_id": 2}, "--bos-id contradicts"),
        ({"tokenizer_name": "other"}, "--tokenizer-name contradicts"),
    ],
)
def test_flags_that_contradict_the_record_are_refused(lab, tmp_path, settings, words):
    run(ours(lab), tmp_path / "m", to="megatron")
    assert words in refused(tmp_path / "m", tmp_path / "s", to="token-list", **settings)


def test_another_tokenizer_than_the_records_is_refused(lab, tmp_path):
    other = Lab(tmp_path / "other", ["quite another text of its own"] * 5, vocabulary_size=262)
    run(ours(lab), tmp_path / "m", to="megatron")
    folder = str(other.tokenizer)
    text = refused(tmp_path / "m", tmp_path / "s", to="token-list", tokenizer=folder)
    assert "another tokenizer made the source" in text or "contradicts" in text
    (tmp_path / "m.tokenscale.json").unlink()
    run(tmp_path / "m", tmp_path / "s", to="token-list", tokenizer=str(lab.tokenizer))
    assert digest(tmp_path / "s") == digest(ours(lab))


@pytest.mark.parametrize("to", [*FOREIGN, "token-list", "packed"])
def test_nothing_is_replaced_without_force(lab, tmp_path, to):
    target = tmp_path / "target.bin"
    run(ours(lab), target, to=to)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert "--force replaces it" in refused(ours(lab, "token-list"), target, to=to)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    run(ours(lab, "token-list", eos=True), target, to=to, force=True)
    run(target, tmp_path / "back", to="token-list")
    assert digest(tmp_path / "back") == digest(ours(lab, "token-list", eos=True))
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_folder_that_holds_other_things_is_never_cleared(lab, tmp_path):
    """A store's writer clears its folder of files of tokens: a user's own must not be among them."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "train.bin").write_bytes(b"precious")
    for force in (False, True):
        assert "is no token store" in refused(ours(lab), mine, to="packed", force=force)
    run(ours(lab), tmp_path / "store", to="packed")
    (tmp_path / "store/val.bin").write_bytes(b"precious")
    text = refused(ours(lab, "token-list"), tmp_path / "store", to="packed", force=True)
    assert "more than a store" in text and "val.bin" in text


def test_force_replaces_only_what_is_of_the_same_kind(lab, tmp_path):
    (tmp_path / "folder").mkdir()
    for to in ("nanogpt", "hf-datasets"):
        assert "same kind" in refused(ours(lab), tmp_path / "folder", to=to, force=True)
    (tmp_path / "one.parquet").write_bytes(b"text")
    assert "same kind" in refused(ours(lab), tmp_path / "one.parquet", to="token-list", force=True)


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_source_is_never_its_own_target(lab, tmp_path, foreign):
    run(ours(lab), tmp_path / "x.bin", to=foreign)
    text = refused(tmp_path / "x.bin", tmp_path / "x.bin", to=foreign, force=True)
    assert "replace its own source" in text


@pytest.mark.parametrize(
    ("source", "settings", "words"),
    [
        ("nowhere", {"to": "packed"}, "the source is missing"),
        ("corpus", {"to": "packed"}, "no format that is known"),
        ("packed", {"to": "megatrn"}, "did you mean 'megatron'"),
        ("packed", {}, "--to is missing"),
        ("packed", {"to": "packed-codec=zstd"}, "unknown option of format packed"),
        ("packed", {"to": "megatron", "eos": True}, "--eos means nothing"),
        ("packed", {"to": "megatron", "vocabulary_size": 5}, "--vocabulary-size means nothing from store"),
        ("packed", {"to": "token-list", "document_end": 5}, "--document-end means nothing"),
        ("padded", {"to": "megatron"}, "cannot be had back from the format padded"),
    ],
)
def test_what_cannot_be_meant_is_refused(lab, tmp_path, source, settings, words):
    path = {"packed": ours(lab), "padded": ours(lab, "padded"), "corpus": lab.corpus}.get(source, tmp_path / source)
    assert words in refused(path, tmp_path / "x", **settings)


def test_packed_is_no_single_file(lab, tmp_path):
    assert "a folder of files" in refused(ours(lab, "token-list"), tmp_path / "x.parquet", to="packed")


def test_a_changed_row_of_a_store_is_found_and_nothing_is_written(lab, tmp_path):
    run(ours(lab), tmp_path / "in/store", to=f"packed-sequence_length={T}")
    tokens = tmp_path / "in/store/tokens.bin"
    data = bytearray(tokens.read_bytes())
    data[40] ^= 1
    tokens.write_bytes(data)
    (tmp_path / "out").mkdir()
    for to in FOREIGN:
        assert "has changed" in refused(tmp_path / "in/store", tmp_path / "out/x.bin", to=to)


# --------------------------------------------------------------------------------------------------------- interruption


class Interrupted(BaseException):
    """As a signal is."""


@pytest.mark.parametrize("to", [*FOREIGN, "token-list", "packed", "token-list.parquet"])
@pytest.mark.parametrize("old", [False, True], ids=["fresh", "over an old one"])
def test_an_interrupted_conversion_leaves_the_target_as_it_was(lab, tmp_path, monkeypatch, to, old):
    target = tmp_path / ("x.parquet" if to.endswith(".parquet") else "x.bin")
    to = to.removesuffix(".parquet")
    run(ours(lab), tmp_path / "source", to="megatron")
    if old:
        run(ours(lab, "packed", eos=True), target, to=to)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    chunks = reframe.Reframed.chunks

    def broken(self, first, last):
        for number, chunk in enumerate(chunks(self, first, last)):
            if number == 2:
                raise Interrupted
            yield chunk

    monkeypatch.setattr(reframe, "BLOCK_TOKENS", 50)
    with monkeypatch.context() as patched:
        patched.setattr(reframe.Reframed, "chunks", broken)
        with pytest.raises(Interrupted):
            run(tmp_path / "source", target, to=to, force=True)
    found = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and ".building" not in p.parts}
    for files in (found, before):  # a lock holds the number of the process that had it
        files.pop(target / ".lock", None)
    assert found == before
    run(tmp_path / "source", target, to=to, force=True)
    run(target, tmp_path / "back", to="token-list")
    assert digest(tmp_path / "back") == digest(ours(lab))


def test_a_source_that_changes_meanwhile_is_refused(lab, tmp_path, monkeypatch):
    run(ours(lab), tmp_path / "m", to="megatron")
    chunks = reframe.Reframed.chunks

    def changing(self, first, last):
        yield from chunks(self, first, last)
        (tmp_path / "m.bin").touch()

    monkeypatch.setattr(reframe.Reframed, "chunks", changing)
    for to in ("nanogpt", "hf-datasets"):
        assert "has changed while it was converted" in refused(tmp_path / "m", tmp_path / "x", to=to)


# --------------------------------------------------------------------------------------------------------- command line


def test_the_command_line(lab, tmp_path, capsys):
    assert main(["convert", str(ours(lab)), str(tmp_path / "m"), "--to", "megatron"]) == 0
    assert main(["convert", str(tmp_path / "m"), str(tmp_path / "s.parquet"), "--to", "token-list", "--eos"]) == 0
    assert "EOS 1 behind" in capsys.readouterr().out
    assert json.loads((tmp_path / "s.build.json").read_text())["command"].startswith("python -m tokenscale")
    assert main(["convert", str(tmp_path / "m"), str(tmp_path / "t"), "--to", "packed", "--bos-id", "x"]) == 2
    assert "--bos-id has no value 'x'" in capsys.readouterr().err
