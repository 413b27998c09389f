"""The benchmark of the whole pretokenize job: each side in a process of its own, counted over the same text."""

import json

import pytest
from benchmarks import pretokenize

from tests.corpora import make_corpus, make_tokenizer
from tokenscale.data.corpus.raw_text import RawText

pytestmark = pytest.mark.experiment


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    corpus = make_corpus(
        folder / "corpus", [f"document {i} has a few words to say" for i in range(300)], row_group_rows=50
    )
    make_tokenizer(folder / "tokenizer", corpus, 300)
    return folder


def arguments(place, *more):
    paths = ["--corpus", place / "corpus/manifest.json", "--tokenizer", place / "tokenizer/manifest.json"]
    return [*map(str, paths), "--output", str(place / "out.json"), *more]


def test_every_side_is_timed_and_the_table_says_how_many_times(place, capsys):
    pytest.importorskip("transformers")
    stores = ["packed-sequence_length=64", "token-list"]
    assert pretokenize.main(arguments(place, "--rounds", "2", "--stores", *stores, "--memory", "1")) == 0
    result = json.loads((place / "out.json").read_text())
    found = sorted((r["round"], r["side"]) for r in result["records"])
    assert found == sorted((n, side) for n in range(2) for side in [*stores, "plain script"])
    assert all(r["seconds"] > 0 and r["peak_bytes"] > 1e7 for r in result["records"])
    assert set(result["engines"]) == {"gigatoken", "tokenizers"}  # tiktoken holds no BPE of ours
    assert result["memory"][0]["megabytes"] == 1 and result["memory"][0]["peak_bytes"] > 1e7
    printed = capsys.readouterr().out
    assert "x tokenizers" in printed and all(f"\n{side} " in printed for side in [*stores, "plain script"])


def test_more_cores_than_there_are_is_a_users_error(place, capsys):
    assert pretokenize.main(arguments(place, "--cores", "4096")) == 2
    assert "not so many cores" in capsys.readouterr().err


def test_a_side_that_fails_is_told_with_its_words(place, tmp_path):
    with pytest.raises(RuntimeError, match="unknown option of format"):
        pretokenize._run(
            pretokenize._command("token-list-nope=1", place / "corpus", place / "tokenizer", tmp_path), None
        )


def test_synthetic_text_is_seeded_and_as_much_as_asked_for(tmp_path):
    for name in "ab":
        pretokenize.synthetic(tmp_path / name, 1)
    manifests = [(tmp_path / name / "manifest.json").read_bytes() for name in "ab"]
    assert manifests[0] == manifests[1]
    split = RawText(tmp_path / "a").split
    assert 0.9e6 < split["utf8_bytes"] < 1.1e6 and split["rows"] > 100
