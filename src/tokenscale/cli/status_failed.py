"""Report the failed jobs of a Snakemake call: the end of each log, the cause, and the next step."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.cli.snakemake_dry_run import Job
from tokenscale.cli.status_runs import find_logs, read_runs, read_tail
from tokenscale.cli.status_stale import format_duration
from tokenscale.runs.launch.failure_hints import Hint, find_hint

#: number of last lines shown of each log
LINES = 15
#: failed jobs that are shown with their logs; the others are listed by name and cause
MAX_WITH_LOGS = 8
#: where Snakemake keeps a log of each call, dry runs too
LOGS = Path(".snakemake/log")
WHOLE_LOG = 20_000_000

# sbatch's message is unindented, in the middle of the block
_BLOCK = re.compile(
    r"^Error in (?:group|rule) (?P<rule>\w+):\n(?P<body>.*?)(?=^\[\w{3} \w{3} |^Error in |^Logfile |\Z)",
    re.MULTILINE | re.DOTALL,
)
# with `show-failed-logs` Snakemake copies logs of failed jobs into its own; these copies are not parsed
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
    """A failed job in Snakemake's log. `slurm` is its SLURM job id, `message` the executor's message."""

    rule: str
    jobid: str
    outputs: tuple[str, ...]
    logs: tuple[Path, ...]
    slurm: str | None
    message: str

    @property
    def was_refused(self) -> bool:
        """Return whether sbatch refused the job, so that it never ran."""
        return "sbatch failed" in self.message or "submission failed" in self.message

    @property
    def state(self) -> str | None:
        """Return SLURM's final state of the job."""
        found = re.search(r"SLURM status is: '([^']+)'", self.message)
        return found[1] if found else None

    @property
    def name(self) -> str:
        """Return what the job should have made."""
        made = self._made
        return f"{made.kind} {made.name}" if made and made.kind != "job" else self.rule

    @property
    def run_id(self) -> str | None:
        """Return the run id of a training job, else None."""
        made = self._made
        return made.name if made and made.kind == "run" else None

    @property
    def _made(self) -> Job | None:
        return Job(self.rule, {}, self.outputs) if self.outputs else None


def describe_failures(log: Path | None = None) -> str:
    """Describe the failed jobs of the Snakemake call with that log, by default of the last call that ran jobs here.

    Return "" for a given log without failures, because Snakemake's hook also runs after Ctrl-C. Raise UserError if the
    given log is missing.
    """
    if log is not None and not log.is_file():
        raise UserError("this Snakemake log does not exist.", log=log, next=f"ls -t {LOGS}")
    named, log = log is not None, log or find_last_log(LOGS)
    if log is None:
        return "no job has run here yet"
    jobs = [job for job in parse_failed_jobs(read_tail(log, WHOLE_LOG)) if not _made_by_retry(job, log)]
    ago = format_duration(max(0.0, time.time() - log.stat().st_mtime))
    if not jobs:
        return "" if named else f"nothing failed in Snakemake's last call ({ago} ago, {log})"
    count = f"{len(jobs)} job{'s' * (len(jobs) != 1)}"
    lines = [f"{count} failed in Snakemake's last call ({ago} ago, {log})"]
    # jobs that sbatch refuses for one reason share one message
    refused: dict[str, list[FailedJob]] = {}
    for job in jobs:
        if job.was_refused:
            refused.setdefault(job.message.partition("sbatch call")[0], []).append(job)
    for alike in refused.values():
        lines += ["", *_describe_refusal(alike)]
    ran = [job for job in jobs if not job.was_refused]
    for job in ran[:MAX_WITH_LOGS]:
        lines += ["", *_describe_job(job)]
    if len(ran) > MAX_WITH_LOGS:
        lines += ["", "more failed jobs, without their logs:", ""]
    for job in ran[MAX_WITH_LOGS:]:
        found = _diagnose(job)[0]
        lines.append(f"{job.name}  {found.what if found else job.state or 'its log shows no known cause'}")
    return "\n".join(lines)


