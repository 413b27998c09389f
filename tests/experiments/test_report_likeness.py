from dataclasses import replace

import pytest

from tests import logs
from tests.experiments.test_figures import parts, texts
from tests.logs import tabulate
from tokenscale.base.files import write_json, write_sealed
from tokenscale.report import page, summary
from tokenscale.runs.records.external import ExternalRun
from tokenscale.runs.records.provenance import describe_machine
from tokenscale.settings.layout import LayoutSettings

pytestmark = [pytest.mark.experiment, pytest.mark.slow(14)]


def made(folder, runs, further=(), changed=(), hardware=logs.HARDWARE, **fields):
    """Tables of runs; `changed`: run id → fields of what its launcher left."""
    for run in runs:
        path = logs.write_run(folder / "runs", run, hardware=hardware)
        if run.identity in changed:
            write_sealed(path / "attempt=00/attempt.json", {"launch": changed[run.identity]})
    logs.ingested(folder, runs, to="tables/demo", further=further, **fields)
    return folder / "tables"


def drawn(name, tables):
    """(texts in the figure, caption, plotted points)."""
    kind, rows = parts(name, tables / "demo")
    return texts(kind(*rows).draw()), kind(*rows).caption(), kind(*rows).data()


@pytest.fixture(scope="module")
def mixed_up(tmp_path_factory):
    """Four approaches at two batch sizes; one of them, at the smaller one, with longer sequences
    (the ETH study's).
    """
    runs = [
        logs.settings(
            a,
            repeat=k,
            micro_batch=b,
            sequence_length=4096 if (a, b) == ("padding-free", 1) else 2048,
        )
        for a in ("padded", "pretokenized-padded", "padding-free", "token-list")
        for b in (1, 2)
        for k in range(2)
    ]
    return made(tmp_path_factory.mktemp("mixed_up"), runs, ("micro_batch",))


@pytest.mark.parametrize(
    "name",
    [
        "tokens_per_second_comparison",
        "data_stall_share",
        "loss_over_time",
        "mfu_comparison",
        "padding_share",
        "time_to_target_loss",
    ],
)
def test_a_sequence_length_mix_up_is_not_drawn_and_named(mixed_up, name):
    told, caption, points = drawn(name, mixed_up)
    assert (
        "padding-free, micro_batch=1" not in set(points["series"])
        and points["series"].nunique() == 7
    )
    assert name == "loss_over_time" or "not comparable" in " ".join(told)
    assert "Not compared: padding-free" in caption and "sequence_length 4096 vs 2048" in caption


@pytest.mark.parametrize("name", ["parallel_methods", "pipeline_bubble"])
def test_figures_over_layouts_are_guarded_alike(tmp_path, name):
    schedules = ("naive", "gpipe", "1f1b")
    runs = [
        replace(logs.settings(), layout=LayoutSettings(pipeline=2, schedule=s)) for s in schedules
    ]
    changed = {run.identity: {"share": 1 + (run.layout.schedule == "1f1b")} for run in runs}
    tables = made(tmp_path, runs, ("layout.schedule",), changed)
    for path in (tmp_path / "runs").iterdir():
        logs.edit(path, lambda step: step | {"bubble_s": 0.02})
    tabulate(tmp_path / "runs.json", tmp_path / "runs", tables / "demo")
    _, caption, points = drawn(name, tables)
    assert len(points) == 2
    assert "Not compared: layout.data=1, layout.schedule=1f1b" in caption
    assert "runs at once on its node 2 vs 1" in caption


def test_a_sequence_length_mix_up_gives_no_ratio_and_the_page_says_why(mixed_up, tmp_path):
    part = summary.experiment("demo", mixed_up)
    found = {(row[0], row[2]) for row in part["comparisons"].rows}
    assert ("token-list", "micro_batch=2") in found and ("token-list", "micro_batch=1") not in found
    assert ("pretokenized-padded", "micro_batch=1") in found
    assert "sequence_length 4096 vs 2048" in part["comparisons"].caption
    page.write([part], tmp_path, tmp_path / "index.html")
    assert "sequence_length 4096 vs 2048" in (tmp_path / "index.html").read_text()


def test_where_nothing_is_alike_nothing_is_drawn(tmp_path):
    runs = [
        logs.settings("padding-free", sequence_length=4096),
        logs.settings("token-list", sequence_length=2048),
    ]
    texts, caption, points = drawn("tokens_per_second_comparison", made(tmp_path, runs))
    assert points.empty and "not comparable: see the method below" in texts
    assert "sequence_length 4096 (padding-free) vs 2048 (token-list)" in caption
    assert summary.experiment("demo", tmp_path / "tables")["comparisons"].rows == []


def test_the_canary_is_counted_apart_and_gives_the_noise_floor(tmp_path):
    runs = [logs.settings("padded"), logs.settings("packed")]
    runs += [logs.settings("packed", repeat=k) for k in (1, 2, 3, 4)]
    part = summary.experiment("demo", made(tmp_path, runs, repeats=1))
    assert [row[-1] for row in part["design"].rows] == ["1 of 1", "1 of 1"]
    assert (
        part["design"].caption
        == "Canary, between the others: 4 of 4 runs of approach=packed, layout.data=1."
    )
    # steps take 1 % longer with each repeat: 1.02/1.01 and 1.04/1.03
    assert (
        "neighbouring runs of the canary (packed) differ by 0.98 % (2 pairs, 0.971–0.99 %)"
        in part["campaign"]
    )


def test_runs_of_other_programs_are_in_the_grid_and_in_no_pair(tmp_path):
    runs = [logs.settings(a, repeat=k, steps=4) for a in ("padded", "packed") for k in range(2)]
    here = {key: value for key, value in describe_machine().items() if key in ("cpu", "cores")}
    tables = made(tmp_path, runs, hardware=logs.HARDWARE | here)
    for k in range(4):
        facts = {"approach": "packed", "steps": 4, "global_batch": 8, "sequence_length": 1024}
        with ExternalRun(tmp_path / f"runs/external-{k}", **facts, rank=0, world_size=1) as run:
            for _ in range(4):
                run.step(loss_sum=2.0, useful_tokens=8000, total_tokens=8192, rows=8)
    table = logs.unsealed(tmp_path / "runs.json")
    cell = {"approach": "packed", "layout.data": 1}
    table["runs"] += [
        {"run_id": f"external-{k}", "external": True, "cell": cell, "repeat": k} for k in range(4)
    ]
    write_json(tmp_path / "runs.json", table)
    tabulate(tmp_path / "runs.json", tmp_path / "runs", tables / "demo")
    part = summary.experiment("demo", tables)
    assert [row[0] for row in part["comparisons"].rows] == ["packed"] and part["comparisons"].rows[
        0
    ][2] == "2"
    grid = {row[0]: row[-1] for row in part["design"].rows}
    assert grid["approach=packed, layout.data=1"] == "2 of 2"
    assert grid["approach=packed, layout.data=1 (external)"] == "4 of 4"
    assert "Canary" not in part["design"].caption and "canary" not in part["throughput"].caption
    _, caption, points = drawn("tokens_per_second_comparison", tables)
    assert "packed (external)" in set(points["series"]) and "Not compared" not in caption
