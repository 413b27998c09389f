"""`predict --tables`: an experiment's own runs through the model, from tables alone, and what it refuses."""

import json

import pyarrow.parquet as pq
import pytest

from tests import tables
from tokenscale.analysis import projection
from tokenscale.analysis.projection import project
from tokenscale.base.errors import UserError
from tokenscale.base.files import write_json
from tokenscale.cli.main import main

RUN = {
    **{"experiment": "e", "approach": "packed", "series": "packed", "model": "m", "method": "ddp", "parameters": 10**8},
    **{"pipeline": 1, "data": 1, "shard": 1, "tensor": 1, "sharding": "zero3", "schedule": "1f1b"},
    **{"stages_per_rank": 1, "sequence_length": 128, "global_batch": 64, "micro_batch": 1, "precision": "fp32"},
    **{"validity": "valid", "device": "cpu", "device_kind": "cpu", "cores": 64, "threads_per_rank": 1},
    "oversubscribed": False,
}
COMPUTE, BETWEEN = 6.4, 1e-9


def step_s(n, rows=64):
    """Strong scaling over one link: rows shared out, a ring of 4e8 bytes."""
    return COMPUTE * -(-rows // n) / rows + BETWEEN * 4e8 * 2 * (n - 1) / n


def write(folder, runs, waited=0.0, steps=8):
    """Tables of runs given as columns that differ from `RUN`, with `step_s` of each."""
    rows, lines = [], []
    for number, run in enumerate(runs):
        row = {**RUN, "run_id": f"r{number}", "data": run["world_size"], **run}
        seconds = row.pop("step_s", step_s(row["world_size"]))
        rows.append(row)
        for rank in range(row["world_size"]):
            for step in range(steps):
                slow = 9.0 if step < 3 else 1.0
                lines.append({
                    "run_id": row["run_id"], "attempt": 0, "rank": rank, "world_size": row["world_size"], "step": step,
                    "attempt_step": step, "step_s": slow * seconds, "data_wait_s": waited, "loss_sum": 1.0,
                    "useful_tokens": row["global_batch"] * 100 // row["world_size"], "total_tokens": 128,
                })  # fmt: skip
    return tables.write(folder, runs=rows, steps=lines)


def runs(sizes, **fields):
    return [{"world_size": n, "repeat": r, **fields} for n in sizes for r in range(2)]


@pytest.fixture
def tables_of(tmp_path):
    return lambda given, **options: write(tmp_path / "tables", given, **options)


@pytest.fixture(autouse=True)
def folder(tmp_path):
    (tmp_path / "tables").mkdir()


def sweep(path, **fields):
    fits = {"all_reduce": {"alpha_s": 1e-4, "beta_s_per_byte": 4e-9}}
    said = {"benchmark": "collectives", "backend": "gloo", "device": "cpu", "nodes": 1, "latency": "ring", "fits": fits}
    write_json(path, said | fields)
    return path


def test_runs_of_small_worlds_predict_the_planted_larger_ones(tables_of):
    (found,) = project(tables_of(runs([1, 2])), world_sizes=[1, 2, 8])
    assert [c.constants for c in found.fit.candidates if "inter_node" in c.constants] == [
        pytest.approx({"compute": COMPUTE, "inter_node": BETWEEN})
    ]
    assert all(p.low_s < step_s(p.world_size) < p.high_s for p in found.predictions)


def test_the_band_of_the_throughput_is_the_reciprocal_of_that_of_the_step_time(tables_of):
    (found,) = project(tables_of(runs([1, 2])), world_sizes=[2, 4, 8])
    for p in found.predictions:
        assert found.throughput(p) == pytest.approx((6400 / p.step_s, 6400 / p.high_s, 6400 / p.low_s))
        assert 0 < found.throughput(p)[1] < found.throughput(p)[0] < found.throughput(p)[2]
    last = found.predictions[-1]
    assert found.efficiency(last) == pytest.approx(found.reference.step_s / last.step_s / 8)


def test_warm_up_steps_do_not_count_and_waiting_for_data_is_apart(tables_of):
    (found,) = project(tables_of(runs([1, 2]), waited=0.05), world_sizes=[1])
    assert found.fit.data_wait_s == pytest.approx((0.05 + 0.05 * 2) / 2)
    assert found.predictions[0].step_s == pytest.approx(COMPUTE, rel=0.03)


def test_weak_scaling_is_seen_by_the_global_batch(tables_of):
    given = [{"world_size": n, "global_batch": 8 * n, "repeat": 0, "step_s": 1 + 0.01 * (n > 1)} for n in (1, 2)]
    (found,) = project(tables_of(given), world_sizes=[2, 4])
    assert found.fit.workload.global_rows is None and "weak scaling: rows per rank are constant" in found.notes
    assert found.throughput(found.predictions[1])[0] == pytest.approx(800 * 4 / found.predictions[1].step_s)


def weak(n, **fields):
    """A run whose global batch, and so its series, grows with its ranks: 1 s alone, 1.1 s on two."""
    named = {"series": f"packed, global_batch={8 * n}", "global_batch": 8 * n, "repeat": 0}
    return {"world_size": n, "step_s": 1 + 0.2 * (n - 1) / n, **named, **fields}


def test_weak_scaling_whose_batch_is_a_factor_is_one_line(tables_of):
    (found,) = project(tables_of([weak(1), weak(2)]), world_sizes=[4])
    assert found.series == "packed" and found.fit.world_sizes == [1, 2] and found.fit.workload.global_rows is None


def test_degrees_of_sharding_are_one_line(tables_of):
    shards = [r | {"series": f"packed, layout.shard={r['world_size']}", "shard": r["world_size"]} for r in runs([2, 4])]
    shards = [r | {"data": 1, "method": "fsdp"} for r in shards]
    (found,) = project(tables_of([*runs([1]), *shards]), world_sizes=[8])
    assert found.series == "packed" and found.fit.world_sizes == [1, 2, 4]


@pytest.mark.parametrize(
    "given",
    [
        [*runs([2]), *runs([4], series="packed, layout.shard=4", method="fsdp")],
        [weak(1), weak(2, global_batch=24)],
        [weak(1), weak(2, external=True)],
    ],
)
def test_series_that_are_no_line_are_not_put_together(tables_of, given):
    with pytest.raises(UserError, match="at least two world sizes"):
        project(tables_of(given))


def test_batches_that_each_have_their_world_sizes_stay_apart(tables_of):
    given = [r for b in (32, 64) for r in runs([1, 2], series=f"packed, global_batch={b}", global_batch=b)]
    assert [one.series for one in project(tables_of(given))] == ["packed, global_batch=32", "packed, global_batch=64"]


THEIRS = {name: None for name in ("pipeline", "data", "shard", "tensor", "sharding", "schedule", "stages_per_rank")}


def test_runs_of_other_programs_are_left_out_and_it_says_so(tables_of):
    theirs = runs([1, 2], external=True, **THEIRS)
    (found,) = project(tables_of([*runs([1, 2]), *theirs]), world_sizes=[4])
    assert len(found.fit.measurements) == 4 and found.notes[0] == "excluded: 4 runs of other programs"
    named = [run | {"series": "theirs"} for run in theirs]
    assert [one.series for one in project(tables_of([*runs([1, 2]), *named]), world_sizes=[4])] == ["packed"]
    with pytest.raises(UserError, match="another program"):
        project(tables_of(named), series="theirs")


def test_the_tail_is_a_bucket_of_ddp(tables_of):
    (found,) = project(tables_of(runs([1, 2])), world_sizes=[4])
    assert found.fit.workload.tail_bytes == 25 * 1024**2 and found.fit.workload.messages == round(4e8 / (25 * 1024**2))


def test_sizes_to_which_the_model_does_not_apply_are_named_and_refused_if_requested(tables_of, capsys):
    folder = tables_of(runs([1, 2]))
    assert main(["predict", "--tables", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "a model, not a measurement" in text and "\n       2 " in text
    assert "note: not predicted: 128, 256: there are more replicas than rows" in text
    assert main(["predict", "--tables", str(folder), "--world-sizes", "2,128"]) == 2
    assert "world size 128" in capsys.readouterr().err


def test_a_size_that_cannot_be_predicted_gets_the_size_to_measure_and_no_number(tables_of, capsys):
    (found,) = project(tables_of(runs([1, 2])), world_sizes=[4, 64])
    near, far = found.predictions
    assert near.measure is None and 2 < far.measure <= 64
    text = projection.format_projection(found)
    assert text.endswith(f"\n      64 cannot be predicted from these sizes; measure {far.measure}")
    noisy = [run | {"step_s": (1.0, 1.9)[run["repeat"]]} for run in runs([1, 2])]
    assert "they vary too much; repeat the runs at 2" in projection.format_projection(project(tables_of(noisy))[0])


def test_json_says_that_it_is_a_model(tables_of, capsys):
    given = [run | {"step_s": step_s(run["world_size"]) * (1 + 0.01 * run["repeat"])} for run in runs([1, 2])]
    assert main(["predict", "--tables", str(tables_of(given)), "--world-sizes", "1,4", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["kind"] == "model" and found["fitted_world_sizes"] == [1, 2] and found["runs"] == 4
    assert [p["world_size"] for p in found["predictions"]] == [1, 4]
    assert all(p["low_s"] < p["step_s"] < p["high_s"] and p["measure"] is None for p in found["predictions"])


def test_nodes_are_those_that_the_launcher_named(tables_of):
    given = [*runs([2], node_names="a"), *runs([4], node_names="a, b")]
    (found,) = project(tables_of(given), world_sizes=[8])
    assert found.fit.workload.ranks_per_node == 2 and found.fit.workload.hierarchy(8) == (2, 4)


def test_a_sweep_on_one_machine_is_its_link(tables_of, tmp_path):
    given = runs([1, 2])
    (found,) = project(tables_of(given), collectives=[sweep(tmp_path / "c.json")], world_sizes=[4])
    assert found.fit.links.inter_node.beta_s_per_byte == 4e-9 and found.fit.links.intra_node is None
    assert any(0 < c.constants.get("exposed", 0.0) < 1 for c in found.fit.candidates)
    assert "link inter_node, from a sweep" in projection.format_projection(found)
    (found,) = project(
        tables_of(given), collectives=[sweep(tmp_path / "c.json")], world_sizes=[2], ranks_per_node=2
    )  # fmt: skip
    assert found.fit.links.intra_node.beta_s_per_byte == 4e-9 and found.fit.links.inter_node is None


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
        ([*runs([1]), *runs([2], oversubscribed=True, cores=1)], "2 ranks: 1 threads each, 1 cores"),
        ([*runs([1]), *runs([2], cores=None)], "2 ranks: 1 threads each, unknown cores"),
        ([*runs([1], threads_per_rank=2, cores=2), *runs([2], cores=2)], "1 rank: 2 threads each, 2 cores"),
    ],
)
def test_nothing_is_predicted_from_ranks_that_share_cores(tables_of, capsys, given, found):
    assert main(["predict", "--tables", str(tables_of(given))]) == 2
    message = capsys.readouterr().err
    assert "share the cores of one machine" in message and found in message and "cores_per_rank" in message


@pytest.mark.parametrize(
    "given, options, said",
    [
        (runs([2]), {}, "at least two world sizes"),
        (runs([1, 2]), {"series": "paked"}, "did you mean 'packed'"),
        ([*runs([1], precision="bf16"), *runs([2])], {}, "differ in precision"),
        (
            [*runs([1], global_batch=64), *runs([2], global_batch=96)],
            {},
            "neither the global batch nor the rows per rank",
        ),
        (runs([1, 2], step_s=0.0), {}, "impossible step time"),
        (runs([1, 2], step_s=-1.0), {}, "impossible step time"),
        (runs([1, 2], validity="invalid"), {}, "no run of these tables"),
        (runs([1, 2], parameters=None), {}, "valid value of `parameters`"),
        (runs([1, 2], tensor=None), {}, "valid value of `tensor`"),
        (runs([1, 2], global_batch=0), {}, "valid value of `global_batch`"),
        (runs([2, 4]), {"world_sizes": [1]}, "below the smallest fitted one"),
    ],
)
def test_what_cannot_be_modelled_is_refused(tables_of, given, options, said):
    with pytest.raises(UserError, match=said):
        project(tables_of(given), **options)


@pytest.mark.parametrize("table, column", [("runs", "oversubscribed"), ("steps", "step_s")])
def test_tables_without_a_column_are_refused(tables_of, capsys, table, column):
    path = tables_of(runs([1, 2])) / f"{table}.parquet"
    pq.write_table(pq.read_table(path).drop_columns([column]), path)
    assert main(["predict", "--tables", str(path.parent)]) == 2
    error = capsys.readouterr().err
    assert "a table has changed since ingest wrote it" in error and f"{table}.parquet" in error


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"benchmark": "data"}, "not a valid sweep of all-reduce"),
        ({"fits": {"all_reduce": {"alpha_s": -1e-4, "beta_s_per_byte": 4e-9}}}, "not a valid sweep of all-reduce"),
        ({"fits": {"all_reduce": {"alpha_s": "nan", "beta_s_per_byte": 4e-9}}}, "not a valid sweep of all-reduce"),
        ({"latency": "star"}, "not a valid sweep of all-reduce"),
        ({"fits": {}}, "not a valid sweep of all-reduce"),
        ({"backend": "nccl", "device": "H200"}, "the sweep and the runs used different backends"),
    ],
)
def test_a_sweep_that_is_not_of_these_ranks_is_refused(tables_of, tmp_path, fields, said):
    with pytest.raises(UserError, match=said):
        project(tables_of(runs([1, 2])), collectives=[sweep(tmp_path / "c.json", **fields)])


