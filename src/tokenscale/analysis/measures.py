"""Points and facts of a run for trackers, from the logs of all ranks, also while ranks still write. Rates as in SQL."""

import math
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import duckdb

from tokenscale.analysis.queries import WARM_UP, step_rates
from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, read_json, sha256_file
from tokenscale.runs.records import provenance
from tokenscale.runs.records.events import FIELDS, VERSION
from tokenscale.settings.options import decode
from tokenscale.settings.run import RunSettings

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


def read_points(directory: Path, *, ended: bool) -> tuple[list[Point], dict[str, float]]:
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


Value = bool | int | float | str

#: parts of run.json that stand elsewhere, or only in the file itself (which goes along)
LEFT_OUT = ("schema", "run_id", "run", "code", "argv", "outcome", "installed")


@dataclass(frozen=True)
class Facts:
    """A run's record for a tracker."""

    run_id: str
    status: str  # running, complete, nonfinite
    started_unix_s: float
    ended_unix_s: float | None
    settings: dict[str, Value]  # all settings by dotted name, the default ones too
    provenance: dict[str, Value]  # git.commit, inputs.store (SHA-256 of its manifest), versions.torch, …
    files: tuple[Path, ...]  # run.json, and dirty.diff where the tree was dirty

    @property
    def commit(self) -> str | None:
        """The commit, where it is known."""
        commit = self.provenance.get("git.commit")
        return str(commit) if commit else None

    @property
    def diff(self) -> str:
        """What had been changed since that commit, "" where nothing was."""
        texts = [p.read_text(encoding="utf-8", errors="replace") for p in self.files if p.name == "dirty.diff"]
        return "".join(texts)


def is_sealed(directory: Path) -> bool:
    """Whether the run in this folder has ended and its record is whole."""
    return provenance.read_sealed(directory / "run.json") is not None


def read_facts(directory: Path) -> Facts:
    """The facts of a run that has started. Raises UserError for a record that is missing or broken."""
    record = read_json(directory / "run.json", "run's record", next="name a folder of a run: results/runs/RUN_ID")
    if not isinstance(record, dict) or "run_id" not in record:
        raise UserError(
            "this run.json is no record of a run.",
            path=directory / "run.json",
            next="name the folder of a run, such as results/runs/RUN_ID",
        )
    rest = {name: value for name, value in record.items() if name not in LEFT_OUT}
    rest |= {"tokenizer": _tokenizer(record)} if _tokenizer(record) else {}
    outcome = record.get("outcome") or {}
    settings, effective = _settings(record.get("run") or {})
    if effective is not None:
        rest["effective_seed"] = effective
    diff = directory / "dirty.diff"
    dirty = diff.is_file() and (record.get("git") or {}).get("diff_sha256") == sha256_file(diff)
    return Facts(
        run_id=record["run_id"],
        status=outcome.get("status", "unknown"),
        started_unix_s=float(record.get("started_unix_s") or 0.0),
        ended_unix_s=outcome.get("ended_unix_s"),
        settings=settings,
        provenance=flat(rest),
        files=(directory / "run.json", *([diff] if dirty else [])),
    )


def _settings(stated: dict[str, Any]) -> tuple[dict[str, Value], int | None]:
    """(all settings, the seed that follows from seed and repeat); only the stated ones where another version made
    them."""
    try:
        run = decode(RunSettings, stated)
    except (UserError, TypeError, AttributeError, ValueError):
        return flat(stated), None
    return flat(asdict(run)), run.effective_seed


def _tokenizer(record: dict[str, Any]) -> Any:
    """Name and hash of the tokenizer that a store was made with, where its manifest is still the one that was read."""
    argv, expected = record.get("argv") or [], (record.get("inputs") or {}).get("store")
    for flag, text in zip(argv, argv[1:], strict=False):
        path = Path(str(text))
        if flag == "--store" and path.is_file() and sha256_file(path) == expected:
            return read_json(path, "manifest").get("tokenizer")
    return None


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Value]:
    """Nested values by dotted names; lists as JSON; null as the word.

    >>> flat({"optimizer": {"beta1": 0.9, "clip_norm": None}, "sizes": [1, 2]})
    {'optimizer.beta1': 0.9, 'optimizer.clip_norm': 'null', 'sizes': '[1,2]'}
    """
    found: dict[str, Value] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            scalar = isinstance(value, (bool, int, float, str))
            found[f"{prefix}{name}"] = value if scalar else canonical_json(value)
    return found
