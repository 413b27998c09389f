"""One training step of one rank without devices: torch's fake process group, tensors without
numbers, and a count of all bytes that exist.

The count knows nothing of parameters, gradients or `costs.memory`: it adds up the storages that
operations have returned.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenscale.data.batches.batch import Batch
from tokenscale.data.order.permutation import micro_steps, rank_slots
from tokenscale.settings.options import LARGEST
from tokenscale.settings.run import RunSettings
from tokenscale.train import optimizer
from tokenscale.train.collectives import local
from tokenscale.train.parallel.world import World
from tokenscale.train.phase_timer import HostTimer
from tokenscale.train.profiling import Exchanges
from tokenscale.train.trainer import Trainer

#: micro-steps that a step without a pipeline needs: a first, one between, and a last one
ENOUGH_MICRO_STEPS = 3

#: share of the peak that a count may miss: counting after each operation takes minutes
PRECISION = 1e-3


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[World]:
    """One rank on the CPU, whose collectives return at once and send nothing."""
    if size == 1:
        yield World(0, 1, 0, torch.device("cpu"))
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield World(rank, size, 0, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations have returned and that still exist. `peak` is the most
    at one time, to `PRECISION`.

    Operations inside a kernel are not seen, so that workspaces of libraries do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        #: address → storage, and its bytes when they were last counted
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        #: at least the bytes that exist: those of the last count, and all that was made since
        self._bound = 0

    def __torch_dispatch__(
        self, function: OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        found = function(*args, **kwargs)
        # FSDP gives a storage its size back without an operation, and then writes to it
        for value in tree_leaves((found, kwargs.get("out"))):
            if isinstance(value, Tensor):
                self.add(value)
        if self._bound > self.peak * (1 + PRECISION):
            self.peak = max(self.peak, self.count())
        return found

    def add(self, tensor: Tensor) -> None:
        """Count a tensor from here on, which may have been made before."""
        if tensor.device.type == "meta":
            return
        storage = local(tensor).untyped_storage()
        size = storage.nbytes()
        known = self._storages.get(storage._cdata)
        if known is None:
            self._storages[storage._cdata] = StorageWeakRef(storage), size
            self._bound += size
        elif size > known[1]:
            self._storages[storage._cdata] = known[0], size
            self._bound += size - known[1]

    def count(self) -> int:
        """Return the bytes of the storages that exist. FSDP empties those of weights that it has
        resharded.
        """
        existing = {}
        for address, (reference, _) in self._storages.items():
            if not reference.expired():
                size = torch.UntypedStorage._new_with_weak_ptr(address).nbytes()
                existing[address] = reference, size
        self._storages = existing
        self._bound = sum(size for _, size in existing.values())
        return self._bound


class _Shapes(FakeTensorMode):
    """Tensors that have a shape and no numbers, if they have storage and hold no integers.

    Integers are ids and the ranks of a mesh, which are read. Tensors of the meta device stay plain:
    modules cannot be moved whose parameters are fake.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
        if any(hasattr(value, "to_local") for value in tensors):
            return NotImplemented  # DTensor calls the operation with its local tensors
        device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        is_cpu = device.type == "cpu"
        if function is torch.ops.aten.empty_like.default and tensors[0].is_meta and is_cpu:
            # made anew: a tensor with weak references, as to fake copies, cannot be swapped
            like = tensors[0]
            function = torch.ops.aten.empty_strided.default
            args = like.size(), like.stride()
            kwargs = {"dtype": kwargs.get("dtype") or like.dtype, "device": device}
        elif not any(isinstance(value, FakeTensor) for value in tensors):
            is_new = not tensors and is_cpu and dtype.is_floating_point
            if not is_new:
                return function(*args, **kwargs)
        found = super().__torch_dispatch__(function, types, args, kwargs)
        self.fake_tensor_converter.meta_converter.tensor_memo.clear()
        return found


@dataclass(frozen=True)
class MeasuredBytes:
    """Bytes on one rank.

    `between_steps` and `between_micro_steps` exist after an update and after a backward pass (the
    most of all passes, without gathered weights; None in a pipeline, where activations of other
    passes exist then), `peak` is the most at any time in a step, and `sent` are the bytes that the
    rank sends in a step.
    """

    between_steps: int
    between_micro_steps: int | None
    peak: int
    sent: int


