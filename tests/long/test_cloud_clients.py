"""The launch scripts of docs/cloud/ against the clients that they are written for, which rent nothing
here.
"""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.faults.test_cloud import environment, objects, project, server, stage  # noqa: F401  (fixtures)

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
PACKAGES = ("skypilot==0.14.1", "modal==1.6.4")
SKY = """
import json, sys
import sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(json.dumps({
    "nodes": task.num_nodes, "accelerators": resources.accelerators, "spot": resources.use_spot,
    "recovery": resources.job_recovery, "envs": sorted(task.envs), "workdir": task.workdir, "run": task.run,
}))
"""
#: Modal's packages come behind ours: it runs in the environment of the tests
MODAL = """
import sys
sys.path += [sys.argv[1], sys.argv[2]]
import modal_app
modal_app.train.local("s3://rented/modal", *sys.argv[3:] or ["rented"], 1)
"""


@pytest.fixture(scope="module")
def clients():
    """The Python of an environment with both clients, made once; TOKENSCALE_CLOUD_CLIENTS names
    another.
    """
    if python := os.environ.get("TOKENSCALE_CLOUD_CLIENTS"):
        return Path(python)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenscale-tests"
    key = hashlib.sha256(f"{PACKAGES} {sys.version}".encode()).hexdigest()[:12]
    folder = cache / f"cloud-clients-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            venv.create(folder, with_pip=True, clear=True)
            command = [
                folder / "bin/python",
                "-m",
                "pip",
                "install",
                "--quiet",
                "--retries",
                "1",
                *PACKAGES,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
            if done.returncode:
                pytest.skip(
                    "pip cannot install the clients: "
                    f"{(done.stderr.strip() or 'no message').splitlines()[-1]}"
                )
            (folder / "installed").touch()
    return folder / "bin/python"


def test_skypilot_reads_its_task(clients, tmp_path):
    command = [clients, "-c", SKY, str(ROOT / "docs/cloud/sky.yaml")]
    home = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=home, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    task = json.loads(done.stdout.splitlines()[-1])
    assert (
        task["spot"]
        and task["nodes"] == 1
        and task["accelerators"] == {"H100": 8}
        and task["workdir"] == "."
    )
    assert task["recovery"]["max_restarts_on_errors"] == 3 and task["envs"] == [
        "BUCKET",
        "EXPERIMENT",
        "RANKS",
    ]
    # the shell that SkyPilot would run, with a worker that prints its arguments
    (tmp_path / ".venv/bin").mkdir(parents=True)
    worker = tmp_path / ".venv/bin/python"
    worker.write_text('#!/bin/sh\necho "$@"\n')
    worker.chmod(0o755)
    given = {"BUCKET": "s3://rented/project", "EXPERIMENT": "demo", "RANKS": "8"}
    done = subprocess.run(
        ["bash", "-ec", task["run"]],
        cwd=tmp_path,
        env=os.environ | given,
        capture_output=True,
        text=True,
    )
    words = "-m tokenscale cloud --bucket s3://rented/project demo --ranks 8 --worker"
    assert done.stdout.split() == words.split(), done.stderr


def test_the_body_of_modals_function_trains_the_staged_runs(
    clients,
    project,  # noqa: F811
    environment,  # noqa: F811
    tmp_path,
):
    stage(project, "modal")
    (packages,) = clients.parents[1].glob("lib/python*/site-packages")
    (tmp_path / "driver.py").write_text(MODAL)
    command = [sys.executable, str(tmp_path / "driver.py"), str(packages), str(ROOT / "docs/cloud")]
    found = environment | {"PYTHONPATH": str(project.root / "src"), "HOME": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=found, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (sealed,) = tmp_path.glob("results/runs/*/done.json")
    assert f"runs/{sealed.parent.name}/done.json" in objects("modal")
    done = subprocess.run(
        [*command, "unstaged"], cwd=tmp_path, env=found, capture_output=True, text=True, timeout=300
    )
    assert "CalledProcessError" in done.stderr and "is not staged" in done.stderr, (
        "Modal then tries again"
    )
