"""Documents from all over a data set: every one equally likely, known totals, bounded reading."""

import gzip
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenscale.base.errors import UserError
from tokenscale.data.corpus import read
from tokenscale.data.corpus import sample as module
from tokenscale.data.corpus.read import find_start, read_texts
from tokenscale.data.corpus.sample import count_repeated, draw_sample
from tokenscale.settings.data import SourceSettings

LINES = SourceSettings(kind="files")


def texts(count, seed=0):
    draw = random.Random(seed)
    return [f"{i} " + "x" * int(draw.lognormvariate(4, 1)) for i in range(count)]


def number(text):
    return int(text.split()[0])


def parquet(path, documents, rows):
    pq.write_table(
        pa.table({"text": documents, "other": [""] * len(documents)}), path, row_group_size=rows
    )
    return path


def lines(path, documents):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in documents))
    return path


@pytest.mark.parametrize("form", ["parquet", "jsonl", "jsonl.gz", "text", "files"])
def test_a_small_data_set_is_taken_whole(tmp_path, form):
    documents = texts(50)
    source = LINES
    if form == "parquet":
        paths = [
            parquet(tmp_path / "a.parquet", documents[:30], 7),
            parquet(tmp_path / "b.parquet", documents[30:], 7),
        ]
    elif form == "files":
        paths = [tmp_path / f"{i:02}.txt" for i in range(50)]
        for path, text in zip(paths, documents, strict=True):
            path.write_text(text)
    elif form == "text":
        paths = [tmp_path / "a.txt"]
        source = SourceSettings(kind="files", separator="<|end|>")
        paths[0].write_text("<|end|>".join(documents))
    else:
        paths = [lines(tmp_path / f"a.{form}", documents)]
        if form.endswith("gz"):
            paths[0].write_bytes(gzip.compress(paths[0].read_bytes()))
    found = draw_sample(paths, source, 1000)
    assert sorted(found.texts, key=number) == documents
    assert found.documents == 50 and found.counted


