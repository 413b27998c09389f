"""What `status` says of runs, by what trainings leave behind in each state."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tokenscale.analysis import queries
from tokenscale.base.files import get_boot_id, lock_folder
from tokenscale.cli import main as cli
from tokenscale.cli import status_runs as runs
from tokenscale.cli.status_queue import QueuedJob
from tokenscale.cli.train_inputs import note_folder
from tokenscale.runs.records.events import Status
from tokenscale.runs.records.provenance import seal_record

RUN = "packed-llama-tiny-ddp-w2-0123456789"


@pytest.fixture
def results(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "120")  # workers of a test session are told of narrow terminals
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results"


def made(results, name=RUN, *, attempt=0, ago=0.0, log="", host=None, **status):
    """A run's folder as a training leaves it that last wrote so many seconds ago."""
    folder = results / "runs" / name
    events = folder / f"attempt={attempt:02d}/rank=00000/events.jsonl"
    events.parent.mkdir(parents=True)
    events.write_text("{}\n")
    os.utime(events, (time.time() - ago,) * 2)
    if status:
        Status(folder / "status.json").update(**status)
        told = json.loads((folder / "status.json").read_text()) | {"t_unix_s": time.time() - ago}
        (folder / "status.json").write_text(json.dumps(told))
    boot = "0" * 8 if host else (get_boot_id() or "")[:8]
    (folder / ".lock").write_text(f"process 4242 on {host or 'here'}, boot {boot}\n")
    if log:
        (results / "logs/train").mkdir(parents=True, exist_ok=True)
        (results / f"logs/train/{name}.log").write_text(log)
    return folder


def only(results, *jobs):
    (found,) = runs.read_runs(results, jobs)
    return found


def job(state, of=RUN):
    return QueuedJob("7", "train", of, state, "Priority", 7200, 7200, 1, "", None)


def said(capsys):
    assert cli.main(["status"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("outcome, word", [("complete", "complete"), ("nonfinite", "diverged")])
def test_a_sealed_run_is_what_its_record_says(results, outcome, word):
    folder = made(results, ago=900, step=24, steps=24, state=outcome)
    seal_record(folder, {"attempt": 0}, {"status": outcome, "steps": 24})
    assert only(results).state == word
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"attempt": 1}))  # the seal does not match: not a result
    assert only(results).state == "interrupted"


@pytest.mark.parametrize(
    ("ago", "status", "words"),
    [
        (14, {"step": 120, "loss": 4.12341}, "step 120 of 400, loss 4.1234, 14 s ago\n"),
        (720, {"step": 120, "loss": 4.1}, "silent for 12 min"),
        (3, None, "before its first step, 3 s ago\n"),
    ],
)
def test_a_running_one_tells_how_far_it_is(results, capsys, ago, status, words):
    folder = made(results, attempt=1, ago=ago, **(status | {"steps": 400, "state": "running"} if status else {}))
    with lock_folder(folder, "it"):
        text = said(capsys)
    assert "runs   1 under results/runs: 1 running\n" in text and f"  running  {RUN}  attempt=01  " in text
    assert words in text


def logged(folder, rank=0, steps=5, step_s=0.5, useful=1000, end=b""):
    path = folder / f"attempt=00/rank={rank:05d}/steps.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = [{"step": n, "step_s": 9.0 if n == 0 else step_s, "useful_tokens": useful} for n in range(steps)]
    path.write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode() + end)


def test_a_running_run_says_its_pace_and_how_long_it_will_take(results, capsys):
    """The slower of two ranks counts, and tokens of both; the first step does not, nor one that a rank is at."""
    folder = made(results, ago=2, step=4, steps=400, loss=4.0, state="running")
    logged(folder, 0)
    logged(folder, 1, steps=4, step_s=0.8, useful=600, end=b'{"step": 4, "step')
    with lock_folder(folder, "it"):
        text = " ".join(said(capsys).split())
        found = only(results)
    assert "step 4 of 400, loss 4.0000, 2,000 useful tokens/s, 5 min 16 s to go" in text
    assert (found.step_s, found.useful_tokens_per_s, found.left_s) == pytest.approx((0.8, 2000.0, 316.8))


@pytest.mark.parametrize(
    "content", [b"", b"rubbish\n[1]\n", b'{"step":1}\n', b'{"step":1,"step_s":0,"useful_tokens":1}\n']
)
def test_a_log_that_says_no_pace_is_no_error(results, capsys, content):
    folder = made(results, ago=2, step=1, steps=400, loss=4.0, state="running")
    logged(folder, steps=0, end=content)
    with lock_folder(folder, "it"):
        assert "step 1 of 400, loss 4.0000, under 1 s ago" in said(capsys)


def test_only_the_end_of_a_long_log_is_read(results, monkeypatch):
    folder = made(results, ago=2, step=1, steps=400, loss=4.0, state="running")
    for rank in (0, 1):
        logged(folder, rank, steps=2000)
    calls, loads = [], json.loads
    monkeypatch.setattr(queries.json, "loads", lambda text: calls.append(text) or loads(text))
    assert queries.current_throughput(folder / "attempt=00")["step_s"] == 0.5 and len(calls) < 2500


def test_looking_takes_no_lock(results):
    folder = made(results)
    with lock_folder(folder, "it"):
        assert runs.is_locked_here(folder / ".lock")
    assert not runs.is_locked_here(folder / ".lock")
    assert not runs.is_locked_here(folder / "none")


