"""Work in several processes of one machine, and the cores of one."""

import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from typing import TypeVar

from tokenscale.base.errors import UserError

Result = TypeVar("Result")


def map_processes(
    function: Callable[..., Result], jobs: Sequence[tuple], processes: int
) -> Iterator[Result]:
    """Yield `function(*job)` of each job in order, computed by up to `processes` processes.

    One process, or one job, is computed here. `function` must be importable. Its exceptions are
    raised here. Raises UserError if a process is killed. The processes end with this process, even
    if it is killed.
    """
    processes = min(processes, len(jobs), os.cpu_count() or 1)
    if processes <= 1:
        yield from (function(*job) for job in jobs)
        return
    context = get_context("forkserver")
    try:
        with ProcessPoolExecutor(processes, context, _end_with, (os.getpid(),)) as pool:
            yield from pool.map(function, *zip(*jobs, strict=True))
    except BrokenProcessPool:
        following = "give the command more memory, or lower --processes"
        facts = {"processes": processes, "reason": "usually too little memory"}
        raise UserError("a process of this command was killed.", **facts, next=following) from None


def _end_with(parent: int) -> None:
    """End this process soon after the process `parent`, which is not its parent: the fork server
    is.
    """

    def watch() -> None:
        while True:
            try:
                os.kill(parent, 0)
            except ProcessLookupError:
                os._exit(1)
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()


def reaches_itself() -> bool:
    """Return whether a connection through the loopback interface works."""
    with (
        suppress(OSError),
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), 5),
    ):
        return True
    return False


def available_cores() -> set[int]:
    """Return the cores that this process may use; empty if unknown."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


@contextmanager
def pin_to_cores(cores: set[int]) -> Iterator[None]:
    """Pin this process, including library threads, to cores while the block runs, if supported."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def count_peak_bytes() -> int:
    """Return the largest resident set that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
