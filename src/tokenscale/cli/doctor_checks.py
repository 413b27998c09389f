"""What a check of `doctor` finds, what each is given, and what several of them need.

Verdicts: `ok`; `note`, it works but there is something to know; `no`, it is not there or does not work. A `no` is a
fault only where something wanted depends on it: that is for `doctor` to say. No check imports a package at the top.
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

from tokenscale.base.errors import without_password
from tokenscale.cli import doctor_machine as machine
from tokenscale.cli.doctor_machine import output_of
from tokenscale.cli.doctor_probe import WITH_TORCH
from tokenscale.cli.packages import GROUPS, PACKAGES, describe_problems, importable, requirements, satisfies, version_of
from tokenscale.runs.records import hardware
from tokenscale.runs.records.hardware import affinity
from tokenscale.runs.records.provenance import SECRET

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """What a check found: a verdict (ok, note, no), the fact, what to do next, and the fact as values."""

    verdict: str
    fact: str
    next: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DoctorContext:
    """What the user asked for, and what `probe` tries meanwhile: several checks read it."""

    results: Path
    network: bool
    imports: Future
    ranks: Future


def noted(fact: str, notes: list[tuple[str, str]], values: dict[str, Any]) -> Finding:
    """`ok`, or `note` with each (reason, next step)."""
    fact = "; ".join([fact, *(why for why, _ in notes)])
    return Finding("note" if notes else "ok", fact, "; ".join(cure for _, cure in notes), values)


def stage_of(context: DoctorContext, name: str) -> tuple[dict[str, Any] | None, Finding | None]:
    """What the ranks say of a stage, or why they say nothing."""
    ranks = context.ranks.result()
    if "version" not in ranks["stages"].get("torch", {}):
        return None, Finding("no", "not known without torch", "see trainer packages", {"without": "torch"})
    if name not in ranks["stages"]:
        fact = f"the processes that try it ended early: {endings(ranks)}"
        return None, Finding("no", fact, "try it again; if it stays, report it")
    return ranks["stages"][name], None


def endings(ranks: dict[str, Any]) -> str:
    """How the ranks ended that did not end well."""
    return ", ".join(dict.fromkeys(ranks["ended"])) or "no answer"


#: what the demo takes: a rank of it peaks at 0.69 GB here, two run at once beside Snakemake
DEMO_MEMORY = 1_700_000_000


def cpu(context: DoctorContext) -> Finding:
    """Cores that may work at once: of the affinity mask and of control groups, not those that are built in."""
    visible, quota = affinity(), hardware.cgroup_limits()[0]
    usable = hardware.usable_cores(visible, quota)
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


def main_memory(context: DoctorContext) -> Finding:
    """Main memory: of the machine, available now, and what control groups leave."""
    total, available = machine.memory()
    limit = hardware.cgroup_limits()[1]
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


def shared_memory(context: DoctorContext) -> Finding:
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


#: the container of trainings on Alps
CONTAINER = Path("profiles/alps/train.toml")


def slurm(context: DoctorContext) -> Finding:
    """SLURM's programs, whether its controller and its accounting answer, and the account of the profile `alps`."""
    found = {name: shutil.which(name) is not None for name in ("sbatch", "srun", "sacct", "squeue", "sinfo")}
    job, account = os.environ.get("SLURM_JOB_ID"), os.environ.get("ALPS_ACCOUNT")
    values: dict[str, Any] = {"programs": found, "job": job, "account": account, "controller": None}
    inside = f"inside job {job}" if job else ""
    missing = [name for name in ("sbatch", "srun") if not found[name]]
    if missing:
        fact = f"{' and '.join(missing)} not found" + (f" {inside}" if inside else "")
        cure = "go to a cluster's login node; a dry run works without: snakemake --profile alps -n"
        return Finding("no", f"{fact}; needed only for --profile alps", cure, values)
    version = output_of(["sbatch", "--version"])[1]
    fact = ", ".join(filter(None, [version or "of unknown version", inside]))
    if found["sinfo"]:
        code, text = output_of(["sinfo", "--noheader", "--format=%P"])
        values["controller"] = code == 0
        if code != 0:
            first = text.splitlines()[0] if text else f"exit code {code}"
            fact += f"; its controller does not answer: {first}"
            return Finding("no", fact, "scontrol ping; then ask its administrators", values)
        fact += f", partitions {', '.join(dict.fromkeys(text.split()))}"
    notes = []
    if not account:
        notes.append(("ALPS_ACCOUNT is not set", "export ALPS_ACCOUNT=<project>"))
    elif image := missing_image():
        notes.append((f"the image of trainings is missing: {image}", "build it: profiles/alps/README.md, step 5"))
    if output_of(["sacct", "-X", "--noheader", "--format=JobIdRaw"])[0] != 0:
        notes.append(
            ("sacct gives no answer: Snakemake would wait for ever", "snakemake --slurm-status-command squeue")
        )
    if inside:
        notes.append(("Snakemake submits jobs of its own", "start it outside of a job"))
    return noted(fact, notes, values)


