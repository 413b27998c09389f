"""The same run by our own launcher and by torchrun: the same losses, and both say who started it."""

import json

import pytest

from tests import served
from tests.corpora import Lab, make_run
from tokenscale.base.files import read_json
from tokenscale.runs.launch.start import start_run
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.machine import Machine
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import BudgetSettings, ScheduleSettings, ValidationSettings

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20)]

TEXTS = ["whoever starts the ranks of a run they are the ranks of one run " * n for n in range(1, 30)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"), TEXTS, validation_share=0.2)


@pytest.mark.distributed
def test_torchrun_starts_what_our_launcher_starts(lab, tmp_path):
    run = make_run(
        "packed",
        32,
        model=PRESETS["llama-micro"],
        global_batch=4,
        layout=LayoutSettings(data=2),
        budget=BudgetSettings(steps=3),
        schedule=ScheduleSettings(warmup_steps=1),
        validation=ValidationSettings(rows=4),
    )
    inputs = lab.inputs(run)
    manifests = {"store": inputs.store / "manifest.json", "validation_store": inputs.validation_store / "manifest.json"}
    losses = []
    for starter, python in {"here": served.python(), "torchrun": None}.items():  # a fork each, and as users start it
        folder = tmp_path / starter
        assert start_run(run, folder / "done.json", manifests, machine=Machine(starter=starter, python=python)) == 0
        assert read_json(folder / "run.json")["launch"]["starter"] == starter
        lines = [
            json.loads(line)
            for rank in (0, 1)
            for line in (folder / f"attempt=00/rank={rank:05d}/steps.jsonl").read_text().splitlines()
        ]
        losses.append([(line["step"], line["loss_sum"]) for line in lines])
    assert losses[0] == losses[1] and len(losses[0]) == 6
