"""Two sets of runs, of any trainer → tables of the referee, and a report.

A folder of a run is taken with its record. Any other log that the package `tokenscale_golden` reads
becomes a run of another program, with the facts that its user declares and none that nobody knows.
"""

import itertools
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.analysis.ingest import TableInputs
from tokenscale.analysis.run_record import read_run_record
from tokenscale.analysis.tables import WARM_UP_STEPS, read_experiment
from tokenscale.base.errors import UserError
from tokenscale.base.files import LOOK_AT_DISK, sha256_file, write_sealed
from tokenscale.referee import statistics
from tokenscale.report import packed_logs, paired_comparisons, save
from tokenscale.report.paired_comparisons import RATE, TOO_FEW, TRAINING_LOSS, Judged
from tokenscale.report.style import number
from tokenscale.runs.records.external import write_log
from tokenscale.settings.experiments import format_cell
from tokenscale_golden.reading import Curve, GoldenError, read

#: name of the experiment in tables and report
NAME = "judge"
#: the factor that tells the sets apart: no setting of a run
FACTOR = "set"
#: approach of logs that other trainers wrote, as padding.sql names it
OTHER = "other trainer"
FIGURES = ("tokens_per_second_over_time", "loss_over_time")
#: what is compared → quantity of the comparison
JUDGED_QUANTITIES = {"throughput": RATE, "loss": TRAINING_LOSS}
#: name of a set
NAMES = re.compile(r"[\w.+ -]+")
#: fewest runs of a set
FEWEST = 2
#: times that grow from each step to the next are of no single steps, if there are more than this
FEWEST_GROWING = 8
#: times that a step's tokens by a log's own time and rate differ from the declared ones, at most
OTHER_BATCH = 1.2
#: units of a time that is not 1 over a rate
TIMES = {"s": 1.0, "ms": 1e-3}
#: units of a rate of all devices, or of one
RATES = ("tokens/s", "samples/s", "tokens/s/device", "samples/s/device")


@dataclass(frozen=True)
class RunSet:
    """Runs of one trainer: folders and files, with `::NAME` behind a file of several runs."""

    name: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class DeclaredFacts:
    """What a user declares of logs: sequences of a step over all devices, tokens of a sequence,
    devices of a run, and the unit of a time or rate whose name has none.
    """

    global_batch: int | None = None
    sequence_length: int | None = None
    devices: int | None = None
    time_unit: str | None = None


@dataclass(frozen=True)
class Log:
    """A log by another trainer."""

    path: Path
    curve: Curve
    #: as it was named, with `::NAME`
    name: str


@dataclass(frozen=True)
class Folder:
    """A run's folder with its record."""

    path: Path
    record: dict[str, Any]


def name_sets(paths: Sequence[Sequence[str]], names: Sequence[str]) -> list[RunSet]:
    """Return both sets, by these names or else by what the names of a set's files begin with.

    >>> [of.name for of in name_sets([["a/nano-1.txt", "a/nano-2.txt"], ["b/1.txt", "b/2.txt"]], ())]
    ['nano', 'B']
    """
    found = []
    for letter, of_set in zip("AB", paths, strict=True):
        stems = [*map(_name_path, of_set)]
        shared = re.sub(r"[^\w.]+$", "", os.path.commonprefix(stems))
        shared = re.sub(r"[^\w.+ -]", "-", shared)
        found.append(shared if len(of_set) > 1 and shared else letter)
    if found[0] == found[1]:
        found = ["A", "B"]
    return [RunSet(name, tuple(of_set)) for name, of_set in zip(names or found, paths, strict=True)]


def _name_path(path: str) -> str:
    """Return the name of a file without its ending, and of a run in it.

    >>> _name_path("logs/nano-1.txt"), _name_path("all.csv::first")
    ('nano-1', 'allfirst')
    """
    file, _, run = path.partition("::")
    return Path(file).stem + run


