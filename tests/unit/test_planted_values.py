"""Faults in values, planted in logs (`tests/planted_faults.py`): each is named at its smallest
magnitude.
"""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pandas as pd
import pytest

from tests import logs, plants
from tests.logs import tabulate
from tests.once import once
from tests.planted_faults import (
    LENGTHS,
    RUNS,
    SYNTHETIC,
    TABLE,
    Experiment,
    Fault,
    make_bases,
    make_kinds,
)
from tokenscale.analysis.runs import run_row
from tokenscale.analysis.tables import TABLES
from tokenscale.base.errors import UserError
from tokenscale.base.files import write_json, write_sealed
from tokenscale.referee.expectations import ONE_SOURCE
from tokenscale.report import summary
from tokenscale.report.answers import find_cautions
from tokenscale.report.campaign_quality import inventory_table
from tokenscale.report.packed_logs import restore
from tokenscale.settings.layout import DEGREES, LayoutSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import ScheduleSettings

pytestmark = pytest.mark.slow(60)

#: of the base with the most steps, whose faults are those of the other base at another length
LONGER = str(LENGTHS[-1])
#: faults whose witness another fault has, or a generated plant, and these other fields by
#: `test_a_field_with_a_second_witness_is_named_when_it_is_changed_much`
REPEATED = {
    *("allocator", "thread variable", "version of torch", "wait longer than its step"),
    *("losses of a twin", "losses of two ranks", "losses of steps in other units"),
    *("times of another repeat", "losses of another repeat", "validations of another repeat"),
    *("bytes sent alone", "no label in some steps", "repeats swapped"),
    *("slow in middle third, 24 steps", "slow in last third, 24 steps"),
    *("slow in compiling until step 6, 24 steps", "growing steps, 24 steps"),
    "shrinking steps, 24 steps",
}
STRENGTH = ("silent", "caution", "suspect", "invalid", "refused")


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Path:
    return once(tmp_path_factory, "planted-values", make_bases)


def read(experiment: Experiment) -> pd.DataFrame:
    """The table `runs` of an experiment's logs, by run."""
    tables = experiment.target / "tables/planted"
    stores = (
        sorted((experiment.bases / "lab/tokens").glob("*/manifest.json"))
        if experiment.base == "trained"
        else []
    )
    tabulate(experiment.target / "runs.json", experiment.target / "runs", tables, stores=stores)
    return logs.read_runs(tables).to_pandas().set_index("run_id")


def statements(experiment: Experiment) -> list[str]:
    """What the page says beside the runs' own reasons, after `read`."""
    part = summary.experiment("planted", experiment.target / "tables")
    found = [
        *summary.list_cautions(part),
        part["text"],
        part["campaign"],
        part["comparisons"].caption,
    ]
    found += [part["design"].caption, *part["machines"]]
    found += [proof["text"] for proof in part["proof"]["parts"] if proof["state"] != "proven"]
    return [text for text in found if text]


