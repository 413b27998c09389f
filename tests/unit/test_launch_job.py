"""What a launcher learns of its job, from programs that say what SLURM's own say."""

import pytest

from tests.machines import program
from tokenscale.base.errors import UserError
from tokenscale.runs.launch import job

SHOWN = (
    "JobId=45 JobName=tokenscale_1 UserId=root(0) Restarts=2 SubmitTime=2026-11-21T16:00:00"
    " StartTime=2026-11-21T16:01:30 Partition=normal NodeList=nid[000001-000002] BatchHost=nid000001"
    " Command=(null) StdOut=/p/results/logs/45.log Power="
)


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program(
        tmp_path,
        "scontrol",
        # of a job array, all elements are told
        f'case "$2" in job) echo "{SHOWN}"; echo "JobId=46 NodeList=(null)";;'
        " hostnames) echo nid000001; echo nid000002;;"
        ' node) echo "NodeName=nid000001 Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=nid000001";; esac',
    )
    return tmp_path


def test_a_job_is_told_by_its_controller(slurm):
    found = job.load_job("45")
    assert found.nodes == ("nid000001", "nid000002") and found.address == "10.0.0.7"
    assert found.partition == "normal" and found.restarts == 2 and found.log == "/p/results/logs/45.log"
    assert found.record()["queue_s"] == 90.0


def test_a_controller_that_does_not_answer_is_an_error_with_its_words(slurm):
    program(slurm, "scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(UserError, match="Unable to contact slurm controller"):
        job.load_job("45")


@pytest.mark.parametrize(
    "says, answer",
    [
        ("echo 45 RUNNING", True),
        ("echo 45 COMPLETING; echo 46 FAILED", True),
        ("echo 46 RUNNING; echo 45 COMPLETED", False),
        ("echo 45 PENDING", False),  # of a requeued one: it will wait in its turn
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", False),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", None),
        ("exec sleep 9", None),
    ],
)
def test_whether_a_job_may_still_write(slurm, says, answer, monkeypatch):
    monkeypatch.setattr(job, "QUEUE_S", 0.5)
    program(slurm, "squeue", says)
    assert job.may_still_write("45") is answer


def test_without_a_queue_nobody_knows(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job.may_still_write("45") is None
