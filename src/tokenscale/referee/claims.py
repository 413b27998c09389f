"""Verdicts on claims: run a claim's SQL on an experiment's tables, and test its numbers against the
claim's bound.

A point is a run, or a pair of runs of one repeat. No run is in two points of a cell. With fewer than
six points, a claim about runs is inconclusive. Quantities that do not vary, such as counts of tokens
and bytes, need one point. Each claim was stated before the runs and is tested at its own level of
5 %. A claim that must hold in all cells is supported if every cell supports it, each at 5 %
(intersection-union test, Berger 1982). One cell is enough to contradict it, and the largest of
several cells is chosen by its number, so both tests are corrected over the claim's cells (Holm
1979). Runs of other programs are not points.
"""

import functools
import math
import operator
import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd

from tokenscale.analysis import queries
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, sha256_text
from tokenscale.referee import comparability, statistics
from tokenscale.settings.claims import PLACEHOLDERS, Claim, ClaimsFile, parse_placeholders
from tokenscale.settings.registry import list_figures

QUERIES = tuple(queries.PARAMETERS)
VERDICTS = ("supported", "contradicted", "inconclusive", "not tested at this scale")
SUPPORTED, CONTRADICTED, INCONCLUSIVE, NOT_TESTED = VERDICTS
#: a published figure is reproduced where the interval comes this close to it, as a share of the
#: figure
REPRODUCED = 0.05
#: fields that `list_verdicts` copies from a claim, and from its verdict
OF_CLAIM = ("claim", "figure", "unit", "direction", "bound", "margin", "remark")
OF_VERDICT = ("id", "sentence", "verdict", "reason", "experiment", "scale", "shown_in", "refused")
#: stands for infinity (a target that was never reached) where numbers are ordered and tested
NEVER = 1e12


@dataclass(frozen=True)
class Cell:
    """The points of one cell: their median, what `low` and `high` are (`kind`), and the test.

    `p` and the smallest p that so many points can give are those of the cell alone; the corrected
    ones are Holm's over the claim's cells.
    """

    name: str
    n: int
    number: float
    low: float
    high: float
    kind: str
    p: float
    smallest_p: float
    corrected_p: float
    corrected_smallest_p: float
    repeated: bool = False  #: a run is in several points, which are not independent then
    verdict: str = INCONCLUSIVE
    reason: str = ""


@dataclass(frozen=True)
class Judged:
    """Verdict on a claim. A claim that was not tested has no experiment and no numbers; `reason`
    says why.
    """

    id: str
    verdict: str
    reason: str
    sentence: str
    experiment: str | None = None
    scale: str | None = None
    cells: tuple[Cell, ...] = ()
    run_ids: tuple[str, ...] = ()
    refused: str = ""
    shown_in: str | None = None


def judge_claims(ledger: ClaimsFile, tables: Path, experiments: Sequence[str]) -> list[Judged]:
    """Judge every claim of the ledger, in its order, by the tables of the named experiments below
    `tables`.

    Raises UserError for SQL that DuckDB refuses or that lacks the columns it needs.
    """
    asked = {name for claim in ledger.claims.values() for name in claim.experiments}
    found = {name: ClaimTables(name, folder=tables / name) for name in experiments if name in asked}
    judged = []
    for name, claim in ledger.claims.items():
        experiment_tables, rows, refused = _find_points(name, claim, found=found)
        if rows is None or experiment_tables is None:
            reason = (
                ""
                if refused or claim.needs
                else "no experiment of this report has the runs that it needs"
            )
            needs = f"Needs {claim.needs}." if claim.needs else ""
            judged.append(
                Judged(
                    id=name,
                    verdict=NOT_TESTED,
                    reason=reason,
                    sentence=needs,
                    refused=refused,
                )
            )
            continue
        cells = _summarize_points(claim, rows)
        if claim.cells != "all":  # chosen after the correction, which knows of the others
            largest = min if claim.direction == "below" else max
            cells = [largest(cells, key=operator.attrgetter("number"))]
        verdicts = [judge_cell(claim, cell) for cell in cells]
        cells = [
            replace(cell, verdict=v, reason=why)
            for cell, (v, why) in zip(cells, verdicts, strict=True)
        ]
        judged.append(
            _conclude(
                name,
                claim,
                experiment_tables=experiment_tables,
                rows=rows,
                cells=tuple(cells),
                refused=refused,
            )
        )
    for experiment_tables in found.values():
        experiment_tables.close()
    return judged


