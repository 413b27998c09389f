"""Comparisons of cells in pairs of runs: effect, interval, verdict, and how many runs would settle them.

An experiment's primary comparisons answer its question. They are one family (Holm 1979), and only they get a verdict.
All other pairs of approaches are exploratory: shown with their spread, without a test, since the more comparisons are
tested, the more runs each of them needs. Without primary comparisons every pair of approaches is tested.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from tokenscale.analysis import comparability, statistics
from tokenscale.base.errors import UserError
from tokenscale.report.style import number
from tokenscale.report.table import Table
from tokenscale.settings.experiments import COMPARISONS

#: the verdict where no data from so few pairs could reach a small p
TOO_FEW = "too few runs"
#: in place of a verdict, where a comparison is not among the primary ones
EXPLORATORY = "exploratory"
_MARGIN = f"1 ± {statistics.MARGIN:g}"
#: after a verdict, where the effect is smaller than what matters
SMALL = f" by less than {100 * statistics.MARGIN:g} %"
#: quantity → (words for a ratio above and below 1, what is compared)
QUANTITIES = {
    "useful_tokens_per_s": ("faster", "slower", "useful tokens per second"),
    "validation_loss": ("higher loss", "lower loss", "final validation loss"),
}
#: every verdict of a comparison
VERDICT_WORDS = (
    *(f"{word}{by}" for above, below, _ in QUANTITIES.values() for word in (above, below) for by in ("", SMALL)),
    *(TOO_FEW, "no difference shown", "equivalent", EXPLORATORY),
)


def comparisons(
    throughput: pd.DataFrame,
    runs: pd.DataFrame,
    primary: Sequence[Mapping[str, Any]] | None = None,
    validation: pd.DataFrame | None = None,
    certificates: pd.DataFrame | None = None,
) -> tuple[list[dict[str, Any]], str]:
    """(comparisons, primary ones first; sentences on runs that are in none because they are not comparable).

    `primary` is what `settings.experiments.describe_primary` wrote; None tests all pairs of approaches. `throughput`,
    `runs`, `validation` and `certificates` are rows of the queries `throughput`, `inventory`, `validation` and
    `certificates`. Runs of other programs are in no pair: they have no repeats of ours. Raises UserError where two runs
    are the same repeat of a cell.
    """
    pairs, refused = _approach_pairs(throughput, runs)
    if primary is None:
        return _judged(pairs), refused
    main, refused_primary = _primary_pairs(throughput, runs, primary, validation)
    main = [replace(pair, parity=_find_parity(pair, runs, certificates)) for pair in main]
    tested = {(pair.of, pair.over) for pair in main if pair.quantity == "useful_tokens_per_s"}
    others = [pair for pair in pairs if (pair.of, pair.over) not in tested]
    sentences = dict.fromkeys(filter(None, [refused_primary, refused]))
    return _judged(main) + [_describe(p, EXPLORATORY, np.nan, np.nan) for p in others], " ".join(sentences)


@dataclass(frozen=True)
class _Pair:
    """Two cells with the numbers of their runs, repeat → (run id, number)."""

    of: str
    over: str
    names: tuple[str, str]
    at: str
    quantity: str
    values: Mapping[Any, tuple[str, float]]
    bases: Mapping[Any, tuple[str, float]]
    parity: str = ""  # of two trainers: their certificate in words

    def result(self) -> statistics.Comparison:
        values, bases = ({repeat: x for repeat, (_, x) in side.items()} for side in (self.values, self.bases))
        return statistics.ratio_of_medians(values, bases)


def _judged(pairs: Sequence[_Pair]) -> list[dict[str, Any]]:
    """Comparisons with verdicts, corrected over all of them."""
    results = [pair.result() for pair in pairs]
    corrected = statistics.holm([result.p for result in results])
    reachable = statistics.holm([result.smallest_p for result in results])
    found = []
    for pair, c, p, smallest in zip(pairs, results, corrected, reachable, strict=True):
        spread = statistics.Summary(c.n, c.paired, c.low, c.high, c.kind)
        verdict = statistics.verdict(spread, p, smallest)
        above, below, _ = QUANTITIES[pair.quantity]
        words = {"faster": above, "slower": below}
        for word, own in words.items():
            verdict = verdict.replace(word, own)
        found.append(_describe(pair, verdict, p, smallest))
    return found


def _describe(pair: _Pair, verdict: str, p: float, smallest_p: float) -> dict[str, Any]:
    return {
        "approach": pair.names[0],
        "baseline": pair.names[1],
        "group": pair.at,
        "quantity": pair.quantity,
        "primary": verdict != EXPLORATORY,
        "result": pair.result(),
        "p": p,
        "smallest_p": smallest_p,
        "verdict": verdict,
        "parity": pair.parity,
    }


def describe_certificate(certificate: Mapping[str, Any] | None) -> str:
    """Return a row of the query `certificates` in words.

    >>> describe_certificate({"verdict": "different", "cause": "epsilon of norm: 1e-05 in A, 1e-06 in B"})
    'different: epsilon of norm: 1e-05 in A, 1e-06 in B'
    """
    if certificate is None:
        return "no certificate"
    if certificate["verdict"] == "none":
        return f"no certificate: {certificate['reason']}"
    if certificate["verdict"] != "different":
        return str(certificate["verdict"])
    cause = certificate["cause"]
    return f"different: {cause if isinstance(cause, str) else certificate['first_difference']}"


def _find_parity(pair: _Pair, runs: pd.DataFrame, certificates: pd.DataFrame | None) -> str:
    """Return the certificate of a comparison of trainers in words; empty where one trainer is compared with itself."""
    arms = [set(runs.loc[runs["cell"] == cell, "arm"].dropna()) for cell in (pair.of, pair.over)]
    if arms[0] == arms[1]:
        return ""
    found = [] if certificates is None else certificates.to_dict("records")
    return describe_certificate(
        next((row for row in found if (row["of_cell"], row["over_cell"]) == (pair.of, pair.over)), None)
    )


def _primary_pairs(
    throughput: pd.DataFrame,
    runs: pd.DataFrame,
    primary: Sequence[Mapping[str, Any]],
    validation: pd.DataFrame | None,
) -> tuple[list[_Pair], str]:
    """(the primary comparisons, also those without any pair of runs; sentences on runs that are not comparable)."""
    ours = runs[~runs["external"].fillna(False).astype(bool)]
    found, sentences = [], []
    for comparison in primary:
        of, over, quantity = comparison["of"], comparison["over"], comparison["quantity"]
        rows = ours[ours["cell"].isin([of, over])]
        refused = comparability.refusals(rows, comparison["factor"])
        sentences += [refusal.sentence for refusal in refused]
        rows = rows[~rows["run_id"].isin(comparability.refused(refused))]
        numbers = _numbers(quantity, throughput, validation)
        sides = []
        for cell in (of, over):
            of_cell = rows[(rows["cell"] == cell) & rows["run_id"].isin(numbers)]
            sides.append({r.repeat: (r.run_id, numbers[r.run_id]) for r in of_cell.itertuples()})
        names = tuple(map(_shorten, comparison["names"]))
        at = _shorten(comparison["at"])
        found.append(_Pair(of, over, (names[0], names[1]), at, quantity, sides[0], sides[1]))
    return found, " ".join(dict.fromkeys(sentences))


def _numbers(quantity: str, throughput: pd.DataFrame, validation: pd.DataFrame | None) -> dict[str, float]:
    """Run id → number of a quantity; runs without one are left out."""
    if quantity == "validation_loss":
        last = None if validation is None else validation[validation["last"].astype(bool)]
        return {} if last is None else dict(zip(last["run_id"], last["loss"].astype(float), strict=True))
    return dict(zip(throughput["run_id"], throughput["useful_tokens_per_s"].astype(float), strict=True))


def _shorten(cell: str) -> str:
    """Return a cell's levels without the keys that their values explain.

    >>> _shorten("approach=packed, layout.data=2")
    'packed, 2 data-parallel ranks'
    """
    levels = []
    for level in cell.split(", "):
        ranks = level.removeprefix("layout.data=")
        if ranks != level:
            level = f"{ranks} data-parallel rank{'s' * (ranks != '1')}"
        for prefix in ("approach=", "arm=", "layout."):
            level = level.removeprefix(prefix)
        levels.append(level)
    return ", ".join(levels)


def _approach_pairs(throughput: pd.DataFrame, runs: pd.DataFrame) -> tuple[list[_Pair], str]:
    """(the pairs of `COMPARISONS`, one a group; sentences on runs that are not comparable).

    A group is what both have in common: all factors but the approach, at the smallest world size that both have.
    Factors of the Parquet store are those of the approach that is compared; its baseline reads none.
    """
    refused = comparability.refusals(runs, "approach")
    out = comparability.refused(refused) | set(runs.loc[runs["external"].fillna(False).astype(bool), "run_id"])
    cells = _cells(throughput[~throughput["run_id"].isin(out)])
    names = dict(zip(runs["run_id"], runs["cell"], strict=True))
    found = []
    for approach, baseline in COMPARISONS:
        groups = {(c.factors, c.storage, c.layout) for c in cells if c.approach == approach}
        for factors, storage, layout in sorted(groups):
            of = _Cell(approach, factors, storage, layout, 0)
            over = _Cell(baseline, factors, "", layout, 0)
            worlds = [c.world_size for c in cells if c == replace(of, world_size=c.world_size)]
            shared = [w for w in worlds if replace(over, world_size=w) in cells]
            if not shared:
                continue
            of, over = (replace(cell, world_size=min(shared)) for cell in (of, over))
            sides = [{k: (r.run_id, r.useful_tokens_per_s) for k, r in cells[c].items()} for c in (of, over)]
            if sides[0].keys() & sides[1].keys():
                of_cell, over_cell = (names[next(iter(side.values()))[0]] for side in sides)
                at = [factors, storage, layout, of.world_size]
                found.append((of_cell, over_cell, (approach, baseline), at, sides))
    sizes = {at[3] for *_, at, _ in found}
    pairs = []
    for of_cell, over_cell, both, (*levels, world), sides in found:
        group = ", ".join(filter(None, [*levels, f"world size {world}" if len(sizes) > 1 else ""]))
        pairs.append(_Pair(of_cell, over_cell, both, group, "useful_tokens_per_s", sides[0], sides[1]))
    return pairs, comparability.sentences(refused)


@dataclass(frozen=True)
class _Cell:
    """What the repeats of a cell share; see `analysis/tables.py`."""

    approach: str
    factors: str
    storage: str
    layout: str
    world_size: int


def _cells(throughput: pd.DataFrame) -> dict[_Cell, dict[Any, Any]]:
    """Cell → repeat → row of `throughput.sql`."""
    cells: dict[_Cell, dict[Any, Any]] = {}
    for row in throughput.itertuples():
        cell = _Cell(row.approach, row.factors, row.storage, row.layout, row.world_size)
        other = cells.setdefault(cell, {}).setdefault(row.repeat, row)
        if other is not row:
            raise UserError(
                "two runs are the same repeat of the same cell.",
                cell=f"{row.series}, world size {row.world_size}, repeat {row.repeat}",
                runs=f"{other.run_id}, {row.run_id}",
                next="name what tells them apart as a factor of the experiment",
            )
    return cells


def select_answers(answers: list[dict[str, str]], most: int) -> tuple[list[dict[str, str]], str]:
    """(answers that are shown where there is room for so many, how many are left out, in words): where they are more,
    the first of those that are decided."""
    if len(answers) <= most:
        return answers, ""
    decided = [answer for answer in answers if answer["verdict"] not in (TOO_FEW, EXPLORATORY)]
    shown = decided[:most]
    left = f"{len(answers) - len(shown)} {'more ' if shown else ''}answers"
    if len(shown) == len(decided) and all(a["verdict"] == TOO_FEW for a in answers if a not in shown):
        left += f"{':' if shown else ', all of'} too few runs for a verdict"
    return shown, left


def answers(compared: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return a line for each primary comparison: effect, spread, verdict."""
    return [{"text": _sentence(c), "spread": _spread(c), "verdict": c["verdict"]} for c in compared if c["primary"]]


