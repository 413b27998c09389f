"""What is done with private parts of Snakemake: signals, jobs and their records."""

import io
import json
import logging
import subprocess
import sys
import time
from logging.handlers import QueueHandler, QueueListener
from queue import Queue
from types import SimpleNamespace

import pytest

from tests import served
from tokenscale.base.errors import UserError
from tokenscale.cli.snakemake import internals
from tokenscale.cli.snakemake.jobs import Job, list_planned_jobs, read_failed_jobs


def test_a_second_interrupt_waits_and_a_third_ends():
    code = """if True:
        import os, signal, sys
        from tokenscale.cli.snakemake.internals import wait_for_jobs_when_interrupted
        signal.signal(signal.SIGINT, signal.default_int_handler)
        wait_for_jobs_when_interrupted()
        for expected in (True, False, True):
            try:
                signal.raise_signal(signal.SIGINT)
                assert not expected
            except KeyboardInterrupt:
                assert expected
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (
        done.returncode == 0 and done.stderr.count("tokenscale: ") == 1 and "save" in done.stderr
    ), done.stderr


def test_a_signal_that_comes_while_jobs_are_selected_does_not_hang_the_call():
    code = """if True:
        import signal, threading
        from tokenscale.cli.snakemake.internals import wait_for_jobs_when_interrupted
        lock, ended = threading.Lock(), threading.Event()  # as Snakemake's scheduler has
        def exit_gracefully(*_):
            with lock:
                ended.set()
        signal.signal(signal.SIGTERM, exit_gracefully)
        wait_for_jobs_when_interrupted()
        with lock:
            signal.raise_signal(signal.SIGTERM)
        assert ended.wait(30)
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class SlowHandler(logging.Handler):
    """Write a line and, later, its end, as Snakemake's handler may."""

    def emit(self, record):
        sys.stderr.write(record.getMessage())
        time.sleep(0.05)
        sys.stderr.write("\n")


@pytest.mark.parametrize("alive", [True, False], ids=["logged by a thread", "its thread has ended"])
def test_an_error_stands_on_lines_of_its_own_and_never_hangs(alive, monkeypatch):
    from snakemake.logging import logger

    queue = Queue()
    handler = QueueHandler(queue)
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setattr(internals, "LONGEST_LOG_WAIT_S", 10 if alive else 0.1)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    listener = QueueListener(queue, SlowHandler())
    if alive:
        listener.start()
    logger.info("Building DAG of jobs...")
    with pytest.raises(SystemExit), internals.exit_on_error():
        raise UserError("no experiment has this run.")
    if alive:
        listener.stop()
        assert sys.stderr.getvalue().splitlines()[0] == "Building DAG of jobs..."
    assert "\ntokenscale: no experiment" in "\n" + sys.stderr.getvalue()


def test_jobs_to_submit_leave_out_local_rules_and_targets():
    names = {"train": False, "figure": False, "all": True}
    jobs = [
        SimpleNamespace(rule=SimpleNamespace(name=name), is_norun=norun)
        for name, norun in names.items()
    ]
    dag = SimpleNamespace(jobs=jobs, needrun_jobs=lambda exclude_finished: jobs)
    assert (
        internals.get_jobs_to_submit(SimpleNamespace(dag=dag, _localrules={"figure"})) == jobs[:1]
    )


SNAKEFILE = """
from tokenscale.cli.snakemake import internals
internals.record_jobs(workflow)

rule all:
    input: "flaky.txt", "bad.txt"

rule flaky:
    output: "flaky.txt"
    log: "flaky.log"
    retries: 1
    shell: "test -e again && touch {output} || {{ touch again; false; }}"

rule bad:
    output: "bad.txt"
    log: "bad.log"
    message: "never made"
    shell: "echo no > {log}; false"
"""


@pytest.mark.parametrize("options", [["--quiet", "all"], ["--logger", "tokenscale"]], ids=" ".join)
def test_jobs_are_recorded_whatever_the_logger_but_not_in_a_dry_run(tmp_path, options):
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    command = [served.python(), "-m", "snakemake", "--cores", "1", "--keep-going", *options]
    subprocess.run([*command, "-n"], cwd=tmp_path, check=True, timeout=60)
    assert not list(tmp_path.glob(".snakemake/log/*"))
    assert subprocess.run(command, cwd=tmp_path, timeout=60).returncode == 1
    log, events = sorted((tmp_path / ".snakemake/log").iterdir(), reverse=True)
    assert (log.suffix, events) == (".log", log.with_suffix(".jsonl"))
    planned = list_planned_jobs(map(json.loads, events.read_text().splitlines()))
    assert Job("bad", ("bad.txt",), ("bad.log",), {"missing": "bad.txt"}, "never made") in planned
    (failed,) = read_failed_jobs(events)
    assert (failed.rule, failed.outputs, failed.logs) == ("bad", ("bad.txt",), ("bad.log",))


def test_a_group_that_fails_is_one_job_with_its_own_log(tmp_path):
    handler = internals.JobEvents(str(tmp_path / "events.jsonl"))
    of_job = {
        "rule_name": "corpus_part",
        "jobid": 7,
        "output": ["a"],
        "log": ["a.log"],
        "aux": {},
        "indent": True,
    }
    group = {
        "event": "group_error",
        "groupid": "parts",
        "aux_logs": ["8.log"],
        "job_error_info": [of_job],
    }
    for fields in (
        group | {"external_jobid": "8"},
        of_job | {"event": "job_error"},
        {"event": "progress"},
    ):
        handler.handle(logging.makeLogRecord(fields))
    assert read_failed_jobs(tmp_path / "events.jsonl") == [
        Job("parts", (), ("8.log",), {"other": ""}, slurm="8")
    ]


def test_the_runs_of_a_job_are_those_of_its_target_jobs(monkeypatch):
    jobs = ["train:run_id=a-w1-0123456789", "record:run_id=b-w2-0123456789", "ingest:experiment=c"]
    words = ["snakemake", "--target-jobs", *jobs, "--allowed-rules", "train", "--mode", "remote"]
    monkeypatch.setattr("sys.argv", words)
    assert internals.get_job_runs() == ["a-w1-0123456789", "b-w2-0123456789"]
    monkeypatch.setattr("sys.argv", ["snakemake", "runs"])
    assert internals.get_job_runs() == []
