"""Report what this machine has and lacks. Exit code 0 if `make run` can run here, else 2.

Verdicts: `ok`; `note`, it works with a restriction; `no`, it is missing or does not work. Packages
are imported in a child process, because any may be missing or broken.
"""

import argparse
import errno
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenscale import __version__
from tokenscale.base.errors import as_typed
from tokenscale.base.processes import reaches_itself
from tokenscale.base.wording import format_bytes, wrap_text
from tokenscale.runs.launch.cluster import SINFO, parse_partitions
from tokenscale.runs.records import provenance

#: time limit of a child process; a first import from a busy network disk is slow
LIMIT_S = 60.0
#: beginning of a line in which the child process reports to its parent
MARK = "tokenscale doctor: "
#: group of packages → its distributions
GROUPS = {
    "host": (
        "snakemake snakemake-executor-plugin-slurm pyyaml packaging pygments requests urllib3 "
        "huggingface-hub"
    ),
    "trainer": "torch numpy pydantic pyarrow safetensors tokenizers mistral-common tiktoken gigatoken "
    "xxhash zstandard "
    "transformers",
    "report": "duckdb pandas matplotlib jinja2 pypdf sacrebleu",
}
PURPOSES = {"host": "the workflow", "trainer": "training", "report": "the report"}
#: distribution → the only feature that needs it
ONLY = {
    "snakemake-executor-plugin-slurm": "SLURM",
    "packaging": "doctor",
    "pygments": "snakemake --report",
}
ONLY |= dict.fromkeys(("requests", "urllib3", "huggingface-hub"), "downloads")
ONLY |= {
    "zstandard": "reading compressed MDS shards",
    "transformers": "its models",
    "sacrebleu": "BLEU",
}
#: bytes of memory that the demo needs: a rank peaks at 0.69 GB, two run at a time; and of disk:
#: twice its results
DEMO_MEMORY = 1_700_000_000
DEMO_DISK = 100_000_000
#: types of file systems, as the kernel names them
NETWORK_FILE_SYSTEMS = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "afs",
    "9p",
    "virtiofs",
)


@dataclass(frozen=True)
class Finding:
    """Result of a check: its verdict (ok, note, no), the fact as text and as values, and the next
    step.
    """

    verdict: str
    fact: str
    next: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """What checks share: the results folder, and what the child process reported.

    `broken`: module → error of its import. `torch`: its version, builds and GPUs. `ended`: how the
    child failed, or "".
    """

    results: Path = Path("results")
    broken: dict[str, str] = field(default_factory=dict)
    torch: dict[str, Any] = field(default_factory=dict)
    ended: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", type=Path, default=Path("results"), metavar="DIR", help="folder of the results"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run all checks and print the report."""
    findings = examine(arguments.results)
    possible = not find_first_lack(findings)
    if arguments.json:
        listed = [{"name": name, **asdict(finding)} for name, finding in findings.items()]
        content = {"schema": 1, "version": __version__, "demo": possible, "findings": listed}
        print(json.dumps(content, indent=2, default=str))
    else:
        print(render(findings))
    return 0 if possible else 2


def examine(results: Path, only: Container[str] | None = None) -> dict[str, Finding]:
    """Return name → finding of all checks, or of those in `only`. A check that fails is a finding,
    too.
    """
    findings = {}
    groups = [group for group in GROUPS if only is None or f"{group} packages" in only]
    context = Context(results, **probe(list(map(module_of, list_packages(*groups)))))
    for name, check in CHECKS:
        try:
            if only is None or name in only:
                findings[name] = check(context)
        except Exception as error:
            fact = f"the check itself failed: {type(error).__name__}: {error}"
            findings[name] = Finding(verdict="no", fact=fact, next="report this as a bug")
    return findings


def find_first_lack(findings: Mapping[str, Finding]) -> str:
    """Return the first step of the first check that `make run` needs and that failed; empty if it
    can run.
    """
    lacks = (findings[name] for name in DEMO if findings[name].verdict == "no")
    return next((finding.next or finding.fact for finding in lacks), "")


