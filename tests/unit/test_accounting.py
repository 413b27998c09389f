"""Every second and event of a log has one owner: each allowance, from both sides of its limit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests import logs, plants
from tokenscale.analysis import ingest, tables
from tokenscale.analysis.recount import Counts, Recount
from tokenscale.analysis.run_folder import InputsAtHand, read_contents
from tokenscale.analysis.run_record import read_run_record
from tokenscale.referee import accounting, validity
from tokenscale.referee.accounting import (
    EXACT_S,
    FEWEST_STEPS,
    LEFT_AT_ENDS,
    LEFT_BETWEEN,
    LEFT_IN_A_STEP,
    LEFT_IN_ALL,
    LEFT_IN_STEPS,
    LEFT_TO_OTHERS,
    LOOSE_S,
    LOOSE_SHARE,
    MOST_OTHERS,
)
from tokenscale.referee.clocks import CLOCK_S
from tokenscale.referee.expectations import NotCheckedError
from tokenscale.settings.data import CorpusSettings
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.mixture import MixtureSettings, MixtureSource, MixtureStage
from tokenscale.settings.options import to_dict
from tokenscale.settings.run import BudgetSettings, CheckpointSettings, ValidationSettings

STEPS = 24
#: step of the validation between two steps, and its seconds
MIDDLE = 12
TOOK_S = 0.2
#: seconds of a step
STEP_S = logs.SHAPES["packed"][0]
#: the steps whose bookkeeping is known, which are judged for what is left over
INSIDE = STEPS - 2

FINDS = (
    "_find_unplanned_events",
    "_find_other_pairs",
    "_find_unplanned_phases",
    "_find_unaccounted_seconds",
)


def list_sentences(log: plants.Log, external: bool = False) -> list[str]:
    """Return what the accounting says of a log; `external`: as of another program's."""
    contents = log.build()
    row = ingest.record_run(log.entry, "accounting", contents=contents) | {"external": external}
    evidence = validity._build_evidence(row, log.entry, contents)
    found = []
    for name in FINDS:
        try:
            found += list(getattr(accounting, name)(evidence))
        except NotCheckedError as reason:
            found.append(f"not checked: {reason}")
    return found


def make_log(
    folder: Path, hardware: dict | None = None, attempts: list[dict] | None = None, **fields
) -> plants.Log:
    """Return the log of a run of quiet times, each second of which has one owner."""
    validation = ValidationSettings(every=MIDDLE)
    run = replace(logs.settings("packed", steps=STEPS, validation=validation), **fields)
    path = logs.write_run(folder, run, hardware=logs.HARDWARE | (hardware or {}), attempts=attempts)
    entry = {"run_id": run.identity, "cell": {}, "repeat": 0, "position": 0}
    entry["run"] = to_dict(run)
    found = read_run_record(path / "run.json")
    log = plants.Log.of(entry, read_contents(path, found, InputsAtHand({}, project=folder)))
    filled = sum(log.steps.get(name, np.zeros(1)) for name in (*accounting.PHASES, "data_wait_s"))
    log.steps["own_s"] = log.steps["step_s"] - filled
    if validation.every and fields.get("validation", validation) == validation and not attempts:
        insert(log, "validation", MIDDLE, TOOK_S)
    return log


def insert(log: plants.Log, event: str, step: int, seconds: float, **fields) -> None:
    """Let an event take its seconds before a step, on rank 0; all ranks wait for it."""
    delay(log, step, seconds)
    first = next(e for e in log.events if e["event"] == "validation" and e["rank"] == 0)
    at = log.steps["step"].tolist().index(step)
    end = log.steps["t_mono_s"][at] - log.steps["step_s"][at]
    ahead = first["t_unix_s"] - first["t_mono_s"]
    clock = {"t_mono_s": end, "t_unix_s": ahead + end, "duration_s": seconds, "step": step}
    log.events.append(first | {"event": event} | clock | fields)


