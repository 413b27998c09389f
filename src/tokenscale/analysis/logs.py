"""Lines of the event files → typed rows and a quarantine. Nothing is dropped without being counted."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenscale.records.schema import FIELDS, VERSION

#: without this field a line says nothing
REQUIRED = {"steps": "step", "spans": "name", "events": "event"}
#: longest text of a broken line that is kept
CUT = 500
_BOUNDS = {"INTEGER": 2**31, "BIGINT": 2**63}
_NUMBERED = re.compile(r"^(attempt|rank)=(\d+)$")


@dataclass
class Lines:
    """What one file holds: typed rows (every field of the schema, null where absent) and broken lines."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    broken: list[dict[str, Any]] = field(default_factory=list)  # line (from 1), reason, text, benign


class Broken(ValueError):
    """Why a line cannot be used, in words."""


def attempts(run: Path) -> Iterator[tuple[int, int, Path]]:
    """(attempt, rank, directory) of a run's logs in ascending order; `superseded/` is not looked into."""
    found = [(a, r, d) for a, outer in _numbered(run, "attempt") for r, d in _numbered(outer, "rank")]
    yield from sorted(found)


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
    result = Lines()
    if not path.is_file():
        return result
    pieces = path.read_bytes().split(b"\n")
    terminated = pieces[-1] == b""
    if terminated:
        pieces.pop()
    for number, raw in enumerate(pieces, start=1):
        try:
            result.rows.append(parse(raw, kind))
        except Broken as reason:
            benign = number == len(pieces) and not terminated
            text = raw[: 4 * CUT].decode("utf-8", "backslashreplace")
            text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)[:CUT]
            result.broken.append({"line": number, "reason": str(reason), "text": text, "benign": benign})
    return result


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
