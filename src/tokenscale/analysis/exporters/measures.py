"""Points for trackers from the logs of all ranks, also while ranks still write. Rates are those of `analysis/sql`."""

import math
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from tokenscale.analysis.queries import WARM_UP, step_rates
from tokenscale.base.errors import UserError
from tokenscale.runs.records.events import FIELDS, VERSION

#: first steps of an attempt that are left out of the rates of the whole run
WARMUP_STEPS = WARM_UP["warmup_steps"]
#: places, clocks and names that happen to be numbers
NOT_MEASURED = {"schema", "step", "t_unix_s", "t_mono_s", "order_digest", "world_size"}
#: fields that add up over ranks; all others are the largest rank's, as times and memory are
SUMMED = {"loss_sum", "useful_tokens", "total_tokens", "rows", "energy_j"}
SUMMED_ENDS = ("_sum", "_tokens", "_rows", "_count", "_flops", "_j")
#: fields that stand beside the loss instead of among the raw ones
TRAIN = ("learning_rate", "grad_norm", "grad_norm_clipped")
#: numeric fields of a file
NUMBERS = {
    kind: [name for name, sql in FIELDS[kind].items() if sql != "VARCHAR" and name not in NOT_MEASURED]
    for kind in ("steps", "events")
}
_PLACE = r"attempt=(\d+)/rank=(\d+)/\w+\.jsonl$"
#: whole lines, in the order of attempts, ranks and lines
_READ = f"""
INSERT INTO {{kind}} BY NAME
SELECT * EXCLUDE (filename), regexp_extract(filename, '{_PLACE}', 1)::INTEGER AS attempt,
    regexp_extract(filename, '{_PLACE}', 2)::INTEGER AS rank, row_number() OVER () AS line
FROM read_json(?, columns = ?, format = 'newline_delimited', ignore_errors = true, filename = true,
    hive_partitioning = false)
"""
#: steps that every rank has written, in the latest attempt that has them
_STEPS = """
WITH attempts AS (SELECT attempt, count(DISTINCT rank) AS ranks, min(step) AS first FROM steps GROUP BY attempt),
worlds AS (SELECT attempt, max(world_size) AS world FROM events WHERE event = 'run_start' GROUP BY attempt),
latest AS (
    FROM steps WHERE step IS NOT NULL
    QUALIFY attempt = max(attempt) OVER (PARTITION BY step)
        AND row_number() OVER (PARTITION BY step, attempt, rank ORDER BY line) = 1
)
SELECT step, coalesce(max(t_unix_s), 0.0), step - any_value(first), {numbers}
FROM latest JOIN attempts USING (attempt) LEFT JOIN worlds USING (attempt)
GROUP BY step HAVING count(*) = any_value(coalesce(world, CASE WHEN ? THEN ranks END)) ORDER BY step
"""
_VALIDATIONS = """
SELECT coalesce(step, 0) AS step_, coalesce(t_unix_s, 0.0), {numbers}
FROM events WHERE event = 'validation' AND useful_tokens <> 0
QUALIFY row_number() OVER (PARTITION BY step_ ORDER BY attempt DESC, rank, t_mono_s DESC NULLS LAST, line) = 1
ORDER BY step_
"""
_SOURCES = """
SELECT coalesce(step, 0) AS step_, corpus, loss_sum / useful_tokens
FROM events WHERE event = 'source_validation' AND useful_tokens <> 0 AND corpus IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY step_, corpus ORDER BY line DESC) = 1 ORDER BY line
"""
#: every other event: of each rank the last line with a number, if it is of the latest attempt
_OTHERS = """
WITH latest AS (
    FROM events
    WHERE event NOT IN ('run_start', 'validation', 'source_validation') AND coalesce({present}) IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY event, rank ORDER BY attempt DESC, line DESC) = 1
)
SELECT event, {numbers} FROM (FROM latest QUALIFY attempt = max(attempt) OVER (PARTITION BY event))
GROUP BY event ORDER BY min(line)
"""


@dataclass(frozen=True)
class Point:
    """Values of one step, all ranks together. `step` counts from 0; a validation's counts the steps before it."""

    step: int
    t_unix_s: float
    values: dict[str, float]