class _SamplingTimer(HostTimer):
    """Calls `sample` when a backward pass has ended, and before the update. DDP ends laps inside a
    pass, too.
    """

    def __init__(self, sample: Callable[[], None]):
        super().__init__()
        self._sample = sample

    def lap(self, part: str) -> None:
        super().lap(part)
        inside = torch._C._current_graph_task_id() != -1
        if part in ("backward", "exposed_communication") and not inside:
            self._sample()


def measure_step(run: RunSettings, rank: int) -> MeasuredBytes:
    """Measure a step in which the optimizer has its state, with a CPU's kernels, without compile.

    The run's model must have its vocabulary size, and be the project's own decoder. Tensors have
    shapes and no numbers (torch's FakeTensorMode), so that a model of any size takes no memory.
    """
    run = replace(shorten(run), compile=False)
    with fake_world(run.layout.world_size, rank) as world, _Shapes(), _whole_norms():
        return count_step(run, world)


def count_step(run: RunSettings, world: World) -> MeasuredBytes:
    """Count the storages of this rank in a second step, in which the optimizer has its state. A
    collective; weights have no values.
    """
    rows = len(
        rank_slots(
            run.global_batch,
            rank=run.layout.coordinate(world.rank).data_rank,
            world_size=run.layout.data_parallel_size,
        )
    )
    tokens = np.zeros((rows, run.sequence_length), dtype=np.int64)
    ids = np.zeros(tokens.shape, dtype=np.int32) if run.document_mask else None
    batch = Batch(tokens, tokens, tokens.size, tokens.size, 0, document_ids_bt=ids)
    with LiveBytes() as live:
        trainer = Trainer(run, run.model, world, "sdpa", unset=True)
        for tensor in (*trainer.model.parameters(), *trainer.model.buffers()):
            live.add(tensor)
        useful = torch.tensor(float(tokens.size * run.layout.data_parallel_size))
        samples: list[int] = []

        def sample() -> None:
            samples.append(live.count() - _count_unheld(trainer))

        trainer.step(batch, useful, rate=1e-3, timer=HostTimer())
        between_steps = live.count() - _count_bytes(trainer.model.buffers())
        live.peak = 0
        with Exchanges() as exchanges:
            trainer.step(batch, useful, rate=1e-3, timer=_SamplingTimer(sample))
        return MeasuredBytes(
            between_steps=between_steps,
            between_micro_steps=max(samples) if run.layout.pipeline == 1 else None,
            peak=live.peak,
            sent=round(exchanges.sent),
        )


@contextmanager
def _whole_norms() -> Iterator[None]:
    """Take the norm of each gradient at once: a CPU's norm is of so many pieces, for its rounding,
    that making them takes minutes where there are billions of weights.
    """
    pieces = optimizer.ADDED_AT_ONCE
    optimizer.ADDED_AT_ONCE = LARGEST
    try:
        yield
    finally:
        optimizer.ADDED_AT_ONCE = pieces


def shorten(run: RunSettings) -> RunSettings:
    """Return the run with at most `ENOUGH_MICRO_STEPS` full micro-steps, if it has no pipeline."""
    ranks = run.layout.data_parallel_size
    passes = micro_steps(run.global_batch, world_size=ranks, micro_batch=run.micro_batch)
    if run.layout.pipeline > 1 or passes <= ENOUGH_MICRO_STEPS:
        return run
    return replace(run, global_batch=ENOUGH_MICRO_STEPS * run.micro_batch * ranks)


def _count_unheld(trainer: Trainer) -> int:
    """Count the bytes that are neither parameters nor gradients nor optimizer state: buffers, weights
    that FSDP has gathered at the moment, and the bucket that ZeRO-1 is sending.
    """
    other: list[Any] = list(trainer.model.buffers())
    if trainer.run.layout.methods[-1] in ("fsdp", "hsdp"):
        other += [w for w in trainer.model.parameters() if not hasattr(w, "to_local")]
    scatter = getattr(trainer.shards, "scatter", None)
    for sending in scatter.under_way if scatter is not None else ():
        other += [sending.sent, sending.received]
    return _count_bytes(other)


def _count_bytes(tensors: Any) -> int:
    """Count the bytes of tensors, and those that share a storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
