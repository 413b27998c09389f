"""Pipeline parallelism: each rank has some of the layers, and micro-batches go through the ranks one behind the other.

What one rank does in which order is in `costs.schedules`; here it is carried out. A stage is the plain model without
the layers of other ranks: what is left keeps its names, and tensor and sharded layouts go on from it.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokenscale.costs.pipeline_schedules import in_flight, schedule, stages_of
from tokenscale.train.models.attention import Bounds
from tokenscale.train.parallel.deferred_weight_grads import Deferred
from tokenscale.train.parallel.mesh import Mesh
from tokenscale.train.parallel.sharding import Sum, held_of

#: (tokens, labels, bounds) of one micro-batch on the device
Micro = tuple[Tensor, Tensor, Bounds | None]


def apply(objective: nn.Module, mesh: Mesh) -> nn.Module:
    """Leave this rank its layers, in place, and put a `Pipeline` into the attribute `pipeline`.

    Called by itself the objective is then one stage. An embedding that is the output head, too, is on the first rank
    and on the last, and its gradient is summed over both. Every rank must have built the same weights.
    """
    model, held, layout = objective.model, held_of(objective), mesh.layout
    rank, ranks = mesh.index("pipeline"), layout.pipeline
    stages = stages_of(model.settings, model.sequence_length, layout.stages)
    mine = stages[rank::ranks]
    first, last = rank == 0, rank == ranks - 1
    kept = {layer for layers in mine for layer in layers}
    for layer in range(len(model.blocks)):
        if layer not in kept:
            model.blocks[layer] = None
    tied = model.settings.tied_embeddings
    if not (first or (last and tied)):
        model.embedding = None
    if not first and model.settings.positions == "learned":
        model.positions = None
    if not last:
        model.norm = model.head = None
    if tied:
        ends = mesh.group_by(lambda place: (place.reader, place.tensor) if place.pipeline in (0, ranks - 1) else None)
        if ends is not None:
            held.sums.append(Sum(("embedding.weight",), ends))
        if last:
            held.repeated.add("embedding.weight")
    objective.forward = partial(_stage, objective)
    objective.pipeline = Pipeline(objective, mesh, mine)
    return objective


def _stage(
    objective: nn.Module, micro: Micro, x_btd: Tensor | None, layers: range, *, first: bool, last: bool
) -> Tensor:
    """One group of layers: what goes to the next one [B, T, d], or the loss. `x_btd` comes from the one before."""
    tokens, labels, bounds = micro
    model = objective.model
    if bounds is not None:
        bounds.prepare(model.kernel, model.causal)
    x = model.embed(tokens, bounds) if first else x_btd
    x = model.through(x, tokens.shape[1], bounds, layers=layers)
    return objective.loss(model.norm(x), labels) if last else x


class Links:
    """What a rank sends to the next stage and gets from it, and the same of the one before.

    Each direction has a group of its own, and so has the way from the last rank back to the first: within a group ranks
    send one way only, in one order, so that nobody can wait for somebody who waits for them.
    """

    def __init__(self, mesh: Mesh, chunks: int):
        self.rank, self.ranks = mesh.index("pipeline"), mesh.size("pipeline")

        def group() -> dist.ProcessGroup:
            return mesh.group_by(lambda place: (place.reader, place.tensor))

        wraps = (False, True) if chunks > 1 else (False,)
        self._groups = {(kind, wrap): group() for kind in "FB" for wrap in wraps}
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def send(self, kind: str, tensor: Tensor) -> None:
        """To the next stage (F) or to the one before (B); goes on while the caller works."""
        to = self.rank + (1 if kind == "F" else -1)
        group = self._groups[kind, not 0 <= to < self.ranks]
        tensor = tensor.contiguous()
        self._sending.append((dist.isend(tensor, group=group, group_dst=to % self.ranks), tensor))

    def receive(self, kind: str, into: Tensor) -> None:
        """From the stage before (F) or from the next one (B); waits for it."""
        of = self.rank - (1 if kind == "F" else -1)
        group = self._groups[kind, not 0 <= of < self.ranks]
        dist.irecv(into, group=group, group_src=of % self.ranks).wait()

    def finish(self) -> None:
        """Wait for what is still being sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()


