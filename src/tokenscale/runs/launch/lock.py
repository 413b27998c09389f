"""Lock of a run's folder, over all nodes and attempts: a file lock, plus the SLURM queue where locks are local."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.base.files import lock_folder
from tokenscale.runs.launch import submission

#: seconds to retry a queue that does not answer about the job that holds a lock
PATIENCE_S = 120.0


@contextmanager
def hold_run_folder(
    directory: Path,
    what: str,
    *,
    wait: bool = False,
    may_write: Callable[[str], bool | None] = submission.may_still_write,
    poll_s: float = 1.0,
) -> Iterator[int]:
    """Lock the folder while the block runs. Yields the lock's descriptor; processes that inherit it keep the lock.

    If another process has the lock: UserError, or with `wait`, wait until it is free. The lock file names the owner's
    process, host and job. A file system may not share locks between nodes (Lustre without `flock`), and ranks may
    outlive their launcher. So a free lock that another job left behind is taken only once that job has ended.
    """
    mine = submission.job_id()
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
    if found is None or found[1] == submission.job_id():
        return
    other, reported, since = found[1], False, time.monotonic()
    while (answer := may_write(other)) is not False:
        unknown = answer is None
        if unknown and not submission.job_id():
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
