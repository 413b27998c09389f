"""Show the queue's jobs and the runs, with reasons and progress; or what failed."""

import argparse
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from tokenscale.base.errors import UserError, as_typed
from tokenscale.base.wording import count, format_duration, wrap_text
from tokenscale.cli.snakemake.internals import LOGS
from tokenscale.cli.status.queue import Queue, QueuedJob, query_queue, seconds_until
from tokenscale.cli.status.runs import RunState, find_writers, list_folders, read_runs
from tokenscale.runs.records.provenance import read_text

#: a folder with one of these is a project, or holds a copy of its results
PROJECT = ("workflow/Snakefile", "results", ".snakemake")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the report; without any, it is the queue and the runs."""
    of_failed = (
        "show what failed and why, from a Snakemake log (default: that of the last call in this "
        "folder)"
    )
    parser.add_argument("--failed", nargs="?", const="", metavar="LOG", help=of_failed)
    parser.add_argument("--json", action="store_true", help="print the queue and the runs as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Print the chosen report. Raise UserError outside a project, and for --json with another
    option.
    """
    if not any(Path(name).exists() for name in PROJECT):
        facts = {"folder": Path.cwd(), "expected": "workflow/Snakefile, or results/"}
        raise UserError("this folder is not a project.", **facts, next="cd to the project's folder")
    if arguments.json and arguments.failed is not None:
        raise UserError(
            "--json cannot be combined with another report.", next="tokenscale status --json"
        )
    if arguments.failed is not None:
        from tokenscale.cli.status.failed import describe_failures

        if text := describe_failures(Path(arguments.failed) if arguments.failed else None):
            print(text)
    else:
        found = collect_status()
        columns = shutil.get_terminal_size((120, 24)).columns
        print(found.to_json() if arguments.json else found.render(max(80, min(160, columns))))


#: states of runs in the order of the output; runs in the first two are counted, not listed
ORDER = ("complete", "diverged", "running", "waiting", "interrupted", "failed")


@dataclass(frozen=True)
class StatusReport:
    """State of the queue and the runs at one time. `snakemake_running`: on this machine, for this
    folder.
    """

    queue: Queue
    runs: list[RunState]
    snakemake_running: bool
    unix_s: float
    folders: tuple[str, ...] = ("results/runs",)

    def render(self, width: int = 120) -> str:
        """Return one line per job and per run, each followed by its reason and the next step."""
        lines = [*self._jobs(), "", *self._runs()]
        return "\n".join(
            line for text in lines for line in (_wrap(text, width) if len(text) > width else [text])
        )

    def to_json(self) -> str:
        jobs = [
            {
                **asdict(j),
                "what": j.label,
                "why": j.waiting_reason[0] or None,
                "next": j.waiting_reason[1] or None,
            }
            for j in self.queue.jobs
        ]
        content = {
            "schema": 1,
            "unix_s": round(self.unix_s, 3),
            "slurm": {"here": self.queue.here, "problem": self.queue.problem or None, "jobs": jobs},
            "snakemake_runs_here": self.snakemake_running,
            "runs": [{**asdict(run), "left_s": run.left_s} for run in self.runs],
        }
        return json.dumps(content, indent=2)

    def _jobs(self) -> Iterator[str]:
        if not self.queue.here:
            yield "jobs   SLURM is not installed here"
        elif self.queue.problem:
            yield f"jobs   SLURM's queue cannot be read: {self.queue.problem}"
        elif not self.queue.jobs:
            yield "jobs   none of this folder in SLURM's queue"
        else:
            jobs = self.queue.jobs
            now = datetime.fromtimestamp(self.unix_s)
            counts = Counter(job.state_name for job in jobs)
            yield f"jobs   {len(jobs)} of this folder: " + ", ".join(
                f"{n} {state}" for state, n in counts.items()
            )
            writers = find_writers(jobs)
            lines = _align(map(_format_job, jobs))
            indent = " " * (4 + max(len(job.id) for job in jobs))
            for job, line in zip(jobs, lines, strict=True):
                yield line.rstrip()
                yield from _explain_waiting(job, now, indent=indent)
                writer = writers.get(job.of, job) if job.rule == "train" else job
                if writer is not job and job.state == "RUNNING":
                    yield (
                        f"{indent}why   job {writer.id} trains this run; this job waits until it "
                        "ends"
                    )
            if not self.snakemake_running:
                text = (
                    "  No Snakemake of this folder runs on this machine. If none runs elsewhere, "
                    "start it again: "
                )
                yield text + "its trainings wait for these jobs instead of running twice."

    def _runs(self) -> Iterator[str]:
        if not self.runs:
            yield "runs   none under results/runs yet"
            return
        counts = Counter(run.state for run in self.runs)
        states = filter(counts.get, dict.fromkeys([*ORDER, *sorted(counts)]))
        summary = ", ".join(f"{counts[state]} {state}" for state in states)
        yield f"runs   {len(self.runs)} under {', '.join(self.folders)}: {summary}"
        listed = [run for state in ORDER[2:] for run in self.runs if run.state == state]
        indent = " " * (4 + max((len(run.state) for run in listed), default=0))
        for run, line in zip(listed, _align(map(_format_run, listed)), strict=True):
            yield f"{line}  {self._progress(run)}".rstrip()
            if run.hint:
                yield f"{indent}why   {run.hint.what}"
                yield f"{indent}next  {as_typed(run.hint.next)}"
        if counts["failed"]:
            yield as_typed(
                "  tokenscale status --failed shows what failed in Snakemake's last call, with "
                "the logs."
            )
        elif counts["interrupted"]:
            yield (
                "  Repeat the call: an interrupted run resumes from its last checkpoint, if it "
                "has one."
            )

    def _progress(self, run: RunState) -> str:
        if run.step is None:
            at = "before its first step" if run.attempt is not None else "no attempt yet"
        else:
            at = f"step {run.step:,}" + (f" of {run.steps:,}" if run.steps else "")
            at += f", loss {run.loss:.4f}" if run.loss is not None else ""
            at += (
                f", {run.useful_tokens_per_s:,.0f} useful tokens/s"
                if run.useful_tokens_per_s
                else ""
            )
            at += f", {format_duration(run.left_s)} to go" if run.left_s else ""
        if run.written_unix_s is None:
            return at
        ago = format_duration(max(0.0, self.unix_s - run.written_unix_s))
        return f"{at}, silent for {ago}" if run.is_silent(self.unix_s) else f"{at}, {ago} ago"


