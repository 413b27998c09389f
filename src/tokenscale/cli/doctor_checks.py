"""Checks of `doctor`, and the types and helpers that they share.

Verdicts: `ok`; `note`, it works with a restriction; `no`, it is missing or does not work. Whether a `no` is a fault
depends on what the user wants to run: `doctor` decides. No check imports a package at the top.
"""

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenscale.base.errors import SECRET_NAME, redact_credentials
from tokenscale.cli import doctor_machine
from tokenscale.cli.doctor_machine import run_command
from tokenscale.cli.doctor_probe import WITH_TORCH
from tokenscale.cli.packages import (
    GROUPS,
    PACKAGES,
    describe_problems,
    installed_version,
    is_importable,
    read_requirements,
    satisfies,
)
from tokenscale.runs.records import hardware
from tokenscale.runs.records.hardware import count_affinity_cores

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """Result of a check: its verdict (ok, note, no), the fact as text and as values, and the next step."""

    verdict: str
    fact: str
    next: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DoctorContext:
    """Options of the user, and the pending results of `doctor_probe` that several checks read."""

    results: Path
    network: bool
    imports: Future
    ranks: Future
    #: GB/s that the machine's file expects inside a node
    least_node_gb_s: float | None = None


def make_finding(fact: str, notes: list[tuple[str, str]], values: dict[str, Any]) -> Finding:
    """Return an `ok` finding, or a `note` with each (reason, next step)."""
    fact = "; ".join([fact, *(why for why, _ in notes)])
    return Finding("note" if notes else "ok", fact, "; ".join(cure for _, cure in notes), values)


def find_stage(context: DoctorContext, name: str) -> tuple[dict[str, Any] | None, Finding | None]:
    """Return (what the ranks reported of a stage, None), or (None, the finding that explains why it is missing)."""
    ranks = context.ranks.result()
    if "version" not in ranks["stages"].get("torch", {}):
        return None, Finding("no", "unknown without torch", "see trainer packages", {"without": "torch"})
    if name not in ranks["stages"]:
        fact = f"the processes that try it ended early: {describe_exits(ranks)}"
        return None, Finding("no", fact, "repeat the command; if it fails again, report it as a bug")
    return ranks["stages"][name], None


def describe_exits(ranks: dict[str, Any]) -> str:
    """Describe how the ranks exited that failed."""
    return ", ".join(dict.fromkeys(ranks["ended"])) or "no result"


#: memory that the demo needs: one rank peaks at 0.69 GB here; two run at a time, beside Snakemake
DEMO_MEMORY = 1_700_000_000


def check_cores(context: DoctorContext) -> Finding:
    """Check the cores that this process may use, by its affinity mask and control groups, not the built-in ones."""
    visible, quota = count_affinity_cores(), hardware.cgroup_limits()[0]
    usable = hardware.usable_cores(visible, quota)
    values = {"usable": usable, "affinity": visible, "quota": quota, "built_in": os.cpu_count()}
    fact = f"{usable} usable of {os.cpu_count()}"
    if quota and quota < visible:
        return Finding(
            "note",
            f"{fact}: a control group allows {quota:g}, but Snakemake's `cores: all` counts all {visible} visible",
            f"snakemake --cores {usable}",
            values,
        )
    return Finding("ok", fact, values=values)


def check_memory(context: DoctorContext) -> Finding:
    """Check main memory: its total, what is available now, and the limit of control groups."""
    total, available = doctor_machine.read_memory()
    limit = hardware.cgroup_limits()[1]
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


