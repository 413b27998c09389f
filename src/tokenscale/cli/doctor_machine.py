"""Facts of this machine from the operating system: limits, mounts, and the operations that a folder supports.

Only the standard library is used: `doctor` also runs on machines where nothing else is installed.
"""

import errno
import mmap
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenscale.runs.records.hardware import read_lines

#: types of file systems, as the kernel names them, by what they mean for results
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "9p", "virtiofs")
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")

#: tries the lock from another process: within one process some file systems grant it twice
TRY_LOCK = """
import fcntl, sys
with open(sys.argv[1]) as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(9)
"""


def run_command(argv: list[str], timeout_s: float = 5.0) -> tuple[int | None, str]:
    """Run a command and return its exit code and its output (both streams).

    The code is None if the command is missing or does not end in time.
    """
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return None, f"no output within {timeout_s:g} s"
    except OSError as error:
        return None, error.strerror or str(error)
    return done.returncode, done.stdout.strip()


def read_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Return (total, available) bytes of main memory; None where the system does not report it."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", "\n".join(read_lines(root / "proc/meminfo")), re.M))
    total, available = found.get("MemTotal"), found.get("MemAvailable")
    if total is None:
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
        except (OSError, ValueError, AttributeError):
            return None, None
    return int(total) * 1024, int(available) * 1024 if available else None


def read_cpu_flags(root: Path = Path("/")) -> set[str]:
    """Return the CPU's instruction sets as the kernel names them (x86 `flags`, ARM `Features`)."""
    for line in read_lines(root / "proc/cpuinfo"):
        name, _, values = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return set(values.split())
    return set()


def find_file_system(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> tuple[str, str] | None:
    """Return (type, mount point) of the file system that holds a path; None if unknown."""
    resolved = path.resolve()
    best = None
    for line in read_lines(mountinfo):
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), left.split()[4])
        inside = resolved == Path(point) or Path(point) in resolved.parents
        # a later mount on the same point hides the earlier one
        if inside and (best is None or len(point) >= len(best[1])):
            best = right.split()[0], point
    return best


def find_existing_parent(path: Path) -> Path:
    """Return the path or its nearest existing parent: a check creates no folders."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def try_folder(folder: Path) -> dict[str, Any]:
    """Try the operations of writing results in a temporary folder. `failed`: step → why it does not work.

    Steps: create, fsync, rename over a file, flock against another process, memory map. `clock_skew_s`: how far the
    file system's clock is ahead of this machine's (Snakemake compares file times).
    """
    failed: dict[str, str] = {}

    def step(name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            failed[name] = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"

    try:
        temporary = tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        return {"failed": {"create": error.strerror or str(error)}, "clock_skew_s": None, "fsync_s": None}
    with temporary as name:
        old, new = Path(name) / "results.json", Path(name) / ".results.json.tmp"
        seconds: dict[str, float] = {}

        def create() -> None:
            old.write_bytes(b"old")
            new.write_bytes(b"new" * 1000)

        def fsync() -> None:
            start = time.perf_counter()
            with open(new, "rb+") as file:
                os.fsync(file.fileno())
            seconds["fsync_s"] = time.perf_counter() - start

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

        for name_of_step, action in (
            ("create", create),
            ("fsync", fsync),
            ("rename", rename),
            ("flock", flock),
            ("memory map", memory_map),
        ):
            step(name_of_step, action)
            if "create" in failed:
                break
        else:
            seconds["clock_skew_s"] = _clock_skew(Path(name) / "now")
        return {"failed": failed, "clock_skew_s": seconds.get("clock_skew_s"), "fsync_s": seconds.get("fsync_s")}


def check_port(family: socket.AddressFamily, address: str) -> None:
    """Send a byte to this process through a free port of an address. Raise OSError if that fails."""
    with socket.socket(family, socket.SOCK_STREAM) as server, socket.socket(family, socket.SOCK_STREAM) as client:
        server.settimeout(2)
        client.settimeout(2)
        server.bind((address, 0))
        server.listen(1)
        client.connect(server.getsockname())
        peer, _ = server.accept()
        with peer:
            peer.settimeout(2)
            client.sendall(b"x")
            if peer.recv(1) != b"x":
                raise OSError(errno.EIO, "the byte sent did not arrive")


def _clock_skew(path: Path) -> float:
    before = time.time()
    path.write_bytes(b"x")
    after, stamp = time.time(), path.stat().st_mtime
    return stamp - min(max(stamp, before), after)
