# ruff: noqa: E501
"""Faults in the values of logs, planted as a wrong trainer, a wrong script or a hand would leave
them: one table.

A fault is sealed again, as by a hand that puts the hashes right, so that only values give it away.
"""

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests import logs
from tests.corpora import WORDS, Lab, make_run
from tests.distributed.ranks import run_ranks, train_rank
from tests.unit.test_batches_objectives import Pairs
from tokenscale.base.files import canonical_json, read_json, sha256_text, write_json
from tokenscale.runs.launch.attempts import hash_identity, prepare_attempt
from tokenscale.runs.records import provenance
from tokenscale.runs.records.external import ExternalRun
from tokenscale.runs.records.provenance import log_hashes
from tokenscale.settings.closure import training_code
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import (
    BudgetSettings,
    CheckpointSettings,
    OptimizerSettings,
    RunSettings,
    ScheduleSettings,
    ValidationSettings,
)

STEPS = 80
BATCH = 6
EVERY = 20


def make_settings(approach: str, world_size: int, repeat: int, **changes: Any) -> RunSettings:
    fields = {
        "model": PRESETS["llama-micro"],
        "global_batch": BATCH,
        "micro_batch": BATCH,
        "layout": LayoutSettings(data=world_size),
        "budget": BudgetSettings(steps=STEPS),
        "schedule": ScheduleSettings(warmup_steps=2),
        "validation": ValidationSettings(rows=4, every=EVERY, accuracy=True),
        "repeat": repeat,
    }
    return make_run(approach, 64, **fields | changes)


#: name → run. `twin` computes what `padded` computes, `two-ranks` what `packed` does.
RUNS = {
    "packed": make_settings("packed", 1, 0),
    "packed-1": make_settings("packed", 1, 1),
    "packed-2": make_settings("packed", 1, 2),
    "two-ranks": make_settings("packed", 2, 0),
    "padded": make_settings("padded", 1, 0),
    "twin": make_settings("pretokenized-padded", 1, 0),
}
#: steps of synthetic experiments of two approaches in three repeats, whose steps take a quiet
#: machine's times
LENGTHS = (24, 200)
SYNTHETIC = {
    (length, name if not repeat else f"{name}-{repeat}"): logs.settings(
        name, 1, repeat, steps=length
    )
    for length in LENGTHS
    for name in ("packed", "padded")
    for repeat in range(3)
}


def train_run(lab: Lab, run: RunSettings, target: Path) -> None:
    inputs = lab.inputs(run)
    manifests = (
        {"validation_store": inputs.validation_store / "manifest.json"}
        if run.validation.rows
        else {}
    )
    if run.store is not None:
        manifests["store"] = inputs.store / "manifest.json"
    prepare_attempt(
        target, run, hash_identity([Path(file) for file in training_code(run)], manifests)
    )
    run_ranks(train_rank, run.layout.world_size, run, inputs, target)


