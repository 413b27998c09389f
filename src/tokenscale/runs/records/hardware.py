"""What machine this is, from what the operating system says; nothing guessed."""

import ctypes
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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


def cores() -> int:
    """Cores that this process can keep busy: those it may use, no more than its control groups pay for."""
    return usable_cores(affinity(), cgroup_limits()[0])


def affinity() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def boot() -> str | None:
    """Which boot of which machine this is, as Linux names it; monotonic clocks of one boot can be compared."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def describe() -> dict[str, Any]:
    """CPU model, cores, memory, architecture and operating system. Unknown facts are left out."""
    facts: dict[str, Any] = {"architecture": platform.machine(), "system": platform.system(), "cores": cores()}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                facts["cpu"] = line.split(":", 1)[1].strip()
                break
        facts["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        facts["load_average_1min"] = os.getloadavg()[0]
    except (OSError, ValueError):
        pass
    return facts


class Energy:
    """Joules since the driver was loaded, of one board, found by the PCI address that torch knows; None without one.

    nvmlDeviceGetTotalEnergyConsumption counts millijoules on boards of Volta and later.
    """

    def __init__(self, pci_bus_id: str | None):
        self._library = self._device = None
        if pci_bus_id is None:
            return
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            handle = ctypes.c_void_p()
            if library.nvmlInit_v2() == 0 and not library.nvmlDeviceGetHandleByPciBusId_v2(
                pci_bus_id.encode(), ctypes.byref(handle)
            ):
                self._library, self._device = library, handle
        except (OSError, AttributeError):
            return

    def joules(self) -> float | None:
        """The counter now; None where nothing counts."""
        if self._library is None:
            return None
        millijoules = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules)):
            return None
        return millijoules.value / 1e3