def list_verdicts(ledger: ClaimsFile, judged: Iterable[Judged]) -> list[dict[str, Any]]:
    """Return the facts of each claim and its verdict, as plain values for `claims.json`."""
    rows = []
    for one in judged:
        claim = ledger.claims[one.id]
        number, low, high, n = summarize_cells(one.cells)
        document = ledger.documents[claim.document]
        rows.append(
            {name: getattr(one, name) for name in OF_VERDICT}
            | {name: getattr(claim, name) for name in OF_CLAIM}
            | {
                "document": document.title,
                "study": document.study,
                "where": document.where,
                "published": list(claim.published),
                "corrected": list(claim.corrected),
                "reproduced": is_near(low, high, figures=claim.published)
                if claim.published and low is not None and high is not None
                else None,
                "number": _without_infinity(number),
                "low": _without_infinity(low),
                "high": _without_infinity(high),
                "n": n,
                "kind": _join_kinds(one.cells) or None,
                "run_ids": list(one.run_ids),
                "sql_sha256": sha256_text(claim.sql),
                "in_cells": claim.cells,
                "cells": [
                    {key: _without_infinity(value) for key, value in vars(cell).items()}
                    for cell in one.cells
                ],
            }
        )
    return rows


def find_lost_claims(
    ledger: ClaimsFile,
    judged: Iterable[Judged],
    scales: AbstractSet[str | None],
    experiments: Iterable[str],
) -> list[Judged]:
    """Return the claims that are required at one of the scales (`holds_at`) and that the data do
    not support.

    A claim is required where the report has one of its experiments. If their tables cannot test it,
    it is lost, too: nothing shows that it holds.
    """
    reported = set(experiments)
    required = {
        name
        for name, c in ledger.claims.items()
        if scales & set(c.holds_at) and reported & set(c.experiments)
    }
    return [one for one in judged if one.id in required and one.verdict != SUPPORTED]


def summarize_cells(cells: Sequence[Cell]) -> tuple[float | None, float | None, float | None, int]:
    """Return (median, lowest low, highest high, fewest points) of several cells."""
    if not cells:
        return None, None, None, 0
    number = float(np.median([cell.number for cell in cells]))
    return number, min(c.low for c in cells), max(c.high for c in cells), min(c.n for c in cells)


def is_near(low: float, high: float, figures: Sequence[float]) -> bool | None:
    """Whether an interval lies within `REPRODUCED` of a figure, or of a range of figures; None
    where it does in part.

    A direction can hold while the figure does not: "around 75 %" is another number than 67 to 70 %.

    >>> is_near(0.96, 1.04, [1.0]), is_near(1.06, 1.2, [1.0]), is_near(0.9, 1.1, [1.0])
    (True, False, None)
    """
    ends = sorted(x * (1 + share) for x in figures for share in (-REPRODUCED, REPRODUCED))
    if ends[0] <= low and high <= ends[-1]:
        return True
    return False if low > ends[-1] or high < ends[0] else None


def format_number(number: float | None, unit: str, digits: int = 3) -> str:
    """Format a number for a sentence, with this number of significant digits.

    >>> format_number(0.0153, "percent"), format_number(5.934, "ratio")
    ('1.53 %', '5.93')
    >>> format_number(1.0, "ratio", 5), format_number(None, "plain")
    ('1.0000', '–')
    """
    if number is None:
        return "–"
    if not math.isfinite(number):
        return "never"
    value = 100 * number if unit == "percent" else number
    if value == 0:
        text = "0"
    elif 1e-3 <= abs(value) < 1e5:
        text = f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:#.{digits}g}"
    else:
        text = f"{value:.2e}"
    return f"{text} %" if unit == "percent" else text


