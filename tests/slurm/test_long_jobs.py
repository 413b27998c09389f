"""Jobs that end before their run does: each attempt goes on where the one before was, and nothing
is trained twice.
"""

import os
import re
import signal

import pytest

from tests.slurm.projects import events, run_of, whole

pytestmark = pytest.mark.slow(20)
ARGUMENTS = ("runs", "--config", "experiments=long")


@pytest.mark.long
def test_a_run_that_is_told_to_stop_goes_on_from_that_step(project):
    """By a signal to its ranks, by one to its launcher alone, and by scancel."""
    project.change("long", budget={"steps": 1000})
    stops = []
    for attempt, options in enumerate((["--signal=USR1"], ["--batch", "--signal=TERM"], [])):
        process = project.start(*ARGUMENTS, "--retries", "0")
        name, path = project.trains(attempt)
        project.cluster.run("scancel", *options, project.jobs_of(name)[-1]["id"])
        text = project.ended(process, code=1)
        (stop,) = events(path, attempt, "run_stop")
        assert stop["status"] == "interrupted"
        assert options or "CANCELLED" in text
        assert attempt != 0 or f"was stopped after step {stop['step']}" in text, (
            "the failed job's log is shown"
        )
        stops.append(stop["step"])
    project.snakemake(*ARGUMENTS)
    whole(project, 4)
    assert stops == [events(path, attempt, "resume")[0]["step"] for attempt in (1, 2, 3)]


def test_a_node_set_down_costs_an_attempt(project):
    """Its daemon lives, so that ranks are told first. What a node loses without a word is in
    tests/faults.
    """
    process = project.start(*ARGUMENTS)
    name, path = project.trains()
    project.cluster.set_node(project.jobs_of(name)[0]["nodes"], "down")  # it comes back by itself
    assert "SLURM status is: 'NODE_FAIL'" in project.ended(process)
    whole(project, 2)
    assert events(path, 1, "resume")[0]["step"] > 0


@pytest.mark.long
def test_a_drained_node_ends_its_job_and_the_next_one_runs_elsewhere(project):
    """Nobody may requeue a job of the workflow meanwhile: another attempt is submitted by Snakemake
    alone.
    """
    process = project.start(*ARGUMENTS)
    name, _ = project.trains()
    (job,) = project.jobs_of(name)
    project.cluster.set_node(job["nodes"], "drain", "being looked at")
    try:
        refused = project.cluster.run("scontrol", "requeue", job["id"], check=False)
        assert refused.returncode and "disabled" in refused.stderr
        project.ended(process)
        whole(project, 1)
        project.change("long", budget={"steps": 5})
        project.snakemake(*ARGUMENTS)
        (other,) = [
            j
            for j in project.cluster.jobs()
            if j["workdir"] == str(project.root) and j["id"] != job["id"]
        ]
        assert other["nodes"] != job["nodes"] and other["state"] == "COMPLETED"
    finally:
        project.cluster.set_node(job["nodes"], "resume")


@pytest.mark.long
def test_a_job_that_is_requeued_in_mid_run_goes_on(project):
    """As of a script that its user submits with --requeue: the same job starts again."""
    (name,) = set(re.findall(r"train (\S+-w2-[0-9a-f]{10})", project.snakemake("-np", *ARGUMENTS)))
    job = project.submit_launches([name], "--requeue", "--ntasks-per-node=2", "--gres=gpu:2")
    _, path = project.trains()
    project.until(lambda: [*path.glob("checkpoints/*/checkpoint.json")])
    project.cluster.run("scontrol", "requeue", job)

    def begun_again() -> bool:
        """SLURM lets a requeued job wait for two minutes, unless an administrator moves its
        start.
        """
        project.cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
        return len([*path.glob("attempt=*")]) == 2

    project.until(begun_again)
    project.cluster.wait_for(job, "COMPLETED")
    whole(project, 2)
    assert events(path, 1, "resume")[0]["step"] >= 50
    assert "Nothing to be done" in project.snakemake(*ARGUMENTS)


def test_a_restarted_controller_trains_nothing_twice(project):
    """Its job goes on when Snakemake is killed; the next one's job waits for it, and seals without
    training.
    """
    process = project.start(*ARGUMENTS)
    name, path = project.trains()
    rank = project.stop_rank(path)  # it still trains when the second job begins
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    project.snakemake("--unlock")
    process = project.start(*ARGUMENTS)
    log = project.root / f"results/logs/train/{name}.log"
    project.until(lambda: log.exists() and "waiting for it" in log.read_text())
    os.kill(rank, signal.SIGCONT)
    project.ended(process)
    first, second = project.jobs_of(name)
    assert (first["state"], second["state"]) == ("COMPLETED", "COMPLETED")
    whole(project, 1)
    assert re.search(
        rf"is being written by process \d+ on .*job {first['id']}; waiting for it", log.read_text()
    )
    assert "has ended already" in log.read_text()


def test_a_run_that_fails_is_tried_as_often_as_the_profile_says(project):
    """Retries of a rule would be multiplied by those of the job inside."""
    project.change("long", resume_from="results/nowhere")
    (project.root / "results/nowhere").mkdir()
    (project.root / "results/nowhere/checkpoint.json").write_text("{}")
    text = project.snakemake(*ARGUMENTS, code=1)
    name, path = run_of(project)
    assert len(project.jobs_of(name)) == 2 and len([*path.glob("attempt=*")]) == 2
    assert "rank 0 on nid00000" in text and "failed first" in text
