"""Status of the queue's jobs and of the runs, with reasons and progress; files that are missing, failed or stale."""

import argparse
import json
import os
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from tokenscale.cli import configuration
from tokenscale.cli.status_missing import Missing, missing
from tokenscale.cli.status_queue import Queue, QueuedJob, queue, seconds_until
from tokenscale.cli.status_runs import RunState, runs, writers
from tokenscale.cli.status_stale import duration
from tokenscale.runs.records.hardware import text_of

#: a folder with one of these is a project's, or holds a copy of its results
PROJECT = ("workflow/Snakefile", "results", ".snakemake")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option says what is asked; without one: the queue and the runs."""
    requested = parser.add_mutually_exclusive_group()
    requested.add_argument(
        "--stale",
        nargs="*",
        metavar="TARGET",
        help="what would rerun and why: of these targets, files or experiments; by default of the report",
    )
    requested.add_argument(
        "--failed",
        nargs="?",
        const="",
        metavar="LOG",
        help="what failed and why, by a log of Snakemake's; by default that of its last call in this folder",
    )
    requested.add_argument(
        "--missing",
        action="store_true",
        help="files of the report that have been deleted, one a line, as targets for Snakemake",
    )
    requested.add_argument(
        "--watch",
        nargs="?",
        const=5.0,
        type=_seconds,
        metavar="SECONDS",
        help="the queue and the runs again and again, every 5 seconds if not told otherwise, until Ctrl-C",
    )
    configuration.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the queue and the runs as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Print the answer. Raises UserError where JSON is asked for of what has none, and outside of a project."""
    if not any(Path(name).exists() for name in PROJECT):
        from tokenscale.base.errors import UserError

        raise UserError(
            "this folder holds no project.",
            folder=Path.cwd(),
            expected="workflow/Snakefile, or results/",
            next="cd to the project's folder, and give the command again",
        )
    others = (arguments.stale, arguments.failed, arguments.watch, arguments.missing or None)
    if arguments.json and any(requested is not None for requested in others):
        from tokenscale.base.errors import UserError

        raise UserError("--json is of the queue and the runs, once.", next="python -m tokenscale status --json")
    if arguments.stale is not None:
        from tokenscale.cli import status_stale as stale
        from tokenscale.settings import calls
        from tokenscale.settings.calls import NO_OPTIONS

        call = configuration.call_of(arguments)
        if call == NO_OPTIONS and (last := calls.load_last_call() or NO_OPTIONS) != NO_OPTIONS:
            call = last
            print(f"configuration of the last call here: {' '.join(['snakemake', *call.arguments])}\n")
        print(stale.stale(arguments.stale, call))
    elif arguments.failed is not None:
        from tokenscale.cli import status_failed as failed

        if text := failed.failed(Path(arguments.failed) if arguments.failed else None):
            print(text)
    elif arguments.missing:
        from tokenscale.cli import status_missing as missing

        for file in missing.missing().files:
            print(file)
    elif arguments.watch is not None:
        watch(arguments.watch)
    else:
        found = overview()
        print(found.to_json() if arguments.json else found.render(terminal_width()))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 1 to 86400")
    return seconds


#: states of runs, in the order of the output; the first two are only counted
ORDER = ("complete", "diverged", "running", "waiting", "interrupted", "failed")


@dataclass(frozen=True)
class Overview:
    """What `status` found at a time. `attended`: a Snakemake of this folder runs on this machine.

    `missing`: files of the report that have been deleted.
    """

    queue: Queue
    runs: list[RunState]
    attended: bool
    unix_s: float
    missing: Missing = Missing([], "")

    def render(self, width: int = 120) -> str:
        """A line a job or run, and below it what there is to say of it."""
        lines = [*self._jobs(), "", *self._runs()]
        if note := self.missing.render():  # its command is not wrapped, so that it can be copied
            note = f"\n\n{note}"
        lines = [line for text in lines for line in (_wrapped(text, width) if len(text) > width else [text])]
        return "\n".join(lines) + note

    def to_json(self) -> str:
        """The same for programs."""
        jobs = [
            {**asdict(j), "what": j.what, "why": j.why[0] or None, "next": j.why[1] or None} for j in self.queue.jobs
        ]
        content = {
            "schema": 1,
            "unix_s": round(self.unix_s, 3),
            "slurm": {"here": self.queue.here, "problem": self.queue.problem or None, "jobs": jobs},
            "snakemake_runs_here": self.attended,
            "runs": [{**asdict(run), "left_s": run.left_s} for run in self.runs],
            "missing": {"files": self.missing.files, "next": self.missing.command if self.missing.files else None},
        }
        return json.dumps(content, indent=2)

    def _jobs(self) -> Iterator[str]:
        if not self.queue.here:
            yield "jobs   no SLURM here"
        elif self.queue.problem:
            yield f"jobs   SLURM's queue cannot be asked: {self.queue.problem}"
        elif not self.queue.jobs:
            yield "jobs   none of this folder in SLURM's queue"
        else:
            jobs, now = self.queue.jobs, datetime.fromtimestamp(self.unix_s)
            counts = Counter(job.state_in_words for job in jobs)
            yield f"jobs   {len(jobs)} of this folder: " + ", ".join(f"{n} {state}" for state, n in counts.items())
            columns = [max(len(text) for text in texts) for texts in zip(*map(_job, jobs), strict=True)]
            for job in jobs:
                cells = (f"{text:<{column}}" for text, column in zip(_job(job), columns, strict=True))
                yield ("  " + "  ".join(cells)).rstrip()
                yield from _why(job, now, " " * (4 + columns[0]))
                writer = writers(jobs).get(job.of, job) if job.rule == "train" else job
                if writer is not job and job.state == "RUNNING":
                    yield f"{'':<{4 + columns[0]}}why   job {writer.id} trains this run; it waits for that one to end"
            if not self.attended:
                yield (
                    "  No Snakemake of this folder runs on this machine. If none does elsewhere, start it again: "
                    "its trainings wait for these jobs instead of running twice."
                )

    def _runs(self) -> Iterator[str]:
        if not self.runs:
            yield "runs   none under results/runs yet"
            return
        counts = Counter(run.state for run in self.runs)
        order = [state for state in (*ORDER, *sorted(counts)) if counts.get(state)]
        summary = ", ".join(f"{counts[state]} {state}" for state in dict.fromkeys(order))
        yield f"runs   {len(self.runs)} under results/runs: {summary}"
        listed = [run for state in ORDER[2:] for run in self.runs if run.state == state]
        widths = [max((len(text) for text in texts), default=0) for texts in zip(*map(_run, listed), strict=True)]
        for run in listed:
            cells = (f"{text:<{column}}" for text, column in zip(_run(run), widths, strict=True))
            yield ("  " + "  ".join(cells) + "  " + self._progress(run)).rstrip()
            if run.hint:
                yield f"{'':<{4 + widths[0]}}why   {run.hint.what}"
                yield f"{'':<{4 + widths[0]}}next  {run.hint.next}"
        if counts["failed"]:
            yield "  python -m tokenscale status --failed shows what failed in Snakemake's last call, with the logs."
        elif counts["interrupted"]:
            yield "  Start Snakemake again: an interrupted run goes on from its last checkpoint, if it has one."

    def _progress(self, run: RunState) -> str:
        if run.step is None:
            at = "before its first step" if run.attempt is not None else "no attempt yet"
        else:
            at = f"step {run.step:,}" + (f" of {run.steps:,}" if run.steps else "")
            at += f", loss {run.loss:.4f}" if run.loss is not None else ""
            at += f", {run.useful_tokens_per_s:,.0f} useful tokens/s" if run.useful_tokens_per_s else ""
            at += f", {duration(run.left_s)} to go" if run.left_s else ""
        if run.written_unix_s is None:
            return at
        silent = run.silent_s(self.unix_s)
        ago = duration(max(0.0, self.unix_s - run.written_unix_s))
        return f"{at}, {f'silent for {ago}' if silent is not None else f'{ago} ago'}"


