"""Compare two reports' folders: measures cell by cell, claims, and what may explain a difference.

Runs of two reports are not paired, and machine, code and inputs may differ. Medians, their ratio
and the spread of the runs are shown, without a test.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tokenscale.base.errors import UserError, few
from tokenscale.base.files import naming, read_json
from tokenscale.base.manifests import read_sums, walk
from tokenscale.report import bundle
from tokenscale.report.style import number
from tokenscale.report.table import Table, columns

#: facts of a run's origin, those first that explain most: (name in `provenance.json`, in words,
#: what it could change)
SUSPECTS = (
    ("corpus", "corpus", "all measures"),
    ("tokenizer", "tokenizer", "all measures"),
    ("held_out_tokens", "held-out tokens", "losses"),
    ("manifests", "inputs", "losses, padding, speed"),
    ("science", "settings", "all measures"),
    *(("device", "device", "speed"), ("cpu", "CPU", "speed"), ("cores", "cores", "speed")),
    *(("threads", "threads of a rank", "speed"), ("load", "load average when runs began", "speed")),
    ("machine", "machine", "speed"),
    ("code_digest", "code and inputs of the training", "all measures"),
    ("packages", "packages of the training", "speed, and last digits of losses"),
    ("commit", "commit", "all measures, if the training's code changed with it"),
    ("dirty", "uncommitted changes", "all measures"),
)
#: the first facts: with other text or settings, runs are other trainings, and none is better or
#: worse
SAME = [name for name, *_ in SUSPECTS[:5]]
#: runs of a cell in each report for a verdict: 4 and 4 that differ by chance have separate ranges
#: in 3 % of all cases
FEWEST = 4
#: median load averages that differ by less explain nothing
LOAD = 1.0


@dataclass(frozen=True)
class Report:
    """A report: its folder as given, (experiment, cell, world size, external) → runs that count,
    origin, claims.
    """

    name: str
    cells: dict[tuple, pd.DataFrame]
    origin: dict[str, Any]
    claims: dict[str, dict[str, Any]] | None


def read(folder: Path) -> Report:
    """Read a report's folder. Raises UserError for another folder, and for a file that differs from
    its checksum.
    """
    record = folder / "provenance.json"
    claims = folder / "claims.json"
    cells = {}
    if not record.is_file():
        expected = f"{record.name} and data/<experiment>/cells.parquet, as in results/report"
        next_step = "snakemake report"
        raise UserError(
            "this is no report's folder.",
            folder=folder,
            expected=expected,
            next=f"{next_step} makes one",
        )
    paths = sorted((folder / "data").glob("*/cells.parquet"))
    listed = read_sums(folder) if (folder / bundle.SUMS).is_file() else {}
    again = "build that report again, or name another one"
    for path in (record, claims, *paths):
        listing = {"name": path.name, "sha256": listed.get(path.relative_to(folder).as_posix())}
        for _, fault in walk(path.parent, files=[listing]) if path.is_file() else ():
            what = "a file of a report has changed since it was built."
            raise UserError(what, file=path, found=f"{fault}  ({bundle.SUMS})", next=again)
    try:
        for path in paths:
            with naming(path):
                rows = pd.read_parquet(path)[[*bundle.IDENTITY, *bundle.NAMES]]
            rows = rows[rows["validity"].isin(["valid", "suspect"])].astype(
                dict.fromkeys(bundle.NAMES, float)
            )
            rows = rows.assign(
                world_size=rows["world_size"].fillna(0), cell=rows["cell"].fillna("")
            )
            for key, group in rows.groupby(["cell", "world_size", "external"], sort=False):
                cells[(path.parent.name, *key)] = group
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            "the cells of a report cannot be read.", folder=folder, reason=reason, next=again
        ) from None
    origin = read_json(record, what="record of the report's origin")
    return Report(
        name=str(folder),
        cells=cells,
        origin=origin,
        claims=_index_claims(read_json(claims, what="claims")) if claims.is_file() else None,
    )


def _index_claims(value: Any) -> dict[str, dict[str, Any]]:
    """Return claim's id → claim, from a list, or from a mapping with the list under `claims`."""
    listed = value.get("claims") if isinstance(value, dict) else value
    return {
        str(claim["id"]): claim
        for claim in listed or []
        if isinstance(claim, dict) and "id" in claim
    }


