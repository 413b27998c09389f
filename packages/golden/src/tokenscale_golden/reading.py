"""Read loss curves from the files that people have: text, JSON, CSV, TensorBoard, standard output,
our logs.
"""

import contextlib
import csv
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LOSSES = (
    "loss",
    "train loss",
    "training loss",
    "lm loss",
    "loss train",
    "reduced train loss",
    "global avg loss",
)
NO_LOSS = {
    "val",
    "valid",
    "validation",
    "eval",
    "test",
    "dev",
    "scale",
    "scaling",
    "aux",
    "balance",
    "balancing",
    "z",
    "mtp",
    "min",
    "max",
    "best",
}
STEP = re.compile(r"\b(steps?|iterations?|iter|it|num updates)$")
NORM = re.compile(r"\bgrad(ient)?s? ?norm$|^(global )?norm$|^gnorm$")
TIME = re.compile(
    r"\b(time|time m?s|step m?s|m?s|dt|seconds|sec|step timing in s|time per (step|iteration)( "
    r"m?s)?)$"
)
NO_TIME = {
    "run",
    "total",
    "relative",
    "wall",
    "eta",
    "remaining",
    "data",
    "wait",
    "val",
    "eval",
    "start",
    "end",
    "since",
    "forward",
    "backward",
}
RATE = re.compile(
    r"\b(tps|tgs|wps|throughput|(tok|tokens|samples) (per )?(s|sec|second)( (per )?(gpu|device))?)$"
)
#: sizes that a trainer's output states, in a step's line or before it
BATCH = re.compile(r"\bglobal (train )?batch( size)?$")
LENGTH = re.compile(r"\b(sequence|seq) len(gth)?$")
#: words of a rate → what it counts a second
COUNTED = {"tokens/s": {"tok", "tokens", "tps", "tgs"}, "samples/s": {"samples"}}
#: words of a rate of one device: so torchtitan's `tps` counts, and InternEvo's `tgs`
OF_A_DEVICE = {"tps", "tgs", "gpu", "device"}
SECONDS = {"s", "sec", "seconds"}
#: letters behind a number of standard output
SCALES = {"K": 1e3, "M": 1e6, "B": 1e9}
NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+|nan|inf(?:inity)?)"
#: a name and its number; or a name without one, taken whole so that it is tried once, not from each
#: of its letters
PAIR = re.compile(
    r"([a-z_][a-z_/\-. ()%]*?)(?:['\"]|(?<!\s))\s*+(?:[:=]\s*+)?['\"]?"
    rf"({NUMBER})(?=(?:m?s?|(?-i:[{''.join(SCALES)}]))(?![a-z0-9_]))|[a-z_][a-z_/\-. ()%]*+",
    re.IGNORECASE,
)
#: behind a number; and numbers that have a unit in place of a name, as llm.c prints them
UNIT = re.compile(r"\s?(m?s)(?![a-z0-9_])")
UNNAMED = re.compile(r"(?<![\d.,\w])(\d++(?:\.\d++)?+) (ms|tok/s)(?![a-z0-9_])")
_is_number = re.compile(rf"\s*{NUMBER}\s*", re.IGNORECASE).fullmatch
REAL = (float, int)
#: columns that name the run
LABELS = ("run", "run_id", "run_name", "Name", "name")
#: words of a time's name that say that it is of one step
STEP_WORDS = {"step", "iteration", "iter"}
#: larger numbers are no steps: beyond, floats skip whole numbers
LARGEST_STEP = 1e15
Rows = list[dict[str, Any]]
csv.field_size_limit(2**30)  # a line of a log


class GoldenError(ValueError):
    """Input that cannot be compared: one message with what was found and what is expected."""


class Number(float):
    """A printed number. `unit` is what one unit of its last digit is worth; it moves with an
    `exponent`.
    """

    unit = 0.0
    exponent = ""