@pytest.mark.parametrize("text", ["[]", '{"benchmark": "collectives", "fits": {"all_reduce": {}}}', "{", None])
def test_a_file_that_is_no_sweep_is_told_and_not_written_over(tables_of, tmp_path, text):
    path = tmp_path / "mine.json"
    path.mkdir() if text is None else path.write_text(text)
    with pytest.raises(UserError, match="sweep of") as told:
        project(tables_of(runs([1, 2])), collectives=[path])
    assert told.value.facts["next"] == "python -m tokenscale benchmark collectives --output sweep.json"


def test_two_sweeps_of_one_link_and_a_missing_one_are_refused(tables_of, tmp_path):
    one, two = sweep(tmp_path / "c.json"), sweep(tmp_path / "d.json")
    with pytest.raises(UserError, match="two sweeps measure the same link"):
        project(tables_of(runs([1, 2])), collectives=[one, two])
    with pytest.raises(UserError, match="sweep of collectives is missing"):
        project(tables_of(runs([1, 2])), collectives=[tmp_path / "none.json"])


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "the following arguments are required: --tables"),
        (["--tables", "x", "--world-sizes", "2,0"], "'0' is not a whole number of at least 1"),
        (["--tables", "x", "--world-sizes", "2;4"], "'2;4' is not a whole number"),
        (["--tables", "x", "--ranks-per-node", "0"], "'0' is not a whole number"),
    ],
)
def test_options_that_say_nothing_or_too_much_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        main(["predict", *arguments])
    assert said in capsys.readouterr().err