def delay(log: plants.Log, step: int, seconds: float) -> None:
    """Let steps from one on, and the events behind it, end later."""
    rows = log.steps["step"] >= step
    begins = (log.steps["t_mono_s"] - log.steps["step_s"])[log.steps["step"] == step]
    for clock in ("t_mono_s", "t_unix_s"):
        log.steps[clock][rows] += seconds
    for event in log.events:
        if event["t_mono_s"] > begins.max() + 1e-9 or event["event"] == "run_stop":
            event["t_mono_s"] += seconds
            event["t_unix_s"] += seconds


def move(log: plants.Log, event: str, seconds: float, step: int | None = None) -> None:
    for found in log.events:
        if found["event"] == event and step in (None, found["step"]):
            found["t_mono_s"] += seconds
            found["t_unix_s"] += seconds


@dataclass(frozen=True)
class Edge:
    """`change(log, seconds)` is named with `words` from `limit` on, and below it by nobody."""

    name: str
    limit: float
    words: str
    change: Callable[[plants.Log, float], None]
    hardware: dict | None = None

    def __str__(self) -> str:
        return self.name


def exceed(log: plants.Log, seconds: float) -> None:
    log.steps["step_s"][5] += seconds
    log.steps["own_s"][5] += seconds


def overfill(log: plants.Log, seconds: float) -> None:
    log.steps["forward_s"][5] += log.steps["own_s"][5] + seconds
    log.steps["own_s"][5] = 0.0


def leave(rows: slice | int) -> Callable[[plants.Log, float], None]:
    """Leave seconds of steps over, evenly."""

    def change(log: plants.Log, seconds: float) -> None:
        count = len(log.steps["own_s"][rows]) if isinstance(rows, slice) else 1
        log.steps["own_s"][rows] -= seconds / count

    return change


def leave_each(log: plants.Log, seconds: float) -> None:
    log.steps["own_s"] -= seconds


def count_twice(log: plants.Log, seconds: float) -> None:
    log.steps["own_s"] += seconds


def stretch(log: plants.Log, seconds: float) -> None:
    """Let the validation between two steps take longer than it says."""
    delay(log, MIDDLE, seconds)


def lengthen_first(log: plants.Log, seconds: float) -> None:
    next(e for e in log.events if e["event"] == "validation" and e["step"] == 0)["duration_s"] += (
        seconds
    )


def wait(log: plants.Log, seconds: float) -> None:
    log.steps["data_wait_s"][:] = 0.0
    log.steps["data_wait_s"][3] = seconds


def set_clock(log: plants.Log, seconds: float) -> None:
    log.steps["t_unix_s"][7] += seconds


GPU = {"device": "NVIDIA H200", "device_kind": "cuda"}
#: seconds of the steps, the first of which takes five times as long
ALL_S = (STEPS + 4) * STEP_S
LOOSE = LOOSE_S + LOOSE_SHARE * STEP_S

