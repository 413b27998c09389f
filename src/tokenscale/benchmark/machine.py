"""Operating-system services for benchmarks: cores, memory and the page cache."""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.data.tokenizers import backends
from tokenscale.data.tokenizers.base import read_tokenizer_manifest
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.settings.benchmarks import Engine

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


NAMES = get_args(Engine)


def list_engines(
    requested: Iterable[Engine], tokenizer: Path, auto: str
) -> tuple[list[Engine], dict[str, str]]:
    """Return (usable requested engines, other engines → reason).

    An engine is unusable if it is not installed, not exact on the hostile texts, or already used by
    `auto`.
    """
    found: list[Engine] = []
    left_out: dict[str, str] = {}
    for engine in requested:
        if (reason := _explain_unusable(engine, folder=tokenizer, auto=auto)) is None:
            found.append(engine)
        else:
            left_out[engine] = reason
    return found, left_out


def _explain_unusable(engine: str, folder: Path, auto: str) -> str | None:
    """Return why an engine cannot be measured, or None."""
    if read_tokenizer_manifest(folder)["kind"] == "numbers":
        return "no engine reads the tokenizer kind numbers"
    if engine == auto:
        return "auto already uses this engine"
    try:
        # not of the kind numbers, which is excluded above
        tokenizer: Any = load_tokenizer(folder, engine)
    except UserError as error:
        return error.facts.get("reason") or error.what
    differs = tokenizer.difference(backends.make_fuzz_texts())
    return None if differs is None else "its ids are not those of the reference"
