"""Raw text: cleaned and counted, split by hash, checked when read, never changed silently."""

import contextlib
import gzip
import json
import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpora import DESCRIPTION, HOSTILE, held_out, make_corpus, texts_of
from tests.unit.conftest import files_of
from tokenscale.base.errors import UserError
from tokenscale.data.corpus import docstrings
from tokenscale.data.corpus import read as read_module
from tokenscale.data.corpus.build import build, build_from
from tokenscale.data.corpus.raw_text import PAIR, RawText, write_text_records
from tokenscale.settings.data import CleaningSettings, CorpusSettings, SourceSettings

TEXTS = [f"document number {i}, {'word ' * (i % 13)}" for i in range(300)]


def test_the_split_is_by_hash_and_covers_all(tmp_path):
    # duplicates kept on purpose
    corpus = make_corpus(tmp_path, TEXTS + TEXTS[:40], validation_share=0.3)
    train, validation = (texts_of(corpus, split) for split in ("train", "validation"))
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(TEXTS + TEXTS[:40])
    assert all(held_out(t, 0.3) for t in validation) and not any(held_out(t, 0.3) for t in train)
    assert 0.2 < len(validation) / 340 < 0.4


def test_text_comes_back_as_it_went_in(tmp_path):
    corpus = make_corpus(tmp_path, HOSTILE, row_group_rows=3)
    text = RawText(corpus)
    assert texts_of(corpus) == list(HOSTILE) == [t for batch in text.batches(2) for t in batch]
    with pytest.raises(IndexError):
        text.text(len(HOSTILE))


def test_cleaning_counts_every_fate(tmp_path):
    cleaning = CleaningSettings(minimum_characters=3, maximum_characters=10)
    texts = [
        "  spaced  ",
        "spaced",
        "no",
        "far too long for it",
        "\ud800 lone",
        "kept it",
        "kept it",
    ]
    corpus = make_corpus(tmp_path, texts, cleaning=cleaning)
    manifest = json.loads((corpus / "manifest.json").read_text())
    assert manifest["cleaning"]["documents"] == {
        "read": 7,
        "no_text": 0,
        "composed": 0,
        "collapsed": 0,
        "stripped": 1,
        "not_unicode": 1,
        "too_short": 1,
        "too_long": 1,
        "duplicates": 2,
        "kept": 2,
    }
    assert texts_of(corpus) == ["spaced", "kept it"]


def test_a_purged_shard_is_restored_and_a_change_that_was_asked_for_is_made(tmp_path):
    corpus = make_corpus(tmp_path / "c", TEXTS)
    before = files_of(corpus)
    (corpus / "train-00000.parquet").unlink()
    assert files_of(make_corpus(corpus, TEXTS)) == before
    make_corpus(corpus, TEXTS, cleaning=CleaningSettings(minimum_characters=8))
    assert files_of(corpus) != before
    assert len(RawText(make_corpus(corpus, [*TEXTS, "one more"]))) == 301


def test_a_large_corpus_is_read_by_number_only_with_its_records_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenscale.data.corpus.raw_text.MEMORY_BYTES", 2000)
    corpus = make_corpus(tmp_path, [*TEXTS, *HOSTILE], row_group_rows=10)
    expected = [text for batch in RawText(corpus).batches() for text in batch]
    with pytest.raises(UserError, match="too large to read documents in random order") as error:
        RawText(corpus).text(0)
    assert error.value.facts["next"] == f"snakemake {corpus}/records/manifest.json"
    write_text_records(corpus)
    text = RawText(corpus)
    count = len(expected)
    assert [text.text(i * 37 % count) for i in range(600)] == [
        expected[i * 37 % count] for i in range(600)
    ]
    # the Parquet shards are not read: they need not even be whole
    shard = corpus / "train-00000.parquet"
    shard.write_bytes(bytes(shard.stat().st_size))
    assert RawText(corpus).text(3) == expected[3]


def test_records_of_an_earlier_build_of_the_corpus_are_not_read(tmp_path):
    corpus = make_corpus(tmp_path / "a", TEXTS)
    write_text_records(corpus)
    other = make_corpus(tmp_path / "b", [text.upper() for text in TEXTS])
    shutil.copytree(corpus / "records", other / "records")
    assert RawText(other).open_records() is None
    assert RawText(other).text(5) == next(RawText(other).batches(10))[5]


@pytest.mark.parametrize(
    "change", [lambda data: bytes([data[0] ^ 1]) + data[1:], lambda data: data[:-1], None]
)
def test_changed_records_of_a_corpus_are_named(tmp_path, change):
    corpus = make_corpus(tmp_path, TEXTS)
    write_text_records(corpus)
    file = corpus / "records/train-00000.bin"
    file.write_bytes(change(file.read_bytes())) if change else file.unlink()
    with pytest.raises(UserError, match="has changed" if change else "missing") as error:
        RawText(corpus).text(0)
    assert (
        error.value.facts["file"] == str(file)
        and f"snakemake -f {corpus}/records" in error.value.facts["next"]
    )


