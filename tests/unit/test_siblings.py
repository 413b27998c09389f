"""Runs against each other, from rows alone."""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tests.tables import Row, connect, run, steps, validation
from tokenscale.analysis.tables import of_rows
from tokenscale.referee.siblings import (
    FIRST_LOSS_DIFFERS,
    LIMITS,
    OF_A_SHAPE,
    Siblings,
)

STORE = {
    "corpus": "web",
    "tokenizer": "bpe",
    "sequence_length": 128,
    "format": "padded",
    "split": "train",
    "cut_tokens": 400,
    "document_tokens": 1010,
    "documents": 10,
}


def find(table: str, runs: Sequence[Row], **rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what is found in a table of `siblings.sql` over rows of the recorded tables."""
    recorded = {name: of_rows(name, rows.get(name, ())) for name in ("steps", "events", "stores")}
    recorded["runs"] = of_rows(
        "runs", [{"external": False, "arm": "tokenscale", **of} for of in runs]
    )
    siblings = Siblings()
    siblings.add(recorded["steps"], recorded["events"])
    with closing(connect(recorded)) as connection:
        siblings.connect(connection, judged=[{"reasons": ""} | of for of in runs])
        return sorted(siblings.find(table))


def name_runs(table: str, runs: Sequence[Row], **rows: Sequence[Row]) -> list[str]:
    """Return the runs that are named in a table of `siblings.sql`."""
    return [run_id for run_id, _ in find(table, runs, **rows)]


@pytest.mark.parametrize(
    ("counted", "stored", "accused"),
    [
        ([0.4, 0.4, 0.4], True, []),
        ([0.41, 0.41, 0.41], True, []),  # of a sample
        ([0.41, 0.41, 0.4101], False, ["2"]),
        ([0.5, 0.5, 0.5], True, ["0", "1", "2"]),
        ([0.5, 0.5, 0.5], False, []),
        ([None, None, None], True, []),
    ],
)
def test_a_share_of_cut_text_is_that_of_other_runs_and_of_the_padded_store(
    counted, stored, accused
):
    of_text = {name: STORE[name] for name in ("corpus", "tokenizer", "sequence_length")}
    runs = [
        run(str(number), text_cut=share and f'{{"web":{share}}}', **of_text)
        for number, share in enumerate(counted)
    ]
    assert name_runs("other_cuts", runs, stores=[STORE] * stored) == accused


def test_useful_tokens_are_those_of_rows_drawn_from_the_store_whatever_the_rows_are():
    """Rows of `least` to 64 useful tokens of 64, of which a run draws eight a step; or four fifths of
    them.
    """
    chance = np.random.default_rng(0)
    of_text = {"objective": "causal", "labels": "all", "approach": "packed", "global_batch": 8}
    runs = []
    stores = []
    rows = []
    far = set()
    for case in range(200):
        least = chance.integers(1, 65)
        useful = np.append(chance.integers(least, 65, 339), 63)
        drawn = chance.permutation(useful)[: 8 * chance.integers(1, 41)].reshape(-1, 8).sum(axis=1)
        scale = chance.choice([1.0, 0.8])
        runs.append(run(str(case), sequence_length=64, store_sha256=f"store {case}", **of_text))
        store = {"manifest_sha256": f"store {case}", "format": "packed", "total_tokens": 64 * 340}
        stores.append(store | {"useful_tokens": int(useful.sum())})
        tokens = [int(scale * of_step) for of_step in drawn]
        rows += steps(
            str(case),
            len(drawn),
            useful_tokens=lambda step, _, tokens=tokens: tokens[step],
            order_digest=lambda step, _: step,
        )
        if scale < 1 and len(drawn) * (least - 50) > 100:
            far.add(str(case))
        elif scale < 1:
            runs.pop()  # too few steps of too unequal rows to tell
    assert far
    assert {*name_runs("other_shares", runs, steps=rows, stores=stores)} == far


def log(event: str, run_id: str, **fields: Any) -> Row:
    return {"run_id": run_id, "attempt": 0, "rank": 0, "event": event, "t_mono_s": 10.0} | fields


def log_quantity(quantity: str, values: Mapping[str, float]) -> dict[str, list[Row]]:
    """Return the rows of runs that have this value of a quantity of `OF_A_SHAPE`."""
    rows: dict[str, list[Row]] = {"steps": [], "events": []}
    for run_id, value in values.items():
        if quantity == "activations_bytes":
            rows["events"].append(log("memory", run_id, activations_bytes=round(1e12 * value)))
        elif quantity == "memory_peak_bytes":
            rows["steps"] += steps(run_id, 1, memory_peak_bytes=round(1e12 * value))
        elif quantity == "seconds of computing a token":
            rows["steps"] += steps(run_id, 4, step_s=1 + value, data_wait_s=1.0)
        else:
            stop = log("run_stop", run_id, t_mono_s=14.0, cpu_s=4 * value)
            rows["events"] += [log("init_done", run_id), stop]
    return rows


def find_other_shapes(cells: Mapping[str, Sequence[float]], quantity: str) -> set[str]:
    """Return the runs that are named. Cell `s c` has approach c and runs `s c 0`, `s c 1` … of shape s."""
    values = {f"{cell} {r}": v for cell, of in cells.items() for r, v in enumerate(of)}
    runs = [
        run(run_id, approach=run_id.split()[1], science_per_rank=run_id.split()[0])
        for run_id in values
    ]
    found = find("other_shapes", runs, **log_quantity(quantity, values))
    assert all(f"its {quantity} is " in sentence for _, sentence in found)
    return {run_id for run_id, _ in found}


@pytest.mark.parametrize("quantity", OF_A_SHAPE)
def test_a_run_is_named_where_it_leaves_its_repeats_by_more_than_the_limit(quantity):
    chance = np.random.default_rng(0)
    cells = {}
    for case in range(100):
        noise = chance.uniform(0, 0.01)
        runs = [math.exp(noise * (-1) ** r) for r in range(chance.integers(4, 10))]
        least = math.log(OF_A_SHAPE[quantity][0])
        beyond = max(least, LIMITS["shape_spreads"] * 1.6 * noise) + 1.5 * noise
        cells[f"honest{case} packed"] = runs
        altered = math.exp(chance.choice([1, -1]) * (beyond * chance.uniform(1, 3) + 1e-9))
        cells[f"altered{case} packed"] = [runs[0], altered, *runs[2:]]
    assert find_other_shapes(cells, quantity) == {f"altered{case} packed 1" for case in range(100)}


@pytest.mark.parametrize("quantity", OF_A_SHAPE)
def test_an_approach_is_named_where_it_leaves_the_others(quantity):
    limit = OF_A_SHAPE[quantity][1]
    cells = {"s a": [1.0] * 3, "s b": [1.0] * 3, "s c": [min(limit, 1e6) * 1.01] * 3}
    named = {"s c 0", "s c 1", "s c 2"} if limit < math.inf else set()
    assert find_other_shapes(cells, quantity) == named


def stop(attempt: int, rank: int, cpu_s: float | None, took_s: float = 4.0) -> list[Row]:
    names = {"attempt": attempt, "rank": rank}
    return [
        log("init_done", "other", **names),
        log("run_stop", "other", t_mono_s=10.0 + took_s, cpu_s=cpu_s, **names),
    ]


@pytest.mark.parametrize(
    ("events", "share"),
    [
        (stop(0, 0, 8.0), "2"),
        (stop(0, 0, 8.0) + stop(0, 1, 4.0), "1.5"),
        (stop(0, 0, 8.0) + stop(1, 0, 2.0), "0.5"),  # the newest attempt
        (stop(0, 0, None), None),
        (stop(0, 0, 8.0)[1:], None),
    ],
)
def test_the_processor_time_of_a_second_is_that_of_all_ranks(events, share):
    rows = log_quantity("processor time a second", dict.fromkeys("abc", 1.0))
    runs = [run(run_id) for run_id in (*"abc", "other")]
    found = find("other_shapes", runs, events=rows["events"] + events)
    sentence = f"its processor time a second is {share} × that of other repeats"
    assert found == ([("other", sentence)] if share else [])


def test_the_activations_of_a_run_are_those_of_its_ranks_latest_attempts():
    attempts = [(0, 0, 90), (1, 0, 10), (0, 1, 40)]
    events = [
        log("memory", run_id, attempt=attempt, rank=rank, activations_bytes=number)
        for run_id in "abc"
        for attempt, rank, number in attempts
    ]
    events.append(log("memory", "other", activations_bytes=100))
    found = find("other_shapes", [run(i) for i in (*"abc", "other")], events=events)
    assert found == [("other", "its activations_bytes is 2 × that of other repeats")]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("approach", ["packed", "own.Loader"])
@pytest.mark.parametrize("altered", [None, "step", "order_digest", "useful_tokens"])
def test_runs_of_one_seed_and_equal_order_digests_have_equal_samples(seed, approach, altered):
    """Losses that an own approach shares with the one whose batches it makes are no copies."""
    runs = [run("a", seed=0), run("b", seed=seed, approach=approach)]
    numbers = {"order_digest": lambda step, _: 100 + step, "loss_sum": lambda step, _: 3.0 + step}
    rows = steps("a", 9, **numbers) + steps("b", 9, **numbers)
    if altered:
        rows[-1] = rows[-1] | {altered: rows[-1][altered] + 1}
    equal = seed == 0 and (approach == "packed" or altered is None)
    assert name_runs("copied_runs", runs, steps=rows) == ([] if equal else ["a", "b"])


def train(run_id: str, losses: Mapping[int, float]) -> list[Row]:
    """Return the rows of a run's steps: step → mean loss."""
    (row,) = steps(run_id, 1)
    return [row | {"step": step, "loss_sum": 30 * loss} for step, loss in losses.items()]


def find_outlying_losses(cells: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> set[str]:
    """Return the runs that are named, for cell → losses of its runs in the validation at step 8 and
    in the training near it.
    """
    runs = []
    rows: dict[str, list[Row]] = {"steps": [], "events": []}
    for cell, losses in cells.items():
        for number, (validated, trained) in enumerate(zip(*losses, strict=True)):
            run_id = f"{cell} {number}"
            runs.append(run(run_id, science_per_rank=cell))
            rows["steps"] += train(run_id, {0: trained, 99: 1.0})
            rows["events"].append(validation(run_id, 8, validated))
    return {run_id for run_id, _ in find("outlying_losses", runs, **rows)}


def test_a_validation_is_named_where_repeats_and_the_training_near_it_contradict():
    chance = np.random.default_rng(0)
    cells = {}
    for case in range(100):
        noise = chance.uniform(0, 0.004)
        losses = [4 * math.exp(noise * (-1) ** r) for r in range(chance.integers(6, 10))]
        factor = math.exp(chance.choice([1, -1]) * chance.uniform(1, 8) * (0.03 + 12 * noise))
        altered = [losses[0] * factor, *losses[1:]]
        cells[f"honest{case}"] = losses, losses
        most, least = chance.uniform([0.6, 0.0], [1.4, 0.4])  # of it, in the training near it
        cells[f"altered{case}"] = altered, [losses[0] * factor**least, *losses[1:]]
        cells[f"spike{case}"] = altered, [losses[0] * factor**most, *losses[1:]]
    assert find_outlying_losses(cells) == {f"altered{case} 0" for case in range(100)}


def test_the_training_near_a_validation_is_that_of_its_own_run():
    """Of sixteen steps before and after it: a spike elsewhere explains nothing."""
    named = {}
    for far in (8, 23, 24):
        rows = [*train("odd", {far: 8.0, 99: 1.0}), *train("other", {8: 8.0, 99: 1.0})]
        rows += [row for i in range(5) for row in train(f"even {i}", {8: 4.0, 99: 1.0})]
        events = [validation(run_id, 8, 8.0 if run_id == "odd" else 4.0) for run_id in IDS]
        named[far] = name_runs("outlying_losses", [*map(run, IDS)], steps=rows, events=events)
    assert named == {8: [], 23: [], 24: ["odd"]}


IDS = ("odd", *(f"even {number}" for number in range(5)))


@pytest.mark.parametrize(
    ("digests", "accused"),
    [
        ([[5, 6, 7]], []),
        ([[5, 6, 7], [5, 6, 7], [5, 6]], []),
        ([[5, 6, 7], [5, 9, 7], [5, 6, 7]], ["1"]),
        ([[5, 6, 7], [5, 6, 8]], ["0", "1"]),  # which of two is wrong nobody knows
    ],
)
def test_runs_of_one_seed_read_their_samples_in_one_order(digests, accused):
    rows = []
    for number, of_run in enumerate(digests):
        order = {"order_digest": lambda step, _, of_run=of_run: of_run[step]}
        rows += steps(str(number), len(of_run), **order)
    runs = [run(str(number)) for number in range(len(digests))]
    assert name_runs("other_orders", runs, steps=rows) == accused


@pytest.mark.parametrize(
    ("tokens", "accused"),
    [
        ([None, None], []),
        ([100, 100, None], []),
        ([100, 101, 100], ["1"]),
        ([100, 101], ["0", "1"]),
    ],
)
def test_runs_validate_on_as_many_tokens_of_the_same_rows(tokens, accused):
    runs = [run(str(number), validation_tokens=count) for number, count in enumerate(tokens)]
    assert name_runs("other_validation_tokens", runs) == accused


@pytest.mark.parametrize(
    ("bytes_of_runs", "accused"),
    [
        ([16e9, 16e9, None], []),
        ([16e9, 16e9, 16.06e9], []),
        ([16e9, 16e9, 16.1e9], ["2"]),
        ([16e9, 16e9, 15.9e9], ["2"]),
    ],
)
def test_a_machine_with_other_memory_is_named(bytes_of_runs, accused):
    runs = [
        run(str(number), machine_memory_bytes=size and round(size))
        for number, size in enumerate(bytes_of_runs)
    ]
    assert name_runs("other_machines", runs) == accused


@pytest.mark.parametrize(
    ("losses", "rounded", "contradicting", "accused"),
    [
        ([8.0, 8.0, 8.0], [], [], []),
        ([8.0, 8.0, 8.001], [], [], ["2"]),
        ([8.0, 8.0, 8.001], [2], [], []),  # its gradients are rounded to bf16
        ([8.0, 8.001], [1], [], []),
        ([8.0, 8.001], [], [], ["0", "1"]),
        ([8.0, 8.1], [1], [], ["1"]),
        ([8.0, 8.001], [], [0], ["0"]),  # its own validation has another loss
        ([8.001, 8.001, 8.0], [0, 1], [], []),  # most are rounded, and no measure of the exact one
    ],
)
def test_losses_of_equal_samples_are_equal_within_the_rounding_of_each(
    losses, rounded, contradicting, accused
):
    runs = []
    rows = []
    for number, loss in enumerate(losses):
        compression = "bf16" if number in rounded else "none"
        reasons = f"{FIRST_LOSS_DIFFERS} 2 ×" if number in contradicting else ""
        of = {"precision": "fp32", "compression": compression, "reasons": reasons}
        runs.append(run(str(number), **of))
        rows += steps(str(number), 1, loss_sum=loss, grad_norm=1.0)
    assert name_runs("other_losses_of_samples", runs, steps=rows) == accused


@pytest.mark.parametrize(
    ("step", "other", "named"),
    [
        (0, {"compression": "bf16"}, 1),
        (3, {"compression": "bf16"}, 0),
        (0, {"layout": "layout.shard=4, layout.gather=bf16"}, 1),
        (3, {"layout": "layout.shard=4, layout.gather=bf16"}, 0),
        (3, {}, 2),
    ],
)
def test_norms_of_rounded_gradients_and_weights_are_compared_at_equal_weights(step, other, named):
    runs = []
    rows = []
    for number, of in enumerate([{"compression": "none", "layout": ""}, other]):
        runs.append(run(str(number), precision="fp32", **of))
        (row,) = steps(str(number), 1, grad_norm=3.0 + number)
        rows.append(row | {"step": step})
    assert len(name_runs("other_losses_of_samples", runs, steps=rows)) == named
