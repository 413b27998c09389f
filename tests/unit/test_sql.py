"""Definitions in SQL against numbers worked out by hand."""

import math
import re
from importlib import resources

import numpy as np
import pandas as pd
import pytest

from tests import tables
from tokenscale.analysis.queries import PARAMETERS, VIEWS, connect, definition, query
from tokenscale.base.errors import UserError
from tokenscale.settings import closure
from tokenscale.settings.layout import DEGREES


def test_each_level_of_a_further_factor_has_its_own_efficiency_and_its_own_pairs(tmp_path):
    cells = [("token-list", dtype) for dtype in ("int32", "int64")] + [("padding-free", "")]
    runs = [
        tables.run(
            f"{a} {storage} {n}", approach=a, storage=storage, series=a + storage, world_size=n
        )
        for a, storage in cells
        for n in (1, 2)
    ]
    steps = [
        row
        for run in runs
        for row in tables.steps(run["run_id"], 6, run["world_size"], useful_tokens=15)
    ]
    folder = tables.write(tmp_path, runs=runs, steps=steps)
    assert query("scaling", folder)["efficiency"].tolist() == [1.0] * 6
    kinds = query("order", folder)["kind"].value_counts().to_dict()
    assert kinds == {"world sizes": 3, "online and offline": 4}, (
        "never one storage against the other"
    )


def laid_out(run_id, **layout):
    """A row of `runs` in a layout of its own."""
    row = dict.fromkeys(DEGREES, 1) | {
        "copies": "ddp",
        "schedule": "1f1b",
        "sharding": "zero3",
        "layout": str(layout),
    }
    row |= layout
    return tables.run(run_id, world_size=math.prod(row[degree] for degree in DEGREES), **row)


METHODS = {
    "single": {},
    "ddp": {"data": 2},
    "zero2": {"shard": 2, "sharding": "zero2"},
    "zero3": {"shard": 2},
    "hsdp 2 × 4": {"data": 2, "shard": 4},
    "tp": {"tensor": 4},
    "gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "tp 4 + ddp 2": {"data": 2, "tensor": 4},
    "1f1b 2 + tp 2 + zero1 2": {"pipeline": 2, "tensor": 2, "shard": 2, "sharding": "zero1"},
}


def test_methods_go_by_their_degrees(tmp_path):
    runs = [laid_out(name, **degrees) for name, degrees in METHODS.items()]
    steps = [row for run in runs for row in tables.steps(run["run_id"], 5, run["world_size"])]
    found = query("parallelism", tables.write(tmp_path, runs=runs, steps=steps))
    assert found["method"].tolist() == found["run_id"].tolist() and len(found) == len(METHODS)


def test_methods_are_held_against_one_rank_of_the_same_micro_batch(tmp_path):
    """30 useful tokens a step: in 1 s on one rank; of two ranks the slower one sets the time."""
    half = {"useful_tokens": 15, "loss_sum": 30.0, "order_digest": lambda step, rank: 1 - rank}
    late = half | {"loss_sum": lambda step, rank: 30.0 + 7.5 * (step == 5 and rank == 0)}
    late |= {"step_s": lambda step, rank: 0.8 if rank else 0.4}
    other = half | {"order_digest": lambda step, rank: 1 - rank + (step == 1 and rank == 0)}
    runs = [laid_out("single"), laid_out("tp", tensor=2), laid_out("ddp", data=2)]
    runs.append(laid_out("1f1b", micro_batch=1, pipeline=2))
    steps = (
        tables.steps("single", 6)
        + tables.steps("tp", 6, 2, **late)
        + tables.steps("ddp", 6, 2, **other)
    )
    found = query(
        "parallelism",
        tables.write(tmp_path, runs=runs, steps=steps + tables.steps("1f1b", 6, 2, **half)),
    )
    found = found.set_index("method")
    assert found["useful_tokens_per_s"].to_dict() == pytest.approx(
        {"single": 30, "tp": 37.5, "ddp": 30, "1f1b": 30}
    )
    compared = found.drop(index="1f1b")
    assert compared["efficiency"].to_dict() == pytest.approx({"single": 1, "tp": 0.625, "ddp": 0.5})
    assert compared["largest_loss_difference"].to_dict() == pytest.approx(
        {"single": 0, "tp": 0.25, "ddp": 0}
    )
    assert compared["same_data"].to_dict() == {"single": True, "tp": True, "ddp": False}
    assert found["final_loss"].to_dict() == pytest.approx(
        {"single": 2, "tp": 2.25, "ddp": 2, "1f1b": 2}
    )
    alone = found.loc["1f1b", ["efficiency", "largest_loss_difference"]]
    assert alone.isna().all(), "its micro-batch has no run on one rank"


