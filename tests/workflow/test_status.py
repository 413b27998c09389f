"""`status --stale` and `--failed` in a real project: the edited file, the runs, what Snakemake refuses, what failed."""

import json
import subprocess
import sys

import pytest

from tests.workflow.conftest import CONFIG

pytestmark = pytest.mark.workflow


def stale(project, *targets):
    return status(project, "--stale", *targets)


def status(project, *options):
    command = [sys.executable, "-m", "tokenscale", "status", *options]
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


def test_a_failed_call_ends_with_what_failed_and_why(fresh):
    """By the hook of the Snakefile, which jobs on nodes do not call."""
    config = CONFIG | {"corpora": {"small": {"source": {"kind": "docstrings", "packages": ["no_such_package"]}}}}
    (fresh.root / "config/config.yaml").write_text(json.dumps(config))
    done = fresh.snakemake("--cores", "1", "results/corpus/small/manifest.json", check=False)
    told = done.stdout.split("1 job failed in Snakemake's last call")
    assert done.returncode == 1 and len(told) == 2, done.stdout
    assert "\ncorpus small\n  why     " in told[1] and "no_such_package" in told[1] and "\n  next    " in told[1]
    assert "  log     results/logs/corpus/small.log\n" in told[1]
    again = status(fresh, "--failed")
    assert again.returncode == 0 and again.stdout.split("\n", 1)[1] in told[1]
