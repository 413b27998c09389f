"""What failed in a call of Snakemake: each job, what its log ends with, what happened, and what to do next."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.cli.snakemake_dry_run import Job
from tokenscale.cli.status_runs import logs, runs, tail
from tokenscale.cli.status_stale import duration
from tokenscale.runs.launch.failure_hints import Hint, hint

#: of each log: its last lines
LINES = 15
#: so many jobs are told with their logs, the others by name and cause
WHOLE = 8
#: where Snakemake keeps a log of each call, dry runs too
LOGS = Path(".snakemake/log")
WHOLE_LOG = 20_000_000

# what sbatch said stands unindented in the middle of it
_BLOCK = re.compile(
    r"^Error in (?:group|rule) (?P<rule>\w+):\n(?P<body>.*?)(?=^\[\w{3} \w{3} |^Error in |^Logfile |\Z)",
    re.MULTILINE | re.DOTALL,
)
# with `show-failed-logs` Snakemake copies logs of failed jobs into its own: what they say is their own business
_COPIED = re.compile(r"^Logfile [^\n]*:\n(={10,})\n.*?^\1\n", re.MULTILINE | re.DOTALL)
_PARTS = {
    "message": r"^    message: ((?s:.*?))(?=^    (?:sbatch call|sbatch script|jobid|input|output|log|shell):|\Z)",
    "jobid": r"^    jobid: (\d+)",
    "output": r"^    output: (.*)",
    "log": r"^    log: (.*?)(?: \(check log file\(s\) for error details\))?$",
    "slurm": r"^    external_jobid: (\S+)",
}


@dataclass(frozen=True)
class FailedJob:
    """A job that failed, as Snakemake's log has it. `slurm` is its number there, `message` what was said of it."""

    rule: str
    jobid: str
    outputs: tuple[str, ...]
    logs: tuple[Path, ...]
    slurm: str | None
    message: str

    @property
    def refused(self) -> bool:
        """Whether it never ran: sbatch did not take it."""
        return "sbatch failed" in self.message or "submission failed" in self.message

    @property
    def state(self) -> str | None:
        """SLURM's state at its end."""
        found = re.search(r"SLURM status is: '([^']+)'", self.message)
        return found[1] if found else None

    @property
    def name(self) -> str:
        """What it was to make."""
        made = self._made
        return f"{made.kind} {made.name}" if made and made.kind != "job" else self.rule

    @property
    def run_id(self) -> str | None:
        """The run of a training."""
        made = self._made
        return made.name if made and made.kind == "run" else None

    @property
    def _made(self) -> Job | None:
        return Job(self.rule, {}, self.outputs) if self.outputs else None


def failed(log: Path | None = None) -> str:
    """What failed in the call of Snakemake with that log, by default the last call here that ran jobs, for people.

    Empty for a log that was named and tells of no failure: Snakemake's hook also asks after Ctrl-C. Raises UserError
    where there is no such log.
    """
    if log is not None and not log.is_file():
        raise UserError("there is no such log of Snakemake's.", log=log, next=f"ls -t {LOGS}")
    named, log = log is not None, log or last_log(LOGS)
    if log is None:
        return "nothing has run here yet"
    jobs = [job for job in parse(tail(log, WHOLE_LOG)) if not _made_since(job, log)]
    ago = duration(max(0.0, time.time() - log.stat().st_mtime))
    if not jobs:
        return "" if named else f"nothing failed in Snakemake's last call ({ago} ago, {log})"
    count = f"{len(jobs)} job{'s' * (len(jobs) != 1)}"
    lines = [f"{count} failed in Snakemake's last call ({ago} ago, {log})"]
    # what sbatch refuses for one reason is one message, however many jobs it hits
    refused: dict[str, list[FailedJob]] = {}
    for job in jobs:
        if job.refused:
            refused.setdefault(job.message.partition("sbatch call")[0], []).append(job)
    for alike in refused.values():
        lines += ["", *_refused(alike)]
    ran = [job for job in jobs if not job.refused]
    for job in ran[:WHOLE]:
        lines += ["", *_describe(job)]
    if len(ran) > WHOLE:
        lines += ["", "and, by name and cause alone:", ""]
    for job in ran[WHOLE:]:
        found = _looked_at(job)[0]
        lines.append(f"{job.name}  {found.what if found else job.state or 'its log says no known cause'}")
    return "\n".join(lines)


