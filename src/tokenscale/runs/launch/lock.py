"""Locks: one process writes a run's folder, a store or a corpus; one Snakemake works in a project's folder."""

import atexit
import fcntl
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from tokenscale.base.files import acquire, lock_folder
from tokenscale.runs.launch import job


def hold_run_folder(directory: Path, what: str, *, wait: bool = False) -> AbstractContextManager[int]:
    """Lock a folder as `lock_folder` does. A free lock that another job left behind is taken only once that job has
    ended: nodes may not share locks (Lustre without `flock`), and ranks may outlive their launcher.
    """
    return lock_folder(directory, what, wait=wait, job=job.job_id(), may_write=job.may_still_write)


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
    file = open(folder / "tokenscale.owners", "a+", encoding="utf-8")  # held until the process ends
    try:
        alone = acquire(file)
    except OSError:  # a file system without locks: Snakemake's own has to do
        file.close()
        return True
    file.seek(0)
    owners = file.read().splitlines()
    elsewhere = [owner for owner in owners if not owner.endswith(f" on {platform.node()}")]
    locked = any((folder / "locks").glob("*"))
    if alone and (not elsewhere or "--unlock" in arguments):
        if locked:
            print("tokenscale: removing the lock of a Snakemake process that was killed.", file=sys.stderr)
            shutil.rmtree(folder / "locks")
        file.truncate(0)
    elif locked:
        how, others = ("may still be", elsewhere) if alone else ("is", owners)
        print(f"tokenscale: Snakemake {how} running in this folder: {', '.join(others)}.", file=sys.stderr)
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
