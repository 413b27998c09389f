"""Description of this machine, as the operating system reports it."""

import ctypes
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def cgroup_limits(root: Path = Path("/")) -> tuple[float | None, int | None]:
    """Return the limits of cores and memory bytes by control groups (v1 and v2); None without a limit."""
    groups = read_lines(root / "proc/self/cgroup")
    cores, memory = [], []
    for folder in _group_folders(groups, "", root / "sys/fs/cgroup"):  # version 2
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            cores.append(int(quota) / int(period))
        memory += _parse_limit(folder / "memory.max")
    for folder in _group_folders(groups, "cpu", root / "sys/fs/cgroup/cpu"):  # version 1
        quotas, periods = (_parse_limit(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        cores += [a / b for a, b in zip(quotas, periods, strict=False)]
    for folder in _group_folders(groups, "memory", root / "sys/fs/cgroup/memory"):
        memory += _parse_limit(folder / "memory.limit_in_bytes")
    memory = [limit for limit in memory if limit < 2**60]  # version 1 writes "no limit" as a huge number
    return min(cores, default=None), min(memory, default=None)


def usable_cores(affinity: int, quota: float | None) -> int:
    """Return the cores usable at once: the affinity's, limited by the control groups' quota."""
    return max(1, min(affinity, math.ceil(quota))) if quota else affinity


def _group_folders(groups: list[str], controller: str, mount: Path) -> Iterator[Path]:
    """Yield this process's control group and its parents up to the mount, each of which may set a limit."""
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = Path(path.lstrip("/"))
            for part in dict.fromkeys([group, *group.parents]):
                yield mount / part


def read_text(path: Path) -> str:
    """Return a file's stripped text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_lines(path: Path) -> list[str]:
    return read_text(path).splitlines()


def _parse_limit(path: Path) -> list[int]:
    text = read_text(path)
    return [int(text)] if text.isdigit() else []  # "max" and -1 are no limits


def count_cores() -> int:
    """Return the number of cores that this process can use, limited by affinity and control groups."""
    return usable_cores(count_affinity_cores(), cgroup_limits()[0])


def count_affinity_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def get_boot_id() -> str | None:
    """Return Linux's boot id; monotonic clocks of one boot can be compared."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def describe_machine() -> dict[str, Any]:
    """Return CPU model, cores, memory, architecture and operating system; unknown facts are left out."""
    facts: dict[str, Any] = {"architecture": platform.machine(), "system": platform.system(), "cores": count_cores()}
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
    """Energy counter of a GPU board (Volta and later), found by its PCI address: joules since the driver was loaded."""

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
        """Return the counter's value; None without a counter."""
        if self._library is None:
            return None
        millijoules = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules)):
            return None
        return millijoules.value / 1e3
