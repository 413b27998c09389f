"""What each rule's job requests from SLURM under the profile of Alps, from a machine of a few cores."""

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
NODE_CORES = 288
#: rule → cores, minutes; each has the memory of its node
REQUESTED = {
    "build_corpus": (1, 240),
    "corpus_parts_00000_00063": (64, 60),
    "corpus_parts_00064_00069": (6, 60),
    "merge_corpus": (64, 240),
    "corpus_records": (64, 240),
    "build_tokenizer": (2, 60),
    "pretokenize": (72, 60),
    "token_parts_00000_00063": (64, 60),
    "token_parts_00064_00069": (6, 60),
    "merge_store": (1, 60),
    "benchmark_data": (NODE_CORES, 60),
    "benchmark_storage": (NODE_CORES, 60),
    "record": (36, 720),
    "certificate": (2, 60),
}
#: rules whose ranks our own srun starts, each with its cores; their time comes from an estimate
TRAININGS = {"train": {36, 72}, "benchmark_inference": {36}}


#: eight local jobs, each of which records its begin and its end
LOCAL = """
from tokenscale.cli.snakemake import internals
internals.use_cores_of_nodes(workflow, 288)
resource_scopes: local_cores="local"
rule all:
    input: expand("{i}.end", i=range(8))
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


def value_of(call, *flags) -> int:
    """The number behind one of these flags of a call."""
    for position, word in enumerate(call):
        for flag in flags:
            if word == flag:
                return int(call[position + 1])
            if word.startswith(f"{flag}="):
                return int(word.partition("=")[2])
    raise AssertionError(f"none of {flags} in {call}")


def test_every_job_requests_what_the_profile_states_whatever_this_machine_has(project):
    """Jobs are refused; their outputs are then there, so that the jobs after them are submitted."""
    targets = ["tables", "results/tokens/large/bpe/token-list/manifest.json"]
    found: dict[str, set[tuple[int, int, int]]] = {}
    for _ in range(8):
        calls, outputs = submit(project, targets)
        if not calls:
            break
        for call in calls:
            rule = re.search(r"--target-jobs .(\w+):", call[-1])[1]
            cores = value_of(call, "--cpus-per-task", "-c")
            found.setdefault(rule, set()).add(
                (cores, value_of(call, "--mem"), value_of(call, "-t", "--time"))
            )
        shutil.rmtree(project.root / ".snakemake")
        for name in outputs:
            (project.root / name).parent.mkdir(parents=True, exist_ok=True)
            (project.root / name).write_text("{}")
        runs = sorted({name.split("/")[2] for name in outputs if name.endswith("/done.json")})
        if runs:
            targets.append(f"results/parity/{runs[0]}/over/{runs[1]}.json")
    trained = {rule: found.pop(rule) for rule in TRAININGS}
    assert {rule: {cores for cores, _, _ in trained[rule]} for rule in trained} == TRAININGS
    assert {memory for requests in trained.values() for _, memory, _ in requests} == {NODE_MB}
    expected = {rule: {(cores, NODE_MB, minutes)} for rule, (cores, minutes) in REQUESTED.items()}
    assert found == expected


def test_every_rule_that_goes_to_a_cluster_is_in_the_test_above():
    text = "".join(path.read_text() for path in (ROOT / "workflow/rules").glob("*.smk"))
    rules = re.findall(r"^rule (\w+):\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    submitted = {name for name, body in rules if "localrule: True" not in body and "shell:" in body}
    tested = {name for name in (*REQUESTED, *TRAININGS) if "_parts_" not in name}
    assert submitted == tested


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
