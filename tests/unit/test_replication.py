"""The source studies' figures beside ours: complete, each asked of its own cell, with a verdict by
the stated rules.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests import tables
from tokenscale.analysis.runs import grouping
from tokenscale.referee import replication
from tokenscale.referee.replication import DIRECTION, OF_BENCHMARKS, OTHER, SAME, UNDECIDED
from tokenscale.settings.claims import load_claims
from tokenscale.settings.config import ALL, load_config
from tokenscale.settings.experiments import STUDIES

ROOT = Path(__file__).parents[2]
LEDGER = load_claims(ROOT / "config/replication.yaml")
SMALL = "DDP, 1.41 billion parameters, 8 rows a GPU"
FORKS = "Students' results of the same course work"
EXAMPLE = "Example of a benchmark: GPT-2 124M, batch 8, 1,024 tokens"


def test_every_figure_has_a_place_of_its_own_and_every_correction_a_reason():
    figures = replication.load_figures()
    assert max(Counter(tuple(f.key) for f in figures).values()) == 1
    assert {document.study for document in LEDGER.documents.values()} <= {*STUDIES, ""}
    assert all(claim.remark for claim in LEDGER.claims.values() if claim.corrected)
    assert all(figure.reason for figure in figures if figure.corrected is not None)


def study_runs():
    """Experiment → rows of `runs`, one for each cell of scale study."""
    config = load_config(root=ROOT, overrides={"scale": "study"})
    found = {}
    for name in config.select_experiments([ALL]):
        rows = []
        for run in config.runs(name):
            s = run.settings
            plain = {
                key: getattr(s, key)
                for key in ("approach", "sequence_length", "global_batch", "micro_batch")
            }
            plain |= {
                key: getattr(s.layout, key)
                for key in ("pipeline", "data", "shard", "tensor", "world_size")
            }
            plain |= {
                "method": s.layout.method,
                "schedule": s.layout.schedule if s.layout.pipeline > 1 else None,
            }
            plain |= {
                "precision": s.precision,
                "external": False,
                "device_kind": "cuda",
                "model": s.model.name,
            }
            plain |= {"science_per_rank": f"{s.model.name} {s.sequence_length}", "bleu": 5.0}
            costs = {"flops_per_token": 1e9, "peak_flops": 1e15}
            rows.append(tables.run(run.run_id, **grouping(s.approach, run.cell) | plain | costs))
        found[name] = rows
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Our numbers of a campaign at scale study, in which all ranks take a second for 30 useful
    tokens of 40.
    """
    folder = tmp_path_factory.mktemp("tables")
    runs = study_runs()
    for name, rows in runs.items():
        peak = {"memory_peak_bytes": 8 * 10**9}
        steps = [
            step
            for row in rows
            for step in tables.steps(row["run_id"], 6, row["world_size"], **peak)
        ]
        memory = {"event": "memory", "attempt": 0, "rank": 0, "parameters_bytes": 1_810_000_000}
        memory |= {
            "gradients_bytes": 1_810_000_000,
            "optimizer_bytes": 3_630_000_000,
            "activations_bytes": 0,
        }
        events = [memory | {"run_id": row["run_id"]} for row in rows]
        events += [tables.validation(row["run_id"], 6, 3.0) for row in rows]
        tables.write(folder / name, {"scale": "study"}, runs=rows, steps=steps, events=events)
    return replication.measure_figures(LEDGER, folder, [*runs])


def test_each_figure_of_a_training_is_that_of_one_cell_of_scale_study(measured):
    figures = {tuple(f.key): f for f in replication.load_figures()}
    found = {tuple(one["of"]): one for one in measured}
    measured_by_trainings = {
        key for key, f in figures.items() if f.experiment and f.quantity not in OF_BENCHMARKS
    }
    assert measured_by_trainings == found.keys()
    assert {one["n"] for one in measured} == {1} and {one["scale"] for one in measured} == {"study"}