def missing_image() -> str | None:
    """The image that the container's file names, where it should be and is not: CSCS deletes what nobody touches."""
    stated = re.search(r'^image = "(.+)"$', CONTAINER.read_text(), re.M) if CONTAINER.is_file() else None
    path = os.path.expandvars(stated[1]) if stated else ""
    # a variable without a value: this is not Alps; `#`: an address
    return path if path and not set("$#") & set(path) and not Path(path).exists() else None


def loopback(context: DoctorContext) -> Finding:
    """Ports on the loopback interface, where the ranks of one machine meet."""
    errors = {}
    for name, family, address in (("IPv4", socket.AF_INET, "127.0.0.1"), ("IPv6", socket.AF_INET6, "::1")):
        try:
            machine.talk(family, address)
        except OSError as error:
            errors[name] = error.strerror or str(error)
    values = {"ipv4": "IPv4" not in errors, "ipv6": "IPv6" not in errors}
    if "IPv4" in errors:
        only = "; IPv6 works, but ranks meet at 127.0.0.1" if values["ipv6"] else ""
        cure = "ip link set lo up && ip address add 127.0.0.1/8 dev lo, or let the firewall pass it"
        return Finding("no", f"no port at 127.0.0.1: {errors['IPv4']}{only}", cure, values)
    interfaces = [name for _, name in socket.if_nameindex()] if sys.platform == "linux" else ["lo"]
    if "lo" not in interfaces:
        cure = f"set GLOO_SOCKET_IFNAME to one of {', '.join(interfaces)}"
        return Finding("note", "a port at 127.0.0.1 works, but no interface is named lo", cure, values)
    ipv6 = "works too" if values["ipv6"] else "does not, and is not needed"
    return Finding("ok", f"a free port at 127.0.0.1 takes a connection; IPv6 {ipv6}", values=values)


def hub(context: DoctorContext) -> Finding:
    """The hub of tokenizers and texts, and only when asked: after the install nothing of the demo needs a network."""
    if not context.network:
        return Finding("ok", "not tried (--network tries the hub); after the install the demo needs none")
    import urllib.error
    import urllib.request

    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if not address.lower().startswith(("http://", "https://")):
        return Finding("no", f"HF_ENDPOINT is no web address: {address}", "unset HF_ENDPOINT", {"reached": False})
    start = time.monotonic()
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except Exception as error:
        fact = without_password(f"{address} cannot be reached: {getattr(error, 'reason', None) or error}")
        cure = "needed only for tokenizers and texts by a name on the hub: fetch them elsewhere, name their folder"
        return Finding("no", fact, cure, {"reached": False})
    fact = f"{without_password(address)} answers in {time.monotonic() - start:.1f} s"
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return Finding("note", f"{fact}; HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE to use it", {"reached": True})
    return Finding("ok", fact, values={"reached": True})


#: twice what the demo's results come to (43 MB)
DEMO_DISK = 100_000_000


def results_folder(context: DoctorContext) -> Finding:
    """The file system that results go to: room, and whether what the project relies on works there."""
    folder = machine.existing(context.results)
    trial = machine.try_folder(folder)
    found = machine.file_system_of(folder)
    kind = found[0] if found else "unknown"
    room, fact = _room(folder)
    values = {"folder": str(folder), "file_system": kind, **room, **trial}
    where = str(context.results) if folder == context.results.absolute() else f"{context.results} (not there yet)"
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


def _room(folder: Path) -> tuple[dict[str, Any], str]:
    free = shutil.disk_usage(folder).free
    status = os.statvfs(folder)
    files = status.f_favail if status.f_files else None  # file systems without a fixed number say 0
    return {"free_bytes": free, "free_files": files}, f"{free / GIB:.1f} GiB free"


def environment(context: DoctorContext) -> Finding:
    """Variables of the environment that change what processes do."""
    ranks = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
    names = "CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|MASTER_(ADDR|PORT)|PYTHON(PATH|OPTIMIZE)"
    families = rf"(NCCL|GLOO|FI|TORCH|PYTORCH|HF)_(?!.*({SECRET.pattern}))\w+"
    others = {n: value for n, value in sorted(os.environ.items()) if re.fullmatch(f"{names}|{families}", n)}
    values = {"variables": {name: without_password(value) for name, value in (ranks | others).items()}}
    fact = ", ".join(f"{n}={value}" for n, value in values["variables"].items()) or "nothing that changes training"
    if {"RANK", "WORLD_SIZE"} <= ranks.keys():  # what `train` knows torchrun by; our own launcher takes them away
        hint = "unset RANK WORLD_SIZE: `train` takes itself for a rank of torchrun's; runs of the workflow do not"
        return Finding("note", fact, hint, values)
    if "PYTHONOPTIMIZE" in others:
        return Finding("note", fact, "unset PYTHONOPTIMIZE: tests without assert prove nothing", values)
    return Finding("ok", fact, values=values)


