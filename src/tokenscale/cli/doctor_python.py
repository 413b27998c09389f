"""Checks of `doctor` on Python, packages, GPUs and collectives. Imports and torch are tried in a child process."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tokenscale.cli.doctor_checks import GIB, Context, Finding, is_importable, python_command, run_command
from tokenscale.runs.records import provenance

#: time limit of a child process; a first import from a busy network disk is slow
LIMIT_S = 60.0

# -- Python and packages

#: import group → what it enables, and its distributions
GROUPS = {
    "host": (
        "the workflow",
        "snakemake snakemake-executor-plugin-slurm pyyaml packaging pygments requests urllib3 huggingface-hub",
    ),
    "trainer": (
        "training",
        "torch numpy pydantic pyarrow safetensors tokenizers mistral-common tiktoken gigatoken xxhash zstandard "
        "transformers",
    ),
    "report": ("the report", "duckdb pandas matplotlib jinja2 pypdf sacrebleu"),
    "test": (
        "the tests",
        "pytest pytest-xdist markdown-it-py hypothesis snakefmt ruff mypy import-linter sphinx myst-parser furo "
        "latex2mathml tensorboard s3fs moto py-partiql-parser flask flask-cors datasets accelerate",
    ),
}
#: distribution → its module, where the name differs
MODULES = {"import-linter": "importlinter", "pyyaml": "yaml", "pytest-xdist": "xdist", "markdown-it-py": "markdown_it"}
#: distribution → the only feature that needs it
ONLY = {
    "snakemake-executor-plugin-slurm": "SLURM",
    "packaging": "doctor",
    "pygments": "snakemake --report",
    **dict.fromkeys(("requests", "urllib3", "huggingface-hub"), "downloads"),
    "zstandard": "reading compressed MDS shards",
    "transformers": "its models",
    "sacrebleu": "BLEU",
    "mypy": "type checks",
    "import-linter": "import contracts",
    **dict.fromkeys(("sphinx", "myst-parser", "furo"), "the documentation site"),
    "latex2mathml": "formulas of the documentation site",
    **dict.fromkeys(("s3fs", "moto", "py-partiql-parser", "flask", "flask-cors"), "sources in a bucket"),
    "datasets": "streamed datasets",
}


def list_packages(*groups: str) -> list[str]:
    """Return the distributions of groups, or of all of them."""
    return [name for group in groups or GROUPS for name in GROUPS[group][1].split()]


def module_of(distribution: str) -> str:
    """Return the module that a distribution installs."""
    return MODULES.get(distribution, distribution.replace("-", "_"))


def installed_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packaging(name: str) -> Any:
    """Import a module of `packaging`, or pip's own copy of it."""
    try:
        return importlib.import_module(f"packaging.{name}")
    except ImportError:
        return importlib.import_module(f"pip._vendor.packaging.{name}")


def read_requirements() -> dict[str, str]:
    """Return distribution → version bounds ("": none), and those of `python`. Empty if they are unknown.

    Read from the pyproject.toml of the clone that this file lies in, because metadata of an editable install may be
    older; elsewhere from the installed metadata.
    """
    try:
        text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8")
        try:
            import tomllib
        except ImportError:  # before Python 3.11: which Python is needed is all that can be of interest
            stated, python = [], re.search(r'^requires-python = "(.+)"$', text, re.MULTILINE)[1]
        else:
            project = tomllib.loads(text)["project"]
            extras, python = project["optional-dependencies"].values(), project["requires-python"]
            stated = [*project["dependencies"], *(r for extra in extras for r in extra)]
    except (OSError, ValueError, KeyError, TypeError):
        try:
            stated = importlib.metadata.requires("tokenscale") or []
            python = importlib.metadata.metadata("tokenscale")["Requires-Python"] or ""
        except importlib.metadata.PackageNotFoundError:
            return {}
    try:
        parsed = list(map(_packaging("requirements").Requirement, [f"python{python}", *stated]))
    except ImportError:
        return {}
    names = (r.name.lower().replace("_", "-") for r in parsed)
    return dict(zip(names, (",".join(sorted(map(str, r.specifier), reverse=True)) for r in parsed), strict=True))


