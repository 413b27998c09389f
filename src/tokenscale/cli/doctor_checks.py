"""Checks of `doctor` on the project, the machine and SLURM, and what all checks share.

Verdicts: `ok`; `note`, it works with a restriction; `no`, it is missing or does not work. Whether a `no` is a fault
depends on what the user wants to run: `doctor` decides. No check imports a package at the top: any may be missing.
"""

import errno
import importlib.util
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenscale.runs.records import provenance

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """Result of a check: its verdict (ok, note, no), the fact as text and as values, and the next step."""

    verdict: str
    fact: str
    next: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """What checks share: the results folder, and what the child process reported.

    `broken`: module → error of its import. `stages`: stage of torch → its report. `ended`: how the child failed, or "".
    """

    results: Path = Path("results")
    broken: dict[str, str] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: str = ""
    #: GB/s that the machine's file expects inside a node
    least_node_gb_s: float | None = None


def make_finding(fact: str, notes: list[tuple[str, str]], values: dict[str, Any]) -> Finding:
    """Return an `ok` finding, or a `note` with each (reason, next step)."""
    fact = "; ".join([fact, *(why for why, _ in notes)])
    return Finding("note" if notes else "ok", fact, "; ".join(cure for _, cure in notes), values)


def run_command(argv: list[str], timeout_s: float = 5.0, **variables: str) -> tuple[int | None, str]:
    """Run a command and return its exit code and its output (both streams).

    The code is None if the command is missing or does not end in time; then its whole process group is killed.
    """
    try:
        process = subprocess.Popen(
            argv,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return None, error.strerror or str(error)
    try:
        return (process.communicate(timeout=timeout_s)[0].strip(), process.returncode)[::-1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, f"{process.communicate()[0].strip()}\nno output within {timeout_s:g} s".strip()
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def is_importable(module: str) -> bool:
    """Return whether Python finds the module, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def python_command() -> str:
    """Return the path of this Python, relative to the working folder if it is inside."""
    executable = Path(sys.executable)
    return str(executable.relative_to(Path.cwd())) if executable.is_relative_to(Path.cwd()) else str(executable)


# -- project, programs, capacity


def check_project_folder(context: Context) -> Finding:
    """Check that this folder is the project's: the workflow is in the repository, not in the package."""
    needed = ("workflow/Snakefile", "config/config.yaml", "profiles/default/config.yaml", "pyproject.toml")
    missing = [name for name in needed if not Path(name).is_file()]
    if missing:
        return Finding("no", f"not in this folder: {', '.join(missing)}", "cd to a clone of the repository")
    if not Path("alps/config.yaml").is_file():  # a download or a file system without symbolic links
        return Finding("note", "the link `alps` does not point to profiles/alps", "ln -sfn profiles/alps alps")
    return Finding("ok", "workflow, configuration and profiles are here")


def check_configuration(context: Context) -> Finding:
    """Check the configuration as the workflow would read it."""
    if not is_importable("pydantic") or not is_importable("yaml"):
        return Finding("no", "unknown without pydantic and pyyaml", "see host packages", {"without": "pydantic"})
    if not Path("config/config.yaml").is_file():
        return Finding("no", "unknown outside the project's folder", "see project", {"without": "project"})
    from tokenscale.base.errors import UserError
    from tokenscale.settings.config import load_config

    try:
        config = load_config("config/config.yaml")
        runs = config.all_runs(list(config.settings.experiments))
    except UserError as error:
        facts = ", ".join(f"{label} {text}" for label, text in error.facts.items() if label != "next")
        return Finding("no", f"{error.what} {facts}", error.facts.get("next", "tokenscale check"))
    most = max((run.settings.layout.world_size for run in runs.values()), default=1)
    on_gpus = max((r.settings.layout.world_size for r in runs.values() if r.settings.device == "auto"), default=0)
    names = ", ".join(config.settings.experiments)
    fact = f"scale {config.settings.scale}, experiments {names}: {len(runs)} runs of at most {most} ranks"
    values = {"scale": config.settings.scale, "runs": len(runs), "ranks": most, "gpu_ranks": on_gpus}
    return Finding("ok", fact, values=values)


def check_tools(context: Context) -> Finding:
    """Check the programs that the commands of the README call."""
    found = {name: shutil.which(name) is not None for name in ("make", "git")}
    parts = []
    if not found["make"]:
        parts.append(f"`{python_command()} -m snakemake` replaces `make run`")
    if not found["git"]:
        parts.append("install git: without it results do not name their commit, and some tests fail")
    listing = ", ".join(f"{name} {'found' if there else 'not found'}" for name, there in found.items())
    return Finding("note" if parts else "ok", listing, "; ".join(parts), found)


def check_cores(context: Context) -> Finding:
    """Check the cores that this process may use, by its affinity mask and control groups, not the built-in ones."""
    visible, quota = provenance.count_affinity_cores(), provenance.cgroup_limits()[0]
    usable = provenance.usable_cores(visible, quota)
    values = {"usable": usable, "affinity": visible, "quota": quota, "built_in": os.cpu_count()}
    fact = f"{usable} usable of {os.cpu_count()}"
    if quota and quota < visible:
        fact += f": a control group allows {quota:g}, but Snakemake's `cores: all` counts all {visible} visible"
        return Finding("note", fact, f"snakemake --cores {usable}", values)
    return Finding("ok", fact, values=values)


#: memory that the demo needs: one rank peaks at 0.69 GB here; two run at a time, beside Snakemake
DEMO_MEMORY = 1_700_000_000


def check_memory(context: Context) -> Finding:
    """Check main memory: its total, what is available now, and the limit of control groups."""
    (total, available), limit = provenance.read_memory(), provenance.cgroup_limits()[1]
    values = {"total_bytes": total, "available_bytes": available, "limit_bytes": limit}
    need = f"the demo needs {DEMO_MEMORY / 1e9:.1f} GB"
    if total is None:
        return Finding("note", f"the system does not report it; {need}", values=values)
    fact = f"{total / GIB:.1f} GiB"
    fact += f", {available / GIB:.1f} GiB available" if available is not None else ""
    fact += f", limited to {limit / GIB:.1f} GiB by a control group" if limit is not None and limit < total else ""
    least = min(x for x in (total, available, limit) if x is not None)
    if least < DEMO_MEMORY:
        return Finding("no", f"{fact}; {need}", "close other programs, or raise the limit", values)
    if least < 2 * DEMO_MEMORY:
        return Finding("note", f"{fact}; {need}, larger models need more", values=values)
    return Finding("ok", fact, values=values)


# -- the results folder

#: types of file systems, as the kernel names them
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "9p", "virtiofs")
#: disk space that the demo needs: twice the size of its results (43 MB)
DEMO_DISK = 100_000_000
#: tries the lock from another process: within one process some file systems grant it twice
TRY_LOCK = """
import fcntl, sys
with open(sys.argv[1]) as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(9)
"""


def find_file_system(folder: Path) -> str:
    """Return the type of the file system that holds a folder, as the kernel names it, or `unknown`."""
    code, text = run_command(["df", "--output=fstype", str(folder)])
    return text.splitlines()[-1] if code == 0 and text else "unknown"


def try_folder(folder: Path) -> dict[str, Any]:
    """Try the operations of writing results in a temporary folder. `failed`: step → why it does not work.

    `clock_skew_s`: how far the file system's clock is ahead of this machine's (Snakemake compares file times).
    """
    found: dict[str, Any] = {"failed": {}, "clock_skew_s": None, "fsync_s": None}
    try:
        temporary = tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        found["failed"]["create"] = error.strerror or str(error)
        return found
    with temporary as name:
        old, new = Path(name) / "results.json", Path(name) / ".results.json.tmp"

        def create() -> None:
            old.write_bytes(b"old")
            new.write_bytes(b"new" * 1000)

        def fsync() -> None:
            start = time.perf_counter()
            with open(new, "rb+") as file:
                os.fsync(file.fileno())
            found["fsync_s"] = time.perf_counter() - start

        def rename() -> None:
            os.replace(new, old)
            if old.read_bytes()[:3] != b"new" or new.exists():
                raise OSError(errno.EIO, "a renamed file still has its old content")

        def flock() -> None:
            import fcntl

            with open(old, "rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                code, text = run_command([sys.executable, "-S", "-c", TRY_LOCK, str(old)], timeout_s=10)
                if code == 0:
                    raise OSError(errno.ENOLCK, "two processes acquired the same lock")
                if code != 9:
                    raise OSError(errno.ENOLCK, text.splitlines()[-1] if text else "the lock test did not run")

        def memory_map() -> None:
            with open(old, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                view[0]

        steps: tuple[Callable[[], None], ...] = (create, fsync, rename, flock, memory_map)
        for step in steps:
            try:
                step()
            except Exception as error:
                why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                found["failed"][step.__name__.replace("_", " ")] = why
            if "create" in found["failed"]:
                return found
        found["clock_skew_s"] = _clock_skew(Path(name) / "now")
    return found


def _clock_skew(path: Path) -> float:
    before = time.time()
    path.write_bytes(b"x")
    after, stamp = time.time(), path.stat().st_mtime
    return stamp - min(max(stamp, before), after)


def check_results_folder(context: Context) -> Finding:
    """Check the file system of the results: free space, and the operations that the project relies on."""
    folder = context.results.absolute()
    while not folder.exists() and folder != folder.parent:  # a check creates no folders
        folder = folder.parent
    trial, kind, free = try_folder(folder), find_file_system(folder), shutil.disk_usage(folder).free
    status = os.statvfs(folder)
    free_files = status.f_favail if status.f_files else None  # file systems without a fixed number report 0
    values = {"folder": str(folder), "file_system": kind, "free_bytes": free, "free_files": free_files, **trial}
    where = str(context.results) if folder == context.results.absolute() else f"{context.results} (does not exist yet)"
    fact = f"{where}, file system {kind}, {free / GIB:.1f} GiB free"
    if trial["failed"]:
        failed = "; ".join(f"{step} fails: {why}" for step, why in trial["failed"].items())
        cure = "choose another folder or file system"
        if "flock" in trial["failed"] and kind == "lustre":
            cure = "request a mount with the option flock"
        elif "create" in trial["failed"]:
            cure = "make it writable, or use a writable folder"
        return Finding("no", f"{fact}; {failed}", cure, values)
    fact += "; rename, fsync, flock and memory map work"
    if free < DEMO_DISK:
        return Finding("no", fact, f"free {DEMO_DISK / 1e6:.0f} MB: the demo's results take half of it", values)
    skew, fsync_s = trial["clock_skew_s"] or 0.0, trial["fsync_s"] or 0.0
    skewed = f"its clock is {skew:+.0f} s off this machine's clock, and Snakemake compares file times"
    notes = [
        (kind in ("tmpfs", "ramfs"), "it is in memory: lost on reboot", "copy important results to a disk"),
        (kind == "overlay", "it is inside a container and is lost with it", "mount a folder of the host here"),
        (
            kind in NETWORK_FILE_SYSTEMS or kind.startswith("fuse"),
            "files of other nodes appear late",
            "snakemake --latency-wait 60, as profiles/alps has it",
        ),
        (abs(skew) > 1.0, skewed, "synchronize both clocks with NTP"),
        (fsync_s > 1.0, f"fsync takes {fsync_s:.1f} s", "use a faster disk, or wait until it is idle"),
        (free < 20 * DEMO_DISK, "little free space beyond the demo", "free some space"),
        (
            free_files is not None and free_files < 10_000,
            f"room for only {free_files} more files",
            "remove files that are not needed",
        ),
    ]
    return make_finding(fact, [(why, cure) for holds, why, cure in notes if holds], values)


# -- SLURM

#: the container of trainings on Alps
CONTAINER = Path("profiles/alps/train.toml")


def check_slurm(context: Context) -> Finding:
    """Check SLURM's programs, its controller and accounting, and the account of the profile `alps`."""
    found = {name: shutil.which(name) is not None for name in ("sbatch", "srun", "sacct", "squeue", "sinfo")}
    job, account = os.environ.get("SLURM_JOB_ID"), os.environ.get("ALPS_ACCOUNT")
    values: dict[str, Any] = {"programs": found, "job": job, "account": account, "controller": None}
    inside = f"inside job {job}" if job else ""
    missing = [name for name in ("sbatch", "srun") if not found[name]]
    if missing:
        fact = f"{' and '.join(missing)} not found" + (f" {inside}" if inside else "")
        cure = "run this on a cluster's login node; a dry run needs no SLURM: snakemake --profile alps -n"
        return Finding("no", f"{fact}; needed only for --profile alps", cure, values)
    version = run_command(["sbatch", "--version"])[1]
    fact = ", ".join(filter(None, [version or "unknown version", inside]))
    if found["sinfo"]:
        code, text = run_command(["sinfo", "--noheader", "--format=%P"])
        values["controller"] = code == 0
        if code != 0:
            first = text.splitlines()[0] if text else f"exit code {code}"
            fact += f"; its controller does not respond: {first}"
            return Finding("no", fact, "scontrol ping; then contact the administrators", values)
        fact += f", partitions {', '.join(dict.fromkeys(text.split()))}"
    notes = []
    if not account:
        notes.append(("ALPS_ACCOUNT is not set", "export ALPS_ACCOUNT=<project>"))
    elif image := find_missing_image():
        notes.append((f"the image of trainings is missing: {image}", "build it: profiles/alps/README.md, step 5"))
    if run_command(["sacct", "-X", "--noheader", "--format=JobIdRaw"])[0] != 0:
        notes.append(("sacct fails: Snakemake would wait forever", "snakemake --slurm-status-command squeue"))
    if inside:
        notes.append(("Snakemake submits jobs itself", "start it outside a job"))
    return make_finding(fact, notes, values)


def find_missing_image() -> str | None:
    """Return the path of the container image if it is missing: CSCS deletes files that nobody accesses."""
    stated = re.search(r'^image = "(.+)"$', CONTAINER.read_text(), re.M) if CONTAINER.is_file() else None
    path = os.path.expandvars(stated[1]) if stated else ""
    # `$`: a variable without a value, this is not Alps; `#`: a registry address
    return path if path and not set("$#") & set(path) and not Path(path).exists() else None