def render(findings: Mapping[str, Finding]) -> str:
    """Return the report as ASCII text: one line per check, then whether `make run` can run."""
    lines = [f"tokenscale {__version__} on {platform.system()} {platform.machine()}"]
    column = max(map(len, findings))
    for name, finding in findings.items():
        lines += wrap_text(
            f"{name:<{column}}  {finding.verdict:<4}  ", text=finding.fact, width=120
        )
        lines += wrap_text(" " * (column + 8) + "next: ", text=as_typed(finding.next), width=120)
    first = find_first_lack(findings)
    chosen = as_typed("`tokenscale ready` says whether the chosen experiments can start")
    lines += [
        "",
        f"make run cannot run here yet. First: {first}"
        if first
        else f"make run can run here; {chosen}",
    ]
    return "\n".join(lines).encode("ascii", "backslashreplace").decode("ascii")


# -- Python and packages


def list_packages(*groups: str) -> list[str]:
    return [name for group in groups for name in GROUPS[group].split()]


def module_of(distribution: str) -> str:
    """Return the module that a distribution installs."""
    return {"pyyaml": "yaml"}.get(distribution, distribution.replace("-", "_"))


def is_importable(module: str) -> bool:
    """Return whether Python finds the module, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def read_requirements() -> dict[str, str]:
    """Return distribution → version bounds ("": none) of the clone that this file lies in, and
    those of `python`.

    The metadata of an editable install may be older. Empty outside a clone, only `python` without
    the package packaging.
    """
    import tomllib  # not in Python 3.10

    file = Path(__file__).resolve().parents[3] / "pyproject.toml"
    if not file.is_file():
        return {}
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    python = project["requires-python"]
    extras = project["optional-dependencies"].values()
    if not is_importable("packaging"):
        return {"python": python}
    from packaging.requirements import Requirement

    stated = [f"python{python}", *project["dependencies"], *(r for extra in extras for r in extra)]
    parsed = map(Requirement, stated)
    return {
        r.name.lower().replace("_", "-"): ",".join(sorted(map(str, r.specifier), reverse=True))
        for r in parsed
    }


def satisfies(version: str, bounds: str) -> bool:
    """Return whether a version lies within bounds such as `>=2.9,<2.14`; any does without the
    package packaging.

    Only the numbers count: a container's `2.9.0a0+5228986` is taken for 2.9.0, which pip would not
    do.

    >>> satisfies("2.13.0+cpu", ">=2.9,<2.14"), satisfies("2.8.1", ">=2.9,<2.14"), satisfies("2.14.0rc1", "<2.14")
    (True, False, False)
    """
    if not bounds or not is_importable("packaging"):
        return True
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    return SpecifierSet(bounds).contains(Version(version).base_version)


def check_python(context: Context) -> Finding:
    """Check the version of Python that runs this command."""
    version = platform.python_version()
    wanted = read_requirements().get("python", "")
    if not wanted:
        return Finding(
            verdict="note",
            fact=f"{version}; the required version is unknown",
            next="work in a clone",
        )
    if not satisfies(version, bounds=wanted):
        cure = (
            "make setup PYTHON=python3.13 (`uv python install 3.13`, or "
            "https://www.python.org/downloads)"
        )
        return Finding(verdict="no", fact=f"{version}; {wanted} is required", next=cure)
    return Finding(
        "ok",
        fact=f"{version} ({wanted}){', not in a virtual environment' * (sys.prefix == sys.base_prefix)}",
    )


def check_packages(group: str, context: Context) -> Finding:
    """Check that the packages of one group are installed, within bounds, and importable."""
    wanted = read_requirements()
    # package → its text
    fine: dict[str, str] = {}
    missing: dict[str, str] = {}
    others: dict[str, str] = {}
    for name in list_packages(group):
        bounds = wanted.get(name, "")
        module = module_of(name)
        version = _find_version(name)
        only = f" (only for {ONLY.get(name)})" if name in ONLY else ""
        if not is_importable(module):
            missing[name] = name + only
        elif module in context.broken:
            others[name] = f"{name} {version} does not import: {context.broken[module]}{only}"
        elif version and not satisfies(version, bounds):
            others[name] = f"{name} {version} is outside {bounds}{only}"
        else:
            within = f" ({bounds})" if bounds else ""
            fine[name] = f"{name} {version or 'of unknown version'}{within}"
    fact = f"for {PURPOSES[group]}"
    wrong = [*missing, *others]
    if not wrong:
        return Finding("ok", fact=f"{fact}: " + ", ".join(fine.values()))
    parts = list(others.values())
    if missing:
        parts.insert(0, f"missing: {', '.join(missing.values())}")
    if fine:
        parts.append(f"fine: {', '.join(fine)}")
    is_broken = any(module_of(name) in context.broken for name in wrong)
    return Finding(
        verdict="note" if ONLY.keys() >= set(wrong) else "no",
        fact=f"{fact}, {'; '.join(parts)}",
        next=_install_command(
            {name: wanted.get(name, "") for name in wrong},
            is_broken=is_broken,
            none_fits=not fine,
        ),
    )


def _install_command(bounds: dict[str, str], is_broken: bool, none_fits: bool) -> str:
    """Return the command that installs packages within their bounds; in a checkout where no package
    of their group fits, the one that installs this project.
    """
    cure = " ".join(f"'{name}{bound}'" for name, bound in bounds.items())
    if is_broken:
        cure = f"--force-reinstall {cure}"
    elif none_fits and Path("src/tokenscale").is_dir():
        cure = "-e '.[test]'"
    python = Path(sys.executable)  # in a message short, if it lies in this folder
    python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    return f"{python} -m pip install {cure}"


def _find_version(name: str) -> str:
    """Return the version of an installed package; empty if it has none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


