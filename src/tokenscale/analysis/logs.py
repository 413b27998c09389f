"""Typed rows and a quarantine from the event files of all attempts of a run. Every dropped line is
counted.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from tokenscale.analysis import tables
from tokenscale.analysis.tables import ARROW
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_file, read_record
from tokenscale.runs.records.events import FIELDS, VERSION

Row = dict[str, Any]

#: kind of event file → Arrow schema of its rows
SCHEMAS = {
    kind: pa.schema([(name, ARROW[sql]) for name, sql in fields.items()])
    for kind, fields in FIELDS.items()
}
#: lines are read in blocks of about so many bytes
BLOCK_BYTES = 1 << 20

#: without this field a line says nothing
REQUIRED = {"steps": "step", "spans": "name", "events": "event"}
#: words of a line of a later version
NEWER = "is newer than this reader's"
#: longest text of a broken line that is kept
CUT = 500
_BOUNDS = {"INTEGER": 2**31, "BIGINT": 2**63}


@dataclass
class Lines:
    """What one file holds: a table with every field of the schema (null where absent), and its
    broken lines.
    """

    table: pa.Table
    broken: list[dict[str, Any]]  # line (from 1), reason, text, benign
    sha256: str | None = None  # of the whole file; None for one that is missing

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The same as dictionaries."""
        return self.table.to_pylist()


class Broken(ValueError):
    """Why a line cannot be used, in words."""


def numbered(directory: Path, word: str) -> list[tuple[int, Path]]:
    """(number, folder) of a run's attempts or an attempt's ranks, `<word>=<number>`, in ascending
    order.
    """
    paths = directory.iterdir() if directory.is_dir() else ()
    found = ((re.fullmatch(rf"{word}=(\d+)", path.name), path) for path in paths)
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def read_launched(attempt: Path) -> dict[str, Any]:
    """What the launcher left for an attempt; nothing where that is missing or damaged."""
    with suppress(OSError, UserError):
        return read_record(attempt / "attempt.json", what="attempt's record", unsealed=True)
    return {}


def launches(run: Path) -> Row:
    """Where the attempts of a run were, from what the launcher left for each; nothing of runs
    without one.
    """
    attempts = (read_launched(folder).get("launch") for _, folder in numbered(run, word="attempt"))
    found = [launch for launch in attempts if isinstance(launch, dict)]
    jobs = [launch["job"] for launch in found if isinstance(launch.get("job"), dict)]
    if not found:
        return {}
    waited = [job["queue_s"] for job in jobs if job.get("queue_s") is not None]
    return {
        **{name: found[-1].get(name) for name in ("machine", "share")},
        "node_names": ", ".join(found[-1].get("job", {}).get("nodes", [])) or None,
        "job_ids": ", ".join(str(job.get("id")) for job in jobs) or None,
        "slurm_logs": ", ".join(job["log"] for job in jobs if job.get("log")) or None,
        # a sum of the known ones alone would be too short
        "queue_s": sum(waited) if waited and len(waited) == len(jobs) else None,
    }


