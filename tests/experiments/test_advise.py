"""Advice about one's own data: the truth lies in the printed intervals, and what cannot be read is told."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpora import make_corpus
from tests.workflow.conftest import make_project
from tokenscale.cli import advise as advice_estimates
from tokenscale.cli import advise as command
from tokenscale.cli import advise_sample as advice_sample
from tokenscale.cli.main import main
from tokenscale.costs import data as costs
from tokenscale.data.order.packing import best_fit_decreasing, split_documents
from tokenscale.data.stores.writing import write_store
from tokenscale.data.tokenizers.load import build
from tokenscale.settings.data import StoreSettings, TokenizerSettings
from tokenscale.settings.registry import FORMATS

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20)]

T = 64
DOCUMENTS = 6_000


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """6,000 documents of numbers, one token each, so that every length is known; and the tokenizer for them."""
    root = tmp_path_factory.mktemp("place")
    generator = np.random.default_rng(0)
    counts = np.maximum(1, generator.lognormal(3.8, 1, DOCUMENTS).astype(int))
    texts = [" ".join(map(str, generator.integers(0, 900, n))) for n in counts]
    pq.write_table(pa.table({"text": texts}), root / "numbers.parquet", row_group_size=1000)
    (root / "numbers.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in texts))
    build(TokenizerSettings(name="numbers", kind="numbers", vocabulary_size=903), root / "tokenizer")
    np.save(root / "lengths.npy", counts + 1)
    return root


@pytest.fixture(autouse=True)
def _fewer_packings(monkeypatch):
    monkeypatch.setattr(advice_estimates, "PACKINGS", 20)


def advise(place, *arguments, file="numbers.parquet"):
    return main(["advise", str(place / file), "--tokenizer", str(place / "tokenizer"), *arguments])


def facts_of(place, tmp_path, *arguments, **more):
    path = tmp_path / "facts.json"
    assert advise(place, "--sequence-length", str(T), "--json", str(path), *arguments, **more) == 0
    return json.loads(path.read_text())


def truth(place):
    lengths = np.load(place / "lengths.npy")
    found = {"documents": len(lengths), "tokens": lengths.sum(), "tokens_per_document": lengths.mean()}
    for t in (T, *command.LENGTHS):
        pieces = split_documents(lengths, t)[2]
        rows = len(best_fit_decreasing(pieces, t + 1)[1]) - 1
        fill, padding = costs.fill_share(lengths, t, rows), float(costs.padding_share(lengths, t))
        found |= {
            f"{t} padding": padding,
            f"{t} cut": float(costs.cut_share(lengths, t)),
            f"{t} cut_documents": float(costs.cut_documents_share(lengths, t)),
            f"{t} fill_packed": fill,
            f"{t} gain": fill / (1 - padding),
        }
    return found


def estimates(facts):
    found = {name: facts[name] for name in ("documents", "tokens", "tokens_per_document")}
    return found | {f"{t} {name}": e for t, of in facts["sequence_lengths"].items() for name, e in of.items()}


@pytest.mark.parametrize("file, seeds", [("numbers.parquet", 5), ("numbers.jsonl", 2)])
def test_the_truth_lies_in_the_intervals(place, tmp_path, monkeypatch, file, seeds):
    column = [] if file.endswith("parquet") else ["--text-column", "body"]
    true = truth(place)
    held = {name: 0 for name in true}
    for seed in range(seeds):
        monkeypatch.setattr(command, "SEED", seed)
        monkeypatch.setattr(advice_estimates, "SEED", seed)
        found = estimates(facts_of(place, tmp_path, "--documents", "1500", *column, file=file))
        assert set(found) == set(true)
        for name, estimate in found.items():
            held[name] += estimate["low"] <= true[name] <= estimate["high"]
        # and they say something
        assert all(found[name]["high"] < 1.2 * found[name]["low"] for name in ("tokens", f"{T} gain"))
        assert 0 < found[f"{T} padding"]["high"] - found[f"{T} padding"]["low"] < 0.05
    assert sum(held.values()) / (seeds * len(held)) >= 0.92, held  # they promise 95 of 100
    main_ones = ("documents", "tokens", f"{T} padding", f"{T} cut", f"{T} gain")
    assert min(held[name] for name in main_ones) >= 0.8 * seeds, held


def test_the_printed_table_rounds_outwards_and_holds_the_truth(place, tmp_path, capsys):
    found, true = estimates(facts_of(place, tmp_path, "--documents", "2500")), truth(place)
    rows = re.findall(r"(?m)^ +(\d+) +(\S+) % +(\S+) % +(\S+) % +(\S+) % +(\S+)x$", capsys.readouterr().out)
    assert [int(row[0]) for row in rows] == sorted({T, *command.LENGTHS})
    for t, *cells in rows:
        for name, cell in zip(("padding", "cut", "cut_documents", "fill_packed", "gain"), cells, strict=True):
            low, _, high = cell.partition("–")
            printed, scale = (float(low), float(high or low)), 1 if name == "gain" else 100
            estimate = found[f"{t} {name}"]
            assert printed[0] <= scale * estimate["low"] + 1e-9 and printed[1] >= scale * estimate["high"] - 1e-9
            if int(t) == T:
                assert printed[0] <= scale * true[f"{t} {name}"] <= printed[1], name


@pytest.fixture(scope="module")
def told(place, tmp_path_factory):
    """What is said of the whole after 4,000 documents, and the corpus of all."""
    folder = tmp_path_factory.mktemp("told")
    corpus = make_corpus(folder / "corpus", pq.read_table(place / "numbers.parquet")["text"].to_pylist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice_estimates, "PACKINGS", 20)
        return facts_of(place, folder, "--documents", "4000"), corpus


@pytest.mark.parametrize("form", FORMATS)
def test_the_whole_store_is_as_large_as_said(place, told, tmp_path, form):
    facts, corpus = told
    store = StoreSettings(form, sequence_length=T)
    manifest = write_store(store, corpus, place / "tokenizer", tmp_path / "store", log=lambda _: None)
    of = facts["formats"][form]
    size = sum(file["bytes"] for file in [*manifest["files"], *manifest.get("records", {}).get("files", [])])
    assert 0.99 * of["bytes"]["low"] <= size <= 1.01 * of["bytes"]["high"]  # more text compresses a bit otherwise
    assert of["useful_tokens"]["low"] <= manifest["tokens_useful"] <= of["useful_tokens"]["high"]
    assert of["tokens"]["low"] <= manifest["tokens_total"] <= of["tokens"]["high"]
    if form == "packed":
        fill = facts["sequence_lengths"][str(T)]["fill_packed"]
        assert fill["low"] <= manifest["tokens_useful"] / manifest["tokens_total"] <= fill["high"]


def test_of_a_data_set_seen_whole_the_numbers_are_exact(place, tmp_path, capsys):
    found, true = estimates(facts_of(place, tmp_path, "--documents", "100000")), truth(place)
    for name, estimate in found.items():
        assert estimate["low"] == estimate["high"] == pytest.approx(true[name]), name


def estimator(lengths, documents):
    """Of a sample of these lengths, each drawn alone from so many documents."""
    found = SimpleNamespace(
        texts=lengths, units=np.arange(len(lengths)), unit_count=len(lengths), documents=documents, counted=True
    )
    timed = np.array([1.0, 2.0])
    return advice_estimates.Estimator(advice_sample.SampleMeasurements(found, None, lengths, lengths, timed, timed, {}))


def test_the_fill_is_that_of_all_documents_not_of_the_few_looked_at(place):
    everything = np.load(place / "lengths.npy")
    generator = np.random.default_rng(0)
    true, t = advice_estimates.compute_packed_fill(everything, 2048), 2048
    samples = [generator.choice(everything, 600, replace=False) for _ in range(20)]
    naive = np.mean([advice_estimates.compute_packed_fill(lengths, t) for lengths in samples])
    found = [estimator(lengths, len(everything)).estimate_fill(t) for lengths in samples]
    assert abs(np.mean([e.value for e in found]) - true) < 0.6 * abs(naive - true)
    assert np.mean([e.low <= true <= e.high for e in found]) >= 0.95


def test_of_one_long_document_seen_there_may_be_five_times_as_many():
    lengths = np.array([10] * 999 + [500])
    of = advice_estimates.estimate_length(estimator(lengths, 10**6), 100)
    assert of["cut_documents"].value == 0.001 and of["cut_documents"].high > 0.0055
    assert of["cut"].high > 5.5 * of["cut"].value


def test_two_looks_find_the_same(place, tmp_path):
    first, second = (facts_of(place, tmp_path, "--documents", "1000") for _ in range(2))
    assert estimates(first) == estimates(second)
    assert first["formats"]["token-list"]["bytes"] == second["formats"]["token-list"]["bytes"]


def test_stalls_follow_from_the_speed_measured(place, tmp_path):
    tokenizing = facts_of(place, tmp_path, "--documents", "1000", "--tokens-per-second", "50000")["tokenizing"]
    speed = tokenizing["tokens_per_core_s"]["value"]
    assert tokenizing["core_share"]["value"] == pytest.approx(50_000 / speed)
    assert tokenizing["step_share"]["value"] == pytest.approx(50_000 / (50_000 + speed))
    assert tokenizing["rate_at_stall_0.1"]["value"] == pytest.approx(speed / 9)


def test_short_documents_ask_for_packing_and_full_rows_for_none(place, tmp_path, capsys):
    assert facts_of(place, tmp_path)["choice"] == "packed"
    capsys.readouterr()
    pq.write_table(pa.table({"text": [" ".join(["7"] * T)] * 300}), tmp_path / "full.parquet")
    tokenizer = ["--tokenizer", str(place / "tokenizer")]
    assert main(["advise", str(tmp_path / "full.parquet"), *tokenizer, "--sequence-length", str(T)]) == 0
    out = capsys.readouterr().out
    assert "choose  padded: documents fill their rows" in out and "approach: pretokenized-padded" in out


@pytest.mark.parametrize("tokenizer", ["numbers", "bpe"])
def test_the_printed_configuration_plans_as_it_is_pasted(place, tmp_path, monkeypatch, capsys, tokenizer):
    project = make_project(tmp_path)
    monkeypatch.chdir(project.root)
    (project.root / "data").mkdir()
    (project.root / "data/my numbers.jsonl").write_bytes((place / "numbers.jsonl").read_bytes())
    folder = place / "tokenizer"
    if tokenizer == "bpe":
        folder = tmp_path / "bpe"
        build(TokenizerSettings(name="learnt", kind="bpe", corpus="c", vocabulary_size=300), folder, corpus(tmp_path))
    arguments = ["data/my numbers.jsonl", "--tokenizer", str(folder), "--text-column", "body", "--documents", "500"]
    assert main(["advise", *arguments, "--sequence-length", str(T)]) == 0
    pasted = capsys.readouterr().out
    for file, text in re.findall(r"  save as (\S+):\n\n(.*?)\n\n", pasted, re.DOTALL):
        (project.root / file).write_text(text)
    assert "then    make run CONFIG=mine.yaml" in pasted
    plan = project.snakemake("--configfile", "mine.yaml", "--workflow-profile", "none", "-n").stdout
    assert "results/corpus/my-my-numbers/manifest.json" in plan and "data/my numbers.jsonl" in pasted
    name = "numbers" if tokenizer == "numbers" else "learnt"
    assert f"results/tokens/my-my-numbers/{name}/packed-sequence_length={T}/manifest.json" in plan
    assert re.search(r"^train +1$", plan, re.MULTILINE)


def corpus(folder):
    """The folder of a small corpus."""
    return make_corpus(folder / "corpus", ["a few words", "and some more of them"] * 50)


@pytest.mark.parametrize(
    "name, content, arguments, told",
    [
        ("", None, [], "the input names a folder"),
        ("*.parquet", None, [], "no file fits the pattern"),
        ("empty.parquet", b"", [], "the input file is empty"),
        ("broken.parquet", b"PAR1 no", [], "not readable Parquet"),
        ("what.dat", b"text", [], "does not say what it holds"),
        ("one.txt", b"One document.", [], "is one document"),
        ("blank.jsonl", b"\n\n", [], "holds no documents"),
        ("lines.jsonl", b'{"text": "1"}\nnot JSON\n', [], "is not JSON"),
        ("lines.jsonl", b'{"text": "1"}\n{"text": "word"}\n', [], "reads numbers only"),
        ("lines.jsonl", b'{"text": "1"}\n{"text": "2"}\n', ["--tokenizer", "tekkne"], "no tokenizer 'tekkne'"),
        ("lines.jsonl", b'{"text": "1"}\n{"text": "2"}\n', ["--sequence-length", "few"], "cannot be 'few'"),
        ("lines.jsonl", b'{"text": "1"}\n{"text": "2"}\n', ["--tokens-per-second", "0"], "cannot be '0'"),
    ],
)
def test_what_cannot_be_looked_at_is_told(place, tmp_path, capsys, name, content, arguments, told):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["advise", str(tmp_path / name), "--tokenizer", str(place / "tokenizer"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tokenscale: ") and told in error, error
    assert "source.files" not in error and "--tokenizer-name" not in error and "a names" not in error
    # words of a configuration that nobody has written
    assert "text_column" not in error and "--input-path" not in error


def test_text_with_a_separator_is_read(place, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("1 2 3\n4 5\n6\n")
    assert main(["advise", str(tmp_path / "a.txt"), "--tokenizer", str(place / "tokenizer"), "--separator", r"\n"]) == 0
    assert "holds 3 documents" in capsys.readouterr().out