# -- child processes


def run_command(
    argv: list[str], timeout_s: float = 5.0, **variables: str
) -> tuple[int | None, str]:
    """Run a command and return its exit code and its output (both streams).

    The code is None if the command is missing or does not end in time; then its whole process group
    is killed.
    """
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    options: dict[str, Any] = {
        **streams,
        "text": True,
        "errors": "replace",
        "start_new_session": True,
    }
    try:
        process = subprocess.Popen(argv, env=os.environ | variables, **options)
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


def run_python(*arguments: str) -> tuple[int | None, str]:
    """Run Python with this very package, whatever the working folder holds."""
    path = os.pathsep.join(
        filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")])
    )
    return run_command([sys.executable, *arguments], timeout_s=LIMIT_S, PYTHONPATH=path)


def describe_exit(code: int | None) -> str:
    if code is None:
        return f"no exit within {LIMIT_S:g} s"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def probe(modules: Sequence[str]) -> dict[str, Any]:
    """Import modules in a child process, where a crash or a hang does no harm, and ask torch for
    its GPUs there.

    Returns the fields `broken`, `torch` and `ended` of `Context`.
    """
    names = [name for name in modules if is_importable(name)]
    code, text = run_python("-c", f"from {__name__} import report_imports; report_imports({names})")
    ended = "" if code == 0 else describe_exit(code)
    tried = dict[str, str]()
    facts = dict[str, Any]()
    for line in text.splitlines():  # a package may print while it is imported
        if line.startswith(MARK):
            found = json.loads(line.removeprefix(MARK))
            tried |= found.pop("imported", {})
            facts |= found
    broken = {name: error for name, error in tried.items() if error}
    if untried := [name for name in names if name not in tried]:
        broken[untried[0]] = f"importing it kills Python: {ended}"
    return {"broken": broken, "torch": facts, "ended": ended}


