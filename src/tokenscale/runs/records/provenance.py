"""Provenance record of a run, `run.json`, with the machine's hardware: written at the start, sealed
at the end.
"""

import ctypes
import importlib.metadata
import math
import os
import platform
import re
import subprocess
import sys
import timeit
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenscale import __version__
from tokenscale.base.errors import SECRET_NAME, UserError, first_line
from tokenscale.base.facts import unknown_fact
from tokenscale.base.files import (
    is_sealed,
    read_json,
    read_record,
    sha256_file,
    sha256_text,
    write_json,
    write_sealed,
    write_text,
)
from tokenscale.runs.records.redaction import redact, redact_arguments, redact_variable

#: list of the runs of a call of Snakemake, below the folder of results
INDEX = Path("arguments/runs.json")
#: its key, and that of `run.json`: experiment → digest of its design
DESIGNS = "designs"


def cgroup_limits(root: Path = Path("/")) -> tuple[float | None, int | None]:
    """Return the limits of cores and memory bytes by control groups (version 2); None without a
    limit.

    This process's group and its parents up to the mount may each set a limit.
    """
    group = re.search(r"^0::/(.*)$", read_text(root / "proc/self/cgroup"), re.MULTILINE)
    cores = []
    memory = []
    for part in [Path(group[1]), *Path(group[1]).parents] if group else []:
        quota, _, period = read_text(root / "sys/fs/cgroup" / part / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():  # "max" is no limit
            cores.append(int(quota) / int(period))
        if (limit := read_text(root / "sys/fs/cgroup" / part / "memory.max")).isdigit():
            memory.append(int(limit))
    return min(cores, default=None), min(memory, default=None)


def read_memory() -> tuple[int | None, int | None]:
    """Return (total, available) bytes of main memory; None where the system does not report it."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", read_text(Path("/proc/meminfo")), re.MULTILINE))
    if total := found.get("MemTotal"):
        return int(total) * 1024, int(
            found["MemAvailable"]
        ) * 1024 if "MemAvailable" in found else None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    except (OSError, ValueError, AttributeError):
        return None, None


def usable_cores(affinity: int, quota: float | None) -> int:
    """Return the cores usable at once: the affinity's, limited by the control groups' quota."""
    return max(1, min(affinity, math.ceil(quota))) if quota else affinity


def read_text(path: Path) -> str:
    """Return a file's stripped text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_lines(path: Path) -> list[str]:
    return read_text(path).splitlines()


def count_cores() -> int:
    """Return the number of cores that this process can use, limited by affinity and control
    groups.
    """
    return usable_cores(count_affinity_cores(), quota=cgroup_limits()[0])


def count_affinity_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process may use, without importing torch."""
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return there
    entries = [entry for entry in chosen.split(",") if entry.strip() not in ("", "-1")]
    return min(there, len(entries))


def measure_matrix_rate() -> float:
    """Return the FLOP/s that matrix products in fp32 reach on this machine's CPU."""
    import numpy as np

    square = np.ones((1024, 1024), np.float32)
    return 2 * 1024**3 / min(timeit.repeat(lambda: square @ square, number=1, repeat=3))


def describe_machine() -> dict[str, Any]:
    """Return CPU model, cores, memory, architecture and operating system."""
    facts: dict[str, Any] = {
        "architecture": platform.machine(),
        "system": platform.system(),
        "cores": count_cores(),
    }
    cpu = re.search(r"(?im)^model name[^:\n]*:(.*)$", read_text(Path("/proc/cpuinfo")))
    facts["cpu"] = cpu[1].strip() if cpu else unknown_fact("/proc/cpuinfo names no model")
    for name, read in (
        ("memory_bytes", lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        ("load_average_1min", lambda: os.getloadavg()[0]),
    ):
        try:
            facts[name] = read()
        except (OSError, ValueError) as error:
            facts[name] = unknown_fact(f"the system does not state it ({first_line(error)})")
    return facts


class Energy:
    """Energy counter of a GPU board (Volta and later), found by its PCI address: joules since the
    driver was loaded.
    """

    def __init__(self, pci_bus_id: str | None):
        self._library = self._device = None
        #: what a record states where no energy was measured; None: of a device without a counter
        self.unknown: str | None = None
        if pci_bus_id is None:
            return
        self.unknown = unknown_fact("NVML does not count it for this device")
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            handle = ctypes.c_void_p()
            find = library.nvmlDeviceGetHandleByPciBusId_v2
            if library.nvmlInit_v2() == 0 and find(pci_bus_id.encode(), ctypes.byref(handle)) == 0:
                self._library = library
                self._device = handle
        except (OSError, AttributeError) as error:
            self.unknown = unknown_fact(f"NVML cannot be asked ({first_line(error)})")

    def joules(self) -> float | None:
        if self._library is None:
            return None
        millijoules = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetTotalEnergyConsumption(
            self._device, ctypes.byref(millijoules)
        ):
            return None
        return millijoules.value / 1e3

    def joules_since(self, before: float | None) -> float | None:
        """Joules since `joules` gave `before`; None where one of the two is not known."""
        now = self.joules()
        return None if now is None or before is None else now - before


#: Environment variables that shape a run: an allow-list, because environments hold secrets
ENVIRONMENT = {
    *(
        "CUDA_VISIBLE_DEVICES",
        "CUBLAS_WORKSPACE_CONFIG",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "RAYON_NUM_THREADS",
    ),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "LD_PRELOAD", "OMP_PROC_BIND"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_JOB_PARTITION", "SLURM_JOB_NUM_NODES"),
}
#: variable that asks for the diff of a changed working tree in the record
KEEP_DIFF = "TOKENSCALE_KEEP_DIFF"
PREFIXES = ("MALLOC_", "NCCL_", "FI_", "TORCH_NCCL_", "GLOO_")
_PACKAGES = (
    "torch numpy pyarrow safetensors tokenizers mistral-common gigatoken xxhash transformers triton"
)
PACKAGES = tuple(_PACKAGES.split())


def find_versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    found = {"python": platform.python_version(), "tokenscale": __version__}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def list_installed() -> dict[str, str]:
    """Return the version of every installed distribution but ours, by its normalized name (PEP
    503), from the names of `.dist-info` folders (PEP 427): reading all metadata takes 0.26 s.
    """
    found: dict[str, str] = {}
    for folder in map(Path, sys.path):
        for info in folder.glob("*.dist-info") if folder.is_dir() else ():
            name, _, version = info.name.removesuffix(".dist-info").partition("-")
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return {name: found[name] for name in sorted(found) if name != "tokenscale"}


def name_differences(then: dict[str, str], now: dict[str, str]) -> list[str]:
    """Describe each package of `then` whose version differs in `now` or is missing: `torch 2.9
    then, 2.13 now`.
    """
    changed = [name for name in sorted(then) if then[name] != now.get(name)]
    return [f"{name} {then[name]} then, {now.get(name, 'none')} now" for name in changed]


def read_git_state() -> tuple[dict[str, Any], str]:
    """Return what git knows of the working tree of this package, and the diff of tracked files and
    of the package's new ones; without git, why the commit is unknown. The diff is empty unless
    `KEEP_DIFF` asks for it: files may hold secrets of any form.
    """

    def git(*arguments: str, fails: bool = False) -> str:
        here = Path(__file__).resolve().parents[2]
        text: Any = {"encoding": "utf-8", "errors": "replace"}
        done = subprocess.run(
            ["git", *arguments], cwd=here, check=not fails, capture_output=True, timeout=20, **text
        )
        return done.stdout

    try:
        commit = git("rev-parse", "HEAD").strip()
        diff = git("diff", "HEAD", "--no-ext-diff", "--no-color")
        changed = git("diff", "HEAD", "--name-only", "-z").split("\0")
        top = git("rev-parse", "--show-toplevel").removesuffix("\n")
        for name in git(
            "ls-files", "--others", "--exclude-standard", "--full-name", "-z", "--", "."
        ).split("\0"):
            if name:  # it ends with 1 where files differ, which these do
                requested = (
                    "-C",
                    top,
                    "diff",
                    "--no-index",
                    "--no-ext-diff",
                    "--no-color",
                    "/dev/null",
                    name,
                )
                diff += git(*requested, fails=True)
                changed.append(name)
    except OSError as error:
        return {"commit": unknown_fact(f"git cannot be run ({error.strerror})")}, ""
    except subprocess.TimeoutExpired:
        return {"commit": unknown_fact("git gave no answer in time")}, ""
    except subprocess.CalledProcessError as error:
        why = f"git {error.cmd[1]} ends with exit code {error.returncode}, as outside of a checkout"
        return {"commit": unknown_fact(why)}, ""
    clean = redact(diff) if os.environ.get(KEEP_DIFF) else ""
    found = {
        "commit": commit,
        "dirty": bool(diff.strip()),
        "changed": sorted(filter(None, changed)),
    }
    for name, text in (("changes_sha256", diff), ("diff_sha256", clean)):
        found[name] = sha256_text(text) if text else None
    # no patch for `git apply` then
    return found | ({"diff_redacted": True} if clean not in ("", diff) else {}), clean


def allowed_environment() -> dict[str, str]:
    family = {k for k in os.environ if k.startswith(PREFIXES) and not SECRET_NAME.search(k)}
    return {
        k: redact_variable(v)
        for k, v in sorted(os.environ.items())
        if k in ENVIRONMENT or k in family
    }


def find_designs(directory: Path) -> dict[str, str]:
    """Return experiment → digest of its design when the run in this folder began: of an earlier
    attempt, or else of the call that started the run. Empty for a run of no experiment.
    """
    for path, keys in (
        (directory / "run.json", [DESIGNS]),
        (directory.parent.parent / INDEX, [directory.name, DESIGNS]),
    ):
        with suppress(UserError, OSError, LookupError, TypeError):
            found = read_json(path)
            for key in keys:
                found = found[key]
            return dict(found)
    return {}


def launched(attempt_directory: Path) -> dict[str, Any]:
    """Return the facts that the launcher wrote for this attempt: digests of its code and inputs."""
    prepared = attempt_directory / "attempt.json"
    return read_record(prepared, what="attempt's record") if prepared.is_file() else {}


def start_record(directory: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Write `<directory>/run.json` with common facts added to `record`, and what changed in the
    working tree.
    """
    git, diff = read_git_state()
    if diff:
        write_text(directory / "dirty.diff", text=diff)
    full = {
        "schema": 1,
        **record,
        "git": git,
        "versions": find_versions(),
        "installed": list_installed(),
        "environment": allowed_environment(),
        "hardware": {**describe_machine(), **record.get("hardware", {})},
        "argv": ["tokenscale", *redact_arguments(sys.argv[1:])],
        DESIGNS: find_designs(directory),
        "outcome": {"status": "running"},
    }
    write_json(directory / "run.json", value=full)
    return full


def log_hashes(directory: Path) -> dict[str, str]:
    """Return the hashes of the logs of all attempts: a resumed run's series is theirs together."""
    files = sorted(directory.glob("attempt=*/rank=*/*.jsonl"))
    return {str(f.relative_to(directory)): sha256_file(f) for f in files}


def seal_record(directory: Path, record: dict[str, Any], outcome: dict[str, Any]) -> None:
    """Write the final record with a digest of its canonical JSON, so that later edits are
    detected.
    """
    write_sealed(directory / "run.json", record=record | {"outcome": outcome})


def read_sealed(path: Path) -> dict[str, Any] | None:
    """Return the record at `path` if it is sealed and unchanged, else None."""
    record = read_json(path, what="run record") if path.is_file() else None
    return record if is_sealed(record) else None