@lru_cache
def honest(bases: Path, base: str) -> tuple[dict[str, str], list[str]]:
    """(run → its reasons, statements) of a base as it is."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(bases, base, Path(folder))
        runs = read(experiment)
        return dict(runs["reasons"]), statements(experiment)


def said(bases: Path, fault: Fault) -> Iterator[tuple[str, str]]:
    """(word of `STRENGTH`, sentence) that the fault's words are found in and nobody says of honest
    runs.
    """
    reasons, sentences = honest(bases, fault.base)
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(bases, fault.base, Path(folder))
        fault.plant(experiment, fault.magnitude)
        try:
            runs = read(experiment)
        except UserError as error:
            yield "refused", " ".join(str(error).split())
            return
        for run in runs[runs.index == experiment.run_id(fault.run)].itertuples():
            for reason in run.reasons.split("; "):
                if (
                    reason
                    and reason not in reasons[run.Index]
                    and re.search(fault.says, reason, re.IGNORECASE)
                ):
                    yield run.validity, reason
        for sentence in statements(experiment):
            if sentence not in sentences and re.search(fault.says, sentence, re.IGNORECASE):
                yield "caution", sentence


def test_honest_runs_of_each_kind_raise_nothing(tmp_path_factory, tmp_path):
    folder = once(tmp_path_factory, "honest-kinds", make_kinds)
    stores = sorted((folder / "lab/tokens").glob("*/manifest.json"))
    tabulate(folder / "runs.json", folder / "runs", tmp_path, stores=stores)
    runs = logs.read_runs(tmp_path).to_pandas()
    assert set(runs["status"]) == {"complete"}
    assert not [text for text in runs["reasons"] if text and not STATED.search(text)]
    cautions = "; ".join(runs["cautions"])
    assert (
        cautions.count("steps before 6 had the learning rates of other settings (budget.steps 6)")
        == 2
    )
    checked = runs[runs["precision"] == "fp32"]["unchecked"]
    # of the clock
    assert not checked.str.contains("learning_rate of each step").sum() > 1, checked.tolist()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault,
            id=fault.name,
            marks=pytest.mark.long if fault.base == LONGER or fault.name in REPEATED else (),
        )
        for fault in TABLE
    ],
)
def test_a_fault_is_named_at_its_smallest_magnitude(bases, fault):
    word, sentence = next(said(bases, fault), ("silent", ""))
    assert STRENGTH.index(word) >= STRENGTH.index(fault.word), (word, sentence)


#: (target, change, magnitude) of generated plants → the expectation that names the run; see
#: `tests/plants.py`, which plants them all
GENERATED = {
    ("checkpoint", "hide", 0.03): "events and their steps",
    ("translation", "hide", 0.03): "events and their steps",
    ("validation", "double", 1.0): "events and their steps",
    ("init_done", "drop", 1.0): "events and their steps",
    ("steps own_s", "scale", 10.0): "seconds of each rank between its start and its stop",
    ("steps forward_s", "divide", 2.0): "seconds of each rank between its start and its stop",
    ("steps backward_s", "unit", 1e-3): "seconds of each rank between its start and its stop",
    ("steps loss_sum", "scale", 1.1): "loss of training step 0",
    ("steps loss_sum", "copy", 1e-9): "timings, norms and losses of steps",
    ("times of steps", "copy", 1e-9): "timings, norms and losses of steps",
    ("validation loss_sum", "copy", 1e-6): "timings, norms and losses of steps",
    ("validation loss_sum", "one value", 2.0): "loss of a validation",
    ("validation loss_sum", "one value less", 1.3): "loss of a validation",
    ("steps learning_rate", "copy", 1e-9): "learning_rate of each step",
    ("both norms", "freeze", 1.0): "loss, gradient norm and time of a step",
    ("times of steps", "one value less", 10.0): "loss, gradient norm and time of a step",
    ("memory activations_bytes", "scale", 1.03): "activations_bytes beside other runs",
    ("memory activations_bytes", "scale", 1.1): "activations_bytes",
    ("memory activations_bytes", "divide", 1.3): "activations_bytes",
    ("all times", "divide", 10.0): "cpu_s",
}


@pytest.fixture(scope="module")
def campaign(bases, tmp_path_factory) -> plants.Campaign:
    experiment = Experiment(bases, "trained", tmp_path_factory.mktemp("planted"))
    read(experiment)
    # a value that stands out on a busy machine does so in its copy, too
    return plants.Campaign(experiment.target, "planted", asks_all=True)


@pytest.mark.parametrize("plant", GENERATED, ids=lambda plant: "{} {} {}".format(*plant))
def test_a_generated_plant_is_named_by_its_witness(campaign, plant):
    name, change, magnitude = plant
    run, donor = (RUNS[other].identity for other in ("packed-2", "packed-1"))
    log = plants.Log.of(campaign.entries[run], campaign.contents[run])
    (target, found), *_ = (
        (target, found)
        for target in plants.list_targets(log)
        for found in target.changes
        if (target.name, found.name) == (name, change)
    )
    result, by = plants.judge_plant(campaign, target, found, magnitude, [run], {run: donor})
    assert result == "seen" and GENERATED[plant] in by, by


def test_a_field_with_a_second_witness_is_named_when_it_is_changed_much(campaign, monkeypatch):
    """Each field by its first change at the largest magnitude: a factor of 10, or another text.
    Runs are compared where none is named by itself.
    """
    monkeypatch.setattr(campaign, "asks_all", False)
    run, donor = (RUNS[other].identity for other in ("packed-2", "packed-1"))
    log = plants.Log.of(campaign.entries[run], campaign.contents[run])
    silent = []
    for target in plants.list_targets(log):
        change = target.changes[0]
        magnitude = change.magnitudes[0]
        found = plants.judge_plant(campaign, target, change, magnitude, [run], {run: donor})
        if found is not None and found[0] in ("silent", "elsewhere"):
            silent.append(target.name)
    # a variable of communication counts where there is any
    known = {*ONE_SOURCE, "run.json environment.GLOO_SOCKET_IFNAME"}
    assert set(silent) <= known


@pytest.mark.parametrize("of", [of for of in ONE_SOURCE.values() if of.column], ids=str)
def test_the_page_names_a_number_of_one_source_where_runs_have_it(of):
    runs, *_ = make_campaign()
    none = pd.DataFrame({"accuracy": [None, None]})
    without = runs.assign(**{name: None for _, name, _ in ONE_SOURCE.values() if name in runs})
    assert "One source" not in inventory_table(without, validation=none).caption
    if of.column in runs:
        caption = inventory_table(without.assign(**{of.column: 0.0}), validation=none).caption
    else:
        caption = inventory_table(without, none.assign(**{of.column: 0.5})).caption
    assert f"One source, which no second one could contradict: {of.quantity} ({of.why})." in caption


def test_a_loss_that_differs_from_that_of_the_same_samples_is_named(campaign):
    run = RUNS["two-ranks"].identity
    log = plants.Log.of(campaign.entries[run], campaign.contents[run])
    targets = {target.name: target for target in plants.list_targets(log)}
    result, by = plants.judge_plant(
        campaign, targets["steps loss_sum"], plants.SCALING[0], 1.002, [run], {run: run}
    )
    assert result == "seen" and by == ("loss and gradient norm of a step",)


def test_runs_at_once_on_other_nodes_or_in_a_shared_job_do_not_overlap(bases, tmp_path):
    experiment = Experiment(bases, "24", tmp_path)
    folder = experiment.of("packed-1")
    first = folder.lines("events")[0]
    end = experiment.of("packed").lines("events")[-1]["t_mono_s"]
    folder.shift(end - 0.5 - first["t_mono_s"])

    def start_in(boot):
        folder.edit(
            lambda line: line | ({"boot": boot} if line["event"] == "run_start" else {}), "events"
        )

    start_in("another boot")
    runs = read(experiment)
    assert (
        set(runs["validity"]) == {"valid"}
        and "other boot" in runs.loc[experiment.run_id("packed-1"), "cautions"]
    )
    start_in(first["boot"])
    assert read(experiment)["reasons"].str.contains("overlaps").any()
    for run in (experiment.target / "runs").iterdir():
        write_sealed(run / "attempt=00/attempt.json", {"launch": {"share": 4}})
    assert not read(experiment)["reasons"].str.contains("overlaps").any()


def test_runs_that_another_experiment_lists_are_not_missed_and_a_table_without_a_seal_is_a_caution(
    bases, tmp_path
):
    experiment = Experiment(bases, "24", tmp_path)
    runs = [run for (length, _), run in SYNTHETIC.items() if length == 24]
    logs.write_table(tmp_path / "experiments/all/runs.json", runs)
    fewer = logs.write_table(
        tmp_path / "experiments/few/runs.json", [run for run in runs if run.repeat < 2]
    )
    tabulate(fewer, experiment.target / "runs", tmp_path / "tables")
    assert set(logs.read_runs(tmp_path / "tables").to_pandas()["cautions"]) == {""}
    write_json(fewer, logs.unsealed(fewer))
    tabulate(fewer, experiment.target / "runs", tmp_path / "tables")
    assert (
        logs.read_runs(tmp_path / "tables")
        .to_pandas()["cautions"]
        .str.contains("has no seal")
        .all()
    )


#: what may be true of an honest run on a busy or shared machine
STATED = re.compile("no steady state|overlaps|cores")
#: layouts of two and four ranks
LAYOUTS = (
    {"data": 2},
    {"shard": 2},
    {"tensor": 2},
    {"pipeline": 2},
    {"data": 2, "shard": 2},
    {"data": 2, "tensor": 2},
)


def make_honest(folder: Path) -> None:
    """`runs` and `runs.json` of approaches, world sizes and repeats, resumed runs, layouts,
    precisions, objectives.
    """
    runs = [logs.settings(a, w, r) for r in range(3) for a in logs.APPROACHES for w in (1, 2)]
    runs += [logs.settings(repeat=3 + r) for r in range(3)]  # resumed below
    base = logs.settings(model=PRESETS["llama-small"])
    runs += [replace(base, layout=LayoutSettings(**layout), micro_batch=4) for layout in LAYOUTS]
    runs += [replace(base, precision="bf16", repeat=r) for r in range(3)]
    runs += [replace(base, schedule=ScheduleSettings(shape=s)) for s in ("linear", "constant")]
    hardware = logs.HARDWARE | {"cores": 8}
    for run in runs:
        resumed = [{"stop": 6, "stopped": False}, {"start": 4}] if run.repeat > 2 else None
        logs.write_run(folder / "runs", run, hardware=hardware, attempts=resumed)
    further = (
        *(f"layout.{degree}" for degree in DEGREES),
        "micro_batch",
        "model.name",
        "precision",
        "schedule.shape",
    )
    logs.write_table(folder / "runs.json", runs, further=further)


def honest_runs(bases: Path, folder: Path) -> pd.DataFrame:
    """The tables `runs` of honest logs: the bases', synthetic ones, and those of the evidence."""
    found = [
        read(Experiment(bases, base, folder / base)).reset_index()
        for base in ("trained", *map(str, LENGTHS))
    ]
    make_honest(folder / "synthetic")
    tabulate(folder / "synthetic/runs.json", folder / "synthetic/runs", folder / "synthetic/tables")
    found.append(logs.read_runs(folder / "synthetic/tables").to_pandas())
    for archive in sorted(Path("evidence").glob("*/logs.json.xz")):
        restored = folder / archive.parent.name
        found += [
            logs.read_runs(restored / f"tables/{name}").to_pandas()
            for name in restore(archive, restored)
        ]
    return pd.concat(found)