def check_shared_memory(context: DoctorContext) -> Finding:
    """Check /dev/shm, which NCCL may use between ranks of one machine."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("note", "no /dev/shm; on Linux, NCCL needs it between GPUs of one machine")
    total, _, free = shutil.disk_usage(folder)
    values = {"total_bytes": total, "free_bytes": free}
    fact = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free in /dev/shm"
    if free < GIB:  # the default in containers is 64 MiB
        return Finding("note", f"{fact}; NCCL with several GPUs needs more", "docker run --shm-size=8g", values)
    return Finding("ok", fact, values=values)


#: the container of trainings on Alps
CONTAINER = Path("profiles/alps/train.toml")


def check_slurm(context: DoctorContext) -> Finding:
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


def check_loopback(context: DoctorContext) -> Finding:
    """Check ports on the loopback interface, where the ranks of one machine rendezvous."""
    errors = {}
    for name, family, address in (("IPv4", socket.AF_INET, "127.0.0.1"), ("IPv6", socket.AF_INET6, "::1")):
        try:
            doctor_machine.check_port(family, address)
        except OSError as error:
            errors[name] = error.strerror or str(error)
    values = {"ipv4": "IPv4" not in errors, "ipv6": "IPv6" not in errors}
    if "IPv4" in errors:
        only = "; IPv6 works, but ranks rendezvous at 127.0.0.1" if values["ipv6"] else ""
        cure = "ip link set lo up && ip address add 127.0.0.1/8 dev lo, or open the firewall for it"
        return Finding("no", f"no port at 127.0.0.1: {errors['IPv4']}{only}", cure, values)
    interfaces = [name for _, name in socket.if_nameindex()] if sys.platform == "linux" else ["lo"]
    if "lo" not in interfaces:
        cure = f"set GLOO_SOCKET_IFNAME to one of {', '.join(interfaces)}"
        return Finding("note", "a port at 127.0.0.1 works, but no interface is named lo", cure, values)
    ipv6 = "works, too" if values["ipv6"] else "does not work, and is not needed"
    return Finding("ok", f"a free port at 127.0.0.1 accepts a connection; IPv6 {ipv6}", values=values)


def check_hub(context: DoctorContext) -> Finding:
    """Check the connection to the Hugging Face hub, only with --network. The demo needs no network."""
    if not context.network:
        return Finding("ok", "not tried (--network tries the hub); the demo needs no network after the install")
    import urllib.error
    import urllib.request

    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if not address.lower().startswith(("http://", "https://")):
        return Finding("no", f"HF_ENDPOINT is not a web address: {address}", "unset HF_ENDPOINT", {"reached": False})
    start = time.monotonic()
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        pass  # any HTTP status is a response
    except Exception as error:
        fact = redact_credentials(f"{address} cannot be reached: {getattr(error, 'reason', None) or error}")
        cure = "needed only for tokenizers and texts on the hub: download them elsewhere and give their folder"
        return Finding("no", fact, cure, {"reached": False})
    fact = f"{redact_credentials(address)} responds in {time.monotonic() - start:.1f} s"
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return Finding("note", f"{fact}; HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE to use it", {"reached": True})
    return Finding("ok", fact, values={"reached": True})


#: disk space that the demo needs: twice the size of its results (43 MB)
DEMO_DISK = 100_000_000


def check_results_folder(context: DoctorContext) -> Finding:
    """Check the file system of the results: free space, and the operations that the project relies on."""
    folder = doctor_machine.find_existing_parent(context.results)
    trial = doctor_machine.try_folder(folder)
    found = doctor_machine.find_file_system(folder)
    kind = found[0] if found else "unknown"
    room, fact = _measure_room(folder)
    values = {"folder": str(folder), "file_system": kind, **room, **trial}
    where = str(context.results) if folder == context.results.absolute() else f"{context.results} (does not exist yet)"
    fact = f"{where}, file system {kind}, {fact}"
    if trial["failed"]:
        failed = "; ".join(f"{step} fails: {why}" for step, why in trial["failed"].items())
        cure = "choose another folder or file system"
        if "flock" in trial["failed"] and kind == "lustre":
            cure = "request a mount with the option flock"
        elif "create" in trial["failed"]:
            cure = "make it writable, or use a writable folder"
        return Finding("no", f"{fact}; {failed}", cure, values)
    fact += "; rename, fsync, flock and memory map work"
    if room["free_bytes"] < DEMO_DISK:
        return Finding("no", fact, f"free {DEMO_DISK / 1e6:.0f} MB: the demo's results take half of it", values)
    notes = []
    if kind in doctor_machine.MEMORY_FILE_SYSTEMS:
        notes.append(("it is in memory: lost on reboot", "copy important results to a disk"))
    if kind == "overlay":
        notes.append(("it is inside a container and is lost with it", "mount a folder of the host here"))
    if kind in doctor_machine.NETWORK_FILE_SYSTEMS or kind.startswith("fuse"):
        notes.append(("files of other nodes appear late", "snakemake --latency-wait 60, as profiles/alps has it"))
    if abs(trial["clock_skew_s"] or 0.0) > 1.0:
        skew = (
            f"its clock is {trial['clock_skew_s']:+.0f} s off this machine's clock, and Snakemake compares file times"
        )
        notes.append((skew, "synchronize both clocks with NTP"))
    if (trial["fsync_s"] or 0.0) > 1.0:
        notes.append((f"fsync takes {trial['fsync_s']:.1f} s", "use a faster disk, or wait until it is idle"))
    if room["free_bytes"] < 20 * DEMO_DISK:
        notes.append(("little free space beyond the demo", "free some space"))
    if room["free_files"] is not None and room["free_files"] < 10_000:
        notes.append((f"room for only {room['free_files']} more files", "remove files that are not needed"))
    return make_finding(fact, notes, values)


def _measure_room(folder: Path) -> tuple[dict[str, Any], str]:
    free = shutil.disk_usage(folder).free
    status = os.statvfs(folder)
    files = status.f_favail if status.f_files else None  # file systems without a fixed number report 0
    return {"free_bytes": free, "free_files": files}, f"{free / GIB:.1f} GiB free"


def check_environment(context: DoctorContext) -> Finding:
    """Check environment variables that change the behaviour of processes."""
    ranks = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
    names = "CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|MASTER_(ADDR|PORT)|PYTHON(PATH|OPTIMIZE)"
    families = rf"(NCCL|GLOO|FI|TORCH|PYTORCH|HF)_(?!.*({SECRET_NAME.pattern}))\w+"
    others = {n: value for n, value in sorted(os.environ.items()) if re.fullmatch(f"{names}|{families}", n)}
    values = {"variables": {name: redact_credentials(value) for name, value in (ranks | others).items()}}
    fact = ", ".join(f"{n}={value}" for n, value in values["variables"].items()) or "nothing that changes training"
    if {"RANK", "WORLD_SIZE"} <= ranks.keys():  # `train` detects torchrun by these; our own launcher removes them
        hint = "unset RANK WORLD_SIZE: with them, `train` acts as a rank of torchrun; runs of the workflow ignore them"
        return Finding("note", fact, hint, values)
    if "PYTHONOPTIMIZE" in others:
        return Finding("note", fact, "unset PYTHONOPTIMIZE: tests need assert statements", values)
    return Finding("ok", fact, values=values)


def check_project_folder(context: DoctorContext) -> Finding:
    """Check that this folder is the project's: the workflow is in the repository, not in the package."""
    needed = ("workflow/Snakefile", "config/config.yaml", "profiles/local/config.yaml", "pyproject.toml")
    missing = [name for name in needed if not Path(name).is_file()]
    if missing:
        return Finding("no", f"not in this folder: {', '.join(missing)}", "cd to a clone of the repository")
    if not Path("alps/config.yaml").is_file():  # a download or a file system without symbolic links
        return Finding("note", "the link `alps` does not point to profiles/alps", "ln -sfn profiles/alps alps")
    return Finding("ok", "workflow, configuration and profiles are here")