class Pipeline:
    """Carries a schedule out on one rank. Called, it computes losses without learning, as any objective does."""

    def __init__(self, objective: nn.Module, mesh: Mesh, layers: list[range]):
        self.objective, self.mesh, self.layers = objective, mesh, layers
        self.rank, self.ranks = mesh.index("pipeline"), mesh.size("pipeline")
        self.links = Links(mesh, len(layers))
        self.group = mesh.group("pipeline")
        self.deferred: Deferred | None = None
        if mesh.layout.schedule == "zero-bubble":
            self.deferred = Deferred()
            blocks = (block for block in objective.model.blocks if block is not None)
            for module in (module for block in blocks for module in block.modules()):
                if isinstance(module, nn.Linear):
                    self.deferred.take_over(module)

    def _is_first(self, chunk: int) -> bool:
        return self.rank == 0 and chunk == 0

    def _is_last(self, chunk: int) -> bool:
        return self.rank == self.ranks - 1 and chunk == len(self.layers) - 1

    def _forward(self, micro: Micro, x: Tensor | None, chunk: int) -> Tensor:
        ends = {"first": self._is_first(chunk), "last": self._is_last(chunk)}
        return self.objective(micro, x, self.layers[chunk], **ends)

    def _between(self, micro: Micro) -> Tensor:
        """Room for what goes from one stage to the next: the residual stream of this rank's positions, in the format of
        the weights (under autocast sums stay in it)."""
        rows, length = micro[0].shape
        weight = next(self.objective.parameters())
        width = self.objective.model.settings.dimension
        shape = (rows, length // self.mesh.size("tensor"), width)
        return torch.empty(shape, dtype=weight.dtype, device=self.mesh.world.device)

    def broadcast_from_last(self, value: Tensor) -> Tensor:
        """The last rank's value, on all of them. A collective."""
        dist.broadcast(value, group=self.group, group_src=self.ranks - 1)
        return value

    @torch.no_grad()
    def __call__(self, tokens_bt: Tensor, labels_bt: Tensor, bounds: Bounds | None = None) -> Tensor:
        """The sum of losses, the same on every rank of the pipeline; a scalar. A collective."""
        micro, loss = (tokens_bt, labels_bt, bounds), torch.zeros((), device=self.mesh.world.device)
        for chunk in range(len(self.layers)):
            x = None
            if not self._is_first(chunk):
                x = self._between(micro)
                self.links.receive("F", x)
            y = self._forward(micro, x, chunk)
            if self._is_last(chunk):
                loss = y.float()
            else:
                self.links.send("F", y)
        self.links.finish()
        return self.broadcast_from_last(loss)

    def step(
        self,
        *,
        weight: Tensor,
        micro: Callable[[int], Micro],
        micro_steps: int,
        timer: object,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        probe: object | None = None,
    ) -> Tensor:
        """As `training.step.backward`, with the micro-batches that `micro` gives by their number. Gradients by weights
        are exchanged, where the layout does that, in the last backward pass. The sum of losses is that of all ranks of
        the pipeline, on each of them."""
        layout = self.mesh.layout
        actions = schedule(layout.schedule, self.rank, self.ranks, micro_steps, layout.stages_per_rank)
        loss_sum = torch.zeros((), device=self.mesh.world.device)
        micros: dict[int, Micro] = {}
        kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        uses = Counter(action.micro for action in actions)
        for number, (kind, k, chunk) in enumerate(actions):
            if k not in micros:
                micros[k] = micro(k)
                timer.lap("h2d")
            if kind == "F":
                x = None
                if not self._is_first(chunk):
                    x = self._between(micros[k])
                    self.links.receive("F", x)
                    x.requires_grad_()
                timer.lap("bubble")
                measured = probe.forward(times=in_flight(actions)) if probe and number == 0 else nullcontext()
                with autocast(), measured:
                    y = self._forward(micros[k], x, chunk)
                if self._is_last(chunk):
                    loss_sum += y.detach()
                else:
                    self.links.send("F", y.detach())
                kept[k, chunk] = x, y
                timer.lap("forward")
            elif kind == "W":
                self.deferred.work_off((k, chunk))
                timer.lap("backward")
            else:
                if self.deferred is not None:
                    self.deferred.key = k, chunk
                x, y = kept.pop((k, chunk))
                gradient = None
                if not self._is_last(chunk):
                    gradient = torch.empty_like(y)
                    self.links.receive("B", gradient)
                timer.lap("bubble")
                last = number == len(actions) - 1
                with nullcontext() if last or not hasattr(self.objective, "no_sync") else self.objective.no_sync():
                    if gradient is None:
                        (y * weight).backward()
                    else:
                        y.backward(gradient)
                if x is not None:
                    self.links.send("B", x.grad)
                timer.lap("backward")
            uses[k] -= 1
            if not uses[k]:
                del micros[k]
        self.links.finish()
        loss_sum = self.broadcast_from_last(loss_sum)
        timer.lap("bubble")
        return loss_sum
