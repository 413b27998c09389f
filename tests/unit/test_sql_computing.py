"""What a token costs and what the device could do: columns of `runs`, and the shares that follow."""

import pandas as pd
import pytest

from tests import logs
from tests import tables as by_hand
from tokenscale.analysis.queries import query
from tokenscale.costs.flops import parameters
from tokenscale.settings.presets import PRESETS

#: 4 layers of width 128, feed-forward width 352, 1000 ids, tied: parameters by hand below
SHAPE = PRESETS["llama-tiny"].with_vocabulary(1000)
H200 = {**logs.HARDWARE, "device": "NVIDIA H200", "device_kind": "cuda"}


def table(folder, run, name="inventory", **fields):
    logs.write_run(folder / "runs", run, **{"parameters": parameters(SHAPE), **fields})
    logs.ingested(folder, [run])
    (row,) = query(name, folder / "tables").to_dict("records")
    return row


def small(**changes):
    return logs.settings(model=PRESETS["llama-tiny"], sequence_length=256, **changes)


def test_flops_are_counted_from_the_settings_whatever_the_record_says(tmp_path):
    shape, n = SHAPE, parameters(SHAPE) - (0 if SHAPE.tied_embeddings else 1000 * SHAPE.dimension)
    attention = 12 * shape.layers * shape.dimension * 256
    row = table(tmp_path, small(), flops_per_token={"full": 5.0, "causal": 4.0, "hardware": 5.0})
    assert row["flops_per_token"] == row["flops_per_token_hardware"] == 6 * n + attention
    assert row["flops_per_token_causal"] == 6 * n + attention / 2
    assert row["flops_per_token_stated"] == 5.0
    again = table(tmp_path / "again", small(activation_checkpointing="block"))
    assert again["flops_per_token"] == row["flops_per_token"], "what backward computes again is the hardware's alone"
    assert again["flops_per_token_hardware"] > row["flops_per_token_hardware"]


def test_of_an_unknown_shape_the_record_is_believed_and_without_it_nothing_is(tmp_path):
    stated = table(tmp_path / "a", small(), parameters=7, flops_per_token={"full": 5, "causal": 4.0})
    assert (stated["flops_per_token"], stated["flops_per_token_causal"]) == (5.0, 4.0)
    assert pd.isna(stated["flops_per_token_hardware"])
    assert pd.isna(table(tmp_path / "b", small(), parameters=7, flops_per_token=None)["flops_per_token"])
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


# -- operations per second: 40 positions a step of which 30 are useful, two ranks, half a second a step


def computed(folder, **fields):
    numbers = {"flops_per_token": 3e12, "flops_per_token_causal": 2e12, "flops_per_token_hardware": 4e12} | fields
    run = by_hand.run("a", world_size=2, **numbers)
    steps = by_hand.steps("a", 6, 2, total_tokens=20, useful_tokens=15, step_s=lambda s, rank: 9.0 if s < 3 else 0.5)
    (row,) = query("computing", by_hand.write(folder, runs=[run], steps=steps)).to_dict("records")
    return row


def test_every_convention_has_its_share_of_all_devices_peak(tmp_path):
    row = computed(tmp_path, peak_flops=400e12, peak_source="a data sheet")
    assert row["total_tokens_per_s"] == 80.0
    assert (row["tflops_per_s"], row["tflops_per_device_s"]) == pytest.approx((240.0, 120.0))
    assert row["mfu_palm"] == pytest.approx(80 * 3 / 800)
    assert row["mfu_causal"] == pytest.approx(80 * 2 / 800)
    assert row["mfu_useful"] == pytest.approx(60 * 3 / 800), "padding is no work"
    assert row["hfu"] == pytest.approx(80 * 4 / 800)
    assert row["peak_source"] == "a data sheet"
    row = computed(tmp_path / "unknown")
    assert row["tflops_per_s"] == pytest.approx(240.0)
    assert all(pd.isna(row[name]) for name in ("mfu_palm", "mfu_causal", "mfu_useful", "hfu"))


def test_stalls_have_a_bound_unless_a_run_waits_all_the_time(tmp_path):
    waits = {"a": 0.2, "b": 1.25}  # two clocks, and a step of one second
    steps = [row for name, wait in waits.items() for row in by_hand.steps(name, 6, data_wait_s=wait)]
    found = query("stalls", by_hand.write(tmp_path, runs=[by_hand.run(name) for name in waits], steps=steps))
    assert found["data_stall_share"].iloc[0] == pytest.approx(0.2)
    assert found["largest_gain"].tolist() == pytest.approx([1 / 0.8, float("inf")])


def test_the_peak_of_memory_is_the_most_of_any_rank_and_step(tmp_path):
    steps = by_hand.steps("a", 3, 2, memory_peak_bytes=lambda s, rank: [10, 70, 30][s] + 5 * rank)
    events = [{"run_id": "a", "attempt": 0, "rank": 0, "event": "memory", "parameters_bytes": 1}]
    folder = by_hand.write(
        tmp_path / "it's one; a 'folder'", runs=[by_hand.run("a", world_size=2)], steps=steps, events=events
    )
    assert query("memory", folder)["peak_bytes"].tolist() == [75]
