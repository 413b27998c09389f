"""Comparisons of cells in pairs of runs: effect, interval, verdict, and what a reader must know beside it.

An experiment's primary comparisons answer its question. They are one family (Holm 1979), and only they get a verdict.
All other pairs of approaches are exploratory: shown with their spread, without a test, since the more comparisons are
tested, the more runs each of them needs. Without primary comparisons every pair of approaches is tested.

A verdict counts all pairs. It is marked where some have a suspect run, and there is none where half of them do. Where
throughput drifted, the drift is taken out of every run: a verdict that does not stand then is none.
"""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from tokenscale.analysis import comparability, statistics
from tokenscale.report.style import number
from tokenscale.report.table import Table, columns
from tokenscale.settings.experiments import COMPARISONS

#: the verdict where no data from so few pairs could reach a small p
TOO_FEW = "too few runs"
#: in place of a verdict, where a comparison is not among the primary ones
EXPLORATORY = "exploratory"
#: in place of a verdict: half of the pairs or more have a suspect run; the effect does not stand without the drift
SUSPECT, DRIFTED = "no verdict: suspect runs", "no verdict: drift"
#: after a verdict that stands
WITH_DRIFT, WITH_SUSPECT, UNEQUAL_UPDATES = ", with drift", ", with suspect runs", ", unequal updates"
_MARGIN = f"1 ± {statistics.MARGIN:g}"
#: after a verdict, where the effect is smaller than what matters
SMALL = f" by less than {100 * statistics.MARGIN:g} %"
RATE = "useful_tokens_per_s"
#: quantity → (words for a ratio above and below 1, what is compared)
QUANTITIES = {
    RATE: ("faster", "slower", "useful tokens per second"),
    "validation_loss": ("higher loss", "lower loss", "final validation loss"),
}
#: every verdict of a comparison, without its marks
VERDICT_WORDS = (
    *(f"{word}{by}" for above, below, _ in QUANTITIES.values() for word in (above, below) for by in ("", SMALL)),
    *(TOO_FEW, "no difference shown", "equivalent", EXPLORATORY, SUSPECT, DRIFTED),
)
#: verdicts that decide nothing, and so have no marks
UNDECIDED = (TOO_FEW, EXPLORATORY, SUSPECT, DRIFTED)
#: of the runs that a comparison leaves out: reasons that are named, and letters of each
REASONS, LETTERS = 3, 90


def comparisons(
    throughput: pd.DataFrame,
    runs: pd.DataFrame,
    primary: Sequence[Mapping[str, Any]] | None = None,
    validation: pd.DataFrame | None = None,
    certificates: pd.DataFrame | None = None,
) -> tuple[list["Judged"], str]:
    """(comparisons, primary ones first; sentences on runs that are in none because they are not comparable).

    `primary` is what `settings.experiments.describe_primary` wrote; None tests all pairs of approaches. `throughput`,
    `runs`, `validation` and `certificates` are rows of the queries `throughput`, `inventory`, `validation` and
    `certificates`. Runs of other programs are in no pair: they have no repeats of ours.
    """
    pairs, sentences = _approach_pairs(throughput, runs)
    others: list[Pair] = []
    if primary is not None:
        main, refused = _primary_pairs(throughput, runs, primary, validation)
        main = [replace(pair, parity=_find_parity(pair, runs, certificates)) for pair in main]
        tested = {(pair.of, pair.over) for pair in main if pair.quantity == RATE}
        others = [pair for pair in pairs if (pair.of, pair.over) not in tested]
        pairs, sentences = main, refused + sentences
    started = runs.dropna(subset=["started_unix_s"]).set_index("run_id")["started_unix_s"].to_dict()
    judged = judge(pairs, measure_drift(throughput, runs), started)
    found = [_add_notes(comparison, runs, validation) for comparison in judged]
    exploratory = [Judged(pair, pair.result(), np.nan, np.nan, EXPLORATORY) for pair in others]
    return found + exploratory, " ".join(dict.fromkeys(sentences))


