"""What a rank holds between steps, between micro-steps and at its peak: predicted, counted in a fake
world, with numbers and without, and on gloo ranks.

The count is the witness that knows nothing of gradients: all storages that operations have returned
are added up (`train/fake_world.py`). On real ranks it sees what the fake world sees, at the times
when messages do arrive; it sees neither gloo's own buffers nor a kernel's workspace. The project's
record of a CPU's peak is the process's resident set, whose libraries alone are larger than these
models.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.distributed.parity import GPT2_PARTS, SHAPE, each, on_ranks, selected, trainer_of
from tests.distributed.ranks import run_ranks
from tokenscale.costs.memory import memory
from tokenscale.data.batches.batch import Batch
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.run import OptimizerSettings, RunSettings
from tokenscale.train.fake_world import count_step, fake_world, measure_step, shorten
from tokenscale.train.phase_timer import HostTimer
from tokenscale.train.profiling import Probe

pytestmark = [pytest.mark.slow(30), pytest.mark.distributed]
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
    **{
        schedule: LayoutSettings(pipeline=RANKS, schedule=schedule)
        for schedule in ("naive", "gpipe", "1f1b", "zero-bubble")
    },
    "interleaved": LayoutSettings(pipeline=2, schedule="interleaved", stages_per_rank=2),
    "1f1b and ddp": LayoutSettings(pipeline=2, data=2),
    "1f1b and tensor": LayoutSettings(pipeline=2, tensor=2),
    "1f1b and zero2": LayoutSettings(pipeline=2, shard=2, sharding="zero2"),
    "zero-bubble and zero1": LayoutSettings(
        pipeline=2, shard=2, sharding="zero1", schedule="zero-bubble"
    ),
    "zero-bubble and tensor": LayoutSettings(pipeline=2, tensor=2, schedule="zero-bubble"),
    "1f1b and zero3": LayoutSettings(pipeline=2, shard=2),
    "1f1b and zero3, unsharded": LayoutSettings(pipeline=2, shard=2, **UNSHARDED),
    "interleaved and zero2": LayoutSettings(
        pipeline=2, shard=2, sharding="zero2", schedule="interleaved", stages_per_rank=2
    ),
}


def run_of(layout: LayoutSettings, micro_steps: int, **changes) -> RunSettings:
    """A run whose rank has `ROWS` rows of each step, in so many micro-steps."""
    settings = {
        "model": MODEL,
        "sequence_length": LENGTH,
        "global_batch": ROWS * layout.data_parallel_size,
        "micro_batch": ROWS // micro_steps,
        "precision": "bf16" if layout.gather == "bf16" else "fp32",
    }
    run = RunSettings(layout=layout, **(settings | changes))
    assert run.problems() == []
    return run


FAKE = {
    (name, steps): run_of(layout, steps)
    for name, layout in (LAYOUTS | PIPELINES).items()
    for steps in (1, 4)
    if steps > 1 or layout.schedule != "interleaved"  # which needs as many as stages
}
#: production settings, and what else changes what exists for a moment
LARGE_VOCABULARY = replace(MODEL, layers=2, vocabulary_size=2048)
AS_RUN = LayoutSettings(shard=RANKS, gather="bf16", embedding_group=True, head_group=True)
FP32_MOMENTS = OptimizerSettings(moments="fp32")
GPT2 = replace(GPT2_PARTS, dimension=64, hidden=256, dropout=0.1).with_vocabulary(96)
CHUNKS = {"model": LARGE_VOCABULARY, "loss_chunk": 16}
CHECKPOINTED = {"precision": "bf16", "activation_checkpointing": "block"}
MOMENTS = {
    "as run, one micro-step": run_of(AS_RUN, 1, **CHUNKS),
    "as run": run_of(AS_RUN, 4, **CHUNKS),
    "ddp, large vocabulary": run_of(LAYOUTS["ddp"], 4, **CHUNKS),
    "zero1, large vocabulary": run_of(LAYOUTS["zero1"], 4, **CHUNKS),
    "zero2, large vocabulary": run_of(LAYOUTS["zero2"], 4, **CHUNKS),
    "zero3, large vocabulary": run_of(LAYOUTS["zero3"], 1, **CHUNKS),
    **{
        f"{name}, large vocabulary, micro-steps": run_of(LAYOUTS[name], 4, model=LARGE_VOCABULARY)
        for name in ("zero3", "zero3, unsharded", "zero3, groups", "hsdp")
    },
    "blocks again": run_of(LAYOUTS["single"], 1, **CHECKPOINTED),
    "blocks again, micro-steps": run_of(LAYOUTS["zero3"], 4, **CHECKPOINTED),
    "products kept": run_of(
        LAYOUTS["single"], 1, precision="bf16", activation_checkpointing="selective"
    ),
    "GPT-2's parts, dropout": run_of(LAYOUTS["single"], 1, model=GPT2, precision="bf16"),
    "gradients in fp32": run_of(
        LayoutSettings(shard=RANKS, accumulation_format="fp32"),
        4,
        precision="bf16-true",
        optimizer=FP32_MOMENTS,
    ),
    **{
        f"{name} in bf16": run_of((LAYOUTS | PIPELINES)[name], 4, precision="bf16")
        for name in ("zero3", "hsdp", "tensor and zero3", "gpipe", "interleaved")
    },
    "1f1b in bf16": run_of(LayoutSettings(pipeline=2), 4, precision="bf16"),
    "1f1b of 16-bit weights": run_of(LayoutSettings(pipeline=2), 4, precision="bf16-true"),
    "zero-bubble in bf16": run_of(
        LayoutSettings(pipeline=2, schedule="zero-bubble"), 4, precision="bf16"
    ),
    "zero-bubble of GPT-2's parts": run_of(
        LayoutSettings(pipeline=2, schedule="zero-bubble"), 4, model=GPT2
    ),
    "1f1b, blocks again": run_of(LayoutSettings(pipeline=2), 4, **CHECKPOINTED),
    "1f1b, large vocabulary": run_of(LayoutSettings(pipeline=2), 4, **CHUNKS),
}


#: of these settings what is part of the gate: one for each moment that others have not
MOMENTS_IN_GATE = (
    "as run",
    "ddp, large vocabulary",
    "zero3, groups, large vocabulary, micro-steps",
    "hsdp, large vocabulary, micro-steps",
    "blocks again, micro-steps",
    "products kept",
    "GPT-2's parts, dropout",
    "gradients in fp32",
    "1f1b in bf16",
    "zero-bubble in bf16",
)
#: layouts whose step of one micro-step is part of the gate; of four each one is
OF_ONE_MICRO_STEP = ("single", "zero2", "zero3", "zero3, gathered in bf16")
#: layouts whose real ranks are part of the gate, one for each method
REAL_IN_GATE = ("ddp", "zero3, groups", "hsdp", "tensor", "1f1b", "zero-bubble and tensor")
#: one for each method and what is between forward and backward
WITHOUT_NUMBERS = (
    ("zero1", 4),
    ("zero3, gathered in bf16", 4),
    ("zero-bubble and tensor", 4),
    "GPT-2's parts, dropout",
    "blocks again, micro-steps",
)
CASES = [
    pytest.param(
        case,
        id=f"{case[0]}, {case[1]} micro-steps",
        marks=pytest.mark.long if case[1] == 1 and case[0] not in OF_ONE_MICRO_STEP else (),
    )
    for case in FAKE
]


def stage_ranks(run):
    """The first rank of each stage: others hold the same."""
    places = [(rank, run.layout.coordinate(rank)) for rank in range(run.layout.world_size)]
    return [rank for rank, place in places if place.data == place.shard == place.tensor == 0]


def count_all(world, runs):
    return [{rank: count(run, rank) for rank in stage_ranks(run)} for run in runs]


def count(run, rank):
    """As `measure_step` counts, with numbers, which takes a fifth of the time."""
    run = shorten(run)
    with fake_world(run.layout.world_size, rank) as world:
        return count_step(run, world)


def measure_all(world, run):
    return {rank: measure_step(run, rank) for rank in stage_ranks(run)}


def hold(world, run):
    trainer = trainer_of(run, world)
    tokens = np.random.default_rng(0).integers(0, 96, (ROWS, LENGTH))
    batch = Batch(tokens, tokens, tokens.size, tokens.size, 0)
    useful = torch.tensor(float(tokens.size * run.layout.data_parallel_size))
    probe = Probe(trainer.model, world.device, run, trainer.shards.held_gradients)
    trainer.step(batch, useful, 1e-3, HostTimer(), probe)
    parts = {
        part: probe.bytes[f"{part}_bytes"] for part in ("parameters", "gradients", "optimizer")
    }
    return parts, count_step(run, world).peak


@pytest.fixture(scope="module")
def counted(request):
    """Case → rank of each stage → what it held, for the selected tests."""
    chosen = {case for (case,) in selected(request, "case")}
    cases = {case: run for case, run in (FAKE | MOMENTS).items() if case in chosen}
    (found,) = run_ranks(count_all, 1, list(cases.values()), timeout_s=1200)
    return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_rank_of_a_fake_world_holds_what_is_predicted(counted, case):
    run = FAKE[case]
    for rank, found in counted[case].items():
        held = memory(run, rank)
        stay = held.gradients if run.layout.keeps_gradients else 0
        if run.layout.pipeline == 1:
            assert found.between_micro_steps == pytest.approx(held.standing, rel=0.02)
        between_steps = held.parameters + held.optimizer + stay
        assert found.between_steps == pytest.approx(between_steps, rel=0.02), f"rank {rank}"


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *(
            pytest.param(case, marks=() if case in MOMENTS_IN_GATE else pytest.mark.long)
            for case in MOMENTS
        ),
    ],
)
def test_the_peak_of_a_rank_of_a_fake_world_is_what_is_predicted(counted, case):
    """And the bytes that `plan` and `ready` compare with a GPU are never below it."""
    for rank, found in counted[case].items():
        held = memory((FAKE | MOMENTS)[case], rank)
        assert found.peak == pytest.approx(held.peak, rel=0.02), f"rank {rank}"
        assert held.total >= held.peak


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if case in WITHOUT_NUMBERS else pytest.mark.long)
        for case in FAKE | MOMENTS
    ],
)
def test_tensors_without_numbers_count_as_much(counted, case):
    """Tensors without numbers are what `plan --measure` counts."""
    (found,) = run_ranks(measure_all, 1, (FAKE | MOMENTS)[case])
    assert found == counted[case]


@pytest.fixture(scope="module")
def on_real_ranks(request):
    """Case → what each of its ranks held, and its peak."""
    chosen = {case for (case,) in selected(request, "case")}
    return on_ranks(each, {case: FAKE[case] for case in chosen}, hold)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=of.id, marks=() if case[0] in REAL_IN_GATE else pytest.mark.long)
        for of in CASES
        if not of.marks
        for case in of.values
    ],
)
def test_real_ranks_hold_what_is_predicted_and_what_a_fake_world_counts(
    counted, on_real_ranks, case
):
    run = FAKE[case]
    for rank, (parts, peak) in enumerate(on_real_ranks[case]):
        held = memory(run, rank)
        assert parts == {part: getattr(held, part) for part in parts}, f"rank {rank}"
        assert peak > 0.98 * held.peak, f"rank {rank}"
        if run.layout.shard > 1:
            continue  # gloo's reduce-scatter copies its input, which neither of the others has
        assert peak == pytest.approx(held.peak, rel=0.02), f"rank {rank}"
        if rank in counted[case]:
            assert peak == pytest.approx(counted[case][rank].peak, rel=0.02), f"rank {rank}"