def test_what_no_corpus_keeps_is_no_document(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", ["a", None, "b", None, "c", "d"], 2)
    for file in (path, lines(tmp_path / "a.jsonl", ["a", None, "b", "\ud800", "c", "d"])):
        found = draw_sample([file], LINES, 100)
        assert found.texts == ["a", "b", "c", "d"] and found.documents == 4
    monkeypatch.setattr(module, "READ_BYTES", 1000)
    path = lines(tmp_path / "b.jsonl", [None, "a \ud800", "b"] * 3000)
    assert set(draw_sample([path], LINES, 1000).texts) == {"b"}


@given(st.lists(st.sampled_from(["a", "b", " b ", "c\n", "c"]), min_size=1, max_size=40))
def test_repeated_documents_are_counted_in_all_files(tmp_path_factory, documents):
    folder = tmp_path_factory.mktemp("files")
    paths = [
        parquet(folder / "a.parquet", documents[::2], 3),
        lines(folder / "b.jsonl", documents[1::2]),
    ]
    distinct = len({document.strip() for document in documents})
    assert count_repeated(paths, LINES) == pytest.approx(1 - distinct / len(documents))


def test_repeated_documents_of_a_large_data_set_are_not_counted(tmp_path, monkeypatch):
    path = lines(tmp_path / "a.jsonl", ["a"] * 9)
    monkeypatch.setattr(module, "READ_BYTES", path.stat().st_size - 1)
    assert count_repeated([path], LINES) is None


@pytest.mark.parametrize(
    "write", [lambda path, texts: parquet(path.with_suffix(".parquet"), texts, 500), lines]
)
def test_rows_come_from_everywhere(tmp_path, write):
    path = write(tmp_path / "a.jsonl", texts(5000))
    found = draw_sample([path], LINES, 500, seed=3)
    numbers = [number(text) for text in found.texts]
    assert len(set(numbers)) == 500 and found.documents == 5000 and found.counted
    assert (np.histogram(numbers, bins=10, range=(0, 5000))[0] > 25).all()
    assert (
        draw_sample([path], LINES, 500, seed=3).texts
        == found.texts
        != draw_sample([path], LINES, 500, seed=4).texts
    )


def test_of_many_row_groups_some_are_read_spread_over_all_files_and_of_a_giant_one_the_beginning(
    tmp_path, monkeypatch
):
    documents = texts(20_000)
    paths = [
        parquet(tmp_path / f"{i}.parquet", documents[i * 5000 : (i + 1) * 5000], 50)
        for i in range(4)
    ]
    monkeypatch.setattr(module, "READ_BYTES", 100_000)
    found = draw_sample(paths, LINES, 400)
    groups = {number(text) // 50 for text in found.texts}
    assert 16 <= len(groups) < 60 and {group // 100 for group in groups} == {0, 1, 2, 3}
    assert found.documents == 20_000 and found.counted
    monkeypatch.setattr(module, "READ_BYTES", 200_000)
    found = draw_sample([parquet(tmp_path / "a.parquet", documents, 20_000)], LINES, 100)
    assert max(number(text) for text in found.texts) < 5000
    assert "its beginning" in found.where and found.documents == 20_000


@given(
    st.lists(st.text("ab\u20ac", max_size=9), max_size=12),
    st.lists(st.integers(0, 120), max_size=6),
    st.sampled_from(["\n", "<>", "\n\n", "\r\n"]),
    st.booleans(),
)
def test_stretches_that_meet_part_the_documents_among_them(
    tmp_path_factory, pieces, cuts, separator, windows
):
    path = tmp_path_factory.mktemp("stretch") / "a.txt"
    pieces = pieces if separator != "\n\n" else [piece or "x" for piece in pieces]
    text = separator.join(pieces)
    path.write_bytes((text.replace("\r", "").replace("\n", "\r\n") if windows else text).encode())
    size = path.stat().st_size
    source = SourceSettings("files", separator=separator)
    bounds = [
        find_start(path, cut, source) for cut in sorted({0, size, *(c for c in cuts if c < size)})
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(read, "CHUNK_BYTES", 5)
        patches = [find_start(path, cut, source) for cut in range(size + 1)]
    assert patches == [find_start(path, cut, source) for cut in range(size + 1)]
    spans = zip(bounds, bounds[1:], strict=False)
    assert [text for span in spans for text in read_texts(path, source, span=span)] == list(
        read_texts(path, source)
    )


@pytest.mark.parametrize("form", ["jsonl", "text"])
def test_stretches_prefer_no_length_and_estimate_how_many_there_are(tmp_path, monkeypatch, form):
    documents = texts(60_000)
    source = LINES
    if form == "jsonl":
        paths = [
            lines(tmp_path / "a.jsonl", documents[:20_000]),
            lines(tmp_path / "b.jsonl", documents[20_000:]),
        ]
    else:
        paths = [tmp_path / "a.txt"]
        source = SourceSettings(kind="files", separator="||")
        paths[0].write_text("||".join(documents))
    monkeypatch.setattr(module, "READ_BYTES", 100_000)
    found = draw_sample(paths, source, 8000)
    assert not found.counted
    assert found.documents == pytest.approx(60_000, rel=0.05)
    assert np.mean([len(t) for t in found.texts]) == pytest.approx(
        np.mean([len(t) for t in documents]), rel=0.05
    )
    assert len({number(t) for t in found.texts}) == len(found.texts) < 20_000


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_sample_of_stretches_reads_as_the_corpus_build_does(tmp_path, monkeypatch, end):
    source = SourceSettings("files", text_column="doc.body")
    rows = [json.dumps({"doc": {"body": text}}) for text in texts(3000)]
    (tmp_path / "a.jsonl").write_bytes(("\ufeff" + end.join(rows)).encode())
    (tmp_path / "a.json").write_text(f"[{','.join(rows)}]")
    (tmp_path / "a.txt").write_bytes(end.join(texts(3000)).encode())
    monkeypatch.setattr(module, "READ_BYTES", 10_000)
    for name, asked in (
        ("a.jsonl", source),
        ("a.json", source),
        ("a.txt", SourceSettings("files", separator="\n")),
    ):
        found = draw_sample([tmp_path / name], asked, 200)
        assert found.counted == (name == "a.json")
        assert len(found.texts) > 100 and set(found.texts) <= set(texts(3000))
    path = tmp_path / "b.jsonl"
    wrong = ['{"text": 3}', '{"body": "x"}', "[1]", "{", "\xff", '{"text": ' + "[" * 100_000]
    for line in [*wrong, '{"n": ' + "9" * 5000 + "}", '{"text": "a", "text": "b"}']:
        good = ['{"text": "a good line"}'] * 500
        path.write_bytes(end.join([*good, *[line] * max(3, 30_000 // len(line))]).encode("latin-1"))
        with pytest.raises(UserError) as caught:
            draw_sample([path], LINES, 5000)
        assert caught.value.facts["file"] == str(path)


def test_too_much_compressed_text_is_refused_and_memory_is_bounded_by_bytes_of_text(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "SAMPLE_BYTES", 20_000)
    plain = lines(tmp_path / "a.jsonl", texts(5000))
    for file in (parquet(tmp_path / "a.parquet", texts(5000), 500), plain):
        assert sum(len(t) for t in draw_sample([file], LINES, 5000).texts) < 40_000
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    monkeypatch.setattr(module, "COMPRESSED_BYTES", 10_000)
    with pytest.raises(UserError, match="compressed text can only be read from the start"):
        draw_sample([tmp_path / "a.jsonl.gz"], LINES, 100)
