"""`status` beside a real controller: one that answers, one that is gone, and one that is there and
says nothing.
"""

import signal
import sys
import time

import pytest

from tokenscale.cli.status.queue import LIMIT_S

RUN = "packed-llama-tiny-ddp-w2-0123456789"
WAITS = ("why the nodes it needs are in use", "why jobs of higher priority")
STATUS = [sys.executable, "-m", "tokenscale", "status"]


def submit(
    cluster, folder, *options, comment=f"rule_train_wildcards_{RUN}", name="tokenscale_test"
):
    options = [
        "--parsable",
        "--time=1",
        f"--chdir={folder}",
        f"--comment={comment}",
        "--output=/dev/null",
        *options,
    ]
    return cluster.run("sbatch", f"--job-name={name}", *options, "--wrap=sleep 60").stdout.strip()


@pytest.fixture
def tmp_path(tmp_path):
    """A folder that holds a project's results."""
    (tmp_path / "results").mkdir()
    return tmp_path


def test_jobs_of_a_folder_and_why_they_wait(cluster, tmp_path):
    jobs = {
        "running": submit(cluster, tmp_path, "--nodes=4", "--exclusive"),
        "held": submit(cluster, tmp_path, "--hold", comment="rule_build_corpus_wildcards_web"),
        "next": submit(cluster, tmp_path, comment="rule_report"),
        "later": submit(cluster, tmp_path, "--begin=now+1hour", comment="rule_report"),
        "of another folder": submit(cluster, "/"),
        "no job of ours": submit(cluster, tmp_path, name="mine"),
    }
    try:
        cluster.wait_for(jobs["running"], "RUNNING")
        end = time.monotonic() + 300  # the scheduler says why a job waits when it has looked at it
        while True:
            text = cluster.run(*STATUS, cwd=tmp_path).stdout
            words = [" ".join(line.split()) for line in text.splitlines()]
            if any(line.startswith(WAITS) for line in words) or time.monotonic() > end:
                break
    finally:
        cluster.run("scancel", *jobs.values())
    assert words[0] == "jobs 4 of this folder: 1 running, 3 waiting"
    assert any(line.startswith(f"{jobs['running']} running train {RUN} ") for line in words)
    assert any(line.endswith("of 1 min nid[000001-000004]") for line in words)
    held = next(
        n
        for n, line in enumerate(words)
        if line.startswith(f"{jobs['held']} waiting build_corpus web ")
    )
    assert words[held + 1 : held + 3] == [
        "why held by you (JobHeldUser)",
        f"next scontrol release {jobs['held']}",
    ]
    assert any(
        line.startswith("why its begin time is in the future (BeginTime); expected start ")
        for line in words
    )
    assert any(line.startswith(WAITS) for line in words), text


def test_a_controller_that_does_not_answer_is_one_line(another, tmp_path):
    with another as cluster:
        controller = cluster.daemons["slurmctld"]
        for end in (signal.SIGSTOP, signal.SIGKILL):
            controller.send_signal(end)
            done = cluster.run(*STATUS, cwd=tmp_path, timeout=300)
            assert (
                done.stdout.startswith("jobs   SLURM's queue cannot be read: ")
                and done.stderr == ""
            )
            assert end == signal.SIGKILL or f"no output within {LIMIT_S:g} s" in done.stdout, (
                "squeue would wait longer"
            )
            assert len(done.stdout.splitlines()) == 3
