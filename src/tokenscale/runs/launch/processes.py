"""A run and a machine → the command lines of its processes: pure functions, the geometry spelled out."""

import json
import sys
from pathlib import Path

from tokenscale.runs.launch.ranks import THREADS
from tokenscale.settings.layout import Geometry
from tokenscale.settings.machine import Machine

#: ports for the ranks to meet at, by the job number: nodes may be shared, and on a test machine they are all one. They
#: lie below those that Linux gives to whoever asks for any.
PORTS = range(20000, 32768)


def rank_argv(
    machine: Machine, shape: Geometry, *, run: str, directory: Path, attempt: int, manifests: dict[str, Path]
) -> list[str]:
    """The command of one rank; all ranks of a run have the same. `run` is its settings as canonical JSON."""
    # in a container Python is the container's, whatever this one is
    python = machine.python or ("python" if machine.container else sys.executable)
    argv = [python, "-m", "tokenscale", "rank", "--settings", run]
    argv += ["--directory", str(directory), "--attempt", str(attempt), "--hang-s", str(machine.hang_s)]
    for role, path in manifests.items():
        argv += [f"--{role.replace('_', '-')}", str(path)]
    if machine.starter == "srun":
        argv += ["--srun"]
    if machine.gpus_per_node is not None:
        argv += ["--nodes", str(shape.nodes)]
    if machine.network is not None and shape.nodes > 1:
        argv += ["--network", machine.network]
    if machine.environment_by_local_rank:
        argv += ["--by-local-rank", json.dumps(machine.environment_by_local_rank, separators=(",", ":"))]
    return argv


def torchrun_argv(rank: list[str], shape: Geometry, port: int | str) -> list[str]:
    """torchrun on one node, as a module: its script need not be in PATH, nor belong to this Python."""
    python, _, *module = rank
    return [
        *(python, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={shape.world_size}"),
        *("--master-addr=127.0.0.1", f"--master-port={port}", "-m", *module),
    ]


def srun_argv(
    rank: list[str], shape: Geometry, machine: Machine, *, name: str, outputs: Path | None, root: Path, share: int = 1
) -> list[str]:
    """One task a rank, one GPU a task, nodes filled one after the other; nothing is left to what the job was asked for.

    Each rank's output goes to a file of its own; without `outputs`, to srun's. With `share`, other runs have a step in
    this job at the same time.
    """
    argv = [
        *("srun", f"--job-name={name}", f"--nodes={shape.nodes}", f"--ntasks={shape.world_size}"),
        *(f"--ntasks-per-node={shape.ranks_per_node}", "--distribution=block:block"),
        *(f"--cpus-per-task={machine.cores_per_rank or 1}", "--gpus-per-task=1", f"--cpu-bind={machine.cpu_bind}"),
    ]
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


def environment(
    machine: Machine, *, outputs: Path, root: Path, address: str | None = None, job: str | None = None
) -> dict[str, str]:
    """Variables that all ranks get from an srun of ours; a machine's own are last, and win."""
    found = dict.fromkeys(THREADS, str(machine.cores_per_rank or 1))
    found["TOKENSCALE_ROOT"] = str(root)  # where the container's file finds the project
    if address is not None:
        found |= {"MASTER_ADDR": address, "MASTER_PORT": str(port_of(job or "0"))}
    if machine.network is not None:  # NCCL ends where it is not there, and says in its log that it is
        found |= {"NCCL_NET": machine.network, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET"}
        found |= {"NCCL_DEBUG_FILE": str(outputs / "nccl.%h.%p.log")}
    if machine.container is not None:  # the code is this project's, not what an image may hold
        found["PYTHONPATH"] = str(Path(__file__).resolve().parents[3])
    return found | machine.environment


def port_of(job: str) -> int:
    """Where the ranks of a job meet.

    >>> port_of("41"), port_of("12809")
    (20041, 20041)
    """
    number = int("".join(c for c in job if c.isdigit()) or 0)
    return PORTS[number % len(PORTS)]
