import json
import subprocess
import sys
from pathlib import Path
from random import Random

import matplotlib.pyplot as plt
import numpy as np
import pytest

from tests import logs
from tests.logs import tabulate
from tests.unit.test_ingest import rows
from tokenscale.analysis.queries import query
from tokenscale.base.errors import UserError
from tokenscale.base.files import sha256_file, write_json
from tokenscale.report import save, summary
from tokenscale.runs.records.external import ExternalRun
from tokenscale.runs.records.provenance import seal_record
from tokenscale.settings.options import to_dict
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.registry import FIGURES

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20)]

FACTS = {"approach": "my loop", "steps": 4, "global_batch": 8, "sequence_length": 64}
LOOPS = Path(__file__).parent / "loops"


def train(folder, done=4, ranks=1, fails_at=None, **facts):
    for rank in range(ranks):
        with ExternalRun(folder, **FACTS | facts, rank=rank, world_size=ranks) as run:
            for step in range(done):
                with run.waiting():
                    pass
                if step == fails_at:
                    raise RuntimeError("out of memory")
                share = 8 // ranks
                run.step(
                    loss_sum=2.0 * 60 * share,
                    useful_tokens=60 * share,
                    total_tokens=64 * share,
                    rows=share,
                )
            with run.paused():
                if rank == 0:
                    run.validation(loss_sum=100.0, useful_tokens=50, rows=1)


def tables(root: Path, runs=(), **cell) -> Path:
    table = logs.write_table(root / "runs.json", list(runs))
    content = logs.unsealed(table)
    for number, path in enumerate(sorted((root / "runs").glob("external-*/run.json"))):
        content["runs"].append(
            {"run_id": path.parent.name, "external": True, "cell": cell, "repeat": number}
        )
    write_json(table, content)
    tabulate(table, root / "runs", root / "tables")
    return root / "tables"


def test_a_foreign_loop_is_in_the_same_tables_and_marked(tmp_path):
    ours = logs.settings()
    logs.write_run(tmp_path / "runs", ours)
    train(tmp_path / "runs/external-mine-0", ranks=2, model="gpt2", corpus="wiki", seed=3)
    found = {row["run_id"]: row for row in rows(tables(tmp_path, [ours]), "runs")}
    row = found["external-mine-0"]
    assert (row["external"], found[ours.identity]["external"]) == (True, False)
    assert (row["validity"], row["reasons"]) == ("valid", "")
    assert (row["approach"], row["series"]) == ("my loop", "my loop (external)")
    assert (row["world_size"], row["model"]) == (2, "gpt2")
    assert row["science"] != found[ours.identity]["science"] and row["flops_per_token"] is None
    throughput = query("throughput", tmp_path / "tables", warmup_steps=1).set_index("run_id")
    assert throughput.loc["external-mine-0", "useful_tokens"] == 3 * 60 * 8
    assert throughput.loc["external-mine-0", "total_tokens"] == 3 * 64 * 8
    assert list(
        query("validation", tmp_path / "tables").query("run_id == 'external-mine-0'")["loss"]
    ) == [2.0]


def test_pauses_are_no_part_of_a_step_and_waits_are(tmp_path, monkeypatch):
    clock = iter(float(n) for n in range(1000))
    monkeypatch.setattr("tokenscale.runs.records.external.time.monotonic", lambda: next(clock))
    with ExternalRun(tmp_path / "external-a", **FACTS) as run:
        began = run._last
        with run.paused():
            next(clock)
        with run.waiting():
            next(clock)
        run.step(loss_sum=1.0, useful_tokens=1, total_tokens=1, rows=8)
        ended = run._last
    (line,) = (tmp_path / "external-a/attempt=00/rank=00000/steps.jsonl").read_text().splitlines()
    step = json.loads(line)
    assert step["step_s"] == ended - began - 2 and step["data_wait_s"] == 2 and step["step"] == 0


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"steps": "4"}, "steps must be a whole number"),
        ({"steps": -1}, "steps must be a whole number"),
        ({"global_batch": True}, "global_batch must be a whole number"),
        ({"sequence_length": None}, "sequence_length must be a whole number"),
        ({"approach": ""}, "approach must be a text"),
        ({"mfu": float("nan")}, "mfu must be a number"),
        ({"shape": "llama"}, "shape must be a mapping"),
        ({"repeat": 1}, "unknown run fact"),
        ({"rank": 2, "world_size": 2}, "the rank is out of range"),
    ],
)
def test_facts_that_no_table_could_read_are_refused_before_the_first_step(tmp_path, facts, said):
    with pytest.raises(UserError, match=said):
        ExternalRun(tmp_path / "external-a", **{**FACTS, **facts})
    assert not list(tmp_path.iterdir())


def test_an_attempt_has_one_writer_and_the_next_one_is_named(tmp_path):
    for attempt in (0, 1):
        with ExternalRun(tmp_path / "external-a", **FACTS, attempt=attempt):
            pass
    with pytest.raises(UserError, match="attempt=01"):
        ExternalRun(tmp_path / "external-a", **FACTS, attempt=1)


