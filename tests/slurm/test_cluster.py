"""The cluster of these tests itself: nodes, GPUs, several nodes in one step, two at once, an end without remains."""

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.slurm import cluster as module
from tests.slurm.cluster import GPUS, NODES, free
from tests.slurm.missing import found

ROOT = Path(__file__).parents[2]
#: a job that only SIGKILL ends
STUBBORN = "trap '' TERM; while :; do sleep 1; done"


def submit(cluster, command: str, *options: str) -> str:
    """The id of a job that runs it."""
    return cluster.run("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={command}").stdout.strip()


def run_stubborn(cluster, *options: str) -> str:
    """The id of a job that only SIGKILL ends, once its processes are there."""
    job = submit(cluster, STUBBORN, *options)
    assert until(lambda: "sleep 1" in cluster.processes().values()), cluster.logs()
    return job


def until(condition, seconds: float = 60) -> bool:
    """Whether it comes to hold."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return holds


def nothing_is_left(cluster) -> bool:
    return not cluster.processes() and len(cluster.ports) == 5 and all(free(port) for port in cluster.ports)


def ended_orderly(cluster, but: str = "") -> bool:
    """Whether its daemons ended themselves when asked to."""
    assert len(cluster.daemons) == 5
    return all(daemon.returncode == 0 for name, daemon in cluster.daemons.items() if name != but)


# -- what it has


def test_four_nodes_are_idle(cluster):
    cluster.wait_for_nodes("idle")
    assert cluster.nodes() == dict.fromkeys(NODES, "idle")
    said = cluster.run("sinfo", "--noheader", "--Node", "--partition=normal", "--format=%c %m %G").stdout
    assert said.splitlines() == ["64 256000 gpu:4"] * 4


def test_a_step_of_one_gpu_sees_that_one(cluster):
    cluster.wait_for_nodes("idle")  # a job that is not quite over keeps its GPUs
    said = cluster.run("srun", "--gres=gpu:1", "sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES $SLURM_NTASKS $SLURM_NNODES"')
    assert said.stdout == "0 1 1\n"


def test_jobs_on_a_node_see_different_gpus(cluster, tmp_path):
    """Each waits until both are there."""
    cluster.wait_for_nodes("idle")
    command = f'touch {tmp_path}/$SLURM_JOB_ID-$CUDA_VISIBLE_DEVICES; until [ -e "{tmp_path}/go" ]; do sleep 0.1; done'
    jobs = [submit(cluster, command, "--gres=gpu:2", f"--nodelist={NODES[1]}") for _ in range(2)]
    for job in jobs:
        cluster.wait_for(job, "RUNNING")
    (tmp_path / "go").touch()
    for job in jobs:
        assert cluster.wait_for(job, "COMPLETED")["nodes"] == NODES[1]
    assert {path.name for path in tmp_path.iterdir()} == {"go", f"{jobs[0]}-0,1", f"{jobs[1]}-2,3"}


def test_a_step_of_four_by_four_is_sixteen_ranks_on_four_nodes(cluster):
    names = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURMD_NODENAME", "SLURM_NTASKS", "CUDA_VISIBLE_DEVICES"]
    options = ["--nodes=4", "--ntasks=16", "--ntasks-per-node=4", "--gpus-per-node=4"]
    said = cluster.run("srun", *options, "sh", "-c", " ".join(["echo", *(f"${name}" for name in names)])).stdout
    ranks = [dict(zip(names, line.split(), strict=True)) for line in said.splitlines()]
    assert sorted(int(rank["SLURM_PROCID"]) for rank in ranks) == [*range(16)]
    assert {rank["SLURM_NTASKS"] for rank in ranks} == {"16"}
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {"0,1,2,3"}
    assert Counter(rank["SLURMD_NODENAME"] for rank in ranks) == dict.fromkeys(NODES, GPUS)
    for rank in ranks:
        number = int(rank["SLURM_PROCID"])
        assert (int(rank["SLURM_NODEID"]), int(rank["SLURM_LOCALID"])) == divmod(number, GPUS)
        assert rank["SLURMD_NODENAME"] == NODES[number // GPUS]


def test_variables_of_another_cluster_change_nothing(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    job = submit(cluster, "true")
    assert cluster.wait_for(job, "COMPLETED")
    assert not [name for name in cluster.environment if name.startswith(("SLURM_", "SQUEUE_", "SBATCH_"))]


# -- beginning and end


def test_after_the_end_nothing_is_left(another):
    with another:
        run_stubborn(another)
        outside = subprocess.Popen(["sleep", "1000"], env=another.environment)
        assert not nothing_is_left(another) and not any(free(port) for port in another.ports)
    assert nothing_is_left(another) and ended_orderly(another)
    assert outside.wait(timeout=60) == -9


def test_nothing_is_left_of_a_start_that_fails_half_way(another, monkeypatch, tmp_path):
    broken = tmp_path / "slurmd"
    broken.write_text(f'#!/bin/sh\ncase "$*" in *{NODES[2]}*) exit 7;; esac\nexec {found("slurmd")} "$@"\n')
    broken.chmod(0o755)
    monkeypatch.setattr(module, "found", lambda command: str(broken) if command == "slurmd" else found(command))
    with pytest.raises(RuntimeError, match=f"{NODES[2]} ended with 7"), another:
        raise AssertionError("it is up without its third node")
    assert nothing_is_left(another) and ended_orderly(another, but=NODES[2])


def test_nothing_is_left_when_its_owner_is_killed(another):
    code = "import sys, time; from pathlib import Path; from tests.slurm.cluster import Cluster\n"
    code += "with Cluster(Path(sys.argv[1])) as cluster: print(*cluster.ports, flush=True); time.sleep(1000)"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(another.root)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as owner:
        another.ports = [int(port) for port in owner.stdout.readline().split()]
        assert another.processes()
        owner.kill()
    assert until(lambda: nothing_is_left(another)), another.processes()
