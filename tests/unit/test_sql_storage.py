"""Benchmarks apart from trainings: from their files to the definitions, against numbers worked out by hand."""

import json
import math

import pytest

from tests import logs
from tests import tables as by_hand
from tokenscale.analysis.queries import query
from tokenscale.report.drawings.storage import StorageBenchmark
from tokenscale.report.drawings.tokenization_benchmark import TokenizationBenchmark


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("storage")
    measured = [logs.write_storage_benchmark(folder / "storage.json"), logs.write_benchmark(folder / "data.json")]
    return logs.ingested(folder, [], measured)


def test_bytes_and_speeds_are_of_tokens(tables):
    rows = query("storage_benchmark", tables).set_index(["format", "round"])
    assert rows.loc[("padded", 0), "bytes_per_id"] == 2.5
    assert rows.loc[("padded", 0), "bytes_per_useful_token"] == pytest.approx(25_000 / 9_900)
    assert rows.loc[("padded", 0), "entropy_bytes"] == pytest.approx(1.2)
    assert rows.loc[("padded", 0), "share_of_text"] == 0.5
    assert rows.loc[("packed", 1), "write_us_per_token"] == pytest.approx(1e6 * 1.5 / 9_900)
    assert rows.loc[("packed", 0), "cold_us_per_token"] == pytest.approx(1e6 * 0.3 / 9_900)
    assert rows.loc[("token-list", 0), "single_row_ms"] == pytest.approx(5.0)


def test_break_even_is_of_the_same_round_and_against_each_engine(tables):
    rows = query("storage_benchmark", tables).set_index(["format", "round"])
    for number, write_s in ((0, 0.5), (1, 1.5)):
        row = rows.loc[("padded", number)]
        assert row["preprocessing_s"] == pytest.approx(0.125 + write_s)  # the fast engine makes the ids
        assert row["break_even_epochs"] == pytest.approx((0.125 + write_s) / ((1 + number) * 0.25 - 0.2))
        saved_s = (1 + number) * 1.2 - 0.2
        assert row["break_even_epochs_tokenizers"] == pytest.approx((0.125 + write_s) / saved_s)


def test_a_store_that_saves_nothing_never_breaks_even(tmp_path):
    text = {"benchmark": "b", "store": "text, e", "format": "text", "round": 0, "engine": "e", "auto": True}
    store = {"benchmark": "b", "store": "s", "format": "packed", "round": 0, "write_s": 1.0, "useful_tokens": 10}
    rows = [text | {"sequential_s": 2.0, "bulk_s": 1.0}, store | {"sequential_s": 1.5}]
    rows += [store | {"store": "slow", "format": "padded", "sequential_s": 0.1, "shuffled_s": 2.0}]
    rows += [store | {"store": "alone", "benchmark": "other", "sequential_s": 0.1}]
    by_hand.write(tmp_path, storage_benchmarks=rows)
    found = query("storage_benchmark", tmp_path).set_index("store")
    assert found.loc["s", "break_even_epochs"] == pytest.approx(2.0 / 0.5)
    assert math.isinf(found.loc["slow", "break_even_epochs"])
    assert math.isnan(found.loc["alone", "break_even_epochs"])
    assert math.isnan(found.loc["s", "break_even_epochs_tokenizers"])


def test_a_store_that_cuts_documents_has_no_share_of_their_text(tmp_path):
    row = {"benchmark": "b", "store": "s", "format": "padded", "round": 0, "stored_bytes": 5, "text_bytes": 10}
    by_hand.write(tmp_path, storage_benchmarks=[row | {"documents_cut": n, "store": str(n)} for n in (0, 1)])
    found = query("storage_benchmark", tmp_path).set_index("store")["share_of_text"]
    assert found["0"] == 0.5 and math.isnan(found["1"])


def test_what_was_left_out_is_said_and_not_drawn(tables, tmp_path):
    frame = query("storage_benchmark", tables)
    assert "Left out: text, tiktoken (it is not here)" in StorageBenchmark(frame).caption()
    assert "tiktoken" not in " ".join(StorageBenchmark(frame).data()["store"])
    path = logs.write_benchmark(tmp_path / "data.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"left_out": {"packed, cold": "all of it stays"}}))
    logs.ingested(tmp_path, [], [path])
    frame = query("benchmark", tmp_path / "tables")
    benchmark = TokenizationBenchmark(frame)
    for _ in range(2):  # a caption leaves its figure as it is
        assert "Left out: packed, cold (all of it stays)" in benchmark.caption()
    assert "packed, cold" not in set(benchmark.data()["arm"])
    assert frame["cache"].dropna().unique().tolist() == ["warm"]
