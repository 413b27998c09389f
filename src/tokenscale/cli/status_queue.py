"""Read the jobs of this folder in SLURM's queue: what each one does and why it waits.

A job belongs to this folder if its work directory is this folder and its name has the prefix of our profiles, no matter
which Snakemake submitted it and whether that Snakemake still runs.
"""

import re
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tokenscale.cli.doctor import run_command

#: `slurm-jobname-prefix` of our profiles
PREFIX = "tokenscale"
#: time limit of squeue, which may wait forever for a controller
LIMIT_S = 10.0
#: separator of fields: names and comments may contain any printable character
SEPARATOR = "\x1f"
FORMAT = SEPARATOR.join(f"%{letter}" for letter in "iTrMlDNSjkZ")

#: SLURM's states → words; others are shown in lower case
STATES = {"PENDING": "waiting", "COMPLETING": "ending", "CONFIGURING": "starting"}
#: (pattern of SLURM's reason, explanation, what the job's owner can do: "" if only waiting helps). The first pattern
#: that matches the beginning counts; other reasons are shown unchanged.
WAITING_REASONS: tuple[tuple[str, str, str], ...] = (
    ("None", "SLURM has not considered it yet", ""),
    ("Priority", "jobs of higher priority come first", ""),
    ("Resources", "the nodes it needs are in use; it is next", ""),
    ("DependencyNeverSatisfied", "a job that it waits for has failed", "scancel {id}, then start Snakemake again"),
    ("Dependency", "another job must end first", ""),
    ("BeginTime", "its begin time is in the future", "scontrol update JobId={id} StartTime=now"),
    ("JobHeldUser", "held by you", "scontrol release {id}"),
    ("JobHeldAdmin", "held by an administrator", "ask the site's support"),
    (
        "(JobHoldMaxRequeue|RequeueExitHold|JobLaunchFailure|launch failed requeued held)",
        "it failed to start and is on hold",
        "read its log, then scontrol release {id} or scancel {id}",
    ),
    (
        "(ReqNodeNotAvail, )?(May be )?[Rr]eserved for maintenance",
        "a maintenance is announced that begins before its time limit ends",
        "a shorter `runtime` may fit in before; scontrol show reservation",
    ),
    (
        "ReqNodeNotAvail",
        "nodes that it needs are down, reserved, or about to be maintained",
        "sinfo -R; scontrol show reservation; a shorter `runtime` may fit in before a maintenance",
    ),
    (
        "(Nodes required for job are DOWN|NodeDown)",
        "nodes that it needs are down, drained, or reserved for jobs of higher priority",
        "sinfo -R shows since when and why",
    ),
    ("ReservationDeleted", "its reservation was deleted", "scancel {id}, then start Snakemake again"),
    ("Reservation", "its reservation has not begun or is full", "scontrol show reservation"),
    ("(PartitionDown|PartitionInactive)", "its partition is closed", "another slurm_partition; sinfo -s"),
    (
        "PartitionTimeLimit",
        "it requests more time than its partition allows",
        "scancel {id}, then a shorter `runtime`; sinfo -o '%P %l'",
    ),
    (
        "(PartitionNodeLimit|PartitionConfig)",
        "it requests more than its partition allows",
        "scancel {id}, then fewer nodes, or another slurm_partition; scontrol show partition",
    ),
    (
        "BadConstraints",
        "no node has the resources that it requests",
        "scancel {id}, then other resources; sinfo -o '%P %D %c %m %G'",
    ),
    ("InvalidAccount", "SLURM does not know its account", "scancel {id}, then export ALPS_ACCOUNT=<project>"),
    ("(InvalidQOS|QOSNotAllowed)", "its account may not use its QOS", "scancel {id}, then another qos"),
    ("Licenses", "licenses that it requests are in use", ""),
    ("JobArrayTaskLimit", "its array runs the maximum number of tasks", ""),
    ("(FrontEndDown|SystemFailure)", "SLURM itself has failed", "ask the site's support"),
    ("BurstBuffer", "its burst buffer is not ready", ""),
    ("(Cleaning|Prolog)", "its nodes are being prepared", ""),
    (
        "(QOSMax|AssocMax|QOSMin).*PerJob|QOSMin|QOSMaxWall|AssocMaxWall|QOSTimeLimit|AssociationTimeLimit",
        "it requests more, or less, than one job may use",
        "scancel {id}, then other resources; sacctmgr show qos",
    ),
    (
        "(Assoc|QOS).*Minutes",
        "the account's or QOS's budget of node or CPU time is used up",
        "ask the project's owner; sacctmgr show associations, or the site's own command, shows what is left",
    ),
    (
        "(QOSMaxJobsPerUser|QOSMaxSubmitJob|AssocMaxJobs|AssocMaxSubmitJob|.*PerUser)",
        "you have reached your limit of running or submitted jobs",
        "",
    ),
    (
        "(AssocGrp|QOSGrp|AssociationJobLimit|AssociationResourceLimit|QOSResourceLimit|QOSJobLimit|.*PerAccount)",
        "the jobs of the account or QOS together have reached a limit",
        "",
    ),
    ("QOSUsageThreshold", "the QOS requires a higher fair share", ""),
)