def report_imports(names: Sequence[str]) -> None:
    """In the child: print a line of JSON for each attempt at once, so that those before a crash are
    known.
    """

    def report(**facts: Any) -> None:
        print(f"\n{MARK}{json.dumps(facts)}", flush=True)

    for name in names:
        error = ""
        try:
            importlib.import_module(name)
        except BaseException as raised:  # a package may even call exit
            error = (
                f"{type(raised).__name__}: {(str(raised).strip().splitlines() or [''])[0][:200]}"
            )
        report(imported={name: error})
    if "torch" not in sys.modules:
        return
    import torch
    import torch.distributed as dist

    builds = {"version": torch.__version__, "cuda": torch.version.cuda, "rocm": torch.version.hip}
    report(**builds, nccl=dist.is_available() and dist.is_nccl_available())
    devices: list[dict[str, Any]] = []
    broken = None
    try:
        if not torch.cuda.is_available() and (torch.version.cuda or torch.version.hip):
            torch.cuda.init()  # is_available gives no reason; this raises it
        for number in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(number)
            capability = f"{about.major}.{about.minor}"
            devices.append(
                {"name": about.name, "memory_bytes": about.total_memory, "capability": capability}
            )
            try:
                ones = torch.ones(64, 64, device=f"cuda:{number}", dtype=torch.bfloat16)
                if (ones @ ones).float().sum().item() != 64**3:
                    devices[-1]["error"] = "a product of ones is wrong"
            except Exception as raised:
                devices[-1]["error"] = f"{type(raised).__name__}: {raised}"[:200]
    except Exception as raised:
        broken = f"{type(raised).__name__}: {raised}"[:200]
    report(devices=devices, error=broken)


# -- project and capacity


def check_project_folder(context: Context) -> Finding:
    """Check that this folder is the project's: the workflow is in the repository, not in the
    package.
    """
    needed = (
        "workflow/Snakefile",
        "config/config.yaml",
        "profiles/default/config.yaml",
        "pyproject.toml",
    )
    if missing := [name for name in needed if not Path(name).is_file()]:
        return Finding(
            verdict="no",
            fact=f"not in this folder: {', '.join(missing)}",
            next="cd to a clone of the repository",
        )
    if absent := [name for name in ("make", "git") if shutil.which(name) is None]:
        cure = (
            "install them: without make, `snakemake` starts the workflow; without git, results "
            "name no commit"
        )
        return Finding(
            verdict="note",
            fact=f"workflow and configuration are here, but not {' and '.join(absent)}",
            next=cure,
        )
    if not Path("alps/config.yaml").is_file():  # a download or a file system without symbolic links
        return Finding(
            verdict="note",
            fact="the link `alps` does not point to profiles/alps",
            next="ln -sfn profiles/alps alps",
        )
    return Finding("ok", fact="workflow, configuration and profiles are here")


def check_cores(context: Context) -> Finding:
    """Check the cores that this process may use, by its affinity mask and control groups, not the
    built-in ones.
    """
    visible = provenance.count_affinity_cores()
    quota = provenance.cgroup_limits()[0]
    usable = provenance.usable_cores(visible, quota)
    fact = f"usable of {os.cpu_count()}"
    values = {"usable": usable}
    if quota and quota < visible:
        fact += (
            f": a control group allows {quota:g}, but Snakemake's `cores: all` counts all "
            f"{visible} visible"
        )
        return Finding(
            verdict="note",
            fact=f"{usable} {fact}",
            next=f"snakemake --cores {usable}",
            values=values,
        )
    return Finding(verdict="ok", fact=f"{usable} {fact}", values=values)


def check_memory(context: Context) -> Finding:
    """Check main memory: its total, what is available now, and the limit of control groups."""
    (total, available) = provenance.read_memory()
    limit = provenance.cgroup_limits()[1]
    fact = f"{format_bytes(total)}" if total else "of unknown size"
    fact += f", {format_bytes(available)} available" if available is not None else ""
    fact += (
        f", limited to {format_bytes(limit)} by a control group"
        if limit and limit < (total or limit)
        else ""
    )
    least = min(filter(None, (total, available, limit)), default=2 * DEMO_MEMORY - 1)
    if least >= 2 * DEMO_MEMORY:
        return Finding("ok", fact)
    fact += f"; the demo needs {format_bytes(DEMO_MEMORY)}, larger models more"
    return Finding(
        verdict="no" if least < DEMO_MEMORY else "note",
        fact=fact,
        next="close other programs, or raise the limit",
    )