def check_configuration(context: DoctorContext) -> Finding:
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
        return Finding("no", f"{error.what} {facts}", error.facts.get("next", "python -m tokenscale check"))
    most = max((run.settings.layout.world_size for run in runs.values()), default=1)
    on_gpus = max((r.settings.layout.world_size for r in runs.values() if r.settings.device == "auto"), default=0)
    names = ", ".join(config.settings.experiments)
    return Finding(
        "ok",
        f"scale {config.settings.scale}, experiments {names}: {len(runs)} runs of at most {most} ranks",
        values={"scale": config.settings.scale, "runs": len(runs), "ranks": most, "gpu_ranks": on_gpus},
    )


def check_python(context: DoctorContext) -> Finding:
    """Check the version of Python that runs this command."""
    version, wanted = platform.python_version(), read_requirements().get("python", "")
    values = {"version": version, "wanted": wanted, "executable": sys.executable}
    if not wanted:
        hint = "tokenscale is not installed here, and pyproject.toml is not found or not readable"
        return Finding("note", f"{version}; the required version is unknown", hint, values)
    if not satisfies(version, wanted):
        return Finding(
            "no", f"{version}; {wanted} is required", f"make setup PYTHON={_find_supported_python(wanted)}", values
        )
    place = "in a virtual environment" if sys.prefix != sys.base_prefix else "not in a virtual environment"
    return Finding("ok", f"{version} ({wanted}), {place}", values=values)


