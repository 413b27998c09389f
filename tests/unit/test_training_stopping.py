"""A signal between two steps: a state, no seal, and the next attempt has the losses of a run that
was never stopped.
"""

import json
import os
import signal

import pytest
import torch

from tests.corpora import small_run, words_lab
from tests.logs import read_steps, series
from tokenscale.runs.records.provenance import read_sealed
from tokenscale.settings.run import BudgetSettings, ScheduleSettings
from tokenscale.train import loop, watchdog
from tokenscale.train.parallel.world import World
from tokenscale.train.watchdog import Interrupted, Signals

WORLD = World(0, 1, 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return words_lab(tmp_path_factory.mktemp("lab"))


def tell(monkeypatch, number):
    step = loop.Training.step

    def told(training):
        if training.done == 2:
            os.kill(os.getpid(), number)
        return step(training)

    monkeypatch.setattr(loop.Training, "step", told)


def test_a_signal_ends_a_run_between_two_steps_and_the_next_attempt_goes_on(
    lab, tmp_path, monkeypatch
):
    """By SIGUSR1: test_stopping.py."""
    run = small_run(steps=6)
    loop.train(run, lab.inputs(run), tmp_path / "whole", WORLD)
    tell(monkeypatch, signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as stopped:
        loop.train(run, lab.inputs(run), tmp_path / "run", WORLD, 0)
    monkeypatch.undo()
    assert stopped.value.step == 3 and signal.getsignal(signal.SIGTERM) is before
    assert read_sealed(tmp_path / "run/run.json") is None
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["step"]) == ("interrupted", 3)
    assert [*read_steps(tmp_path / "run")] == [0, 1, 2]
    loop.train(run, lab.inputs(run), tmp_path / "run", WORLD, 1)
    assert series(tmp_path / "run") == series(tmp_path / "whole")
    assert (tmp_path / "run/attempt=01/rank=00000/steps.jsonl").read_text().count("\n") == 3


def test_a_run_told_to_stop_in_its_last_step_is_complete(lab, tmp_path, monkeypatch):
    run = small_run(steps=3)
    tell(monkeypatch, signal.SIGTERM)
    loop.train(run, lab.inputs(run), tmp_path, WORLD)
    assert read_sealed(tmp_path / "run.json")["outcome"]["status"] == "complete"


def test_a_second_interrupt_of_a_terminal_ends_at_once_and_what_nohup_ignores_stays_ignored():
    # a shell ignores it for its background jobs
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.stop_requested is None
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.stop_requested == "SIGINT"
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGHUP, hangup)


def test_a_run_of_some_seconds_that_was_stopped_before_its_last_step_still_has_it(
    lab, tmp_path, monkeypatch
):
    """Of a budget in seconds, the step that begins after them is the last; a stop before it must
    not take it away.
    """
    run = small_run(budget=BudgetSettings(wall_s=600), schedule=ScheduleSettings(warmup_steps=1))
    tell(monkeypatch, signal.SIGTERM)
    with pytest.raises(Interrupted):
        loop.train(run, lab.inputs(run), tmp_path / "run", WORLD, 0)
    budget = loop.Training(run, lab.inputs(run), tmp_path / "run", WORLD, 1).budget
    state = json.loads(
        next((tmp_path / "run/checkpoints").glob("step=*/checkpoint.json")).read_text()
    )["budget"]
    assert 0 < state["clock"] < state["seconds"] and budget._done == state["clock"]


def test_the_start_may_take_three_times_as_long_as_a_step(tmp_path, monkeypatch):
    armed = []
    monkeypatch.setattr(
        watchdog.faulthandler, "dump_traceback_later", lambda seconds, file: armed.append(seconds)
    )
    watch = watchdog.Watchdog(tmp_path / "stacks.txt", limit_s=100)
    watch.beat(is_start=True)  # at once after the first: it is armed already
    watch.beat()
    watch.beat()
    watch.close()
    assert armed == [300, 100]
