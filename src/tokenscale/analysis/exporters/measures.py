"""Curves for trackers from the events of all ranks, read while ranks still write.

Rates are those of `analysis/sql`. Every numeric field of a line becomes a curve, known or not.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenscale.analysis.live import step_rates
from tokenscale.analysis.queries import WARM_UP
from tokenscale.base.errors import UserError
from tokenscale.runs.records.schema import VERSION

#: first steps of an attempt that are left out of the rates of the whole run
WARMUP_STEPS = WARM_UP["warmup_steps"]
#: places, clocks and names that happen to be numbers
NOT_MEASURED = {"schema", "step", "t_unix_s", "t_mono_s", "order_digest", "world_size"}
#: fields that add up over ranks; all others are the largest rank's, as times and memory are
SUMMED = {"loss_sum", "useful_tokens", "total_tokens", "rows", "energy_j"}
SUMMED_ENDS = ("_sum", "_tokens", "_rows", "_count", "_flops", "_j")
#: fields that stand beside the loss instead of among the raw ones
TRAIN = ("learning_rate", "grad_norm", "grad_norm_clipped")


@dataclass(frozen=True)
class Point:
    """Values of one step, all ranks together. `step` counts from 0; a validation's counts the steps before it."""

    step: int
    t_unix_s: float
    values: dict[str, float]


class Rewritten(Exception):
    """What has been handed out no longer holds: a later attempt repeats it, or it was moved away. Read it all again."""


@dataclass
class _Step:
    attempt: int
    ranks: set[int] = field(default_factory=set)
    values: dict[str, float] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # field → ranks that have it
    t_unix_s: float = 0.0


