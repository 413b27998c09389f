"""The run table of an experiment: which runs belong to which cell, and what it lacks."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    canonical_json,
    check_file_name,
    check_types,
    read_json,
    read_record,
    report_malformed,
)
from tokenscale.settings.experiments import flatten_cell, format_cell

Row = dict[str, Any]

#: at most so many positions or repeats are named
NAMED = 6
MAKE_AGAIN = "tokenscale plan EXPERIMENT --output FILE"


def read_run_table(path: Path) -> Row:
    """Return an experiment's run table. Raises UserError for one that is damaged or another file."""
    again = f"snakemake -f {path}"
    table = read_record(path, what="run table", next=again, unsealed=True)
    if not isinstance(table.get("runs"), list):
        expected = 'an object with a list "runs"'
        raise UserError(
            "this is no run table of an experiment.",
            path=path,
            expected=expected,
            next=MAKE_AGAIN,
        )
    with report_malformed(path, what="experiment's run table", next=again):
        check_types(table, fields={"experiment": str})
        for entry in table["runs"]:
            check_file_name(entry["run_id"])
    return table


def list_entries(table: Row, path: Path) -> dict[str, Row]:
    """Return run id → its entry in the table at `path`, by id. Raises UserError for one that is
    listed twice.
    """
    entries = {entry["run_id"]: entry for entry in sorted(table["runs"], key=lambda r: r["run_id"])}
    if len(entries) < len(table["runs"]):
        twice = sorted(
            run_id for run_id, n in Counter(r["run_id"] for r in table["runs"]).items() if n > 1
        )
        raise UserError(
            "the run table lists a run twice.",
            path=path,
            run=", ".join(twice),
            next=MAKE_AGAIN,
        )
    return entries


def find_gaps(table: Row, path: Path, runs: Path | None) -> list[str]:
    """Return what the run table at `path` lacks, in words: positions, repeats of its cells, runs of
    these cells in the folder `runs` that no run table beside it lists, and its seal.
    """
    ours = [entry for entry in table["runs"] if not entry.get("external")]
    found = [] if "seal" in read_json(path) else ["has no seal"]
    positions = {entry["position"] for entry in ours if isinstance(entry.get("position"), int)}
    if missing := sorted(set(range(max(positions, default=-1) + 1)) - positions):
        found.append(f"has no run at position {_listed(missing)}")
    repeats: dict[str, set[int]] = defaultdict(set)
    for entry in table["runs"]:
        if isinstance(entry.get("repeat"), int):
            repeats[format_cell(flatten_cell(entry.get("cell") or {}))].add(entry["repeat"])
    planned = table.get("cell_repeats") or {}
    for cell in sorted({*repeats, *planned}):
        count = max(planned.get(cell) or 0, *repeats[cell], 0)
        missing = sorted(set(range(count)) - repeats[cell])
        if missing:
            found.append(f"has no repeat {_listed(missing)} of {cell or 'its cell'}")
    if runs is not None and (unlisted := _find_unlisted(ours, path, runs=runs)):
        found.append(f"does not list {_listed(unlisted)}, which its cells have in {runs.name}")
    return found


def _find_unlisted(ours: list[Row], path: Path, runs: Path) -> list[str]:
    """Ids of runs in the folder `runs` whose settings are those of a listed run but for the
    repeat.
    """
    known = {entry["run_id"] for entry in ours}
    settings = {
        _without_repeat(entry["run"]) for entry in ours if isinstance(entry.get("run"), dict)
    }
    names = {run_id.rpartition("-")[0] for run_id in known}
    found = []
    for record in sorted(runs.glob("*/run.json")):
        if record.parent.name not in known and record.parent.name.rpartition("-")[0] in names:
            with suppress(UserError, ValueError):
                run = read_json(record, what="run record").get("run")
                if isinstance(run, dict) and _without_repeat(run) in settings:
                    found.append(record.parent.name)
    others = path.parent.parent.glob(f"*/{path.name}") if found else ()
    listed = "".join(
        other.read_text(encoding="utf-8", errors="replace") for other in others if other != path
    )
    return [run_id for run_id in found if f'"{run_id}"' not in listed]


def _without_repeat(run: Row) -> str:
    return canonical_json({key: value for key, value in run.items() if key != "repeat"})


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:NAMED])) + (
        f" and {len(values) - NAMED} more" if len(values) > NAMED else ""
    )
