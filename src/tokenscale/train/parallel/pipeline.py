"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass through the
ranks in turn.

`costs.pipeline_schedules` decides the order of one rank's work; this module runs it. A stage is the
plain model without the layers of other ranks. Parameters keep their names, so that tensor and
sharded layouts apply to it as to a model.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from tokenscale.costs.pipeline_schedules import assign_stages, build_schedule, max_in_flight
from tokenscale.train.models.decoder import Decoder
from tokenscale.train.models.objective import KVCache, MicroBatch, Objective
from tokenscale.train.parallel.sharding import GradReduction, Mesh, ParallelModel
from tokenscale.train.phase_timer import HostTimer
from tokenscale.train.profiling import Probe


class DeferredWeightGrads:
    """Inputs and output gradients of linear layers, stored until their weights' gradients are
    computed.
    """

    def __init__(self) -> None:
        self.key: object = None
        self._pending: dict[
            object, list[tuple[nn.Parameter, nn.Parameter | None, Tensor, Tensor]]
        ] = {}

    def replace_linear_layers(self, module: nn.Module) -> None:
        """Replace the linear layers below a module by layers that leave their weight gradients to
        this object.
        """
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, DeferredLinear(child, deferred=self))

    def store(
        self, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, gradient: Tensor
    ) -> None:
        """Store x [..., inputs] and the output gradient [..., outputs] of a layer, under the
        current `key`.
        """
        self._pending.setdefault(self.key, []).append((weight, bias, x, gradient))

    @torch.no_grad()
    def accumulate(self, key: object) -> None:
        """Compute the weight gradients stored under a key and add them to the weights' `grad`."""
        for weight, bias, x, gradient in self._pending.pop(key, []):
            rows = gradient.flatten(0, -2)
            _add(weight, values=rows.T @ x.flatten(0, -2).to(rows.dtype))
            if bias is not None:
                _add(bias, values=rows.sum(dim=0))