class Measures:
    """The points of one run. The latest attempt wins per step; a step that lacks a rank is left out."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.broken = 0  # lines that are no JSON objects
        self._offsets: dict[Path, int] = {}
        self._world: dict[int, int] = {}  # attempt → ranks, as they observed it
        self._ranks: dict[int, set[int]] = defaultdict(set)  # attempt → ranks that have a step
        self._first: dict[int, int] = {}  # attempt → its first step
        self._steps: dict[int, _Step] = {}  # not handed out yet
        self._handed: dict[int, int] = {}  # step → attempt
        self._validations: dict[int, tuple[tuple, dict[str, Any]]] = {}
        #: step → corpus of a mixture → line of its validation
        self._sources: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
        self._validated: set[int] = set()
        self._others: dict[str, dict[int, tuple[int, dict[str, Any]]]] = defaultdict(dict)  # event → rank → the last
        self._last = -1  # last step handed out
        self._useful = 0.0
        self._totals: dict[str, float] = defaultdict(float)

    def poll(self, *, ended: bool) -> list[Point]:
        """Points that have become whole since the last call, steps ascending; with `ended` all that is left.

        Raises Rewritten where an earlier answer would be another one now, UserError for logs of a newer version.
        """
        gone = [path for path in self._offsets if not path.exists()]
        if gone:
            raise Rewritten(f"{gone[0]} is gone")
        for directory in sorted(self.directory.glob("attempt=*/rank=*")):
            attempt, rank = (int(part.partition("=")[2]) for part in directory.parts[-2:])
            for line in self._lines(directory / "steps.jsonl", ended):  # before the events: a validation comes first
                self._add_step(attempt, rank, line)
            for line in self._lines(directory / "events.jsonl", ended):
                self._add_event(attempt, rank, line)
        points = [(k, 1, point) for k, point in self._with_rates(list(self._whole_steps(ended)))]
        points += [(k, 0, point) for k, point in self._whole_validations(ended)]
        ordered = [point for *_, point in sorted(points, key=lambda p: p[:2])]
        return [self._with_tokens_seen(point) for point in ordered]

    def summary(self) -> dict[str, float]:
        """Of the whole run: speeds after warm-up, sum over sum (`throughput.sql`, `stalls.sql`), and what was
        reported once."""
        total = self._totals
        (rates,) = step_rates([total])
        waiting = {"data_wait_s": total["data_wait_s"], "step_s": total["waited_step_s"]}
        found = {
            "useful_tokens_per_s": rates["useful_tokens_per_s"],
            "total_tokens_per_s": rates["total_tokens_per_s"],
            "data_wait_share": step_rates([waiting])[0]["data_wait_share"],
            "useful_tokens_seen": self._useful,
        }
        for event, ranks in self._others.items():
            latest = max(attempt for attempt, _ in ranks.values())
            lines = [line for attempt, line in ranks.values() if attempt == latest]
            for name in sorted({name for line in lines for name in line}):
                values = [line[name] for line in lines if name in line]
                found[f"{event}/{name}"] = sum(values) if _summed(name) else max(values)
        return {f"summary/{name}": value for name, value in found.items() if value is not None}

    # -- lines in

    def _lines(self, path: Path, ended: bool) -> Iterator[dict[str, Any]]:
        """New whole lines of a file; the rest of a line is left for later, as long as somebody may write it."""
        if not path.is_file():
            return
        offset = self._offsets.setdefault(path, 0)
        if path.stat().st_size < offset:
            raise Rewritten(f"{path} has become shorter")
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
        whole = len(data) if ended else data.rfind(b"\n") + 1
        self._offsets[path] = offset + whole
        for raw in data[:whole].split(b"\n"):
            if not raw.strip(b"\0 \t\r"):
                continue
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict):
                self.broken += 1
                continue
            if (line.get("schema") or 0) > VERSION:
                raise UserError(
                    "this run's logs were written by a newer tokenscale.",
                    path=path,
                    found=f"schema {line['schema']}",
                    expected=f"at most {VERSION}",
                    next="upgrade tokenscale",
                )
            yield line

    def _add_step(self, attempt: int, rank: int, line: dict[str, Any]) -> None:
        step = line.get("step")
        if not isinstance(step, int):
            self.broken += 1
            return
        self._first[attempt] = min(self._first.get(attempt, step), step)
        self._ranks[attempt].add(rank)
        if self._handed.get(step, attempt) != attempt:
            if attempt > self._handed[step]:
                raise Rewritten(f"attempt {attempt} repeats step {step}")
            return
        if step in self._handed:
            return  # a line twice
        known = self._steps.get(step)
        if known is None or attempt > known.attempt:
            known = self._steps[step] = _Step(attempt)
        if attempt < known.attempt or rank in known.ranks:
            return
        known.ranks.add(rank)
        known.t_unix_s = max(known.t_unix_s, _number(line.get("t_unix_s")) or 0.0)
        for name, value in _numbers(line).items():
            before = known.values.get(name)
            if before is not None:
                value = before + value if _summed(name) else max(before, value)
            known.values[name] = value
            known.seen[name] += 1

    def _add_event(self, attempt: int, rank: int, line: dict[str, Any]) -> None:
        event = line.get("event")
        if event == "run_start" and isinstance(line.get("world_size"), int):
            self._world[attempt] = max(self._world.get(attempt, 0), line["world_size"])
        elif event == "validation":
            if not _number(line.get("useful_tokens")):
                return
            step = line.get("step") or 0
            key = (attempt, -rank, _number(line.get("t_mono_s")) or 0.0)
            if step not in self._validations or key > self._validations[step][0]:
                if step in self._validated:
                    raise Rewritten(f"attempt {attempt} repeats the validation at step {step}")
                self._validations[step] = key, line
        elif event == "source_validation":
            if _number(line.get("useful_tokens")) and isinstance(line.get("corpus"), str):
                self._sources[line.get("step") or 0][line["corpus"]] = line
        elif isinstance(event, str):
            numbers = _numbers(line)
            if numbers and attempt >= self._others[event].get(rank, (attempt,))[0]:
                self._others[event][rank] = attempt, numbers

    # -- points out

    def _whole_steps(self, ended: bool) -> Iterator[tuple[int, float, dict[str, float]]]:
        for step in sorted(self._steps):
            known = self._steps[step]
            world = self._world.get(known.attempt, len(self._ranks[known.attempt]) if ended else None)
            if len(known.ranks) != world:
                continue
            if step <= self._last:
                raise Rewritten(f"step {step} became whole after step {self._last}")
            del self._steps[step]
            self._handed[step] = known.attempt
            self._last = step
            merged = {n: v for n, v in known.values.items() if not _summed(n) or known.seen[n] == world}
            self._count(step - self._first[known.attempt], merged)
            yield step, known.t_unix_s, merged

    def _with_rates(self, steps: list[tuple[int, float, dict[str, float]]]) -> Iterator[tuple[int, Point]]:
        for (step, t_unix_s, _), values in zip(steps, curves([merged for *_, merged in steps]), strict=True):
            yield step, Point(step, t_unix_s, values)

    def _whole_validations(self, ended: bool) -> Iterator[tuple[int, Point]]:
        for step, (_, line) in sorted(self._validations.items()):
            if step in self._validated or not (ended or step <= self._last + 1):
                continue
            self._validated.add(step)
            values = {f"validation/{name}": value for name, value in _numbers(line).items()}
            loss = _ratio(_number(line.get("loss_sum")), line["useful_tokens"])
            if loss is not None:
                values["validation/loss"] = loss
                values["validation/perplexity"] = math.exp(loss) if loss < 700 else math.inf
            for corpus, found in self._sources.get(step, {}).items():  # logged before the validation over all corpora
                values[f"validation/{corpus}/loss"] = _ratio(_number(found.get("loss_sum")), found["useful_tokens"])
            finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
            yield step, Point(step, _number(line.get("t_unix_s")) or 0.0, finite)

    def _count(self, attempt_step: int, merged: dict[str, float]) -> None:
        step_s = merged.get("step_s")
        if attempt_step < WARMUP_STEPS or step_s is None:
            return
        for name in ("useful_tokens", "total_tokens", "step_s"):
            self._totals[name] += merged.get(name, 0.0)
        if "data_wait_s" in merged:
            self._totals["data_wait_s"] += merged["data_wait_s"]
            self._totals["waited_step_s"] += step_s

    def _with_tokens_seen(self, point: Point) -> Point:
        useful = point.values.get("step/useful_tokens")
        if useful is None:  # a validation
            return point
        self._useful += useful
        return Point(point.step, point.t_unix_s, {**point.values, "train/useful_tokens_seen": self._useful})


def curves(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the curves of each step: rates from its sums over ranks and its slowest rank's times, and every field.

    >>> (found,) = curves([{"loss_sum": 30.0, "useful_tokens": 10, "step_s": 0.5, "data_wait_s": 0.1}])
    >>> found["train/loss"], found["speed/useful_tokens_per_s"], found["speed/data_wait_share"]
    (3.0, 20.0, 0.2)
    """
    found = []
    for step, rates in zip(steps, step_rates(steps), strict=True):
        values = {(f"train/{name}" if name in TRAIN else f"step/{name}"): value for name, value in step.items()}
        loss = None if step.get("nonfinite") else rates["loss"]
        named = {"train/loss": loss} | {f"speed/{name}": value for name, value in rates.items() if name != "loss"}
        found.append(values | {name: value for name, value in named.items() if value is not None})
    return found


def _summed(name: str) -> bool:
    return name in SUMMED or name.endswith(SUMMED_ENDS)


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    """Numeric fields; yes and no are 1 and 0."""
    values = {name: _number(value) for name, value in line.items() if name not in NOT_MEASURED}
    return {name: value for name, value in values.items() if value is not None}


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