def overview(folder: Path = Path()) -> Overview:
    """Ask SLURM, read the runs."""
    now, found = time.time(), queue(folder)
    return Overview(found, runs(folder / "results", found.jobs, now), attended(folder), now, missing(folder))


def attended(folder: Path, processes: Path = Path("/proc")) -> bool:
    """Whether a Snakemake of this folder lives on this machine: its log is open. Those inside of jobs do not count."""
    logs = f"{(folder / '.snakemake/log').resolve()}/"
    for process in processes.glob("[0-9]*"):
        try:
            opened = any(os.readlink(number).startswith(logs) for number in (process / "fd").iterdir())
        except OSError:  # gone, or another user's
            continue
        if opened and "--target-jobs" not in text_of(process / "cmdline").split("\0"):
            return True
    return False


def _job(job: QueuedJob) -> tuple[str, ...]:
    """The cells of its line: id, state, what, time, nodes."""
    limit = duration(job.limit_s) if job.limit_s is not None else "no limit"
    # a job in its first second has used none, and yet runs
    began = job.used_s or (job.used_s == 0 and job.state == "RUNNING")
    used = f"{duration(job.used_s)} of {limit}" if began else f"limit {limit}"
    count = f"{job.node_count} node{'s' * (job.node_count != 1)}"
    return job.id, job.state_in_words, job.what, used, job.nodes or count


def _why(job: QueuedJob, now: datetime, indent: str) -> Iterator[str]:
    why, cure = job.why
    if not why:
        return
    ahead = seconds_until(job.start, now)
    start = ""
    if ahead is not None:
        clock = datetime.fromisoformat(job.start)
        day = "" if clock.date() == now.date() else f"{clock:%Y-%m-%d} "
        start = f"; expected start {day}{clock:%H:%M}" + (f", in {duration(ahead)}" if ahead >= 1 else "")
    elif job.start:
        start = f"; expected start {job.start}"
    yield f"{indent}why   {why}{start}"
    if cure:
        yield f"{indent}next  {cure}"


def _run(run: RunState) -> tuple[str, ...]:
    """The cells of its line: state, id, attempt."""
    return run.state, run.id, f"attempt={run.attempt:02d}" if run.attempt is not None else ""


def _wrapped(text: str, width: int) -> list[str]:
    """A long line in several, the later ones indented; never broken inside of a run's id or an option."""
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(
        text, max(width, 60), subsequent_indent=f"{indent}      ", break_long_words=False, break_on_hyphens=False
    )


def watch(every_s: float, folder: Path = Path()) -> None:
    """Show it again and again until somebody interrupts: redrawn in a terminal, else one below the other."""
    terminal = sys.stdout.isatty()
    try:
        while True:
            found = overview(folder)
            clock = f"{datetime.fromtimestamp(found.unix_s):%Y-%m-%d %H:%M:%S}, every {duration(every_s)}; Ctrl-C ends"
            text = f"{clock}\n\n{found.render(terminal_width())}\n"
            # from the top left, each line to its end, then whatever is below: nothing flickers
            shown = "\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[J" if terminal else text
            print(shown, end="" if terminal else "\n", flush=True)
            time.sleep(every_s)
    except KeyboardInterrupt:
        print()


def terminal_width() -> int:
    """Columns to fill."""
    return max(80, min(160, shutil.get_terminal_size((120, 24)).columns))
