"""Where SLURM is not installed, nobody is left in doubt whether these tests ran."""

import re
import subprocess
import sys
from pathlib import Path

from tests.slurm.missing import APT, COMMANDS

ROOT = Path(__file__).parents[2]
#: a machine that has none of the commands
NONE = "import runpy, shutil, sys; shutil.which = lambda *_, **__: None; "


def without_slurm(code: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", NONE + code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_check_before_the_tests_fails_with_what_to_install():
    done = without_slurm("runpy.run_module('tests.slurm.missing', run_name='__main__')")
    assert done.returncode == 1
    assert done.stderr == f"SLURM is not installed ({', '.join(COMMANDS)}): {APT}\n"


def test_the_check_comes_first_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    (pytest_call,) = re.findall(r"(?m)^PYTEST := (.*)$", makefile)
    recipe = makefile.split("\nslurm-test:")[1].split("\n\n")[0].replace("$(PYTEST)", pytest_call).splitlines()[1:]
    assert [line.split("-m ")[1].split()[0] for line in recipe] == ["tests.slurm.missing", "pytest"]
    assert not any(line.lstrip("\t@").startswith("-") or "|" in line for line in recipe)  # no failure is passed over


def test_tests_are_skipped_with_what_to_install():
    arguments = ["-rs", "-p", "no:cacheprovider", "tests/slurm/test_cluster.py", "-k", "idle"]
    done = without_slurm(f"import pytest; sys.exit(pytest.main({arguments}))")
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert line.endswith(APT)


def test_continuous_integration_installs_these_packages():
    installs = [line.split() for line in (ROOT / ".ci/slurm").read_text().splitlines() if "install" in line.split()]
    timeout = ["-o", "DPkg::Lock::Timeout=600"]  # another process may hold the package manager's lock
    assert [[word for word in words[1:] if word not in timeout] for words in installs] == [APT.split()]
