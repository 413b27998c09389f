"""What runs cost: FLOPs of a token, the device's peak, and predicted memory beside the measured."""

from dataclasses import replace

import pandas as pd
import pytest

from tests import logs
from tokenscale.analysis.queries import query
from tokenscale.costs.flops import parameters
from tokenscale.costs.memory import largest_memory
from tokenscale.referee import expectations
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS

#: 4 layers of width 128, feed-forward width 352, 1000 ids, tied: parameters by hand below
SHAPE = PRESETS["llama-tiny"].with_vocabulary(1000)
H200 = {**logs.HARDWARE, "device": "NVIDIA H200", "device_kind": "cuda"}


def recorded(folder, *runs):
    """Rows of the inventory of runs, each (changes of its settings, fields of its record), by
    repeat.
    """
    settings = [
        logs.settings(model=PRESETS["llama-tiny"], sequence_length=256, **changes)
        for changes, _ in runs
    ]
    for run, (_, fields) in zip(settings, runs, strict=True):
        logs.write_run(folder / "runs", run, **{"parameters": parameters(SHAPE), **fields})
    further = ("activation_checkpointing", "precision", "float8")
    rows = query("inventory", logs.ingested(folder, settings, further=further)).sort_values(
        "repeat"
    )
    return rows.to_dict("records")


def test_flops_are_counted_from_the_settings_whatever_the_record_says(tmp_path):
    shape = SHAPE
    n = parameters(SHAPE) - (0 if SHAPE.tied_embeddings else 1000 * SHAPE.dimension)
    attention = 12 * shape.layers * shape.dimension * 256
    stated = {"flops_per_token": {"full": 5.0, "causal": 4.0, "hardware": 5.0}}
    row, again = recorded(
        tmp_path, ({}, stated), ({"repeat": 1, "activation_checkpointing": "block"}, {})
    )
    assert row["flops_per_token"] == row["flops_per_token_hardware"] == 6 * n + attention
    assert row["flops_per_token_causal"] == 6 * n + attention / 2
    assert row["flops_per_token_stated"] == 5.0
    assert again["flops_per_token"] == row["flops_per_token"], (
        "what backward computes again is the hardware's alone"
    )
    assert again["flops_per_token_hardware"] > row["flops_per_token_hardware"]


def test_of_an_unknown_shape_the_record_is_believed_and_without_it_nothing_is(tmp_path):
    flops = ({"full": 5, "causal": 4.0}, None, [1])
    runs = [({"repeat": n}, {"parameters": 7, "flops_per_token": of}) for n, of in enumerate(flops)]
    stated, *others = recorded(tmp_path, *runs)
    assert (stated["flops_per_token"], stated["flops_per_token_causal"]) == (5.0, 4.0)
    assert pd.isna(stated["flops_per_token_hardware"]) and all(
        pd.isna(row["flops_per_token"]) for row in others
    )


#: (changes of the settings, fields of the record, number format, peak)
PEAKS = [
    ({"precision": "bf16"}, {}, "bf16", 989.4e12),
    ({"precision": "bf16-true"}, {}, "bf16", 989.4e12),
    ({}, {}, "fp32", 66.9e12),
    ({"precision": "bf16", "float8": True}, {}, "fp8", 1978.9e12),
    ({"precision": "bf16"}, {"number_format": "tf32"}, "tf32", 494.7e12),
    ({"precision": "bf16"}, {"number_format": "source"}, "source", None),
    ({"precision": "bf16"}, {"hardware": {**H200, "device": "NVIDIA H300"}}, "bf16", None),
    ({"precision": "bf16"}, {"hardware": logs.HARDWARE}, "bf16", None),
]