EDGES = [
    Edge("a step longer than its clock", EXACT_S, "step_s exceeds", exceed),
    Edge("phases longer than their step", EXACT_S, "the phases of step 5", overfill),
    Edge("each step left over", LEFT_IN_STEPS.beside(STEP_S), "of a step of", leave_each),
    Edge("each step counted twice", LEFT_IN_STEPS.beside(STEP_S), "of a step of", count_twice),
    Edge(
        "a third of the steps left over",
        LEFT_IN_ALL.beside(INSIDE * STEP_S),
        "of steps of",
        leave(slice(STEPS - 8, None)),
    ),
    Edge("a step left over", LEFT_IN_A_STEP.beside(STEP_S), "s of step 5", leave(5)),
    Edge("a gap", EXACT_S, "falls short of t_mono_s", lambda log, s: delay(log, 5, s)),
    Edge("a longer validation", LEFT_BETWEEN.beside(TOOK_S), "between steps", stretch),
    Edge(
        "a late first step",
        LEFT_AT_ENDS.beside(TOOK_S),
        "before the first step",
        lambda log, s: delay(log, 0, s),
    ),
    Edge(
        "a late stop",
        LEFT_AT_ENDS.beside(TOOK_S),
        "after the last step",
        lambda log, s: move(log, "run_stop", s),
    ),
    Edge(
        "a validation in the step behind it",
        EXACT_S,
        "validation (step 12)",
        lambda log, s: move(log, "validation", s, step=MIDDLE),
    ),
    Edge(
        "a validation in the step before it",
        EXACT_S,
        "validation (step 12)",
        lambda log, s: move(log, "validation", -s, step=MIDDLE),
    ),
    Edge("a validation in the set-up", EXACT_S, "validation (step 0)", lengthen_first),
    Edge(
        "an init_done in the first step",
        TOOK_S + EXACT_S,
        "init_done",
        lambda log, s: move(log, "init_done", s),
    ),
    Edge(
        "a stop before the last step",
        TOOK_S + EXACT_S,
        "run_stop",
        lambda log, s: move(log, "run_stop", -s),
    ),
    Edge("a wall clock that is set", 1e-3, "clock of the log diverge", set_clock),
    Edge("on a GPU, a step longer than its clock", LOOSE, "step_s exceeds", exceed, GPU),
    Edge(
        "on a GPU, phases longer than their step",
        0.001 * STEP_S + EXACT_S,
        "the phases of step 5",
        lambda log, s: overfill(log, s + log.steps["data_wait_s"][5]),
        GPU,
    ),
    Edge("on a GPU, waits", 1.05 * ALL_S + 1.0, "waits for data", wait, GPU),
    Edge(
        "on a GPU, a gap",
        (ALL_S - 5 * STEP_S + TOOK_S) / 9,  # a tenth of the time with it
        "falls short of t_mono_s",
        lambda log, s: delay(log, 5, s),
        GPU,
    ),
]


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_time_is_named_from_its_allowance_on(edge, tmp_path):
    log = make_log(tmp_path, hardware=edge.hardware)
    assert list_sentences(log) == []
    for share in (0.2, 0.9):
        log = make_log(tmp_path / f"below-{share}", hardware=edge.hardware)
        edge.change(log, share * edge.limit)
        found = list_sentences(log)
        assert not any(edge.words in text for text in found), (share, found)
    for share in (1.1, 30.0):
        log = make_log(tmp_path / f"above-{share}", hardware=edge.hardware)
        edge.change(log, share * edge.limit)
        assert any(edge.words in text for text in list_sentences(log)), share


@pytest.mark.parametrize("cores", [1, 2, 64])
@pytest.mark.parametrize("load", [0.0, 1.0, 2.0, 6.0, 40.0, 5000.0])
@pytest.mark.parametrize(
    ("change", "allowed_s", "beside_s"),
    [
        (leave_each, LEFT_IN_STEPS.beside(STEP_S), STEP_S),
        (
            leave(slice(STEPS - 8, None)),
            LEFT_IN_ALL.beside(INSIDE * STEP_S),
            INSIDE * STEP_S,
        ),
    ],
    ids=["median", "all"],
)
def test_processes_beside_a_run_are_allowed_a_share_of_its_steps(
    cores, load, change, allowed_s, beside_s, tmp_path
):
    others = min(max(0.0, load / cores - 1), MOST_OTHERS)
    limit = allowed_s + LEFT_TO_OTHERS * others * beside_s
    for name, share in (("below", 0.95), ("above", 1.05)):
        hardware = {"cores": cores, "load_average_1min": load}
        log = make_log(tmp_path / name, hardware=hardware)
        change(log, share * limit)
        found = [text for text in list_sentences(log) if "leave" in text]
        # of a third of the steps one alone may be too much
        found = [text for text in found if "s of step " not in text]
        assert bool(found) == (name == "above"), (limit, found)