def make_kinds(folder: Path) -> None:
    """`runs` and `runs.json` of one honest run of each kind, trained: budgets, objectives, a
    resumed run, formats.
    """
    lab = make_lab(folder / "lab")
    few = {"budget": BudgetSettings(steps=12)}
    keep = {
        "checkpoints": CheckpointSettings(every=6, keep_resume_state=True),
        "budget": BudgetSettings(steps=6),
    }
    first = make_settings("packed", 1, 0, **keep)
    state = str(folder / "first/checkpoints/step=00000006")
    train_run(lab, first, folder / "first")
    runs = [
        make_settings("padded", 1, 0, budget=BudgetSettings(useful_tokens=2500)),
        make_settings(
            "token-list",
            1,
            0,
            budget=BudgetSettings(wall_s=0.2),
            schedule=ScheduleSettings(warmup_steps=0),
        ),
        make_settings("padding-free", 1, 0, budget=BudgetSettings(epochs=0.5)),
        make_settings("packed", 1, 0, objective="masked", **few),
        make_settings("packed", 1, 0, micro_batch=2, precision="bf16", **few),
        make_settings(
            "packed", 1, 1, precision="bf16-true", optimizer=OptimizerSettings(beta2=0.999), **few
        ),
        make_settings(
            "packed", 1, 2, optimizer=OptimizerSettings(clip_norm=None, fused=False), **few
        ),
        make_settings("packed", 1, 0, resume_from=state),
        make_settings(
            "padded",
            1,
            0,
            resume_from=state.replace("first", "second"),
            budget=BudgetSettings(steps=30),
        ),
    ]
    train_run(lab, make_settings("padded", 1, 0, **keep), folder / "second")
    for run in runs:
        train_run(lab, run, folder / "runs" / run.identity)
    off = few | {"validation": ValidationSettings(rows=0)}
    targets = make_settings("padded", 1, 0, labels="target", eos=True, **off)
    pairs = Pairs(folder / "pairs")
    train_run(pairs, targets, folder / "runs" / targets.identity)
    with ExternalRun(
        folder / "runs/external-0", approach="theirs", steps=9, global_batch=8, sequence_length=64
    ) as run:
        for k in range(9):
            run.step(loss_sum=2.0 * 480 - k, useful_tokens=480, total_tokens=512, rows=8)
        run.validation(loss_sum=100.0, useful_tokens=50, rows=1)
    further = ("objective", "labels", "precision", "micro_batch", "resume_from")
    table = read_json(logs.write_table(folder / "runs.json", [*runs, targets], further=further))
    table["runs"].append({"run_id": "external-0", "external": True, "cell": {}, "repeat": 0})
    del table["seal"]
    write_json(folder / "runs.json", table | {"seal": sha256_text(canonical_json(table))})


def make_lab(folder: Path) -> Lab:
    pick = random.Random(0)
    texts = [" ".join(pick.choices(WORDS, k=pick.choice([2, 5, 9, 14]))) for _ in range(600)]
    return Lab(folder, texts, validation_share=0.1)


def make_bases(folder: Path) -> None:
    """`lab` and, for each base (`trained`, `24`, `200`), `runs` and `runs.json`."""
    lab = make_lab(folder / "lab")
    for run in RUNS.values():
        train_run(lab, run, folder / "trained/runs" / run.identity)
    logs.write_table(folder / "trained/runs.json", list(RUNS.values()))
    for length in LENGTHS:
        runs = [run for (steps, _), run in SYNTHETIC.items() if steps == length]
        for run in runs:
            path = logs.write_run(folder / str(length) / "runs", run)
            Folder(path).retime(lambda k, median, run=run: steady(k + 5 * run.repeat, median))
        logs.write_table(folder / str(length) / "runs.json", runs)


def steady(k: int, median: float) -> float:
    return median * (1 + 0.03 * math.sin(7.3 * k))


class Folder:
    def __init__(self, path: Path):
        self.path = path

    def edit(self, change, kind="steps", rank="*", attempt="*") -> "Folder":
        """Replace every line (a mapping) by what `change` makes of it (None: leave it out), and
        seal again.
        """
        logs.edit(self.path, change, kind, rank, attempt)
        return self.seal()

    def seal(self, **changes) -> "Folder":
        """Seal the record with the hashes of the logs as they are; names with `__` change its
        fields.
        """
        record = self.record
        record["outcome"] |= {"logs": log_hashes(self.path)}
        for name, value in changes.items():
            *parents, last = name.split("__")
            at = record
            for key in parents:
                at = at[key]
            at[last] = value(at.get(last)) if callable(value) else value
        provenance.seal_record(self.path, record, record["outcome"])
        return self

    @property
    def record(self) -> dict:
        return read_json(self.path / "run.json")

    def lines(self, kind="steps", rank="00000") -> list[dict]:
        path = self.path / f"attempt=00/rank={rank}/{kind}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def retime(self, seconds) -> "Folder":
        """Give step k `seconds(k, median)`, with all clocks, phases and events as a training writes
        them.
        """
        steps = self.lines()
        median = float(np.median([line["step_s"] for line in steps]))
        new = [seconds(line["step"], median) for line in steps]
        late = np.cumsum([n - line["step_s"] for n, line in zip(new, steps, strict=True)])

        def change(line):
            k = line["step"]
            ratio = new[k] / line["step_s"]
            scaled = {
                name: ratio * v
                for name, v in line.items()
                if name.endswith("_s") and not name.startswith("t_")
            }
            return (
                line
                | scaled
                | {"t_mono_s": line["t_mono_s"] + late[k], "t_unix_s": line["t_unix_s"] + late[k]}
            )

        ends = [line["t_mono_s"] for line in steps]

        def move(line):
            after = int(np.searchsorted(ends, line["t_mono_s"]))
            shift = late[after - 1] if after else 0.0
            return line | {
                "t_mono_s": line["t_mono_s"] + shift,
                "t_unix_s": line["t_unix_s"] + shift,
            }

        self.edit(move, "events").edit(change)
        outcome = self.record["outcome"]
        ended = (
            {"outcome__ended_unix_s": outcome["ended_unix_s"] + late[-1]}
            if "ended_unix_s" in outcome
            else {}
        )
        return self.seal(**ended)

    def shift(self, seconds: float, clocks=("t_mono_s", "t_unix_s"), **selected) -> "Folder":
        """Move the clocks of steps and events, and where both move those of the record."""
        for kind in ("steps", "events"):
            self.edit(
                lambda line: line | {name: line[name] + seconds for name in clocks},
                kind,
                **selected,
            )
        return self


