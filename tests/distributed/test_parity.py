"""Every layout computes what one process computes: gradients, weights after some steps, and runs that change layout.

Everything goes through the engine, as in a training; what ranks hold is put together from what they would write into a
checkpoint, so that a row that nobody owns, or two do with unequal values, is seen.
"""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.corpora import Lab, make_run
from tests.distributed.ranks import run_ranks
from tests.distributed.test_data_parallel import GLOBAL_BATCH, LENGTH, differentiate, my_batch
from tokenscale.files import read_json
from tokenscale.order.digest import MODULUS
from tokenscale.parallel.world import World
from tokenscale.records.provenance import sealed
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import (
    BudgetSettings,
    CheckpointSettings,
    OptimizerSettings,
    RunSettings,
    ScheduleSettings,
    ValidationSettings,
)
from tokenscale.training.checkpoint import Checkpoint, State, commit, write_rank
from tokenscale.training.engine import Engine
from tokenscale.training.loop import Inputs, train
from tokenscale.training.memory import Probe
from tokenscale.training.timing import HostTimer

pytestmark = pytest.mark.distributed
#: 97 entries, which 2, 3 and 4 ranks share unequally, and 92 hidden units, which 3 do
SHAPE = replace(PRESETS["llama-micro"], hidden=92, layers=4, heads=4, key_value_heads=4).with_vocabulary(97)
ONE = LayoutSettings()
LAYOUTS = {
    f"{sharding}@{ranks}": LayoutSettings(shard=ranks, sharding=sharding)
    for sharding in ("zero1", "zero2", "zero3")
    for ranks in (2, 3, 4)
} | {
    "hsdp-zero2@2x2": LayoutSettings(data=2, shard=2, sharding="zero2"),
    "hsdp-zero3@2x2": LayoutSettings(data=2, shard=2),
    "tp@2": LayoutSettings(tensor=2),
    "tp@4": LayoutSettings(tensor=4),
    "tp-ddp@2x2": LayoutSettings(tensor=2, data=2),
    "tp-zero1@2x2": LayoutSettings(tensor=2, shard=2, sharding="zero1"),
    "tp-zero2@2x2": LayoutSettings(tensor=2, shard=2, sharding="zero2"),
    "tp-zero3@2x2": LayoutSettings(tensor=2, shard=2),
    "naive@2": LayoutSettings(pipeline=2, schedule="naive"),
    "naive@4": LayoutSettings(pipeline=4, schedule="naive"),
    "gpipe@2": LayoutSettings(pipeline=2, schedule="gpipe"),
    "gpipe@4": LayoutSettings(pipeline=4, schedule="gpipe"),
    "1f1b@2": LayoutSettings(pipeline=2),
    "1f1b@4": LayoutSettings(pipeline=4),
    "interleaved@2": LayoutSettings(pipeline=2, schedule="interleaved", stages_per_rank=2),
    "zero-bubble@2": LayoutSettings(pipeline=2, schedule="zero-bubble"),
    "zero-bubble@4": LayoutSettings(pipeline=4, schedule="zero-bubble"),
    "zero-bubble-tp@2x2": LayoutSettings(pipeline=2, tensor=2, schedule="zero-bubble"),
    "zero-bubble-ddp@2x2": LayoutSettings(pipeline=2, data=2, schedule="zero-bubble"),
    "1f1b-tp@2x2": LayoutSettings(pipeline=2, tensor=2),
    "1f1b-ddp@2x2": LayoutSettings(pipeline=2, data=2),
    "1f1b-zero1@2x2": LayoutSettings(pipeline=2, shard=2, sharding="zero1"),
    "1f1b-zero2@2x2": LayoutSettings(pipeline=2, shard=2, sharding="zero2"),
    "1f1b-zero3@2x2": LayoutSettings(pipeline=2, shard=2),
    "interleaved-zero2@2x2": LayoutSettings(
        pipeline=2, shard=2, sharding="zero2", schedule="interleaved", stages_per_rank=2
    ),
    "gpipe-tp@2x2": LayoutSettings(pipeline=2, tensor=2, schedule="gpipe"),
}
HYBRID = "hsdp-zero3@2x2"
TWO_RANKS = [name for name in LAYOUTS if name.endswith("@2")]
#: fp32: sums run in another order
TOLERANCE = {"atol": 2e-7, "rtol": 2e-5}
#: after five steps: Adam divides by the root of the squared gradient, and rounding grows where gradients are near zero
AFTER_STEPS = {"atol": 1e-5, "rtol": 1e-4}