@pytest.mark.parametrize("missing", [None, 3])
@pytest.mark.parametrize("name", ["loss_difference", "order", "parallelism"])
def test_data_whose_digest_a_step_lacks_is_not_the_same(name, missing, tmp_path):
    digest = {"order_digest": lambda step, rank: None if step == missing else step * (rank == 0)}
    whole = {"order_digest": lambda step, rank: step}
    runs = [laid_out("single"), laid_out("ddp", data=2)]
    steps = tables.steps("single", 5, **whole) + tables.steps("ddp", 5, 2, **digest)
    found = query(name, tables.write(tmp_path, runs=runs, steps=steps))
    of_pair = found[found.iloc[:, 0] == "ddp"] if name == "parallelism" else found
    assert len(of_pair)
    assert of_pair["same_data"].all() == (missing is None)


def test_memory_is_that_of_the_fullest_rank_in_the_latest_attempt(tmp_path):
    parts = ["parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes"]
    measured = [("zero3", 0, rank, 900, 900, 900, 900) for rank in (0, 1)]
    measured += [("zero3", 1, 0, 10, 20, 30, 5), ("zero3", 1, 1, 10, 20, 30, 40)]
    measured += [("ddp", 0, 0, 10, 20, 30, None), ("ddp", 0, 1, 10, 20, 30, 40)]
    events = [
        dict(zip(["run_id", "attempt", "rank", *parts], row, strict=True), event="memory")
        for row in measured
    ]
    runs = [laid_out("zero3", shard=2), laid_out("ddp", data=2)]
    steps = [row for run in runs for row in tables.steps(run["run_id"], 5, 2)]
    found = query(
        "parallelism", tables.write(tmp_path, runs=runs, steps=steps, events=events)
    ).set_index("method")
    assert found.loc["zero3", [*parts, "memory_bytes"]].tolist() == [10, 20, 30, 40, 100]
    assert pd.isna(found.loc["ddp", "memory_bytes"]), "one rank's activations were not measured"


def test_a_bubble_is_waiting_over_waiting_and_passes_of_all_ranks(tmp_path):
    """Rank 0 waits 10 ms of 40, rank 1 20 of 80 but for its last step, 50 of 110: 2 × 1 + 2 + 5 of
    2 × 4 + 8 + 11.
    """

    def find_waiting(step: int, rank: int) -> float:
        if step < 3:
            return 0.3
        if rank == 0:
            return 0.01
        return 0.05 if step == 4 else 0.02

    passes = {
        "bubble_s": find_waiting,
        "forward_s": lambda step, rank: 0.01 + 0.01 * rank,
        "backward_s": lambda step, rank: 0.02 + 0.02 * rank,
    }
    wrong = {"loss_sum": lambda step, rank: 60.0 + 7.5 * (step == 0)}
    #: run → schedule, micro-batches, seconds a step
    shapes = {
        "few": ("naive", 1, 0.8, {}),
        "many": ("naive", 2, 0.6, wrong),
        "gpipe": ("gpipe", 2, 0.5, {}),
    }
    runs = [laid_out(name, pipeline=2, schedule=of) for name, (of, *_) in shapes.items()] + [
        laid_out("single")
    ]
    steps = tables.steps("single", 5)
    for name, (_, micro_steps, step_s, fields) in shapes.items():
        steps += tables.steps(name, 5, 2, micro_steps=micro_steps, step_s=step_s, **passes | fields)
    found = query("pipeline", tables.write(tmp_path, runs=runs, steps=steps)).set_index("run_id")
    assert found["bubble_share"].to_dict() == pytest.approx(
        dict.fromkeys(("gpipe", "few", "many"), 9 / 27)
    )
    assert found["micro_batches"].to_dict() == {"gpipe": 2, "few": 1, "many": 2}
    assert found["speed_up"].to_dict() == pytest.approx({"gpipe": 0.6 / 0.5, "few": 1, "many": 1})
    assert found["largest_loss_difference"].to_dict() == pytest.approx(
        {"gpipe": 0, "few": 0, "many": 0.25}
    )
    assert found["same_data"].all()


