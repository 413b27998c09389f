"""What control groups leave this process: cores and memory. Containers and batch jobs are limited by them.

The standard library alone.
"""

import math
from collections.abc import Iterator
from pathlib import Path


def cgroup_limits(root: Path = Path("/")) -> tuple[float | None, int | None]:
    """Cores and bytes that control groups leave this process, None where they set no limit. Both versions are read."""
    groups = lines_of(root / "proc/self/cgroup")
    cores, memory = [], []
    for folder in _group_folders(groups, "", root / "sys/fs/cgroup"):  # version 2
        quota, _, period = text_of(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            cores.append(int(quota) / int(period))
        memory += _number(folder / "memory.max")
    for folder in _group_folders(groups, "cpu", root / "sys/fs/cgroup/cpu"):  # version 1
        for quota, period in zip(
            _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us"), strict=False
        ):
            cores.append(quota / period)
    for folder in _group_folders(groups, "memory", root / "sys/fs/cgroup/memory"):
        memory += _number(folder / "memory.limit_in_bytes")
    memory = [limit for limit in memory if limit < 2**60]  # version 1 writes "no limit" as a huge number
    return min(cores, default=None), min(memory, default=None)


def usable_cores(affinity: int, quota: float | None) -> int:
    """Cores that work at once: those this process may use, no more than control groups pay for."""
    return max(1, min(affinity, math.ceil(quota))) if quota else affinity


def _group_folders(groups: list[str], controller: str, mount: Path) -> Iterator[Path]:
    """This process's group and its parents up to the mount: each of them limits. A container sees only the mount."""
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = Path(path.lstrip("/"))
            for part in dict.fromkeys([group, *group.parents]):
                yield mount / part


def text_of(path: Path) -> str:
    """A file's text without surrounding space; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def lines_of(path: Path) -> list[str]:
    return text_of(path).splitlines()


def _number(path: Path) -> list[int]:
    text = text_of(path)
    return [int(text)] if text.isdigit() else []  # "max" and -1 are no limits
