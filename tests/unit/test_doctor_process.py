"""What `doctor` says of environment variables, encodings and the clock."""

import json
import os
import sys

import pytest

from tests.machines import asked
from tokenscale.diagnosis import process


@pytest.mark.parametrize(
    "variables, verdict, words",
    [
        ({}, "ok", "nothing that changes training"),
        ({"NCCL_P2P_DISABLE": "1"}, "ok", "NCCL_P2P_DISABLE=1"),
        ({"WORLD_SIZE": "4", "RANK": "1"}, "no", "unset RANK WORLD_SIZE"),
        ({"RANK": "0"}, "note", "unset RANK"),
        ({"PYTHONOPTIMIZE": "1"}, "note", "unset PYTHONOPTIMIZE"),
    ],
)
def test_variables_that_change_training_are_told(monkeypatch, variables, verdict, words):
    monkeypatch.setattr(os, "environ", {"PATH": "/bin", "HF_TOKEN": "hf_secret"} | variables)
    found = process.environment(asked())
    assert found.verdict == verdict and words in f"{found.fact} {found.next}"
    assert "hf_secret" not in json.dumps(found.values) + found.fact


def test_an_output_that_is_not_utf_8_is_a_note(monkeypatch):
    class Terminal:
        encoding = "latin-1"

    monkeypatch.setattr(sys, "stdout", Terminal())
    found = process.locale(asked())
    assert found.verdict == "note" and "PYTHONUTF8" in found.next


def test_a_clock_that_runs_backwards_is_no(monkeypatch):
    assert process.clock(asked()).verdict == "ok"
    ticks = iter(range(2000, 0, -1))
    monkeypatch.setattr(process.time, "perf_counter", lambda: next(ticks))
    assert process.clock(asked()).verdict == "no"
