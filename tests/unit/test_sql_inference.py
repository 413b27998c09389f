"""What models wrote: from the benchmark's file to the definitions, against numbers worked out by hand."""

import pytest

from tests import logs
from tests import tables as by_hand
from tokenscale.analysis.queries import query
from tokenscale.report.drawings.inference import InferenceTokensPerSecond, names


def made(folder, **options):
    measured = [logs.write_inference_benchmark(folder / "bench.json", **options)]
    return logs.ingested(folder, [], measured)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return made(tmp_path_factory.mktemp("inference"))


def drawn(tables):
    return InferenceTokensPerSecond(query("inference", tables), query("inference_steps", tables))


def cells(tables):
    rows = query("inference", tables)
    return rows[rows["left_out"].isna()].set_index(["new_tokens", "cached", "round"]).sort_index()


def test_tokens_behind_the_first_are_those_of_all_rows_over_their_seconds(tables):
    rows = cells(tables)
    assert rows.loc[(4, True, 0), "tokens_per_s"] == pytest.approx(2 * 3 / 0.03)
    assert rows.loc[(12, True, 0), "tokens_per_s"] == pytest.approx(2 * 11 / 0.19)
    assert rows.loc[(12, False, 1), "ms_per_token"] == pytest.approx(1e3 * 19 * 0.11 / 11)
    assert rows.loc[(4, True, 0), "prefill_s"] == 0.5
    assert rows.loc[(4, True, 0), "prefill_tokens_per_s"] == pytest.approx(2 * 8 / 0.5)


def test_a_speed_up_is_of_the_same_round_and_of_the_cache(tables):
    rows = cells(tables)
    assert rows.loc[(12, True, 1), "speed_up"] == pytest.approx(10)
    assert rows["speed_up"].notna().sum() == 4 and rows.loc[(12, False, 0), "speed_up"] != 10


def test_the_cache_has_bytes_by_formula_and_none_has_none(tables):
    rows = cells(tables)
    assert rows.loc[(12, True, 0), ["formula_bytes", "cache_bytes"]].tolist() == [2 * 2 * 4 * 16 * 20 * 4 * 2] * 2
    assert rows.loc[(12, False, 0), "formula_bytes"] == 0


def test_cells_whose_texts_differ_are_compared_in_nothing(tmp_path):
    tables = made(tmp_path, differs=True)
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


def test_what_was_left_out_is_said_and_not_drawn(tables):
    figure = drawn(tables)
    assert "Left out: qwen-tiny (no cache)" in figure.caption()
    assert set(figure.data()["model"]) == {"llama-tiny"}
    assert figure.data()["position"].notna().sum() == len(query("inference_steps", tables))


def test_two_runs_of_one_model_have_names_of_their_own():
    import pandas as pd

    rows = pd.DataFrame({"run_id": ["a-0123456789", "b-1123456789", "c"], "model": ["m", "m", "n"]})
    named = names(rows)
    assert named == {"a-0123456789": "m (0123456789)", "b-1123456789": "m (1123456789)", "c": "n"}


def test_answers_come_in_the_order_of_their_prompts(tmp_path):
    row = {"benchmark": "b", "of_run": "r", "model": "m", "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    by_hand.write(tmp_path, generations=[row | {"number": n, "prompt": str(n)} for n in (2, 0, 1)])
    assert query("generations", tmp_path)["prompt"].tolist() == ["0", "1", "2"]
