"""What fills a device's memory: parameters, gradients, optimizer state, activations."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tokenscale.parallel.parts import local


def peak(device: torch.device) -> int:
    """Bytes: the most that was allocated on a GPU; the largest resident set of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Probe:
    """Measures one step, in bytes that this rank holds: parameters, gradients, optimizer state, and what backward needs
    of one forward pass (activations)."""

    def __init__(self, model: nn.Module, device: torch.device, *, compiled: bool):
        self._model, self._device, self._compiled = model, device, compiled
        self.bytes: dict[str, int] = {}

    @contextmanager
    def forward(self, times: int = 1) -> Iterator[None]:
        """Measure the activations of the forward pass in the block; `times` such are held at once.

        On a GPU: what the allocator holds more at its end. On a CPU, which has no such counter: the storages that
        autograd saves, each counted once, parameters left out; not under torch.compile, whose graph such hooks change.
        """
        if self._device.type == "cuda":
            before = torch.cuda.memory_allocated(self._device)
            yield
            self.bytes["activations_bytes"] = times * max(0, torch.cuda.memory_allocated(self._device) - before)
        elif self._compiled:
            yield
        else:
            own = {local(p).untyped_storage().data_ptr() for p in self._model.parameters()}
            saved: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                storage = local(tensor).untyped_storage()
                if storage.data_ptr() not in own:  # what is saved lives until backward: an address comes once
                    saved[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                yield
            self.bytes["activations_bytes"] = times * sum(saved.values())

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """After the update, while gradients are there."""
        weights = [local(p) for p in self._model.parameters()]
        gradients = [local(p.grad) for p in self._model.parameters() if p.grad is not None]
        moments = [local(v) for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        self.bytes |= {
            "parameters_bytes": sum(map(_bytes, weights)),
            "gradients_bytes": sum(map(_bytes, gradients)),
            "optimizer_bytes": sum(map(_bytes, moments)),
        }


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
