"""Faults in values, planted in logs that trainings wrote: each is named, honest logs raise nothing.

A planted fault is sealed again, as by a hand that puts the hashes right: only its values give it away. Magnitudes go
from large to the smallest that is found.
"""

import json
import math
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests import logs
from tests.corpora import Lab, make_run
from tests.distributed.ranks import run_ranks
from tests.once import once
from tokenscale.analysis.comparability import refusals
from tokenscale.analysis.ingest import ingest, one_run
from tokenscale.analysis.queries import query
from tokenscale.analysis.runs import run_row
from tokenscale.base.files import read_json, sha256_file
from tokenscale.report.answers import find_cautions
from tokenscale.report.campaign_quality import proof
from tokenscale.report.summary import throughput_table
from tokenscale.runs.launch.attempts import hash_identity, prepare_attempt
from tokenscale.runs.records import provenance
from tokenscale.settings.closure import training_code
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import BudgetSettings, RunSettings, ScheduleSettings, ValidationSettings
from tokenscale.train.loop import train
from tokenscale.train.record import log_hashes

pytestmark = pytest.mark.slow(30)

STEPS, BATCH = 80, 6
WORDS = "the loss of a model falls when it reads what it has read before and then some more of it".split()


def make_settings(approach: str, world_size: int, repeat: int) -> RunSettings:
    return make_run(
        approach,
        64,
        model=PRESETS["llama-micro"],
        global_batch=BATCH,
        micro_batch=BATCH,
        layout=LayoutSettings(data=world_size),
        budget=BudgetSettings(steps=STEPS),
        schedule=ScheduleSettings(warmup_steps=2),
        validation=ValidationSettings(rows=4, every=20),
        repeat=repeat,
    )


#: name → run
RUNS = {
    "packed": make_settings("packed", 1, 0),
    "packed-1": make_settings("packed", 1, 1),
    "packed-2": make_settings("packed", 1, 2),
    "two-ranks": make_settings("packed", 2, 0),
    "padded": make_settings("padded", 1, 0),
    "twin": make_settings("pretokenized-padded", 1, 0),
}
ID = {name: run.identity for name, run in RUNS.items()}


def train_rank(world, run, inputs, folder):
    train(run, inputs, folder, world)