def read(directory: Path, *, ended: bool) -> tuple[list[Point], dict[str, float]]:
    """Return the points of a run, steps ascending, and values of the whole run.

    The latest attempt wins per step. A step that lacks a rank is left out, and so is a validation after it unless the
    run has `ended`. Raises UserError for logs of a newer version.
    """
    with closing(duckdb.connect(":memory:")) as connection:
        connection.execute("SET threads = 1")
        for kind in NUMBERS:
            _load(connection, directory, kind)
        columns = ", ".join(_over_ranks(name) for name in NUMBERS["steps"])
        rows = connection.execute(_STEPS.format(numbers=columns), [ended]).fetchall()
        validations = _validations(connection)
        others = _others(connection)
    steps = [_present(NUMBERS["steps"], row[3:]) for row in rows]
    points, useful = [], 0.0
    for (step, t_unix_s, *_), values in zip(rows, curves(steps), strict=True):
        if "step/useful_tokens" in values:
            useful += values["step/useful_tokens"]
            values["train/useful_tokens_seen"] = useful
        points.append(Point(step, t_unix_s, values))
    last = points[-1].step if points else -1
    shown = [point for point in validations if ended or point.step <= last + 1]
    summary = _rates([row[2] for row in rows], steps) | {"useful_tokens_seen": useful} | others
    ordered = sorted([(p.step, 1, p) for p in points] + [(p.step, 0, p) for p in shown], key=lambda p: p[:2])
    return [point for *_, point in ordered], {f"summary/{n}": v for n, v in summary.items() if v is not None}


def _load(connection: duckdb.DuckDBPyConnection, directory: Path, kind: str) -> None:
    columns = FIELDS[kind] | {"attempt": "INTEGER", "rank": "INTEGER", "line": "BIGINT"}
    connection.execute(f"CREATE TABLE {kind} ({', '.join(f'{name} {sql}' for name, sql in columns.items())})")
    files = [str(path) for path in sorted(directory.glob(f"attempt=*/rank=*/{kind}.jsonl"))]
    if not files:
        return
    read_json = "read_json(?, columns = ?, format = 'newline_delimited', ignore_errors = true)"
    (newest,) = connection.execute(f"SELECT max(schema) FROM {read_json}", [files, {"schema": "INTEGER"}]).fetchone()
    if newest is not None and newest > VERSION:
        raise UserError(
            "this run's logs were written by a newer tokenscale.",
            path=directory,
            found=f"schema {newest}",
            expected=f"at most {VERSION}",
            next="upgrade tokenscale",
        )
    connection.execute(_READ.format(kind=kind), [files, FIELDS[kind]])


def _validations(connection: duckdb.DuckDBPyConnection) -> list[Point]:
    sources: dict[int, dict[str, float]] = {}
    for step, corpus, loss in connection.execute(_SOURCES).fetchall():
        sources.setdefault(step, {})[f"validation/{corpus}/loss"] = loss
    points = []
    for step, t_unix_s, *numbers in connection.execute(
        _VALIDATIONS.format(numbers=", ".join(NUMBERS["events"]))
    ).fetchall():
        found = _present(NUMBERS["events"], numbers)
        values = {f"validation/{name}": value for name, value in found.items()}
        if "loss_sum" in found:
            loss = found["loss_sum"] / found["useful_tokens"]
            values |= {"validation/loss": loss, "validation/perplexity": math.exp(loss) if loss < 700 else math.inf}
        values |= sources.get(step, {})
        finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        points.append(Point(step, t_unix_s, finite))
    return points


def _others(connection: duckdb.DuckDBPyConnection) -> dict[str, float]:
    """Return what was reported once: numbers of all other events, over the ranks of their latest attempt."""
    names = NUMBERS["events"]
    numbers = ", ".join(f"{'sum' if _summed(name) else 'max'}({name} ORDER BY rank)" for name in names)
    rows = connection.execute(_OTHERS.format(present=", ".join(names), numbers=numbers)).fetchall()
    return {f"{event}/{name}": value for event, *found in rows for name, value in _present(names, found).items()}


def _rates(attempt_steps: list[int], steps: list[dict[str, float]]) -> dict[str, float | None]:
    """Return speeds of the whole run after warm-up, sum over sum (`throughput.sql`, `stalls.sql`)."""
    timed = [step for at, step in zip(attempt_steps, steps, strict=True) if at >= WARMUP_STEPS and "step_s" in step]
    waited = [step for step in timed if "data_wait_s" in step]

    def total(name: str, of: list[dict[str, float]]) -> float:
        return sum(step.get(name, 0.0) for step in of)

    speeds, waiting = step_rates([
        {name: total(name, timed) for name in ("useful_tokens", "total_tokens", "step_s")},
        {name: total(name, waited) for name in ("data_wait_s", "step_s")},
    ])  # fmt: skip
    named = {name: speeds[name] for name in ("useful_tokens_per_s", "total_tokens_per_s")}
    return named | {"data_wait_share": waiting["data_wait_share"]}


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


def _over_ranks(name: str) -> str:
    """A field over the ranks of a step: a sum if every rank has it, or the largest. Yes and no are 1 and 0."""
    if _summed(name):
        return f"CASE WHEN count({name}) = count(*) THEN sum({name} ORDER BY rank) END"
    return f"max({name})::INTEGER" if FIELDS["steps"][name] == "BOOLEAN" else f"max({name})"


def _summed(name: str) -> bool:
    return name in SUMMED or name.endswith(SUMMED_ENDS)


def _present(names: list[str], values: Any) -> dict[str, float]:
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}
