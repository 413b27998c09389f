"""What runs take, against numbers computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from tokenscale.costs import prices
from tokenscale.costs.prices import (
    Price,
    StoreSize,
    estimate_run,
    job_minutes,
    store_bytes,
    sum_prices,
)
from tokenscale.data.order.packing import pack, split_documents
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.machine import Machine
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import (
    BudgetSettings,
    CheckpointSettings,
    RunSettings,
    ValidationSettings,
)

CLUSTER = Machine(
    name="cluster", starter="srun", gpus_per_node=4, device="NVIDIA GH200 120GB", minutes=720
)
#: the same nodes without SLURM: no job, and no time limit
BOX = replace(CLUSTER, starter="torchrun")
#: 7.65 GFLOP a token at 2048 positions (costs/flops)
RUN = RunSettings(
    model=PRESETS["llama-1.4b-nemo"],
    sequence_length=2048,
    global_batch=96,
    micro_batch=4,
    precision="bf16",
    budget=BudgetSettings(steps=500),
    validation=ValidationSettings(rows=0),
)
#: 500 x 96 x 2048 x 7.65e9 FLOP over 0.3 x 989.4e12 FLOP/s: seconds of one GPU
ONE_GPU_S = 2533.5


def on(world_size, **changes):
    return replace(RUN, layout=LayoutSettings(data=world_size), **changes)


def seconds(run, **facts):
    return estimate_run(run, CLUSTER, **facts).seconds


def test_seconds_are_the_start_and_the_flops_over_an_assumed_share_of_the_peak_and_whole_nodes_are_charged():
    assert seconds(on(1)) == pytest.approx(120 + ONE_GPU_S, rel=1e-3)
    assert seconds(on(16)) == pytest.approx(120 + ONE_GPU_S / 16, rel=1e-3)
    one = estimate_run(on(1), CLUSTER)
    sixteen = estimate_run(on(16), CLUSTER)
    assert (one.nodes, sixteen.nodes) == (1, 4)
    assert one.node_hours == one.gpu_hours == pytest.approx(2653.5 / 3600, rel=1e-3)
    assert sixteen.node_hours == pytest.approx(4 * 278.3 / 3600, rel=1e-3)
    assert sixteen.gpu_hours == pytest.approx(16 * 278.3 / 3600, rel=1e-3)
    assert seconds(on(1, model=PRESETS["llama-150m"]), vocabulary_size=131072) is not None


def test_validation_costs_a_forward_pass_and_of_a_resumed_run_the_steps_that_are_left_are_priced():
    """6 passes (before, after, at 100, 200, 300 and 400) of 64 rows x 2048 positions, a third of
    7.65 GFLOP each. Of 500 steps 350; validation before the first step was the other run's, and so
    was that after step 100.
    """
    validation = ValidationSettings(rows=64, every=100)
    assert seconds(on(1, validation=validation)) - seconds(on(1)) == pytest.approx(6.757, rel=1e-3)
    rest = {"resume_from": "results/runs/other/checkpoints/step=00000150"}
    assert estimate_run(on(1, **rest), CLUSTER).steps == 350
    assert seconds(on(1, **rest)) - 120 == pytest.approx(0.7 * ONE_GPU_S, rel=1e-3)
    passes = seconds(on(1, validation=validation, **rest)) - seconds(on(1, **rest))
    assert passes == pytest.approx(4 / 6 * 6.757, rel=1e-3)
    assert estimate_run(on(1, budget=BudgetSettings(steps=100), **rest), CLUSTER).steps == 0


def test_the_peak_is_that_of_the_number_format():
    def training(**changes):
        return seconds(on(1, **changes)) - 120

    assert training(precision="fp32") / training() == pytest.approx(989.4 / 66.9)
    assert training(precision="bf16-true") == training(precision="fp16") == training()
    assert training(float8=True) / training() == pytest.approx(989.4 / 1978.9)
    # blocks are run forward again: 6 + 2 of 8 passes' parts, but for the head
    assert 1.2 < training(activation_checkpointing="block") / training() < 4 / 3


def test_a_pipeline_that_waits_takes_longer():
    naive = replace(RUN, layout=LayoutSettings(pipeline=16, schedule="naive"))
    assert seconds(naive) - 120 == pytest.approx(ONE_GPU_S, rel=1e-3), (
        "one of 16 ranks works at a time"
    )
    # 24 micro-batches: 3 of 27 waiting
    flushed = replace(RUN, layout=LayoutSettings(pipeline=4, schedule="gpipe"))
    assert seconds(flushed) - 120 == pytest.approx(ONE_GPU_S / 4 * 27 / 24, rel=1e-3)


def test_every_budget_is_priced_where_it_can_be():
    def priced(machine=CLUSTER, rows=None, objective="causal", **budget):
        return estimate_run(
            on(1, budget=BudgetSettings(**budget), objective=objective), machine, rows=rows
        )

    rows = StoreSize(per_epoch=4800, useful_tokens=4800 * 1024)
    assert (
        priced(rows=rows, epochs=10).steps
        == priced(rows=rows, useful_tokens=500 * 96 * 1024).steps
        == 500
    )
    assert priced(flops=500 * 96 * 2048 * 7.65e9).steps in (500, 501)
    assert priced(wall_s=3600).seconds == 3720 and priced(rows=rows, epochs=10).seconds == seconds(
        on(1)
    )
    for budget, what in (({"epochs": 10}, "epoch"), ({"useful_tokens": 10**6}, "useful tokens")):
        unknown = priced(BOX, **budget)
        assert (
            unknown.seconds is unknown.node_hours is unknown.gpu_hours is None
            and what in unknown.unknown
        )
    masked = priced(BOX, rows, "masked", useful_tokens=10**6)
    assert masked.seconds is None, "15 % of the stored tokens are predicted, at random"


@pytest.mark.parametrize(
    ("run", "machine", "reason"),
    [
        (on(1), Machine(), "no device"),
        (on(1), replace(BOX, device="NVIDIA Unheard 1"), "no peak of NVIDIA Unheard 1 in bf16"),
        (on(1, device="cpu"), BOX, "CPU"),
        (on(1, model=PRESETS["llama-150m"]), BOX, "tokenizer tekken"),
    ],
)
def test_what_is_not_known_is_said_and_files_are_counted_all_the_same(run, machine, reason):
    found = estimate_run(run, machine)
    assert found.seconds is None and reason in found.unknown
    assert found.bound is None and job_minutes(found, machine) == machine.minutes
    assert (
        found.steps == 500
        and found.bytes == pytest.approx(25_000 + 1_000 + 500 * 600)
        and found.files >= 9
    )
    assert sum_prices([found, estimate_run(on(1), CLUSTER)]).unknown == {found.unknown: 1}


@pytest.mark.parametrize(
    ("run", "machine", "reason"),
    [
        (on(2), replace(CLUSTER, device=None), "no device"),
        (on(8, device="cpu"), CLUSTER, "CPU"),
        (on(1, model=PRESETS["llama-150m"]), CLUSTER, "tokenizer tekken"),
        (on(16, budget=BudgetSettings(epochs=1)), CLUSTER, "epoch"),
        (on(1, budget=BudgetSettings(useful_tokens=10**9)), CLUSTER, "useful tokens"),
    ],
)
def test_the_time_limit_of_its_job_bounds_what_nothing_else_does(run, machine, reason):
    found = estimate_run(run, machine)
    assert (
        found.unknown is None and reason in found.bound and found.bound.startswith("the time limit")
    )
    assert found.node_hours == found.nodes * 12 and job_minutes(found, machine) == 720
    assert sum_prices([found, estimate_run(on(1), CLUSTER)]).bounded == {found.bound: 1}


def test_bounds_of_what_a_store_will_hold_are_bounds_of_the_price():
    rows = StoreSize(per_epoch=4800, useful_tokens=4800 * 1024, bound="by the corpus")
    found = estimate_run(on(1, budget=BudgetSettings(epochs=10)), CLUSTER, rows=rows)
    assert (found.steps, found.bound, found.unknown) == (500, "by the corpus", None)
    assert estimate_run(on(1), CLUSTER, rows=rows).bound is None, "a budget in steps needs no store"


@pytest.mark.parametrize("mean", [8, 30, 100, 129, 1000])
def test_packed_rows_are_no_more_and_no_emptier_than_their_bounds(mean):
    spread = np.random.default_rng(mean).exponential(mean - 2, 4000).astype(np.int64) + 3
    run = RunSettings(approach="packed", sequence_length=256)
    for lengths in (spread, np.full(1000, mean, dtype=np.int64)):
        _, _, pieces = split_documents(lengths, 256)
        _, rows = pack(pieces, 257)
        useful = int((pieces - 1).sum())
        assert len(rows) - 1 <= prices.max_rows(run, False, len(lengths), int(lengths.sum()))
        assert useful / (len(rows) - 1) >= prices.min_useful_tokens(run, streams=False)


def test_a_job_asks_for_three_times_its_estimate_and_the_time_to_write_a_state():
    def asked(seconds, **changes):
        return job_minutes(Price(4, 1, seconds, 500, 1, 0, 1), replace(CLUSTER, **changes))

    assert asked(3600) == 190, "180 min and 5, in steps of 10"
    assert asked(3600, signal_s=0) == 180 and asked(3600, runtime_margin=1.5) == 100
    assert asked(120) == 30, "a first start can take long"
    assert asked(120, minutes=20) == 20 and asked(5 * 3600) == 720, (
        "never more than the machine allows"
    )
    # the signal comes when the estimate has long passed
    for seconds in (10, 600, 3600, 13000):
        assert asked(seconds) * 60 - CLUSTER.signal_s >= 3 * seconds


def test_checkpoints_are_weights_and_moments():
    """1.41 G weights in fp32: 5.64 GB a model, three times that with two moments."""
    # 2 x 131072 x 2048 + 16 x (2 x 2048**2 + 2 x 2048 x 512 + 3 x 2048 x 7168 + 2 x 2048) + 2048
    count = 1_409_353_728
    logs = estimate_run(on(4), CLUSTER)

    def beside(**settings):
        found = estimate_run(on(4, checkpoints=CheckpointSettings(**settings)), CLUSTER)
        return found.bytes - logs.bytes, found.passing_bytes, found.files - logs.files

    assert beside() == (0, 0, 0)
    assert beside(final=True) == (4 * count, 0, 1 + 2 * 4 + 2)
    assert beside(every=100) == (0, 2 * 12 * count, 0), (
        "the next is written before the last is deleted"
    )
    assert beside(every=100, keep_last=2, keep_resume_state=True) == (
        2 * 12 * count,
        12 * count,
        2 * 11,
    )
    half = estimate_run(
        on(4, precision="bf16-true", checkpoints=CheckpointSettings(final=True)), CLUSTER
    )
    assert half.bytes - logs.bytes == 2 * count


def test_a_node_that_runs_share_is_charged_until_the_last_one_ends():
    """By hand: runs of 4, 3, 2 and 1 hours on nodes of two places, and one of 5 hours alone."""
    alone = Price(1, 1, 5 * 3600.0, 1, 0, 0, 1)
    shared = [replace(alone, seconds=hours * 3600.0, places=2) for hours in (1, 4, 2, 3)]
    assert sum_prices([alone, *shared]).node_hours == 5 + 4 + 2
    assert sum_prices([alone, *shared]).gpu_hours == 5 + 4 + 2 + 3 + 1


def test_a_total_adds_up_and_logs_grow_with_ranks_and_steps():
    """By hand: 25 kB a run, and for each rank 1 kB and 600 B a step; six files, SLURM's log, and
    three a rank.
    """
    runs = ((on(1), CLUSTER), (on(16), CLUSTER), (on(1, budget=BudgetSettings(epochs=1)), BOX))
    priced = [estimate_run(run, machine) for run, machine in runs]
    found = sum_prices(priced)
    assert (found.runs, found.timed, found.unlogged) == (3, 2, 1)
    assert found.node_hours == pytest.approx(2653.5 / 3600 + 4 * 278.3 / 3600, rel=1e-3)
    assert found.files == 10 + 55 + 9 and sum_prices([]).node_hours == 0
    assert (priced[1].bytes, priced[1].files) == (25_000 + 16 * (1_000 + 600 * 500), 6 + 1 + 16 * 3)


def test_ids_are_as_wide_as_the_format_stores_them():
    assert store_bytes(StoreSettings("packed"), 10, 1000, vocabulary_size=4096) == 2000
    assert store_bytes(StoreSettings("packed"), 10, 1000, vocabulary_size=131072) == 4000
    assert (
        store_bytes(StoreSettings("token-list", dtype="int64"), 10, 1000, vocabulary_size=4096)
        == 8000 + 2000 + 160
    )
    padded = StoreSettings("padded", sequence_length=256, codec="none")
    assert store_bytes(padded, 10, 1000, vocabulary_size=4096) == 10 * 257 * 4 + 2000 + 160
