"""Locks: one process writes a run's folder, a store or a corpus; one Snakemake works in a project's
folder.
"""

import atexit
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from tokenscale.base.errors import USER_PATH, UserError
from tokenscale.base.files import (
    acquire,
    get_boot_id,
    is_shared,
    lock_folder,
    name_process,
    open_file,
    utc_now,
)
from tokenscale.runs.launch import job


def hold_run_folder(
    directory: Path, what: str, *, wait: bool = False
) -> AbstractContextManager[int]:
    """Lock a folder as `lock_folder` does. A free lock that another job left behind is taken only
    once that job has ended: nodes may not share locks (Lustre without `flock`), and ranks may
    outlive their launcher.
    """
    return lock_folder(directory, what, wait=wait, job=job.job_id(), may_write=job.may_still_write)


#: options with which Snakemake runs no jobs, besides -n
DRY_OPTIONS = {
    "--dry-run",
    "--dryrun",
    "--dag",
    "--rulegraph",
    "--filegraph",
    "--lint",
    "--report",
    "--summary",
    "-S",
}
DRY_OPTIONS |= {"--detailed-summary", "-D", "--list", "-l", "--list-rules", "--version", "-v"}
OWNER = "tokenscale.owners"
_held: list[IO[str]] = []


def enter_workflow(arguments: Sequence[str], folder: Path = Path(".snakemake")) -> bool:
    """Take the lock of this project for the whole call of Snakemake. Returns False for dry runs and
    the like.

    Snakemake's own lock is removed at the end of any call, and names files instead of calls. This
    one is the operating system's, which ends with the process: whoever gets it is alone, and locks
    that Snakemake left are removed. Nodes may not share locks of a network file system, so an owner
    on another machine counts as alive there until `--unlock` is given. Raises UserError if another
    call works in this folder.
    """
    if DRY_OPTIONS & set(arguments) or any(a.startswith("-n") for a in arguments):
        return False
    if _held:
        return True
    folder.mkdir(exist_ok=True)
    file = os.fdopen(
        open_file(folder / OWNER, flags=os.O_RDWR | os.O_CREAT | os.O_APPEND, follow=False), "a+"
    )
    try:
        free = acquire(file)
    except OSError:  # a file system without locks: Snakemake's own has to do
        file.close()
        return True
    file.seek(0)
    owner = file.read().strip()
    boot = f"boot {(get_boot_id() or '')[:8]}"
    if not free:
        following = "wait for it (`tokenscale status` shows its runs), or end it"
        raise UserError(
            "Snakemake is running in this folder.", folder=Path.cwd(), owner=owner, next=following
        )
    if owner and boot not in owner and is_shared(folder) and "--unlock" not in arguments:
        what = "Snakemake may still be running in this folder."
        raise UserError(
            what, folder=Path.cwd(), owner=owner, next="if that machine is gone: snakemake --unlock"
        )
    if any((folder / "locks").glob("*")):
        print(
            "tokenscale: removing the lock of a Snakemake process that was killed.", file=sys.stderr
        )
        shutil.rmtree(folder / "locks")
    file.truncate(0)
    file.write(f"{name_process()}, since {utc_now()}\n")
    file.flush()
    _held.append(file)  # until the process ends
    atexit.register(_release, file, os.getpid())
    return True


def _release(file: IO[str], process: int) -> None:
    if os.getpid() == process:  # not a fork
        file.truncate(0)


def use_this_python() -> None:
    """Put the folder of the running Python first in PATH, so that Snakemake's jobs run with it,
    activated or not.
    """
    here = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if folders[0] != here:
        os.environ.setdefault(USER_PATH, os.environ.get("PATH", ""))
        os.environ["PATH"] = os.pathsep.join([here, *folders])
