"""What a rank holds between the micro-steps of a step: predicted, counted in a fake world, and
measured on gloo ranks.

The fake world is the witness that knows nothing of gradients: one rank of torch's fake process
group, on which all storages of numbers that still exist after a backward pass are added up.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.parity import SHAPE, each, on_ranks, trainer_of
from tests.distributed.ranks import run_ranks
from tokenscale.costs.memory import memory
from tokenscale.data.batches.batch import Batch
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.run import RunSettings
from tokenscale.train.collectives import local
from tokenscale.train.parallel import ddp
from tokenscale.train.parallel.world import World
from tokenscale.train.phase_timer import HostTimer
from tokenscale.train.profiling import Probe

pytestmark = [pytest.mark.slow(15), pytest.mark.distributed]
LENGTH = 24
RANKS = 4
ROWS = 4
MODEL = replace(SHAPE, dimension=64, hidden=96, vocabulary_size=96)
UNSHARDED = {"accumulation": "unsharded"}
LAYOUTS = {
    "single": LayoutSettings(),
    "ddp": LayoutSettings(data=RANKS),
    "zero1": LayoutSettings(shard=RANKS, sharding="zero1"),
    "zero2": LayoutSettings(shard=RANKS, sharding="zero2"),
    "zero2, unsharded": LayoutSettings(shard=RANKS, sharding="zero2", **UNSHARDED),
    "zero3": LayoutSettings(shard=RANKS),
    "zero3, unsharded": LayoutSettings(shard=RANKS, **UNSHARDED),
    "zero3, gathered in bf16": LayoutSettings(shard=RANKS, gather="bf16"),
    "zero3, gathered in bf16, unsharded": LayoutSettings(shard=RANKS, gather="bf16", **UNSHARDED),
    "zero3, groups": LayoutSettings(shard=RANKS, embedding_group=True, head_group=True),
    "hsdp": LayoutSettings(data=2, shard=2),
    "hsdp, unsharded": LayoutSettings(data=2, shard=2, **UNSHARDED),
    "tensor": LayoutSettings(tensor=RANKS),
    "tensor and zero3": LayoutSettings(tensor=2, shard=2),
    "tensor and zero3, unsharded": LayoutSettings(tensor=2, shard=2, **UNSHARDED),
}
PIPELINES = {
    "1f1b and zero3": LayoutSettings(pipeline=2, shard=2),
    "1f1b and zero3, unsharded": LayoutSettings(pipeline=2, shard=2, **UNSHARDED),
    "interleaved and zero2": LayoutSettings(
        pipeline=2, shard=2, sharding="zero2", schedule="interleaved", stages_per_rank=2
    ),
}


def run_of(layout: LayoutSettings, micro_steps: int) -> RunSettings:
    """A run whose rank has `ROWS` rows of each step, in so many micro-steps."""
    precision = "bf16" if layout.gather == "bf16" else "fp32"
    run = RunSettings(
        model=MODEL,
        sequence_length=LENGTH,
        global_batch=ROWS * layout.data_parallel_size,
        micro_batch=ROWS // micro_steps,
        layout=layout,
        precision=precision,
    )
    assert run.problems() == []
    return run


FAKE = {
    (name, steps): run_of(layout, steps) for name, layout in LAYOUTS.items() for steps in (1, 4)
}
REAL = {
    **{
        (name, steps): run_of(LAYOUTS[name], steps)
        for name in ("zero1", "zero2", "zero2, unsharded", "zero3", "zero3, unsharded", "hsdp")
        for steps in (1, 4)
    },
    ("zero3, gathered in bf16, unsharded", 4): FAKE["zero3, gathered in bf16, unsharded", 4],
    ("tensor and zero3, unsharded", 4): FAKE["tensor and zero3, unsharded", 4],
    **{(name, 4): run_of(layout, 4) for name, layout in PIPELINES.items()},
}


class LiveStorages(TorchDispatchMode):
    """Remembers every storage of floating-point numbers that an operation returns."""

    def __init__(self):
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.add(tensor)
        return found

    def add(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cpu":
            reference = StorageWeakRef(local(tensor).untyped_storage())
            self._made[reference.cdata] = reference

    def count_bytes(self) -> int:
        """Bytes of the storages that still exist. FSDP empties those of weights that it has given
        back.
        """
        self._made = {key: made for key, made in self._made.items() if not made.expired()}
        return sum(torch.UntypedStorage._new_with_weak_ptr(key).nbytes() for key in self._made)


class SamplingTimer(HostTimer):
    """Calls `sample` when a backward pass has ended, and before the update."""

    def __init__(self, sample):
        super().__init__()
        self._sample = sample

    def lap(self, phase: str) -> None:
        super().lap(phase)
        if phase in ("backward", "exposed_communication"):
            self._sample()


def reduce_nothing(group, bucket):
    """A hook of DDP that ends at once: the fake process group never completes its futures."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def count_held(run: RunSettings) -> int:
    """The most bytes of parameters, gradients and optimizer state on rank 0, after any backward
    pass of the second step, in which the optimizer has its state.

    All that exists, less buffers (rotary tables), weights that are gathered at the moment, and the
    one bucket that ZeRO-1 is sending.
    """
    dist.init_process_group("fake", rank=0, world_size=run.layout.world_size, store=FakeStore())
    ddp.allreduce_hook = reduce_nothing
    try:
        with LiveStorages() as live:
            world = World(0, run.layout.world_size, 0, torch.device("cpu"))
            trainer = trainer_of(run, world)
            for tensor in (*trainer.model.parameters(), *trainer.model.buffers()):
                live.add(tensor)
            samples: list[int] = []

            def sample() -> None:
                gathered = [w for w in trainer.model.parameters() if not hasattr(w, "to_local")]
                other = list(trainer.model.buffers())
                if run.layout.methods[-1] in ("fsdp", "hsdp"):
                    other += gathered
                scatter = getattr(trainer.shards, "scatter", None)  # of zero1
                for sending in scatter.under_way if scatter is not None else ():
                    other += [sending.sent, sending.received]
                sizes = {
                    t.untyped_storage()._cdata: t.untyped_storage().nbytes()
                    for t in other
                    if t.is_floating_point()
                }
                samples.append(live.count_bytes() - sum(sizes.values()))

            tokens = np.random.default_rng(0).integers(0, 96, (ROWS, LENGTH))
            batch = Batch(tokens, tokens, tokens.size, tokens.size, 0)
            useful = torch.tensor(float(tokens.size * run.layout.data_parallel_size))
            trainer.step(batch, useful, 1e-3, HostTimer())
            trainer.step(batch, useful, 1e-3, SamplingTimer(sample))
        return max(samples)
    finally:
        dist.destroy_process_group()


