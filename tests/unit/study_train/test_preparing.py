"""From a request to a run and its inputs: where they lie, what is made and what is not made
again.
"""

import json
import math
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.refusals import refused
from tests.unit.study_train.conftest import LISTS, PADDED, TEXTS, asked, files, prepared
from tokenscale.base.errors import UserError
from tokenscale.base.files import lock_folder, read_json, sha256_file, write_json, write_sealed
from tokenscale.cli.main import main
from tokenscale.cli.train import inputs
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.data.stores.manifest import open_store
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.settings import config, flags, source_studies
from tokenscale.settings.data import CorpusSettings
from tokenscale.settings.manifests import list_manifests

OWN = "--dataset tinystories --tokenizer-name own --sequence-length 32"


def test_inputs_lie_where_the_workflow_puts_them_and_are_made_once(here):
    words = [*OWN.split(), "--validation.rows", "2", "--training-steps", "3"]
    job = prepared(*words)
    own = "results/tokens/tinystories/own"
    assert {role: str(path) for role, path in job.manifests.items()} == {
        "store": f"{own}/packed-sequence_length=32/manifest.json",
        # kept with the weights, which `train` keeps
        "tokenizer": "results/tokenizers/own/manifest.json",
        "validation_store": f"{own}/packed-split=validation-sequence_length=32/manifest.json",
    }
    assert Path("results/corpus/tinystories/manifest.json").is_file()
    assert job.output.parent.parent == Path("results/runs")
    # the very run that an experiment with these settings would have
    settings = config.load_config()
    assert (job.run.corpus, job.run.tokenizer) == (
        settings.corpora["tinystories"],
        settings.tokenizers["own"],
    )
    before = files(here)
    assert prepared(*words) == job and files(here) == before


def flags_of(form, beforehand):
    return f"--dataset-type {form}" + " --pretokenized" * beforehand


PAIRS = "--eos --tokenizer-name bpe --sequence-length 32"


@pytest.mark.parametrize("pair", source_studies.APPROACH_OF)
def test_translating_reads_the_corpus_beside_any_store(here, pair):
    pq.write_table(
        pa.table({"de": TEXTS, "en": [f"the {text}" for text in TEXTS]}), "pairs.parquet"
    )
    source = {"files": "pairs.parquet", "text_column": "de", "target_column": "en"}
    write_json(
        Path("config/config.yaml"), {"experiments": [], "corpora": {"pairs": {"source": source}}}
    )
    words = f"{PAIRS} --dataset pairs --validation.bleu 2 --training-steps 2 {flags_of(*pair)}"
    job = prepared(*words.split())
    assert job.run.approach == source_studies.APPROACH_OF[pair] and job.run.corpus.source.pairs
    assert {"corpus", "tokenizer"} <= job.manifests.keys()
    assert set(job.manifests) == set(list_manifests(job.run)), "as the workflow has them"


def test_nothing_held_out_is_nothing_to_translate(here):
    pq.write_table(pa.table({"de": TEXTS[:1], "en": TEXTS[:1]}), "pairs.parquet")
    with pytest.raises(UserError, match="BLEU needs held-out documents") as refused:
        columns = ["--dataset", "pairs.parquet", "--text-column", "de", "--target-column", "en"]
        prepared(*columns, *PAIRS.split(), "--validation.bleu", "2", "--validation.rows", "0")
    assert refused.value.facts["flag"] == "--validation.bleu"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_pretokenized_file_brings_its_tokenizer(here, elsewhere, tmp_path, monkeypatch):
    if elsewhere:
        shutil.copytree("out", tmp_path / "moved/out")
        monkeypatch.chdir(tmp_path / "moved")
    for dataset in (PADDED, LISTS):
        job = prepared("--dataset", dataset, "--pretokenized", "--training-steps", "2")
        assert job.run.keeps_weights
        assert job.manifests["tokenizer"] == Path("out/tokenizers/bpe/manifest.json")


def test_a_tokenizer_that_is_not_here_is_told_with_what_to_pass(here):
    shutil.rmtree("out/tokenizers")
    shutil.move("results/tokenizers/bpe", "kept")
    words = ["--dataset", PADDED, "--pretokenized", "--training-steps", "2"]
    (note,) = asked(*words).notes
    assert "bpe, which is not here" in note and "--tokenizer-name FOLDER" in note
    assert "tokenizer" not in prepared(*words).manifests
    assert prepared(*words, "--tokenizer-name", "kept").manifests["tokenizer"] == Path(
        "kept/manifest.json"
    )
    with pytest.raises(UserError, match="objective masked needs the tokenizer"):
        prepared(*words, "--objective", "masked")


def test_what_was_made_of_other_text_or_settings_is_made_again(here):
    words = [*OWN.split(), "--validation.rows", "0"]
    manifests = prepared(*words).manifests
    before = files(here)
    (here / "stories.txt").write_text("<|endoftext|>".join(TEXTS[:90]))
    assert prepared(*words).manifests == manifests
    after = files(here)
    for name in (
        "corpus/tinystories",
        "tokenizers/own",
        "tokens/tinystories/own/packed-sequence_length=32",
    ):
        assert after[f"results/{name}/manifest.json"] != before[f"results/{name}/manifest.json"], (
            name
        )


