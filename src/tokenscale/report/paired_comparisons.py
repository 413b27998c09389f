"""What one approach gains on another, in pairs of runs: comparisons, words, and how many runs would settle them."""

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
_MARGIN = f"1 ± {statistics.MARGIN:g}"


def comparisons(throughput: pd.DataFrame, runs: pd.DataFrame) -> tuple[list[dict[str, Any]], str]:
    """(the pairs of `COMPARISONS`, one comparison a group, paired by repeat, p after Holm over all; who is refused).

    A group is what both have in common: all factors but the approach, at the smallest world size that both have.
    Factors of the Parquet store are those of the approach that is compared; its baseline reads none. Runs that are not
    like for like (`analysis/comparability.py`, on the rows of `runs`) are in no pair, and sentences say so. Raises
    UserError where two runs are the same repeat of a cell. Runs of other programs are in no pair: they have no repeats
    of ours.
    """
    refused = comparability.refusals(runs, "approach")
    out = comparability.refused(refused) | set(runs.loc[runs["external"], "run_id"])
    cells = _cells(throughput[~throughput["run_id"].isin(out)])
    device_s = _device_seconds(runs)
    family = []
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
            values, bases = cells[of], cells[over]
            if pairs := values.keys() & bases.keys():
                rates, base_rates = _rates(values), _rates(bases)
                compared = statistics.ratio_of_medians(rates, base_rates)
                noise = statistics.spread_of_pairs([rates[k] / base_rates[k] for k in sorted(pairs)])
                seconds = [device_s[values[k].run_id] + device_s[bases[k].run_id] for k in pairs]
                family.append((of, baseline, compared, noise, float(np.median(seconds))))
    corrected = statistics.holm([c.p for _, _, c, *_ in family])
    reachable = statistics.holm([c.smallest_p for _, _, c, *_ in family])
    sizes = {of.world_size for of, *_ in family}
    found = []
    for (of, baseline, c, noise, took), p, smallest in zip(family, corrected, reachable, strict=True):
        spread = statistics.Summary(c.n, c.paired, c.low, c.high, c.kind)
        group = [of.factors, of.storage, of.layout, f"world size {of.world_size}" if len(sizes) > 1 else ""]
        found.append(
            {
                "approach": of.approach,
                "baseline": baseline,
                "group": ", ".join(filter(None, group)),
                "result": c,
                "p": p,
                "smallest_p": smallest,
                "verdict": statistics.verdict(spread, p, smallest),
                "spread_of_pairs": noise,
                "device_s": took,
            }
        )
    return found, comparability.sentences(refused)


def _device_seconds(runs: pd.DataFrame) -> dict[str, float]:
    """run id → seconds from its first event to its last, times its ranks."""
    seconds = (runs["stopped_unix_s"] - runs["started_unix_s"]) * runs["world_size"]
    return dict(zip(runs["run_id"], seconds.astype(float), strict=True))


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


def _rates(rows: dict[Any, Any]) -> dict[Any, float]:
    return {repeat: row.useful_tokens_per_s for repeat, row in rows.items()}


def select_answers(answers: list[dict[str, str]], most: int) -> tuple[list[dict[str, str]], str]:
    """(answers that are shown where there is room for so many, how many are left out, in words): where they are more,
    the first of those that are decided."""
    if len(answers) <= most:
        return answers, ""
    decided = [answer for answer in answers if answer["verdict"] != TOO_FEW]
    shown = decided[:most]
    left = f"{len(answers) - len(shown)} {'more ' if shown else ''}comparisons"
    if len(shown) == len(decided):
        left += f"{':' if shown else ', all of'} too few runs for a verdict"
    return shown, left


def answers(compared: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One line a comparison: effect, spread, word."""
    return [
        {
            "text": (f"{c['group']}: " if c["group"] else "")
            + f"{c['approach']} trains on {number(c['result'].paired)} × as many useful tokens a second "
            f"as {c['baseline']}",
            "spread": f"{number(c['result'].low)}–{number(c['result'].high)}, {in_pairs(c['result'].n)}, "
            f"{c['result'].kind}" + (f", within {_MARGIN}" if c["verdict"] == "equivalent" else ""),
            "verdict": c["verdict"],
        }
        for c in compared
    ]


def in_pairs(n: int) -> str:
    """`1 pair`, `2 pairs`."""
    return f"{n} pair{'s' * (n != 1)}"


def comparison_table(compared: list[dict[str, Any]], refused: str = "") -> Table:
    """Online against offline: ratios, test and verdict. Groups are named where there are any, and who is in none."""
    grouped = any(c["group"] for c in compared)
    columns = [
        ("approach", False),
        ("against", False),
        *([("at", False)] if grouped else []),
        ("pairs", True),
        ("ratio of medians", True),
        ("median of paired ratios", True),
    ]
    columns += [
        ("spread", True),
        ("what the spread is", False),
        ("p (Holm)", True),
        ("smallest possible p", True),
        ("verdict", False),
    ]
    rows = []
    for c in compared:
        r = c["result"]
        rows.append(
            [
                c["approach"],
                c["baseline"],
                *([c["group"]] if grouped else []),
                str(r.n),
                number(r.ratio),
                number(r.paired),
                f"{number(r.low)}–{number(r.high)}",
            ]
            + [r.kind, number(c["p"], 2), number(c["smallest_p"], 2), c["verdict"]]
        )
    return Table(
        columns,
        rows,
        "Useful tokens per second at the smallest world size that both have, paired by repeat, all other factors "
        "equal. Exact sign-flip test on log ratios, Holm-corrected over the rows; “too few runs” means that no data "
        "from so many pairs could reach p < 0.05, “equivalent” that the whole interval of the ratios lies within "
        f"{_MARGIN}. {refused}".strip(),
    )


def power_table(compared: list[dict[str, Any]]) -> Table:
    """How many pairs it takes to show effects of several sizes, from the spread of the pairs that there are."""
    columns = [("approach", False), ("against", False), ("at", False), ("pairs here", True), ("spread (%)", True)]
    columns += [(f"to show {100 * effect:g} %", True) for effect in statistics.EFFECTS]
    rows = []
    for c in compared:
        needed = statistics.power_table(c["spread_of_pairs"], c["device_s"], family=len(compared))
        rows.append(
            [c["approach"], c["baseline"], c["group"], str(c["result"].n), number(100 * c["spread_of_pairs"])]
            + [_needed(row, c["spread_of_pairs"]) for row in needed]
        )
    text = (
        "Pairs of runs, and the time of devices (on a CPU: of ranks) that they take, with which a difference of that "
        f"size is shown in {100 * statistics.POWER:g} of 100 campaigns: interval and sign test, at "
        f"{100 * statistics.LEVEL:g} % over as many comparisons as there are rows, exclude “no difference”. The spread "
        "is the standard deviation of the pairs' log ratios; from few pairs it is known badly."
    )
    return Table(columns, rows, text)


def _needed(row: statistics.Power, spread: float) -> str:
    if row.runs is None:
        return f"more than {statistics.MOST_PAIRS}" if spread == spread else "not known"
    if row.device_hours is None:
        return f"{row.runs} pairs"
    long = row.device_hours >= 1
    return f"{row.runs} pairs, {number(row.device_hours * (1 if long else 60), 2)} {'h' if long else 'min'}"