@dataclass
class Curve:
    """Losses, gradient norms and times by step (NaN: not known). Units: what a last printed digit is
    worth, or 0. `time_unit` is what the log says of times: s or ms; tokens/s, samples/s or another
    rate/s if they are 1 over a rate, with /device behind it if that is of one device; or "". `rate` is
    what the log counts a second, in `rate_unit`. `batch` (sequences of a step over all devices) and
    `length` (tokens of a sequence) are what the log states; None where it states none, or several.
    """

    steps: np.ndarray
    loss: np.ndarray
    unit: np.ndarray
    norm: np.ndarray | None = None
    norm_unit: np.ndarray | None = None
    time: np.ndarray | None = None
    time_unit: str = ""
    rate: np.ndarray | None = None
    rate_unit: str = ""
    batch: int | None = None
    length: int | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, losses: Sequence[float], norms: Sequence[float] | None = None) -> "Curve":
        """Return the curve of losses (and gradient norms) of steps 1, 2, … in full precision."""
        loss = np.array(losses, float)
        zero = np.zeros(len(losses))
        return cls(
            np.arange(1, len(loss) + 1),
            loss,
            zero,
            None if norms is None else np.array(norms, float),
            zero,
        )


def read(path: str | Path) -> Curve:
    """Return the curve of a file or a run's folder; `FILE::NAME` chooses a run or column. Raises
    GoldenError.
    """
    path, _, chosen = str(path).partition("::")
    try:
        return _pick(
            path,
            rows=_read_folder(Path(path)) if Path(path).is_dir() else _read_file(Path(path)),
            chosen=chosen,
        )
    except OSError as error:
        raise GoldenError(f"{path} cannot be read: {error.strerror}.") from error


def is_run(path: Path) -> bool:
    """Whether a path is one curve and not a folder of curves. Raises GoldenError for a missing
    one.
    """
    if not Path(str(path).partition("::")[0]).exists():
        raise GoldenError(f"{path} does not exist.")
    return not path.is_dir() or any(
        any(path.glob(name)) for name in ("steps.jsonl", "attempt=*", "*tfevents*")
    )


def _read_folder(folder: Path) -> Rows:
    """Return the steps of a recording, of TensorBoard or of our logs (summed over ranks; a later
    attempt counts).
    """
    found = []
    for name in ("steps.jsonl", "*tfevents*"):
        for file in sorted(folder.glob(name)):
            found += _read_file(file)
    for attempt in sorted(folder.glob("attempt=*")):
        found += _sum_ranks(attempt)
    if not found:
        raise GoldenError(
            f"{folder} has no losses: expected files, steps.jsonl, TensorBoard or attempt=*/rank=*."
        )
    return found


def _sum_ranks(attempt: Path) -> Rows:
    """Return one row a step of an attempt, with the sums of the losses and tokens of all ranks."""
    steps: dict[Any, dict[str, Any]] = {}
    for file in sorted(attempt.glob("rank=*/steps.jsonl")):
        for row in _read_file(file):
            first = steps.setdefault(row.get("step"), row)
            if first is row:
                continue
            for name in ("loss_sum", "useful_tokens"):
                known = [r[name] for r in (first, row) if isinstance(r.get(name), REAL)]
                first[name] = sum(known) if len(known) == 2 else math.nan
    return [*steps.values()]


def _read_file(path: Path) -> Rows:
    if not path.is_file():
        raise GoldenError(f"{path} is not a regular file.")
    if "tfevents" in path.name:
        return _read_events(path)
    utf16 = (content := path.read_bytes())[:2] in (b"\xff\xfe", b"\xfe\xff")
    if not utf16 and b"\0" in content[:4096]:
        raise GoldenError(
            f"{path} is a binary file; expected text, JSON, CSV or TensorBoard events (*tfevents*)."
        )
    text = content.decode("utf-16" if utf16 else "utf-8-sig", errors="replace")
    lines = [
        line for line in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).splitlines() if line.strip()
    ]
    if not lines:
        raise GoldenError(f"{path} is empty.")
    plain = [line for line in lines if not line.lstrip().startswith(("#", "//"))] or lines
    for reader in (_read_json, _read_csv, _read_numbers, _read_output):
        if rows := reader(lines if reader is _read_output else plain):
            return rows
    shown = " / ".join(line[:80] for line in dict.fromkeys([*lines[:2], lines[-1]]))
    known = (
        "no JSON, no CSV with a header (decimal commas: ; between cells), no lines of numbers, "
        "no 'step 1 loss 2.3'"
    )
    raise GoldenError(f"{path} has no losses.\n  lines       {shown}\n  understood  {known}")


