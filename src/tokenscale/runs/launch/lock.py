"""Locks: one process writes a run's folder, a store or a corpus; one Snakemake works in a project's folder."""

import atexit
import fcntl
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tokenscale.base.errors import UserError
from tokenscale.base.files import acquire, lock_folder
from tokenscale.runs.launch import job

#: seconds to retry a queue that does not answer about the job that holds a lock
PATIENCE_S = 120.0


@contextmanager
def hold_run_folder(
    directory: Path,
    what: str,
    *,
    wait: bool = False,
    may_write: Callable[[str], bool | None] = job.may_still_write,
    poll_s: float = 1.0,
) -> Iterator[int]:
    """Lock the folder while the block runs. Yields the lock's descriptor; processes that inherit it keep the lock.

    If another process has the lock: UserError, or with `wait`, wait until it is free. The lock file names the owner's
    process, host and job. A file system may not share locks between nodes (Lustre without `flock`), and ranks may
    outlive their launcher. So a free lock that another job left behind is taken only once that job has ended.
    """
    mine = job.job_id()
    with lock_folder(
        directory,
        what,
        wait=wait,
        poll_s=poll_s,
        owner=f", job {mine}" if mine else "",
        check=lambda owner: _wait_for_job(owner, directory / ".lock", what, wait, may_write, poll_s),
    ) as held:
        yield held


def _wait_for_job(
    owner: str, path: Path, what: str, wait: bool, may_write: Callable[[str], bool | None], poll_s: float
) -> None:
    found = re.search(r"job (\S+)", owner)
    if found is None or found[1] == job.job_id():
        return
    other, reported, since = found[1], False, time.monotonic()
    while (answer := may_write(other)) is not False:
        unknown = answer is None
        if unknown and not job.job_id():
            return  # results of a cluster on a machine without its queue: the lock itself is free
        if not wait or (unknown and time.monotonic() - since > PATIENCE_S):
            raise UserError(
                f"{what} may still be written by job {other}.",
                lock=path,
                owner=owner,
                found="the queue does not answer" if unknown else f"job {other} is in the queue",
                next=f"wait for it, or scancel {other}",
            )
        if not unknown:
            since = time.monotonic()
        if not reported:
            print(f"tokenscale: {what} may still be written by job {other}; waiting for its end", flush=True)
            reported = True
        time.sleep(poll_s)


#: options with which Snakemake runs no jobs, besides -n
DRY_OPTIONS = {"--dry-run", "--dryrun", "--dag", "--rulegraph", "--filegraph", "--lint", "--report", "--summary", "-S"}
DRY_OPTIONS |= {"--detailed-summary", "-D", "--list", "-l", "--list-rules", "--version", "-v"}
_held: list[IO[str]] = []


def enter_workflow(arguments: Sequence[str], folder: Path = Path(".snakemake")) -> bool:
    """Register this Snakemake process before it takes Snakemake's own lock. Returns False for dry runs and the like.

    Concurrent processes share a lock of the operating system, which ends with them. A process that finds it free is
    alone: a lock of Snakemake is then stale and is removed. File systems may not share locks between nodes, so a
    process registered on another node counts as alive until `--unlock` is given.
    """
    if DRY_OPTIONS & set(arguments) or any(a.startswith("-n") for a in arguments):
        return False
    if _held:
        return True
    folder.mkdir(exist_ok=True)
    owners_file = folder / "tokenscale.owners"
    file = open(owners_file, "a+", encoding="utf-8")  # held until the process ends
    try:
        alone = acquire(file)
    except OSError:  # a file system without locks: Snakemake's own has to do
        file.close()
        return True
    file.seek(0)
    owners = file.read().splitlines()
    elsewhere = [owner for owner in owners if not owner.endswith(f" on {platform.node()}")]
    locks = folder / "locks"
    if alone and (not elsewhere or "--unlock" in arguments):
        if locks.is_dir() and any(locks.iterdir()):
            print("tokenscale: removing the lock of a Snakemake process that was killed.", file=sys.stderr)
            shutil.rmtree(locks)
        file.truncate(0)
    elif locks.is_dir() and any(locks.iterdir()):
        others = ", ".join(owners if not alone else elsewhere)
        how = "may still be" if alone else "is"
        print(f"tokenscale: Snakemake {how} running in this folder: {others}.", file=sys.stderr)
    fcntl.flock(file, fcntl.LOCK_SH)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    _held.append(file)
    atexit.register(_release, file, os.getpid())
    return True


def _release(file: IO[str], process: int) -> None:
    if os.getpid() == process and acquire(file):
        file.truncate(0)


def use_this_python() -> None:
    """Put the folder of the running Python first in PATH, so that Snakemake's jobs run with it, activated or not."""
    here = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if folders[0] != here:
        os.environ["PATH"] = os.pathsep.join([here, *folders])
