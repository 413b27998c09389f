"""Read the state of the runs in a folder of results: sealed, running, waiting in the queue, or
ended early.

Only files that trainings wrote are read. No lock is taken and nothing is waited for.
"""

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenscale.analysis.live import current_throughput
from tokenscale.base.errors import UserError
from tokenscale.base.files import get_boot_id, read_json
from tokenscale.cli.status.queue import QueuedJob
from tokenscale.runs.launch.failure_hints import Hint, find_hint
from tokenscale.runs.records.provenance import read_lines, read_sealed
from tokenscale.settings.manifests import RUN_FOLDERS

#: outcome of a sealed run → its state
OUTCOMES = {"complete": "complete", "nonfinite": "diverged"}
#: a run on another machine and without a job counts as running if it wrote within this time
FRESH_S = 60.0
#: a running run that wrote nothing for longer than this is reported as silent
SILENT_S = 300.0
#: number of bytes read from the end of a long log
TAIL_BYTES = 200_000


@dataclass(frozen=True)
class RunState:
    """State of one run: complete, diverged, running, waiting, interrupted or failed. `attempt`: the
    newest, if any.

    `step`, `steps`, `loss`, `written_unix_s`: its last status, None where it wrote none. `step_s`
    and `useful_tokens_per_s`: its current throughput, None unless the run is running. `hint` says
    why it failed.
    """

    id: str
    state: str
    attempt: int | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    written_unix_s: float | None = None
    step_s: float | None = None
    useful_tokens_per_s: float | None = None
    job: str | None = None
    hint: Hint | None = None

    @property
    def left_s(self) -> float | None:
        """Return the remaining seconds of training at the current throughput."""
        if self.step_s is None or self.step is None or not self.steps:
            return None
        return max(0, self.steps - self.step) * self.step_s

    def is_silent(self, now: float) -> bool:
        """Return whether a running run has written nothing for longer than SILENT_S."""
        return (
            self.state == "running"
            and self.written_unix_s is not None
            and now - self.written_unix_s >= SILENT_S
        )


def read_runs(
    results: Path, jobs: Sequence[QueuedJob] = (), now: float | None = None
) -> list[RunState]:
    """Return the state of all runs in `list_folders(results)`. `jobs` are the queue's jobs, which
    name their runs.
    """
    now = time.time() if now is None else now
    queued = find_writers(jobs)
    by_id = {job.id: job for job in jobs}
    inside = (path for parent in list_folders(results) for path in sorted(parent.glob("*")))
    folders = [path for path in inside if path.is_dir() and not path.name.startswith(".")]
    # Snakemake makes a run's folder before it starts anything
    begun = [
        f
        for f in folders
        if f.name in queued or (f / "run.json").exists() or any(f.glob("attempt=*"))
    ]
    # a job that was submitted by hand is named in the lock that it holds
    return [
        _read_run(
            f,
            job=queued.get(f.name) or by_id.get(_read_owner(f, pattern=r"job (\S+)") or ""),
            now=now,
        )
        for f in begun
    ]


def list_folders(results: Path) -> list[Path]:
    """Return the folders of runs: `results/runs`, and those that `train --output-dir` named in this
    project.
    """
    others = map(Path, read_lines(results.parent / RUN_FOLDERS))
    return [results / "runs", *(folder for folder in others if folder.is_dir())]


def find_writers(jobs: Sequence[QueuedJob]) -> dict[str, QueuedJob]:
    """Return run → its job. Of several jobs the first running one counts: it holds the run's lock,
    the others wait.
    """
    trainings = [job for job in jobs if job.rule == "train"]
    running = [job for job in trainings if job.state != "PENDING"]
    return {job.of: job for job in [*trainings[::-1], *running[::-1]]}


def _read_run(folder: Path, job: QueuedJob | None, now: float) -> RunState:
    attempt = find_last_attempt(folder)
    status = _read_status(folder, attempt)
    known: dict[str, Any] = {"id": folder.name, "attempt": attempt, "job": job.id if job else None}
    written = _find_last_write(folder, attempt, status=status)
    if written and _is_before(written, job, now=now):
        status = {}
        written = None  # from an attempt before this job, which has not written yet
    known |= {name: status.get(name) for name in ("step", "steps", "loss")} | {
        "written_unix_s": written
    }
    if job is not None and job.state == "PENDING":
        return RunState(**known, state="waiting")
    if (outcome := _read_outcome(folder)) is not None:
        state = OUTCOMES.get(outcome["status"], outcome["status"])
        return RunState(**known | {"steps": outcome["steps"]}, state=state)
    ended = status.get("state", "running") != "running"  # the last state that the run wrote
    if job is not None or (not ended and _is_alive(folder, written, now=now)):
        if attempt is not None:
            known |= current_throughput(folder / f"attempt={attempt:02d}") or {}
        return RunState(**known, state="running")
    found = None if ended else find_hint(*map(read_tail, find_logs(folder, attempt)))
    return RunState(**known, state="failed" if found else "interrupted", hint=found)


