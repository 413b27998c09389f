"""Where SLURM is not installed, nobody is left in doubt whether these tests ran."""

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


def test_tests_are_skipped_with_what_to_install():
    arguments = ["-rs", "-p", "no:cacheprovider", "tests/slurm/test_cluster.py", "-k", "variables"]
    done = without_slurm(f"import pytest; sys.exit(pytest.main({arguments}))")
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert line.endswith(APT)