def count_held_in_all(world, runs):
    return [count_held(run) for run in runs]


def measure(world, run):
    trainer = trainer_of(run, world)
    tokens = np.random.default_rng(0).integers(0, 96, (ROWS, LENGTH))
    batch = Batch(tokens, tokens, tokens.size, tokens.size, 0)
    useful = torch.tensor(float(tokens.size * run.layout.data_parallel_size))
    probe = Probe(trainer.model, world.device, run, trainer.shards.held_gradients)
    trainer.step(batch, useful, 1e-3, HostTimer(), probe)
    return {part: probe.bytes[f"{part}_bytes"] for part in ("parameters", "gradients", "optimizer")}


@pytest.fixture(scope="module")
def counted():
    (found,) = run_ranks(count_held_in_all, 1, list(FAKE.values()))
    return dict(zip(FAKE, found, strict=True))


@pytest.fixture(scope="module")
def measured():
    return on_ranks(each, REAL, measure)


@pytest.mark.parametrize("case", FAKE)
def test_a_rank_of_a_fake_world_holds_what_is_predicted(counted, case):
    held = memory(FAKE[case], rank=0)
    expected = held.parameters + held.gradients + held.optimizer
    assert counted[case] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("case", REAL)
def test_real_ranks_hold_what_is_predicted(measured, case):
    for rank, found in enumerate(measured[case]):
        held = memory(REAL[case], rank)
        assert found == {part: getattr(held, part) for part in found}, f"rank {rank}"
