"""How a run is spread over processes: degrees, what they can do, and which rank stands where."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from tokenscale.base.errors import UserError
from tokenscale.data.order.shares import micro_steps
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import STRICT, option
from tokenscale.settings.registry import COPIES

#: degrees, from what may lie furthest apart to what must lie closest together
DEGREES = ("pipeline", "data", "shard", "tensor")


@dataclass(frozen=True)
class Place:
    """One rank's place along each degree; `reader` is which of the ranks that read different rows it belongs to."""

    pipeline: int
    data: int
    shard: int
    tensor: int
    reader: int

    @property
    def counts(self) -> bool:
        """Whether it speaks for the ranks that train on the same rows: those of its tensor group and its pipeline."""
        return self.pipeline == 0 and self.tensor == 0


@dataclass(frozen=True)
class LayoutSettings:
    """How a run is spread over processes. The world size is the product of the degrees."""

    __pydantic_config__ = STRICT

    data: int = option(1, "data-parallel degree: copies of the model (DDP; with shard: HSDP)", ge=1, strict=True)
    shard: int = option(1, "ranks that hold one copy between them (ZeRO, FSDP)", ge=1, strict=True)
    sharding: Literal["zero1", "zero2", "zero3"] = option(
        "zero3",
        "what they share out: optimizer state; gradients and weights too, gathered once a step; or gathered for each "
        "pass and given back",
    )
    tensor: int = option(
        1, "ranks that share each matrix, each vocabulary and the positions between blocks (TP, SP)", ge=1, strict=True
    )
    pipeline: int = option(1, "ranks that share the layers, one group of them behind the other (PP)", ge=1, strict=True)
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zero-bubble"] = option(
        "1f1b", "the order of a pipeline's passes; naive: one micro-batch at a time, all others wait"
    )
    stages_per_rank: int = option(1, "interleaved: groups of layers a rank of the pipeline holds", ge=1, strict=True)
    copies: Literal[*COPIES] = option("ddp", "what keeps copies alike, where each rank holds all of it (data alone)")
    bucket_megabytes: int = option(25, "size of DDP's gradient buckets (also zero1's)", ge=1, strict=True)
    compression: Literal["none", "bf16"] = option(
        "none", "bf16: gradients in those buckets are rounded to 16 bits before ranks exchange them"
    )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(getattr(self, degree) for degree in DEGREES)

    @property
    def readers(self) -> int:
        """Ranks, or groups of ranks, that read different rows."""
        return self.data * self.shard

    @property
    def stages(self) -> int:
        """Groups of layers."""
        return self.pipeline * self.stages_per_rank

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that it is made of, in the order in which they are applied: keys of `registry.PARALLEL`."""
        found = ["pp"] * (self.pipeline > 1) + ["tp"] * (self.tensor > 1)
        if self.shard > 1:
            found.append("zero1" if self.sharding == "zero1" else "hsdp" if self.data > 1 else "fsdp")
        else:
            found.append(self.copies if self.data > 1 else "single")
        return tuple(found)

    @property
    def method(self) -> str:
        """The method's name in tables and in run ids: a pipeline goes by its schedule."""
        named = [name for name in self.methods if name != "single"] or ["single"]
        return "-".join(self.schedule if name == "pp" else name for name in named)

    def place(self, rank: int) -> Place:
        """Where a rank stands: ranks of a tensor group have neighbouring numbers, and stages lie furthest apart.

        >>> LayoutSettings(data=2, tensor=2, pipeline=2).place(3)
        Place(pipeline=0, data=1, shard=0, tensor=1, reader=1)
        """
        found = {}
        for degree in reversed(DEGREES):
            rank, found[degree] = divmod(rank, getattr(self, degree))
        return Place(**found, reader=found["data"] * self.shard + found["shard"])

    def problems(
        self, model: ModelSettings, *, global_batch: int, micro_batch: int, sequence_length: int
    ) -> list[tuple[str, str]]:
        """(field, what is wrong, and the nearest that works) of a layout for a model and its batches."""
        found = []
        if self.readers > global_batch:
            field = "data" if self.data > 1 else "shard"
            text = f"{self.readers} ranks share {global_batch} rows: some would train on nothing"
            found.append((field, f"{text}; at most {global_batch} ranks, or a larger global_batch"))
        if self.shard == 1 and self.sharding != _DEFAULT["sharding"]:
            found.append(("sharding", f"{self.sharding} shares nothing out over one rank: set layout.shard, too"))
        buckets = self.pipeline == 1 and self.methods[-1] in ("ddp", "zero1")
        for name in ("bucket_megabytes", "compression"):
            if getattr(self, name) != _DEFAULT[name] and not buckets:
                found.append((name, f"{self.method} has no buckets of gradients: ddp and zero1 without a pipeline do"))
        if self.copies != _DEFAULT["copies"] and self.copies not in self.methods:
            found.append(("copies", "there are none that each rank holds all of: set layout.data, without shard"))
        if self.shard > 1 and self.sharding == "zero1" and self.data > 1:
            text = "zero1 shares optimizer state out over all ranks, and has no copies beside them"
            found.append(("data", f"{text}: data 1 and shard {self.readers}, or sharding zero2"))
        if model.transformers is not None:
            text = f"models of transformers ({model.transformers}) are not cut: use data or shard"
            found += [(name, text) for name in ("tensor", "pipeline") if getattr(self, name) > 1]
            return found
        return (
            found
            + self._tensor_problems(model, sequence_length)
            + self._pipeline_problems(model, micro_steps(global_batch, self.readers, micro_batch))
        )

    def _tensor_problems(self, model: ModelSettings, sequence_length: int) -> list[tuple[str, str]]:
        shared = {
            "model.heads": model.heads,
            "model.key_value_heads": model.key_value_heads,
            "model.hidden": model.hidden,
            "sequence_length": sequence_length,
        }
        wrong = [f"{name} {count}" for name, count in shared.items() if count % self.tensor]
        if not wrong:
            return []
        nearest = _nearest(self.tensor, _divisors(math.gcd(*shared.values())))
        return [("tensor", f"{self.tensor} ranks cannot share {', '.join(wrong)} evenly: {nearest}")]

    def _pipeline_problems(self, model: ModelSettings, micro_batches: int) -> list[tuple[str, str]]:
        if self.pipeline == 1:
            given = [name for name in ("schedule", "stages_per_rank") if getattr(self, name) != _DEFAULT[name]]
            return [(name, "there is no pipeline to order: set layout.pipeline, too") for name in given]
        found = []
        if self.stages > model.layers:
            fitting = model.layers // self.stages_per_rank
            most = f"; at most {fitting}" if fitting > 1 else ": too few for a pipeline"
            found.append(("pipeline", f"{self.stages} stages are more than the model's {model.layers} layers{most}"))
        if self.schedule == "interleaved":
            if self.stages_per_rank == 1:
                found.append(("stages_per_rank", "interleaved needs 2 stages a rank or more; with one it is 1f1b"))
            if micro_batches % self.pipeline:
                nearest = max(self.pipeline, micro_batches // self.pipeline * self.pipeline)
                text = f"interleaved needs a multiple of {self.pipeline} micro-batches a step, not {micro_batches}"
                change = f"change global_batch or micro_batch to make {nearest}, or take 1f1b"
                found.append(("schedule", f"{text}: {change}"))
        elif self.schedule == "zero-bubble" and self.shard > 1 and self.sharding != "zero1":
            text = f"zero-bubble computes gradients by weights after {self.sharding} has given the weights back"
            found.append(("schedule", f"{text}: take 1f1b, or sharding zero1"))
        if self.schedule != "interleaved" and self.stages_per_rank > 1:
            found.append(("stages_per_rank", f"{self.schedule} has one stage a rank; interleaved has several"))
        return found

    def node_problem(self, ranks_per_node: int) -> str | None:
        """Why this layout should not lie on nodes of so many ranks; None where nothing speaks against it.

        Exchanges of a tensor group are in every block, and must not leave a node.

        >>> LayoutSettings(tensor=4, data=2).node_problem(6)
        'tensor groups of 4 would reach over nodes of 6 ranks: tensor 3 stays inside'
        """
        if ranks_per_node % self.tensor == 0:
            return None
        inside = max(d for d in _divisors(ranks_per_node) if d < self.tensor)
        over = f"tensor groups of {self.tensor} would reach over nodes of {ranks_per_node} ranks"
        return f"{over}: tensor {inside} stays inside"


_DEFAULT = {field.name: field.default for field in fields(LayoutSettings)}


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _nearest(requested: int, fitting: list[int]) -> str:
    """The next smaller and the next larger that work, as text."""
    below, above = [n for n in fitting if n < requested], [n for n in fitting if n > requested]
    return f"{below[-1]} works" + (f", {above[0]} too" if above else "")


@dataclass(frozen=True)
class Geometry:
    """How a run's ranks lie on nodes; one rank a GPU, every node used alike."""

    world_size: int
    nodes: int
    ranks_per_node: int

    @property
    def tasks_per_node(self) -> int:
        """What a SLURM job asks for: its plugin for Snakemake takes two tasks or more where we call srun ourselves."""
        return max(2, self.ranks_per_node)

    def cores_per_task(self, cores_per_rank: int | None) -> int:
        """Cores for each of these tasks, so that all of a node hold its ranks' cores; 1 where nobody says."""
        return -(-(cores_per_rank or 1) * self.ranks_per_node // self.tasks_per_node)


def geometry(world_size: int, gpus_per_node: int | None) -> Geometry:
    """The fewest nodes that hold the ranks, filled evenly; one node for any number where nodes are not counted.

    Raises UserError where that does not come out even, naming the nearest world sizes that do.

    >>> [(g.nodes, g.ranks_per_node) for g in (geometry(n, 4) for n in (1, 2, 4, 8, 12, 16))]
    [(1, 1), (1, 2), (1, 4), (2, 4), (3, 4), (4, 4)]
    """
    if gpus_per_node is None:
        return Geometry(world_size, 1, world_size)
    nodes = -(-world_size // gpus_per_node)
    if world_size % nodes:
        fitting = [n for n in range(1, 2 * world_size) if n % -(-n // gpus_per_node) == 0]
        below, above = max(n for n in fitting if n < world_size), min(n for n in fitting if n > world_size)
        raise UserError(
            "the world size does not fill its nodes evenly.",
            world_size=world_size,
            gpus_per_node=gpus_per_node,
            next=f"use {below} or {above}",
        )
    return Geometry(world_size, nodes, world_size // nodes)
