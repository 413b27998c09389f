"""The user's own files, in every shape they come in, pairs of texts among them, and the dummy
source.
"""

import csv
import gzip
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import GRAMMAR, HOSTILE
from tests.web import Server
from tokenscale.base.errors import UserError
from tokenscale.data.corpus import dummy, files, fingerprint, read
from tokenscale.data.corpus.build import FATES, build, clean
from tokenscale.data.corpus.download import fetch_corpus
from tokenscale.data.corpus.raw_text import PAIR, RawText
from tokenscale.data.tokenizers.load import build as build_tokenizer
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.settings.data import (
    CleaningSettings,
    CorpusSettings,
    LengthSettings,
    SourceSettings,
    TokenizerSettings,
)

#: what any text file can hold; line ends only where a test puts them
TEXTS = [
    text.replace("\x00", "").replace("\n", " ")
    for text in HOSTILE
    if text and not text.startswith("\ufeff")
]


def source(*names, **more) -> SourceSettings:
    more = {k: tuple(map(str, v)) if isinstance(v, list) else v for k, v in more.items()}
    made = SourceSettings(kind=more.pop("kind", "files"), files=tuple(map(str, names)), **more)
    assert made.problems() == []
    return made


def texts_of(settings: SourceSettings) -> list[str | None]:
    return [text for text, _ in files.documents(settings)]


def write_parquet(path, texts, column="text", type_=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"n": list(range(len(texts))), column: pa.array(texts, type=type_)}), path
    )