class ClaimTables:
    """Tables of one experiment. A named query becomes a table when a claim first uses it."""

    def __init__(self, name: str, folder: Path):
        self.name = name
        self._folder = folder
        self.connection = queries.connect(folder)
        self.inventory = queries.query("inventory", source=self.connection)
        head = read_json(folder / "experiment.json", what="experiment's description")
        self.scale = head.get("scale")
        self.figures = list_figures(head.get("figures") or ())
        self._made: set[str] = set()
        # a claim's SQL writes no file and reads none but these tables
        quoted = str(folder).replace("'", "''")
        self.connection.execute(
            f"SET allowed_directories = ['{quoted}']; SET enable_external_access = false"
        )

    def rows(self, claim: str, sql: str) -> pd.DataFrame:
        """Return the rows of a claim's SQL. Raises UserError unless it is one SELECT that runs."""
        try:
            kinds = [statement.type for statement in self.connection.extract_statements(sql)]
            if kinds == [duckdb.StatementType.SELECT]:
                with queries.damage_reported(self.connection):
                    wanted = {
                        name.lower()
                        for name in re.findall(r'\b(?:from|join)\s+"?(\w+)', sql, re.IGNORECASE)
                    }
                    for query in sorted(wanted & set(QUERIES) - set(queries.VIEWS) - self._made):
                        text = queries.sql(query)
                        parameters = queries.PARAMETERS[query]
                        self.connection.execute(
                            f'CREATE TEMP TABLE "{query}" AS {text}', parameters or None
                        )
                        self._made.add(query)
                    return self.connection.execute(sql).df()
            reason = "it has to be one SELECT, so that it changes nothing for other claims"
        except duckdb.Error as error:
            reason = str(error).splitlines()[0]
        next_step = "correct the query of this claim in the claims file"
        raise UserError(
            "a claim's SQL does not run.",
            claim=claim,
            experiment=self.name,
            reason=reason,
            next=next_step,
        )

    def close(self) -> None:
        self.connection.close()


def _find_points(
    name: str, claim: Claim, found: dict[str, ClaimTables]
) -> tuple[ClaimTables | None, pd.DataFrame | None, str]:
    """Return (the first experiment that has points, its rows with a column `number`, a sentence on
    the runs that were left out); None for experiment and rows if no experiment has points.
    """
    refused = ""
    for experiment in claim.experiments:
        if experiment not in found:
            continue
        experiment_tables = found[experiment]
        rows = experiment_tables.rows(name, claim.sql)
        wanted = {
            "value",
            *_list_sentence_columns(claim),
            *(["run_id"] if claim.compares is not None else []),
        }
        if missing := sorted(wanted - set(rows.columns)):
            listed = {"column": ", ".join(missing), "found": ", ".join(rows.columns)}
            next_step = "select it, or leave it out of the sentence"
            raise UserError("a claim's SQL lacks a column.", claim=name, **listed, next=next_step)
        rows = rows[
            rows["value"].notna() & (rows["baseline"].notna() if "baseline" in rows else True)
        ]
        rows, found_refused = _select_comparable(claim, rows, inventory=experiment_tables.inventory)
        refused = found_refused or refused
        over = _convert_numbers(name, rows, column="baseline") if "baseline" in rows else 1.0
        cells = rows["cell"].fillna("").astype(str) if "cell" in rows else ""
        rows = rows.assign(number=_convert_numbers(name, rows, column="value") / over, cell=cells)
        rows = rows[rows["number"].notna()]  # infinity over infinity: neither run got there
        if len(rows):
            return experiment_tables, rows, refused
    return None, None, refused


def _list_id_columns(rows: pd.DataFrame) -> list[str]:
    return [column for column in rows if column == "run_id" or column.endswith("_run_id")]


def _select_comparable(
    claim: Claim, rows: pd.DataFrame, inventory: pd.DataFrame
) -> tuple[pd.DataFrame, str]:
    """Return (rows of our own runs that differ only in what the claim compares, sentences on the
    runs that were left out).
    """
    columns = _list_id_columns(rows)
    out = set(inventory.loc[inventory["external"].fillna(False).astype(bool), "run_id"])
    refused = ""
    if claim.compares is not None and len(rows):
        unlike = comparability.refusals(inventory, factor=claim.compares)
        ours = set().union(*(rows[column].dropna() for column in columns))
        refused = comparability.sentences([r for r in unlike if ours & set(r.run_ids)])
        out |= comparability.refused(unlike)
    return rows[~rows[columns].isin(out).any(axis=1)], refused


