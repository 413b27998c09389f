"""SLURM's record of a job, by scontrol: nodes, time limit, and whether the job may still write."""

import os
import re
import subprocess
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.facts import unknown_fact

#: job states in which processes may still write
ALIVE = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "CONFIGURING"}
#: seconds to wait for an answer of squeue
QUEUE_S = 20.0


@dataclass(frozen=True)
class Job:
    """Properties of a SLURM job. Times are Unix seconds, or `unknown: why`; `address` is that of
    the first node.
    """

    id: str
    nodes: tuple[str, ...]
    address: str
    partition: str
    submitted_unix_s: float | str
    started_unix_s: float | str
    restarts: int
    log: str | None

    def record(self) -> dict[str, Any]:
        """Return the description for an attempt's record, with the seconds spent in the queue:
        None where one of its times is unknown, or the clock was set back between them.
        """
        start = self.started_unix_s
        submitted = self.submitted_unix_s
        waited = None
        if isinstance(start, float) and isinstance(submitted, float) and start >= submitted:
            waited = start - submitted
        return {**asdict(self), "nodes": list(self.nodes), "queue_s": waited}


def job_id() -> str | None:
    return os.environ.get("SLURM_JOB_ID") or None


def load_job(identity: str) -> Job:
    """Query a job by its id. Raises UserError if the controller does not answer."""
    lines = _query("scontrol", "show", "job", "--oneliner", identity).splitlines()
    # one element of a job array has the array's number, and scontrol lists all of them
    facts = next(
        (found for found in map(_parse_fields, lines) if found.get("JobId") == identity), {}
    )
    nodes = tuple(_query("scontrol", "show", "hostnames", facts.get("NodeList", "")).split())
    first = _parse_fields(_query("scontrol", "show", "node", "--oneliner", nodes[0]))
    return Job(
        id=identity,
        nodes=nodes,
        address=first.get("NodeAddr") or nodes[0],
        partition=facts.get("Partition", ""),
        submitted_unix_s=_parse_time(facts.get("SubmitTime")),
        started_unix_s=_parse_time(facts.get("StartTime")),
        restarts=int(facts.get("Restarts") or 0),
        log=facts.get("StdOut"),
    )


def may_still_write(identity: str) -> bool | None:
    """Whether processes of a job may still be running; None if the queue cannot be queried."""
    try:
        argv = ["squeue", "--noheader", "--states=all", "--format=%A %T", f"--jobs={identity}"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=QUEUE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:  # forgotten by its controller
        return False if "Invalid job id" in done.stderr else None
    rows = [line.split() for line in done.stdout.splitlines()]
    return any(words[:1] == [identity] and words[-1] in ALIVE for words in rows)


def _query(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        if done.returncode == 0:
            return done.stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    what = "SLURM does not answer the query for this job."
    raise UserError(what, requested=" ".join(argv), reason=reason, next="scontrol ping")


def _parse_fields(line: str) -> dict[str, str]:
    """Parse `Key=value` pairs of scontrol's one-line output. Values with spaces are cut."""
    return dict(re.findall(r"(?:^|\s)([A-Za-z/:]+)=(\S*)", line))


def _parse_time(text: str | None) -> float | str:
    """Return the Unix seconds of a time of scontrol, which states no zone: it is a local time.

    Unknown in the hours around a change of the clock, which come twice or not at all.
    """
    try:
        local = datetime.fromisoformat(text or "")
    except ValueError:
        return unknown_fact(f"scontrol states {text!r}")
    seconds = local.timestamp()
    if local.tzinfo is None and local.replace(fold=1).timestamp() != seconds:
        return unknown_fact(f"the local time {text} is not one moment: the clock changes")
    return seconds