def _find_supported_python(wanted: str) -> str:
    """Return the name of a supported Python on PATH that can create environments, or of one to install."""
    code = "import ensurepip, platform; print(platform.python_version())"
    for name in (f"python3.{minor}" for minor in (13, 12, 11, 14)):
        try:  # pyenv has commands for versions that are not active: run it
            done = subprocess.run([name, "-c", code], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and satisfies(done.stdout.strip(), wanted):
            return name
    return "python3.13, once it is installed (`uv python install 3.13` or https://www.python.org/downloads)"


def check_packages(group: str, context: DoctorContext) -> Finding:
    """Check that the packages of one import group are installed, within bounds, and importable."""
    wanted, broken = read_requirements(), dict(context.imports.result())
    tried_by_ranks = {p.module for p in PACKAGES if p.group == group} & {"torch", *WITH_TORCH}
    for module in sorted(filter(is_importable, tried_by_ranks)):
        ranks = context.ranks.result()
        if module == "torch" or "version" in ranks["stages"].get("torch", {}):  # without torch, nothing else was tried
            stage = ranks["stages"].get(module, {"error": f"importing it kills Python: {describe_exits(ranks)}"})
            broken |= {module: stage["error"]} if "error" in stage else {}
    found = {}
    for package in (p for p in PACKAGES if p.group == group):
        name, bounds = package.distribution, wanted.get(package.distribution, "")
        version = installed_version(name)
        if not is_importable(package.module):
            state, text = "missing", f"{name} is missing"
        elif package.module in broken:
            state, text = "broken", f"{name} {version or ''} does not import: {broken[package.module]}"
        elif version and not satisfies(version, bounds):
            state, text = "outside", f"{name} {version} is outside {bounds}"
        else:
            state, text = "ok", f"{name} {version or 'of unknown version'}" + (f" ({bounds})" if bounds else "")
        found[name] = {"version": version, "wanted": bounds, "only": package.only, "state": state, "text": text}
    wrong, fact = {name: p for name, p in found.items() if p["state"] != "ok"}, f"for {GROUPS[group]}"
    if not wrong:
        return Finding("ok", f"{fact}: " + ", ".join(p["text"] for p in found.values()), values={"packages": found})
    fine = [name for name in found if name not in wrong]
    fact += f", {describe_problems(wrong)}" + (f"; fine: {', '.join(fine)}" if fine else "")
    cure = " ".join(f"'{name}{p['wanted']}'" for name, p in wrong.items())
    if any(p["state"] == "broken" for p in wrong.values()):
        cure = f"--force-reinstall {cure}"
    elif not fine and Path("src/tokenscale").is_dir():
        cure = "-e '.[test]'"  # no package was installed at all
    only = all(p["only"] for p in wrong.values())
    return Finding("note" if only else "no", fact, f"{python_command()} -m pip install {cure}", {"packages": found})


def check_tools(context: DoctorContext) -> Finding:
    """Check the programs that the commands of the README call."""
    found = {name: shutil.which(name) is not None for name in ("make", "git")}
    parts = []
    if not found["make"]:
        parts.append(f"`{python_command()} -m snakemake --profile profiles/local` replaces `make run`")
    if not found["git"]:
        parts.append("install git: without it results do not name their commit, and some tests fail")
    listing = ", ".join(f"{name} {'found' if there else 'not found'}" for name, there in found.items())
    return Finding("note" if parts else "ok", listing, "; ".join(parts), found)


def python_command() -> str:
    """Return the path of this Python, relative to the working folder if it is inside."""
    executable = Path(sys.executable)
    return str(executable.relative_to(Path.cwd())) if executable.is_relative_to(Path.cwd()) else str(executable)


def check_gpus(context: DoctorContext) -> Finding:
    """Check the GPUs that torch and the driver see."""
    driver = query_driver()
    there = len(driver["names"])
    seen = f"the driver sees {there} ({', '.join(dict.fromkeys(driver['names']))})" if there else driver["text"]
    stage, problem = find_stage(context, "devices")
    if problem:
        return Finding("no", f"{seen}; GPUs seen by torch: {problem.fact}", problem.next, {"driver": driver})
    torch, devices = context.ranks.result()["stages"]["torch"], stage.get("devices", [])
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['rocm']}" if torch["rocm"] else None
    values = {"devices": devices, "driver": driver}
    if devices:
        names = [f"{d['name']} ({d['memory_bytes'] / GIB:.0f} GiB, capability {d['capability']})" for d in devices]
        fact = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) + f"; torch for {build}"
        fact += f", driver {driver['version']}" if driver["version"] else ""
        if failing := [f"GPU {n}: {d['error']}" for n, d in enumerate(devices) if "error" in d]:
            return Finding("no", f"{fact}; {'; '.join(failing)}", "install a torch built for this GPU", values)
        if there > len(devices):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            return Finding("note", f"{fact}; {seen}; CUDA_VISIBLE_DEVICES is {visible}", values=values)
        return Finding("ok", fact, values=values)
    if not there:
        return Finding("no", f"none: {seen}; training runs on the CPU", values=values)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if build is None:
        why, cure = (
            f"torch {torch['version']} is a build for CPUs",
            "make setup without PIP_ARGS installs a build for CUDA",
        )
    elif hidden is not None:
        why, cure = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them", "unset CUDA_VISIBLE_DEVICES"
    else:
        why = f"torch for {build} cannot use them: {stage.get('reason') or stage.get('error') or 'it gives no reason'}"
        cure = "update the driver, or install a torch for an older CUDA"
    return Finding("no", f"{seen}, but {why}; training runs on the CPU", cure, values)


