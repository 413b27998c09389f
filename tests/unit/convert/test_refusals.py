"""What is never replaced, never its own source, never guessed, and never half there."""

import shutil

import pytest

from tests.corpora import Lab, flip_bit
from tests.refusals import tree_of
from tests.unit.conftest import Interrupted
from tests.unit.convert.conftest import FOREIGN, digest, ours, refused, run
from tokenscale.data.stores.foreign import reframe


def test_flags_that_contradict_the_record_are_refused_and_a_renamed_pair_is_read(lab, tmp_path):
    run(ours(lab), tmp_path / "m", to="megatron")
    for name, value in (("vocabulary_size", 999), ("bos_id", 2), ("tokenizer_name", "other")):
        text = refused(tmp_path / "m", tmp_path / "s", to="token-list", **{name: value})
        assert f"--{name.replace('_', '-')} contradicts" in text
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
    before = tree_of(tmp_path)
    assert "--force replaces it" in refused(ours(lab, "token-list"), target, to=to)
    assert tree_of(tmp_path) == before
    run(ours(lab, "token-list", eos=True), target, to=to, force=True)
    run(target, tmp_path / "back", to="token-list")
    assert digest(tmp_path / "back") == digest(ours(lab, "token-list", eos=True))
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("to", ["packed", "litdata", "mds"])
def test_a_folder_that_holds_other_things_is_never_cleared(lab, tmp_path, to):
    """A store's writer clears its folder of files of tokens: a user's own must not be among
    them.
    """
    run(ours(lab), tmp_path / "store", to=to)
    run(ours(lab), tmp_path / "store", to=to, force=True)
    (tmp_path / "store/val.bin").write_bytes(b"precious")
    text = refused(ours(lab, "token-list"), tmp_path / "store", to=to, force=True)
    assert "more than a" in text and "val.bin" in text
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/train.bin").write_bytes(b"precious")
    for force in (False, True):
        text = refused(ours(lab), tmp_path / "mine", to=to, force=force)
        assert "is not a token store" in text or to != "packed"


def test_force_replaces_only_what_is_of_the_same_kind(lab, tmp_path):
    (tmp_path / "folder").mkdir()
    for to in ("nanogpt", "hf-datasets"):
        assert "same kind" in refused(ours(lab), tmp_path / "folder", to=to, force=True)
    for mine in ("one.parquet", "two.records"):
        (tmp_path / mine).write_bytes(b"text")
        target = (tmp_path / mine).with_suffix(".parquet")
        assert "same kind" in refused(ours(lab), target, to="token-list", force=True)
        assert (tmp_path / mine).read_bytes() == b"text"


def test_a_source_is_never_its_own_target(lab, tmp_path):
    for number, foreign in enumerate(FOREIGN):
        run(ours(lab), tmp_path / f"{number}.bin", to=foreign)
        assert "its own source" in refused(
            tmp_path / f"{number}.bin", tmp_path / f"{number}.bin", to=foreign, force=True
        )


def test_what_cannot_be_meant_is_refused(lab, tmp_path):
    paths = {"packed": ours(lab), "padded": ours(lab, "padded"), "corpus": lab.corpus}
    for source, settings, words in [
        ("nowhere", {"to": "packed"}, "the source is missing"),
        ("corpus", {"to": "packed"}, "format of the source is unknown"),
        ("packed", {"to": "megatrn"}, "did you mean 'megatron'"),
        ("packed", {}, "--to is missing"),
        ("packed", {"to": "packed-codec=zstd"}, "expected  packed"),
        ("packed", {"to": "megatron", "eos": True}, "--eos does not apply"),
        (
            "packed",
            {"to": "megatron", "vocabulary_size": 5},
            "--vocabulary-size does not apply from store",
        ),
        ("packed", {"to": "token-list", "document_end": 5}, "--document-end does not apply"),
        ("padded", {"to": "megatron"}, "cannot be recovered from the format padded"),
    ]:
        assert words in refused(paths.get(source, tmp_path / source), tmp_path / "x", **settings)
    assert "a folder of files" in refused(
        ours(lab, "token-list"), tmp_path / "x.parquet", to="packed"
    )


def test_a_changed_row_of_a_store_is_found_and_nothing_is_written(lab, tmp_path):
    store = shutil.copytree(ours(lab), tmp_path / "in/store")
    flip_bit(store / "tokens.bin", 40)
    (tmp_path / "out").mkdir()
    for to in FOREIGN:
        assert "has changed" in refused(store, tmp_path / "out/x.bin", to=to)


@pytest.mark.parametrize("to", [*FOREIGN, "token-list", "packed", "token-list.parquet"])
@pytest.mark.parametrize("old", [False, True], ids=["fresh", "over an old one"])
def test_an_interrupted_conversion_leaves_the_target_as_it_was(lab, tmp_path, monkeypatch, to, old):
    target = tmp_path / ("x.parquet" if to.endswith(".parquet") else "x.bin")
    to = to.removesuffix(".parquet")
    run(ours(lab), tmp_path / "source", to="megatron")
    if old:
        run(ours(lab, "packed", eos=True), target, to=to)
    before = tree_of(tmp_path)
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
    assert {
        name: data for name, data in tree_of(tmp_path).items() if ".building" not in name and data
    } == {name: data for name, data in before.items() if data}
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
        assert "has changed while it was converted" in refused(
            tmp_path / "m", tmp_path / "x", to=to
        )