def test_honest_logs_raise_nothing(bases, tmp_path):
    runs = honest_runs(bases, tmp_path)
    said = {
        (run.run_id, reason)
        for run in runs[~runs["external"].astype(bool)].itertuples()
        for reason in run.reasons.split("; ")
        if reason and run.validity != "missing" and not STATED.search(reason)
    }
    assert len(runs) >= 100 and not said


def make_campaign(load=1.0, drift=1.0, spread=1.0, efficiency=0.9):
    """Rows of inventory, throughput and scaling of one approach on one and two ranks, six repeats
    each.
    """
    machine = {
        "device_kind": "cpu",
        "load_average": load,
        "cores": 2,
        "threads_per_rank": 1,
        "external": False,
    }
    rows = []
    for position in range(12):
        world = 1 + position % 2
        repeat = position // 2
        rate = (
            1000.0
            * (1 if world == 1 else 2 * efficiency)
            * drift**position
            * (spread if repeat == 2 else 1)
        )
        shown = {
            "run_id": f"packed-{world}-{repeat}",
            "series": "packed",
            "world_size": world,
            "base_world_size": 1,
        }
        shown |= {"useful_tokens_per_s": rate * (1 + 0.001 * (position * 7 % 5))}
        shown |= {"started_unix_s": 1.7e9 + 60 * position}
        rows.append(machine | shown | {"efficiency": efficiency if world > 1 else 1.0})
    frame = pd.DataFrame(rows)
    runs = frame.reindex(columns=list(TABLES["runs"])).assign(
        validity="valid", reasons="", cautions="", unchecked=""
    )
    return runs, frame[["run_id", "series", "world_size", "useful_tokens_per_s"]], frame


