"""What `status` says of runs, by what trainings leave behind in each state, and of SLURM's
queue.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.machines import program
from tests.refusals import refused
from tokenscale.analysis import live
from tokenscale.base.files import get_boot_id, lock_folder
from tokenscale.cli import main as cli
from tokenscale.cli.status import queue, runs
from tokenscale.cli.train.inputs import note_folder
from tokenscale.runs.records.events import Status
from tokenscale.runs.records.provenance import seal_record

RUN = "packed-llama-tiny-ddp-w2-0123456789"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A working folder on a machine without any program."""
    monkeypatch.setenv("COLUMNS", "120")  # workers of a test session are told of narrow terminals
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("bin", "work/results"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def results(folder):
    return folder / "results"


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


def job(state, of=RUN, number="7", rule="train", used_s=7200):
    return queue.QueuedJob(number, rule, of, state, "Priority", used_s, 7200, 1, "", None)


def said(capsys, *options):
    assert cli.main(["status", *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("outcome, word", [("complete", "complete"), ("nonfinite", "diverged")])
def test_a_sealed_run_is_what_its_record_says(results, outcome, word):
    folder = made(results, ago=900, step=24, steps=24, state=outcome)
    seal_record(folder, {"attempt": 0}, {"status": outcome, "steps": 24})
    assert only(results).state == word
    record = json.loads((folder / "run.json").read_text())
    # the seal does not match: not a result
    (folder / "run.json").write_text(json.dumps(record | {"attempt": 1}))
    assert only(results).state == "interrupted"


@pytest.mark.parametrize(
    ("ago", "status", "words"),
    [
        (14, {"step": 120, "loss": 4.12341}, "step 120 of 400, loss 4.1234"),
        (720, {"step": 120, "loss": 4.1}, "silent for 12 min"),
        (3, None, "before its first step"),
    ],
)
def test_a_running_one_tells_how_far_it_is(results, capsys, ago, status, words):
    folder = made(
        results,
        attempt=1,
        ago=ago,
        **(status | {"steps": 400, "state": "running"} if status else {}),
    )
    with lock_folder(folder, "it"):
        text = said(capsys)
    assert f"  running  {RUN}  attempt=01  " in text and words in text


def logged(folder, rank=0, steps=5, step_s=0.5, useful=1000, end=b""):
    path = folder / f"attempt=00/rank={rank:05d}/steps.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = [
        {"step": n, "step_s": 9.0 if n == 0 else step_s, "useful_tokens": useful}
        for n in range(steps)
    ]
    path.write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode() + end)


def test_a_running_run_says_its_pace_and_how_long_it_will_take(results, capsys):
    """The slower of two ranks counts, and tokens of both; the first step does not, nor one that a
    rank is at.
    """
    folder = made(results, ago=2, step=4, steps=400, loss=4.0, state="running")
    logged(folder, 0)
    logged(folder, 1, steps=4, step_s=0.8, useful=600, end=b'{"step": 4, "step')
    with lock_folder(folder, "it"):
        text = " ".join(said(capsys).split())
        found = only(results)
    assert "2,000 useful tokens/s, 5 min 16 s to go" in text
    assert (found.step_s, found.useful_tokens_per_s, found.left_s) == pytest.approx(
        (0.8, 2000.0, 316.8)
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"rubbish\n[1]\n", b'{"step":1}\n', b'{"step":1,"step_s":0,"useful_tokens":1}\n'],
)
def test_a_log_that_says_no_pace_is_no_error(results, capsys, content):
    folder = made(results, ago=2, step=1, steps=400, loss=4.0, state="running")
    logged(folder, steps=0, end=content)
    with lock_folder(folder, "it"):
        assert "step 1 of 400, loss 4.0000" in said(capsys)


def test_only_the_end_of_a_long_log_is_read(results, monkeypatch):
    folder = made(results, ago=2, step=1, steps=400, loss=4.0, state="running")
    for rank in (0, 1):
        logged(folder, rank, steps=2000)
    calls = []
    loads = json.loads
    monkeypatch.setattr(live.json, "loads", lambda text: calls.append(text) or loads(text))
    assert live.current_throughput(folder / "attempt=00")["step_s"] == 0.5 and len(calls) < 2500


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
    later = job("RUNNING", number="8", used_s=0)
    assert only(results, job("RUNNING"), later).job == "7", "of two, the first that runs"
    assert only(results, job("PENDING"), later).job == "8"
    (folder / ".lock").write_text("process 4242 on nid000002, job 7\n")
    assert only(results, job("RUNNING", "", rule="tokenscale-mine")).job == "7", "started by hand"