def _read_json(lines: list[str]) -> Rows:
    """Return rows of JSON: Megatron's values by metric and step, lists by metric, a list of rows,
    or a row a line.
    """
    # the last line of a killed run is cut
    found = _load_json("\n".join(lines)) or [_load_json(line) for line in lines]
    if isinstance(found, dict):
        found = found.get("log_history", found)
    if isinstance(found, dict) and all(map(str.isdecimal, found)):
        found = [_row_of_step(step, value) for step, value in found.items()]
    if isinstance(found, dict):
        if any(isinstance(value, dict | list) for value in found.values()):
            return _join_metrics(found) or [found]
        found = [found]
    if not isinstance(found, list):
        return []
    return [
        {name: _number(value) for name, value in row.items()}
        for row in found
        if isinstance(row, dict)
    ]


def _load_json(text: str) -> Any:
    """Return the value of a JSON text; None if it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text, parse_float=_number, parse_int=_number)


def _row_of_step(step: str, value: object) -> dict[str, Any]:
    row = value if isinstance(value, dict) else {"loss": value}
    return {"step": int(step)} | row


def _join_metrics(found: dict[str, Any]) -> Rows:
    """Return rows by step of metrics, each with values by step or with a list."""
    table: dict[str, dict[str, Any]] = {}
    for metric, given in found.items():
        for step, value in _values_by_step(given).items():
            if step.isdecimal():
                row = table.setdefault(step, {"step": int(step)})
                row[metric] = math.nan if value is None else _number(value)
    return [table[step] for step in sorted(table, key=int)]


def _values_by_step(given: object) -> dict[str, Any]:
    """Return one metric's values by step; none where they are neither by step nor a list."""
    facts = given if isinstance(given, dict) and "values" in given else {"values": given}
    values = facts["values"]
    if isinstance(values, dict):
        return values
    if not isinstance(values, list):
        return {}
    start = _whole_or_one(facts.get("start_step"))
    interval = _whole_or_one(facts.get("step_interval"))
    return {str(start + place * interval): value for place, value in enumerate(values)}


def _whole_or_one(value: object) -> int:
    return int(value) if isinstance(value, REAL) and abs(value) < LARGEST_STEP else 1


def _read_csv(lines: list[str]) -> Rows:
    """Return rows of CSV with a header. Behind ; or a tab a comma is a decimal one."""
    delimiter = max(",;\t", key=lines[0].count)
    names, *rows = (
        [cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter)
    )
    # TensorBoard's
    names = ["wall time", "step", "loss"] if names == ["Wall time", "Step", "Value"] else names
    if (
        any(map(_is_number, names))
        or not any(map(_is_loss, names))
        or not any(map(_is_number, (rows or [[]])[0]))
    ):
        return []
    rows = rows[:-1] if len(rows[-1]) < len(names) else rows  # a killed run
    fits = all(len(row) == len(names) for row in rows)
    return [
        {n: _number(cell) for n, cell in zip(names, row, strict=False) if cell}
        for row in rows
        if fits
    ]


def _read_numbers(lines: list[str]) -> Rows:
    """Return rows of `step loss [grad_norm] [time]`; a header renames the columns."""
    cells = [line.split() for line in lines]
    names = ["step", "loss", "grad_norm", "time"]
    if not any(map(_is_number, cells[0])):
        names = cells.pop(0)
    is_cut = len(cells) > 1 and len(cells[-1]) < len(cells[-2])  # a killed run
    if is_cut:
        cells.pop()
    if not any(map(_is_loss, names)):
        return []
    for row in cells:
        if not 2 <= len(row) <= len(names) or not all(map(_is_number, row)):
            return []
    return [dict(zip(names, map(_number, row), strict=False)) for row in cells]


