"""`ready` says whether experiments can start, and names each thing that is missing with the step that mends it."""

import argparse
import shutil
from dataclasses import replace

import pytest

from tests.machines import GPU, ROOT
from tokenscale.cli import main, ready
from tokenscale.cli.doctor_checks import Finding
from tokenscale.cli.plan_prices import RunPrices
from tokenscale.runs.records import provenance
from tokenscale.settings.config import load_config

WELL = {name: Finding("ok", "fine") for name in {*ready.HERE, *ready.SUBMITTED}}


@pytest.fixture(autouse=True)
def project(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ALPS_ACCOUNT", "g1")
    monkeypatch.setattr(RunPrices, "is_done", lambda prices, run_id: False)  # whatever this clone has built


def find(profile=None, machine=(), experiments=("demo",), **overrides):
    config = load_config(profile=profile, overrides=overrides)
    config.machine = replace(config.machine, **dict(machine))
    names = config.select_experiments(list(experiments))
    return list(ready.find_problems(config, names, RunPrices(config), profile))


ALPS = {"container_digest": f"sha256:{'0' * 64}"}


def test_nothing_is_missing_for_the_demo_here_nor_on_a_described_cluster():
    assert find() == [] and find("alps", ALPS) == []


def without_account(monkeypatch):
    monkeypatch.delenv("ALPS_ACCOUNT")
    return find("alps", ALPS), "export ALPS_ACCOUNT=<project>"


def without_digest(monkeypatch):
    return find("alps"), "container_digest"


def without_a_package(monkeypatch):
    packages = tuple(name for name in load_config(profile="alps").machine.container_packages if name != "numpy")
    return find("alps", ALPS | {"container_packages": packages}), "container_packages"


def with_a_small_budget(monkeypatch):
    return find("alps", ALPS, budget={"node_hours": 0.5}), "budget={node_hours:"


def with_little_memory(monkeypatch):
    monkeypatch.setattr(provenance, "read_memory", lambda: (1 << 20, None))
    return find(), "micro_batch"


def with_small_gpus(monkeypatch):
    return find("alps", ALPS | {"gpu_memory_gib": 0.001}), "micro_batch"


def with_a_full_disk(monkeypatch):
    full = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    return find(), "free space"


CASES = [without_account, without_digest, without_a_package, with_a_small_budget, with_little_memory, with_small_gpus,
         with_a_full_disk]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_each_lack_is_one_problem_with_its_next_step(case, monkeypatch):
    problems, following = case(monkeypatch)
    assert len(problems) == 1, problems
    assert following in " ".join(problems[0])


@pytest.mark.parametrize(
    ("findings", "lacks"),
    [
        ({}, 0),
        ({"trainer packages": Finding("no", "missing: torch", "pip install torch")}, 1),
        ({"results folder": Finding("no", "read-only", "choose another")}, 1),
        ({"gpu": Finding("no", "none"), "nccl": Finding("no", "no GPU")}, 0),  # the CPU does
        ({"gloo": Finding("no", "hangs")}, 1),
        ({"gpu": Finding("ok", "", values={"devices": [GPU]})}, 1),  # there are runs of two ranks and more
        ({"gpu": Finding("ok", "", values={"devices": [GPU] * 4})}, 0),
        ({"gpu": Finding("ok", "", values={"devices": [GPU] * 4}), "nccl": Finding("no", "no path")}, 1),
    ],
)
def test_what_doctor_finds_counts_where_runs_need_it(findings, lacks):
    config = load_config(overrides={"scale": "workstation" if findings.get("gpu") else "demo"})  # demo: device cpu
    assert len(list(ready.judge_machine(config, ["demo"], WELL | findings))) == lacks


def test_the_first_line_is_the_verdict_and_the_exit_code_agrees(monkeypatch, capsys):
    parser = argparse.ArgumentParser()
    ready.add_arguments(parser)
    for findings, verdict, exit_code in (
        (WELL, "ready: ", 0),
        ({"python": Finding("no", "3.9", "install")}, "not ready, 1", 2),
    ):
        monkeypatch.setattr(ready.doctor, "examine", lambda results, only, findings=findings: findings)
        assert ready.run(parser.parse_args(["demo"])) == exit_code
        assert capsys.readouterr().out.startswith(verdict)
    assert main.main(["ready", "no-such-experiment"]) == 2
