"""What SLURM, Snakemake's job step and the launcher add to a job: measured and printed; nothing fails for speed."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.slurm import polled

ROOT = Path(__file__).parents[2]
SHIPPED = yaml.safe_load((ROOT / "profiles/slurm-test/config.yaml").read_text())


@pytest.mark.parametrize("program", ["shipped settings", "poll capped at 1 s"])
def test_one_trivial_job_from_its_submission_to_its_noticed_end(cluster, tmp_path, measured, program):
    (tmp_path / "Snakefile").write_text("rule hello:\n    output: 'hello.txt'\n    shell: 'echo hello > {output}'\n")
    start = ["-m", "snakemake"] if program == "shipped settings" else [str(Path(polled.__file__))]
    options = ["--executor", "slurm", "--jobs", "1", "--default-resources"]
    options += [f"{name}={value}" for name, value in SHIPPED["default-resources"].items()]
    for name in ("slurm-status-command", "slurm-init-seconds-before-status-checks"):
        options += [f"--{name}", str(SHIPPED[name])]
    process = subprocess.Popen(
        [sys.executable, *start, *options],
        cwd=tmp_path,
        env=cluster.environment | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seen, said = {}, []
    for line in process.stdout:
        said.append(line)
        for word in ("has been submitted", "Finished job"):
            if word in line:
                seen.setdefault(word, time.monotonic())
    assert process.wait(120) == 0, "".join(said)
    took = seen["Finished job"] - seen["has been submitted"]
    measured(f"one trivial job, {program}: {took:.1f} s from its submission to its noticed end")


def test_what_the_launcher_adds_to_a_jobs_start(project, measured):
    project.change("long", budget={"steps": 5})
    project.snakemake("runs", "--config", "experiments=long")
    (log,) = project.root.glob("results/logs/train/*.log")
    took = re.search(r"srun is called (\d+\.\d+) s after", log.read_text())
    measured(f"the launcher, Python and its imports included: {took[1]} s until it calls srun")
