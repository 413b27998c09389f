"""Tokens at rest: nothing lost that should not be, equal bytes on a rebuild, everything that does
not fit refused.
"""

import json
import os
import resource
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.corpora import Lab, documents_of, make_store
from tests.unit.conftest import files_of
from tokenscale.base.errors import UserError
from tokenscale.data.stores.documents import IGNORED, make_labels
from tokenscale.data.stores.manifest import load_reader, open_store
from tokenscale.data.stores.packed import PackedStore
from tokenscale.data.stores.text import encode_documents
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.registry import FORMATS, TOKEN_FORMATS

pytestmark = pytest.mark.slow(24)

T = 16
PADDED = StoreSettings("padded", sequence_length=T)
TOKEN_LIST = StoreSettings("token-list")
PACKED = StoreSettings("packed", sequence_length=T)
CONCATENATED = replace(PACKED, packing="concatenate")
ALL = [PADDED, TOKEN_LIST, PACKED]
ALL += [
    StoreSettings(form, sequence_length=T)
    for form in TOKEN_FORMATS
    if form not in {store.format for store in ALL}
]
STREAMED = [StoreSettings(form) for form, entry in FORMATS.items() if entry.streamed]


def opened(lab, store):
    return load_reader(store.format)(lab.store(store), open_store(lab.store(store), store))


def manifest_of(lab, store):
    return json.loads((lab.store(store) / "manifest.json").read_text())


def test_all_formats_prove_the_same_text(lab):
    assert (
        len({manifest_of(lab, store)["ids_digest"]["value"] for store in [*ALL, CONCATENATED]}) == 1
    )
    assert (
        manifest_of(lab, PADDED)["ids_digest"]
        != manifest_of(lab, replace(PADDED, eos=True))["ids_digest"]
    )


STORAGES = [replace(TOKEN_LIST, dtype=dtype, row_group_rows=5) for dtype in ("int64", "uint32")]
STORAGES += [
    replace(TOKEN_LIST, codec=codec, row_group_rows=5)
    for codec in ("zstd", "snappy", "lz4", "none")
]
STORAGES += [replace(TOKEN_LIST, codec_level=19)]


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("store", [*STREAMED, *STORAGES], ids=lambda s: s.directory)
def test_a_format_of_documents_gives_them_back(lab, store, eos):
    """Whole, by number in any order, in chunks, and their lengths without them: what streams and
    `convert` ask for.
    """
    store = replace(store, eos=eos)
    reader = opened(lab, store)
    documents = documents_of(lab, eos)
    assert len(reader) == len(documents)
    order = np.random.default_rng(0).permutation(len(documents))
    assert reader.lengths_of(order).tolist() == [len(documents[i]) for i in order]
    for i in order.tolist():
        assert reader.document(i).dtype == np.int32 and np.array_equal(
            reader.document(i), documents[i]
        )
    for first, last in ((0, len(documents)), (3, 8)):
        found = [d for chunk in reader.chunks(first, last) for d in chunk.documents()]
        assert [d.tolist() for d in found] == [d.tolist() for d in documents[first:last]]


def test_padded_rows_are_cut_and_padded_documents(lab):
    tokens, labels = opened(lab, PADDED).rows(np.arange(len(documents_of(lab))))
    assert tokens.dtype == labels.dtype == np.int64 and tokens.shape == labels.shape
    for row, (document, inputs) in enumerate(zip(documents_of(lab), tokens, strict=True)):
        whole = document[: T + 1].tolist() + [2] * (T + 1 - len(document))
        assert inputs.tolist() == whole[:T]
        real = min(len(document), T + 1) - 1
        assert labels[row].tolist() == whole[1 : real + 1] + [IGNORED] * (T - real)


def test_padded_files_are_as_described_and_count_what_they_cut(lab):
    documents = documents_of(lab)
    manifest = manifest_of(lab, PADDED)
    assert manifest["tokens_cut"] == sum(max(0, len(d) - T - 1) for d in documents) > 0
    assert manifest["documents_cut"] == sum(len(d) > T + 1 for d in documents)
    assert manifest["tokens_useful"] == sum(min(len(d), T + 1) - 1 for d in documents)
    assert manifest["tokens_total"] == len(documents) * T
    file = pq.ParquetFile(lab.store(PADDED) / "shard-00000.parquet")
    metadata = {k.decode(): v.decode() for k, v in file.schema_arrow.metadata.items()}
    assert metadata == {"tokenizer": "bpe", "format": "padded"}
    assert file.schema_arrow.names == ["input_ids", "attention_mask"]
    column = file.metadata.row_group(0).column(0)
    assert column.compression == "ZSTD" and not {"PLAIN_DICTIONARY", "RLE_DICTIONARY"} & set(
        column.encodings
    )
    rows = file.read().to_pylist()
    assert [sum(row["attention_mask"]) for row in rows] == [min(len(d), T + 1) for d in documents]
    assert all(len(row["attention_mask"]) == len(row["input_ids"]) == T + 1 for row in rows)