class DeferredLinear(nn.Linear):
    """A linear layer, with another one's parameters, whose backward pass computes the gradient of
    its input only.
    """

    def __init__(self, linear: nn.Linear, deferred: DeferredWeightGrads):
        super().__init__(
            linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta"
        )
        self.weight = linear.weight
        self.bias = linear.bias
        self._deferred = deferred

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _DeferredProduct.apply(x, weight, bias, self._deferred)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs]."""
        return self.product(x, self.weight, self.bias)


def _add(weight: nn.Parameter, values: Tensor) -> None:
    values = values.to(weight.dtype)
    weight.grad = values if weight.grad is None else weight.grad.add_(values)


class _DeferredContext(FunctionCtx):
    """What forward keeps for backward."""

    deferred: DeferredWeightGrads
    weight: nn.Parameter
    bias: nn.Parameter | None
    saved_tensors: tuple[Tensor]


class _DeferredProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _DeferredContext,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        deferred: DeferredWeightGrads,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.bias = bias
        ctx.deferred = deferred
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: _DeferredContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        # without the graph that made it, whose leaves are activations
        ctx.deferred.store(ctx.weight, ctx.bias, x.detach(), gradient)
        return (gradient @ ctx.weight.to(gradient.dtype)).to(x.dtype), None, None, None


def apply_pipeline(parallel: ParallelModel, mesh: Mesh) -> ParallelModel:
    """Keep this rank's layers, in place, and make a `Pipeline` that runs them.

    A tied embedding (which is also the output head) is on the first rank and on the last, and its
    gradient is summed over both.
    """
    model = cast(Decoder, parallel.objective.model)
    sharding = parallel.sharding
    layout = mesh.layout
    rank = mesh.index("pipeline")
    ranks = layout.pipeline
    stages = assign_stages(
        model.settings, sequence_length=model.sequence_length, stages=layout.stages
    )
    mine = stages[rank::ranks]
    first = rank == 0
    last = rank == ranks - 1
    own_layers = {layer for layers in mine for layer in layers}
    for layer in range(len(model.blocks)):
        if layer not in own_layers:
            model.blocks.register_module(str(layer), None)
    tied = model.settings.tied_embeddings
    if not (first or (last and tied)):
        model.register_module("embedding", None)
    if not first and model.settings.positions == "learned":
        model.register_module("positions", None)
    if not last:
        model.register_module("norm", None)
        model.register_module("head", None)
    if tied:
        ends = mesh.group_by(
            lambda place: (
                (place.data_rank, place.tensor) if place.pipeline in (0, ranks - 1) else None
            )
        )
        if ends is not None:
            sharding.reductions.append(GradReduction(("embedding.weight",), group=ends))
        if last:
            sharding.replicated.add("embedding.weight")
    parallel.module = PipelineStage(parallel.objective)
    parallel.pipeline = Pipeline(stage=parallel.module, mesh=mesh, layers=mine)
    return parallel


class PipelineStage(nn.Module):
    """The layers of one rank: (activations of the layer before) → (activations for the layer
    behind, or the loss).
    """

    def __init__(self, objective: Objective):
        super().__init__()
        self.objective = objective

    def forward(
        self, inputs: MicroBatch, x_btd: Tensor | None, layers: range, *, first: bool, last: bool
    ) -> Tensor:
        """Run a group of layers. `x_btd` [B, T, d] comes from the stage before; None for the first
        stage.
        """
        model = cast(Decoder, self.objective.model)
        bounds = inputs.bounds
        if bounds is not None:
            bounds.prepare(model.kernel, model.causal)
        x = model.embed(inputs.tokens_bt, bounds) if first else x_btd
        assert x is not None
        x = model.run_blocks(
            x,
            length=inputs.tokens_bt.shape[1],
            bounds=bounds,
            layers=layers,
        )
        return self.objective.loss(model.norm(x), inputs.labels_bt) if last else x

    def next_logits(
        self,
        tokens_bt: Tensor,
        x_btd: Tensor | None,
        cache: KVCache | None,
        layers: range,
        *,
        first: bool,
        last: bool,
    ) -> Tensor:
        """Run a group of layers, and return what they give the layer behind, or the logits [B, V]
        of the next token.
        """
        model = cast(Decoder, self.objective.model)
        if first:
            x_btd = model.embed(tokens_bt, start=cache.length if cache else 0)
        assert x_btd is not None
        x = model.run_blocks(
            x_btd,
            length=tokens_bt.shape[1],
            cache=cache,
            layers=layers,
        )
        return self.objective.whole_logits(model.head(model.norm(x)[:, -1])) if last else x


class StageP2P:
    """Point-to-point messages between neighbouring stages.

    Each direction has a process group of its own, and so has the link from the last rank back to
    the first: within a group ranks send one way only, in one order, so that no two ranks can wait
    for each other.
    """

    def __init__(self, mesh: Mesh, chunks: int):
        self.rank = mesh.index("pipeline")
        self.ranks = mesh.size("pipeline")

        def group() -> dist.ProcessGroup:
            found = mesh.group_by(lambda place: (place.data_rank, place.tensor))
            assert found is not None  # every rank has a key
            return found

        wraps = (False, True) if chunks > 1 else (False,)
        self._groups = {(kind, wrap): group() for kind in "FB" for wrap in wraps}
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def send(self, kind: str, tensor: Tensor) -> None:
        """Send to the next stage (F) or to the one before (B), without waiting."""
        target = self.rank + (1 if kind == "F" else -1)
        group = self._groups[kind, not 0 <= target < self.ranks]
        tensor = tensor.contiguous()
        self._sending = [(work, sent) for work, sent in self._sending if not work.is_completed()]
        work = dist.isend(tensor, group=group, group_dst=target % self.ranks)
        assert work is not None  # this rank is in the group
        self._sending.append((work, tensor))

    def receive(self, kind: str, into: Tensor) -> None:
        """Receive from the stage before (F) or from the next one (B), and wait for it."""
        source = self.rank - (1 if kind == "F" else -1)
        group = self._groups[kind, not 0 <= source < self.ranks]
        work = dist.irecv(into, group=group, group_src=source % self.ranks)
        assert work is not None  # this rank is in the group
        work.wait()

    def held(self) -> list[Tensor]:
        """Return the tensors of messages that are not known to be sent: gloo knows only after
        waiting.
        """
        return [sent for _, sent in self._sending]

    def finish(self) -> None:
        """Wait until all messages are sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()


