"""A lock that a killed Snakemake left is taken off; that of a living one, or of one on another node, is not."""

import os
import platform
import subprocess
import sys

import pytest

from tokenscale.runs.launch import lock

ENTER = (
    "import sys; from pathlib import Path; from tokenscale.runs.launch import lock\n"
    "lock.enter_workflow(sys.argv[2:], Path(sys.argv[1])); print('in', flush=True); sys.stdin.read()"
)


@pytest.fixture
def folder(tmp_path):
    """A `.snakemake` whose lock somebody left."""
    made = tmp_path / ".snakemake"
    (made / "locks").mkdir(parents=True)
    (made / "locks/0.input.lock").write_text("results/corpus/small/manifest.json\n")
    return made


def started(folder, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", ENTER, folder, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "in\n"
    return process


def ended(process) -> str:
    return process.communicate("")[1]


def test_what_a_killed_one_left_is_taken_off(folder):
    first = started(folder, "all")
    (folder / "locks").mkdir(exist_ok=True)
    (folder / "locks/0.input.lock").touch()
    first.kill()
    first.wait()
    second = started(folder, "all")
    assert not (folder / "locks").exists()
    assert "removing the lock of a Snakemake process that was killed" in ended(second)
    assert (folder / "tokenscale.owners").read_text() == "", "an orderly end leaves no name"


def test_that_of_a_living_one_stays_and_its_owner_is_named(folder):
    first = started(folder, "all")
    (folder / "locks").mkdir(exist_ok=True)
    (folder / "locks/0.input.lock").touch()
    second = started(folder, "all")
    assert f"Snakemake is running in this folder: process {first.pid} on {platform.node()}" in ended(second)
    assert (folder / "locks/0.input.lock").exists()
    third = started(folder, "all")  # the second's end took nothing from the first
    assert f"process {first.pid} on" in ended(third)
    ended(first)


def test_that_of_another_node_stays_until_it_is_unlocked(folder):
    (folder / "tokenscale.owners").write_text("process 7 on login9\n")
    assert "may still be running in this folder: process 7 on login9" in ended(started(folder, "all"))
    assert (folder / "locks/0.input.lock").exists()
    ended(started(folder, "--unlock"))
    assert not (folder / "locks").exists() and "login9" not in (folder / "tokenscale.owners").read_text()


@pytest.mark.parametrize("arguments", [["-n"], ["-np", "all"], ["--dry-run"], ["--lint"], ["--report", "report.zip"]])
def test_who_only_looks_changes_nothing(folder, arguments):
    lock.enter_workflow(arguments, folder)
    assert (folder / "locks/0.input.lock").exists() and os.listdir(folder) == ["locks"]
