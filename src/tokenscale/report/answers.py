"""Answers to an experiment's question: one sentence each, with its number, its spread and its
verdict.

Counts come before timings: they are exact and need one run. An answer is given only where the runs
have its part, so an experiment without approaches says nothing of padding, and one with a single
world size nothing of scaling.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd

from tokenscale.costs.card import NEEDS
from tokenscale.costs.pipeline_schedules import bubble_share
from tokenscale.referee import comparability
from tokenscale.referee.expectations import TOO_NOISY
from tokenscale.referee.statistics import MARGIN, Summary, compare_pairs, summary
from tokenscale.report import captions, paired_comparisons
from tokenscale.report.paired_comparisons import RATE, TOO_FEW
from tokenscale.report.style import number, order_series
from tokenscale.settings.data import LOSS_CAUTION

#: verdicts of answers that no test decides
COUNTED = "counted"
MEASURED = "measured"
PROVEN = "proven"
NOT_PROVEN = "not proven"
WITHIN = "within the spread of repeats"
BEYOND = "beyond the spread of repeats"
ONE_RUN = "one run each"
OPEN = "not resolved"
#: after the verdict of a comparison of losses
UNEQUAL_TEXT = ", unequal text"
WORDS = (COUNTED, MEASURED, PROVEN, NOT_PROVEN, WITHIN, BEYOND, ONE_RUN, OPEN)
#: from this share on, text that is dropped is a caution, and a difference of it stands beside
#: losses and rates
MATERIAL = 0.01
#: part of a question → figures that show it, the first that an experiment draws is linked
FIGURES = {
    "choice": ("tokens_per_second_comparison",),
    "dropped text": (),
    "padding": ("padding_share", "tokens_per_second_comparison"),
    "throughput": ("tokens_per_second_comparison", "batch_size_comparison", "training_time"),
    "loss": ("loss_over_time", "time_to_target_loss"),
    "scaling": ("scaling_throughput", "scaling_weak"),
    "memory": ("memory_by_method", "parallel_methods"),
    "waiting": ("pipeline_bubble",),
    "data": ("ddp_verification_loss",),
}
#: at most so many approaches or series are named in a sentence
NAMED = 6
#: approaches whose rates differ by less are equal where no run is repeated
UNREPEATED = 0.1
#: numbers of a sentence
NUMBERS = re.compile(r"\d[\d.,]*(e[-+]\d+)?")
#: unit of losses a token, which runs of one vocabulary share
NATS = "nats"
NEARLY_ALL = "drops less than 1 % of the text"

Answer = dict[str, str]
#: series → corpus → share of its tokens that the series drops; NaN: not known. No corpora: nothing
#: is known
Dropped = Mapping[str, Mapping[str, float]]
#: how the runs of a proven pair agree, by kind of pair (see `order.sql`)
_AGREE = {
    "world sizes": "{worlds} ranks train on the same data as {base}",
    "resumed and uninterrupted": "Resumed runs train on the same data as uninterrupted ones",
    "online and offline": "Offline stores yield the same batches as online tokenization",
}


def find_answers(
    rows: Callable[[str], pd.DataFrame],
    compared: Sequence[paired_comparisons.Judged],
    proof: Mapping[str, Any],
    figures: Sequence[str],
    caution: str = "",
    marks: Sequence[str] = (),
) -> list[Answer]:
    """Return all answers of an experiment: `part` (a key of `FIGURES`), `text`, `spread`,
    `verdict`, `figure`.

    `rows` gives the rows of a query, `compared` is the result of `paired_comparisons.comparisons`,
    `proof` that of `campaign_quality.proof`. `figure` is empty where none of `figures` shows the
    part. With a `caution` (ranks share cores), scaling is not answered. `marks` stand beside each
    comparison of losses: what they are losses of.
    """
    inventory = rows("inventory")
    refused = paired_comparisons.differences(comparability.refusals(inventory, factor="approach"))
    padding, validation = (
        found[~found["run_id"].isin(refused)] for found in map(rows, ("padding", "validation"))
    )
    dropped = rows("dropped_text")
    shown = {
        part: next((name for name in names if name in figures), "")
        for part, names in FIGURES.items()
    }
    throughput = rows("throughput")
    found = answer_choice(
        throughput[~throughput["run_id"].isin(refused)],
        dropped,
        *share_unit(_fewest_ranks(validation), inventory),
    )
    found += answer_dropped(dropped) + answer_padding(padding)
    found += paired_comparisons.answers(compared)
    found += answer_loss(
        validation,
        inventory,
        refused=refused,
        dropped=dropped_shares(dropped),
    )
    found += answer_scaling(rows("scaling")) if not caution else []
    # part of the question only where a figure of the experiment shows it
    found += answer_memory(rows("parallelism")) if shown["memory"] else []
    found += answer_waiting(rows("pipeline")) if shown["waiting"] else []
    found += answer_data(rows("order"), proof)
    for answer in found:
        answer["figure"] = shown[answer["part"]]
        if answer["part"] == "loss":
            answer["spread"] = "; ".join(filter(None, [answer["spread"], *marks]))
    return found


def dropped_shares(rows: pd.DataFrame) -> Dropped:
    """Return the text that each series drops, from rows of `dropped_text.sql`; not known if it is
    not of every run.
    """
    found: dict[str, dict[str, float]] = {}
    for (series, corpus), shares in rows.groupby(["series", "corpus"], sort=False)["dropped_share"]:
        found.setdefault(series, {})[corpus] = float(shares.max(skipna=False))
    return found


def describe_dropped(shares: Mapping[str, float]) -> str:
    """Return the shares of dropped text, by corpus where there are several; empty if nothing is
    dropped.

    >>> describe_dropped({"web": 0.7524}), describe_dropped({"web": 0.5, "code": float("nan"), "books": 0.0})
    ('75 %', '50 % of web, not known of code, 0 % of books')
    """
    if shares and not any(shares.values()):
        return ""
    texts = [
        "not known" if math.isnan(share) else f"{number(100 * share, digits=2)} %"
        for share in shares.values()
    ]
    if len(texts) > 1:
        texts = [f"{text} of {corpus}" for text, corpus in zip(texts, shares, strict=True)]
    return ", ".join(texts) or "not known"


def answer_choice(
    throughput: pd.DataFrame,
    dropped: pd.DataFrame,
    validation: pd.DataFrame | None = None,
    unit: str = NATS,
) -> list[Answer]:
    """Return which approaches to use: of those that keep the text, and whose loss after equal
    seconds pairs of repeats do not show to be higher than the lowest, the fastest in the median of
    all repeats, and approaches that pairs do not show to be slower by more than
    `statistics.MARGIN`. Nothing where more than the approach differs, or all drop text. From rows
    of `throughput.sql`, `dropped_text.sql` and `validation.sql`, whose losses are in `unit`.

    A pair's ratio is unharmed by what slows a whole repeat, and an outlier touches the comparison
    of its own approach only, unless the fastest has it. The interval is that of every other
    comparison of the page.
    """
    rows = _fewest_ranks(throughput)
    shares = dropped_shares(dropped)
    kept = rows[rows["series"].map(lambda name: _most(shares.get(name, {})) < MATERIAL)]
    if (rows["series"] != rows["approach"]).any() or rows["series"].nunique() < 2 or kept.empty:
        return []
    losses = _losses_after_equal_seconds(validation, of=set(kept["series"]))
    worse = _find_higher(losses) if losses else []
    rates = kept.groupby("series")[RATE].median()
    kept = kept[~kept["series"].isin(worse)]
    medians = kept.groupby("series")[RATE].median()
    fastest = str(medians.idxmax())
    ratios = compare_rates(kept, fastest)
    used = [
        name
        for name in order_series(list(medians.index))
        if name == fastest or _is_as_fast(ratios[name])
    ]
    slowest = medians[used].min()
    fast = " to ".join(dict.fromkeys(number(rate) for rate in (slowest, medians[fastest])))
    keeps = "drops no text" if max(_most(shares[name]) for name in used) == 0 else NEARLY_ALL
    subject = "each" if len(used) > 1 else "it"
    text = f"Use {captions.listing(used, 'or')}: {subject} {keeps} and trains on {fast} useful "
    text += "tokens a second"
    others = rows[~rows["series"].isin([*used, *worse])].groupby("series")[RATE].median()
    notes = []
    if len(others):
        notes.append(f"the fastest other, {others.idxmax()}, on {number(others.max())}")
    if losses:
        faster = {name: rates[name] for name in worse if rates[name] >= slowest}
        notes += _describe_higher(losses, faster, of=fastest, unit=unit)
    text += f" ({'; '.join(notes)})" if notes else ""
    if len(used) > 1:
        text += "".join(f"; if {NEEDS[name]}, {name}" for name in used if name in NEEDS)
    near = [name for name in used if name != fastest]
    near = near or sorted(ratios, key=lambda name: -ratios[name].median)[:1]
    against = ", ".join(f"{name} {_describe_ratio(ratios[name])}" for name in near)
    if any(ratios[name].n < 2 for name in near):
        against += f"; of one pair, less than {100 * UNREPEATED:.0f} % is no difference"
    spread = (
        f"speed over that of {fastest}: {against}"
        if near
        else "all others that keep the text end higher"
    )
    if not (kept["series"].value_counts() > 1).any():
        spread = ONE_RUN
    return [{"part": "choice", "text": text, "spread": spread, "verdict": MEASURED}]


def _losses_after_equal_seconds(validation: pd.DataFrame | None, of: Set[str]) -> "LossesAt | None":
    """Return the losses of some series after equal seconds of training steps; None where one is not
    known or not finite.
    """
    if validation is None:
        return None
    known = validation[validation["series"].isin(of)].dropna(subset=["training_s"])
    if set(known["series"]) != of or not np.isfinite(known["loss"]).all():
        return None
    return interpolate_losses(known, "training_s")


def _find_higher(losses: "LossesAt") -> list[str]:
    """Return the series whose losses pairs of repeats show to be higher than those of the series
    with the lowest median, by more than interpolation is off by.
    """
    lowest = min(losses.medians, key=losses.medians.__getitem__)
    base = losses.by_repeat(lowest)
    found = []
    for name in losses.medians:
        pairs = compare_pairs(losses.by_repeat(name), base, ratios=False)
        if pairs.effect.n > 1 and pairs.effect.low > losses.error:
            found.append(name)
    return found


def _describe_higher(
    losses: "LossesAt", faster: Mapping[str, float], of: str, unit: str
) -> list[str]:
    """Return in words why series with such rates are not advised, but `of`."""
    limit = f"after {number(losses.spent, digits=3)} s of training steps"
    ends = {name: number(loss, digits=4) for name, loss in losses.medians.items()}
    return [
        f"{name} trains on {number(rate)}, but ends at {ends[name]} {unit} {limit}, not {ends[of]}"
        for name, rate in faster.items()
    ]


def compare_rates(rows: pd.DataFrame, fastest: str) -> dict[str, Summary]:
    """Return series → its rates over those of the fastest, in pairs of one repeat. A series with
    fewer than two pairs has the ratio of the medians, as one: further repeats of either count.
    """
    rates = {
        str(name): dict(zip(of["repeat"], of[RATE], strict=True))
        for name, of in rows.groupby("series")
    }
    base = rates.pop(fastest)
    ratios = {}
    for name, of in rates.items():
        compared = compare_pairs(of, base)
        ratio = float(np.median([*of.values()]) / np.median([*base.values()]))
        ratios[name] = compared.spread if compared.spread.n > 1 else summary([ratio])
    return ratios


def _is_as_fast(ratio: Summary) -> bool:
    """Whether pairs do not show that a series is slower by more than the margin."""
    return ratio.high >= 1 - (MARGIN if ratio.n > 1 else UNREPEATED)


def _describe_ratio(ratio: Summary) -> str:
    """
    >>> _describe_ratio(summary([0.9, 1.0])), _describe_ratio(summary([0.91]))
    ('0.95× (0.9 to 1, range of 2 pairs)', '0.91×')
    """
    text = f"{number(ratio.median)}×"
    if ratio.n < 2:
        return text
    return f"{text} ({number(ratio.low)} to {number(ratio.high)}, {ratio.kind} of {ratio.n} pairs)"


def answer_dropped(rows: pd.DataFrame) -> list[Answer]:
    """Return which share of the text each approach drops, from rows of `dropped_text.sql`; nothing
    if that is equal.
    """
    dropped = dropped_shares(rows)
    names = sorted(order_series(list(dropped)), key=lambda name: -_most(dropped[name]))
    texts = {name: describe_dropped(dropped[name]) for name in names}
    if len(set(texts.values())) < 2:
        return []
    whole = [name for name in names if not texts[name]]
    text = (
        f"Text dropped: {', '.join(_by_text({name: text for name, text in texts.items() if text}))}"
    )
    text += f"; {_some(whole)} keep{'s' * (len(whole) == 1)} all" if whole else ""
    known = rows["dropped_share"].notna().all()
    by_run = rows["counted_by_run"].any()
    source = "counted by the runs as they began" if by_run else "counted over a whole epoch"
    spread = (
        "share of the useful tokens that lie behind the end of a row, "
        f"{source if known else 'not recorded for all'}"
    )
    return [
        {
            "part": "dropped text",
            "text": text,
            "spread": spread,
            "verdict": COUNTED if known else OPEN,
        }
    ]


def caution_dropped(dropped: Dropped) -> list[str]:
    """Return what a reader must know of series that drop a material share of the text, or an
    unknown one.
    """
    named = [(f"{name} ({describe_dropped(of)})", _most(of)) for name, of in dropped.items()]
    material = [text for text, most in named if MATERIAL <= most < math.inf]
    unknown = [text for text, most in named if most == math.inf]
    lost = (
        f"Text is dropped: documents longer than a row lose their end with {_some(material)}. "
        "Such runs never train "
    )
    found = (
        [f"{lost}on it: their throughput and loss are those of shortened documents."]
        if material
        else []
    )
    return found + (
        [f"How much text is dropped is not known of all runs: {_some(unknown)}."] if unknown else []
    )


def _by_text(texts: Mapping[str, str]) -> list[str]:
    """Return each text with its names, `70 % with padded and packed`; of many texts the first and
    the last. The names of many that share one text are left out.
    """
    found: dict[str, list[str]] = {}
    for name, text in texts.items():
        found.setdefault(text, []).append(name)
    if len(found) == 1 < NAMED < len(texts):
        return [f"{text} in all {len(texts)} series" for text in found]
    listed = [f"{text} with {_some(names)}" for text, names in found.items()]
    return [listed[0], listed[-1]] if len(listed) > NAMED else listed


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED + 1
    return captions.listing([*names] if more < 2 else [*names[: NAMED - 1], f"{more} more"])


def _most(shares: Mapping[str, float]) -> float:
    """Return the largest share; infinite where one is not known."""
    return max(
        (math.inf if math.isnan(share) else share for share in shares.values()), default=math.inf
    )


def unequal_text(dropped: Dropped, of: str, over: str) -> str:
    """Return what text two series drop; empty if their shares are known and differ by less than
    `MATERIAL`.
    """
    one = dropped.get(of, {})
    other = dropped.get(over, {})
    near = one.keys() == other.keys() and all(
        abs(one[corpus] - other[corpus]) < MATERIAL for corpus in one
    )
    texts = {name: describe_dropped(shares) for name, shares in ((of, one), (over, other))}
    if near or len(texts) < 2 or not any(texts.values()):
        return ""
    return "text dropped: " + ", ".join(
        f"{text or '0 %'} with {name}" for name, text in texts.items()
    )


def note_dropped(
    compared: Sequence[paired_comparisons.Judged], dropped: Dropped, runs: pd.DataFrame
) -> list[paired_comparisons.Judged]:
    """Note what text two compared series drop, where it differs; mark comparisons of losses."""
    series = dict(zip(runs["cell"], runs["series"], strict=True))
    found = []
    for judged in compared:
        of, over = (series.get(cell, "") for cell in (judged.pair.of, judged.pair.over))
        note = unequal_text(dropped, of, over=over) if judged.result.spread.n else ""
        found.append(
            judged.mark(
                UNEQUAL_TEXT * bool(note and judged.pair.quantity != paired_comparisons.RATE), note
            )
        )
    return found


def not_useful_shares(rows: pd.DataFrame) -> dict[tuple[str, int], float]:
    """Return (series, world size) → median share of processed tokens that are not useful."""
    medians = rows.groupby(["series", "world_size"])["not_useful_share"].median()
    return {(str(name), int(world)): float(share) for (name, world), share in medians.items()}


def answer_padding(padding: pd.DataFrame) -> list[Answer]:
    """Return which share of processed tokens is not useful (padding, ignored labels); from rows of
    `padding.sql`.
    """
    rows = _fewest_ranks(padding.dropna(subset=["not_useful_share"]))
    names = order_series(rows["series"])
    shares = {name: share for (name, _), share in not_useful_shares(rows).items()}
    if len(names) < 2:
        return []
    listed = _by_text(
        {n: f"{number(100 * shares[n])} %" for n in sorted(names, key=lambda n: -shares[n])}
    )
    apart = max(
        100 * (values.max() - values.min())
        for _, values in rows.groupby("series")["not_useful_share"]
    )
    text = (
        "Processed tokens that are not useful (padding, ignored labels): "
        f"{captions.listing(listed)}"
    )
    spread = f"exact counts of {len(rows)} runs" + (
        f"; repeats differ by up to {number(apart, digits=2)} points" if apart else ""
    )
    return [{"part": "padding", "text": text, "spread": spread, "verdict": COUNTED}]


@dataclass(frozen=True)
class LossesAt:
    """Validation losses of runs where all of them have spent as much: `spent` of a column such as
    seconds. `losses`, `steps` and `repeats` are series → one value a run; `error` bounds the
    interpolation.
    """

    spent: float
    losses: Mapping[str, list[float]]
    steps: Mapping[str, list[float]]
    repeats: Mapping[str, list[int]]
    error: float

    @property
    def medians(self) -> dict[str, float]:
        return {name: float(np.median(values)) for name, values in self.losses.items()}

    def by_repeat(self, name: str) -> dict[object, float]:
        """Repeat → the loss of a series' run."""
        return dict(zip(self.repeats[name], self.losses[name], strict=True))

    def step(self, name: str) -> int:
        """The median step of a series' runs."""
        return round(float(np.median(self.steps[name])))


