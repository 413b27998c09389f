"""Jobs that end before their run does: each attempt goes on where the one before was, and nothing is trained twice."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.slurm.cluster import open_files
from tests.slurm.projects import events, run_of, whole

pytestmark = pytest.mark.slow(20)


def test_a_run_that_is_told_to_stop_goes_on_from_that_step(project):
    process = project.start("runs", "--config", "experiments=long")
    project.until(lambda: project.step() > 20)
    name, path = run_of(project)
    project.cluster.run("scancel", "--signal=USR1", project.jobs_of(name)[0]["id"])
    text = project.ended(process)
    whole(project, 2)
    (stop,), (resume,) = events(path, 0, "run_stop"), events(path, 1, "resume")
    assert stop["status"] == "interrupted" and resume["step"] == stop["step"] > 20
    assert f"was stopped after step {stop['step']}" in text, "the failed job's log is shown"


def test_a_launcher_alone_that_is_told_to_end_has_its_ranks_write_a_state(project):
    """srun, which it calls, would kill them at its SIGTERM."""
    process = project.start("runs", "--retries", "0", "--config", "experiments=long")
    project.until(lambda: project.step() > 20)
    name, path = run_of(project)
    project.cluster.run("scancel", "--batch", "--signal=TERM", project.jobs_of(name)[0]["id"])
    project.ended(process, code=1)
    (stop,) = events(path, 0, "run_stop")
    assert stop["status"] == "interrupted"


def test_a_cancelled_job_is_told_as_such_and_goes_on(project):
    """scancel gives it twenty seconds here, and thirty on most clusters."""
    process = project.start("runs", "--retries", "0", "--config", "experiments=long")
    project.until(lambda: project.step() > 20)
    name, path = run_of(project)
    project.cluster.run("scancel", project.jobs_of(name)[0]["id"])
    text = project.ended(process, code=1)
    assert "CANCELLED" in text
    (stop,) = events(path, 0, "run_stop")
    assert stop["status"] == "interrupted"
    project.snakemake("runs", "--config", "experiments=long")
    whole(project, 2)
    assert events(path, 1, "resume")[0]["step"] == stop["step"]


def test_a_node_set_down_costs_an_attempt(project):
    """Its daemon lives, so that ranks are told first. What a node loses without a word is in tests/faults."""
    process = project.start("runs", "--config", "experiments=long")
    project.until(lambda: project.step() > 20)
    name, path = run_of(project)
    (job,) = project.jobs_of(name)
    project.cluster.set_node(job["nodes"], "down")  # it comes back by itself, as its daemon is there
    text = project.ended(process)
    assert "node failure" in text
    whole(project, 2)
    assert events(path, 1, "resume")[0]["step"] > 20


def test_a_drained_node_ends_its_job_and_the_next_one_runs_elsewhere(project):
    """Nobody may requeue a job of the workflow meanwhile: another attempt is submitted by Snakemake alone."""
    process = project.start("runs", "--config", "experiments=long")
    project.until(lambda: project.step() > 20)
    name, path = run_of(project)
    (job,) = project.jobs_of(name)
    project.cluster.set_node(job["nodes"], "drain", "being looked at")
    try:
        refused = project.cluster.run("scontrol", "requeue", job["id"], check=False)
        assert refused.returncode and "disabled" in refused.stderr
        project.ended(process)
        whole(project, 1)
        project.change("long", budget={"wall_s": 5})
        project.snakemake("runs", "--config", "experiments=long")
        (other,) = [j for j in project.cluster.jobs() if j["workdir"] == str(project.root) and j["id"] != job["id"]]
        assert other["nodes"] != job["nodes"] and other["state"] == "COMPLETED"
    finally:
        project.cluster.set_node(job["nodes"], "resume")


def test_a_job_that_is_requeued_in_mid_run_goes_on(project):
    """As of a script that its user submits with --requeue: the same job starts again."""
    project.change("long", budget={"wall_s": 20})
    planned = project.snakemake("-np", "runs", "--config", "experiments=long")
    (name,) = set(re.findall(r"train (\S+-w2-[0-9a-f]{10})", planned))
    job = project.submit_launches([name], "--requeue", "--ntasks-per-node=2", "--gres=gpu:2")
    project.until(lambda: project.step() > 60)
    project.cluster.run("scontrol", "requeue", job)

    def begun_again() -> bool:
        """SLURM lets a requeued job wait for two minutes, unless an administrator moves its start."""
        project.cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
        return len([*project.root.glob("results/runs/*/attempt=*")]) == 2

    project.until(begun_again)
    project.until(lambda: [*project.root.glob("results/runs/*/done.json")], 180)
    assert project.cluster.wait_for(job, "COMPLETED")["state"] == "COMPLETED"
    whole(project, 2)
    _, path = run_of(project)
    assert events(path, 1, "resume")[0]["step"] >= 50
    assert "Nothing to be done" in project.snakemake("runs", "--config", "experiments=long")


def test_a_restarted_controller_trains_nothing_twice(project):
    """Its job goes on when Snakemake is killed; the next one's job waits for it, and seals without training."""
    process = project.start("runs", "--config", "experiments=long")
    project.until(lambda: project.step() > 20)
    name, path = run_of(project)
    steps = str(path / "attempt=00/rank=00000/steps.jsonl")
    (rank,) = (int(folder.name) for folder in Path("/proc").glob("[0-9]*") if steps in open_files(folder.name))
    os.kill(rank, signal.SIGSTOP)  # it still trains when the second job begins
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    project.snakemake("--unlock")
    process = project.start("runs", "--config", "experiments=long")
    log = project.root / f"results/logs/train/{name}.log"
    project.until(lambda: log.exists() and "waiting for it" in log.read_text())
    os.kill(rank, signal.SIGCONT)
    project.ended(process)
    first, second = project.jobs_of(name)
    assert (first["state"], second["state"]) == ("COMPLETED", "COMPLETED")
    whole(project, 1)
    assert re.search(rf"is being written by process \d+ on .*job {first['id']}; waiting for it", log.read_text())
    assert "has ended already" in log.read_text()


def test_a_run_that_fails_is_tried_as_often_as_the_profile_says(project):
    """Retries of a rule would be multiplied by those of the job inside."""
    project.change("long", resume_from="results/nowhere")
    (project.root / "results/nowhere").mkdir()
    (project.root / "results/nowhere/checkpoint.json").write_text("{}")
    text = project.snakemake("runs", "--config", "experiments=long", code=1)
    name, path = run_of(project)
    assert len(project.jobs_of(name)) == 2 and len([*path.glob("attempt=*")]) == 2
    assert "rank 0 on nid00000" in text and "failed first" in text
