"""A campaign on a SLURM that cancels jobs, loses nodes, and is away at times."""

import json
import random
import time

import pyarrow.parquet as parquet
import pytest

from tests.slurm.projects import OnCluster, losses
from tests.workflow.conftest import copy_of

pytestmark = pytest.mark.slow(20)

RUNS = 30
#: what happens during the campaign, in a random order
HAPPENS = ("scancel",) * 10 + ("node",) * 3 + ("accounting", "controller")
#: seconds for which a daemon is away, and between two events
AWAY_S = 15
BETWEEN_S = (1, 6)


def disturb(project: OnCluster, what: str, chance: random.Random) -> None:
    """Let one event happen, once a training runs that it can hit."""
    cluster = project.cluster
    if what == "accounting":
        cluster.stop_accounting()
        time.sleep(AWAY_S)
        cluster.start_accounting()
        return
    if what == "controller":
        cluster.stop_controller()
        time.sleep(AWAY_S)
        cluster.start_controller()
        return
    job = chance.choice(project.until(lambda: list_trainings(project)))
    if what == "scancel":
        cluster.run("scancel", job["id"])
    else:
        cluster.set_node(job["nodes"], "down")  # it comes back by itself


def list_trainings(project: OnCluster) -> list[dict[str, str]]:
    return [
        job for job in project.jobs_of("rule_train") if job["state"] == "RUNNING" and job["nodes"]
    ]


def count_ends(run) -> int:
    """How often a run was trained to its end."""
    logs = run.glob("attempt=*/rank=00000/events.jsonl")
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    stops = [line for line in lines if line["event"] == "run_stop"]
    return sum(stop["status"] == "complete" for stop in stops)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_a_campaign_ends_right_whatever_happens_to_its_jobs(seed, made, another, tmp_path):
    """All runs are complete, each was trained to its end once, and the tables find no fault but
    that runs overlap, as the cluster's nodes are one machine.
    """
    chance = random.Random(seed)
    order = chance.sample(HAPPENS, len(HAPPENS))
    with another as cluster:
        project = OnCluster(copy_of(made, tmp_path), cluster)
        project.change("long", layout={}, budget={"steps": 300})
        path = project.root / "config/experiments/long.yaml"
        factors = {"factors": {"seed": [*range(RUNS)]}}
        path.write_text(json.dumps(json.loads(path.read_text()) | factors))
        process = project.start("tables", "--retries", "5", "--config", "experiments=long")
        for what in order:
            disturb(project, what, chance)
            time.sleep(chance.uniform(*BETWEEN_S))
        text = project.ended(process, timeout=1500)
        states = [record["state"] for record in cluster.records()]
    runs = project.runs()
    assert len(runs) == RUNS
    assert {count_ends(run) for run in runs.values()} == {1}
    assert {len(losses(run)) for run in runs.values()} == {300}
    rows = parquet.read_table(project.root / "results/tables/long/validity.parquet").to_pylist()
    reasons = {reason for row in rows for reason in row["reasons"].split("; ") if reason}
    assert all(reason.startswith("overlaps run") for reason in reasons), "nodes share one boot"
    assert sum(state.startswith("CANCELLED") for state in states) >= 8
    assert "SLURM status is: 'NODE_FAIL'" in text and "SLURM answers again" in text