def run_of(layout=ONE, **changes) -> RunSettings:
    """Two micro-steps at two ranks, of which one has fewer rows; a clipping that bites in each step."""
    settings = {
        "model": SHAPE,
        "sequence_length": LENGTH,
        "global_batch": GLOBAL_BATCH,
        "micro_batch": 2,
        "layout": layout,
        "optimizer": OptimizerSettings(learning_rate=1e-3, clip_norm=0.5),
    }
    return RunSettings(**(settings | changes))


def engine_of(run, world) -> Engine:
    return Engine(run, run.model, world, "sdpa")


def held(engine, resume=False):
    """Name → (values, offsets, whole) of what this rank writes."""
    pieces = engine.pieces(resume=resume)
    return {n: (p.tensor.detach().float().numpy().copy(), p.offsets, p.whole) for n, p in pieces.items()}


def whole(ranks):
    """The tensors that all ranks' pieces make; each element has one owner."""
    found, owners = {}, {}
    for pieces in ranks:
        for name, (values, offsets, shape) in pieces.items():
            place = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            found.setdefault(name, np.zeros(shape, np.float32))[place] = values
            owners.setdefault(name, np.zeros(shape, int))[place] += 1
    for name, counts in owners.items():
        assert (counts == 1).all(), f"{name} has elements with {counts.min()} or {counts.max()} owners"
    return found


def batch_of(step, world, layout):
    """(this rank's rows, useful tokens of the global batch)."""
    place = layout.place(world.rank)
    batch = my_batch(step, place.reader, layout.readers)
    return batch, torch.tensor(float(world.sum(batch.useful_tokens * place.counts)[0]))


def gradients(world, run):
    engine = engine_of(run, world)
    loss = differentiate(engine.objective, 0, run.micro_batch, world, run.layout)
    engine.parts.take_gradients()
    return loss.item(), {n: (p.tensor.grad.float().numpy(), p.offsets, p.whole) for n, p in engine.parts.of.items()}


def steps(world, run, count=5):
    """(losses a useful token, norms before clipping, what this rank holds) after some steps of the engine."""
    engine, losses, norms = engine_of(run, world), [], []
    for step in range(count):
        batch, useful = batch_of(step, world, run.layout)
        done = engine.step(batch, useful, 1e-3, HostTimer())
        losses.append(world.sum(done.loss_sum.item() * engine.mesh.place.counts)[0] / useful.item())
        norms.append(done.norm.item())
        assert done.norm_clipped.item() < 0.51 < done.norm.item(), "the clipping bites"
    return losses, norms, held(engine)


VARIANTS = {
    "GPT-2's parts": {
        "model": replace(
            SHAPE, norm="layer", positions="learned", activation="gelu", biases=True, tied_embeddings=True
        ).with_positions(LENGTH)
    },
    "grouped queries": {"model": replace(SHAPE, key_value_heads=2)},
    "chunked loss": {"loss_chunk": 5},
    "chunked loss of tied embeddings, blocks computed again": {
        "model": replace(SHAPE, tied_embeddings=True),
        "loss_chunk": 5,
        "activation_checkpointing": "block",
    },
    "products kept, the rest computed again": {"activation_checkpointing": "selective"},
    "update without the fused kernel": {"optimizer": OptimizerSettings(learning_rate=1e-3, clip_norm=0.5, fused=False)},
}


PRECISIONS = ("bf16", "bf16-true")
FEW = (
    "zero1@2",
    "zero2@2",
    "zero3@3",
    "tp@2",
    "1f1b@2",
    "interleaved@2",
    "zero-bubble@2",
    "1f1b-tp@2x2",
    "1f1b-zero2@2x2",
)
CASES = (
    {(name, "plain"): run_of(layout) for name, layout in {"single": ONE, **LAYOUTS}.items()}
    | {(n, v): run_of(LAYOUTS.get(n, ONE), **VARIANTS[v]) for v in VARIANTS for n in ("single", *FEW)}
    | {
        (n, p): run_of(LAYOUTS.get(n, ONE), precision=p)
        for p in PRECISIONS
        for n in ("single", *TWO_RANKS, HYBRID, "1f1b-tp@2x2")
    }
)


def steps_of_each(world, runs):
    return [steps(world, run) for run in runs]