def satisfies(version: str, bounds: str) -> bool:
    """Return whether a version lies within bounds such as `>=2.9,<2.14`.

    Only the numbers count: a container's `2.9.0a0+5228986` is taken for 2.9.0, which pip would not do.

    >>> satisfies("2.13.0+cpu", ">=2.9,<2.14"), satisfies("2.8.1", ">=2.9,<2.14"), satisfies("2.14.0rc1", "<2.14")
    (True, False, False)
    """
    return not bounds or _packaging("specifiers").SpecifierSet(bounds).contains(
        _packaging("version").Version(version).base_version
    )


def describe_problems(states: dict[str, dict[str, Any]]) -> str:
    """Describe what is wrong with packages: missing ones together, each other one by its own text.

    >>> old = {"state": "outside", "only": "", "text": "b 1 is outside >2"}
    >>> describe_problems({"a": {"state": "missing", "only": "SLURM"}, "b": old})
    'missing: a (only for SLURM); b 1 is outside >2'
    """
    only = {name: f" (only for {state['only']})" if state["only"] else "" for name, state in states.items()}
    missing = [name + only[name] for name, state in states.items() if state["state"] == "missing"]
    others = [s["text"] + only[name] for name, s in states.items() if s["state"] not in ("ok", "missing")]
    return "; ".join([f"missing: {', '.join(missing)}"] * bool(missing) + others)


def check_python(context: Context) -> Finding:
    """Check the version of Python that runs this command."""
    version, wanted = platform.python_version(), read_requirements().get("python", "")
    values = {"version": version, "wanted": wanted, "executable": sys.executable}
    if not wanted:
        hint = "neither pyproject.toml nor the metadata of tokenscale can be read here"
        return Finding("note", f"{version}; the required version is unknown", hint, values)
    if not satisfies(version, wanted):
        cure = f"make setup PYTHON={_find_supported_python(wanted)}"
        return Finding("no", f"{version}; {wanted} is required", cure, values)
    place = "in a virtual environment" if sys.prefix != sys.base_prefix else "not in a virtual environment"
    return Finding("ok", f"{version} ({wanted}), {place}", values=values)


def _find_supported_python(wanted: str) -> str:
    """Return the name of a supported Python on PATH that can create environments, or of one to install."""
    code = "import ensurepip, platform; print(platform.python_version())"
    for name in (f"python3.{minor}" for minor in (13, 12, 11, 14)):
        exit_code, version = run_command([name, "-c", code])  # pyenv has commands for versions that are not active
        if exit_code == 0 and satisfies(version, wanted):
            return name
    return "python3.13, once it is installed (`uv python install 3.13` or https://www.python.org/downloads)"


def check_packages(group: str, context: Context) -> Finding:
    """Check that the packages of one import group are installed, within bounds, and importable."""
    wanted, found = read_requirements(), {}
    for name in list_packages(group):
        bounds, version, module = wanted.get(name, ""), installed_version(name), module_of(name)
        if not is_importable(module):
            state, text = "missing", f"{name} is missing"
        elif module in context.broken:
            state, text = "broken", f"{name} {version or ''} does not import: {context.broken[module]}"
        elif version and not satisfies(version, bounds):
            state, text = "outside", f"{name} {version} is outside {bounds}"
        else:
            state, text = "ok", f"{name} {version or 'of unknown version'}" + (f" ({bounds})" if bounds else "")
        only = ONLY.get(name, "")
        found[name] = {"version": version, "wanted": bounds, "only": only, "state": state, "text": text}
    wrong, fact = {name: p for name, p in found.items() if p["state"] != "ok"}, f"for {GROUPS[group][0]}"
    if not wrong:
        return Finding("ok", f"{fact}: " + ", ".join(p["text"] for p in found.values()), values={"packages": found})
    fine = [name for name in found if name not in wrong]
    fact += f", {describe_problems(wrong)}" + (f"; fine: {', '.join(fine)}" if fine else "")
    cure = " ".join(f"'{name}{p['wanted']}'" for name, p in wrong.items())
    if any(p["state"] == "broken" for p in wrong.values()):
        cure = f"--force-reinstall {cure}"
    elif not fine and Path("src/tokenscale").is_dir():
        cure = "-e '.[test]'"  # no package was installed at all
    verdict = "note" if all(p["only"] for p in wrong.values()) else "no"
    return Finding(verdict, fact, f"{python_command()} -m pip install {cure}", {"packages": found})


# -- the child process