def _read_output(lines: list[str]) -> Rows:
    """Return the lines of standard output that name a loss, with the sizes that lines before them
    state.
    """
    rows: Rows = []
    sizes: dict[str, Any] = {}
    for line in lines:
        row: dict[str, Any] = {}
        shown = " ".join(line[:1000].split())
        for pair in PAIR.finditer(shown):
            key, text = pair.groups()
            if not key:
                continue
            name = _words(key)
            unit = UNIT.match(shown, pair.end())
            if unit and TIME.search(name) and not name.endswith("ms"):
                name += f" {unit[1]}"
            if not STEP.search(name):
                row[name] = _number(text, thousands=not _is_loss(name))
                if scale := SCALES.get(shown[pair.end() : pair.end() + 1]):
                    row[name] *= scale
            elif "step" not in row or name.endswith("step"):
                row["step"] = _number(text, thousands=True)
        for text, unit in UNNAMED.findall(shown):
            row.setdefault(_words(unit), _number(text, thousands=True))
        if any(map(_is_loss, row)):
            rows.append(sizes | row)
        else:
            sizes |= {name: value for name, value in row.items() if _is_size(name)}
    return rows


def _is_size(name: str) -> bool:
    return bool(BATCH.search(_words(name)) or LENGTH.search(_words(name)))


def _read_events(path: Path) -> Rows:
    """Return the scalars of a TensorBoard file, one row a step."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise GoldenError(
            f"{path} is TensorBoard's, and tensorboard is missing: pip install tensorboard."
        ) from None
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    found = [
        (e.step, tag, e.value) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)
    ]
    steps: dict[int, dict[str, Any]] = {}
    for step, tag, value in sorted(found, key=lambda scalar: scalar[0]):
        steps.setdefault(step, {"step": step})[tag] = value
    return [*steps.values()]


def _number(value: object, thousands: bool = False) -> Any:
    """Return the number of a text, with the digits that it was printed with; other values
    unchanged.
    """
    if not isinstance(value, str) or not _is_number(value):
        return value
    grouped = re.fullmatch(r"\s*[-+]?\d{1,3}(,\d{3})+(\.\d*)?\s*", value) and (
        thousands or "." in value
    )
    decimal = value.count(",") == 1 and "." not in value and not grouped
    text = value.strip().lower().replace(",", "." if decimal else "")
    mantissa, exponent, power = text.partition("e")
    found = Number(text)
    if math.isfinite(found):
        found.unit = 10.0 ** min(99, int(power or 0) - len(mantissa.partition(".")[2]))
        found.exponent = exponent
    return found


def _words(name: str) -> str:
    """Return the words of a column's name, without the run that W&B writes in front of it."""
    return " ".join(re.findall(r"[a-z0-9]+", name.rpartition(" - ")[2].lower()))


def _is_loss(name: str) -> bool:
    return bool((words := {*_words(name).split()}) & {"loss", "losses"}) and not words & NO_LOSS


def _pick(path: str, rows: Rows, chosen: str) -> Curve:
    """Return the curve of the columns for step, loss, gradient norm and time."""
    _add_losses_of_sums(rows)
    label = _find_label(rows)
    run, loss = _choose_loss(path, rows, label=label, chosen=chosen)
    rows = [row for row in rows if loss in row and (not run or str(row.get(label)) == run)]
    columns = _find_columns(rows, loss)
    notes = [] if columns.step else ["no column of steps: lines are counted from 1"]
    rows = _drop_empty_losses(rows, columns)
    numbers = _number_steps(path, rows, step=columns.step)
    repeated = len(numbers) - len({*numbers})
    if repeated:
        notes.append(f"{repeated} steps are there twice (a resumed run?): the later line counts")
    table = _table_by_step(numbers, rows)
    found_rows = [table[step] for step in sorted(table)]
    losses = _read_column(found_rows, loss)
    norms = _read_column(found_rows, columns.norm)
    rates = _read_column(found_rows, columns.rate).values
    rate_unit = _find_rate_unit(columns.rate)
    if columns.rate and not columns.time:
        unknown = np.full(len(rates), math.nan)
        seconds = np.divide(1.0, rates, out=unknown, where=rates > 0)
    else:
        seconds = _read_column(found_rows, columns.time).values
    return Curve(
        steps=np.array(sorted(table)),
        loss=losses.values,
        unit=losses.units,
        norm=_unless_unknown(norms.values),
        norm_unit=norms.units,
        time=_unless_unknown(seconds),
        time_unit=_find_time_unit(columns.time) if columns.time else rate_unit,
        rate=_unless_unknown(rates),
        rate_unit=rate_unit,
        batch=_find_size(found_rows, BATCH),
        length=_find_size(found_rows, LENGTH),
        notes=notes,
    )


