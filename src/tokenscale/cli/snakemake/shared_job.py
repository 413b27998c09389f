"""Jobs of Snakemake that stand side by side on one node, as one job of SLURM."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4


class Job(Protocol):
    """What the executor reads of a job of Snakemake."""

    name: str
    jobid: int
    is_local: bool
    attempt: int
    restart_times: int
    wildcards: Sequence[str]
    log: Sequence[str]
    resources: Any


def count_places(job: Job) -> int:
    """Return how many jobs like this one a node has room for; 1 for a job that shares no node
    (the resource `share`, see workflow/rules/train.smk).
    """
    return job.resources.get("share") or 1


class Resources(dict[str, Any]):
    """Resources of a job as the SLURM plugin reads them: keys, and attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class SharedJob:
    """What the SLURM plugin submits for jobs that share a node: like the first of them, with the
    GPUs and cores of all, and the longest time limit.
    """

    def __init__(self, jobs: Iterable[Job], folder: Path) -> None:
        """`folder` is for a mark of each job that succeeded; all nodes see it."""
        self.jobs = list(jobs)
        self.marks = {job: folder / f"succeeded-{uuid4().hex}" for job in self.jobs}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jobs[0], name)

    @property
    def wildcards(self) -> list[str]:
        """Name of the log's folder, and of the job in SLURM's queue."""
        return [*self.jobs[0].wildcards, f"and_{len(self.jobs) - 1}_more"]

    @property
    def log(self) -> list[str]:
        return [log for job in self.jobs for log in job.log]

    @property
    def resources(self) -> Resources:
        first = self.jobs[0].resources
        tasks = max(2, sum(job.resources.ranks for job in self.jobs))
        cores = sum(job.resources.tasks_per_node * job.resources.cpus_per_task for job in self.jobs)
        gpus = sum(int(job.resources.gres.rpartition(":")[2]) for job in self.jobs)
        return Resources(
            first.items(),
            runtime=max(job.resources.runtime for job in self.jobs),
            tasks_per_node=tasks,
            cpus_per_task=-(-cores // tasks),
            gres=f"gpu:{gpus}",
        )

    def format_command(self, format_one: Callable[[Job], str]) -> str:
        """Return the shell command that starts all jobs at once and creates a file for each job
        that succeeds. It fails unless all jobs succeed.

        Without variables of the shell: the plugin quotes it for a shell that would expand them.
        """
        marks = {job: shlex.quote(str(mark)) for job, mark in self.marks.items()}
        started = [f"( {format_one(job)} && touch {marks[job]} ) &" for job in self.jobs]
        ended = " && ".join(f"test -e {mark}" for mark in marks.values())
        return f"{' '.join(started)} wait; {ended}"
