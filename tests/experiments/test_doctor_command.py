import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.machines import ROOT, TORCH
from tokenscale.cli import doctor
from tokenscale.cli.doctor import GROUPS, PURPOSES, list_packages, module_of

pytestmark = [pytest.mark.experiment, pytest.mark.slow(9)]


def run_doctor(*arguments, without=(), **environment):
    code = f"import sys\nfor name in {list(without)!r}: sys.modules[name] = None\n"
    code += f"from tokenscale.cli.main import main\nsys.exit(main({['doctor', *arguments]!r}))"
    command = [sys.executable, "-c", code]
    env = os.environ | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, cwd=ROOT, env=env, text=True, timeout=180, **pipes)


def test_json_holds_every_check_and_the_verdict_and_two_real_processes_meet_here(tmp_path):
    results = tmp_path / "résultats"  # a folder beyond ASCII
    done = run_doctor("--json", "--results", str(results))
    said = json.loads(done.stdout)
    findings = {f["name"]: f for f in said["findings"]}
    assert list(findings) == [name for name, _ in doctor.CHECKS]
    assert not [name for name, f in findings.items() if "the check itself failed" in f["fact"]]
    assert {f["verdict"] for f in said["findings"]} <= {"ok", "note", "no"} and all(
        f["fact"] for f in said["findings"]
    )
    assert done.returncode == (0 if said["demo"] else 2)
    assert not results.exists()  # a check makes nothing
    assert findings["gloo"]["verdict"] == "ok" and findings["gloo"]["values"]["ranks"] == 2


def test_it_runs_without_any_package_and_says_which_are_missing():
    done = run_doctor(without=map(module_of, list_packages(*GROUPS)), PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout
    lines = done.stdout.splitlines()
    for group in GROUPS:
        line = next(line for line in lines if line.startswith(f"{group} packages"))
        assert line.split()[2] == "no" and f"for {PURPOSES[group]}, missing: " in line
    assert "missing: torch, numpy" in done.stdout and "missing: snakemake, " in done.stdout
    # what does not need packages is examined all the same
    assert next(line for line in lines if line.startswith("cores")).split()[1] in ("ok", "note")
    assert (
        lines[-1].startswith("make run cannot run here yet. First: ")
        and "pip install -e '.[test]'" in lines[-1]
    )


def test_without_a_loopback_interface_ranks_are_refused_before_they_start():
    """What a hanging all-reduce then means: tests/unit/test_doctor.py."""
    # no interface is up there, not even the loopback one
    offline = ["unshare", "--map-root-user", "--net"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*offline, "true"], capture_output=True).returncode
    ):
        pytest.skip("no network namespaces here")
    code = """
from tokenscale.base.errors import UserError
from tokenscale.runs.launch.ranks import run_ranks
try:
    print(run_ranks(["true"], 2))
except UserError as error:
    print(error)
"""
    met, refused = (
        subprocess.check_output([*prefix, sys.executable, "-c", code], text=True)
        for prefix in ([], offline)
    )
    assert met == "0\n"
    assert "the loopback interface is down" in refused and "ip link set lo up" in refused


def test_a_check_that_breaks_is_a_line_like_any_other(monkeypatch, tmp_path):
    def breaks(context):
        raise RuntimeError("the disk sings")

    monkeypatch.setattr(
        doctor, "probe", lambda modules: {"broken": {}, "torch": TORCH, "ended": ""}
    )
    fine = [(name, lambda context: doctor.Finding("ok", "fine")) for name, _ in doctor.CHECKS]
    monkeypatch.setattr(
        doctor, "CHECKS", [(name, breaks if name == "memory" else check) for name, check in fine]
    )
    found = doctor.examine(tmp_path)
    assert found["memory"].verdict == "no"
    assert "the check itself failed: RuntimeError: the disk sings" in found["memory"].fact
    assert (
        "Traceback" not in doctor.render(found)
        and doctor.find_first_lack(found) == "report this as a bug"
    )