def _convert_numbers(name: str, rows: pd.DataFrame, column: str) -> pd.Series:
    try:
        return rows[column].astype(float)
    except (TypeError, ValueError):
        found = rows[column].iloc[0]
        what = "a claim's SQL gives no number."
        next_step = "have the query return one number in this column"
        raise UserError(what, claim=name, column=column, found=found, next=next_step) from None


def _list_sentence_columns(claim: Claim) -> set[str]:
    return set(parse_placeholders(claim.sentence)) - set(PLACEHOLDERS)


def _summarize_points(claim: Claim, rows: pd.DataFrame) -> list[Cell]:
    found = []
    for name, group in rows.groupby("cell", sort=False):
        x = np.clip(group["number"].to_numpy(), -NEVER, NEVER)
        p, smallest = (0.0, 0.0) if claim.exact else _test_points(claim, x)
        spread = statistics.summarize_pairs(x, ratios=bool((x > 0).all()))
        if claim.exact:
            kind = "one value" if x.min() == x.max() else "lowest and highest value"
            spread = replace(spread, low=float(x.min()), high=float(x.max()), kind=kind)
        median, low, high = (
            _restore_infinity(n, reached=x[np.abs(x) < NEVER])
            for n in (spread.median, spread.low, spread.high)
        )
        ids = [run_id for column in _list_id_columns(group) for run_id in group[column].dropna()]
        shared = len(set(ids)) < len(ids)
        found.append(
            Cell(
                name=str(name),
                n=len(x),
                number=median,
                low=low,
                high=high,
                kind=spread.kind,
                p=p,
                smallest_p=smallest,
                corrected_p=p,
                corrected_smallest_p=smallest,
                repeated=shared,
            )
        )
    corrected = (
        statistics.holm([cell.p for cell in found]),
        statistics.holm([cell.smallest_p for cell in found]),
    )
    return [
        replace(cell, corrected_p=p, corrected_smallest_p=smallest)
        for cell, p, smallest in zip(found, *corrected, strict=True)
    ]


def _restore_infinity(number: float, reached: np.ndarray) -> float:
    """Return the number, or infinity where it lies outside the numbers that were reached: it is then
    `NEVER`, or a mean with it.
    """
    if len(reached) and reached.min() <= number <= reached.max():
        return number
    return math.copysign(math.inf, number)


def find_edges(claim: Claim) -> tuple[float, float]:
    """Return the bound minus the margin, and the bound plus the margin."""
    away = abs(claim.bound) * claim.margin
    return claim.bound - away, claim.bound + away


def _test_points(claim: Claim, x: np.ndarray) -> tuple[float, float]:
    """Return (p, smallest p) of the test against the edge that the claim, or its contradiction, has
    to exceed. Within a margin, that is the larger p of both edges (Schuirmann 1987).
    """
    near, far = find_edges(claim)
    median = float(np.median(x))
    if claim.direction == "equal":
        tried = [near, far]
        if not near <= median <= far:
            tried = [near if median < near else far]
    else:
        tried = [far if claim.direction == "above" else near]
    distances = (np.log(x / edge) if (x > 0).all() and edge > 0 else x - edge for edge in tried)
    return max(map(statistics.sign_flip_p, distances))


def judge_cell(claim: Claim, cell: Cell) -> tuple[str, str]:
    """Return (verdict, reason) of one cell.

    `above`, `below`: supported where the whole interval, and the test, lie beyond the bound by more
    than the margin; contradicted where they do not reach so far. `equal` (Schuirmann 1987):
    supported where they are within the margin, contradicted where they are outside.
    """
    low = cell.low
    high = cell.high
    near, far = find_edges(claim)
    if not claim.exact and (lack := _name_lack_of_points(cell)):
        return INCONCLUSIVE, lack
    within = near <= low and high <= far
    holds = {"above": low > far, "below": high < near, "equal": within}[claim.direction]
    fails = {"above": high <= far, "below": low >= near, "equal": high < near or low > far}[
        claim.direction
    ]
    if not holds and not fails:
        bound = "margin" if claim.margin else "bound"
        return INCONCLUSIVE, f"the {bound} lies inside the interval"
    if doubt := _name_doubt(cell, alone=holds and claim.cells == "all"):
        return INCONCLUSIVE, doubt
    if holds:
        return SUPPORTED, ""
    if claim.direction != "equal" and claim.margin and within:
        bound = format_number(claim.bound, unit=claim.unit)
        return (
            CONTRADICTED,
            f"no further from {bound} than {format_number(claim.margin, unit='percent')}",
        )
    return CONTRADICTED, ""


