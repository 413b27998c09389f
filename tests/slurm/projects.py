"""A tiny project on the test cluster: its tokens are made beforehand, its trainings are jobs."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests import served
from tests.logs import read_steps
from tests.slurm.cluster import Cluster, open_files
from tests.workflow.conftest import RUNS, Project, make_project

PROFILE = "profiles/slurm-test"
#: log of an attempt's first rank, which is written some steps at a time
STEPS = "attempt={:02d}/rank=00000/steps.jsonl"
PACKED = RUNS | {"approach": "packed", "global_batch": 16, "micro_batch": 1}
#: some seconds of steps, more where a machine is busy, and a state now and then
LONG = PACKED | {
    "budget": {"steps": 600},
    "global_batch": 4,
    "layout": {"data": 2},
    "checkpoints": {"every": 50},
}
EXPERIMENTS = {
    "sizes": {
        "question": "Do any number of GPUs compute what one computes?",
        "runs": PACKED
        | {"model": {"preset": "llama-micro", "layers": 2, "heads": 4, "key_value_heads": 4}},
        "factors": {
            # one stage a node
            "layout": [{"data": 1}, {"data": 2}, {"data": 16}, {"pipeline": 2, "tensor": 4}]
        },
    },
    "pair": {
        "question": "Are the tables those of the local profile?",
        "runs": PACKED,
        "factors": {"approach": ["packed", "token-list"], "layout.data": [1, 2]},
        "figures": ["loss_over_time", "scaling_throughput"],
    },
    "long": {"question": "Does it go on?", "runs": LONG, "factors": {"seed": [0]}},
}


@dataclass
class OnCluster:
    """A project folder whose Snakemake submits to a cluster."""

    project: Project
    cluster: Cluster

    @property
    def root(self) -> Path:
        return self.project.root

    @property
    def environment(self) -> dict[str, str]:
        """The cluster's programs, the project's code, a home of its own."""
        own = {name: self.project.environment[name] for name in ("PYTHONPATH", "HOME")}
        return self.cluster.environment | own

    def change(self, experiment: str, **runs) -> None:
        """Other settings for the runs of an experiment."""
        path = self.root / f"config/experiments/{experiment}.yaml"
        values = json.loads(path.read_text())
        path.write_text(json.dumps(values | {"runs": values["runs"] | runs}))

    def start(self, *arguments: str) -> subprocess.Popen:
        """Snakemake with the profile of the test cluster, in a session of its own."""
        log = open(self.root / "snakemake.log", "w")  # noqa: SIM115  # the process's
        argv = [served.python(), "-m", "tests.slurm.polled", "--profile", PROFILE, *arguments]
        return subprocess.Popen(
            argv,
            cwd=self.root,
            env=self.environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def snakemake(self, *arguments: str, code: int = 0, timeout: float = 400) -> str:
        """The same, to its end; returns what it says. Fails where it ends with another code."""
        return self.ended(self.start(*arguments), code, timeout)

    def ended(self, process: subprocess.Popen, code: int = 0, timeout: float = 400) -> str:
        """What a Snakemake said, once it has ended with that code."""
        try:
            found = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"no end within {timeout} s\n{self.said()}") from None
        assert found == code, f"exit code {found}\n{self.said()}"
        return (self.root / "snakemake.log").read_text()

    def said(self) -> str:
        """For a failed test: Snakemake's last words, the queue, every training's log."""
        logs = [
            *self.root.glob("results/logs/train/*.log"),
            *self.root.glob("results/runs/*/attempt=*/output/*.log"),
        ]
        texts = [
            f"--- {path.relative_to(self.root)}\n{path.read_text()[-1500:]}"
            for path in sorted(logs)
        ]
        last = (self.root / "snakemake.log").read_text()[-4000:]
        return "\n".join([last, *map(str, self.cluster.jobs()), *texts])

    def tokenscale(self, *arguments: str) -> str:
        """What a verb prints."""
        argv = (served.python(), "-m", "tokenscale", *arguments)
        done = subprocess.run(
            argv, cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit_launches(self, run_ids: list[str], *options: str) -> str:
        """Submit a script of one's own that launches runs side by side on one node; return its
        job.
        """
        options_of_each = f"--profile slurm-test --share {len(run_ids)}"
        commands = "".join(
            f"{sys.executable} -m tokenscale launch {name} {options_of_each} &\n"
            for name in run_ids
        )
        (self.root / "job.sh").write_text(f"#!/usr/bin/env bash\n{commands}wait\n")
        asked = (
            "-A test -p normal -t 10 --mem=20000 --nodes=1 --cpus-per-task=1 --signal=USR1@60 "
            f"{' '.join(options)}"
        )
        submitted = self.cluster.run(
            *("sbatch", "--parsable", *asked.split(), "job.sh"),
            cwd=self.root,
            variables=self.environment,
        )
        return submitted.stdout.strip()

    def runs(self, pattern: str = "*") -> dict[str, Path]:
        """run id → folder."""
        return {path.name: path for path in sorted(self.root.glob(f"results/runs/{pattern}"))}

    def jobs_of(self, run_id: str) -> list[dict[str, str]]:
        """The cluster's jobs of a run in this folder, the oldest first."""
        return [
            j
            for j in self.cluster.jobs()
            if j["workdir"] == str(self.root) and run_id in j["comment"]
        ]

    def until(self, what, timeout: float = 400):
        """The first value of `what()` that is true."""
        end = time.monotonic() + timeout
        while not (found := what()):
            assert time.monotonic() < end, f"waited in vain\n{self.said()}"
            time.sleep(0.2)
        return found

    def trains(self, attempt: int = 0) -> tuple[str, Path]:
        """The id and folder of the one run of the experiment `long`, once this attempt has logged
        steps.
        """
        self.until(
            lambda: any(
                f.stat().st_size for f in self.root.glob(f"results/runs/*/{STEPS.format(attempt)}")
            )
        )
        return run_of(self)

    def stop_rank(self, path: Path) -> int:
        """Rank 0 of a run's first attempt, which does nothing until it is sent SIGCONT."""
        steps = str(path / STEPS.format(0))
        (rank,) = (
            int(folder.name)
            for folder in Path("/proc").glob("[0-9]*")
            if steps in open_files(folder.name)
        )
        os.kill(rank, signal.SIGSTOP)
        return rank


