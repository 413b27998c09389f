"""`predict --tables`: an experiment's own runs through the model, from tables alone, and what it
refuses.
"""

import json

import pytest

from tests import tables
from tests.refusals import refused
from tokenscale.base.errors import UserError
from tokenscale.cli.main import main
from tokenscale.referee import projection
from tokenscale.referee.projection import project

RUN = {
    "experiment": "e",
    "approach": "packed",
    "series": "packed",
    "model": "m",
    "method": "ddp",
    "pipeline": 1,
    "data": 1,
    "shard": 1,
    "tensor": 1,
    "sharding": "zero3",
    "schedule": "1f1b",
    "stages_per_rank": 1,
    "sequence_length": 128,
    "micro_batch": 1,
    "precision": "fp32",
    "validity": "valid",
    "device": "cpu",
    "device_kind": "cpu",
    "cores": 64,
    "threads_per_rank": 1,
    "oversubscribed": False,
}


def write(folder, runs):
    """Tables of runs given as columns that differ from `RUN`, with `step_s` of each. The first
    three steps are slow.
    """
    rows = []
    steps = []
    for number, run in enumerate(runs):
        n = run["world_size"]
        row = {**RUN, "run_id": f"r{number}", "data": n, "global_batch": 8 * n, **run}
        # weak scaling: 2 % more for each doubling
        seconds = row.pop("step_s", 1 + 0.02 * (n.bit_length() - 1))
        rows.append(row)
        times = {"step_s": lambda step, _, seconds=seconds: (9.0 if step < 3 else 1.0) * seconds}
        steps += tables.steps(
            row["run_id"], 8, n, useful_tokens=row["global_batch"] * 100 // n, **times
        )
    return tables.write(folder, runs=rows, steps=steps)


def runs(sizes, **fields):
    return [{"world_size": n, "repeat": r, **fields} for n in sizes for r in range(2)]


@pytest.fixture
def tables_of(tmp_path):
    (tmp_path / "tables").mkdir()
    return lambda given: write(tmp_path / "tables", given)


def test_runs_of_small_worlds_predict_larger_ones_without_their_warm_up(tables_of):
    (found,) = project(tables_of(runs([1, 2])), world_sizes=[1, 2, 8])
    assert [p.step_s for p in found.predictions] == pytest.approx([1.0, 1.02, 1.06])
    last = found.predictions[-1]
    rates = [800 * 8 / s for s in (1.06, last.high_s, last.low_s, 1.02)]
    assert found.throughput(last) == pytest.approx(rates) and rates[1] < rates[0] < rates[2]


def weak(n, **fields):
    """A run whose global batch, and so its series, grows with its ranks."""
    return {"world_size": n, "series": f"packed, global_batch={8 * n}", "repeat": 0, **fields}


def test_weak_scaling_whose_batch_is_a_factor_is_one_series(tables_of):
    (found,) = project(tables_of([weak(1), weak(2)]), world_sizes=[4])
    assert found.series == "packed" and found.fit.world_sizes == [1, 2]


@pytest.mark.parametrize(
    "sharding, data, full", [("zero3", 1, True), ("zero1", 1, False), ("zero3", 2, False)]
)
def test_weights_sharded_over_all_ranks_widen_the_band(tables_of, sharding, data, full):
    """Sharding degrees are one series. Sharded within nodes (data above 1) is no full sharding."""
    shards = [
        run
        | {
            "series": f"packed, layout.shard={run['world_size']}",
            "shard": run["world_size"] // data,
            "data": data,
        }
        for run in runs([2, 4], method="fsdp", sharding=sharding)
    ]
    (found,) = project(tables_of([*runs([1], sharding=None), *shards]), world_sizes=[8, 32])
    assert (
        found.series == "packed"
        and found.fit.world_sizes == [1, 2, 4]
        and found.fit.fully_sharded is full
    )
    near, far = found.predictions
    assert (
        near.measure is None
        and (near.high_s > 1.3 * near.step_s) is full
        and (far.measure == 16) is full
    )


@pytest.mark.parametrize(
    "given",
    [
        [*runs([2]), *runs([4], series="packed, layout.shard=4", method="fsdp")],
        [weak(1), weak(2, global_batch=24)],
        [weak(1), weak(2, external=True)],
    ],
)
def test_series_that_differ_in_more_are_not_put_together(tables_of, given):
    with pytest.raises(UserError, match="at least two world sizes"):
        project(tables_of(given))


THEIRS = dict.fromkeys(
    ("pipeline", "data", "shard", "tensor", "sharding", "schedule", "stages_per_rank")
)


def test_runs_of_other_programs_are_left_out_and_it_says_so(tables_of):
    theirs = runs([1, 2], external=True, **THEIRS)
    (found,) = project(tables_of([*runs([1, 2]), *theirs]), world_sizes=[4])
    assert len(found.fit.sizes) == 4 and found.notes[0] == "excluded: 4 runs of other programs"
    named = [run | {"series": "theirs"} for run in theirs]
    assert [one.series for one in project(tables_of([*runs([1, 2]), *named]), world_sizes=[4])] == [
        "packed"
    ]
    with pytest.raises(UserError, match="another program"):
        project(tables_of(named), series="theirs")


