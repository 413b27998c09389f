"""Attempts of a run: which belong together, and how they become one row a step and rank."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tokenscale.analysis import logs, tables
from tokenscale.analysis.siblings import find_copied_logs

Row = dict[str, Any]

#: columns that `merge` fills in
NOT_YET = {"world_size": None, "attempt_step": None}


@dataclass
class Attempt:
    """What one attempt logged. `digest`: of its code and inputs, None where nothing says it."""

    number: int
    folder: str  # below the run's
    digest: str | None
    steps: dict[int, pa.Table] = field(default_factory=dict)  # rank → its rows in the order of the file
    times: list[float] = field(default_factory=list)  # wall-clock times of its events
    superseded: bool = False


@dataclass
class RunLog:
    """Logs of a run's folder. Superseded attempts are only in `all` and `quarantine`."""

    run_id: str
    all: list[Attempt]
    steps: pa.Table  # of the merged attempts, by attempt and rank, in the order of the files
    spans: pa.Table
    events: list[Row]
    quarantine: list[Row]
    hashes: dict[str, str]  # file below the run's folder → SHA-256

    @property
    def merged(self) -> list[Attempt]:
        """Attempts that are merged: all but the superseded ones."""
        return [attempt for attempt in self.all if not attempt.superseded]

    def changed(self, record: Row) -> list[str]:
        """Log files that are not those whose hashes were sealed into run.json, and those that it does not name."""
        sealed = (record.get("outcome") or {}).get("logs")
        if not isinstance(sealed, dict):
            return []
        found = [name for name, sha256 in sealed.items() if self.hashes.get(name) != sha256]
        if not record.get("external"):  # its ranks seal their own
            found += [f"{name} (not sealed)" for name in self.hashes.keys() - sealed.keys() if "superseded" not in name]
        return sorted(found)

    def copies(self) -> list[str]:
        """Return which logs of steps are the same file as another one, or repeat its timings, in words."""
        first: dict[str, str] = {}
        found = []
        different = {}
        for attempt in self.merged:
            for rank, rows in sorted(attempt.steps.items()):
                name = f"{attempt.folder}/rank={rank:05d}/steps.jsonl"
                if len(rows) and (other := first.setdefault(self.hashes[name], name)) != name:
                    found.append(f"{name} is a copy of {other}")
                else:
                    different[name] = rows
        return found + find_copied_logs(different)

    def validation_tokens(self) -> int | None:
        """Return the useful tokens of the newest validation; None without one."""
        counts = [e["useful_tokens"] for e in self.events if e["event"] == "validation" and e["useful_tokens"]]
        return counts[-1] if counts else None

    def lasted(self) -> Row:
        """Return when the run began and ended, on the wall clock, as far as its logs show.

        Its attempts' own times count and, where the clock went on between two of them, the time between. A clock that
        was set back in between shortens nothing.
        """
        spans = [(min(attempt.times), max(attempt.times)) for attempt in self.merged if attempt.times]
        if not spans:
            return {}
        started, stopped = spans[0]
        for (_, before), (first, last) in pairwise(spans):
            stopped += max(0.0, first - before) + last - first
        return {"started_unix_s": started, "stopped_unix_s": stopped}

    def attempts(self, steps: pa.Table) -> list[Row]:
        """Rows of the table `attempts`; `steps` are the merged ones."""
        kept = np.unique(steps["attempt"].to_numpy(), return_counts=True)
        merged = dict(zip(*(values.tolist() for values in kept), strict=True))
        return [_attempt_row(self.run_id, attempt, merged) for attempt in self.all]


def _attempt_row(run_id: str, attempt: Attempt, merged: dict[int, int]) -> Row:
    numbers = [rows["step"].to_numpy() for rows in attempt.steps.values() if len(rows)]
    return {
        "run_id": run_id,
        "folder": attempt.folder,
        "attempt": attempt.number,
        "superseded": attempt.superseded,
        "digest": attempt.digest,
        "ranks": len(attempt.steps),
        "first_step": min((int(n.min()) for n in numbers), default=None),
        "last_step": max((int(n.max()) for n in numbers), default=None),
        "step_rows": sum(map(len, numbers)),
        "merged_rows": 0 if attempt.superseded else merged.get(attempt.number, 0),
        "started_unix_s": min(attempt.times, default=None),
        "stopped_unix_s": max(attempt.times, default=None),
    }


