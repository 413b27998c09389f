"""Checks of cores and memory: what this process may use, which in a container is less than the machine has."""

import os
import shutil
from pathlib import Path

from tokenscale.cli import doctor_machine as machine
from tokenscale.cli.doctor_finding import GIB, Asked, Finding
from tokenscale.runs.records import control_groups
from tokenscale.runs.records.hardware import affinity

#: what the demo takes: a rank of it peaks at 0.69 GB here, two run at once beside Snakemake
DEMO_MEMORY = 1_700_000_000


def cpu(asked: Asked) -> Finding:
    """Cores that may work at once: of the affinity mask and of control groups, not those that are built in."""
    visible, quota = affinity(), control_groups.cgroup_limits()[0]
    usable = control_groups.usable_cores(visible, quota)
    values = {"usable": usable, "affinity": visible, "quota": quota, "built_in": os.cpu_count()}
    fact = f"{usable} usable of {os.cpu_count()}"
    if quota and quota < visible:
        return Finding(
            "note",
            f"{fact}: a control group allows {quota:g}, but Snakemake's `cores: all` counts the {visible} visible ones",
            f"snakemake --cores {usable}",
            values,
        )
    return Finding("ok", fact, values=values)


def main_memory(asked: Asked) -> Finding:
    """Main memory: of the machine, available now, and what control groups leave."""
    total, available = machine.memory()
    limit = control_groups.cgroup_limits()[1]
    values = {"total_bytes": total, "available_bytes": available, "limit_bytes": limit}
    need = f"the demo takes {DEMO_MEMORY / 1e9:.1f} GB"
    if total is None:
        return Finding("note", f"the system does not say; {need}", values=values)
    fact = f"{total / GIB:.1f} GiB"
    fact += f", {available / GIB:.1f} GiB available" if available is not None else ""
    fact += f", limited to {limit / GIB:.1f} GiB by a control group" if limit is not None and limit < total else ""
    least = min(x for x in (total, available, limit) if x is not None)
    if least < DEMO_MEMORY:
        return Finding("no", f"{fact}; {need}", "end other programs, or raise the limit", values)
    if least < 2 * DEMO_MEMORY:
        return Finding("note", f"{fact}; {need}, and larger models more", values=values)
    return Finding("ok", fact, values=values)


def shared_memory(asked: Asked) -> Finding:
    """/dev/shm, through which ranks on one machine may talk (NCCL)."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("note", "no /dev/shm; on Linux, NCCL between GPUs of one machine needs it")
    total, _, free = shutil.disk_usage(folder)
    values = {"total_bytes": total, "free_bytes": free}
    fact = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free in /dev/shm"
    if free < GIB:  # containers are given 64 MiB when nobody asks for more
        return Finding("note", f"{fact}; NCCL with several GPUs takes more", "docker run --shm-size=8g", values)
    return Finding("ok", fact, values=values)
