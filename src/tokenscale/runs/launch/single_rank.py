"""Run a command as a single rank on a machine that starts processes by srun, for benchmarks."""

import os
import subprocess
import sys
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.runs.launch import processes, ranks
from tokenscale.runs.launch.command import KEPT_VARIABLES
from tokenscale.runs.launch.job import job_id
from tokenscale.settings.layout import geometry
from tokenscale.settings.machine import Machine


def build_argv(machine: Machine, arguments: list[str], root: Path) -> list[str]:
    """Return the srun command of `tokenscale ARGUMENTS` with the Python of the machine's ranks."""
    python = machine.python or ("python" if machine.container else sys.executable)
    shape = geometry(1, machine.gpus_per_node)
    command = [python, "-m", "tokenscale", *arguments]
    return processes.srun_argv(command, shape, machine, name=arguments[0], outputs=None, root=root)


def run_single_rank(machine: Machine, arguments: list[str]) -> int:
    """Run the command in this job and return its exit code. Raises UserError outside of a SLURM job."""
    if job_id() is None:
        raise UserError(
            "this machine starts processes by srun, but this process is not in a SLURM job.",
            machine=machine.name,
            next="run snakemake with this machine's profile, or remove --site to measure here",
        )
    root = Path.cwd()
    base = ranks.rank_environment(machine.cores_per_rank or 1)
    # the step does not inherit the job's request: its geometry is explicit
    base = {n: v for n, v in base.items() if n in KEPT_VARIABLES or not n.startswith(("SLURM_", "SRUN_", "SBATCH_"))}
    variables = processes.srun_environment(machine, outputs=root / "results/logs", root=root)
    return subprocess.run(build_argv(machine, arguments, root), env=base | variables, cwd=os.getcwd()).returncode