def last_log(folder: Path) -> Path | None:
    """The newest log of a call that ran jobs; None where there is none. Names are times."""
    for path in sorted(folder.glob("*.snakemake.log"), reverse=True):
        if re.search(r"^Execute \d+ jobs|^Error in rule", tail(path, WHOLE_LOG), re.MULTILINE):
            return path
    return None


def parse(text: str) -> list[FailedJob]:
    """The jobs that failed, each as it failed last; without those that a retry has made."""
    jobs: dict[str, FailedJob] = {}
    text = _COPIED.sub("", text)
    for block in _BLOCK.finditer(text):
        found = {name: re.search(pattern, block["body"], re.MULTILINE) for name, pattern in _PARTS.items()}
        fields = {name: match[1].strip() for name, match in found.items() if match}
        job = FailedJob(
            rule=block["rule"],
            jobid=fields.get("jobid", ""),
            outputs=tuple(filter(None, fields.get("output", "").split(", "))),
            logs=tuple(Path(path) for path in fields.get("log", "").split(", ") if path),
            slurm=fields.get("slurm"),
            message=fields.get("message", "") if fields.get("message") != "None" else "",
        )
        jobs.pop(job.jobid, None)
        if not re.search(rf"^Finished jobid: {job.jobid}\b", text[block.end() :], re.MULTILINE):
            jobs[job.jobid] = job
    return list(jobs.values())


def _made_since(job: FailedJob, log: Path) -> bool:
    """Whether a retry has made it after all: a quiet profile leaves that out of the log, whose name is its start."""
    try:
        began = datetime.strptime(log.name[:17], "%Y-%m-%dT%H%M%S").timestamp()
        return bool(job.outputs) and all(Path(output).stat().st_mtime > began for output in job.outputs)
    except (ValueError, OSError):
        return False


def _refused(jobs: list[FailedJob]) -> Iterator[str]:
    """Jobs that never ran, for one reason. Logs that are there are older, and the call is too long to find it in."""
    names = [job.name for job in jobs]
    yield f"{', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "") + "  refused by sbatch"
    fields = re.search(r"error message was '(.*)'", jobs[0].message, re.DOTALL)
    for line in (fields[1] if fields else jobs[0].message).splitlines():
        yield f"  sbatch  {line.strip().removeprefix('sbatch: error: ')}"
    found = hint(jobs[0].message)
    if found:
        yield f"  why     {found.what}"
        yield f"  next    {found.next}"


def _describe(job: FailedJob) -> Iterator[str]:
    where = f" (SLURM job {job.slurm})" if job.slurm else ""
    yield f"{job.name}{where}" + (f"  {job.state}" if job.state else "")
    found, log = _looked_at(job)
    if found is None:
        yield "  why     its log says no known cause; who is killed, as where main memory is full, says nothing"
        yield "  next    look at its end, below, and at `dmesg`, if you may; the same call then goes on"
    else:
        yield f"  why     {found.what}"
        if found.line:
            yield f"  said    {found.line if len(found.line) <= 200 else f'{found.line[:199]}…'}"
        yield f"  next    {found.next}"
    if log is None:
        yield f"  log     none: {job.message.splitlines()[0] if job.message else 'the job wrote nothing'}"
    else:
        yield f"  log     {log}"
        yield from (f"          | {line[:200]}" for line in tail(log).rstrip().splitlines()[-LINES:])


def _looked_at(job: FailedJob) -> tuple[Hint | None, Path | None]:
    """What its logs hint at, and the one to look into."""
    own = [path for path in job.logs if "logs/slurm" not in path.as_posix()]
    if job.run_id:
        attempts = [run.attempt for run in runs(Path("results")) if run.id == job.run_id]
        own = logs(Path("results"), job.run_id, attempts[0] if attempts else None) or own
    written = [path for path in own if path.is_file() and path.stat().st_size]
    slurm = [path for path in job.logs if path not in own and path.is_file()]
    # SLURM's log begins with Snakemake's own start in the job and repeats the command, in which any word may be; where
    # the job never came to its command, it is all there is
    fields = [
        line for path in slurm for line in tail(path).splitlines() if re.match(r"slurmstepd|srun:|\S+: line \d", line)
    ]
    texts = [tail(path) for path in written] or [_without_commands(tail(path)) for path in slurm]
    found = hint(*texts, "\n".join(fields), job.message, state=job.state)
    return found, next(iter([*written, *slurm]), None)


def _without_commands(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not re.match(r" {4,}|Command |  Command:", line))
