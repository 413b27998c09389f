"""A run on a machine: its job, what would be started, by whom, and what a failed srun left."""

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.machines import program
from tokenscale.base.errors import UserError
from tokenscale.base.facts import list_unknown
from tokenscale.base.files import read_arguments
from tokenscale.runs.launch import failure_hints, job
from tokenscale.runs.launch.job import Job
from tokenscale.runs.launch.start import PORTS, Launch
from tokenscale.settings.data import CorpusSettings, SourceSettings
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.machine import Machine
from tokenscale.settings.run import RunSettings

RUN = RunSettings(layout=LayoutSettings(data=8), global_batch=8)
SRUN = Machine(name="m", starter="srun", gpus_per_node=4, cores_per_rank=8)
JOB = Job("45", ("nid1", "nid2"), "10.0.0.7", "normal", 10.0, 40.0, 0, "/elsewhere/45.log")


def test_ranks_are_processes_of_their_own_or_of_torchrun():
    by_rank = {"NCCL_IB_HCA": ("mlx5_0", "mlx5_1")}
    machine = Machine(environment={"A": "1"}, environment_by_local_rank=by_rank)
    argv, variables = Launch(RUN, machine, Path("d")).command(0, {"store": Path("s.json")})
    assert argv[1:4] == ["-m", "tokenscale", "rank"] and variables == {"A": "1"}
    assert argv[argv.index("--store") + 1] == "s.json"
    assert argv[argv.index("--by-local-rank") + 1] == '{"NCCL_IB_HCA":["mlx5_0","mlx5_1"]}'
    argv, _ = Launch(RUN, Machine(starter="torchrun"), Path("d")).command(0, {})
    assert argv[1:5] == ["-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=8"]
    assert argv[argv.index("-m", 2) + 1 :][:2] == ["tokenscale", "rank"]


def test_srun_is_told_where_ranks_meet_by_its_job_and_a_machines_own_variables_win():
    argv, variables = Launch(RUN, SRUN, Path("d"), job=JOB).command(3, {})
    assert argv[0] == "srun" and "--output=d/attempt=03/output/rank=%5t.log" in argv
    assert variables["MASTER_ADDR"] == "10.0.0.7" and int(variables["MASTER_PORT"]) in PORTS
    other = replace(RUN, repeat=1)
    _, of_other = Launch(other, SRUN, Path("d"), job=JOB).command(3, {})
    assert of_other["MASTER_PORT"] != variables["MASTER_PORT"]  # runs of one job
    assert variables["OMP_NUM_THREADS"] == "8"
    machine = Machine(
        starter="srun",
        gpus_per_node=4,
        network="AWS Libfabric",
        environment={"OMP_NUM_THREADS": "4"},
    )
    _, variables = Launch(RUN, machine, Path("d"), job=JOB).command(0, {})
    assert variables["OMP_NUM_THREADS"] == "4" and variables["NCCL_NET"] == "AWS Libfabric"
    assert variables["NCCL_DEBUG_FILE"] == "d/attempt=00/output/nccl.%h.%p.log"


@pytest.mark.parametrize(
    "job, said",
    [(None, "not in a SLURM job"), (Job("45", ("nid1",), "", "", 0, 0, 0, None), "fewer")],
)
def test_without_a_job_that_is_large_enough_nothing_begins(job, said):
    with pytest.raises(UserError, match=said):
        Launch(RUN, SRUN, Path("d"), job=job).check()
    Launch(RUN, SRUN, Path("d"), job=JOB).check()


def test_the_record_says_where_and_after_which_wait(tmp_path, monkeypatch):
    found = Launch(RUN, SRUN, Path("d"), share=1, job=JOB).record()
    assert (
        found["machine"] == "m"
        and found["job"]["queue_s"] == 30.0
        and found["job"]["nodes"] == ["nid1", "nid2"]
    )
    assert Launch(RUN, Machine(), Path("d")).record() == {
        "machine": "this machine",
        "starter": "here",
        "share": 1,
    }


def test_a_failed_srun_is_told_by_its_first_rank_or_in_its_own_words(tmp_path):
    file = tmp_path / failure_hints.SRUN
    file.write_text("srun: error: Unable to create step for job 45: More processors requested\n")
    text = failure_hints.describe_failure(tmp_path)
    assert "did not run to their end" in text and "More processors" in text
    (tmp_path / "rank=00005.log").write_text(
        "step 1\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate\n"
    )
    (tmp_path / "rank=00000.log").write_text("RuntimeError: Connection closed by peer\n")
    file.write_text(
        "srun: error: nid2: task 5: Exited with exit code 1\nsrun: Terminating StepId=45.0\n"
        "srun: error: nid1: tasks 0-3: Killed\n"
    )
    text = failure_hints.describe_failure(tmp_path)
    assert (
        "rank 5 on nid2 failed first (Exited with exit code 1)" in text
        and "CUDA out of memory" in text
    )
    assert "a GPU's memory was full" in text and "closed by peer" not in text


