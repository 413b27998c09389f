"""Definitions in SQL against numbers worked out by hand."""

import pytest

from tests import logs
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.queries import PARAMETERS, connect, definition, query
from tokenscale.errors import UserError
from tokenscale.settings.data import StorageSettings


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sql")
    ingest(
        logs.write_demo(folder, world_sizes=(1, 2), repeats=2),
        folder / "runs",
        folder / "tables",
        [folder / "bench.json"],
    )
    return folder / "tables"


def one(frame, **where):
    for column, value in where.items():
        frame = frame[frame[column] == value]
    (row,) = frame.to_dict("records")
    return row


def test_throughput_is_sum_over_sum_after_warm_up(tables):
    row = one(query("throughput", tables), approach="packed", world_size=1, repeat=0)
    useful = int(8 * 1024 * 0.97)
    assert row["steps"] == 9
    assert row["useful_tokens_per_s"] == pytest.approx(useful / 0.25)
    assert row["total_tokens_per_s"] == pytest.approx(8 * 1024 / 0.25)
    cold = one(query("throughput", tables, warmup_steps=0), approach="packed", world_size=1, repeat=0)
    assert cold["useful_tokens_per_s"] == pytest.approx(12 * useful / (16 * 0.25))


def test_ranks_add_up_and_the_slowest_sets_the_time(tmp_path):
    run = logs.settings(world_size=2, steps=6)
    folder = logs.write_run(tmp_path / "runs", run)
    path = folder / "attempt=00" / "rank=00001" / "steps.jsonl"
    path.write_text(path.read_text().replace('"step_s":0.25,', '"step_s":0.5,'))
    ingest(logs.write_table(tmp_path / "runs.json", [run]), tmp_path / "runs", tmp_path / "tables")
    steps = query("steps_global", tmp_path / "tables")
    assert steps["rows"].tolist() == [8] * 6
    assert steps["step_s"].tolist()[1:] == [0.5] * 5
    assert steps["total_tokens"].tolist() == [8 * 1024] * 6


def test_a_step_that_lacks_a_rank_is_left_out(tmp_path):
    run = logs.settings(world_size=2, steps=6)
    folder = logs.write_run(tmp_path / "runs", run)
    path = folder / "attempt=00" / "rank=00001" / "steps.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    ingest(logs.write_table(tmp_path / "runs.json", [run]), tmp_path / "runs", tmp_path / "tables")
    with connect(tmp_path / "tables") as connection:
        assert query("inventory", connection)["steps_seen"].tolist() == [5]
        assert len(query("steps_global", connection)) == 0  # the run is invalid: it counts for nothing


def test_loss_is_weighed_by_useful_tokens(tables):
    loss = query("loss", tables)
    row = loss[(loss["approach"] == "packed") & (loss["world_size"] == 2) & (loss["repeat"] == 0)].iloc[0]
    assert row["loss"] == pytest.approx(8.0)
    assert row["useful_tokens_seen"] == row["useful_tokens"] > 0


def test_validation_knows_the_tokens_before_it(tables):
    found = query("validation", tables)
    first, last = found[found["run_id"] == found["run_id"].iloc[0]].to_dict("records")
    assert (first["step"], first["useful_tokens_seen"], bool(first["last"])) == (0, 0, False)
    assert (last["step"], bool(last["last"])) == (12, True)
    assert last["useful_tokens_seen"] == 12 * int(8 * 1024 * 0.97)
    assert last["perplexity"] > 1


def test_stalls_and_their_bound(tables):
    row = one(query("stalls", tables), approach="padded", world_size=1, repeat=0)
    assert row["data_stall_share"] == pytest.approx(0.05 / 0.30)
    assert row["largest_gain"] == pytest.approx(1 / (1 - 0.05 / 0.30))


def test_benchmark_units(tables):
    row = one(query("benchmark", tables), arm="padded", round=0)
    assert row["ms_per_batch"] == pytest.approx(1e3 * 0.5 / 16)
    assert row["us_per_useful_token"] == pytest.approx(1e6 * 0.5 / 60_000)


def test_efficiency_is_against_the_same_repeat(tables):
    scaling = query("scaling", tables)
    assert scaling.loc[scaling["world_size"] == 1, "efficiency"].tolist() == [1.0] * 10
    assert scaling.loc[scaling["world_size"] == 2, "efficiency"].tolist() == pytest.approx([0.5] * 10, rel=1e-3)


def test_equal_digests_prove_the_same_data_and_one_other_row_refutes_it(tmp_path):
    runs = [logs.settings(world_size=w, steps=5) for w in (1, 2, 3)]
    for run in runs:
        logs.write_run(tmp_path / "runs", run)
    table = logs.write_table(tmp_path / "runs.json", runs)
    ingest(table, tmp_path / "runs", tmp_path / "tables")
    order = query("order", tmp_path / "tables")
    assert order["same_data"].tolist() == [True, True]
    assert order["steps_compared"].tolist() == [5, 5]
    path = tmp_path / "runs" / runs[2].identity / "attempt=00" / "rank=00002" / "steps.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace('"order_digest":', '"order_digest":1')
    path.write_text("\n".join(lines) + "\n")
    ingest(table, tmp_path / "runs", tmp_path / "tables")
    order = query("order", tmp_path / "tables")
    assert order["same_data"].tolist() == [True, False]
    assert order["steps_equal"].tolist() == [5, 4]