def read_lines(path: Path, kind: str) -> Lines:
    """Read one `steps.jsonl`, `spans.jsonl` or `events.jsonl`. A missing or empty file has no rows.

    A broken line is benign only where a killed writer leaves one: at the very end, without its
    newline.
    """
    if not path.is_file():
        return Lines(SCHEMAS[kind].empty_table(), broken=[])
    content = read_file(path)
    tables = [SCHEMAS[kind].empty_table()]
    broken: list[dict[str, Any]] = []
    found: list[dict[str, Any]]
    begin = line = 0
    while begin < len(content):
        # one broken line makes only its own block slow to read
        end = (
            content.find(b"\n", begin + BLOCK_BYTES) + 1
            if begin + BLOCK_BYTES < len(content)
            else 0
        )
        end = end or content.rfind(b"\n", begin) + 1 or len(content)
        table = _parse_clean_lines(
            content,
            begin,
            end=end,
            kind=kind,
        )
        found = []
        if table is None:
            table, found = _parse_line_by_line(content[begin:end], before=line, kind=kind)
        tables.append(table)
        broken += found
        begin = end
        line = line + len(table) + len(found)
    if broken and not content.endswith(b"\n"):
        broken[-1]["benign"] = broken[-1]["line"] == line
    return Lines(
        table=pa.concat_tables(tables).combine_chunks(),
        broken=broken,
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _parse_clean_lines(content: bytes, begin: int, end: int, kind: str) -> pa.Table | None:
    """The lines between two places that all hold what the schema says, read at once; None where
    `_parse_line_by_line` must look.

    Numbers that are not finite are left to that careful reader, too.
    """
    try:
        first = json.loads(content[begin : content.index(b"\n", begin, end)])
    except (ValueError, RecursionError):
        return None
    if not isinstance(first, dict):
        return None
    found = _parse_columns(content[begin:end], kind, first=set(first))
    if found is None or REQUIRED[kind] not in found or found[REQUIRED[kind]].null_count:
        return None
    if "schema" in found and (pc.max(found["schema"]).as_py() or 0) > VERSION:
        return None
    for name, column in found.items():
        if FIELDS[kind][name] == "DOUBLE" and pc.all(pc.is_finite(column)).as_py() is False:
            return None
    count = len(found[REQUIRED[kind]])
    if kind == "steps":
        flags = found.get("nonfinite")
        found["nonfinite"] = pa.repeat(False, count) if flags is None else flags.fill_null(False)
    columns = [found[c.name] if c.name in found else pa.nulls(count, c.type) for c in SCHEMAS[kind]]
    return pa.Table.from_arrays(columns, schema=SCHEMAS[kind])


def _parse_columns(block: bytes, kind: str, first: set[str]) -> dict[str, pa.ChunkedArray] | None:
    """Columns of a block by a reader of any JSON; None where an object has a field of another type.

    Every line begins with { and ends with }, and a row comes of each: so no object spans two lines,
    and none shares its line. Text beyond ASCII is left to the careful reader. The fields of the
    `first` line are most often those of all lines: they are tried alone, in two thirds of the time.
    """
    count = block.count(b"\n")
    whole = block.startswith(b"{") and block.endswith(b"}\n") and block.count(b"}\n{") == count - 1
    if not whole or not block.isascii():
        return None
    reading = pyarrow.json.ReadOptions(use_threads=False, block_size=len(block))
    few = pa.schema([column for column in SCHEMAS[kind] if column.name in first])
    for schema, others in ((few, "error"), (SCHEMAS[kind], "ignore")):
        options = pyarrow.json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior=others
        )
        try:
            table = pyarrow.json.read_json(
                pa.BufferReader(block), read_options=reading, parse_options=options
            )
        except pa.ArrowInvalid:
            continue
        return (
            dict(zip(table.column_names, table.columns, strict=True))
            if len(table) == count
            else None
        )
    return None


def _parse_line_by_line(
    block: bytes, before: int, kind: str
) -> tuple[pa.Table, list[dict[str, Any]]]:
    """Return (rows, broken lines) of a block; `before` lines of the file precede it."""
    pieces = block.split(b"\n")
    if pieces[-1] == b"":
        pieces.pop()
    rows = []
    broken = []
    for number, raw in enumerate(pieces, start=before + 1):
        try:
            rows.append(parse(raw, kind))
        except Broken as reason:
            text = raw[: 4 * CUT].decode("utf-8", "backslashreplace")
            text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)[:CUT]
            broken.append({"line": number, "reason": str(reason), "text": text, "benign": False})
    return pa.Table.from_pylist(rows, SCHEMAS[kind]), broken


def parse(raw: bytes, kind: str) -> dict[str, Any]:
    """One line as a row with every field of the schema. Raises Broken.

    >>> parse(b'{"schema":1,"name":"load","duration_s":2}', "spans")["duration_s"]
    2.0
    """
    nonfinite = False

    def constant(_: str) -> None:  # NaN and Infinity are not JSON; null and a flag say the same
        nonlocal nonfinite
        nonfinite = True

    try:
        record = json.loads(raw, parse_constant=constant)
    except (ValueError, RecursionError):
        raise Broken("not JSON" if raw.strip(b"\0 \t\r") else "no text") from None
    if not isinstance(record, dict):
        raise Broken("not an object")
    row = {
        name: _convert_field(name, sql, value=record.get(name))
        for name, sql in FIELDS[kind].items()
    }
    if row["schema"] is not None and row["schema"] > VERSION:
        raise Broken(f"schema {row['schema']} {NEWER} {VERSION}")
    if row[REQUIRED[kind]] is None:
        raise Broken(f"no field {REQUIRED[kind]}")
    if kind == "steps":
        row["nonfinite"] = bool(row["nonfinite"]) or nonfinite
    return row


def _convert_field(name: str, sql: str, value: object) -> Any:
    if value is None:
        return None
    if sql == "BOOLEAN" and isinstance(value, bool):
        return value
    if sql == "VARCHAR" and isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if sql == "DOUBLE":
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if math.isfinite(number):
                return number
        elif (
            sql in _BOUNDS
            and math.isfinite(value)
            and value == int(value)
            and -_BOUNDS[sql] <= value < _BOUNDS[sql]
        ):
            return int(value)
    raise Broken(f"field {name} is no {sql}")


