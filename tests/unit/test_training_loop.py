"""What a run can be asked for beside its steps: budgets, number formats, recomputation, when to
look at the device.
"""

import gc
import gzip
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.corpora import WORDS, Lab, small_run, words_lab
from tests.graphs import inductor_replaced
from tests.unit.test_batches_objectives import Pairs
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json
from tokenscale.costs.flops import Convention, flops_per_token
from tokenscale.costs.schedule import learning_rate
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import (
    BudgetSettings,
    CheckpointSettings,
    OptimizerSettings,
    ProfileSettings,
    RunSettings,
    ScheduleSettings,
    ValidationSettings,
)
from tokenscale.train import budget as budgets
from tokenscale.train import loop
from tokenscale.train.evaluation import held_out
from tokenscale.train.loop import train
from tokenscale.train.parallel.world import World

pytestmark = pytest.mark.slow(35)

STEPS = 8
T = 32
WORLD = World(0, 1, 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return words_lab(tmp_path_factory.mktemp("lab"), 100)


def trained(lab: Lab, directory: Path, run: RunSettings) -> tuple[list[dict], list[dict]]:
    train(run, lab.inputs(run), directory, WORLD)
    folder = directory / "attempt=00/rank=00000"
    return tuple(
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("steps", "events")
    )


def losses(steps):
    return [step["loss_sum"] / step["useful_tokens"] for step in steps]


def without_times(steps):
    timed = ("t_unix_s", "t_mono_s", "memory_peak_bytes")
    return [
        {k: v for k, v in s.items() if k not in timed and (not k.endswith("_s") or k == "loss_sum")}
        for s in steps
    ]


@pytest.fixture(scope="module")
def plain(lab, tmp_path_factory):
    return trained(lab, tmp_path_factory.mktemp("plain"), small_run())


# --- budgets


@pytest.mark.parametrize("budget", [{"steps": 9}, {"useful_tokens": 900}, {"wall_s": 5}])
def test_a_loaded_budget_is_the_saved_one(budget):
    saved = {"useful_tokens": 300.0, "seconds": 3.0, "warm": 0.2} | (
        {"clock": 2.0} if "wall_s" in budget else {}
    )
    loaded = budgets.Budget(BudgetSettings(**budget), budget.get("steps"), WORLD, 0)
    loaded.load(saved)
    assert loaded.state() == saved
    assert loaded.share(3) == pytest.approx(
        {"steps": 3 / 9, "useful_tokens": 300 / 900, "wall_s": 2 / 5}[[*budget][0]]
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("budget", "shares"),
    [
        ({"steps": 3}, [1 / 3, 2 / 3, 1]),
        ({"useful_tokens": 30}, [12 / 30, 24 / 30, 1]),
        ({"wall_s": 3.5}, [0, 2 / 3.5, 1]),
    ],
)
def test_two_ranks_have_one_count_one_clock_and_one_end(monkeypatch, rank, budget, shares):
    """The clock is rank 0's, and both stop a step after one of them was asked to."""
    world = World(rank, 2, rank, torch.device("cpu"))
    shared = budgets.Budget(BudgetSettings(**budget), budget.get("steps"), world, 0)
    found = []
    for step in range(3):
        other = torch.tensor([7, rank * 2.0 * step, 0], dtype=torch.float64)
        monkeypatch.setattr(
            torch.distributed, "all_reduce", partial(torch.Tensor.add_, other=other)
        )
        assert shared.exchange(5, stop_requested=step == 1) == 12
        found.append((shared.after(step, 2.0), shared.stop, shared.share(step + 1)))
    ended = [False, False, True]
    assert found == list(zip(ended, ended, map(pytest.approx, shares), strict=True))
    counted = shared.state()
    assert (counted["useful_tokens"], counted["seconds"]) == (36, 6)


def test_rows_of_two_ranks_are_counted_by_one_of_them(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: sums.add_(7))
    world = World(1, 2, 1, torch.device("cpu"))
    assert budgets.Budget(BudgetSettings(steps=3), 3, world, 0, counts=False).exchange(5) == 7


def test_one_rank_counts_its_tokens_and_stops_after_the_step_in_which_it_was_asked_to():
    alone = budgets.Budget(BudgetSettings(steps=3), 3, WORLD, 0)
    for step in range(2):
        assert alone.exchange(5, stop_requested=step == 1) == 5
        assert (alone.after(step, 1.0), alone.stop) == (False, step == 1)
    assert alone.state()["useful_tokens"] == 10


@pytest.mark.parametrize(("settings", "later"), [({"steps": 999}, 0), ({"wall_s": 999}, 1)])
def test_so_many_steps_without_a_label_after_one_with_labels_end_a_run(settings, later):
    """Labels that ranks count together are read a step later."""
    budget = budgets.Budget(BudgetSettings(**settings), settings.get("steps"), WORLD, 0)
    for useful_tokens in [0, 5, *[0] * (budgets.UNLABELLED_STEPS - 1 + later)]:
        budget.exchange(useful_tokens)
        budget.after(0, seconds=1.0)
        budget.check_labels(ended=False)
    budget.exchange(0)
    budget.after(0, seconds=1.0)
    with pytest.raises(UserError, match=f"{budgets.UNLABELLED_STEPS} steps in a row"):
        budget.check_labels(ended=False)


def test_the_share_of_a_budget_that_the_last_step_exceeds_is_all_of_it():
    budget = budgets.Budget(BudgetSettings(useful_tokens=900), None, WORLD, 0)
    budget.load({"useful_tokens": 950.0, "seconds": 3.0, "warm": 0.2})
    assert budget.share(3) == 1.0


@pytest.mark.parametrize("approach", ["packed", "padded", "padding-free"])
def test_epochs_are_passes_over_what_the_approach_reads(lab, tmp_path, approach):
    run = small_run(approach, budget=BudgetSettings(epochs=1.5))
    steps, _ = trained(lab, tmp_path, run)
    rows = lab.batches(run).rows_per_epoch()
    assert len(steps) * 6 >= 1.5 * rows > (len(steps) - 1) * 6
    assert steps[-1]["learning_rate"] == pytest.approx(0.1 * 3e-3), (
        "the schedule ends with the budget"
    )


def test_useful_tokens_end_with_the_step_that_reaches_them(lab, tmp_path):
    run = small_run(
        "padded",
        budget=BudgetSettings(useful_tokens=900),
        schedule=ScheduleSettings(warmup_steps=0),
    )
    steps, _ = trained(lab, tmp_path, run)
    counts = [step["useful_tokens"] for step in steps]
    assert sum(counts) >= 900 > sum(counts[:-1])
    shares = [sum(counts[:number]) / 900 for number in range(len(counts))]
    rates = [
        learning_rate(number, None, 3e-3, run.schedule, share)
        for number, share in enumerate(shares)
    ]
    assert rates[0] == 3e-3 > rates[-1] and [
        step["learning_rate"] for step in steps
    ] == pytest.approx(rates)


def test_flops_are_those_of_the_formula(lab, tmp_path):
    per_row = T * flops_per_token(PRESETS["llama-micro"].with_vocabulary(300), T, Convention.FULL)
    run = small_run(budget=BudgetSettings(flops=4.5 * 6 * per_row))
    assert len(trained(lab, tmp_path, run)[0]) == 5


@pytest.mark.parametrize(("wait_s", "validation"), [(0, {}), (0, {"every": 1}), (0.05, {})])
def test_wall_time_ends_a_run_that_has_no_other_end(lab, tmp_path, monkeypatch, wait_s, validation):
    """The host's wait for a device that computes behind it is part of a step; set-up and validation
    are not.
    """
    monkeypatch.setattr(loop.Training, "_describe", lambda *args, **options: time.sleep(0.4))
    read = budgets._read
    validate = held_out.HeldOut.validate
    monkeypatch.setattr(budgets, "_read", lambda *sums: (time.sleep(wait_s), read(*sums))[1])
    monkeypatch.setattr(
        held_out.HeldOut, "validate", lambda *args: (time.sleep(0.1), validate(*args))[1]
    )
    off = {
        "schedule": ScheduleSettings(warmup_steps=0),
        "validation": ValidationSettings(rows=4, **validation),
    }
    steps, _ = trained(lab, tmp_path, small_run(budget=BudgetSettings(wall_s=0.3), **off))
    times = [step["step_s"] for step in steps]
    # reading the log before a validation is counted, and no part of a step: little, but more on a
    # busy machine
    assert sum(times) >= 0.15 and sum(times[:-1]) < 0.3 + 2 * max(times)
    assert not wait_s or min(step["own_s"] for step in steps[1:]) < wait_s, "bookkeeping is no wait"


def test_a_warm_up_longer_than_the_budget_and_two_budgets_are_refused(lab, tmp_path):
    run = small_run(budget=BudgetSettings(epochs=0.01), schedule=ScheduleSettings(warmup_steps=50))
    with pytest.raises(UserError, match="warm-up"):
        trained(lab, tmp_path, run)
    for budget in (BudgetSettings(steps=5, epochs=1), BudgetSettings(flops=1e9, wall_s=3)):
        assert any(key.startswith("budget.") for key, _ in small_run(budget=budget).problems())


@pytest.mark.parametrize(
    ("budget", "found"),
    [
        ({"steps": 3}, "3 "),
        ({"steps": 400}, "100 "),
        ({"useful_tokens": 10**6}, "100 "),
        ({"epochs": 1}, "7 "),
    ],
)
def test_a_run_without_labels_ends_and_is_not_complete(tmp_path, capsys, budget, found):
    """Sources fill the rows, so that no target is in any: nor can a budget of useful tokens be
    reached.
    """
    lab = Pairs(tmp_path, [(" ".join(WORDS * 4), f"short {i}") for i in range(40)])
    off = {"validation": ValidationSettings(rows=0), "schedule": ScheduleSettings(warmup_steps=0)}
    run = replace(
        small_run("padded", labels="target", budget=BudgetSettings(**budget), **off), eos=True
    )
    with pytest.raises(UserError, match="no label") as error:
        train(run, lab.inputs(run), tmp_path / "run", WORLD)
    assert error.value.facts["found"].startswith(found)
    out = capsys.readouterr().out
    assert "labels   0 of the first" in out and "loss –" in out and "loss 0" not in out
    assert read_json(tmp_path / "run/run.json")["outcome"] == {"status": "running"}


@pytest.mark.parametrize(
    "approach, rows, repeats",
    [
        (name, 600, True)
        for name in ("packed", "padded", "padding-free", "pretokenized-padded", "token-list")
    ]
    + [("packed", 6, False)],
)
def test_batches_larger_than_the_data_are_named(lab, tmp_path, capsys, approach, rows, repeats):
    off = {"validation": ValidationSettings(rows=0), "budget": BudgetSettings(steps=1)}
    run = small_run(
        approach,
        global_batch=rows,
        micro_batch=rows,
        schedule=ScheduleSettings(warmup_steps=0),
        **off,
    )
    trained(lab, tmp_path, run)
    assert ("each batch repeats them" in capsys.readouterr().out) == repeats


def test_held_out_rows_without_labels_are_refused(lab, tmp_path, monkeypatch):
    load = held_out.load_held_out

    def without_labels(*arguments, **named):
        found = load(*arguments, **named)
        return [replace(rows, labels_bt=rows.labels_bt * 0 - 100) for rows in found]

    monkeypatch.setattr(held_out, "load_held_out", without_labels)
    with pytest.raises(UserError, match="held-out slice keeps a label"):
        trained(lab, tmp_path, small_run())


# --- number formats, recomputation, compiled blocks


@pytest.mark.parametrize(
    ("precision", "near"), [("bf16", 0.05), ("fp16", 0.02), ("bf16-true", 0.3)]
)
def test_other_precisions_learn_the_same(lab, tmp_path, plain, precision, near):
    steps, events = trained(lab, tmp_path, small_run(precision=precision))
    assert losses(steps) != losses(plain[0])
    assert losses(steps) == pytest.approx(losses(plain[0]), abs=near)
    held_out = [e["loss_sum"] / e["useful_tokens"] for e in events if e["event"] == "validation"]
    assert held_out[-1] < held_out[0] - 0.2
    assert all(step.get("loss_scale") == 65536.0 for step in steps) or precision != "fp16"
    memory = next(e for e in events if e["event"] == "memory")
    size = 2 if precision == "bf16-true" else 4
    expected = sum(p.numel() for p in _model(lab).parameters()) * size
    assert memory["parameters_bytes"] == memory["gradients_bytes"] == expected
    assert 2 * expected <= memory["optimizer_bytes"] < 2 * expected + 1000
    assert memory["activations_bytes"] > 0


def _model(lab):
    from tokenscale.train.models.build import build

    shape = PRESETS["llama-micro"].with_vocabulary(lab.batches(small_run()).vocabulary_size)
    return build(shape, T, objective="causal", kernel="sdpa")


def test_fp16_steps_that_overflow_are_left_out_and_said(lab, tmp_path, monkeypatch):
    """A first scale far too large: it halves until gradients fit, nothing is trained until then;
    the run goes on.
    """
    from tokenscale.train import optimizer

    monkeypatch.setattr(
        optimizer.LossScale.__init__, "__kwdefaults__", {"initial": 2.0**28, "interval": 2000}
    )
    steps, _ = trained(lab, tmp_path, small_run(precision="fp16", budget=BudgetSettings(steps=30)))
    skipped = [step["skipped"] for step in steps]
    assert skipped[:3] == [True] * 3 and skipped.count(True) < 15
    for before, after in zip(steps[:-1], steps[1:], strict=True):
        assert after["loss_scale"] == before["loss_scale"] * (0.5 if before["skipped"] else 1)
    assert not any(step["nonfinite"] for step in steps)
    assert read_json(tmp_path / "run.json")["outcome"]["status"] == "complete"
    assert losses(steps)[-1] < losses(steps)[0]


@pytest.mark.parametrize("mode", ["block", "selective"])
def test_activation_checkpointing_changes_memory_alone(lab, tmp_path, plain, mode):
    model = replace(PRESETS["llama-micro"], dropout=0.2)
    kept = trained(lab, tmp_path / "kept", small_run(model=model))
    again = trained(lab, tmp_path / "again", small_run(model=model, activation_checkpointing=mode))
    assert without_times(again[0]) == without_times(kept[0])
    bytes_of = [
        next(e for e in events if e["event"] == "memory")["activations_bytes"]
        for _, events in (kept, again)
    ]
    assert bytes_of[1] < bytes_of[0]


def test_compiled_blocks_compute_the_same_and_the_record_states_what_was_compiled(
    lab, tmp_path, plain, capsys
):
    """With a backend that traces and differentiates, and leaves the code generation out, which
    costs a minute here.
    """
    from torch._dynamo.backends.debugging import aot_eager

    with inductor_replaced(aot_eager):
        steps, events = trained(lab, tmp_path, small_run(compile=True))
    assert losses(steps) == pytest.approx(losses(plain[0]), abs=1e-5)
    assert "activations_bytes" not in next(e for e in events if e["event"] == "memory")
    (event,) = (e for e in events if e["event"] == "compilation")
    # of blocks and of the loss one graph in training and one in validation
    blocks = PRESETS["llama-micro"].layers
    counts = {"graphs": 4, "recompiles": 2, "graph_breaks": 0, "blocks": blocks, "eager_blocks": 0}
    assert (
        read_json(tmp_path / "run.json")["compilation"]
        == counts
        == {name: event[name] for name in counts}
    )
    assert f"compiled {blocks} of {blocks} blocks: 4 graphs" in capsys.readouterr().out
    assert not [e for e in plain[1] if e["event"] == "compilation"]


# --- what is looked at, and when


def test_looking_at_the_device_and_collecting_garbage_less_often_changes_no_line(
    lab, tmp_path, plain
):
    steps, events = trained(lab, tmp_path, small_run(log_every=5, garbage_every=3))
    assert without_times(steps) == without_times(plain[0])
    assert [e["event"] for e in events] == [e["event"] for e in plain[1]]
    assert gc.isenabled() and gc.get_freeze_count() == 0, "as before"


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_run_that_diverges_names_its_batch_and_keeps_no_later_step(lab, tmp_path, log_every):
    optimizer = OptimizerSettings(learning_rate=1e30, clip_norm=None)
    steps, _ = trained(lab, tmp_path, small_run(optimizer=optimizer, log_every=log_every))
    outcome = read_json(tmp_path / "run.json")["outcome"]
    assert outcome["status"] == "nonfinite" and outcome["steps"] == steps[-1]["step"] < STEPS - 1
    assert outcome["stopped_at"] == {
        "step": steps[-1]["step"],
        "order_digest_of_rank_0": steps[-1]["order_digest"],
    }
    assert [s["nonfinite"] for s in steps] == [False] * (len(steps) - 1) + [True]


def test_the_parts_of_a_step_are_all_of_it(plain):
    for step in plain[0]:
        parts = [
            step[f"{name}_s"] for name in ("data_wait", "h2d", "forward", "backward", "optimizer")
        ]
        assert (
            min(parts) >= 0 and sum(parts) <= step["step_s"] and 0 < step["own_s"] < step["step_s"]
        )
    assert sum(step["forward_s"] + step["backward_s"] for step in plain[0]) > 0.3 * sum(
        s["step_s"] for s in plain[0]
    )
    assert "exposed_communication_s" not in plain[0][0], "one rank exchanges nothing"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, [0, 8]),
        ({"every": 3}, [0, 3, 6, 8]),
        ({"at_start": False, "at_end": False, "every": 4}, [4]),
        ({"each_epoch": True, "at_start": False}, "epochs"),
    ],
)
def test_validation_comes_when_it_is_asked_for(lab, tmp_path, asked, expected):
    run = small_run(validation=ValidationSettings(rows=4, **asked), global_batch=60, micro_batch=20)
    _, events = trained(lab, tmp_path, run)
    if expected == "epochs":
        rows = lab.batches(run).rows_per_epoch()
        expected = sorted(
            {-int(-e * rows // 60) for e in range(1, 9)} & set(range(1, STEPS)) | {STEPS}
        )
        assert len(expected) > 1
    assert [e["step"] for e in events if e["event"] == "validation"] == expected


def test_a_trace_is_written_for_the_steps_asked_for(lab, tmp_path):
    trained(lab, tmp_path, small_run(profile=ProfileSettings(first=2, steps=3)))
    with gzip.open(tmp_path / "attempt=00/rank=00000/trace.json.gz", "rt") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert any("scaled_dot_product" in name for name in names)
    assert {f"ProfilerStep#{k}" for k in (0, 1, 2)} <= names or any(
        n.startswith("Optimizer.step") for n in names
    )


def test_events_say_what_was_written(lab, tmp_path):
    asked = CheckpointSettings(final=True, asynchronous=False)
    _, events = trained(lab, tmp_path, small_run(checkpoints=asked))
    (written,) = [e for e in events if e["event"] == "checkpoint"]
    assert written["status"] == "final" and written["bytes"] > 10_000 and written["duration_s"] > 0
    stop = events[-1]
    assert stop["event"] == "run_stop" and stop["energy_j"] is None
    assert read_json(tmp_path / "run.json")["outcome"]["energy_j"] is None
