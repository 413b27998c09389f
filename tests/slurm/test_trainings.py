"""Trainings on a real SLURM: any number of ranks on any number of nodes, and the report of a small
experiment.
"""

import csv
import json
import os
import re
import signal
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from tests.slurm.projects import PROFILE, events, losses, whole

pytestmark = pytest.mark.slow(20)

#: columns that are times, and what measures or names the place: memory, threads, jobs, nodes
PLACE = (
    "_s",
    "memory_peak_bytes",
    "threads_per_rank",
    "job_ids",
    "node_names",
    "machine",
    "slurm_logs",
    "seal",
)
PLACE += ("load_average", "environment")
#: what is said of a run: the nodes of the tests' cluster share one boot, so that jobs overlap
PLACE += ("validity", "reasons", "cautions", "unchecked")


def test_any_number_of_gpus_computes_what_one_computes(project):
    """World sizes 1, 2, 16 on 1, 1, 4 nodes, and a pipeline with a stage on each of two."""
    project.snakemake("runs", "--config", "experiments=sizes")
    runs = project.runs()
    one = next(losses(path) for name, path in runs.items() if "-w1-" in name)
    assert len(runs) == 4 and len(one) == 5
    places = {}
    for name, path in runs.items():
        assert losses(path) == pytest.approx(one, rel=1e-6), name
        record = json.loads((path / "run.json").read_text())
        assert record["hardware"]["nodes"] == record["launch"]["job"]["nodes"]
        assert record["launch"]["job"]["queue_s"] >= 0
        places.setdefault(record["hardware"]["world_size"], set()).add(
            len(record["hardware"]["nodes"])
        )
    assert places == {1: {1}, 2: {1}, 8: {2}, 16: {4}}


def test_a_report_has_the_tables_of_the_local_profile(project, local):
    project.snakemake("--config", "experiments=pair")
    assert (project.root / "results/report-experiments=pair/index.html").stat().st_size > 10_000
    local.snakemake(
        "--profile", "profiles/default", "--cores", "2", "tables", "--config", "experiments=pair"
    )
    for name in ("runs", "steps", "events", "quarantine"):
        ours = parquet.read_table(project.root / f"results/tables/pair/{name}.parquet")
        theirs = parquet.read_table(local.root / f"results/tables/pair/{name}.parquet")
        assert ours.schema == theirs.schema and ours.num_rows == theirs.num_rows
        for column in ours.column_names:
            if not column.endswith(PLACE):
                same(ours[column].to_pylist(), theirs[column].to_pylist(), f"{name}.{column}")


def same(ours: list, theirs: list, what: str) -> None:
    """Equal; floats as far as another number of threads leaves them."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == (pytest.approx(other, rel=1e-5) if isinstance(mine, float) else other), what


def test_runs_of_an_experiment_that_shares_nodes_stand_side_by_side(project):
    """Each has GPUs of its own at the same time, and says that it had company."""
    machine = project.root / PROFILE / "machine.toml"
    machine.write_text("exclusive = true\n" + machine.read_text())
    project.change("long", budget={"steps": 60})
    path = project.root / "config/experiments/long.yaml"
    factors = {"layout.data": [1, 2], "seed": [0, 1]}
    together = json.loads(path.read_text()) | {"factors": factors, "share_nodes": True}
    path.write_text(json.dumps(together))
    project.snakemake("runs", "--config", "experiments=long")
    by_job: dict[str, list] = {}
    for folder in project.runs().values():
        record = json.loads((folder / "run.json").read_text())
        by_job.setdefault(record["launch"]["job"]["id"], []).append((folder, record))
    sizes = [[record["hardware"]["world_size"] for _, record in of] for of in by_job.values()]
    assert sorted(sizes) == [[1, 1], [2, 2]]
    for of in by_job.values():
        folders, records = zip(*of, strict=True)
        assert {r["launch"]["share"] * r["hardware"]["world_size"] for r in records} == {4}
        assert len({tuple(record["hardware"]["nodes"]) for record in records}) == 1
        gpus = [record["environment"]["CUDA_VISIBLE_DEVICES"] for record in records]
        assert len(set(gpus)) == len(gpus)
        spans = [read_span(folder) for folder in folders]
        assert max(begin for begin, _ in spans) < min(end for _, end in spans)
    assert "Nothing to be done" in project.snakemake("runs", "--config", "experiments=long")


def read_span(run) -> tuple[float, float]:
    """Start of a run's launcher and end of the run, of one attempt, by the wall clock. On a busy
    machine imports of one run may take longer than all steps of another.
    """
    (stopped,) = events(run, 0, "run_stop")
    return (run / "attempt=00/arguments.json").stat().st_mtime, stopped["t_unix_s"]


@pytest.mark.long
def test_a_recording_is_made_in_a_job_and_the_accounting_says_what_jobs_took(project):
    project.change("long", layout={}, budget={"steps": 5})
    planned = project.snakemake("-np", "runs", "--config", "experiments=long")
    (name,) = set(re.findall(r"train (\S+-w1-[0-9a-f]{10})", planned))
    recorded = project.root / f"results/parity/{name}/outcome.json"
    project.snakemake(str(recorded.relative_to(project.root)), "--config", "experiments=long")
    assert json.loads(recorded.read_text())
    (job,) = project.jobs_of(f"rule_record_wildcards_{name}")
    assert job["state"] == "COMPLETED"
    (report,) = project.root.glob("results/logs/slurm/efficiency_report_*.csv")
    rows = list(csv.DictReader(report.read_text().splitlines()))
    assert rows and all(row["JobID"].startswith(f"{job['id']}.") for row in rows)
    assert {row["RuleName"].partition("_wildcards")[0] for row in rows} == {"rule_record"}


def test_a_submission_that_is_refused_is_told_with_its_reason(project):
    options = ("--retries", "0", "--set-resources", "train:slurm_partition=nowhere")
    text = project.snakemake("runs", "--config", "experiments=long", *options, code=1)
    assert "there is no such partition here" in text and "next" in text
    assert project.runs() == {}


def test_a_job_with_fewer_nodes_than_its_run_needs_trains_nothing(project):
    """What one changes in a profile must not make sixteen ranks on four GPUs of it."""
    project.change("long", layout={"data": 8}, global_batch=16)
    options = ("--retries", "0", "--set-resources", "train:nodes=1")
    text = project.snakemake("runs", "--config", "experiments=long", *options, code=1)
    assert "the job has fewer nodes than the run needs" in text
    assert [*project.root.glob("results/runs/*/attempt=*/rank=*")] == []


def pending(process: int) -> int:
    """A bit for each signal that waits for a process."""
    return int(
        re.search(r"(?m)^ShdPnd:\s*(\w+)", Path(f"/proc/{process}/status").read_text())[1], 16
    )


def test_a_job_beyond_its_time_limit_goes_on_in_the_next(project):
    """A job has a minute; its rank does nothing until SLURM has told it that the time is over."""
    project.change("long", layout={})
    options = ("--set-resources", "train:runtime=1", "train:slurm_extra=--signal=USR1@1")
    process = project.start("runs", *options, "--retries", "9", "--config", "experiments=long")
    name, path = project.trains()
    rank = project.stop_rank(path)
    project.until(lambda: pending(rank) & 1 << signal.SIGUSR1 - 1)
    os.kill(rank, signal.SIGCONT)
    project.ended(process)
    states = [job["state"] for job in project.jobs_of(name)]
    assert len(states) > 1 and states[-1] == "COMPLETED"
    assert [event["status"] for event in events(path, 0, "run_stop")] == ["interrupted"]
    whole(project, len(states))