class Experiment:
    def __init__(self, bases: Path, base: str, target: Path):
        self.base = base
        self.bases = bases
        self.target = target
        shutil.copytree(bases / base, target, dirs_exist_ok=True)

    def run_id(self, name: str) -> str:
        return (RUNS[name] if self.base == "trained" else SYNTHETIC[int(self.base), name]).identity

    def of(self, name: str) -> Folder:
        return Folder(self.target / "runs" / self.run_id(name))

    def table(self, change: Callable[[dict], Any], seal: bool = True) -> None:
        table = read_json(self.target / "runs.json")
        sealed = table.pop("seal")
        change(table)
        table["seal"] = sha256_text(canonical_json(table)) if seal else sealed
        write_json(self.target / "runs.json", table)


Plant = Callable[[Experiment, Any], Any]


@dataclass(frozen=True)
class Fault:
    """`plant(experiment, magnitude)`, at the smallest that is found, in the logs of `run`. `says`
    is a regular expression of what is said, `word` the least that is said: invalid, suspect, or
    caution, which is no word for the run.
    """

    name: str
    plant: Plant
    magnitude: Any
    says: str
    run: str = "packed"
    word: str = "suspect"
    base: str = "trained"


def put(**fields) -> Callable[[dict], dict]:
    """Change a line's fields; a function makes the value from the line."""
    return lambda line: line | {name: v(line) if callable(v) else v for name, v in fields.items()}


def at(k: int, **fields) -> Callable[[dict], dict]:
    """Change fields of step k (of steps that log it, of events after it)."""
    return lambda line: put(**fields)(line) if line.get("step") == k else line


def times(field: str, m: float) -> dict[str, Callable]:
    return {field: lambda line: type(line[field])(m * line[field])}


def plus(field: str, m: float) -> dict[str, Callable]:
    return {field: lambda line: line[field] + m}


def steps(change: Callable[..., Callable], run="packed", kind="steps", **selected) -> Plant:
    return lambda e, m: e.of(run).edit(change(m), kind, **selected)


def events(change: Callable[..., Callable], event="validation", run="packed", **selected) -> Plant:
    def of(m):
        return lambda line: change(m)(line) if line["event"] == event else line

    return steps(of, run, "events", **selected)


def record(run="packed", **fields) -> Plant:
    """Fields of run.json: `m` itself, or a function of (old value, m)."""

    def plant(e, m):
        e.of(run).seal(
            **{n: (lambda old, f=f: f(old, m)) if callable(f) else f for n, f in fields.items()}
        )

    return plant


def all_of(*plants: Plant) -> Plant:
    def plant(e, m):
        for one in plants:
            one(e, m)

    return plant


def scale_losses(e: Experiment, m: float, run="packed", of=("steps", "events"), start=0) -> None:
    def change(line):
        here = line.get("loss_sum") is not None and line.get("step", 0) >= start
        return line | ({"loss_sum": m * line["loss_sum"]} if here else {})

    for kind in of:
        e.of(run).edit(change, kind)