@pytest.mark.parametrize("times", [0.5, 1.0, 3.0, 40.0])
def test_a_rank_that_waits_for_a_core_is_set_up_as_many_times_later(times, tmp_path):
    limit = LEFT_AT_ENDS.beside(TOOK_S) * max(1.0, times)
    for name, share in (("below", 0.95), ("above", 1.05)):
        log = make_log(tmp_path / name)
        (stop,) = (event for event in log.events if event["event"] == "run_stop")
        stop["cpu_s"] = log.steps["step_s"].sum() / times
        delay(log, 0, share * limit)
        found = [text for text in list_sentences(log) if "before the first step" in text]
        assert bool(found) == (name == "above"), found


@pytest.mark.parametrize(("late", "named"), [(1, False), (0, False), (None, True)])
def test_ranks_wait_for_the_last_one_that_is_set_up(late, named, tmp_path):
    log = make_log(tmp_path, layout=LayoutSettings(data=2))
    seconds = 3 * LEFT_AT_ENDS.beside(TOOK_S)
    delay(log, 0, seconds)
    for event in log.events:
        if event["event"] == "init_done" and event["rank"] == late:
            event["t_mono_s"] += seconds
            event["t_unix_s"] += seconds
    found = [text for text in list_sentences(log) if "before the first step" in text]
    assert bool(found) == named, found


@pytest.mark.parametrize("steps", range(1, 2 * FEWEST_STEPS))
def test_a_few_steps_may_all_have_waited_for_a_core(steps, tmp_path):
    """The first step is not judged. What is counted twice no wait explains."""
    few = {"budget": BudgetSettings(steps=1 + steps), "validation": ValidationSettings(rows=0)}
    for sign in (1, -1):
        log = make_log(tmp_path / str(sign), **few)
        leave_each(log, sign * 2 * LEFT_IN_STEPS.beside(STEP_S))
        found = [text for text in list_sentences(log) if "of a step of" in text]
        assert bool(found) == (sign < 0 or steps >= FEWEST_STEPS), found


def add(event: str, step: int | None, **fields) -> Callable[[plants.Log], None]:
    def change(log: plants.Log) -> None:
        first = next(e for e in log.events if e["event"] == "init_done")
        log.events.append(first | {"event": event, "step": step, "duration_s": None} | fields)

    return change


def drop(event: str, step: int | None = None) -> Callable[[plants.Log], None]:
    def change(log: plants.Log) -> None:
        log.events = [
            e for e in log.events if e["event"] != event or (step is not None and e["step"] != step)
        ]

    return change


def repeat(log: plants.Log) -> None:
    log.events.append(dict(log.events[-1]))


def stop_at(step: int, status: str) -> Callable[[plants.Log], None]:
    def change(log: plants.Log) -> None:
        next(e for e in log.events if e["event"] == "run_stop").update(step=step, status=status)

    return change


UNPLANNED = "against the settings"
SAVED = CheckpointSettings(every=8, keep_resume_state=True)