def write_tables(
    sets: Sequence[RunSet], quantities: Sequence[str], declared: DeclaredFacts, results: Path
) -> Path:
    """Write runs, run table and judged tables of two sets below `results`; return the tables' folder.

    Raises UserError for runs that cannot be read, are in both sets or are too few, and for a log
    that lacks a quantity or a fact that its user must declare.
    """
    _check_sets(sets)
    runs = [[_read_run(path) for path in of_set.paths] for of_set in sets]
    _check_counts(sets)
    every = [run for of_set in runs for run in of_set]
    logs = [run for run in every if isinstance(run, Log)]
    if logs:
        _check_copies(logs)
        _check_steps(logs, is_beside_folder=len(logs) < len(every))
    if "throughput" in quantities:
        for log in logs:
            _check_times(log, declared)
    repeats = _number_repeats(runs)
    stems = Counter(_name_path(path) for of_set in sets for path in of_set.paths)
    entries: list[dict[str, Any]] = []
    for of_set, of_runs, of_repeats in zip(sets, runs, repeats, strict=True):
        lengths = Counter(len(run.curve.steps) for run in of_runs if isinstance(run, Log))
        for run, repeat in zip(of_runs, of_repeats, strict=True):
            if isinstance(run, Folder):
                run_id = run.path.resolve().name
            else:
                stem = _name_path(run.name)
                name = stem if stems[stem] == 1 else f"{of_set.name}-{repeat}"
                run_id = re.sub(r"[^\w.-]", "-", name)
            if any(run_id == other["run_id"] for other in entries):
                raise UserError(
                    "two runs have one name.", run=run_id, next="give other names with --names"
                )
            entry: dict[str, Any] = {"cell": {FACTOR: of_set.name}, "repeat": repeat}
            if isinstance(run, Folder):
                entry |= {"external": "external" in run.record, "run": run.record.get("run")}
                _copy_run(run.path, results / "runs" / run_id)
            else:
                entry["external"] = True
                steps = lengths.most_common(1)[0][0]
                facts = {"approach": OTHER, "steps": steps}
                _write_run(run, facts, declared, results / "runs" / run_id)
            entries.append({"run_id": run_id, **entry})
    table = _describe(sets, quantities) | {"runs": entries}
    inputs = TableInputs(NAME)
    write_sealed(results / inputs.table, record=table)
    folder = results / "tables" / NAME
    packed_logs.make_tables(inputs, results, folder=folder)
    return folder


def _check_sets(sets: Sequence[RunSet]) -> None:
    for path in itertools.chain.from_iterable(of_set.paths for of_set in sets):
        if not Path(path.partition("::")[0]).exists():
            raise UserError(
                "there is no such run or log.",
                path=path,
                next="name a run's folder, or a log of a format in docs/other-trainers.md",
            )
    places = [[os.path.realpath(path) for path in of_set.paths] for of_set in sets]
    both = {*places[0]} & {*places[1]}
    twice = both or {path for of_set in places for path in of_set if of_set.count(path) > 1}
    if twice:
        what = "a run is in both sets." if both else "a run is named twice."
        raise UserError(what, run=os.path.relpath(min(twice)), next="name each run once")
    if sets[0].name == sets[1].name or not all(NAMES.fullmatch(of.name) for of in sets):
        raise UserError(
            "these names do not tell the sets apart.",
            found=", ".join(of_set.name for of_set in sets),
            expected="two names of letters, digits, blanks and . _ + -",
            next="--names mine theirs, for example",
        )


def _check_counts(sets: Sequence[RunSet]) -> None:
    """Raise UserError for a set of too few runs."""
    for of_set in sets:
        if len(of_set.paths) < FEWEST:
            raise UserError(
                "one run shows no spread, and nothing can be compared with it.",
                set=of_set.name,
                found=", ".join(of_set.paths),
                expected=f"{FEWEST} runs or more; {statistics.fewest_pairs()} for a verdict",
                next="repeat the training, and name the log of each repeat",
            )


def _read_run(path: str) -> Folder | Log:
    folder = Path(path)
    if (folder / "run.json").is_file():
        return Folder(folder, read_run_record(folder / "run.json").record or {})
    try:
        log = Log(Path(path.partition("::")[0]), curve=read(path), name=path)
    except GoldenError as error:
        what, *facts = str(error).splitlines()
        is_of_system = isinstance(error.__cause__, OSError)
        raise UserError(
            "this log cannot be taken as one run.",
            reason="\n".join([what, *map(str.strip, facts)]),
            next=LOOK_AT_DISK
            if is_of_system
            else "name a run's folder, or a log of a format in docs/other-trainers.md",
        ) from None
    if len(log.curve.steps) < 2:
        raise UserError(
            "this log cannot be taken as one run.",
            path=path,
            found=f"one loss, {log.curve.loss[0]:g}",
            expected="a loss of each step, or of every few",
            next="name a run's folder, or a log of a format in docs/other-trainers.md",
        )
    return log


