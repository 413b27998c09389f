"""Comparisons of cells in pairs of runs: effect, interval, verdict, and what a reader must know
beside it.

An experiment's primary comparisons answer its question. They are one family (Holm 1979), and only
they get a verdict. All other pairs of approaches are exploratory: shown with their spread, without
a test, since the more comparisons are tested, the more runs each of them needs. Without primary
comparisons every pair of approaches is tested.

A verdict counts all pairs. It is marked where some have a suspect run, and there is none where half
of them do. Where throughput drifted, the drift is taken out of every run: a verdict that does not
stand then is none.
"""

import functools
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from tokenscale.referee import comparability, statistics
from tokenscale.report.style import number
from tokenscale.report.table import Table, columns
from tokenscale.settings.experiments import COMPARISONS
from tokenscale.settings.run import READERS

#: the verdict where no data from so few pairs could reach a small p
TOO_FEW = "too few runs"
#: in place of a verdict: not a primary comparison; half of the pairs or more have a suspect run;
#: the effect does not stand without the drift
EXPLORATORY = "exploratory"
SUSPECT = "no verdict: suspect runs"
DRIFTED = "no verdict: drift"
#: verdicts that decide nothing, and so have no marks
UNDECIDED = (TOO_FEW, EXPLORATORY, SUSPECT, DRIFTED)
#: after a verdict that stands
WITH_DRIFT = ", with drift"
WITH_SUSPECT = ", with suspect runs"
UNEQUAL_UPDATES = ", unequal updates"
#: after the verdict of `statistics.verdict`, where the effect is smaller than what matters
BY_MARGIN = " by less than the margin"
RATE = "useful_tokens_per_s"
LOSS = "validation_loss"
#: the training loss, compared where the logs hold no validation, as those of other trainers
TRAINING_LOSS = "training_loss"
RATE_MARGIN = f"1 ± {statistics.MARGIN:g}"
#: quantity → the same in the words of a report
SMALL = {
    RATE: f" by less than {100 * statistics.MARGIN:g} %",
    LOSS: BY_MARGIN,
    TRAINING_LOSS: BY_MARGIN,
}
#: quantity → (words for a ratio above and below 1, what is compared)
QUANTITIES = {
    RATE: ("faster", "slower", "useful tokens per second"),
    LOSS: ("higher loss", "lower loss", "final validation loss"),
    TRAINING_LOSS: ("higher loss", "lower loss", "training loss of the last tenth"),
}
#: (word for an effect, what follows it where the effect is small)
EFFECTS = [(word, SMALL[quantity]) for quantity, words in QUANTITIES.items() for word in words[:2]]
#: every verdict of a comparison, without its marks
VERDICT_WORDS = (
    *(word + by for word, small in EFFECTS for by in ("", small)),
    *(TOO_FEW, "no difference shown", "equivalent", EXPLORATORY, SUSPECT, DRIFTED),
)
#: of the runs that a comparison leaves out: reasons that are named, and letters of each
REASONS = 3
LETTERS = 90
#: the largest drift that is printed, as a share
UNREADABLE = 1000.0
#: repeat → (run id, number)
Values = Mapping[Any, tuple[str, float]]


