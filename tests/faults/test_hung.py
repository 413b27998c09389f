"""A rank that stands still: the run ends, and says which rank it was and where it stood."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests import served
from tests.distributed.ranks import run_ranks
from tests.faults.test_resume import first_step, launch, run_of, series, start, wait_for
from tokenscale.runs.launch.failure_hints import describe_hang
from tokenscale.settings.run import BudgetSettings, CheckpointSettings
from tokenscale.train.loop import Training
from tokenscale.train.watchdog import CODE

#: seconds for which a rank is stopped
PAUSE = 3


def reading_for_ever():
    time.sleep(999)


def one_rank(world, run, inputs, directory):
    training = Training(run, inputs, directory, world, hang_s=2)
    if world.rank == 1:
        training.batches.next = reading_for_ever
    training.run()


def test_the_rank_that_hangs_is_named_with_its_stack_and_the_others_as_waiting(lab, tmp_path):
    run = run_of(world_size=2)
    with pytest.raises(AssertionError, match=f"exit code {CODE}"):
        run_ranks(one_rank, 2, run, lab.inputs(run), tmp_path)
    said = describe_hang(tmp_path / "attempt=00", 2)
    assert "  rank 1  is stuck here:\n    | File" in said and "in reading_for_ever" in said
    assert "  waiting for it: rank 0\n" in said


def has_line(log: Path) -> bool:
    return log.exists() and "\n" in log.read_text()


def children(process: int) -> list[int]:
    return [
        int(number)
        for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]


def second_rank(launcher: int) -> int:
    """The process of rank 1."""
    processes = children(launcher)
    (found,) = [
        n for n in processes if "RANK=1" in Path(f"/proc/{n}/environ").read_text().split("\0")
    ]
    return found


@pytest.mark.long
def test_a_rank_that_is_stopped_and_continued_costs_only_that_time(lab, tmp_path):
    """Nothing gives up meanwhile: losses and samples are those of an undisturbed run, in one
    attempt.
    """
    run = run_of(
        world_size=2,
        budget=BudgetSettings(steps=60),
        checkpoints=CheckpointSettings(every=10),
        device="cpu",
    )
    start(run, lab.inputs(run), tmp_path / "whole")
    process = launch(lab, run, tmp_path / "run")
    try:
        steps = tmp_path / "run/attempt=00/rank=00001/steps.jsonl"
        wait_for(process, lambda: has_line(steps))
        stopped = second_rank(process.pid)
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(PAUSE)
        at = [
            len(path.read_text().splitlines())
            for path in (tmp_path / "run/attempt=00").glob("rank=*/steps.jsonl")
        ]
        assert process.poll() is None and max(at) < 60, "the others wait for it"
        os.kill(stopped, signal.SIGCONT)
        _, said = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said
    assert [path.name for path in tmp_path.glob("run/attempt=*")] == ["attempt=00"]
    assert series(tmp_path / "run") == series(tmp_path / "whole")
    longest = max(json.loads(line)["step_s"] for line in steps.read_text().splitlines())
    assert longest > PAUSE - 1, "the pause is in the log"


def test_a_process_that_is_stopped_is_named_and_the_run_goes_on_when_started_again(lab, tmp_path):
    """As where a node's disk does not answer: such a rank can say nothing itself."""
    site = tmp_path / "machine.toml"
    site.write_text('name = "small"\nhang_s = 12\n')
    keep = CheckpointSettings(every=10)
    run = run_of(world_size=2, budget=BudgetSettings(steps=4000), checkpoints=keep, device="cpu")
    process = launch(lab, run, tmp_path / "run", site)
    try:
        wait_for(process, lambda: list((tmp_path / "run/checkpoints").glob("step=*[0-9]")))
        stopped = second_rank(process.pid)
        os.kill(stopped, signal.SIGSTOP)
        _, said = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == CODE
    assert (
        "  rank 1  wrote no stack: it is stopped, blocked on a disk, or its node is gone\n" in said
    )
    assert "  waiting for it: rank 0\n" in said and "Traceback" not in said
    assert not Path(f"/proc/{stopped}").exists(), "it was ended, too"
    again = launch(lab, run, tmp_path / "run", python=served.python())
    try:
        steps = tmp_path / "run/attempt=01/rank=00000/steps.jsonl"
        wait_for(again, lambda: has_line(steps))
        assert first_step(tmp_path / "run/attempt=01") >= 10, "it goes on from a state"
    finally:
        os.killpg(again.pid, signal.SIGKILL)
        again.wait()
