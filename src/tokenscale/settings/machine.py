"""Description of a machine and its launcher, from a TOML file next to a profile. It never changes a
run's id.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_file
from tokenscale.settings.options import as_list, decode, option, raise_errors, settings_class


@settings_class
class PublishedLink:
    """What a site publishes of the quantity that `train.parallel.preflight` measures: the bus
    bandwidth of an all-reduce inside a node, or between nodes with one rank on each.
    """

    gb_s: float = option(description="GB/s over the link as it should be", gt=0)
    source: str = option(description="document and version that state it")
    slow_gb_s: float | None = option(
        None, description="GB/s over the path that the bound is to refuse", gt=0
    )


@settings_class
class Machine:
    """Kind of node, and the resources of a rank. The default is this machine."""

    name: str = option("this machine", description="name in records")
    starter: Literal["here", "torchrun", "srun"] = option(
        "here",
        description=(
            "launcher of the ranks. here: this project's, on one node; torchrun, on one node; "
            "srun, "
            "in a SLURM job"
        ),
    )
    gpus_per_node: int | None = option(
        None, description="ranks per node; without it all ranks of a run share one machine", ge=1
    )
    device: str | None = option(
        None, description="name of the GPU as its driver reports it; `plan` uses its peak FLOP/s"
    )
    gpu_memory_gib: float | None = option(
        None, description="GPU memory in GiB, as in torch; `plan` lists runs that do not fit", gt=0
    )
    cores_per_rank: int | None = option(
        None, description="cores that srun binds each rank to", ge=1
    )
    memory_mb: int = option(16000, description="memory per node that a training job requests", ge=1)
    exclusive: bool = option(
        False, description="nodes have one job each: every job requests all of memory_mb"
    )
    minutes: int = option(
        120,
        description="longest time limit of a training job; a shorter estimate shortens it",
        ge=1,
    )
    runtime_margin: float = option(
        3.0,
        description="time limit of a training job: this multiple of its estimate + signal_s",
        ge=1,
    )
    signal_s: int = option(
        300,
        description="seconds before the time limit at which ranks write a resume state; 0: never",
        ge=0,
    )
    hang_s: int = option(
        600,
        description="seconds without a step after which a rank dumps its stack and ends, three times as "
        "many until the first step has ended; 0: never",
        ge=0,
    )
    gpu_bind: Literal["task", "node"] = option(
        "task",
        description="GPUs that srun shows to a rank. task: its own alone (--gpus-per-task=1); node: all of "
        "the node's, which CUDA "
        "IPC between ranks may need",
    )
    least_node_gb_s: float | None = option(
        None, description="least GB/s of an all-reduce inside a node; below it a run ends", gt=0
    )
    least_network_gb_s: float | None = option(
        None, description="the same between nodes, with one rank on each", gt=0
    )
    published: dict[Literal["node", "network"], PublishedLink] = option(
        dict,
        description="published measurements of what least_node_gb_s and least_network_gb_s bound; a bound "
        "must lie above slow_gb_s and not above gb_s",
    )
    cpu_bind: str = option(
        "cores", description="srun's --cpu-bind, which gives each rank its own cores"
    )
    mem_bind: str | None = option(
        None, description="srun's --mem-bind; local: memory of the rank's NUMA node"
    )
    container: str | None = option(
        None, description="environment definition file for the inner srun only", path=True
    )
    container_option: Literal["environment", "edf"] = option(
        "environment",
        description="srun's option that takes this file: environment of the Container Engine, edf of Sarus Suite",
    )
    container_record: str | None = option(
        None,
        description="file that names the image, its digest and the packages installed beside it, required by "
        "`check`; profiles/alps/install.py writes it",
        path=True,
    )
    container_packages: tuple[str, ...] = option(
        tuple,
        description="Python packages of the ranks in the container, by import name; a run that imports any other "
        "package is rejected; "
        "empty: no check",
    )
    python: str | None = option(
        None,
        description="Python of the ranks; by default the launcher's, or the container's",
        path=True,
    )
    network: str | None = option(
        None, description="network that NCCL must report between nodes, such as AWS Libfabric"
    )
    environment: dict[str, str] = option(dict, description="environment variables of every rank")
    environment_by_local_rank: dict[str, tuple[str, ...]] = option(
        dict, description="environment variables, a value per local rank"
    )
    srun_options: tuple[str, ...] = option(tuple, description="further options of the inner srun")
    accounts: Literal["any", "groups"] = option(
        "any", description="SLURM's accounts. groups: they are the user's groups (`id -Gn`)"
    )
    purged_days: dict[str, int] = option(
        dict,
        description="folder → days after its last access at which a file in it is deleted; `ready` and the "
        "submission refuse a plan that takes longer",
    )

    @property
    def cores_per_node(self) -> int:
        """Cores of a node that its ranks have together."""
        return (self.cores_per_rank or 1) * (self.gpus_per_node or 1)

    @property
    def least_links(self) -> dict[str, float]:
        """Least GB/s by kind of link (`train.parallel.preflight.LINKS`)."""
        found = {kind: getattr(self, f"least_{kind}_gb_s") for kind in ("node", "network")}
        return {kind: value for kind, value in found.items() if value is not None}

    @property
    def slurm_options(self) -> str:
        """Options of a training job besides its resources. The signal goes to ranks, not to the
        batch script.
        """
        return f"--signal=USR1@{self.signal_s}" if self.signal_s else ""

    @as_list
    def problems(self) -> Iterator[tuple[str, str]]:
        """Violations of rules over several fields, as (field, what is wrong)."""
        if self.container is not None and self.starter != "srun":
            yield (
                "container",
                'needs starter = "srun"; or start the whole workflow in the container',
            )
        for kind, link in self.published.items():
            least = self.least_links.get(kind)
            if least is not None and not (link.slow_gb_s or 0) < least <= link.gb_s:
                yield (
                    f"least_{kind}_gb_s",
                    f"{least:g} is not between {link.slow_gb_s or 0:g} and {link.gb_s:g} GB/s, "
                    f"which {link.source} states",
                )
        if self.signal_s >= 60 * self.minutes:
            yield "signal_s", f"{self.signal_s} s is not shorter than minutes = {self.minutes}"
        if self.gpu_bind != "task" and self.starter != "srun":
            yield "gpu_bind", 'needs starter = "srun"; other launchers show every rank all GPUs'
        if self.starter == "srun" and self.gpus_per_node is None:
            yield "gpus_per_node", 'starter = "srun" needs the number of ranks per node'
        if self.environment_by_local_rank and self.gpus_per_node is None:
            yield "environment_by_local_rank", "needs gpus_per_node: one value per rank of a node"
        for name, values in self.environment_by_local_rank.items():
            if self.gpus_per_node is not None and len(values) != self.gpus_per_node:
                text = f"{name} has {len(values)} values for {self.gpus_per_node} ranks per node"
                yield "environment_by_local_rank", text


def load_machine(path: str | Path | None, root: str | Path = ".") -> Machine:
    """Load a machine's file; None gives this machine. Raises UserError for a missing, unreadable or
    invalid file.
    """
    if not path:
        return Machine()
    from tokenscale.settings.yaml_files import find_foreign_values  # PyYAML

    file = Path(root) / path
    try:
        values = tomllib.loads(read_file(file).decode("utf-8-sig"))
    except FileNotFoundError:
        next_step = "profiles/alps/machine.toml is an example"
        raise UserError("the machine file is missing.", file=file, next=next_step) from None
    except (ValueError, RecursionError, OSError) as error:  # also an invalid file name
        what = "the machine file is not readable TOML."
        next_step = "correct it, or use another file"
        raise UserError(what, file=file, reason=error, next=next_step) from None
    raise_errors(find_foreign_values(values), file=str(file))
    machine: Machine = decode(Machine, values, file=str(file))
    raise_errors(machine.problems(), file=str(file))
    return machine