def collect_status(folder: Path = Path()) -> StatusReport:
    """Query SLURM and read the runs below a project's folder."""
    now = time.time()
    found = query_queue(folder)
    results = folder / "results"
    runs = read_runs(results, jobs=found.jobs, now=now)
    parents = tuple(map(str, list_folders(results)))
    return StatusReport(
        queue=found,
        runs=runs,
        snakemake_running=is_snakemake_running(folder),
        unix_s=now,
        folders=parents,
    )


def is_snakemake_running(folder: Path, processes: Path = Path("/proc")) -> bool:
    """Return whether a Snakemake of this folder runs on this machine, not inside a job: it has its
    log open.
    """
    logs = f"{(folder / LOGS).resolve()}/"
    for process in processes.glob("[0-9]*"):
        try:
            opened = any(
                os.readlink(number).startswith(logs) for number in (process / "fd").iterdir()
            )
        except OSError:  # gone, or another user's
            continue
        if opened and "--target-jobs" not in read_text(process / "cmdline").split("\0"):
            return True
    return False


def _align(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return indented lines whose cells begin below each other."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)) for row in rows]


def _format_job(job: QueuedJob) -> tuple[str, ...]:
    """Return the cells of a job's line: id, state, label, time, nodes."""
    limit = format_duration(job.limit_s) if job.limit_s is not None else "no limit"
    used = f"limit {limit}"
    # a job in its first second runs, although its used time is 0
    if job.used_s is not None and (job.used_s or job.state == "RUNNING"):
        used = f"{format_duration(job.used_s)} of {limit}"
    return job.id, job.state_name, job.label, used, job.nodes or count(job.node_count, noun="node")


def _explain_waiting(job: QueuedJob, now: datetime, indent: str) -> Iterator[str]:
    reason, cure = job.waiting_reason
    if not reason:
        return
    ahead = seconds_until(job.start, now)
    start = ""
    if ahead is not None and job.start is not None:
        clock = datetime.fromisoformat(job.start)
        day = "" if clock.date() == now.date() else f"{clock:%Y-%m-%d} "
        start = f"; expected start {day}{clock:%H:%M}" + (
            f", in {format_duration(ahead)}" if ahead >= 1 else ""
        )
    elif job.start:
        start = f"; expected start {job.start}"
    yield f"{indent}why   {reason}{start}"
    if cure:
        yield f"{indent}next  {as_typed(cure)}"


def _format_run(run: RunState) -> tuple[str, ...]:
    """Return the cells of a run's line: state, id, attempt."""
    return run.state, run.id, f"attempt={run.attempt:02d}" if run.attempt is not None else ""


def _wrap(text: str, width: int) -> list[str]:
    start = text[: len(text) - len(text.lstrip())]
    return wrap_text(
        start,
        text=text.strip(),
        width=width,
        indent=len(start) + 6,
    )
