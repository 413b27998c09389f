"""One rank's trainer: build a model, run optimizer steps, and read and write its part of a
checkpoint.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenscale.base.errors import UserError
from tokenscale.data.batches.batch import Batch
from tokenscale.data.order.permutation import micro_steps, mix64
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.registry import OBJECTIVES
from tokenscale.settings.run import RunSettings
from tokenscale.train.checkpoint import Checkpoint, Piece
from tokenscale.train.models.build import build, initialise, objective_of
from tokenscale.train.models.decoder import initialise_part
from tokenscale.train.models.objective import MicroBatch, micro_batch
from tokenscale.train.optimizer import (
    LossScale,
    adamw,
    autocast_of,
    cast_weights,
    float8,
    total_norm,
    update,
)
from tokenscale.train.parallel.parallelize import parallelize
from tokenscale.train.parallel.sharding import Mesh, ParallelModel
from tokenscale.train.parallel.world import World
from tokenscale.train.phase_timer import HostTimer
from tokenscale.train.profiling import Probe


@dataclass(frozen=True)
class StepResult:
    """Results of an optimizer step, as scalars on the device. `bad` is 1 where the gradient was not
    finite: then no weight and no moment has changed.
    """

    loss_sum: Tensor
    norm: Tensor
    norm_clipped: Tensor
    bad: Tensor
    loss_scale: Tensor


class Trainer:
    """One rank's part of the model, its optimizer and its number formats.

    `model` is the plain model, whose parameters have the names of checkpoints; `parallel` is what
    the layout made of it. All ranks build it together, without storage; each then sets the initial
    values of its own parts. Every rank builds the whole model where code of `transformers` sets its
    weights, and where the objective needs it whole: that may keep a copy of the initial weights, as
    DPO's reference does.

    `unset`: leave the weights without values, for `load`.
    """

    def __init__(
        self,
        run: RunSettings,
        shape: ModelSettings,
        world: World,
        kernel: str,
        *,
        unset: bool = False,
    ):
        self.run = run
        self.world = world
        self.mesh = Mesh(run.layout, world)
        self.kernel = kernel
        keeps_initial = OBJECTIVES[run.objective].whole_model
        whole = shape.transformers is not None or keeps_initial
        with nullcontext() if whole else torch.device("meta"):
            self.model = build(shape, run.sequence_length, objective=run.objective, kernel=kernel)
        if keeps_initial or whole and not unset:
            initialise(self.model, run.effective_seed)
        cast_weights(self.model, precision=run.precision)
        if run.float8:
            float8(self.model, device=world.device)
        self._shapes = {name: tuple(weight.shape) for name, weight in self.model.named_parameters()}
        # of the whole model
        self.parameters = sum(weight.numel() for weight in self.model.parameters())
        objective = objective_of(
            run.objective, model=self.model, loss_chunk=run.loss_chunk, compiled=run.compile
        )
        self.parallel = parallelize(
            objective,
            mesh=self.mesh,
            activation_checkpointing=run.activation_checkpointing,
            compiled=run.compile,
        )
        assert self.parallel.shards is not None  # `parallelize` gives every model some
        self.shards = self.parallel.shards
        if not whole and not unset:
            self._initialise(shape, run.effective_seed)
        self.optimizer = adamw(self.shards.tensors, settings=run.optimizer)
        self.autocast = (
            autocast_of(run.precision, device=world.device) if run.autocasts else nullcontext
        )
        self.loss_scale = LossScale(run.precision, world.device)
        self.micro_steps = micro_steps(
            run.global_batch, run.layout.data_parallel_size, run.micro_batch
        )

    def _initialise(self, shape: ModelSettings, seed: int) -> None:
        for name, shard in self.shards.by_name.items():
            initialise_part(
                shape,
                seed,
                name=name,
                into=shard.tensor,
                offsets=shard.offsets,
                whole=shard.global_shape,
            )
        self.shards.all_gather_parameters()

    def seed(self, step: int) -> None:
        """Seed what a step draws, which is dropout: other numbers in each step and on each rank,
        and the same ones in a run that was resumed.
        """
        key = np.array([self.run.effective_seed % (1 << 64)], dtype=np.uint64)
        for number in (self.world.rank, step):
            key = mix64(key ^ np.uint64(number))
        torch.manual_seed(int(key[0]))

    def step(
        self,
        batch: Batch,
        useful: Tensor,
        rate: float,
        timer: HostTimer,
        probe: Probe | None = None,
    ) -> StepResult:
        """Train on this rank's share of a global batch with `useful` useful tokens over all ranks.
        A collective.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        scale = self.loss_scale.scale

        # forward and backward; DDP averages gradients over the readers, so the weight is that of a
        # mean over them
        loss_sum = forward_backward(
            self.parallel,
            batch,
            weight=self.run.layout.data_parallel_size * scale / useful.clamp(min=1),
            micro_batch_size=self.run.micro_batch,
            micro_steps=self.micro_steps,
            device=self.world.device,
            autocast=self.autocast,
            timer=timer,
            probe=probe,
        )

        # gradients: reduce what backward has not reduced, and take the global norm
        self.shards.reduce_gradients()
        if self.shards.reduces_after_backward:
            timer.lap("exposed_communication")
        gradients = [tensor.grad for tensor in self.shards.counted if tensor.grad is not None]
        norm = total_norm(gradients, group=self.shards.group, device=self.world.device) / scale

        # clip and update; ranks that update a part of the parameters gather the rest
        norm, clipped, bad = update(
            self.optimizer,
            norm,
            limit=self.run.optimizer.clip_norm,
            loss_scale=scale,
        )
        self.shards.all_gather_parameters()
        self.loss_scale.update(bad)
        if probe is not None:
            probe.after(self.optimizer)
        # views of buckets are set to zero: new gradients would stand beside the buckets until the
        # last micro-step
        self.model.zero_grad(set_to_none=not self.run.layout.keeps_gradients)
        for tensor in self.shards.tensors:
            if not tensor.requires_grad:  # rows of a parameter, whose gradient is part of another
                tensor.grad = None
        timer.lap("optimizer")
        return StepResult(
            loss_sum=loss_sum,
            norm=norm,
            norm_clipped=clipped,
            bad=bad,
            loss_scale=scale,
        )

    def pieces(self, *, resume: bool) -> dict[str, Piece]:
        """Return the tensors that this rank writes: its share of parameters, for `resume` also of
        optimizer states.
        """
        found: dict[str, Piece] = {}
        for number, (name, shard) in enumerate(self.shards.by_name.items()):
            mine = shard.first and number % self.shards.replicas == self.shards.replica
            if not mine or not shard.tensor.numel():
                continue
            found["model." + name] = Piece(
                tensor=shard.tensor.detach(), offsets=shard.offsets, whole=shard.global_shape
            )
            for moment, value in (
                self.optimizer.state.get(shard.tensor, {}).items() if resume else ()
            ):
                key = f"optimizer.{moment}.{name}"
                if value.dim():
                    found[key] = Piece(
                        tensor=value.detach(), offsets=shard.offsets, whole=shard.global_shape
                    )
                # the count of steps: whoever has the beginning writes it
                elif not any(shard.offsets):
                    found[key] = Piece.of(value.detach())
        return found

    def load(self, checkpoint: Checkpoint, *, resume: bool = True) -> None:
        """Load a checkpoint of any layout, with `resume` the optimizer's state. A collective.
        Raises UserError for another shape.
        """
        mine = self._shapes
        theirs = {
            name: tuple(checkpoint.shapes["model." + name]) for name in checkpoint.names("model.")
        }
        if mine != theirs:
            wrong = sorted(
                name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)
            )
            raise UserError(
                "the checkpoint is of another model.",
                checkpoint=checkpoint.folder,
                tensor=wrong[0],
                found=theirs.get(wrong[0], "not there"),
                expected=mine.get(wrong[0], "not there"),
                next="name a checkpoint of the same model, or start without one",
            )
        shards = self.shards.by_name
        wanted = [("model." + name, shard.offsets, shard.tensor) for name, shard in shards.items()]
        for key in checkpoint.names("optimizer.") if resume else ():
            moment, name = key.split(".", 1)
            if name not in shards:  # another rank's
                continue
            shard = shards[name]
            key = "optimizer." + key
            scalar = not checkpoint.shapes[key]  # the number of steps
            shape = () if scalar else shard.tensor.shape
            value = torch.empty(shape, dtype=checkpoint.dtypes[key], device=shard.tensor.device)
            self.optimizer.state[shard.tensor][moment] = value
            wanted.append((key, () if scalar else shard.offsets, value))
        checkpoint.read(wanted)
        self.shards.all_gather_parameters()

    def facts(self) -> dict[str, Any]:
        """Return what the run's record states about the computation."""
        kind = "fused" if self.run.optimizer.fused else "foreach"
        return {
            "kernel": self.kernel,
            "parameters": self.parameters,
            "micro_steps": self.micro_steps,
            "optimizer": f"AdamW, {kind}",
        }


