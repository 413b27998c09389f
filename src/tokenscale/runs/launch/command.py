"""Launch of a run on a machine: build the command that starts its ranks, record it, run it."""

import os
import shlex
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.runs.launch import failure_hints, processes, ranks
from tokenscale.runs.launch.job import Job, job_id, load_job
from tokenscale.settings.layout import Geometry, geometry
from tokenscale.settings.machine import Machine
from tokenscale.settings.run import RunSettings

#: SLURM variables that srun needs to find job and cluster
KEPT_VARIABLES = {
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "SLURM_CONF",
    "SLURM_CLUSTER_NAME",
    "SLURM_SUBMIT_DIR",
    "SLURM_SUBMIT_HOST",
}


def find_job(machine: Machine) -> Job | None:
    """Return the SLURM job of this process if the machine starts ranks by srun, else None."""
    identity = job_id()
    return load_job(identity) if machine.starter == "srun" and identity and shutil.which("scontrol") else None


@dataclass(frozen=True)
class Launch:
    """Run on a machine, within a SLURM job if there is one."""

    run: RunSettings
    machine: Machine
    directory: Path
    share: int = 1
    job: Job | None = None

    @property
    def shape(self) -> Geometry:
        return geometry(self.run.layout.world_size, self.machine.gpus_per_node)

    def record(self) -> dict[str, Any]:
        """Return the description of the launch for an attempt's record."""
        found: dict[str, Any] = {"machine": self.machine.name, "starter": self.machine.starter, "share": self.share}
        if self.machine.container_digest is not None:
            found["container_digest"] = self.machine.container_digest
        if self.job is None:
            return found
        job, here = self.job.record(), Path.cwd()
        if job["log"] and Path(job["log"]).is_relative_to(here):  # the project may be moved
            job["log"] = str(Path(job["log"]).relative_to(here))
        return found | {"job": job}

    def command(self, attempt: int, manifests: dict[str, Path]) -> tuple[list[str], dict[str, str]]:
        """Return (argv, additional variables) of the command: srun's, torchrun's, or that of each rank (`here`)."""
        machine, shape, outputs = self.machine, self.shape, self.outputs(attempt)
        rank = processes.rank_argv(
            machine, shape, run=self.run.to_json(), directory=self.directory, attempt=attempt, manifests=manifests
        )
        if machine.starter == "here":
            return rank, machine.environment
        if machine.starter == "torchrun":
            return processes.torchrun_argv(rank, shape), machine.environment
        argv = processes.srun_argv(
            rank,
            shape,
            machine,
            name=self.run.identity,
            outputs=outputs,
            root=Path.cwd(),
            share=self.share,
        )
        variables = processes.srun_environment(
            machine,
            outputs=outputs,
            root=Path.cwd(),
            address=self.job.address if self.job else None,
            job=self.job.id if self.job else None,
        )
        return argv, variables

    def outputs(self, attempt: int) -> Path:
        return self.attempt_directory(attempt) / "output"

    def attempt_directory(self, attempt: int) -> Path:
        return self.directory / f"attempt={attempt:02d}"

    def go(self, attempt: int, manifests: dict[str, Path], keep: tuple[int, ...] = ()) -> int:
        """Start the ranks, wait for them and return their exit code. Ranks inherit the file descriptors `keep`."""
        world_size = self.shape.world_size
        argv, variables = self.command(attempt, manifests)
        if self.machine.starter == "here":
            return ranks.run_ranks(argv, world_size, variables=variables, keep=keep)
        threads = self.machine.cores_per_rank or ranks.threads_per_rank(world_size)
        base = ranks.rank_environment(threads)
        if self.machine.starter == "torchrun":
            base |= ranks.local_rendezvous(base) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else it listens
        else:
            # the step does not inherit the job's request: its geometry is explicit
            base = {
                n: v for n, v in base.items() if n in KEPT_VARIABLES or not n.startswith(("SLURM_", "SRUN_", "SBATCH_"))
            }
            base |= ranks.new_secret()
            self.outputs(attempt).mkdir(parents=True, exist_ok=True)
            print(f"output of the ranks: {self.outputs(attempt)}/rank=*.log", flush=True)
            print(f"srun is called {_process_age_s():.2f} s after this launcher was", flush=True)
            with open(self.outputs(attempt) / failure_hints.SRUN, "w") as srun_output:
                return ranks.run_processes(
                    [(argv, base | variables)], stderr=srun_output, end_signal=signal.SIGUSR1, keep=keep
                )
        return ranks.run_processes([(argv, base | variables)], keep=keep)

    def printed(self, manifests: dict[str, Path]) -> str:
        """Return the command of the first attempt as shell text."""
        argv, variables = self.command(0, manifests)
        if self.machine.starter == "here" and self.shape.world_size > 1:
            variables = {
                "RANK": f"0…{self.shape.world_size - 1}",
                "WORLD_SIZE": str(self.shape.world_size),
                **variables,
            }
        if self.machine.starter == "srun" and self.job is None:
            variables = {"MASTER_ADDR": "<the job's first node>", "MASTER_PORT": "<by the job's number>", **variables}
        lines = [f"{name}={shlex.quote(value)} \\" for name, value in variables.items()]
        return "\n".join([*lines, shlex.join(argv)])

    def check(self) -> None:
        """Raise UserError if srun has no job or too few nodes, before any file is written."""
        shape = self.shape
        if self.machine.starter != "srun":
            if shape.nodes > 1:
                raise UserError(
                    "the run needs several nodes, which only srun can start.",
                    run=f"{self.run.identity} wants {shape.nodes} x {shape.ranks_per_node} ranks",
                    machine=f"{self.machine.name}: gpus_per_node {self.machine.gpus_per_node}",
                    next='set starter = "srun" in the machine file, or use a smaller layout',
                )
            return
        if self.job is None:
            raise UserError(
                "this machine starts ranks by srun, but this process is not in a SLURM job.",
                machine=self.machine.name,
                next=f"snakemake --profile {self.machine.name} {self.directory / 'done.json'}",
            )
        if len(self.job.nodes) < shape.nodes:
            raise UserError(
                "the job has fewer nodes than the run needs.",
                run=f"{self.run.identity} wants {shape.nodes} x {shape.ranks_per_node} ranks",
                job=f"{self.job.id} has {', '.join(self.job.nodes)}",
                next="do not set `nodes` in the profile, or request as many",
            )


def _process_age_s() -> float:
    """Return seconds since this process started, including Python's start and imports. Linux only."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