def measure_drift(throughput: pd.DataFrame, runs: pd.DataFrame) -> statistics.Drift:
    """Return the drift of useful tokens per second over the starts of our own runs, within their cells."""
    started = _ours(runs)[["run_id", "started_unix_s"]].dropna()
    timed = throughput.merge(started, on="run_id").sort_values("started_unix_s", kind="stable")
    cells = list(zip(timed["series"], timed["world_size"], strict=True))
    return statistics.drift(timed["started_unix_s"], timed[RATE], cells)


def _ours(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[~runs["external"].fillna(False).astype(bool)]


@dataclass(frozen=True)
class Pair:
    """Two cells with the numbers of their runs, repeat → (run id, number)."""

    of: str
    over: str
    names: tuple[str, str]
    at: str
    quantity: str
    values: Mapping[Any, tuple[str, float]]
    bases: Mapping[Any, tuple[str, float]]
    refused: Mapping[str, str]  # runs that are not comparable: run id → what differs
    parity: str = ""  # of two trainers: their certificate in words

    @property
    def ids(self) -> list[tuple[str, str]]:
        """The ids of both runs of each repeat that both cells have."""
        return [(self.values[k][0], self.bases[k][0]) for k in sorted(self.values.keys() & self.bases.keys())]

    def result(self) -> statistics.Comparison:
        return statistics.compare_pairs(*({k: x for k, (_, x) in side.items()} for side in (self.values, self.bases)))

    def without_drift(self, slope: float, started: Mapping[str, float]) -> "Pair":
        """The same with `slope` (of the logarithm, a second) taken out of all rates whose run's start is known."""
        if self.quantity != RATE:
            return self
        last = max(started.values())
        sides = [
            {k: (run, x * math.exp(slope * (last - started[run]))) for k, (run, x) in side.items() if run in started}
            for side in (self.values, self.bases)
        ]
        return replace(self, values=sides[0], bases=sides[1])


@dataclass(frozen=True)
class Judged:
    """A comparison: p and smallest possible p after correction, the verdict, and what a reader must know beside it."""

    pair: Pair
    result: statistics.Comparison
    p: float
    smallest_p: float
    verdict: str
    notes: tuple[str, ...] = ()

    def mark(self, mark: str, *notes: str) -> "Judged":
        """The same with notes, and with a mark if the verdict decides anything."""
        verdict = self.verdict if self.verdict in UNDECIDED else self.verdict + mark
        return replace(self, verdict=verdict, notes=(*self.notes, *filter(None, notes)))


def judge(pairs: Sequence[Pair], drift: statistics.Drift, started: Mapping[str, float]) -> list[Judged]:
    """Return the verdicts of comparisons that are one family, corrected over all of them.

    Where throughput drifted, a difference or equivalence of rates that is not found without the drift is `DRIFTED`.
    `started` is run id → start in seconds.
    """
    results = [pair.result() for pair in pairs]
    corrected = statistics.holm([result.p for result in results])
    reachable = statistics.holm([result.smallest_p for result in results])
    found = []
    for pair, c, p, smallest in zip(pairs, results, corrected, reachable, strict=True):
        verdict = statistics.verdict(c.spread, p, smallest)
        for word, own in zip(("faster", "slower"), QUANTITIES[pair.quantity], strict=False):
            verdict = verdict.replace(word, own)
        found.append(Judged(pair, c, p, smallest, verdict))
    if drift.verdict == "drift":
        steady = judge([pair.without_drift(drift.slope, started) for pair in pairs], replace(drift, p=1.0), {})
        found = [_hold_against(*both, drift) for both in zip(found, steady, strict=True)]
    return [_add_order(judged, started) for judged in found]


def _hold_against(judged: Judged, steady: Judged, drift: statistics.Drift) -> Judged:
    """Mark a comparison of rates, or take its verdict away if it has another one without the drift."""
    if judged.pair.quantity != RATE or not judged.result.spread.n:
        return judged
    word = judged.verdict.removesuffix(SMALL)
    if word in ("faster", "slower", "equivalent") and steady.verdict.removesuffix(SMALL) != word:
        judged = replace(judged, verdict=DRIFTED)
    ratio = f"without the drift {format_ratio(steady.result.spread.median)}×"
    return judged.mark(WITH_DRIFT, f"throughput drifted by {number(100 * drift.share, 2)} %, {ratio}")


def _add_order(judged: Judged, started: Mapping[str, float]) -> Judged:
    """Note which cell ran first in how many pairs, where throughput drifted or it is one cell in six or more."""
    pair = judged.pair
    known = [started[a] < started[b] for a, b in pair.ids if a in started and b in started]
    if known and (judged.notes or (len(known) > 5 and len(set(known)) == 1)):
        return judged.mark("", f"{pair.names[0]} ran first in {sum(known)} of {in_pairs(len(known))}")
    return judged


def _add_notes(judged: Judged, runs: pd.DataFrame, validation: pd.DataFrame | None) -> Judged:
    """Mark suspect runs and unequal updates, and name the runs that are left out."""
    pair = judged.pair
    used = {run_id for ids in pair.ids for run_id in ids}
    suspect = _reasons(runs[runs["run_id"].isin(used) & (runs["validity"] == "suspect")])
    if doubtful := sum(not suspect.keys().isdisjoint(ids) for ids in pair.ids):
        if 2 * doubtful >= len(pair.ids) and judged.verdict not in UNDECIDED:
            judged = replace(judged, verdict=SUSPECT)
        note = f"suspect runs in {doubtful} of {in_pairs(len(pair.ids))}: {_name_runs(suspect)}"
        judged = judged.mark(WITH_SUSPECT, note)
    if pair.quantity == "validation_loss" and validation is not None and used:
        last = validation[validation["last"].astype(bool)].set_index("run_id")
        for column, unit, mark in (("step", "updates", UNEQUAL_UPDATES), ("useful_tokens_seen", "useful tokens", "")):
            of, over = (round(last.loc[list(side), column].median()) for side in zip(*pair.ids, strict=True))
            if of != over:
                judged = judged.mark(mark, f"after {number(of, 6)} against {number(over, 6)} {unit}")
    rows = _ours(runs)
    return judged.mark("", describe_left_out(rows[rows["cell"].isin([pair.of, pair.over])], used, pair.refused))


def describe_left_out(runs: pd.DataFrame, used: Set[str], refused: Mapping[str, str]) -> str:
    """Return which of these runs a comparison does not use, and why; empty if it uses all.

    `refused` is run id → what makes it not comparable.
    """
    ids = set(runs["run_id"])
    reasons = _reasons(runs[~runs["validity"].isin(["valid", "suspect"])])
    reasons |= {run_id: f"not comparable: {why}" for run_id, why in refused.items() if run_id in ids}
    reasons |= {run_id: "nothing to compare in their repeat" for run_id in runs["run_id"] if run_id not in reasons}
    left = {run_id: reason for run_id, reason in reasons.items() if run_id not in used}
    return f"left out: {_name_runs(left)}" if left else ""


def _reasons(runs: pd.DataFrame) -> dict[str, str]:
    """Run id → its validity and the first reason for it."""
    texts = [f"{r.validity}: {(r.reasons or 'no reason recorded').split('; ')[0]}" for r in runs.itertuples()]
    return dict(zip(runs["run_id"], texts, strict=True))


def _name_runs(reasons: Mapping[str, str]) -> str:
    """Return runs with their reasons, those of one reason together: `a, b (missing: not started)`."""
    by_reason: dict[str, list[str]] = {}
    for run_id, reason in reasons.items():
        by_reason.setdefault(reason, []).append(run_id)
    texts = [
        f"{', '.join(ids) if len(ids) < 3 else f'{len(ids)} runs'} ({textwrap.shorten(reason, LETTERS)})"
        for reason, ids in by_reason.items()
    ]
    more = len(reasons) - sum(map(len, list(by_reason.values())[:REASONS]))
    return ", ".join(texts[:REASONS]) + (f" and {more} more" if more else "")


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


def _find_parity(pair: Pair, runs: pd.DataFrame, certificates: pd.DataFrame | None) -> str:
    """Return the certificate of a comparison of trainers in words; empty where one trainer is compared with itself."""
    of, over = (set(runs.loc[runs["cell"] == cell, "arm"].dropna()) for cell in (pair.of, pair.over))
    rows = [] if certificates is None else certificates.to_dict("records")
    found = {(row["of_cell"], row["over_cell"]): row for row in reversed(rows)}
    return "" if of == over else describe_certificate(found.get((pair.of, pair.over)))


def _primary_pairs(
    throughput: pd.DataFrame, runs: pd.DataFrame, primary: Sequence[Mapping[str, Any]], validation: pd.DataFrame | None
) -> tuple[list[Pair], list[str]]:
    """(the primary comparisons, also those without any pair of runs; sentences on runs that are not comparable)."""
    ours = _ours(runs)
    found, sentences = [], []
    for comparison in primary:
        of, over, quantity = comparison["of"], comparison["over"], comparison["quantity"]
        rows = ours[ours["cell"].isin([of, over])]
        refusals = comparability.refusals(rows, comparison["factor"])
        sentences += [refusal.sentence for refusal in refusals]
        refused, numbers = differences(refusals), _numbers(quantity, throughput, validation)
        rows = rows[~rows["run_id"].isin(refused) & rows["run_id"].isin(numbers)]
        sides: list[dict[Any, tuple[str, float]]] = [
            {r.repeat: (r.run_id, numbers[r.run_id]) for r in rows[rows["cell"] == cell].itertuples()}
            for cell in (of, over)
        ]
        of_name, over_name, at = map(_shorten, (*comparison["names"], comparison["at"]))
        found.append(Pair(of, over, (of_name, over_name), at, quantity, sides[0], sides[1], refused))
    return found, sentences


def differences(refusals: Sequence[comparability.Refusal]) -> dict[str, str]:
    """Run id → what makes it not comparable."""
    return {run_id: "; ".join(refusal.differs) for refusal in refusals for run_id in refusal.run_ids}


def _numbers(quantity: str, throughput: pd.DataFrame, validation: pd.DataFrame | None) -> dict[str, float]:
    """Run id → number of a quantity; runs without one are left out."""
    if quantity == "validation_loss":
        last = None if validation is None else validation[validation["last"].astype(bool)]
        return {} if last is None else dict(zip(last["run_id"], last["loss"].astype(float), strict=True))
    return dict(zip(throughput["run_id"], throughput[RATE].astype(float), strict=True))


def _shorten(cell: str) -> str:
    """Return a cell's levels without the keys that their values explain.

    >>> _shorten("approach=packed, layout.data=2")
    'packed, 2 data-parallel ranks'
    """
    text = re.sub(r"(^|, )layout\.data=([^,]*)", r"\1\2 data-parallel ranks", cell)
    text = re.sub(r"(^|, )1 data-parallel ranks", r"\g<1>1 data-parallel rank", text)
    return re.sub(r"(^|, )(?:approach=|arm=|layout\.)", r"\1", text)


def _approach_pairs(throughput: pd.DataFrame, runs: pd.DataFrame) -> tuple[list[Pair], list[str]]:
    """(the pairs of `COMPARISONS`, one a group; sentences on runs that are not comparable).

    A group is what both have in common: all factors but the approach, at the smallest world size that both have.
    Factors of the Parquet store are those of the approach that is compared; its baseline reads none.
    """
    refusals = comparability.refusals(runs, "approach")
    refused, ours = differences(refusals), set(_ours(runs)["run_id"])
    cells: dict[tuple, dict[Any, tuple[str, float]]] = {}
    for row in throughput[throughput["run_id"].isin(ours - refused.keys())].itertuples():
        cell = (row.approach, row.factors, row.storage, row.layout, row.world_size)
        cells.setdefault(cell, {})[row.repeat] = row.run_id, row.useful_tokens_per_s
    smallest: dict[tuple, tuple] = {}
    for approach, baseline in COMPARISONS:
        for cell in sorted(cell for cell in cells if cell[0] == approach):
            over = (baseline, cell[1], "", *cell[3:])
            if over in cells:
                smallest.setdefault((approach, baseline, *cell[1:4]), (cell, over))
    groups = [key for key, (of, over) in smallest.items() if cells[of].keys() & cells[over].keys()]
    several = len({smallest[key][0][-1] for key in groups}) > 1
    names = dict(zip(runs["run_id"], runs["cell"], strict=True))
    pairs = []
    for key in groups:
        values, bases = (cells[cell] for cell in smallest[key])
        of, over = (names[next(iter(side.values()))[0]] for side in (values, bases))
        group = ", ".join(filter(None, [*key[2:], f"world size {smallest[key][0][-1]}" * several]))
        pairs.append(Pair(of, over, key[:2], group, RATE, values, bases, refused))
    return pairs, [refusal.sentence for refusal in refusals]


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


def answers(compared: Sequence[Judged]) -> list[dict[str, str]]:
    """Return an answer for each comparison that is not exploratory: effect, spread with notes, verdict."""
    return [
        {
            "part": "loss" if c.pair.quantity == "validation_loss" else "throughput",
            "text": _sentence(c),
            "spread": "; ".join([_spread(c), *c.notes]),
            "verdict": c.verdict,
        }
        for c in compared
        if c.verdict != EXPLORATORY
    ]


def _sentence(c: Judged) -> str:
    (of, over), ratio = c.pair.names, format_ratio(c.result.spread.median)
    start = f"{c.pair.at}: " if c.pair.at else ""
    if not c.result.spread.n:
        return f"{start}{of} against {over}: no pair of runs"
    if c.pair.quantity == "validation_loss":
        return f"{start}{of} ends at {ratio}× the validation loss of {over}"
    parity = f" (parity: {c.pair.parity})" if c.pair.parity else ""
    return f"{start}{of} trains on {ratio}× as many useful tokens per second as {over}{parity}"


def _spread(c: Judged) -> str:
    r = c.result.spread
    text = f"{format_ratio(r.low)}–{format_ratio(r.high)}, {in_pairs(r.n)}, {r.kind}"
    return text + (f", within {_MARGIN}" if c.verdict.startswith("equivalent") else "")


def format_ratio(value: float) -> str:
    """Return a ratio with the digits that tell it from 1: three decimals near 1, three significant digits elsewhere.

    >>> format_ratio(1.0), format_ratio(1.0042), format_ratio(3.3071), format_ratio(0.28514)
    ('1.000', '1.004', '3.31', '0.285')
    """
    return f"{value:.3f}" if 0.5 < value < 2 else number(value)


def in_pairs(n: int) -> str:
    return f"{n} pair{'s' * (n != 1)}"


def comparison_table(compared: Sequence[Judged], refused: str = "") -> Table:
    """Return a row for each comparison: ratios, test and verdict; some columns only where there is anything in them."""
    losses = any(c.pair.quantity != RATE for c in compared)
    cells = {
        "of": lambda c, r: c.pair.names[0],
        "against": lambda c, r: c.pair.names[1],
        "at": lambda c, r: c.pair.at,
        "compared": lambda c, r: QUANTITIES[c.pair.quantity][2] * losses,
        ">pairs": lambda c, r: str(r.n),
        ">ratio of medians": lambda c, r: format_ratio(c.result.ratio),
        ">median of paired ratios": lambda c, r: format_ratio(r.median),
        ">spread": lambda c, r: f"{format_ratio(r.low)}–{format_ratio(r.high)}",
        "what the spread is": lambda c, r: r.kind,
        ">p (Holm)": lambda c, r: number(c.p, 2),
        ">smallest possible p": lambda c, r: number(c.smallest_p, 2),
        "verdict": lambda c, r: c.verdict,
        "parity of the trainers": lambda c, r: c.pair.parity,
    }
    found = {head: [cell(c, c.result.spread) for c in compared] for head, cell in cells.items()}
    shown = {head: texts for head, texts in found.items() if any(texts) or not compared}
    notes = [
        "Ratios in pairs of runs of one repeat, all other factors equal"
        + ("." if losses else ": useful tokens per second."),
        "Exact sign-flip test on log ratios, Holm-corrected over the rows with a verdict.",
        "“too few runs”: no data from so many pairs could reach p < 0.05.",
        f"“equivalent”: the whole interval lies within {_MARGIN}, the smallest effect that matters.",
        "Parity: whether both trainers compute the same from the same weights and batches; A is the second of the two, "
        "B the first (docs/parity.md)."
        if "parity of the trainers" in shown and compared
        else "",
        "“exploratory”: not a primary comparison of this experiment, so it is not tested."
        if any(c.verdict == EXPLORATORY for c in compared)
        else "",
    ]
    rows = [list(row) for row in zip(*shown.values(), strict=True)]
    return Table(columns(*shown), rows, " ".join(filter(None, [*notes, refused])))
