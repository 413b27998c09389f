"""Recorder of a training for its parity certificate: `tokenscale parity A B`.

This file imports only torch and safetensors, so that it can be copied into any environment. Add
three lines to a loop:

    recorder = ParityRecorder("recorded/a", model, optimizer)   # before the first step
    recorder.loss(loss)                                         # each loss that .backward() is called on
    recorder.close()                                            # after the last step

Hooks record the rest. In a folder, `recording.json` is written last; `steps.jsonl` has a line per
optimizer step; `trace.safetensors` has inputs and outputs of every module in the first forward
pass; `details.safetensors` has initial weights, and gradients and weights around the first updates.

With TOKENSCALE_PARITY_FLOOR=1 (or 2, 3 …) the same script measures the rounding floor. It records
into FOLDER/floor-1, with another number of threads, and with weights and module outputs moved by up
to one unit in the last place (random rounding: Parker 1997, "Monte Carlo arithmetic"), as other
orders of the same sums move them.
"""

import hashlib
import json
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

SCHEMA_VERSION = 2
FLOOR_VARIABLE = "TOKENSCALE_PARITY_FLOOR"
#: tensors with more values are kept as evenly spaced samples of at most this many
SAMPLES = 1 << 16
#: bytes of a trace that are kept in full, all modules together
FULL_TRACE_BYTES = 1 << 30


