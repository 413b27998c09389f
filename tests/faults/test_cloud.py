"""An experiment on rented machines: separate folders, a bucket on the loopback interface, workers
that are killed.

Workers run the project's own code in processes of their own. In a folder with a file `hold`, ranks
wait at step 9, so that the kill meets them after a resume state whatever the machine's speed is.
"""

import contextlib
import logging
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import planted, served
from tests.faults.kills import (
    SIGNALS,
    arguments_of,
    jobs_of,
    left,
    leftovers,
    send,
    small_project,
    until,
)
from tests.faults.test_resume import first_step
from tests.logs import series
from tests.workflow.conftest import RUNS, Project, make_project
from tokenscale.cli import cloud
from tokenscale.cli.verify import verify_results
from tokenscale.settings.config import load_config

pytestmark = pytest.mark.slow(60)
pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")

EXPERIMENT = {
    "question": "Does a killed worker lose anything?",
    "runs": RUNS
    | {"approach": "packed", "budget": {"steps": 14}, "checkpoints": {"every": 4, "final": True}},
    "factors": {"layout.data": [1, 2]},
    "figures": ["loss_over_time"],
}
BEAT = "        self.watch.beat(is_start=not self.log.last)\n        self.trace.before(step)\n"
HOLD = """        while step == 9 and Path('hold').exists() and self.signals.stop_requested is None:
            time.sleep(0.02)
"""
SECRET = "wJalrXUtnFEMI/" + planted.VALUE
LIMIT_S = 240.0
#: moments of each signal
KILLS = 2