def difference(a: Report, b: Report) -> dict[str, Table]:
    """Return heading → table of how `b` differs from `a`, without empty tables."""
    rows = [
        [
            *_name_cell(key),
            measure,
            *_compare_measure(measure, sides, other=_other_text(a, b, sides=sides)),
        ]
        for key in b.cells
        for measure in bundle.NAMES
        if len(
            sides := [
                r.cells[key][np.isfinite(r.cells[key][measure])] for r in (a, b) if key in r.cells
            ]
        )
        == 2
        and min(map(len, sides))
    ]
    text = (
        "Valid and suspect runs of cells that both reports have. Spread: the lowest run of B "
        "over the highest of A, "
    )
    text += (
        f"to the highest over the lowest. A verdict needs {FEWEST} runs in each report whose "
        "ranges do not "
    )
    text += "overlap, of the same text and settings."
    only = [
        [*_name_cell(key), report.name, str(len(report.cells[key]))]
        for report, other in ((a, b), (b, a))
        for key in report.cells.keys() - other.cells.keys()
    ]
    numeric = (">runs, A and B", ">median, A", ">median, B", ">B / A", ">spread")
    found = {
        "Cells": Table(
            columns=columns("experiment", "cell", "measure", *numeric, "verdict"),
            rows=rows,
            caption=text,
        ),
        "In one report only": Table(
            columns("experiment", "cell", "only in", ">runs"), rows=sorted(only)
        ),
        "Claims whose verdict differs": _claim_table(a.claims, b=b.claims),
        "What may explain it": suspects(a, b),
    }
    return {heading: table for heading, table in found.items() if table.rows}


def _name_cell(key: tuple) -> list[str]:
    return [key[0], (key[1] or "(one cell)") + (" (external)" if key[3] else "")]


def _compare_measure(measure: str, sides: list[pd.DataFrame], other: str) -> list[str]:
    """Return the columns behind the measure: runs, medians, ratio, spread and verdict."""
    x, y = (rows[measure] for rows in sides)
    texts = [f"{len(x)}, {len(y)}", number(x.median(), digits=5), number(y.median(), digits=5)]
    ratios = ["–", "–"]
    if min(x.min(), y.min()) > 0:
        ratio, low, high = (
            number(r, digits=4)
            for r in (y.median() / x.median(), y.min() / x.max(), y.max() / x.min())
        )
        ratios = [ratio, f"{low}–{high}"]
    if sides[0]["seal"].notna().all() and set(sides[0]["seal"]) == set(sides[1]["seal"]):
        verdict = "the same runs"
    elif other:
        verdict = f"not judged: other or unrecorded {other}"
    elif min(len(x), len(y)) < FEWEST:
        verdict = "too few runs"
    elif y.min() <= x.max() and x.min() <= y.max():
        verdict = "within the spread of the runs"
    else:
        lower = y.max() < x.min()
        better = lower == (measure in bundle.LESS_IS_BETTER)
        verdict = f"{'lower' if lower else 'higher'} ({'better' if better else 'worse'})"
    return [*texts, *ratios, verdict]


def _other_text(a: Report, b: Report, sides: list[pd.DataFrame]) -> str:
    """Return what differs of the text or settings of the runs of two cells; empty where nothing
    does.
    """
    # each repeat has settings of its own: fewer repeats are no other settings
    repeats = set.intersection(*(set(rows["repeat"]) for rows in sides))
    facts_of = []
    for report, rows in zip((a, b), sides, strict=True):
        if repeats:
            rows = rows[rows["repeat"].isin(repeats)]
        facts_of.append(_collect_facts(report, runs=set(rows["run_id"])))
    x, y = facts_of
    different = {
        name for name, key in x.keys() | y.keys() if x.get((name, key)) != y.get((name, key))
    }
    known = all(any(name in SAME for name, _ in facts) for facts in facts_of)
    if not known:
        different = set(SAME)
    return ", ".join(words for name, words, _ in SUSPECTS if name in SAME and name in different)


#: (fact, key of a mapping or "") → its values
Facts = dict[tuple[str, str], set]


