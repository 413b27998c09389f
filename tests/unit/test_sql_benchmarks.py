"""Benchmarks apart from trainings: from their files to the definitions, against numbers worked out
by hand.
"""

import json
import math

import pandas as pd
import pytest

from tests import logs
from tests import tables as by_hand
from tokenscale.analysis.queries import query
from tokenscale.report.drawings.inference import InferenceTokensPerSecond, names
from tokenscale.report.drawings.storage import StorageBenchmark
from tokenscale.report.drawings.tokenization_benchmark import TokenizationBenchmark


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    kinds = {"storage": logs.write_storage_benchmark, "data": logs.write_benchmark}
    kinds |= {"inference": logs.write_inference_benchmark}
    return logs.ingested(
        folder, benchmarks=[write(folder / f"{name}.json") for name, write in kinds.items()]
    )


def test_bytes_and_speeds_are_of_tokens(tables):
    rows = query("storage_benchmark", tables).set_index(["format", "round"])
    assert rows.loc[("padded", 0), "bytes_per_id"] == 2.5
    assert rows.loc[("padded", 0), "bytes_per_useful_token"] == pytest.approx(25_000 / 9_900)
    assert rows.loc[("padded", 0), "entropy_bytes"] == pytest.approx(1.2)
    assert rows.loc[("padded", 0), "share_of_text"] == 0.5
    assert rows.loc[("packed", 1), "write_us_per_token"] == pytest.approx(1e6 * 1.5 / 9_900)
    assert rows.loc[("packed", 0), "cold_us_per_token"] == pytest.approx(1e6 * 0.3 / 9_900)
    assert rows.loc[("token-list", 0), "single_row_ms"] == pytest.approx(5.0)
    # breaking even is of the same round and against each engine; the fast one makes the ids
    for number, made_s in ((0, 0.125 + 0.5), (1, 0.125 + 1.5)):
        row = rows.loc[("padded", number)]
        assert row["preprocessing_s"] == pytest.approx(made_s)
        assert row["break_even_epochs"] == pytest.approx(made_s / ((1 + number) * 0.25 - 0.2))
        assert row["break_even_epochs_tokenizers"] == pytest.approx(
            made_s / ((1 + number) * 1.2 - 0.2)
        )


def test_a_store_that_saves_nothing_never_breaks_even(tmp_path):
    text = {
        "benchmark": "b",
        "store": "text, e",
        "format": "text",
        "round": 0,
        "engine": "e",
        "auto": True,
    }
    store = {
        "benchmark": "b",
        "store": "s",
        "format": "packed",
        "round": 0,
        "write_s": 1.0,
        "useful_tokens": 10,
    }
    rows = [text | {"sequential_s": 2.0, "bulk_s": 1.0}, store | {"sequential_s": 1.5}]
    rows += [store | {"store": "slow", "format": "padded", "sequential_s": 0.1, "shuffled_s": 2.0}]
    rows += [store | {"store": "alone", "benchmark": "other", "sequential_s": 0.1}]
    by_hand.write(tmp_path, storage_benchmarks=rows)
    found = query("storage_benchmark", tmp_path).set_index("store")
    assert found.loc["s", "break_even_epochs"] == pytest.approx(2.0 / 0.5)
    assert math.isinf(found.loc["slow", "break_even_epochs"])
    assert math.isnan(found.loc["alone", "break_even_epochs"])
    assert math.isnan(found.loc["s", "break_even_epochs_tokenizers"])


def test_a_store_that_cuts_documents_has_no_share_of_their_text_and_answers_are_in_the_order_of_prompts(
    tmp_path,
):
    row = {
        "benchmark": "b",
        "store": "s",
        "format": "padded",
        "round": 0,
        "stored_bytes": 5,
        "text_bytes": 10,
    }
    cut = [row | {"documents_cut": n, "store": str(n)} for n in (0, 1)]
    row = {
        "benchmark": "b",
        "of_run": "r",
        "model": "m",
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 0,
    }
    written = [row | {"number": n, "prompt": str(n)} for n in (2, 0, 1)]
    by_hand.write(tmp_path, storage_benchmarks=cut, generations=written)
    found = query("storage_benchmark", tmp_path).set_index("store")["share_of_text"]
    assert found["0"] == 0.5 and math.isnan(found["1"])
    assert query("generations", tmp_path)["prompt"].tolist() == ["0", "1", "2"]


