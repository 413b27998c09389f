"""Golden tables: how srun starts the ranks, for every world size under every profile."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tokenscale.runs.launch import start
from tokenscale.settings import machine, profile
from tokenscale.settings.layout import geometry
from tokenscale.settings.machine import Machine

ROOT = Path(__file__).parents[2]
SIZES = (1, 2, 4, 8, 12, 16)
#: nodes and ranks of each; what follows is one for all sizes
STARTED = {
    1: "--nodes=1 --ntasks=1 --ntasks-per-node=1 --distribution=block:block",
    2: "--nodes=1 --ntasks=2 --ntasks-per-node=2 --distribution=block:block",
    4: "--nodes=1 --ntasks=4 --ntasks-per-node=4 --distribution=block:block",
    8: "--nodes=2 --ntasks=8 --ntasks-per-node=4 --distribution=block:block",
    12: "--nodes=3 --ntasks=12 --ntasks-per-node=4 --distribution=block:block",
    16: "--nodes=4 --ntasks=16 --ntasks-per-node=4 --distribution=block:block",
}
BOUND = {
    "alps": "--cpus-per-task=72 --gpus-per-task=1 --cpu-bind=cores --mem-bind=local --kill-on-bad-exit=1"
    f" --output=out/rank=%5t.log --environment={ROOT}/profiles/alps/train.toml python",
    "slurm-test": "--cpus-per-task=1 --gpus-per-task=1 --cpu-bind=none --kill-on-bad-exit=1"
    " --output=out/rank=%5t.log PYTHON",
}


@pytest.fixture(params=BOUND)
def site(request):
    """(a profile's name, its machine)."""
    config = profile.load_profile_config(request.param, ROOT)
    return request.param, machine.load_machine(config["machine"], ROOT)


@pytest.mark.parametrize("size", SIZES)
def test_how_srun_starts_the_ranks(site, size, monkeypatch):
    name, where = site
    monkeypatch.setattr(start.sys, "executable", "PYTHON")
    shape = geometry(size, where.gpus_per_node)
    rank = start.rank_argv(where, shape, run="{}", directory=Path("d"), attempt=0, manifests={})
    words = start.srun_argv(rank, shape, where, name="run", outputs=Path("out"), root=ROOT)
    network = " --network 'AWS Libfabric'" if name == "alps" and shape.nodes > 1 else ""
    links = """ --least-links '{"node":60.0,"network":30.0}'""" if name == "alps" else ""
    asked = f"--settings '{{}}' --directory d --attempt 0 --hang-s 1800 --srun --nodes {shape.nodes}{network}{links}"
    assert shlex.join(words) == f"srun --job-name=run {STARTED[size]} {BOUND[name]} -m tokenscale rank {asked}"


def test_runs_that_share_a_node_take_only_their_part(site):
    _, where = site
    shape = geometry(1, where.gpus_per_node)
    words = start.srun_argv(["rank"], shape, where, name="run", outputs=Path("out"), root=ROOT, share=4)
    assert {"--exact", "--mem=0"} <= set(words)


def test_gpus_are_bound_to_a_rank_or_shown_to_all_ranks_of_a_node():
    where = replace(machine.load_machine("profiles/alps/machine.toml", ROOT), gpu_bind="node")
    words = start.srun_argv(["rank"], geometry(8, 4), where, name="run", outputs=None, root=ROOT)
    assert "--gpus-per-task=1" not in words and {"--gpus-per-node=4", "--gpu-bind=none"} <= set(words)
    rank = start.rank_argv(where, geometry(8, 4), run="{}", directory=Path("d"), attempt=0, manifests={})
    assert json.loads(rank[rank.index("--least-links") + 1]) == {"node": 60, "network": 30}
    assert [key for key, _ in Machine(gpu_bind="node").problems()] == ["gpu_bind"]
