"""The clock is set back by an hour: while a run trains, and between its attempts."""

import time

import pytest
import torch

from tests import logs
from tests.faults.test_resume import interrupted, run_of, series
from tokenscale.runs.records import events, provenance
from tokenscale.train import loop
from tokenscale.train.loop import train
from tokenscale.train.parallel.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))
HOUR = 3600.0


class Clock:
    """The wall clock of this process, `behind` by so many seconds."""

    def __init__(self):
        self.real = time.time
        self.behind = 0.0

    def now(self) -> float:
        return self.real() - self.behind


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "time", made.now)
    return made


def rows_of(run, folder):
    entry = {"run_id": folder.name, "cell": {}, "position": 0}
    return logs.judge_one(entry, "clock", folder.parent)


def test_a_training_goes_on_and_its_times_stay_in_order(lab, tmp_path, clock, monkeypatch):
    run = run_of()
    inputs = lab.inputs(run)
    train(run, inputs, tmp_path / "whole", ALONE)
    before = clock.now()
    step = events.Writer.step

    def set_back(writer, **fields):
        if fields["step"] in (3, 7):
            clock.behind += HOUR
        return step(writer, **fields)

    monkeypatch.setattr(events.Writer, "step", set_back)
    folder = tmp_path / "runs" / run.identity
    train(run, inputs, folder, ALONE)
    assert clock.behind == 2 * HOUR
    assert series(folder) == series(tmp_path / "whole")
    made, row = rows_of(run, folder)
    of_steps = made["steps"]["t_unix_s"].to_pylist()
    times = of_steps + made["events"]["t_unix_s"].to_pylist()
    assert min(times) > before - 1 and max(times) < clock.real() + 1
    assert of_steps == sorted(of_steps)
    # a loaded machine may slow some steps down
    assert [
        reason
        for reason in row["reasons"].split("; ")
        if reason and "no steady state" not in reason
    ] == []
    assert 0 < row["stopped_unix_s"] - row["started_unix_s"] < 100
    lines = [*made["steps"].to_pylist(), *made["events"].to_pylist(), *made["spans"].to_pylist()]
    times = [
        value
        for line in lines
        for name, value in line.items()
        if name.endswith("_s") and value is not None
    ]
    assert len(times) > 100 and min(times) >= 0


@pytest.mark.parametrize(
    "where", [(provenance, "launched"), (loop, "get_boot_id"), (loop, "Energy")]
)
def test_a_start_that_waits_for_its_machine_is_no_fault_of_its_log(
    where, lab, tmp_path, monkeypatch
):
    """A busy machine takes the core away anywhere, also before the log's first line."""
    module, name = where
    wanted = getattr(module, name)
    waits = []

    def wait(*arguments):
        waits.append(time.sleep(0.3))
        return wanted(*arguments)

    monkeypatch.setattr(module, name, wait)
    run = run_of()
    folder = tmp_path / "runs" / run.identity
    train(run, lab.inputs(run), folder, ALONE)
    assert waits
    assert "init_done" not in rows_of(run, folder)[1]["reasons"]


def test_the_next_attempt_is_not_taken_for_a_second_one_at_the_same_time(lab, tmp_path, clock):
    run = run_of()
    inputs = lab.inputs(run)
    folder = tmp_path / "runs" / run.identity
    interrupted(run, inputs, folder, at=8)
    clock.behind = HOUR
    train(run, inputs, folder, ALONE, 1)
    made, row = rows_of(run, folder)
    assert (row["validity"], row["reasons"], row["attempts"]) == ("valid", "", 2)
    assert 0 < row["stopped_unix_s"] - row["started_unix_s"] < 100
    first, second = made["attempts"].to_pylist()
    assert second["started_unix_s"] < first["started_unix_s"] - HOUR / 2, (
        "each says what its clock said"
    )
