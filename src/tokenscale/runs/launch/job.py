"""The SLURM job that this process runs in, as its controller tells it: on the way here most variables were taken away.

Snakemake's job step leaves SLURM_JOB_ID and little else, so everything is asked for by that.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from tokenscale.base.errors import UserError

#: states in which a job's processes may still write
ALIVE = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "CONFIGURING"}


@dataclass(frozen=True)
class Job:
    """What is known of it. Times are seconds since 1970; `address` is where the first node can be reached."""

    id: str
    nodes: tuple[str, ...]
    address: str
    partition: str
    submitted_unix_s: float | None
    started_unix_s: float | None
    restarts: int
    log: str | None

    def record(self) -> dict[str, Any]:
        """As an attempt keeps it, with the seconds it waited in the queue."""
        known = self.submitted_unix_s is not None and self.started_unix_s is not None
        waited = self.started_unix_s - self.submitted_unix_s if known else None
        return {**asdict(self), "nodes": list(self.nodes), "queue_s": waited}


def job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """The id of the job that this process is in; None outside of one."""
    return environment.get("SLURM_JOB_ID") or None


def this_job(identity: str) -> Job:
    """The job of that id. Raises UserError where its controller does not answer."""
    lines = _requested("scontrol", "show", "job", "--oneliner", identity).splitlines()
    # of a job array, one element has the array's number, and all of them are told
    facts = next((found for found in map(_fields, lines) if found.get("JobId") == identity), {})
    nodes = tuple(_requested("scontrol", "show", "hostnames", facts.get("NodeList", "")).split())
    first = _fields(_requested("scontrol", "show", "node", "--oneliner", nodes[0]))
    return Job(
        id=identity,
        nodes=nodes,
        address=first.get("NodeAddr") or nodes[0],
        partition=facts.get("Partition", ""),
        submitted_unix_s=_time(facts.get("SubmitTime")),
        started_unix_s=_time(facts.get("StartTime")),
        restarts=int(facts.get("Restarts") or 0),
        log=facts.get("StdOut"),
    )


def may_write(identity: str, timeout_s: float = 20) -> bool | None:
    """Whether processes of a job may still be there; None where the queue cannot be asked."""
    try:
        argv = ["squeue", "--noheader", "--states=all", "--format=%A %T", f"--jobs={identity}"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:  # forgotten by its controller
        return False if "Invalid job id" in done.stderr else None
    rows = [line.split() for line in done.stdout.splitlines()]
    return any(words[:1] == [identity] and words[-1] in ALIVE for words in rows)


def _requested(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        if done.returncode == 0:
            return done.stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    raise UserError(
        "SLURM does not say what this job has.", requested=" ".join(argv), reason=reason, next="scontrol ping"
    )


def _fields(line: str) -> dict[str, str]:
    """`Key=value` pairs of scontrol's one-line answers; values that hold spaces are cut, which none of ours does."""
    return dict(re.findall(r"(?:^|\s)([A-Za-z/:]+)=(\S*)", line))


def _time(text: str | None) -> float | None:
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return None