@pytest.mark.parametrize(
    ("fields", "change", "words"),
    [
        ({}, add("validation", 5), UNPLANNED),
        ({}, add("checkpoint", None, status="step=00000005"), "a checkpoint at step 5, against"),
        ({}, add("checkpoint", None, status="best"), UNPLANNED),
        ({}, add("translation", STEPS), UNPLANNED),
        ({}, add("source_validation", MIDDLE), UNPLANNED),
        ({}, add("resume", 0), UNPLANNED),
        ({}, add("memory", 5), UNPLANNED),
        ({}, add("memory", 0), ""),
        ({}, add("compilation", 5), UNPLANNED),
        ({}, add("compilation", 1), ""),
        ({}, add("compilation", STEPS), ""),
        ({}, stop_at(STEPS - 1, "complete"), UNPLANNED),
        ({}, repeat, "is logged twice"),
        ({}, drop("init_done"), "no init_done"),
        ({}, drop("validation", MIDDLE), "no validation at step 12"),
        ({}, drop("validation", 0), "no validation at step 0"),
        ({}, drop("validation", STEPS), "no validation at step 24"),
        ({"validation": ValidationSettings(at_start=False, every=MIDDLE)}, None, "at step 0,"),
        ({"validation": ValidationSettings(at_end=False, every=MIDDLE)}, None, "at step 24,"),
        ({"validation": ValidationSettings(rows=0)}, None, "at step 0,"),
        ({"checkpoints": SAVED}, None, "no checkpoint at step 8 (3 so)"),
        ({"checkpoints": replace(SAVED, at_start=True)}, None, "no checkpoint at step 0 (4 so)"),
        ({"checkpoints": CheckpointSettings(every=8)}, None, "no checkpoint at step 8 (2 so)"),
        (
            {"checkpoints": CheckpointSettings(best=True)},
            add("checkpoint", None, status="best"),
            "",
        ),
        (
            {"checkpoints": CheckpointSettings(final=True)},
            add("checkpoint", None, status="final"),
            "",
        ),
    ],
)
def test_events_are_those_that_settings_plan(fields, change, words, tmp_path):
    log = make_log(tmp_path, **fields)
    if change is not None:
        change(log)
    found = [text for text in list_sentences(log) if "at a time when" not in text]
    assert any(words in text for text in found) if words else found == [], found


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"validation": ValidationSettings(each_epoch=True)}, "no validation at step 5 (4 so)"),
        (
            {"checkpoints": CheckpointSettings(each_epoch=True, keep_resume_state=True)},
            "no checkpoint at step 5 (5 so)",
        ),
    ],
)
def test_events_of_epochs_follow_from_the_rows_of_one(fields, words, tmp_path):
    log = make_log(tmp_path, **fields)
    unknown = "not checked: the rows of an epoch are not at hand"
    assert any(text == unknown for text in list_sentences(log))
    count_epochs(log)
    assert any(words in text for text in list_sentences(log))


#: pairs that a run translates
PAIRS = 3
TRANSLATED = ValidationSettings(every=MIDDLE, bleu=PAIRS)
EACH_EPOCH = replace(TRANSLATED, bleu_each_epoch=True)
#: steps of an epoch, with which no other event falls together
EPOCH = 5


def count_epochs(log: plants.Log) -> None:
    """Let the inputs be at hand, of which an epoch has `EPOCH` steps."""
    none = np.zeros(0)
    counts = Counts(
        steps=none,
        useful=none,
        total=none,
        digests=none,
        vocabulary_size=300,
        rows_per_epoch=Fraction(EPOCH * logs.settings().global_batch),
    )
    log.contents = replace(log.contents, recount=Recount(counted=counts))


def translate(step: int, pairs: int = PAIRS, first: int = 0) -> Callable[[plants.Log], None]:
    def change(log: plants.Log) -> None:
        for number in range(first, first + pairs):
            add("translation", step, number=number)(log)

    return change


def translate_epochs(log: plants.Log) -> None:
    count_epochs(log)
    for step in (*range(EPOCH, STEPS, EPOCH), STEPS):
        translate(step)(log)


def add_sources(log: plants.Log) -> None:
    """Add the validation of each corpus before each validation of all."""
    for event in [event for event in log.events if event["event"] == "validation"]:
        for corpus in ("prose", "code"):
            log.events.append(event | {"event": "source_validation", "corpus": corpus})


@pytest.mark.parametrize(
    ("policy", "honest", "change", "words"),
    [
        (TRANSLATED, translate(STEPS), None, ""),
        (TRANSLATED, translate(STEPS), translate(MIDDLE), "a translation at step 12, against"),
        (TRANSLATED, translate(STEPS), drop("translation"), "no translation at step 24 (1 so)"),
        (
            TRANSLATED,
            translate(STEPS),
            translate(STEPS, 1),
            "translation (step 24) is logged twice",
        ),
        (TRANSLATED, translate(STEPS, 2), None, ""),  # of a corpus that has no more
        (TRANSLATED, translate(STEPS, 4), None, "4 pairs are translated at step 24"),
        (TRANSLATED, translate(STEPS, 2, first=1), None, "those before pair 0"),
        (EACH_EPOCH, translate_epochs, None, ""),
        (EACH_EPOCH, translate_epochs, translate(MIDDLE), "a translation at step 12, against"),
        (EACH_EPOCH, translate_epochs, drop("translation", 10), "no translation at step 10 (1 so)"),
        (replace(EACH_EPOCH, bleu_each_epoch=False), translate_epochs, None, "at step 5, against"),
    ],
)
def test_translations_are_those_that_settings_plan(policy, honest, change, words, tmp_path):
    log = make_log(tmp_path, validation=policy)
    insert(log, "validation", MIDDLE, TOOK_S)
    honest(log)
    if change is not None:
        change(log)
    found = [text for text in list_sentences(log) if "at a time when" not in text]
    assert any(words in text for text in found) if words else found == [], found


