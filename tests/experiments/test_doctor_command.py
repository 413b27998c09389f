"""`doctor` as a command: what it says of this machine, and of one that lacks packages or a network."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.machines import ROOT, TORCH
from tokenscale.cli import doctor
from tokenscale.cli.doctor import GROUPS, PURPOSES, list_packages, module_of

pytestmark = [pytest.mark.experiment, pytest.mark.slow(17)]


def run_doctor(*arguments, without=(), cwd=ROOT, **environment):
    code = f"import sys\nfor name in {list(without)!r}: sys.modules[name] = None\n"
    code += f"from tokenscale.cli.main import main\nsys.exit(main({['doctor', *arguments]!r}))"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The examination of this machine as JSON, where a folder beyond ASCII is asked for."""
    results = tmp_path_factory.mktemp("doctor") / "résultats"
    return run_doctor("--json", "--results", str(results)), results


def test_json_holds_every_check_and_the_verdict(here):
    done, results = here
    said = json.loads(done.stdout)
    findings = {f["name"]: f for f in said["findings"]}
    assert list(findings) == [name for name, _ in doctor.CHECKS]
    assert {f["verdict"] for f in said["findings"]} <= {"ok", "note", "no"} and all(f["fact"] for f in said["findings"])
    assert done.returncode == (0 if said["demo"] else 2)
    assert not results.exists()  # a check makes nothing


def test_two_real_processes_meet_here(here):
    findings = {f["name"]: f for f in json.loads(here[0].stdout)["findings"]}
    assert findings["gloo"]["verdict"] == "ok" and findings["gloo"]["values"]["ranks"] == 2
    assert 0.01 < findings["gloo"]["values"]["gb_s"] < 1000
    assert not [name for name, f in findings.items() if "the check itself failed" in f["fact"]]


def test_it_runs_without_any_package_and_says_which_are_missing(tmp_path):
    done = run_doctor(without=map(module_of, list_packages(*GROUPS)), PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout
    lines = done.stdout.splitlines()
    for group in GROUPS:
        line = next(line for line in lines if line.startswith(f"{group} packages"))
        assert line.split()[2] == "no" and f"for {PURPOSES[group]}, missing: " in line
    assert "missing: torch, numpy" in done.stdout and "missing: snakemake, " in done.stdout
    # what does not need packages is examined all the same
    assert next(line for line in lines if line.startswith("cores")).split()[1] in ("ok", "note")
    assert lines[-1].startswith("make run cannot run here yet. First: ") and "pip install -e '.[test]'" in lines[-1]


def offline():
    """A prefix that starts a program where no interface is up, not even the loopback one; or None."""
    prefix = ["unshare", "--map-root-user", "--net"]
    usable = shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    return prefix if usable else None


@pytest.mark.skipif(offline() is None, reason="no network namespaces here")
def test_without_a_loopback_interface_no_ranks_and_no_demo():
    done = subprocess.run(
        [*offline(), sys.executable, "-m", "tokenscale", "doctor", "--json"], cwd=ROOT, capture_output=True, text=True
    )
    said = json.loads(done.stdout)
    verdicts = {f["name"]: f["verdict"] for f in said["findings"]}
    assert (verdicts["gloo"], verdicts["trainer packages"]) == ("no", "ok")
    assert done.returncode == 2 and not said["demo"]


def test_a_check_that_breaks_is_a_line_like_any_other(monkeypatch, tmp_path):
    def breaks(context):
        raise RuntimeError("the disk sings")

    monkeypatch.setattr(doctor, "probe", lambda modules: {"broken": {}, "torch": TORCH, "ended": ""})
    fine = [(name, lambda context: doctor.Finding("ok", "fine")) for name, _ in doctor.CHECKS]
    monkeypatch.setattr(doctor, "CHECKS", [(name, breaks if name == "memory" else check) for name, check in fine])
    found = doctor.examine(tmp_path)
    assert found["memory"].verdict == "no"
    assert found["memory"].fact == "the check itself failed: RuntimeError: the disk sings"
    assert "Traceback" not in doctor.render(found) and doctor.find_first_lack(found) == "report this as a bug"


def test_the_packages_of_a_conclusion_are_enough_for_it():
    """The report's code imports with its packages alone, `doctor` with none: the others are made unimportable."""
    report = [module_of(name) for name in list_packages("report")] + ["numpy", "pyarrow", "packaging"]
    for allowed, modules in (
        (report, ["analysis.ingest", "report.page", "report.pdf", "report.save", "cli.ingest", "cli.report"]),
        ([], ["cli.doctor", "cli.main"]),
    ):
        forbidden = [module for module in map(module_of, list_packages(*GROUPS)) if module not in allowed]
        code = f"import sys\nfor name in {forbidden!r}: sys.modules[name] = None\n"
        code += "import " + ", ".join(f"tokenscale.{module}" for module in modules)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
