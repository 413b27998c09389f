"""Definitions in SQL against numbers worked out by hand."""

import re
from dataclasses import replace
from importlib import resources

import pandas as pd
import pytest

from tests import logs
from tests import tables as by_hand
from tokenscale.analysis import expectations
from tokenscale.analysis.ingest import ingest
from tokenscale.analysis.queries import PARAMETERS, VIEWS, definition, query
from tokenscale.base.errors import UserError
from tokenscale.settings import closure
from tokenscale.settings.data import StorageSettings
from tokenscale.settings.layout import LayoutSettings

pytestmark = pytest.mark.slow(21)


def test_each_level_of_a_further_factor_has_its_own_efficiency_and_its_own_pairs(tmp_path):
    stored = [StorageSettings(dtype=dtype) for dtype in ("int32", "int64")]
    runs = [logs.settings("token-list", world, storage=storage) for world in (1, 2) for storage in stored]
    runs += [logs.settings("padding-free", world) for world in (1, 2)]
    logs.made(tmp_path, runs, further=("storage.dtype",))
    scaling = query("scaling", tmp_path / "tables")
    assert len(scaling) == 6
    assert scaling["efficiency"].round(3).tolist() == [1.0, 0.5] * 3
    order = query("order", tmp_path / "tables")
    assert (order["kind"] == "world sizes").sum() == 3  # never one storage against the other
    assert (order["kind"] == "online and offline").sum() == 4


def one(frame, **where):
    for column, value in where.items():
        frame = frame[frame[column] == value]
    (row,) = frame.to_dict("records")
    return row


def layout(steps=6, micro_batch=8, **degrees):
    return replace(logs.settings(steps=steps), micro_batch=micro_batch, layout=LayoutSettings(**degrees))


LAYOUTS = ("layout.pipeline", "layout.schedule", "layout.stages_per_rank", "layout.shard", "layout.sharding")
LAYOUTS += ("layout.tensor",)


def laid_out(folder, runs, edit=None, further=()):
    """Tables of runs in layouts of their own; `edit` gets (run, rank, a step's fields) and changes the fields."""
    for run in runs:
        run_folder = logs.write_run(folder / "runs", run)
        for rank in range(run.layout.world_size) if edit else ():
            logs.edit(run_folder, lambda step, run=run, rank=rank: edit(run, rank, step) or step, rank=f"{rank:05d}")
        logs.retime(run_folder)
    return logs.ingested(folder, runs, further=LAYOUTS + further)


METHODS = {
    "single": {}, "ddp": {"data": 2}, "zero2": {"shard": 2, "sharding": "zero2"}, "zero3": {"shard": 2},
    "hsdp 2 × 4": {"data": 2, "shard": 4}, "tp": {"tensor": 4}, "gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "tp 4 + ddp 2": {"data": 2, "tensor": 4},
    "1f1b 2 + tp 2 + zero1 2": {"pipeline": 2, "tensor": 2, "shard": 2, "sharding": "zero1"},
}  # fmt: skip


def test_methods_go_by_their_degrees(tmp_path):
    runs = {layout(**degrees).identity: name for name, degrees in METHODS.items()}
    found = query("parallelism", laid_out(tmp_path, [layout(**degrees) for degrees in METHODS.values()]))
    assert found.set_index("run_id")["method"].to_dict() == runs


def test_methods_are_held_against_one_rank_of_the_same_micro_batch(tmp_path):
    """Useful tokens: 8 × 1024 × 0.97 a step on one rank. Steps of 0.25 s, and of 0.2 and 0.1 s where edited."""
    runs = [layout(), layout(tensor=2), layout(data=2), layout(micro_batch=4, pipeline=2)]

    def edit(run, rank, step):
        if run.layout.tensor == 2:
            step["step_s"] = 0.2 if rank else 0.1
            if step["step"] == 5 and rank == 0:
                step["loss_sum"] += 0.25 * step["useful_tokens"]  # which are all this rank's
        if run.layout.pipeline == 2 and step["step"] == 1:
            step["order_digest"] += 1

    tables = laid_out(tmp_path, runs, edit, further=("micro_batch",))
    ingest(logs.write_table(tmp_path / "runs.json", runs, further=LAYOUTS), tmp_path / "runs", tables)
    found = query("parallelism", tables)
    single, ddp = one(found, method="single"), one(found, method="ddp")
    assert (single["efficiency"], single["largest_loss_difference"], single["same_data"]) == (1.0, 0.0, True)
    useful = int(8 * 1024 * 0.97)
    assert ddp["useful_tokens_per_s"] == pytest.approx(2 * int(4 * 1024 * 0.97) / 0.25)
    assert ddp["efficiency"] == pytest.approx(0.5, rel=1e-3) and bool(ddp["same_data"])
    tp = one(found, method="tp")  # the slower rank sets the time
    assert tp["useful_tokens_per_s"] == pytest.approx(ddp["useful_tokens_per_s"] * 0.25 / 0.2)
    assert tp["efficiency"] == pytest.approx(0.625, rel=1e-3)
    assert tp["largest_loss_difference"] == pytest.approx(0.25, rel=1e-6)
    assert tp["final_loss"] == pytest.approx(single["final_loss"] + 0.25)
    assert single["useful_tokens_per_s"] == pytest.approx(useful / 0.25)
    other = one(found, method="1f1b")  # its micro-batch has no run on one rank
    assert pd.isna(other["efficiency"]) and pd.isna(other["largest_loss_difference"])
    pairs = [layout(), layout(pipeline=2)]
    found = query("parallelism", laid_out(tmp_path / "digests", pairs, edit))
    assert found["same_data"].tolist() == [True, False]


