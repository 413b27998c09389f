"""How srun starts the ranks, for every world size under every profile, and a measurement on one
GPU.
"""

import json
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tokenscale.base.files import read_arguments
from tokenscale.cli.main import main
from tokenscale.runs.launch import start
from tokenscale.settings import machine, profile
from tokenscale.settings.layout import geometry
from tokenscale.settings.machine import Machine

ROOT = Path(__file__).parents[2]
#: size → nodes and ranks of each; what follows is one for all sizes
STARTED = {
    size: f"--nodes={nodes} --ntasks={size} --ntasks-per-node={ranks} --distribution=block:block"
    for size, nodes, ranks in [(1, 1, 1), (2, 1, 2), (4, 1, 4), (8, 2, 4), (12, 3, 4), (16, 4, 4)]
}
BOUND = {
    "alps": "--cpus-per-task=72 --gpus-per-task=1 --cpu-bind=cores --mem-bind=local "
    "--kill-on-bad-exit=1"
    f" --output=out/rank=%5t.log --environment={ROOT}/profiles/alps/train.toml"
    " --network=disable_rdzv_get .venv-alps/bin/python",
    "slurm-test": "--cpus-per-task=1 --gpus-per-task=1 --cpu-bind=none --kill-on-bad-exit=1"
    " --output=out/rank=%5t.log PYTHON",
}


@pytest.fixture(params=BOUND)
def site(request):
    config = profile.load_profile_config(request.param, ROOT)
    return request.param, machine.load_machine(config["machine"], ROOT)


@pytest.mark.parametrize("size", STARTED)
def test_how_srun_starts_the_ranks(site, size, monkeypatch):
    name, where = site
    monkeypatch.setattr(start.sys, "executable", "PYTHON")
    shape = geometry(size, where.gpus_per_node)
    rank = start.rank_argv(where, shape, run="{}", directory=Path("d"), attempt=0, manifests={})
    words = start.srun_argv(rank, shape, where, name="run", outputs=Path("out"), root=ROOT)
    network = " --network 'AWS Libfabric'" if name == "alps" and shape.nodes > 1 else ""
    links = """ --least-links '{"node":60.0,"network":15.0}'""" if name == "alps" else ""
    asked = (
        f"--settings '{{}}' --directory d --attempt 0 --hang-s 600 --srun --nodes "
        f"{shape.nodes}{network}{links}"
    )
    assert (
        shlex.join(words)
        == f"srun --job-name=run {STARTED[size]} {BOUND[name]} -m tokenscale rank {asked}"
    )


def test_runs_that_share_a_node_take_only_their_part(site):
    _, where = site
    shape = geometry(1, where.gpus_per_node)
    words = start.srun_argv(
        ["rank"], shape, where, name="run", outputs=Path("out"), root=ROOT, share=4
    )
    assert {"--exact", "--mem=0"} <= set(words)


def test_gpus_are_bound_to_a_rank_or_shown_to_all_ranks_of_a_node():
    where = replace(machine.load_machine("profiles/alps/machine.toml", ROOT), gpu_bind="node")
    words = start.srun_argv(["rank"], geometry(8, 4), where, name="run", outputs=None, root=ROOT)
    assert "--gpus-per-task=1" not in words and {"--gpus-per-node=4", "--gpu-bind=none"} <= set(
        words
    )
    rank = start.rank_argv(
        where, geometry(8, 4), run="{}", directory=Path("d"), attempt=0, manifests={}
    )
    assert json.loads(rank[rank.index("--least-links") + 1]) == {"node": 60, "network": 15}
    assert [key for key, _ in Machine(gpu_bind="node").problems()] == ["gpu_bind"]


#: writes down how it was called, and ends as the process that it would start
SRUN = f"""#!{sys.executable}
import json, os, sys
json.dump([sys.argv[1:], dict(os.environ)], open(os.environ["CALLED"], "w"))
sys.exit(7)
"""


def test_srun_starts_one_process_on_one_gpu_in_the_container():
    site = machine.load_machine("profiles/alps/machine.toml", ROOT)
    words = shlex.join(start.build_argv(site, ["benchmark", "inference", "--run", "r"], ROOT))
    bound = BOUND["alps"].replace(" --output=out/rank=%5t.log", "")
    assert words == (
        f"srun --job-name=benchmark {STARTED[1]} {bound} -m tokenscale benchmark inference --run r"
    )


def test_the_verb_ends_as_srun_ends_and_leaves_the_jobs_own_request_out(tmp_path, monkeypatch):
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLED", str(tmp_path / "called.json"))
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    monkeypatch.chdir(tmp_path)
    # 216 kB
    many = [f"results/runs/packed-llama-micro-single-w1-{number:010x}" for number in range(4000)]
    argv = [
        "benchmark",
        "inference",
        "--settings",
        '{"rounds":2}',
        "--run",
        *many,
        "--output",
        "out.json",
    ]
    assert main([*argv, "--site", str(ROOT / "profiles/alps/machine.toml")]) == 7
    words, variables = json.loads((tmp_path / "called.json").read_text())
    asked = [
        "benchmark",
        "inference",
        "--settings",
        '{"rounds":2}',
        "--output",
        "out.json",
        "--run",
        *many,
    ]
    assert read_arguments(words)[-len(asked) :] == asked
    assert variables["SLURM_JOB_ID"] == "41" and "SLURM_CPUS_PER_TASK" not in variables
    assert variables["HF_HUB_OFFLINE"] == "1" and variables["OMP_NUM_THREADS"] == "72"


def test_a_recording_starts_in_the_container_of_trainings(tmp_path, monkeypatch):
    """On the host's Python it would record on a CPU, and its certificate would be one of the CPU."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLED", str(tmp_path / "called.json"))
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.chdir(tmp_path)
    asked = [
        "--run",
        "{}",
        "--store",
        "s.json",
        "--output",
        "parity/llama-1.4b-w1/outcome.json",
        "--arm",
        "e",
    ]
    site = ["--site", str(ROOT / "profiles/alps/machine.toml")]
    assert main(["arm_record", *asked, *site]) == 7
    words, _ = json.loads((tmp_path / "called.json").read_text())
    assert f"--environment={tmp_path}/profiles/alps/train.toml" in words
    assert read_arguments(words)[-len(asked) - 1 :] == ["arm_record", *asked]
    # beside the folder, which the recording empties
    assert [path.name for path in (tmp_path / "parity").iterdir()] == [
        "llama-1.4b-w1.arguments.json"
    ]


def test_every_rule_that_takes_a_gpu_starts_its_command_by_our_srun():
    rules = "\n".join(file.read_text() for file in (ROOT / "workflow/rules").glob("*.smk"))
    on_gpus = [rule for rule in re.split(r"(?m)^(?=rule )", rules) if "gres=" in rule]
    assert len(on_gpus) >= 3
    for rule in on_gpus:
        assert 'mpi="srun"' in rule and "--site {resources.site:q}" in rule, rule[:40]


def test_outside_of_a_job_it_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    argv = ["benchmark", "inference", "--run", "a", "--output", "out.json", "--site"]
    assert main([*argv, str(ROOT / "profiles/alps/machine.toml")]) == 2
    assert "not in a SLURM job" in capsys.readouterr().err
