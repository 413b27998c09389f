"""Long runs: 20,000 steps in the memory, files and log bytes of the first thousands, and 50 resumes
that equal one run.

Writes `evidence/long-tests/runs.txt`.
"""

import json
import os
import signal
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.faults.conftest import lab  # noqa: F401
from tests.faults.test_hung import children
from tests.faults.test_resume import interrupted, launch, run_of, series, start
from tests.long import logs
from tokenscale.runs.records.provenance import read_sealed
from tokenscale.settings.run import BudgetSettings, CheckpointSettings, ValidationSettings

pytestmark = [pytest.mark.long, pytest.mark.slow(600)]

STEPS = 20_000
RESUMES = 50
#: from here on nothing is new: imports, first states and validations are behind
SETTLED = 5_000
LINES: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def log():
    yield
    if LINES:
        logs.write("runs", "\n".join(LINES) + "\n")


@dataclass
class Sample:
    """Anonymous memory and open files of a process after a step."""

    step: int
    kib: int
    files: int


def sample(process: int, step: int) -> Sample:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines()
    )
    kib = (
        int(status["RssAnon"].split()[0])
        if "RssAnon" in status
        else int(status["VmRSS"].split()[0])
    )
    return Sample(step, kib, len(os.listdir(f"/proc/{process}/fd")))


def watch(process, directory: Path) -> dict[str, list[Sample]]:
    """Sample launcher and ranks twice a second until the launcher ends."""
    found: dict[str, list[Sample]] = defaultdict(list)
    while process.poll() is None:
        try:
            step = json.loads((directory / "status.json").read_text())["step"]
            ranks = children(process.pid)
            for name, number in (
                ("launcher", process.pid),
                *((f"rank {rank}", n) for rank, n in enumerate(ranks)),
            ):
                found[name].append(sample(number, step))
        except (OSError, ValueError, KeyError):
            pass  # not yet there, or gone
        time.sleep(0.5)
    return found


def middle(samples: list[Sample], field: str, first: int, last: int) -> float:
    return statistics.median(getattr(s, field) for s in samples if first <= s.step < last)


def test_memory_and_files_of_twenty_thousand_steps_stay_flat(lab, tmp_path):  # noqa: F811
    run = run_of(
        device="cpu",
        global_batch=2,
        micro_batch=1,
        sequence_length=16,
        budget=BudgetSettings(steps=STEPS),
        validation=ValidationSettings(rows=4, every=1000),
        checkpoints=CheckpointSettings(every=500, keep_last=2),
    )
    process = launch(lab, run, tmp_path / "run")
    try:
        found = watch(process, tmp_path / "run")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, process.stderr.read()
    assert found.keys() == {"launcher", "rank 0"}
    written = sum(
        path.stat().st_size for path in (tmp_path / "run").glob("attempt=*/**/*") if path.is_file()
    )
    LINES.append(f"{STEPS:,} steps of one rank: {written / STEPS:.0f} log bytes a step")
    grown = {}
    for name, samples in found.items():
        early = (SETTLED, 2 * SETTLED)
        late = (STEPS - SETTLED, STEPS)
        before, after = (middle(samples, "kib", *part) for part in (early, late))
        files = [int(middle(samples, "files", *part)) for part in (early, late)]
        grown[name] = after - before
        LINES.append(
            f"  {name:<9} {before / 1024:.1f} MiB in steps {early[0]:,} to {early[1]:,}, "
            f"{after / 1024:.1f} MiB in "
            f"the last {SETTLED:,}; open files {files[0]} and {files[1]}"
        )
        assert files[0] == files[1], name
    assert all(kib < 2048 for kib in grown.values()), (
        f"KiB more after {STEPS - 2 * SETTLED:,} steps: {grown}"
    )
    assert written / STEPS < 1024


def test_fifty_resumes_in_a_row_equal_one_run(lab, tmp_path):  # noqa: F811
    steps = 2 * RESUMES + 4
    keep = CheckpointSettings(every=2, keep_last=2)
    run = run_of(
        budget=BudgetSettings(steps=steps), checkpoints=keep, validation=ValidationSettings(rows=0)
    )
    run = replace(run, device="cpu")
    inputs = lab.inputs(run)
    start(run, inputs, tmp_path / "whole")
    for attempt in range(RESUMES):
        interrupted(run, inputs, tmp_path / "cut", at=2 * attempt + 3, attempt=attempt)
    start(run, inputs, tmp_path / "cut", attempt=RESUMES)
    firsts = [
        json.loads(path.read_text().partition("\n")[0])["step"]
        for path in sorted((tmp_path / "cut").glob("attempt=*/rank=00000/steps.jsonl"))
    ]
    assert firsts == [2 * attempt for attempt in range(RESUMES + 1)], (
        "each goes on from the newest state"
    )
    assert (
        series(tmp_path / "cut") == series(tmp_path / "whole")
        and len(series(tmp_path / "whole")) == steps
    )
    outcome = read_sealed(tmp_path / "cut/run.json")["outcome"]
    assert outcome["status"] == "complete" and outcome["steps"] == steps
    LINES.append(
        f"{RESUMES} resumes in a row: losses, gradient norms and samples of {steps} steps as in "
        "one run"
    )
