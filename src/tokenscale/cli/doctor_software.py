"""Checks of what is installed: Python, packages, programs."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

from tokenscale.cli.doctor_finding import Asked, Finding, endings
from tokenscale.cli.doctor_probe import WITH_TORCH
from tokenscale.cli.packages import GROUPS, PACKAGES, importable, requirements, satisfies, told, version_of


def python(asked: Asked) -> Finding:
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


def packages(group: str, asked: Asked) -> Finding:
    """The packages of one import group: found, within bounds, and importable."""
    wanted, broken = requirements(), dict(asked.imports.result())
    tried_by_ranks = {p.module for p in PACKAGES if p.group == group} & {"torch", *WITH_TORCH}
    for module in sorted(filter(importable, tried_by_ranks)):
        ranks = asked.ranks.result()
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
    fact += f", {told(wrong)}" + (f"; fine: {', '.join(fine)}" if fine else "")
    cure = " ".join(f"'{name}{p['wanted']}'" for name, p in wrong.items())
    if any(p["state"] == "broken" for p in wrong.values()):
        cure = f"--force-reinstall {cure}"
    elif not fine and Path("src/tokenscale").is_dir():
        cure = "-e '.[test]'"  # nothing was installed at all
    only = all(p["only"] for p in wrong.values())
    return Finding("note" if only else "no", fact, f"{this_python()} -m pip install {cure}", {"packages": found})


def tools(asked: Asked) -> Finding:
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