@pytest.mark.parametrize("starter", ["here", "torchrun"])
def test_settings_of_any_size_reach_the_rank(tmp_path, starter):
    files = tuple(f"/scratch/crawl/part-{number:05d}-of-04000.jsonl" for number in range(4000))
    run = RunSettings(corpus=CorpusSettings("crawl", SourceSettings("files", files=files)))
    called = tmp_path / "called.json"
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open({str(called)!r}, "
        "'w'))\n"
    )
    python.chmod(0o755)
    launch = Launch(run, Machine(starter=starter, python=str(python)), tmp_path / "run")
    launch.attempt_directory(0).mkdir(parents=True)
    assert launch.go(0, {}) == 0
    words = read_arguments(json.loads(called.read_text()))
    assert RunSettings.from_json(words[words.index("--settings") + 1]) == run
    assert words[words.index("--directory") + 1] == str(tmp_path / "run")


SHOWN = (
    "JobId=45 JobName=tokenscale_1 UserId=root(0) Restarts=2 SubmitTime=2026-11-21T16:00:00"
    " StartTime=2026-11-21T16:01:30 Partition=normal NodeList=nid[000001-000002] "
    "BatchHost=nid000001"
    " Command=(null) StdOut=/p/results/logs/45.log Power="
)


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program(
        tmp_path,
        "scontrol",
        # of a job array, all elements are told
        f'case "$2" in job) echo "{SHOWN}"; echo "JobId=46 NodeList=(null)";;'
        " hostnames) echo nid000001; echo nid000002;;"
        ' node) echo "NodeName=nid000001 Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=nid000001";; '
        "esac",
    )
    return tmp_path


def test_a_job_is_told_by_its_controller(slurm):
    found = job.load_job("45")
    assert found.nodes == ("nid000001", "nid000002") and found.address == "10.0.0.7"
    assert (
        found.partition == "normal"
        and found.restarts == 2
        and found.log == "/p/results/logs/45.log"
    )
    assert found.record()["queue_s"] == 90.0


def test_a_clock_set_back_between_submission_and_start_leaves_the_wait_unknown(slurm, monkeypatch):
    """Of the controller, in a zone without summer time, too."""
    begun = re.search(r"StartTime=(\S+)", SHOWN)[1]
    program(slurm, "scontrol", f"echo '{SHOWN.replace(begun, '2026-11-21T15:00:00')}'")
    assert job.load_job("45").record()["queue_s"] is None


@pytest.mark.parametrize(
    ("shown", "is_known"),
    [
        ("2026-10-26T02:30:00", True),
        ("2026-10-25T02:30:00", False),  # comes twice
        ("2026-03-29T02:30:00", False),  # is left out
        ("2026-10-25T02:30:00+01:00", True),
        ("Unknown", False),
        (None, False),
    ],
)
def test_a_time_that_is_not_one_moment_is_unknown(shown, is_known, monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Zurich")
    time.tzset()
    try:
        found = job._parse_time(shown)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert isinstance(found, float) is is_known
    assert is_known or f"{shown}" in dict(list_unknown({"time": found}))["time"]


def test_whether_a_job_may_still_write(slurm, monkeypatch):
    monkeypatch.setattr(job, "QUEUE_S", 0.5)
    for says, answer in {
        "echo 45 RUNNING": True,
        "echo 45 COMPLETING; echo 46 FAILED": True,
        "echo 46 RUNNING; echo 45 COMPLETED": False,
        "echo 45 PENDING": False,  # of a requeued one: it will wait in its turn
        "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1": False,
        "echo 'Unable to contact slurm controller' >&2; exit 1": None,
        "exec sleep 9": None,
    }.items():
        program(slurm, "squeue", says)
        assert job.may_still_write("45") is answer, says


def test_a_controller_that_does_not_answer_is_an_error_and_without_a_queue_nobody_knows(
    slurm, monkeypatch
):
    program(slurm, "scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(UserError, match="Unable to contact slurm controller"):
        job.load_job("45")
    monkeypatch.setenv("PATH", str(slurm))
    assert job.may_still_write("45") is None
