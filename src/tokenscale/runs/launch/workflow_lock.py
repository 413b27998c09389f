"""Who runs the workflow in this folder, and Snakemake's lock where its owner died without taking it off."""

import atexit
import fcntl
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tokenscale.runs.launch import clock

#: options with which Snakemake makes nothing; beside them -n, alone or with others behind it
LOOKING = {"--dry-run", "--dryrun", "--dag", "--rulegraph", "--filegraph", "--lint", "--report", "--summary", "-S"}
LOOKING |= {"--detailed-summary", "-D", "--list", "-l", "--list-rules", "--version", "-v"}
_held: list[IO[str]] = []


def enter(arguments: Sequence[str], folder: Path = Path(".snakemake"), results: Path = Path("results")) -> bool:
    """Called by each Snakemake that is about to make something here, before it asks for its own lock.

    All that work at the same time share a lock of the operating system, which ends with their processes, whatever ends
    them. Who finds it free is alone: a lock of Snakemake's is then one that a killed Snakemake left, and is taken off.
    File systems may keep their locks from other nodes; so a process that left its name on another node counts as alive,
    until `--unlock` says that it is not.

    Who is alone also sees whether the clock was set back since the last call, and puts the times of `results` right.
    Returns whether this call makes something: not for a dry run and the like.
    """
    if LOOKING & set(arguments) or any(a.startswith("-n") for a in arguments):
        return False
    if _held:
        return True
    folder.mkdir(exist_ok=True)
    owners_file = folder / "tokenscale.owners"
    back_s = clock.set_back(owners_file) if owners_file.is_file() else None
    file = open(owners_file, "a+", encoding="utf-8")  # held until the process ends
    try:
        alone = _taken(file)
    except OSError:  # a file system without locks: Snakemake's own has to do
        file.close()
        return True
    file.seek(0)
    owners = file.read().splitlines()
    elsewhere = [owner for owner in owners if not owner.endswith(f" on {platform.node()}")]
    locks = folder / "locks"
    if alone and (not elsewhere or "--unlock" in arguments):
        if locks.is_dir() and any(locks.iterdir()):
            print("tokenscale: taking off the lock of a Snakemake that was killed.", file=sys.stderr)
            shutil.rmtree(locks)
        if back_s is not None and (moved := clock.to_the_past(results)):
            message = (
                f"tokenscale: the clock was set back by {back_s:.0f} s or more since the last call; {moved} files of"
            )
            print(f"{message} a time to come have been given times that have been, in their order.", file=sys.stderr)
        file.truncate(0)
    elif locks.is_dir() and any(locks.iterdir()):
        others = ", ".join(owners if not alone else elsewhere)
        how = "may still be" if alone else "is"
        print(f"tokenscale: Snakemake {how} at work in this folder: {others}.", file=sys.stderr)
    fcntl.flock(file, fcntl.LOCK_SH)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    _held.append(file)
    atexit.register(_leave, file, os.getpid())
    return True


def _taken(file: IO[str]) -> bool:
    """Whether nobody else has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _leave(file: IO[str], process: int) -> None:
    """An orderly end: who is the last one leaves no name."""
    if os.getpid() == process and _taken(file):
        file.truncate(0)


def use_this_python() -> None:
    """Put the folder of the running Python first in PATH, for this process and its children.

    A Snakemake that is called by its path then runs its jobs with its own Python, activated or not.
    """
    here = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if folders[0] != here:
        os.environ["PATH"] = os.pathsep.join([here, *folders])