def test_a_file_of_ones_own_is_never_made_over_another(here):
    words = ["--tokenizer-name", "bpe", "--sequence-length", "32"]
    first = prepared("--dataset", "web.parquet", *words)
    pq.write_table(pa.table({"text": TEXTS[:50]}), "web.parquet")
    second = prepared("--dataset", "web.parquet", *words)
    assert (
        first.manifests["store"] != second.manifests["store"] and first.manifests["store"].is_file()
    )
    assert (
        first.run.corpus.name.startswith("web-") and len(first.run.corpus.name) == len("web-") + 6
    )


def test_one_long_text_is_trained_on_without_validation(here):
    words = ["--dataset", "book.txt", "--tokenizer-name", "bpe", "--sequence-length", "32"]
    job = prepared(*words)
    assert any("--separator" in note for note in asked(*words).notes)
    assert job.run.validation.rows == 0 and job.run.corpus.validation_share == 0
    assert json.loads(job.manifests["store"].read_text())["documents"] == 1


@pytest.mark.parametrize("pair", source_studies.APPROACH_OF)
def test_epochs_are_steps_over_all_rows_or_all_tokens(here, pair):
    job = prepared(
        *f"{OWN.replace('own', 'bpe')} --batch-size 5 --epochs 2.5 {flags_of(*pair)}".split()
    )
    texts = list(*RawText(Path("results/corpus/tinystories"), "train").batches(1000))
    tokens = sum(
        1 + len(ids) for ids in load_tokenizer(Path("results/tokenizers/bpe")).encode_batch(texts)
    )
    rows = {"padding-free": tokens / 32, "token-list": tokens / 32}
    if job.run.approach == "packed":
        rows["packed"] = read_json(job.manifests["store"])["rows"]
    assert job.run.budget.steps == math.ceil(2.5 * rows.get(job.run.approach, len(texts)) / 5)


def test_a_failed_preparation_leaves_no_folder(here):
    (here / "half.jsonl").write_text('{"text": "a"}\n{"text": "b"}\nnot json\n')
    before = files(here)
    with pytest.raises(UserError, match="line 3"):
        prepared("--dataset", "half.jsonl", "--tokenizer-name", "bpe")
    assert files(here) == before and not list(here.glob("results/corpus/*"))


def test_a_corpus_from_elsewhere_is_downloaded_first(here, monkeypatch):
    corpora = {"far": {"source": {"files": "https://localhost/a.txt", "separator": "\n"}}}
    write_json(here / "config/config.yaml", {"experiments": [], "corpora": corpora})

    def fetch(settings: CorpusSettings, directory: Path) -> dict:
        directory.mkdir(parents=True)
        path = directory / "a.txt"
        path.write_text("\n".join(TEXTS))
        listed = {
            "name": "a.txt",
            "from": "x",
            "bytes": path.stat().st_size,
            "sha256": sha256_file(path),
        }
        write_sealed(
            directory / "manifest.json", {"schema_version": 1, "kind": "url", "files": [listed]}
        )
        return read_json(directory / "manifest.json")

    monkeypatch.setattr("tokenscale.cli.download.fetch_corpus", fetch)
    job = prepared(
        *[
            "--dataset",
            "far",
            "--tokenizer-name",
            "bpe",
            "--sequence-length",
            "32",
            "--validation.rows",
            "0",
        ]
    )
    assert Path("results/downloads/far/a.txt").is_file()
    open_store(job.manifests["store"], job.run.store)


@pytest.mark.parametrize(
    "columns, chosen", [(["story"], "story"), (["text", "story"], "text"), (["a", "b"], None)]
)
def test_the_only_column_of_text_is_used_and_named(here, capsys, columns, chosen):
    pq.write_table(
        pa.table({"n": range(len(TEXTS))} | dict.fromkeys(columns, TEXTS)), "own.parquet"
    )
    pretokenize = [
        "pretokenize",
        "--input-path",
        "own.parquet",
        "--output-dir",
        "own",
        "--tokenizer-name",
        "bpe",
    ]
    if chosen is None:
        for command in (["train", "--dataset", "own.parquet"], pretokenize):
            assert "--text-column" in refused(capsys, command)
        return
    request = asked("--dataset", "own.parquet")
    assert request.run.corpus.source.text_column == chosen
    assert any("column: story" in note for note in request.notes) == (chosen == "story")
    assert main(pretokenize) == 0 and ("column: story" in capsys.readouterr().out) == (
        chosen == "story"
    )


def test_what_another_process_builds_is_refused_and_kept(here):
    words = OWN.replace("own", "bpe").split()
    folder = here / "results/corpus/tinystories"
    with lock_folder(folder, "the corpus"), pytest.raises(UserError, match="is being written"):
        prepared(*words)
    assert (folder / ".lock").is_file() and prepared(*words)


@pytest.mark.parametrize(
    "words, long",
    [("--global-batch 1", False), ("--global-batch 4096 --sequence-length 256", True)],
)
def test_a_step_that_takes_long_is_announced_beforehand(words, long, monkeypatch):
    monkeypatch.setattr(inputs, "measure_matrix_rate", lambda: 107e9)
    run = asked(*f"--dataset dummy --model llama-tiny --device cpu {words}".split()).run
    found = inputs.describe_long_step(
        flags.replace_values(run, {"model.vocabulary_size": 4096}), {}
    )
    assert found is None or re.match(
        r"a step takes at least \d+ s: \d\.\d TFLOP, .* reach 0.11 a second", found
    )
    assert bool(found) == long
