"""Repair modification times that lie in the future after a clock change, at which Snakemake would stop."""

import os
import time
from pathlib import Path

#: largest accepted difference between the clocks of a file server and of this machine
MAX_SKEW_S = 1.0


def measure_setback(stamp: Path) -> float | None:
    """Return by how many seconds, at least, the clock was set back since `stamp` was written; None if it was not."""
    ahead = stamp.stat().st_mtime - time.time()
    return ahead if ahead > MAX_SKEW_S else None


def repair_future_times(folder: Path) -> int:
    """Set future modification times below `folder` to the recent past and return their number.

    The order of the files is kept, and all of them stay newer than the rest. Links to folders are followed.
    """
    now = time.time_ns()
    found: dict[int, list[Path]] = {}
    for parent, _, names in os.walk(folder, followlinks=True):
        for path in (Path(parent, name) for name in names):
            written = path.lstat().st_mtime_ns
            if written > now:
                found.setdefault(written, []).append(path)
    for ago, written in enumerate(sorted(found, reverse=True)):
        for path in found[written]:
            os.utime(path, ns=(now - ago * 1000,) * 2, follow_symlinks=False)
    return sum(map(len, found.values()))