def _find_size(rows: Rows, kind: re.Pattern[str]) -> int | None:
    """Return the only size of a kind that rows state; None for none, or several."""
    found = {
        value
        for row in rows
        for name, value in row.items()
        if kind.search(_words(name)) and isinstance(value, REAL)
    }
    size = found.pop() if len(found) == 1 else 0
    return int(size) if 0 < size < LARGEST_STEP and size == int(size) else None


def _add_losses_of_sums(rows: Rows) -> None:
    """Add the loss to the rows of our logs, where a sum that is null is not finite."""
    for row in rows:
        tokens = row.get("useful_tokens")
        if isinstance(tokens, REAL) and isinstance(row.get("loss_sum", ""), float | None):
            loss_sum = math.nan if row["loss_sum"] is None else row["loss_sum"]
            row["loss"] = float(loss_sum) / max(1.0, tokens)


def _find_label(rows: Rows) -> str:
    """Return the column that names the run; "" if there is none."""
    for name in LABELS:
        if any(name in row for row in rows):
            return name
    return ""


def _run_in_front(name: str) -> str:
    """Return the run that W&B writes in front of a column's name."""
    return name.rpartition(" - ")[0]


def _list_losses(rows: Rows, label: str) -> dict[tuple[str, str], list[str]]:
    """Return columns of losses by run, as a column and in front of names."""
    series: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        for name, value in row.items():
            if _is_loss(name) and isinstance(value, REAL):
                run = (str(row.get(label, "")), _run_in_front(name))
                series.setdefault(run, {})[name] = None
    return {run: [*names] for run, names in series.items()}


def _choose_loss(path: str, rows: Rows, label: str, chosen: str) -> tuple[str, str]:
    """Return the run and the column of the losses. Raises GoldenError where there are none or
    several.
    """
    found: dict[str, tuple[str, str]] = {}
    for (run, prefix), names in _list_losses(rows, label).items():
        if chosen in names:
            found[chosen] = (run, chosen)
            continue
        best = _best_known(names)
        for name in best:
            found[prefix or run if len(best) == 1 else name] = (run, name)
    if not found:
        shown = (
            f"\n  first line  {json.dumps(rows[0], default=str)[:160]}\n  understood  "
            f"{[*rows[0]][:8]}"
        )
        raise GoldenError(f"{path} has no column of training losses.{shown}")
    if chosen and chosen not in found:
        raise _choice_error(path, f"no {chosen!r} among the runs or columns", found)
    if not chosen and len(found) > 1:
        raise _choice_error(path, "several runs or columns", found)
    return found[chosen] if chosen else next(iter(found.values()))


def _best_known(names: list[str]) -> list[str]:
    """Return the one column that has the first of the known names, else all."""
    for known in LOSSES:
        for name in names:
            if _words(name) == known:
                return [name]
    return names


def _choice_error(path: str, what: str, found: dict[str, tuple[str, str]]) -> GoldenError:
    if [*found] == [""]:
        return GoldenError(f"{path} has one run, without a name.\n  choose  {path}")
    example = next(iter(found)) or "NAME"
    return GoldenError(f"{path}: {what} with losses: {[*found]}.\n  choose  {path}::{example}")


