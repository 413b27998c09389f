"""Facts that could not be had: their reason stands in records, no reader takes it for a value, and
pages count them.
"""

import subprocess

import pytest

from tests import logs
from tokenscale.analysis import tables
from tokenscale.base.facts import is_unknown, list_unknown, unknown_fact
from tokenscale.report import summary
from tokenscale.runs.records import provenance

FACTS = {
    "git": {"commit": unknown_fact("git is not installed")},
    "hardware": {"cpu": unknown_fact("no name"), "memory_bytes": unknown_fact("no sysconf")},
}


def test_a_page_counts_the_unknown_facts_of_its_records(tmp_path):
    lacking, whole = (logs.settings(steps=10, repeat=repeat) for repeat in range(2))
    logs.write_run(tmp_path / "runs", lacking, **FACTS)
    logs.write_run(tmp_path / "runs", whole)
    folder = logs.ingested(tmp_path, [lacking, whole])
    head = tables.read_experiment(folder)
    assert [(fact["fact"], fact["records"]) for fact in head["unknown"]] == [
        ("git.commit", 1),
        ("hardware.cpu", 1),
        ("hardware.memory_bytes", 1),
    ]
    text = summary.describe_unknown([head])
    assert text.startswith("3 facts unknown: git.commit of 1 record (git is not installed)")
    found = {row["repeat"]: row for row in logs.read_runs(folder).to_pylist()}
    columns = ("cpu", "machine_memory_bytes", "git_commit")
    assert [found[0][name] for name in columns] == [None] * 3
    assert found[0]["validity"] == "valid" and found[1]["cpu"] == "A test CPU"
    assert summary.describe_unknown([head | {"unknown": []}]) == ""


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (FileNotFoundError(2, "No such file or directory"), "No such file or directory"),
        (subprocess.TimeoutExpired("git", 20), "no answer"),
        (subprocess.CalledProcessError(128, ["git", "rev-parse"]), "exit code 128"),
    ],
)
def test_a_commit_that_git_does_not_tell_has_a_reason(failure, why, monkeypatch):
    def fail(*arguments, **options):
        raise failure

    monkeypatch.setattr(subprocess, "run", fail)
    state, diff = provenance.read_git_state()
    assert diff == "" and why in dict(list_unknown(state))["commit"]


def test_a_machine_that_does_not_describe_itself_has_reasons(monkeypatch):
    def fail(*arguments):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(provenance, "read_text", lambda path: "")
    monkeypatch.setattr(provenance.os, "sysconf", fail)
    monkeypatch.setattr(provenance.os, "getloadavg", fail)
    found = provenance.describe_machine()
    assert {name for name, value in found.items() if is_unknown(value)} == {
        "cpu",
        "memory_bytes",
        "load_average_1min",
    }


def test_the_energy_of_a_device_without_a_counter_has_a_reason():
    assert provenance.Energy(None).unknown is None, "a CPU has none to read"
    found = provenance.Energy("00000000:00:00.0")
    assert found.joules() is None and is_unknown(found.unknown)
