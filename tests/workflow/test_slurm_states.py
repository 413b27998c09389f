"""What our executor does with answers that a real SLURM cannot be made to give: states as `sacct`
prints them, and clients that fail. The commands are made up; Snakemake and the plugin are real.
"""

import json
import os
import sys
import time
from types import SimpleNamespace

import pytest

from tests import served
from tests.workflow import forked
from tests.workflow.conftest import ROOT
from tokenscale.base.errors import UserError
from tokenscale.cli.snakemake import executor, internals

pytestmark = [pytest.mark.slow(60), pytest.mark.workflow]

#: every client of SLURM: jobs are files of one folder, each with what is to be said of it
CLIENT = """#!{python}
import json, os, subprocess, sys, time
from pathlib import Path
name = Path(sys.argv[0]).name
folder = Path(os.environ["FAKE_SLURM"])
with open(folder / "calls", "a") as file:
    file.write(json.dumps([time.time(), name, *sys.argv[1:]]) + "\\n")
plan = json.loads((folder / "plan").read_text())
jobs = sorted(folder.glob("*.job"), key=lambda path: int(path.stem))
silent = plan.get("silent", {{}}).get(name)
if silent and silent[0] < time.time() - plan["start"] < silent[1]:
    sys.exit(name + ": error: " + silent[2])
if name == "sbatch":
    if refusal := plan.get("refusal"):
        sys.exit("sbatch: error: " + refusal)
    words = sys.argv[1:]
    comment = words[words.index("--comment") + 1]
    ends = plan.get("ends", [])
    number = 100 + len(jobs)
    while True:  # two calls at once have two numbers
        state = ends[number - 100] if number - 100 < len(ends) else ""
        written = folder / f"{{number}}.{{os.getpid()}}"
        written.write_text(json.dumps({{"state": state, "comment": comment}}))
        try:
            os.link(written, folder / f"{{number}}.job")
            break
        except FileExistsError:
            number += 1
    if not state:
        command = next(word for word in words if word.startswith("--wrap="))[7:]
        end = f"({{command}}) > {{folder}}/{{number}}.log 2>&1; echo $? > {{folder}}/{{number}}.rc"
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        subprocess.Popen(["bash", "-c", end], start_new_session=True, **streams)
    if number - 100 in plan.get("unanswered", []):
        sys.exit("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    print(number)
elif name in ("sacct", "squeue"):
    for path in jobs:
        job = json.loads(path.read_text())
        code = path.with_suffix(".rc")
        ended = code.read_text().strip() if code.exists() else ""
        state = job["state"] or ("RUNNING" if not ended else "FAILED" if int(ended) else "COMPLETED")
        if any("%k" in word for word in sys.argv):
            state = job["comment"]
        elif name == "squeue" and plan.get("forgotten"):
            continue
        elif name == "squeue":
            state = state.split()[0]
        print(f"{{path.stem}}|{{state}}")
elif name == "sinfo":
    print(plan.get("down", ""))
elif name == "scontrol":
    print("MinJobAge = 300 sec")
"""
#: runs its command here, without the options of srun
SRUN = """#!/bin/bash
while [[ "$1" == -* ]]; do case "$1" in -n|-c) shift 2;; *) shift;; esac; done
exec "$@"
"""
CLIENTS = ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "sshare")
SNAKEFILE = """
from tokenscale.cli.snakemake import executor
executor.install_executor()
executor.FIRST_RETRY_S = 0.5
executor.LONGEST_PAUSE_S = 2
executor.LONGER_BY_S = 1
executor.SHARED_AFTER_S = 4
rule all:
    input: expand("{{n}}.txt", n=range({jobs}))
rule one:
    input: {inputs}
    output: "{{n}}.txt"
    log: "{{n}}.log"
    resources: mem_mb=100, runtime=10{resources}
    shell: "echo begun >> {{wildcards.n}}.begun; {first}sleep {seconds}; echo 1 > {{output}}"
"""
#: of a run on one of a node's four GPUs, as workflow/rules/train.smk has them
SHARED = ", ranks=1, nodes=1, tasks_per_node=2, cpus_per_task=36, mpi='srun', gres='gpu:1', share=4"