@dataclass(frozen=True)
class Pair:
    """Two cells with the numbers of their runs. `refused` is run id → what makes a run not
    comparable. `margin` is the smallest difference of losses that matters, in nats, if the design
    states one. `looks` counts the designs under which its runs began: repeats that were added after
    a look have another one.
    """

    of: str
    over: str
    names: tuple[str, str]
    at: str
    quantity: str
    values: Values
    bases: Values
    refused: Mapping[str, str]
    parity: str = ""  # of two trainers: their certificate in words
    margin: float | None = None
    looks: int = 1

    @property
    def ids(self) -> list[tuple[str, str]]:
        """The ids of both runs of each repeat that both cells have."""
        return [
            (self.values[k][0], self.bases[k][0])
            for k in sorted(self.values.keys() & self.bases.keys())
        ]

    def result(self) -> statistics.Comparison:
        values, bases = ({k: x for k, (_, x) in side.items()} for side in (self.values, self.bases))
        return statistics.compare_pairs(values, bases, ratios=self.quantity == RATE)

    def without_drift(self, slope: float, started: Mapping[str, float]) -> "Pair":
        """The same with `slope` (of the logarithm, a second) taken out of the rates, each as if its
        run had begun with the other one of its repeat. Only repeats of which both starts are
        known, and not so far apart that the slope makes a rate infinite or zero.
        """
        if self.quantity != RATE:
            return self
        values = {}
        for repeat in self.values.keys() & self.bases.keys():
            run, rate = self.values[repeat]
            base, _ = self.bases[repeat]
            if run in started and base in started:
                with np.errstate(over="ignore", under="ignore"):
                    steady = rate * float(np.exp(slope * (started[base] - started[run])))
                if 0 < steady < math.inf:
                    values[repeat] = (run, steady)
        return replace(self, values=values)


@dataclass(frozen=True)
class Judged:
    """A comparison: p and smallest possible p after correction, the verdict, and what a reader must
    know beside it.
    """

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


def read_comparisons(
    rows: Callable[[str], pd.DataFrame], primary: Sequence[Mapping[str, Any]] | None
) -> tuple[list[Judged], str]:
    """Return `comparisons` of an experiment's tables; `rows` returns those of a query."""
    of_training = any(each["quantity"] == TRAINING_LOSS for each in primary or ())
    return comparisons(
        rows("throughput"),
        rows("inventory"),
        primary,
        validation=rows("validation"),
        certificates=rows("certificates"),
        training=rows("training_loss") if of_training else None,
    )


def comparisons(
    throughput: pd.DataFrame,
    runs: pd.DataFrame,
    primary: Sequence[Mapping[str, Any]] | None = None,
    validation: pd.DataFrame | None = None,
    certificates: pd.DataFrame | None = None,
    training: pd.DataFrame | None = None,
) -> tuple[list[Judged], str]:
    """Return (comparisons, primary ones first; sentences on runs that are in no comparison because
    they are not comparable).

    `primary` is what `settings.experiments.describe_primary` wrote; None tests all pairs of
    approaches. `throughput`, `runs`, `validation`, `certificates` and `training` are rows of the
    queries `throughput`, `inventory`, `validation`, `certificates` and `training_loss`.
    """
    pairs, sentences = _approach_pairs(throughput, runs)
    others: list[Pair] = []
    if primary is not None:
        numbers = {RATE: throughput.set_index("run_id")[RATE].astype(float).to_dict()}
        if validation is not None:
            last = validation[validation["last"].astype(bool)]
            numbers[LOSS] = last.set_index("run_id")["loss"].astype(float).to_dict()
        if training is not None:
            known = training.dropna(subset=["loss"])  # what only reads has none
            numbers[TRAINING_LOSS] = known.set_index("run_id")["loss"].astype(float).to_dict()
        main, refused = _primary_pairs(runs, primary, numbers=numbers)
        main = [
            replace(pair, parity=_find_parity(pair, runs, certificates=certificates))
            for pair in main
        ]
        tested = {(pair.of, pair.over) for pair in main if pair.quantity == RATE}
        others = [pair for pair in pairs if (pair.of, pair.over) not in tested]
        pairs = main
        sentences = refused + sentences
    started = runs.dropna(subset=["started_unix_s"]).set_index("run_id")["started_unix_s"].to_dict()
    pairs = [replace(pair, looks=_count_looks(pair, runs)) for pair in pairs]
    judged = judge(pairs, drift=measure_drift(throughput, runs), started=started)
    # each comparison filters the runs, and a row of the inventory has eighty columns
    noted = runs[["run_id", "cell", "validity", "reasons"]]
    found = [_add_notes(comparison, runs=noted, validation=validation) for comparison in judged]
    found += (
        Judged(
            pair=pair,
            result=pair.result(),
            p=np.nan,
            smallest_p=np.nan,
            verdict=EXPLORATORY,
        )
        for pair in others
    )
    return found, " ".join(dict.fromkeys(sentences))