def test_scalars_of_other_libraries_are_numbers_and_a_cpu_is_one_however_it_is_written(tmp_path):
    for number, (device, kind) in enumerate(
        (("CPU", "cpu"), ("cpu", "cpu"), ("NVIDIA H100 80GB HBM3", "cuda"))
    ):
        with ExternalRun(tmp_path / f"external-{number}", **FACTS, device=device) as run:
            run.step(
                loss_sum=np.float32(1.5),
                useful_tokens=np.int64(4),
                total_tokens=np.int64(5),
                rows=np.int64(8),
            )
            run.validation(loss_sum=np.float32(2.5), useful_tokens=np.int64(4), rows=1)
        log = tmp_path / f"external-{number}/attempt=00/rank=00000"
        (step,) = map(json.loads, (log / "steps.jsonl").read_text().splitlines())
        assert (step["loss_sum"], step["useful_tokens"], step["rows"]) == (1.5, 4, 8)
        assert '"loss_sum":2.5' in (log / "events.jsonl").read_text()
        assert (
            json.loads((log.parents[1] / "run.json").read_text())["hardware"]["device_kind"] == kind
        )


def test_a_loop_that_fails_says_so(tmp_path):
    with pytest.raises(RuntimeError):
        train(tmp_path / "runs/external-mine-0", fails_at=2)
    (row,) = rows(tables(tmp_path), "runs")
    assert (row["status"], row["validity"], row["steps_seen"]) == ("failed", "invalid", 2)


def test_facts_of_another_type_in_a_record_of_other_hands_count_as_not_stated(tmp_path):
    folder = tmp_path / "runs/external-mine-0"
    train(folder)
    record = json.loads((folder / "run.json").read_text())
    record["external"] |= {
        "seed": "three",
        "parameters": True,
        "shape": {"layers": "many"},
        "mfu": "high",
    }
    seal_record(folder, record, record["outcome"])
    (row,) = rows(tables(tmp_path), "runs")
    assert row["validity"] == "valid"
    assert [row[key] for key in ("seed", "parameters", "flops_per_token", "mfu_stated")] == [
        None
    ] * 4


def damaged(folder, change_step=None, change_validation=None, **facts):
    """A sealed record of other hands: values of every step, of the validation, and facts."""
    train(folder)
    log = folder / "attempt=00/rank=00000"
    for name, of in (("steps", change_step or {}), ("events", change_validation or {})):
        logs.edit(
            folder,
            lambda x, of=of: x | of if x.get("event", "validation") == "validation" else x,
            name,
        )
    record = json.loads((folder / "run.json").read_text())
    record["external"] |= facts
    hashes = {
        path.relative_to(folder).as_posix(): sha256_file(path) for path in log.glob("*.jsonl")
    }
    seal_record(folder, record, record["outcome"] | {"logs": hashes})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"change_step": {"step_s": 0}}, "a step that took no time"),
        ({"change_step": {"step_s": 1e-300}}, "step_s below any that is possible"),
        ({"change_step": {"step_s": 1e300}}, "step_s above any that is possible"),
        (
            {"change_step": {"total_tokens": 0, "useful_tokens": 0, "loss_sum": 0}},
            "no tokens at step 0",
        ),
        ({"change_step": {"total_tokens": None, "useful_tokens": None}}, "no tokens at step 0"),
        ({"change_step": {"memory_peak_bytes": 0}}, "memory_peak_bytes of 0"),
        ({"change_step": {"loss_sum": 1e300}}, "loss_sum above any that is possible"),
        ({"change_step": {"forward_s": 1e9}}, "forward_s above any that is possible"),
        ({"change_validation": {"useful_tokens": 0}}, "over 0 useful tokens"),
        ({"change_validation": {"loss_sum": None}}, "a loss_sum of None"),
        ({"change_validation": {"loss_sum": -1.0}}, "a loss_sum of -1.0"),
        ({"change_validation": {"loss_sum": 1e300}}, "a loss_sum of 1e+300"),
        ({"change_validation": {"correct_tokens": 51}}, "correct_tokens of 51"),
        ({"steps": 5}, "4 of 5 steps are in its log"),
        ({"global_batch": 16}, "ranks hold 8 rows at step 0, the global batch is 16"),
        (
            {"sequence_length": 32},
            "a rank reports 512 tokens at step 0, 8 rows of 32 hold at most 256",
        ),
        ({"world_size": None}, "world_size must be a whole number"),
        ({"approach": ""}, "approach must be a text"),
    ],
)
def test_values_that_no_training_has_are_refused_with_one_reason(tmp_path, values, reason):
    damaged(tmp_path / "runs/external-mine-0", **values)
    (row,) = rows(tables(tmp_path), "runs")
    assert row["validity"] == "invalid" and row["reasons"].count(reason) == 1, row["reasons"]


