"""Golden tables: what SLURM is asked for, and how ranks are started, for every world size under every profile.

What sbatch gets is computed by the plugin's own functions: an upgrade that asks for something else turns these red.
"""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tokenscale.base.errors import UserError
from tokenscale.runs.launch import processes, submission
from tokenscale.settings import machine, profile
from tokenscale.settings.layout import LayoutSettings, geometry
from tokenscale.settings.machine import Machine
from tokenscale.settings.run import RunSettings

ROOT = Path(__file__).parents[2]
SIZES = (1, 2, 4, 8, 12, 16)
COMMON = "--parsable --job-name name --output log --export=ALL --comment what"
ALPS, TEST = (
    "-A g1 -p normal -t 720 -C 'thp_never&nvidia_vboost_enabled' --mem 450000",
    "-A test -p normal -t 10 --mem 20000",
)
SUBMITTED = {
    "alps": {
        1: f"{ALPS} --nodes=1 --ntasks-per-node=2 --cpus-per-task=36 --signal=USR1@300 -D here --gres=gpu:1",
        2: f"{ALPS} --nodes=1 --ntasks-per-node=2 --cpus-per-task=72 --signal=USR1@300 -D here --gres=gpu:2",
        4: f"{ALPS} --nodes=1 --ntasks-per-node=4 --cpus-per-task=72 --signal=USR1@300 -D here --gres=gpu:4",
        8: f"{ALPS} --nodes=2 --ntasks-per-node=4 --cpus-per-task=72 --signal=USR1@300 -D here --gres=gpu:4",
        12: f"{ALPS} --nodes=3 --ntasks-per-node=4 --cpus-per-task=72 --signal=USR1@300 -D here --gres=gpu:4",
        16: f"{ALPS} --nodes=4 --ntasks-per-node=4 --cpus-per-task=72 --signal=USR1@300 -D here --gres=gpu:4",
    },
    "slurm-test": {
        1: f"{TEST} --nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --signal=USR1@60 -D here --gres=gpu:1",
        2: f"{TEST} --nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --signal=USR1@60 -D here --gres=gpu:2",
        4: f"{TEST} --nodes=1 --ntasks-per-node=4 --cpus-per-task=1 --signal=USR1@60 -D here --gres=gpu:4",
        8: f"{TEST} --nodes=2 --ntasks-per-node=4 --cpus-per-task=1 --signal=USR1@60 -D here --gres=gpu:4",
        12: f"{TEST} --nodes=3 --ntasks-per-node=4 --cpus-per-task=1 --signal=USR1@60 -D here --gres=gpu:4",
        16: f"{TEST} --nodes=4 --ntasks-per-node=4 --cpus-per-task=1 --signal=USR1@60 -D here --gres=gpu:4",
    },
}
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


@pytest.fixture(params=SUBMITTED)
def site(request, monkeypatch):
    """(a profile's name, what it says, its machine)."""
    monkeypatch.setenv("ALPS_ACCOUNT", "g1")
    stated = profile.load_profile(request.param, ROOT)[1]
    return (
        request.param,
        stated,
        machine.load_machine(profile.load_profile_config(request.param, ROOT)["machine"], ROOT),
    )


def run_of(size: int) -> RunSettings:
    return RunSettings(layout=LayoutSettings(data=size), global_batch=48)


@pytest.mark.parametrize("size", SIZES)
def test_what_sbatch_is_asked_for(site, size):
    name, stated, where = site
    resources = submission.merge_resources(geometry(size, where.gpus_per_node), where, stated)
    words = submission.sbatch_options(resources, name="name", comment="what", log="log", directory="here")
    assert shlex.join(words) == f"{COMMON} {SUBMITTED[name][size]}"


@pytest.mark.parametrize("size", SIZES)
def test_how_srun_starts_the_ranks(site, size, monkeypatch):
    name, _, where = site
    monkeypatch.setattr(processes.sys, "executable", "PYTHON")
    shape = geometry(size, where.gpus_per_node)
    rank = processes.rank_argv(where, shape, run="{}", directory=Path("d"), attempt=0, manifests={})
    words = processes.srun_argv(rank, shape, where, name="run", outputs=Path("out"), root=ROOT)
    network = " --network 'AWS Libfabric'" if name == "alps" and shape.nodes > 1 else ""
    links = """ --least-links '{"node":60.0,"network":30.0}'""" if name == "alps" else ""
    asked = f"--settings '{{}}' --directory d --attempt 0 --hang-s 1800 --srun --nodes {shape.nodes}{network}{links}"
    assert shlex.join(words) == f"srun --job-name=run {STARTED[size]} {BOUND[name]} -m tokenscale rank {asked}"