def folder(context: DoctorContext) -> Finding:
    """Whether this folder is the project's: the workflow lies in the repository, not in the package."""
    needed = ("workflow/Snakefile", "config/config.yaml", "profiles/local/config.yaml", "pyproject.toml")
    missing = [name for name in needed if not Path(name).is_file()]
    if missing:
        return Finding("no", f"not in this folder: {', '.join(missing)}", "cd to the clone of the repository")
    if not Path("alps/config.yaml").is_file():  # a download without links, or a file system without them
        return Finding("note", "the link `alps` does not lead to profiles/alps", "ln -sfn profiles/alps alps")
    return Finding("ok", "workflow, configuration and profiles are here")


def configuration(context: DoctorContext) -> Finding:
    """What the configuration asks for, as the workflow would read it."""
    if not importable("pydantic") or not importable("yaml"):
        return Finding("no", "not known without pydantic and pyyaml", "see host packages", {"without": "pydantic"})
    if not Path("config/config.yaml").is_file():
        return Finding("no", "not known outside of the project's folder", "see project", {"without": "project"})
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


def python(context: DoctorContext) -> Finding:
    """The version of Python that runs this."""
    version, wanted = platform.python_version(), requirements().get("python", "")
    values = {"version": version, "wanted": wanted, "executable": sys.executable}
    if not wanted:
        hint = "tokenscale is not installed here, and pyproject.toml is not found or not readable"
        return Finding("note", f"{version}; which one is needed is not known", hint, values)
    if not satisfies(version, wanted):
        return Finding("no", f"{version}; {wanted} is needed", f"make setup PYTHON={_supported_python(wanted)}", values)
    place = "in a virtual environment" if sys.prefix != sys.base_prefix else "not in a virtual environment"
    return Finding("ok", f"{version} ({wanted}), {place}", values=values)


def _supported_python(wanted: str) -> str:
    """The name of a Python on PATH that the bounds allow and that can make environments, or of one to install."""
    code = "import ensurepip, platform; print(platform.python_version())"
    for name in (f"python3.{minor}" for minor in (13, 12, 11, 14)):
        try:  # found is not enough: pyenv has commands for versions that are not in use
            done = subprocess.run([name, "-c", code], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and satisfies(done.stdout.strip(), wanted):
            return name
    return "python3.13, once it is installed (`uv python install 3.13` or https://www.python.org/downloads)"


def packages(group: str, context: DoctorContext) -> Finding:
    """The packages of one import group: found, within bounds, and importable."""
    wanted, broken = requirements(), dict(context.imports.result())
    tried_by_ranks = {p.module for p in PACKAGES if p.group == group} & {"torch", *WITH_TORCH}
    for module in sorted(filter(importable, tried_by_ranks)):
        ranks = context.ranks.result()
        if module == "torch" or "version" in ranks["stages"].get("torch", {}):  # without torch nothing else was tried
            stage = ranks["stages"].get(module, {"error": f"importing it ends Python: {endings(ranks)}"})
            broken |= {module: stage["error"]} if "error" in stage else {}
    found = {}
    for package in (p for p in PACKAGES if p.group == group):
        name, bounds = package.distribution, wanted.get(package.distribution, "")
        version = version_of(name)
        if not importable(package.module):
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
        cure = "-e '.[test]'"  # nothing was installed at all
    only = all(p["only"] for p in wrong.values())
    return Finding("note" if only else "no", fact, f"{this_python()} -m pip install {cure}", {"packages": found})


def tools(context: DoctorContext) -> Finding:
    """Programs that the commands of the README call."""
    found = {name: shutil.which(name) is not None for name in ("make", "git")}
    parts = []
    if not found["make"]:
        parts.append(f"`{this_python()} -m snakemake --profile profiles/local` does what `make run` does")
    if not found["git"]:
        parts.append("install git: without it results do not name their commit, and some tests fail")
    listing = ", ".join(f"{name} {'found' if there else 'not found'}" for name, there in found.items())
    return Finding("note" if parts else "ok", listing, "; ".join(parts), found)


def this_python() -> str:
    """How to call the Python that runs this, from here."""
    executable = Path(sys.executable)
    return str(executable.relative_to(Path.cwd())) if executable.is_relative_to(Path.cwd()) else str(executable)


def gpu(context: DoctorContext) -> Finding:
    """GPUs as torch sees them, and as the driver does."""
    driver = driver_gpus()
    there = len(driver["names"])
    seen = f"the driver sees {there} ({', '.join(dict.fromkeys(driver['names']))})" if there else driver["text"]
    stage, problem = stage_of(context, "devices")
    if problem:
        return Finding("no", f"{seen}; what torch sees is {problem.fact}", problem.next, {"driver": driver})
    torch, devices = context.ranks.result()["stages"]["torch"], stage.get("devices", [])
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['rocm']}" if torch["rocm"] else None
    values = {"devices": devices, "driver": driver}
    if devices:
        names = [f"{d['name']} ({d['memory_bytes'] / GIB:.0f} GiB, capability {d['capability']})" for d in devices]
        fact = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) + f"; torch for {build}"
        fact += f", driver {driver['version']}" if driver["version"] else ""
        if failing := [f"GPU {n}: {d['error']}" for n, d in enumerate(devices) if "error" in d]:
            return Finding("no", f"{fact}; {'; '.join(failing)}", "install a torch that is built for this GPU", values)
        if there > len(devices):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            return Finding("note", f"{fact}; {seen}; CUDA_VISIBLE_DEVICES is {visible}", values=values)
        return Finding("ok", fact, values=values)
    if not there:
        return Finding("no", f"none: {seen}; training runs on the CPU", values=values)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if build is None:
        why, cure = f"torch {torch['version']} is a build for CPUs", "make setup without PIP_ARGS: a build for CUDA"
    elif hidden is not None:
        why, cure = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them", "unset CUDA_VISIBLE_DEVICES"
    else:
        why = f"torch for {build} cannot use them: {stage.get('reason') or stage.get('error') or 'it does not say why'}"
        cure = "renew the driver, or install a torch for an older CUDA"
    return Finding("no", f"{seen}, but {why}; training runs on the CPU", cure, values)