def run_python(*arguments: str) -> tuple[int | None, str]:
    """Run Python with this very package, whatever the working folder holds."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]))
    return run_command([sys.executable, *arguments], LIMIT_S, PYTHONPATH=path)


def probe(modules: list[str]) -> dict[str, Any]:
    """Import modules in a child process, where a crash or a hang does no harm, and try torch there.

    Returns the fields `broken`, `stages` and `ended` of `Context`. The child prints a line of JSON for each attempt at
    once, so that the attempts before a crash are known.
    """
    names = [name for name in modules if is_importable(name)]
    code, text = run_python("-m", __name__, *names)
    lines = []
    for line in text.splitlines():
        with suppress(ValueError):  # a package that prints while it is imported
            lines.append(json.loads(line))
    lines = [line for line in lines if isinstance(line, dict)]
    tried = {line["module"]: line.get("error") for line in lines if "module" in line}
    broken = {name: error for name, error in tried.items() if error}
    ended = "" if code == 0 else _describe_exit(code)
    if untried := [name for name in names if name not in tried]:
        broken[untried[0]] = f"importing it kills Python: {ended}"
    return {"broken": broken, "stages": {line["stage"]: line for line in lines if "stage" in line}, "ended": ended}


def _describe_exit(code: int | None) -> str:
    if code is None:
        return f"no exit within {LIMIT_S:g} s"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _describe_error(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _try(key: str, name: str, action: Callable[[], dict[str, Any]]) -> None:
    """In the child: print the outcome of an action as a line of JSON."""
    try:
        facts = action()
    except BaseException as error:  # a package may even call exit
        facts = {"error": _describe_error(error)}
    print("\n" + json.dumps({key: name, **facts}), flush=True)


def _import(name: str) -> dict[str, Any]:
    importlib.import_module(name)
    return {}


def _describe_torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    nccl = dist.is_available() and dist.is_nccl_available()
    return {"version": torch.__version__, "cuda": torch.version.cuda, "rocm": torch.version.hip, "nccl": nccl}


def _multiply(device: str) -> dict[str, Any]:
    """Multiply in bf16."""
    import torch

    ones = torch.ones(64, 64, device=device)
    with torch.autocast(ones.device.type, dtype=torch.bfloat16):
        product = ones @ ones
    if product.dtype != torch.bfloat16 or product.float().sum().item() != 64**3:
        raise ArithmeticError("a product of ones is wrong")
    return {}


def _list_devices() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        if torch.version.cuda or torch.version.hip:
            torch.cuda.init()  # is_available gives no reason; this raises it
        return {"devices": []}
    found = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        capability = f"{properties.major}.{properties.minor}"
        device = {"name": properties.name, "memory_bytes": properties.total_memory, "capability": capability}
        try:
            with torch.cuda.device(number):
                device["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
                _multiply(f"cuda:{number}")
        except Exception as error:
            device["error"] = _describe_error(error)
        found.append(device)
    return {"devices": found}


# -- GPUs and collectives


def find_stage(context: Context, name: str) -> tuple[dict[str, Any], Finding | None]:
    """Return (what the child reported of a stage of torch, None), or the finding that explains why it is missing."""
    if "version" not in context.stages.get("torch", {}):
        return {}, Finding("no", "unknown without torch", "see trainer packages", {"without": "torch"})
    if name not in context.stages:
        fact = f"the process that tries it ended early: {context.ended or 'no result'}"
        return {}, Finding("no", fact, "repeat the command; if it fails again, report it as a bug")
    return context.stages[name], None


def check_gpus(context: Context) -> Finding:
    """Check the GPUs that torch and the driver see."""
    driver = query_driver()
    there = len(driver["names"])
    seen = f"the driver sees {there} ({', '.join(dict.fromkeys(driver['names']))})" if there else driver["text"]
    stage, problem = find_stage(context, "devices")
    if problem:
        return Finding("no", f"{seen}; GPUs seen by torch: {problem.fact}", problem.next, {"driver": driver})
    torch, devices = context.stages["torch"], stage.get("devices", [])
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
        why = f"torch {torch['version']} is a build for CPUs"
        cure = "make setup without PIP_ARGS installs a build for CUDA"
    elif hidden is not None:
        why, cure = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them", "unset CUDA_VISIBLE_DEVICES"
    else:
        why = f"torch for {build} cannot use them: {stage.get('error') or 'it gives no reason'}"
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
    version = re.search(r"\d+\.\d+(\.\d+)?", provenance.read_text(Path("/proc/driver/nvidia/version")))
    if version:
        return {"names": [], "version": version[0], "text": f"driver {version[0]}, but nvidia-smi is not found"}
    return {"names": [], "version": "", "text": "no GPU driver found (nvidia-smi)"}


def check_bf16(context: Context) -> Finding:
    """Check whether the device that training would use computes natively in bf16."""
    stage, problem = find_stage(context, "bf16 on the CPU")
    if problem:
        return problem
    devices = context.stages.get("devices", {}).get("devices", [])
    if without := [d["name"] for d in devices if not d.get("bf16")]:
        return Finding("note", f"{without[0]} has no bf16 units: slow", "use precision: fp32", {"native": False})
    if devices:
        return Finding("ok", "on the GPU", values={"native": True})
    if "error" in stage:
        return Finding("no", f"fails on the CPU: {stage['error']}", "use precision: fp32")
    units = sorted(read_cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
    if units:
        return Finding("ok", f"on the CPU, which has {', '.join(units)}", values={"native": True})
    fact = "works on the CPU without native instructions: slow"
    return Finding("note", fact, "use precision: fp32", {"native": False})


def read_cpu_flags() -> set[str]:
    """Return the CPU's instruction sets as the kernel names them (x86 `flags`, ARM `Features`)."""
    found = re.search(r"(?im)^(flags|features)\s*:(.*)$", provenance.read_text(Path("/proc/cpuinfo")))
    return set(found[2].split()) if found else set()