def test_the_text_says_what_it_is_and_the_size_to_measure(tables_of, capsys):
    assert main(["predict", "--tables", str(tables_of(runs([1, 2])))]) == 0
    text = capsys.readouterr().out
    assert "a model, not a measurement" in text and "4 runs at world sizes 1, 2" in text
    assert text.rstrip().endswith("32 cannot be predicted from these sizes; measure 4")
    noisy = [run | {"step_s": (1.0, 1.9)[run["repeat"]]} for run in runs([1, 2])]
    assert "repeat the runs at 2" in projection.format_projection(project(tables_of(noisy))[0])


def test_json_says_that_it_is_a_model(tables_of, capsys):
    arguments = ["--world-sizes", "1,4,1000000000", "--json"]
    assert main(["predict", "--tables", str(tables_of(runs([1, 2]))), *arguments]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (
        found["kind"] == "model" and found["fit"]["sizes"] == [1, 1, 2, 2] and found["band"] == 0.9
    )
    near = found["predictions"][1]
    assert near["low_s"] < near["step_s"] < near["high_s"] and near["measure"] is None
    assert (
        near["useful_tokens_per_s_low"]
        < near["useful_tokens_per_s"]
        < near["useful_tokens_per_s_high"]
    )
    assert found["predictions"][2]["measure"] == 2**27, "three doublings before a thousand million"


def test_nodes_are_those_that_the_launcher_named(tables_of):
    given = [*runs([2], node_names="a"), *runs([4], node_names="a, b")]
    (found,) = project(tables_of(given), world_sizes=[6, 8])
    assert "one kind of link" not in str(found.notes)
    with pytest.raises(UserError, match="fill a node"):
        project(tables_of(given), world_sizes=[7])


def test_all_series_with_two_world_sizes_are_shown_and_one_by_its_name(tables_of):
    given = [*runs([1, 2]), *runs([1, 2], series="padded"), *runs([1], series="alone")]
    assert [one.series for one in project(tables_of(given))] == ["packed", "padded"]
    assert [one.series for one in project(tables_of(given), series="padded")] == ["padded"]


@pytest.mark.parametrize("fields", [{"oversubscribed": True}, {"cores": None}])
def test_runs_whose_ranks_share_cores_are_excluded(tables_of, fields):
    given = [*runs([1, 2]), *runs([4], step_s=99.0, **fields)]
    (found,) = project(tables_of(given), world_sizes=[4])
    assert found.fit.world_sizes == [1, 2] and found.predictions[0].step_s < 9
    assert found.notes[0].startswith("excluded: world size 4: ranks x threads exceed the cores")


@pytest.mark.parametrize(
    "given, found",
    [
        ([*runs([1]), *runs([2], oversubscribed=True, cores=1)], "2 ranks: 1 thread each, 1 core"),
        ([*runs([1]), *runs([2], cores=None)], "2 ranks: 1 thread each, unknown cores"),
        (
            [*runs([1], threads_per_rank=2, cores=2), *runs([2], cores=2)],
            "1 rank: 2 threads each, 2 cores",
        ),
    ],
)
def test_nothing_is_predicted_from_ranks_that_share_cores(tables_of, capsys, given, found):
    assert found in refused(capsys, ["predict", "--tables", tables_of(given)])


@pytest.mark.parametrize(
    "given, options, said",
    [
        (runs([2]), {}, "at least two world sizes"),
        (runs([1, 2]), {"series": "paked"}, "did you mean 'packed'"),
        ([*runs([1], precision="bf16"), *runs([2])], {}, "differ in precision"),
        (
            [*runs([1]), *runs([2], global_batch=24)],
            {},
            "neither the rows per rank nor the global batch",
        ),
        (runs([1, 2], global_batch=64), {}, r"strong scaling.*\n(.*\n)+  next      measure 4, or"),
        (runs([1, 2], validity="invalid"), {}, "needs finished runs(.*\n)+  next    snakemake e"),
        (runs([1, 2], tensor=None), {}, "valid value of `tensor`"),
        (runs([1, 2], global_batch=0), {}, "valid value of `global_batch`"),
        (runs([2, 4]), {"world_sizes": [1]}, "below the smallest measured one"),
        (runs([2, 4], tensor=2), {"world_sizes": [7]}, "a multiple of 2"),
        (
            runs([1, 4]),
            {"world_sizes": [16], "ranks_per_node": 4},
            "no measured run uses two nodes; measure 8",
        ),
    ],
)
def test_what_cannot_be_modelled_is_refused(tables_of, given, options, said):
    with pytest.raises(UserError, match=said):
        project(tables_of(given), **options)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--world-sizes", "2,0"],
        ["--world-sizes", "2;4"],
        ["--world-sizes", "10" * 6],
        ["--ranks-per-node", "0"],
    ],
)
def test_options_that_say_nothing_or_too_much_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        main(["predict", "--tables", "x", *arguments])
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tables_at", "name"), [("results/tables/mine", "mine"), ("x", "ddp_scaling_weak")]
)
def test_without_tables_the_command_that_makes_them_is_named(
    tables_at, name, tmp_path, monkeypatch, capsys
):
    (tmp_path / "config/experiments").mkdir(parents=True)
    (tmp_path / "config/experiments/mine.yaml").touch()
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, ["predict", "--tables", tables_at])
    assert f"snakemake {name}" in said and f"results/tables/{name}\n" in said
