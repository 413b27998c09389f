"""Units and plausible ranges in every JSON record and table of a small built project, by the end of
a field's name.
"""

import json
import re
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from tests.workflow.conftest import Project

pytestmark = pytest.mark.workflow


def number(least: float, most: float, *types: type):
    """A check for numbers of these types (int by default) within the range. A bool is no number."""
    return lambda value, when: type(value) in (types or (int,)) and least <= value <= most


def unix_time(value, when):
    """Seconds since 1970, from the making of the project until the file was written."""
    return isinstance(value, float) and when.started_unix_s - 2 <= value <= when.written_unix_s + 2


def utc_time(value, when):
    """ISO 8601 in UTC, in the same range."""
    if not isinstance(value, str) or not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", value):
        return False
    return unix_time(datetime.fromisoformat(value).timestamp(), when)


#: what the end of a field's name says about its value, the longest ending first
UNITS = {
    "_unix_s": unix_time,
    "_utc": utc_time,
    "_s": number(0.0, 3600.0, float),  # nothing of this project takes an hour
    "_j": number(0.0, 1e9, float),
    "sha256": lambda value, when: (
        isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None
    ),
    "bytes": number(0, 1 << 50),
    "_share": number(0.0, 1.0, float, int),
    "_mb": number(0, 10**9),
}


def unit_of(field: str) -> str | None:
    """The ending in UNITS that a field's name has."""
    return next((ending for ending in UNITS if field.endswith(ending)), None)


def complaints(value, when, path="") -> list[str]:
    """`field = value` of each field below a value that is not in its unit."""
    if isinstance(value, dict):
        return [
            text for key, item in value.items() for text in complaints(item, when, f"{path}.{key}")
        ]
    if isinstance(value, list):
        return [text for item in value for text in complaints(item, when, path)]
    ending = None if value is None else unit_of(path.rpartition(".")[2])
    return (
        []
        if ending is None or UNITS[ending](value, when)
        else [f"{path} = {json.dumps(value)[:80]}"]
    )


def times_of(project: Project, file: Path):
    """When the project was made, and when the file was written."""
    started = (project.root / "config/config.yaml").stat().st_mtime
    return SimpleNamespace(started_unix_s=started, written_unix_s=file.stat().st_mtime)


def test_each_field_has_its_unit_and_a_plausible_value(built):
    found = {}
    units = set()
    files = [p for p in (built.root / "results").rglob("*.json") if not p.name.startswith(".")]
    for file in files:
        text = file.read_text()
        record = json.loads(text, parse_constant=lambda name: pytest.fail(name))
        if wrong := complaints(record, times_of(built, file)):
            found[str(file.relative_to(built.root))] = wrong
        endings = {unit_of(name) for name in re.findall(r'"(\w+)":', text)}
        units |= endings
        if file.name == "manifest.json":  # equal on a rebuild: no time is in it
            assert not endings & {"_unix_s", "_utc", "_date", "_s"}, file
    assert found == {} and len(files) > 40 and {"_unix_s", "_utc", "_s", "sha256", "bytes"} <= units


def test_each_column_of_the_tables_holds_its_unit(built):
    """Columns by the end of their names. `_mono_s` counts from a boot and is compared with itself
    alone.
    """
    found = {}
    units = set()
    for file in sorted((built.root / "results/tables").glob("*/*.parquet")):
        when = times_of(built, file)
        table = pq.read_table(file)
        for column in table.column_names:
            ending = unit_of(column)
            if ending is None or column.endswith("_mono_s"):
                continue
            values = [value for value in table[column].to_pylist() if value is not None]
            wrong = [value for value in values if not UNITS[ending](value, when)]
            found |= {f"{file.name}: {column}": wrong[:3]} if wrong else {}
            units |= {ending} if values else set()
    assert found == {} and {"_unix_s", "_s", "bytes"} <= units