# -- GPUs and collectives


def find_torch_problem(context: Context) -> Finding | None:
    """Return the finding that explains why the child reported nothing of torch; None if it did."""
    if "version" not in context.torch:
        return Finding(verdict="no", fact="unknown without torch", next="see trainer packages")
    if "devices" not in context.torch:
        fact = f"the process that tries it ended early: {context.ended or 'no result'}"
        return Finding(
            verdict="no",
            fact=fact,
            next="repeat the command; if it fails again, report it as a bug",
        )
    return None


def check_gpus(context: Context) -> Finding:
    """Check the GPUs that torch and NVIDIA's driver see."""
    there, why = query_driver()
    seen = f"the driver sees {len(there)} ({', '.join(dict.fromkeys(there))})" if there else why
    if problem := find_torch_problem(context):
        return Finding(
            verdict="no", fact=f"{seen}; GPUs seen by torch: {problem.fact}", next=problem.next
        )
    torch = context.torch
    devices = context.torch["devices"]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch["cuda"]:
        build = f"CUDA {torch['cuda']}"
    elif torch["rocm"]:
        build = f"ROCm {torch['rocm']}"
    else:
        build = ""
    if devices:
        names = [
            f"{d['name']} ({format_bytes(d['memory_bytes'])}, capability {d['capability']})"
            for d in devices
        ]
        fact = (
            ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
            + f"; torch for {build}"
        )
        if failing := [f"GPU {n}: {d['error']}" for n, d in enumerate(devices) if "error" in d]:
            cure = "install a torch built for this GPU"
            return Finding(
                verdict="no",
                fact=f"{fact}; {'; '.join(failing)}",
                next=cure,
                values={"devices": devices},
            )
        fewer = (
            f"; {seen}; CUDA_VISIBLE_DEVICES is {hidden or 'not set'}"
            if len(there) > len(devices)
            else ""
        )
        return Finding(
            verdict="note" if fewer else "ok", fact=fact + fewer, values={"devices": devices}
        )
    if not there:
        return Finding(
            verdict="no", fact=f"none: {seen}; training runs on the CPU", values={"devices": []}
        )
    if not build:
        why = f"torch {torch['version']} is a build for CPUs"
        cure = "make setup without PIP_ARGS installs a build for CUDA"
    elif hidden is not None:
        why = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them"
        cure = "unset CUDA_VISIBLE_DEVICES"
    else:
        why = f"torch for {build} cannot use them: {torch.get('error') or 'it gives no reason'}"
        cure = "update the driver, or install a torch for an older CUDA"
    return Finding(
        verdict="no",
        fact=f"{seen}, but {why}; training runs on the CPU",
        next=cure,
        values={"devices": []},
    )