def read_run(folder: Path, run_id: str, digest: str | None) -> RunLog:
    """Read the logs below a run's folder. Attempts whose digest is known and another than `digest` (that of the run's
    record; of the newest attempt where there is none) are superseded: other code or other inputs made them."""
    found, spans, events, quarantine = [], [], [], []
    hashes: dict[str, str] = {}
    for number, path in [*logs.attempts(folder), *logs.superseded(folder)]:
        inside = path.parent == folder
        attempt = Attempt(number, path.relative_to(folder).as_posix(), _digest(path), superseded=not inside)
        found.append(attempt)
    newest = next((a.digest for a in found[::-1] if a.digest and not a.superseded), None)
    for attempt in found:
        attempt.superseded |= attempt.digest is not None and attempt.digest != (digest or newest)
        for rank, directory in logs.ranks(folder / attempt.folder):
            read = {kind: logs.read(directory / f"{kind}.jsonl", kind) for kind in logs.SCHEMAS}
            where = directory.relative_to(folder).as_posix()
            for kind, lines in read.items():
                hashes |= {f"{where}/{kind}.jsonl": lines.sha256} if lines.sha256 else {}
                file = {"run_id": run_id, "file": f"{run_id}/{where}/{kind}.jsonl"}
                quarantine += [{**file, **broken} for broken in lines.broken]
            attempt.steps[rank] = read["steps"].table
            place = {"run_id": run_id, "attempt": attempt.number, "rank": rank}
            event_rows = [{**place, **row} for row in read["events"].rows]
            attempt.times += [event["t_unix_s"] for event in event_rows if event["t_unix_s"] is not None]
            if not attempt.superseded:
                events += event_rows
                spans.append(_placed("spans", read["spans"].table, place))
    steps = [
        _placed("steps", rows, {"run_id": run_id, "attempt": a.number, "rank": rank} | NOT_YET)
        for a in found
        if not a.superseded
        for rank, rows in sorted(a.steps.items())
    ]
    whole = {
        name: pa.concat_tables([tables.schema(name).empty_table(), *parts]).combine_chunks()
        for name, parts in (("steps", steps), ("spans", spans))
    }
    order = [("attempt", "ascending"), ("rank", "ascending"), ("start_mono_s", "ascending")]
    return RunLog(run_id, found, whole["steps"], whole["spans"].sort_by(order), events, quarantine, hashes)


def _digest(attempt: Path) -> str | None:
    try:
        found = json.loads((attempt / "attempt.json").read_text(encoding="utf-8")).get("digest")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def _placed(table: str, rows: pa.Table, place: Row) -> pa.Table:
    """Rows with the columns that say where they come from."""
    fields = tables.schema(table)
    constants = [pa.repeat(pa.scalar(value, fields.field(name).type), len(rows)) for name, value in place.items()]
    return pa.Table.from_arrays([*constants, *rows.columns], schema=fields)


def merge(rows: pa.Table, events: list[Row]) -> pa.Table:
    """One row a step and rank of raw rows. The latest attempt wins per step, for all ranks together.

    Ranks of two attempts never mix in one step: a resumed run may have another world size. Fills in the `world_size`
    that the attempt observed and `attempt_step`, the place of the step in its attempt (for the warm-up rule).
    """
    if not len(rows):
        return rows
    attempt, rank, step = (rows[name].to_numpy() for name in ("attempt", "rank", "step"))
    numbers, of_attempt = np.unique(attempt, return_inverse=True)
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    np.minimum.at(first, of_attempt, step)
    kept = _kept(attempt, rank, step)
    world = _worlds(events)
    sizes = np.array([world[n] if n in world else len(np.unique(rank[attempt == n])) for n in numbers.tolist()])
    filled = {
        "world_size": sizes[of_attempt[kept]],
        "attempt_step": (step - first[of_attempt])[kept],
    }
    columns = [
        pa.array(filled[c.name], c.type) if c.name in filled else _taken(rows[c.name], kept) for c in rows.schema
    ]
    return pa.Table.from_arrays(columns, schema=rows.schema).combine_chunks()


def _kept(attempt: np.ndarray, rank: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Places of the rows that count, by step and rank; `step` and the others in the order of the files."""
    kept = np.arange(len(step))
    if attempt.min() != attempt.max():
        steps, of_step = np.unique(step, return_inverse=True)
        latest = np.full(len(steps), -1, dtype=np.int64)
        np.maximum.at(latest, of_step, attempt)
        kept = np.flatnonzero(attempt == latest[of_step])
    kept = kept[np.lexsort((kept, rank[kept], step[kept]))]
    last = np.ones(len(kept), dtype=bool)  # where a file has a step twice, its last row counts
    last[:-1] = (np.diff(step[kept]) != 0) | (np.diff(rank[kept]) != 0)
    return kept[last]


def _taken(column: pa.ChunkedArray, kept: np.ndarray) -> pa.ChunkedArray | pa.Array:
    """The rows of a column; of what no log has said there is nothing to copy."""
    if column.null_count == len(column):
        return pa.nulls(len(kept), column.type)
    return column.take(pa.array(kept))


def _worlds(events: list[Row]) -> dict[int, int]:
    """Attempt → the largest world size that one of its ranks observed."""
    seen: dict[int, int] = defaultdict(int)
    for event in events:
        if event["event"] == "run_start" and event["world_size"] is not None:
            seen[event["attempt"]] = max(seen[event["attempt"]], event["world_size"])
    return seen
