"""The cluster of these tests: no traces of another one, an end without remains. What it has: test_trainings.py."""

import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm import cluster as module
from tests.slurm import missing
from tests.slurm.cluster import NODES, free
from tests.slurm.missing import found

ROOT = Path(__file__).parents[2]
#: a job that only SIGKILL ends
STUBBORN = "trap '' TERM; while :; do sleep 1; done"


def submit(cluster, command: str) -> str:
    """The id of a job that runs it."""
    return cluster.run("sbatch", "--parsable", "--output=/dev/null", f"--wrap={command}").stdout.strip()


def until(condition, seconds: float = 300) -> bool:
    """Whether it comes to hold."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return holds


def nothing_is_left(cluster) -> bool:
    return not cluster.processes() and len(cluster.ports) == 5 and all(free(port) for port in cluster.ports)


def ended_orderly(cluster, but: str = "") -> bool:
    """Whether its daemons ended themselves when asked to; on a busy machine one may not know the signal yet."""
    assert len(cluster.daemons) == 5
    return all(daemon.returncode in (0, -15) for name, daemon in cluster.daemons.items() if name != but)


def test_the_check_before_the_tests_says_what_to_install(monkeypatch):
    assert missing.message() is None
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit, match=missing.APT) as end:
        runpy.run_path(missing.__file__, run_name="__main__")
    assert all(command in end.value.code for command in missing.COMMANDS)


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
        submit(another, STUBBORN)
        assert until(lambda: "sleep 1" in another.processes().values()), another.logs()
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