@pytest.mark.parametrize("store", [PACKED, CONCATENATED], ids=lambda s: s.packing)
def test_packed_drops_nothing_and_repeats_no_label(lab, store):
    reader = opened(lab, store)
    tokens, labels = reader.rows(np.arange(len(reader)))
    pairs = sorted(
        zip(tokens[labels != IGNORED].tolist(), labels[labels != IGNORED].tolist(), strict=True)
    )
    expected = sorted(
        (int(a), int(b)) for d in documents_of(lab) for a, b in zip(d, d[1:], strict=False)
    )
    assert pairs == expected


def test_packed_is_full_and_counts_and_concatenated_rows_are_fuller_and_cut_more_documents(lab):
    best = manifest_of(lab, PACKED)
    cut = manifest_of(lab, CONCATENATED)
    documents = documents_of(lab)
    useful = sum(len(d) - 1 for d in documents)
    assert (
        best["tokens_useful"]
        == cut["tokens_useful"]
        == useful
        == manifest_of(lab, TOKEN_LIST)["tokens_useful"]
    )
    assert (
        best["tokens_cut"] == best["documents_cut"] == 0
        and best["fill"] > 0.9
        and best["dtype"] == "uint16"
    )
    assert cut["places"] - cut["tokens_stored"] <= T  # all rows are full but the last
    assert (
        cut["documents_split"] > best["documents_split"] == sum(len(d) > T + 1 for d in documents)
    )


def test_packed_uses_32_bits_above_65536_ids(lab, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(lab.tokenizer)
    tokenizer.vocabulary_size = 65_537
    monkeypatch.setattr(
        "tokenscale.data.stores.writing.load_tokenizer", lambda directory, engine: tokenizer
    )
    path = make_store(tmp_path, lab.corpus, lab.tokenizer, PACKED)
    wide = PackedStore(path, open_store(path, PACKED))
    narrow = opened(lab, PACKED)
    assert json.loads((path / "manifest.json").read_text())["dtype"] == "uint32"
    for a, b in zip(
        wide.rows(np.arange(len(wide))), narrow.rows(np.arange(len(narrow))), strict=True
    ):
        assert np.array_equal(a, b)


def test_rows_are_stored_shuffled(lab):
    """Best-fit-decreasing makes rows of long documents first; stored order must not."""
    pieces = np.load(lab.store(PACKED) / "pieces.npy")
    pointers = np.load(lab.store(PACKED) / "rows.npy")
    longest = [int(pieces[a:b].max()) for a, b in zip(pointers[:-1], pointers[1:], strict=True)]
    assert longest != sorted(longest, reverse=True)


def test_masks_never_compare_ids():
    """A document that uses the pad id keeps its labels; padding by length is ignored whatever its
    id.
    """
    rows = np.array([[0, 2, 2, 5, 2, 2]])
    assert make_labels(rows, lengths=np.array([4])).tolist() == [[2, 2, 5, IGNORED, IGNORED]]
    starts = [np.array([0, 2])]
    assert make_labels(rows, starts).tolist() == [[2, IGNORED, 5, 2, 2]]


def read_all(path, store):
    reader = load_reader(store.format)(path, open_store(path, store))
    if FORMATS[store.format].streamed:
        return [reader.document(i).tolist() for i in range(len(reader))]
    rows = [part.tolist() for part in reader.rows(np.arange(len(reader)))]
    if store.format == "packed":  # the tables of documents are read for documents alone
        rows += [
            document.tolist() for chunk in reader.chunks(0, 3) for document in chunk.documents()
        ]
    return rows


def _put(path, at, byte):
    """One byte in place: a file that is written anew after it was cut to nothing, ext4 hands to the
    disk at once.
    """
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes([byte]))


@pytest.mark.parametrize("store", ALL, ids=lambda s: s.format)
def test_every_single_byte_flip_is_found(tmp_path, store):
    lab = Lab(tmp_path / "lab", ["some words", "", "x" * 40], vocabulary_size=259)
    path = lab.store(
        replace(store, **({"sequence_length": 8} if "sequence_length" in store.options() else {}))
    )
    store = StoreSettings.parse(path.name)
    good_content = read_all(path, store)
    names = sorted(file.name for file in path.iterdir() if file.suffix not in (".json", ".parquet"))
    tried = 0
    for file in [*names, "manifest.json"]:
        good = (path / file).read_bytes()
        for at, byte in enumerate(good):
            _put(path / file, at, byte ^ 1 << (at % 8))
            try:  # of a records file, the zeros before the table are never read
                assert (
                    read_all(path, store) == good_content
                    and file == "shard-00000.bin"
                    and byte == 0
                )
            except UserError as error:
                assert str(path) in error.render() and "next" in error.facts, (file, at)
            _put(path / file, at, byte)
            tried += 1
    assert tried > 1000 and read_all(path, store) == good_content


