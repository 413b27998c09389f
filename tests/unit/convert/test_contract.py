"""What holds for every format of others: round trips, equal bytes, types of ids, full files, all
damage refused.
"""

import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import flip_bit
from tests.refusals import tree_of
from tests.unit.conftest import T
from tests.unit.convert.conftest import (
    FOREIGN,
    KNOWN,
    digest,
    documents_of,
    ours,
    refused,
    run,
    write_hf,
    write_megatron,
)
from tests.unit.convert.layouts import file_of, flatten, parse, write
from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, write_sealed
from tokenscale.cli.convert import ConvertSettings, convert
from tokenscale.data.stores import parquet, write_parquet
from tokenscale.data.stores.foreign import hf_datasets, reframe, shards
from tokenscale.data.stores.manifest import SEAL, load_reader, open_store, read_store_manifest
from tokenscale.settings.data import StoreSettings

PEER = Path(__file__).with_name("peer.py")
SHARDED = ["litdata", "mds"]  # folders of files of a given size beside index.json


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
    made = read_store_manifest(store)
    back = read_store_manifest(tmp_path / "back")
    same = (
        "tokenizer",
        "vocabulary_size",
        "bos_id",
        "eos_id",
        "padding",
        "documents",
        "tokens_in_documents",
    )
    assert [made[name] for name in same] == [back[name] for name in same]
    assert back["options"]["eos"] is eos and back["converted_from"]["format"] == foreign


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("part", [1, 7])
def test_a_source_is_read_from_any_document_on(
    lab, tmp_path, small_blocks, monkeypatch, foreign, part
):
    """The writer of Parquet asks for the documents of a shard at a time."""
    run(ours(lab, "token-list"), tmp_path / "x.bin", to=foreign)
    monkeypatch.setattr(write_parquet, "SHARD_ROWS", part)
    monkeypatch.setattr("tokenscale.data.stores.documents.GROUP_DOCUMENTS", part)
    run(tmp_path / "x.bin", tmp_path / "back", to="token-list")
    count = read_store_manifest(tmp_path / "back")["documents"]
    assert count > 7 and len(list((tmp_path / "back").glob("*.parquet"))) == -(-count // part)
    assert documents_of(tmp_path / "back") == documents_of(ours(lab, "token-list"))


@pytest.mark.parametrize("form", ["packed", "token-list", "padded"])
def test_a_store_becomes_another_store(lab, tmp_path, form):
    source = ours(lab, "packed" if form == "token-list" else "token-list")
    run(
        source,
        tmp_path / "new",
        to=form,
        **({"sequence_length": T} if form != "token-list" else {}),
    )
    right = read_store_manifest(ours(lab, form))
    found = read_store_manifest(tmp_path / "new")
    # the date of the text, which Parquet files hold and their manifests do not, is lost
    if form != "packed":
        for manifest in (right, found):
            del manifest["files"], manifest["bits_per_token"]["stored"]
    assert found == right


def test_eos_is_added_and_taken_off(lab, tmp_path):
    with_eos = ours(lab, "token-list", eos=True)
    assert "EOS 1 added to each document" in run(
        ours(lab, "packed"), tmp_path / "with", to="token-list", eos=True
    )
    assert "EOS 1 removed from each document" in run(
        with_eos, tmp_path / "without", to="token-list", eos=False
    )
    assert digest(tmp_path / "with") == digest(with_eos)
    assert digest(tmp_path / "without") == digest(ours(lab, "token-list"))


def test_one_parquet_file_can_be_written_and_read(lab, tmp_path):
    run(ours(lab), tmp_path / "one.parquet", to="token-list")
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [
        ".json",
        ".json",
        ".parquet",
        ".records",
    ]
    run(tmp_path / "one.parquet", tmp_path / "again", to=f"packed-sequence_length={T}")
    assert digest(tmp_path / "again") == digest(ours(lab))


@pytest.mark.parametrize("form", ["token-list", "padded"])
@pytest.mark.parametrize("single", [False, True])
def test_a_store_without_records_is_refused_with_the_command_that_writes_it_again(
    lab, tmp_path, form, single
):
    path = tmp_path / ("one.parquet" if single else "store")
    store = StoreSettings(form, **({"sequence_length": T} if form == "padded" else {}))
    convert(ConvertSettings(to=store.directory), ours(lab), path, command="tokenscale c")
    where = path.with_suffix(".manifest.json") if single else path / "manifest.json"
    manifest = read_store_manifest(where)
    del manifest["records"]
    write_sealed(where, manifest, SEAL)
    with pytest.raises(UserError, match="no records") as error:
        load_reader(form)(where, open_store(where, store))
    assert error.value.facts["next"] == "tokenscale c --force"


def test_the_manifest_says_what_was_converted(lab, tmp_path):
    source = write_megatron(tmp_path / "m", [[5, 6, 1], [7, 1]])
    run(source, tmp_path / "s", to="token-list", tokenizer_name="theirs", **KNOWN)
    found = read_store_manifest(tmp_path / "s")
    origin = found["converted_from"]
    assert [file["name"] for file in origin["files"]] == ["m.bin", "m.idx"]
    assert all(re.fullmatch("[0-9a-f]{64}", file["sha256"]) for file in origin["files"])
    assert (origin["document_ends_stripped"], origin["bos_stripped"], origin["documents"]) == (
        2,
        0,
        2,
    )
    assert found["tokenizer"] == {"name": "theirs", "kind": "unknown", "file_sha256": None}
    assert "makers" in found["special_token_policy"] and str(tmp_path) not in canonical_json(found)
    # a run that asks for a corpus is refused
    with pytest.raises(UserError, match="corpus manifest"):
        open_store(tmp_path / "s", StoreSettings("token-list"), corpus_manifest_sha256="0" * 64)


@pytest.mark.parametrize("layout", FOREIGN)
def test_equal_documents_give_equal_files(lab, tmp_path, layout):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run(ours(lab), tmp_path / name / "x.bin", to=layout)
    assert tree_of(tmp_path / "a") == tree_of(tmp_path / "b")


@pytest.mark.parametrize("layout", [*SHARDED, "megatron"])
@pytest.mark.parametrize(
    ("size", "dtype"), [(65_499, "<u2"), (65_500, "<i4"), (65_536, "<i4"), (131_072, "<i4")]
)
def test_ids_are_uint16_below_65500_ids(tmp_path, layout, size, dtype):
    long = [0, *[size - 1] * 300]
    source = write_hf(tmp_path / "hf", input_ids=[long, [0, 3]])
    run(source, tmp_path / "x", to=layout, vocabulary_size=size, bos_id=0)
    assert parse(layout, tmp_path / "x") == (dtype, [[long, [0, 3]]])


#: bytes that one more document of uint16 takes
MORE = {
    "litdata": lambda ids: 4 + 2 * len(ids),
    "mds": lambda ids: 4 + 4 + (2 if len(ids) < 256 else 3) + 2 * len(ids),
}


@pytest.mark.parametrize("size", [40, 300, 4096])
@pytest.mark.parametrize("layout", SHARDED)
def test_documents_are_distributed_to_files_of_the_given_size(
    lab, tmp_path, monkeypatch, small_blocks, layout, size
):
    monkeypatch.setattr(shards, "SHARD_BYTES", size)
    run(ours(lab), tmp_path / "pair", to="megatron")  # which is read in blocks smaller than a file
    run(tmp_path / "pair", tmp_path / "x", to=layout)
    _, found = parse(layout, tmp_path / "x")
    assert flatten(found) == documents_of(ours(lab, "token-list"))
    sizes = [file_of(layout, tmp_path / "x", number).stat().st_size for number in range(len(found))]
    assert all(
        bytes_ <= size or len(documents) == 1
        for bytes_, documents in zip(sizes, found, strict=True)
    )
    # each file is as full as it can be
    for bytes_, following in zip(sizes, found[1:], strict=False):
        assert bytes_ + MORE[layout](following[0]) > size
    run(tmp_path / "x", tmp_path / "back", to="packed-sequence_length=16")
    assert digest(tmp_path / "back") == digest(ours(lab))


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("litdata", {}),
        *(("mds", {"encoding": e}) for e in ("ndarray:uint16", "bytes")),
        ("mds", {"compression": "zstd"}),
    ],
)
@settings(max_examples=10)
@given(
    st.lists(st.lists(st.integers(2, 99), max_size=300), min_size=1, max_size=20),
    st.integers(16, 3000),
    st.integers(1, 600),
)
def test_any_documents_are_written_and_read(layout, options, documents, size, block):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        folder = Path(name)
        patched.setattr(shards, "SHARD_BYTES", size)
        patched.setattr(reframe, "BLOCK_TOKENS", block)
        source = write(layout, folder / "theirs", [documents[:3], documents[3:]], **options)
        run(source, folder / "x", to=layout, bos="keep", **KNOWN)
        assert flatten(parse(layout, folder / "x")[1]) == [[0, *ids] for ids in documents]
        run(source, folder / "plain", to=layout, **KNOWN)  # without the BOS that the source has not
        assert flatten(parse(layout, folder / "plain")[1]) == documents
        run(folder / "x", folder / "s", to="token-list")
        assert documents_of(folder / "s") == [[0, *ids] for ids in documents]


