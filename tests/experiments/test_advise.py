import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import make_corpus
from tests.unit.study_train.conftest import asked
from tokenscale.cli import advise as command
from tokenscale.cli.main import main
from tokenscale.costs.card import TextCard, compare_approaches
from tokenscale.data.stores.writing import list_files, write_store
from tokenscale.data.tokenizers.load import build
from tokenscale.settings.data import StoreSettings, TokenizerSettings
from tokenscale.settings.registry import TOKEN_FORMATS

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20)]

T = 64
DOCUMENTS = 3_000


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The same documents of numbers, one token each, in three files; their tokenizer; and a store
    of each format.
    """
    root = tmp_path_factory.mktemp("place")
    generator = np.random.default_rng(0)
    counts = np.maximum(1, generator.lognormal(3.8, 1, DOCUMENTS).astype(int))
    texts = [" ".join(map(str, generator.integers(0, 900, n))) for n in counts]
    write_texts(root, texts, n=counts)
    build(
        TokenizerSettings(name="numbers", kind="numbers", vocabulary_size=903), root / "tokenizer"
    )
    corpus = make_corpus(root / "corpus", texts)
    for form in TOKEN_FORMATS:
        write_store(
            StoreSettings(form, sequence_length=T),
            corpus,
            root / "tokenizer",
            root / form,
            log=lambda _: None,
        )
    return root


def advise(place, file, *arguments):
    words = ["--tokenizer", str(place / "tokenizer"), "--sequence-length", str(T)]
    return main(["advise", str(place / file), *words, *arguments])


FILES = [
    ("a.parquet", []),
    ("a.jsonl", ["--text-column", "body"]),
    ("a.txt", ["--separator", r"\n"]),
]


@pytest.mark.parametrize("file, arguments", FILES)
@pytest.mark.parametrize("documents", [100_000, 1_000])
def test_the_numbers_are_those_of_the_stores(place, tmp_path, file, arguments, documents):
    assert (
        advise(
            place,
            file,
            "--documents",
            str(documents),
            "--json",
            str(tmp_path / "facts"),
            *arguments,
        )
        == 0
    )
    facts = json.loads((tmp_path / "facts").read_text())
    near = 0 if documents > DOCUMENTS else 0.08
    assert facts["sampled"]["every_document"] == (not near) and facts["documents"] == DOCUMENTS
    for form in TOKEN_FORMATS:
        made = json.loads((place / form / "manifest.json").read_text())
        of = facts["formats"][form]
        rows = None
        assert of["tokens"] == pytest.approx(made["tokens_total"], rel=near or 1e-9)
        assert of["useful_tokens"] == pytest.approx(made["tokens_useful"], rel=near or 1e-9)
        assert of["bytes"] == pytest.approx(
            sum(entry["bytes"] for entry in list_files(made)), rel=near or 0.01
        )
        rows = facts["sequence_lengths"][str(T)]
        useful = made["tokens_useful"] / made["tokens_total"]
        if form == "padded":
            assert 1 - rows["padding"] == pytest.approx(useful, rel=near or 1e-9)
            text = made["tokens_useful"] + made["tokens_cut"]
            assert rows["cut"] == pytest.approx(made["tokens_cut"] / text, rel=3 * near or 1e-9)
            assert rows["cut_documents"] == pytest.approx(
                made["documents_cut"] / DOCUMENTS, rel=3 * near or 1e-9
            )
        if form == "packed":
            assert rows["fill_packed"] == pytest.approx(useful, rel=near or 1e-9)
    assert facts["sequence_lengths"].keys() == {str(t) for t in (T, *command.LENGTHS)}


def write_texts(folder, texts, **columns):
    pq.write_table(pa.table({**columns, "body": texts}), folder / "a.parquet", row_group_size=1000)
    (folder / "a.jsonl").write_text("".join(json.dumps({"n": 1, "body": t}) + "\n" for t in texts))
    (folder / "a.txt").write_text("\n".join(texts))


@pytest.mark.parametrize("file, arguments", FILES)
@pytest.mark.parametrize("choice", ["packed", "pretokenized-padded"])
def test_the_next_command_trains_in_the_advised_format(
    place, tmp_path, monkeypatch, capsys, file, arguments, choice
):
    if choice == "packed":
        (tmp_path / file).write_bytes((place / file).read_bytes())
    else:
        write_texts(tmp_path, [" ".join(["7"] * T)] * 300)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer").symlink_to(place / "tokenizer")
    assert advise(tmp_path.relative_to(tmp_path), file, *arguments) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next ")]
    _, _, train, *words = shlex.split(line)
    run = asked(*words).run
    assert train == "train" and (run.approach, run.sequence_length) == (choice, T)
    assert run.tokenizer.name == "numbers" and run.corpus.source.files == (file,)


@pytest.mark.parametrize(
    ("lengths", "choice", "words"),
    [
        ([18] * 500, "packed", "about 14 documents, which see each other: set document_mask: true"),
        ([40] * 300 + [700] * 200, "packed", "(length-bucketed)"),
        ([257] * 300, "pretokenized-padded", "documents fill their rows"),
        ([20] * 10 + [5000] * 30, "token-list", "75.0 % of the documents are longer than a row"),
        ([5001], "packed", "one document of 20 rows, which packed reads in random order"),
        ([258], "packed", "one document of 2 rows"),
        ([257], "packed", "fits into one row of 256"),
    ],
)
def test_one_sentence_says_what_to_use_and_when_something_else(lengths, choice, words):
    """At 256 positions; lengths with BOS."""
    lengths = np.array(lengths)
    approaches = compare_approaches(lengths, 256)
    found, reason = command.choose_approach(lengths, 256, approaches)
    assert found == choice and words in reason and reason.endswith(".")
    assert re.search("use|ask", reason.rpartition("If ")[2]), "and if something is different"


@pytest.mark.parametrize("file", ["book.txt", "book.jsonl"])
def test_one_document_is_answered_and_its_validation_must_come_from_elsewhere(
    place, tmp_path, capsys, file
):
    text = " ".join(str(n % 900) for n in range(5 * T))
    (tmp_path / file).write_text(json.dumps({"text": text}) if "json" in file else text)
    assert advise(tmp_path, file, "--tokenizer", str(place / "tokenizer")) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 document," in out and "one document of 321 tokens" in out
    assert "use packed, because the text is one document of 5 rows" in out
    assert "a validation loss needs further documents (validation_files" in out
    assert ("--separator TEXT parts them" in out) == (file == "book.txt")


#: values of columns that are not the one of the text
NO_TEXTS = [
    st.lists(st.sampled_from(["en", "de", "fr", "es"]), min_size=80, max_size=99),
    st.lists(st.integers().map(str), min_size=20, max_size=99),
    st.lists(st.dates().map(str), min_size=20, max_size=99),
    st.lists(st.uuids().map(lambda n: f"{n}"[:8] + "7"), min_size=20, max_size=99),
]


@pytest.mark.parametrize("end", ["parquet", "csv", "jsonl"])
def test_a_column_that_is_not_the_text_is_the_only_answer_with_the_call_that_names_the_text(
    place, tmp_path, capsys, monkeypatch, end
):
    """One message, before anything is tokenized; its next step runs and advises on the text."""
    monkeypatch.chdir(tmp_path)

    @settings(max_examples=4, deadline=None)
    @given(st.one_of(NO_TEXTS))
    def check(column):
        bodies = [f"{n} {n} 7 8" for n in range(len(column))]
        texts = pa.table({"text": column, "body": bodies})
        if end == "parquet":
            pq.write_table(texts, "a.parquet")
        else:
            frame = texts.to_pandas()
            csv = frame.to_csv(index=False)
            lines = frame.to_json(orient="records", lines=True)
            Path(f"a.{end}").write_text(csv if end == "csv" else lines)
        words = ["a." + end, "--tokenizer", str(place / "tokenizer"), "--sequence-length", "64"]
        assert main(["advise", *words]) == 2
        out, error = capsys.readouterr()
        assert not out and "'text' does not look like the text" in error
        assert "columns  text, body" in error
        (line,) = [line for line in error.splitlines() if line.startswith("  next ")]
        _, _, *again = shlex.split(line)
        assert again[-2:] == ["--text-column", "body"] and main(again) == 0
        assert "use     " in capsys.readouterr().out

    check()


@given(st.lists(st.text("abcdefgh ", min_size=3), min_size=20, max_size=99, unique=True))
def test_short_texts_that_differ_are_texts(values):
    assert command.find_no_texts(values) is None


def test_texts_that_repeat_and_texts_without_words_are_named():
    """As where the column of languages was taken for the text."""
    texts = ["en", "de"] * 50
    card = TextCard(documents=100, text_bytes=200, lengths=np.full(100, 2))
    repeated, short = command.list_cautions(command.describe_texts(texts, card), 100)
    assert repeated.startswith("caution: 98.0 % of the sampled texts repeat")
    assert "--text-column" in short
    longer = replace(card, lengths=np.full(100, 20))
    whole = command.describe_texts([f"text {n}" for n in range(100)], longer)
    assert not [*command.list_cautions(whole, 100)]
    all_read = command.describe_texts(texts[:2], longer, repeated=0.24)
    (caution,) = command.list_cautions(all_read, 2)
    assert caution.startswith("caution: 24.0 % of the documents repeat earlier ones")


@pytest.mark.parametrize("end", ["parquet", "jsonl", "tsv", "csv"])
def test_the_only_column_of_text_is_used_and_named(place, tmp_path, capsys, end):
    path = tmp_path / f"a.{end}"
    for names, code, note in (
        (["story"], 0, True),
        (["text", "story"], 0, False),
        (["story", "title"], 2, False),
    ):
        rows = [{"n": 1} | dict.fromkeys(names, text) for text in ("1 2", "3")]
        if end == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            comma = {"tsv": "\t", "csv": ","}.get(end, "")
            lines = [comma.join(names), *(comma.join(row[name] for name in names) for row in rows)]
            path.write_text("\n".join(lines if comma else map(json.dumps, rows)))
        assert main(["advise", str(path), "--tokenizer", str(place / "tokenizer")]) == code
        out, error = capsys.readouterr()
        assert ("story, the only one" in out) == note
        assert code == 0 or "--text-column" in error and all(name in error for name in names)


TWO = b'{"text": "1"}\n{"text": "2"}\n'


@pytest.mark.parametrize(
    "name, content, arguments, told",
    [
        ("what.dat", b"text", [], "does not say what it holds"),
        ("blank.jsonl", b"\n\n", [], "holds no documents"),
        ("lines.jsonl", TWO.replace(b"2", b"word"), [], "reads numbers only"),
        ("lines.jsonl", TWO, ["--tokenizer", "tekkne"], "no tokenizer 'tekkne'"),
        ("lines.jsonl", TWO, ["--sequence-length", "few"], "cannot be 'few'"),
        ("lines.jsonl", TWO, ["--documents", "1"], "cannot be '1'"),
    ],
)
def test_what_cannot_be_looked_at_is_told(place, tmp_path, capsys, name, content, arguments, told):
    (tmp_path / name).write_bytes(content)
    assert (
        main(["advise", str(tmp_path / name), "--tokenizer", str(place / "tokenizer"), *arguments])
        == 2
    )
    error = capsys.readouterr().err
    assert error.startswith("tokenscale: ") and told in error and "  next" in error, error
    assert (
        "source.files" not in error and "text_column" not in error and "--input-path" not in error
    )