PACK = {"": lambda data: data, ".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("ending", PACK)
def test_text_between_separators_lines_and_whole_files(tmp_path, ending):
    for name, text, separator, expected in [
        ("a.txt", "<|endoftext|>".join(TEXTS), "<|endoftext|>", TEXTS),
        ("b.txt", "\n".join(TEXTS) + "\n", "\n", TEXTS),
        ("c.txt", "one\n\ntwo", None, ["one\n\ntwo"]),
        ("d.txt", "", "\n", []),
        ("e.txt", "a||b||", "||", ["a", "b"]),
    ]:
        path = tmp_path / (name + ending)
        path.write_bytes(PACK[ending](text.encode()))
        assert texts_of(source(path, separator=separator)) == expected
    # `cat a.gz b.gz > c.gz` is a valid file, and tools that pack in parallel write such
    path.write_bytes(PACK[ending](b"one\ntw") + PACK[ending](b"o\nthree\n"))
    assert texts_of(source(path, separator="\n")) == ["one", "two", "three"]
    path = tmp_path / f"a.jsonl{ending}"
    rows = [{"body": text, "n": 1} for text in HOSTILE] + [{"body": None}]
    path.write_bytes(PACK[ending]("\n".join(map(json.dumps, rows)).encode() + b"\n\n"))
    assert texts_of(source(path, text_column="body")) == [*HOSTILE, None]


@pytest.mark.parametrize(
    "type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_any_text_column_of_parquet(tmp_path, type_):
    write_parquet(tmp_path / "a.parquet", [*HOSTILE, None], "body", type_)
    assert texts_of(source(tmp_path / "a.parquet", text_column="body")) == [*HOSTILE, None]


@given(
    st.lists(st.text("ab<|>\n日é👩‍", max_size=9), max_size=12),
    st.sampled_from(["<|>", "\n", "ab", "<<"]),
    st.integers(1, 7),
)
def test_separators_and_characters_across_any_chunk(tmp_path_factory, texts, separator, chunk):
    joined = separator.join(texts)
    path = tmp_path_factory.mktemp("chunks") / "a.txt"
    path.write_text("\ufeff" + joined, newline="")
    expected = joined.split(separator)
    expected = expected if expected[-1] else expected[:-1]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(read, "CHUNK_BYTES", chunk)
        assert texts_of(source(path, separator=separator)) == expected


def test_globs_are_sorted_and_no_file_is_read_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.parquet", "b/10.parquet", "a.parquet", "b/deep/x.parquet"):
        write_parquet(tmp_path / "data" / name, [name])
    found = list(files.documents(source("data/b/2.parquet", "data/**/*.parquet")))
    assert [t for t, _ in found] == ["b/2.parquet", "a.parquet", "b/10.parquet", "b/deep/x.parquet"]
    assert found[0] == ("b/2.parquet", "b/2.parquet::0")
    assert (
        texts_of(source("data/**/*.parquet", maximum_documents=2))
        == [t for t, _ in sorted(found)][:2]
    )
    (tmp_path / "data/latest.parquet").symlink_to("a.parquet")
    (tmp_path / "data/up").symlink_to(tmp_path / "data")
    os.link(tmp_path / "data/a.parquet", tmp_path / "data/same.parquet")
    names = ("data/**/*.parquet", str(tmp_path / "data/b/2.parquet"))
    assert len(texts_of(source(*names))) == 4, "a file of several names is read once"


def test_two_keys_make_a_corpus_and_no_path_is_in_its_manifest(tmp_path):
    write_parquet(
        tmp_path / "in" / "mine.parquet",
        [f"document {i}" for i in range(50)] + ["document 1", None],
        "body",
    )
    settings = CorpusSettings(
        name="mine", source=source(tmp_path / "in" / "*.parquet", text_column="body")
    )
    manifest = build(settings, tmp_path / "c")
    counts = manifest["cleaning"]["documents"]
    assert (counts["read"], counts["duplicates"], counts["no_text"], counts["kept"]) == (
        52,
        1,
        1,
        50,
    )
    assert str(tmp_path) not in (tmp_path / "c/manifest.json").read_text()
    before = (tmp_path / "c/manifest.json").read_bytes()
    shutil.copytree(tmp_path / "in", tmp_path / "elsewhere")
    moved = CorpusSettings(
        name="mine", source=source(tmp_path / "elsewhere" / "mine.parquet", text_column="body")
    )
    build(moved, tmp_path / "d")
    assert (tmp_path / "d/manifest.json").read_bytes() == before


def test_missing_files_are_named_with_the_nearest(tmp_path):
    write_parquet(tmp_path / "train.parquet", ["a"])
    for pattern, words in [
        (tmp_path / "trian.parquet", ["missing", "did you mean 'train.parquet'"]),
        (tmp_path / "*.txt", ["pattern", "holds 1 file"]),
        (tmp_path / "no" / "a.txt", ["does not exist"]),
        (tmp_path, ["folder", "*.parquet"]),
    ]:
        with pytest.raises(UserError) as error:
            files.describe(source(pattern))
        for word in words:
            assert word in error.value.render()


@pytest.mark.parametrize(
    ("kind", "options", "field"),
    [
        ("files", {}, "files"),
        ("files", {"files": ("a",), "revision": "x"}, "revision"),
        ("hub", {"repository": "a/b", "files": ("x",)}, "revision"),
        ("hub", {"repository": "a/b", "files": ("x",), "revision": "main"}, "revision"),
        ("url", {"files": ("a.txt",)}, "files"),
        ("url", {"files": ("http://h/a.txt#sha256=beef",)}, "files"),
        ("dummy", {}, "documents"),
        (
            "dummy",
            {"documents": 1, "lengths": LengthSettings(minimum=5, maximum=4)},
            "lengths.minimum",
        ),
        ("docstrings", {"files": ("a.parquet",)}, "files"),
        (
            "files",
            {"files": ("a",), "target_files": ("b",), "target_column": "en"},
            "target_column",
        ),
        ("files", {"files": ("a",), "target_files": ("b",), "format": "jsonl"}, "target_files"),
        ("files", {"files": ("a",), "target_files": ("b",), "separator": "||"}, "separator"),
        (
            "files",
            {"files": ("a",), "target_files": ("b",), "validation_files": ("c",)},
            "validation_target_files",
        ),
        ("files", {"files": ("a",), "validation_target_files": ("c",)}, "validation_target_files"),
    ],
)
def test_options_that_do_not_fit_the_kind_are_told(kind, options, field):
    assert field in [name for name, _ in SourceSettings(kind, **options).problems()]


def test_the_keys_say_the_kind():
    for keys, kind in [
        ({}, "docstrings"),
        ({"documents": 4}, "dummy"),
        ({"files": "a.parquet"}, "files"),
        ({"files": "https://h/a.txt"}, "url"),
        ({"files": "s3://texts/raw/*.parquet"}, "bucket"),
        ({"repository": "a/b", "files": "x"}, "hub"),
        ({"repository": "a/b", "split": "train"}, "stream"),
    ]:
        assert SourceSettings.infer_kind(keys) == kind


# --- cleaning


def cleaned(texts, **options):
    counts = dict.fromkeys(FATES, 0)
    kept = [
        d.text for d in clean(((t, "") for t in texts), CleaningSettings(**options), counts, set())
    ]
    return kept, counts


@given(
    st.lists(st.one_of(st.none(), st.text(max_size=20)), max_size=20), st.booleans(), st.booleans()
)
def test_every_document_has_one_fate_and_cleaning_twice_changes_nothing(texts, nfc, collapse):
    options = {"nfc": nfc, "collapse": collapse, "maximum_characters": 15}
    kept, counts = cleaned(texts, **options)
    gone = sum(
        counts[name] for name in ("no_text", "not_unicode", "too_short", "too_long", "duplicates")
    )
    assert counts["read"] == len(texts) == gone + counts["kept"] and len(kept) == counts["kept"]
    again, counts = cleaned(kept, **options)
    assert again == kept and counts["collapsed"] == counts["composed"] == counts["stripped"] == 0
    kept, counts = cleaned(["e\u0301", "é", "a  b\t\n\n\n\nc", "fine"], nfc=True, collapse=True)
    assert kept == ["é", "a b\n\nc", "fine"]
    assert (counts["composed"], counts["collapsed"], counts["duplicates"]) == (1, 1, 1)


# --- contents as a parameter of the workflow


def test_a_touch_or_a_copy_keeps_the_fingerprint_and_an_edit_changes_it(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    memory = tmp_path / "memory.json"
    write_parquet(path, ["one", "two"])
    corpus = CorpusSettings(name="c", source=source(tmp_path / "*.parquet"))

    def now():
        fingerprint._list_named_paths.cache_clear()
        return fingerprint.fingerprint_sources(corpus, tmp_path / "corpus", memory=memory)

    first = now()
    build(corpus, tmp_path / "corpus" / "c", content=first)
    read_files = []
    monkeypatch.setattr(
        fingerprint, "sha256_file", lambda p: read_files.append(p) or files.sha256_file(p)
    )
    assert now() == first and read_files == []
    os.utime(path, (1, 1))
    assert now() == now() == first and read_files == [path]
    memory.unlink()
    assert now() == first
    before = path.read_bytes()
    path.unlink()
    assert now() == first  # results were copied without their text
    write_parquet(path, ["one", "too"])
    assert now() != first
    path.write_bytes(bytes(len(before)))  # of the same size
    assert now() != first
    path.write_bytes(before)
    assert now() == first
    write_parquet(tmp_path / "b.parquet", ["three"])
    assert now() != first


@pytest.mark.parametrize(
    "change", [lambda path: path.write_bytes(b"a"), lambda path: path.with_name("b.txt").touch()]
)
def test_a_source_file_that_changes_while_it_is_read_is_refused(tmp_path, change):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="changed while it was read"):
        build(
            CorpusSettings(source=source(tmp_path / "*.txt")),
            tmp_path / "c",
            lambda *_, **__: change(tmp_path / "a.txt"),
        )
    assert not list((tmp_path / "c").iterdir())


# --- dummy


def test_dummy_documents_are_random_numbers_of_the_stated_lengths():
    lengths = LengthSettings(mean=60, sigma=0.5)
    settings = SourceSettings(kind="dummy", documents=3000, vocabulary_size=97, lengths=lengths)
    texts = [text for text, _ in dummy.documents(settings)]
    lengths = [len(text.split()) for text in texts]
    assert texts == [text for text, _ in dummy.documents(settings)] and len(set(texts)) == 3000
    # sqrt(e^0.25 - 1) * 60 = 32.0
    assert 57 < statistics.mean(lengths) < 63 and 27 < statistics.stdev(lengths) < 37
    counts = np.bincount([int(n) for text in texts for n in text.split()], minlength=97)
    assert len(counts) == 97 and counts.min() > 0.9 * counts.mean()


def test_dummy_numbers_never_change():
    """The bits are PCG64's, which NumPy keeps; written down here so that a new version that does
    not is found.
    """
    lengths = LengthSettings("uniform", minimum=3, maximum=5)
    found = [
        text
        for text, _ in dummy.documents(
            SourceSettings(kind="dummy", documents=2, lengths=lengths, seed=7)
        )
    ]
    assert found == ["48457 8141 11293 11813", "48917 12425 31060 38146 8833"]


@pytest.mark.parametrize("distribution", ["constant", "uniform", "lognormal"])
def test_lengths_keep_their_bounds(distribution):
    lengths = LengthSettings(distribution, mean=10, sigma=3, minimum=4, maximum=12)
    found = {dummy.length_at(u, lengths) for u in np.linspace(0, 1 - 2**-53, 500)}
    assert found <= set(range(4, 13)) and (distribution == "constant" or found == set(range(4, 13)))


def test_a_number_is_a_token(tmp_path):
    build_tokenizer(TokenizerSettings(name="n", kind="numbers", vocabulary_size=53), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text, _ in dummy.documents(SourceSettings(kind="dummy", documents=20, vocabulary_size=50)):
        ids = tokenizer.encode_batch([text])[0]
        assert (
            ids.dtype == np.int32
            and len(ids) == len(text.split())
            and 3 <= ids.min() <= ids.max() < 53
        )
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([""])[0].shape == (0,)
    for text in ("ten", "50", "-1", "1.5", "９"):
        with pytest.raises(UserError, match="numbers only"):
            tokenizer.encode_batch([text])


# --- pairs of texts, and the corpus grammar
# --------------------------------------------------------------------------

PAIRS = [
    ("ein Haus", "a house"),
    ("zwei  B\u00e4ume ", "two trees"),
    ("drei\u2028Wege", "three\x85ways"),
]
DE, EN = ("".join(pair[side] + "\n" for pair in PAIRS) for side in (0, 1))
TSV = "id\tde\ten\n" + "".join(f"{i}\t{a}\t{b}\r\n" for i, (a, b) in enumerate(PAIRS))


def pairs_of(settings, downloads=None):
    return [text and tuple(text.split(PAIR)) for text, _ in files.documents(settings, downloads)]


def write(path, text):
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("ending", [".tsv", ".tsv.gz"])
@pytest.mark.parametrize("columns", [("de", "en"), ("2", "3")])
def test_two_columns_of_a_tsv_by_name_or_by_number(tmp_path, ending, columns):
    text = TSV if columns == ("de", "en") else TSV.partition("\n")[2]
    path = write(tmp_path / f"a{ending}", text)
    assert pairs_of(source(path, text_column=columns[0], target_column=columns[1])) == PAIRS


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))))
def test_what_other_programs_write_as_csv_is_read_as_they_read_it(texts):
    """Windows line ends within a text become line breaks, as in all formats."""
    buffer = io.StringIO(newline="")
    rows = [["id", "text"], *([str(number), text] for number, text in enumerate(texts))]
    csv.writer(buffer).writerows(rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        path.write_bytes(buffer.getvalue().encode())
        found = list(read.read_texts(path, SourceSettings("files")))
        assert found == [text.replace("\r\n", "\n") for text in texts]
        options = "header=true, all_varchar=true, quote='\"', escape='\"', strict_mode=true"
        query = f"SELECT text FROM read_csv('{path}', {options}, auto_detect=false, delim=',', "
        query += "columns={'id': 'VARCHAR', 'text': 'VARCHAR'}, nullstr='\\0')"
        if not any("\r" in text for text in texts):
            assert [row[0] for row in duckdb.sql(query).fetchall()] == found


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_line_n_of_one_file_goes_with_line_n_of_the_other(tmp_path, ending):
    de = write(tmp_path / f"a.de{ending}", DE)
    en = write(tmp_path / f"a.en{ending}", EN)
    more = write(tmp_path / "b.de", "eins\nzwei\n\n"), write(tmp_path / "b.en", "one\n \nthree\n")
    found = pairs_of(source(de, more[0], target_files=[en, more[1]]))  # in the order they are named
    assert found == [*PAIRS, ("eins", "one"), None, None], "a blank line is no translation"
    with pytest.raises(UserError, match="each file of texts goes with one of translations"):
        pairs_of(source(de, more[0], target_files=[en]))


@pytest.mark.parametrize("longer", ["de", "en"])
def test_files_of_different_lengths_are_refused_with_both_counts(tmp_path, longer):
    texts = {"de": DE, "en": EN} | {longer: (DE if longer == "de" else EN) + "more\nand more\n"}
    paths = {lang: write(tmp_path / f"a.{lang}", text) for lang, text in texts.items()}
    with pytest.raises(UserError, match="another number of lines") as error:
        pairs_of(source(paths["de"], target_files=[paths["en"]]))
    told = error.value.render()
    assert all(words in told for words in (*map(str, paths.values()), "3 lines", "5 lines"))


def test_parts_of_a_column_of_objects(tmp_path):
    rows = [{"translation": {"de": de, "en": en}} for de, en in PAIRS] + [{"translation": None}]
    parquet = tmp_path / "a.parquet"
    lines = tmp_path / "a.jsonl"
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    write(lines, "".join(json.dumps(row) + "\n" for row in rows))
    for path in (parquet, lines):
        asked = source(path, text_column="translation.de", target_column="translation.en")
        assert pairs_of(asked) == [*PAIRS, None]
        with pytest.raises(UserError, match="has no .* 'translation.fr'"):
            pairs_of(source(path, text_column="translation.de", target_column="translation.fr"))


LINES = '{"de": "a", "en": %s}\n'


@pytest.mark.parametrize(
    ("name", "text", "columns", "more", "says"),
    [
        ("a.tsv", TSV, ("de", "fr"), {}, "has no column 'fr'"),
        ("a.tsv", "a\tb\nc\n", ("1", "2"), {}, "line 2"),
        ("a.tsv", TSV, ("1", "4"), {}, "1, 2, 3"),
        ("a.jsonl", LINES % '"b"', ("de", "fr"), {}, "source.target_column"),
        ("a.jsonl", LINES % "3", ("de", "en"), {}, "does not hold text in the key 'en'"),
        (
            "a.jsonl",
            LINES % '"b"',
            ("de", "en"),
            {"format": "text"},
            "a text file has no columns to hold pairs",
        ),
        ("a.jsonl", LINES % f'"b{PAIR}c"', ("de", "en"), {}, "separates the two texts of a pair"),
    ],
)
def test_what_holds_no_pairs_is_refused(tmp_path, name, text, columns, more, says):
    with pytest.raises(UserError) as error:
        pairs_of(
            source(
                write(tmp_path / name, text),
                text_column=columns[0],
                target_column=columns[1],
                **more,
            )
        )
    assert says in error.value.render()


def test_a_corpus_of_two_files_is_one_of_pairs_and_its_content_is_both(tmp_path):
    de = write(tmp_path / "a.de", DE + "only\n")
    en = write(tmp_path / "a.en", EN + "\n")
    settings = CorpusSettings(
        name="tiny", source=source(de, target_files=[en]), validation_share=0.0
    )
    manifest = build(settings, tmp_path / "corpus")
    assert manifest["pairs"] is True and len(RawText(tmp_path / "corpus")) == 3
    assert manifest["cleaning"]["documents"]["no_text"] == 1
    assert [file["name"] for file in manifest["source"]["target_files"]] == ["a.en"]
    before = fingerprint.fingerprint_sources(settings, tmp_path, memory=tmp_path / "memory.json")
    write(en, EN.replace("house", "hut") + "\n")
    assert (
        fingerprint.fingerprint_sources(settings, tmp_path, memory=tmp_path / "memory.json")
        != before
    )


def test_two_files_from_the_web(tmp_path):
    texts = {"a/train.de": DE, "a/train.en": EN, "b/train.de": "vier\n", "b/train.en": "four\n"}
    with Server() as web:
        web.files |= {f"/{name}": text.encode() for name, text in texts.items()}
        asked = source(
            f"{web.address}/a/train.de",
            kind="url",
            target_files=[f"{web.address}/a/train.en"],
            validation_files=[f"{web.address}/b/train.de"],
            validation_target_files=[f"{web.address}/b/train.en"],
        )
        fetch_corpus(CorpusSettings(name="tiny", source=asked), tmp_path)
    assert pairs_of(asked, tmp_path) == PAIRS
    held_out = [text.split(PAIR) for text, _ in files.validation_documents(asked, tmp_path)]
    assert held_out == [["vier", "four"]]


@pytest.fixture(scope="module")
def splits():
    return [
        pq.read_table(GRAMMAR / f"{split}.parquet").to_pylist() for split in ("train", "validation")
    ]


def test_the_script_makes_the_files_again(splits, tmp_path):
    subprocess.run([sys.executable, GRAMMAR / "generate.py", tmp_path], check=True)
    for split, pairs in zip(("train", "validation"), splits, strict=True):
        made = tmp_path / f"{split}.parquet"
        kept = GRAMMAR / f"{split}.parquet"
        assert pq.read_table(made).to_pylist() == pairs
        # the same version of pyarrow
        if pq.read_metadata(made).created_by == pq.read_metadata(kept).created_by:
            assert made.read_bytes() == kept.read_bytes()


def test_no_held_out_sentence_is_trained_on_and_all_of_its_words_are(splits):
    training, held_out = splits
    for language in ("german", "english"):
        seen, unseen = ({pair[language] for pair in pairs} for pairs in (training, held_out))
        assert (len(training), len(held_out)) == (4000, 500) and not seen & unseen
        words, known = (
            set(re.findall(r"\w+", " ".join(texts).lower())) for texts in (unseen, seen)
        )
        assert words <= known
