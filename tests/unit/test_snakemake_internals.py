"""Private parts of Snakemake are used in one file, and a release without one of them is refused
clearly.
"""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenscale.base.errors import UserError
from tokenscale.cli.snakemake import internals
from tokenscale.cli.snakemake.jobs import Job, list_planned_jobs, read_failed_jobs

ROOT = Path(__file__).parents[2]
RULES = [ROOT / "workflow/Snakefile", *sorted((ROOT / "workflow/rules").glob("*.smk"))]
PLUGIN = [
    ROOT / "src/snakemake_logger_plugin_tokenscale/__init__.py",
    *sorted((ROOT / "src/tokenscale/cli/snakemake").glob("[!_i]*.py")),
]


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


def test_jobs_to_submit_leave_out_local_rules_and_targets_and_another_release_is_refused():
    names = {"train": False, "figure": False, "all": True}
    jobs = [
        SimpleNamespace(rule=SimpleNamespace(name=name), is_norun=norun)
        for name, norun in names.items()
    ]
    dag = SimpleNamespace(jobs=jobs, needrun_jobs=lambda exclude_finished: jobs)
    assert (
        internals.get_jobs_to_submit(SimpleNamespace(dag=dag, _localrules={"figure"})) == jobs[:1]
    )
    with pytest.raises(UserError, match="does not fit the workflow") as caught:
        internals.get_jobs_to_submit(SimpleNamespace())
    assert (
        "_localrules" in caught.value.facts["found"] and "pip install" in caught.value.facts["next"]
    )


#: names of Snakemake that are no part of its documented interface
PRIVATE = (
    r"(?<!/)\bworkflow\.\w|(?:from|import) snakemake\b(?!\.utils import min_version)"
    r"|os\._exit|sys\.argv"
)


@pytest.mark.parametrize("path", [*RULES, *PLUGIN], ids=lambda path: path.name)
def test_private_names_are_used_in_one_guarded_file(path):
    assert re.findall(PRIVATE, path.read_text()) == []


WITHOUT = """
import sys
import snakemake.cli
import {module} as module
owner = {owner}
del owner.{name}
from snakemake.cli import main
main(["-n", "--cores", "1", "--logger", "tokenscale"])
"""
PLAIN = """
from tokenscale.cli.snakemake import internals
with internals.exit_on_error():
    internals.is_main_process(workflow)
rule all:
    shell: "true"
"""


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("snakemake.logging", "module", "ColorizingTextHandler"),
        ("snakemake.logging", "module", "DefaultFormatter"),
        ("snakemake.workflow", "module.Workflow", "is_main_process"),
    ],
)
def test_a_release_without_a_name_is_refused_in_one_message(tmp_path, module, owner, name):
    (tmp_path / "Snakefile").write_text(PLAIN)
    code = WITHOUT.format(module=module, owner=owner, name=name)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    text = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in text, text
    assert text.count("this release of Snakemake does not fit the workflow.") == 1
    assert name in text and "pip install 'snakemake~=" in text


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
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--keep-going", *options]
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
