"""Two reports' folders held against each other: measures cell by cell, claims, and where the runs come from.

Runs of two reports are no pairs, whatever their repeats are called: they are compared as two samples
(`analysis/statistics.py`), and a difference may be that of code, machines, packages or inputs. `suspects` lists those.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tokenscale.analysis import statistics
from tokenscale.base.errors import UserError, few
from tokenscale.base.files import read_json, sha256_file
from tokenscale.base.manifests import read_sums
from tokenscale.report import bundle
from tokenscale.report.style import number
from tokenscale.report.table import Table

#: fields of a run's origin, those first that explain most: (name in `provenance.json`, in words, how it could matter)
SUSPECTS = (
    ("device", "device", "speed"),
    ("cpu", "CPU", "speed"),
    ("cores", "cores", "speed"),
    ("machine", "machine", "speed"),
    ("manifests", "inputs", "losses, padding, speed"),
    ("code_digest", "code and inputs of the training", "all measures"),
    ("packages", "packages of the training", "speed, and last digits of losses"),
    ("commit", "commit", "all measures, if the training's code changed with it"),
    ("dirty", "uncommitted changes", "all measures"),
)


@dataclass(frozen=True)
class Report:
    """One report's folder: its name as given, cells by experiment, origin, and claims where it has any."""

    name: str
    cells: dict[str, pd.DataFrame]
    origin: dict[str, Any]
    claims: dict[str, dict[str, Any]] | None


@dataclass(frozen=True)
class Difference:
    """What differs between two reports, as tables with their headings."""

    cells: Table
    only_in_one: Table
    claims: Table
    suspects: Table

    def sections(self) -> list[tuple[str, Table]]:
        """Those that have something to say."""
        titled = [("Cells", self.cells), ("In one report only", self.only_in_one),
                  ("Claims whose verdict differs", self.claims), ("What may explain it", self.suspects)]  # fmt: skip
        return [(title, table) for title, table in titled if table.rows]


def read(folder: Path) -> Report:
    """A report's folder. Raises UserError where it is none, or where a file that is read is not that of its list."""
    if not (folder / "provenance.json").is_file():
        raise UserError(
            "this is no report's folder.",
            folder=folder,
            expected="provenance.json and data/<experiment>/cells.parquet, as in results/report",
            next="snakemake report makes one",
        )
    _check_sums(folder)
    origin = read_json(folder / "provenance.json", "record of the report's origin")
    found = {path.parent.name: _cells(path) for path in sorted((folder / "data").glob("*/cells.parquet"))}
    claims = folder / "claims.json"
    return Report(str(folder), found, origin, _claims(read_json(claims, "claims")) if claims.is_file() else None)


def _check_sums(folder: Path) -> None:
    """Compare the files that `read` reads with SHA256SUMS, where the folder has this list."""
    listed = read_sums(folder) if (folder / bundle.SUMS).is_file() else {}
    for name, expected in listed.items():
        path = folder / name
        read = name in ("provenance.json", "claims.json") or path.name == "cells.parquet"
        if read and path.is_file() and (found := sha256_file(path)) != expected:
            raise UserError(
                "a file of a report has changed since it was built.",
                file=path,
                expected=f"sha256 {expected}  ({bundle.SUMS})",
                found=f"sha256 {found}",
                next="build that report again, or name another one",
            )


def _cells(path: Path) -> pd.DataFrame:
    try:
        rows = pd.read_parquet(path)
        return rows[[*bundle.IDENTITY, *bundle.NAMES]]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            "the cells of a report cannot be read.",
            file=path,
            reason=str(error).split("\n")[0],
            next="build that report again, or name another one",
        ) from None


def _claims(value: Any) -> dict[str, dict[str, Any]]:
    """Claim's id → claim, from a list, or from a mapping with the list under `claims`."""
    listed = value.get("claims") if isinstance(value, dict) else value
    return {str(claim["id"]): claim for claim in listed or [] if isinstance(claim, dict) and "id" in claim}


def difference(a: Report, b: Report) -> Difference:
    """What `b` differs in from `a`."""
    return Difference(_cell_table(a, b), _only_in_one(a, b), _claim_table(a, b), suspects(a, b))


