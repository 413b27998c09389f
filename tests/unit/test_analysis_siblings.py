"""What the runs of an experiment show about each other: faults are named at small magnitudes, honest runs are not."""

import shutil
from types import SimpleNamespace

import pandas as pd
import pytest

from tests import logs
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.siblings import _find_other_levels
from tokenscale.base.files import sha256_file, write_json, write_sealed

STEPS = 12
RUNS = {
    f"{approach}-{repeat}": logs.settings(approach, repeat=repeat, steps=STEPS)
    for repeat in range(4)
    for approach in ("packed", "padded", "pretokenized-padded")
}
ID = {name: run.identity for name, run in RUNS.items()}


@pytest.fixture
def experiment(tmp_path):
    return Experiment(tmp_path)


class Experiment:
    def __init__(self, folder):
        self.folder = folder
        for number, run in enumerate(RUNS.values()):
            start = {"boot_s": 100.0 + 50 * number, "t0": 1.7e9 + 50 * number - logs.began_s(run), "boot": "boot-1"}
            logs.write_run(folder / "runs", run, attempts=[start])
        logs.write_table(folder / "experiments/demo/runs.json", list(RUNS.values()))

    def edit(self, name, kind, change):
        logs.edit(self.folder / "runs" / ID[name], change, kind)

    def shift(self, name, seconds, boot=None):
        for kind in ("steps", "events"):
            self.edit(name, kind, lambda e: e | {c: e[c] + seconds for c in ("t_mono_s", "t_unix_s")})
        if boot:
            self.edit(name, "events", set_boot(boot))

    def share(self, name, runs):
        path = self.folder / "runs" / ID[name] / "attempt=00/attempt.json"
        write_sealed(path, {"launch": {"share": runs}})

    def ingest(self, **manifests):
        ingest(self.folder / "experiments/demo/runs.json", self.folder / "runs", self.folder / "tables", **manifests)
        return pd.read_parquet(self.folder / "tables/runs.parquet").set_index("run_id")


def set_boot(boot):
    return lambda event: event | ({"boot": boot} if event["event"] == "run_start" else {})


@pytest.mark.parametrize("name", ["packed-1", "padded-3"])
def test_runs_at_once_on_other_nodes_or_in_a_shared_job_do_not_overlap(experiment, name):
    experiment.shift(name, -30.0, boot="boot-2")
    runs = experiment.ingest()
    assert set(runs["validity"]) == {"valid"}
    assert "other boot" in runs.loc[ID[name], "cautions"] and (runs["cautions"] == "").sum() == len(runs) - 1
    experiment.edit(name, "events", set_boot("boot-1"))
    for run in RUNS:
        experiment.share(run, 4)
    assert not experiment.ingest()["reasons"].str.contains("overlaps").any()


def test_a_run_validated_on_the_training_split_is_invalid(experiment):
    (store,) = logs.write_stores(experiment.folder, {"packed": 4})
    folder = experiment.folder / "runs" / ID["packed-0"]
    logs.write_table(experiment.folder / "experiments/demo/runs.json", [RUNS["packed-0"]])
    shutil.rmtree(folder)
    logs.write_run(experiment.folder / "runs", RUNS["packed-0"], inputs={"validation_store": sha256_file(store)})
    assert "training split" in experiment.ingest(stores=[store]).loc[ID["packed-0"], "reasons"]


def test_runs_that_another_experiment_lists_are_not_missed_and_a_table_without_a_seal_is_a_caution(experiment):
    path = experiment.folder / "experiments/demo/runs.json"
    fewer = experiment.folder / "experiments/a/runs.json"
    logs.write_table(fewer, [r for r in RUNS.values() if r.repeat < 3])
    ingest(fewer, experiment.folder / "runs", experiment.folder / "tables")
    assert set(pd.read_parquet(experiment.folder / "tables/runs.parquet")["cautions"]) == {""}
    write_json(path, logs.unsealed(path))
    assert all("has no seal" in text for text in experiment.ingest()["cautions"])


def test_a_row_of_the_run_table_is_compared_with_the_settings():
    for repeat, cell, words in [
        (1, "approach=packed", "its settings repeat 0"),
        (0, "approach=padded, layout.data=1", "its settings have packed"),
        (0, "approach=packed, layout.data=2", "its settings have 1"),
        (0, "approach=packed, layout.data=1, precision=fp32", None),
    ]:
        row = {"external": False, "repeat": repeat, "cell": cell}
        found = list(_find_other_levels(SimpleNamespace(run=RUNS["packed-0"], row=row)))
        assert words in found[0] if words else not found