def test_memory_is_that_of_the_fullest_rank_in_the_latest_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr(expectations, "OF_A_RUN", [])  # whatever the numbers are
    run, other = layout(12, shard=2), layout(12, data=2)
    path = logs.write_run(tmp_path / "runs", run, attempts=[{"stop": 3, "stopped": False}, {"start": 3}])
    for rank, activations in enumerate((5, 40)):
        logs.add_memory(path, (900, 900, 900, 900), rank, attempt=0)
        logs.add_memory(path, (10, 20, 30, activations), rank, attempt=1)
    path = logs.write_run(tmp_path / "runs", other)
    for rank, activations in enumerate((None, 40)):
        logs.add_memory(path, (10, 20, 30, activations), rank)
    logs.ingested(tmp_path, [run, other], further=LAYOUTS, to="t")
    found = query("parallelism", tmp_path / "t")
    row = one(found, method="zero3")
    assert [row[f"{part}_bytes"] for part in ("parameters", "gradients", "optimizer", "activations", "memory")] == [
        10, 20, 30, 40, 100
    ]  # fmt: skip
    assert pd.isna(one(found, method="ddp")["memory_bytes"])  # one rank's activations were not measured


def test_a_bubble_is_waiting_over_waiting_and_passes_of_all_ranks(tmp_path):
    """Rank 0 waits 10 ms of 40, rank 1 20 of 80 but for its last step, 50 of 110: 2 × 1 + 2 + 5 of 2 × 4 + 8 + 11."""
    naive = layout(steps=5, pipeline=2, schedule="naive")
    many = layout(steps=5, micro_batch=4, pipeline=2, schedule="naive")
    gpipe = layout(steps=5, micro_batch=4, pipeline=2, schedule="gpipe")

    def edit(run, rank, step):
        step["micro_steps"] = run.global_batch // run.micro_batch
        waits = (0.05 if step["step"] == 4 else 0.02) if rank else 0.01
        step |= {"bubble_s": 0.3 if step["step"] < 3 else waits}  # the first three are warm-up
        step |= {"forward_s": 0.01 + 0.01 * rank, "backward_s": 0.02 + 0.02 * rank}
        step["step_s"] = 0.5 if run.layout.schedule == "gpipe" else 0.6 if run.micro_batch == 4 else 0.8
        if run is many and step["step"] == 0:
            step["loss_sum"] += 0.25 * step["useful_tokens"]

    tables = laid_out(tmp_path, [naive, many, gpipe, layout(steps=5)], edit, further=("micro_batch",))
    found = query("pipeline", tables)
    assert found["schedule"].tolist() == ["gpipe", "naive", "naive"]
    assert found["bubble_share"].tolist() == pytest.approx([9 / 27] * 3)
    assert found["micro_batches"].tolist() == [2, 1, 2]
    assert found["speed_up"].tolist() == pytest.approx([0.6 / 0.5, 1.0, 1.0])
    assert found["largest_loss_difference"].tolist() == pytest.approx([0, 0, 0.25])
    assert found["same_data"].tolist() == [True] * 3


@pytest.mark.parametrize("name", ["throughput", "scaling", "stalls", "validation", "order", "steps_global"])
def test_runs_that_stopped_or_are_invalid_count_for_nothing(tmp_path, name):
    runs = [logs.settings(a, w) for a in ("padded", "pretokenized-padded") for w in (1, 2)]
    for run in runs:
        logs.write_run(tmp_path / "runs", run, attempts=[{"diverges": 8}])
    edited = logs.write_run(tmp_path / "runs", logs.settings("packed")) / "attempt=00" / "rank=00000" / "steps.jsonl"
    edited.write_text(edited.read_text().replace('"rows":8', '"rows":7'))
    logs.ingested(tmp_path, [*runs, logs.settings("packed")])
    assert len(query(name, tmp_path / "tables")) == 0