@pytest.mark.parametrize(
    ("disturbance", "words"),
    [
        ({"load": 3.2}, "load average was 3.2"),
        ({"drift": 0.99}, "Throughput drifted by −11 %"),
        ({"spread": 0.75}, "Repeats of 2 of 2 cells differ"),
        ({"efficiency": 1.06}, "Scaling efficiency is above 100 %"),
    ],
)
def test_a_disturbed_campaign_is_cautioned_about(disturbance, words):
    assert any(words in text for text in find_cautions(*make_campaign(**disturbance))), words
    assert find_cautions(*make_campaign()) == [], "a quiet one has none"


def test_held_out_texts_that_are_trained_on_are_a_caution():
    stores = pd.DataFrame(
        [
            ("web", 3, True),
            ("web", 3, True),
            ("own", 1200, False),
            ("clean", 0, True),
            ("elsewhere", None, None),
        ],
        columns=["corpus", "held_out_in_training", "held_out_dropped"],
    )
    own, web = find_cautions(*make_campaign(), stores=stores)
    assert "own: 1,200 " in own and "too low" in own and "web: 3 " in web and "were dropped" in web


def test_invalid_runs_and_open_verdicts_are_cautions():
    runs, throughput, scaling = make_campaign()
    runs.loc[3, ["validity", "reasons"]] = ["invalid", "a step that took no time; negative rows"]
    invalid, open_ = find_cautions(runs, throughput, scaling, verdicts=["too few runs", "faster"])
    assert (
        invalid == "1 invalid of 12 runs: a step that took no time (packed-2-1)."
        and "1 of 2" in open_
    )
    runs.loc[runs.index[-5:], "validity"] = "missing"
    assert "5 missing of 12 runs." in find_cautions(runs, throughput, scaling)


def test_blocks_that_ran_eagerly_although_compile_was_requested_are_a_caution():
    runs, throughput, scaling = make_campaign()
    counts = {"graphs": 9, "recompiles": 7, "graph_breaks": 1, "blocks": 32, "eager_blocks": 0}
    compiled = (counts, counts | {"eager_blocks": 24}, None)
    rows = [run_row({"run_id": "r"}, "e", {"compilation": compiled[n % 3]}) for n in range(12)]
    for column in ("blocks", "eager_blocks", "graph_breaks"):
        runs[column] = [row[column] for row in rows]
    (caution,) = find_cautions(runs, throughput, scaling)
    assert "eagerly in 4 of 8 runs" in caution and "24 of 32 blocks" in caution
    assert find_cautions(runs.assign(eager_blocks=0), throughput, scaling) == []