def _number_repeats(runs: Sequence[Sequence[Folder | Log]]) -> list[list[int]]:
    """Return the repeat of each run: of our own runs the recorded one, where a set has each once; of
    other runs those of the other set, then further ones, in the order given.
    """
    recorded = [_list_recorded_repeats(of_set) for of_set in runs]
    found = []
    for own, other, of_set in zip(recorded, reversed(recorded), runs, strict=True):
        first = max(other, default=-1) + 1
        free = [*sorted(other), *range(first, first + len(of_set))]
        found.append(own or free[: len(of_set)])
    return found


def _list_recorded_repeats(runs: Sequence[Folder | Log]) -> list[int]:
    settings = [run.record.get("run") for run in runs if isinstance(run, Folder)]
    found = [of.get("repeat", 0) for of in settings if isinstance(of, dict)]
    is_complete = len(set(found)) == len(runs) and all(type(repeat) is int for repeat in found)
    return found if is_complete else []


def _check_copies(logs: Sequence[Log]) -> None:
    """Raise UserError for two logs with the same losses and times."""
    first: dict[bytes, Log] = {}
    for log in logs:
        if log.curve.time is None:
            continue
        key = log.curve.loss.tobytes() + log.curve.time.tobytes()
        other = first.setdefault(key, log)
        if other is not log:
            raise UserError(
                "two logs are of one run: all losses and times are equal.",
                logs=f"{other.path}, {log.path}",
                next="name each run once",
            )


def _check_steps(logs: Sequence[Log], is_beside_folder: bool) -> None:
    """Raise UserError for logs of which one begins elsewhere, or leaves out other steps."""
    by_start = sorted(logs, key=lambda log: int(log.curve.steps[0]))
    starts = [int(log.curve.steps[0]) for log in by_start]
    by_stride = sorted(logs, key=lambda log: _find_stride(log.curve.steps))
    strides = [_find_stride(log.curve.steps) for log in by_stride]
    least = 1 if is_beside_folder else strides[0]
    if starts[-1] - starts[0] > 1:
        found = [f"{log.name} begins at step {log.curve.steps[0]}" for log in by_start]
    elif strides[-1] > least:
        found = [
            f"{log.name} has a line for every {stride} steps"
            for log, stride in zip(by_stride, strides, strict=True)
        ]
    else:
        return
    raise UserError(
        "the logs are of unequal steps.",
        found=found[0],
        beside=found[-1] if len(found) > 1 else "a run's folder, which has every step",
        next="name logs of the same steps",
    )


def _find_stride(steps: np.ndarray) -> int:
    """Return the distance that most neighbouring steps have; 1 for a single step."""
    return Counter(np.diff(steps).tolist() or [1]).most_common(1)[0][0]


def _copy_run(source: Path, target: Path) -> None:
    """Copy what tables are made of."""
    for path in packed_logs.list_run_files(source):
        copied = target / path.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copied)


def _write_run(log: Log, facts: dict[str, Any], declared: DeclaredFacts, folder: Path) -> None:
    """Write a log as the run of another program, its steps counted from 0. Without times of its steps
    they have none.
    """
    batch, length, devices = _get_sizes(log, declared)
    curve = log.curve
    tokens = batch * length
    unit = _find_unit(log, declared)
    seconds = _convert_times(log, unit, batch, tokens, devices)
    if unit in TIMES:
        _check_batch(log, seconds, batch, tokens, devices)
    counts = {"rows": batch, "useful_tokens": tokens, "total_tokens": tokens}
    steps = (
        {
            "step": step,
            "step_s": float(seconds[step]) if np.isfinite(seconds[step]) else None,
            "loss_sum": float(curve.loss[step]) * tokens,
            **counts,
        }
        for step in range(len(curve.steps))
    )
    read_from = {
        "file": log.path.name,
        "sha256": sha256_file(log.path) if log.path.is_file() else None,
        "time_unit": unit,
        "every": _find_stride(curve.steps),
        "notes": curve.notes,
    }
    shape = {"global_batch": batch, "sequence_length": length, "world_size": devices}
    write_log(folder, facts | shape, read_from, steps)