def test_numbers_are_those_of_the_cell(measured):
    found = {(one["of"][1], one["of"][2], one["of"][3]): one["number"] for one in measured}
    assert found[SMALL, "padded, 8 GPUs", "useful tokens/s"] == 8 * 30
    assert (
        found[SMALL, "token-list, 16 GPUs", "efficiency %"] == 100
        and found[SMALL, "padded, 4 GPUs", "MFU %"] > 0
    )
    assert found[SMALL, "padded, 4 GPUs", "seconds to a training loss of 5.5"] == 1, (
        "two nats a token from the start"
    )
    assert found[SMALL, "padded, 8 GPUs", "efficiency to that loss %"] == 50, (
        "as long on twice the GPUs"
    )
    assert found[EXAMPLE, "4 GPUs, FSDP", "efficiency against one GPU %"] == 100
    assert found[EXAMPLE, "4 GPUs, DDP", "GB a GPU"] == 8
    assert (
        found[FORKS, "fork A, 2 GPUs", "speed-up of an epoch"] == 1
        and found[FORKS, "fork A, 1 GPU", "BLEU"] == 5
    )
    assert (
        found["Memory: GPT-2 355M in fp32", "DDP", "GB of weights, gradients and optimizer state"]
        == 7.25
    )


def test_figures_of_benchmarks_come_from_rows_of_2048_tokens_at_any_scale(tmp_path):
    shape = {
        "benchmark": "b",
        "round": 0,
        "rows": 8,
        "batches": 10,
        "useful_tokens": 1000,
        "total_tokens": 2000,
    }
    shape |= {"cache": "warm", "sequence_length": 2048, "open_s": 0.5}
    arms = {
        "padded, tokenizers": 8.0,
        "padding-free, tokenizers": 6.0,
        "pretokenized-padded": 2.0,
        "token-list": 2.0,
    }
    rows = [shape | {"arm": arm, "seconds": seconds} for arm, seconds in arms.items()]
    rows += [row | {"sequence_length": 1024, "benchmark": "other"} for row in rows]
    tables.write(tmp_path / "tokenization", {"scale": "alps"}, benchmarks=rows)
    stores = {
        "benchmark": "b",
        "round": 0,
        "sequence_length": 2048,
        "documents": 10,
        "useful_tokens": 1000,
    }
    files = {
        "format": "padded",
        "codec": "snappy",
        "dtype": "int64",
        "row_group_rows": 1000,
        "stored_bytes": 35_500,
    }
    text = {"format": "text", "engine": "tokenizers", "bulk_s": 0.002}
    tables.write(
        tmp_path / "storage", {"scale": "alps"}, storage_benchmarks=[stores | files, stores | text]
    )
    found = {
        tuple(one["of"][2:]): one["number"]
        for one in replication.measure_figures(LEDGER, tmp_path, ["tokenization", "storage"])
    }
    assert (
        found["pretokenized padded", "speed-up"] == 4
        and found["pretokenized token-list", "speed-up"] == 3
    )
    assert found["on the fly (padded)", "seconds of 1,000 rows"] == 100
    assert found["padded, snappy", "bytes a document"] == 3550
    assert found["padded, snappy", "µs of tokenizing a token"] == pytest.approx(2)


def test_tables_of_another_scale_give_no_figure_of_a_training(tmp_path):
    rows = study_runs()["ddp_scaling_weak"]
    steps = [s for row in rows for s in tables.steps(row["run_id"], 6, row["world_size"])]
    for scale in ("alps", "study"):
        tables.write(tmp_path / "ddp_scaling_weak", {"scale": scale}, runs=rows, steps=steps)
        assert bool(replication.measure_figures(LEDGER, tmp_path, ["ddp_scaling_weak"])) == (
            scale == "study"
        )


def of_figure(number, low, high, n=6, **changes):
    fields = {"published": 2.0, "corrected": None, "quantity": "speed-up"} | changes
    figure = replace(replication.load_figures()[0], **fields)
    ours = {
        "number": number,
        "low": low,
        "high": high,
        "n": n,
        "kind": "interval",
        "experiment": "e",
        "scale": "s",
    }
    row = replication._compare_figure(figure, ours)
    return row.ratio, row.verdict