def _sentence(c: dict[str, Any]) -> str:
    of, over, ratio = c["approach"], c["baseline"], format_ratio(c["result"].paired)
    start = f"{c['group']}: " if c["group"] else ""
    if not c["result"].n:
        return f"{start}{of} against {over}: no pair of runs"
    if c["quantity"] == "validation_loss":
        return f"{start}{of} ends at {ratio}× the validation loss of {over}"
    parity = f" (parity: {c['parity']})" if c["parity"] else ""
    return f"{start}{of} trains on {ratio}× as many useful tokens per second as {over}{parity}"


def _spread(c: dict[str, Any]) -> str:
    r = c["result"]
    text = f"{format_ratio(r.low)}–{format_ratio(r.high)}, {in_pairs(r.n)}, {r.kind}"
    return text + (f", within {_MARGIN}" if c["verdict"] == "equivalent" else "")


def format_ratio(value: float) -> str:
    """Return a ratio with the digits that tell it from 1: three decimals near 1, three significant digits elsewhere.

    >>> format_ratio(1.0), format_ratio(1.0042), format_ratio(3.3071), format_ratio(0.28514)
    ('1.000', '1.004', '3.31', '0.285')
    """
    return f"{value:.3f}" if 0.5 < value < 2 else number(value)


def in_pairs(n: int) -> str:
    """`1 pair`, `2 pairs`."""
    return f"{n} pair{'s' * (n != 1)}"