#: columns that `merge` fills in
NOT_YET = {"world_size": None, "attempt_step": None}


@dataclass
class Attempt:
    """What one attempt logged. `digest`: of its code and inputs, None where nothing says it."""

    number: int
    folder: str  # below the run's
    digest: str | None
    # rank → its rows in the order of the file
    steps: dict[int, pa.Table] = field(default_factory=dict)
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
        """Return log files whose hashes differ from those sealed in run.json, and those without a
        sealed hash.
        """
        sealed = (record.get("outcome") or {}).get("logs")
        if not isinstance(sealed, dict):
            return []
        found = [name for name, sha256 in sealed.items() if self.hashes.get(name) != sha256]
        if not record.get("external"):  # its ranks seal their own
            found += [
                f"{name} (not sealed)"
                for name in self.hashes.keys() - sealed.keys()
                if "superseded" not in name
            ]
        return sorted(found)

    def validation_tokens(self) -> int | None:
        """Return the useful tokens of the newest validation; None without one."""
        counts = [
            e["useful_tokens"]
            for e in self.events
            if e["event"] == "validation" and e["useful_tokens"]
        ]
        return counts[-1] if counts else None

    def lasted(self) -> Row:
        """Return when the run began and ended, on the wall clock, as far as its logs show.

        Its attempts' own times count and, where the clock went on between two of them, the time
        between. A clock that was set back in between shortens nothing.
        """
        spans = [
            (min(attempt.times), max(attempt.times)) for attempt in self.merged if attempt.times
        ]
        if not spans:
            return {}
        started, stopped = spans[0]
        for (_, before), (first, last) in pairwise(spans):
            stopped += max(0.0, first - before) + last - first
        return {"started_unix_s": started, "stopped_unix_s": stopped}

    def attempts(self, steps: pa.Table) -> list[Row]:
        """Rows of the table `attempts`; `steps` are the merged ones."""
        merged = Counter(steps["attempt"].to_numpy().tolist())
        found = []
        for attempt in self.all:
            numbers = [rows["step"].to_numpy() for rows in attempt.steps.values() if len(rows)]
            found.append(
                {
                    "folder": attempt.folder,
                    "superseded": attempt.superseded,
                    "digest": attempt.digest,
                    "run_id": self.run_id,
                    "attempt": attempt.number,
                    "ranks": len(attempt.steps),
                    "first_step": min((int(n.min()) for n in numbers), default=None),
                    "last_step": max((int(n.max()) for n in numbers), default=None),
                    "step_rows": sum(map(len, numbers)),
                    "merged_rows": 0 if attempt.superseded else merged[attempt.number],
                    "started_unix_s": min(attempt.times, default=None),
                    "stopped_unix_s": max(attempt.times, default=None),
                }
            )
        return found


def read_run(folder: Path, run_id: str, digest: str | None) -> RunLog:
    """Read the logs below a run's folder. Attempts whose digest is known and another than `digest`
    (that of the run's record; of the newest attempt where there is none) are superseded: other code
    or other inputs made them.
    """
    found = _list_attempts(folder)
    spans = []
    events = []
    quarantine = []
    hashes: dict[str, str] = {}
    _mark_superseded(found, digest)
    for attempt in found:
        for rank, directory in numbered(folder / attempt.folder, word="rank"):
            read = {kind: read_lines(directory / f"{kind}.jsonl", kind) for kind in SCHEMAS}
            where = directory.relative_to(folder).as_posix()
            for kind, lines in read.items():
                name = f"{where}/{kind}.jsonl"
                if lines.sha256:
                    hashes[name] = lines.sha256
                file = {"run_id": run_id, "file": f"{run_id}/{name}"}
                quarantine += [{**file, **broken} for broken in lines.broken]
            attempt.steps[rank] = read["steps"].table
            place = {"run_id": run_id, "attempt": attempt.number, "rank": rank}
            event_rows = [{**place, **row} for row in read["events"].rows]
            attempt.times += [
                event["t_unix_s"] for event in event_rows if event["t_unix_s"] is not None
            ]
            if not attempt.superseded:
                events += event_rows
                spans.append(_prepend_columns("spans", rows=read["spans"].table, place=place))
    steps = [
        _prepend_columns(
            "steps",
            rows=rows,
            place={"run_id": run_id, "attempt": attempt.number, "rank": rank} | NOT_YET,
        )
        for attempt in found
        if not attempt.superseded
        for rank, rows in sorted(attempt.steps.items(), key=itemgetter(0))
    ]
    order = [("attempt", "ascending"), ("rank", "ascending"), ("start_mono_s", "ascending")]
    return RunLog(
        run_id=run_id,
        all=found,
        steps=_concatenate("steps", parts=steps),
        spans=_concatenate("spans", parts=spans).sort_by(order),
        events=events,
        quarantine=quarantine,
        hashes=hashes,
    )


