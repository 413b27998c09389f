"""What each rule's job requests from SLURM under the profile of Alps, from a machine of a few cores."""

import itertools
import json
import os
import re
import shutil

import pytest

from tests import served
from tests.machines import program, write_image_record
from tests.workflow import forked
from tests.workflow.conftest import CONFIG, EXPERIMENTS, ROOT, RUNS

pytestmark = [pytest.mark.slow(60), pytest.mark.workflow]

#: records its call and refuses the job
SBATCH = """#!{python}
import json, os, sys
with open(os.environ["SUBMITTED"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit("refused")
"""
NODE_MB = 450_000
#: column of the table in docs/clusters.md → options of sbatch that state it
REQUESTS = {
    "nodes": ("--nodes",),
    "tasks a node": ("--ntasks-per-node", "--ntasks"),
    "cores a task": ("--cpus-per-task",),
    "GPUs a node": ("--gres",),
    "MB a node": ("--mem",),
    "minutes": ("-t",),
}


#: five local jobs, each of which records its begin and its end
LOCAL = """
from tokenscale.cli.snakemake import internals
internals.use_cores_of_nodes(workflow, 288)
resource_scopes: local_cores="local"
rule all:
    input: expand("{i}.end", i=range(5))
rule one:
    output: "{i}.end"
    localrule: True
    shell: "date +%s.%N > {wildcards.i}.begin; sleep 2; date +%s.%N > {output}"
"""


def equip(commands) -> None:
    """Write the commands of a SLURM that refuses jobs."""
    commands.mkdir()
    for name in ("sbatch", "sacctmgr", "sshare", "sacct", "squeue", "scancel", "sinfo"):
        text = "#!/bin/sh\nexit 0\n"
        if name == "sbatch":
            text = SBATCH.format(python=served.python())
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)


@pytest.fixture
def project(fresh):
    """A project with jobs of every rule, and commands of a SLURM that refuses them."""
    equip(fresh.root.parent / "commands")
    program(fresh.root.parent / "commands", "id", "echo users g1")
    write_image_record(fresh.root / ".venv-alps/image.json")
    (fresh.root / "raw").mkdir()
    for number in range(70):
        (fresh.root / f"raw/{number:02d}.txt").write_text(f"text {number}")
    corpora = CONFIG["corpora"] | {"large": {"source": {"files": ["raw/*.txt"]}, "parts": 70}}
    (fresh.root / "config/config.yaml").write_text(json.dumps(CONFIG | {"corpora": corpora}))
    extra = {
        "runs": RUNS | {"approach": "packed", "checkpoints": {"final": True}},
        "storage_benchmark": {"corpus": "small", "tokenizer": "bpe"},
        "inference_benchmark": {
            "sample_tokens": 4,
            "prompt_tokens": [8],
            "new_tokens": [8],
        },
    }
    path = fresh.root / "config/experiments/ranks.yaml"
    path.write_text(json.dumps(EXPERIMENTS["ranks"] | extra))
    return fresh


def submit(project, targets) -> tuple[list[list[str]], list[str]]:
    """The calls of sbatch for all jobs that are ready, and the outputs of these jobs."""
    calls = project.root.parent / "submitted"
    calls.write_text("")
    environment = project.environment | {"SUBMITTED": str(calls), "ALPS_ACCOUNT": "g1"}
    environment["PATH"] = f"{project.root.parent / 'commands'}{os.pathsep}{environment['PATH']}"
    options = ["--retries", "0", "--slurm-init-seconds-before-status-checks", "1"]
    _, text = forked.snakemake(
        ["--profile", "alps", *options, "--", *targets], project.root, environment
    )
    submitted = [json.loads(line) for line in calls.read_text().splitlines()]
    events = [
        json.loads(line)
        for path in (project.root / ".snakemake/log").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    outputs = [name for e in events if e["event"] == "job_error" for name in e["output"]]
    assert not submitted or outputs, text[-3000:]
    return submitted, outputs


def find_value(call, options) -> str:
    """The number behind one of these options of a call; "" where it has none of them."""
    for option in options:
        for word, following in itertools.pairwise(call):
            if word == option:
                return following
            if word.startswith(f"{option}="):
                return word.rpartition("=")[2].removeprefix("gpu:")
    return ""


def read_rules(page: str) -> set[str]:
    """The rules in the first column of the page's table of requests."""
    table = page.partition("| rule |")[2].partition("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))


PAGE = (ROOT / "docs/clusters.md").read_text()


def test_every_job_requests_what_the_documentation_says_whatever_this_machine_has(project):
    """Jobs are refused; their outputs are then there, so that the jobs after them are submitted."""
    targets = ["tables", "results/tokens/large/bpe/token-list/manifest.json"]
    found: set[tuple[str, ...]] = set()
    for _ in range(8):
        calls, outputs = submit(project, targets)
        if not calls:
            break
        for call in calls:
            rule = re.search(r"--target-jobs .(\w+):", call[-1])[1]
            found.add((f"`{rule}`", *(find_value(call, of) for of in REQUESTS.values())))
        shutil.rmtree(project.root / ".snakemake")
        for name in outputs:
            (project.root / name).parent.mkdir(parents=True, exist_ok=True)
            (project.root / name).write_text("{}")
        runs = sorted({name.split("/")[2] for name in outputs if name.endswith("/done.json")})
        if runs:
            targets.append(f"results/parity/{runs[0]}/over/{runs[1]}.json")
    rows = [("rule", *REQUESTS), ("---",) * (1 + len(REQUESTS)), *sorted(found)]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    assert table in PAGE, f"docs/clusters.md has another table than\n{table}"
    memory = 1 + list(REQUESTS).index("MB a node")
    assert {int(row[memory]) for row in found} == {NODE_MB}


def test_every_rule_that_goes_to_a_cluster_is_in_the_table_above():
    text = "".join(path.read_text() for path in (ROOT / "workflow/rules").glob("*.smk"))
    rules = re.findall(r"^rule (\w+):\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    submitted = {name for name, body in rules if "localrule: True" not in body and "shell:" in body}
    assert submitted == {name for name in read_rules(PAGE) if "_parts_" not in name}


def test_local_jobs_take_no_more_than_local_cores(tmp_path):
    """Snakemake itself ignores `local-cores`."""
    equip(tmp_path / "commands")
    (tmp_path / "Snakefile").write_text(LOCAL)
    path = f"{tmp_path / 'commands'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src")}
    options = "--executor slurm --jobs 20 --local-cores 3 --default-resources local_cores=threads"
    code, text = forked.snakemake(
        [*options.split(), "slurm_account=a", "--"], tmp_path, environment
    )
    assert code == 0, text
    changes = [(float(path.read_text()), 1) for path in tmp_path.glob("*.begin")]
    changes += [(float(path.read_text()), -1) for path in tmp_path.glob("*.end")]
    running = [sum(change for _, change in sorted(changes)[: n + 1]) for n in range(len(changes))]
    assert max(running) == 3