def _grouped(report: Report) -> dict[tuple, pd.DataFrame]:
    """(experiment, cell, world size, external) → runs that count."""
    groups = {}
    for experiment, rows in report.cells.items():
        counted = rows[rows["validity"].isin(["valid", "suspect"])]
        known = counted.assign(world_size=counted["world_size"].fillna(0), cell=counted["cell"].fillna(""))
        for key, group in known.groupby(["cell", "world_size", "external"], sort=False):
            groups[(experiment, *key)] = group
    return groups


@dataclass(frozen=True)
class _Pair:
    """A measure of a cell in both reports; `found` is None where nothing can be tested, and `why` says so."""

    place: tuple[str, str, str]
    runs: tuple[int, int]
    medians: tuple[float, float]
    found: statistics.Unpaired | None
    why: str


def _cell_table(a: Report, b: Report) -> Table:
    """A row a cell and measure that both have."""
    before, after = _grouped(a), _grouped(b)
    pairs = [
        pair
        for key in after
        if key in before
        for measure in bundle.NAMES
        if (pair := _pair(key, measure, before[key], after[key]))
    ]
    corrected = _corrected(pairs)
    rows = []
    for pair in pairs:
        texts = [*pair.place, f"{pair.runs[0]}, {pair.runs[1]}", *(number(m, 5) for m in pair.medians)]
        if pair.found:
            p, smallest = corrected[pair.place]
            word = _judged(statistics.compare_unpaired(pair.found, p, smallest), pair.place[2])
            spread = f"{number(pair.found.low, 4)}–{number(pair.found.high, 4)}"
            rows.append([*texts, number(pair.found.ratio, 4), spread, number(p, 2), word])
        else:
            rows.append([*texts, "–", "–", "–", pair.why])
    columns = [("experiment", False), ("cell", False), ("measure", False), ("runs, A and B", True)]
    columns += [("median, A", True), ("median, B", True), ("B / A", True), ("spread", True), ("p (Holm)", True)]
    return Table([*columns, ("verdict", False)], rows, _caption(pairs))


