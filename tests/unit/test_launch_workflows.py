"""One call of Snakemake works in a folder; what a killed one left is taken off."""

import os
import subprocess
import sys

import pytest

from tokenscale.base import files
from tokenscale.base.errors import UserError
from tokenscale.base.files import name_process
from tokenscale.cli.snakemake import internals
from tokenscale.runs.launch import lock

ENTER = (
    "import sys; from pathlib import Path; from tokenscale.runs.launch import lock\n"
    "lock.enter_workflow(sys.argv[2:], Path(sys.argv[1])); print('in', flush=True); "
    "sys.stdin.read()"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_held", [])
    made = tmp_path / ".snakemake"
    (made / "locks").mkdir(parents=True)
    (made / "locks/0.input.lock").write_text("results/corpus/small/manifest.json\n")
    return made


@pytest.fixture
def other(folder):
    command = [sys.executable, "-c", ENTER, folder, "all"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "in\n"
    (folder / "locks").mkdir(exist_ok=True)
    yield process
    process.communicate("")


def test_what_a_killed_one_left_is_taken_off(folder, other, capsys):
    assert f"process {other.pid} on" in (folder / lock.OWNER).read_text()
    other.kill()
    other.wait()
    (folder / "locks/0.input.lock").touch()
    assert lock.enter_workflow(["all"], folder) and not (folder / "locks").exists()
    assert (
        "was killed" in capsys.readouterr().err
        and str(os.getpid()) in (folder / lock.OWNER).read_text()
    )


def test_a_second_is_refused_and_names_the_first_which_leaves_no_name(folder, other):
    for arguments in (["all"], ["report_now"], ["--unlock"]):
        with pytest.raises(UserError, match=f"process {other.pid} on"):
            lock.enter_workflow(arguments, folder)
    assert (folder / "locks").exists() and lock.enter_workflow(["-n"], folder) is False
    other.communicate("")
    assert (folder / lock.OWNER).read_text() == "" and lock.enter_workflow(["all"], folder)


@pytest.mark.parametrize(
    "shared, boot, refused", [(True, "0" * 8, True), (False, "0" * 8, False), (True, None, False)]
)
def test_an_owner_of_another_machine_counts_where_locks_may_not_reach_it(
    folder, monkeypatch, shared, boot, refused
):
    monkeypatch.setattr(lock, "is_shared", lambda path: shared)
    mine = files.get_boot_id()[:8]
    (folder / lock.OWNER).write_text(
        name_process().replace(mine, boot or mine).replace(" on ", " on old-")
    )
    if refused:
        with pytest.raises(UserError, match="may still be running"):
            lock.enter_workflow(["all"], folder)
    assert lock.enter_workflow(["--unlock"] if refused else ["all"], folder)
    assert not (folder / "locks").exists()


def test_a_link_in_place_of_the_lock_is_not_followed(folder, tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    (folder / lock.OWNER).symlink_to(tmp_path / "thesis.tex")
    with pytest.raises(UserError, match="not a regular file"):
        lock.enter_workflow(["all"], folder)
    assert (tmp_path / "thesis.tex").read_text() == "all of it"


@pytest.mark.parametrize(
    "arguments", [["-n"], ["-np", "all"], ["--dry-run"], ["--lint"], ["--report", "report.zip"]]
)
def test_who_only_looks_changes_nothing(folder, arguments):
    lock.enter_workflow(arguments, folder)
    assert (folder / "locks/0.input.lock").exists() and os.listdir(folder) == ["locks"]


def test_a_folder_that_this_user_cannot_write_is_one_message(folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="cannot write"):
        internals.check_folder(folder)