def test_one_runs_here_while_it_is_locked_and_elsewhere_while_it_writes(results):
    folder = made(results, ago=1, step=1, steps=4, state="running")
    assert only(results).state == "interrupted", "killed a moment ago"
    (folder / ".lock").write_text("")
    assert only(results).state == "interrupted", "an orderly end leaves no owner"
    shutil.rmtree(results)
    folder = made(results, ago=5, step=1, steps=4, state="running", host="nid000002")
    assert only(results).state == "running"
    (folder / "status.json").unlink()
    os.utime(folder / "attempt=00/rank=00000/events.jsonl", (time.time() - 3600,) * 2)
    assert only(results).state == "interrupted"


def test_the_queue_says_what_runs_on_other_nodes(results):
    folder = made(results, ago=3600, step=1, steps=4, state="running", host="nid000002")
    found = only(results, job("RUNNING"))
    assert (found.state, found.job) == ("running", "7")
    assert only(results, job("PENDING")).state == "waiting"
    assert only(results, job("RUNNING", of="another")).state == "interrupted"
    later = QueuedJob("8", "train", RUN, "RUNNING", "None", 0, 60, 1, "", None)
    assert only(results, job("RUNNING"), later).job == "7", "of two, the first that runs"
    assert only(results, job("PENDING"), later).job == "8"
    (folder / ".lock").write_text("process 4242 on nid000002, job 7\n")
    by_hand = QueuedJob("7", "tokenscale-mine", "", "RUNNING", "None", 0, 60, 1, "", None)
    assert only(results, by_hand).job == "7"


def test_a_new_attempt_or_job_has_not_the_progress_of_the_one_before(results):
    folder = made(results, attempt=1, ago=90, step=91, steps=400, loss=4.8, state="running")
    (folder / "attempt=01/attempt.json").write_text("{}")
    with lock_folder(folder, "it"):
        assert (only(results).state, only(results).step) == ("running", None)
    shutil.rmtree(results)
    made(results, ago=400, step=91, steps=400, loss=4.8, state="running", host="nid000002")
    fields = ("7", "train", RUN, "RUNNING", "None")
    found = only(results, QueuedJob(*fields, 17, 600, 1, "nid000003", None))
    assert (found.state, found.step, found.is_silent(time.time())) == ("running", None, False)
    found = only(results, QueuedJob(*fields, 500, 600, 1, "nid000003", None))
    assert found.step == 91 and found.is_silent(time.time()) and only(results, job("PENDING")).step == 91


def test_a_failed_one_says_why_and_one_that_was_told_to_stop_has_not_failed(results, capsys):
    log = "step 1/4\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    made(results, ago=3600, step=1, steps=4, loss=8.0, state="running", log=log)
    text = said(capsys)
    assert f"  failed  {RUN}  attempt=00  step 1 of 4, loss 8.0000, 1 h ago\n" in text and "status --failed" in text
    assert "why   a GPU's memory was full" in text and "next  a smaller micro_batch" in text
    shutil.rmtree(results)
    made(results, ago=1, step=1, steps=4, state="interrupted", log="signal SIGTERM\n")
    assert (only(results).state, only(results).hint) == ("interrupted", None)


@pytest.mark.parametrize(
    "words",
    [
        "rank 3 failed first (exit code 1); ending 3 other rank(s).",
        "rank 3 on nid000002 failed first (Exited with exit code 1).",
        "a rank failed.\n  output  results/runs/x/attempt=02/output/rank=00003.log, which is empty",
    ],
)
def test_the_log_of_the_rank_that_failed_first_comes_first(results, words):
    folder = made(results, attempt=2, log=f"tokenscale: {words}\n")
    (folder / "attempt=02/output").mkdir()
    for rank in range(4):
        (folder / f"attempt=02/output/rank={rank:05d}.log").write_text("x\n")
    names = [path.name for path in runs.find_logs(folder, 2)]
    assert names == ["rank=00003.log", f"{RUN}.log", "rank=00000.log", "rank=00001.log", "rank=00002.log"]


def test_what_is_half_there_breaks_nothing(results):
    folder = made(results, ago=3600)
    (folder / "run.json").write_text('{"sche')
    (folder / "status.json").write_text("[1")
    assert only(results).state == "interrupted"
    (results / "runs/begun-by-snakemake").mkdir()
    assert only(results).id == RUN


def test_runs_that_train_started_elsewhere_are_listed(results, capsys, tmp_path):
    """By the list that `train --output-dir` writes once; a folder that is gone is left out."""
    made(results, ago=900)
    elsewhere = made(tmp_path / "my out", "own-w1-0123456789", step=3, steps=9, loss=2.0, state="running")
    for folder in (tmp_path / "my out/runs", tmp_path / "gone", Path("my out/runs"), Path("results/runs")):
        note_folder(folder)
    with lock_folder(elsewhere, "it"):
        text = said(capsys)
        assert {run.id for run in runs.read_runs(results)} == {RUN, "own-w1-0123456789"}
    text = " ".join(text.split())
    assert f"runs 2 under results/runs, {tmp_path}/my out/runs: 1 running, 1 interrupted" in text
    assert "running own-w1-0123456789 attempt=00 step 3 of 9, loss 2.0000" in text


def test_the_end_of_a_log_is_text(tmp_path):
    (tmp_path / "x.log").write_bytes(b"\x1b[31mred\x1b[0m\n 1%\r 2%\r 3%\nend\r\n\xff")
    assert runs.read_tail(tmp_path / "x.log") == "red\n 3%\nend\n\N{REPLACEMENT CHARACTER}"
    assert runs.read_tail(tmp_path / "x.log", 5) == "nd\n\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("asked", ["--stale", "--failed"])
def test_json_is_refused_where_there_is_none(asked, capsys):
    assert cli.main(["status", asked, "--json"]) == 2
    assert "--json cannot be combined" in capsys.readouterr().err
