"""The jobs of this folder in SLURM's queue: what each is, and why it waits.

A job is ours where its work directory is this folder and its name begins as our profiles let it begin, whichever
Snakemake submitted it and whether that one still lives.
"""

import re
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tokenscale.cli.doctor_machine import output_of

#: `slurm-jobname-prefix` of our profiles
PREFIX = "tokenscale"
#: squeue may wait for ever for a controller; this is what people wait
LIMIT_S = 10.0
#: a name or a comment may hold any character that one can type
SEPARATOR = "\x1f"
FORMAT = SEPARATOR.join(f"%{letter}" for letter in "iTrMlDNSjkZ")

#: SLURM's states → words; others are shown in lower case
STATES = {"PENDING": "waiting", "COMPLETING": "ending", "CONFIGURING": "starting"}
#: (SLURM's reason for a job that waits, why in words, what its owner can do: nothing, where waiting is all). The first
#: that matches its beginning; reasons that are not here are shown as they are.
WHY: tuple[tuple[str, str, str], ...] = (
    ("None", "SLURM has not looked at it yet", ""),
    ("Priority", "jobs of higher priority come first", ""),
    ("Resources", "the nodes it needs are in use; it is next", ""),
    ("DependencyNeverSatisfied", "a job that it waits for has failed", "scancel {id}, then start Snakemake again"),
    ("Dependency", "another job must end first", ""),
    ("BeginTime", "its time to begin has not come", "scontrol update JobId={id} StartTime=now"),
    ("JobHeldUser", "you hold it", "scontrol release {id}"),
    ("JobHeldAdmin", "an administrator holds it", "ask the site's support"),
    (
        "(JobHoldMaxRequeue|RequeueExitHold|JobLaunchFailure|launch failed requeued held)",
        "it failed to start and is held",
        "its log, then scontrol release {id} or scancel {id}",
    ),
    (
        "(ReqNodeNotAvail, )?(May be )?[Rr]eserved for maintenance",
        "a maintenance is announced, and its time limit reaches into it",
        "a shorter `runtime` may fit in before; scontrol show reservation",
    ),
    (
        "ReqNodeNotAvail",
        "nodes that it needs are down, reserved, or in a maintenance to come",
        "sinfo -R; scontrol show reservation; a shorter `runtime` may fit in before a maintenance",
    ),
    (
        "(Nodes required for job are DOWN|NodeDown)",
        "nodes that it needs are down, drained, or reserved for jobs of higher priority",
        "sinfo -R says since when and why",
    ),
    ("ReservationDeleted", "its reservation was deleted", "scancel {id}, then start Snakemake again"),
    ("Reservation", "its reservation has not begun, or is full", "scontrol show reservation"),
    ("(PartitionDown|PartitionInactive)", "its partition is closed", "another slurm_partition; sinfo -s"),
    (
        "PartitionTimeLimit",
        "it asks for more time than its partition ever gives",
        "scancel {id}, then a shorter `runtime`; sinfo -o '%P %l'",
    ),
    (
        "(PartitionNodeLimit|PartitionConfig)",
        "it asks for more than its partition ever gives",
        "scancel {id}, then fewer nodes, or another slurm_partition; scontrol show partition",
    ),
    (
        "BadConstraints",
        "no node has what it asks for",
        "scancel {id}, then other resources; sinfo -o '%P %D %c %m %G'",
    ),
    ("InvalidAccount", "SLURM does not know its account", "scancel {id}, then export ALPS_ACCOUNT=<project>"),
    ("(InvalidQOS|QOSNotAllowed)", "its account may not use its QOS", "scancel {id}, then another qos"),
    ("Licenses", "licenses that it asks for are in use", ""),
    ("JobArrayTaskLimit", "its array runs as many tasks at a time as it may", ""),
    ("(FrontEndDown|SystemFailure)", "SLURM itself has a failure", "ask the site's support"),
    ("BurstBuffer", "its burst buffer is not ready", ""),
    ("(Cleaning|Prolog)", "its nodes are being made ready", ""),
    (
        "(QOSMax|AssocMax|QOSMin).*PerJob|QOSMin|QOSMaxWall|AssocMaxWall|QOSTimeLimit|AssociationTimeLimit",
        "it alone asks for more, or less, than one job may",
        "scancel {id}, then other resources; sacctmgr show qos",
    ),
    (
        "(Assoc|QOS).*Minutes",
        "the account's or QOS's budget of node or CPU time is used up",
        "ask the project's owner; sacctmgr show associations, or the site's own command, tells what is left",
    ),
    (
        "(QOSMaxJobsPerUser|QOSMaxSubmitJob|AssocMaxJobs|AssocMaxSubmitJob|.*PerUser)",
        "you run as much at a time as you may",
        "",
    ),
    (
        "(AssocGrp|QOSGrp|AssociationJobLimit|AssociationResourceLimit|QOSResourceLimit|QOSJobLimit|.*PerAccount)",
        "all jobs of the account or QOS together have reached a limit",
        "",
    ),
    ("QOSUsageThreshold", "the QOS asks for a higher fair share", ""),
)


