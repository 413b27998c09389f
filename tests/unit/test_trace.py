"""`trace`: the text of a step, compared with what the run logged. What lies where is a property of
test_passes.py.
"""

import json
import shutil
from dataclasses import replace

import pytest

from tests.corpora import make_corpus, make_store, make_tokenizer, take
from tests.logs import edit, settings, write_run
from tokenscale.base.files import sha256_file
from tokenscale.cli.main import main
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.open import open_batches
from tokenscale.settings.data import CorpusSettings, TokenizerSettings

TEXTS = [f"document {n}: " + "and so on " * (n % 7) for n in range(40)]
STEPS = 30
SPIKE = 25


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A project with a run whose logs hold the digests of its batches, and one high loss."""
    project = tmp_path_factory.mktemp("project")
    corpus = make_corpus(project / "results/corpus/tiny", TEXTS)
    tokenizer = make_tokenizer(project / "results/tokenizers/bpe", corpus)
    run = replace(
        settings(steps=STEPS),
        corpus=CorpusSettings("tiny"),
        tokenizer=TokenizerSettings("bpe", kind="bpe", corpus="tiny", vocabulary_size=300),
        sequence_length=16,
        global_batch=4,
    )
    store = make_store(project / "results/tokens/tiny/bpe", corpus, tokenizer, run.store)
    inputs = {"store": sha256_file(store / "manifest.json")}
    folder = write_run(project / "results/runs", run, inputs=inputs)
    batches = take(open_batches(run, Inputs(corpus, tokenizer, store)), STEPS)

    def as_read(line):
        batch = batches[line["step"]]
        line |= {"order_digest": batch.order_digest, "useful_tokens": batch.useful_tokens}
        line["loss_sum"] = 3.0 * batch.useful_tokens * (1 + (line["step"] == SPIKE))
        return line

    edit(folder, as_read)
    return project, folder


@pytest.fixture
def run_folder(made, tmp_path):
    """A copy of the project that a test may change."""
    project, folder = made
    shutil.copytree(project, tmp_path / "copy")
    return tmp_path / "copy" / folder.relative_to(project)


def test_the_text_of_a_step_is_shown_with_its_files_and_shares(run_folder, tmp_path, capsys):
    output = tmp_path / "step.json"
    assert main(["trace", str(run_folder), "--step", "7", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "is the one that the run read" in shown and "loss      3.0000" in shown
    (step,) = json.loads(output.read_text())["steps"]
    assert sum(piece["labels"] for piece in step["pieces"]) == step["labels"]
    for piece in step["pieces"]:
        assert piece["text"] == TEXTS[piece["document"]]
        assert f"tiny/{piece['origin']['file']}, row {piece['origin']['row']}" in shown


def test_the_step_whose_loss_stands_out_is_traced(run_folder, capsys):
    assert main(["trace", str(run_folder), "--loss-spike"]) == 0
    shown = capsys.readouterr().out
    assert f"step {SPIKE} of" in shown and "its loss 6 is" in shown
    edit(run_folder, lambda line: line | {"loss_sum": 3.0 * line["useful_tokens"]})
    assert main(["trace", str(run_folder), "--loss-spike"]) == 0
    shown = capsys.readouterr().out
    assert "no step" in shown and "looked at" in shown and "6 or more stand out" in shown


def test_another_batch_than_the_run_read_is_named(run_folder, capsys):
    edit(run_folder, lambda line: line | {"order_digest": line["order_digest"] + 1})
    assert main(["trace", str(run_folder), "--step", "7"]) == 1
    assert "IS NOT the one that the run read" in capsys.readouterr().out


def _change_parquet(folder):
    (file,) = (folder.parents[1] / "corpus/tiny").glob("train-*.parquet")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _drop(name, is_project=True):
    """Remove a folder of results, in a project's folder or beside no workflow."""

    def change(folder):
        shutil.rmtree(folder.parents[1] / name)
        if is_project:
            (folder.parents[2] / "workflow").mkdir(exist_ok=True)
            (folder.parents[2] / "workflow/Snakefile").touch()

    return change


def _write_store_again(folder):
    (manifest,) = (folder.parents[1] / "tokens/tiny/bpe").glob("*/manifest.json")
    manifest.write_text(manifest.read_text() + "\n")


MISTAKES = {
    "a changed Parquet file": (_change_parquet, ["--step", "7"], "train-00000.parquet"),
    "a step behind the last": (lambda _: None, ["--step", "30"], "0 … 29"),
    "a step before the first": (lambda _: None, ["--step", "-1"], "0 … 29"),
    "a run without a record": (lambda f: (f / "run.json").unlink(), ["--step", "1"], "no run.json"),
    "a store that is gone": (_drop("tokens"), ["--step", "1"], "snakemake results/tokens"),
    "a store that was never here": (_drop("tokens", False), ["--step", "1"], "cd to the project"),
    "a text that is gone": (_drop("corpus"), ["--step", "1"], "snakemake results/corpus"),
    "another store": (_write_store_again, ["--step", "1"], "is not the one that the run read"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_missing_or_changed_is_one_message(mistake, run_folder, capsys):
    change, options, named = MISTAKES[mistake]
    change(run_folder)
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["trace", str(run_folder), *options]))
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    assert named in said.err and "next" in said.err and "Traceback" not in said.err
