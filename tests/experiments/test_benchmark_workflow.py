"""The benchmark of planning, at tiny size: it runs, finds its states as it says, and prints."""

import os
import re

import pytest
from benchmarks import workflow

from tests.workflow import forked
from tests.workflow.conftest import ROOT

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20), pytest.mark.workflow]


def snakemake(root, *arguments):
    """The benchmark's own, in a fork that has imported Snakemake: the projects take ten calls to make."""
    environment = {"ALPS_ACCOUNT": "none"} | os.environ | {"PYTHONPATH": str(root / "src")}
    code, text = forked.snakemake([*arguments], root, environment)
    assert code == 0, text[-2000:]
    return text


def test_planning_is_timed_with_real_rules_and_code(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    timed = workflow._timed

    def really_timed(root, *arguments):
        with monkeypatch.context() as inner:
            inner.setattr(workflow, "_snakemake", own)
            return timed(root, *arguments)

    own = workflow._snakemake
    monkeypatch.setattr(workflow, "_snakemake", snakemake)
    monkeypatch.setattr(workflow, "_timed", really_timed)
    assert workflow.main(["--runs", "3", "--rounds", "1", "--states", "checkout", "--profiles", "alps"]) == 0
    printed = capsys.readouterr().out
    row = re.search(r"^ +10 +(\d+) +([\d.]+)  checkout +alps +([\d.]+) ", printed, re.MULTILINE)
    assert row, printed
    jobs, source_files, seconds = (float(group) for group in row.groups())
    assert jobs > 10 and source_files > 20 and seconds > 0
    assert re.search(r"^ +start +[\d.]+ ", printed, re.MULTILINE) and "cold" not in printed


def test_planning_needs_a_project(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert workflow.main([]) == 2
    assert "workflow/Snakefile" in capsys.readouterr().err
    monkeypatch.chdir(ROOT)
    assert workflow.main(["--runs", "0"]) == 2
    assert "1 or more" in capsys.readouterr().err