def test_a_new_attempt_or_job_has_not_the_progress_of_the_one_before(results):
    folder = made(results, attempt=1, ago=90, step=91, steps=400, loss=4.8, state="running")
    (folder / "attempt=01/attempt.json").write_text("{}")
    with lock_folder(folder, "it"):
        assert (only(results).state, only(results).step) == ("running", None)
    shutil.rmtree(results)
    made(results, ago=400, step=91, steps=400, loss=4.8, state="running", host="nid000002")
    found = only(results, job("RUNNING", used_s=17))
    assert (found.state, found.step, found.is_silent(time.time())) == ("running", None, False)
    found = only(results, job("RUNNING", used_s=500))
    assert (
        found.step == 91
        and found.is_silent(time.time())
        and only(results, job("PENDING")).step == 91
    )


def test_a_failed_one_says_why_and_one_that_was_told_to_stop_has_not_failed(results, capsys):
    log = "step 1/4\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    made(results, ago=3600, step=1, steps=4, loss=8.0, state="running", log=log)
    text = said(capsys)
    assert (
        f"  failed  {RUN}  attempt=00" in text
        and "a GPU's memory was full" in text
        and "next  a smaller" in text
    )
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
    assert names == [
        "rank=00003.log",
        f"{RUN}.log",
        "rank=00000.log",
        "rank=00001.log",
        "rank=00002.log",
    ]


def test_what_is_half_there_breaks_nothing(results):
    folder = made(results, ago=3600)
    (folder / "run.json").write_text('{"sche')
    (folder / "status.json").write_text("[1")
    assert only(results).state == "interrupted"
    (results / "runs/begun-by-snakemake").mkdir()
    assert only(results).id == RUN


def test_runs_that_train_started_elsewhere_are_listed(results, capsys):
    """By the list that `train --output-dir` writes once; a folder that is gone is left out."""
    made(results, ago=900)
    elsewhere = made(
        results.parent / "my out", "own-w1-0123456789", step=3, steps=9, loss=2.0, state="running"
    )
    for folder in (
        results.parent / "my out/runs",
        results.parent / "gone",
        Path("my out/runs"),
        Path("results/runs"),
    ):
        note_folder(folder)
    with lock_folder(elsewhere, "it"):
        text = said(capsys)
        assert "SLURM is not installed here" in text
        assert {run.id for run in runs.read_runs(results)} == {RUN, "own-w1-0123456789"}
    assert f"results/runs, {results.parent}/my out/runs: 1 running, 1 interrupted" in " ".join(
        text.split()
    )


# -- SLURM's queue, by a squeue that says what the real one (22.05) says


def line(folder, number=6, state="RUNNING", reason="None", **values):
    usual = {
        "used": "0:04",
        "limit": "12:00:00",
        "count": 1,
        "nodes": "nid000002",
        "start": "2026-11-21T16:12:12",
    }
    usual |= {"name": "tokenscale_12234107-f5a1", "comment": f"rule_train_wildcards_{RUN}"} | values
    return queue.SEPARATOR.join(map(str, (number, state, reason, *usual.values(), folder)))


def waiting(folder, reason, **values):
    return line(
        folder,
        **{"state": "PENDING", "reason": reason, "used": "0:00", "nodes": "", "start": "N/A"}
        | values,
    )


def squeue(folder, *lines):
    said = folder.parent / "said.txt"
    said.write_text("".join(f"{text}\n" for text in lines))
    # the shell's own words alone: the test's PATH has no `cat`
    program(
        folder.parent / "bin",
        "squeue",
        f'while IFS= read -r l; do printf "%s\\n" "$l"; done < {said}',
    )


