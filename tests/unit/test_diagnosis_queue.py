"""What `status` says of SLURM's queue, by a squeue that says what the real one (22.05) says."""

import json
import sys

import pytest

from tests.machines import program
from tokenscale.cli import main as cli
from tokenscale.cli import status
from tokenscale.cli import status_queue as queue

RUN = "packed-llama-tiny-ddp-w2-0123456789"
#: SLURM's reason → what must be in its explanation
REASONS = {
    "Priority": "higher priority",
    "DependencyNeverSatisfied": "has failed",
    "ReqNodeNotAvail, UnavailableNodes:nid000003": "down",
    "ReqNodeNotAvail, Reserved for maintenance": "maintained",
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved": "drained",
    "PartitionTimeLimit": "more time",
    "AssocGrpCPUMinutesLimit": "used up",
    "QOSMaxJobsPerUserLimit": "QOSMaxJobsPerUserLimit",
    "QOSGrpGRES": "QOSGrpGRES",
    "QOSMaxWallDurationPerJobLimit": "one job",
}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "120")  # workers of a test session are told of narrow terminals
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "work/results").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def line(folder, number=6, state="RUNNING", reason="None", **values):
    usual = {"used": "0:04", "limit": "12:00:00", "count": 1, "nodes": "nid000002", "start": "2026-11-21T16:12:12"}
    usual |= {"name": "tokenscale_12234107-f5a1", "comment": f"rule_train_wildcards_{RUN}"} | values
    return queue.SEPARATOR.join(map(str, (number, state, reason, *usual.values(), folder)))


def waiting(folder, reason, **values):
    return line(folder, **{"state": "PENDING", "reason": reason, "used": "0:00", "nodes": "", "start": "N/A"} | values)


def squeue(folder, *lines):
    said = folder.parent / "said.txt"
    said.write_text("".join(f"{text}\n" for text in lines))
    # the shell's own words alone: the test's PATH has no `cat`
    program(folder.parent / "bin", "squeue", f'while IFS= read -r l; do printf "%s\\n" "$l"; done < {said}')


def said(capsys, *options):
    assert cli.main(["status", *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_machine_without_slurm_says_so_in_one_line(folder, capsys):
    assert said(capsys) == "jobs   SLURM is not installed here\n\nruns   none under results/runs yet\n"


def test_jobs_of_this_folder_alone_are_told(folder, capsys):
    (folder.parent / "link").symlink_to(folder)
    squeue(
        folder,
        *("Fri Nov 20 2026", ""),  # lines of another shape
        line(folder),
        line(folder, 7, name="interactive", comment="(null)"),  # its user's, from here, but no job of ours
        line(folder.parent, 8),  # of another working folder
        line(folder.parent / "link", 9, name="tokenscale-by-hand", comment="(null)", count=4, nodes="nid[000001-4]"),
        line(folder, 10, comment="rule_build_corpus_wildcards_web", limit="UNLIMITED", used="1-00:00:10"),
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


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_is_told_in_words(folder, reason):
    squeue(folder, waiting(folder, reason))
    (job,) = queue.query_queue().jobs
    why, cure = job.waiting_reason
    assert REASONS[reason] in why
    assert "{" not in cure


def test_what_one_can_do_names_the_job_and_the_start_is_told(folder, capsys):
    squeue(
        folder,
        waiting(folder, "JobHeldUser", number=3),
        waiting(folder, "Priority", number=4, start="2999-01-01T17:11:53"),
        waiting(folder, "Resources", number=5, start="soon"),
    )
    text = said(capsys)
    assert "why   held by you (JobHeldUser)\n" in text and "next  scontrol release 3\n" in text
    assert "why   jobs of higher priority come first; expected start 2999-01-01 17:11, in " in text
    assert "it is next; expected start soon\n" in text


@pytest.mark.parametrize(
    "script, words",
    [
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1", "contact"),
        ("exit 3", "squeue ended with 3"),
        (f"exec {sys.executable} -c 'import time; time.sleep(60)'", "no output within 0.5 s"),
    ],
)
def test_a_controller_that_does_not_answer_is_one_line_and_the_rest_is_told(folder, capsys, monkeypatch, script, words):
    monkeypatch.setattr(queue, "LIMIT_S", 0.5)
    program(folder.parent / "bin", "squeue", script)
    first, empty, runs = said(capsys).splitlines()
    assert first.startswith("jobs   SLURM's queue cannot be read: ") and words in first
    assert runs == "runs   none under results/runs yet"


def test_jobs_without_a_snakemake_are_still_ours(folder, capsys):
    squeue(folder, line(folder))
    assert "start it again" in said(capsys)
    log = folder / ".snakemake/log/now.snakemake.log"
    log.parent.mkdir(parents=True)
    with log.open("w"):  # as a Snakemake holds it while it lives
        assert status.is_snakemake_running(folder)
        assert "start it again" not in said(capsys)
    assert not status.is_snakemake_running(folder)


def test_a_job_that_waits_for_anothers_lock_says_so(folder, capsys):
    squeue(folder, line(folder, 21), line(folder, 22), line(folder, 23, comment="rule_train_wildcards_another"))
    assert [text.strip() for text in said(capsys).splitlines() if "why" in text] == [
        "why   job 21 trains this run; this job waits until it ends"
    ]


def test_programs_get_the_same_as_json(folder, capsys):
    squeue(folder, waiting(folder, "JobHeldUser", number=3))
    found = json.loads(said(capsys, "--json"))
    (job,) = found["slurm"]["jobs"]
    assert (job["id"], job["rule"], job["of"], job["limit_s"]) == ("3", "train", RUN, 43_200)
    assert job["next"] == "scontrol release 3" and job["start"] is None
    assert found["schema"] == 1 and found["runs"] == []