def query_driver() -> dict[str, Any]:
    """Query NVIDIA's driver for its GPUs and its version; `text` explains why there are none."""
    if shutil.which("nvidia-smi"):
        code, text = run_command(["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"])
        if code == 0 and text:
            rows = [line.split(", ", 1) for line in text.splitlines() if ", " in line]
            return {"names": [row[1] for row in rows], "version": rows[0][0] if rows else "", "text": ""}
        first = text.splitlines()[0] if text else "it lists no GPU"
        return {"names": [], "version": "", "text": f"nvidia-smi fails: {first}"}
    version = re.search(r"\d+\.\d+(\.\d+)?", hardware.read_text(Path("/proc/driver/nvidia/version")))
    if version:
        return {"names": [], "version": version[0], "text": f"driver {version[0]}, but nvidia-smi is not found"}
    return {"names": [], "version": "", "text": "no GPU driver found (nvidia-smi)"}


def check_bf16(context: DoctorContext) -> Finding:
    """Check whether the device that training would use computes natively in bf16."""
    stage, problem = find_stage(context, "bf16 on the CPU")
    if problem:
        return problem
    devices = context.ranks.result()["stages"].get("devices", {}).get("devices", [])
    if without := [d["name"] for d in devices if not d.get("bf16")]:
        return Finding("note", f"{without[0]} has no bf16 units: slow", "use precision: fp32", {"native": False})
    if devices:
        return Finding("ok", "on the GPU", values={"native": True})
    if "error" in stage:
        return Finding("no", f"fails on the CPU: {stage['error']}", "use precision: fp32")
    units = sorted(doctor_machine.read_cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
    if units:
        return Finding("ok", f"on the CPU, which has {', '.join(units)}", values={"native": True})
    fact = "works on the CPU without native instructions: slow"
    return Finding("note", fact, "use precision: fp32", {"native": False})


def check_gloo(context: DoctorContext) -> Finding:
    """Check an all-reduce over two processes on the loopback interface with gloo."""
    return _check_collective(context, "gloo", "set up the loopback interface; see loopback")


def check_nccl(context: DoctorContext) -> Finding:
    """Check an all-reduce on the first one or two GPUs with NCCL."""
    stage, problem = find_stage(context, "torch")
    if problem:
        return problem
    if not stage["nccl"]:
        return Finding("no", f"not in this build of torch ({stage['version']}); needed only for GPUs")
    if not context.ranks.result()["stages"].get("devices", {}).get("devices"):
        return Finding("no", "in this build of torch, but torch sees no GPU")
    return _check_collective(
        context, "nccl", "NCCL_DEBUG=INFO shows why; NCCL_P2P_DISABLE=1 often helps if GPUs cannot reach each other"
    )


def _check_collective(context: DoctorContext, backend: str, cure: str) -> Finding:
    stage, problem = find_stage(context, backend)
    if problem:
        return problem
    if "error" in stage:
        return Finding("no", f"an all-reduce fails: {stage['error']}", cure)
    ranks = "1 rank" if stage["ranks"] == 1 else f"{stage['ranks']} ranks"
    fact, rate, least = f"{ranks} completed an all-reduce in {stage['seconds']:.2f} s", stage["gb_s"], None
    if rate is not None:
        fact += f", at {rate:.3g} GB/s once connected"
        least = context.least_node_gb_s if backend == "nccl" else None
    if least is not None and rate < least:
        fact += f": the machine's file expects at least {least:g} GB/s (least_node_gb_s), and trainings would stop"
        return Finding("note", fact, "nvidia-smi topo -m shows how the GPUs are joined", stage)
    return Finding("ok", fact, values=stage)