class Pipeline:
    """Run a pipeline schedule on one rank."""

    def __init__(self, stage: PipelineStage, mesh: Mesh, layers: list[range]):
        self.stage = stage
        self.mesh = mesh
        self.layers = layers
        self.rank = mesh.index("pipeline")
        self.ranks = mesh.size("pipeline")
        self.messages = StageP2P(mesh, chunks=len(layers))
        self.group = mesh.group("pipeline")
        self.deferred: DeferredWeightGrads | None = None
        if mesh.layout.schedule == "zero-bubble":
            self.deferred = DeferredWeightGrads()
            self.deferred.replace_linear_layers(stage.objective.model.blocks)

    def _is_first(self, chunk: int) -> bool:
        return self.rank == 0 and chunk == 0

    def _is_last(self, chunk: int) -> bool:
        return self.rank == self.ranks - 1 and chunk == len(self.layers) - 1

    def _forward(self, inputs: MicroBatch, x: Tensor | None, chunk: int) -> Tensor:
        ends = {"first": self._is_first(chunk), "last": self._is_last(chunk)}
        return self.stage(inputs, x, self.layers[chunk], **ends)

    def _receive_buffer(self, inputs: MicroBatch) -> Tensor:
        """Return an empty tensor for the activations of the stage before: this rank's positions of
        the residual stream, in the format of the weights (under autocast sums stay in it).
        """
        rows, length = inputs.tokens_bt.shape
        return self._empty(
            rows, length // self.mesh.size("tensor"), self.stage.objective.model.settings.dimension
        )

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(
            shape, dtype=next(self.stage.parameters()).dtype, device=self.mesh.world.device
        )

    def broadcast_from_last(self, value: Tensor) -> Tensor:
        """Return the last rank's value on all of them. A collective."""
        dist.broadcast(value, group=self.group, group_src=self.ranks - 1)
        return value

    @torch.no_grad()
    def __call__(self, inputs: MicroBatch) -> Tensor:
        """Return the sum of losses without gradients, the same on every rank of the pipeline. A
        collective.
        """
        loss = torch.zeros((), device=self.mesh.world.device)
        for chunk in range(len(self.layers)):
            x = None
            if not self._is_first(chunk):
                x = self._receive_buffer(inputs)
                self.messages.receive("F", into=x)
            y = self._forward(inputs, x, chunk)
            if self._is_last(chunk):
                loss = y.float()
            else:
                self.messages.send("F", y)
        self.messages.finish()
        return self.broadcast_from_last(loss)

    def next_logits(self, tokens_bt: Tensor, cache: KVCache | None) -> Tensor:
        """Return the logits [B, V] of the token behind each row, on every rank of the pipeline. A
        collective.

        Each rank keeps the keys and values of its own layers; activations pass from stage to stage
        as in training.
        """
        settings = self.stage.objective.model.settings
        logits = self._empty(len(tokens_bt), settings.resolved_vocabulary_size)
        for chunk, layers in enumerate(self.layers):
            x = None
            if not self._is_first(chunk):
                x = self._empty(*tokens_bt.shape, settings.dimension)
                self.messages.receive("F", into=x)
            last = self._is_last(chunk)
            y = self.stage.next_logits(
                tokens_bt, x, cache, layers, first=self._is_first(chunk), last=last
            )
            if last:
                logits = y
            else:
                self.messages.send("F", y)
        self.messages.finish()
        if cache is not None:
            cache.length += tokens_bt.shape[1]
        return self.broadcast_from_last(logits)

    def step(
        self,
        inputs: Callable[[int], MicroBatch],
        *,
        weight: Tensor,
        micro_steps: int,
        timer: HostTimer,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        accumulate: Callable[[], AbstractContextManager] = nullcontext,
        probe: Probe | None = None,
    ) -> Tensor:
        """Run the forward (F), backward (B) and deferred weight-gradient (W) passes of one
        optimizer step.

        `inputs` returns a micro-batch by its number. Weight gradients are reduced, where the layout
        does that, in the last backward pass. Returns the sum of losses over all ranks of the
        pipeline, on each of them.
        """
        layout = self.mesh.layout
        actions = build_schedule(
            layout.schedule,
            rank=self.rank,
            ranks=self.ranks,
            micro_batches=micro_steps,
            chunks=layout.stages_per_rank,
        )
        loss_sum = torch.zeros((), device=self.mesh.world.device)
        micro_batches: dict[int, MicroBatch] = {}
        activations: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        uses = Counter(action.micro for action in actions)
        for number, (kind, k, chunk) in enumerate(actions):
            if k not in micro_batches:
                micro_batches[k] = inputs(k)
                timer.lap("h2d")
            if kind == "F":
                x = None
                if not self._is_first(chunk):
                    x = self._receive_buffer(micro_batches[k])
                    self.messages.receive("F", into=x)
                    x.requires_grad_()
                timer.lap("bubble")
                measured = (
                    probe.forward(times=max_in_flight(actions))
                    if probe and number == 0
                    else nullcontext()
                )
                with autocast(), measured:
                    y = self._forward(micro_batches[k], x, chunk)
                if self._is_last(chunk):
                    loss_sum += y.detach()
                else:
                    self.messages.send("F", y.detach())
                activations[k, chunk] = x, y
                timer.lap("forward")
            elif kind == "W":
                assert self.deferred is not None  # only zero-bubble has such passes
                self.deferred.accumulate((k, chunk))
                timer.lap("backward")
            else:
                if self.deferred is not None:
                    self.deferred.key = k, chunk
                x, y = activations.pop((k, chunk))
                gradient = None
                if not self._is_last(chunk):
                    gradient = torch.empty_like(y)
                    self.messages.receive("B", into=gradient)
                timer.lap("bubble")
                last = number == len(actions) - 1
                with nullcontext() if last else accumulate():
                    if gradient is None:
                        (y * weight).backward()
                    else:
                        y.backward(gradient)
                if probe is not None:
                    probe.after_backward()
                if x is not None:
                    assert x.grad is not None  # of the backward pass above
                    self.messages.send("B", x.grad)
                del x, y, gradient  # before the next pass
                timer.lap("backward")
            uses[k] -= 1
            if not uses[k]:
                del micro_batches[k]
        if probe is not None:
            probe.add_messages(self.messages.held())
        self.messages.finish()
        loss_sum = self.broadcast_from_last(loss_sum)
        timer.lap("bubble")
        return loss_sum
