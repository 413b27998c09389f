"""Parallel layout of a run: degrees, their constraints, and the mesh coordinate of each rank."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from tokenscale.base.errors import UserError
from tokenscale.data.order.permutation import micro_steps
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import MOST, as_list, option, settings_class
from tokenscale.settings.registry import REPLICATION

#: parallel degrees, from the least to the most communication between ranks
DEGREES = ("pipeline", "data", "shard", "tensor")
#: variable with the secret of a run's ranks (`train/parallel/world.py`); no command line and no
#: record holds it
RENDEZVOUS_SECRET = "TOKENSCALE_RENDEZVOUS_SECRET"


@dataclass(frozen=True)
class MeshCoordinate:
    """A rank's index along each degree. `data_rank` numbers the groups of ranks that read different
    sequences.
    """

    pipeline: int
    data: int
    shard: int
    tensor: int
    data_rank: int

    @property
    def is_group_leader(self) -> bool:
        """Whether the rank reports for the ranks with the same sequences: its tensor group and its
        pipeline.
        """
        return self.pipeline == 0 and self.tensor == 0


@settings_class
class LayoutSettings:
    """Parallel layout of a run. The world size is the product of the degrees."""

    data: int = option(
        1,
        description="data-parallel degree: number of model replicas (DDP; with shard: HSDP)",
        ge=1,
        le=MOST,
    )
    shard: int = option(
        1,
        description="number of ranks that one replica is sharded over (ZeRO, FSDP)",
        ge=1,
        le=MOST,
    )
    sharding: Literal["zero1", "zero2", "zero3"] = option(
        "zero3",
        description="zero1: shard the optimizer state. zero2: and gradients; weights stay gathered until "
        "backward. zero3: also "
        "the weights, resharded after each forward and backward",
    )
    gather: Literal["stored", "bf16"] = option(
        "stored",
        description="sharding zero2 and zero3: format in which weights are gathered. stored: theirs; "
        "autocast rounds them for "
        "products, as in other layouts. bf16: half the bytes; all but the loss is computed in "
        "bf16, and gradients are "
        "reduced in fp32 (FSDP's MixedPrecisionPolicy)",
    )
    reshard_to: int | None = option(
        None,
        description="sharding zero3: ranks that a block's weights stay sharded over between forward and "
        "backward, such as those of "
        "a node; by default all of `shard`",
        ge=2,
        le=MOST,
    )
    accumulation: Literal["sharded", "unsharded"] = option(
        "sharded",
        description="sharding zero2 and zero3: gradients between micro-steps. sharded: reduced in each, "
        "so that a rank holds its shard, as in torchtitan. unsharded: reduced in the last one, so that "
        "each rank holds the whole model's gradient until then",
    )
    accumulation_format: Literal["stored", "fp32"] = option(
        "stored",
        description="precision bf16-true: format in which gradients of micro-steps are added. stored: that "
        "of the weights, which rounds every sum; fp32: 4 bytes a gradient, reduced by DDP and zero1 "
        "after backward. Needs optimizer.moments: fp32",
    )
    embedding_group: bool = option(
        False,
        description="sharding zero3: gather the embedding separately, reshard it after its lookup",
    )
    head_group: bool = option(
        False,
        description="sharding zero2 and zero3: gather the head separately, reduce its gradient first",
    )
    tensor: int = option(
        1,
        description="tensor-parallel degree: ranks that share each matrix (TP, SP)",
        ge=1,
        le=MOST,
    )
    pipeline: int = option(
        1,
        description="pipeline-parallel degree: ranks that the layers are divided among (PP)",
        ge=1,
        le=MOST,
    )
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zero-bubble"] = option(
        "1f1b",
        description="pipeline schedule; naive: one micro-batch at a time, so that only one rank works",
    )
    stages_per_rank: int = option(
        1,
        description="schedule interleaved: stages per rank of the pipeline",
        ge=1,
        le=MOST,
    )
    copies: Literal[*REPLICATION] = option(  # type: ignore[valid-type]  # a tuple of names
        "ddp", description="method that synchronises full replicas (data alone)"
    )
    bucket_megabytes: int = option(
        25,
        description="size of the gradient buckets of DDP and zero1",
        ge=1,
        le=MOST,
    )
    compression: Literal["none", "bf16"] = option(
        "none", description="bf16: round gradients in buckets before they are reduced"
    )

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, degree) for degree in DEGREES)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or groups of ranks, that read different sequences."""
        return self.data * self.shard

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients are views of DDP's buckets, which stay from step to step. Buckets have
        the format of the weights.
        """
        in_buckets = self.pipeline == 1 and self.accumulation_format == "stored"
        return in_buckets and self.methods[-1] in ("ddp", "zero1")

    @property
    def stages(self) -> int:
        return self.pipeline * self.stages_per_rank

    @property
    def methods(self) -> tuple[str, ...]:
        """Parallel methods, in the order in which they are applied: keys of
        `parallelize.METHODS`.
        """
        names = []
        if self.pipeline > 1:
            names.append("pp")
        if self.tensor > 1:
            names.append("tp")
        if self.shard == 1:
            names.append(self.copies if self.data > 1 else "single")
        elif self.sharding == "zero1":
            names.append("zero1")
        else:
            names.append("hsdp" if self.data > 1 else "fsdp")
        return tuple(names)

    @property
    def method(self) -> str:
        """Name of the layout in tables and run ids. A pipeline is named by its schedule."""
        names = [name for name in self.methods if name != "single"] or ["single"]
        return "-".join(self.schedule if name == "pp" else name for name in names)

    def coordinate(self, rank: int) -> MeshCoordinate:
        """Return a rank's mesh coordinate. Ranks of a tensor group are neighbours, stages are
        furthest apart.
        """
        index = {}
        for degree in reversed(DEGREES):
            rank, index[degree] = divmod(rank, getattr(self, degree))
        return MeshCoordinate(**index, data_rank=index["data"] * self.shard + index["shard"])

    @as_list
    def problems(
        self, model: ModelSettings, global_batch: int, micro_batch: int, sequence_length: int
    ) -> Iterator[tuple[str, str]]:
        """Violations of a model's and its batches' constraints, as (field, what is wrong, with the
        nearest fix).
        """
        if self.data_parallel_size > global_batch:
            field = "data" if self.data > 1 else "shard"
            text = (
                f"{self.data_parallel_size} ranks share {global_batch} sequences: some would "
                "have none"
            )
            yield field, f"{text}; at most {global_batch} ranks, or a larger global_batch"
        if self.shard == 1 and self.sharding != _DEFAULT["sharding"]:
            yield "sharding", f"{self.sharding} needs several ranks: set layout.shard"
        for name in ("bucket_megabytes", "compression"):
            if getattr(self, name) != _DEFAULT[name] and not self.keeps_gradients:
                yield (
                    name,
                    (
                        f"{self.method} has no gradient buckets: only ddp and zero1 have, without a "
                        "pipeline and accumulation_format fp32"
                    ),
                )
        yield from self._fsdp_problems(model)
        if self.accumulation_format == "fp32":
            if self.accumulation == "unsharded":
                text = "FSDP adds unsharded gradients in the format of the weights: use sharded"
                yield "accumulation", f"{text}, or accumulation_format stored"
            if self.pipeline > 1 and self.schedule == "zero-bubble":
                text = "zero-bubble adds deferred gradients in the format of the weights: use 1f1b"
                yield "schedule", f"{text}, or accumulation_format stored"
        if self.copies != _DEFAULT["copies"] and self.copies not in self.methods:
            yield "copies", "needs full replicas: set layout.data, without shard"
        if self.shard > 1 and self.sharding == "zero1" and self.data > 1:
            text = "zero1 shards the optimizer state over all ranks, without replicas"
            yield (
                "data",
                f"{text}: use data 1 and shard {self.data_parallel_size}, or sharding zero2",
            )
        if model.transformers is not None:
            text = (
                f"models of transformers ({model.transformers}) cannot be split: use data or shard"
            )
            yield from [(name, text) for name in ("tensor", "pipeline") if getattr(self, name) > 1]
            return
        micro_batches = micro_steps(
            global_batch, world_size=self.data_parallel_size, micro_batch=micro_batch
        )
        yield from self._tensor_problems(model, sequence_length)
        yield from self._pipeline_problems(model, micro_batches)

    def _fsdp_problems(self, model: ModelSettings) -> Iterator[tuple[str, str]]:
        unsharded = self.methods[-1] not in ("fsdp", "hsdp")
        for name in (
            "gather",
            "reshard_to",
            "accumulation",
            "embedding_group",
            "head_group",
        ):
            if getattr(self, name) == _DEFAULT[name]:
                continue
            if unsharded:
                text = "weights are not sharded: set layout.shard, with sharding zero2 or zero3"
                yield name, text
            elif name in ("reshard_to", "embedding_group") and self.sharding != "zero3":
                yield name, f"{self.sharding} keeps weights gathered until backward: use zero3"
        if self.tensor > 1 or self.pipeline > 1:
            alone = "is for data and shard alone"
            if self.gather != "stored":
                yield "gather", f"{self.gather} {alone}: use stored with tensor or pipeline"
            if self.head_group:
                yield "head_group", f"{alone}: remove it with tensor or pipeline"
        divides = self.reshard_to and self.shard % self.reshard_to == 0
        if not unsharded and self.reshard_to and not (divides and self.reshard_to < self.shard):
            fitting = [d for d in _list_divisors(self.shard) if 1 < d < self.shard]
            works = _find_nearest(self.reshard_to, fitting) if fitting else "leave it out"
            yield "reshard_to", f"no divisor of shard {self.shard} below it: {works}"
        yield from self._group_problems(model)

    def _group_problems(self, model: ModelSettings) -> Iterator[tuple[str, str]]:
        """Groups of the embedding and the head, where the two are not weights of their own."""
        if model.tied_embeddings:
            why = "are one weight"
        elif model.transformers is not None:
            why = "are the library's"
        else:
            return
        for name in ("embedding_group", "head_group"):
            if getattr(self, name):
                yield name, f"embedding and output head of {model.name} {why}: remove {name}"

    def _tensor_problems(self, model: ModelSettings, sequence_length: int) -> list[tuple[str, str]]:
        shared = {
            f"model.{name}": getattr(model, name) for name in ("heads", "key_value_heads", "hidden")
        }
        shared["sequence_length"] = sequence_length
        wrong = [f"{name} {count}" for name, count in shared.items() if count % self.tensor]
        if not wrong:
            return []
        nearest = _find_nearest(self.tensor, fitting=_list_divisors(math.gcd(*shared.values())))
        return [
            ("tensor", f"{self.tensor} ranks cannot share {', '.join(wrong)} evenly: {nearest}")
        ]

    def _pipeline_problems(
        self, model: ModelSettings, micro_batches: int
    ) -> Iterator[tuple[str, str]]:
        if self.pipeline == 1:
            for name in ("schedule", "stages_per_rank"):
                if getattr(self, name) != _DEFAULT[name]:
                    yield name, "needs a pipeline: set layout.pipeline"
            return
        if self.stages > model.layers:
            fitting = model.layers // self.stages_per_rank
            most = f"; at most {fitting}" if fitting > 1 else ": too few for a pipeline"
            yield (
                "pipeline",
                f"{self.stages} stages are more than the model's {model.layers} layers{most}",
            )
        if self.schedule == "interleaved":
            if self.stages_per_rank == 1:
                yield (
                    "stages_per_rank",
                    "interleaved needs at least 2 stages per rank; with one it equals 1f1b",
                )
            if micro_batches % self.pipeline:
                nearest = max(self.pipeline, micro_batches // self.pipeline * self.pipeline)
                text = (
                    f"interleaved needs a multiple of {self.pipeline} micro-batches per step, "
                    f"not {micro_batches}"
                )
                change = f"change global_batch or micro_batch to get {nearest}, or use 1f1b"
                yield "schedule", f"{text}: {change}"
        elif self.schedule == "zero-bubble" and self.shard > 1 and self.sharding != "zero1":
            text = (
                f"zero-bubble computes weight gradients after {self.sharding} has resharded the "
                "weights"
            )
            yield "schedule", f"{text}: use 1f1b, or sharding zero1"
        if self.schedule != "interleaved" and self.stages_per_rank > 1:
            yield (
                "stages_per_rank",
                f"{self.schedule} has one stage per rank: use interleaved for several",
            )

    def node_problem(self, ranks_per_node: int) -> str | None:
        """Return why the layout does not suit nodes of so many ranks, or None: a tensor group stays
        within a node.
        """
        if ranks_per_node % self.tensor == 0:
            return None
        inside = max(d for d in _list_divisors(ranks_per_node) if d < self.tensor)
        return (
            f"tensor groups of {self.tensor} would span nodes of {ranks_per_node} ranks: tensor "
            f"{inside} fits"
        )


_DEFAULT = {field.name: field.default for field in fields(LayoutSettings)}


def _list_divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _find_nearest(requested: int, fitting: list[int]) -> str:
    below = [n for n in fitting if n < requested]
    above = [n for n in fitting if n > requested]
    near = [*below[-1:], *above[:1]]
    return f"{near[0]} works" + (f", {near[1]} too" if near[1:] else "")


@dataclass(frozen=True)
class Geometry:
    """Distribution of a run's ranks over nodes: one rank per GPU, the same number on every node."""

    world_size: int
    nodes: int
    ranks_per_node: int

    @property
    def tasks_per_node(self) -> int:
        """Tasks per node that a SLURM job requests. Snakemake's SLURM plugin needs at least two to
        leave srun to us.
        """
        return max(2, self.ranks_per_node)

    def cores_per_task(self, cores_per_rank: int | None) -> int:
        """Return the cores per task such that the tasks of a node have its ranks' cores; one per
        rank by default.
        """
        return -(-(cores_per_rank or 1) * self.ranks_per_node // self.tasks_per_node)


def geometry(world_size: int, gpus_per_node: int | None) -> Geometry:
    """Return the smallest geometry that fills its nodes evenly; without `gpus_per_node` always one
    node.

    Raises UserError for a world size that fills nodes unevenly, naming the nearest ones that do
    not.
    """
    if gpus_per_node is None:
        return Geometry(world_size=world_size, nodes=1, ranks_per_node=world_size)
    nodes = -(-world_size // gpus_per_node)
    if world_size % nodes:
        fitting = [n for n in range(1, 2 * world_size) if n % -(-n // gpus_per_node) == 0]
        below = max(n for n in fitting if n < world_size)
        above = min(n for n in fitting if n > world_size)
        what = "the world size does not fill its nodes evenly."
        facts = {"gpus_per_node": gpus_per_node}
        raise UserError(what, world_size=world_size, **facts, next=f"use {below} or {above}")
    return Geometry(world_size=world_size, nodes=nodes, ranks_per_node=world_size // nodes)
