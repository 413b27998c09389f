"""What machine this is, from what the operating system says; nothing guessed."""

import os
import platform
from pathlib import Path
from typing import Any

from tokenscale.runs.records.control_groups import cgroup_limits, usable_cores


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
