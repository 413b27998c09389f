"""What `doctor` concludes: each lack stops what needs it, and nothing else."""

import pytest

from tests.machines import GPU
from tokenscale.cli import doctor
from tokenscale.cli.doctor_checks import Finding
from tokenscale.cli.doctor_python import GROUPS, list_packages


def all_well():
    """Findings of a machine of two cores without GPU where nothing is wrong."""
    findings = {name: Finding("ok", f"fine {name}") for name in doctor.CHECKS}
    for group in GROUPS:
        states = {name: {"state": "ok", "text": ""} for name in list_packages(group)}
        findings[f"{group} packages"] = Finding("ok", "all", values={"packages": states})
    return findings | {
        "configuration": Finding("ok", "", values={"ranks": 2}),
        "tools": Finding("ok", "", values={"make": True, "git": True}),
        "cores": Finding("ok", "", values={"usable": 2}),
        "gpu": Finding("no", "none", "buy one", {"devices": []}),
        "nccl": Finding("no", "no GPU"),
        "slurm": Finding("no", "sbatch not found", values={"account": None}),
    }


def lacking(distribution):
    group = next(group for group in GROUPS if distribution in list_packages(group))
    finding = all_well()[f"{group} packages"]
    wrong = {distribution: {"state": "missing", "text": f"{distribution} is missing"}}
    return {
        f"{group} packages": Finding(
            "no", "", f"install {distribution}", {"packages": finding.values["packages"] | wrong}
        )
    }


ALL = ["demo", "CPU", "GPUs", "bf16", "SLURM", "report", "tests"]


def possible(findings):
    return [
        name for name, capability in zip(ALL, doctor.derive_capabilities(findings), strict=True) if capability.possible
    ]


WITHOUT = ["demo", "CPU", "bf16", "report", "tests"]  # what a machine without GPU and SLURM can


@pytest.mark.parametrize(
    "change, left",
    [
        ({}, WITHOUT),
        (lacking("torch"), ["report"]),
        (lacking("pydantic"), ["report"]),
        (lacking("snakemake-executor-plugin-slurm"), ["demo", "CPU", "bf16", "report"]),
        (lacking("pygments"), ["demo", "CPU", "bf16", "report"]),
        (lacking("mistral-common"), ["report"]),
        (lacking("duckdb"), ["CPU", "bf16"]),
        (lacking("pytest"), ["demo", "CPU", "bf16", "report"]),
        ({"python": Finding("no", "3.9")}, ["bf16"]),
        ({"results folder": Finding("no", "full")}, ["bf16"]),
        ({"memory": Finding("no", "small")}, ["bf16", "report"]),
        ({"project": Finding("no", "elsewhere")}, ["CPU", "bf16", "report"]),
        ({"configuration": Finding("no", "wrong")}, ["CPU", "bf16", "report"]),
        ({"gloo": Finding("no", "hangs")}, ["bf16", "report"]),
        ({"bf16": Finding("no", "wrong product")}, ["demo", "CPU", "report", "tests"]),
        ({"tools": Finding("note", "", values={"make": False, "git": False})}, ["demo", "CPU", "bf16", "report"]),
        ({"trainer packages": Finding("no", "the check itself failed")}, []),
    ],
)
def test_each_lack_stops_what_needs_it_and_nothing_else(change, left):
    assert possible(all_well() | change) == left


def gpus(number, nccl="ok", verdict="ok"):
    return {
        "gpu": Finding(verdict, "GPUs", values={"devices": [GPU] * number}),
        "nccl": Finding(nccl, "cannot reach each other", "NCCL_DEBUG=INFO"),
    }


@pytest.mark.parametrize(
    "change, left, ranks",
    [
        (gpus(4), ["demo", "CPU", "GPUs", "bf16", "report", "tests"], "1 to 4 ranks"),
        (gpus(1), ["CPU", "GPUs", "bf16", "report", "tests"], "1 rank"),  # the demo's two ranks need two
        (gpus(4, nccl="no"), ["CPU", "GPUs", "bf16", "report", "tests"], "1 rank only: cannot reach each other"),
        (gpus(2, verdict="no"), ["CPU", "bf16", "report", "tests"], "gpu: GPUs"),
    ],
)
def test_gpus_are_taken_where_there_are_some(change, left, ranks):
    findings = all_well() | change
    assert possible(findings) == left
    assert doctor.derive_capabilities(findings)[ALL.index("GPUs")].reason == ranks
    assert "`device: cpu`" in doctor.derive_capabilities(findings)[ALL.index("CPU")].reason


def test_one_gpu_cannot_hold_two_ranks_but_the_cpu_can():
    findings = all_well() | gpus(1)
    demo = doctor.derive_capabilities(findings)[0]
    assert not demo.possible and demo.next == "CUDA_VISIBLE_DEVICES= make run"
    findings["configuration"].values["gpu_ranks"] = 0  # every run says `device: cpu`
    demo = doctor.derive_capabilities(findings)[0]
    assert demo.possible and "on the CPU" in demo.reason


@pytest.mark.parametrize(
    "change, yes",
    [
        ({}, True),
        ({"slurm": Finding("note", "", values={"account": None})}, False),
        ({"slurm": Finding("no", "", values={"account": "g1"})}, False),
        (lacking("snakemake-executor-plugin-slurm"), False),
        ({"project": Finding("note", "no link", "ln")}, False),
    ],
)
def test_the_cluster_profile_needs_its_programs_plugin_account_and_link(change, yes):
    findings = all_well() | {"slurm": Finding("ok", "slurm 22.05.8", values={"account": "g1"})} | change
    assert ("SLURM" in possible(findings)) is yes


def test_the_exit_code_and_the_last_line_say_whether_the_demo_can_run():
    for change, last in (
        ({}, None),
        (lacking("torch"), "make run cannot run here yet. First: install torch"),
        ({"results folder": Finding("no", "full", "free 100 MB")}, "make run cannot run here yet. First: free 100 MB"),
    ):
        findings = all_well() | change
        text = doctor.Examination(findings, doctor.derive_capabilities(findings), 1.0).render()
        if last:
            assert text.splitlines()[-1] == last
        else:
            assert "cannot run" not in text