#: values of logs and facts of other hands, some of which no training has
VALUES = (0, -1, 1, 512, None, 0.5, 1e-300, 1e300, 2**53)
STEP_FIELDS = (
    "step_s",
    "loss_sum",
    "useful_tokens",
    "total_tokens",
    "rows",
    "memory_peak_bytes",
    "data_wait_s",
    "grad_norm",
    "learning_rate",
    "t_mono_s",
    "correct_tokens",
    "forward_s",
    "bubble_s",
)
STATED = (
    "steps",
    "global_batch",
    "sequence_length",
    "world_size",
    "micro_batch",
    "seed",
    "parameters",
    "mfu",
    "flops_per_token",
    "model",
    "precision",
    "shape",
)


def test_pages_and_figures_survive_whatever_ingest_accepts(tmp_path):
    random = Random(0)
    ours = [
        logs.settings(approach, repeat=repeat)
        for approach in ("padded", "packed")
        for repeat in range(2)
    ]
    for run in ours:
        logs.write_run(tmp_path / "runs", run)
    for number in range(30):

        def pick(names):
            chosen = random.sample(names, random.choice((0, 0, 1, 2)))
            return {name: random.choice(VALUES) for name in chosen}

        validation = pick(("loss_sum", "useful_tokens", "rows", "duration_s"))
        damaged(tmp_path / f"runs/external-{number}", pick(STEP_FIELDS), validation, **pick(STATED))
    folder = tables(tmp_path, ours, approach="Trainer")
    assert "valid" in {row["validity"] for row in rows(folder, "runs") if row["external"]}
    summary.experiment("tables", tmp_path)
    with save.Tables(folder) as opened:
        for name in FIGURES:
            figure = save.load_figure(name, opened).figure
            plt.close(figure.draw())
            assert figure.caption() and figure.alt() and figure.finding()
            figure.data(), figure.table(), figure.folded()


@pytest.mark.parametrize("external", [None, "yes", [1]])
def test_a_record_that_says_nothing_of_itself_is_invalid(tmp_path, external):
    train(tmp_path / "runs/external-mine-0")
    record = json.loads((tmp_path / "runs/external-mine-0/run.json").read_text())
    write_json(tmp_path / "runs/external-mine-0/run.json", record | {"external": external})
    (row,) = rows(tables(tmp_path), "runs")
    assert (
        row["validity"] == "invalid"
        and "not readable by this version" in row["reasons"]
        and row["external"]
    )


@pytest.mark.parametrize(
    ("facts", "validity", "reason"),
    [
        (
            {"flops_per_token": 9.26e9},
            "suspect",
            "it states FLOPs per token 1.21 × the formula's: the input embedding",
        ),
        (
            {"mfu": 0.3789},
            "suspect",
            "its MFU of 37.89 % implies FLOPs per token 1.21 × the formula's: the input emb",
        ),
        ({"flops_per_token": 7.65e9, "mfu": 0.3130}, "valid", ""),
    ],
)
def test_flops_that_a_wrapper_inflated_are_named(tmp_path, facts, validity, reason):
    """The source study's run on 4 GPUs (1.41B parameters): its FLOPs counted the embedding, which
    DDP's wrapper hid.
    """
    tokens = 32 * 2048
    counts = {"loss_sum": 1.0, "useful_tokens": 1, "rows": 32}
    facts = facts | {
        "approach": "padded",
        "steps": 3,
        "global_batch": 32,
        "sequence_length": 2048,
        "world_size": 1,
    }
    facts |= {
        "device": "NVIDIA GH200 120GB",
        "number_format": "bf16",
        "shape": to_dict(PRESETS["llama-1.4b-nemo"]),
    }
    with ExternalRun(tmp_path / "runs/external-study-0", **facts) as run:
        for _ in range(3):
            run.step(step_s=tokens / 40463.5, total_tokens=tokens, **counts)
    (row,) = rows(tables(tmp_path), "runs")
    assert row["validity"] == validity and (
        reason in row["reasons"] if reason else not row["reasons"]
    )
    assert row["flops_per_token"] == pytest.approx(7.65e9, rel=2e-3)


@pytest.mark.parametrize(
    "loop", ["transformers", pytest.param("accelerate", marks=pytest.mark.long)]
)
def test_loops_of_other_libraries_join(tmp_path, loop):
    pytest.importorskip(loop)
    folder = tmp_path / "runs" / f"external-{loop}-0"
    subprocess.run(
        [sys.executable, str(LOOPS / f"{loop}_loop.py"), str(folder)], check=True, timeout=300
    )
    found = tables(tmp_path)
    (row,) = rows(found, "runs")
    assert (row["validity"], row["steps_seen"], row["world_size"]) == ("valid", 6, 1), row[
        "reasons"
    ]
    assert row["flops_per_token"] > 6 * 10_000
    (speed,) = query("throughput", found, warmup_steps=1).to_dict("records")
    assert speed["useful_tokens"] == 5 * 4 * 31 and speed["total_tokens"] == 5 * 4 * 32
    (loss,) = query("loss", found).query("step == 5")["loss"]
    assert 0 < loss < 6
