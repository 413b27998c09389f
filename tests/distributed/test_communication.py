"""What layouts of 64 and 128 ranks exchange in one step: counted on one rank of a process group
that is a fake.

The numbers follow from the methods, and are written out as they do: L blocks and the rest, M
micro-steps.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.distributed.parity import EVEN, GPT2_PARTS, LAYOUTS, SHAPE, my_batch, run_of
from tests.distributed.ranks import run_ranks
from tokenscale.costs.exchanges import exchanged_bytes, is_predicted, most_exchanged_bytes
from tokenscale.data.batches.batch import Batch
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.run import RunSettings
from tokenscale.train.fake_world import fake_world
from tokenscale.train.models.objective import micro_batch
from tokenscale.train.phase_timer import HostTimer
from tokenscale.train.profiling import Exchanges, Probe
from tokenscale.train.trainer import Trainer

pytestmark = pytest.mark.distributed
LAYERS = 4
LENGTH = 32
MICRO_STEPS = 4
VOCABULARY = 96
WIDTH = 32
MODEL = replace(
    SHAPE, layers=LAYERS, heads=8, key_value_heads=8, hidden=96, vocabulary_size=VOCABULARY
)


def exchanges(layout: LayoutSettings, rank: int) -> dict[str, int]:
    """Operation → times, in one step of one rank. Nothing is sent: what comes in are numbers that
    were there before.
    """
    run = RunSettings(
        model=MODEL,
        layout=layout,
        sequence_length=LENGTH,
        global_batch=MICRO_STEPS * layout.data_parallel_size,
        micro_batch=1,
    )
    assert run.problems() == []
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (MICRO_STEPS, LENGTH))
    batch = Batch(tokens, tokens, tokens.size, tokens.size, 0)
    useful = torch.tensor(float(tokens.size * layout.data_parallel_size))
    with fake_world(layout.world_size, rank) as world:
        trainer = Trainer(run, MODEL, world, "sdpa")
        # the first step finds out about the module, the second orders DDP's buckets by it
        for _ in range(3):
            with Exchanges() as found:
                trainer.step(batch, useful, rate=1e-3, timer=HostTimer())
    return found.counts


def exchanges_of(world, cases):
    return [exchanges(layout, rank) for layout, rank in cases]


L = LAYERS
M = MICRO_STEPS
#: a tensor group in one micro-step: gathers of each block's two parts, and as many in the backward
#: passes of their sums; as many scatters. The embedding's sum and the loss' gather have one of
#: each; the loss its maximum and its sum.
BLOCK = 4
EDGE = 1
#: gradients of the parameters that a tensor group repeats; of a pipeline's copies; squared norms
REPEATED = MEAN = NORM = 1
TENSOR = M * (BLOCK * L + 2 * EDGE)
THREE_D = LayoutSettings(pipeline=4, tensor=8, data=4)
ENDS = {"gather": M * (BLOCK + EDGE), "scatter": M * (BLOCK + EDGE), "send": M, "receive": M}
CASES = {
    # one bucket has all gradients of so small a model
    "ddp@64": (LayoutSettings(data=64), 5, {"sum": 1}),
    # one bucket has all gradients of so small a model
    "zero1@64": (
        LayoutSettings(shard=64, sharding="zero1"),
        5,
        {"gather": 1, "scatter": 1, "sum": NORM},
    ),
    # zero3 gathers each block for forward and for backward, the rest once; gradients are scattered
    # in each micro-step
    "zero3@64": (
        LayoutSettings(shard=64),
        5,
        {"gather": M * (2 * L + 1), "scatter": M * (L + 1), "sum": NORM},
    ),
    "zero3@64, accumulation unsharded": (
        LayoutSettings(shard=64, accumulation="unsharded"),
        5,
        {"gather": M * (2 * L + 1), "scatter": L + 1, "sum": NORM},
    ),
    "zero2@128": (
        LayoutSettings(shard=128, sharding="zero2"),
        5,
        {"gather": L + 1, "scatter": M * (L + 1), "sum": NORM},
    ),
    "zero2@128, accumulation unsharded": (
        LayoutSettings(shard=128, sharding="zero2", accumulation="unsharded"),
        5,
        {"gather": L + 1, "scatter": L + 1, "sum": NORM},
    ),
    # copies sum the gradients of each group of weights
    "hsdp@8x8": (
        LayoutSettings(data=8, shard=8),
        0,
        {"gather": M * (2 * L + 1), "scatter": M * (L + 1), "sum": M * (L + 1) + NORM},
    ),
    "hsdp@8x8, accumulation unsharded": (
        LayoutSettings(data=8, shard=8, accumulation="unsharded"),
        0,
        {"gather": M * (2 * L + 1), "scatter": L + 1, "sum": L + 1 + NORM},
    ),
    "tp-zero3@8x16": (
        LayoutSettings(tensor=8, shard=16),
        0,
        {
            "gather": TENSOR + M * (2 * L + 1),
            "scatter": TENSOR + M * (L + 1),
            "sum": 2 * M + REPEATED + NORM,
        },
    ),
    "tp-zero2@8x8": (
        LayoutSettings(tensor=8, shard=8, sharding="zero2"),
        9,
        {
            "gather": TENSOR + L + 1,
            "scatter": TENSOR + M * (L + 1),
            "sum": 2 * M + REPEATED + NORM,
        },
    ),
    # one block a stage; the first has the embedding, the last the loss
    "1f1b-tp-ddp@4x8x4, first": (THREE_D, 0, ENDS | {"sum": REPEATED + MEAN + NORM}),
    "1f1b-tp-ddp@4x8x4, second": (
        THREE_D,
        40,
        {
            "gather": M * BLOCK,
            "scatter": M * BLOCK,
            "sum": REPEATED + MEAN + NORM,
            "send": 2 * M,
            "receive": 2 * M,
        },
    ),
    "1f1b-tp-ddp@4x8x4, last": (THREE_D, 127, ENDS | {"sum": 2 * M + REPEATED + MEAN + NORM}),
    "1f1b-zero2@4x16": (
        LayoutSettings(pipeline=4, shard=16, sharding="zero2"),
        20,
        {"gather": 1, "scatter": M, "sum": NORM, "send": 2 * M, "receive": 2 * M},
    ),
    # four stages: the first rank has the first and the third, and gets from the last what goes back
    # to the beginning
    "interleaved-zero2@2x32": (
        LayoutSettings(
            pipeline=2, stages_per_rank=2, schedule="interleaved", shard=32, sharding="zero2"
        ),
        20,
        {"gather": 2 + 1, "scatter": M * (2 + 1), "sum": NORM, "send": 3 * M, "receive": 3 * M},
    ),
}
NAMES = {"gather": "allgather_base", "scatter": "reduce_scatter_base", "sum": "allreduce"}
NAMES |= {"send": "send", "receive": "recv", "tell": "broadcast"}


@pytest.fixture(scope="module")
def found():
    (counts,) = run_ranks(exchanges_of, 1, [case[:2] for case in CASES.values()])
    return dict(zip(CASES, counts, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_step_exchanges_what_the_method_needs_and_no_more(found, case):
    layout, _, expected = CASES[case]
    expected = {NAMES[kind]: times for kind, times in expected.items()}
    if layout.pipeline > 1:
        expected[NAMES["tell"]] = 1  # the loss, by the last stage
    assert found[case] == expected


def bytes_sent(world, run):
    """Those of a step, after a validation, which leaves weights gathered."""
    trainer = Trainer(run, run.model, world, "sdpa")
    ranks = run.layout.data_parallel_size
    batch = my_batch(0, run.layout.coordinate(world.rank).data_rank, ranks)
    probe = Probe(trainer.model, world.device, run, trainer.shards.held_gradients)
    first = micro_batch(batch, rows=slice(0, run.micro_batch), device=world.device)
    with torch.no_grad(), trainer.autocast():
        trainer.parallel.loss(first)
    with probe.sending(trainer.parallel.module):
        trainer.step(batch, torch.tensor(100.0), rate=1e-3, timer=HostTimer())
    return probe.bytes["sent_bytes"]


def bytes_of_ranks(_, runs):
    found = []
    for run in runs:
        sent = []
        for rank in range(run.layout.world_size):
            with fake_world(run.layout.world_size, rank) as world:
                sent.append(bytes_sent(world, run))
        found.append(sent)
    return found


#: two micro-batches of one row at four ranks
SENT = [LayoutSettings(data=4, **more) for more in ({}, {"compression": "bf16"})] + [
    LayoutSettings(data=2, shard=2)
]
SENT += [LayoutSettings(shard=4, sharding=name) for name in ("zero1", "zero2", "zero3")]
SENT += [LayoutSettings(shard=4, **{name: True}) for name in ("embedding_group", "head_group")]
SENT += [LayoutSettings(shard=4, **more) for more in ({"reshard_to": 2}, {"gather": "bf16"})]
SENT += [
    replace(layout, accumulation="unsharded")
    for layout in SENT
    if layout.methods[-1] in ("fsdp", "hsdp")
]


TIED = {"model": GPT2_PARTS}
GROUPS = {str(layout): layout for layout in SENT}
ALL = LAYOUTS | {name: of for name, of in GROUPS.items() if of not in LAYOUTS.values()}


@pytest.mark.parametrize(
    ("of", "precision", "layouts"),
    [
        pytest.param(EVEN, "fp32", GROUPS, id="llama-fp32, groups"),
        pytest.param(TIED, "bf16", ALL, id="tied embeddings-bf16"),
        pytest.param(EVEN, "fp32", ALL, id="llama-fp32", marks=pytest.mark.long),
        pytest.param(EVEN, "bf16", ALL, id="llama-bf16", marks=pytest.mark.long),
        pytest.param(TIED, "fp32", ALL, id="tied embeddings-fp32", marks=pytest.mark.long),
    ],
)
def test_plan_states_the_bytes_that_each_rank_sends(of, precision, layouts):
    """Beside weights, gradients and positions ranks send a few numbers: useful tokens and the square
    of the gradient's norm.
    """
    cases = {
        name: run_of(layout, micro_batch=min(layout.pipeline, 2), precision=precision, **of)
        for name, layout in layouts.items()
        if precision == "bf16" or layout.gather != "bf16"
    }
    # as others run it: one micro-step, gathers in bf16, groups for the embedding and the head
    others = LayoutSettings(shard=4, gather="bf16", embedding_group=True, head_group=True)
    if precision == "bf16":
        cases["as others run it"] = run_of(others, micro_batch=2, precision="bf16", **of)
    # a tied embedding has no group of its own
    cases = {name: run for name, run in cases.items() if not run.problems()}
    wrong = []
    (found,) = run_ranks(bytes_of_ranks, 1, list(cases.values()))
    for name, ranks in zip(cases, found, strict=True):
        for rank, sent in enumerate(ranks):
            expected = exchanged_bytes(cases[name], rank)
            if sent != pytest.approx(expected, rel=1e-3, abs=64):
                wrong.append((name, rank, sent, expected))
    assert not wrong, "\n".join(map(str, wrong))


NOT_PREDICTED = {
    "blocks of a tensor group again": {
        "layout": LayoutSettings(tensor=2),
        "activation_checkpointing": "block",
    },
    "a pipeline's rows of unequal length": {
        "layout": LayoutSettings(pipeline=2),
        "approach": "length-bucketed",
    },
}


@pytest.mark.parametrize("case", NOT_PREDICTED)
def test_what_depends_on_more_than_the_layout_is_not_predicted(case):
    run = run_of(**EVEN, **NOT_PREDICTED[case])
    assert not is_predicted(run) and most_exchanged_bytes(run) is None
    alone = replace(run, layout=LayoutSettings(data=2))
    assert is_predicted(alone) and most_exchanged_bytes(alone) == exchanged_bytes(alone, 0)


def test_a_tensor_group_sends_more_where_blocks_are_computed_again():
    run = run_of(**EVEN, **NOT_PREDICTED["blocks of a tensor group again"])
    ((sent,),) = run_ranks(bytes_of_ranks, 1, [run])
    assert min(sent) > 1.2 * exchanged_bytes(run, 0)
