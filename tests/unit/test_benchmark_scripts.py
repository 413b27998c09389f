"""Benchmarks of this project's own speed are scripts of the repository; the command names their new place."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tokenscale.cli import benchmark
from tokenscale.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name, script", benchmark.SCRIPTS.items())
@pytest.mark.parametrize("options", [[], ["--rounds", "3", "--output", "o.json"]])
def test_the_command_names_the_script_that_took_its_place(capsys, name, script, options):
    assert main(["benchmark", name, *options]) == 2
    assert f"next  python {script} --help" in capsys.readouterr().err
    assert (ROOT / script).is_file()


@pytest.mark.parametrize("script", sorted(benchmark.SCRIPTS.values()))
def test_a_script_runs_from_any_folder_and_prints_its_help(tmp_path, script):
    command = [sys.executable, ROOT / script, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and f"usage: python {script} " in done.stdout, done.stderr


def test_no_installed_module_imports_a_script():
    for path in (ROOT / "src").rglob("*.py"):
        assert "import benchmarks" not in (text := path.read_text()) and "from benchmarks" not in text, path


def test_the_start_of_a_rank_is_measured():
    """The second of eight ranks opens the record, eight indices, its own file and the first's, with the step counts."""
    command = [sys.executable, ROOT / "benchmarks/startup.py", "load", "--model", "gpt2-micro", "--ranks", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout)["opens"] == 1 + 8 + 2, done.stderr