def test_waiting_is_over_the_passes_of_the_same_steps(tmp_path):
    """A step whose passes were not logged counts neither as waiting nor as computing."""
    for missing in ("forward_s", "backward_s"):
        steps = tables.steps("a", 8, 2, micro_steps=4, bubble_s=0.4, forward_s=0.2, backward_s=0.4)
        steps = [row | ({missing: None} if row["step"] == 5 else {}) for row in steps]
        found = query(
            "pipeline", tables.write(tmp_path, runs=[laid_out("a", pipeline=2)], steps=steps)
        )
        assert found["bubble_share"].tolist() == pytest.approx([0.4])


def test_runs_that_stopped_or_are_invalid_count_for_nothing(tmp_path):
    kinds = [("padded", "nonfinite"), ("pretokenized-padded", "nonfinite"), ("packed", "complete")]
    runs = [
        tables.run(
            f"{approach}-{world}",
            approach=approach,
            world_size=world,
            status=status,
            validity="invalid",
        )
        for approach, status in kinds
        for world in (1, 2)
    ]
    steps = [
        row
        for run in runs
        for row in tables.steps(run["run_id"], 6, run["world_size"], data_wait_s=0.1)
    ]
    events = [tables.validation(run["run_id"], 6, 2.0) for run in runs]
    folder = tables.write(tmp_path, runs=runs, steps=steps, events=events)
    for name in ("throughput", "scaling", "stalls", "validation", "order", "steps_global"):
        assert query(name, folder).empty, name


def test_the_loss_of_a_stopped_run_is_listed_up_to_its_stop(tmp_path):
    """In one curve a step and in curves of few points, each run with parts of its own."""
    stopped = {"repeat": 1, "status": "nonfinite", "validity": "invalid"}
    runs = [tables.run("a", world_size=2), tables.run("b", world_size=2, **stopped)]
    runs.append(tables.run("c", world_size=2, repeat=2, validity="invalid"))
    steps = tables.steps("a", 12, 2) + tables.steps("c", 12, 2)
    last = {
        "nonfinite": lambda step, _: step == 5,
        "loss_sum": lambda step, _: None if step == 5 else 60.0,
    }
    steps += tables.steps("b", 6, 2, **last)
    folder = tables.write(tmp_path, runs=runs, steps=steps)
    loss = query("loss", folder)
    assert loss.groupby(["run_id", "stopped"])["step"].max().to_dict() == {
        ("a", False): 11,
        ("b", True): 4,
    }
    assert set(loss["loss"]) == {2.0}, "of the tokens of all ranks"
    points = query("loss_curves", folder, points=2)
    assert points["stopped"].tolist() == [False, False, True, True] and points["step"].tolist() == [
        5,
        11,
        1,
        4,
    ]
    pd.testing.assert_frame_equal(
        query("loss_curves", folder)[loss.columns], loss, check_exact=True
    )


def test_every_query_works_without_rows_and_unknown_names_are_refused(tmp_path):
    with connect(tables.write(tmp_path)) as connection:
        for name in PARAMETERS:
            assert query(name, connection).empty, name
            assert definition(name) and "$" not in definition(name), name
        for name, parameters in (("throughputs", {}), ("throughput", {"warmup": 1})):
            with pytest.raises(UserError, match="'throughput'|warmup_steps"):
                query(name, connection, **parameters)
    assert {*VIEWS, "macros"} == closure.VIEWS and set(VIEWS) <= PARAMETERS.keys()


FILES = [
    path
    for path in resources.files("tokenscale.analysis").joinpath("sql").iterdir()
    if path.name != "macros.sql"
]
#: a mean, a median or a sum of a rate, named or worked out inside: sums of counts over sums of
#: seconds are meant
RATE_AVERAGED = re.compile(
    r"\b(avg|mean|median|sum|favg|quantile\w*)\(\s*(\w+\.)?\w*(_per_\w*s|mfu\w*|hfu|share|efficiency)\b"
    r"|\b(avg|mean|median|favg|quantile\w*)\([^()]*/"
)


@pytest.mark.parametrize("path", sorted(FILES), ids=lambda path: path.stem)
def test_every_file_is_a_query_that_orders_all_rows_and_averages_no_rate(path):
    text = path.read_text()
    assert re.search(r"ORDER BY [^()]*;\n$", text), "the rows' order is the last word"
    code = re.sub(r"--.*", "", text)
    assert not RATE_AVERAGED.search(code)
    assert set(re.findall(r"\$(\w+)", code)) == PARAMETERS[path.stem].keys()


