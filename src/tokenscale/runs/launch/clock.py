"""Files of a time that is still to come, because the clock was set back: Snakemake would stop at them."""

import os
import time
from pathlib import Path

#: clocks of a file system's server and of this machine may differ by so much
APART_S = 1.0


def set_back(stamp: Path) -> float | None:
    """By how many seconds at least the clock was set back since that file was written; None where it was not."""
    ahead = stamp.stat().st_mtime - time.time()
    return ahead if ahead > APART_S else None


def to_the_past(folder: Path) -> int:
    """Give the files below that are of a time to come one that has just been, in their order: what was newer stays
    newer, and all of them stay newer than the rest. Returns how many there were. Links to folders are followed."""
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