def _count_looks(pair: Pair, runs: pd.DataFrame) -> int:
    """Count the designs under which runs of a pair began; one where none is recorded."""
    used = {run_id for both in pair.ids for run_id in both}
    known = runs.reindex(columns=["run_id", "design_sha256"])
    return max(1, known.loc[known["run_id"].isin(used), "design_sha256"].nunique())


def measure_drift(throughput: pd.DataFrame, runs: pd.DataFrame) -> statistics.Drift:
    """Return the drift of useful tokens per second over the starts of runs, within their cells."""
    timed = throughput.merge(runs[["run_id", "started_unix_s"]].dropna(), on="run_id")
    timed = timed.sort_values("started_unix_s", kind="stable")
    cells = zip(timed["series"], timed["world_size"], strict=True)
    return _drift(tuple(timed["started_unix_s"]), tuple(timed[RATE]), tuple(cells))


def format_share(drift: statistics.Drift) -> str:
    """Return a drift from the first start to the last in percent. A slope of minutes, drawn on over
    months, is a number that no one can read.
    """
    if drift.share > UNREADABLE:
        return f"more than {number(100 * UNREADABLE)} %"
    return f"{number(100 * drift.share, digits=2)} %"


#: a page needs the drift of one experiment three times
_drift = functools.lru_cache(maxsize=8)(statistics.drift)


def differences(refusals: Sequence[comparability.Refusal]) -> dict[str, str]:
    """Run id → what makes it not comparable."""
    return {
        run_id: "; ".join(refusal.differs) for refusal in refusals for run_id in refusal.run_ids
    }


def _primary_pairs(
    runs: pd.DataFrame,
    primary: Sequence[Mapping[str, Any]],
    numbers: Mapping[str, Mapping[str, float]],
) -> tuple[list[Pair], list[str]]:
    """(the primary comparisons, also without pairs; sentences on refused runs). `numbers`: quantity
    → run → number.
    """
    found = []
    sentences = []
    for comparison in primary:
        of = comparison["of"]
        over = comparison["over"]
        quantity = comparison["quantity"]
        rows = runs[runs["cell"].isin([of, over])]
        known = numbers.get(quantity, {})
        refusals = comparability.refusals(rows, factor=comparison["factor"])
        sentences += [refusal.sentence for refusal in refusals]
        refused = differences(refusals)
        if quantity != RATE:
            unlike = comparability.find_unlike_units(rows, factor=comparison["factor"])
            refused |= dict.fromkeys(rows["run_id"], unlike) if unlike else {}
            sentences += [f"Not compared: {of}, {over} ({unlike})."] if unlike else []
        rows = rows[~rows["run_id"].isin(refused) & rows["run_id"].isin(known)]
        values, bases = (
            {r.repeat: (r.run_id, known[r.run_id]) for r in rows[rows["cell"] == cell].itertuples()}
            for cell in (of, over)
        )
        of_name, over_name, at = map(_shorten, (*comparison["names"], comparison["at"]))
        found.append(
            Pair(
                of=of,
                over=over,
                names=(of_name, over_name),
                at=at,
                quantity=quantity,
                values=values,
                bases=bases,
                refused=refused,
                margin=comparison.get("margin"),  # run tables of older versions have none
            )
        )
    return found, sentences


