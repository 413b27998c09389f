"""Memory is full: for an allocation in a rank, for each library."""

import os
import signal
import time

import duckdb
import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.faults.test_hung import second_rank
from tests.faults.test_resume import first_step, launch, launched, run_of, series, start, wait_for
from tokenscale.cli import main as cli
from tokenscale.cli.main import translate_error
from tokenscale.settings.run import BudgetSettings, CheckpointSettings
from tokenscale.train.loop import Training

HUGE = 1 << 60


def of_duckdb():
    with duckdb.connect(config={"memory_limit": "1MB", "temp_directory": ""}) as connection:
        connection.sql(
            "SELECT max(x) FROM (SELECT list(range) AS x FROM range(1000000) GROUP BY range % 7)"
        ).fetchall()


LIBRARIES = {
    "Python": lambda: bytearray(HUGE),
    "NumPy": lambda: np.ones(HUGE, np.uint8),
    "Arrow": lambda: pa.allocate_buffer(HUGE),
    "torch": lambda: torch.empty(HUGE, dtype=torch.uint8),
    "DuckDB": of_duckdb,
}


def test_what_each_library_says_is_one_message_and_other_errors_are_not():
    for allocate in LIBRARIES.values():
        with pytest.raises(Exception) as caught:
            allocate()
        said = translate_error(caught.value).render()
        assert (
            said.startswith("tokenscale: main memory was full")
            and "  next    allow more memory" in said
        ), said
    said = translate_error(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    ).render()
    assert said.startswith("tokenscale: a GPU's memory was full.") and "micro_batch" in said
    assert translate_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert translate_error(ValueError("remember")) is None


def test_a_rank_without_memory_says_so_and_the_run_then_goes_on(lab, tmp_path, monkeypatch, capsys):
    run = run_of(device="cpu")
    inputs = lab.inputs(run)
    step = Training.step

    def full(training):
        if training.done == 8:
            # it is written beside the steps
            while not (tmp_path / "cut/checkpoints/step=00000006").exists():
                time.sleep(0.001)
            torch.empty(HUGE, dtype=torch.uint8)
        return step(training)

    argv = ["rank", "--settings", run.to_json(), "--directory", str(tmp_path / "cut")]
    argv += ["--store", str(inputs.store), "--validation-store", str(inputs.validation_store)]
    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", full)
        assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("tokenscale: main memory was full") and "Traceback" not in said
    assert cli.main([*argv, "--attempt", "1"]) == 0
    assert first_step(tmp_path / "cut/attempt=01") == 6


def test_a_rank_that_the_kernel_kills_is_told_as_such_and_the_run_goes_on(lab, tmp_path):
    """The out-of-memory killer sends SIGKILL to one process, the largest: launcher and other ranks
    live on.
    """
    run = run_of(
        world_size=2,
        budget=BudgetSettings(steps=40),
        checkpoints=CheckpointSettings(every=4),
        device="cpu",
    )
    process = launch(lab, run, tmp_path / "cut")
    wait_for(process, lambda: list((tmp_path / "cut/checkpoints").glob("step=*[0-9]")))
    os.kill(second_rank(process.pid), signal.SIGKILL)
    _, said = process.communicate(timeout=100)
    assert process.returncode != 0 and "rank 1" in said and "SIGKILL" in said
    assert (
        "a process was killed without a message, most often because main memory was full" in said
    ), said
    assert launched(lab, run, tmp_path / "cut")[0] == 0
    start(run, lab.inputs(run), tmp_path / "whole")
    assert series(tmp_path / "cut") == series(tmp_path / "whole")
    assert (step := first_step(tmp_path / "cut/attempt=01")) > 0 and step % 4 == 0
