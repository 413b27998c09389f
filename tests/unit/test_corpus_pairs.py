"""Pairs of texts from TSV, from two files line for line, and from columns of objects; and the corpus grammar."""

import gzip
import json
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpora import GRAMMAR
from tests.web import Server
from tokenscale.base.errors import UserError
from tokenscale.data.corpus import files, fingerprint
from tokenscale.data.corpus.build import build
from tokenscale.data.corpus.download import fetch_corpus
from tokenscale.data.corpus.raw_text import PAIR, RawText
from tokenscale.settings.data import CorpusSettings, SourceSettings

PAIRS = [("ein Haus", "a house"), ("zwei  B\u00e4ume ", "two trees"), ("drei\u2028Wege", "three\x85ways")]
DE, EN = ("".join(pair[side] + "\n" for pair in PAIRS) for side in (0, 1))
TSV = "id\tde\ten\n" + "".join(f"{i}\t{a}\t{b}\r\n" for i, (a, b) in enumerate(PAIRS))


def source(*names, **more) -> SourceSettings:
    more = {k: tuple(map(str, v)) if isinstance(v, list) else v for k, v in more.items()}
    made = SourceSettings(kind=more.pop("kind", "files"), files=tuple(map(str, names)), **more)
    assert made.problems() == []
    return made


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


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_line_n_of_one_file_goes_with_line_n_of_the_other(tmp_path, ending):
    de, en = write(tmp_path / f"a.de{ending}", DE), write(tmp_path / f"a.en{ending}", EN)
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
    parquet, lines = tmp_path / "a.parquet", tmp_path / "a.jsonl"
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
        ("a.jsonl", LINES % '"b"', ("de", "en"), {"format": "text"}, "a text file has no columns to hold pairs"),
        ("a.jsonl", LINES % f'"b{PAIR}c"', ("de", "en"), {}, "separates the two texts of a pair"),
    ],
)
def test_what_holds_no_pairs_is_refused(tmp_path, name, text, columns, more, says):
    with pytest.raises(UserError) as error:
        pairs_of(source(write(tmp_path / name, text), text_column=columns[0], target_column=columns[1], **more))
    assert says in error.value.render()


def test_a_corpus_of_two_files_is_one_of_pairs_and_its_content_is_both(tmp_path):
    de, en = write(tmp_path / "a.de", DE + "only\n"), write(tmp_path / "a.en", EN + "\n")
    settings = CorpusSettings(name="tiny", source=source(de, target_files=[en]), validation_share=0.0)
    manifest = build(settings, tmp_path / "corpus")
    assert manifest["pairs"] is True and len(RawText(tmp_path / "corpus")) == 3
    assert manifest["cleaning"]["documents"]["no_text"] == 1
    assert [file["name"] for file in manifest["source"]["target_files"]] == ["a.en"]
    before = fingerprint.fingerprint_sources(settings, tmp_path, memory=tmp_path / "memory.json")
    write(en, EN.replace("house", "hut") + "\n")
    assert fingerprint.fingerprint_sources(settings, tmp_path, memory=tmp_path / "memory.json") != before


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
    return [pq.read_table(GRAMMAR / f"{split}.parquet").to_pylist() for split in ("train", "validation")]


def test_the_script_makes_the_files_again(splits, tmp_path):
    subprocess.run([sys.executable, GRAMMAR / "generate.py", tmp_path], check=True)
    for split, pairs in zip(("train", "validation"), splits, strict=True):
        made, kept = tmp_path / f"{split}.parquet", GRAMMAR / f"{split}.parquet"
        assert pq.read_table(made).to_pylist() == pairs
        if pq.read_metadata(made).created_by == pq.read_metadata(kept).created_by:  # the same version of pyarrow
            assert made.read_bytes() == kept.read_bytes()


def test_no_held_out_sentence_is_trained_on_and_all_of_its_words_are(splits):
    training, held_out = splits
    for language in ("german", "english"):
        seen, unseen = ({pair[language] for pair in pairs} for pairs in (training, held_out))
        assert (len(training), len(held_out)) == (4000, 500) and not seen & unseen
        words, known = (set(re.findall(r"\w+", " ".join(texts).lower())) for texts in (unseen, seen))
        assert words <= known
