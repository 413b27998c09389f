"""What a machine is and how processes come to its nodes: a TOML file beside a profile. It never changes a run."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenscale.base.errors import UserError
from tokenscale.settings.options import STRICT, option


@dataclass(frozen=True)
class Machine:
    """One kind of node, and what a rank needs there. Without a file: this machine, as it is."""

    __pydantic_config__ = STRICT

    name: str = option("this machine", "what records call it")
    starter: Literal["here", "torchrun", "srun"] = option(
        "here", "who starts ranks: our own launcher, torchrun (both on one node), or srun inside of a SLURM job"
    )
    gpus_per_node: int | None = option(None, "ranks that a node holds; without it one machine holds a whole run", ge=1)
    device: str | None = option(None, "the GPU by the name its driver gives: `plan` prices runs by its peak")
    cores_per_rank: int | None = option(None, "what srun gives and binds each rank to", ge=1)
    memory_mb: int = option(16000, "of a node: what a training's job asks for", ge=1)
    minutes: int = option(120, "longest time limit of a training's job; its estimate makes it shorter", ge=1)
    runtime_margin: float = option(
        3.0, "a training's job asks for so many times its estimated time, and for `signal_s` more", ge=1
    )
    signal_s: int = option(
        300, "before its time limit a job's ranks are told to write a state to go on from; 0: never", ge=0
    )
    hang_s: int = option(
        1800, "a rank that has made no step for so long writes where it stands, and the run ends; 0: never", ge=0
    )
    cpu_bind: str = option("cores", "srun's --cpu-bind: ranks keep to cores of their own")
    mem_bind: str | None = option(None, "srun's --mem-bind, such as local: memory of the NUMA node that a rank is on")
    container: str | None = option(None, "environment definition file that only the inner srun enters")
    container_packages: tuple[str, ...] = option(
        tuple,
        "Python packages of the container's image, by the names they are imported by: a run that imports another one "
        "is refused; empty: not compared",
    )
    python: str | None = option(None, "Python of the ranks; without it the launcher's own, or the container's")
    network: str | None = option(None, "what NCCL must say it talks over between nodes, such as AWS Libfabric")
    environment: dict[str, str] = option(dict, "variables of every rank")
    environment_by_local_rank: dict[str, tuple[str, ...]] = option(
        dict, "variables that differ by a rank's place on its node: NICs, for one"
    )
    srun_options: tuple[str, ...] = option(tuple, "further options of the inner srun")

    @property
    def slurm_options(self) -> str:
        """What a training's job asks for beside its resources. The signal goes to ranks, not to the batch script."""
        return f"--signal=USR1@{self.signal_s}" if self.signal_s else ""

    def problems(self) -> list[tuple[str, str]]:
        """(field, what is wrong) of fields that do not fit together."""
        found = []
        if self.container is not None and self.starter != "srun":
            found.append(("container", 'only srun enters containers: starter = "srun", or start all in the container'))
        if self.signal_s >= 60 * self.minutes:
            found.append(("signal_s", f"{self.signal_s} s are no part of {self.minutes} minutes"))
        if self.starter == "srun" and self.gpus_per_node is None:
            found.append(("gpus_per_node", "srun needs to know how many ranks a node holds"))
        if self.environment_by_local_rank and self.gpus_per_node is None:
            found.append(("environment_by_local_rank", "say gpus_per_node, too: as many values as a node has ranks"))
        for name, values in self.environment_by_local_rank.items():
            if self.gpus_per_node is not None and len(values) != self.gpus_per_node:
                text = f"{name} has {len(values)} values for {self.gpus_per_node} ranks a node"
                found.append(("environment_by_local_rank", text))
        return found


def load(path: str | Path | None, root: str | Path = ".") -> Machine:
    """The machine of a file; this one for None. Raises UserError for what is missing, no TOML, or not understood."""
    if not path:
        return Machine()
    from tokenscale.settings import validate

    file = Path(root) / path
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            "the machine's file is missing.", file=file, next="profiles/alps/machine.toml is an example"
        ) from None
    except (ValueError, RecursionError, OSError) as error:  # also a name that no file has
        raise UserError(
            "the machine's file is not readable TOML.", file=file, reason=error, next="mend it, or name another"
        ) from None
    machine: Machine = validate.build(Machine, values, file=str(file))
    validate.check_problems(machine.problems(), file=str(file))
    return machine