@pytest.fixture(scope="module")
def server():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="0.0.0.0", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture(scope="module")
def environment(server, tmp_path_factory):
    """Variables of all machines: where the bucket is, and secrets."""
    import boto3

    none = str(tmp_path_factory.mktemp("aws") / "none")
    found = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server}",
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7PLANTED",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": f"session-{planted.VALUE}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": none,
        "AWS_SHARED_CREDENTIALS_FILE": none,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found.items():
            patch.setenv(name, value)
        patch.delenv("AWS_PROFILE", raising=False)
        boto3.client("s3").create_bucket(Bucket="rented")
        yield os.environ | planted.SECRETS | found | {"NO_PROXY": "*", "no_proxy": "*"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project whose inputs are built."""
    project = small_project(tmp_path_factory.mktemp("project"), "rented", EXPERIMENT)
    loop = project.root / "src/tokenscale/train/loop.py"
    assert BEAT in loop.read_text()
    loop.write_text(loop.read_text().replace(BEAT, HOLD + BEAT))
    project.snakemake("--cores", "2", "tokens")
    return project


@pytest.fixture(scope="module")
def whole(project, environment, tmp_path_factory):
    """(Steps of the run of a worker that nobody disturbs, seconds that it took)."""
    stage(project, "alone")
    began = time.monotonic()
    machine = Machine(
        tmp_path_factory.mktemp("alone"),
        prefix="alone",
        environment=environment | {"PYTHONPATH": str(project.root / "src")},
    )
    machine.wait()
    return series(machine.run), time.monotonic() - began


class Machine:
    """A rented machine: an empty folder, and a worker in it."""

    def __init__(self, folder: Path, prefix: str, environment: dict[str, str]):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        words = ["cloud", "--bucket", f"s3://rented/{prefix}", "rented", "--ranks", "1", "--worker"]
        with (folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                [served.python(), "-m", "tokenscale", *words, "--every", "0.2"],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, code: int = 0) -> None:
        """Wait until the worker has ended."""
        try:
            assert self._process.wait(LIMIT_S) == code, self.log
        finally:
            self.kill()

    def stop(self) -> None:
        """Tell the worker to end, as a provider does before it takes the machine away: its ranks
        hold until then.
        """
        os.kill(self._process.pid, signal.SIGTERM)
        self.wait(75)

    def kill(self) -> None:
        """Kill the worker and its ranks, as a machine that is taken away."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_for(self, what) -> None:
        """Wait until something is there, while the worker lives."""
        end = time.monotonic() + LIMIT_S
        while not what():
            assert self._process.poll() is None and time.monotonic() < end, self.log
            time.sleep(0.1)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def run(self) -> Path:
        """The folder of its only run."""
        (found,) = self.folder.glob("results/runs/*")
        return found


def stage(project: Project, prefix: str) -> None:
    with contextlib.chdir(project.root):
        list(cloud.stage(f"s3://rented/{prefix}", "rented", 1, load_config()))


def objects(prefix: str) -> dict[str, bytes]:
    """Key → content of all objects below a prefix."""
    bucket = cloud.open_bucket(f"s3://rented/{prefix}")
    return {key: bucket.read(key) for key in bucket.list()}


def check_ended(run: Path, folder: Path) -> None:
    """A finished run in the bucket: complete, with weights, without resume states, and as its seal
    says.
    """
    found = objects("cut")
    keys = {key.partition(f"{run.name}/")[2] for key in found if key.startswith("runs/")}
    assert keys >= {f"attempt={number:02d}/rank=00000/steps.jsonl" for number in range(3)}
    assert keys >= {"run.json", "done.json", "checkpoints/final/checkpoint.json"}
    assert not [key for key in keys if "step=" in key]
    for key, data in found.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
    assert [finding.what for finding in verify_results(folder)[0] if not finding.note] == []
    check_for_secrets(folder)


def check_for_secrets(folder: Path) -> None:
    for path in folder.rglob("*"):
        for secret in (planted.VALUE, "AKIAIOSFODNN7PLANTED"):
            assert (
                path.is_dir() or path.suffix == ".pyc" or secret.encode() not in path.read_bytes()
            ), path


def test_a_killed_worker_goes_on_in_an_empty_folder_and_the_report_is_built_from_the_bucket(
    project, environment, tmp_path
):
    environment = environment | {"PYTHONPATH": str(project.root / "src")}
    for prefix in ("whole", "cut"):
        stage(project, prefix)
    whole = Machine(tmp_path / "whole", "whole", environment)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hold").touch()
    first = Machine(tmp_path / "first", "cut", environment)
    try:
        first.wait_for(
            lambda: any(key.endswith("/step=00000008/checkpoint.json") for key in objects("cut"))
        )
    finally:
        first.kill()
    whole.wait()
    second = Machine(tmp_path / "second", "cut", environment)
    second.wait_for(lambda: any("attempt=01/rank=00000/events" in key for key in objects("cut")))
    second.stop()
    assert first_step(second.run / "attempt=01") == 8, "it went on, and did not begin anew"
    third = Machine(tmp_path / "third", "cut", environment)
    third.wait()
    assert first_step(third.run / "attempt=02") > 8, (
        "the second one wrote a state when it was told to stop"
    )
    assert series(third.run) == series(whole.run) and len(series(whole.run)) == 14
    check_ended(third.run, tmp_path / "bucket")
    again = Machine(tmp_path / "third", "cut", environment)
    again.wait()
    assert "has ended already" in again.log

    away = make_project(tmp_path)
    shutil.rmtree(away.root / "config")
    shutil.copytree(project.root / "config", away.root / "config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Project, "environment", environment | {"PYTHONPATH": str(away.root / "src")})
        said = away.snakemake(
            "--cores", "2", "report_now", "--config", "bucket=s3://rented/cut"
        ).stdout
    assert "s3://rented/cut: 1 finished runs, 1 of them fetched" in said
    report = away.root / "results/report"
    assert third.run.name in (report / "index.html").read_text()
    assert (report / "report.pdf").is_file()
    check_for_secrets(away.root)


@pytest.mark.long
@pytest.mark.parametrize("name", SIGNALS)
def test_a_plain_call_completes_what_a_killed_worker_began(
    name, project, environment, whole, tmp_path
):
    """The worker's process alone gets the signal, at moments drawn over the time that it takes."""
    steps, usual_s = whole
    pick = random.Random(name)
    for moment in range(KILLS):
        folder = tmp_path / str(moment)
        prefix = f"{name}-{moment}"
        stage(project, prefix)
        with jobs_of(tmp_path / "jobs") as jobs:
            variables = environment | {"PYTHONPATH": str(project.root / "src")}
            variables |= {"SERVED_JOBS": str(jobs)}
            machine = Machine(folder, prefix, variables)
            machine.wait_for(lambda jobs=jobs: left(jobs))
            (worker,) = (job for job, words in arguments_of(jobs).items() if words[0] == "cloud")
            time.sleep(pick.random() * usual_s)
            send(getattr(signal, name), [worker])
            if name == "SIGSTOP":
                time.sleep(pick.random())
                send(pick.choice([signal.SIGCONT, signal.SIGKILL]), [worker])
            assert until(lambda jobs=jobs: not left(jobs), lambda: True, LIMIT_S), machine.log
            again = Machine(folder, prefix, variables)
            again.wait()
            assert until(lambda jobs=jobs: not left(jobs), lambda: True, 10)
        assert series(again.run) == steps, again.log
        assert leftovers(folder) == []
        assert f"runs/{again.run.name}/done.json" in objects(prefix)