def find_last_attempt(folder: Path) -> int | None:
    """Return the number of the newest attempt in a run's folder, None without one."""
    attempts = [
        int(path.name.split("=")[1]) for path in folder.glob("attempt=*") if path.name[8:].isdigit()
    ]
    return max(attempts, default=None)


def _read_outcome(folder: Path) -> dict[str, Any] | None:
    """Return the outcome by a run's sealed record; None without one."""
    try:
        record = read_sealed(folder / "run.json")
    except UserError:  # partial file: a copy in progress, or a full disk
        return None
    return None if record is None else record["outcome"]


def _is_before(written: float, job: QueuedJob | None, now: float) -> bool:
    """Return whether a time lies before the start of a job that has started."""
    if job is None:
        return False
    return job.used_s is not None and job.state != "PENDING" and written < now - job.used_s


def find_logs(folder: Path, attempt: int | None) -> list[Path]:
    """Return a training's logs: of the rank that failed first, of the launcher, of the other ranks.

    If ranks have logs of their own, the training's log names the one that failed first.
    """
    own = folder.parents[1] / "logs/train" / f"{folder.name}.log"
    ranks = []
    if attempt is not None:
        ranks = sorted((folder / f"attempt={attempt:02d}" / "output").glob("rank=*.log"))
    named = re.search(r"rank[ =](\d+)(?:\.log| .*failed first)", read_tail(own))
    first = [path for path in ranks if named and path.name == f"rank={int(named[1]):05d}.log"]
    return [path for path in dict.fromkeys([*first, own, *ranks]) if path.is_file()]


def _is_alive(folder: Path, written: float | None, now: float) -> bool:
    """Return whether a process trains this run: one here that holds the lock, or one elsewhere that
    still writes.
    """
    lock = folder / ".lock"
    if is_locked_here(lock):
        return True
    # a run that ended normally removed the owner
    if lock.is_file() and not read_tail(lock).strip():
        return False
    boot = _read_owner(folder, pattern="boot ([0-9a-f]+)")
    elsewhere = boot != (get_boot_id() or "")[:8] or not Path("/proc/locks").is_file()
    return elsewhere and written is not None and now - written < FRESH_S


def _read_owner(folder: Path, pattern: str) -> str | None:
    """Return a field of the lock file's owner line, such as `process 42 on nid000001, job 7`."""
    found = re.search(pattern, read_tail(folder / ".lock"))
    return found[1] if found else None


def _read_status(folder: Path, attempt: int | None) -> dict[str, Any]:
    """Return the last status of the newest attempt.

    A new attempt leaves the previous attempt's status file in place until it writes its own; that
    one does not count.
    """
    try:
        values = read_json(folder / "status.json")
        record = folder / f"attempt={attempt or 0:02d}/attempt.json"
        begun = record.stat().st_mtime if attempt and record.is_file() else 0
        return values if isinstance(values, dict) and values.get("t_unix_s", 0) >= begun else {}
    except (UserError, OSError, TypeError):
        return {}


def _find_last_write(folder: Path, attempt: int | None, status: dict[str, Any]) -> float | None:
    """Return when the newest attempt last wrote: its status or, before the first step, its
    events.
    """
    stamps = [status["t_unix_s"]] if isinstance(status.get("t_unix_s"), int | float) else []
    for path in (folder / f"attempt={attempt or 0:02d}").glob("rank=00000/*.jsonl"):
        with suppress(OSError):
            stamps.append(path.stat().st_mtime)
    return max(stamps, default=None)


def is_locked_here(path: Path, table: Path = Path("/proc/locks")) -> bool:
    """Return whether a process of this machine holds a lock on a file, without touching the lock.
    False if unknown.
    """
    try:
        found = path.stat()
    except OSError:
        return False
    # `1: FLOCK  ADVISORY  WRITE 4242 fd:01:131112 0 EOF`: device numbers in hex, then the inode
    held = rf" {os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino} "
    return any(held in line and "->" not in line for line in read_lines(table))


def read_tail(path: Path, size: int = TAIL_BYTES) -> str:
    """Return the end of a text file without colours and redrawn lines; "" if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[^\n]*\r(?=[^\n])|\r", "", text)
