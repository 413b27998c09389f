"""Generated faults in the logs of an experiment, and the share of them that no check sees.

    python -m tests.plants [RESULTS] [--experiment demo] [--sample N --seed S] [--output FILE]

RESULTS is a folder of results, or an archive of logs (`logs.json.xz`). Every field of steps, events,
`run.json` and the run table is changed by every operation, at falling magnitudes, in one run, in the
log of its last rank, and in all repeats of its cell. Logs are sealed again, as by a hand that puts
the hashes right: only values give a fault away. Nothing is written to RESULTS; a fault is planted in
what `ingest` read, in memory, and judged as `ingest` judges.

A fault is *seen* if an expectation that is content with the honest logs accuses a changed run,
*elsewhere* if it accuses others alone, *unchecked* if the page lists a value as not checked that was
checked before, and *silent* otherwise. It is *immaterial*, as it changes no reported number, if it
moves less than `MATERIAL` of a step's time from or to a phase, or no number by more than
`NEGLIGIBLE`. Fields of `ONE_SOURCE` have no second witness: they are the holes, and are scored
apart.
"""

import argparse
import copy
import itertools
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from tests.tables import connect
from tokenscale.analysis import ingest, tables
from tokenscale.analysis.logs import merge
from tokenscale.analysis.recount import Recount
from tokenscale.analysis.rows import store_rows
from tokenscale.analysis.run_contents import RunContents
from tokenscale.analysis.run_folder import InputsAtHand, read_contents
from tokenscale.analysis.run_record import read_run_record
from tokenscale.analysis.run_table import find_gaps
from tokenscale.base.files import read_json, sha256_file, write_json
from tokenscale.referee import comparability, validity
from tokenscale.referee.accounting import PHASES
from tokenscale.referee.expectations import (
    BETWEEN_RUNS,
    OF_A_RUN,
    ONE_SOURCE,
    Evidence,
    Findings,
    NotCheckedError,
    describe_findings,
)
from tokenscale.referee.siblings import Siblings
from tokenscale.report import answers
from tokenscale.report.packed_logs import restore
from tokenscale.settings.experiments import digest_design

Row = dict[str, Any]
#: (run, expectation) of a sentence, or (run, `?` and expectation) of what is not checked
Said = set[tuple[str, str]]
#: share of the time of a run's steps below which a plant in their phases is immaterial, and the
#: relative difference below which one is in any number
MATERIAL = 0.01
NEGLIGIBLE = 1e-6
#: (target, changes) → why nothing can know it: what is left is a possible course of the run
POSSIBLE = {
    ("times of steps", ("shift", "swap", "one value")): "another order of times",
    ("both norms", ("shift", "swap")): "another order of norms",
    ("both norms", ("one value", "one value less")): "gradients of one step may be large",
    ("all times", ("offset",)): "a run at another time",
    (
        "steps memory_peak_bytes",
        ("copy", "freeze"),
    ): "a device may hold as much in each run and step",
    ("memory activations_bytes", ("copy",)): "runs of one shape hold as much",
}

#: columns of runs with what is said of them
COLUMNS = tables.TABLES["runs"] | tables.TABLES[tables.JUDGED]

# -- what is changed


@dataclass
class Log:
    """What a run left, to be changed: columns of its steps, its events, record and entry in the run
    table. `spread` is that of honest repeats, per column.
    """

    steps: dict[str, np.ndarray]
    events: list[Row]
    record: Row
    entry: Row
    contents: RunContents

    @classmethod
    def of(cls, entry: Row, contents: RunContents) -> "Log":
        raw = contents.parts["raw"]
        numbers = [f.name for f in raw.schema if not pa.types.is_string(f.type)]
        return cls(
            steps={
                name: raw[name].to_numpy().copy() for name in numbers if raw[name].null_count == 0
            },
            events=contents.parts["events"].to_pylist(),
            record=copy.deepcopy(contents.found.record or {}),
            entry=copy.deepcopy(entry),
            contents=contents,
        )

    def build(self) -> RunContents:
        """Return the contents of a folder with these logs, sealed."""
        raw = self.contents.parts["raw"]
        arrays = []
        for column in raw.schema:
            values = self.steps.get(column.name)
            arrays.append(
                raw[column.name] if values is None else pa.array(values, column.type, safe=False)
            )
        raw = pa.Table.from_arrays(arrays, schema=raw.schema)
        times = [e["t_unix_s"] for e in self.events if e["t_unix_s"] is not None]
        validated = [
            e["useful_tokens"]
            for e in self.events
            if e["event"] == "validation" and e["useful_tokens"]
        ]
        columns = dict(self.contents.columns)
        columns |= {"started_unix_s": min(times), "stopped_unix_s": max(times)} if times else {}
        columns["validation_tokens"] = validated[-1] if validated else None
        parts = dict(self.contents.parts)
        parts |= {
            "raw": raw,
            "steps": merge(raw, self.events),
            "events": tables.of_rows("events", self.events),
        }
        found = self.contents.found._replace(record=self.record)
        recount = self.contents.recount
        if self.record.get("inputs") != (self.contents.found.record or {}).get("inputs"):
            recount = Recount(counted="the store at hand is not the one that the run read")
        return replace(self.contents, found=found, columns=columns, parts=parts, recount=recount)


