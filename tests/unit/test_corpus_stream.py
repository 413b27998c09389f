"""Documents that the library datasets streams, from Parquet files on this machine."""

import contextlib
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpora import texts_of
from tokenscale.base.errors import UserError
from tokenscale.data.corpus.build import build
from tokenscale.data.corpus.raw_text import PAIR
from tokenscale.settings.data import CorpusSettings, SourceSettings

pytestmark = pytest.mark.slow(15)
pytest.importorskip("datasets")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "dataset"
    (folder / "data").mkdir(parents=True)
    for name, numbers in (("train-00000", range(300)), ("train-00001", range(300, 500)), ("validation-00000", [900])):
        texts = [f"document {i}" if i % 100 else None for i in numbers]
        pairs = [{"de": f"Satz {i}", "en": f"sentence {i}"} for i in numbers]
        table = pa.table({"body": texts, "translation": pairs, "score": [0.5] * len(texts)})
        pq.write_table(table, folder / f"data/{name}.parquet", row_group_size=64)
    return folder


def corpus_of(folder, **more):
    source = SourceSettings(kind="stream", repository=str(folder), **{"text_column": "body", **more})
    return CorpusSettings(name="own", source=source)


def test_a_dataset_becomes_the_corpus_of_its_files(folder, tmp_path):
    built = build(corpus_of(folder), tmp_path / "c")
    paths = tuple(str(p) for p in sorted((folder / "data").glob("train*")))
    files = SourceSettings(kind="files", files=paths, text_column="body")
    expected = build(CorpusSettings(name="own", source=files), tmp_path / "files")
    for split in ("train", "validation"):
        assert texts_of(tmp_path / "c", split) == texts_of(tmp_path / "files", split)
        assert built["splits"][split]["text_sha256"] == expected["splits"][split]["text_sha256"]
    assert built["cleaning"] == expected["cleaning"]  # nulls are counted
    names = [file["name"] for file in built["source"]["files"]]
    assert names == ["data/train-00000.parquet", "data/train-00001.parquet", "data/validation-00000.parquet"]


def test_a_validation_split_pairs_and_a_limit(folder, tmp_path):
    more = {"text_column": "translation.de", "target_column": "translation.en", "maximum_documents": 7}
    build(corpus_of(folder, validation_split="validation", **more), tmp_path / "c")
    assert texts_of(tmp_path / "c", "train") == [f"Satz {i}{PAIR}sentence {i}" for i in range(7)]
    assert texts_of(tmp_path / "c", "validation") == [f"Satz 900{PAIR}sentence 900"]


@pytest.mark.parametrize(
    ("values", "message", "fact"),
    [
        ({"split": "tset"}, "has no split 'tset'", "train"),
        ({"validation_split": "test"}, "has no split 'test'", "validation"),
        ({"text_column": "boby"}, "no column 'boby'", "body"),
        ({"text_column": "score"}, "does not hold text", "float"),
        ({"subset": "other"}, "cannot be streamed", "default"),
        (None, "cannot be streamed", ""),
    ],
)
def test_what_is_not_there_or_damaged_is_one_message(folder, tmp_path, values, message, fact):
    if values is None:
        path = folder / "data/train-00001.parquet"
        path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match=message) as error:
        build(corpus_of(folder, **(values or {})), tmp_path / "c")
    assert fact in error.value.render() and "next" in error.value.facts


def test_a_dataset_of_the_hub_needs_its_commit(tmp_path):
    with pytest.raises(UserError, match="needs its commit"):
        build(corpus_of("org/name"), tmp_path)
    assert "revision" in dict(corpus_of("a/b", revision="main").source.problems())


def test_without_its_package_or_with_one_that_runs_scripts_the_message_says_so(folder, tmp_path, monkeypatch):
    with monkeypatch.context() as old, pytest.raises(UserError, match="need the package datasets") as error:
        old.setattr("datasets.__version__", "3.6.0")
        build(corpus_of(folder), tmp_path)
    assert error.value.facts["found"] == "version 3.6.0"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="need the package datasets") as error:
        build(corpus_of(folder), tmp_path)
    assert error.value.facts["next"] == 'pip install "tokenscale[datasets]"'


def test_no_script_of_a_dataset_runs(folder, tmp_path):
    (folder / "dataset.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with contextlib.suppress(UserError):
        build(corpus_of(folder), tmp_path / "c")
    assert not (tmp_path / "ran").exists()
