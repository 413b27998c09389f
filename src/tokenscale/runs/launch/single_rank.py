"""One process on one device of a machine that starts processes by srun: what measures a model, as ranks train it."""

import os
import subprocess
import sys
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.runs.launch import processes, ranks
from tokenscale.runs.launch.command import KEPT
from tokenscale.runs.launch.job import job_id
from tokenscale.settings.layout import geometry
from tokenscale.settings.machine import Machine


def argv_of(machine: Machine, arguments: list[str], root: Path) -> list[str]:
    """srun, and `tokenscale ARGUMENTS` by the Python of the machine's ranks; its output is that of srun."""
    python = machine.python or ("python" if machine.container else sys.executable)
    shape = geometry(1, machine.gpus_per_node)
    command = [python, "-m", "tokenscale", *arguments]
    return processes.srun_argv(command, shape, machine, name=arguments[0], outputs=None, root=root)


def run(machine: Machine, arguments: list[str]) -> int:
    """Start it in this job and wait for it. Returns its exit code; raises UserError outside of a SLURM job."""
    if job_id() is None:
        raise UserError(
            "this machine starts processes by srun, and this process is in no SLURM job.",
            machine=machine.name,
            next="snakemake with this machine's profile, or leave --site out to measure right here",
        )
    root = Path.cwd()
    base = ranks.environment(machine.cores_per_rank or 1)
    # what the job was asked for is not for the step, whose geometry is spelled out
    base = {n: v for n, v in base.items() if n in KEPT or not n.startswith(("SLURM_", "SRUN_", "SBATCH_"))}
    variables = processes.environment(machine, outputs=root / "results/logs", root=root)
    return subprocess.run(argv_of(machine, arguments, root), env=base | variables, cwd=os.getcwd()).returncode
