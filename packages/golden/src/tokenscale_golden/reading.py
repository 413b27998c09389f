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
    r"\b(tps|tgs|wps|throughput|(tok|tokens|samples) (per )?(s|sec|second)( per (gpu|device))?)$"
)
NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+|nan|inf(?:inity)?)"
PAIR = re.compile(
    rf"([a-z_][a-z_/\-. ()%]*?)['\"]?\s*[:=]?\s*['\"]?({NUMBER})(?=m?s?(?![a-z0-9_]))",
    re.IGNORECASE,
)
_is_number = re.compile(rf"\s*{NUMBER}\s*", re.IGNORECASE).fullmatch
REAL = (float, int)
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
    """Losses, gradient norms and seconds by step (NaN: not known). Units: what a last printed digit
    is worth, or 0.
    """

    steps: np.ndarray
    loss: np.ndarray
    unit: np.ndarray
    norm: np.ndarray | None = None
    norm_unit: np.ndarray | None = None
    time: np.ndarray | None = None
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
        raise GoldenError(f"{path} cannot be read: {error.strerror}.") from None


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
    found = [
        row
        for name in ("steps.jsonl", "*tfevents*")
        for f in sorted(folder.glob(name))
        for row in _read_file(f)
    ]
    for attempt in sorted(folder.glob("attempt=*")):
        steps: dict[Any, dict[str, Any]] = {}
        for row in (
            row for file in sorted(attempt.glob("rank=*/steps.jsonl")) for row in _read_file(file)
        ):
            first = steps.setdefault(row.get("step"), row)
            for name in ("loss_sum", "useful_tokens") if first is not row else ():
                first[name] = sum(
                    r[name] if isinstance(r.get(name), REAL) else math.nan for r in (first, row)
                )
        found += steps.values()
    if not found:
        raise GoldenError(
            f"{folder} has no losses: expected files, steps.jsonl, TensorBoard or attempt=*/rank=*."
        )
    return found


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

    def load(text: str) -> Any:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text, parse_float=_number, parse_int=_number)

    found = load("\n".join(lines)) or [*map(load, lines)]  # the last line of a killed run is cut
    found = found.get("log_history", found) if isinstance(found, dict) else found
    if isinstance(found, dict) and all(map(str.isdecimal, found)):  # by step
        found = [
            {"step": int(k), **(row if isinstance(row, dict) else {"loss": row})}
            for k, row in found.items()
        ]
    if not isinstance(found, dict) or not any(
        isinstance(value, dict | list) for value in found.values()
    ):
        rows = [
            row for row in (found if isinstance(found, list) else [found]) if isinstance(row, dict)
        ]
        return [{name: _number(value) for name, value in row.items()} for row in rows]
    table: dict[str, dict[str, Any]] = {}
    for metric, values in found.items():
        facts = values if isinstance(values, dict) and "values" in values else {"values": values}
        if isinstance(values := facts["values"], list):
            given = facts.get("start_step"), facts.get("step_interval")
            start, interval = (
                int(v) if isinstance(v, REAL) and abs(v) < 1e15 else 1 for v in given
            )
            values = {str(start + i * interval): value for i, value in enumerate(values)}
        for step, value in values.items() if isinstance(values, dict) else ():
            if step.isdecimal():
                table.setdefault(step, {"step": int(step)})[metric] = (
                    math.nan if value is None else _number(value)
                )
    return [table[step] for step in sorted(table, key=int)] or [found]


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
    names = names if any(map(_is_number, cells[0])) else cells.pop(0)
    # a killed run
    cells = cells[:-1] if len(cells) > 1 and len(cells[-1]) < len(cells[-2]) else cells
    fits = any(map(_is_loss, names)) and all(
        2 <= len(row) <= len(names) and all(map(_is_number, row)) for row in cells
    )
    return [dict(zip(names, map(_number, row), strict=False)) for row in cells] if fits else []


def _read_output(lines: list[str]) -> Rows:
    """Return the lines of standard output that name a loss."""
    rows: Rows = []
    for line in lines:
        row: dict[str, Any] = {}
        for key, text in PAIR.findall(line[:1000]):
            name = _words(key)
            if not STEP.search(name):
                row[name] = _number(text, thousands=not _is_loss(name))
            elif "step" not in row or name.endswith("step"):
                row["step"] = _number(text, thousands=True)
        rows += [row] if any(map(_is_loss, row)) else []
    return rows


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


def _value_of(row: dict[str, Any], column: str | None) -> Any:
    return None if column is None else row.get(column)