def query_driver() -> tuple[list[str], str]:
    """Return the names of the GPUs that NVIDIA's driver lists, and why there are none."""
    if not shutil.which("nvidia-smi"):
        return [], "no GPU driver found (nvidia-smi)"
    code, text = run_command(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return (
        (text.splitlines(), "")
        if code == 0 and text
        else ([], f"nvidia-smi fails: {text or 'it lists no GPU'}")
    )


def check_nccl(context: Context) -> Finding:
    """Check an all-reduce over two GPUs with NCCL."""
    devices = context.torch.get("devices")
    if devices is not None and not context.torch["nccl"]:
        return Finding(
            "no",
            fact=f"not in this build of torch ({context.torch['version']}); needed only for GPUs",
        )
    if devices is not None and len(devices) < 2:
        fact = "one GPU needs no all-reduce" if devices else "torch sees no GPU"
        return Finding("ok" if devices else "no", fact=f"in this build of torch; {fact}")
    cure = (
        "NCCL_DEBUG=INFO shows why; NCCL_P2P_DISABLE=1 often helps if GPUs cannot reach each other"
    )
    return check_all_reduce("auto", cure, context=context)


def check_all_reduce(device: str, cure: str, context: Context) -> Finding:
    """Run `benchmark collectives` on two ranks, with a buffer as large as that of a training's
    preflight.
    """
    if problem := find_torch_problem(context):
        return problem
    size = (4 if device == "cpu" else 128) * 2**20
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "collectives.json"
        options = f"--sizes 4096 {size} --collectives all_reduce --rounds 3 --device {device} --output".split()
        code, text = run_python(
            "-m", "tokenscale", "benchmark", "collectives", *options, str(output)
        )
        if code is None and reaches_itself():  # a busy machine does not show that its links fail
            again = (
                f"try again when the machine is idle (its load is {os.getloadavg()[0]:.0f}); "
                f"else {cure}"
            )
            return Finding(
                verdict="note", fact=f"an all-reduce did not end within {LIMIT_S:g} s", next=again
            )
        if code != 0:
            found = (
                re.findall(r"^(?:[\w.]+Error|tokenscale): .*", text, re.MULTILINE)
                or text.splitlines()[-1:]
            )
            return Finding(
                verdict="no",
                fact=f"an all-reduce fails: {found[0][:200] if found else describe_exit(code)}",
                next=cure,
            )
        seconds = min(
            r["seconds"] for r in json.loads(output.read_text())["records"] if r["bytes"] == size
        )
    rate = size / seconds / 1e9  # bus bandwidth of two ranks, as in nccl-tests
    return Finding(
        verdict="ok",
        fact=f"2 ranks completed an all-reduce, at {rate:.3g} GB/s",
        values={"ranks": 2, "gb_s": rate},
    )


# -- the results folder


def try_folder(folder: Path) -> tuple[str, float]:
    """Try the operations of writing results in a temporary folder. Return why one does not work, or
    "", and the seconds that the file system's clock is ahead of this machine's (Snakemake compares
    file times).
    """
    import fcntl

    step = "create"
    try:
        with tempfile.TemporaryDirectory(
            prefix=".doctor-", dir=folder, ignore_cleanup_errors=True
        ) as name:
            old = Path(name) / "results.json"
            new = Path(name) / ".results.json.tmp"
            old.write_bytes(b"old")
            before = time.time()
            new.write_bytes(b"new")
            stamp = new.stat().st_mtime
            skew = stamp - min(max(stamp, before), time.time())
            step = "rename"
            os.replace(new, old)
            if old.read_bytes() != b"new" or new.exists():
                raise OSError(errno.EIO, "a renamed file still has its old content")
            step = "flock"
            with open(old, "rb+") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # another process: within one, some file systems grant a lock twice
                again = (
                    "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'rb+'), fcntl.LOCK_EX | "
                    "fcntl.LOCK_NB)"
                )
                code, text = run_command(
                    [sys.executable, "-S", "-c", again, str(old)], timeout_s=10
                )
                if code == 0 or "BlockingIOError" not in text:
                    raise OSError(
                        errno.ENOLCK, text if code else "two processes acquired the same lock"
                    )
    except Exception as error:
        return (
            (
                f"{step} fails: "
                f"{getattr(error, 'strerror', None) or f'{type(error).__name__}: {error}'}"
            ),
            0.0,
        )
    return "", skew


def check_results_folder(context: Context) -> Finding:
    """Check the file system of the results: free space, and the operations that the project relies
    on.
    """
    folder = context.results.absolute()
    while not folder.exists() and folder != folder.parent:  # a check creates no folders
        folder = folder.parent
    (failed, skew) = try_folder(folder)
    free = shutil.disk_usage(folder).free
    code, text = run_command(["df", "--output=fstype", str(folder)])
    kind = text.splitlines()[-1] if code == 0 and text else "unknown"  # as the kernel names it
    where = str(context.results) + (
        " (does not exist yet)" if folder != context.results.absolute() else ""
    )
    fact = f"{where}, file system {kind}, {format_bytes(free)} free"
    if failed:
        cure = "make it writable, or use another folder"
        cure = (
            "request a mount with the option flock"
            if "flock" in failed and kind == "lustre"
            else cure
        )
        return Finding(verdict="no", fact=f"{fact}; {failed}", next=cure)
    fact += "; rename and flock work"
    if free < DEMO_DISK:
        return Finding(
            verdict="no",
            fact=fact,
            next=f"free {format_bytes(DEMO_DISK)}: the demo's results take half of it",
        )
    on_network = kind in NETWORK_FILE_SYSTEMS or kind.startswith("fuse")
    skewed = (
        f"its clock is {skew:+.0f} s off this machine's clock, and Snakemake compares file times"
    )
    notes = {
        ("it is in memory: lost on reboot", "copy important results to a disk"): kind
        in ("tmpfs", "ramfs"),
        ("it is inside a container and is lost with it", "mount a folder of the host here"): kind
        == "overlay",
        (
            "files of other nodes appear late",
            "snakemake --latency-wait 60, as profiles/alps has it",
        ): on_network,
        (skewed, "synchronize both clocks with NTP"): abs(skew) > 1.0,
        ("little free space beyond the demo", "free some space"): free < 20 * DEMO_DISK,
    }
    return make_finding(fact, notes=[note for note, holds in notes.items() if holds])


def make_finding(fact: str, notes: list[tuple[str, str]], **values: Any) -> Finding:
    """Return an `ok` finding, or a `note` with each (reason, next step)."""
    fact = "; ".join([fact, *(why for why, _ in notes)])
    return Finding(
        verdict="note" if notes else "ok",
        fact=fact,
        next="; ".join(cure for _, cure in notes),
        values=values,
    )


# -- SLURM


def check_slurm(context: Context) -> Finding:
    """Check SLURM's programs, its controller and its accounting. `values`: its partitions."""
    if missing := [name for name in ("sbatch", "srun", "sinfo") if shutil.which(name) is None]:
        cure = (
            "run this on a cluster's login node; a dry run needs no SLURM: snakemake --profile "
            "alps -n"
        )
        return Finding(
            verdict="no",
            fact=f"{', '.join(missing)} not found; needed only for --profile alps",
            next=cure,
        )
    code, text = run_command(["sinfo", *SINFO])
    if code != 0:
        first = text.splitlines()[0] if text else describe_exit(code)
        cure = "scontrol ping; then contact the administrators"
        return Finding(
            verdict="no", fact=f"its controller does not respond: {first[:160]}", next=cure
        )
    partitions = parse_partitions(text)
    notes = []
    if run_command(["sacct", "-X", "--noheader", "--format=JobIdRaw"])[0] != 0:
        notes.append(
            ("sacct fails: Snakemake would wait forever", "snakemake --slurm-status-command squeue")
        )
    if job := os.environ.get("SLURM_JOB_ID"):
        notes.append(
            (
                f"this is inside job {job}, and Snakemake submits jobs itself",
                "start it outside a job",
            )
        )
    fact = f"{run_command(['sbatch', '--version'])[1]}, partitions {', '.join(partitions)}"
    values = {name: partition._asdict() for name, partition in partitions.items()}
    return make_finding(fact, notes, partitions=values)


#: (name, check), in the order of the output
CHECKS: list[tuple[str, Callable[[Context], Finding]]] = [
    ("python", check_python),
    *((f"{group} packages", partial(check_packages, group)) for group in GROUPS),
    ("project", check_project_folder),
    ("cores", check_cores),
    ("memory", check_memory),
    ("gpu", check_gpus),
    ("gloo", partial(check_all_reduce, "cpu", "set up the loopback interface: ip link set lo up")),
    ("nccl", check_nccl),
    ("results folder", check_results_folder),
    ("slurm", check_slurm),
]
#: checks that `make run` needs, which decide the exit code
DEMO = (
    "python",
    "host packages",
    "trainer packages",
    "report packages",
    "project",
    "memory",
    "gloo",
    "results folder",
)