def from_other(
    e: Experiment, run: str, source: str, *fields: str, kind="steps", event: str | None = None
) -> None:
    lines = iter([line for line in e.of(source).lines(kind) if event in (None, line.get("event"))])

    def change(line):
        source = next(lines) if event in (None, line.get("event")) else {}
        return line | {name: value for name, value in source.items() if name in fields}

    e.of(run).edit(change, kind)


def scale_clocks(e: Experiment, m: float, events=True, clocks=True) -> None:
    folder = e.of("packed")
    first = folder.lines("events" if events else "steps")[0]

    def change(line):
        moved = {
            name: first[name] + m * (line[name] - first[name])
            for name in ("t_mono_s", "t_unix_s")
            if clocks
        }
        return (
            line
            | {n: m * v for n, v in line.items() if n.endswith("_s") and not n.startswith("t_")}
            | moved
        )

    if events:
        folder.edit(change, "events")
    folder.edit(change)


def copy_attempt(e: Experiment, m: float) -> None:
    folder = e.of("packed")
    shutil.copytree(folder.path / "attempt=00", folder.path / "attempt=01")
    folder.shift(m, attempt="01")
    folder.seal(attempt=1, started_unix_s=lambda old: old + m)


def copy_rank(e: Experiment, m: float) -> None:
    folder = e.of("two-ranks")
    source = folder.path / "attempt=00/rank=00000/steps.jsonl"
    shutil.copy(source, folder.path / "attempt=00/rank=00001/steps.jsonl")
    folder.edit(at(9, **plus("step_s", m)), rank="00001")


def copy_run(e: Experiment, m: str) -> None:
    """packed-1 logs what packed logged: to the byte, shifted in time, or with nothing but `own_s`
    untouched.
    """
    source = e.of("packed")
    target = e.of("packed-1")
    shutil.copytree(source.path / "attempt=00", target.path / "attempt=00", dirs_exist_ok=True)
    own = {line["step"]: line["own_s"] for line in target.lines()}
    if m == "shifted":
        target.shift(100)
    elif m == "own_s":
        target.retime(lambda k, median: steady(k, 2 * median)).edit(
            put(own_s=lambda line: own[line["step"]])
        )
    target.seal()


def overlap(e: Experiment, m: float, run="packed-1", other="packed") -> None:
    """`run` began m seconds (of a share: times the other's length) before `other` ended."""
    events = e.of(other).lines("events")
    start = events[0]["t_mono_s"]
    end = events[-1]["t_mono_s"]
    folder = e.of(run)
    late = end - (m if m < 1 else (end - start) * 0.9) - folder.lines("events")[0]["t_mono_s"]
    folder.shift(late)
    folder.seal(started_unix_s=lambda old: old + late, outcome__ended_unix_s=lambda old: old + late)


def slow(where: Callable[[int, int], bool], base: int, run: tuple[str, ...] = ("packed",)) -> Plant:
    def plant(e, m):
        for name in run:
            e.of(name).retime(lambda k, median: steady(k, median) * (m if where(k, base) else 1))

    return plant


def course(of: Callable[[float, float], float], length: int) -> Plant:
    return lambda e, m: e.of("packed").retime(
        lambda k, median: steady(k, median) * of(k / length, m)
    )