def test_what_was_left_out_is_said_and_not_drawn(tables, tmp_path):
    stores = StorageBenchmark(query("storage_benchmark", tables))
    assert "text, tiktoken (it is not here)" in stores.caption() and "text, tiktoken" not in set(
        stores.data()["store"]
    )
    path = logs.write_benchmark(tmp_path / "data.json")
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"left_out": {"packed, cold": "all of it stays"}})
    )
    frame = query("benchmark", logs.ingested(tmp_path, [], [path]))
    benchmark = TokenizationBenchmark(frame)
    assert "packed, cold (all of it stays)" in benchmark.caption()
    assert "packed, cold" not in set(benchmark.data()["arm"]) and frame[
        "cache"
    ].dropna().unique().tolist() == ["warm"]
    models = drawn(tables)
    assert "qwen-tiny (no cache)" in models.caption() and set(models.data()["model"]) == {
        "llama-tiny"
    }


# -- what models wrote


def drawn(tables):
    return InferenceTokensPerSecond(query("inference", tables), query("inference_steps", tables))


def cells(tables):
    rows = query("inference", tables)
    return rows[rows["left_out"].isna()].set_index(["new_tokens", "cached", "round"]).sort_index()


def test_speeds_and_bytes_are_those_of_all_rows(tables):
    rows = cells(tables)
    assert rows.loc[(4, True, 0), "tokens_per_s"] == pytest.approx(2 * 3 / 0.03)
    assert rows.loc[(12, True, 0), "tokens_per_s"] == pytest.approx(2 * 11 / 0.19)
    assert rows.loc[(12, False, 1), "ms_per_token"] == pytest.approx(1e3 * 19 * 0.11 / 11)
    assert rows.loc[(4, True, 0), "prefill_s"] == 0.5
    assert rows.loc[(4, True, 0), "prefill_tokens_per_s"] == pytest.approx(2 * 8 / 0.5)
    assert rows.loc[(12, True, 1), "speed_up"] == pytest.approx(10), "of the same round"
    assert rows["speed_up"].notna().sum() == 4 and rows.loc[(12, False, 0), "speed_up"] != 10, (
        "and of the cache"
    )
    assert (
        rows.loc[(12, True, 0), ["formula_bytes", "cache_bytes"]].tolist()
        == [2 * 2 * 4 * 16 * 20 * 4 * 2] * 2
    )
    assert rows.loc[(12, False, 0), "formula_bytes"] == 0


def test_cells_whose_texts_differ_are_compared_in_nothing(tmp_path):
    path = logs.write_inference_benchmark(tmp_path / "bench.json", differs=True)
    tables = logs.ingested(tmp_path, benchmarks=[path])
    rows = cells(tables)
    assert rows["speed_up"].dropna().index.get_level_values("new_tokens").unique().tolist() == [4]
    assert not rows.loc[12, "same_text"].any() and rows.loc[4, "same_text"].all()
    figure = drawn(tables)
    assert "Texts differ with the cache" in figure.caption()
    assert "12 tokens" not in figure.alt()
    assert [row[-1] for row in figure.table().rows] == ["equal", "differ from position 15"]


def test_time_of_a_token_is_by_stretches_of_the_longest_text(tables):
    rows = query("inference_steps", tables)
    assert set(rows["new_tokens"]) == {12} and sorted(set(rows["position"])) == [9, 12]
    times = rows[rows["cached"] & (rows["round"] == 0)].set_index("position")["ms_per_token"]
    assert times[9] == pytest.approx(10) and times[12] == pytest.approx(20)


def test_models_of_one_name_are_told_apart_by_their_runs():
    named = names(
        pd.DataFrame({"run_id": ["a-0123456789", "b-1123456789", "c"], "model": ["m", "m", "n"]})
    )
    assert named == {"a-0123456789": "m (0123456789)", "b-1123456789": "m (1123456789)", "c": "n"}
