"""Work in several processes."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Result = TypeVar("Result")


def map_processes(function: Callable[..., Result], jobs: Sequence[tuple], processes: int) -> Iterator[Result]:
    """Yield `function(*job)` of each job in order, computed by up to `processes` processes.

    One process, or one job, is computed here. `function` must be importable. Its exceptions are raised here.
    """
    processes = min(processes, len(jobs), os.cpu_count() or 1)
    if processes <= 1:
        yield from (function(*job) for job in jobs)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
        yield from pool.map(function, *zip(*jobs, strict=True))
