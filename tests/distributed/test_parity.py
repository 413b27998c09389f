"""Every layout computes what one process computes: gradients, and losses, norms and weights after
some steps.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import golden
from tests.distributed.parity import (
    EVEN,
    GPT2_PARTS,
    HYBRID,
    LAYOUTS,
    ONE,
    SHAPE,
    TOLERANCE,
    TWO_RANKS,
    batch_of,
    compare,
    differentiate,
    each,
    gradients,
    on_ranks,
    run_of,
    selected,
    steps,
    trainer_of,
    whole,
)
from tests.distributed.ranks import run_ranks
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.run import BudgetSettings, OptimizerSettings
from tokenscale.train.parallel import ddp, sharding
from tokenscale.train.phase_timer import HostTimer
from tokenscale.train.profiling import Exchanges, Probe

pytestmark = [pytest.mark.slow(77), pytest.mark.distributed]
TIED = "GPT-2's parts, its tied embedding among them"
VARIANTS = {
    # with 0 a gradient is so near zero that an update differs by 2e-5
    TIED: {"model": GPT2_PARTS, "seed": 1},
    "grouped queries": {"model": replace(SHAPE, key_value_heads=2)},
    "Qwen3's attention": {
        "model": replace(
            SHAPE, key_value_heads=2, head_dim=12, query_key_norm=True, attention_biases="all"
        )
    },
    "chunked loss": {"loss_chunk": 5},
    "chunked loss of tied embeddings, blocks computed again": {
        "model": replace(SHAPE, tied_embeddings=True),
        "loss_chunk": 5,
        "activation_checkpointing": "block",
    },
    "products kept, the rest computed again": {"activation_checkpointing": "selective"},
    "update without the fused kernel": {
        "optimizer": OptimizerSettings(learning_rate=1e-3, clip_norm=0.5, fused=False)
    },
}
PRECISIONS = ("bf16", "bf16-true")
FEW = ("zero1@2", "zero3@3", "tp@2", "interleaved@2", "zero-bubble@2", "1f1b-tp@2x2")
#: what `make test` compares. Other layouts are experiments, and other variants of a run are long
#: tests. Each method on two ranks, an uneven share,
#: and two pairs of methods; of variants those that hold others (tied embeddings, chunks and
#: recomputation at once; Qwen3's attention has grouped queries)
DAILY = {*TWO_RANKS, *FEW, HYBRID}
DAILY_VARIANTS = {TIED, "Qwen3's attention"}
DAILY_VARIANTS |= {"chunked loss of tied embeddings, blocks computed again"}
#: the same method or pair on another number of ranks, or with another schedule: long tests
REPEATED = {"zero1@3", "zero2@3", "zero2@4", "naive@4", "gpipe@4", "zero-bubble@4", "gpipe-tp@2x2"}
REPEATED |= {"zero-bubble-tp@2x2", "zero-bubble-ddp@2x2", "1f1b-zero2@2x2", "tp-zero2@2x2"}
#: every schedule of a pipeline runs the same stages
DAILY_PRECISIONS = {"ddp@2", "zero1@2", "zero3@2", "tp@2", "1f1b-tp@2x2"}
COMPRESSED = {
    "ddp@2": LayoutSettings(data=2, compression="bf16"),
    "zero1@2": LayoutSettings(shard=2, sharding="zero1", compression="bf16"),
}
#: groups of weights, where they stay between forward and backward, and when gradients are reduced
GROUPED = {
    "embedding@2": LayoutSettings(shard=2, embedding_group=True),
    "head@2": LayoutSettings(shard=2, sharding="zero2", head_group=True),
    "zero2-unsharded@2": LayoutSettings(shard=2, sharding="zero2", accumulation="unsharded"),
    "zero3-unsharded@2": LayoutSettings(shard=2, accumulation="unsharded"),
    "to-two@4": LayoutSettings(shard=4, reshard_to=2, embedding_group=True, head_group=True),
}
#: without the methods of a plug-in, which have no golden losses
OURS = [*(name for name, layout in LAYOUTS.items() if layout.copies == "ddp"), *GROUPED]
SHARDED = {name: LAYOUTS[name] for name in ("zero2@2", "zero3@2", HYBRID)} | GROUPED
#: weights gathered in bf16; gradients are summed in fp32
GATHERED = {name: replace(layout, gather="bf16") for name, layout in SHARDED.items()}
CASES = (
    {(name, "plain"): run_of(layout) for name, layout in {"single": ONE, **LAYOUTS}.items()}
    | {("single", "short"): run_of(ONE)}
    | {
        (n, v): run_of(LAYOUTS.get(n, ONE), **VARIANTS[v])
        for v in VARIANTS
        for n in ("single", *FEW)
    }
    | {("1f1b@4", TIED): run_of(LAYOUTS["1f1b@4"], **VARIANTS[TIED])}
    | {
        (n, p): run_of(LAYOUTS.get(n, ONE), precision=p)
        for p in PRECISIONS
        for n in ("single", *TWO_RANKS, HYBRID, "1f1b-tp@2x2")
    }
    | {(name, "compressed"): run_of(layout) for name, layout in COMPRESSED.items()}
    | {(name, "plain"): run_of(layout) for name, layout in GROUPED.items()}
    | {
        (name, "gathered in bf16"): run_of(layout, precision="bf16")
        for name, layout in GATHERED.items()
    }
)


#: (kind, what is summed over ranks) → largest differences from one process that were measured over
#: all layouts and eight draws of initial weights, on a CPU with AVX-512: losses, norms (relative),
#: weights, and the mean difference of weights as a multiple of what the number format itself
#: changes. Adam's first update is 1e-3, and goes the other way where rounding turns the sign of a
#: gradient near zero. Products are summed over a tensor degree; gradients once a step, or shards of
#: them in every micro-step.
MEASURED = {
    ("bf16", "gradients"): (4.8e-7, 3.8e-6, 3.1e-5, 7.4e-3),
    ("bf16", "shards"): (4.8e-7, 3.8e-6, 3.1e-5, 7.4e-3),
    ("bf16", "products"): (8.4e-5, 2.9e-4, 3.5e-3, 1.0),
    ("bf16-true", "gradients"): (9.7e-5, 2.2e-4, 1.5e-3, 0.077),
    ("bf16-true", "shards"): (9.7e-5, 2.2e-4, 2.0e-3, 0.092),
    ("bf16-true", "products"): (1.4e-4, 4.7e-4, 3.7e-3, 0.23),
    ("compressed", "gradients"): (5.1e-5, 1.9e-4, 1.5e-3, 0.31),
    ("gathered in bf16", "shards"): (2.1e-4, 6.1e-4, 4.0e-3, 1.5),
}
#: multiple of what was measured that a test allows
MARGIN = 3


def compare_rounded(found, expected, variant, name, rounded):
    """Compare within `MARGIN` of what was measured. `rounded`: what the number format itself
    changes on average.
    """
    layout = {**LAYOUTS, **COMPRESSED, **GATHERED}[name]
    summed = "shards" if layout.methods[-1] in ("fsdp", "hsdp") else "gradients"
    if layout.tensor > 1:
        summed = "products"
    losses, norms, weights, share = (MARGIN * value for value in MEASURED[variant, summed])
    compare(found, expected, losses=losses, norms=norms, weights={"atol": weights, "rtol": 0})
    assert distance(found, expected) < share * rounded


def daily(values, chosen, others):
    """Parameters of a test, those that are not chosen with the mark `others`."""
    return [pytest.param(value, marks=() if value in chosen else others) for value in values]


def mark(name, variant, day):
    """A case of `make test`, of the experiments, or of `make long-test`."""
    if day:
        return ()
    if variant == "plain" and name not in REPEATED:
        return pytest.mark.experiment
    return pytest.mark.long


def steps_of_budget(world, run):
    return steps(world, run, run.budget.steps)


@pytest.fixture(scope="module")
def after(request):
    """Case → (losses, norms, weights) after five steps of what is plain, and after two of what else
    may be asked for: the second is the first that goes on from an update. Only cases that a
    selected test names, and one rank.
    """
    chosen = selected(request, "name", "variant")
    cases = {
        case: replace(run, budget=BudgetSettings(steps=5 if case[1] == "plain" else 2))
        for case, run in CASES.items()
        if case[0] == "single" or case in chosen
    }
    found = {}
    for case, ranks in on_ranks(each, cases, steps_of_budget).items():
        losses, norms, _ = ranks[0]
        assert all(rank[:2] == (losses, norms) for rank in ranks), (
            f"ranks of {case} differ in losses or norms"
        )
        found[case] = losses, norms, whole([pieces for _, _, pieces in ranks])
    return found


#: layout and variant: all that is plain, and few layouts of what else a run may ask for. Stages in
#: the middle have no part in a tied embedding
EQUAL = [(name, "plain", name in (*DAILY, "embedding@2")) for name in (*LAYOUTS, *GROUPED)]
EQUAL += [(name, variant, variant in DAILY_VARIANTS) for variant in VARIANTS for name in FEW] + [
    ("1f1b@4", TIED, True)
]


@pytest.mark.parametrize(
    "name, variant",
    [pytest.param(name, variant, marks=mark(name, variant, day)) for name, variant, day in EQUAL],
)
def test_weights_losses_and_norms_after_some_steps_are_those_of_one_process(after, name, variant):
    compare(after[name, variant], after["single", variant])


@pytest.mark.parametrize("variant", ["plain"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=mark(name, "plain", name in (*DAILY, "embedding@2")))
        for name in OURS
    ],
)
def test_losses_of_a_layout_are_the_golden_ones(after, name, variant):
    golden.compare("layouts", {name: after[name, variant][0]}, part=True)


@pytest.mark.parametrize(
    "name", daily([*TWO_RANKS, HYBRID, "1f1b-tp@2x2"], DAILY_PRECISIONS, pytest.mark.long)
)
@pytest.mark.parametrize("variant", PRECISIONS)
def test_sixteen_bits_are_near_those_of_one_process(after, variant, name):
    """A row's products are rounded alike, and autocast sums them over rows in fp32."""
    found = after[name, variant]
    expected = after["single", variant]
    exact = after["single", "short"]
    assert found[0] != exact[0], "it is not fp32"
    compare_rounded(found, expected, variant, name, distance(exact, expected))


