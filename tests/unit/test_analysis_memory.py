"""Predicted memory of runs, from their records, beside the measured."""

from dataclasses import replace

import pandas as pd
import pytest

from tests import logs
from tokenscale.analysis import expectations
from tokenscale.analysis.queries import query
from tokenscale.costs.flops import parameters
from tokenscale.costs.memory import largest_memory
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS

SHAPE = PRESETS["llama-tiny"].with_vocabulary(513)
PARTS = ("parameters", "gradients", "optimizer", "activations")


@pytest.fixture(autouse=True)
def any_value_is_valid(monkeypatch):
    monkeypatch.setattr(expectations, "OF_A_RUN", [])


def run_of(model="llama-tiny", **changes):
    return logs.settings(world_size=2, model=PRESETS[model], **changes)


def rows(folder, *cases):
    """Rows of `memory` of runs, each (run, sizes by rank, fields of its record)."""
    for run, measured, fields in cases:
        path = logs.write_run(folder / "runs", run, **fields)
        for rank, sizes in enumerate(measured):
            logs.add_memory(path, sizes, rank)
    logs.ingested(folder, [run for run, *_ in cases], further=("seed",))
    return query("memory", folder / "tables").to_dict("records")


def test_the_rank_that_held_the_most_stands_beside_what_the_settings_predict(tmp_path):
    run = run_of()
    measured = [(10, 10, 20, 5), (10, 10, 21, 7)]
    (row,) = rows(tmp_path, (run, measured, {"parameters": parameters(SHAPE)}))
    expected = largest_memory(replace(run, model=SHAPE))
    assert [row[f"{part}_bytes"] for part in PARTS] == [10, 10, 21, 7]
    assert [row[f"predicted_{part}_bytes"] for part in PARTS] == [getattr(expected, part) for part in PARTS]
    assert (row["rank"], row["bytes"], row["predicted_bytes"]) == (1, 48, expected.total)
    assert row["predicted_per_measured"] == pytest.approx(expected.total / 48)


def test_a_gpus_activations_are_predicted_for_a_gpu(tmp_path):
    run, hardware = run_of(), {**logs.HARDWARE, "device": "A test GPU", "device_kind": "cuda"}
    (row,) = rows(tmp_path, (run, [(1, 1, 1, 1)], {"parameters": parameters(SHAPE), "hardware": hardware}))
    gpu, cpu = (largest_memory(replace(run, model=SHAPE), device).activations for device in ("cuda", "cpu"))
    assert row["predicted_activations_bytes"] == gpu < cpu


def test_what_is_not_measured_or_not_predicted_is_null(tmp_path):
    """Activations under torch.compile; a count that no vocabulary makes; a model of transformers; settings that no
    training would take."""
    cases = {
        "compiled": (run_of(compile=True, seed=3), parameters(SHAPE)),
        "odd count": (run_of(seed=1), parameters(SHAPE) + 1),
        "transformers": (run_of("bert-base", seed=4, sequence_length=512), 5_000_000),
        "too many stages": (replace(run_of(seed=2), layout=LayoutSettings(pipeline=4)), parameters(SHAPE)),
    }
    sizes = [(10, 10, 20, None)]
    listed = [(run, sizes, {"parameters": count, "flops_per_token": None}) for run, count in cases.values()]
    found = {row["run_id"]: row for row in rows(tmp_path, *listed)}
    for name, (run, _) in cases.items():
        row = pd.Series(found[run.identity])
        assert row["parameters_bytes"] == 10
        assert row[["activations_bytes", "bytes", "predicted_activations_bytes", "predicted_bytes"]].isna().all(), name
        assert pd.isna(row["predicted_parameters_bytes"]) == (name != "compiled"), name
