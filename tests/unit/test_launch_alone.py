"""A measurement on one GPU of a cluster: how srun starts it, what it inherits, and where it is refused."""

import json
import os
import shlex
import sys
from pathlib import Path

from tokenscale.base.files import read_arguments
from tokenscale.cli.main import main
from tokenscale.runs.launch import start as alone
from tokenscale.settings import machine

ROOT = Path(__file__).parents[2]
#: writes down how it was called, and ends as the process that it would start
SRUN = f"""#!{sys.executable}
import json, os, sys
json.dump([sys.argv[1:], dict(os.environ)], open(os.environ["CALLED"], "w"))
sys.exit(7)
"""


def test_srun_starts_one_process_on_one_gpu_in_the_container():
    site = machine.load_machine("profiles/alps/machine.toml", ROOT)
    words = shlex.join(alone.build_argv(site, ["benchmark", "inference", "--run", "r"], ROOT))
    assert words == (
        "srun --job-name=benchmark --nodes=1 --ntasks=1 --ntasks-per-node=1 --distribution=block:block "
        "--cpus-per-task=72 --gpus-per-task=1 --cpu-bind=cores --mem-bind=local --kill-on-bad-exit=1 "
        f"--environment={ROOT}/profiles/alps/train.toml python -m tokenscale benchmark inference --run r"
    )


def test_the_verb_ends_as_srun_ends_and_leaves_the_jobs_own_request_out(tmp_path, monkeypatch):
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLED", str(tmp_path / "called.json"))
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    monkeypatch.chdir(tmp_path)
    many = [f"results/runs/packed-llama-micro-single-w1-{number:010x}" for number in range(4000)]  # 216 kB
    argv = ["benchmark", "inference", "--settings", '{"rounds":2}', "--run", *many, "--output", "out.json"]
    assert main([*argv, "--site", str(ROOT / "profiles/alps/machine.toml")]) == 7
    words, variables = json.loads((tmp_path / "called.json").read_text())
    asked = ["benchmark", "inference", "--settings", '{"rounds":2}', "--output", "out.json", "--run", *many]
    assert read_arguments(words)[-len(asked) :] == asked
    assert variables["SLURM_JOB_ID"] == "41" and "SLURM_CPUS_PER_TASK" not in variables
    assert variables["HF_HUB_OFFLINE"] == "1" and variables["OMP_NUM_THREADS"] == "72"


def test_outside_of_a_job_it_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    argv = ["benchmark", "inference", "--run", "a", "--output", "out.json", "--site"]
    assert main([*argv, str(ROOT / "profiles/alps/machine.toml")]) == 2
    assert "not in a SLURM job" in capsys.readouterr().err