def _pick(path: str, rows: Rows, chosen: str) -> Curve:  # noqa: C901
    """Return the curve of the columns for step, loss, gradient norm and time."""
    for row in rows:  # our logs, where null is not finite
        if isinstance(row.get("useful_tokens"), REAL) and isinstance(
            row.get("loss_sum", ""), float | None
        ):
            row["loss"] = float("nan" if row["loss_sum"] is None else row["loss_sum"]) / max(
                1.0, row["useful_tokens"]
            )
    label = next(
        (n for n in ("run", "run_id", "run_name", "Name", "name") if any(n in row for row in rows)),
        "",
    )
    # run, as a column or in front of names → columns of losses
    series: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        for name in (name for name in row if _is_loss(name) and isinstance(row[name], REAL)):
            series.setdefault((str(row.get(label, "")), name.rpartition(" - ")[0]), {})[name] = None
    found = {}
    for (run, prefix), names in series.items():
        best = [name for known in LOSSES for name in names if _words(name) == known][:1] or [*names]
        for name in [chosen] if chosen in names else best:
            found[chosen if name == chosen else prefix or run if len(best) == 1 else name] = (
                run,
                name,
            )
    if not found:
        shown = (
            f"\n  first line  {json.dumps(rows[0], default=str)[:160]}\n  understood  "
            f"{[*rows[0]][:8]}"
        )
        raise GoldenError(f"{path} has no column of training losses.{shown}")
    if chosen not in found if chosen else len(found) > 1:
        many = f"no {chosen!r} among the runs or columns" if chosen else "several runs or columns"
        raise GoldenError(
            f"{path}: {many} with losses: {[*found]}.\n  choose  "
            f"{path}::{next(iter(found)) or 'NAME'}"
        )
    run, loss = found[chosen] if chosen else next(iter(found.values()))
    rows = [row for row in rows if loss in row and (not run or str(row.get(label)) == run)]
    real = [row for row in rows if isinstance(row[loss], REAL)]
    front = ("", loss.rpartition(" - ")[0])
    mine = [
        *dict.fromkeys(
            n for row in real for n in row if n != loss and n.rpartition(" - ")[0] in front
        )
    ]
    norm, rate, step = (
        next((n for n in mine if kind.search(_words(n))), None) for kind in (NORM, RATE, STEP)
    )
    times = [n for n in mine if TIME.search(_words(n)) and not NO_TIME & {*_words(n).split()}]
    time = min(
        times,
        key=lambda name: not {"step", "iteration", "iter"} & {*_words(name).split()},
        default=None,
    )
    notes = [] if step else ["no column of steps: lines are counted from 1"]
    # null is not finite, unless another row has the loss of the step
    known = {_value_of(row, step) for row in real}
    rows = [
        row
        for row in rows
        if isinstance(row[loss], REAL) or (row[loss] is None and _value_of(row, step) not in known)
    ]
    numbers = [
        at if isinstance(at := _value_of(row, step), REAL) else i for i, row in enumerate(rows, 1)
    ]
    if wrong := [at for at in numbers if not abs(at) < 1e15 or at != int(at)]:
        raise GoldenError(
            f"{path}: steps must be whole numbers; {step!r} has {wrong[0]} (columns swapped?)."
        )
    if repeated := len(numbers) - len({*numbers}):
        notes.append(f"{repeated} steps are there twice (a resumed run?): the later line counts")
    table: dict[int, dict[str, Any]] = {}
    for number, row in zip(map(int, numbers), rows, strict=True):
        while repeated and table and next(reversed(table)) >= number:
            table.popitem()
        table[number] = row
    columns = [
        [_value_of(table[number], name) for number in sorted(table)]
        for name in (loss, norm, time or rate)
    ]
    values = [
        np.array([float(v) if isinstance(v, REAL) else math.nan for v in column])
        for column in columns
    ]
    units = [np.array([getattr(v, "unit", 0.0) for v in column]) for column in columns]
    # zeros at the end may have been left out: the smallest unit counts
    for i, column in enumerate(columns):
        if not any(getattr(v, "exponent", "") for v in column):
            units[i][:] = min(units[i][units[i] > 0], default=0.0)
    if rate and not time:
        values[2] = np.divide(
            1.0, values[2], out=np.full(len(values[2]), math.nan), where=values[2] > 0
        )
    norms, seconds = (found if np.isfinite(found).any() else None for found in values[1:])
    return Curve(
        steps=np.array(sorted(table)),
        loss=values[0],
        unit=units[0],
        norm=norms,
        norm_unit=units[1],
        time=seconds,
        notes=notes,
    )
