"""The archive: every document comes back from blocks of any size, and `packed` comes out as if from the text."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import Lab
from tests.unit.conftest import TEXTS, T, files_of
from tokenscale.base.errors import UserError
from tokenscale.cli import main as cli
from tokenscale.data.stores import archive, ranked, unpack
from tokenscale.data.stores.archive import ArchiveDocuments, ArchiveStore
from tokenscale.data.stores.documents import Chunk, Origin
from tokenscale.data.stores.manifest import open_store, read_store_manifest, write_sealed
from tokenscale.data.stores.write import write_store
from tokenscale.settings.data import StoreSettings

pytestmark = pytest.mark.slow(23)

ARCHIVE = StoreSettings("archive")
PACKED = StoreSettings("packed", sequence_length=T)


class Listed:
    """Documents that a test made up."""

    def __init__(self, documents, vocabulary_size):
        self._documents = documents
        tokenizer = {"name": "none", "kind": "test", "file_sha256": "0" * 64}
        self.origin = Origin(tokenizer, vocabulary_size, 0, None, 0, {"text_sha256": "1" * 64})

    def __len__(self):
        return len(self._documents)

    def chunks(self, first, last):
        some = self._documents[first:last]
        yield Chunk(np.concatenate(some).astype(np.int32), np.array([len(d) for d in some], dtype=np.int64))

    def confirm(self):
        pass


def opened(path, store=ARCHIVE):
    return ArchiveStore(path, open_store(path, store))


def written(path, lab, store):
    write_store(store, lab.corpus, lab.tokenizer, path)
    return path


# ---------------------------------------------------------------------------------------------------------- round trip


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_range_of_documents_comes_back_from_blocks_of_any_size(tmp_path_factory, data):
    vocabulary = data.draw(st.sampled_from([2, 300, 65_536, 65_537, 131_072]), "vocabulary")
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=30), "lengths")
    block = data.draw(st.integers(1, 60), "ids of a block")
    level = data.draw(st.sampled_from(["fast", "small", "smallest"]), "level")
    first = data.draw(st.integers(0, len(lengths)), "first")
    last = data.draw(st.integers(first, len(lengths)), "last")
    numbers = np.random.default_rng(sum(lengths))
    documents = [numbers.integers(0, vocabulary, n) for n in lengths]
    path, store = tmp_path_factory.mktemp("a") / "archive", replace(ARCHIVE, level=level)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranked, "BLOCK_IDS", block)
        archive.write(store, Listed(documents, vocabulary), path)
    reader = opened(path, store)
    assert len(reader) == len(lengths) and reader.lengths.tolist() == lengths
    assert reader.manifest["blocks"] == -(-sum(lengths) // block)
    chunks = list(reader.chunks(first, last))
    assert all(chunk.ids.dtype == np.int32 and len(chunk.lengths) for chunk in chunks)
    found = [d.tolist() for chunk in chunks for d in chunk.documents()]
    assert found == [d.tolist() for d in documents[first:last]]


def test_memory_holds_a_block_and_the_documents_that_end_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(ranked, "BLOCK_IDS", 100)
    archive.write(ARCHIVE, Listed([np.arange(30)] * 50, 30), tmp_path)
    assert max(len(chunk.ids) for chunk in opened(tmp_path).chunks(0, 50)) < 100 + 30


def test_the_manifest_counts_as_token_list_does(lab):
    counts = ("rows", "documents", "tokens_in_documents", "tokens_useful", "tokens_total", "tokens_stored", "places")
    counts += (
        "fill",
        "tokens_cut",
        "documents_cut",
        "ids_digest",
        "text_sha256",
        "corpus_manifest_sha256",
        "tokenizer",
    )
    ours, theirs = (read_store_manifest(lab.store(s)) for s in (ARCHIVE, StoreSettings("token-list")))
    assert {name: ours[name] for name in counts} == {name: theirs[name] for name in counts}
    assert ours["bits_per_token"]["order_0_entropy"] == theirs["bits_per_token"]["order_0_entropy"]
    ids = np.concatenate([chunk.ids for chunk in opened(lab.store(ARCHIVE)).chunks(0, len(TEXTS))])
    assert ours["different_ids"] == len(np.unique(ids))


@pytest.mark.parametrize("level", ["fast", "small", "smallest"])
def test_levels_trade_bytes_for_time_and_change_no_id(tmp_path, level):
    numbers = np.random.default_rng(0)
    phrases = numbers.integers(0, 5000, (40_000, 6))  # more of them than `fast` remembers
    documents = [phrases[numbers.integers(0, len(phrases), 400)].ravel() for _ in range(500)]
    sizes, digests = [], set()
    for name in ("fast", level):
        store = replace(ARCHIVE, level=name)
        manifest = archive.write(store, Listed(documents, 5000), tmp_path / name)
        sizes.append(sum(file["bytes"] for file in manifest["files"]))
        digests.add(manifest["ids_digest"]["value"])
        assert manifest["options"]["level"] == name
    assert len(digests) == 1 and (sizes[1] < sizes[0] or level == "fast")
    assert sizes[0] < sum(map(len, documents)) * 2  # what uint16 takes


def test_options_are_in_the_name():
    assert ARCHIVE.directory == "archive"
    assert StoreSettings.parse("archive-eos=true-level=small") == replace(ARCHIVE, eos=True, level="small")
    assert replace(PACKED, split="validation", eos=True).archive == replace(ARCHIVE, split="validation", eos=True)
    with pytest.raises(UserError, match="unknown value of level 'smal'"):
        StoreSettings.parse("archive-level=smal")
    with pytest.raises(UserError, match="unknown option of format archive 'sequence_length'"):
        StoreSettings.parse("archive-sequence_length=2048")


# ------------------------------------------------------------------------------------------------------ what is refused


def test_a_block_is_checked_when_it_is_read_and_not_before(tmp_path, monkeypatch):
    monkeypatch.setattr(ranked, "BLOCK_IDS", 100)
    archive.write(ARCHIVE, Listed([np.arange(30)] * 50, 30), tmp_path)
    file = tmp_path / "blocks.bin"
    good = file.read_bytes()
    block = len(good) // 15
    assert read_store_manifest(tmp_path)["blocks"] == 15
    file.write_bytes(good[: 7 * block] + bytes([good[7 * block] ^ 1]) + good[7 * block + 1 :])
    reader = opened(tmp_path)
    assert sum(len(c.lengths) for c in reader.chunks(0, 20)) == 20  # ids 0–599: blocks 0–5
    with pytest.raises(UserError, match="a block of the token store has changed") as error:
        list(reader.chunks(0, 50))
    assert error.value.facts["block"].startswith("7 of 15, byte ") and "snakemake -f" in error.value.facts["next"]


def test_without_xxhash_the_whole_file_is_checked_on_opening(lab, tmp_path, monkeypatch):
    path = shutil.copytree(lab.store(ARCHIVE), tmp_path / "archive")
    monkeypatch.setattr(archive, "xxh3_64_intdigest", None)
    assert sum(len(c.lengths) for c in opened(path).chunks(0, len(TEXTS))) == len(TEXTS)
    good = (path / "blocks.bin").read_bytes()
    (path / "blocks.bin").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(UserError, match="has changed"):
        opened(path)


def test_writing_without_zstandard_says_what_to_install(lab, tmp_path, monkeypatch):
    find = archive.importlib.util.find_spec
    monkeypatch.setattr(archive.importlib.util, "find_spec", lambda name: None if name == "zstandard" else find(name))
    with pytest.raises(UserError, match="pip install zstandard"):
        written(tmp_path / "archive", lab, ARCHIVE)
    assert not (tmp_path / "archive").exists()


def test_reading_needs_no_zstandard(lab, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    assert sum(len(c.lengths) for c in opened(lab.store(ARCHIVE)).chunks(0, len(TEXTS))) == len(TEXTS)


# ------------------------------------------------------------------------------------------------------------ unpacking


@pytest.mark.parametrize(
    "store", [PACKED, replace(PACKED, eos=True), replace(PACKED, sequence_length=64)], ids=lambda s: s.directory
)
@pytest.mark.parametrize("level", ["fast", "smallest"])
def test_unpacked_is_packed_byte_for_byte(lab, tmp_path, monkeypatch, small_parts, store, level):
    """Without text and tokenizer: where the archive is all that is left."""
    made = written(tmp_path / "archive", lab, replace(store.archive, level=level))
    whole = written(tmp_path / "packed", lab, store)
    monkeypatch.setattr("tokenscale.data.stores.text.RawText", None)
    assert read_store_manifest(made)["blocks"] > 10
    unpack.unpack(made, store, tmp_path / "unpacked")
    assert files_of(tmp_path / "unpacked") == files_of(whole)
    assert json.loads((tmp_path / "unpacked/build.json").read_text())["engine"] == "archive"


def test_unpacking_ids_of_32_bits_and_of_the_validation_split(tmp_path):
    lab = Lab(tmp_path / "lab", [f"document {i}" for i in range(200)], vocabulary_size=262, validation_share=0.5)
    store = replace(PACKED, split="validation")
    unpack.unpack(written(tmp_path / "archive", lab, store.archive), store, tmp_path / "unpacked")
    assert files_of(tmp_path / "unpacked") == files_of(lab.store(store))
    wide = Listed([np.arange(60_000, 70_000)] * 3, 70_000)
    archive.write(ARCHIVE, wide, tmp_path / "wide")
    manifest = unpack.unpack(tmp_path / "wide/manifest.json", PACKED, tmp_path / "rows")
    unpack.packed.write(PACKED, wide, tmp_path / "direct")
    assert manifest["dtype"] == "uint32" and files_of(tmp_path / "rows") == files_of(tmp_path / "direct")


def test_an_interrupted_unpacking_is_taken_over(lab, tmp_path, monkeypatch, small_parts):
    made = written(tmp_path / "archive", lab, ARCHIVE)
    started, chunks = [], ArchiveDocuments.chunks

    def interrupted(self, first, last):
        if started:
            raise KeyboardInterrupt
        started.append(first)
        yield from chunks(self, first, last)

    with monkeypatch.context() as patched:
        patched.setattr(ArchiveDocuments, "chunks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            unpack.unpack(made, PACKED, tmp_path / "unpacked")
    unpack.unpack(made, PACKED, tmp_path / "unpacked")
    assert json.loads((tmp_path / "unpacked/build.json").read_text())["parts_taken_over"] == 1
    assert files_of(tmp_path / "unpacked") == files_of(written(tmp_path / "packed", lab, PACKED))


def test_a_store_of_another_format_is_not_unpacked(lab, tmp_path):
    with pytest.raises(UserError, match="only archives can be unpacked") as error:
        unpack.unpack(lab.store(PACKED), PACKED, tmp_path / "unpacked")
    assert error.value.facts["found"] == "format packed" and not (tmp_path / "unpacked").exists()


@pytest.mark.parametrize(
    "store",
    [replace(PACKED, eos=True), replace(PACKED, split="validation"), StoreSettings("token-list")],
    ids=lambda s: s.directory,
)
def test_an_archive_of_other_documents_is_refused(lab, tmp_path, store):
    with pytest.raises(UserError, match="cannot be made from this archive") as error:
        unpack.unpack(lab.store(ARCHIVE), store, tmp_path / "unpacked")
    assert error.value.facts["found"] == "archive" and not (tmp_path / "unpacked").exists()


def test_a_damaged_archive_leaves_no_store(lab, tmp_path):
    path = shutil.copytree(lab.store(ARCHIVE), tmp_path / "archive")
    good = (path / "blocks.bin").read_bytes()
    (path / "blocks.bin").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(UserError, match="a block of the token store has changed"):
        unpack.unpack(path, PACKED, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked/manifest.json").exists()


def test_ids_that_are_not_the_archives_make_no_store(lab, tmp_path):
    """The last word is the digest: here of an archive whose every file is what its manifest says."""
    path = shutil.copytree(lab.store(ARCHIVE), tmp_path / "archive")
    manifest = read_store_manifest(path)
    manifest["ids_digest"]["value"] = "0" * 64
    write_sealed(path / "manifest.json", manifest)
    with pytest.raises(UserError, match="the ids differ from those of their source store"):
        unpack.unpack(path, PACKED, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked/manifest.json").exists()


def test_a_nodes_disk_is_filled_once(lab, tmp_path):
    path, made = unpack.unpack_once(lab.store(ARCHIVE), PACKED, tmp_path)
    assert made and path == tmp_path / "packed-sequence_length=16/manifest.json"
    assert files_of(path.parent) == files_of(lab.store(PACKED))
    assert unpack.unpack_once(lab.store(ARCHIVE), PACKED, tmp_path) == (path, False)
    assert unpack.unpack_once(lab.store(ARCHIVE), replace(PACKED, sequence_length=32), tmp_path)[1]  # beside it
    (path.parent / "rows.npy").write_bytes(b"")
    assert unpack.unpack_once(lab.store(ARCHIVE), PACKED, tmp_path)[1]  # it was damaged
    assert files_of(path.parent) == files_of(lab.store(PACKED))
    other = Lab(tmp_path / "other", TEXTS[1:], vocabulary_size=262)
    assert unpack.unpack_once(other.store(ARCHIVE), PACKED, tmp_path)[1]  # it was of another text
    assert files_of(path.parent) == files_of(other.store(PACKED))


# ------------------------------------------------------------------------------------------------------------ the verb


def test_the_verb_takes_a_folder_or_a_manifest(lab, tmp_path, capsys):
    for number, words in enumerate((["--sequence-length", str(T)], ["--store", PACKED.directory])):
        path = [lab.store(ARCHIVE), lab.store(ARCHIVE) / "manifest.json"][number]
        output = tmp_path / f"{number}/manifest.json"
        assert cli.main(["unpack", "--archive", str(path), "--output", str(output), *words]) == 0
        assert files_of(output.parent) == files_of(lab.store(PACKED))
    said = capsys.readouterr().out
    assert f"{len(TEXTS)} of {len(TEXTS)} documents" in said and "useful of" in said


def test_the_verb_names_the_store_on_a_nodes_disk(lab, tmp_path, capsys):
    words = ["unpack", "--archive", str(lab.store(ARCHIVE)), "--local-disk", str(tmp_path), "--sequence-length", str(T)]
    path = tmp_path / "packed-sequence_length=16/manifest.json"
    assert cli.main(words) == 0 and capsys.readouterr().out.strip() == str(path)
    before = path.stat().st_mtime_ns
    assert cli.main(words) == 0 and capsys.readouterr().out.strip() == f"{path} (already exists)"
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "words, says",
    [
        (["--archive", "nowhere", "--output", "o/manifest.json"], "the manifest of the token store is missing"),
        (
            ["--archive", "ARCHIVE", "--output", "o/manifest.json", "--sequence-length", "0"],
            "--sequence-length must be at least 1",
        ),
        (["--archive", "ARCHIVE", "--output", "o/manifest.json", "--store", "packd"], "unknown format 'packd'"),
        (["--archive", "ARCHIVE", "--output", "o/rows.bin"], "a store's manifest must be named manifest.json"),
    ],
)
def test_wrong_words_are_one_message_and_exit_code_2(lab, tmp_path, capsys, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    words = [str(lab.store(ARCHIVE)) if word == "ARCHIVE" else word for word in words]
    assert cli.main(["unpack", *words]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "o").exists()


@pytest.mark.parametrize("to", [[], ["--output", "o/manifest.json", "--local-disk", "d"]])
def test_one_place_is_asked_for(lab, to):
    with pytest.raises(SystemExit) as error:
        cli.main(["unpack", "--archive", str(lab.store(ARCHIVE)), *to])
    assert error.value.code == 2