def on_ranks(function, cases, *arguments):
    """Case → what each of its ranks returned, in rank order. Ranks are started once for all cases of a world size."""
    found = {}
    for size in sorted({run.layout.world_size for run in cases.values()}):
        mine = {name: run for name, run in cases.items() if run.layout.world_size == size}
        ranks = run_ranks(function, size, list(mine.values()), *arguments)
        found |= dict(zip(mine, zip(*ranks, strict=True), strict=True))
    return found


@pytest.fixture(scope="module")
def after():
    """Case → (losses, norms, weights) after five steps."""
    found = {}
    for case, ranks in on_ranks(steps_of_each, CASES).items():
        losses, norms, _ = ranks[0]
        assert all(rank[:2] == (losses, norms) for rank in ranks), f"ranks of {case} differ in losses or norms"
        found[case] = losses, norms, whole([pieces for _, _, pieces in ranks])
    return found


def compare(found, expected, *, losses=1e-6, norms=1e-4, weights=AFTER_STEPS):
    assert found[0] == pytest.approx(expected[0], abs=losses)
    assert found[1] == pytest.approx(expected[1], rel=norms)
    assert found[2].keys() == expected[2].keys()
    for name in expected[2]:
        np.testing.assert_allclose(found[2][name], expected[2][name], err_msg=name, **weights)


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_losses_and_norms_after_five_steps_are_those_of_one_process(after, name):
    compare(after[name, "plain"], after["single", "plain"])


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_else_a_run_may_ask_for_changes_nothing(after, variant, name):
    compare(after[name, variant], after["single", variant])