def test_each_translation_has_as_many_pairs(tmp_path):
    log = make_log(tmp_path, validation=EACH_EPOCH)
    insert(log, "validation", MIDDLE, TOOK_S)
    translate_epochs(log)
    last = next(e for e in log.events if e["step"] == 10 and e.get("number") == PAIRS - 1)
    log.events = [event for event in log.events if event is not last]
    words = "2 pairs are translated at one step and 3 at another"
    assert any(text == words for text in list_sentences(log))


MIXED = {
    "mixture": MixtureSettings(
        sources=tuple(MixtureSource(CorpusSettings(name=name)) for name in ("prose", "code")),
        stages=(MixtureStage(weights=(0.5, 0.5)),),
    )
}


@pytest.mark.parametrize(
    ("fields", "honest", "change", "words"),
    [
        (MIXED, add_sources, None, ""),
        (MIXED, add_sources, add("source_validation", 5), "a source_validation at step 5, against"),
        (MIXED, add_sources, drop("source_validation", MIDDLE), "no source_validation at step 12"),
        (MIXED, add_sources, drop("source_validation"), "no source_validation at step 0 (3 so)"),
        ({}, add_sources, None, "a source_validation at step 0, against the settings"),
    ],
)
def test_validations_of_corpora_are_those_of_a_mixture(fields, honest, change, words, tmp_path):
    log = make_log(tmp_path, **fields)
    honest(log)
    if change is not None:
        change(log)
    found = list_sentences(log)
    assert any(words in text for text in found) if words else found == [], found


def test_a_run_that_did_not_end_need_not_have_its_last_events(tmp_path):
    log = make_log(tmp_path)
    drop("validation", STEPS)(log)
    log.record["outcome"]["status"] = "interrupted"
    found = list_sentences(log)
    assert "not checked: the run did not end" in found
    assert not any("no validation" in text for text in found)


@pytest.mark.parametrize("name", ["bubble_s", "exposed_communication_s"])
@pytest.mark.parametrize(
    ("layout", "planned"),
    [
        (LayoutSettings(), ()),
        (LayoutSettings(data=2), ("exposed_communication_s",)),
        (LayoutSettings(pipeline=2), ("bubble_s",)),
        (LayoutSettings(data=2, pipeline=2), ("bubble_s", "exposed_communication_s")),
    ],
    ids=["one rank", "data", "pipeline", "both"],
)
def test_phases_are_those_of_the_layout(name, layout, planned, tmp_path):
    log = make_log(tmp_path, layout=layout, validation=ValidationSettings(), micro_batch=4)
    rows = len(log.steps["step"])
    log.steps[name] = np.full(rows, 1e-4)
    log.steps["own_s"] -= 1e-4
    found = [text for text in list_sentences(log) if "which this layout has not" in text]
    assert bool(found) == (name not in planned), found


def test_a_pause_that_is_recorded_explains_its_gap(tmp_path):
    log = make_log(tmp_path)
    before = log.steps["t_mono_s"][4]
    delay(log, 5, 3.0)
    assert any("falls short" in text for text in list_sentences(log))
    names = log.contents.parts["spans"].schema.names
    row = dict.fromkeys(names) | {"run_id": log.entry["run_id"], "attempt": 0, "rank": 0}
    rows = [row | {"duration_s": 3.0}, row | {"start_mono_s": before + 0.01, "duration_s": 3.0}]
    log.contents.parts["spans"] = tables.of_rows("spans", rows)
    assert list_sentences(log) == []