@pytest.mark.parametrize("variant", ["compressed"])
@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_gradients_are_near_those_of_one_process(after, name, variant):
    """Of a gradient two or three digits are left, whatever the ranks' rows."""
    found = after[name, variant]
    expected = after["single", "short"]
    compare_rounded(found, expected, variant, name, distance(after["single", "bf16"], expected))
    assert distance(found, expected) > 1e-7, (
        "uncompressed, sums in another order alone come to 3e-10"
    )


@pytest.mark.parametrize("variant", ["gathered in bf16"])
@pytest.mark.parametrize("name", daily(GATHERED, {"zero3@2"}, pytest.mark.long))
def test_weights_gathered_in_bf16_are_near_those_of_one_process(after, name, variant):
    """What is computed is rounded to bf16, norms and residual sums too; weights, gradients and
    moments stay in fp32.
    """
    found = after[name, variant]
    expected = after["single", "bf16"]
    exact = after["single", "short"]
    assert found[0] != after[name, "bf16"][0] if (name, "bf16") in after else found[0] != exact[0]
    compare_rounded(found, expected, variant, name, distance(exact, expected))


def distance(found, expected) -> float:
    apart = [np.abs(found[2][name] - expected[2][name]).ravel() for name in expected[2]]
    return float(np.concatenate(apart).mean())


