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
from tokenscale.records.schema import FIELDS, VERSION

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
    tables, broken = [SCHEMAS[kind].empty_table()], []
    begin = line = 0
    while begin < len(content):
        # one broken line makes only its own block slow to read
        end = content.find(b"\n", begin + BLOCK_BYTES) + 1 if begin + BLOCK_BYTES < len(content) else 0
        end = end or content.rfind(b"\n", begin) + 1 or len(content)
        block = content[begin:end]
        count = block.count(b"\n")
        table = _clean(block, count, kind)
        if table is None:
            table, found = _by_line(block, line, kind)
            broken += found
        tables.append(table)
        begin, line = end, line + count
    if broken and not content.endswith(b"\n"):
        broken[-1]["benign"] = broken[-1]["line"] == line + 1
    return Lines(pa.concat_tables(tables).combine_chunks(), broken, hashlib.sha256(content).hexdigest())


def _clean(block: bytes, count: int, kind: str) -> pa.Table | None:
    """Whole lines that all hold what the schema says, read at once; None where `_by_line` must look.

    Every line begins with { and ends with }, and a row comes of each: so no object spans two lines, and none shares its
    line. Text beyond ASCII and numbers that are not finite are left to the careful reader, too.
    """
    whole = block.startswith(b"{") and block.endswith(b"}\n") and block.count(b"}\n{") == count - 1
    if not whole or not block.isascii():
        return None
    table = _parsed(block, kind)
    if table is None:
        return None
    if table.num_rows != count or table[REQUIRED[kind]].null_count or (pc.max(table["schema"]).as_py() or 0) > VERSION:
        return None
    for name, sql in FIELDS[kind].items():
        if sql == "DOUBLE" and pc.all(pc.is_finite(table[name])).as_py() is False:
            return None
    if kind == "steps":
        place = table.schema.get_field_index("nonfinite")
        table = table.set_column(place, SCHEMAS[kind].field(place), table["nonfinite"].fill_null(False))
    return table


def _parsed(block: bytes, kind: str) -> pa.Table | None:
    """All objects of a block with every field of the schema; None where one of them has a field of another type.

    Most logs have the same fields in every line: those of the first are tried alone, in two thirds of the time.
    """
    try:
        first = json.loads(block[: block.index(b"\n")])
    except (ValueError, RecursionError):
        return None
    reading = pyarrow.json.ReadOptions(use_threads=False, block_size=len(block))
    few = pa.schema([column for column in SCHEMAS[kind] if column.name in first])
    for schema, others in ((few, "error"), (SCHEMAS[kind], "ignore")):
        options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others)
        try:
            table = pyarrow.json.read_json(pa.BufferReader(block), read_options=reading, parse_options=options)
        except pa.ArrowInvalid:
            continue
        here = set(table.column_names)
        columns = [table[c.name] if c.name in here else pa.nulls(len(table), c.type) for c in SCHEMAS[kind]]
        return pa.Table.from_arrays(columns, schema=SCHEMAS[kind])
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