def test_the_peak_is_that_of_the_device_in_the_runs_number_format(tmp_path):
    rows = recorded(
        tmp_path,
        *(({"repeat": n, **PEAKS[n][0]}, {"hardware": H200, **PEAKS[n][1]}) for n in range(8)),
    )
    for row, (_, _, number, peak) in zip(rows, PEAKS, strict=True):
        assert row["number_format"] == number
        assert pd.isna(row["peak_flops"]) == pd.isna(row["peak_source"]) == (peak is None)
        assert peak is None or (
            row["peak_flops"] == pytest.approx(peak) and "H200" in row["peak_source"]
        )


def test_a_run_names_the_manifests_that_it_read(tmp_path):
    inputs = {"store": "a" * 64, "validation_store": "b" * 64}
    row, odd = recorded(tmp_path, ({}, {"inputs": inputs}), ({"repeat": 1}, {"inputs": ["store"]}))
    assert (row["store_sha256"], row["validation_store_sha256"]) == ("a" * 64, "b" * 64)
    assert pd.isna([row["corpus_sha256"], row["tokenizer_sha256"], odd["store_sha256"]]).all()


# -- memory

PARTS = ("parameters", "gradients", "optimizer", "activations")


def run_of(model="llama-tiny", **changes):
    return logs.settings(world_size=2, model=PRESETS[model], **changes)


def measured_memory(folder, *cases):
    """Rows of `memory` of runs, each (run, sizes by rank, fields of its record)."""
    for run, measured, fields in cases:
        path = logs.write_run(folder / "runs", run, **fields)
        for rank, sizes in enumerate(measured):
            logs.add_memory(path, sizes, rank)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(expectations, "OF_A_RUN", [])  # sizes that no such run has are valid
        logs.ingested(folder, [run for run, *_ in cases], further=("seed",))
    return query("memory", folder / "tables").to_dict("records")


def test_the_rank_that_held_the_most_stands_beside_what_is_predicted_for_its_device(tmp_path):
    fields = {"parameters": parameters(SHAPE)}
    gpu = fields | {"hardware": H200}
    run = run_of()
    expected = largest_memory(replace(run_of(), model=SHAPE))
    row, other = measured_memory(
        tmp_path,
        (run, [(10, 10, 20, 5), (10, 10, 21, 7)], fields),
        (run_of(seed=1), [(1, 1, 1, 1)], gpu),
    )
    assert [row[f"{part}_bytes"] for part in PARTS] == [10, 10, 21, 7]
    assert [row[f"predicted_{part}_bytes"] for part in PARTS] == [
        getattr(expected, part) for part in PARTS
    ]
    assert (row["rank"], row["bytes"], row["predicted_bytes"]) == (1, 48, expected.sum_of_parts)
    assert row["predicted_per_measured"] == pytest.approx(expected.sum_of_parts / 48)
    on_gpu = largest_memory(replace(run, model=SHAPE), "cuda").activations
    assert other["predicted_activations_bytes"] == on_gpu < expected.activations


def test_what_is_not_measured_or_not_predicted_is_null(tmp_path):
    """Activations under torch.compile; a count that no vocabulary makes; a model of transformers;
    settings that no training would take.
    """
    cases = {
        "compiled": (run_of(compile=True, seed=3), parameters(SHAPE)),
        "odd count": (run_of(seed=1), parameters(SHAPE) + 1),
        "transformers": (run_of("bert-base", seed=4, sequence_length=512), 5_000_000),
        "too many stages": (
            replace(run_of(seed=2), layout=LayoutSettings(pipeline=4)),
            parameters(SHAPE),
        ),
    }
    sizes = [(10, 10, 20, None)]
    listed = [
        (run, sizes, {"parameters": count, "flops_per_token": None})
        for run, count in cases.values()
    ]
    found = {row["run_id"]: row for row in measured_memory(tmp_path, *listed)}
    for name, (run, _) in cases.items():
        row = pd.Series(found[run.identity])
        assert row["parameters_bytes"] == 10
        assert (
            row[["activations_bytes", "bytes", "predicted_activations_bytes", "predicted_bytes"]]
            .isna()
            .all()
        ), name
        assert pd.isna(row["predicted_parameters_bytes"]) == (name != "compiled"), name