def _name_lack_of_points(cell: Cell) -> str:
    """Return why the points of a cell allow no verdict, empty if they do."""
    if cell.repeated:
        return "its points share runs, so that they are not independent"
    if cell.n < statistics.fewest_pairs():
        return f"{cell.n} of the {statistics.fewest_pairs()} or more points that a verdict takes"
    return ""


def _name_doubt(cell: Cell, alone: bool) -> str:
    """Return why the test of a cell decides nothing, empty if it does; `alone`: without a
    correction for the other cells.
    """
    p = cell.p if alone else cell.corrected_p
    smallest = cell.smallest_p if alone else cell.corrected_smallest_p
    if smallest >= statistics.LEVEL:
        return "too few points for tests of so many cells"
    if p >= statistics.LEVEL:
        corrected = "" if alone else ", corrected for the other cells,"
        return f"the test{corrected} does not exclude chance"
    return ""


def _conclude(
    name: str,
    claim: Claim,
    experiment_tables: ClaimTables,
    rows: pd.DataFrame,
    cells: tuple[Cell, ...],
    refused: str,
) -> Judged:
    verdicts = [cell.verdict for cell in cells]
    verdict = SUPPORTED if {*verdicts} == {SUPPORTED} else INCONCLUSIVE
    verdict = CONTRADICTED if CONTRADICTED in verdicts else verdict
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell.verdict == verdict and cell.reason:
            reasons.setdefault(cell.reason, []).append(cell.name)
    shown = rows[rows["cell"].isin([cell.name for cell in cells])]
    used = set().union(*(shown[column].dropna() for column in _list_id_columns(shown)))
    inventory = experiment_tables.inventory
    suspect = inventory["run_id"].isin(used) & (inventory["validity"] == "suspect")
    marks = [f"suspect runs: {int(suspect.sum())} of {len(used)}"] if suspect.any() else []
    # after the cells that it is true of, where it is not true of all
    texts = [r if len(of) == len(cells) else f"{', '.join(of)}: {r}" for r, of in reasons.items()]
    reason = "; ".join(texts + marks)
    sentence = _write_sentence(claim, rows=shown, cells=cells)
    # an experiment that was not made for the claim may have its rows without its figure
    figures = experiment_tables.figures
    figure = claim.shown_in if not figures or claim.shown_in in figures else None
    where = experiment_tables.name, experiment_tables.scale
    return Judged(
        name, verdict, reason, sentence, *where, cells, tuple(sorted(used)), refused, figure
    )


def _write_sentence(claim: Claim, rows: pd.DataFrame, cells: tuple[Cell, ...]) -> str:
    _, low, high, n = summarize_cells(cells)
    digits = max(3, math.ceil(-math.log10(claim.margin)) + 2) if claim.direction == "equal" else 3
    # which show what is equal
    format_value = functools.partial(format_number, unit=claim.unit, digits=digits)
    # what does not vary from run to run is shown from end to end, not by a median of unlike things
    ends = (
        (low, high) if claim.exact else (min(c.number for c in cells), max(c.number for c in cells))
    )
    values: dict[str, str] = {
        "number": " to ".join(dict.fromkeys(map(format_value, ends))),
        "spread": (f"{format_value(low)} to {format_value(high)}, " if low != high else "")
        + _join_kinds(cells),
        "n": str(n),
        "cells": ", ".join(filter(None, (cell.name for cell in cells))),
    }
    for name in _list_sentence_columns(claim):
        values[name] = ", ".join(dict.fromkeys(map(_format_value, rows[name])))
    return re.sub(r"\b1 (pair|triple|round)s\b", r"1 \1", claim.sentence.format(**values))


def _join_kinds(cells: Sequence[Cell]) -> str:
    """Name the kinds of interval of the cells. Cells with different numbers of points can have
    different kinds.
    """
    return " or ".join(dict.fromkeys(cell.kind for cell in cells))


def _format_value(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _without_infinity(value: object) -> Any:
    """Return None in place of infinity, which JSON cannot express."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