def test_a_figure_is_reproduced_where_the_whole_interval_is_within_5_percent():
    assert of_figure(2.0, 1.9, 2.1) == ("1 (0.95 to 1.05, interval)", SAME)
    assert of_figure(2.3, 2.11, 2.4)[1] == DIRECTION and of_figure(2.0, 1.5, 2.5)[1] == DIRECTION
    assert of_figure(0.9, 0.8, 1.1)[1] == OTHER and of_figure(2.0, 0.9, 3.0)[1] == UNDECIDED
    speed = {"quantity": "MFU %"}  # no side of 1
    assert (
        of_figure(2.3, 2.11, 2.4, **speed)[1] == OTHER
        and of_figure(1.8, 1.7, 1.89, **speed)[1] == OTHER
    )
    assert (
        of_figure(2.0, 1.8, 2.05, **speed)[1] == UNDECIDED
        and of_figure(9.0, 2.05, 20.0, **speed)[1] == UNDECIDED
    )
    assert of_figure(1.0, 1.0, 1.0, corrected=1.0) == ("1", SAME)
    assert of_figure(2.0, 2.0, 2.0, corrected=1.0)[1] == OTHER
    never = {"published": 404.6, "corrected": float("inf"), "quantity": "seconds of training"}
    assert of_figure(None, None, None, **never) == ("–", SAME) and of_figure(
        9.0, 9.0, 9.0, **never
    ) == ("–", OTHER)
    assert of_figure(9.0, 9.0, None, **never)[1] == UNDECIDED


def test_without_runs_a_figure_of_a_training_needs_a_gpu_and_one_of_a_benchmark_is_not_run():
    figures = replication.load_figures()
    rows = replication.compare_with_studies([], measured=[])
    of_trainings = {
        f"{one.cell}: {one.quantity}"
        for one in figures
        if one.experiment not in ("", "storage", "tokenization")
    }
    assert {row.verdict for row in rows} == {"needs a GPU", "not run"}
    assert {row.cell for row in rows if row.verdict == "needs a GPU"} == of_trainings


@pytest.mark.parametrize("number", [2.0, 9.0])
def test_what_is_measured_needs_the_runs_of_an_interval_and_a_count_needs_one(number):
    for n in (1, 3, 5):
        assert of_figure(number, number, number, n)[1] == UNDECIDED
        expected = SAME if number == 2 else OTHER
        assert of_figure(number, number, number, n, quantity="GB of weights")[1] == expected


CLAIM = {
    "study": "000",
    "claim": "c",
    "figure": "2x",
    "unit": "ratio",
    "remark": "why",
    "kind": "range",
}
CLAIM |= {
    "scale": "demo",
    "experiment": "e",
    "verdict": "supported",
    "number": 2.0,
    "low": 2.0,
    "high": 2.0,
}
CLAIM |= {"published": [2.0], "corrected": []}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, SAME),
        ({"number": 3.0, "low": 3.0, "high": 3.0}, DIRECTION),
        ({"low": 1.0}, DIRECTION),
        ({"verdict": "inconclusive"}, UNDECIDED),
        ({"verdict": "inconclusive", "number": 9.0, "low": 9.0, "high": 9.0}, UNDECIDED),
        ({"verdict": "contradicted", "number": 0.5, "low": 0.5, "high": 0.5}, OTHER),
        ({"verdict": "contradicted", "corrected": [2.0], "published": [9.0]}, SAME),
        ({"published": []}, SAME),
        ({"verdict": "contradicted", "corrected": [2.0], "low": 1.0}, UNDECIDED),
        ({"published": [], "verdict": "inconclusive"}, UNDECIDED),
        ({"experiment": None, "number": None, "low": None, "high": None}, replication.NOT_RUN),
    ],
)
def test_a_claims_verdict_follows_from_the_data_and_its_figure(changes, verdict):
    (row,) = (
        row
        for row in replication.compare_with_studies([CLAIM | changes], [])
        if row.table == "Claims"
    )
    assert row.verdict == verdict