def _get_sizes(log: Log, declared: DeclaredFacts) -> tuple[int, int, int]:
    """Return sequences of a step, tokens of a sequence, and devices: as declared, or as the log states
    them. Raises UserError where one is neither, both and unequal, or below 1.
    """
    sizes = {
        "--global-batch": (declared.global_batch, log.curve.batch),
        "--sequence-length": (declared.sequence_length, log.curve.length),
        "--devices": (declared.devices, None),
    }
    for flag, (size, stated) in sizes.items():
        if size is not None and size < 1:
            raise UserError(f"{flag} is {size}.", expected="1 or more", next=f"give {flag} another")
        if size and stated and size != stated:
            raise UserError(
                f"a log states another size than {flag}.",
                path=log.path,
                found=stated,
                declared=size,
                next=f"correct {flag}, or compare runs of one size",
            )
    known = {flag: declared or stated for flag, (declared, stated) in sizes.items()}
    missing = [flag for flag, size in known.items() if size is None]
    if missing:
        raise UserError(
            "how many tokens are in a step is not in a log of another trainer.",
            path=log.path,
            expected="sequences of a step over all devices, tokens of a sequence, and devices",
            next=f"add {' N '.join(missing)} N",
        )
    batch, length, devices = (size for size in known.values() if size is not None)
    return batch, length, devices


def _find_unit(log: Log, declared: DeclaredFacts) -> str | None:
    """Return the unit of a log's times: its own, or the declared one of the same kind."""
    logged = log.curve.time_unit
    if logged in (*TIMES, *RATES):
        return logged
    fitting = RATES if logged else tuple(TIMES)
    return declared.time_unit if declared.time_unit in fitting else None


def _convert_times(log: Log, unit: str | None, batch: int, tokens: int, devices: int) -> np.ndarray:
    """Return seconds by step, NaN where none are known. `batch` sequences or `tokens` of a step are
    on so many `devices` together.
    """
    if log.curve.time is None or unit is None:
        return np.full(len(log.curve.steps), np.nan)
    if unit in TIMES:
        return log.curve.time * TIMES[unit]
    return log.curve.time * _count_of_step(unit, batch, tokens, devices)


def _count_of_step(rate: str, batch: int, tokens: int, devices: int) -> float:
    """Return how many of what a rate counts are in a step."""
    counted = tokens if rate.startswith("tokens") else batch
    return counted / (devices if rate.endswith("/device") else 1)


def _check_batch(log: Log, seconds: np.ndarray, batch: int, tokens: int, devices: int) -> None:
    """Raise UserError for a log whose times and rates together are of another batch."""
    rate = log.curve.rate_unit
    if log.curve.rate is None or rate not in RATES:
        return
    of_steps = log.curve.rate * seconds
    of_steps = of_steps[np.isfinite(of_steps)]
    if not len(of_steps):
        return
    declared = _count_of_step(rate, batch, tokens, devices)
    counted = float(np.median(of_steps))
    if not 1 / OTHER_BATCH < counted / declared < OTHER_BATCH:
        what = rate.replace("/s", "").replace("/", " of a ")
        raise UserError(
            "a log's own times and rates are of another batch.",
            path=log.path,
            found=f"{counted:,.0f} {what} in a step",
            declared=f"{declared:,.0f}",
            next="correct --global-batch, --sequence-length or --devices",
        )


