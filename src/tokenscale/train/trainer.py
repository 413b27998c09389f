"""A model that trains: built from its settings, spread by its layout, stepped, and taken apart for a checkpoint."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokenscale.base.errors import UserError
from tokenscale.data.batches.batch import Batch
from tokenscale.data.order.shares import micro_steps
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.registry import PARALLEL
from tokenscale.settings.run import RunSettings
from tokenscale.train import activation_checkpointing as recomputation
from tokenscale.train.checkpoint import Checkpoint, Piece, from_json_bytes, to_json_bytes
from tokenscale.train.memory_probe import Probe
from tokenscale.train.models.build import build, initialise
from tokenscale.train.models.objective import objective_of
from tokenscale.train.optimizer import adamw, total_norm, update
from tokenscale.train.parallel.mesh import Mesh
from tokenscale.train.parallel.sharding import Part, held_of, parts_of
from tokenscale.train.parallel.world import World
from tokenscale.train.phase_timer import Timer
from tokenscale.train.precision import LossScale, autocast_of, cast_weights, float8
from tokenscale.train.step import backward


@dataclass(frozen=True)
class Stepped:
    """Scalars on the device: what a step came to. `bad` is 1 where the gradient was not finite: nothing changed."""

    loss_sum: Tensor
    norm: Tensor
    norm_clipped: Tensor
    bad: Tensor
    loss_scale: Tensor


class Engine:
    """One rank's part of the model, its optimizer and its number formats.

    `model` is the plain model, whose parameters have the names of checkpoints; `objective` is what the layout made of
    it, and gives a loss. All ranks build it together, and with the same weights.
    """

    def __init__(
        self,
        run: RunSettings,
        shape: ModelSettings,
        world: World,
        kernel: str,
        initial: Callable[[nn.Module, int], None] = initialise,
    ):
        self.run, self.world, self.mesh = run, world, Mesh(run.layout, world)
        self.model = build(shape, run.sequence_length, objective=run.objective, kernel=kernel)
        initial(self.model, run.effective_seed)
        # only dropout draws from here: each rank its own, whatever it holds
        torch.manual_seed(run.effective_seed * 1_000_003 + world.rank)
        cast_weights(self.model, run.precision)
        if run.float8:
            float8(self.model, world.device)
        recomputation.apply(self.model.blocks, run.activation_checkpointing)
        if run.compile:
            for block in self.model.blocks:
                block.compile()
        self._shapes = {name: tuple(weight.shape) for name, weight in self.model.named_parameters()}
        self.objective: nn.Module = objective_of(
            run.objective, self.model, loss_chunk=run.loss_chunk, compiled=run.compile
        )
        self.parameters = sum(weight.numel() for weight in self.model.parameters())  # of the whole model
        held = held_of(self.objective)
        for method in run.layout.methods:
            self.objective = importlib.import_module(PARALLEL[method]).apply(self.objective, self.mesh)
        self.parts = parts_of(self.objective, self.model, self.mesh, held)
        self.optimizer = adamw(self.parts.tensors, run.optimizer)
        self.autocast = autocast_of(run.precision, world.device)
        self.loss_scale = LossScale(run.precision, world.device)
        self.micro_steps = micro_steps(run.global_batch, run.layout.readers, run.micro_batch)

    def step(self, batch: Batch, useful: Tensor, rate: float, timer: Timer, probe: Probe | None = None) -> Stepped:
        """Train on this rank's share of a global batch with `useful` useful tokens over all ranks. A collective."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        scale = self.loss_scale.scale
        loss_sum = backward(
            self.objective,
            batch,
            weight=self.run.layout.readers * scale / useful.clamp(min=1),
            micro_batch=self.run.micro_batch,
            micro_steps=self.micro_steps,
            device=self.world.device,
            autocast=self.autocast,
            timer=timer,
            probe=probe,
        )
        self.parts.take_gradients()
        if self.parts.sums:
            timer.lap("exposed_communication")
        gradients = [tensor.grad for tensor in self.parts.counted if tensor.grad is not None]
        norm = total_norm(gradients, self.parts.group, self.world.device) / scale
        norm, clipped, bad = update(self.optimizer, norm, self.run.optimizer.clip_norm, scale)
        self.parts.spread()
        self.loss_scale.update(bad)
        if probe is not None:
            probe.after(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)  # where parts are other tensors than the parameters
        timer.lap("optimizer")
        return Stepped(loss_sum, norm, clipped, bad, scale)

    def pieces(self, *, resume: bool) -> dict[str, Piece]:
        """The tensors of a checkpoint that this rank writes: parameters, and the optimizer's state for `resume`.

        Where ranks hold the same parts, each writes its share of them.
        """
        found: dict[str, Piece] = {}
        for number, (name, part) in enumerate(self.parts.of.items()):
            mine = part.first and number % self.parts.replicas == self.parts.replica
            if not mine or not part.tensor.numel():
                continue
            found["model." + name] = Piece(part.tensor.detach(), part.offsets, part.whole)
            for moment, value in self.optimizer.state.get(part.tensor, {}).items() if resume else ():
                key = f"optimizer.{moment}.{name}"
                if value.dim():
                    found[key] = Piece(value.detach(), part.offsets, part.whole)
                elif not any(part.offsets):  # the count of steps: whoever has the beginning writes it
                    found[key] = Piece.of(value.detach())
        return found

    def load(self, checkpoint: Checkpoint, *, resume: bool = True) -> None:
        """Weights of a checkpoint of any layout, and with `resume` the optimizer's state. A collective.

        Raises UserError for a model of another shape.
        """
        mine = self._shapes
        theirs = {name: tuple(checkpoint.shapes["model." + name]) for name in checkpoint.names("model.")}
        if mine != theirs:
            wrong = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            raise UserError(
                "the checkpoint is of another model.",
                checkpoint=checkpoint.folder,
                tensor=wrong[0],
                found=theirs.get(wrong[0], "not there"),
                expected=mine.get(wrong[0], "not there"),
                next="name a checkpoint of the same model, or start without one",
            )
        moments: dict[str, list[str]] = {}
        for key in checkpoint.names("optimizer."):
            moment, name = key.split(".", 1)
            moments.setdefault(name, []).append(moment)
        with torch.no_grad():
            for name, part in self.parts.of.items():
                part.tensor.copy_(_values(checkpoint, "model." + name, part))
                if resume and name in moments:
                    self.optimizer.state[part.tensor] = {
                        moment: _values(checkpoint, f"optimizer.{moment}.{name}", part).to(part.tensor.device)
                        for moment in moments[name]
                    }
        self.parts.spread()

    def random_state(self) -> dict[str, str]:
        """State of this rank's random generators, as text."""
        states = {"cpu": to_json_bytes(torch.get_rng_state())}
        if self.world.device.type == "cuda":
            states["cuda"] = to_json_bytes(torch.cuda.get_rng_state(self.world.device))
        return states

    def load_random_state(self, states: dict[str, str]) -> None:
        """What `random_state` returned."""
        torch.set_rng_state(from_json_bytes(states["cpu"]))
        if self.world.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(from_json_bytes(states["cuda"]), self.world.device)

    def facts(self) -> dict[str, Any]:
        """What a record says of how it computes."""
        kind = "fused" if self.run.optimizer.fused else "foreach"
        return {
            "parameters": self.parameters,
            "micro_steps": self.micro_steps,
            "optimizer": f"AdamW, {kind}",
            "compiled": self.run.compile,
        }


def _values(checkpoint: Checkpoint, key: str, part: Part) -> Tensor:
    """What a checkpoint has for a part of a tensor; a scalar (the count of steps) is everyone's."""
    if not checkpoint.shapes[key]:
        return checkpoint.tensor(key)
    if not part.tensor.numel():  # fewer rows than ranks
        return torch.empty_like(part.tensor)
    return checkpoint.part(key, part.offsets, tuple(part.tensor.shape))
