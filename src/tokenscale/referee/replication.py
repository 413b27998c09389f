"""The source studies' figures beside ours: every cell of their tables, and every claim.

`published/studies.csv` has a row for each figure of a table: as published, corrected with the
reason, and what gives ours: a quantity of the runs (`replication.sql`) or rows of a benchmark that
`where` selects. Figures of runs come from tables of scale `study`, whose cells are the studies'
own. A claim's figure is that of `config/replication.yaml`.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenscale.referee import statistics
from tokenscale.referee.claims import CONTRADICTED, SUPPORTED, ClaimTables, format_number, is_near
from tokenscale.settings.claims import ClaimsFile

FILES = ("published/studies.csv", "replication.sql")
VERDICTS = (
    "reproduced",
    "direction only",
    "not decided",
    "not reproduced",
    "needs a GPU",
    "not run",
)
SAME, DIRECTION, UNDECIDED, OTHER, NEEDS_GPU, NOT_RUN = VERDICTS
#: verdicts on figures that no run here has
WITHOUT_NUMBER = (NEEDS_GPU, NOT_RUN)
#: quantities that are counted: one run suffices. All others are measured and need an interval
COUNTS = (
    "useful share %",
    "GB of weights",
    "GB of optimizer state",
    "bytes a document",
    "GB of weights, gradients and optimizer state",
)
#: scale of the studies' own cells
SCALE = "study"
#: quantity of a benchmark with rows of 2,048 tokens → SQL of its column `value`, at any scale
OF_BENCHMARKS = {
    "bytes a document": "SELECT stored_bytes / documents AS value FROM storage_benchmark WHERE {where}",
    "µs of tokenizing a token": "SELECT 1e6 * bulk_s / useful_tokens AS value FROM storage_benchmarks WHERE {where}",
    "seconds of opening": "SELECT open_s AS value FROM benchmark WHERE {where}",
    "seconds of 1,000 rows": "SELECT ms_per_batch / rows AS value FROM benchmark WHERE {where}",
    "speed-up": """
        SELECT o.us_per_useful_token / s.us_per_useful_token AS value
        FROM (SELECT * FROM benchmark WHERE {where}) AS s
        JOIN benchmark AS o ON o.benchmark = s.benchmark AND o.round = s.round AND o.cache = s.cache
            AND o.arm = CASE s.arm WHEN 'token-list' THEN 'padding-free' ELSE 'padded' END || ', tokenizers'
    """,
}


@dataclass(frozen=True)
class Figure:
    """One figure of a study's table. Without an experiment nothing here measures it, and `reason`
    says why.
    """

    study: str
    table: str
    cell: str
    quantity: str
    published: float
    corrected: float | None
    reason: str
    experiment: str
    where: str

    @property
    def key(self) -> list[str]:
        """Names of study, table, cell and quantity."""
        return [self.study, self.table, self.cell, self.quantity]


def _read_file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def load_figures() -> list[Figure]:
    """Return the figures of all tables, in the order of the file."""
    figures: list[dict[str, Any]] = list(csv.DictReader(_read_file(FILES[0]).splitlines()))
    for row in figures:
        row |= {
            name: float(row[name]) if row[name] else None for name in ("published", "corrected")
        }
    return [Figure(**row) for row in figures]


def measure_figures(
    ledger: ClaimsFile, tables: Path, experiments: Sequence[str]
) -> list[dict[str, Any]]:
    """Return our number, its interval, n, experiment and scale of each figure that the tables of
    experiments have; none if no claim of the ledger is one of a source study.
    """
    if not any(document.study for document in ledger.documents.values()):
        return []
    found = []
    with ExitStack() as stack:
        figures = [figure for figure in load_figures() if figure.experiment in experiments]
        names = dict.fromkeys(figure.experiment for figure in figures)
        opened = {
            name: stack.enter_context(closing(ClaimTables(name, folder=tables / name)))
            for name in names
        }
        of_runs = {
            name: of.rows(FILES[1], _read_file(FILES[1]))
            for name, of in opened.items()
            if of.scale == SCALE
        }
        for figure in figures:
            claim_tables = opened[figure.experiment]
            key = " / ".join(figure.key)
            if sql := OF_BENCHMARKS.get(figure.quantity):
                values = claim_tables.rows(key, sql.format(where=figure.where))["value"]
            elif (of := of_runs.get(figure.experiment)) is not None:
                ids = claim_tables.rows(
                    key, f"SELECT run_id FROM runs WHERE NOT external AND {figure.where}"
                )["run_id"]
                values = of.loc[
                    (of["quantity"] == figure.quantity) & of["run_id"].isin(ids), "value"
                ]
            else:
                continue
            values = values.dropna().astype(float)
            if len(values):
                spread = statistics.summary(values.clip(upper=1e12).to_numpy())
                number, low, high = (
                    None if x >= 1e12 else float(x)
                    for x in (spread.median, spread.low, spread.high)
                )
                parts = {
                    "number": number,
                    "low": low,
                    "high": high,
                    "n": len(values),
                    "kind": spread.kind,
                }
                found.append(
                    {
                        "of": figure.key,
                        **parts,
                        "experiment": figure.experiment,
                        "scale": claim_tables.scale,
                    }
                )
    return found


@dataclass(frozen=True)
class Row:
    """One row of the replication table, as text."""

    study: str
    table: str
    cell: str
    published: str
    corrected: str = "–"
    ours: str = "–"
    ratio: str = "–"
    verdict: str = NOT_RUN

    @property
    def texts(self) -> list[str]:
        """The columns behind study and table."""
        return [self.cell, self.published, self.corrected, self.ours, self.ratio, self.verdict]


def compare_with_studies(
    claims: Iterable[dict[str, Any]], measured: Iterable[dict[str, Any]]
) -> list[Row]:
    """Return the table: the figures of the studies' tables, then their claims. `claims` are those
    of `claims.json`.
    """
    ours = {tuple(one["of"]): one for one in measured}
    rows = [_compare_figure(figure, ours=ours.get(tuple(figure.key))) for figure in load_figures()]
    rows += [_compare_claim(claim) for claim in claims if claim["study"]]
    return sorted(rows, key=lambda row: row.study)


def _compare_figure(figure: Figure, ours: dict[str, Any] | None) -> Row:
    expected = figure.published if figure.corrected is None else figure.corrected
    corrected = (
        figure.reason
        if figure.corrected is None
        else f"{_format_figure(figure.corrected)} ({figure.reason})"
    )
    cell = f"{figure.cell}: {figure.quantity}"
    row = Row(
        study=figure.study,
        table=figure.table,
        cell=cell,
        published=_format_figure(figure.published),
        corrected=corrected or "–",
    )
    if ours is None:
        # the studies' own cells have models of 124 million to 8 billion parameters
        is_of_runs = bool(figure.experiment) and figure.quantity not in OF_BENCHMARKS
        return replace(row, verdict=NEEDS_GPU) if is_of_runs else row
    number, low, high = _read_spread(ours)
    runs = f"; n = {ours['n']}" if ours["n"] > 1 else ""
    text = f"{_format_figure(number)} ({ours['experiment']} at {ours['scale']}{runs})"
    verdict = UNDECIDED
    if figure.quantity in COUNTS or ours["n"] >= statistics.fewest_pairs():
        verdict = {True: SAME, False: OTHER, None: UNDECIDED}[
            is_near(low, high, figures=(expected,))
        ]
        same_side = low > 1 if expected > 1 else high < 1
        verdict = (
            DIRECTION
            if verdict != SAME and figure.quantity.startswith("speed-up") and same_side
            else verdict
        )
    return replace(
        row,
        ours=text,
        ratio=_format_ratio(
            number,
            low,
            high=high,
            expected=expected,
            kind=ours["kind"],
        ),
        verdict=verdict,
    )


def _compare_claim(claim: dict[str, Any]) -> Row:
    corrected = " to ".join(format_number(one, unit=claim["unit"]) for one in claim["corrected"])
    corrected = f"{corrected} ({claim['remark']})" if corrected else "–"
    row = Row(
        study=claim["study"],
        table="Claims",
        cell=claim["claim"],
        published=claim["figure"] or "–",
        corrected=corrected,
    )
    if claim["experiment"] is None:
        return row
    number, low, high = _read_spread(claim)
    text = (
        f"{format_number(number, claim['unit'])} ({claim['experiment']} at {claim['scale']}; "
        f"{claim['verdict']})"
    )
    expected = claim["corrected"] or claim["published"]
    ratio = (
        _format_ratio(
            number,
            low,
            high=high,
            expected=expected[0],
            kind=claim["kind"],
        )
        if len(expected) == 1
        else "–"
    )
    near = is_near(low, high, figures=expected) if expected else True
    if claim["verdict"] not in (SUPPORTED, CONTRADICTED):
        verdict = UNDECIDED
    elif claim["verdict"] == SUPPORTED:
        verdict = SAME if near else DIRECTION
    elif claim["corrected"]:
        verdict = {True: SAME, False: OTHER, None: UNDECIDED}[near]
    else:
        verdict = OTHER
    return replace(row, ours=text, ratio=ratio, verdict=verdict)


def _read_spread(ours: dict[str, Any]) -> list[float]:
    """(number, low, high); JSON has null for infinity."""
    return [math.inf if ours[key] is None else ours[key] for key in ("number", "low", "high")]


def _format_ratio(number: float, low: float, high: float, expected: float, kind: str) -> str:
    if not all(map(math.isfinite, (number, low, high, expected))):
        return "–"
    spread = "" if low == high else f" ({low / expected:.3g} to {high / expected:.3g}, {kind})"
    return f"{number / expected:.3g}{spread}"


def _format_figure(number: float) -> str:
    """Return a figure as a table has it.

    >>> _format_figure(161853.91), _format_figure(31.97), _format_figure(0.571), _format_figure(math.inf)
    ('161,854', '31.97', '0.571', 'never')
    """
    if math.isinf(number):
        return "never"
    if number >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}"
