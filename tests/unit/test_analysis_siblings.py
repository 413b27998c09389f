"""What the runs of an experiment show about each other: faults are named at small magnitudes, honest runs are not."""

import shutil

import pandas as pd
import pytest

from tests import logs
from tokenscale.analysis.ingest import ingest
from tokenscale.base.files import sha256_file, write_sealed

STEPS = 12
RUNS = {
    f"{approach}-{repeat}": logs.settings(approach, repeat=repeat, steps=STEPS)
    for repeat in range(4)
    for approach in ("packed", "padded", "pretokenized-padded")
}
ID = {name: run.identity for name, run in RUNS.items()}


@pytest.fixture
def experiment(tmp_path):
    for number, run in enumerate(RUNS.values()):
        start = {"boot_s": 100.0 + 50 * number, "t0": 1.7e9 + 50 * number - logs.began_s(run), "boot": "boot-1"}
        logs.write_run(tmp_path / "runs", run, attempts=[start])
    logs.write_table(tmp_path / "experiments/demo/runs.json", list(RUNS.values()))
    return tmp_path


def read(folder, **manifests):
    ingest(folder / "experiments/demo/runs.json", folder / "runs", folder / "tables", **manifests)
    return pd.read_parquet(folder / "tables/runs.parquet").set_index("run_id")


def set_boot(boot):
    return lambda event: event | ({"boot": boot} if event["event"] == "run_start" else {})


@pytest.mark.parametrize("name", ["packed-1", "padded-3"])
def test_runs_at_once_on_other_nodes_or_in_a_shared_job_do_not_overlap(experiment, name):
    folder = experiment / "runs" / ID[name]
    for kind in ("steps", "events"):
        logs.edit(folder, lambda e: e | {c: e[c] - 30.0 for c in ("t_mono_s", "t_unix_s")}, kind)
    logs.edit(folder, set_boot("boot-2"), "events")
    runs = read(experiment)
    assert set(runs["validity"]) == {"valid"}
    assert "other boot" in runs.loc[ID[name], "cautions"] and (runs["cautions"] == "").sum() == len(runs) - 1
    logs.edit(folder, set_boot("boot-1"), "events")
    for run_id in ID.values():
        write_sealed(experiment / "runs" / run_id / "attempt=00/attempt.json", {"launch": {"share": 4}})
    assert not read(experiment)["reasons"].str.contains("overlaps").any()


def test_a_run_validated_on_the_training_split_is_invalid(experiment):
    (store,) = logs.write_stores(experiment, {"packed": 4})
    logs.write_table(experiment / "experiments/demo/runs.json", [RUNS["packed-0"]])
    shutil.rmtree(experiment / "runs" / ID["packed-0"])
    logs.write_run(experiment / "runs", RUNS["packed-0"], inputs={"validation_store": sha256_file(store)})
    assert "training split" in read(experiment, stores=[store]).loc[ID["packed-0"], "reasons"]


def test_runs_that_another_experiment_lists_are_not_missed(experiment):
    fewer = logs.write_table(experiment / "experiments/a/runs.json", [r for r in RUNS.values() if r.repeat < 3])
    ingest(fewer, experiment / "runs", experiment / "tables")
    assert set(pd.read_parquet(experiment / "tables/runs.parquet")["cautions"]) == {""}