def forward_backward(
    parallel: ParallelModel,
    batch: Batch,
    *,
    weight: Tensor,
    micro_batch_size: int,
    micro_steps: int,
    device: torch.device,
    timer: HostTimer,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    probe: Probe | None = None,
) -> Tensor:
    """Add the gradient of `weight` times the sum of losses over this rank's rows to the model's
    gradients.

    `weight` is a scalar on the device: readers times the loss scale over useful tokens of the
    global batch, since DDP averages over ranks. A rank has `batch.tokens_bt` [rows, T], at most
    `micro_batch_size * micro_steps` rows; every rank runs `micro_steps` passes, and a pass without
    rows contributes zero. DDP reduces gradients in the last pass, FSDP in each. Returns this rank's sum of
    losses, a scalar on its device. A pipeline orders the passes itself.
    """

    def inputs(k: int) -> MicroBatch:
        return micro_batch(
            batch, rows=slice(k * micro_batch_size, (k + 1) * micro_batch_size), device=device
        )

    if parallel.pipeline is not None:
        return parallel.pipeline.step(
            inputs,
            weight=weight,
            micro_steps=micro_steps,
            timer=timer,
            autocast=autocast,
            accumulate=parallel.accumulate,
            probe=probe,
        )
    loss_sum = torch.zeros((), device=device)
    for k in range(micro_steps):
        tokens_bt, labels_bt, bounds = inputs(k)
        timer.lap("h2d")
        last = k == micro_steps - 1
        listener = parallel.bucket_listener if last else None
        if listener is not None:
            listener.on_ready = lambda: timer.lap("backward")
        with nullcontext() if last else parallel.accumulate():
            with autocast(), probe.forward() if probe and k == 0 else nullcontext():
                loss = parallel.module(tokens_bt, labels_bt, bounds)
            timer.lap("forward")
            (loss * weight).backward()
        # the last bucket was ready when backward had nothing left to compute: what follows is
        # waiting for all-reduces
        timer.lap("backward" if listener is None else "exposed_communication")
        loss_sum += loss.detach()
        if probe is not None:
            probe.after_backward()
    return loss_sum