@pytest.mark.parametrize("name", [*TWO_RANKS, HYBRID, "1f1b-tp@2x2"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sixteen_bits_are_near_those_of_one_process(after, precision, name):
    """A row's products are rounded alike, and autocast sums them over rows in fp32. Gradients in bf16 are rounded when
    they are summed over ranks, and with a tensor degree so are parts of products: an update of Adam is 1e-3 at most,
    and some go the other way where a gradient is near zero. On average that must stay within what the number format
    itself changes: the distance of one process to itself in fp32."""
    found, expected, exact = after[name, precision], after["single", precision], after["single", "plain"]
    assert found[0] != exact[0], "it is not fp32"
    if precision == "bf16" and LAYOUTS[name].tensor == 1:
        compare(found, expected, weights={"atol": 1e-5, "rtol": 1e-4})
    else:
        compare(found, expected, losses=3e-4, norms=2e-3, weights={"atol": 1e-2, "rtol": 0})
        assert distance(found, expected) < 1.5 * distance(exact, expected)


def distance(found, expected) -> float:
    """Mean absolute difference of all weights."""
    apart = [np.abs(found[2][name] - expected[2][name]).ravel() for name in expected[2]]
    return float(np.concatenate(apart).mean())


def gradients_of_each(world, runs):
    return [gradients(world, run) for run in runs]


@pytest.mark.parametrize("micro_batch", [1, 8])
def test_the_gradient_is_that_of_one_process(micro_batch):
    """7 rows on 2, 3 and 4 ranks: unequal shares, and passes that have no rows on some ranks."""
    ((loss, expected),) = run_ranks(gradients, 1, run_of(micro_batch=8))
    cases = {n: run_of(LAYOUTS[n], micro_batch=micro_batch) for n in ("zero1@2", "zero2@3", "zero3@4", HYBRID)}
    for case, ranks in on_ranks(gradients_of_each, cases).items():
        assert sum(rank_loss for rank_loss, _ in ranks) == pytest.approx(loss, rel=1e-6)
        shard = LAYOUTS[case].shard
        for first in range(0, len(ranks), shard):
            together = whole([pieces for _, pieces in ranks[first : first + shard]])
            for name, (values, _, _) in expected.items():
                np.testing.assert_allclose(together[name], values, err_msg=f"{case}: {name}", **TOLERANCE)


def mislaid(world, run):
    """Ranks that take each other's rows of the gradient: the mistake of a shuffled shard."""
    engine = engine_of(run, world)
    differentiate(engine.objective, 0, 8, world, run.layout)
    for weight in engine.model.parameters():
        weight.grad = torch.flip(weight.grad, [0])
    engine.parts.take_gradients()
    return {n: (p.tensor.grad.float().numpy(), p.offsets, p.whole) for n, p in engine.parts.of.items()}


def test_this_suite_sees_a_shard_that_is_shuffled():
    """A test of the tests."""
    ((_, expected),) = run_ranks(gradients, 1, run_of(micro_batch=8))
    found = whole(run_ranks(mislaid, 2, run_of(LAYOUTS["zero1@2"])))
    values = expected["blocks.0.attention.query.weight"][0]
    assert not np.allclose(found["blocks.0.attention.query.weight"], values, **TOLERANCE)


class Exchanges(TorchDispatchMode):
    """Counts what the operations of torch.distributed are called with: (operation) → times."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function._opname.strip("_")
            self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def exchanges_of_each(world, runs):
    """Operation → times, in the backward passes of one step, for each run."""
    found = []
    for run in runs:
        engine = engine_of(run, world)
        # the first pass finds out about the module
        differentiate(engine.objective, 0, run.micro_batch, world, run.layout)
        engine.model.zero_grad(set_to_none=True)
        with Exchanges() as counted:
            differentiate(engine.objective, 0, run.micro_batch, world, run.layout)
        found.append(counted.counts)
    return found


def test_gradients_are_exchanged_once_a_step_and_weights_as_often_as_they_are_given_back():
    """4 micro-steps, four blocks and the rest. zero2 gathers the five once; zero3 the blocks twice in each micro-step,
    and the rest once in each."""
    cases = {name: run_of(LAYOUTS[name], micro_batch=1) for name in ("zero2@2", "zero3@2")}
    gathered = {"zero2@2": 5, "zero3@2": 4 * (2 * 4 + 1)}
    for name, ranks in on_ranks(exchanges_of_each, cases).items():
        expected = {"allgather_base": gathered[name], "reduce_scatter_base": 5, "allreduce": 1}  # of the useful tokens
        assert ranks == (expected, expected), name


def bytes_held(world, runs):
    return [bytes_of(world, run) for run in runs]


def bytes_of(world, run):
    engine, (batch, useful) = engine_of(run, world), batch_of(0, world, run.layout)
    probe = Probe(engine.model, world.device, compiled=False)
    engine.step(batch, useful, 1e-3, HostTimer(), probe)
    return {key: probe.bytes[f"{key}_bytes"] for key in ("parameters", "gradients", "optimizer")}


def test_a_rank_holds_its_share_and_no_more():
    """Bytes: 4 a weight, 4 a gradient, 8 for Adam's moments; a half at two ranks, up to the rows that do not divide."""
    half = (0.5, 0.5, 0.5)
    shares = {"zero1@2": (1, 1, 0.5), "zero2@2": half, "zero3@2": half, "tp@2": half}
    found = on_ranks(bytes_held, {name: run_of(LAYOUTS.get(name, ONE)) for name in ("single", *shares)})
    (all_of_it,) = found.pop("single")
    for name, ranks in found.items():
        for rank in ranks:
            for (kind, size), share in zip(rank.items(), shares[name], strict=True):
                assert size / all_of_it[kind] == pytest.approx(share, rel=0.02), (name, kind)


def write_seeds(world, runs, folder):
    return [write_seed(world, run, folder / run.layout.method) for run in runs]


def write_seed(world, run, folder):
    """A resume state after two steps, written by these ranks; and what it holds."""
    engine = engine_of(run, world)
    for step in range(2):
        engine.step(*batch_of(step, world, run.layout), 1e-3, HostTimer())
    write_rank(folder, world.rank, State(engine.pieces(resume=True)))
    if world.rank == 0:
        commit(folder, world.size, {})
    world.barrier()
    return held(engine, resume=True)


def read_seeds(world, runs, folders):
    return [{folder.name: read_seed(world, run, folder) for folder in folders} for run in runs]


def read_seed(world, run, folder):
    """What this rank holds after loading; and with ZeRO-1, all weights."""
    engine = engine_of(replace(run, seed=5), world)
    engine.load(Checkpoint(folder))
    weights = engine.model.named_parameters() if run.layout.sharding == "zero1" else ()
    return held(engine, resume=True), {name: weight.detach().numpy() for name, weight in weights}


def test_a_checkpoint_of_one_layout_loads_in_every_other_to_the_last_bit(tmp_path):
    layouts = {"single": ONE} | {name: LAYOUTS[name] for name in ("zero1@3", "zero3@2", HYBRID)}
    written = on_ranks(write_seeds, {name: run_of(layout) for name, layout in layouts.items()}, tmp_path)
    written = {layouts[name].method: whole(ranks) for name, ranks in written.items()}
    folders = [tmp_path / method for method in written]
    names = ("single", "ddp@2", "zero1@2", "zero2@4", "zero3@3", HYBRID)
    readers = {n: run_of({"single": ONE, "ddp@2": LayoutSettings(data=2), **LAYOUTS}[n]) for n in names}
    for reader, ranks in on_ranks(read_seeds, readers, folders).items():
        for writer, expected in written.items():
            together = whole([found[writer][0] for found in ranks])
            assert together.keys() == expected.keys() and any("exp_avg_sq" in name for name in expected)
            for name, values in expected.items():
                np.testing.assert_array_equal(together[name], values, err_msg=f"{writer} → {reader}: {name}")
            for found in ranks:
                for name, values in found[writer][1].items():
                    np.testing.assert_array_equal(values, expected["model." + name], err_msg=f"{writer}: {name}")


WORDS = "the loss of a model falls when it reads what it has read before and then some more of it".split()
STEPS = 12


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    pick = random.Random(0)
    texts = [" ".join(pick.choices(WORDS, k=pick.choice([0, 3, 10, 30, 200]))) for _ in range(120)]
    return Lab(tmp_path_factory.mktemp("lab"), texts, validation_share=0.2)


def training_of(layout, resume_from=None) -> RunSettings:
    """Validation of 5 rows in passes of 2: ranks with unequal numbers of rows, one of them with a pass too few."""
    return replace(
        make_run("packed", 32),
        model=PRESETS["llama-micro"],
        global_batch=6,
        micro_batch=1,
        layout=layout,
        budget=BudgetSettings(steps=STEPS),
        schedule=ScheduleSettings(warmup_steps=2),
        optimizer=OptimizerSettings(learning_rate=3e-3),
        validation=ValidationSettings(rows=5, every=6),
        checkpoints=CheckpointSettings(every=3, keep_last=9, keep_resume_state=True, final=True),
        resume_from=resume_from,
    )


def one_rank(world: World, run, inputs, directory):
    train(run, inputs, directory, world)


def trained(lab, directory, run):
    """(step → (loss, digest), validation losses) of a whole training."""
    inputs = Inputs(lab.corpus, lab.tokenizer, lab.store(run.store), lab.store(run.validation_store))
    run_ranks(one_rank, run.layout.world_size, run, inputs, directory)
    assert sealed(directory / "run.json")["outcome"]["status"] == "complete"
    found: dict[int, list] = {}
    for path in directory.glob("attempt=00/rank=*/steps.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            loss, useful, digest = found.get(line["step"], (0, 0, 0))
            digest = (digest + line["order_digest"]) % MODULUS
            found[line["step"]] = (loss + line["loss_sum"], useful + line["useful_tokens"], digest)
    events = map(json.loads, (directory / "attempt=00/rank=00000/events.jsonl").read_text().splitlines())
    held_out = {e["step"]: e["loss_sum"] / e["useful_tokens"] for e in events if e["event"] == "validation"}
    return {k: (loss / useful, digest) for k, (loss, useful, digest) in sorted(found.items())}, held_out


def test_a_run_goes_on_in_other_layouts_with_the_same_samples_and_losses(lab, tmp_path):
    expected, held_out = trained(lab, tmp_path / "whole", training_of(ONE))
    assert list(expected) == list(range(STEPS))
    before = None
    for begins, layout in {
        0: LAYOUTS["zero3@2"],
        3: ONE,
        6: LayoutSettings(data=2),
        9: LAYOUTS["hsdp-zero3@2x2"],
    }.items():
        directory = tmp_path / f"{layout.method}-{layout.world_size}"
        found, validation = trained(lab, directory, training_of(layout, before and str(before)))
        assert list(found) == list(range(begins, STEPS))
        for step, (loss, digest) in found.items():
            assert digest == expected[step][1], f"{layout.method} reads other samples in step {step}"
            assert loss == pytest.approx(expected[step][0], abs=1e-5), (layout.method, step)
        assert validation[STEPS] == pytest.approx(held_out[STEPS], abs=1e-5)
        before = directory / f"checkpoints/step={begins + 3:08d}"
    assert read_json(tmp_path / "hsdp-4/checkpoints/final/checkpoint.json")["world_size"] == 4
    weights = {n: Checkpoint(tmp_path / d / "checkpoints/final") for n, d in (("one", "whole"), ("four", "hsdp-4"))}
    for name in weights["one"].names():
        torch.testing.assert_close(weights["four"].tensor(name), weights["one"].tensor(name), atol=2e-4, rtol=1e-3)
