"""A conversion that is interrupted, or whose source changes meanwhile."""

import pytest

from tests.unit.convert.conftest import FOREIGN, digest, ours, refused, run
from tokenscale.data.stores.foreign import reframe


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