def test_the_loss_of_a_stopped_run_is_listed_up_to_its_stop(tmp_path):
    runs = [logs.settings(world_size=2, repeat=r) for r in (0, 1, 2)]
    logs.write_run(tmp_path / "runs", runs[0])
    logs.write_run(tmp_path / "runs", runs[1], attempts=[{"diverges": 5}])
    broken = logs.write_run(tmp_path / "runs", runs[2]) / "attempt=00" / "rank=00000" / "steps.jsonl"
    broken.write_text(broken.read_text().replace('"rows":4', '"rows":3'))
    logs.ingested(tmp_path, runs)
    loss = query("loss", tmp_path / "tables")
    assert loss.groupby(["repeat", "stopped"])["step"].max().to_dict() == {(0, False): 11, (1, True): 4}
    assert loss[loss["step"] == 0]["loss"].tolist() == pytest.approx([8, 8], abs=0.04), "of the tokens of all ranks"
    assert loss["loss"].notna().all()


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_query_works_without_rows_and_says_what_it_means(tmp_path, name):
    ingest(logs.write_table(tmp_path / "runs.json", []), tmp_path, tmp_path / "tables")
    assert len(query(name, tmp_path / "tables")) == 0
    assert len(definition(name)) > 60
    assert "$" not in definition(name)
    with pytest.raises(UserError, match=rf"'{name}'"):
        query(f"{name}s", tmp_path / "tables")
    with pytest.raises(UserError, match="warmup_steps"):
        query("throughput", tmp_path / "tables", warmup=1)
    assert {*VIEWS, "macros"} == closure.VIEWS and set(VIEWS) <= PARAMETERS.keys()


SQL = sorted(resources.files("tokenscale.analysis").joinpath("sql").iterdir(), key=lambda path: path.name)
FILES = [path for path in SQL if path.name != "macros.sql"]
#: a mean, a median or a sum of a rate, named or worked out inside: sums of counts over sums of seconds are meant
RATE_AVERAGED = re.compile(
    r"\b(avg|mean|median|sum|favg|quantile\w*)\(\s*(\w+\.)?\w*(_per_\w*s|mfu\w*|hfu|share|efficiency)\b"
    r"|\b(avg|mean|median|favg|quantile\w*)\([^()]*/"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_a_query_that_defines_itself_orders_all_rows_and_averages_no_rate(path):
    text = path.read_text()
    assert path.name.removesuffix(".sql") in PARAMETERS
    assert text.startswith("-- ")
    assert re.search(r"ORDER BY [^()]*;\n$", text), "the rows' order is the last word"
    code = re.sub(r"--.*", "", text)
    assert not RATE_AVERAGED.search(code)
    assert set(re.findall(r"\$(\w+)", code)) == PARAMETERS[path.name.removesuffix(".sql")].keys()


def test_one_rank_and_several_give_the_same_steps(tmp_path):
    """The first branch of steps_global takes rows as they are, the second adds up: equal for what one rank logged."""
    steps = by_hand.steps("a", 3, order_digest=2**52 + 5, data_wait_s=0.25)
    shared = by_hand.steps("b", 3, 2, useful_tokens=15, total_tokens=20, rows=2, loss_sum=30.0, data_wait_s=0.25)
    for row in shared:
        row["order_digest"] = 2**52 - 10 if row["rank"] else 15
    folder = by_hand.write(tmp_path, runs=[by_hand.run("a"), by_hand.run("b", repeat=1)], steps=steps + shared)
    found = query("steps_global", folder)
    one_rank, two_ranks = (found[found["run_id"] == name].drop(columns=["run_id", "ranks"]) for name in "ab")
    assert one_rank.reset_index(drop=True).equals(two_ranks.reset_index(drop=True))
    assert one_rank["order_digest"].tolist() == [5] * 3
    assert found["ranks"].tolist() == [1] * 3 + [2] * 3


def test_samples_and_shares_of_a_device_are_sum_over_sum(tmp_path):
    steps = by_hand.steps("a", 5, 2, rows=lambda s, _: s, step_s=lambda s, _: float(s))
    folder = by_hand.write(tmp_path, runs=[by_hand.run("a", world_size=2)], steps=steps)
    (row,) = query("throughput", folder).to_dict("records")
    assert (row["rows"], row["seconds"], row["rows_per_s"]) == (14, 7.0, 2.0)
    assert row["useful_tokens_per_device_s"] == 2 * 2 * 30 / 7 / 2
    assert row["total_tokens_per_device_s"] == 2 * 2 * 40 / 7 / 2
