"""Each rank makes its own parts of the weights: those of one process to the last bit, and no memory
for others.
"""

import numpy as np
import pytest

from tests.distributed import parity
from tests.distributed.parity import (
    GPT2_PARTS,
    HYBRID,
    LAYOUTS,
    ONE,
    each,
    held,
    on_ranks,
    run_of,
    trainer_of,
    whole,
)
from tests.distributed.ranks import run_ranks
from tokenscale.referee.accounting import plan_phases
from tokenscale.settings.registry import OBJECTIVES
from tokenscale.train import trainer as engine
from tokenscale.train.collectives import local
from tokenscale.train.fake_world import LiveBytes
from tokenscale.train.models import initial_values
from tokenscale.train.models.build import objective_of

pytestmark = pytest.mark.distributed
VARIANTS = {
    "plain": {},
    "GPT-2's parts": {"model": GPT2_PARTS},
    "bf16-true": {"precision": "bf16-true"},
}
#: what `make test` compares: an uneven share, parts of rows, and two methods at once. The rest is long
DAILY = {"ddp@2", "zero1@2", "zero2@2", "tp@2", "interleaved@2", HYBRID, "zero3@3", "1f1b-tp@2x2"}
FEW = {"zero3@3", "1f1b-tp@2x2", "naive@2"}
#: layouts of four ranks that hold a part of the weights each → the largest part. A stage has an
#: embedding or a head, and shares of 97 rows are uneven
PARTS = {
    "zero3@4": 0.27,
    "tp@4": 0.27,
    "1f1b@4": 0.30,
    "1f1b-zero3@2x2": 0.28,
    "tp-zero3@2x2": 0.27,
}
#: work on a few hundred values at a time, and what FSDP and AdamW make of small things
WORK_BYTES = 25_000


def initial_of(world, run):
    """What this rank holds, its modules, and whether it exchanges gradients behind backward."""
    trainer = trainer_of(run, world)
    waits = trainer.shards.reduces_after_backward or bool(trainer.parallel.bucket_listener)
    return held(trainer), modules_of(trainer), waits


def peak_of(world, run):
    """The bytes that this rank's modules hold, and the most that there were."""
    initial_values.CHUNK = 512  # in this fork alone
    with LiveBytes() as live:
        trainer = trainer_of(run, world)
    return sum(values.nbytes for values in modules_of(trainer).values()), live.peak


def modules_of(trainer):
    return {
        "model." + n: local(w).detach().float().numpy() for n, w in trainer.model.named_parameters()
    }


@pytest.fixture(scope="module")
def initial(request):
    """(layout, variant) → what its ranks found, for the selected tests and for one process."""
    chosen = parity.selected(request, "name", "variant") | {
        ("single", variant) for variant in VARIANTS
    }
    cases = {
        (name, variant): run_of(LAYOUTS.get(name, ONE), **VARIANTS[variant])
        for name, variant in sorted(chosen)
    }
    return on_ranks(each, cases, initial_of)


def marked(name, variant):
    """Parameters of a test; what `make test` leaves to `make long-test` is marked."""
    daily = name in (DAILY if variant == "plain" else FEW)
    return pytest.param(name, variant, marks=() if daily else pytest.mark.long)


@pytest.mark.parametrize(
    "name, variant", [marked(name, variant) for variant in VARIANTS for name in LAYOUTS]
)
def test_initial_weights_are_those_of_one_process_to_the_last_bit(initial, name, variant):
    ((expected, _, _),) = initial["single", variant]
    ranks = initial[name, variant]
    found = whole([pieces for pieces, _, _ in ranks])
    assert found.keys() == expected.keys()
    for key, (values, _, _) in expected.items():
        assert values.ndim == 1 or values.std() > 0
        np.testing.assert_array_equal(found[key], values, err_msg=key)
        for _, modules, _ in ranks:  # what this rank leaves another one to write
            if key in modules and modules[key].shape == values.shape:
                np.testing.assert_array_equal(modules[key], values, err_msg=key)


@pytest.mark.parametrize(
    "name, variant", [marked(name, variant) for variant in VARIANTS for name in LAYOUTS]
)
def test_ranks_exchange_gradients_only_where_the_accounting_of_seconds_plans_it(
    initial, name, variant
):
    planned = plan_phases(run_of(LAYOUTS[name], **VARIANTS[variant]))
    exchanges = any(waits for _, _, waits in initial[name, variant])
    assert planned["exposed_communication_s"] >= exchanges


def test_no_rank_has_memory_for_more_than_its_part():
    """All tensors that exist at one time while a rank sets up, not only those that are left."""
    layouts = {"single": ONE, **{name: LAYOUTS[name] for name in PARTS}}
    found = on_ranks(each, {name: run_of(layout) for name, layout in layouts.items()}, peak_of)
    (((total, _),)) = found.pop("single")
    for name, ranks in found.items():
        for mine, peak in ranks:
            assert mine <= PARTS[name] * total and mine <= peak, name
            assert peak < mine + WORK_BYTES < total / 2, (
                f"{name}: {peak:,} bytes for {mine:,} of {total:,}"
            )


@pytest.mark.parametrize("unset", [False, True])
def test_an_objective_that_needs_the_whole_model_finds_initial_weights(unset):
    """DPO copies them as its reference, also in a run that loads a state."""
    expected = run_ranks(initial_of, 1, run_of())[0][1]
    (found,) = run_ranks(weights_when_an_objective_is_made, 1, unset)
    assert found.keys() <= {name.removeprefix("model.") for name in expected} and found
    for name, values in found.items():
        np.testing.assert_array_equal(values, expected[f"model.{name}"])


def weights_when_an_objective_is_made(world, unset):
    found = {}

    def keep(name, model, **options):
        found.update({n: w.detach().numpy().copy() for n, w in model.named_parameters()})
        return objective_of(name, model, **options)

    engine.objective_of = keep  # in this fork alone; so the next
    OBJECTIVES["causal"] = OBJECTIVES["causal"]._replace(whole_model=True)
    run = run_of()
    engine.Trainer(run, run.model, world, "sdpa", unset=unset)
    return found
