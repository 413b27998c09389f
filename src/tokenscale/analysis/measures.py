"""Points and facts of a run for trackers, from the logs of all ranks, also while ranks still
write.
"""

from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenscale.analysis.live import connect_logs
from tokenscale.analysis.queries import query_rows, read_file
from tokenscale.analysis.run_record import read_settings
from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, read_json, sha256_file
from tokenscale.runs.records.events import FIELDS
from tokenscale.settings.experiments import flatten_cell

#: places, clocks and names that happen to be numbers
NOT_MEASURED = {"schema", "step", "t_unix_s", "t_mono_s", "order_digest", "world_size"}
#: fields that add up over ranks; all others are the largest rank's, as times and memory are
SUMMED = ("_sum", "_tokens", "rows", "_j")
#: fields that stand beside the loss instead of among the raw ones
TRAIN = ("learning_rate", "grad_norm", "grad_norm_clipped")


def _select(kind: str, column: str) -> str:
    """Return a select list of a file's numeric fields. `{name}` is the field, `{over}` the field
    over ranks (its sum if every rank has it, or the largest), `{part}` the curves that it belongs
    to.
    """
    names = [
        name for name, sql in FIELDS[kind].items() if sql != "VARCHAR" and name not in NOT_MEASURED
    ]
    sums = {
        n: f"CASE WHEN count({n}) = count(*) THEN sum({n} ORDER BY rank) END"
        for n in names
        if n.endswith(SUMMED)
    }
    return ", ".join(
        column.format(name=n, over=sums.get(n, f"max({n})"), part="train" if n in TRAIN else "step")
        for n in names
    )


FILES = ("points.sql", "once.sql")
_FIELDS = {
    "summed_steps": _select("steps", column="{over}::DOUBLE AS {name}"),
    "steps": _select("steps", column='{name} AS "{part}/{name}"'),
    "validations": _select("events", column='{name}::DOUBLE AS "validation/{name}"'),
    "events": _select("events", column="{name}"),
    "summed_events": _select("events", column="{over}::DOUBLE AS {name}"),
}


@dataclass(frozen=True)
class Point:
    """Values of one step, all ranks together. `step` counts from 0; a validation's counts the steps
    before it.
    """

    step: int
    t_unix_s: float
    values: dict[str, float]


def read_points(directory: Path, *, ended: bool) -> tuple[list[Point], dict[str, float]]:
    """Return the points of a run, steps ascending, and values of the whole run.

    The latest attempt wins per step. A step that lacks a rank is left out, and so is a validation
    after it unless the run has `ended`. Raises UserError for logs of a newer version.
    """
    points: dict[tuple[int, bool], Point] = {}
    of_steps, of_run = (read_file(name).format(**_FIELDS) for name in FILES)
    with closing(connect_logs(directory)) as connection:
        for step, after, t_unix_s, name, value in connection.execute(
            of_steps, {"ended": ended}
        ).fetchall():
            points.setdefault((step, after), Point(step=step, t_unix_s=t_unix_s, values={})).values[
                name
            ] = value
        once = dict(connection.execute(of_run).fetchall())
        speed, stalls = (
            next(iter(query_rows(connection, name)), {}) for name in ("throughput", "stalls")
        )
    seen = [point.values.get("train/useful_tokens_seen", 0.0) for point in points.values()]
    whole = {name: speed.get(name) for name in ("useful_tokens_per_s", "total_tokens_per_s")}
    whole |= {
        "data_wait_share": stalls.get("data_stall_share"),
        "useful_tokens_seen": max(seen, default=0.0),
    } | once
    return list(points.values()), {
        f"summary/{name}": value for name, value in whole.items() if value is not None
    }


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
    # git.commit, inputs.store (SHA-256 of its manifest), versions.torch, …
    provenance: dict[str, Value]
    files: tuple[Path, ...]  # run.json, and dirty.diff where the tree was dirty


def read_facts(directory: Path) -> Facts:
    """Return the facts of a run that has started. Raises UserError for a missing or broken record."""
    record = read_json(
        directory / "run.json",
        what="run's record",
        next="name a folder of a run: results/runs/RUN_ID",
    )
    if not isinstance(record, dict) or "run_id" not in record:
        next_step = "name the folder of a run, such as results/runs/RUN_ID"
        raise UserError(
            "this run.json is no record of a run.", path=directory / "run.json", next=next_step
        )
    rest = {name: value for name, value in record.items() if name not in LEFT_OUT}
    if tokenizer := _tokenizer(record):
        rest["tokenizer"] = tokenizer
    outcome = record.get("outcome") or {}
    stated = record.get("run") or {}
    run = read_settings(stated)  # None where another version made them
    if run is not None:
        rest["effective_seed"] = run.effective_seed
    diff = directory / "dirty.diff"
    dirty = diff.is_file() and (record.get("git") or {}).get("diff_sha256") == sha256_file(diff)
    times = float(record.get("started_unix_s") or 0.0), outcome.get("ended_unix_s")
    settings = _flat(stated if run is None else asdict(run))
    files = (directory / "run.json", *([diff] if dirty else []))
    return Facts(
        record["run_id"], outcome.get("status", "unknown"), *times, settings, _flat(rest), files
    )


def _tokenizer(record: dict[str, Any]) -> Any:
    """Name and hash of the tokenizer that a store was made with, where its manifest is still the
    one that was read.
    """
    argv = record.get("argv") or []
    expected = (record.get("inputs") or {}).get("store")
    for flag, text in zip(argv, argv[1:], strict=False):
        path = Path(str(text))
        if flag == "--store" and path.is_file() and sha256_file(path) == expected:
            return read_json(path, what="manifest").get("tokenizer")
    return None


def _flat(values: dict[str, Any]) -> dict[str, Value]:
    found = {name: value for name, value in flatten_cell(values).items() if value != {}}
    return {
        k: v if isinstance(v, (bool, int, float, str)) else canonical_json(v)
        for k, v in found.items()
    }