@pytest.mark.parametrize("layout", ["litdata", "megatron"])
def test_documents_that_do_not_end_get_a_note_and_an_end_on_request(lab, tmp_path, layout):
    assert "--document-end 1 puts one" in run(ours(lab), tmp_path / "x", to=layout)
    assert "--document-end" not in run(ours(lab, eos=True), tmp_path / "with", to=layout)
    told = run(ours(lab), tmp_path / "ended", to=layout, document_end=1, bos="drop")
    assert "added after documents" in told and "--document-end" not in told
    _, found = parse(layout, tmp_path / "ended")
    assert flatten(found) == [[*ids[1:], 1] for ids in documents_of(ours(lab, "token-list"))]
    run(tmp_path / "ended", tmp_path / "back", to="token-list")
    assert digest(tmp_path / "back") == digest(ours(lab))


@pytest.mark.parametrize("layout", ["hf-datasets", *SHARDED])
def test_an_id_outside_of_the_vocabulary_names_its_file_and_document(tmp_path, layout):
    for number, wrong in enumerate((100, -1, 2**40, 100)):
        documents = [[5, 6], [7], [8], [9]]
        documents[number] = [9, wrong]
        source = write(layout, tmp_path / f"x{number}", [documents[:2], documents[2:]])
        text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
        assert f"found     id {wrong}" in text and f"document  {number} of 4, token 1 of 2" in text
        assert (
            source if layout == "hf-datasets" else file_of(layout, source, number // 2)
        ).name in text


@pytest.mark.parametrize("layout", FOREIGN)
def test_a_changed_id_of_what_we_wrote_is_found(lab, tmp_path, layout):
    path = tmp_path / ("x.bin" if layout == "nanogpt" else "x")
    run(ours(lab), path, to=layout)
    file = next(file for file in tmp_path.rglob("*") if file.suffix in (".bin", ".mds", ".arrow"))
    flip_bit(file, file.stat().st_size // 2)
    text = refused(path, tmp_path / "s", to="token-list")
    assert ("has changed" in text or "not what its record describes" in text) and file.name in text


@pytest.mark.parametrize(
    "change", [lambda d: d[:-1], lambda d: d[:-8], lambda d: d + b"\0" * 8, lambda d: b"", None]
)
@pytest.mark.parametrize("layout", [*SHARDED, "megatron"])
def test_a_file_of_another_size_than_the_index_says_or_none_is_refused(tmp_path, layout, change):
    source = write(layout, tmp_path / "x", [[[5, 6], [7]], [[8], [9]]])
    file = file_of(layout, source, 1)
    if change:
        file.write_bytes(change(file.read_bytes()))
    else:
        file.unlink()
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert file.name in text and "next" in text
    assert ("another size than its index says" if change else "is missing") in text


#: layout, place in the file, bytes or number (a negative one counts from the end of the file) to
#: write, message
ARRAY = "one-dimensional array of uint16 in the column tokens"
WRONG = [
    ("megatron", 0, b"MMIDIDY", "no Megatron index"),
    ("megatron", 9, b"\x02", "another version"),
    *(("megatron", 17, code, "no integers") for code in (b"\x06", b"\x00")),
    *(
        ("megatron", 18, number, "another size than its header says")
        for number in (b"\xff" * 8, b"\x03")
    ),
    ("megatron", 26, b"\x02", "another size than its header says"),
    ("megatron", 34, b"\xff\xff\xff\xff", "negative length"),
    *(
        ("megatron", at, byte, "points elsewhere")
        for at, byte in ((34, b"\x01"), (50, b"\x06"), (42, b"\x02"))
    ),
    *(
        ("megatron", at, byte, "out of order")
        for at, byte in ((58, b"\x01"), (66, b"\x03"), (74, b"\x01"))
    ),
    *(
        ("litdata", at, number, "its offsets")  # 2 items at 16 and 32, which end at 40
        for at, numbers in ((0, (3, 1)), (4, (8, 24)), (8, (12, 48, 33)), (12, (32, 48)))
        for number in numbers
    ),
    *(
        ("mds", at, number, "its offsets")  # samples of 4 + 2 + 4 and 4 + 2 + 2 bytes
        for at, number in ((0, 3), (4, 12), (8, 1), (8, 1 << 20), (12, 1 << 20))
    ),
    ("mds", 8, -2, "ends inside the sizes of its columns"),  # a second sample of two bytes
    ("mds", -18, 7, "sizes of its columns"),  # the size of the first sample's column
    ("mds", -18, 1 << 31, "sizes of its columns"),
    *(("mds", -14, bytes([axes]), ARRAY) for axes in (8, 0, 5, 7)),
    *(("mds", -13, bytes([length]), ARRAY) for length in (3, 1)),
    ("mds", -4, b"\x01", ARRAY),
]


@pytest.mark.parametrize(("layout", "at", "change", "words"), WRONG)
def test_a_wrong_byte_of_an_index_or_a_file_is_refused(tmp_path, layout, at, change, words):
    options = {"encoding": "ndarray:uint16"} if layout == "mds" else {}
    source = write(layout, tmp_path / "x", [[[5, 6], [7]]], **options)
    file = source.with_name("x.idx") if layout == "megatron" else file_of(layout, source, 0)
    data = bytearray(file.read_bytes())
    if isinstance(change, int):
        change = (change if change >= 0 else len(data) + change).to_bytes(4, "little")
    at %= len(data)
    assert data[at : at + len(change)] != change
    data[at : at + len(change)] = change
    file.write_bytes(data)
    text = refused(source, tmp_path / "s", to="token-list", from_format=layout, **KNOWN)
    assert (
        words in text
        and file.name in text
        and "next" in text
        and ("expected" in text or layout == "mds")
    )


ENTRIES = [
    *(("litdata", {"chunk_size": size}, "its offsets") for size in (1, -1, 10**12)),
    *(
        ("litdata", {key: value}, "expected content")
        for key, value in (("chunk_size", "2"), ("dim", None))
    ),
    *(("litdata", {"filename": name}, "expected content") for name in ("../chunk-0-0.bin", None)),
    ("litdata", {"dim": 4}, "its offsets"),
    ("litdata", {"chunk_bytes": 41}, "another size"),
    *(("mds", {"samples": number}, "its offsets") for number in (1, -1, 10**12)),
    ("mds", {"samples": None}, "expected content"),
    ("mds", {"version": 1}, "version 2"),
    ("mds", {"format": "csv"}, "version 2"),
    ("mds", {"column_sizes": [4]}, "sizes of its columns"),
    ("mds", {"column_sizes": []}, "expected content"),
    ("mds", {"column_encodings": ["ndarray:int32"]}, "the same columns in all shards"),
    ("mds", {"column_names": [5]}, "expected content"),
    ("mds", {"raw_data": None}, "expected content"),
    ("mds", {"raw_data": {"basename": "../x/shard.00000.mds", "bytes": 100}}, "expected content"),
    ("mds", {"raw_data": {"basename": "shard.00000.mds", "bytes": "100"}}, "expected content"),
    ("mds", {"raw_data": {"basename": "shard.00000.mds", "bytes": 100}}, "another size"),
    ("mds", {"zip_data": {"basename": "x", "bytes": 5}}, "expected content"),
]


@pytest.mark.parametrize(("layout", "change", "words"), ENTRIES)
def test_a_wrong_entry_of_the_index_is_refused(tmp_path, layout, change, words):
    source = write(layout, tmp_path / "x", [[[5, 6], [7]], [[8]]])
    index = json.loads((source / "index.json").read_text())
    index["shards" if layout == "mds" else "chunks"][0] |= change
    (source / "index.json").write_text(json.dumps(index))
    text = refused(source, tmp_path / "s", to="token-list", from_format=layout, **KNOWN)
    assert (
        words in text
        and "next" in text
        and ("index.json" in text or file_of(layout, source, 0).name in text)
    )


BROKEN = {
    "litdata": ['{"chunks": {}, "config": {}}', '{"chunks": []}'],
    "mds": ['{"shards": {}}', '{"shards": [5]}', '{"shards": [{"format": "json"}]}'],
}
EMPTY = {
    "litdata": '{"chunks": [], "config": {"data_format": ["no_header_tensor:18"]}}',
    "mds": '{"shards": []}',
}


@pytest.mark.parametrize("layout", SHARDED)
def test_a_broken_or_missing_index_is_refused(tmp_path, layout):
    source = write(layout, tmp_path / "x", [[[5, 6], [7]]])
    for text in ("{", "[]", "{}", *BROKEN[layout]):
        (source / "index.json").write_text(text)
        assert "format of the source is unknown" in refused(
            source, tmp_path / "s", to="packed", **KNOWN
        )
        assert "index" in refused(
            source, tmp_path / "s", to="token-list", from_format=layout, **KNOWN
        )
    (source / "index.json").unlink()
    assert "is missing" in refused(
        source, tmp_path / "s", to="token-list", from_format=layout, **KNOWN
    )
    (source / "index.json").write_text(EMPTY[layout])
    assert "holds no documents" in refused(source, tmp_path / "s", to="token-list", **KNOWN)


@pytest.mark.experiment
@pytest.mark.slow(55)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param("litdata", {"block": 1}, marks=pytest.mark.long),
        ("litdata", {"block": 7}),
        ("mds", {"kind": "StreamingDataset"}),
        pytest.param("mds", {"kind": "LocalDataset"}, marks=pytest.mark.long),
    ],
)
def test_the_library_reads_what_is_written(lab, tmp_path, monkeypatch, peers, layout, options):
    monkeypatch.setattr(shards, "SHARD_BYTES", 800)
    source = write_hf(tmp_path / "hf", input_ids=[[0, *[70_000] * 300], [0, 6]])
    run(source, tmp_path / "int32", to=layout, vocabulary_size=1 << 17, bos_id=0)
    run(ours(lab), tmp_path / "uint16", to=layout)
    # MDSWriter writes no empty arrays, but they are read
    run(ours(lab), tmp_path / "empty", to=layout, bos="drop")
    assert len(parse(layout, tmp_path / "uint16")[1]) > 3
    for name in ("int32", "uint16", "empty"):
        right = parse(layout, tmp_path / name)[1]
        if size := options.get("block"):
            streams = [flatten(chunk) for chunk in right]
            right = [
                [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
                for ids in streams
            ]
        found = peers.run(PEER, do=f"read_{layout}", folder=str(tmp_path / name), **options)
        assert found == flatten(right)


@pytest.mark.experiment
@pytest.mark.slow(55)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("litdata", {"dtype": "uint16", "chunk_bytes": 500}),
        *(
            pytest.param("litdata", {"dtype": dtype, "chunk_bytes": 500}, marks=pytest.mark.long)
            for dtype in ("int32", "int64")
        ),
        (
            "mds",
            {
                "columns": {"tokens": "ndarray:uint16", "number": "int", "uid": "str"},
                "hashes": ["sha256", "xxh3_64"],
            },
        ),
        *(
            pytest.param("mds", options, marks=pytest.mark.long)
            for options in (
                {
                    "columns": {"tokens": "ndarray:int32"},
                    "compression": "zstd",
                    "hashes": ["xxh3_64"],
                },
                {"columns": {"tokens": "bytes"}, "dtype": "int64", "compression": "zstd:19"},
                {"columns": {"tokens": "ndarray:uint32"}},
            )
        ),
    ],
)
def test_what_the_library_writes_is_read(lab, tmp_path, peers, layout, options):
    documents = documents_of(ours(lab, "token-list"))
    if layout == "mds":
        dtype = options["columns"]["tokens"].removeprefix("ndarray:")
        options = {"dtype": dtype, "size_limit": 1000, **options}
    peers.run(
        PEER, do=f"write_{layout}", folder=str(tmp_path / "x"), documents=documents, **options
    )
    assert len(list((tmp_path / "x").glob("*-*.bin" if layout == "litdata" else "shard.*"))) > 3
    run(tmp_path / "x", tmp_path / "s", to="token-list", vocabulary_size=1 << 20, bos_id=0)
    assert documents_of(tmp_path / "s") == documents
    run(tmp_path / "x", tmp_path / "back", to="token-list", tokenizer=str(lab.tokenizer))
    assert digest(tmp_path / "back") == digest(ours(lab))


def test_datasets_itself_reads_what_is_written_and_writes_what_is_read(lab, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(hf_datasets, "SHARD_TOKENS", 500)
    monkeypatch.setattr(parquet, "CHUNK_DOCUMENTS", 5)
    run(ours(lab, "token-list"), tmp_path / "hf", to="hf-datasets")
    assert len(list((tmp_path / "hf").glob("data-*-of-*.arrow"))) > 2
    run(tmp_path / "hf", tmp_path / "back", to="token-list")
    assert digest(tmp_path / "back") == digest(ours(lab))
    data = datasets.load_from_disk(str(tmp_path / "hf"))
    assert data["input_ids"][:] == documents_of(ours(lab, "token-list"))
    data.select(range(3, 10)).save_to_disk(str(tmp_path / "theirs"))
    run(tmp_path / "theirs", tmp_path / "again", to="token-list", tokenizer=str(lab.tokenizer))
    assert documents_of(tmp_path / "again") == documents_of(ours(lab, "token-list"))[3:10]