def _collect_facts(report: Report, runs: set[str] | None = None) -> Facts:
    """Return the facts of these runs, or of all runs, that have a record."""
    found: Facts = {}
    for experiment in (report.origin.get("experiments") or {}).values():
        for run, facts in (experiment.get("runs") or {}).items():
            if runs is not None and run not in runs:
                continue
            for name, value in facts.items():
                values = value if isinstance(value, dict) else {"": value}
                for key, one in values.items():
                    found.setdefault((name, key), set()).add(one)
    return found


def _claim_table(a: dict[str, dict[str, Any]] | None, b: dict[str, dict[str, Any]] | None) -> Table:
    """Return claims with another verdict, or that one of the two lacks; empty where a report has no
    claims at all.
    """
    rows = []
    for name in sorted(a.keys() | b.keys()) if a is not None and b is not None else ():
        pair = [claims.get(name, {}) for claims in (a or {}, b or {})]
        if pair[0].get("verdict") != pair[1].get("verdict"):
            rows.append(
                [
                    name,
                    *(
                        text
                        for c in pair
                        for text in (_format_number(c.get("number")), c.get("verdict") or "–")
                    ),
                ]
            )
    return Table(columns("claim", ">number, A", "verdict, A", ">number, B", "verdict, B"), rows)


def _format_number(value: object) -> str:
    return number(value) if isinstance(value, (int, float)) else str(value or "–")


def suspects(a: Report, b: Report) -> Table:
    """Return what may explain a difference: facts of the runs in the order of `SUSPECTS`, their
    spread, the reports.
    """
    rows = _list_different_facts(_collect_facts(a), theirs=_collect_facts(b))
    spreads = [_find_largest_spread(report) for report in (a, b)]
    if max(spreads) > 0:
        rows.append(
            [
                "spread of the runs of a cell, up to",
                *(f"{number(100 * s, digits=2)} %" for s in spreads),
                "speed",
            ]
        )
    for name, words in (("git", "commit of the report"), ("packages", "packages of the report")):
        ours = a.origin.get(name) or {}
        theirs = b.origin.get(name) or {}
        rows += [
            [
                f"{words}: {key}",
                _format_values({ours.get(key)}),
                _format_values({theirs.get(key)}),
                "definitions and drawings",
            ]
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]
    heads = columns(">rank", "what differs", "A", "B", "what it could change")
    text = "Values over all runs of a report that have a record, those first that explain most."
    return Table(
        columns=heads, rows=[[str(rank), *row] for rank, row in enumerate(rows, 1)], caption=text
    )


def _list_different_facts(ours: Facts, theirs: Facts) -> list[list[str]]:
    """Return a row of each fact of the runs that differs, in the order of `SUSPECTS`."""
    rows = []
    for name, words, matters in SUSPECTS:
        for key in sorted(key for fact, key in ours.keys() | theirs.keys() if fact == name):
            a = ours.get((name, key), set())
            b = theirs.get((name, key), set())
            if not _is_explained(name, a, b=b):
                rows.append(
                    [
                        words + (f": {key}" if key else ""),
                        _format_values(a),
                        _format_values(b),
                        matters,
                    ]
                )
    return rows


def _is_explained(name: str, a: set, b: set) -> bool:
    """Return whether the values of a fact are equal, or differ by what explains nothing: loads that
    are near, and runs of which one report has more.
    """
    if a == b:
        return True
    if not a or not b:
        return False
    if name == "load":
        return bool(abs(np.median([*a]) - np.median([*b])) < LOAD)
    return name == "science" and (a <= b or b <= a)


def _find_largest_spread(report: Report) -> float:
    """Return the largest range of throughput over its median, of all cells."""
    rates = [rows["useful_tokens_per_s"].dropna() for rows in report.cells.values()]
    return max(
        ((x.max() - x.min()) / x.median() for x in rates if len(x) and x.median() > 0), default=0.0
    )


def _format_values(values: set) -> str:
    """Return a few values, digests by their beginning; of numbers, the range."""
    known = sorted(values - {None}, key=str)
    if len(known) > 1 and all(isinstance(v, float) for v in known):
        return f"{number(min(known))} to {number(max(known))}"
    texts = [v if isinstance(v, str) else json.dumps(v) for v in known]
    return (
        few([v[:12] if v in known and len(v) in (16, 40, 64) else v for v in texts], shown=4)
        or "not recorded"
    )
