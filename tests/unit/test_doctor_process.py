"""What `doctor` says of environment variables."""

import json
import os
import sys

import pytest

from tests.machines import asked
from tokenscale.cli import doctor_checks
from tokenscale.runs.launch.ranks import run_ranks


@pytest.mark.parametrize(
    "variables, verdict, words",
    [
        ({}, "ok", "nothing that changes training"),
        ({"NCCL_P2P_DISABLE": "1"}, "ok", "NCCL_P2P_DISABLE=1"),
        ({"WORLD_SIZE": "4", "RANK": "1"}, "note", "unset RANK WORLD_SIZE: with them, `train`"),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, "note", "unset RANK WORLD_SIZE: with them, `train`"),
        ({"RANK": "0"}, "ok", "RANK=0"),  # nobody takes that for torchrun
        ({"WORLD_SIZE": "4"}, "ok", "WORLD_SIZE=4"),
        ({"PYTHONOPTIMIZE": "1"}, "note", "unset PYTHONOPTIMIZE"),
    ],
)
def test_variables_that_change_training_are_told(monkeypatch, variables, verdict, words):
    monkeypatch.setattr(os, "environ", {"PATH": "/bin", "HF_TOKEN": "hf_secret"} | variables)
    found = doctor_checks.check_environment(asked())
    assert found.verdict == verdict and words in f"{found.fact} {found.next}"
    assert "hf_secret" not in json.dumps(found.values) + found.fact


@pytest.mark.parametrize("world_size", [1, 2])
def test_runs_of_the_workflow_start_without_what_another_launcher_left(monkeypatch, world_size):
    """What makes it a note and no `no`."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    code = f"import os; assert os.environ.get('WORLD_SIZE', '1') == '{world_size}' and os.environ.get('RANK') != '3'"
    assert run_ranks([sys.executable, "-c", code], world_size) == 0
