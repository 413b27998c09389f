"""A job through Snakemake's executor for SLURM, looked after every second."""

import sys
from pathlib import Path

from tests.slurm import polled

#: settings of the executor that this cluster needs: it has no accounting, so any account will do
SETTINGS = ["--executor", "slurm", "--slurm-status-command", "squeue"]
SETTINGS += ["--default-resources", "slurm_account=test", "slurm_partition=normal", "runtime=5", "mem_mb=500"]
#: longer than the test may take
OWN_WAIT = ["--slurm-init-seconds-before-status-checks", "600"]


def test_a_rule_runs_as_a_job(cluster, tmp_path):
    (tmp_path / "Snakefile").write_text(
        "rule hello:\n    output: 'hello.txt'\n    shell: 'echo $SLURM_JOB_ID > {output}'\n"
    )
    before = {job["id"] for job in cluster.jobs()}
    program = [sys.executable, Path(polled.__file__)]
    said = cluster.run(*program, "--jobs", "1", *SETTINGS, *OWN_WAIT, cwd=tmp_path, timeout=300).stderr
    (job,) = [job for job in cluster.jobs() if job["id"] not in before]
    assert (job["state"], job["comment"], job["workdir"]) == ("COMPLETED", "rule_hello", str(tmp_path)), said
    assert (tmp_path / "hello.txt").read_text() == f"{job['id']}\n"