def driver_gpus() -> dict[str, Any]:
    """GPUs that NVIDIA's driver names, its version, and in words where there are none."""
    if shutil.which("nvidia-smi"):
        code, text = output_of(["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"])
        if code == 0 and text:
            rows = [line.split(", ", 1) for line in text.splitlines() if ", " in line]
            return {"names": [row[1] for row in rows], "version": rows[0][0] if rows else "", "text": ""}
        first = text.splitlines()[0] if text else "it names no GPU"
        return {"names": [], "version": "", "text": f"nvidia-smi is here, but: {first}"}
    version = re.search(r"\d+\.\d+(\.\d+)?", hardware.text_of(Path("/proc/driver/nvidia/version")))
    if version:
        return {"names": [], "version": version[0], "text": f"driver {version[0]}, but nvidia-smi is not found"}
    return {"names": [], "version": "", "text": "no driver of a GPU is found (nvidia-smi)"}


def bf16(context: DoctorContext) -> Finding:
    """Whether the device that training would use computes in bf16 by itself."""
    stage, problem = stage_of(context, "bf16 on the CPU")
    if problem:
        return problem
    devices = context.ranks.result()["stages"].get("devices", {}).get("devices", [])
    if without := [d["name"] for d in devices if not d.get("bf16")]:
        return Finding("note", f"{without[0]} has no bf16 units: slow", "use precision: fp32", {"native": False})
    if devices:
        return Finding("ok", "on the GPU", values={"native": True})
    if "error" in stage:
        return Finding("no", f"does not work on the CPU: {stage['error']}", "use precision: fp32")
    units = sorted(machine.cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
    if units:
        return Finding("ok", f"on the CPU, which has {', '.join(units)}", values={"native": True})
    fact = "works on the CPU, which has no instructions for it: slow"
    return Finding("note", fact, "use precision: fp32", {"native": False})


def gloo(context: DoctorContext) -> Finding:
    """A sum over two processes on the loopback interface, as ranks on CPUs make it."""
    return _collective(context, "gloo", "set up the loopback interface; see loopback")


def nccl(context: DoctorContext) -> Finding:
    """A sum on the first GPU, or over the first two."""
    stage, problem = stage_of(context, "torch")
    if problem:
        return problem
    if not stage["nccl"]:
        return Finding("no", f"not in this build of torch ({stage['version']}); needed only for GPUs")
    if not context.ranks.result()["stages"].get("devices", {}).get("devices"):
        return Finding("no", "in this build of torch, but torch sees no GPU")
    return _collective(
        context, "nccl", "NCCL_DEBUG=INFO says why; NCCL_P2P_DISABLE=1 often helps where GPUs cannot reach each other"
    )


def _collective(context: DoctorContext, backend: str, cure: str) -> Finding:
    stage, problem = stage_of(context, backend)
    if problem:
        return problem
    if "error" in stage:
        return Finding("no", f"a sum over ranks fails: {stage['error']}", cure)
    ranks = "1 rank" if stage["ranks"] == 1 else f"{stage['ranks']} ranks"
    return Finding("ok", f"{ranks} met and summed in {stage['seconds']:.2f} s", values=stage)
