"""System calls on results that fail: one message each that names the place, and the next call ends
well.
"""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.faults.kills import STAGES
from tests.faults.sick_disk import compile_shim
from tests.faults.test_resume import launch, run_of
from tokenscale.base.files import TEMPORARY
from tokenscale.settings.run import BudgetSettings, CheckpointSettings

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


#: of the gate: a build, a training, and tables
FEW = ("tokenizer", "runs", "tables")


@needs_compiler
@pytest.mark.parametrize(
    ("names", "tries", "reached"),
    [(FEW, 1, 2), pytest.param((*STAGES, "end"), 20, 150, marks=pytest.mark.long)],
)
def test_every_job_names_the_place_of_a_failed_call_and_then_ends_well(
    names, tries, reached, stages, tmp_path
):
    argv = ["-m", "tests.faults.sick_disk", stages.folder, tmp_path, ",".join(names), tries, 281128]
    argv = [sys.executable, *argv]
    rows = tmp_path / "rows.jsonl"  # grows while the long test runs
    with rows.open("w") as output:
        done = subprocess.run(
            [*map(str, argv)], stdout=output, stderr=subprocess.PIPE, text=True, timeout=7200
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(found) >= reached, "not one fault in three is reached"
    for row in found:
        # `verify` counts an unreadable file as one that differs, or that it could not check
        codes = (0, 1, 2, 3) if row["job"][0] == "verify" else (0, 2)
        assert row["code"] in codes and "Traceback" not in row["said"], row
        if row["code"] == 2:
            own = re.sub(f"folder  {tmp_path}.*", "", row["said"])  # the working folder
            assert re.search(r"\bresults\b", own), row
            assert "\n  next  " in row["said"], row
        assert row["again"] == 0, row
        assert not row["temporary"] and not row["differs"], row


@pytest.mark.long
@needs_compiler
def test_two_ranks_write_their_checkpoints_where_no_lock_reaches_the_other_node(
    lab, tmp_path, monkeypatch
):
    """Lustre mounted with localflock: every flock is granted at once."""
    each_step = CheckpointSettings(every=1, keep_last=20, keep_resume_state=True)
    run = run_of(world_size=2, checkpoints=each_step, device="cpu")
    run = replace(run, budget=BudgetSettings(steps=20))
    monkeypatch.setenv("SHIM", f"{tmp_path} flock 0 1 {1 << 30}")
    monkeypatch.setenv("SHIM_LOG", str(tmp_path / "granted.txt"))
    monkeypatch.setenv("LD_PRELOAD", str(compile_shim(tmp_path)))
    process = launch(lab, run, tmp_path / "run")
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert (tmp_path / "granted.txt").exists()
    steps = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step=*"))
    assert steps == [f"step={step:08d}" for step in range(1, 21)]
    assert not [*(tmp_path / "run").rglob(f"{TEMPORARY}*")]