@pytest.mark.parametrize("kind", ["run_start", "init_done", "memory"])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_logs_its_start(kind, rank, tmp_path):
    log = make_log(tmp_path, layout=LayoutSettings(data=2))
    for of in (0, 1):
        add("memory", 0, rank=of)(log)
    unplaced = [text for text in list_sentences(log) if "at a time when" not in text]
    assert unplaced == []
    log.events = [e for e in log.events if (e["event"], e["rank"]) != (kind, rank)]
    words = f"no {kind} of rank {rank}, though it took steps (attempt 0)"
    assert words in list_sentences(log)


def test_no_rank_need_measure_its_memory(tmp_path):
    log = make_log(tmp_path, layout=LayoutSettings(data=2))
    assert not any("memory" in text for text in list_sentences(log))


def test_a_rank_waits_for_the_validation_of_another(tmp_path):
    log = make_log(tmp_path, layout=LayoutSettings(data=2))
    assert {e["rank"] for e in log.events if e["event"] == "validation"} == {0}
    assert list_sentences(log) == []


def resume(folder: Path, stopped: bool, **fields) -> plants.Log:
    attempts = [{"stop": 8, "stopped": stopped}, {"start": 8}]
    run: dict = {"validation": ValidationSettings(), "checkpoints": SAVED}
    log = make_log(folder, attempts=attempts, **run | fields)
    first = next(e for e in log.events if e["event"] == "init_done" and e["attempt"] == 1)
    log.events.append(first | {"event": "resume", "step": 8, "duration_s": None})
    return log


def test_a_killed_attempt_may_lack_its_last_checkpoint(tmp_path):
    assert list_sentences(resume(tmp_path / "a", stopped=False)) == []
    for gaps, named in ((2, False), (3, True)):
        log = resume(tmp_path / str(gaps), stopped=False)
        for step in range(3, 3 + gaps):
            rows = (log.steps["step"] >= step) & (log.steps["attempt"] == 0)
            for clock in ("t_mono_s", "t_unix_s"):
                log.steps[clock][rows] += 0.5
        assert any("falls short" in text for text in list_sentences(log)) == named


@pytest.mark.parametrize("step", [0, 7, 8, 9])
def test_an_attempt_resumes_at_its_first_step(step, tmp_path):
    log = resume(tmp_path, stopped=False)
    log.events[-1]["step"] = step
    assert any(UNPLANNED in text for text in list_sentences(log)) == (step != 8)


def test_an_attempt_that_was_killed_before_its_first_step_may_have_begun(tmp_path):
    log = make_log(tmp_path)
    add("run_start", None, attempt=1, status=None)(log)
    add("resume", 9, attempt=1)(log)
    assert not any("resume" in text for text in list_sentences(log))


def test_a_run_that_goes_on_from_another_has_no_events_before_it(tmp_path):
    state = "results/runs/first/checkpoints/step=00000008"
    policy = ValidationSettings()
    log = make_log(tmp_path, attempts=[{"start": 8}], resume_from=state, validation=policy)
    assert list_sentences(log) == []
    add("validation", 0)(log)
    assert any(UNPLANNED in text for text in list_sentences(log))


def test_another_program_may_differ_by_more(tmp_path):
    for name, share in (("below", 0.9), ("above", 1.1)):
        log = make_log(tmp_path / name)
        set_clock(log, share * CLOCK_S)
        delay(log, 0, 2 * LEFT_AT_ENDS.beside(TOOK_S))
        found = [text for text in list_sentences(log, external=True) if "not checked" not in text]
        assert len(found) == (name == "above") and all("clock of the log" in t for t in found)


def test_logs_without_a_step_are_not_checked(tmp_path):
    log = make_log(tmp_path)
    log.contents.parts["raw"] = log.contents.parts["raw"].slice(0, 0)
    log.steps = {name: values[:0] for name, values in log.steps.items()}
    assert set(list_sentences(log)) == {"not checked: the logs hold no step"}