def comparison_table(compared: list[dict[str, Any]], refused: str = "") -> Table:
    """Return a row for each comparison: ratios, test and verdict; a column for groups only where there are any."""
    grouped = any(c["group"] for c in compared)
    losses = any(c["quantity"] != "useful_tokens_per_s" for c in compared)
    columns = [("of", False), ("against", False), *([("at", False)] if grouped else [])]
    columns += [("compared", False)] if losses else []
    columns += [("pairs", True), ("ratio of medians", True), ("median of paired ratios", True), ("spread", True)]
    columns += [("what the spread is", False), ("p (Holm)", True), ("smallest possible p", True), ("verdict", False)]
    trainers = any(c["parity"] for c in compared)
    columns += [("parity of the trainers", False)] if trainers else []
    rows = []
    for c in compared:
        r = c["result"]
        names = [c["approach"], c["baseline"], *([c["group"]] if grouped else [])]
        names += [QUANTITIES[c["quantity"]][2]] if losses else []
        spread = f"{format_ratio(r.low)}–{format_ratio(r.high)}"
        rows.append(
            [*names, str(r.n), format_ratio(r.ratio), format_ratio(r.paired), spread]
            + [r.kind, number(c["p"], 2), number(c["smallest_p"], 2), c["verdict"], *[c["parity"]] * trainers]
        )
    exploratory = any(not c["primary"] for c in compared)
    notes = [
        "Ratios in pairs of runs of one repeat, all other factors equal"
        + ("." if losses else ": useful tokens per second."),
        "Exact sign-flip test on log ratios, Holm-corrected over the rows with a verdict.",
        "“too few runs”: no data from so many pairs could reach p < 0.05.",
        f"“equivalent”: the whole interval lies within {_MARGIN}, the smallest effect that matters.",
        "Parity: whether both trainers compute the same from the same weights and batches; A is the second of the two, "
        "B the first (docs/parity.md)."
        if trainers
        else "",
        "“exploratory”: not a primary comparison of this experiment, so it is not tested." if exploratory else "",
    ]
    return Table(columns, rows, " ".join(filter(None, [*notes, refused])))
