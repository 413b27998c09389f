"""One writer a run, over all nodes and all attempts: the file system's lock, and the queue where that is not enough."""

import fcntl
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tokenscale.base.errors import UserError
from tokenscale.base.files import lock_failed
from tokenscale.runs.launch import job

#: how long a queue that does not answer is asked about the job that holds a lock
PATIENCE_S = 120.0


@contextmanager
def held(
    directory: Path,
    what: str,
    *,
    wait: bool = False,
    may_write: Callable[[str], bool | None] = job.may_write,
    poll_s: float = 1.0,
) -> Iterator[int]:
    """Hold the folder while the block runs; yields the lock's descriptor: processes that inherit it go on holding it.

    Where another process has the folder: UserError, or with `wait`, until it is free.
    The owner's process, host and job are in the lock's file. A file system may keep locks of one node from the others
    (Lustre without `flock`), and a process may be gone whose ranks are not: so a lock that is free, but was left by
    another job, counts only once the queue says that this job has ended.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".lock"
    with open(path, "a+", encoding="utf-8") as file:
        _take(file, path, what, wait, poll_s)
        _outlive(_owner(file), path, what, wait, may_write, poll_s)
        file.truncate(0)
        mine = job.job_id()
        file.write(f"process {os.getpid()} on {platform.node()}{f', job {mine}' if mine else ''}\n")
        file.flush()
        os.fsync(file.fileno())
        yield file.fileno()
        file.truncate(0)  # an orderly end leaves no owner; after a failure its ranks may still be there


def _take(file: IO[str], path: Path, what: str, wait: bool, poll_s: float) -> None:
    reported = False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not isinstance(error, BlockingIOError) or not wait:
                raise lock_failed(error, what, path, _owner(file)) from None
        if not reported:
            print(f"tokenscale: {what} is being written by {_owner(file)}; waiting for it", flush=True)
            reported = True
        time.sleep(poll_s)


def _outlive(
    owner: str, path: Path, what: str, wait: bool, may_write: Callable[[str], bool | None], poll_s: float
) -> None:
    """Wait for a job that left its name in the lock and may still write."""
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


def _owner(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "unknown"