def losses(run: Path) -> list[float]:
    """Loss in nats per useful token of every step, over all ranks; of each step the latest attempt counts."""
    return [step["loss_sum"] / step["useful_tokens"] for step in read_steps(run).values()]


def run_of(project) -> tuple[str, Path]:
    """The one run of the experiment `long`: its id and its folder."""
    ((name, path),) = project.runs().items()
    return name, path


def whole(project, attempts: int) -> None:
    """The run is complete in so many attempts; each of its steps is there once, as if it had never
    been stopped.
    """
    name, path = run_of(project)
    record = json.loads((path / "run.json").read_text())
    assert record["outcome"]["status"] == "complete" and record["attempt"] == attempts - 1
    assert len(losses(path)) == record["outcome"]["steps"]
    assert (path / "done.json").is_file() and len([*path.glob("attempt=*")]) == attempts


def events(path, attempt: int, event: str) -> list[dict]:
    lines = (path / f"attempt={attempt:02d}/rank=00000/events.jsonl").read_text().splitlines()
    return [found for found in map(json.loads, lines) if found["event"] == event]


def make(folder: Path) -> None:
    """A project with these experiments, whose tokens are made."""
    project = make_project(folder)
    for path in project.root.glob("config/experiments/*.yaml"):
        path.unlink()
    for name, experiment in EXPERIMENTS.items():
        (project.root / f"config/experiments/{name}.yaml").write_text(json.dumps(experiment))
    config = project.root / "config/config.yaml"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"experiments": [*EXPERIMENTS]}))
    project.snakemake("--cores", "2", "tokens")