def sample(tensor: Tensor, count: int = SAMPLES) -> Tensor:
    """Return the flattened tensor, or every n-th value of it so that at most `count` remain."""
    flat = tensor.reshape(-1)
    return flat[:: -(-max(flat.numel(), 1) // count)]


class ParityRecorder:
    """Records one training: `model` (any nn.Module) and `optimizer` (any torch.optim.Optimizer) of
    one process.

    Weights, gradients and updates are kept for the first `detailed_steps` steps, and norms for all.
    A model that is compiled or wrapped is passed as it was before.
    """

    def __init__(
        self, folder: str | Path, model: nn.Module, optimizer: Any, detailed_steps: int = 4
    ):
        floor = os.environ.get(FLOOR_VARIABLE)
        self.folder = Path(folder) / f"floor-{int(floor)}" if floor else Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "recording.json").unlink(missing_ok=True)
        self.model = model
        self.optimizer = optimizer
        self.detailed_steps = detailed_steps
        self.step = 0
        self._parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._details: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._trace: list[dict[str, Any]] = []
        self._tensors: dict[str, Tensor] = {}
        self._traced_bytes = 0
        self._loss_calls: list[dict[str, Any]] = []
        steps = self.folder / "steps.jsonl"
        self._file = open(steps, "w", encoding="utf-8")  # noqa: SIM115  # until close()
        self._start_step()
        if floor:
            torch.set_num_threads(torch.get_num_threads() // 2 or 1)
            self._round_randomly(int(floor))
        self._initial = self._describe_parameters()
        for name, parameter in self._parameters.items():
            self._details[f"initial.{name}"] = sample(parameter.detach()).clone().cpu()
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._keep_gradient)
        self._hooks = list(self._trace_modules())
        model.register_forward_pre_hook(self._keep_inputs, with_kwargs=True)
        optimizer.register_step_pre_hook(lambda *_: self.before_update())
        optimizer.register_step_post_hook(lambda *_: self.after_update())
        self._cross_entropy = F.cross_entropy
        F.cross_entropy = self._watch_cross_entropy  # until the first loss

    # --- called by the training loop
    # -------------------------------------------------------------------------------

    def loss(self, value: Tensor | float) -> None:
        """Record the loss of one backward pass. A step's loss is the sum of its calls, as its
        gradient is.
        """
        if F.cross_entropy == self._watch_cross_entropy:
            F.cross_entropy = self._cross_entropy
        self._losses.append(float(value.detach() if isinstance(value, Tensor) else value))

    def close(self) -> None:
        """Write the recording. Without this call the recording counts as truncated."""
        F.cross_entropy = self._cross_entropy
        self._file.close()
        save_file(
            {name: value.contiguous() for name, value in self._tensors.items()},
            self.folder / "trace.safetensors",
        )
        save_file(
            {k: v.contiguous() for k, v in self._details.items()},
            self.folder / "details.safetensors",
        )
        facts: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "steps": self.step,
            "detailed_steps": min(self.step, self.detailed_steps),
            "floor": os.environ.get(FLOOR_VARIABLE),
            "parameters": self._initial,
            "trace": self._trace,
            "cross_entropy": self._loss_calls,
            "optimizer": type(self.optimizer).__name__,
            "model": type(self.model).__name__,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "device": str(next(iter(self._parameters.values())).device),
            "threads": torch.get_num_threads(),
        }
        names = ("steps.jsonl", "trace.safetensors", "details.safetensors")
        facts["files"] = {
            name: hashlib.sha256((self.folder / name).read_bytes()).hexdigest() for name in names
        }
        text = json.dumps(
            json.loads(json.dumps(facts)), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        facts["seal"] = hashlib.sha256(text.encode()).hexdigest()
        temporary = self.folder / "recording.json.partial"
        temporary.write_text(json.dumps(facts), encoding="utf-8")
        temporary.replace(self.folder / "recording.json")

    # --- around an update: hooks of torch.optim; a loop with an optimizer of its own calls them
    # ---------------------

    @torch.no_grad()
    def before_update(self) -> None:
        """Record gradients as the optimizer receives them, and keep the weights."""
        # the fused AdamW divides by this as it reads a gradient
        scale = float(getattr(self.optimizer, "grad_scale", None) or 1.0)
        gradients = {
            n: p.grad.detach() / scale for n, p in self._parameters.items() if p.grad is not None
        }
        self._row["gradient_norm_clipped"] = _norm(gradients.values())
        self._row["groups"] = [self._describe_group(group) for group in self.optimizer.param_groups]
        self._before = {
            name: parameter.detach().clone() for name, parameter in self._parameters.items()
        }
        if self.step < self.detailed_steps:
            self._keep("gradient_clipped", values=gradients)
            self._keep("before", values=self._before)

    @torch.no_grad()
    def after_update(self) -> None:
        """Record the update, and write the step's line."""
        after = {name: parameter.detach() for name, parameter in self._parameters.items()}
        updates = {
            name: _norm([after[name].double() - self._before[name].double()]) for name in after
        }
        row = self._row | {
            "step": self.step,
            "loss": sum(self._losses) if self._losses else None,
            "losses": self._losses,
            "gradient_norm": float(sum(self._squares.values())) ** 0.5,
            "update_norm": math.hypot(*updates.values()),
        }
        if self.step < self.detailed_steps:
            self._keep("after", values=after)
            row["gradient_norms"] = {
                name: float(square) ** 0.5 for name, square in self._squares.items()
            }
            row["update_norms"] = updates
            self._keep("gradient", values=self._unclipped)
            for number, gradients in enumerate(self._micro_batches):
                self._keep(f"micro-batch-{number}", values=gradients)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self.step += 1
        self._start_step()

    # --- internals
    # --------------------------------------------------------------------------------------------------

    def _start_step(self) -> None:
        self._row: dict[str, Any] = {"rows": []}
        self._losses: list[float] = []
        self._squares: dict[str, Tensor] = {}
        self._unclipped: dict[str, Tensor] = {}
        self._micro_batches: list[dict[str, Tensor]] = []
        self._before = {}

    def _keep(self, kind: str, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._details[f"{self.step}.{kind}.{name}"] = sample(value).clone().cpu()

    def _keep_gradient(self, parameter: Tensor) -> None:
        """Keep the gradient after each backward pass: the last one before the update is the one
        before clipping.
        """
        name = self._names[id(parameter)]
        assert parameter.grad is not None  # called when it is there
        gradient = parameter.grad.detach()
        self._squares[name] = gradient.double().square().sum()
        if self.step < self.detailed_steps:
            self._unclipped[name] = sample(gradient).clone()
        if self.step == 0:
            if not self._micro_batches or name in self._micro_batches[-1]:
                self._micro_batches.append({})
            self._micro_batches[-1][name] = sample(gradient).clone()

    def _keep_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Record a hash of each row of the first tensor: the tokens of one sequence."""
        if torch.is_grad_enabled():  # not in validation
            tokens = next(_tensors([args, kwargs]), None)
            if tokens is not None:
                rows = tokens.detach().reshape(len(tokens) if tokens.dim() > 1 else 1, -1)
                self._row["rows"] += [_digest(row) for row in rows]

    def _describe_group(self, group: dict[str, Any]) -> dict[str, Any]:
        numbers = {
            k: v
            for k, v in group.items()
            if k != "params" and isinstance(v, (bool, int, float, tuple))
        }
        numbers |= {k: float(v) for k, v in group.items() if isinstance(v, Tensor)}
        return numbers | {
            "parameters": [self._names[id(p)] for p in group["params"] if id(p) in self._names]
        }

    def _describe_parameters(self) -> list[dict[str, Any]]:
        every = dict(self.model.named_parameters(remove_duplicate=False))
        found = []
        for name, parameter in self._parameters.items():
            values = parameter.detach().double()
            constant = bool((values == values.flatten()[0]).all()) if values.numel() else True
            found.append(
                {
                    "name": name,
                    "shape": list(values.shape),
                    "sum": float(values.sum()),
                    "squares": float(values.square().sum()),
                    "constant": float(values.flatten()[0]) if constant else None,
                    "digest": _digest(parameter),
                    "tied": [
                        other
                        for other, same in every.items()
                        if same is parameter and other != name
                    ],
                }
            )
        return found

    def _trace_modules(self) -> Iterator[Any]:
        """Record inputs and outputs of every module of the first forward pass, in order of
        execution.
        """
        open_entries: dict[str, list[dict[str, Any]]] = {}

        def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            # a validation before the first step; reentrant checkpoints run blocks without
            # gradients, within the model
            if not torch.is_grad_enabled() and not open_entries.get(""):
                return
            numbers = {
                k: v
                for k, v in vars(module).items()
                if k[0] != "_" and isinstance(v, (bool, int, float, str))
            }
            owned = [self._names[id(p)] for p in module._parameters.values() if p is not None]
            entry: dict[str, Any] = {
                "module": name,
                "class": type(module).__name__,
                "parameters": owned,
                "attributes": numbers,
            }
            entry["number"] = len(self._trace)
            entry["inputs"] = self._keep_trace(entry["number"], kind="in", values=[args, kwargs])
            open_entries.setdefault(name, []).append(entry)
            self._trace.append(entry)

        def leave(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not open_entries.get(name):
                return
            entry = open_entries[name].pop()
            entry["outputs"] = self._keep_trace(entry["number"], kind="out", values=output)
            if module is self.model:
                for hook in self._hooks:
                    hook.remove()

        for name, module in self.model.named_modules():
            yield module.register_forward_pre_hook(
                lambda *a, name=name: enter(name, *a), with_kwargs=True
            )
            yield module.register_forward_hook(
                lambda *a, name=name: leave(name, *a), with_kwargs=True
            )

    def _keep_trace(self, number: int, kind: str, values: Any) -> list[dict[str, Any]]:
        kept: list[dict[str, Any]] = []
        for tensor in [tensor for tensor in _tensors(values) if not tensor.is_complex()][:4]:
            key = f"{number}.{kind}.{len(kept)}"
            full = self._traced_bytes + tensor.nbytes <= FULL_TRACE_BYTES
            self._traced_bytes += tensor.nbytes if full else 0
            self._tensors[key] = (
                (tensor.detach() if full else sample(tensor.detach())).clone().cpu()
            )
            kept.append({"key": key, "shape": list(tensor.shape)})
        return kept

    def _watch_cross_entropy(
        self, input: Tensor, target: Tensor, *args: Any, **options: Any
    ) -> Tensor:
        """Record arguments of F.cross_entropy in the first micro-batch."""
        names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        number = len(self._loss_calls)
        options = dict(zip(names, args, strict=False)) | options
        value = self._cross_entropy(input, target, **options)
        numbers = {k: v for k, v in options.items() if isinstance(v, (int, float, str))}
        kept = self._keep_trace(number, kind="cross_entropy", values=[input, target])
        self._loss_calls.append(
            numbers
            | {"tensors": kept, "value": float(value.detach()) if value.numel() == 1 else None}
        )
        return value

    @torch.no_grad()
    def _round_randomly(self, seed: int) -> None:
        generators: dict[torch.device, torch.Generator] = {}

        def moved(tensor: Tensor) -> Tensor:
            device = tensor.device
            generator = generators.setdefault(device, torch.Generator(device).manual_seed(seed))
            noise = torch.rand(tensor.shape, generator=generator, device=device) * 2 - 1
            return tensor * (1 + torch.finfo(tensor.dtype).eps * noise.double()).to(tensor.dtype)

        for parameter in self._parameters.values():
            parameter.copy_(moved(parameter))
        for module in self.model.modules():
            if not any(True for _ in module.children()):
                module.register_forward_hook(
                    lambda _module, _args, out: (
                        moved(out) if isinstance(out, Tensor) and out.is_floating_point() else None
                    )
                )


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dictionaries (outputs of `transformers` are
    such).
    """
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def _digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's values; integers of all widths have equal hashes."""
    values = tensor.detach().cpu().contiguous()
    values = values if values.is_floating_point() else values.long()
    return hashlib.blake2b(
        values.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=8
    ).hexdigest()


def _norm(tensors: Any) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors)) ** 0.5