def test_jobs_of_this_folder_alone_are_told(folder, capsys):
    (folder.parent / "link").symlink_to(folder)
    squeue(
        folder,
        *("Fri Nov 20 2026", ""),  # lines of another shape
        line(folder),
        # its user's, from here, but no job of ours
        line(folder, 7, name="interactive", comment="(null)"),
        line(folder.parent, 8),  # of another working folder
        line(
            folder.parent / "link",
            9,
            name="tokenscale-by-hand",
            comment="(null)",
            count=4,
            nodes="nid[000001-4]",
        ),
        line(
            folder,
            10,
            comment="rule_build_corpus_wildcards_web",
            limit="UNLIMITED",
            used="1-00:00:10",
        ),
        line(folder, 11, state="COMPLETING", comment="rule_report", used="0:59", limit="1:00"),
        line(folder, 12, used="0:00", comment="rule_report"),  # in its first second
        waiting(folder, "Priority", number=13, comment="rule_report"),
    )
    head, *told = said(capsys).split("\n\n")[0].splitlines()[:7]
    assert head == "jobs   6 of this folder: 4 running, 1 ending, 1 waiting"
    assert [" ".join(text.split()) for text in told] == [
        f"6 running train {RUN} 4 s of 12 h nid000002",
        "9 running tokenscale-by-hand 4 s of 12 h nid[000001-4]",
        "10 running build_corpus web 1 d of no limit nid000002",
        "11 ending report 59 s of 1 min nid000002",
        "12 running report under 1 s of 12 h nid000002",
        "13 waiting report limit 12 h 1 node",
    ]


def test_a_waiting_job_says_why_what_to_do_and_when_it_starts(folder, capsys):
    squeue(
        folder,
        waiting(folder, "JobHeldUser", number=3),
        waiting(folder, "Priority", number=4, start="2999-01-01T17:11:53"),
        waiting(folder, "QOSGrpGRES", number=5, start="soon"),
    )
    text = said(capsys)
    assert "held by you (JobHeldUser)\n" in text and "next  scontrol release 3\n" in text
    assert "expected start 2999-01-01 17:11, in " in text
    assert "QOSGrpGRES" in text and "expected start soon\n" in text


@pytest.mark.parametrize(
    "script, words",
    [
        (
            (
                "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect "
                "failure)' "
                ">&2; exit 1"
            ),
            "contact",
        ),
        ("exit 3", "squeue ended with 3"),
        (f"exec {sys.executable} -c 'import time; time.sleep(60)'", "no output within 0.5 s"),
    ],
)
def test_a_controller_that_does_not_answer_is_one_line_and_the_rest_is_told(
    folder, capsys, monkeypatch, script, words
):
    monkeypatch.setattr(queue, "LIMIT_S", 0.5)
    program(folder.parent / "bin", "squeue", script)
    first, _, last = said(capsys).splitlines()
    assert "cannot be read" in first and words in first and last.startswith("runs")


def test_jobs_without_a_snakemake_are_still_ours(folder, capsys):
    squeue(folder, line(folder))
    assert "start it again" in said(capsys)
    (folder / ".snakemake/log").mkdir(parents=True)
    # as a Snakemake holds it while it lives
    with (folder / ".snakemake/log/now.snakemake.log").open("w"):
        assert "start it again" not in said(capsys)
    assert "start it again" in said(capsys)


def test_a_job_that_waits_for_anothers_lock_says_so(folder, capsys):
    squeue(
        folder,
        line(folder, 21),
        line(folder, 22),
        line(folder, 23, comment="rule_train_wildcards_another"),
    )
    assert [text.strip() for text in said(capsys).splitlines() if "why" in text] == [
        "why   job 21 trains this run; this job waits until it ends"
    ]


def test_programs_get_the_same_as_json(folder, capsys):
    squeue(folder, waiting(folder, "JobHeldUser", number=3))
    found = json.loads(said(capsys, "--json"))
    expected = {
        "id": "3",
        "rule": "train",
        "of": RUN,
        "limit_s": 43_200,
        "next": "scontrol release 3",
        "start": None,
    }
    (job,) = found["slurm"]["jobs"]
    assert expected.items() <= job.items() and found["schema"] == 1 and found["runs"] == []
    assert "--json cannot be combined" in refused(capsys, ["status", "--failed", "--json"])