def test_each_level_of_a_further_factor_has_its_own_efficiency_and_its_own_pairs(tmp_path):
    runs = [
        logs.settings("token-list", world, storage=StorageSettings(dtype=dtype))
        for world in (1, 2)
        for dtype in ("int32", "int64")
    ] + [logs.settings("padding-free", world) for world in (1, 2)]
    for run in runs:
        logs.write_run(tmp_path / "runs", run)
    table = logs.write_table(tmp_path / "runs.json", runs, further=("storage.dtype",))
    ingest(table, tmp_path / "runs", tmp_path / "tables")
    scaling = query("scaling", tmp_path / "tables")
    assert len(scaling) == 6
    assert scaling["efficiency"].round(3).tolist() == [1.0, 0.5] * 3
    order = query("order", tmp_path / "tables")
    assert (order["kind"] == "world sizes").sum() == 3  # never one storage against the other
    assert (order["kind"] == "online and offline").sum() == 4


def test_a_run_without_a_partner_at_world_size_one_has_no_efficiency(tmp_path):
    runs = [logs.settings("packed", 2), logs.settings("padded", 1)]
    for run in runs:
        logs.write_run(tmp_path / "runs", run)
    ingest(logs.write_table(tmp_path / "runs.json", runs), tmp_path / "runs", tmp_path / "tables")
    scaling = query("scaling", tmp_path / "tables")
    assert scaling.set_index("approach")["efficiency"].isna().to_dict() == {"packed": True, "padded": False}


@pytest.mark.parametrize("name", ["throughput", "scaling", "stalls", "validation", "order", "steps_global"])
def test_runs_that_stopped_or_are_invalid_count_for_nothing(tmp_path, name):
    runs = [logs.settings(a, w) for a in ("padded", "pretokenized-padded") for w in (1, 2)]
    for run in runs:
        logs.write_run(tmp_path / "runs", run, attempts=[{"diverges": 8}])
    edited = logs.write_run(tmp_path / "runs", logs.settings("packed")) / "attempt=00" / "rank=00000" / "steps.jsonl"
    edited.write_text(edited.read_text().replace('"rows":8', '"rows":7'))
    table = logs.write_table(tmp_path / "runs.json", [*runs, logs.settings("packed")])
    ingest(table, tmp_path / "runs", tmp_path / "tables")
    assert len(query(name, tmp_path / "tables")) == 0


def test_the_loss_of_a_stopped_run_is_listed_up_to_its_stop(tmp_path):
    runs = [logs.settings(world_size=2, repeat=r) for r in (0, 1, 2)]
    logs.write_run(tmp_path / "runs", runs[0])
    logs.write_run(tmp_path / "runs", runs[1], attempts=[{"diverges": 5}])
    broken = logs.write_run(tmp_path / "runs", runs[2]) / "attempt=00" / "rank=00000" / "steps.jsonl"
    broken.write_text(broken.read_text().replace('"rows":4', '"rows":3'))
    ingest(logs.write_table(tmp_path / "runs.json", runs), tmp_path / "runs", tmp_path / "tables")
    loss = query("loss", tmp_path / "tables")
    assert loss.groupby(["repeat", "stopped"])["step"].max().to_dict() == {(0, False): 11, (1, True): 4}
    assert loss["loss"].notna().all()


def test_a_digest_is_defined_as_what_it_is():
    assert "names the samples, not their content" in definition("order")


def test_online_and_offline_twins_are_paired(tables):
    order = query("order", tables)
    twins = order[order["kind"] == "online and offline"]
    assert set(zip(twins["approach"], twins["other_approach"], strict=True)) == {
        ("padded", "pretokenized-padded"),
        ("padding-free", "token-list"),
    }
    assert len(twins) == 8


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_query_works_without_rows_and_says_what_it_means(tmp_path, name):
    ingest(logs.write_table(tmp_path / "runs.json", []), tmp_path, tmp_path / "tables")
    assert len(query(name, tmp_path / "tables")) == 0
    assert len(definition(name)) > 60
    assert "$" not in definition(name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_query_gives_equal_rows_twice(tables, name):
    assert query(name, tables).equals(query(name, tables))


def test_misspelt_names_are_mended(tables):
    with pytest.raises(UserError, match="throughput"):
        query("thruput", tables)
    with pytest.raises(UserError, match="warmup_steps"):
        query("throughput", tables, warmup=1)


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(UserError, match="table is missing"):
        query("loss", tmp_path)
