"""Read the jobs of this folder in SLURM's queue: what each one does and why it waits.

A job belongs to this folder if its work directory is this folder and its name has the prefix of our
profiles, no matter which Snakemake submitted it and whether that Snakemake still runs.
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
#: (beginning of SLURM's reason as a pattern, explanation, what the job's owner can do). Of the
#: reasons for which only waiting helps, the three most frequent are explained; others are shown as
#: SLURM names them.
WAITING_REASONS: tuple[tuple[str, str, str], ...] = (
    ("None", "SLURM has not considered it yet", ""),
    ("Priority", "jobs of higher priority come first", ""),
    ("Resources", "the nodes it needs are in use; it is next", ""),
    (
        "DependencyNeverSatisfied|ReservationDeleted",
        "what it waits for has failed or was deleted",
        "scancel {id}, then start Snakemake again",
    ),
    ("BeginTime", "its begin time is in the future", "scontrol update JobId={id} StartTime=now"),
    ("JobHeldUser", "held by you", "scontrol release {id}"),
    (
        "JobHeldAdmin|FrontEndDown|SystemFailure",
        "held by an administrator, or SLURM fails",
        "ask the site's support",
    ),
    (
        "JobHoldMaxRequeue|RequeueExitHold|JobLaunchFailure|launch failed requeued held",
        "it failed to start and is on hold",
        "read its log, then scontrol release {id} or scancel {id}",
    ),
    (
        "PartitionDown|PartitionInactive|NodeDown|Nodes required for job are DOWN|Reservation"
        "|ReqNodeNotAvail|May be reserved|Reserved for maintenance",
        "its nodes or its partition are down, drained, reserved, or about to be maintained",
        "sinfo -R; scontrol show reservation; a shorter `runtime` may fit in before a maintenance",
    ),
    (
        "PartitionTimeLimit|PartitionNodeLimit|PartitionConfig|BadConstraints"
        "|(QOSMax|AssocMax|QOSMin).*PerJob|QOSMin|QOSMaxWall|AssocMaxWall|.*TimeLimit",
        "it requests more time or nodes than its partition, QOS or account gives one job",
        (
            "scancel {id}, then a shorter `runtime`, other resources or slurm_partition; sinfo -o "
            "'%P %l %D %c %m %G'"
        ),
    ),
    (
        "InvalidAccount|InvalidQOS|QOSNotAllowed",
        "SLURM does not know its account, or the account may not use its QOS",
        "scancel {id}, then export ALPS_ACCOUNT=<project>, or another qos",
    ),
    (
        "(Assoc|QOS).*Minutes",
        "the account's or QOS's budget of node or CPU time is used up",
        (
            "ask the project's owner; sacctmgr show associations, or the site's own command, shows "
            "what is left"
        ),
    ),
)


@dataclass(frozen=True)
class QueuedJob:
    """One job of this folder. Times are in seconds; None where SLURM gives none (no limit, no
    expected start).
    """

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
        """Return (why the job waits, what to do about it); both are empty for a job that does not
        wait.
        """
        if self.state not in ("PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT"):
            return "", ""
        for pattern, words, cure in WAITING_REASONS:
            if re.match(pattern, self.reason):
                described = (
                    words
                    if self.reason in ("None", "Priority", "Resources")
                    else f"{words} ({self.reason})"
                )
                return described, cure.format(id=self.id)
        return self.reason, ""


@dataclass(frozen=True)
class Queue:
    """The jobs of this folder, or the reason why they are unknown (`problem`). `here` is false
    without SLURM.
    """

    here: bool
    jobs: tuple[QueuedJob, ...] = ()
    problem: str = ""


def query_queue(folder: Path = Path()) -> Queue:
    """Query squeue for the caller's jobs that belong to `folder`. Never waits longer than
    `LIMIT_S`.
    """
    if shutil.which("squeue") is None:
        return Queue(here=False)
    code, text = run_command(
        ["squeue", "--me", "--noheader", "--sort=i", f"--format={FORMAT}"], timeout_s=LIMIT_S
    )
    if code != 0:
        first = next(iter(text.splitlines()), "") or f"squeue ended with {code}"
        return Queue(
            here=True, problem=re.sub(r"^squeue: error: |^slurm_load_jobs error: ", "", first)
        )
    jobs = (
        _parse_job(line.split(SEPARATOR), folder)
        for line in text.splitlines()
        if line.count(SEPARATOR) == 10
    )
    return Queue(here=True, jobs=tuple(job for job in jobs if job))


def _parse_job(fields: list[str], folder: Path) -> QueuedJob | None:
    """Parse a line of squeue; None for a job of another folder or without our prefix."""
    number, state, reason, used, limit, count, nodes, start, name, comment, workdir = fields
    if not name.startswith(PREFIX) or Path(workdir).resolve() != folder.resolve():
        return None
    # Snakemake sets the comment; a job that was submitted by hand only has a name
    described = re.fullmatch(r"(?:rule_|group_)(\w+?)(?:_wildcards_(.*))?", comment)
    rule, of = described.groups(default="") if described else (name, "")
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
    """Convert SLURM's `[days-][hours:]minutes:seconds` to seconds; None for words such as
    UNLIMITED.

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
