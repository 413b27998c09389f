"""What is never replaced, never its own source, never guessed, and never half there."""

import pytest

from tests.corpora import Lab
from tests.unit.conftest import T
from tests.unit.convert.conftest import FOREIGN, digest, ours, refused, run
from tokenscale.data.stores.foreign import reframe


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"vocabulary_size": 999}, "--vocabulary-size contradicts the source's record"),
        ({"bos_id": 2}, "--bos-id contradicts"),
        ({"tokenizer_name": "other"}, "--tokenizer-name contradicts"),
    ],
)
def test_flags_that_contradict_the_record_are_refused_and_a_renamed_pair_is_read(lab, tmp_path, settings, words):
    run(ours(lab), tmp_path / "m", to="megatron")
    assert words in refused(tmp_path / "m", tmp_path / "s", to="token-list", **settings)
    for name in ("bin", "idx", "tokenscale.json"):
        (tmp_path / f"m.{name}").rename(tmp_path / f"n.{name}")
    run(tmp_path / "n", tmp_path / "ok", to="token-list")


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
        assert "is not a token store" in refused(ours(lab), mine, to="packed", force=force)
    run(ours(lab), tmp_path / "store", to="packed")
    (tmp_path / "store/val.bin").write_bytes(b"precious")
    text = refused(ours(lab, "token-list"), tmp_path / "store", to="packed", force=True)
    assert "more than a store" in text and "val.bin" in text


def test_force_replaces_only_what_is_of_the_same_kind(lab, tmp_path):
    (tmp_path / "folder").mkdir()
    for to in ("nanogpt", "hf-datasets"):
        assert "same kind" in refused(ours(lab), tmp_path / "folder", to=to, force=True)
    for mine in ("one.parquet", "two.records"):
        (tmp_path / mine).write_bytes(b"text")
        target = (tmp_path / mine).with_suffix(".parquet")
        assert "same kind" in refused(ours(lab), target, to="token-list", force=True)
        assert (tmp_path / mine).read_bytes() == b"text"


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_source_is_never_its_own_target(lab, tmp_path, foreign):
    path = tmp_path / "x.bin"
    run(ours(lab), path, to=foreign)
    assert "replace its own source" in refused(path, path, to=foreign, force=True)


def test_what_cannot_be_meant_is_refused(lab, tmp_path):
    paths = {"packed": ours(lab), "padded": ours(lab, "padded"), "corpus": lab.corpus}
    for source, settings, words in [
        ("nowhere", {"to": "packed"}, "the source is missing"),
        ("corpus", {"to": "packed"}, "format of the source is unknown"),
        ("packed", {"to": "megatrn"}, "did you mean 'megatron'"),
        ("packed", {}, "--to is missing"),
        ("packed", {"to": "packed-codec=zstd"}, "expected  packed"),
        ("packed", {"to": "megatron", "eos": True}, "--eos does not apply"),
        ("packed", {"to": "megatron", "vocabulary_size": 5}, "--vocabulary-size does not apply from store"),
        ("packed", {"to": "token-list", "document_end": 5}, "--document-end does not apply"),
        ("padded", {"to": "megatron"}, "cannot be recovered from the format padded"),
    ]:
        assert words in refused(paths.get(source, tmp_path / source), tmp_path / "x", **settings)
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
    chunks = reframe.ReframedDocuments.chunks

    def broken(self, first, last):
        for number, chunk in enumerate(chunks(self, first, last)):
            if number == 2:
                raise Interrupted
            yield chunk

    monkeypatch.setattr(reframe, "BLOCK_TOKENS", 50)
    with monkeypatch.context() as patched:
        patched.setattr(reframe.ReframedDocuments, "chunks", broken)
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
    chunks = reframe.ReframedDocuments.chunks

    def changing(self, first, last):
        yield from chunks(self, first, last)
        (tmp_path / "m.bin").touch()

    monkeypatch.setattr(reframe.ReframedDocuments, "chunks", changing)
    for to in ("nanogpt", "hf-datasets", "litdata", "mds"):
        assert "has changed while it was converted" in refused(tmp_path / "m", tmp_path / "x", to=to)
