"""Our stores through each format and back: equal ids, and a manifest that says where they came from."""

import re

import pytest

from tests.unit.conftest import T
from tests.unit.convert.conftest import FOREIGN, KNOWN, digest, documents_of, ours, run, write_megatron
from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, write_sealed
from tokenscale.cli.convert import ConvertSettings, convert
from tokenscale.data.stores import write_parquet
from tokenscale.data.stores.manifest import SEAL, load_reader, open_store, read_store_manifest
from tokenscale.settings.data import StoreSettings


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
def test_a_source_is_read_from_any_document_on(lab, tmp_path, small_blocks, monkeypatch, foreign, part):
    """The writer of Parquet asks for the documents of a shard at a time."""
    run(ours(lab, "token-list"), tmp_path / "x.bin", to=foreign)
    monkeypatch.setattr(write_parquet, "SHARD_ROWS", part)
    monkeypatch.setattr("tokenscale.data.stores.documents.GROUP_DOCUMENTS", part)
    run(tmp_path / "x.bin", tmp_path / "back", to="token-list")
    count = read_store_manifest(tmp_path / "back")["documents"]
    assert count > 7 and len(list((tmp_path / "back").glob("*.parquet"))) == -(-count // part)
    assert documents_of(tmp_path / "back") == documents_of(ours(lab, "token-list"))


def test_foreign_formats_become_one_another(lab, tmp_path, small_blocks):
    path = ours(lab)
    for number, layout in enumerate([*FOREIGN, *FOREIGN[::2], *FOREIGN[::-1]]):
        run(path, tmp_path / f"{number}/x.bin", to=layout)
        path = tmp_path / f"{number}/x.bin"
    run(path, tmp_path / "back", to=f"packed-sequence_length={T}")
    assert digest(tmp_path / "back") == digest(ours(lab))


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
    assert "EOS 1 removed from each document" in run(with_eos, tmp_path / "without", to="token-list", eos=False)
    assert digest(tmp_path / "with") == digest(with_eos)
    assert digest(tmp_path / "without") == digest(ours(lab, "token-list"))


def test_one_parquet_file_can_be_written_and_read(lab, tmp_path):
    run(ours(lab), tmp_path / "one.parquet", to="token-list")
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".json", ".parquet", ".records"]
    run(tmp_path / "one.parquet", tmp_path / "again", to=f"packed-sequence_length={T}")
    assert digest(tmp_path / "again") == digest(ours(lab))


@pytest.mark.parametrize("form", ["token-list", "padded"])
@pytest.mark.parametrize("single", [False, True])
def test_a_store_without_records_is_refused_with_the_command_that_writes_it_again(lab, tmp_path, form, single):
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
    assert (origin["document_ends_stripped"], origin["bos_stripped"], origin["documents"]) == (2, 0, 2)
    assert found["tokenizer"] == {"name": "theirs", "kind": "unknown", "file_sha256": None}
    assert "makers" in found["special_token_policy"] and str(tmp_path) not in canonical_json(found)
    with pytest.raises(UserError, match="corpus manifest"):  # a run that asks for a corpus is refused
        open_store(tmp_path / "s", StoreSettings("token-list"), corpus_manifest_sha256="0" * 64)
