"""Files in the page cache of the system."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

#: largest share of pages in the page cache for a reader to be called cold: those read at opening
WARM_SHARE = 0.01


def drop_page_cache(paths: Iterable[Path]) -> float | None:
    """Drop files from the page cache and return the share of pages that remain, from 0 to 1.

    Files on tmpfs and mapped files remain. None if the system does not support or report it.
    """
    paths = list(paths)
    if not hasattr(os, "posix_fadvise"):
        return None
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    counted = [_count_resident_pages(path) for path in paths]
    found = [pages for pages in counted if pages is not None]
    if len(found) < len(counted):
        return None
    return sum(kept for kept, _ in found) / max(1, sum(pages for _, pages in found))


def explain_warm_cache(kept: float | None) -> str | None:
    """Return why a reader is not cold, or None if it is. `kept` is the result of
    `drop_page_cache`.
    """
    if kept is None:
        return "the system does not report whether it drops files from its page cache"
    return f"{kept:.0%} of its files stay in the page cache" if kept > WARM_SHARE else None


def _count_resident_pages(path: Path) -> tuple[int, int] | None:
    """Return (resident pages, all pages) of a file by mincore(2); None if unavailable."""
    size = path.stat().st_size
    if size == 0:
        return 0, 0
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # maps without reading
    pages = -(-size // mmap.PAGESIZE)
    marks = (ctypes.c_ubyte * pages)()
    address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
    try:
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), marks)
    except (OSError, AttributeError):
        return None
    return (
        None
        if failed
        else (int(np.count_nonzero(np.frombuffer(memoryview(marks), dtype=np.uint8) & 1)), pages)
    )
