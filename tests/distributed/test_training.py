"""Whole trainings: every approach at world sizes 1, 2 and 4 reads the same data and follows the
same loss.
"""

import json
from functools import cache

import numpy as np
import pytest

from tests import logs
from tests.corpora import small_run, words_lab
from tests.distributed.ranks import run_ranks, train_rank
from tokenscale.data.stores.manifest import open_store
from tokenscale.data.stores.packed import PackedStore
from tokenscale.runs.records.provenance import read_sealed
from tokenscale.settings.run import (
    APPROACHES,
    BudgetSettings,
    OptimizerSettings,
    ScheduleSettings,
    ValidationSettings,
)

pytestmark = [pytest.mark.slow(25), pytest.mark.distributed]
STEPS = 8


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return words_lab(tmp_path_factory.mktemp("lab"), 150)


def run_of(approach="packed", world_size=1, **changes):
    return small_run(
        approach, world_size, STEPS, **{"validation": ValidationSettings(rows=6, every=4)} | changes
    )


def slice_of(lab, run):
    """[useful labels, rows] of the held-out slice, read as one process."""
    directory = lab.store(run.validation_store)
    store = PackedStore(directory, open_store(directory, run.validation_store, requested_by="test"))
    labels = store.rows(np.arange(run.validation.rows))[1]
    return [int((labels >= 0).sum()), run.validation.rows]


def trained(lab, directory, run):
    """Train, and read back (losses by step, digests by step, validation losses)."""
    run_ranks(train_rank, run.layout.world_size, run, lab.inputs(run), directory)
    steps = logs.read_steps(directory).values()
    assert [step["rows"] for step in steps] == [run.global_batch] * STEPS
    events = map(
        json.loads, (directory / "attempt=00/rank=00000/events.jsonl").read_text().splitlines()
    )
    held_out = [e for e in events if e["event"] == "validation"]
    slices = {json.dumps([e["useful_tokens"], e["rows"]]) for e in held_out}
    assert slices == {json.dumps(slice_of(lab, run))}, "every rank's rows count once"
    validation = [e["loss_sum"] / e["useful_tokens"] for e in held_out]
    assert read_sealed(directory / "run.json")["outcome"]["status"] == "complete"
    # a batch of the shortest documents alone may hold nothing to learn from
    losses = [step["loss_sum"] / max(step["useful_tokens"], 1) for step in steps]
    return losses, [step["order_digest"] for step in steps], validation


@pytest.fixture(scope="module")
def alone(lab, tmp_path_factory):
    """Approach → its training on one rank, which several tests compare others with."""
    return cache(lambda approach: trained(lab, tmp_path_factory.mktemp("alone"), run_of(approach)))


@pytest.mark.parametrize("approach", APPROACHES)
def test_every_world_size_trains_on_the_same_data_to_the_same_loss(lab, alone, tmp_path, approach):
    """fp32; sums run in another order, and Adam magnifies rounding: 1e-5 nats after eight steps."""
    losses, digests, validation = alone(approach)
    assert len(validation) == 3 and validation[-1] < validation[0] - 0.2, "the model learns"
    # tests of batches go to 16
    for world_size in (2, 4) if approach in ("packed", "padding-free") else (2,):
        others = trained(lab, tmp_path / str(world_size), run_of(approach, world_size))
        assert others[1] == digests
        assert others[0] == pytest.approx(losses, abs=1e-5)
        assert others[2] == pytest.approx(validation, abs=1e-5)


@pytest.mark.parametrize(
    "online, offline", [("padded", "pretokenized-padded"), ("padding-free", "token-list")]
)
def test_tokenizing_beforehand_changes_no_bit_of_the_loss(alone, online, offline):
    assert alone(online) == alone(offline)


@pytest.mark.parametrize("approach", ["packed", "padding-free"])
def test_the_same_run_reading_ahead_is_the_same_to_the_last_bit(lab, alone, tmp_path, approach):
    assert trained(lab, tmp_path, run_of(approach, prefetch=True)) == alone(approach)


def test_a_repeat_has_other_weights_and_another_order(lab, alone, tmp_path):
    one = alone("packed")
    two = trained(lab, tmp_path, run_of(repeat=1))
    assert all(a != b for a, b in zip(one[1], two[1], strict=True)) and one[2][0] != two[2][0]


def test_a_run_that_diverges_stops_on_all_ranks_and_names_the_batch(lab, tmp_path):
    run = run_of(world_size=2, optimizer=OptimizerSettings(learning_rate=1e30, clip_norm=None))
    run_ranks(train_rank, 2, run, lab.inputs(run), tmp_path)
    outcome = read_sealed(tmp_path / "run.json")["outcome"]
    assert outcome["status"] == "nonfinite" and outcome["steps"] < STEPS
    for path in tmp_path.glob("attempt=00/rank=*/steps.jsonl"):
        last = json.loads(path.read_text().splitlines()[-1])
        assert last["nonfinite"] is True and last["step"] == outcome["steps"]
    assert (
        outcome["stopped_at"]["step"] == outcome["steps"]
        and outcome["stopped_at"]["order_digest_of_rank_0"]
    )


@pytest.mark.parametrize(
    "budget, worlds", [({"useful_tokens": 700}, (1, 2)), ({"wall_s": 0.2}, (2,))]
)
def test_ranks_agree_on_the_end_of_a_budget_that_is_no_number_of_steps(
    lab, tmp_path, budget, worlds
):
    """Each rank sees other tokens and another clock: one that went on alone would wait for ever."""
    rates = []
    for size in worlds:
        run = run_of(
            "padded",
            size,
            budget=BudgetSettings(**budget),
            schedule=ScheduleSettings(warmup_steps=0),
        )
        run_ranks(train_rank, size, run, lab.inputs(run), tmp_path / str(size))
        paths = (tmp_path / str(size)).glob("attempt=00/rank=*/steps.jsonl")
        steps = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
        assert len(steps) == size and len({len(lines) for lines in steps}) == 1
        rates.append([step["learning_rate"] for step in steps[0]])
    assert rates[0] == rates[-1]
    assert all(s["exposed_communication_s"] >= 0 and s["backward_s"] > 0 for s in steps[0])
