"""What a dry run would start and why, what failed, and what Snakemake shows, in a real project."""

import json
import shutil
import subprocess

import pytest

from tests import served
from tests.workflow.conftest import CONFIG
from tests.workflow.jobs import PAPER

pytestmark = [pytest.mark.slow(64), pytest.mark.workflow]

FIGURE = "results/figures/ways/data_stall_share.svg"


def test_an_edit_is_told_with_the_store_and_the_run_that_it_hits(copy):
    assert "Nothing to be done" in copy.snakemake("-n").stdout

    def told_of(*files):
        for file in files:
            path = copy.root / "src/tokenscale" / file
            path.write_text(path.read_text() + "\n# an edited line\n")
        told = copy.snakemake("-n").stdout
        return told, {part.split("\n")[0]: part for part in told.split("\n\n")}

    _, parts = told_of("data/stores/parquet.py", "data/batches/online.py")
    assert (
        "run padding-free-llama-micro-single-w1-"
        in parts["code      src/tokenscale/data/batches/online.py changed"]
    )
    assert (
        "run token-list-llama-micro-single-w1-"
        in parts["code      src/tokenscale/data/stores/parquet.py changed"]
    )
    told, parts = told_of("data/corpus/build.py")
    assert (
        "\n            corpus small\n"
        in parts["code      src/tokenscale/data/corpus/build.py changed"]
    )
    assert " would start only because data is rebuilt" in told
    assert "trainings: 3 on 1 rank, 1 on 2 ranks; last time took " in told


def test_a_project_with_nothing_built_says_so(fresh):
    dry = fresh.snakemake("-n", "tokens").stdout
    assert "4 stores and 3 other jobs would run.\n\nnew       not built yet\n" in dry
    assert (
        "corpus small, records small, tokenizer bpe and 4 stores" in dry and "Job stats" not in dry
    )
    dry = fresh.snakemake("-n").stdout
    assert len(dry.splitlines()) < 60 and "ways, ranks at scale demo, 4 of 4 runs to do" in dry


def test_a_call_shows_one_line_a_job_and_ends_with_what_failed_and_why(fresh):
    """By the hook of the Snakefile, which jobs on nodes do not call."""
    corpora = CONFIG["corpora"] | {
        "broken": {"source": {"kind": "docstrings", "packages": ["no_such_package"]}}
    }
    (fresh.root / "config/config.yaml").write_text(json.dumps(CONFIG | {"corpora": corpora}))
    files = ["results/tokenizers/bpe/manifest.json", "results/corpus/broken/manifest.json"]
    done = fresh.snakemake(
        "--profile", "profiles/default", "--cores", "1", "--keep-going", *files, check=False
    )
    assert done.returncode == 1
    lines = [line.split("(")[0].split() for line in done.stdout.splitlines()]
    jobs = [words[1:] for words in lines if len(words) == 4 and words[1].endswith("/3")]
    assert sorted(words[0] for words in jobs) == ["1/3", "2/3", "3/3"]
    expected = [["build_corpus", "broken"], ["build_corpus", "small"], ["build_tokenizer", "bpe"]]
    assert (
        sorted(words[1:] for words in jobs) == expected
        and "2 of 3 jobs done, 1 failed, in " in done.stdout
    )
    for words in ("Select jobs", "Provided cores", "Finished job", "Using shell", "Job stats"):
        assert words not in done.stdout
    error = done.stdout.split("Error in rule build_corpus:")[1]
    assert "results/logs/corpus/broken.log" in error and "no_such_package" in error
    _, told = done.stdout.split("1 job failed in Snakemake's last call")
    assert (
        "\ncorpus broken\n  why     " in told
        and "no_such_package" in told
        and "\n  next    " in told
    )
    assert "  log     results/logs/corpus/broken.log\n" in told
    command = [served.python(), "-m", "tokenscale", "status", "--failed"]
    again = subprocess.run(
        command, cwd=fresh.root, env=fresh.environment, capture_output=True, text=True, timeout=200
    )
    assert again.returncode == 0 and again.stdout.split("\n", 1)[1] in told


def test_a_deleted_figure_is_drawn_again_and_other_deleted_files_are_not_needed(copy):
    figure = copy.root / FIGURE
    store = copy.root / "results/tokens/small/bpe/token-list/manifest.json"
    (run,) = copy.root.glob("results/runs/packed-llama-micro-single-w1-*/done.json")
    drawn = figure.read_bytes()
    figure.unlink()
    for path in (run, store):
        shutil.rmtree(path.parent)
    assert copy.planned() == {"draw_figure": 1, "build_experiment_page": 1} | PAPER
    copy.snakemake("--cores", "2", "figures")
    assert figure.read_bytes() == drawn and not run.exists()
    copy.snakemake("--cores", "2", *(str(path.relative_to(copy.root)) for path in (run, store)))
    assert run.is_file() and store.is_file()
