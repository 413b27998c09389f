"""The wheels of tokenscale and tokenscale-golden: built from copies of the sources, installed and
removed.
"""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow(15)

ROOT = Path(__file__).parents[2]
#: distribution → its folder
FOLDERS = {"tokenscale": ROOT, "tokenscale_golden": ROOT / "packages/golden"}
#: what a wheel is built from
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Distribution → wheel, built outside of the checkout."""
    base = tmp_path_factory.mktemp("wheels")
    for name, folder in FOLDERS.items():
        copy = base / "sources" / name
        copy.mkdir(parents=True)
        for source in SOURCES:
            if (folder / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(folder / source, copy / source, ignore=ignored)
            elif (folder / source).is_file():
                shutil.copy(folder / source, copy)
        flags = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(base)]
        subprocess.run([*PIP, "wheel", *flags, str(copy)], check=True, timeout=300)
    return {path.name.partition("-")[0]: path for path in base.glob("*.whl")}


@pytest.fixture
def environment(tmp_path, wheels):
    """A virtual environment without pip and without packages, and a pip for it."""
    venv.create(tmp_path / "venv", with_pip=False)

    def pip(command: str, *words: str | Path) -> None:
        python = ["--python", str(tmp_path / "venv/bin/python")]
        subprocess.run([*PIP, *python, command, *map(str, words)], check=True, timeout=300)

    return tmp_path / "venv/bin", pip


def call(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    command = [str(word) for word in words]
    return subprocess.run(
        command, cwd=cwd, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60
    )


def test_no_file_is_of_two_wheels(wheels):
    files = {name: {*zipfile.ZipFile(path).namelist()} for name, path in wheels.items()}
    assert files.keys() == FOLDERS.keys()
    assert not files["tokenscale"] & files["tokenscale_golden"]
    packages = {path.partition("/")[0] for path in files["tokenscale_golden"]}
    assert {name for name in packages if "." not in name} == {"tokenscale_golden"}


def test_tokenscale_works_before_and_after_golden_is_removed(wheels, environment, tmp_path):
    programs, pip = environment
    flags = ["--no-deps", "--no-index"]
    pip("install", *flags, wheels["tokenscale_golden"])
    pip("install", *flags, wheels["tokenscale"])
    pip("uninstall", "--yes", "tokenscale-golden")
    done = call(programs / "tokenscale", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "golden" in done.stdout, done.stderr
    done = call(programs / "tokenscale", "golden", "old.txt", "new.txt", cwd=tmp_path)
    assert done.returncode == 2 and "tokenscale-golden is not installed" in done.stderr
    assert "next" in done.stderr and "packages/golden" in done.stderr
    pip("install", *flags, wheels["tokenscale_golden"])
    pip("uninstall", "--yes", "tokenscale")
    assert call(programs / "python", "-c", "import tokenscale", cwd=tmp_path).returncode != 0
    assert (programs / "tokenscale-golden").is_file()


def test_golden_needs_numpy_only(wheels, environment, tmp_path):
    programs, pip = environment
    pip("install", "--no-deps", "--no-index", wheels["tokenscale_golden"])
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    for library in Path(np.__file__).parents[1].glob("numpy*"):
        (site / library.name).symlink_to(library)
    (tmp_path / "old.txt").write_text("1 10.5\n2 10.25\n3 10.125\n")
    done = call(programs / "tokenscale-golden", "old.txt", "old.txt", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("identical"), done.stderr
