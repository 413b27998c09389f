"""Lines of the event files → typed rows and a quarantine. Nothing is dropped without being counted."""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from tokenscale.analysis.tables import ARROW
from tokenscale.runs.records.events import FIELDS, VERSION

#: kind of event file → Arrow schema of its rows
SCHEMAS = {kind: pa.schema([(name, ARROW[sql]) for name, sql in fields.items()]) for kind, fields in FIELDS.items()}
#: lines are read in blocks of about so many bytes
BLOCK_BYTES = 1 << 20

#: without this field a line says nothing
REQUIRED = {"steps": "step", "spans": "name", "events": "event"}
#: longest text of a broken line that is kept
CUT = 500
_BOUNDS = {"INTEGER": 2**31, "BIGINT": 2**63}
_NUMBERED = re.compile(r"^(attempt|rank)=(\d+)$")


@dataclass
class Lines:
    """What one file holds: a table with every field of the schema (null where absent), and its broken lines."""

    table: pa.Table
    broken: list[dict[str, Any]]  # line (from 1), reason, text, benign
    sha256: str | None = None  # of the whole file; None for one that is missing

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The same as dictionaries."""
        return self.table.to_pylist()


class Broken(ValueError):
    """Why a line cannot be used, in words."""


def attempts(run: Path) -> Iterator[tuple[int, Path]]:
    """(attempt, directory) of a run in ascending order, but those that were set aside."""
    yield from sorted(_numbered(run, "attempt"))


def superseded(run: Path) -> Iterator[tuple[int, Path]]:
    """The same of those that were set aside, for they are of other code or inputs."""
    for folder in sorted((run / "superseded").glob("*/")):
        yield from attempts(folder)


def ranks(attempt: Path) -> Iterator[tuple[int, Path]]:
    """(rank, directory) of an attempt in ascending order."""
    yield from sorted(_numbered(attempt, "rank"))


def launched(run: Path) -> Iterator[dict[str, Any]]:
    """What the launcher left for each attempt of a run, in ascending order; unreadable ones are left out."""
    for _, folder in sorted(_numbered(run, "attempt")):
        try:
            found = json.loads((folder / "attempt.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            yield found


def _numbered(directory: Path, word: str) -> Iterator[tuple[int, Path]]:
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _NUMBERED.match(path.name)
        if match and match[1] == word and path.is_dir():
            yield int(match[2]), path


def read(path: Path, kind: str) -> Lines:
    """Read one `steps.jsonl`, `spans.jsonl` or `events.jsonl`. A missing or empty file has no rows.

    A broken line is benign only where a killed writer leaves one: at the very end, without its newline.
    """
    if not path.is_file():
        return Lines(SCHEMAS[kind].empty_table(), [])
    content = path.read_bytes()
    tables = [SCHEMAS[kind].empty_table()]
    broken: list[dict[str, Any]] = []
    found: list[dict[str, Any]]
    begin = line = 0
    while begin < len(content):
        # one broken line makes only its own block slow to read
        end = content.find(b"\n", begin + BLOCK_BYTES) + 1 if begin + BLOCK_BYTES < len(content) else 0
        end = end or content.rfind(b"\n", begin) + 1 or len(content)
        table, found = _clean(content, begin, end, kind), []
        if table is None:
            table, found = _by_line(content[begin:end], line, kind)
        tables.append(table)
        broken += found
        begin, line = end, line + len(table) + len(found)
    if broken and not content.endswith(b"\n"):
        broken[-1]["benign"] = broken[-1]["line"] == line
    return Lines(pa.concat_tables(tables).combine_chunks(), broken, hashlib.sha256(content).hexdigest())


def _clean(content: bytes, begin: int, end: int, kind: str) -> pa.Table | None:
    """The lines between two places that all hold what the schema says, read at once; None where `_by_line` must look.

    Numbers that are not finite are left to that careful reader, too.
    """
    try:
        first = json.loads(content[begin : content.index(b"\n", begin, end)])
    except (ValueError, RecursionError):
        return None
    if not isinstance(first, dict):
        return None
    found = _parsed(content[begin:end], kind, set(first))
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


def _parsed(block: bytes, kind: str, first: set[str]) -> dict[str, pa.ChunkedArray] | None:
    """Columns of a block by a reader of any JSON; None where an object has a field of another type.

    Every line begins with { and ends with }, and a row comes of each: so no object spans two lines, and none shares its
    line. Text beyond ASCII is left to the careful reader. The fields of the `first` line are most often those of all
    lines: they are tried alone, in two thirds of the time.
    """
    count = block.count(b"\n")
    whole = block.startswith(b"{") and block.endswith(b"}\n") and block.count(b"}\n{") == count - 1
    if not whole or not block.isascii():
        return None
    reading = pyarrow.json.ReadOptions(use_threads=False, block_size=len(block))
    few = pa.schema([column for column in SCHEMAS[kind] if column.name in first])
    for schema, others in ((few, "error"), (SCHEMAS[kind], "ignore")):
        options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others)
        try:
            table = pyarrow.json.read_json(pa.BufferReader(block), read_options=reading, parse_options=options)
        except pa.ArrowInvalid:
            continue
        return dict(zip(table.column_names, table.columns, strict=True)) if len(table) == count else None
    return None


def _by_line(block: bytes, before: int, kind: str) -> tuple[pa.Table, list[dict[str, Any]]]:
    """(rows, broken lines) of a block that begins after so many lines of its file."""
    pieces = block.split(b"\n")
    if pieces[-1] == b"":
        pieces.pop()
    rows, broken = [], []
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
    row = {name: _typed(name, sql, record.get(name)) for name, sql in FIELDS[kind].items()}
    if row["schema"] is not None and row["schema"] > VERSION:
        raise Broken(f"schema {row['schema']} is newer than this reader's {VERSION}")
    if row[REQUIRED[kind]] is None:
        raise Broken(f"no field {REQUIRED[kind]}")
    if kind == "steps":
        row["nonfinite"] = bool(row["nonfinite"]) or nonfinite
    return row


def _typed(name: str, sql: str, value: Any) -> Any:
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
        elif sql in _BOUNDS and math.isfinite(value) and value == int(value) and -_BOUNDS[sql] <= value < _BOUNDS[sql]:
            return int(value)
    raise Broken(f"field {name} is no {sql}")