def test_the_gradient_is_that_of_one_process():
    """7 rows on 2, 3 and 4 ranks: unequal shares, and passes that have no rows on some ranks."""
    ((loss, expected),) = run_ranks(gradients, 1, run_of(micro_batch=8))
    names = (
        "ddp@2",
        "ddp@4",
        "zero1@2",
        "zero2@3",
        "zero3@4",
        HYBRID,
        "tp@4",
        "1f1b@4",
        "1f1b-tp@2x2",
        "1f1b-ddp@2x2",
    )
    cases = {
        (name, rows): run_of(LAYOUTS[name], micro_batch=rows) for name in names for rows in (1, 8)
    }
    for case, ranks in on_ranks(each, cases, gradients).items():
        assert sum(rank_loss for rank_loss, _ in ranks) == pytest.approx(loss, rel=1e-6)
        layout = LAYOUTS[case[0]]
        for copy in range(layout.data):
            its = [
                pieces
                for rank, (_, pieces) in enumerate(ranks)
                if layout.coordinate(rank).data == copy
            ]
            together = whole(its)
            for name, (values, _, _) in expected.items():
                np.testing.assert_allclose(
                    together[name], values, err_msg=f"{case}: {name}", **TOLERANCE
                )


def test_a_bucket_ends_with_the_tensor_that_fills_it(monkeypatch):
    monkeypatch.setattr(sharding, "BUCKET", 4)
    for sizes in itertools.product(range(1, 6), repeat=4):
        tensors = {f"of {size}, {at}": torch.empty(size) for at, size in enumerate(sizes)}
        buckets = sharding.fill_buckets(tensors)
        assert [name for names in buckets for name in names] == list(tensors)
        counts = [[tensors[name].numel() for name in names] for names in buckets]
        assert all(sum(values) >= 4 for values in counts[:-1])
        assert all(sum(values[:-1]) < 4 for values in counts)