@dataclass(frozen=True)
class QueuedJob:
    """One job of this folder. Times in seconds; None where SLURM says none (no limit, no expected start)."""

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
    def what(self) -> str:
        """`train <run id>`, in our words."""
        return f"{self.rule} {self.of}".strip()

    @property
    def state_in_words(self) -> str:
        """What it does now."""
        return STATES.get(self.state, self.state.lower().replace("_", " "))

    @property
    def why(self) -> tuple[str, str]:
        """(why it waits, what to do about it); both empty for a job that does not wait."""
        if self.state not in ("PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT"):
            return "", ""
        for pattern, words, cure in WHY:
            if re.match(pattern, self.reason):
                described = words if self.reason in ("None", "Priority", "Resources") else f"{words} ({self.reason})"
                return described, cure.format(id=self.id)
        return self.reason, ""


@dataclass(frozen=True)
class Queue:
    """The jobs of this folder, or why they are not known (`problem`). `here` is false on a machine without SLURM."""

    here: bool
    jobs: tuple[QueuedJob, ...] = ()
    problem: str = ""


def queue(folder: Path = Path()) -> Queue:
    """Ask squeue for the jobs of its caller that belong to `folder`. Never waits longer than `LIMIT_S`."""
    if shutil.which("squeue") is None:
        return Queue(here=False)
    code, text = output_of(["squeue", "--me", "--noheader", "--sort=i", f"--format={FORMAT}"], LIMIT_S)
    if code != 0:
        first = next(iter(text.splitlines()), "") or f"squeue ended with {code}"
        return Queue(here=True, problem=re.sub(r"^squeue: error: |^slurm_load_jobs error: ", "", first))
    jobs = (_job(line.split(SEPARATOR), folder) for line in text.splitlines() if line.count(SEPARATOR) == 10)
    return Queue(here=True, jobs=tuple(job for job in jobs if job))


def _job(fields: list[str], folder: Path) -> QueuedJob | None:
    """A line of squeue; None for a job of another folder, or not of our making."""
    number, state, reason, used, limit, count, nodes, start, name, comment, workdir = fields
    if not name.startswith(PREFIX) or Path(workdir).resolve() != folder.resolve():
        return None
    # the comment is Snakemake's; a job that somebody submitted by hand has its name alone
    described = re.fullmatch(r"(?:rule_|group_)(?P<rule>\w+?)(?:_wildcards_(?P<of>.*))?", comment)
    rule, of = (described["rule"], described["of"] or "") if described else (name, "")
    return QueuedJob(
        id=number,
        rule=rule,
        of=of,
        state=state,
        reason=reason.replace("_", " "),
        used_s=seconds_of(used),
        limit_s=seconds_of(limit),
        node_count=int(count) if count.isdigit() else 1,
        nodes=nodes,
        start=start if start not in ("", "N/A", "Unknown") else None,
    )


def seconds_of(text: str) -> int | None:
    """SLURM's `[days-][hours:]minutes:seconds` in seconds; None for words such as UNLIMITED.

    >>> [seconds_of(text) for text in ("0:04", "12:00:00", "1-00:00:10", "UNLIMITED")]
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
    """From now to a time as SLURM writes it; None for what is no time."""
    try:
        return (datetime.fromisoformat(start) - now).total_seconds() if start else None
    except ValueError:
        return None