def _check_times(log: Log, declared: DeclaredFacts) -> None:
    """Raise UserError for a log that lacks times of steps which a rate counts, or their unit."""
    times = log.curve.time
    counted = len(log.curve.steps[WARM_UP_STEPS:])
    known = 0 if times is None else int(np.isfinite(times[WARM_UP_STEPS:]).sum())
    if times is None or known < counted:
        raise UserError(
            "a log has no time of its steps, and no rate.",
            path=log.path,
            found=f"times of {known} of {counted} steps behind the first {WARM_UP_STEPS}",
            next="add --quantity loss, or log the time of each step",
        )
    is_rate = log.curve.time_unit not in ("", *TIMES)
    grow = (np.diff(times[WARM_UP_STEPS:]) > 0).all()
    if grow and not is_rate and counted > FEWEST_GROWING:
        raise UserError(
            "the times of a log grow with every step, as those since its start do.",
            path=log.path,
            next="log the time of each step, or a rate",
        )
    if _find_unit(log, declared) is None:
        raise UserError(
            "what a rate counts is not in the log."
            if is_rate
            else "the unit of a step's time is not in the log.",
            path=log.path,
            next=f"add --time-unit {', --time-unit '.join(RATES if is_rate else TIMES)}",
        )


def _describe(sets: Sequence[RunSet], quantities: Sequence[str]) -> dict[str, Any]:
    """Return the run table without its runs."""
    of, over = (format_cell({FACTOR: of_set.name}) for of_set in sets)
    names = [of_set.name for of_set in sets]
    pair = {"of": of, "over": over, "names": names, "at": "", "factor": FACTOR}
    counts = {cell: len(of_set.paths) for cell, of_set in zip((of, over), sets, strict=True)}
    return {
        "schema": 1,
        "experiment": NAME,
        "question": f"How do runs of {names[0]} compare with those of {names[1]}?",
        "factors": {FACTOR: names},
        "repeats": min(counts.values()),
        "cell_repeats": counts,
        "primary": [{**pair, "quantity": JUDGED_QUANTITIES[name]} for name in quantities],
        "figures": list(FIGURES),
    }


def compare(folder: Path) -> list[Judged]:
    """Return the comparisons of judged tables. Raises UserError where one has no pair of runs."""
    primary = read_experiment(folder)["primary"]
    with save.Tables(folder) as opened:
        compared, refused = paired_comparisons.read_comparisons(opened.rows, primary)
    tested = [found for found in compared if found.verdict != paired_comparisons.EXPLORATORY]
    known = [
        name
        for name, quantity in JUDGED_QUANTITIES.items()
        for found in tested
        if found.pair.quantity == quantity and found.result.spread.n
    ]
    following = "name runs of equal steps, batches and machines, all of which ended"
    if known:
        following = f"--quantity {known[0]}, which both have"
    for found in tested:
        if not found.result.spread.n:
            raise UserError(
                "these runs cannot be compared.",
                quantity=paired_comparisons.QUANTITIES[found.pair.quantity][2],
                reason=refused or "; ".join(found.notes) or "no repeat is in both sets",
                next=following,
            )
    return tested


def describe(compared: Sequence[Judged]) -> Iterator[str]:
    """Yield the verdicts, each with its spread, and how many runs a verdict takes."""
    for found, answer in zip(compared, paired_comparisons.answers(compared), strict=True):
        yield f"{answer['part']:<10}  {answer['verdict']}: {answer['text']}"
        yield f"{'':<10}  {answer['spread']}"
        if found.verdict == TOO_FEW:
            yield f"{'':<10}  {_describe_repeats(found, family=len(compared))}"


def _describe_repeats(found: Judged, family: int) -> str:
    pairs = found.result.spread.n
    needed = statistics.fewest_pairs(family)
    text = f"{paired_comparisons.in_pairs(pairs)}: no verdict possible; {needed}"
    if pairs < 2:
        return f"{text} are needed"
    of_pairs = [
        (found.pair.values[repeat][1], found.pair.bases[repeat][1])
        for repeat in found.pair.values.keys() & found.pair.bases.keys()
    ]
    a, b = np.array(of_pairs).T
    alone = ""
    if family > 1 and pairs >= statistics.fewest_pairs():
        of = {quantity: name for name, quantity in JUDGED_QUANTITIES.items()}
        alone = f"; --quantity {of[found.pair.quantity]} takes {statistics.fewest_pairs()}"
    if found.pair.quantity != RATE:
        return f"{text} would show {statistics.least_shown(a - b, needed):.2g} nats{alone}"
    share = np.expm1(statistics.least_shown(np.log(a / b), needed))
    return f"{text} would show {number(100 * share, 2)} %{alone}"