def check_gloo(context: Context) -> Finding:
    """Check an all-reduce over two processes with gloo."""
    problem = find_stage(context, "torch")[1]
    return problem or _check_all_reduce("cpu", None, "set up the loopback interface: ip link set lo up")


def check_nccl(context: Context) -> Finding:
    """Check an all-reduce over two GPUs with NCCL."""
    stage, problem = find_stage(context, "torch")
    if problem:
        return problem
    if not stage["nccl"]:
        return Finding("no", f"not in this build of torch ({stage['version']}); needed only for GPUs")
    devices = context.stages.get("devices", {}).get("devices", [])
    if not devices:
        return Finding("no", "in this build of torch, but torch sees no GPU")
    if len(devices) == 1:
        return Finding("ok", "in this build of torch; one GPU needs no all-reduce")
    cure = "NCCL_DEBUG=INFO shows why; NCCL_P2P_DISABLE=1 often helps if GPUs cannot reach each other"
    return _check_all_reduce("auto", context.least_node_gb_s, cure)


def _check_all_reduce(device: str, least: float | None, cure: str) -> Finding:
    """Run `benchmark collectives` on two ranks, with a buffer as large as that of a training's preflight."""
    size = (4 if device == "cpu" else 128) * 2**20
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "collectives.json"
        options = f"--sizes 4096 {size} --collectives all_reduce --rounds 3 --device {device} --output".split()
        code, text = run_python("-m", "tokenscale", "benchmark", "collectives", *options, str(output))
        if code != 0:
            found = re.findall(r"^(?:[\w.]+Error|tokenscale): .*", text, re.M) or text.splitlines()[-1:]
            why = found[0][:200] if found else _describe_exit(code)
            return Finding("no", f"an all-reduce fails: {why}", cure)
        seconds = min(r["seconds"] for r in json.loads(output.read_text())["records"] if r["bytes"] == size)
    rate = size / seconds / 1e9  # bus bandwidth of two ranks, as in nccl-tests
    values, fact = {"ranks": 2, "gb_s": rate}, f"2 ranks completed an all-reduce, at {rate:.3g} GB/s"
    if least is not None and rate < least:
        fact += f": the machine's file expects at least {least:g} GB/s (least_node_gb_s), and trainings would stop"
        return Finding("note", fact, "nvidia-smi topo -m shows how the GPUs are joined", values)
    return Finding("ok", fact, values=values)


if __name__ == "__main__":
    for module in sys.argv[1:]:
        _try("module", module, partial(_import, module))
    if "torch" in sys.modules:
        _try("stage", "torch", _describe_torch)
        _try("stage", "bf16 on the CPU", partial(_multiply, "cpu"))
        _try("stage", "devices", _list_devices)