def interpolate_losses(validation: pd.DataFrame, column: str) -> LossesAt:
    """Return the losses at the least that a run spent in all, from rows of `validation.sql`.

    Losses are interpolated linearly between the validations before and after. A falling, convex
    loss lies between that value and the later validation, so the distance of the two bounds the
    error.
    """
    spent = float(validation.loc[validation["last"].astype(bool), column].min())
    losses: dict[str, list[float]] = {name: [] for name in order_series(validation["series"])}
    steps: dict[str, list[float]] = {name: [] for name in losses}
    repeats: dict[str, list[int]] = {name: [] for name in losses}
    error = 0.0
    for (name, _), run in validation.sort_values("step").groupby(["series", "run_id"]):
        repeats[name].append(int(run["repeat"].iloc[0]))
        seen = run[column].to_numpy(float)
        loss = run["loss"].to_numpy(float)
        losses[name].append(float(np.interp(spent, seen, loss)))
        steps[name].append(float(np.interp(spent, seen, run["step"])))
        error = max(error, losses[name][-1] - float(loss[np.searchsorted(seen, spent)]))
    return LossesAt(spent=spent, losses=losses, steps=steps, repeats=repeats, error=error)


def share_unit(validation: pd.DataFrame, runs: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return rows of `validation.sql` with losses in a unit that all of them share, and its name:
    nats (a token) of one vocabulary, else bits per byte, where those are known.
    """
    used = runs[runs["run_id"].isin(validation["run_id"])]
    # by name: a run that reads stored tokens opens no tokenizer, and has no hash of one
    if "tokenizer" not in used or used["tokenizer"].dropna().nunique() < 2:
        return validation, NATS
    known = validation.dropna(subset=["bits_per_byte"])
    return known.assign(loss=known["bits_per_byte"]), "bits per byte"


def answer_loss(
    validation: pd.DataFrame, inventory: pd.DataFrame, refused: Mapping[str, str], dropped: Dropped
) -> list[Answer]:
    """Return how far median validation losses lie apart at equal compute (steps × positions) and
    after equal seconds of training steps, in a unit that they share; from rows of `validation.sql`.

    With more error of interpolation than difference, an answer is open. `inventory` and `refused`
    (run id → what makes it not comparable) name the runs that are left out.
    """
    rows, unit = share_unit(_fewest_ranks(validation), inventory)
    found = []
    for column in ("positions_seen", "training_s"):
        known = rows.dropna(subset=[column])
        if known["series"].nunique() < 2:
            continue
        planned = inventory[inventory["world_size"] == known["world_size"].min()]
        used = set(known["run_id"])
        left_out = paired_comparisons.describe_left_out(planned, used=used, refused=refused)
        at = interpolate_losses(known, column)
        if column == "positions_seen":
            where = f"At equal compute ({number(at.spent, digits=3)} positions)"
        else:
            where = f"After {number(at.spent, digits=3)} s of training steps"
        answer = _answer_losses(at, where, unit=unit, dropped=dropped, left_out=left_out)
        found.append(answer)
    return found


def _answer_losses(
    at: LossesAt, where: str, *, unit: str, dropped: Dropped, left_out: str
) -> Answer:
    """Return the answer on the lowest and the highest median of losses; `where` begins its text."""
    medians = at.medians
    low = min(medians, key=medians.__getitem__)
    high = max(medians, key=medians.__getitem__)
    apart = medians[high] - medians[low]
    ends = ", ".join(
        f"{number(medians[n], digits=4)} with {n} (step {at.step(n)})" for n in (low, high)
    )
    result = (
        f"{_nats(apart)} {unit} apart: {ends}"
        if apart
        else f"equal: {number(medians[low], digits=4)} {unit}"
    )
    noise = max(max(values) - min(values) for values in at.losses.values())
    runs = [len(at.losses[name]) for name in (low, high)]
    spread = [f"medians of {runs[0]} and {runs[1]} runs"] if max(runs) > 1 else []
    repeated = max(map(len, at.losses.values())) > 1
    spread += [f"repeats differ by up to {_nats(noise)} {unit}"] if repeated else []
    spread += [f"interpolation is off by up to {_nats(at.error)}"] if at.error >= 1e-4 else []
    if max(runs) == 1:
        verdict = ONE_RUN
    elif apart > noise + at.error:
        verdict = BEYOND
    elif at.error <= noise:
        verdict = WITHIN
    else:
        verdict = OPEN
    if at.step(low) != at.step(high):
        verdict += paired_comparisons.UNEQUAL_UPDATES
        spread.append(f"after {at.step(low)} against {at.step(high)} updates")
    if note := unequal_text(dropped, of=low, over=high):
        verdict += UNEQUAL_TEXT
        spread.append(note)
    spread += [left_out] if left_out else []
    return {
        "part": "loss",
        "text": f"{where}, validation losses are {result}",
        "spread": "; ".join(spread),
        "verdict": verdict,
    }


def describe_equal_tokens(validation: pd.DataFrame) -> str:
    """Return a sentence on the losses after equal useful tokens, at the smallest world size; empty
    for one series.
    """
    rows = _fewest_ranks(validation)
    if rows["series"].nunique() < 2:
        return ""
    at = interpolate_losses(rows, column="useful_tokens_seen")
    losses = {name: f"{number(loss, digits=4)}" for name, loss in at.medians.items()}
    texts = captions.listing(_by_text(losses))
    return f"After {number(at.spent, digits=3)} useful tokens, interpolated between validations: {texts}."


def answer_scaling(scaling: pd.DataFrame) -> list[Answer]:
    """Return the efficiency at the largest world size, over all series; from rows of
    `scaling.sql`.
    """
    rows = scaling[
        (scaling["world_size"] > scaling["base_world_size"]) & scaling["efficiency"].notna()
    ]
    if rows.empty:
        return []
    world = int(rows["world_size"].max())
    rows = rows[rows["world_size"] == world]
    base = _list_numbers(sorted(rows["base_world_size"].unique()))
    medians = 100 * rows.groupby("series")["efficiency"].median()
    values = summary(100 * rows["efficiency"]) if len(medians) == 1 else None
    text = f"{world} ranks reach {captions.describe_extremes(medians, ' %')} of ideal scaling from {base}"
    spread = f"medians of {len(medians)} series, {len(rows)} runs"
    if values is not None:
        spread = (
            values.kind
            if values.n == 1
            else f"{number(values.low)}–{number(values.high)} %, {values.kind}"
        )
    return [{"part": "scaling", "text": text, "spread": spread, "verdict": MEASURED}]


def answer_memory(parallelism: pd.DataFrame) -> list[Answer]:
    """Return the memory of the fullest rank at the largest world size with several methods; from
    `parallelism.sql`.

    Nothing where the runs differ in another factor (micro-batches, models), which changes memory as
    well.
    """
    rows = parallelism.dropna(subset=["memory_bytes"])
    methods = rows.groupby("world_size")["method"].nunique()
    if methods.empty or methods.max() < 2 or rows["factors"].nunique() > 1:
        return []
    world = int(methods[methods > 1].index.max())
    alone = rows[rows["world_size"] == 1]
    rows = rows[rows["world_size"] == world]
    least = captions.describe_extremes(
        1e-6 * rows.groupby("method")["memory_bytes"].median(), unit=" MB"
    )
    single = (
        f"; {number(1e-6 * alone['memory_bytes'].median())} MB on one rank" if len(alone) else ""
    )
    spread = f"{len(rows)} runs, in their first step{single}"
    text = f"The fullest of {world} ranks holds {least}"
    return [{"part": "memory", "text": text, "spread": spread, "verdict": MEASURED}]


def answer_waiting(pipeline: pd.DataFrame) -> list[Answer]:
    """Return how long pipeline ranks wait at the most micro-batches with several schedules; from
    `pipeline.sql`.
    """
    rows = pipeline.dropna(subset=["bubble_share"])
    schedules = rows.groupby(["pipeline", "micro_batches"])["schedule"].nunique()
    if schedules.empty or schedules.max() < 2:
        return []
    stages, count = schedules[schedules > 1].index.max()
    rows = rows[(rows["pipeline"] == stages) & (rows["micro_batches"] == count)]
    groups = rows.groupby(["schedule", "stages_per_rank"])["bubble_share"]
    shares = groups.median().sort_values(ascending=False, kind="stable")
    most = groups.size().max()
    expected = (
        bubble_share(
            schedule,
            ranks=int(stages),
            micro_batches=int(count),
            chunks=int(chunks),
        )
        for schedule, chunks in shares.index
    )
    predicted = ", ".join(f"{number(100 * share)} %" for share in expected)
    listed = captions.listing(
        [f"{number(100 * share)} % with {schedule}" for (schedule, _), share in shares.items()]
    )
    text = f"With {count} micro-batches on {stages} stages, ranks wait {listed} of the time"
    spread = f"{len(rows)} runs, up to {most} of a schedule; predicted: {predicted}"
    return [{"part": "waiting", "text": text, "spread": spread, "verdict": MEASURED}]


def answer_data(order: pd.DataFrame, proof: Mapping[str, Any]) -> list[Answer]:
    """Return for each kind of pair of `order.sql` whether both runs train on the same data, by the
    `proof`.
    """
    found = []
    for part in proof["parts"]:
        pairs = order[order["kind"] == part["kind"]]
        if pairs.empty:
            continue
        if part["state"] != "proven":
            found.append(
                {
                    "part": "data",
                    "text": part["text"].rstrip("."),
                    "spread": "",
                    "verdict": NOT_PROVEN,
                }
            )
            continue
        base = sorted(set(pairs["world_size"]))
        worlds = sorted(set(pairs["other_world_size"]) - set(base))
        text = _AGREE[part["kind"]].format(worlds=_list_numbers(worlds), base=_list_numbers(base))
        largest = pairs["largest_loss_difference"].max()
        text += ": equal samples and useful tokens at every step"
        if largest == 0:
            text += ", bit-identical losses"
        elif largest > 0:  # what only reads has none
            text += f", losses within rounding ({_nats(largest, digits=1)} nats)"
        spread = f"exact counts of {paired_comparisons.in_pairs(len(pairs))}"
        found.append({"part": "data", "text": text, "spread": spread, "verdict": PROVEN})
    return found


def _fewest_ranks(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["world_size"] == rows["world_size"].min()]


def _list_numbers(values: Sequence[int]) -> str:
    return captions.listing([str(int(value)) for value in values])


def _nats(value: float, digits: int = 2) -> str:
    """
    >>> _nats(0.0314), _nats(1.4e-6, 1)
    ('0.031', '1e-6')
    """
    return (
        number(value, digits)
        if value >= 1e-3 or value == 0
        else f"{value:.{digits - 1}e}".replace("e-0", "e-")
    )


#: tasks beside the run's own that its machine may have run or queued on average, as a share of its
#: cores
BUSY = 0.5
#: highest less lowest throughput of a cell's repeats over their median, from which on a spread is a
#: caution
SPREAD = 0.2
#: efficiency above 1 by more than this is no noise
EFFICIENCY = 0.05


def find_cautions(
    runs: pd.DataFrame,
    throughput: pd.DataFrame,
    scaling: pd.DataFrame,
    stragglers: pd.DataFrame | None = None,
    verdicts: Sequence[str] = (),
    stores: pd.DataFrame | None = None,
    design: Sequence[Mapping[str, str]] = (),
    design_sha256: str = "",
) -> list[str]:
    """Return the cautions of an experiment, the most important first; nothing for a quiet campaign
    with enough runs.

    `runs`, `throughput`, `scaling` and `stragglers` are the rows of the queries `inventory`,
    `throughput`, `scaling` and `stragglers`; `verdicts` those of its comparisons; `stores` the
    table; `design` the `cautions` of `experiment.json`, `design_sha256` the digest there.
    """
    refused, warned = (
        [f"{c['what'][0].upper()}{c['what'][1:]}." for c in design if c["level"] == level]
        for level in ("refuse", "warn")
    )
    drift = paired_comparisons.measure_drift(throughput, runs)
    few = list(verdicts).count(TOO_FEW)
    drifted = (
        f"Throughput drifted by {paired_comparisons.format_share(drift)} "
        f"from the first run to the last ({drift.n} runs, "
    )
    found = [
        *_describe_validity(runs),
        *refused,
        *([] if stores is None else _describe_held_out(stores)),
        _caution_design(runs, digest=design_sha256),
        _describe_lost_text(runs),
        *warned,
        _describe_compilation(runs),
        _describe_efficiency(scaling),
        f"{drifted}p = {number(drift.p, digits=2)})." if drift.verdict == "drift" else "",
        _describe_spread(throughput),
        "" if stragglers is None or stragglers.empty else _describe_stragglers(stragglers),
        f"Comparisons with too few runs for a verdict: {few} of {len(verdicts)}." if few else "",
        *_describe_run_cautions(runs),
        _describe_load(runs),
    ]
    return [text for text in found if text]


def _select_designs(runs: pd.DataFrame) -> pd.Series:
    """Digest of the design that each of our runs that began recorded; null where none is."""
    known = runs.reindex(columns=["external", "status", "design_sha256"])
    ours = ~known["external"].fillna(False).astype(bool) & (known["status"] != "missing")
    return known.loc[ours, "design_sha256"]


def _caution_design(runs: pd.DataFrame, digest: str) -> str:
    """Return that the design was changed after runs had begun; empty where none recorded another."""
    designs = _select_designs(runs)
    others = int((designs.dropna() != digest).sum())
    if not others:
        return ""
    return (
        "The design (question, cells, primary comparisons, margins, target or repeats) was changed "
        f"after {others} of {captions.count(len(designs), 'run')} had begun."
    )


def describe_registration(runs: pd.DataFrame, digest: str) -> str:
    """Return a sentence on whether the design was set before the runs; `digest` is that of the run
    table.
    """
    if changed := _caution_design(runs, digest):
        return changed
    missing = _select_designs(runs).isna()
    if missing.all():
        return "Whether the design was set before these runs is not recorded."
    text = (
        "Question, cells, primary comparisons, margins, target and repeats were set before the "
        "first of these runs"
    )
    if missing.any():
        text += f"; not recorded of {int(missing.sum())} of {captions.count(len(missing), 'run')}"
    return f"{text}."


def _describe_validity(runs: pd.DataFrame) -> list[str]:
    """Runs that are not valid: their first reasons, of which three are named."""
    missing = int((runs["validity"] == "missing").sum())
    found = [f"{missing} missing of {captions.count(len(runs), 'run')}."] if missing else []
    for word in ("invalid", "suspect"):
        wrong = runs[runs["validity"] == word]
        of = dict[str, list[str]]()
        for run_id, reasons in zip(wrong["run_id"], wrong["reasons"], strict=True):
            of.setdefault((reasons or "no reason recorded").split("; ")[0], []).append(run_id)
        texts = [
            f"{text} ({ids[0] if len(ids) == 1 else f'{len(ids)} runs'})"
            for text, ids in of.items()
        ]
        more = [f"{len(texts) - 3} more reasons"] if len(texts) > 4 else texts[3:]
        if texts:
            found += [f"{len(wrong)} {word} of {len(runs)} runs: {'; '.join(texts[:3] + more)}."]
    return found


def _describe_run_cautions(runs: pd.DataFrame) -> list[str]:
    """Return cautions of single runs, each with the number of runs. Those that differ in their
    numbers alone are one, with the first of them.

    >>> _describe_run_cautions(pd.DataFrame({"cautions": ["it took 2 s; odd", "it took 3.5 s", "odd"]}))
    ['2 of 3 runs, such as: it took 2 s.', '2 of 3 runs: odd.']
    """
    found: dict[str, dict[str, set[int]]] = {}
    for run, of in enumerate(runs["cautions"].dropna()):
        for text in filter(None, of.split("; ")):
            alike = found.setdefault(NUMBERS.sub("#", text), {})
            alike.setdefault(text, set()).add(run)
    sentences = []
    for alike in found.values():
        n = len(set().union(*alike.values()))
        count = f"{n} of {len(runs)} runs" if n < len(runs) else "All runs"
        such_as = ", such as" if len(alike) > 1 else ""
        sentences.append(f"{count}{such_as}: {next(iter(alike))}.")
    return sentences


def _describe_lost_text(runs: pd.DataFrame) -> str:
    """Runs whose tokenizer loses a part of their text, with the largest share."""
    shares = runs.reindex(columns=["text_lost", "text_unknown"]).astype(float)
    if not (lossy := (shares > LOSS_CAUTION).any(axis=1)).any():
        return ""
    worst = runs.loc[shares.max(axis=1).idxmax()]
    unknown = (
        f"; {number(100 * worst['text_unknown'], digits=2)} % of the ids are unknown"
        if worst["text_unknown"] > 0
        else ""
    )
    lost = (
        f"up to {number(100 * worst['text_lost'], digits=2)} % of its bytes ({worst['tokenizer']} on "
        f"{worst['corpus']}"
    )
    return (
        f"The tokenizer loses a part of the text of {int(lossy.sum())} of {len(runs)} runs, "
        f"{lost}{unknown})."
    )


def _describe_held_out(stores: pd.DataFrame) -> list[str]:
    corpora = (
        stores[stores["held_out_in_training"].fillna(0) > 0]
        .drop_duplicates("corpus")
        .sort_values("corpus")
    )
    return [
        f"Corpus {row.corpus}: {int(row.held_out_in_training):,} distinct held-out texts also "
        "occur in its training "
        "text; they were "
        f"{'dropped' if row.held_out_dropped else 'kept, so validation losses are too low'}."
        for row in corpora.itertuples()
    ]


def _describe_compilation(runs: pd.DataFrame) -> str:
    """Runs that asked for compile and ran blocks eagerly, with the counts of the first."""
    requested = runs.dropna(subset=["blocks", "eager_blocks"])
    eager = requested[requested["eager_blocks"] > 0]
    for first in eager.head(1).itertuples():
        blocks = f"{first.run_id}: {int(first.eager_blocks)} of {int(first.blocks)} blocks"
        return (
            f"Blocks ran eagerly in {len(eager)} of {len(requested)} runs that ask for compile: "
            f"{blocks}."
        )
    return ""


def _describe_load(runs: pd.DataFrame) -> str:
    """Describe whether the machine did other work, and whether slow steps can be recognized.

    The load average counts runnable tasks over about the last minute (getloadavg(3)), and so the
    ranks of the run before this one, too; they are taken to be as many as the largest run of the
    experiment has: ranks × threads.
    """
    counted = captions.select_usable(runs)
    found = []
    known = counted[counted["device_kind"] == "cpu"].dropna(
        subset=["load_average", "cores", "world_size"]
    )
    own = (known["world_size"] * known["threads_per_rank"].fillna(1)).max()
    load = known.loc[(known["load_average"] - own) / known["cores"] > BUSY, "load_average"]
    if len(load):
        most = f" (up to {number(load.max(), digits=2)})" if len(load) > 1 else ""
        found.append(
            f"Other work ran on the machine: when {len(load)} of {len(known)} runs began, its "
            "load average was "
            f"{number(load.median(), digits=2)}{most} on {int(known['cores'].max())} cores; the runs' "
            "own threads are at most "
            f"{int(own)}."
        )
    if noisy := int(counted["unchecked"].fillna("").str.contains(TOO_NOISY).sum()):
        text = "steps vary so much that a slowdown to half the speed would go unnoticed."
        found.append(f"In {noisy} of {len(runs)} runs {text}")
    return " ".join(found)


def _describe_spread(throughput: pd.DataFrame) -> str:
    """Cells whose repeats differ widely."""
    cells = [
        ((rates.max() - rates.min()) / rates.median(), f"{series} at world size {world}")
        for (series, world), rates in throughput.groupby(["series", "world_size"])[
            "useful_tokens_per_s"
        ]
    ]
    wide = [cell for cell in cells if cell[0] > SPREAD]
    share, where = max(wide, default=(0.0, ""))
    least = (
        f"Repeats of {len(wide)} of {len(cells)} cells differ by more than {100 * SPREAD:.0f} % "
        "of their median"
    )
    return f"{least}, up to {number(100 * share, digits=2)} % ({where})." if wide else ""


def _describe_stragglers(stragglers: pd.DataFrame) -> str:
    """Ranks that were slower than their peers for a stretch, with the one that took the most
    time.
    """
    worst = stragglers.iloc[0]  # in order of the time that they took
    begins, ends = (
        datetime.fromtimestamp(worst[f"{end}_unix_s"], UTC) for end in ("started", "stopped")
    )
    node = f" on {worst['node']}" if isinstance(worst["node"], str) else ""
    more = (
        f" {len(stragglers) - 1} more stretches: query stragglers." if len(stragglers) > 1 else ""
    )
    return (
        f"Rank {int(worst['rank'])} of {worst['run_id']}{node} was "
        f"{number(worst['slowdown'], digits=3)} times slower than "
        f"its peers in steps {int(worst['first_step'])} to {int(worst['last_step'])} "
        f"({begins:%Y-%m-%d %H:%M:%S} to "
        f"{ends:%H:%M:%S} UTC), mostly in {worst['part']}, {number(worst['lost_s'], digits=2)} s in "
        f"all.{more}"
    )


def _describe_efficiency(scaling: pd.DataFrame) -> str:
    """Efficiency above 1: ranks cannot do more than as many single ones, so the base was disturbed
    or differs.
    """
    known = scaling[
        (scaling["world_size"] > scaling["base_world_size"]) & scaling["efficiency"].notna()
    ]
    above = known[known["efficiency"] > 1 + EFFICIENCY]
    if above.empty:
        return ""
    worst = above.loc[above["efficiency"].idxmax()]
    shared = (above["device_kind"] == "cpu").any()
    where = (
        f"{number(100 * worst['efficiency'], digits=3)} % ({worst['series']} at world size "
        f"{int(worst['world_size'])})"
    )
    next_step = (
        "ranks that share cores do not measure scaling"
        if shared
        else "look at the run that it is measured from"
    )
    return (
        f"Scaling efficiency is above 100 % in {len(above)} of {len(known)} runs, up to {where}: "
        f"{next_step}."
    )