def test_one_rank_and_several_give_the_same_steps(tmp_path):
    """The first branch of steps_global takes rows as they are, the second adds up: equal for what
    one rank logged.
    """
    steps = tables.steps("a", 3, order_digest=2**52 + 5, data_wait_s=0.25)
    shared = {
        "useful_tokens": 15,
        "total_tokens": 20,
        "rows": 2,
        "loss_sum": 30.0,
        "data_wait_s": 0.25,
    }
    steps += tables.steps(
        "b", 3, 2, order_digest=lambda _, rank: 2**52 - 10 if rank else 15, **shared
    )
    runs = [tables.run("a"), tables.run("b", repeat=1)]
    found = query("steps_global", tables.write(tmp_path, runs=runs, steps=steps))
    one_rank, two_ranks = (
        found[found["run_id"] == name].drop(columns=["run_id", "ranks"]) for name in "ab"
    )
    assert one_rank.reset_index(drop=True).equals(two_ranks.reset_index(drop=True))
    assert one_rank["order_digest"].tolist() == [5] * 3
    assert found["ranks"].tolist() == [1] * 3 + [2] * 3


# -- operations per second: 40 positions a step of which 30 are useful, two ranks, half a second a
# step


def computed(folder, **fields):
    numbers = {
        "flops_per_token": 3e12,
        "flops_per_token_causal": 2e12,
        "flops_per_token_hardware": 4e12,
    } | fields
    steps = tables.steps(
        "a",
        6,
        2,
        total_tokens=20,
        useful_tokens=15,
        step_s=lambda step, _: 9.0 if step < 3 else 0.5,
    )
    return tables.query_row(
        "computing",
        tables.write(folder, runs=[tables.run("a", world_size=2, **numbers)], steps=steps),
    )


def test_every_convention_has_its_share_of_all_devices_peak(tmp_path):
    row = computed(tmp_path, peak_flops=400e12, peak_source="a data sheet")
    assert (row["total_tokens_per_s"], row["peak_source"]) == (80.0, "a data sheet")
    assert (row["tflops_per_s"], row["tflops_per_device_s"]) == pytest.approx((240.0, 120.0))
    assert (row["mfu_palm"], row["mfu_causal"], row["hfu"]) == pytest.approx(
        (80 * 3 / 800, 80 * 2 / 800, 80 * 4 / 800)
    )
    assert row["mfu_useful"] == pytest.approx(60 * 3 / 800), "padding is no work"
    row = computed(tmp_path / "unknown")
    assert row["tflops_per_s"] == pytest.approx(240.0)
    assert all(pd.isna(row[name]) for name in ("mfu_palm", "mfu_causal", "mfu_useful", "hfu"))


def test_samples_and_shares_of_a_device_are_sum_over_sum(tmp_path):
    steps = tables.steps("a", 5, 2, rows=lambda step, _: step, step_s=lambda step, _: float(step))
    row = tables.query_row(
        "throughput", tables.write(tmp_path, runs=[tables.run("a", world_size=2)], steps=steps)
    )
    assert (row["rows"], row["seconds"], row["rows_per_s"]) == (14, 7.0, 2.0)
    assert row["useful_tokens_per_device_s"] == 2 * 2 * 30 / 7 / 2
    assert row["total_tokens_per_device_s"] == 2 * 2 * 40 / 7 / 2


def test_stalls_have_a_bound_unless_a_run_waits_all_the_time(tmp_path):
    waits = {"a": 0.2, "b": 1.25}  # two clocks, and a step of one second
    steps = [row for name, wait in waits.items() for row in tables.steps(name, 6, data_wait_s=wait)]
    found = query(
        "stalls", tables.write(tmp_path, runs=[tables.run(name) for name in waits], steps=steps)
    )
    assert found["data_stall_share"].iloc[0] == pytest.approx(0.2)
    assert found["largest_gain"].tolist() == pytest.approx([1 / 0.8, math.inf])


def test_the_peak_of_memory_is_the_most_of_any_rank_and_step(tmp_path):
    steps = tables.steps(
        "a", 3, 2, memory_peak_bytes=lambda step, rank: [10, 70, 30][step] + 5 * rank
    )
    events = [{"run_id": "a", "attempt": 0, "rank": 0, "event": "memory", "parameters_bytes": 1}]
    folder = tmp_path / "it's one; a 'folder'"
    runs = [tables.run("a", world_size=2)]
    assert query("memory", tables.write(folder, runs=runs, steps=steps, events=events))[
        "peak_bytes"
    ].tolist() == [75]