def test_any_range_of_documents_is_read_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenscale.data.corpus.build.SHARD_DOCUMENTS", 23)
    text = RawText(make_corpus(tmp_path, TEXTS, row_group_rows=10))
    count = len(TEXTS)
    assert [file["rows"] for file in text.split["files"]] == [23] * 13 + [1]
    for first, last in [(0, 0), (0, 1), (22, 24), (9, 47), (46, 46), (5, count), (count, count)]:
        for size in (1, 7, 512):
            columns = [column.to_pylist() for column in text.columns(size, first, last)]
            assert [document for column in columns for document in column] == TEXTS[first:last], (
                first,
                last,
                size,
            )
            assert all(len(column) <= size for column in columns)


def test_docstrings_are_read_by_syntax_not_by_import(tmp_path):
    settings = CorpusSettings(source=SourceSettings(packages=("hypothesis", "pydoc_data")))
    manifest = build(settings, tmp_path / "a")
    build(settings, tmp_path / "b")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert manifest["splits"]["train"]["rows"] > 300
    origins = pq.read_table(tmp_path / "a" / "train-00000.parquet").column("origin").to_pylist()
    assert all(o.startswith(("hypothesis/", "pydoc_data/")) for o in origins)
    assert any(o.startswith("pydoc_data/topics.py::") for o in origins)


def test_a_file_that_would_fail_on_import_is_read(tmp_path, monkeypatch):
    package = tmp_path / "oddpackage"
    package.mkdir()
    (package / "__init__.py").write_text(
        '"""The module."""\nraise RuntimeError\nclass A:\n    """A\n    class."""\n'
    )
    (package / "broken.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = list(docstrings.documents(SourceSettings(packages=("oddpackage",))))
    assert found == [
        ("The module.", "oddpackage/__init__.py"),
        ("A\nclass.", "oddpackage/__init__.py::A"),
    ]


def test_documents_can_be_limited_and_a_package_that_is_not_installed_is_named(tmp_path):
    source = SourceSettings(packages=("hypothesis",), maximum_documents=5)
    assert len(list(docstrings.documents(source))) == 5
    with pytest.raises(UserError, match="no_such_package"):
        build(CorpusSettings(source=SourceSettings(packages=("no_such_package",))), tmp_path)


def test_a_failed_build_leaves_nothing_half_done(tmp_path):
    def documents():
        yield "fine", "a"
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        build_from(documents(), CorpusSettings(), tmp_path / "c", DESCRIPTION)
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.parametrize("name", ["text.txt", "text.txt.gz", "pairs.tsv"])
def test_windows_line_ends_give_the_same_documents(tmp_path, monkeypatch, name):
    # "\r" and "\n" fall into two chunks somewhere
    monkeypatch.setattr(read_module, "CHUNK_BYTES", 7)
    lines = ["de\ten", *(f"{i} one line\tof {i} pairs" for i in range(40))]
    columns = {"text_column": "de", "target_column": "en"} if name.endswith(".tsv") else {}
    found = []
    for end in ("\n", "\r\n"):
        data = "".join(f"{line}{end}" for line in lines).encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        sources = [
            SourceSettings("files", separator=s, **columns)
            for s in ([None] if columns else ["\n", end, None])
        ]
        found.append([list(read_module.read_texts(tmp_path / name, source)) for source in sources])
    assert found[0] == found[1] and "\r" not in repr(found)
    assert any(len(texts) >= 40 for texts in found[0])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "dataset"
    (folder / "data").mkdir(parents=True)
    for name, numbers in (
        ("train-00000", range(300)),
        ("train-00001", range(300, 500)),
        ("validation-00000", [900]),
    ):
        texts = [f"document {i}" if i % 100 else None for i in numbers]
        pairs = [{"de": f"Satz {i}", "en": f"sentence {i}"} for i in numbers]
        table = pa.table({"body": texts, "translation": pairs, "score": [0.5] * len(texts)})
        pq.write_table(table, folder / f"data/{name}.parquet", row_group_size=64)
    return folder


def corpus_of(folder, **more):
    source = SourceSettings(
        kind="stream", repository=str(folder), **{"text_column": "body", **more}
    )
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
    assert names == [
        "data/train-00000.parquet",
        "data/train-00001.parquet",
        "data/validation-00000.parquet",
    ]


def test_a_validation_split_pairs_and_a_limit(folder, tmp_path):
    more = {
        "text_column": "translation.de",
        "target_column": "translation.en",
        "maximum_documents": 7,
    }
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


def test_a_dataset_of_the_hub_needs_its_commit(folder, tmp_path):
    with pytest.raises(UserError, match="needs its commit"):
        build(corpus_of("org/name"), tmp_path)
    assert "revision" in dict(corpus_of("a/b", revision="main").source.problems())


def test_without_its_package_or_with_one_that_runs_scripts_the_message_says_so(
    folder, tmp_path, monkeypatch
):
    with (
        monkeypatch.context() as old,
        pytest.raises(UserError, match="need the package datasets") as error,
    ):
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
