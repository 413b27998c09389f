"""Command lines of a run's processes on a machine: pure functions with explicit geometry."""

import json
import sys
from pathlib import Path

from tokenscale.runs.launch.ranks import THREADS
from tokenscale.settings.layout import Geometry
from tokenscale.settings.machine import Machine

#: rendezvous ports, chosen by job number because nodes may be shared; below Linux's range of ephemeral ports
PORTS = range(20000, 32768)


def rank_argv(
    machine: Machine, shape: Geometry, *, run: str, directory: Path, attempt: int, manifests: dict[str, Path]
) -> list[str]:
    """Return the command of a rank, equal for all ranks of a run. `run` is its settings as canonical JSON."""
    # in a container Python is the container's, whatever this one is
    python = machine.python or ("python" if machine.container else sys.executable)
    argv = [python, "-m", "tokenscale", "arm_rank" if "arm" in manifests else "rank", "--settings", run]
    argv += ["--directory", str(directory), "--attempt", str(attempt), "--hang-s", str(machine.hang_s)]
    for role, path in manifests.items():
        argv += [f"--{role.replace('_', '-')}", str(path)]
    if machine.starter == "srun":
        argv += ["--srun"]
    if machine.gpus_per_node is not None:
        argv += ["--nodes", str(shape.nodes)]
    if machine.network is not None and shape.nodes > 1:
        argv += ["--network", machine.network]
    if machine.least_links:
        argv += ["--least-links", json.dumps(machine.least_links, separators=(",", ":"))]
    if machine.environment_by_local_rank:
        argv += ["--by-local-rank", json.dumps(machine.environment_by_local_rank, separators=(",", ":"))]
    return argv


def torchrun_argv(rank: list[str], shape: Geometry) -> list[str]:
    """Return the torchrun command on one node, as a module. Its rendezvous is a file: an address would listen on every
    interface.
    """
    python, _, *module = rank
    return [
        *(python, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={shape.world_size}"),
        *("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "-m", *module),
    ]


def srun_argv(
    rank: list[str], shape: Geometry, machine: Machine, *, name: str, outputs: Path | None, root: Path, share: int = 1
) -> list[str]:
    """Return the srun command: one task and one GPU per rank, block distribution, nothing left to the job.

    Each rank writes to its own file in `outputs`, or without it to srun's output. With `share` > 1, several runs have
    steps in this job at the same time.
    """
    argv = [
        *("srun", f"--job-name={name}", f"--nodes={shape.nodes}", f"--ntasks={shape.world_size}"),
        *(f"--ntasks-per-node={shape.ranks_per_node}", "--distribution=block:block"),
        f"--cpus-per-task={machine.cores_per_rank or 1}",
    ]
    if machine.gpu_bind == "task":
        argv += ["--gpus-per-task=1"]
    else:
        argv += [f"--gpus-per-node={shape.ranks_per_node}", "--gpu-bind=none"]
    argv += [f"--cpu-bind={machine.cpu_bind}"]
    if machine.mem_bind is not None:
        argv += [f"--mem-bind={machine.mem_bind}"]
    if share > 1:  # without these a step takes all of the job, and the next one waits for it
        argv += ["--exact", "--mem=0"]
    argv += ["--kill-on-bad-exit=1"]
    if outputs is not None:
        argv += [f"--output={outputs / 'rank=%5t.log'}"]
    if machine.container is not None:
        argv += [f"--environment={(root / machine.container).resolve()}"]
    return [*argv, *machine.srun_options, *rank]


def srun_environment(
    machine: Machine, *, outputs: Path, root: Path, address: str | None = None, job: str | None = None
) -> dict[str, str]:
    """Return the variables that srun passes to all ranks; the machine's own take precedence."""
    found = dict.fromkeys(THREADS, str(machine.cores_per_rank or 1))
    found["TOKENSCALE_ROOT"] = str(root)  # where the container's file finds the project
    if address is not None:
        found |= {"MASTER_ADDR": address, "MASTER_PORT": str(choose_port(job or "0"))}
    if machine.network is not None:  # NCCL ends where it is not there, and says in its log that it is
        found |= {"NCCL_NET": machine.network, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET"}
        found |= {"NCCL_DEBUG_FILE": str(outputs / "nccl.%h.%p.log")}
    if machine.container is not None:  # the code is this project's, not what an image may hold
        found["PYTHONPATH"] = str(Path(__file__).resolve().parents[3])
    return found | machine.environment


def choose_port(job: str) -> int:
    """Return the rendezvous port of a job.

    >>> choose_port("41"), choose_port("12809")
    (20041, 20041)
    """
    number = int("".join(c for c in job if c.isdigit()) or 0)
    return PORTS[number % len(PORTS)]