def _approach_pairs(throughput: pd.DataFrame, runs: pd.DataFrame) -> tuple[list[Pair], list[str]]:
    """(the pairs of `COMPARISONS`, one a group; sentences on runs that are not comparable).

    A group has all factors but the approach in common, at the smallest world size that both have.
    Factors of the Parquet store are those of the approach that is compared; its baseline reads
    none. Runs of other programs, which may call anything an approach, are in no such pair.
    """
    refusals = comparability.refusals(runs, factor="approach")
    refused = differences(refusals)
    names = runs.set_index("run_id")["cell"]
    of_others = runs["external"].fillna(False).astype(bool)
    cells: dict[tuple, dict[Any, tuple[str, float]]] = {}
    for row in throughput[
        throughput["run_id"].isin(set(runs.loc[~of_others, "run_id"]) - refused.keys())
    ].itertuples():
        cell = (row.approach, row.factors, row.storage, row.layout, row.world_size)
        cells.setdefault(cell, {})[row.repeat] = row.run_id, row.useful_tokens_per_s
    smallest: dict[tuple, tuple] = {}
    for approach, baseline in COMPARISONS:
        for cell in sorted(cell for cell in cells if cell[0] == approach):
            over = (baseline, cell[1], "", *cell[3:])
            if over in cells:
                smallest.setdefault((approach, baseline, *cell[1:4]), (cell, over))
    groups = {key: of for key, of in smallest.items() if cells[of[0]].keys() & cells[of[1]].keys()}
    several = len({of[-1] for of, _ in groups.values()}) > 1
    pairs = []
    for key, (cell, base) in groups.items():
        of, over = (names[next(iter(cells[side].values()))[0]] for side in (cell, base))
        at = ", ".join(filter(None, [*key[2:], f"world size {cell[-1]}" * several]))
        pairs.append(
            Pair(
                of=of,
                over=over,
                names=key[:2],
                at=at,
                quantity=RATE,
                values=cells[cell],
                bases=cells[base],
                refused=refused,
            )
        )
    return pairs, [refusal.sentence for refusal in refusals]


def _shorten(cell: str) -> str:
    """Return a cell's levels without the keys that their values explain.

    >>> _shorten("approach=packed, layout.data=2")
    'packed, 2 data-parallel ranks'
    """
    text = re.sub(r"(^|, )layout\.data=([^,]*)", r"\1\2 data-parallel ranks", cell)
    text = re.sub(r"(^|, )1 data-parallel ranks", r"\g<1>1 data-parallel rank", text)
    return re.sub(r"(^|, )(?:approach=|arm=|layout\.)", r"\1", text)


def judge(
    pairs: Sequence[Pair], drift: statistics.Drift, started: Mapping[str, float]
) -> list[Judged]:
    """Return the verdicts of comparisons that are one family, corrected over all of them.

    Where throughput drifted, a difference or equivalence of rates that is not found without the
    drift is `DRIFTED`. `started` is run id → start in seconds. At the k-th look p is multiplied by
    k²: looks that nobody planned spend 5 % / k² each, by Bonferroni's bound (α-spending: Lan &
    DeMets 1983).
    """
    results = [pair.result() for pair in pairs]
    of_looks = [pair.looks**2 for pair in pairs]
    corrected, reachable = (
        statistics.holm(
            [min(1.0, n * getattr(r, p)) for r, n in zip(results, of_looks, strict=True)]
        )
        for p in ("p", "smallest_p")
    )
    found = []
    for pair, c, p, smallest in zip(pairs, results, corrected, reachable, strict=True):
        rate = pair.quantity == RATE
        verdict = statistics.verdict(
            effect=c.effect,
            p=p,
            smallest_p=smallest,
            equality=1.0 if rate else 0.0,
            margin=statistics.MARGIN if rate else pair.margin,
        )
        verdict = verdict.replace(BY_MARGIN, SMALL[pair.quantity])
        for word, own in zip(("higher", "lower"), QUANTITIES[pair.quantity], strict=False):
            verdict = re.sub(f"^{word}", own, verdict)
        found.append(
            Judged(
                pair=pair,
                result=c,
                p=p,
                smallest_p=smallest,
                verdict=verdict,
            )
        )
    if drift.verdict == "drift":
        steady = judge(
            [pair.without_drift(drift.slope, started) for pair in pairs],
            drift=replace(drift, p=1.0),
            started={},
        )
        found = [_hold_against(*both, drift) for both in zip(found, steady, strict=True)]
    return [_add_looks(_add_order(judged, started)) for judged in found]