# -- curves of at most so many points: equal parts of a run's useful tokens, held against NumPy


def uneven(folder, count=500, ranks=2, seed=0, **fields):
    """Tables of one run whose steps all differ, and (useful, total, loss_sum, step_s), each [count,
    ranks].
    """
    pick = np.random.default_rng(seed)
    useful = pick.integers(1, 2000, (count, ranks))
    total = useful + pick.integers(0, 500, (count, ranks))
    loss_sum = useful * pick.uniform(1, 9, (count, ranks))
    step_s = pick.uniform(0.1, 0.3, (count, ranks))
    names = ("useful_tokens", "total_tokens", "loss_sum", "step_s")
    values = dict(zip(names, (useful, total, loss_sum, step_s), strict=True)) | fields
    columns = {
        name: lambda step, rank, held=held: held[step, rank].item() for name, held in values.items()
    }
    rows = tables.steps("a", count, ranks, **columns)
    tables.write(folder, runs=[tables.run("a", world_size=ranks)], steps=rows)
    return [values[name] for name in names]


@pytest.mark.parametrize(("points", "ranks"), [(1, 3), (7, 1), (100, 3)])
def test_a_point_is_the_steps_that_end_in_its_part(tmp_path, points, ranks):
    useful, total, loss_sum, step_s = uneven(tmp_path, ranks=ranks)
    tokens = useful.sum(1)
    losses = loss_sum.sum(1)
    seconds = step_s.max(1)
    seen = np.cumsum(tokens)
    ends = np.searchsorted(seen, np.arange(1, points + 1) * seen[-1] / points, side="right")
    parts = [part for part in np.split(np.arange(len(seen)), ends[:-1]) if len(part)]
    found = query("loss_curves", tmp_path, points=points)
    assert len(found) == len(parts) == points
    assert len(query("loss_curves", tmp_path)) == 100, "where nothing else is asked for"
    assert found["step"].tolist() == [part[-1] for part in parts]
    assert found["steps"].tolist() == [len(part) for part in parts]
    assert found["useful_tokens"].tolist() == [tokens[part].sum() for part in parts]
    assert found["useful_tokens_seen"].tolist() == [seen[part[-1]] for part in parts]
    each = losses / tokens
    expected = {
        "loss": [losses[part].sum() / tokens[part].sum() for part in parts],
        "loss_lowest": [each[part].min() for part in parts],
        "loss_highest": [each[part].max() for part in parts],
        "training_s": [seconds[: part[-1] + 1].sum() for part in parts],
        "total_tokens_per_s": [total[part].sum() / seconds[part].sum() for part in parts],
    }
    for column, values in expected.items():
        assert found[column].tolist() == pytest.approx(values, rel=1e-12), column


def test_a_run_of_no_more_steps_than_points_has_the_losses_of_its_steps_to_the_last_digit(tmp_path):
    uneven(tmp_path, count=100)
    each = query("loss", tmp_path)
    curve = query("loss_curves", tmp_path)
    assert len(curve) == 100
    pd.testing.assert_frame_equal(curve[each.columns], each, check_exact=True)
    for extreme in ("loss_lowest", "loss_highest"):
        assert curve[extreme].equals(each["loss"].rename(extreme))
    assert len(query("loss_curves", tmp_path, points=99)) < 100


def test_steps_longer_than_a_part_leave_parts_without_a_point(tmp_path):
    useful = np.ones((40, 1), int)
    useful[:4] = 0
    useful[20] = 1000
    uneven(tmp_path, count=40, ranks=1, useful_tokens=useful)
    found = query("loss_curves", tmp_path, points=20)
    assert found["step"].tolist() == [19, 39]
    assert found["steps"].sum() == 40 and found["useful_tokens_seen"].tolist() == [16, 1035]
    uneven(tmp_path, count=40, ranks=1, useful_tokens=0 * useful)
    point = tables.query_row("loss_curves", tmp_path, points=20)
    assert (point["step"], point["useful_tokens_seen"]) == (39, 0), (
        "and steps without a useful token have no loss"
    )
    assert all(np.isnan(point[column]) for column in ("loss", "loss_lowest", "loss_highest"))
    tables.write(tmp_path, runs=[tables.run("a")], steps=tables.steps("a", 12))
    ends = [query("loss_curves", tmp_path, points=n)["step"].tolist() for n in (4, 5)]
    assert ends == [[2, 5, 8, 11], [1, 3, 6, 8, 11]], (
        "a step that ends just where a part ends belongs to it"
    )
