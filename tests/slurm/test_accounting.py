"""Jobs' ends as the shipped profile learns of them, from SLURM's accounting: every state that a job can
be brought to here, and an accounting and a controller that are away for a while.

The jobs are small and wait for the test; trainings are in test_long_jobs.py. OUT_OF_MEMORY needs
cgroups, which this cluster has not.
"""

import signal
import time

import pytest

from tests.slurm.projects import OnCluster
from tests.workflow.conftest import ROOT, copy_of

pytestmark = pytest.mark.slow(100)


class SmallJobs:
    """A call of Snakemake whose jobs, by name, wait until they are let go."""

    def __init__(self, project: OnCluster, names: list[str], *options: str):
        self.project = project
        self.cluster = project.cluster
        self.folder = project.root / "small"
        self.folder.mkdir()
        (project.root / "small.smk").write_text((ROOT / "tests/slurm/small.smk").read_text())
        chosen = f"names={','.join(names)}"
        self.process = project.start("--snakefile", "small.smk", *options, "--config", chosen)

    def starts(self, name: str) -> list[str]:
        """The SLURM job of each start."""
        path = self.folder / f"{name}.started"
        return path.read_text().splitlines() if path.exists() else []

    def started(self, name: str, times: int = 1) -> str:
        """Waits until it has started so often; returns the last start's job."""
        self.project.until(lambda: self.ends_early() or len(self.starts(name)) >= times)
        return self.starts(name)[-1]

    def ends_early(self) -> bool:
        assert self.process.poll() is None, self.project.said()
        return False

    def let_go(self, *names: str) -> None:
        for name in names:
            (self.folder / f"{name}.go").touch()

    def has_ended(self, name: str) -> bool:
        return (self.folder / f"{name}.txt").exists()

    def states(self, name: str) -> list[str]:
        """What the accounting says of each start."""
        return [
            record["state"]
            for record in self.cluster.records()
            if record["workdir"] == str(self.project.root)
            and record["comment"].endswith(f"wildcards_{name}")
        ]


def test_every_state_is_noticed_and_retried_or_reported(project):
    """`lost` is cancelled as often as it is tried. Everything else is right in the end."""
    cluster = project.cluster
    ends = {
        "cancelled": ["CANCELLED by 0", "COMPLETED"],
        "late": ["TIMEOUT", "COMPLETED"],
        "broken": ["NODE_FAIL", "COMPLETED"],
        "preempted": ["PREEMPTED", "COMPLETED"],
        "requeued": ["REQUEUED", "COMPLETED"],
        "lost": ["CANCELLED by 0", "CANCELLED by 0"],
    }
    jobs = SmallJobs(project, [*ends])
    job = {name: jobs.started(name) for name in ends}
    nodes = {entry["id"]: entry["nodes"] for entry in cluster.jobs()}

    cluster.run("scontrol", "update", f"JobId={job['late']}", "EndTime=now+1")
    cluster.run("scancel", job["cancelled"], job["lost"])
    cluster.set_node(nodes[job["broken"]], "down")  # it comes back by itself
    place = ("--exclusive", f"--nodelist={nodes[job['preempted']]}")
    cluster.run("sbatch", "--output=/dev/null", *place, "--wrap=true")
    for command in (
        ("update", f"JobId={job['requeued']}", "Requeue=1"),  # an administrator may
        ("requeue", job["requeued"]),
        ("update", f"JobId={job['requeued']}", "StartTime=now"),
    ):
        cluster.run("scontrol", *command)
    project.until(lambda: jobs.states("late") == ["TIMEOUT"])
    jobs.let_go(*(name for name in ends if name != "lost"))
    cluster.run("scancel", jobs.started("lost", 2))

    text = project.ended(jobs.process, code=1)
    assert {name: jobs.states(name) for name in ends} == ends
    assert [name for name in ends if not jobs.has_ended(name)] == ["lost"]
    for state in ("CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"):
        assert state in text


def test_an_accounting_and_a_controller_that_are_away_are_waited_for(made, another, tmp_path):
    """Each is ended once, and once kept from answering. No job is lost, and none is run twice."""
    with another as cluster:
        project = OnCluster(copy_of(made, tmp_path), cluster)
        names = ["silent", "away", "hung", "last", "here", "after"]
        jobs = SmallJobs(project, names, "--retries", "0")
        for name in names[:-1]:
            jobs.started(name)

        cluster.stop_accounting()
        end_job(jobs, "silent")
        wait_for_calls(jobs, "sacct", 2)
        cluster.start_accounting()

        cluster.stop_controller()
        jobs.let_go("here")  # `after` is ready
        end_job(jobs, "away")
        log = project.root / "snakemake.log"
        project.until(lambda: jobs.ends_early() or "Trying again in" in log.read_text())
        cluster.start_controller()

        jobs.started("after")
        cluster.stop_controller(signal.SIGSTOP)
        end_job(jobs, "hung")
        cluster.start_controller()

        cluster.stop_accounting(signal.SIGSTOP)
        end_job(jobs, "after")
        wait_for_calls(jobs, "sacct", 1)
        cluster.start_accounting()

        jobs.let_go("last")
        project.ended(jobs.process)
        assert {name: jobs.states(name) for name in names if name != "here"} == dict.fromkeys(
            (name for name in names if name != "here"), ["COMPLETED"]
        )


def end_job(jobs: SmallJobs, name: str) -> None:
    """Let a job go, and give it the time to end."""
    jobs.let_go(name)
    jobs.project.until(lambda: jobs.ends_early() or jobs.has_ended(name))
    time.sleep(3)


def wait_for_calls(jobs: SmallJobs, client: str, count: int) -> None:
    """Until so many calls of a client have begun and ended, and the next one has begun."""
    before = jobs.cluster.calls(client)
    jobs.project.until(lambda: jobs.ends_early() or jobs.cluster.calls(client) > before + count)
