"""Checks of folders: room, what works on their file systems, and how many files a process may hold open."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenscale.cli import doctor_machine as machine
from tokenscale.cli.doctor_finding import GIB, Asked, Finding, noted

#: twice what the demo's results come to (43 MB)
DEMO_DISK = 100_000_000


def results_folder(asked: Asked) -> Finding:
    """The file system that results go to: room, and whether what the project relies on works there."""
    folder = machine.existing(asked.results)
    trial = machine.try_folder(folder)
    found = machine.file_system_of(folder)
    kind = found[0] if found else "unknown"
    room, fact = _room(folder)
    values = {"folder": str(folder), "file_system": kind, **room, **trial}
    where = str(asked.results) if folder == asked.results.absolute() else f"{asked.results} (not there yet)"
    fact = f"{where}, file system {kind}, {fact}"
    if trial["failed"]:
        failed = "; ".join(f"{step} fails: {why}" for step, why in trial["failed"].items())
        cure = "choose another folder or file system"
        if "flock" in trial["failed"] and kind == "lustre":
            cure = "ask for a mount with the option flock"
        elif "create" in trial["failed"]:
            cure = "make it writable, or work in a folder that is"
        return Finding("no", f"{fact}; {failed}", cure, values)
    fact += "; rename, fsync, flock and memory map work"
    if room["free_bytes"] < DEMO_DISK:
        return Finding("no", fact, f"free {DEMO_DISK / 1e6:.0f} MB: the demo's results take half of it", values)
    notes = []
    if kind in machine.MEMORY_FILE_SYSTEMS:
        notes.append(("it is in memory: lost on reboot", "copy what counts to a disk"))
    if kind == "overlay":
        notes.append(("it is inside a container: lost with it", "mount a folder of the host here"))
    if kind in machine.NETWORK_FILE_SYSTEMS or kind.startswith("fuse"):
        notes.append(("files of other nodes show late", "snakemake --latency-wait 60, as profiles/alps has it"))
    if abs(trial["clock_skew_s"] or 0.0) > 1.0:
        skew = f"its clock is {trial['clock_skew_s']:+.0f} s off this machine's, and Snakemake compares times of files"
        notes.append((skew, "set both clocks by NTP"))
    if (trial["fsync_s"] or 0.0) > 1.0:
        notes.append((f"fsync takes {trial['fsync_s']:.1f} s", "use a faster disk, or wait until it is idle"))
    if room["free_bytes"] < 20 * DEMO_DISK:
        notes.append(("little room for more than the demo", "free some"))
    if room["free_files"] is not None and room["free_files"] < 10_000:
        notes.append((f"room for {room['free_files']} more files only", "remove files that are not needed"))
    return noted(fact, notes, values)


def temporary_folder(asked: Asked) -> Finding:
    """The folder for temporary files."""
    try:
        folder = Path(tempfile.gettempdir())
    except OSError as error:
        return Finding("no", error.strerror or str(error), "set TMPDIR to a folder that can be written")
    room, fact = _room(folder)
    fact = f"{folder}, {fact}"
    if room["free_bytes"] < DEMO_DISK:
        return Finding("note", fact, "set TMPDIR to a folder with room", room)
    return Finding("ok", fact, values=room)


def _room(folder: Path) -> tuple[dict[str, Any], str]:
    free = shutil.disk_usage(folder).free
    status = os.statvfs(folder)
    files = status.f_favail if status.f_files else None  # file systems without a fixed number say 0
    return {"free_bytes": free, "free_files": files}, f"{free / GIB:.1f} GiB free"


def open_files(asked: Asked) -> Finding:
    """How many files a process may hold open."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    fact = "no limit" if unlimited else f"{soft} a process"
    if not unlimited and soft < 1024:
        return Finding("note", fact, "ulimit -n 1024, before many shards or ranks", {"soft": soft, "hard": hard})
    return Finding("ok", fact, values={"soft": soft, "hard": hard})