@dataclass(frozen=True)
class Change:
    """An operation on the values of a field: `apply(values, magnitude, donor)` returns others.
    `magnitudes` fall. `donor` are the values of another run.
    """

    name: str
    magnitudes: Sequence[float]
    apply: Callable[[np.ndarray, float, np.ndarray], np.ndarray]


def _noisy(donor: np.ndarray, noise: float) -> np.ndarray:
    wave = np.cos(12.9898 * np.arange(1, len(donor) + 1))
    return donor * (1 + noise * wave)


def _part(values: np.ndarray, share: float) -> slice:
    """The last `share` of the values, of two at least."""
    return slice(len(values) - max(2, round(share * len(values))), None)


def _freeze(values: np.ndarray, share: float, _: np.ndarray) -> np.ndarray:
    found = values.copy()
    part = _part(values, share)
    found[part] = found[part][0]
    return found


def _swap(values: np.ndarray, pairs: float, _: np.ndarray) -> np.ndarray:
    found = values.copy()
    count = min(int(pairs), len(values) // 2)
    one = np.arange(count)
    two = len(values) - 1 - one
    found[one], found[two] = values[two], values[one]
    return found


def _change_one(values: np.ndarray, factor: float, _: np.ndarray) -> np.ndarray:
    found = values.copy()
    found[2 * len(values) // 3] *= factor
    return found


FACTORS = (10.0, 2.0, 1.3, 1.1, 1.03, 1.01)
OFFSETS = (10.0, 1.0, 0.3, 0.1, 0.03)
NOISES = (0.0, 1e-12, 1e-9, 1e-6, 1e-4)
#: ending of a field → factors of units that people mistake
UNITS = {
    "_s": (1e3, 1 / 60, 1e-3),
    "bytes": (1024.0, 8.0, 1e-3),
    "loss_sum": (1 / math.log(2), 1 / math.log(10)),
    "grad_norm": (1024.0,),
}
SCALING = (
    Change("scale", FACTORS, lambda x, m, _: x * m),
    Change("divide", FACTORS, lambda x, m, _: x / m),
    Change("offset", OFFSETS, lambda x, m, _: x + m * np.abs(x).mean()),
    Change("sign", (1.0,), lambda x, _m, _: -x),
)
COPY = Change("copy", NOISES, lambda _x, m, donor: _noisy(donor, m))
SERIES = (
    *SCALING,
    COPY,
    Change("freeze", (1.0, 0.5, 0.25, 0.0), _freeze),
    Change("shift", (8, 2, 1), lambda x, m, _: np.roll(x, int(m))),
    Change("swap", (1e9, 2, 1), _swap),
    Change("one value", FACTORS, _change_one),
    Change("one value less", FACTORS, lambda x, m, d: _change_one(x, 1 / m, d)),
)


def units(name: str) -> Change | None:
    """Return the change of a field's unit; None for a field without one."""
    found = next((factors for end, factors in UNITS.items() if name.endswith(end)), None)
    if found is None:
        return None
    factors = tuple(sorted(found, key=lambda factor: -abs(math.log(factor))))
    return Change("unit", factors, lambda x, m, _: x * m)


#: (log, the same of the donor, change, magnitude): change the log in place
Plant = Callable[[Log, Log, Change, float], None]


@dataclass(frozen=True)
class Target:
    """A field, or fields that change together, with the changes that apply."""

    name: str
    changes: tuple[Change, ...]
    plant: Plant


def _cast(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    return values if like.dtype.kind == "f" else np.round(values).astype(like.dtype)


def change_column(name: str) -> Plant:
    def plant(log: Log, donor: Log, change: Change, magnitude: float) -> None:
        old = log.steps[name]
        if name in donor.steps and len(donor.steps[name]) == len(old):
            other = donor.steps[name].astype(float)
        elif change is COPY:
            return
        else:
            other = old.astype(float)
        log.steps[name] = _cast(change.apply(old.astype(float), magnitude, other), old)

    return plant


def change_event(event: str, name: str) -> Plant:
    def plant(log: Log, donor: Log, change: Change, magnitude: float) -> None:
        rows = [e for e in log.events if e["event"] == event and e[name] is not None]
        others = [e[name] for e in donor.events if e["event"] == event and e[name] is not None]
        old = np.array([e[name] for e in rows])
        if len(others) != len(old):
            if change is COPY:
                return
            others = old.tolist()
        new = _cast(change.apply(old.astype(float), magnitude, np.array(others, float)), old)
        for row, value in zip(rows, new.tolist(), strict=True):
            row[name] = value

    return plant


def in_last_rank(plant: Plant) -> Plant:
    """Leave the logs of all ranks but the last one, and the record, as they are."""

    def planted(log: Log, donor: Log, change: Change, magnitude: float) -> None:
        last = log.steps["rank"].max()
        others = log.steps["rank"] != last
        steps = {name: values.copy() for name, values in log.steps.items()}
        kept = copy.deepcopy([event for event in log.events if event["rank"] != last])
        record = copy.deepcopy(log.record)
        plant(log, donor, change, magnitude)
        for name, values in steps.items():
            log.steps[name] = np.where(others, values, log.steps[name])
        own = [event for event in log.events if event["rank"] == last]
        # in the order in which the files of ranks are read
        log.events = sorted((*kept, *own), key=lambda event: (event["attempt"], event["rank"]))
        log.record = record

    return planted


def together(*plants: Plant) -> Plant:
    def plant(log: Log, donor: Log, change: Change, magnitude: float) -> None:
        for one in plants:
            one(log, donor, change, magnitude)

    return plant


#: seconds of a step that grow with it
SECONDS = ("step_s", "data_wait_s", "own_s", *PHASES)


def change_steps_and_clocks(log: Log, donor: Log, change: Change, magnitude: float) -> None:
    """Give the steps other times, with the phases, clocks and events that a training of these times
    writes.
    """
    old = log.steps["step_s"].copy()
    change_column("step_s")(log, donor, change, magnitude)
    ratio = log.steps["step_s"] / old
    late = {}
    ends = {}
    for rank in np.unique(log.steps["rank"]):
        rows = log.steps["rank"] == rank
        late[rank] = np.cumsum((log.steps["step_s"] - old)[rows])
        ends[rank] = log.steps["t_mono_s"][rows].copy()
        for clock in ("t_mono_s", "t_unix_s"):
            log.steps[clock][rows] += late[rank]
    for name in SECONDS[1:]:
        if name in log.steps:
            log.steps[name] = log.steps[name] * ratio
    for event in log.events:
        before = int(np.searchsorted(ends[event["rank"]], event["t_mono_s"]))
        moved = late[event["rank"]][before - 1] if before else 0.0
        event["t_mono_s"] += moved
        event["t_unix_s"] += moved
    _move_end(log, late[0][-1])


def change_all_times(log: Log, donor: Log, change: Change, magnitude: float) -> None:
    """Change all durations and clocks, as a clock of another speed has them."""
    if change.name == "offset":
        seconds = magnitude * float(log.steps["step_s"].mean())
        for clock in ("t_mono_s", "t_unix_s"):
            log.steps[clock] = log.steps[clock] + seconds
            for event in log.events:
                event[clock] += seconds
        log.record["started_unix_s"] += seconds
        _move_end(log, seconds)
        return
    factor = float(change.apply(np.ones(1), magnitude, np.ones(1))[0])
    begins = {clock: log.events[0][clock] for clock in ("t_mono_s", "t_unix_s")}
    for name in SECONDS:
        if name in log.steps:
            log.steps[name] = log.steps[name] * factor
    for clock, begin in begins.items():
        log.steps[clock] = begin + factor * (log.steps[clock] - begin)
    for event in log.events:
        for clock, begin in begins.items():
            event[clock] = begin + factor * (event[clock] - begin)
        if event["duration_s"] is not None:
            event["duration_s"] *= factor
    last = max(e["t_unix_s"] for e in log.events)
    _move_end(log, last - log.record["outcome"]["ended_unix_s"])


def _move_end(log: Log, seconds: float) -> None:
    log.record["outcome"]["ended_unix_s"] += seconds


def hide_time(event: str) -> Plant:
    """Book a share of each step as an event before it, which takes the time out of the rates."""

    def plant(log: Log, donor: Log, change: Change, magnitude: float) -> None:
        first = next(e for e in log.events if e["event"] == "init_done")
        for at in range(3, len(log.steps["step"])):
            taken = magnitude * log.steps["step_s"][at]
            end = log.steps["t_mono_s"][at] - log.steps["step_s"][at] + taken
            for name in SECONDS:
                if name in log.steps:
                    log.steps[name][at] *= 1 - magnitude
            step = int(log.steps["step"][at])
            wall = first["t_unix_s"] - first["t_mono_s"]
            new = dict.fromkeys(first) | {name: first[name] for name in ("run_id", "attempt")}
            new |= {"schema": 2, "event": event, "rank": int(log.steps["rank"][at])}
            new |= {"t_mono_s": end, "t_unix_s": wall + end, "duration_s": taken}
            named = event in ("checkpoint", "resume")
            new |= {"status": f"step={step:08d}"} if named else {"step": step}
            log.events.append(new)

    return plant


def drop_events(event: str) -> Plant:
    def plant(log: Log, donor: Log, change: Change, magnitude: float) -> None:
        of = [e for e in log.events if e["event"] == event]
        gone = of[-max(1, round(magnitude * len(of))) :]
        log.events = [e for e in log.events if not any(e is one for one in gone)]

    return plant


def repeat_events(event: str) -> Plant:
    def plant(log: Log, donor: Log, change: Change, magnitude: float) -> None:
        log.events += [dict(e) for e in log.events if e["event"] == event][-int(magnitude) :]

    return plant


EVENT_HIDES = Change("hide", (0.5, 0.3, 0.1, 0.03), lambda x, _m, _: x)
EVENT_DROP = Change("drop", (1.0, 0.1), lambda x, _m, _: x)
EVENT_TWICE = Change("double", (1.0,), lambda x, _m, _: x)
OTHER = Change("other", (1.0,), lambda x, _m, _: x)
GONE = Change("delete", (1.0,), lambda x, _m, _: x)


def _leaf(record: Row, path: tuple[str, ...]) -> tuple[Row, str]:
    for name in path[:-1]:
        record = record[name]
    return record, path[-1]


def change_record(path: tuple[str, ...]) -> Plant:
    def plant(log: Log, donor: Log, change: Change, magnitude: float) -> None:
        parent, name = _leaf(log.record, path)
        old = parent[name]
        if change is GONE:
            del parent[name]
        elif change is COPY:
            there, _ = _leaf(donor.record, path)
            parent[name] = copy.deepcopy(there[name])
        elif change is OTHER:
            parent[name] = (not old) if isinstance(old, bool) else f"{'0' * len(str(old))}"
        else:
            new = change.apply(np.array([old], float), magnitude, np.array([old], float))[0]
            parent[name] = round(new) if isinstance(old, int) else float(new)

    return plant


#: parts of run.json whose entries are alike: the first of each stands for all
ALIKE = ("code", "versions", "environment", "inputs", "designs")
#: fields of earlier versions' records, which nothing reads
UNREAD = ("compiled", "science_code", "layout_digest")
#: what names a run, and hashes that are put right
SEALED = ("seal", "logs", "run", "argv", "launch", "code_sha256", "installed")


def record_targets(record: Row, path: tuple[str, ...] = ()) -> Iterator[Target]:
    for name, value in sorted(record.items()):
        where = (*path, name)
        if name in (*SEALED, *UNREAD) or (path[:1] and path[0] in ALIKE and name != min(record)):
            continue
        if isinstance(value, dict):
            yield from record_targets(value, where)
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        changes = [*SCALING, GONE] if number else [OTHER, GONE]
        if isinstance(value, (int, float, str)):
            yield Target(f"run.json {'.'.join(where)}", tuple(changes), change_record(where))


def change_entry(name: str) -> Plant:
    def plant(log: Log, donor: Log, change: Change, magnitude: float) -> None:
        old = log.entry[name]
        if isinstance(old, int):
            log.entry[name] = round(float(change.apply(np.array([old], float), magnitude, old)[0]))
        else:
            log.entry[name] = copy.deepcopy(donor.entry[name])

    return plant


#: fields of steps and events that name the row
NAMES = ("schema", "attempt", "rank", "world_size", "attempt_step")
#: kinds of events that can stand between two steps
BETWEEN = ("validation", "checkpoint", "translation", "source_validation", "resume", "compilation")


def list_targets(log: Log) -> Iterator[Target]:
    """Yield what can be changed in a run's log, by every field that has a value."""
    for name, values in log.steps.items():
        if name in NAMES:
            continue
        if values.dtype == bool:
            flip = Change("other", (1.0,), lambda x, _m, _: 1 - x)
            yield Target(f"steps {name}", (flip,), change_column(name))
            continue
        changes = [*SERIES, unit] if (unit := units(name)) else list(SERIES)
        yield Target(f"steps {name}", tuple(changes), change_column(name))
    kinds = dict.fromkeys(e["event"] for e in log.events)
    for kind in kinds:
        rows = [e for e in log.events if e["event"] == kind]
        for name, value in rows[0].items():
            if name in NAMES or isinstance(value, str) or value is None:
                continue
            changes = list(SERIES if len(rows) > 2 else [*SCALING, COPY])
            if unit := units(name):
                changes.append(unit)
            yield Target(f"{kind} {name}", tuple(changes), change_event(kind, name))
        yield Target(f"{kind}", (EVENT_DROP,), drop_events(kind))
        yield Target(f"{kind}", (EVENT_TWICE,), repeat_events(kind))
    for kind in BETWEEN:
        yield Target(f"{kind}", (EVENT_HIDES,), hide_time(kind))
    time_changes = (*SCALING[:2], Change("unit", UNITS["_s"], lambda x, m, _: x * m))
    offset = Change("offset", (1e5, 1e3, 10.0), SCALING[2].apply)
    yield Target("all times", (*time_changes, offset), change_all_times)
    kept = [c for c in SERIES if c.name not in ("offset", "sign")]
    yield Target("times of steps", tuple(kept), change_steps_and_clocks)
    losses = together(change_column("loss_sum"), change_event("validation", "loss_sum"))
    loss_units = Change("unit", UNITS["loss_sum"], lambda x, m, _: x * m)
    yield Target("all losses", (*SCALING[:2], loss_units, COPY), losses)
    norms = together(change_column("grad_norm"), change_column("grad_norm_clipped"))
    yield Target("both norms", (*SERIES, Change("unit", (1024.0,), SCALING[0].apply)), norms)
    yield from record_targets(log.record)
    for name in ("repeat", "position"):
        one = (Change("offset", (2.0, 1.0), lambda x, m, _: x + m),)
        yield Target(f"run table {name}", one, change_entry(name))
    for name in ("cell", "run"):
        yield Target(f"run table {name}", (OTHER,), change_entry(name))


# -- what is said


@dataclass
class Campaign:
    """An experiment's logs, read once. `asks_all`: runs are compared where one is named by itself,
    too.
    """

    results: Path
    experiment: str
    asks_all: bool = False
    table: Row = field(default_factory=dict)
    contents: dict[str, RunContents] = field(default_factory=dict)
    stores: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        inputs = ingest.read_inputs(self.results / "tables" / self.experiment)
        self._path = self.results / inputs.table
        self.table = read_json(self._path)
        stores = [self.results / name for name in inputs.stores]
        corpora = [self.results / name for name in inputs.corpora]
        manifests = {sha256_file(path): path for path in (*stores, *corpora)}
        at_hand = InputsAtHand(manifests, project=self.results.absolute().parent)
        self.stores = store_rows(stores, corpora=corpora)
        self.entries = {entry["run_id"]: entry for entry in self.table["runs"]}
        for run_id in self.entries:
            folder = self.results / "runs" / run_id
            if (found := read_run_record(folder / "run.json")).record is not None:
                self.contents[run_id] = read_contents(folder, found, at_hand)
        self._rows: dict[str, Row] = {}
        self._donors: dict[str, Log] = {}
        self.said: dict[str, Said] = {}
        for run_id, contents in self.contents.items():
            self._rows[run_id], self.said[run_id] = self._judge_run(self.entries[run_id], contents)
        self.honest = self.judge({})

    def read_donor(self, run_id: str) -> Log:
        """Return the log of a run that is copied, which nobody may change."""
        if run_id not in self._donors:
            self._donors[run_id] = Log.of(self.entries[run_id], self.contents[run_id])
        return self._donors[run_id]

    def _judge_run(self, entry: Row, contents: RunContents) -> tuple[Row, Said]:
        """Return the row of the table `runs`, and who says something."""
        run_id = entry["run_id"]
        said: Said = set()

        def judge(evidence: Evidence) -> Findings:
            found = Findings()
            for expectation in OF_A_RUN:
                try:
                    for sentence in expectation.find(evidence) or ():
                        found.sentences[expectation.word].append(sentence)
                        said.add((run_id, expectation.value))
                except NotCheckedError:
                    said.add((run_id, f"?{expectation.value}"))
            return found

        with mock.patch.object(validity, "judge", judge):
            try:
                row = ingest.record_run(entry, self.experiment, contents=contents)
                found = validity.judge_run(row, entry, contents)
            except Exception:  # noqa: BLE001  # as `ingest` takes what no row can be made of
                return self._rows[run_id] | {"validity": "invalid"}, {(run_id, "readable")}
        return row | describe_findings(run_id, [found or Findings()]), said

    def judge(self, changed: Mapping[str, tuple[Row, RunContents]], compare: bool = True) -> Said:
        """Return who says something of the experiment with these runs changed; `compare`: also of
        runs that are not comparable. Runs are compared where none is named by itself, or if
        `asks_all`.
        """
        rows = dict(self._rows)
        said: Said = set().union(
            *(found for run_id, found in self.said.items() if run_id not in changed)
        )
        for run_id, (entry, contents) in changed.items():
            rows[run_id], found = self._judge_run(entry, contents)
            said |= found
            named = any(value[0] != "?" for _, value in found - self.said[run_id])
            if named and not self.asks_all:
                return said
        gaps = ()
        if compare:
            entries = {run_id: entry for run_id, (entry, _) in changed.items()}
            table = [entries.get(entry["run_id"], entry) for entry in self.table["runs"]]
            gaps = find_gaps(self.table | {"runs": table}, self._path, self.results / "runs")
        siblings = Siblings(gaps)
        contents = self.contents | {run_id: found for run_id, (_, found) in changed.items()}
        recorded = {
            name: pa.concat_tables([found.parts[name] for found in contents.values()])
            for name in ("steps", "events")
        }
        siblings.add(recorded["steps"], recorded["events"])
        recorded["stores"] = tables.of_rows("stores", self.stores)
        recorded["runs"] = tables.of_rows("runs", rows.values())
        with closing(connect(recorded)) as connection:
            siblings.connect(connection, judged=rows.values())
            for expectation in BETWEEN_RUNS:
                with suppress(NotCheckedError):
                    said |= {(run, expectation.value) for run, _ in expectation.find(siblings)}
        return said | self._compare(rows, changed or rows) if compare else said

    def _compare(self, rows: Mapping[str, Row], changed: Iterable[str]) -> Said:
        """Return which runs are refused in comparisons of approaches and world sizes, and what the
        page says of all of them.
        """
        frame = pd.DataFrame([{name: row.get(name) for name in COLUMNS} for row in rows.values()])
        found: Said = set()
        factors = {name for key in self.table["factors"] for name in key.split(", ")}
        for factor in (*comparability.LEVELS, *sorted(factors)):
            for refusal in comparability.refusals(frame, factor):
                found |= {(run, f"comparability: {refusal.sentence}") for run in refusal.run_ids}
        registered = answers.describe_registration(frame, digest_design(self.table))
        commits = sorted(
            {f"{row.get('git_commit')} {row.get('git_dirty')}" for row in rows.values()}
        )
        for words in (registered, f"commits {commits}"):
            found |= {(run, f"page: {words}") for run in changed}
        return found


# -- the score


@dataclass(frozen=True)
class Outcome:
    """What became of a plant: `seen`, `elsewhere` or `silent`, and the expectations that spoke."""

    target: str
    change: str
    magnitude: float
    scope: str
    result: str
    by: tuple[str, ...]


def is_equal(one: RunContents, other: RunContents) -> bool:
    return (
        one.found.record == other.found.record
        and one.parts["raw"].equals(other.parts["raw"])
        and one.parts["events"].equals(other.parts["events"])
    )


def is_immaterial(target: str, old: RunContents, new: RunContents) -> bool:
    """Whether a plant in one duration moves too little time for any reported number, which are sums
    and medians of steps.
    """
    kind, _, name = target.partition(" ")
    if name not in (*SECONDS[1:], "duration_s"):
        return False

    def sum_up(contents: RunContents) -> float:
        rows = contents.parts["raw" if kind == "steps" else "events"]
        if kind != "steps":
            rows = rows.filter(pc.equal(rows["event"], kind))
        return float(pc.sum(rows[name]).as_py() or 0.0)

    took = float(pc.sum(old.parts["raw"]["step_s"]).as_py())
    return abs(sum_up(new) - sum_up(old)) < MATERIAL * took


def is_negligible(old: RunContents, new: RunContents) -> bool:
    """Whether a plant changes nothing but numbers of the logs, none by more than `NEGLIGIBLE` of it:
    no digit that is reported. An order digest is no such number.
    """
    if old.found.record != new.found.record:
        return False
    for part in ("raw", "events"):
        before = old.parts[part]
        after = new.parts[part]
        if len(before) != len(after):
            return False
        for name in before.schema.names:
            if before[name].equals(after[name]):
                continue
            if not pa.types.is_floating(before[name].type):
                return False
            values = [np.nan_to_num(of[name].to_numpy()) for of in (before, after)]
            if not np.allclose(*values, rtol=NEGLIGIBLE, atol=0):
                return False
    return True


def judge_plant(
    campaign: Campaign,
    target: Target,
    change: Change,
    magnitude: float,
    runs: Sequence[str],
    donors: Mapping[str, str],
) -> tuple[str, tuple[str, ...]] | None:
    """Plant in `runs` and return (result, expectations that spoke); None where nothing changes.
    `donors` are run → the run that is copied.
    """
    changed: dict[str, tuple[Row, RunContents]] = {}
    immaterial = True
    for run in runs:
        log = Log.of(campaign.entries[run], campaign.contents[run])
        try:
            target.plant(log, campaign.read_donor(donors[run]), change, magnitude)
            contents = log.build()
        except (KeyError, OverflowError, ValueError, pa.ArrowInvalid):
            continue  # what this log does not have, or no file can hold
        if log.entry != campaign.entries[run] or not is_equal(contents, campaign.contents[run]):
            changed[run] = (log.entry, contents)
            immaterial &= is_immaterial(target.name, campaign.contents[run], contents)
    if not changed:
        return None
    compare = target.name.startswith("run")  # run.json, run table
    new = campaign.judge(changed, compare) - campaign.honest
    by = tuple(sorted({value for run, value in new if run in changed and value[0] != "?"}))
    if by:
        return "seen", by
    if any(value[0] != "?" for _, value in new):
        return "elsewhere", ()
    is_same = [
        entry == campaign.entries[run] and is_negligible(campaign.contents[run], contents)
        for run, (entry, contents) in changed.items()
    ]
    if immaterial or all(is_same):
        return "immaterial", ()
    return ("unchecked" if new else "silent"), ()


def list_plants(
    campaign: Campaign, scopes: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Target, Change, str, float]]:
    """Yield each target with its changes, the scopes of each, and its magnitudes; `scopes` are the
    runs that a plant changes, by name.
    """
    first = next(iter(scopes.values()))[0]
    for target in list_targets(Log.of(campaign.entries[first], campaign.contents[first])):
        for change, scope in itertools.product(target.changes, scopes):
            if scope == LAST_RANK and target.name.startswith("run"):
                continue  # run.json and run table are of all ranks
            for magnitude in change.magnitudes:
                yield target, change, scope, magnitude


def plant_all(
    campaign: Campaign,
    plants: Iterable[tuple[Target, Change, str, float]],
    scopes: Mapping[str, Sequence[str]],
    donors: Mapping[str, str],
) -> Iterator[Outcome]:
    """Yield the outcome of each plant of `list_plants` that changes anything."""
    for target, change, scope, magnitude in plants:
        planted = target
        if scope == LAST_RANK:
            planted = replace(target, plant=in_last_rank(target.plant))
        found = judge_plant(campaign, planted, change, magnitude, scopes[scope], donors)
        if found is not None:
            yield Outcome(target.name, change.name, magnitude, scope, *found)


def is_hole(outcome: Outcome) -> bool:
    return outcome.target in ONE_SOURCE or any(
        outcome.target == target and outcome.change in changes for target, changes in POSSIBLE
    )


#: scope of the plants in one rank's log of a run of several
LAST_RANK = "last rank"
RESULTS = ("seen", "unchecked", "elsewhere", "silent", "immaterial")


def summarize(outcomes: Sequence[Outcome]) -> Row:
    """Return counts of results, the silent share of those with a second witness, and for each
    target its witnesses and the smallest magnitude from which on all are seen, by change.
    """
    known = [o for o in outcomes if not is_hole(o) and o.result != "immaterial"]
    silent = sum(o.result in ("silent", "elsewhere") for o in known)
    targets: dict[str, Row] = {}
    for name, of in itertools.groupby(
        sorted(outcomes, key=lambda o: o.target), key=lambda o: o.target
    ):
        found = list(of)
        counts = {r: n for r in RESULTS if (n := sum(o.result == r for o in found))}
        smallest = {}
        for change in dict.fromkeys(o.change for o in found):
            seen = None
            mine = [o for o in found if o.change == change and o.result != "immaterial"]
            for magnitude in dict.fromkeys(o.magnitude for o in mine):
                if any(o.result != "seen" for o in mine if o.magnitude == magnitude):
                    break
                seen = magnitude
            smallest[change] = seen
        witnesses = sorted({value for o in found for value in o.by})
        targets[name] = {"results": counts, "smallest": smallest, "witnesses": witnesses}
        if name in ONE_SOURCE:
            targets[name]["one_source"] = ONE_SOURCE[name].why
    return {
        "plants": len(outcomes),
        "results": {r: sum(o.result == r for o in outcomes) for r in RESULTS},
        "with_second_witness": len(known),
        "silent_share": round(silent / len(known), 4),
        "one_source": sorted(ONE_SOURCE),
        "targets": targets,
    }


def choose_scopes(campaign: Campaign) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the runs that plants change, and the run that each is copied from: one repeat that no
    other run computes again, its last rank, and all repeats of its cell; of an experiment without
    repeats, its first run.
    """
    cells: dict[str, list[str]] = defaultdict(list)
    for run_id in campaign.contents:
        cells[str(campaign.entries[run_id]["cell"])].append(run_id)
    cell = max(cells.values(), key=len)
    quiet = [run for run in cell if not any(run == i and v[0] != "?" for i, v in campaign.honest)]
    one = (quiet or cell)[-1]
    others = [run for run in campaign.contents if run != one]
    first = next((run for run in cell if run != one), others[0])
    donors = dict.fromkeys(cell, first) | {first: one}
    scopes = {"run": [one]}
    if (campaign.read_donor(one).steps["rank"] > 0).any():
        scopes[LAST_RANK] = [one]
    if len(cell) > 1:
        scopes["cell"] = cell
    return scopes, donors


def render(score: Row) -> str:
    """Return the score as lines."""
    lines = [
        f"{score['plants']:,} plants: "
        + ", ".join(f"{n:,} {result}" for result, n in score["results"].items()),
        f"silent or elsewhere: {score['silent_share']:.1%} of {score['with_second_witness']:,} "
        "with a second witness",
    ]
    for name, target in score["targets"].items():
        counts = ", ".join(f"{n} {result}" for result, n in target["results"].items())
        sizes = ", ".join(
            f"{change} {'not' if size is None else f'{size:g}'}"
            for change, size in target["smallest"].items()
        )
        hole = f"  one source: {target['one_source']}" if "one_source" in target else ""
        lines.append(f"{name:42} {counts}; seen from: {sizes}{hole}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="?", type=Path, default=Path("results"))
    parser.add_argument("--experiment", action="append")
    parser.add_argument("--sample", type=int, help="plant so many of each experiment, by chance")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--output", type=Path, help="write the score there, as JSON")
    arguments = parser.parse_args()
    scores = {}
    with tempfile.TemporaryDirectory() as folder:
        results = arguments.results
        if results.is_file():
            restore(results, Path(folder))
            results = Path(folder)
        for experiment in arguments.experiment or ["demo"]:
            campaign = Campaign(results, experiment)
            scopes, donors = choose_scopes(campaign)
            plants = list(list_plants(campaign, scopes))
            if arguments.sample is not None:
                chosen = random.Random(arguments.seed).sample(
                    range(len(plants)), min(arguments.sample, len(plants))
                )
                plants = [plants[number] for number in sorted(chosen)]
            score = summarize(list(plant_all(campaign, plants, scopes, donors)))
            if arguments.sample is not None:
                score |= {"sample": arguments.sample, "seed": arguments.seed}
            scores[experiment] = score
            print(f"{experiment}: {render(score)}\n", flush=True)
    if arguments.output is not None:
        write_json(arguments.output, scores)


if __name__ == "__main__":
    main()