def find_last_log(folder: Path) -> Path | None:
    """Return the newest log of a call that ran jobs, or None. Log names are times."""
    for path in sorted(folder.glob("*.snakemake.log"), reverse=True):
        if re.search(r"^Execute \d+ jobs|^Error in rule", read_tail(path, WHOLE_LOG), re.MULTILINE):
            return path
    return None


def parse_failed_jobs(text: str) -> list[FailedJob]:
    """Return the failed jobs, each with its last failure, without those whose retry succeeded."""
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


def _made_by_retry(job: FailedJob, log: Path) -> bool:
    """Return whether a retry made the outputs after all.

    A quiet profile leaves successful retries out of the log; the log's name is its start time.
    """
    try:
        began = datetime.strptime(log.name[:17], "%Y-%m-%dT%H%M%S").timestamp()
        return bool(job.outputs) and all(Path(output).stat().st_mtime > began for output in job.outputs)
    except (ValueError, OSError):
        return False


def _describe_refusal(jobs: list[FailedJob]) -> Iterator[str]:
    """Yield a description of jobs that sbatch refused for one reason.

    Logs that exist are older, and the sbatch call is too long to search for the reason.
    """
    names = [job.name for job in jobs]
    yield f"{', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "") + "  refused by sbatch"
    fields = re.search(r"error message was '(.*)'", jobs[0].message, re.DOTALL)
    for line in (fields[1] if fields else jobs[0].message).splitlines():
        yield f"  sbatch  {line.strip().removeprefix('sbatch: error: ')}"
    found = find_hint(jobs[0].message)
    if found:
        yield f"  why     {found.what}"
        yield f"  next    {found.next}"


def _describe_job(job: FailedJob) -> Iterator[str]:
    where = f" (SLURM job {job.slurm})" if job.slurm else ""
    yield f"{job.name}{where}" + (f"  {job.state}" if job.state else "")
    found, log = _diagnose(job)
    if found is None:
        yield "  why     its log shows no known cause; a killed process (main memory full, for example) logs nothing"
        yield "  next    read the end of the log, below, and `dmesg` if you have access; then repeat the call"
    else:
        yield f"  why     {found.what}"
        if found.line:
            yield f"  error   {found.line if len(found.line) <= 200 else f'{found.line[:199]}…'}"
        yield f"  next    {found.next}"
    if log is None:
        yield f"  log     none: {job.message.splitlines()[0] if job.message else 'the job wrote nothing'}"
    else:
        yield f"  log     {log}"
        yield from (f"          | {line[:200]}" for line in read_tail(log).rstrip().splitlines()[-LINES:])


def _diagnose(job: FailedJob) -> tuple[Hint | None, Path | None]:
    """Return the failure hint of a job and the log to read."""
    own = [path for path in job.logs if "logs/slurm" not in path.as_posix()]
    if job.run_id:
        attempts = [run.attempt for run in read_runs(Path("results")) if run.id == job.run_id]
        own = find_logs(Path("results"), job.run_id, attempts[0] if attempts else None) or own
    written = [path for path in own if path.is_file() and path.stat().st_size]
    slurm = [path for path in job.logs if path not in own and path.is_file()]
    # SLURM's log begins with Snakemake's own start in the job and repeats the command, which may contain any word. If
    # the job never reached its command, it is the only log
    fields = [
        line
        for path in slurm
        for line in read_tail(path).splitlines()
        if re.match(r"slurmstepd|srun:|\S+: line \d", line)
    ]
    texts = [read_tail(path) for path in written] or [_strip_commands(read_tail(path)) for path in slurm]
    found = find_hint(*texts, "\n".join(fields), job.message, state=job.state)
    return found, next(iter([*written, *slurm]), None)


def _strip_commands(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not re.match(r" {4,}|Command |  Command:", line))
