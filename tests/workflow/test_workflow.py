"""The workflow as a user meets it: profiles, targets, wrong input, lint."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import planted, served
from tests.refusals import refused
from tests.workflow import forked
from tests.workflow.conftest import EXPERIMENTS, OFFLINE, ROOT, RUNS
from tests.workflow.jobs import REPORT
from tokenscale.base.files import read_json, sha256_file
from tokenscale.runs.records import provenance

pytestmark = [pytest.mark.slow(20), pytest.mark.workflow]


def test_every_target_has_its_stage(fresh):
    assert fresh.planned("corpus") == {"build_corpus": 1}
    # with the records of the text: runs that tokenize while training then start in their planned
    # order, too
    tokens = {"build_corpus": 1, "corpus_records": 1, "build_tokenizer": 1, "pretokenize": 4}
    assert fresh.planned("tokens") == tokens
    runs = {
        "build_corpus": 1,
        "corpus_records": 1,
        "build_tokenizer": 1,
        "pretokenize": 4,
        "train": 4,
    }
    assert fresh.planned("runs") == runs
    tables = runs | {
        "run_table": 2,
        "benchmark_storage": 1,
        "ingest": 2,
        "validate": 2,
    }
    assert fresh.planned("tables") == tables
    assert fresh.planned("figures") == tables | {"draw_figure": 4}
    pages = {"describe_experiment": 2, "build_experiment_page": 2}
    report = tables | {"draw_figure": 4} | pages | REPORT
    assert fresh.planned("report") == fresh.planned() == report
    assert fresh.planned("claims") == tables | {"judge_claims": 1}
    ranks = fresh.planned("ranks")
    assert (
        ranks
        == fresh.planned("--config", "experiments=ranks")
        == ranks | REPORT | {"train": 2, "draw_figure": 1, "describe_experiment": 1}
    )


def test_each_configuration_has_its_own_report_and_the_call_ends_with_it(copy):
    """Another configuration, an experiment by its name, and the first configuration again, with
    nothing left to do.
    """
    results = copy.root / "results"
    before = {path: sha256_file(path) for path in (results / "report").rglob("*") if path.is_file()}
    (copy.root / "mine.yaml").write_text("experiments: [ranks]")
    pages = set()
    for asked, name in (
        (["--configfile", "mine.yaml"], "report-mine"),
        (["ranks"], "report-experiments=ranks"),
    ):
        dry = copy.snakemake("-n", "--cores", "2", *asked).stdout
        said = copy.snakemake("--cores", "2", *asked).stdout
        closing = said[said.index(f"\nreport   results/{name}/index.html\nanswers  ") :]
        pages.add((results / name / "index.html").read_bytes())
        assert (results / name / "report.pdf").is_file() and (
            results / name / "SHA256SUMS"
        ).is_file()
        assert "\ncaution  This is demo scale" in closing and closing.count("\ncaution") <= 6
        assert "\nreport   " not in dry
        assert copy.snakemake("--cores", "2", *asked).stdout.endswith(closing)
    assert len(pages) == 1, "the same content whichever way it is built"
    assert {path: sha256_file(path) for path in before} == before
    assert (
        copy.snakemake("--cores", "2").stdout.count(
            "\nreport   results/report/index.html\nanswers  "
        )
        == 1
    )


def test_alps_is_planned_without_slurm_and_without_writing_elsewhere(fresh, monkeypatch):
    """GPUs 1/2/4/8/12/16 → nodes 1/1/1/2/3/4, ranks a node 1/2/4/4/4/4."""
    runs = RUNS | {"approach": "packed", "global_batch": 48}
    changed = EXPERIMENTS["ranks"] | {
        "runs": runs,
        "factors": {"layout.data": [1, 2, 4, 8, 12, 16]},
    }
    (fresh.root / "config/experiments/ranks.yaml").write_text(json.dumps(changed))
    # a rule with a message does not list its resources
    rules = fresh.root / "workflow/rules/train.smk"
    rules.write_text(re.sub(r" +message:\n.*\n", "", rules.read_text()))
    monkeypatch.setenv("ALPS_ACCOUNT", "g1")
    text = fresh.command(
        *[
            "--profile",
            "alps",
            "-n",
            "--verbose",
            "--printshellcmds",
            "--quiet",
            "host",
            "--",
            "ranks",
        ]
    )
    found = {}
    for block in re.split(r"\n\n|\n(?=\[)", text):
        size = re.search(r"run_id=\S+-w(\d+)-", block)
        resources = re.search(r"resources: (.*)", block)
        if size and resources:
            found[int(size[1])] = dict(
                r.split("=", 1) for r in resources[1].split(", ") if "=" in r
            )
    assert sorted(found) == [1, 2, 4, 8, 12, 16], text[-4000:]
    for size, nodes, tasks in [(1, 1, 2), (2, 1, 2), (4, 1, 4), (8, 2, 4), (12, 3, 4), (16, 4, 4)]:
        resources = found[size]
        assert resources["nodes"] == str(nodes) and resources["ranks"] == str(size)
        assert resources["tasks_per_node"] == str(tasks) and resources["mpi"] == "srun"
        assert resources["cpus_per_task"] == ("36" if size == 1 else "72")
        assert resources["mem_mb"] == "450000" and resources["slurm_account"] == "g1"
    # Snakemake itself makes the empty folders of its cache
    assert [p for p in (fresh.root.parent / "home").rglob("*") if not p.is_dir()] == []


@pytest.mark.skipif(not OFFLINE, reason="this machine allows no network namespace")
def test_snakemakes_own_report_is_made_offline(built):
    built.command("--report", "report.zip", offline=True)
    assert (built.root / "report.zip").stat().st_size > 100_000
    (built.root / "report.zip").unlink()


def test_no_secret_of_the_environment_is_in_anything_that_was_made(built):
    """Planted ones are in the environment of every job of these projects."""
    made = [
        path
        for name in ("results", ".snakemake")
        for path in (built.root / name).rglob("*")
        if path.is_file()
    ]
    assert len(made) > 100 and any(path.name == "run.json" for path in made)
    assert [path for path in made if planted.VALUE.encode() in path.read_bytes()] == []


def test_every_figure_leads_back_to_logs_code_environment_and_raw_text(built):
    """The report's provenance → sealed records → logs, versions, manifests → the bytes of tokens
    and text.
    """
    results = built.root / "results"
    manifests = {sha256_file(path): path for path in results.glob("[ct]o*/**/manifest.json")}
    drawn = sorted((results / "report/figures").rglob("*.svg"))
    assert len(drawn) >= 3
    for part in read_json(results / "report/provenance.json")["experiments"].values():
        assert part["runs"]
        for run_id, facts in part["runs"].items():
            record = provenance.read_sealed(results / "runs" / run_id / "run.json")
            assert record["designs"], "of the experiment, when the local call began the run"
            assert (
                record["seal"] == facts["seal"]
                and record["environment"]
                and record["versions"]["torch"]
            )
            for name, digest in record["outcome"]["logs"].items():
                assert sha256_file(results / "runs" / run_id / name) == digest
            for role, digest in record["inputs"].items():
                assert digest in manifests, f"{role} of {run_id}"
            for name, digest in record["code"].items():
                assert sha256_file(built.root / "src/tokenscale" / name) == digest
    command = [served.python(), "-m", "tokenscale", "verify", "results/"]
    done = subprocess.run(
        command, cwd=built.root, env=built.environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("count", [15, pytest.param(300, marks=pytest.mark.long)])
def test_each_damaged_file_is_named(built, count):
    """In a process of its own: its forks must not inherit the threads of other tests."""
    options = ["--results", built.root / "results", "--seed", "26", "--count", str(count)]
    command = [sys.executable, "-m", "tests.faults.mutate", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["all"]["named"] > count / 2


def test_the_rule_graph_in_the_readme_is_the_real_one():
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    code, text = forked.snakemake(["--rulegraph", "mermaid-js"], ROOT, environment)
    readme = (ROOT / "docs/development.md").read_text()
    assert (
        code == 0 and edges(text) and edges(text) == edges(readme.split("<!-- rule graph -->")[1])
    )


def edges(text):
    """(rule, rule) for each arrow of a Mermaid graph, whatever its nodes are called."""
    names = dict(re.findall(r"(id\d+)\[+\"?([\w ]+?)\"?\]+", text))
    return {(names.get(a, a), names.get(b, b)) for a, b in re.findall(r"(\w+) *--> *(\w+)", text)}


def test_the_command_for_a_damaged_table_restores_it(copy, monkeypatch, capsys):
    """The damage keeps the file's size."""
    monkeypatch.chdir(copy.root)
    path = Path("results/tables/ways/steps.parquet")
    before = path.read_bytes()
    with open(path, "r+b") as file:
        file.write(bytes(len(before)))
    arguments = [
        "report",
        "figure",
        "loss_over_time",
        "--tables",
        "results/tables/ways",
        "--output",
        "o",
    ]
    told = refused(capsys, arguments)
    command, *again = told.split("  next    ")[1].split()
    assert command == "snakemake"
    copy.snakemake(*again)
    assert path.read_bytes() == before