@dataclass(frozen=True)
class QueuedJob:
    """One job of this folder. Times are in seconds; None where SLURM gives none (no limit, no expected start)."""

    id: str
    rule: str
    of: str
    state: str
    reason: str
    used_s: int | None
    limit_s: int | None
    node_count: int
    nodes: str
    start: str | None

    @property
    def label(self) -> str:
        """Return the job's rule and target, such as `train <run id>`."""
        return f"{self.rule} {self.of}".strip()

    @property
    def state_name(self) -> str:
        """Return the plain name of the job's state."""
        return STATES.get(self.state, self.state.lower().replace("_", " "))

    @property
    def waiting_reason(self) -> tuple[str, str]:
        """Return (why the job waits, what to do about it); both are empty for a job that does not wait."""
        if self.state not in ("PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT"):
            return "", ""
        for pattern, words, cure in WAITING_REASONS:
            if re.match(pattern, self.reason):
                described = words if self.reason in ("None", "Priority", "Resources") else f"{words} ({self.reason})"
                return described, cure.format(id=self.id)
        return self.reason, ""


@dataclass(frozen=True)
class Queue:
    """The jobs of this folder, or the reason why they are unknown (`problem`). `here` is false without SLURM."""

    here: bool
    jobs: tuple[QueuedJob, ...] = ()
    problem: str = ""


def query_queue(folder: Path = Path()) -> Queue:
    """Query squeue for the caller's jobs that belong to `folder`. Never waits longer than `LIMIT_S`."""
    if shutil.which("squeue") is None:
        return Queue(here=False)
    code, text = run_command(["squeue", "--me", "--noheader", "--sort=i", f"--format={FORMAT}"], LIMIT_S)
    if code != 0:
        first = next(iter(text.splitlines()), "") or f"squeue ended with {code}"
        return Queue(here=True, problem=re.sub(r"^squeue: error: |^slurm_load_jobs error: ", "", first))
    jobs = (_parse_job(line.split(SEPARATOR), folder) for line in text.splitlines() if line.count(SEPARATOR) == 10)
    return Queue(here=True, jobs=tuple(job for job in jobs if job))


def _parse_job(fields: list[str], folder: Path) -> QueuedJob | None:
    """Parse a line of squeue; None for a job of another folder or without our prefix."""
    number, state, reason, used, limit, count, nodes, start, name, comment, workdir = fields
    if not name.startswith(PREFIX) or Path(workdir).resolve() != folder.resolve():
        return None
    # Snakemake sets the comment; a job that was submitted by hand only has a name
    described = re.fullmatch(r"(?:rule_|group_)(?P<rule>\w+?)(?:_wildcards_(?P<of>.*))?", comment)
    rule, of = (described["rule"], described["of"] or "") if described else (name, "")
    return QueuedJob(
        id=number,
        rule=rule,
        of=of,
        state=state,
        reason=reason.replace("_", " "),
        used_s=parse_seconds(used),
        limit_s=parse_seconds(limit),
        node_count=int(count) if count.isdigit() else 1,
        nodes=nodes,
        start=start if start not in ("", "N/A", "Unknown") else None,
    )


def parse_seconds(text: str) -> int | None:
    """Convert SLURM's `[days-][hours:]minutes:seconds` to seconds; None for words such as UNLIMITED.

    >>> [parse_seconds(text) for text in ("0:04", "12:00:00", "1-00:00:10", "UNLIMITED")]
    [4, 43200, 86410, None]
    """
    if not re.fullmatch(r"(\d+-)?(\d+:){1,2}\d+", text):
        return None
    days, _, clock = text.rpartition("-")
    seconds = 0
    for part in clock.split(":"):
        seconds = 60 * seconds + int(part)
    return seconds + 86_400 * int(days or 0)


def seconds_until(start: str | None, now: datetime) -> float | None:
    """Return the seconds from now to a time in SLURM's format; None for other text."""
    try:
        return (datetime.fromisoformat(start) - now).total_seconds() if start else None
    except ValueError:
        return None
