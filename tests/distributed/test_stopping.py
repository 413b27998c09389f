"""One rank of several is told to stop: all stop after the same step, and the next attempt goes on
from there.
"""

import os
import signal
from dataclasses import replace

import pytest

from tests.corpora import small_run, words_lab
from tests.distributed.ranks import run_ranks
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import BudgetSettings, ScheduleSettings
from tokenscale.train.loop import Training
from tokenscale.train.watchdog import Interrupted

pytestmark = pytest.mark.slow(16)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return words_lab(tmp_path_factory.mktemp("lab"))


def one_rank(world, run, inputs, directory, attempt, told):
    """(whether it was stopped, after which step) of a rank that gets a signal before the steps
    `told` names for it.
    """
    training = Training(run, inputs, directory, world, attempt)
    step = training.step

    def with_signal():
        if training.done in told.get(world.rank, ()):
            os.kill(os.getpid(), signal.SIGUSR1)
        return step()

    training.step = with_signal
    try:
        training.run()
    except Interrupted as stopped:
        return True, stopped.step
    return False, training.done


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout, budget",
    [
        ({"data": 2}, {"steps": 9}),
        ({"data": 2}, {"useful_tokens": 1000}),
        ({"pipeline": 2}, {"steps": 9}),
        ({"tensor": 2}, {"epochs": 0.3}),
    ],
)
def test_all_ranks_stop_after_the_same_step(lab, tmp_path, layout, budget):
    model = replace(PRESETS["llama-micro"], layers=2, heads=2, key_value_heads=2)
    options = {
        "layout": LayoutSettings(**layout),
        "budget": BudgetSettings(**budget),
        "global_batch": 4,
    }
    run = small_run(model=model, schedule=ScheduleSettings(warmup_steps=1), **options)
    inputs = lab.inputs(run)
    # rank 1 alone, then both in different steps: all hear of it one step later
    assert run_ranks(one_rank, 2, run, inputs, tmp_path, 0, {1: [1]}) == [(True, 3)] * 2
    assert run_ranks(one_rank, 2, run, inputs, tmp_path, 1, {0: [4], 1: [5]}) == [(True, 6)] * 2
    (first, last), other = run_ranks(one_rank, 2, run, inputs, tmp_path, 2, {})
    assert (first, last) == other and not first and last > 6