def test_a_job_holds_the_cores_of_its_ranks(site):
    """Two tasks are asked for where there is one rank, as the plugin wants it; the cores are those of one."""
    _, stated, where = site
    for size in SIZES:
        resources = submission.merge_resources(geometry(size, where.gpus_per_node), where, stated)
        held = resources["nodes"] * resources["tasks_per_node"] * resources["cpus_per_task"]
        assert held >= size * where.cores_per_rank and resources["ranks"] == size


def test_nodes_that_are_not_full_have_as_many_gpus_each(site):
    """Six for the whole job may be four on the one and two on the other."""
    _, stated, where = site
    resources = submission.merge_resources(geometry(6, where.gpus_per_node), where, stated)
    words = submission.sbatch_options(resources, name="name", comment="what", log="log")
    assert {"--nodes=2", "--ntasks-per-node=3", "--gres=gpu:3"} <= set(words)


def test_runs_that_share_a_node_take_only_their_part(site):
    _, _, where = site
    shape = geometry(1, where.gpus_per_node)
    words = processes.srun_argv(["rank"], shape, where, name="run", outputs=Path("out"), root=ROOT, share=4)
    assert {"--exact", "--mem=0"} <= set(words)


def test_a_job_script_asks_for_the_same(site):
    name, stated, where = site
    text = submission.render_script(
        [run_of(8)], where, stated, [["launch", "--run", "{}"]], ["results/a/manifest.json"]
    )
    options = " ".join(line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH"))
    asked = SUBMITTED[name][8].replace("-D here", f"-D {Path.cwd()}")
    assert asked in options and "--parsable" not in options
    assert text.splitlines()[-1].endswith("-m tokenscale launch --run '{}'")
    assert "#   results/a/manifest.json" in text


def test_runs_of_one_rank_share_a_node_in_one_script(site):
    name, stated, where = site
    words = [["launch", "--share", "4", "--output", str(number)] for number in range(4)]
    text = submission.render_script([replace(run_of(1), seed=n) for n in range(4)], where, stated, words, [])
    options = " ".join(line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH"))
    assert SUBMITTED[name][4].replace("-D here", f"-D {Path.cwd()}") in options
    assert text.count(" &\npids+=($!)") == 4
    for runs in ([replace(run_of(1), seed=n) for n in range(5)], [run_of(1), run_of(2)]):
        with pytest.raises(UserError, match="cannot share a node"):
            submission.render_script(runs, where, stated, words, [])


def test_an_account_without_a_value_is_no_account(monkeypatch):
    monkeypatch.delenv("ALPS_ACCOUNT", raising=False)
    stated = profile.load_profile("alps", ROOT)[1]
    resources = submission.merge_resources(
        geometry(1, 4), machine.load_machine("profiles/alps/machine.toml", ROOT), stated
    )
    with pytest.raises(UserError, match="ALPS_ACCOUNT"):
        submission.sbatch_options(resources, name="name", comment="what", log="log")


def test_a_machine_without_slurm_has_no_job_script():
    with pytest.raises(UserError, match="does not use SLURM"):
        submission.render_script([run_of(1)], machine.Machine(), {}, [], [])


def test_gpus_are_bound_to_a_rank_or_shown_to_all_ranks_of_a_node():
    where = replace(machine.load_machine("profiles/alps/machine.toml", ROOT), gpu_bind="node")
    words = processes.srun_argv(["rank"], geometry(8, 4), where, name="run", outputs=None, root=ROOT)
    assert "--gpus-per-task=1" not in words and {"--gpus-per-node=4", "--gpu-bind=none"} <= set(words)
    rank = processes.rank_argv(where, geometry(8, 4), run="{}", directory=Path("d"), attempt=0, manifests={})
    assert json.loads(rank[rank.index("--least-links") + 1]) == {"node": 60, "network": 30}
    assert [key for key, _ in Machine(gpu_bind="node").problems()] == ["gpu_bind"]