def reduce_small(world, mean):
    """(gradients of two, one and three tensors a bucket after their reduction, bytes of each
    all-reduce).
    """
    sharding.BUCKET = 4
    shapes = [(1,), (3,), (2, 3), (1,), (1,), (1,)]
    gradients = {
        str(i): torch.arange(float(np.prod(s))).reshape(s) + 10 * world.rank
        for i, s in enumerate(shapes)
    }
    gradients["2"] = gradients["2"].t()  # not contiguous
    with Exchanges() as counted:
        sharding._all_reduce(
            gradients, sharding.GradReduction((*gradients,), torch.distributed.group.WORLD, mean)
        )
    return [gradient.tolist() for gradient in gradients.values()], [
        size for _, size in counted.sizes
    ]


@pytest.mark.parametrize("mean", [False, True])
def test_small_gradients_share_an_all_reduce_and_each_gets_its_own_sum(mean):
    one, two = run_ranks(reduce_small, 2, mean)
    by = 2 if mean else 1
    long = [[(2 * k + 10) / by for k in row] for row in ((0, 3), (1, 4), (2, 5))]
    expected = [[10 / by], [10 / by, 12 / by, 14 / by], long, *[[10 / by]] * 3]
    assert one == two == (expected, [16, 24, 12])


def gradients_in_buckets(world, run):
    """As they come, and with all gradients of 1 and of 1000 values on sent alone."""
    found = []
    for values in (ddp.BUCKET, 1, 1000):
        ddp.BUCKET = values
        found.append(gradients(world, run))
    return found


def test_scattered_rows_are_the_same_from_a_copy_and_from_where_they_lie():
    """From so many values on a gradient whose rows divide is sent alone, without a copy."""
    cases = {name: run_of(LAYOUTS[name]) for name in ("zero1@2", "zero1@3", "1f1b-zero1@2x2")}
    for ranks in on_ranks(each, cases, gradients_in_buckets).values():
        for (loss, mine), *others in ranks:
            for same_loss, same in others:
                assert loss == same_loss and mine.keys() == same.keys()
                for name in mine:
                    np.testing.assert_allclose(same[name][0], mine[name][0], **TOLERANCE)


#: values of a bucket → how many collectives there are at most
BUCKETS = {1 << 25: 1, 20_000: 4, 1000: 30}


def gathered(world, run):
    """(operation → times, largest in values, whether each weight is the whole updated one) of
    ZeRO-1's gathering, for buckets of each size.
    """
    found = []
    for ddp.BUCKET in BUCKETS:
        sharding.BUCKET = ddp.BUCKET
        trainer = trainer_of(run, world)
        before = {
            name: weight.detach().clone() for name, weight in trainer.model.named_parameters()
        }
        for tensor in trainer.shards.tensors:
            tensor += 1
        with Exchanges() as counted:
            trainer.shards.all_gather_parameters()
        right = all(
            torch.equal(weight, before[name] + 1)
            for name, weight in trainer.model.named_parameters()
        )
        found.append((counted.counts, max(size for _, size in counted.sizes) / 4, right))
    return found


