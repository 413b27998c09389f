"""`status --stale` in a real project: it names the edited file, the runs, and what Snakemake refuses."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.workflow


def stale(project, *targets):
    command = [sys.executable, "-m", "tokenscale", "status", "--stale", *targets]
    return subprocess.run(
        command, cwd=project.root, env=project.environment, capture_output=True, text=True, timeout=120
    )


def test_an_edit_is_told_with_the_store_and_the_run_that_it_hits(copy):
    assert stale(copy).stdout == "nothing is stale\n"
    for file in ("corpus/clean.py", "formats/token_list.py", "parallel/data.py"):
        path = copy.root / "src/tokenscale" / file
        path.write_text(path.read_text() + "\n# an edited line\n")
    done = stale(copy)
    assert done.returncode == 0, done.stderr
    parts = {part.split("\n")[0]: part for part in done.stdout.split("\n\n")}
    assert "\n            corpus small\n" in parts["code      src/tokenscale/corpus/clean.py changed"]
    # Snakemake does not look behind the corpus by itself; runs are told all the same
    assert "run packed-llama-micro-ddp-w2-" in parts["code      src/tokenscale/parallel/data.py changed"]
    assert "run token-list-llama-micro-single-w1-" in parts["code      src/tokenscale/formats/token_list.py changed"]
    assert "2 runs would start only because data is rebuilt" in done.stdout
    assert "trainings: 3 on 1 rank, 1 on 2 ranks; last time took " in done.stdout


def test_a_project_with_nothing_built_says_so(fresh):
    done = stale(fresh, "tokens")
    assert done.returncode == 0
    assert done.stdout.startswith("6 stores and 2 other jobs would run.\n\nnew       never built\n")


def test_what_snakemake_refuses_is_passed_on(fresh):
    done = stale(fresh, "nonsense")
    assert done.returncode == 2 and "No rule to produce nonsense" in done.stderr
    (fresh.root / "config/config.yaml").write_text("{scale: dmeo}")
    done = stale(fresh)
    assert done.returncode == 2 and done.stderr.startswith("tokenscale: unknown scale 'dmeo'.\n")
    assert "did you mean 'demo'" in done.stderr