def train_all(folder: Path) -> None:
    pick = random.Random(0)
    texts = [" ".join(pick.choices(WORDS, k=pick.choice([2, 5, 9, 14]))) for _ in range(600)]
    lab = Lab(folder / "lab", texts, validation_share=0.1)
    for run in RUNS.values():
        inputs = lab.inputs(run)
        target = folder / "runs" / run.identity
        manifests = {"validation_store": inputs.validation_store / "manifest.json"}
        if run.store is not None:
            manifests["store"] = inputs.store / "manifest.json"
        identity = hash_identity([Path(file) for file in training_code(run)], manifests)
        prepare_attempt(target, run, identity)
        run_ranks(train_rank, run.layout.world_size, run, inputs, target)
    logs.write_table(folder / "runs.json", list(RUNS.values()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """`lab`, `runs` and `runs.json` of all `RUNS`."""
    return once(tmp_path_factory, "planted-values", train_all)


class Folder:
    """A copy of one run's folder, to plant faults in."""

    def __init__(self, path: Path):
        self.path = path

    def edit(self, change, kind="steps", rank="*", attempt="*") -> "Folder":
        """Replace every line (a mapping) by what `change` makes of it, and seal again."""
        for path in sorted(self.path.glob(f"attempt={attempt}/rank={rank}/{kind}.jsonl")):
            lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self.seal()

    def seal(self, **changes) -> "Folder":
        """Seal the record with the hashes of the logs as they are; dotted names change its fields."""
        record = read_json(self.path / "run.json")
        outcome = record["outcome"] | {"logs": log_hashes(self.path)}
        record["outcome"] = outcome
        for name, value in changes.items():
            *parents, last = name.split("__")
            at = record
            for key in parents:
                at = at[key]
            at[last] = value
        provenance.seal_record(self.path, record, record["outcome"])
        return self

    def lines(self, kind="steps", rank="00000") -> list[dict]:
        path = self.path / f"attempt=00/rank={rank}/{kind}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def retime(self, seconds) -> "Folder":
        """Give step k `seconds(k, median)`, with all clocks, phases and events as a training writes them."""
        steps = self.lines()
        median = float(np.median([line["step_s"] for line in steps]))
        new = [seconds(line["step"], median) for line in steps]
        late = np.cumsum([n - line["step_s"] for n, line in zip(new, steps, strict=True)])

        def change(line):
            k = line["step"]
            ratio = new[k] / line["step_s"]
            scaled = {name: ratio * v for name, v in line.items() if name.endswith("_s") and not name.startswith("t_")}
            return line | scaled | {"t_mono_s": line["t_mono_s"] + late[k], "t_unix_s": line["t_unix_s"] + late[k]}

        ends = [line["t_mono_s"] for line in steps]

        def move(line):
            after = int(np.searchsorted(ends, line["t_mono_s"]))
            shift = late[after - 1] if after else 0.0
            return line | {"t_mono_s": line["t_mono_s"] + shift, "t_unix_s": line["t_unix_s"] + shift}

        self.edit(move, "events").edit(change)
        return self.seal(outcome__ended_unix_s=read_json(self.path / "run.json")["outcome"]["ended_unix_s"] + late[-1])


def at_step(k, **fields):
    """Change fields of step k; a function makes the value from the line."""
    return lambda line: line | {n: v(line) if callable(v) else v for n, v in fields.items() if line.get("step") == k}


def scale_steps(folder, m):
    folder.edit(lambda line: line | {n: m * v for n, v in line.items() if n.endswith("_s") and not n.startswith("t_")})


def scale_steps_and_clocks(folder, m):
    first = folder.lines()[0]

    def change(line):
        clocks = {name: first[name] + m * (line[name] - first[name]) for name in ("t_mono_s", "t_unix_s")}
        times = {n: m * v for n, v in line.items() if n.endswith("_s") and not n.startswith("t_")}
        return line | times | clocks

    folder.edit(change)


def scale_everything(folder, m):
    first = folder.lines("events")[0]

    def change(line):
        clocks = {name: first[name] + m * (line[name] - first[name]) for name in ("t_mono_s", "t_unix_s")}
        times = {n: m * v for n, v in line.items() if n.endswith("_s") and not n.startswith("t_")}
        return line | times | clocks

    folder.edit(change, "events").edit(change)


def shift_wall_clock(folder, m, rank="*"):
    for kind in ("steps", "events"):
        folder.edit(lambda line: line | {"t_unix_s": line["t_unix_s"] + m}, kind, rank)


def shift_clocks(folder, m, attempt="*"):
    for kind in ("steps", "events"):
        folder.edit(lambda line: line | {n: line[n] + m for n in ("t_mono_s", "t_unix_s")}, kind, attempt=attempt)


def steady(k, median):
    """A quiet machine's times: 3 % around the median."""
    return median * (1 + 0.03 * math.sin(7.3 * k))


def copy_attempt(folder, m):
    """Attempt 1 is attempt 0, later by m seconds."""
    shutil.copytree(folder.path / "attempt=00", folder.path / "attempt=01")
    shift_clocks(folder, m, attempt="01")
    folder.seal(attempt=1, started_unix_s=read_json(folder.path / "run.json")["started_unix_s"] + m)


def copy_rank(folder, m):
    """Rank 1's steps are rank 0's, one of them m seconds longer."""
    source = folder.path / "attempt=00/rank=00000/steps.jsonl"
    shutil.copy(source, folder.path / "attempt=00/rank=00001/steps.jsonl")
    folder.edit(at_step(9, step_s=lambda line: line["step_s"] + m), rank="00001")


#: fault → (run, plant(folder, magnitude), magnitudes down to the smallest that is found, validity, reason)
IN_A_RUN = {
    "times of steps scaled": ("packed", scale_steps, (0.5, 2.0, 0.99), "invalid", "t_mono_s"),
    "times and clocks of steps scaled": ("packed", scale_steps_and_clocks, (0.5, 0.9, 0.99), "invalid", "validation"),
    "all times scaled": ("packed", scale_everything, (1e-9, 1e-6, 2e-5), "invalid", "more than 2 cores can do"),
    "wall clock of a log ahead": ("packed", shift_wall_clock, (3600.0, 600.0, 65.0), "suspect", "of run.json is"),
    "wall clock of a step ahead": (
        "packed",
        lambda f, m: f.edit(at_step(9, t_unix_s=lambda line: line["t_unix_s"] + m)),
        (3600.0, 1.0, 0.002),
        "invalid",
        "the wall clock and the monotonic clock of the log diverge by",
    ),
    "wall clock of a rank ahead": (
        "two-ranks",
        lambda f, m: shift_wall_clock(f, m, rank="00001"),
        (3600.0, 600.0, 65.0),
        "suspect",
        "wall clocks of ranks on one machine are",
    ),
    "one long step": (
        "packed",
        lambda f, m: f.retime(lambda k, median: m if k == 40 else steady(k, median)),
        (3600.0, 60.0, 10.0),
        "suspect",
        "no steady state",
    ),
    "throttled": (
        "packed",
        lambda f, m: f.retime(lambda k, median: steady(k, median) * (m if k > 54 else 1)),
        (4.0, 2.0, 1.3),
        "suspect",
        "no steady state",
    ),
    "still warming up": (
        "packed",
        lambda f, m: f.retime(lambda k, median: steady(k, median) / (m if k > 54 else 1)),
        (4.0, 2.0, 1.3),
        "suspect",
        "no steady state",
    ),
    "two kinds of steps": (
        "packed",
        lambda f, m: f.retime(lambda k, median: steady(k, median) * (m if k % 3 == 0 else 1)),
        (10.0, 3.0, 1.6),
        "suspect",
        "two kinds of steps",
    ),
    "negative wait": (
        "packed",
        lambda f, m: f.edit(at_step(9, data_wait_s=-m)),
        (1.0, 1e-3, 2e-6),
        "invalid",
        "negative data_wait_s",
    ),
    "wait longer than its step": (
        "packed",
        lambda f, m: f.edit(at_step(9, data_wait_s=lambda line: line["step_s"] + m)),
        (1.0, 0.01, 2e-5),
        "invalid",
        "a wait longer than its step",
    ),
    "phase longer than its step": (
        "packed",
        lambda f, m: f.edit(at_step(9, backward_s=lambda line: line["step_s"] + m)),
        (1.0, 0.01, 2e-5),
        "invalid",
        "the phases of step 9 last",
    ),
    "negative tokens": (
        "packed",
        lambda f, m: f.edit(at_step(9, useful_tokens=-m)),
        (10**6, 100, 1),
        "invalid",
        "negative useful_tokens",
    ),
    "validations of unequal size": (
        "packed",
        lambda f, m: f.edit(at_step(20, useful_tokens=lambda line: (line.get("useful_tokens") or m) - m), "events"),
        (50, 10, 1),
        "invalid",
        "validated on",
    ),
    "attempt copied": ("packed", copy_attempt, (1e5, 1e3, 100.0), "invalid", "is a copy of attempt=00/rank=00000"),
    "rank copied": ("two-ranks", copy_rank, (1e-3, 1e-6, 1e-9), "invalid", "steps.jsonl is a copy of attempt=00"),
    "steps of the outcome": ("packed", lambda f, m: f.seal(outcome__steps=m), (-80, -1), "invalid", "outcome.steps"),
    "world size": ("packed", lambda f, m: f.seal(hardware__world_size=m), (-1, 0), "invalid", "hardware.world_size"),
    "cores": ("packed", lambda f, m: f.seal(hardware__cores=m), (-2, 0, 1.5), "invalid", "hardware.cores"),
    "parameters": ("packed", lambda f, m: f.seal(parameters=m), (-5, 0), "invalid", "parameters"),
    "attempt": ("packed", lambda f, m: f.seal(attempt=m), (-1,), "invalid", "attempt -1"),
    "budget": ("packed", lambda f, m: f.seal(budget_steps=m), (-80, 0), "invalid", "budget_steps"),
    "start of the record": (
        "packed",
        lambda f, m: f.seal(started_unix_s=read_json(f.path / "run.json")["started_unix_s"] + m),
        (-1e6, 3600.0, 65.0),
        "suspect",
        "started_unix_s of run.json is",
    ),
    "learning rate": (
        "packed",
        lambda f, m: f.edit(lambda line: line | {"learning_rate": m * line["learning_rate"]}),
        (0, 3, 10, 1 + 1e-8),
        "invalid",
        "learning_rate is",
    ),
    "steps skipped": (
        "packed",
        lambda f, m: f.edit(lambda line: line | {"skipped": line["step"] < m}),
        (80, 1),
        "invalid",
        "skipped",
    ),
    "tokens of a step": (
        "packed",
        lambda f, m: f.edit(at_step(9, useful_tokens=lambda line: line["useful_tokens"] + m)),
        (9, -1),
        "invalid",
        "the batch has",
    ),
    "total tokens": (
        "packed",
        lambda f, m: f.edit(at_step(9, total_tokens=lambda line: line["total_tokens"] + m)),
        (64, -1, 1),
        "invalid",
        "tokens at step 9",
    ),
    "order digest": (
        "packed",
        lambda f, m: f.edit(at_step(9, order_digest=lambda line: line["order_digest"] + m)),
        (1,),
        "invalid",
        "order_digest is",
    ),
    "no labels": (
        "padded",
        lambda f, m: f.edit(lambda line: line | {"useful_tokens": m}),
        (0,),
        "invalid",
        "predicts nothing",
    ),
    "passes": ("packed", lambda f, m: f.edit(at_step(9, micro_steps=m)), (0, 2), "invalid", "micro_steps is"),
    "times the parameters": (
        "packed",
        lambda f, m: f.seal(parameters=int(m * read_json(f.path / "run.json")["parameters"])),
        (2, 1.001),
        "invalid",
        "parameters",
    ),
    "number format": ("packed", lambda f, m: f.seal(number_format=m), ("bf16",), "invalid", "number_format"),
    "FLOPs": ("packed", lambda f, m: f.seal(flops_per_token__causal=m), (1e5,), "invalid", "flops_per_token.causal"),
    "clipped norm": (
        "packed",
        lambda f, m: f.edit(at_step(9, grad_norm_clipped=lambda line: m * line["grad_norm"])),
        (2, 1.001),
        "invalid",
        "grad_norm_clipped is",
    ),
    "peak memory": (
        "packed",
        lambda f, m: f.edit(lambda line: line | {"memory_peak_bytes": line["memory_peak_bytes"] // m}),
        (2**20, 2**11),
        "invalid",
        "memory_peak_bytes is",
    ),
    "memory": (
        "packed",
        lambda f, m: f.edit(
            lambda line: line | {n: line[n] // m for n in ("parameters_bytes", "optimizer_bytes") if n in line},
            "events",
        ),
        (2**20, 2),
        "invalid",
        "its share of the model",
    ),
    "held-out tokens": (
        "packed",
        lambda f, m: f.edit(
            lambda line: (
                line | {"useful_tokens": int(m * line["useful_tokens"])} if line["event"] == "validation" else line
            ),
            "events",
        ),
        (0.5, 0.999),
        "invalid",
        "the slice has",
    ),
    "validation elsewhere": (
        "packed",
        lambda f, m: f.edit(
            lambda line: line | {"step": m} if line["event"] == "validation" and line["step"] == 20 else line, "events"
        ),
        (19, 21),
        "invalid",
        "alidation at step",
    ),
    "set-up": (
        "packed",
        lambda f, m: f.edit(
            lambda line: line | {"duration_s": line["duration_s"] + m} if line["event"] == "init_done" else line,
            "events",
        ),
        (60, 1),
        "suspect",
        "init_done of rank 0",
    ),
    "energy": (
        "packed",
        lambda f, m: f.edit(lambda line: line | {"energy_j": m} if line["event"] == "run_stop" else line, "events"),
        (-1, 1e7),
        "invalid",
        "energy_j",
    ),
    "another run's record": (
        "packed",
        lambda f, m: f.seal(run_id=m),
        ("packed-other",),
        "invalid",
        "of the run packed-o",
    ),
    "log changed after sealing": (
        "packed",
        lambda f, m: (f.path / "attempt=00/rank=00000/steps.jsonl").open("ab").write(m),
        (b"{}\n", b"\n"),
        "invalid",
        "logs differ from the hashes sealed",
    ),
}


def read_row(path: Path, lab: Path) -> dict:
    """The row of the table `runs` of one run's folder, with the inputs of `lab` at hand."""
    run = next(run for run in RUNS.values() if run.identity == path.name)
    cell = {"approach": run.approach, "layout.data": run.layout.data}
    entry = {"run_id": path.name, "cell": cell, "repeat": run.repeat, "position": 0}
    manifests = {sha256_file(path): path for path in lab.rglob("manifest.json")}
    return one_run(entry, "planted", path.parent, manifests)["runs"].to_pylist()[0]


PLANTS = [pytest.param(fault, m, id=f"{fault}, {m!r}") for fault, row in IN_A_RUN.items() for m in row[2]]


@pytest.mark.parametrize(("fault", "magnitude"), PLANTS)
def test_a_fault_in_a_run_is_named(trained, tmp_path, fault, magnitude):
    name, plant, _, validity, reason = IN_A_RUN[fault]
    path = tmp_path / ID[name]
    shutil.copytree(trained / "runs" / path.name, path)
    plant(Folder(path), magnitude)
    row = read_row(path, trained / "lab")
    assert reason in row["reasons"]
    assert row["validity"] == validity, row["reasons"]


class Experiment:
    """A copy of all runs."""

    def __init__(self, trained: Path, target: Path):
        self.trained, self.target = trained, target
        shutil.copytree(trained / "runs", target / "runs")

    def of(self, name: str) -> Folder:
        return Folder(self.target / "runs" / ID[name])

    def ingest(self) -> pd.DataFrame:
        stores = sorted((self.trained / "lab/tokens").glob("*/manifest.json"))
        ingest(self.trained / "runs.json", self.target / "runs", self.target / "tables", stores=stores)
        return pd.read_parquet(self.target / "tables/runs.parquet").set_index("run_id")


@pytest.fixture
def experiment(trained, tmp_path) -> Experiment:
    return Experiment(trained, tmp_path)


def multiply_useful(m):
    """m times the useful tokens, or one more at one step."""
    if m == "one":
        return at_step(7, useful_tokens=lambda line: line["useful_tokens"] + 1)
    return lambda line: line | {"useful_tokens": int(m * line["useful_tokens"])}


def multiply_useful_of_twins(experiment, m):
    for name in ("padded", "twin"):
        experiment.of(name).edit(multiply_useful(m))


def copy_run(experiment, m):
    """packed-1 logs what packed logged: to the byte, shifted in time, or with nothing but `own_s` untouched."""
    source, target = experiment.of("packed"), experiment.of("packed-1")
    shutil.copytree(source.path / "attempt=00", target.path / "attempt=00", dirs_exist_ok=True)
    if m == "bytes":
        target.seal()
    elif m == "shifted":
        shift_clocks(target, 100)
    else:
        median = float(np.median([line["step_s"] for line in target.lines()]))
        own = {line["step"]: line["own_s"] for line in target.lines()}
        target.retime(lambda k, _: steady(k, 2 * median)).edit(lambda line: line | {"own_s": own[line["step"]]})


#: fault → (plant(experiment, magnitude), magnitudes, run, validity, reason)
ACROSS_RUNS = {
    "useful tokens of an arm": (
        lambda e, m: e.of("padded").edit(multiply_useful(m)),
        (2, 1.2, "one"),
        "padded",
        "invalid",
        f"where {ID['twin']} has",
    ),
    "useful tokens of both twins": (multiply_useful_of_twins, (3, 2, 1.4), "twin", "invalid", "the batch has"),
    "run copied": (
        copy_run,
        ("bytes", "shifted", "own_s"),
        "packed-1",
        "invalid",
        f"a copy of run {RUNS['packed'].identity}",
    ),
    "the original of a copy": (copy_run, ("bytes",), "packed", "invalid", f"a copy of run {ID['packed-1']}"),
    "clock of a run ahead of later runs": (
        lambda e, m: shift_wall_clock(e.of("packed"), m),
        (3600.0, 600.0, 65.0),
        "packed",
        "suspect",
        "ahead of later runs' on this machine",
    ),
}
PLANTS_ACROSS = [pytest.param(fault, m, id=f"{fault}, {m!r}") for fault, row in ACROSS_RUNS.items() for m in row[1]]


@pytest.mark.parametrize(("fault", "magnitude"), PLANTS_ACROSS)
def test_a_fault_that_other_runs_show_is_named(experiment, fault, magnitude):
    plant, _, name, validity, reason = ACROSS_RUNS[fault]
    plant(experiment, magnitude)
    row = experiment.ingest().loc[ID[name]]
    assert reason in row["reasons"]
    assert row["validity"] == validity, row["reasons"]


@pytest.mark.parametrize(
    ("step", "nats"), [(50, 7.2), (50, 0.2), (50, 0.03), (20, 0.02), (20, 0.003), (5, 0.001), (5, 5e-5)]
)
def test_unequal_losses_are_no_proof_of_equal_data(experiment, step, nats):
    folder = experiment.of("two-ranks")
    useful = sum(folder.lines(rank=rank)[step]["useful_tokens"] for rank in ("00000", "00001"))
    folder.edit(at_step(step, loss_sum=lambda line: line["loss_sum"] + nats * useful), rank="00000")
    experiment.ingest()
    part = proof(query("order", experiment.target / "tables"))["parts"][0]
    assert part["state"] == "broken" and "not proven" in part["text"]
    assert f"Losses differ by up to {nats:.1g}" in part["text"]


def change_code(folder, m):
    record = read_json(folder.path / "run.json")
    folder.seal(code=record["code"] | {m: "f" * 64})


#: fault → (plant(folder), words of the refusal)
INCOMPARABLE = {
    "shared source file": (lambda f: change_code(f, "train/loop.py"), "source file train/loop.py ffffffffffff"),
}


@pytest.mark.parametrize("fault", INCOMPARABLE)
def test_a_run_that_is_not_like_its_siblings_is_not_compared(experiment, fault):
    plant, words = INCOMPARABLE[fault]
    plant(experiment.of("padded"))
    found = refusals(experiment.ingest().reset_index(), "approach")
    assert any(ID["padded"] in refusal.run_ids and words in refusal.sentence for refusal in found), found
    throughput, stalls, inventory = (
        query(n, experiment.target / "tables") for n in ("throughput", "stalls", "inventory")
    )
    shown = {row[0]: row[2] for row in throughput_table(throughput, stalls, inventory).rows if row[1] == "1"}
    assert shown["padded"] == "1 (1 not compared)" and shown["packed"] == "3"


def test_honest_logs_raise_nothing(experiment):
    """Whether a busy machine let the steps settle is its own matter."""
    runs = experiment.ingest()
    reasons = {reason for text in runs["reasons"] for reason in text.split("; ") if reason}
    assert all(reason.startswith("no steady state") for reason in reasons), reasons
    assert set(runs["validity"]) <= {"valid", "suspect"}
    assert refusals(runs.reset_index(), "approach") == [] and refusals(runs.reset_index(), "world_size") == []
    assert [part["state"] for part in proof(query("order", experiment.target / "tables"))["parts"]] == ["proven"] * 2


def make_campaign(load=1.0, drift=1.0, spread=1.0, efficiency=0.9):
    """Rows of inventory, throughput and scaling of one approach on one and two ranks, six repeats each."""
    runs, throughput, scaling = [], [], []
    for position in range(12):
        world, repeat = 1 + position % 2, position // 2
        run_id = f"packed-{world}-{repeat}"
        rate = 1000.0 * (1 if world == 1 else 2 * efficiency) * drift**position * (spread if repeat == 2 else 1)
        rate *= 1 + 0.001 * (position * 7 % 5)
        runs.append(
            {
                "run_id": run_id,
                "validity": "valid",
                "reasons": "",
                "device_kind": "cpu",
                "load_average": load,
                "cores": 2,
            }
            | {"world_size": world, "threads_per_rank": 1, "started_unix_s": 1.7e9 + 60 * position, "external": False}
        )
        throughput.append({"run_id": run_id, "series": "packed", "world_size": world, "useful_tokens_per_s": rate})
        scaling.append(
            {"run_id": run_id, "series": "packed", "world_size": world, "base_world_size": 1, "device_kind": "cpu"}
            | {"efficiency": efficiency if world > 1 else 1.0}
        )
    return pd.DataFrame(runs), pd.DataFrame(throughput), pd.DataFrame(scaling)


@pytest.mark.parametrize(
    ("disturbance", "words"),
    [
        ({"load": 7.5}, "load average was 7.5"),
        ({"load": 3.2}, "load average was 3.2"),
        ({"drift": 0.8}, "Throughput drifted by −91 %"),
        ({"drift": 0.99}, "Throughput drifted by −11 %"),
        ({"spread": 0.2}, "Repeats of 2 of 2 cells differ by more than 20 %"),
        ({"spread": 0.75}, "Repeats of 2 of 2 cells differ"),
        ({"efficiency": 3.83}, "Scaling efficiency is above 100 % in 6 of 6 runs, up to 383 %"),
        ({"efficiency": 1.06}, "Scaling efficiency is above 100 %"),
    ],
)
def test_a_disturbed_campaign_is_cautioned_about(disturbance, words):
    assert any(words in text for text in find_cautions(*make_campaign(**disturbance))), words


def test_a_quiet_campaign_has_no_cautions():
    assert find_cautions(*make_campaign()) == []


def test_held_out_texts_that_are_trained_on_are_a_caution():
    stores = pd.DataFrame(
        [("web", 3, True), ("web", 3, True), ("own", 1200, False), ("clean", 0, True), ("elsewhere", None, None)],
        columns=["corpus", "held_out_in_training", "held_out_dropped"],
    )
    own, web = find_cautions(*make_campaign(), stores=stores)
    assert "own: 1,200 " in own and "too low" in own and "web: 3 " in web and "were dropped" in web
    assert find_cautions(*make_campaign(), stores=stores[["corpus"]]) == []  # tables of an earlier version


def test_invalid_runs_and_open_verdicts_are_cautions():
    runs, throughput, scaling = make_campaign()
    runs.loc[3, ["validity", "reasons"]] = ["invalid", "a step that took no time; negative rows"]
    found = find_cautions(runs, throughput, scaling, verdicts=["too few runs", "faster"])
    assert found == [
        "1 invalid of 12 runs: packed-2-1: a step that took no time.",
        "1 of 2 comparisons have too few runs for a verdict.",
    ]


def test_blocks_that_ran_eagerly_although_compile_was_requested_are_a_caution():
    runs, throughput, scaling = make_campaign()
    counts = {"graphs": 9, "recompiles": 7, "graph_breaks": 1, "blocks": 32, "eager_blocks": 24}
    rows = [
        run_row({"run_id": "r"}, "e", {"compilation": found}) for found in (counts, counts | {"eager_blocks": 0}, None)
    ]
    for column in ("blocks", "eager_blocks", "graph_breaks"):
        runs[column] = [rows[(1, 0, 2)[n % 3]][column] for n in range(12)]
    assert find_cautions(runs, throughput, scaling) == [
        "Blocks ran eagerly in 4 of 8 runs that ask for compile: packed-2-0: 24 of 32 blocks."
    ]
    runs["eager_blocks"] = 0
    assert find_cautions(runs, throughput, scaling) == []


def print_table() -> None:
    """Print every fault with its magnitude and what the report says: `python -m tests.unit.test_planted_values`."""
    with tempfile.TemporaryDirectory() as folder:
        trained = Path(folder) / "trained"
        trained.mkdir()
        train_all(trained)
        number = 0
        for fault, (name, plant, magnitudes, *_) in IN_A_RUN.items():
            for magnitude in magnitudes:
                path = Path(folder) / str(number) / ID[name]
                shutil.copytree(trained / "runs" / path.name, path)
                plant(Folder(path), magnitude)
                row, number = read_row(path, trained / "lab"), number + 1
                print(f"{fault}, {magnitude!r}: {row['validity']}: {row['reasons'][:160]}")
        for fault, (plant, magnitudes, name, *_) in ACROSS_RUNS.items():
            for magnitude in magnitudes:
                experiment = Experiment(trained, Path(folder) / str(number))
                plant(experiment, magnitude)
                row, number = experiment.ingest().loc[ID[name]], number + 1
                print(f"{fault}, {magnitude!r}: {row['validity']}: {row['reasons'][:160]}")
        for fault, (plant, _) in INCOMPARABLE.items():
            experiment, number = Experiment(trained, Path(folder) / str(number)), number + 1
            plant(experiment.of("padded"))
            for refusal in refusals(experiment.ingest().reset_index(), "approach"):
                print(f"{fault}: not compared: {refusal.sentence[:160]}")


if __name__ == "__main__":
    print_table()