@pytest.mark.parametrize("store", ALL, ids=lambda s: s.format)
def test_truncated_longer_and_missing_files_are_found(lab, tmp_path, store):
    path = make_store(tmp_path, lab.corpus, lab.tokenizer, store)
    for shard in sorted(file for file in path.iterdir() if file.suffix != ".json"):
        good = shard.read_bytes()
        for bad in (good[:-1], good + b"\0", b""):
            shard.write_bytes(bad)
            with pytest.raises(UserError, match="has changed") as error:
                open_store(path, store)
            assert (
                str(shard) in error.value.render()
                and f"snakemake -f {path}/manifest.json" in error.value.render()
            )
        shard.unlink()
        with pytest.raises(UserError, match="is missing"):
            open_store(path, store)
        shard.write_bytes(good)
    open_store(path, store)


def test_a_row_is_checked_when_it_is_read_and_not_before(lab, tmp_path):
    path = make_store(tmp_path, lab.corpus, lab.tokenizer, PACKED)
    rows = np.memmap(path / "tokens.bin", dtype="<u2", mode="r+").reshape(-1, T + 1)
    rows[3, 5] ^= 1
    reader = PackedStore(path, open_store(path, PACKED))
    reader.rows(np.array([0, 1, 2, 4]))
    with pytest.raises(UserError, match="a row of the token store has changed") as error:
        reader.rows(np.array([0, 3]))
    assert error.value.facts["row"].startswith("3 of ")
    # what verify=False means
    PackedStore(path, open_store(path, PACKED), verify=False).rows(np.array([3]))


#: what a run wants of a store of the format padded, by the name in the message
MISMATCHES = {
    "sequence_length": {"expected": replace(PADDED, sequence_length=T * 2)},
    "eos": {"expected": replace(PADDED, eos=True)},
    "dtype": {"expected": replace(PADDED, dtype="int64")},
    "format": {"expected": PACKED},
    "tokenizer": {"tokenizer_name": "tekken"},
    "tokenizer file, sha256": {"tokenizer_sha256": "0" * 64},
    "corpus manifest, sha256": {"corpus_manifest_sha256": "0" * 64},
    "vocabulary of at most": {"vocabulary_size": 261},
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_store_that_does_not_match_is_refused(lab, name):
    with pytest.raises(UserError, match=f"the-run-1 wants {name}") as error:
        open_store(
            lab.store(PADDED),
            **{"requested_by": "the-run-1", "expected": PADDED, **MISMATCHES[name]},
        )
    assert f"snakemake -f {lab.store(PADDED)}/manifest.json" in error.value.render()


@pytest.mark.parametrize("store", ALL, ids=lambda s: s.format)
def test_a_split_without_documents_and_eos_without_its_token_are_refused(lab, tmp_path, store):
    with pytest.raises(UserError, match="no validation documents"):
        make_store(tmp_path, lab.corpus, lab.tokenizer, replace(store, split="validation"))
    tokenizer = load_tokenizer(lab.tokenizer)
    tokenizer.eos_id = None
    with pytest.raises(UserError, match="no end-of-document token"):
        encode_documents(tokenizer, ["a"], eos=True)


def test_a_failed_writer_leaves_the_old_store(lab, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("disk")

    path = make_store(tmp_path, lab.corpus, lab.tokenizer, PACKED)
    before = files_of(path)
    monkeypatch.setattr("tokenscale.data.stores.write_packed.split_documents", fail)
    with pytest.raises(OSError, match="disk"):
        make_store(tmp_path, lab.corpus, lab.tokenizer, PACKED)
    assert files_of(path) == before


def test_a_row_group_beyond_int32_offsets_is_an_error(lab, tmp_path, monkeypatch):
    monkeypatch.setattr("tokenscale.data.stores.write_parquet.GROUP_VALUES", 20)
    with pytest.raises(UserError, match="a row group has too many ids") as error:
        make_store(tmp_path, lab.corpus, lab.tokenizer, TOKEN_LIST)
    assert (
        "row_group_rows" in error.value.facts["next"] and not (tmp_path / "manifest.json").exists()
    )


@pytest.mark.parametrize("store", [PADDED, TOKEN_LIST, PACKED], ids=lambda s: s.format)
def test_a_store_of_many_parts_is_written_and_read_with_few_open_files(
    lab, tmp_path, monkeypatch, store
):
    monkeypatch.setattr("tokenscale.data.stores.write_parquet.SHARD_ROWS", 1)
    monkeypatch.setattr("tokenscale.data.records.OPEN_FILES", 4)
    before = len(os.listdir("/proc/self/fd"))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, limit[1]))
    try:
        path = make_store(tmp_path, lab.corpus, lab.tokenizer, store)
        found = read_all(path, store)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    if store.format != "packed":  # its rows depend on windows of pieces, not on parts
        assert len(list(path.glob("shard-*.parquet"))) > 20
    monkeypatch.undo()
    assert found == read_all(lab.store(store), store)
