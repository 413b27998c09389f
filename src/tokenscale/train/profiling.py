"""Measurement of a step: memory by kind, traces by torch.profiler, and garbage collection at fixed
steps.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenscale.base.processes import count_peak_bytes
from tokenscale.costs.communication import bus_factor
from tokenscale.settings.run import ProfileSettings, RunSettings
from tokenscale.train.collectives import local
from tokenscale.train.compilation import STORED


class Trace:
    """Record steps `first` to `first + steps` of this rank into `<folder>/trace.json.gz`, for
    Perfetto or Chrome.
    """

    def __init__(self, settings: ProfileSettings, folder: Path, device: torch.device):
        self._first = settings.first
        self._after = settings.first + settings.steps
        self._path = folder / "trace.json.gz"
        self._activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if device.type == "cuda" else []),
        ]
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Start the trace if step `step` is the first to record."""
        if step == self._first and self._after > self._first:
            self._profile = profile(
                activities=self._activities, record_shapes=True, profile_memory=True
            )
            self._profile.start()

    def after(self, done: int) -> None:
        """Write the trace if `done` steps end the recording."""
        if self._profile is not None:
            self._profile.step()
            if done >= self._after:
                self.close()

    def close(self) -> None:
        """Write an unfinished trace."""
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None


class Garbage:
    """Collect garbage every `every` steps on all ranks together, not in between: a pause of one
    rank is one of all.
    """

    def __init__(self, every: int):
        self._every = every
        self._was = gc.isenabled()
        if every:
            gc.collect()
            gc.freeze()  # what is there now stays: no collection looks at it again
            gc.disable()

    def after(self, done: int) -> None:
        """Collect garbage if it is due after `done` steps."""
        if self._every and done % self._every == 0:
            gc.collect(1)

    def close(self) -> None:
        """Restore automatic collection."""
        if self._every:
            gc.unfreeze()
            if self._was:
                gc.enable()


