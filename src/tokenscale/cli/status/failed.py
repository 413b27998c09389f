"""Report the failed jobs of a Snakemake call: the end of each log, the cause, and the next step."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

from tokenscale.base.errors import UserError, as_typed, few
from tokenscale.base.wording import count, format_duration
from tokenscale.cli.snakemake.internals import LOGS
from tokenscale.cli.snakemake.jobs import Job, read_failed_jobs
from tokenscale.cli.status.runs import find_last_attempt, find_logs, read_tail
from tokenscale.runs.launch.failure_hints import Hint, find_hint

#: number of last lines shown of each log
LINES = 15
#: failed jobs that are shown with their logs; the others are listed by name and cause
MAX_WITH_LOGS = 8


def describe_failures(log: Path | None = None) -> str:
    """Describe the failed jobs of the Snakemake call with that log, by default of the last call
    that ran jobs here.

    Return "" for a given log without failures, because Snakemake's hook also runs after Ctrl-C.
    Raise UserError if the given log is missing.
    """
    if (named := log) is not None and not named.is_file():
        raise UserError("this Snakemake log does not exist.", log=log, next=f"ls -t {LOGS}")
    events = log.with_suffix(".jsonl") if log else max(LOGS.glob("*.snakemake.jsonl"), default=None)
    if events is None:
        return "no job has run here yet"
    log = events.with_suffix(".log")
    jobs = read_failed_jobs(events)
    if named and not jobs:
        return ""
    ago = format_duration(
        max(0.0, time.time() - (log if log.is_file() else events).stat().st_mtime)
    )
    if not jobs:
        return f"nothing failed in Snakemake's last call ({ago} ago, {log})"
    lines = [f"{count(len(jobs), 'job')} failed in Snakemake's last call ({ago} ago, {log})"]
    # jobs that sbatch refuses for one reason share one message
    refused: dict[str, list[Job]] = {}
    for job in jobs:
        if "sbatch failed" in job.message or "submission failed" in job.message:
            refused.setdefault(job.message, []).append(job)
    for alike in refused.values():
        lines += ["", *_describe_refusal(alike)]
    ran = [job for job in jobs if job.message not in refused]
    for job in ran[:MAX_WITH_LOGS]:
        lines += ["", *_describe_job(job)]
    if len(ran) > MAX_WITH_LOGS:
        lines += ["", "more failed jobs, without their logs:", ""]
    for job in ran[MAX_WITH_LOGS:]:
        found = _diagnose(job)[0]
        lines.append(
            f"{_name(job)}  "
            f"{found.what if found else _state(job) or 'its log shows no known cause'}"
        )
    return "\n".join(lines)


def _name(job: Job) -> str:
    """Return what the job should have made."""
    return f"{job.kind} {job.name}" if job.kind != "job" else job.rule


def _state(job: Job) -> str | None:
    """Return SLURM's final state of the job."""
    found = re.search(r"SLURM status is: '([^']+)'", job.message)
    return found[1] if found else None


def _describe_refusal(jobs: list[Job]) -> Iterator[str]:
    """Yield a description of jobs that sbatch refused for one reason.

    Logs that exist are older, and the sbatch call is too long to search for the reason.
    """
    names = [_name(job) for job in jobs]
    yield f"{few(names)}  refused by sbatch"
    fields = re.search(r"error message was '(.*)'", jobs[0].message, re.DOTALL)
    for line in (fields[1] if fields else jobs[0].message).splitlines():
        yield f"  sbatch  {line.strip().removeprefix('sbatch: error: ')}"
    found = find_hint(jobs[0].message)
    if found:
        yield f"  why     {found.what}"
        yield f"  next    {as_typed(found.next)}"


def _describe_job(job: Job) -> Iterator[str]:
    where = f" (SLURM job {job.slurm})" if job.slurm else ""
    yield f"{_name(job)}{where}" + (f"  {state}" if (state := _state(job)) else "")
    found, log = _diagnose(job)
    if found is None:
        yield (
            "  why     its log shows no known cause; a killed process (main memory full, for "
            "example) logs nothing"
        )
        yield (
            "  next    read the end of the log, below, and `dmesg` if you have access; then "
            "repeat the call"
        )
    else:
        yield f"  why     {found.what}"
        if found.line:
            yield f"  error   {found.line if len(found.line) <= 200 else f'{found.line[:199]}…'}"
        yield f"  next    {as_typed(found.next)}"
    if log is None:
        yield (
            "  log     none: "
            f"{job.message.splitlines()[0] if job.message else 'the job wrote nothing'}"
        )
    else:
        yield f"  log     {log}"
        yield from (
            f"          | {line[:200]}" for line in read_tail(log).rstrip().splitlines()[-LINES:]
        )


def _diagnose(job: Job) -> tuple[Hint | None, Path | None]:
    """Return the failure hint of a job and the log to read."""
    logs = [Path(path) for path in job.logs]
    own = _find_own_logs(job, logs)
    written = [path for path in own if path.is_file() and path.stat().st_size]
    slurm = [path for path in logs if path not in own and path.is_file()]
    # SLURM's log begins with Snakemake's own start in the job and repeats the command, which may
    # contain any word. If the job never reached its command, it is the only log
    lines = (line for path in slurm for line in read_tail(path).splitlines())
    fields = [line for line in lines if re.match(r"slurmstepd|srun:|\S+: line \d", line)]
    texts = [read_tail(path) for path in written]
    if not texts:
        texts = [_strip_commands(read_tail(path)) for path in slurm]
    found = find_hint(*texts, "\n".join(fields), job.message, state=_state(job))
    return found, next(iter([*written, *slurm]), None)


def _find_own_logs(job: Job, logs: list[Path]) -> list[Path]:
    """Return the logs that a job's command wrote: of a training, those of its last attempt."""
    if job.kind == "run":
        folder = Path("results/runs", job.name)
        if found := find_logs(folder, attempt=find_last_attempt(folder)):
            return found
    return [path for path in logs if "logs/slurm" not in path.as_posix()]


def _strip_commands(text: str) -> str:
    return "\n".join(
        line for line in text.splitlines() if not re.match(r" {4,}|Command |  Command:", line)
    )
