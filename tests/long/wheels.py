"""Resolve all dependencies, extras included, from wheels for every supported Python: `python -m
tests.long.wheels`.

Needs the package registry, installs nothing here, and writes `evidence/long-tests/wheels.txt`. The
resolver is uv in a temporary folder: unlike pip it evaluates environment markers for a Python that
is not installed.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.long import logs
from tests.long.lock import install_uv

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = tuple(
    f"3.{minor}" for minor in range(*map(int, re.findall(r"3\.(\d+)", PROJECT["requires-python"])))
)
#: the extra that names a distribution of this repository, which is on no index
OURS = "golden"
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
#: dependencies of Snakemake without a wheel, which pip builds: of pure Python, and those that need
#: a C compiler
PURE_PYTHON = ("connection-pool",)
COMPILED = {"3.14": ("immutables",)}


def resolve(uv: Path, python: str, platform: str) -> tuple[dict[str, str], str]:
    """(package → version, error of uv or ""). Nothing but the packages above may come without a
    wheel.
    """
    command = [
        uv,
        "pip",
        "compile",
        ROOT / "pyproject.toml",
        *(f"--extra={name}" for name in PROJECT["optional-dependencies"] if name != OURS),
        "--quiet",
        "--no-header",
        "--no-annotate",
    ]
    command += ["--python-version", python, "--python-platform", platform, "--only-binary", ":all:"]
    for package in (*PURE_PYTHON, *COMPILED.get(python, ())):
        command += ["--no-binary", package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    versions = (
        line.split(" ;")[0].split("==") for line in done.stdout.splitlines() if "==" in line
    )
    return {
        name: version.strip() for name, version in versions
    }, done.stderr.strip() if done.returncode else ""


def own_packages() -> list[str]:
    """The distributions that pyproject.toml names without an extra."""
    return [re.match(r"[\w.-]+", requirement)[0] for requirement in PROJECT["dependencies"]]


def main() -> int:
    """0 where every combination resolves; the log says what each gets."""
    uv = install_uv()
    version = subprocess.run([uv, "--version"], capture_output=True, text=True).stdout.strip()
    found = {
        (python, platform): resolve(uv, python, platform)
        for python in PYTHONS
        for platform in PLATFORMS
    }
    lines = [f"{version}: pyproject.toml with all extras, from wheels alone but for", ""]
    lines += [f"  {package:<16} every Python: pure Python, built by pip" for package in PURE_PYTHON]
    lines += [
        f"  {package:<16} {python}: built with a C compiler"
        for python in COMPILED
        for package in COMPILED[python]
    ]
    for (python, platform), (versions, error) in found.items():
        lines += ["", f"Python {python}, {platform}: {error or f'{len(versions)} packages'}"]
        lines += [
            f"  {name:<32} {versions.get(name, 'none')}" for name in own_packages() if not error
        ]
    text = "\n".join(lines) + "\n"
    logs.write("wheels", text)
    return 1 if any(error for _, error in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