def peak(device: torch.device) -> int:
    """Return the peak memory in bytes: the most allocated on a GPU; the process's largest resident
    set on a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return count_peak_bytes()


class Probe:
    """Measure one step, in bytes on this rank: parameters, gradients, optimizer state, and what
    backward needs of one forward pass (activations). `costs.memory` predicts the same.

    `held_gradients` returns the gradients that are in memory. The most counts: after any backward
    pass, or in the update.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        run: RunSettings,
        held_gradients: Callable[[], list[Tensor]],
    ):
        self._model = model
        self._device = device
        self._compiled = run.compile
        self._reshard_to = run.layout.reshard_to
        self._held_gradients = held_gradients
        self.bytes: dict[str, int] = {"gradients_bytes": 0}

    @contextmanager
    def forward(self, times: int = 1) -> Iterator[None]:
        """Measure the activations of the forward pass in the `with` block; `times` such passes are
        in memory at once.

        On a GPU: what the allocator holds more at its end. On a CPU, which has no such counter: the
        storages that autograd saves, and those of products that blocks keep when they are computed
        again, as far as they stand at its end; not under torch.compile, whose graph such hooks
        change. Parameters are left out. Those that were gathered for the pass and not given back
        count, but only once.
        """
        if self._device.type == "cuda":
            before = torch.cuda.memory_allocated(self._device) - sum(self._gathered().values())
            yield
            gathered = sum(self._gathered().values())
            held = max(0, torch.cuda.memory_allocated(self._device) - before - gathered)
            self.bytes["activations_bytes"] = times * held + gathered
        elif self._compiled:
            yield
        else:
            saved: dict[int, torch.UntypedStorage] = {}

            def pack(tensor: Tensor) -> Tensor:
                storage = local(tensor).untyped_storage()
                saved[storage._cdata] = storage
                return tensor

            own = self._weights()
            with (
                _Products() as products,
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            ):
                yield
            own |= self._weights()
            found = {place: storage.nbytes() for place, storage in saved.items()} | products.kept()
            held = sum(size for place, size in found.items() if place not in own)
            self.bytes["activations_bytes"] = times * held + sum(self._gathered().values())

    @contextmanager
    def sending(self, module: nn.Module) -> Iterator[None]:
        """Count the bytes that this rank sends in the `with` block, a step of `module`. Not on a GPU
        and not under torch.compile, where a mode that sees all operations has not been tried.
        """
        if self._device.type == "cuda" or self._compiled:
            yield
            return
        # a validation leaves weights gathered, which other steps gather themselves
        parts: list[Any] = list(module.modules())
        for part in parts:
            if hasattr(part, "reshard"):
                part.reshard()
        with Exchanges() as found:
            yield
        self.bytes["sent_bytes"] = round(found.sent)

    def add_messages(self, held: list[Tensor]) -> None:
        """Add what a pipeline still holds to send it. On a GPU the allocator has counted a pass's
        output already.
        """
        if self._device.type != "cuda" and "activations_bytes" in self.bytes:
            sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
            self.bytes["activations_bytes"] += sum(sizes.values())

    def _weights(self) -> dict[int, torch.UntypedStorage]:
        """Return address → storage of the parameters. While it exists, no other storage gets its
        address.
        """
        storages = [local(weight).untyped_storage() for weight in self._model.parameters()]
        return {storage._cdata: storage for storage in storages}

    def _gathered(self) -> dict[int, int]:
        """Return address → bytes of weights that FSDP has gathered: parameters that are no DTensors
        now, or that are sharded over `reshard_to` ranks. They may be there before a pass, since
        validation does not reshard.
        """
        # no FSDPModule: its import is slow
        if not any(hasattr(module, "unshard") for module in self._model.modules()):
            return {}
        weights: list[Any] = list(self._model.parameters())
        found = [
            w
            for w in weights
            if not hasattr(w, "to_local") or w.device_mesh.size(-1) == self._reshard_to
        ]
        storages = [local(weight).untyped_storage() for weight in found]
        return {storage._cdata: storage.nbytes() for storage in storages}

    def after_backward(self) -> None:
        """Measure the gradients in memory between micro-steps, where FSDP may keep unsharded ones."""
        gradients_bytes = sum(map(_count_bytes, self._held_gradients()))
        self.bytes["gradients_bytes"] = max(self.bytes["gradients_bytes"], gradients_bytes)

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure after the update, while gradients exist."""
        self.after_backward()
        weights = [local(p) for p in self._model.parameters()]
        moments = [
            local(v)
            for state in optimizer.state.values()
            for v in state.values()
            if isinstance(v, Tensor)
        ]
        self.bytes |= {
            "parameters_bytes": sum(map(_count_bytes, weights)),
            "optimizer_bytes": sum(map(_count_bytes, moments)),
        }


class Exchanges(TorchDispatchMode):
    """Operations of torch.distributed: how often each is called, the buffers of collectives in their
    order, and the bytes that this rank sends, collectives as rings send them.

    Broadcasts send nothing here: those of a step have one number.
    """

    #: operation → (what it is, position of the tensor of all ranks)
    BUFFERS = {
        "allreduce_": ("all_reduce", 0),
        "_allgather_base_": ("all_gather", 0),
        "allgather_": ("all_gather", 0),
        "_reduce_scatter_base_": ("reduce_scatter", 1),
    }

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        #: (collective, bytes) one after the other
        self.sizes: list[tuple[str, int]] = []
        self.sent = 0.0

    def __torch_dispatch__(
        self, function: OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if function.namespace == "c10d":
            self._add(function._opname, args)
        return function(*args, **(kwargs or {}))

    def _add(self, operation: str, args: tuple) -> None:
        self.counts[operation.strip("_")] += 1
        if operation == "send":
            self.sent += _count_all(args[0])
        elif operation in self.BUFFERS:
            collective, position = self.BUFFERS[operation]
            group = next(argument for argument in args if _is_group(argument))
            ranks = dist.ProcessGroup.unbox(group).size()
            size = _count_all(args[position])
            self.sizes.append((collective, size))
            self.sent += bus_factor(collective, ranks) * size


def _is_group(argument: object) -> bool:
    return isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())


def _count_all(tensors: Any) -> int:
    """Count the bytes of a tensor, or of those in lists."""
    return sum(_count_bytes(tensor) for tensor in tree_leaves(tensors))


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Products(TorchDispatchMode):
    """Record the outputs of the operations that selective checkpointing stores."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(
        self, function: OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        found = function(*args, **(kwargs or {}))
        if str(function) in STORED:
            for tensor in tree_leaves(found):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    self._made.append((StorageWeakRef(storage), storage.nbytes()))
        return found

    def kept(self) -> dict[int, int]:
        """Return address → bytes of the outputs that still exist."""
        return {made.cdata: size for made, size in self._made if not made.expired()}