#: name → (which steps of n; times what they take, in 24 steps and in 200; None: too little to
#: change a rate)
PARTS = {
    "first third": (lambda k, n: k < n // 3, 1.3, 1.3),
    "middle third": (lambda k, n: n // 3 <= k < 2 * n // 3, 1.3, 1.3),
    "last third": (lambda k, n: k >= 2 * n // 3, 1.3, 1.3),
    "every second step": (lambda k, n: k % 2 == 0, 1.3, 1.3),
    "a tenth in the middle": (lambda k, n: n // 2 <= k < n // 2 + max(n // 10, 2), 4.0, 4.0),
    "single step": (lambda k, n: k == 2 * n // 3, 8.0, 100.0),
    "compiling until step 6": (lambda k, n: k < 6, 1.3, None),
}
#: name → (times of a step after the share x of n steps, at m; m in 24 steps and in 200)
COURSES = {
    "growing steps": (lambda x, m: 1 + (m - 1) * x, 1.6, 1.6),
    "shrinking steps": (lambda x, m: 1 / (1 + (m - 1) * x), 1.6, 1.6),
    "still warming up": (lambda x, m: 1 + (m - 1) * math.exp(-4 * x), 4.0, 1.6),
}
STEADY = "stead|slower|faster|kinds of steps|spread|step_s"


def drop_run(e: Experiment, m: str) -> None:
    e.table(
        lambda table: table["runs"].remove(
            next(r for r in table["runs"] if r["run_id"] == e.run_id(m))
        )
    )


def renumber(e: Experiment, m: Any) -> None:
    """Leave out a repeat, and close the hole in numbers and positions."""

    def change(table):
        table["runs"] = [r for r in table["runs"] if r["run_id"] != e.run_id("packed-1")]
        table["repeats"] = 2
        for position, entry in enumerate(table["runs"]):
            entry |= {"position": position, "repeat": min(entry["repeat"], 1)}

    e.table(change)


def swap_repeats(e: Experiment, m: Any) -> None:
    def change(table):
        one, two = (
            next(r for r in table["runs"] if r["run_id"] == e.run_id(n))
            for n in ("packed", "packed-2")
        )
        one["repeat"], two["repeat"] = two["repeat"], one["repeat"]

    e.table(change)


def in_table(change: Callable[[list, Any], Any]) -> Plant:
    return lambda e, m: e.table(lambda table: change(table["runs"], m))


X = "invalid"
LOSS = "loss"

TABLE = [
    # ---- settings and store know
    Fault(
        "learning rate of one rank",
        steps(lambda m: put(**times("learning_rate", m)), "two-ranks", rank="00001"),
        1.00001,
        "learning.rate",
        "two-ranks",
        X,
    ),
    Fault(
        "learning rates of another budget before its start",
        record(earlier_schedule=lambda old, m: m),
        {"schedule.floor": 0.5},
        "other settings",
        word="caution",
    ),
    Fault(
        "norms not clipped",
        steps(lambda m: put(grad_norm=m, grad_norm_clipped=m)),
        1.001,
        "clip",
        word=X,
    ),
    Fault(
        "gradient norm zero, one step",
        steps(lambda m: at(40, grad_norm=0.0, grad_norm_clipped=0.0)),
        1,
        "norm",
    ),
    Fault(
        "gradient norm negative",
        steps(lambda m: at(40, grad_norm=-m, grad_norm_clipped=-m)),
        1e-6,
        "norm",
        word=X,
    ),
    Fault("gradient norm missing", steps(lambda m: put(grad_norm=None)), 1, "norm"),
    Fault(
        "correct above useful tokens",
        events(lambda m: at(40, correct_tokens=lambda line: line["useful_tokens"] + m)),
        1,
        "correct",
        word=X,
    ),
    Fault(
        "correct tokens negative", events(lambda m: at(40, correct_tokens=-m)), 1, "correct", word=X
    ),
    Fault(
        "useful above total tokens, one step",
        steps(lambda m: at(40, useful_tokens=lambda line: line["total_tokens"] + m)),
        1,
        "useful",
        word=X,
    ),
    Fault(
        "useful tokens of both twins",
        all_of(
            steps(lambda m: put(**times("useful_tokens", m)), "padded"),
            steps(lambda m: put(**times("useful_tokens", m)), "twin"),
        ),
        1.02,
        "useful|store",
        "twin",
        X,
    ),
    Fault(
        "memory peak below the weights",
        steps(lambda m: put(memory_peak_bytes=m)),
        170_000,
        "memory",
        word="suspect",
    ),
    Fault(
        "memory peak falls", steps(lambda m: at(40, **times("memory_peak_bytes", m))), 0.9, "memory"
    ),
    Fault(
        "bytes sent alone", events(lambda m: put(sent_bytes=m), "memory"), 100, "sent_bytes", word=X
    ),
    Fault(
        "bytes sent by two ranks",
        events(lambda m: put(**times("sent_bytes", m)), "memory", run="two-ranks"),
        1.01,
        "sent_bytes",
        "two-ranks",
        X,
    ),
    Fault("all steps skipped", steps(lambda m: put(skipped=True)), 1, "skipped", word=X),
    Fault("loss scale in fp32", steps(lambda m: put(loss_scale=m)), 1.0, "loss.scale"),
    Fault("loss missing, one step", steps(lambda m: at(40, loss_sum=None)), 1, LOSS, word=X),
    Fault(
        "loss that no guess needs",
        events(lambda m: at(0, loss_sum=lambda line: m * math.log(300) * line["useful_tokens"])),
        1.2,
        "loss|validation before",
    ),
    Fault(
        "begins at a step", record(outcome__begins_at=lambda old, m: m), 1, "begins", word="suspect"
    ),
    Fault(
        "useful tokens before its start",
        record(outcome__begins_at_useful_tokens=lambda old, m: m),
        1,
        "begins",
    ),
    Fault("cores", record(hardware__cores=lambda old, m: m), 1.5, "cores", word=X),
    Fault(
        "another run's record",
        record(run_id=lambda old, m: m),
        "packed-other",
        "of the run packed-o",
        word=X,
    ),
    Fault(
        "settings of the record",
        lambda e, m: e.of("packed").seal(run=lambda old: old | m),
        {"optimizer": {"learning_rate": 0.1}},
        "settings|run table|identity|run_id",
    ),
    Fault(
        "compiled, although not asked for",
        record(
            compilation=lambda old, m: {
                "graphs": 2,
                "blocks": m,
                "eager_blocks": 0,
                "graph_breaks": 0,
                "recompiles": 0,
            }
        ),
        2,
        "compil",
        word=X,
    ),
    Fault(
        "energy on a machine that counts none",
        record(outcome__energy_j=lambda old, m: m),
        1e9,
        "energy",
    ),
    Fault("energy of the run's stop", events(lambda m: put(energy_j=m), "run_stop"), 1e9, "energy"),
    Fault(
        "validation that was not asked for",
        events(lambda m: at(40, **plus("step", m))),
        1,
        "validat",
    ),
    Fault(
        "text that the tokenizer loses",
        record(text_lost=lambda old, m: m),
        -0.1,
        "lose|lost|text",
        word="caution",
    ),
    Fault(
        "a step missing",
        steps(lambda m: lambda line: None if line["step"] == m else line),
        0,
        "step",
        word=X,
    ),
    Fault(
        "a step logged twice",
        steps(lambda m: at(m, step=lambda line: line["step"] - 1)),
        79,
        "step",
        word=X,
    ),
    Fault("all times scaled", scale_clocks, 2e-5, "more than 2 cores can do", word=X),
    Fault(
        "wait longer than its step",
        steps(lambda m: at(9, data_wait_s=lambda line: line["step_s"] + m)),
        2e-5,
        "wait",
        word=X,
    ),
    Fault(
        "phase longer than its step",
        steps(lambda m: at(9, backward_s=lambda line: line["step_s"] + m)),
        2e-5,
        "phases",
        word=X,
    ),
    Fault(
        "wall clock of a log ahead",
        lambda e, m: e.of("packed").shift(m, ["t_unix_s"]),
        65.0,
        "run.json",
    ),
    Fault(
        "log changed after sealing",
        lambda e, m: (
            (e.of("packed").path / "attempt=00/rank=00000/steps.jsonl").open("ab").write(m)
        ),
        b"\n",
        "logs differ",
        word=X,
    ),
    Fault("attempt copied", copy_attempt, 100.0, "copy", word=X),
    Fault("rank copied", copy_rank, 1e-9, "copy", "two-ranks", X),
    # ---- predicts nothing
    Fault(
        "no label in any step",
        steps(lambda m: put(useful_tokens=0, loss_sum=0.0)),
        1,
        "useful|label|predict",
        word=X,
    ),
    Fault(
        "no label in some steps",
        steps(
            lambda m: (
                lambda line: (
                    line | ({"useful_tokens": 0, "loss_sum": 0.0} if line["step"] % m == 1 else {})
                )
            )
        ),
        40,
        "useful|label|predict",
        word="caution",
    ),
    Fault("losses of zero", steps(lambda m: put(loss_sum=0.0)), 1, LOSS, word="caution"),
    Fault(
        "no label held out",
        events(lambda m: put(useful_tokens=0, correct_tokens=0, loss_sum=0.0)),
        1,
        "useful|label|predict|validat",
        word="suspect",
    ),
    # ---- other runs know
    Fault(
        "validation before the first step",
        events(
            lambda m: at(0, loss_sum=lambda line: line["loss_sum"] + m * line["useful_tokens"]),
            run="padded",
        ),
        1e-5,
        "validat|before",
        "padded",
    ),
    Fault(
        "digest of a step",
        steps(
            lambda m: at(40, order_digest=lambda line: (line["order_digest"] + m) % 2**52),
            "two-ranks",
            rank="00000",
        ),
        1,
        "digest|order|data",
        "two-ranks",
        "caution",
    ),
    Fault(
        "validations in other units",
        lambda e, m: scale_losses(e, m, of=["events"]),
        1 / math.log(10),
        "loss|validation before",
    ),
    Fault(
        "losses of steps in other units",
        lambda e, m: scale_losses(e, m, of=["steps"]),
        1 / math.log(10),
        LOSS,
    ),
    Fault(
        "last validation lower than any",
        lambda e, m: scale_losses(e, m, of=["events"], start=STEPS),
        0.9,
        LOSS,
    ),
    Fault(
        "losses of steps lower than any",
        lambda e, m: scale_losses(e, m, of=["steps"], start=60),
        0.95,
        LOSS,
        word="caution",
    ),
    Fault(
        "diverged in one repeat",
        lambda e, m: scale_losses(e, m, "packed-1", start=40),
        1.2,
        "loss|diverg",
        "packed-1",
    ),
    Fault(
        "a validation logged twice",
        lambda e, m: e.of("packed").edit(
            lambda line: (
                line
                | (
                    {
                        "loss_sum": next(
                            v["loss_sum"]
                            for v in e.of("packed").lines("events")
                            if v.get("step") == 40 - m and v["event"] == "validation"
                        )
                    }
                    if line["event"] == "validation" and line["step"] == 40
                    else {}
                )
            ),
            "events",
        ),
        20,
        "validat|loss",
        word=X,
    ),
    Fault(
        "validations are those of training",
        lambda e, m: e.of("packed").edit(
            lambda line: (
                line
                | (
                    {
                        "loss_sum": line["useful_tokens"]
                        * e.of("packed").lines()[line["step"] - 1]["loss_sum"]
                        / e.of("packed").lines()[line["step"] - 1]["useful_tokens"]
                    }
                    if line["event"] == "validation" and line["step"]
                    else {}
                )
            ),
            "events",
        ),
        1,
        "validat|loss",
    ),
    Fault(
        "validations of another repeat",
        lambda e, m: from_other(
            e, "packed-1", "packed", "loss_sum", kind="events", event="validation"
        ),
        1,
        "validat|loss|copy",
        "packed-1",
        word=X,
    ),
    Fault(
        "losses of another repeat",
        lambda e, m: from_other(e, "packed-1", "packed", "loss_sum"),
        1,
        "loss|copy",
        "packed-1",
    ),
    Fault(
        "norms of another repeat",
        lambda e, m: from_other(e, "packed-1", "packed", "grad_norm", "grad_norm_clipped"),
        1,
        "norm|copy",
        "packed-1",
        word=X,
    ),
    Fault(
        "times of another repeat",
        lambda e, m: (
            (times_of := {line["step"]: line["step_s"] for line in e.of("packed").lines()})
            and e.of("packed-1").retime(lambda k, _: times_of[k])
        ),
        1,
        "copy|step_s",
        "packed-1",
    ),
    Fault(
        "useful tokens of an arm, one step",
        steps(lambda m: at(7, **plus("useful_tokens", m)), "padded"),
        1,
        "useful",
        "padded",
        X,
    ),
    Fault(
        "losses of a twin",
        lambda e, m: scale_losses(e, m, "twin", of=["steps"], start=40),
        1.01,
        "loss|data|batches",
        "twin",
        "caution",
    ),
    Fault(
        "losses of two ranks",
        lambda e, m: scale_losses(e, m, "two-ranks", of=["steps"], start=20),
        1.1,
        "loss|data",
        "two-ranks",
        "caution",
    ),
    Fault("run copied", copy_run, "own_s", "copy", "packed-1", X),
    Fault("the original of a copy", copy_run, "bytes", "copy", "packed", X),
    Fault(
        "held-out slice",
        events(lambda m: put(**times("useful_tokens", m)), run="padded"),
        0.99,
        "validat",
        "padded",
        "caution",
    ),
    Fault(
        "one source file",
        record("padded", code=lambda old, m: old | {m: "f" * 64}),
        "train/loop.py",
        "train/loop.py",
        "padded",
        "caution",
    ),
    # ---- the machine knows
    Fault("overlaps another run", overlap, 0.01, "overlap|at one time|same time", "packed-1"),
    Fault(
        "overlaps another approach's",
        lambda e, m: overlap(e, m, "padded", "packed"),
        0.1,
        "overlap|at one time|same time",
        "padded",
    ),
    Fault(
        "another boot",
        events(lambda m: put(boot=m), "run_start", "packed-1"),
        "another",
        "boot",
        "packed-1",
        "caution",
    ),
    Fault(
        "allocator",
        record("padded", environment=lambda old, m: old | {"MALLOC_ARENA_MAX": m}),
        "1",
        "MALLOC",
        "padded",
        "caution",
    ),
    Fault(
        "thread variable",
        record("padded", environment=lambda old, m: old | {"OMP_NUM_THREADS": m}),
        "2",
        "OMP_NUM_THREADS|thread",
        "padded",
        "caution",
    ),
    Fault(
        "version of torch",
        record("padded", versions=lambda old, m: old | {"torch": m}),
        "2.12.0",
        "torch",
        "padded",
        "caution",
    ),
    Fault(
        "wall clock of a rank ahead",
        lambda e, m: e.of("two-ranks").shift(m, ["t_unix_s"], rank="00001"),
        65.0,
        "wall clock",
        "two-ranks",
    ),
    # ---- the plan knows
    Fault(
        "a repeat that the table does not list",
        drop_run,
        "packed-2",
        "list|repeat|position",
        "packed-2",
        "caution",
    ),
    Fault(
        "an approach that the table does not list",
        drop_run,
        "padded",
        "list|repeat|position",
        "padded",
        "caution",
    ),
    Fault(
        "a repeat left out and the rest renumbered",
        renumber,
        1,
        "list|repeat|position|table",
        "packed-2",
        "caution",
    ),
    Fault("repeats swapped", swap_repeats, 1, "repeat|table", "packed", "caution"),
    Fault(
        "positions swapped",
        in_table(lambda runs, m: [r.update(position=len(runs) - 1 - r["position"]) for r in runs]),
        1,
        "position|order|table",
        "packed",
        "caution",
    ),
    Fault(
        "settings of the table",
        in_table(lambda runs, m: runs[0]["run"].update(m)),
        {"optimizer": {"learning_rate": 0.1}},
        "settings|table",
        "packed",
        "caution",
    ),
    Fault(
        "a cell of the table",
        in_table(lambda runs, m: runs[4]["cell"].update(approach=m)),
        "token-list",
        "cell|table|approach",
        "padded",
        "caution",
    ),
    Fault(
        "a note of the table, not sealed again",
        lambda e, m: e.table(lambda table: table.update(note=m), seal=False),
        "Faster.",
        "table|seal",
        word="caution",
    ),
    # ---- steadiness: one run of six; and all runs of one approach
    *(
        Fault(f"slow in {part}, {length} steps", slow(where, length), m, STEADY, base=str(length))
        for part, (where, *least) in PARTS.items()
        for length, m in zip(LENGTHS, least, strict=True)
        if m
    ),
    Fault(
        "slow in first third, all packed runs",
        slow(PARTS["first third"][0], 24, ("packed", "packed-1", "packed-2")),
        1.3,
        STEADY,
        base="24",
    ),
    *(
        Fault(f"{name}, {length} steps", course(of, length), m, STEADY, base=str(length))
        for name, (of, *least) in COURSES.items()
        for length, m in zip(LENGTHS, least, strict=True)
    ),
]