def _corrected(pairs: list[_Pair]) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Place → (p, smallest possible p) after Holm over the cells of one measure in one experiment."""
    families: dict[tuple[str, str], list[_Pair]] = {}
    for pair in pairs:
        if pair.found:
            families.setdefault((pair.place[0], pair.place[2]), []).append(pair)
    corrected: dict[tuple[str, str, str], tuple[float, float]] = {}
    for family in families.values():
        ps = statistics.holm([pair.found.p for pair in family])
        smallest = statistics.holm([pair.found.smallest_p for pair in family])
        corrected |= dict(zip((pair.place for pair in family), zip(ps, smallest, strict=True), strict=True))
    return corrected


def _pair(key: tuple, measure: str, before: pd.DataFrame, after: pd.DataFrame) -> _Pair | None:
    """One measure of one cell; None where one of the two has no value of it."""
    x, y = (rows.dropna(subset=[measure]) for rows in (before, after))
    if x.empty or y.empty:
        return None
    experiment, cell, _, external = key
    place = (experiment, (cell or "(one cell)") + " (external)" * bool(external), measure)
    old, new = x[measure].astype(float), y[measure].astype(float)
    found, why = None, ""
    if x["seal"].notna().all() and set(x["seal"]) == set(y["seal"]):
        why = "the same runs"
    elif (old <= 0).any() or (new <= 0).any():
        why = "not compared: values not above zero"
    else:
        found = statistics.compare(new, old)
    return _Pair(place, (len(x), len(y)), (old.median(), new.median()), found, why)


def _judged(word: str, measure: str) -> str:
    """The word, and for whom it is good."""
    if word not in ("higher", "lower"):
        return word
    return f"{word} ({'better' if (word == 'lower') == (measure in bundle.LESS_IS_BETTER) else 'worse'})"


def _caption(pairs: list[_Pair]) -> str:
    kinds = ", ".join(sorted({pair.found.kind for pair in pairs if pair.found}))
    return (
        "Valid and suspect runs of cells that both reports have, by their medians. Runs of two reports are not paired: "
        "exact permutation test on logarithms, Holm-corrected over the cells of a measure in an experiment, and the "
        f"spread of the ratios of every run of B to every run of A{f' ({kinds})' if kinds else ''}. “Too few runs”: no "
        f"data from so few could reach p < {statistics.LEVEL:g}; “equivalent”: the whole interval lies within "
        f"1 ± {statistics.MARGIN:g}."
    )


def _only_in_one(a: Report, b: Report) -> Table:
    """Cells that one of the two lacks."""
    before, after = _grouped(a), _grouped(b)
    rows = [
        [experiment, cell or "(one cell)", report.name, str(len(group))]
        for report, groups, others in ((a, before, after), (b, after, before))
        for (experiment, cell, *rest), group in groups.items()
        if (experiment, cell, *rest) not in others
    ]
    return Table([("experiment", False), ("cell", False), ("only in", False), ("runs", True)], rows)


def _claim_table(a: Report, b: Report) -> Table:
    """Claims with another verdict, or that one of the two lacks; empty where a report has no claims at all."""
    columns = [("claim", False), ("number, A", True), ("verdict, A", False), ("number, B", True), ("verdict, B", False)]
    if a.claims is None or b.claims is None:
        return Table(columns, [])
    rows = []
    for claim in sorted(a.claims.keys() | b.claims.keys()):
        x, y = a.claims.get(claim, {}), b.claims.get(claim, {})
        if x.get("verdict") != y.get("verdict"):
            rows.append([claim, _number(x), x.get("verdict") or "–", _number(y), y.get("verdict") or "–"])
    return Table(columns, rows)


def _number(claim: dict[str, Any]) -> str:
    value = claim.get("number")
    return number(value) if isinstance(value, (int, float)) else str(value or "–")


def suspects(a: Report, b: Report) -> Table:
    """Fields of the runs' origin that differ, in the order of `SUSPECTS`, then those of the reports themselves."""
    rows = []
    for name, words, matters in SUSPECTS:
        for detail, x, y in _values(a, b, name):
            rows.append([words + (f": {detail}" if detail else ""), _text(x), _text(y), matters])
    for name, words in (("git", "commit of the report"), ("packages", "packages of the report")):
        ours, theirs = a.origin.get(name) or {}, b.origin.get(name) or {}
        for key in sorted(ours.keys() | theirs.keys()):
            x, y = ours.get(key), theirs.get(key)
            if x != y:
                rows.append([f"{words}: {key}", _text({x}), _text({y}), "definitions and drawings"])
    rows = [[str(rank), *row] for rank, row in enumerate(rows, 1)]
    columns = [("rank", True), ("what differs", False), ("A", False), ("B", False), ("what it could change", False)]
    return Table(columns, rows, "Values over all runs of a report that have a record, those first that explain most.")


def _values(a: Report, b: Report, name: str) -> list[tuple[str, set, set]]:
    """(key of a mapping, or nothing; values in A; values in B) of a field that differs."""
    found = []
    x, y = (_of_runs(report, name) for report in (a, b))
    for key in sorted(x.keys() | y.keys()):
        if x.get(key, set()) != y.get(key, set()):
            found.append((key, x.get(key, set()), y.get(key, set())))
    return found


def _of_runs(report: Report, name: str) -> dict[str, set]:
    """Key ("" of a plain value) → values, of experiments and runs."""
    values: dict[str, set] = {}
    for experiment in (report.origin.get("experiments") or {}).values():
        for run in (experiment.get("runs") or {}).values():
            value = run.get(name)
            for key, one in value.items() if isinstance(value, dict) else [("", value)]:
                values.setdefault(key, set()).add(one)
    return values


def _text(values: set) -> str:
    """A few values; digests by their beginning."""
    texts = [v[:12] if isinstance(v, str) and len(v) in (40, 64) else json.dumps(v) if not isinstance(v, str) else v
            for v in sorted(values - {None}, key=str)]  # fmt: skip
    return few(texts, 4) or "not recorded"
