"""What a token costs and what the device could do: columns of `runs`, and the shares that follow."""

import pandas as pd
import pytest

from tests import logs
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.queries import query
from tokenscale.costs.flops import parameters
from tokenscale.settings.presets import PRESETS

#: 4 layers of width 128, feed-forward width 352, 1000 ids, tied: parameters by hand below
SHAPE = PRESETS["llama-tiny"].with_vocabulary(1000)
H200 = {**logs.HARDWARE, "device": "NVIDIA H200", "device_kind": "cuda"}


def table(folder, run, name="inventory", **fields):
    logs.write_run(folder / "runs", run, **{"parameters": parameters(SHAPE), **fields})
    ingest(logs.write_table(folder / "runs.json", [run]), folder / "runs", folder / "tables")
    (row,) = query(name, folder / "tables").to_dict("records")
    return row


def small(**changes):
    return logs.settings(model=PRESETS["llama-tiny"], sequence_length=256, **changes)


def test_flops_are_counted_from_the_settings_whatever_the_record_says(tmp_path):
    """6 N + 12 L d T, the second term halved under a causal mask."""
    shape, n = SHAPE, parameters(SHAPE) - (0 if SHAPE.tied_embeddings else 1000 * SHAPE.dimension)
    attention = 12 * shape.layers * shape.dimension * 256
    row = table(tmp_path, small(), flops_per_token={"full": 5.0, "causal": 4.0, "hardware": 5.0})
    assert row["flops_per_token"] == row["flops_per_token_hardware"] == 6 * n + attention
    assert row["flops_per_token_causal"] == 6 * n + attention / 2
    assert row["flops_per_token_stated"] == 5.0


def test_what_backward_computes_again_counts_for_the_hardware_alone(tmp_path):
    plain, again = table(tmp_path / "a", small()), table(tmp_path / "b", small(activation_checkpointing="block"))
    assert again["flops_per_token"] == plain["flops_per_token"]
    assert again["flops_per_token_hardware"] > plain["flops_per_token_hardware"]


def test_of_an_unknown_shape_the_record_is_believed_and_without_it_nothing_is(tmp_path):
    stated = table(tmp_path / "a", small(), parameters=7, flops_per_token={"full": 5, "causal": 4.0})
    assert (stated["flops_per_token"], stated["flops_per_token_causal"]) == (5.0, 4.0)
    assert pd.isna(stated["flops_per_token_hardware"])
    assert pd.isna(table(tmp_path / "b", small(), parameters=7)["flops_per_token"])
    assert pd.isna(table(tmp_path / "c", small(), parameters=7, flops_per_token=[1])["flops_per_token"])


@pytest.mark.parametrize(
    ("changes", "fields", "number", "peak"),
    [
        ({"precision": "bf16"}, {}, "bf16", 989.4e12),
        ({"precision": "bf16-true"}, {}, "bf16", 989.4e12),
        ({}, {}, "fp32", 66.9e12),
        ({"precision": "bf16", "float8": True}, {}, "fp8", 1978.9e12),
        ({"precision": "bf16"}, {"number_format": "tf32"}, "tf32", 494.7e12),
        ({"precision": "bf16"}, {"number_format": "source"}, "source", None),
        ({"precision": "bf16"}, {"hardware": {**H200, "device": "NVIDIA H300"}}, "bf16", None),
        ({"precision": "bf16"}, {"hardware": logs.HARDWARE}, "bf16", None),
    ],
)
def test_the_peak_is_that_of_the_device_in_the_runs_number_format(tmp_path, changes, fields, number, peak):
    row = table(tmp_path, small(**changes), **{"hardware": H200, **fields})
    assert row["number_format"] == number
    if peak is None:
        assert pd.isna(row["peak_flops"]) and pd.isna(row["peak_source"])
    else:
        assert row["peak_flops"] == pytest.approx(peak)
        assert "H200" in row["peak_source"]


def test_a_run_names_the_manifests_that_it_read(tmp_path):
    row = table(tmp_path / "a", small(), inputs={"store": "a" * 64, "validation_store": "b" * 64})
    assert (row["store_sha256"], row["validation_store_sha256"]) == ("a" * 64, "b" * 64)
    assert pd.isna(row["corpus_sha256"]) and pd.isna(row["tokenizer_sha256"])
    assert pd.isna(table(tmp_path / "b", small(), inputs=["store"])["store_sha256"])