def _hold_against(judged: Judged, steady: Judged, drift: statistics.Drift) -> Judged:
    """Mark a comparison of rates, or take its verdict away if it has another one without the
    drift.
    """
    if judged.pair.quantity != RATE or not judged.result.spread.n:
        return judged
    word = judged.verdict.removesuffix(SMALL[RATE])
    steady_word = steady.verdict.removesuffix(SMALL[RATE])
    if word in ("faster", "slower", "equivalent") and steady_word != word:
        judged = replace(judged, verdict=DRIFTED)
    ratio = f"with the drift taken out {format_ratio(steady.result.spread.median)}×"
    return judged.mark(WITH_DRIFT, f"throughput drifted by {format_share(drift)}, {ratio}")


def _add_order(judged: Judged, started: Mapping[str, float]) -> Judged:
    """Note which cell ran first in how many pairs, where throughput drifted or it is one cell in
    six or more; and that the first run of all, behind no other, is in one of seven or more pairs.
    """
    known = [started[a] < started[b] for a, b in judged.pair.ids if a in started and b in started]
    if known and (judged.notes or (len(known) > 5 and len(set(known)) == 1)):
        judged = judged.mark(
            "", f"{judged.pair.names[0]} ran first in {sum(known)} of {in_pairs(len(known))}"
        )
    first = min(started, key=started.__getitem__, default=None)
    in_pair = any(first in both for both in judged.pair.ids)
    if judged.pair.quantity == RATE and len(known) > 6 and in_pair:
        return judged.mark("", "the first run of all, in a pair, follows no other: no canary")
    return judged


def _add_looks(judged: Judged) -> Judged:
    looks = judged.pair.looks
    times = f"looked at {looks} times, as its runs began under so many designs: p × {looks**2}"
    return judged.mark("", times) if looks > 1 else judged


def _add_notes(judged: Judged, runs: pd.DataFrame, validation: pd.DataFrame | None) -> Judged:
    """Mark suspect runs and unequal updates, and name the runs that are left out."""
    pair = judged.pair
    ids = judged.pair.ids
    used = {run_id for both in ids for run_id in both}
    suspect = _reasons(runs[runs["run_id"].isin(used) & (runs["validity"] == "suspect")])
    if doubtful := sum(not suspect.keys().isdisjoint(both) for both in ids):
        if 2 * doubtful >= len(ids) and judged.verdict not in UNDECIDED:
            judged = replace(judged, verdict=SUSPECT)
        judged = judged.mark(
            WITH_SUSPECT,
            f"suspect runs in {doubtful} of {in_pairs(len(ids))}: {_name_runs(suspect)}",
        )
    if pair.quantity == LOSS and validation is not None and used:
        last = validation[validation["last"].astype(bool)].set_index("run_id")
        for column, unit, mark in (
            ("step", "updates", UNEQUAL_UPDATES),
            ("useful_tokens_seen", "useful tokens", ""),
        ):
            of, over = (
                round(last.loc[list(side), column].median()) for side in zip(*ids, strict=True)
            )
            if of != over:
                judged = judged.mark(
                    mark, f"after {number(of, digits=6)} against {number(over, digits=6)} {unit}"
                )
    rows = runs[runs["cell"].isin([pair.of, pair.over])]
    return judged.mark("", describe_left_out(rows, used, refused=pair.refused))