@dataclass
class _Columns:
    """Names of the columns beside the loss; None for those that a file lacks."""

    loss: str
    step: str | None
    norm: str | None
    time: str | None
    rate: str | None


def _find_columns(rows: Rows, loss: str) -> _Columns:
    """Find the columns of the same run as the loss, in rows that have one."""
    prefixes = ("", _run_in_front(loss))
    names: dict[str, None] = {}
    for row in rows:
        if isinstance(row[loss], REAL):
            names |= dict.fromkeys(
                name for name in row if name != loss and _run_in_front(name) in prefixes
            )

    def find(kind: re.Pattern[str]) -> str | None:
        return next((name for name in names if kind.search(_words(name))), None)

    def is_not_of_step(name: str) -> bool:
        return not STEP_WORDS & {*_words(name).split()}

    times = [
        name
        for name in names
        if TIME.search(_words(name))
        and not RATE.search(_words(name))
        and not NO_TIME & {*_words(name).split()}
    ]
    return _Columns(
        loss=loss,
        step=find(STEP),
        norm=find(NORM),
        time=min(times, key=is_not_of_step, default=None),
        rate=find(RATE),
    )


def _find_time_unit(name: str) -> str:
    """Return the unit that the name of the times states; "" if it states none."""
    words = _words(name).split()
    if "ms" in words:
        return "ms"
    return "s" if SECONDS & {*words} else ""


def _find_rate_unit(name: str | None) -> str:
    """Return what a rate counts by its name, and whether it is of one device; "" without a rate."""
    if name is None:
        return ""
    words = {*_words(name).split()}
    unit = next((unit for unit, counted in COUNTED.items() if counted & words), "rate/s")
    return f"{unit}/device" if OF_A_DEVICE & words else unit


def _drop_empty_losses(rows: Rows, columns: _Columns) -> Rows:
    """Return the rows with a loss, or with null: not finite, unless another row has the loss of
    the step.
    """
    loss = columns.loss
    known = {_get(row, columns.step) for row in rows if isinstance(row[loss], REAL)}
    return [
        row
        for row in rows
        if isinstance(row[loss], REAL)
        or (row[loss] is None and _get(row, columns.step) not in known)
    ]


def _get(row: dict[str, Any], name: str | None) -> Any:
    """Return a row's value in a column; None where the column is not known."""
    return None if name is None else row.get(name)


def _number_steps(path: str, rows: Rows, step: str | None) -> list[Any]:
    """Return the step of each row, which is its number where it has none."""
    numbers = []
    for line, row in enumerate(rows, 1):
        number = _get(row, step)
        numbers.append(number if isinstance(number, REAL) else line)
    for number in numbers:
        if not abs(number) < LARGEST_STEP or number != int(number):
            raise GoldenError(
                f"{path}: steps must be whole numbers; {step!r} has {number} (columns swapped?)."
            )
    return numbers


def _table_by_step(numbers: list[Any], rows: Rows) -> dict[int, dict[str, Any]]:
    """Return rows by step. A row of an earlier step than the last drops the rows from there on."""
    is_resumed = len(numbers) > len({*numbers})
    table: dict[int, dict[str, Any]] = {}
    for number, row in zip(map(int, numbers), rows, strict=True):
        while is_resumed and table and next(reversed(table)) >= number:
            table.popitem()
        table[number] = row
    return table


@dataclass
class _Column:
    """Numbers of a column, NaN where there is none, and the worth of their last digits."""

    values: np.ndarray
    units: np.ndarray


def _read_column(rows: Rows, name: str | None) -> _Column:
    cells = [_get(row, name) for row in rows]
    values = [float(cell) if isinstance(cell, REAL) else math.nan for cell in cells]
    units = np.array([getattr(cell, "unit", 0.0) for cell in cells])
    # zeros at the end may have been left out: the smallest unit counts
    if not any(getattr(cell, "exponent", "") for cell in cells):
        units[:] = min(units[units > 0], default=0.0)
    return _Column(values=np.array(values), units=units)


def _unless_unknown(values: np.ndarray) -> np.ndarray | None:
    return values if np.isfinite(values).any() else None