def run_campaign(
    folder, *more_options, jobs=1, seconds=0, inputs="[]", resources="", first="", **plan
):
    """The call's exit code and text, its calls of clients, and the outputs that are there."""
    commands = folder / "commands"
    commands.mkdir()
    for name in CLIENTS:
        (commands / name).write_text(CLIENT.format(python=served.python()))
        (commands / name).chmod(0o755)
    (commands / "srun").write_text(SRUN)
    (commands / "srun").chmod(0o755)
    state = folder / "state"
    state.mkdir()
    (state / "plan").write_text(json.dumps(plan | {"start": time.time()}))
    text = SNAKEFILE.format(
        jobs=jobs, seconds=seconds, inputs=inputs, resources=resources, first=first
    )
    (folder / "Snakefile").write_text(text)
    environment = os.environ | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "FAKE_SLURM": str(state),
        "PYTHONPATH": str(ROOT / "src"),
    }
    options = "--executor slurm --slurm-no-requeue --jobs 8 --retries 1 --keep-going"
    settings = "--slurm-init-seconds-before-status-checks 1 --latency-wait 5"
    account = "--default-resources slurm_account=g1 slurm_partition=normal"
    words = f"{options} {settings} {account}".split()
    code, said = forked.snakemake([*words, *more_options], folder, environment, timeout_s=240)
    calls = []
    if (state / "calls").exists():
        calls = [json.loads(line) for line in (state / "calls").read_text().splitlines()]
    outputs = {path.stem for path in folder.glob("*.txt")}
    return code, said, calls, outputs


def count(calls, client):
    return sum(name == client for _, name, *_ in calls)