def describe_left_out(runs: pd.DataFrame, used: Set[str], refused: Mapping[str, str]) -> str:
    """Return which runs a comparison does not use, and why; `refused` is run id → what makes it not
    comparable.
    """
    ids = set(runs["run_id"])
    reasons = _reasons(runs[~runs["validity"].isin(["valid", "suspect"])])
    reasons |= {
        run_id: f"not comparable: {why}" for run_id, why in refused.items() if run_id in ids
    }
    reasons |= {
        run_id: "nothing to compare in their repeat"
        for run_id in runs["run_id"]
        if run_id not in reasons
    }
    left = {run_id: reason for run_id, reason in reasons.items() if run_id not in used}
    return f"left out: {_name_runs(left)}" if left else ""


def _reasons(runs: pd.DataFrame) -> dict[str, str]:
    """Run id → its validity and the first reason for it."""
    return {
        r.run_id: f"{r.validity}: {(r.reasons or 'no reason recorded').split('; ')[0]}"
        for r in runs.itertuples()
    }


def _name_runs(reasons: Mapping[str, str]) -> str:
    """Return runs with their reasons, those of one reason together: `a, b (missing: not
    started)`.
    """
    by_reason: dict[str, list[str]] = {}
    for run_id, reason in reasons.items():
        by_reason.setdefault(reason, []).append(run_id)
    texts = [
        (
            f"{', '.join(ids) if len(ids) < 3 else f'{len(ids)} runs'} "
            f"({textwrap.shorten(reason, LETTERS)})"
        )
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
    """Return the certificate of a comparison of trainers in words; empty where one trainer is
    compared with itself.
    """
    of, over = (
        set(runs.loc[runs["cell"] == cell, "arm"].dropna()) for cell in (pair.of, pair.over)
    )
    rows = [] if certificates is None else certificates.to_dict("records")
    found = (row for row in rows if (row["of_cell"], row["over_cell"]) == (pair.of, pair.over))
    return "" if of == over else describe_certificate(next(found, None))


def select_answers(answers: list[dict[str, str]], most: int) -> tuple[list[dict[str, str]], str]:
    """Return (the answers to show, at most `most`; a text on how many are left out). Decided answers
    come first.
    """
    if len(answers) <= most:
        return answers, ""
    decided = [answer for answer in answers if answer["verdict"] not in (TOO_FEW, EXPLORATORY)]
    shown = decided[:most]
    left = f"{len(answers) - len(shown)} {'more ' if shown else ''}answers"
    if len(shown) == len(decided) and all(
        a["verdict"] == TOO_FEW for a in answers if a not in shown
    ):
        left += f"{':' if shown else ', all of'} too few runs for a verdict"
    return shown, left


def _only_read(pair: Pair) -> bool:
    """Return whether the runs of a pair read and do not train, as their ids say."""
    named = tuple(f"{arm}-" for arm in READERS)
    return any(run_id.startswith(named) for run_id, _ in pair.values.values())


def answers(compared: Sequence[Judged]) -> list[dict[str, str]]:
    """Return an answer for each comparison that is not exploratory: effect, spread with notes,
    verdict.
    """
    found = []
    for c in (c for c in compared if c.verdict != EXPLORATORY):
        (of, over) = c.pair.names
        r = c.result.spread
        loss = c.pair.quantity != RATE
        parity = f" (parity: {c.pair.parity})" if c.pair.parity else ""
        ratio = format_ratio(r.median)
        if not r.n:
            text = f"{of} against {over}: no pair of runs"
        elif loss:
            kind = "validation" if c.pair.quantity == LOSS else "training"
            text = f"{of} ends at {ratio}× the {kind} loss of {over}"
        else:
            verb = "reads" if _only_read(c.pair) else "trains on"
            text = f"{of} {verb} {ratio}× as many useful tokens per second as {over}{parity}"
        spread = ", ".join(filter(None, [_ends(r), in_pairs(r.n), r.kind * (r.n > 1)]))
        if loss and r.n:
            spread += f", {_describe_nats(c.result.effect)}"
        if c.verdict.startswith("equivalent"):
            spread += f", within {_describe_margin(c.pair)}"
        text = f"{c.pair.at}: {text}" if c.pair.at else text
        spread = "; ".join([spread, *c.notes])
        part = "loss" if loss else "throughput"
        found.append({"part": part, "text": text, "spread": spread, "verdict": c.verdict})
    return found


def _describe_nats(effect: statistics.Summary) -> str:
    """A difference of losses with its spread: `-0.012 (-0.02 to -0.008) nats`."""
    median, low, high = (f"{x:+.3g}" for x in (effect.median, effect.low, effect.high))
    return f"{median} ({low} to {high}) nats" if effect.n > 1 else f"{median} nats"


def _describe_margin(pair: Pair) -> str:
    if pair.quantity == RATE:
        return RATE_MARGIN
    return "no margin" if pair.margin is None else f"± {pair.margin:g} nats"


def _ends(spread: statistics.Summary) -> str:
    """Both ends of a spread; empty for a single pair, which has none."""
    return f"{format_ratio(spread.low)}–{format_ratio(spread.high)}" if spread.n > 1 else ""


def format_ratio(value: float) -> str:
    """Return a ratio with the digits that tell it from 1: three decimals near 1, three significant
    digits elsewhere.

    >>> format_ratio(1.0), format_ratio(1.0042), format_ratio(3.3071), format_ratio(0.28514)
    ('1.000', '1.004', '3.31', '0.285')
    """
    return f"{value:.3f}" if 0.5 < value < 2 else number(value)


def in_pairs(n: int) -> str:
    return f"{n} pair{'s' * (n != 1)}"


def comparison_table(compared: Sequence[Judged], refused: str = "") -> Table:
    """Return a row for each comparison: ratios, test and verdict; some columns only where there is
    anything in them.
    """
    losses = any(c.pair.quantity != RATE for c in compared)
    heads = (
        "of",
        "against",
        "at",
        "compared",
        ">pairs",
        ">ratio of medians",
        ">median of paired ratios",
        ">spread",
        "what the spread is",
        ">p (Holm)",
        ">smallest possible p",
        "verdict",
        "parity of the trainers",
    )
    rows = [
        [
            *(*c.pair.names, c.pair.at, QUANTITIES[c.pair.quantity][2] * losses),
            *(
                str(c.result.spread.n),
                format_ratio(c.result.ratio),
                format_ratio(c.result.spread.median),
            ),
            _ends(c.result.spread),
            *(
                c.result.spread.kind * (c.result.spread.n > 1),
                number(c.p, digits=2),
                number(c.smallest_p, digits=2),
                c.verdict,
                c.pair.parity,
            ),
        ]
        for c in compared
    ]
    shown = [i for i in range(len(heads)) if not rows or any(row[i] for row in rows)]
    tested = [c.pair for c in compared if c.verdict != EXPLORATORY]
    margins = list(dict.fromkeys(map(_describe_margin, tested)))
    unit = "" if losses else f": {QUANTITIES[RATE][2]}"
    text = (
        f"Ratios in pairs of runs of one repeat, all other factors equal{unit}; tests and intervals "
        "as Methods says. “equivalent”: the whole interval lies within "
        f"{' or '.join(margins or [RATE_MARGIN])}, the smallest effect that matters."
    )
    if any(c.pair.parity for c in compared):
        text += (
            " Parity: whether both trainers compute the same from the same weights and batches; "
            "A is the second of "
        )
        text += "the two, B the first (docs/other-trainers.md)."
    if any(c.verdict == EXPLORATORY for c in compared):
        text += " “exploratory”: not a primary comparison of this experiment, so it is not tested."
    return Table(
        columns=columns(*(heads[i] for i in shown)),
        rows=[[row[i] for i in shown] for row in rows],
        caption=f"{text} {refused}".strip(),
    )