def _list_attempts(folder: Path) -> list[Attempt]:
    """Return the attempts of a run, then those set aside because other code or inputs made them."""
    found = []
    for place, number, path in _find_attempts(folder):
        digest = read_launched(path).get("digest")
        found.append(
            Attempt(
                number=number,
                folder=path.relative_to(folder).as_posix(),
                digest=digest if isinstance(digest, str) else None,
                superseded=place != folder,
            )
        )
    return found


def _find_attempts(folder: Path) -> Iterator[tuple[Path, int, Path]]:
    """Yield (folder that it is in, number, folder) of each attempt of a run."""
    for place in (folder, *sorted((folder / "superseded").glob("*/"))):
        for number, path in numbered(place, word="attempt"):
            yield place, number, path


def list_files(folder: Path) -> list[tuple[str, int, int, int]]:
    """Return (path below the folder, bytes, modification time in ns, inode) of each file beside
    `run.json` that `read_run` and `launches` read.
    """
    found = []
    for _, _, attempt in _find_attempts(folder):
        below = attempt.relative_to(folder).as_posix()
        names = [f"{below}/attempt.json"]
        for _, rank in numbered(attempt, word="rank"):
            names += [f"{below}/{rank.name}/{kind}.jsonl" for kind in SCHEMAS]
        for name in names:
            try:
                facts = os.stat(f"{folder}/{name}")
            except OSError:
                found.append((name, -1, 0, 0))
            else:
                found.append((name, facts.st_size, facts.st_mtime_ns, facts.st_ino))
    return found


def _mark_superseded(found: list[Attempt], digest: str | None) -> None:
    newest = next((a.digest for a in found[::-1] if a.digest and not a.superseded), None)
    for attempt in found:
        attempt.superseded |= attempt.digest is not None and attempt.digest != (digest or newest)


def _concatenate(table: str, parts: list[pa.Table]) -> pa.Table:
    return pa.concat_tables([tables.schema(table).empty_table(), *parts]).combine_chunks()


def _prepend_columns(table: str, rows: pa.Table, place: Row) -> pa.Table:
    fields = tables.schema(table)
    constants = [
        pa.repeat(pa.scalar(value, fields.field(name).type), len(rows))
        for name, value in place.items()
    ]
    return pa.Table.from_arrays([*constants, *rows.columns], schema=fields)


def merge(rows: pa.Table, events: list[Row]) -> pa.Table:
    """One row a step and rank. The latest attempt wins per step, for all ranks together: its world
    size may be another.

    Fills in the `world_size` that it observed and `attempt_step`, the place of the step in it (for
    the warm-up rule).
    """
    if not len(rows):
        return rows
    attempt, rank, step = (rows[name].to_numpy() for name in ("attempt", "rank", "step"))
    numbers, of_attempt = np.unique(attempt, return_inverse=True)
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    np.minimum.at(first, of_attempt, step)
    kept = _choose_latest_rows(attempt, rank, step=step)
    world: dict[int, int] = defaultdict(int)  # the largest that a rank of the attempt observed
    for event in events:
        if event["event"] == "run_start" and event["world_size"] is not None:
            world[event["attempt"]] = max(world[event["attempt"]], event["world_size"])
    sizes = np.array(
        [world[n] if n in world else len(np.unique(rank[attempt == n])) for n in numbers.tolist()]
    )
    filled = {
        "world_size": sizes[of_attempt[kept]],
        "attempt_step": (step - first[of_attempt])[kept],
    }

    def column(field: pa.Field) -> pa.ChunkedArray | pa.Array:
        if field.name in filled:
            return pa.array(filled[field.name], field.type)
        if rows[field.name].null_count == len(rows):  # a column without any value is not copied
            return pa.nulls(len(kept), field.type)
        return rows[field.name].take(pa.array(kept))

    return pa.Table.from_arrays(list(map(column, rows.schema)), schema=rows.schema).combine_chunks()


def _choose_latest_rows(attempt: np.ndarray, rank: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Places of the rows that count, by step and rank; `step` and the others in the order of the
    files.
    """
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