#: of one the plugin would wait for the end; others are brought about in tests/slurm, and are in the
#: table of test_when_a_job_has_failed
ENDED = ["PREEMPTED"]
ENDED += [
    pytest.param(state, marks=pytest.mark.long)
    for state in ("CANCELLED by 1000", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")
]


@pytest.mark.parametrize("state", ENDED)
def test_a_job_that_ended_without_success_is_submitted_again(state, tmp_path):
    code, text, calls, outputs = run_campaign(tmp_path, ends=[state])
    assert code == 0 and outputs == {"0"}, text
    assert count(calls, "sbatch") == 2
    assert f"SLURM status is: '{state}'" in text


def test_of_a_lost_jobs_nodes_those_that_are_down_are_excluded(tmp_path):
    code, text, calls, _ = run_campaign(tmp_path, ends=["NODE_FAIL"], down="nid000002")
    assert code == 0, text
    second = [words for _, name, *words in calls if name == "sbatch"][1]
    assert [word for word in second if "nid" in word] == ["--exclude=nid000002"]


REFUSAL = "Batch job submission failed: Socket timed out on send/recv operation"


def test_a_controller_that_does_not_answer_is_asked_until_it_does(tmp_path):
    away = [0, 6, REFUSAL]
    code, text, calls, outputs = run_campaign(
        tmp_path, jobs=4, silent={"sbatch": away, "squeue": away}
    )
    assert code == 0 and outputs == {"0", "1", "2", "3"}, text
    assert "Socket timed out on send/recv operation. Trying again in" in text
    # two threads submit, in pauses of 0.5, 1, 2, 2, … seconds
    assert count(calls, "sbatch") <= 4 + 2 * 10


def test_a_job_that_was_taken_without_an_answer_is_not_submitted_twice(tmp_path):
    code, text, calls, outputs = run_campaign(tmp_path, unanswered=[0], seconds=3)
    assert code == 0 and outputs == {"0"}, text
    assert count(calls, "sbatch") == 1
    assert (tmp_path / "0.begun").read_text() == "begun\n"
    assert "SLURM has taken one as job 100." in text


@pytest.mark.parametrize("refusal", ["Invalid account or account/partition combination specified"])
def test_a_refusal_that_stays_is_final(refusal, tmp_path):
    code, text, calls, outputs = run_campaign(tmp_path, refusal=refusal)
    assert code == 1 and not outputs
    assert count(calls, "sbatch") == 1
    assert refusal in text


def test_array_jobs_are_refused_before_the_first_submission(tmp_path):
    code, text, calls, _ = run_campaign(tmp_path, "--slurm-array-jobs", "one")
    assert code == 2 and "slurm-array-jobs: one" in text and "Traceback" not in text
    assert count(calls, "sbatch") == 0


def test_a_job_that_ends_while_slurm_is_silent_is_noticed(tmp_path):
    """Neither the accounting nor the controller answers for a time, in which the job ends."""
    away = [4, 16, "failed to open persistent connection to host"]
    code, text, calls, outputs = run_campaign(
        tmp_path, seconds=5, silent={"sacct": away, "squeue": away}
    )
    assert code == 0 and outputs == {"0"}, text
    assert "failed to open persistent connection to host. Still asking." in text
    assert "SLURM answers again, after" in text


def test_a_cluster_without_accounting_is_asked_through_its_controller(tmp_path):
    disabled = [0, 1e9, "Slurm accounting storage is disabled"]
    code, text, _, outputs = run_campaign(tmp_path, silent={"sacct": disabled})
    assert code == 0 and outputs == {"0"}, text
    assert "Still asking" not in text


def test_an_old_log_is_not_shown_for_a_job_that_dies_before_it_writes(tmp_path):
    (tmp_path / "0.log").write_text("of an earlier success")
    code, text, _, _ = run_campaign(tmp_path, ends=["CANCELLED by 0"] * 2)
    assert code == 1, text
    assert (tmp_path / "0.log").read_text() == ""


def find_value(call, option):
    return next(word.partition("=")[2] for word in call if word.startswith(f"{option}="))


def test_jobs_that_share_nodes_fill_them_and_one_that_fails_is_repeated_alone(tmp_path):
    fails_once = "test {wildcards.n} != 2 || test -e again || {{ touch again; exit 1; }}; "
    code, text, calls, outputs = run_campaign(
        tmp_path, jobs=6, seconds=2, resources=SHARED, first=fails_once
    )
    assert code == 0 and outputs == set("012345"), text
    submitted = [words for _, name, *words in calls if name == "sbatch"]
    *first, last = [
        [find_value(call, of) for of in ("--gres", "--ntasks-per-node", "--cpus-per-task")]
        for call in submitted
    ]
    assert sorted(first) == [["gpu:2", "2", "72"], ["gpu:4", "4", "72"]]
    assert last == ["gpu:1", "2", "36"]
    begun = {n: (tmp_path / f"{n}.begun").read_text().count("begun") for n in outputs}
    assert begun == dict.fromkeys("01345", 1) | {"2": 2}


def test_a_job_whose_company_does_not_come_is_submitted_without_it(tmp_path):
    """The others cannot be ready: their input needs this job's output."""
    waits = "lambda w: [] if w.n == '0' else '0.txt'"
    code, text, calls, outputs = run_campaign(tmp_path, jobs=5, inputs=waits, resources=SHARED)
    assert code == 0 and outputs == set("01234"), text
    submitted = [words for _, name, *words in calls if name == "sbatch"]
    assert [find_value(call, "--gres") for call in submitted] == ["gpu:1", "gpu:4"]


def build_executor(requeue=False):
    """An executor without a cluster, for single decisions."""
    settings = SimpleNamespace(requeue=requeue)
    built = object.__new__(executor.CampaignExecutor)
    built.workflow = SimpleNamespace(executor_settings=settings)
    built._unclear_since = {}
    return built


@pytest.mark.parametrize(
    ("state", "requeue", "is_complete", "after_s", "failed"),
    [
        ("RUNNING", False, True, 1e6, False),
        ("REQUEUED", False, True, 1e6, False),
        ("a word of a later release", False, True, 1e6, False),
        ("PREEMPTED", False, True, 0, True),
        ("PREEMPTED", True, True, 0, False),
        ("PREEMPTED", True, True, 601, True),
        ("NODE_FAIL", True, True, 601, True),
        ("", False, True, 599, False),
        ("", False, True, 601, True),
        ("", False, False, 1e6, False),
        ("CANCELLED by 0", False, False, 0, True),
        *((state, False, True, 0, True) for state in sorted(executor.FAILED)),
    ],
)
def test_when_a_job_has_failed(state, requeue, is_complete, after_s, failed, monkeypatch):
    built = build_executor(requeue)
    info = SimpleNamespace(external_jobid="7")
    now = time.monotonic()
    built._has_failed(info, state, is_complete)
    monkeypatch.setattr(executor.time, "monotonic", lambda: now + after_s)
    assert built._has_failed(info, state, is_complete) is failed


def test_a_job_that_is_known_again_is_waited_for_anew(monkeypatch):
    built = build_executor()
    info = SimpleNamespace(external_jobid="7")
    now = time.monotonic()
    for seconds, state in ((0, ""), (400, "RUNNING"), (800, "")):
        monkeypatch.setattr(executor.time, "monotonic", lambda later=seconds: now + later)
        assert not built._has_failed(info, state, True)


@pytest.mark.parametrize("entry", internals.EXECUTOR_NAMES)
def test_a_plugin_without_a_name_is_refused(entry, monkeypatch):
    module, _, path = entry.partition(":")
    owner = sys.modules[module]
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    monkeypatch.delattr(owner, name)
    with pytest.raises(UserError, match="this release of snakemake-executor-plugin-slurm does not"):
        internals.check_executor_plugin()


@pytest.mark.parametrize("name", internals.EXECUTOR_ATTRIBUTES)
def test_an_executor_without_an_attribute_is_refused(name):
    attributes = dict.fromkeys(set(internals.EXECUTOR_ATTRIBUTES) - {name})
    with pytest.raises(UserError, match="does not fit the workflow") as caught:
        internals.check_executor(SimpleNamespace(**attributes))
    assert caught.value.facts["next"] == "pip install 'snakemake-executor-plugin-slurm~=2.8.0'"