def test_updated_rows_are_gathered_in_buckets():
    """39 parameters, of which 2 and 3 ranks share some unequally; from 1000 values on those that
    divide go alone.
    """
    cases = {name: run_of(LAYOUTS[name]) for name in ("zero1@2", "zero1@3", "tp-zero1@2x2")}
    largest = SHAPE.vocabulary_size * SHAPE.dimension
    for name, ranks in on_ranks(each, cases, gathered).items():
        for found in ranks:
            for (limit, most), (counts, values, right) in zip(BUCKETS.items(), found, strict=True):
                assert right and counts.keys() == {"allgather_base"}, (name, counts)
                assert counts["allgather_base"] <= most and values <= 1.1 * (limit + largest), (
                    name,
                    counts,
                )


def order_of(world, run):
    """(operation, bytes) of the collectives of one micro-step, in order."""
    trainer = trainer_of(run, world)
    with Exchanges() as counted:
        differentiate(trainer.parallel, 0, run.micro_batch, world, run.layout)
    return counted.sizes


def test_a_head_in_its_own_group_is_gathered_last_and_reduced_first():
    """Otherwise the first block waits for its weights, and the last reduction has its gradient."""
    layouts = {
        "with the rest": LayoutSettings(shard=2),
        "for itself": LayoutSettings(shard=2, head_group=True),
    }
    cases = {name: run_of(layout, **EVEN) for name, layout in layouts.items()}
    head = 4 * cases["for itself"].model.dimension * EVEN["model"].vocabulary_size
    for name, ranks in on_ranks(each, cases, order_of).items():
        gathered = [size for operation, size in ranks[0] if operation == "all_gather"]
        reduced = [size for operation, size in ranks[0] if operation == "reduce_scatter"]
        if name == "for itself":  # the rest and four blocks before it
            assert gathered.index(head) == 5 and reduced[0] == head
        else:
            assert gathered[0] > head and head not in gathered and reduced[-1] > head


def bytes_held(world, run):
    trainer = trainer_of(run, world)
    (batch, useful) = batch_of(0, world, run.layout)
    probe = Probe(trainer.model, world.device, run, trainer.shards.held_gradients)
    trainer.step(batch, useful, 1e-3, HostTimer(), probe)
    return {key: probe.bytes[f"{key}_bytes"] for key in ("parameters", "gradients", "optimizer")}


def test_a_rank_holds_its_share_and_no_more():
    """Bytes: 4 a weight, 4 a gradient, 8 for Adam's moments; a half at two ranks, up to the rows
    that do not divide.
    """
    half = (0.5, 0.5, 0.5)
    shares = {"zero1@2": (1, 1, 0.5), "zero2@2": half, "zero3@2": half, "tp@2": half}
    found = on_ranks(
        each, {name: run_of(LAYOUTS.get(name, ONE)) for name in ("single", *shares)}, bytes_held
    )
    (all_of_it,) = found.pop("single")
    for name, ranks in found.items():
        for rank in ranks:
            for (kind, size), share in zip(rank.items(), shares[name], strict=True):
                assert size / all_of_it[kind] == pytest.approx(share, rel=0.02), (name, kind)


def gradients_left(world, run):
    """(share of parameters, number of their rows that this rank updates) with a gradient after a
    step; all are zero.
    """
    trainer = trainer_of(run, world)
    trainer.step(*batch_of(0, world, run.layout), 1e-3, HostTimer())
    gradients = [weight.grad for weight in trainer.model.parameters()]
    left = [gradient for gradient in gradients if gradient is not None]
    assert not any(gradient.any() for gradient in left)
    rows = [tensor.grad for tensor in trainer.shards.tensors if not tensor.requires_grad]
    return len(left) / len(gradients), sum(gradient is not None for gradient in rows)


def test_gradients_in_buckets_alone_stay_from_step_to_step():
    """New ones would stand beside the buckets; all others are given back."""
    expected = {"single": (0, 0), "ddp@2": (1, 0), "zero1@2": (1, 0), "zero2@2": (0, 0)}
    cases = {name: run_of(LAYOUTS.get(name, ONE)) for name in expected}
    for name, ranks in on_ranks(each, cases, gradients_left).items():
        assert set(ranks) == {expected[name]}, name
