"""Say what kind of change separates two loss curves. docs/other-trainers.md explains the rules and their
limits.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tokenscale_golden.history import LARGEST, derive_floors
from tokenscale_golden.platforms import Platform, compare_movements
from tokenscale_golden.reading import Curve
from tokenscale_golden.speed import Speed, compare_speed

IDENTICAL = "identical"
ROUNDING = "rounding"
DATA = "other data"
WEIGHTS = "other initial weights"
MODEL = "other loss, mask or model"
UPDATE = "other update"
DIVERGED = "diverged or not finite"
NORM = "gradient norm only"
SPEED = "speed only"
UNKNOWN = "cannot tell"
# worst first
KINDS = (DIVERGED, MODEL, WEIGHTS, DATA, UPDATE, NORM, UNKNOWN, SPEED, ROUNDING, IDENTICAL)
#: floor of earlier versions
EARLIER = "earlier versions"
RATES = json.loads((Path(__file__).parent / "rates.json").read_text(encoding="utf-8"))

# --- rounding. Sizes are relative to the loss or the norm where nothing else is said

#: differences beyond that many times the largest among floor runs are real
MULTIPLE = 10.0
#: spacing of fp32: the smallest floor of a loss or a norm
RESOLUTION = 2.0**-24
#: without floor runs: fp32 rounding at step 1 (measured: 2e-7), its growth a step, and the number of
#: steps over which it grows
FP32 = 1e-6
GROWTH = 1.1
GROWTH_STEPS = 100
#: more than bf16's rounding (5e-4)
BF16 = 1e-3
#: the floor at a step is the largest difference up to that many steps later, since rounding may
#: reach its level at any step
STEPS_AHEAD = 2
#: from that many different runs on (OLD is one), the floor counts at each step for itself
ENOUGH_RUNS = 3
#: fewer compared steps than these cannot show rounding: with floor runs, and without
FEWEST_STEPS = 3
FEWEST_STEPS_WITHOUT_FLOOR = 5
#: a last digit worth more hides rounding, unless differences exceed that many of its units
COARSE_DIGIT = 2e-5
DIGITS_OF_PRINT = 2.01
#: slack of a comparison of printed numbers, for the binary fractions
PRINT_SLACK = 1 + 1e-6
#: stands for a loss or a norm of 0 in a division
TINY = 1e-30
#: gradient norms moved where that many steps are beyond rounding (or the only one)
NORM_STEPS = 2

# --- kinds of real changes

#: a later loss of NEW above that many times its first loss and the largest of OLD has diverged
DIVERGENCE = 1.25
#: later differences of one sign are real from this size on
SYSTEMATIC = 1e-2
#: batches whose losses correlate less are others: without and with an abrupt begin
SIMILAR = 0.75
OTHER_BATCHES = 0.5
#: differences begin abruptly: their median over the first steps, as a share of that over all steps
BEGIN_STEPS = 3
ABRUPT = 0.3
#: smaller shares are rounding that grows from far below
GRADUAL = 0.03
#: fewer steps leave a doubt about other batches, unless they correlate less than half as much as
#: OTHER_BATCHES
DATA_STEPS = 16
#: a first difference is small within this share of how much losses bend from step to step (median
#: of second differences), which takes so many steps to know
SMALL_BEND = 0.3
BEND_STEPS = 5
#: other initial weights: the largest early difference is between these sizes ...
WEIGHTS_SMALLEST = 2e-3
WEIGHTS_LARGEST = 0.05
#: ... and at least that share of the median of the steps up to EVEN_UNTIL: differences do not grow
EVEN = 0.2
EVEN_UNTIL = 11
EVEN_FEWEST_STEPS = 6
#: ... and the first gradient norm moves by less
WEIGHTS_NORM = 0.14
#: second differences that a correlation needs
CORRELATION_STEPS = 4
#: chance puts differences on one side at most this far beyond a half, at one step (1 in 1,000 at
#: 32 steps); it shrinks with the root of the steps
LEAN_OF_CHANCE = 1.7
#: counting steps from 0 in one curve must shrink the median difference at least to that share
SHIFT_GAIN = 0.5


@dataclass
class Verdict:
    """One comparison. `step` is the first that differs, `first` and `largest` are relative
    differences.
    """

    kind: str
    reason: str
    step: int | None = None
    first: float = 0.0
    largest: float = 0.0
    floor: str = ""
    notes: list[str] = field(default_factory=list)
    speed: Speed | None = None
    #: whether a second platform decided
    by_platform: bool = False

    @property
    def title(self) -> str:
        return f"{self.kind} from step {self.step}" if self.kind == DATA else self.kind

    @property
    def sure(self) -> str:
        """How often this answer was right on labelled cases, with floor runs or without."""
        source = "none"
        if self.floor.startswith("given"):
            source = "floor"
        elif self.floor.startswith("fp32 "):
            source = "fp32"
        elif self.floor.startswith(EARLIER) or self.by_platform:
            return ""
        right, answered = RATES[source].get(self.kind, (0, 0))
        if not answered:
            return ""
        return f"right in {right} of {answered} labelled cases with this answer ({RATES['source']})"


@dataclass
class _Common:
    """The steps that two curves share [n], and the place of each in both curves."""

    old: Curve
    new: Curve
    steps: np.ndarray
    at_old: np.ndarray
    at_new: np.ndarray
    notes: list[str]


@np.errstate(invalid="ignore", over="ignore")
def judge(
    old: Curve,
    new: Curve,
    floors: Sequence[Curve] = (),
    fp32: bool = False,
    *,
    versions: Sequence[Curve] = (),
    second: Platform | None = None,
) -> Verdict:
    """Compare common steps. `floors` differ from OLD by rounding only; `fp32`: nothing was rounded
    to fewer bits. `versions` of OLD up to it, oldest first, are asked for a floor where none is
    given. `second` are the losses of another platform before and after the same change.
    """
    common = _find_common(old, new)
    if not len(common.steps):
        return Verdict(
            kind=UNKNOWN,
            reason=f"no loss in common: OLD begins at {old.steps[0]}, NEW at {new.steps[0]}",
            notes=common.notes,
        )
    repeats = []
    for number, floor in enumerate(floors, 1):
        shifted = replace(floor, steps=floor.steps + _find_shift(old, new=floor))
        verdict = judge(old, shifted)
        if verdict.kind in (DIVERGED, WEIGHTS, DATA):
            common.notes.append(
                f"floor run {number} does not repeat OLD and is left out: {verdict.title}"
            )
        else:
            repeats.append(shifted)
    earlier = [] if repeats else derive_floors(old, versions)
    verdict = _judge_losses(common, floors=repeats or earlier, fp32=fp32)
    if earlier:
        verdict.floor = verdict.floor.replace("given", EARLIER).replace("run(s)", "changes")
    elif versions and not repeats:
        verdict.notes.append("no two earlier changes are small and as large as one another")
    if second is not None:
        _ask_second_platform(verdict, common, second)
    verdict.notes = common.notes + verdict.notes
    if old.time is not None and new.time is not None:
        verdict.speed = compare_speed(old.time, new=new.time)
        if not verdict.speed:
            verdict.notes.append("too few times of steps to compare speed")
        elif verdict.speed.moved and verdict.kind in (IDENTICAL, ROUNDING):
            verdict.reason = f"losses are {verdict.kind}: {verdict.reason}"
            verdict.kind = SPEED
    return verdict


def _ask_second_platform(verdict: Verdict, common: _Common, second: Platform) -> None:
    """Decide an open verdict by whether a second platform moved alike. Small changes may round alike
    on both.
    """
    if verdict.kind != UNKNOWN or verdict.step is None:
        return
    moved = compare_movements(common.old, common.new, second)
    if moved is None:
        verdict.notes.append("the second platform did not change, or has too few common steps")
    elif moved.alike and verdict.largest > BF16:
        verdict.kind = MODEL if verdict.step == common.steps[0] else UPDATE
        verdict.reason += f"; the second platform moved alike, as rounding does not: {moved}"
        verdict.by_platform = True
    elif moved.apart and verdict.largest <= LARGEST:
        verdict.kind = ROUNDING
        verdict.reason += f"; the second platform moved otherwise, as rounding does: {moved}"
        verdict.by_platform = True
    else:
        verdict.notes.append(f"the second platform does not tell: {moved}")


def _find_common(old: Curve, new: Curve) -> _Common:
    """Return the common steps at which a loss is finite."""
    notes = [f"{name}: {note}" for name, c in (("OLD", old), ("NEW", new)) for note in c.notes]
    shift = _find_shift(old, new)
    if shift:
        notes.append(
            f"steps of NEW are counted from {new.steps[0]}, those of OLD from {old.steps[0]}: "
            "shifted"
        )
    steps, at_old, at_new = np.intersect1d(old.steps, new.steps + shift, return_indices=True)
    if len(steps) < max(len(old.steps), len(new.steps)):
        notes.append(f"{len(steps)} steps in common of {len(old.steps)} and {len(new.steps)}")
    finite = np.isfinite(old.loss[at_old]) | np.isfinite(new.loss[at_new])
    if not finite.all():
        notes.append(f"losses are not finite in both at {np.sum(~finite)} steps")
    return _Common(
        old=old,
        new=new,
        steps=steps[finite],
        at_old=at_old[finite],
        at_new=at_new[finite],
        notes=notes,
    )


def _find_shift(old: Curve, new: Curve) -> int:
    """Return what to add to the steps of `new`: 1 or -1 where one curve counts from 0 and losses
    then fit, else 0.
    """
    shift = int(old.steps[0] - new.steps[0])
    if abs(shift) != 1:
        return 0
    count_as_is, gap_as_is = _measure_gap(old, new, shift=0)
    count_shifted, gap_shifted = _measure_gap(old, new, shift)
    fits = not gap_shifted > SHIFT_GAIN * gap_as_is
    return shift if count_shifted >= count_as_is and fits else 0


def _measure_gap(old: Curve, new: Curve, shift: int) -> tuple[int, float]:
    """Return the number of common steps, and the median difference of their losses."""
    _, at_old, at_new = np.intersect1d(old.steps, new.steps + shift, return_indices=True)
    if not len(at_old):
        return 0, math.inf
    gap = np.nan_to_num(np.abs(old.loss[at_old] - new.loss[at_new]), nan=np.inf)
    return len(at_old), float(np.median(gap))


def _differences(
    x: np.ndarray, y: np.ndarray, unit_x: np.ndarray, unit_y: np.ndarray
) -> np.ndarray:
    """Return y - x, 0 where both are equal in the digits of the coarser print, NaN where one is not
    finite.
    """
    half_digit = 0.5 * np.maximum(unit_x, unit_y)
    slack = np.where(unit_x == unit_y, 0.0, half_digit * PRINT_SLACK)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    change = np.where(same, 0.0, y - x)
    known = np.where(np.isfinite(change), change, np.nan)
    return np.where(np.abs(change) <= slack, 0.0, known)


@dataclass
class _Floor:
    """Rounding among floor runs: the largest difference so far, and the smallest that is real
    [n].
    """

    size: np.ndarray
    real: np.ndarray

    def largest_ratio(self, change: np.ndarray, unit: np.ndarray) -> float:
        """Return how many times the floor differences are at most."""
        return float((np.abs(change) / (self.size + unit)).max())


def _measure_floor(
    steps: np.ndarray,
    curves: list[tuple[Curve, np.ndarray]],
    unit: np.ndarray,
    low: np.ndarray,
) -> _Floor | None:
    """Return the floor at the steps [n]; None if runs differ by no more than `low`."""
    tables = [dict(zip(curve.steps, values, strict=True)) for curve, values in curves]
    runs = np.array([[table.get(step, math.nan) for step in steps] for table in tables])
    gaps = np.abs(runs[:, None] - runs[None])
    largest = np.nan_to_num(gaps, nan=0.0, posinf=0.0).max((0, 1))
    if not (largest > low).any():
        return None
    padded = np.append(largest, np.zeros(STEPS_AHEAD))
    ahead = [padded[shift : shift + len(steps)] for shift in range(STEPS_AHEAD + 1)]
    reached = np.maximum.accumulate(np.array(ahead).max(0))
    spacing = RESOLUTION * np.abs(np.nan_to_num(runs[0]))
    size = reached + spacing + unit / MULTIPLE
    # rounding may reach its level at any step, and one run shows less of it
    few = len(np.unique(runs, axis=0)) < ENOUGH_RUNS
    at_the_end = size[-1] * (MULTIPLE if few else 1.0)
    return _Floor(size=size, real=np.maximum(MULTIPLE * size, at_the_end))


@dataclass
class _NormChange:
    """Whether gradient norms moved beyond rounding, a sentence, the place, and the change at the
    first step.
    """

    moved: bool = False
    text: str = ""
    place: int = 0
    start: float = 0.0


@dataclass
class _Evidence:
    """Losses at the common steps [n], their differences, and what rounding explains."""

    common: _Common
    floors: Sequence[Curve]
    fp32: bool
    old_loss: np.ndarray
    new_loss: np.ndarray
    #: worth of a last printed digit, 0 where all are known
    unit: np.ndarray
    change: np.ndarray
    #: sizes of the losses of OLD, and of the differences relative to them
    scale: np.ndarray
    relative: np.ndarray
    #: place of the first difference
    first_change: int | None
    #: fp32's rounding without floor runs, relative, and the size up to which a floor is fp32's
    growth: np.ndarray
    low: np.ndarray
    floor: _Floor | None

    def conclude(self, kind: str, reason: str, place: int | None = None) -> Verdict:
        """Return a verdict on the step at a place, by default that of the first difference."""
        place = self.first_change if place is None else place
        notes = []
        if self.floors and self.floor is None:
            notes.append("floor runs that differ as fp32 rounds tell nothing of bf16")
        return Verdict(
            kind=kind,
            reason=reason,
            step=None if place is None else int(self.common.steps[place]),
            first=float(self.relative[place or 0]),
            largest=float(self.relative.max()),
            floor=self._name_floor(place or 0),
            notes=notes,
        )

    def _name_floor(self, place: int) -> str:
        if self.first_change is None:
            return ""
        if self.floor is not None:
            size = self.floor.size[place]
            step = self.common.steps[place]
            return f"given: {len(self.floors)} run(s), which differ by {size:.1e} at step {step}"
        return "fp32 rounding" if self.fp32 else "digits, first steps"

    def describe(self, first_change: int) -> str:
        """Return the sizes of the differences in words."""
        step = self.common.steps[first_change]
        change = self.change[first_change]
        relative = self.relative[first_change]
        sizes = (
            f"step {step} differs by {change:+.2g} ({relative:.1e} of the loss), "
            f"at most {self.relative.max():.1e}"
        )
        if self.floor is None:
            return sizes
        ratio = self.floor.largest_ratio(self.change, self.unit)
        return f"{sizes}; {ratio:.3g} times the floor at most"

    def compare_norms(self, limit: np.ndarray | float) -> _NormChange:
        """Return the change of gradient norms; differences within `limit` are rounding."""
        return _compare_norms(self.common, floors=self.floors, limit=limit, low=self.low)


def _judge_losses(common: _Common, floors: Sequence[Curve], fp32: bool) -> Verdict:
    evidence = _compare_losses(common, floors, fp32)
    norms = evidence.compare_norms(limit=evidence.growth if fp32 else BF16)
    if not_finite := _judge_not_finite(evidence):
        return not_finite
    first_change = evidence.first_change
    if first_change is None:
        return _judge_equal(evidence, norms)
    if diverged := _judge_divergence(evidence, first_change):
        return diverged
    sizes = evidence.describe(first_change)
    if evidence.floor is None:
        limit = evidence.growth * evidence.scale + evidence.unit
        small = _judge_without_floor(evidence, limit, sizes)
    else:
        limit = evidence.floor.real
        small = _judge_with_floor(evidence, evidence.floor, sizes, norms=norms)
    if small:
        return small
    beyond = np.flatnonzero(np.abs(evidence.change) > limit)
    first_real = first_change or int(beyond[0])
    return _judge_real_change(evidence, first_real, sizes, norms=norms)


def _compare_losses(common: _Common, floors: Sequence[Curve], fp32: bool) -> _Evidence:
    old = common.old
    new = common.new
    old_loss = old.loss[common.at_old]
    new_loss = new.loss[common.at_new]
    old_unit = old.unit[common.at_old]
    new_unit = new.unit[common.at_new]
    unit = np.maximum(old_unit, new_unit)
    change = _differences(old_loss, new_loss, unit_x=old_unit, unit_y=new_unit)
    scale = np.maximum(np.abs(np.nan_to_num(old_loss)), TINY)
    changed = np.flatnonzero(change).tolist()
    growth = FP32 * GROWTH ** np.minimum(np.arange(len(change)), GROWTH_STEPS)
    low = np.zeros(len(change)) if fp32 else growth
    repeats = [(curve, curve.loss) for curve in (old, *floors)]
    return _Evidence(
        common=common,
        floors=floors,
        fp32=fp32,
        old_loss=old_loss,
        new_loss=new_loss,
        unit=unit,
        change=change,
        scale=scale,
        relative=np.abs(np.nan_to_num(change)) / scale,
        first_change=changed[0] if changed else None,
        growth=growth,
        low=low,
        floor=_measure_floor(common.steps, curves=repeats, unit=unit, low=low * scale),
    )


def _judge_not_finite(evidence: _Evidence) -> Verdict | None:
    places = np.flatnonzero(np.isnan(evidence.change)).tolist()
    if not places:
        return None
    place = places[0]
    name = "NEW" if np.isfinite(evidence.old_loss[place]) else "OLD"
    step = evidence.common.steps[place]
    return evidence.conclude(DIVERGED, f"{name}'s loss is not finite at step {step}", place)


def _judge_equal(evidence: _Evidence, norms: _NormChange) -> Verdict:
    sizes = f"{len(evidence.change)} losses are equal"
    if evidence.unit.any():
        decimals = max(0, round(-math.log10(evidence.unit.max())))
        sizes += f" in the {decimals} decimals printed"
    if norms.moved:
        return evidence.conclude(NORM, f"{sizes}; {norms.text}", norms.place)
    return evidence.conclude(IDENTICAL, sizes)


def _judge_divergence(evidence: _Evidence, first_change: int) -> Verdict | None:
    losses = evidence.new_loss
    peak = int(np.nanargmax(losses))
    before = max(losses[0], np.nanmax(evidence.old_loss), 0.0)
    if peak <= first_change or not losses[peak] > DIVERGENCE * before:
        return None
    step = evidence.common.steps[peak]
    return evidence.conclude(
        DIVERGED,
        f"the loss of NEW rises from {losses[0]:.4g} to {losses[peak]:.4g} at step {step}",
    )


def _judge_with_floor(
    evidence: _Evidence, floor: _Floor, sizes: str, norms: _NormChange
) -> Verdict | None:
    """Return the verdict on losses within what is real by floor runs; None where one is beyond."""
    if (np.abs(evidence.change) > floor.real).any():
        return None
    if norms.moved:
        return evidence.conclude(NORM, f"{sizes}; {norms.text}", norms.place)
    doubt = ""
    if len(evidence.change) < FEWEST_STEPS:
        doubt = "in few steps"
    elif floor.largest_ratio(evidence.change, evidence.unit) > 1:
        doubt = "beyond it"
    elif _lean(evidence.change) > 1:
        doubt = "with one sign"
    if doubt:
        return evidence.conclude(UNKNOWN, f"{sizes}, {doubt}: give more floor runs or steps")
    return evidence.conclude(ROUNDING, sizes)


def _judge_without_floor(evidence: _Evidence, limit: np.ndarray, sizes: str) -> Verdict | None:
    """Return the verdict on losses that print or fp32 may have rounded; None where they are beyond
    both.
    """
    change = np.abs(evidence.change)
    coarse = (evidence.unit / evidence.scale).max() > COARSE_DIGIT
    if coarse and np.all(change <= DIGITS_OF_PRINT * evidence.unit):
        return evidence.conclude(
            UNKNOWN, f"{sizes}: too few digits are printed; print 7 digits of the loss"
        )
    if (change > limit).any():
        return None
    sizes = f"{sizes}: as small as rounding in fp32"
    norms = evidence.compare_norms(limit=evidence.growth)
    doubt = ""
    if norms.moved:
        doubt = norms.text
    elif len(change) < FEWEST_STEPS_WITHOUT_FLOOR:
        doubt = "over few steps"
    if doubt:
        return evidence.conclude(UNKNOWN, f"{sizes}, but {doubt}; give --floor runs")
    return evidence.conclude(ROUNDING, sizes)


@dataclass
class _Change:
    """Differences from the first real one on."""

    first: int
    #: how far they lean to one side, see `_lean`
    lean: float
    #: how losses of batches correlate; None for too few steps
    correlation: float | None
    other_batches: bool
    #: the first difference is small beside what losses move from step to step
    small: bool


def _describe_change(evidence: _Evidence, first: int) -> _Change:
    old_loss = evidence.old_loss
    relative = evidence.relative[first:]
    lean = _lean(evidence.change[first:])
    correlation = _correlate(old_loss[first:], y=evidence.new_loss[first:])
    typical = np.median(relative)
    abruptness = np.median(relative[:BEGIN_STEPS]) / max(typical, TINY)
    other_batches = False
    if correlation is not None and typical > BF16:
        alternates = correlation < SIMILAR and lean < 1 and abruptness > GRADUAL
        other_batches = bool(alternates or (correlation < OTHER_BATCHES and abruptness >= ABRUPT))
    small = False
    if len(old_loss) >= BEND_STEPS:
        bend = np.median(np.abs(np.diff(old_loss, 2)))
        small = bool(evidence.relative[first] * evidence.scale[first] <= SMALL_BEND * bend)
    return _Change(
        first=first,
        lean=lean,
        correlation=correlation,
        other_batches=other_batches,
        small=small,
    )


def _judge_real_change(evidence: _Evidence, first: int, sizes: str, norms: _NormChange) -> Verdict:
    """Return the kind of a change beyond rounding whose first real difference is at `first`."""
    change = _describe_change(evidence, first)
    if change.correlation is not None:
        sizes += f"; losses of batches correlate by {change.correlation:.2f}"
    if evidence.floor is None and not evidence.fp32 and not _exceeds_bf16(evidence, change):
        return evidence.conclude(
            UNKNOWN,
            f"{sizes}: rounding in bf16 or a small change? Give --floor runs, or --fp32 if it is so",
        )
    if change.other_batches:
        if _doubts_batches(evidence, change):
            reason = f"{sizes}: other data or not? Compare {DATA_STEPS} steps"
            return evidence.conclude(UNKNOWN, reason, first)
        return evidence.conclude(DATA, sizes, first)
    if first == 0:
        return _judge_change_of_first_step(evidence, change, sizes, norms=norms)
    return _judge_later_change(evidence, change, sizes, norms=norms)


def _exceeds_bf16(evidence: _Evidence, change: _Change) -> bool:
    if evidence.relative[change.first] > BF16 or change.other_batches:
        return True
    return bool(change.lean > 1 and evidence.relative.max() > SYSTEMATIC)


def _doubts_batches(evidence: _Evidence, change: _Change) -> bool:
    """Whether the steps are too few to tell other batches from another change."""
    if len(evidence.relative) - change.first >= DATA_STEPS:
        return False
    if change.first == 0 or change.small:
        return True
    return change.correlation is not None and change.correlation > OTHER_BATCHES / 2


def _judge_change_of_first_step(
    evidence: _Evidence, change: _Change, sizes: str, norms: _NormChange
) -> Verdict:
    first_step = evidence.common.steps[0]
    if first_step > 1:
        return evidence.conclude(
            UNKNOWN,
            f"{sizes}: beyond rounding; a model or an update? Log from step 1 on, not {first_step}",
        )
    if _looks_like_other_weights(evidence, change, norms):
        return evidence.conclude(WEIGHTS, f"{sizes}; with both signs, not growing")
    return evidence.conclude(MODEL, sizes)


def _looks_like_other_weights(evidence: _Evidence, change: _Change, norms: _NormChange) -> bool:
    """Whether differences are of the size that other initial weights make, and do not grow."""
    relative = evidence.relative
    if change.correlation is None or len(relative) < EVEN_FEWEST_STEPS:
        return False
    early = relative[:BEGIN_STEPS].max()
    even = early >= EVEN * np.median(relative[BEGIN_STEPS:EVEN_UNTIL])
    fits = WEIGHTS_SMALLEST <= early <= WEIGHTS_LARGEST
    return bool(even and fits and change.lean < 1 and norms.start < WEIGHTS_NORM)


def _judge_later_change(
    evidence: _Evidence, change: _Change, sizes: str, norms: _NormChange
) -> Verdict:
    first = change.first
    steps = evidence.common.steps
    changed_at_once = evidence.first_change == 0
    if changed_at_once:
        floor = evidence.floor
        beyond_floor = floor is not None and abs(evidence.change[0]) > floor.size[0]
        if beyond_floor or (norms.moved and norms.place == 0):
            return evidence.conclude(
                UNKNOWN,
                f"{sizes}: step {steps[0]} is not equal: a small change of the model, or an update",
            )
    if change.correlation is None and not change.small:
        return evidence.conclude(
            UNKNOWN,
            f"{sizes}: another update or data? Compare {CORRELATION_STEPS + 2} steps from step "
            f"{steps[first]} on",
            first,
        )
    equality = "within the floor" if changed_at_once else "equal"
    reason = f"step {steps[0]} is {equality}; {sizes}"
    if norms.moved and norms.place < first:
        reason += f"; {norms.text}"
    return evidence.conclude(UPDATE, reason, first)


def _correlate(x: np.ndarray, y: np.ndarray) -> float | None:
    """Return how losses of batches correlate, without the trend (second differences); None for
    fewer than 6 steps.
    """
    one = np.diff(x, 2)
    two = np.diff(y, 2)
    if len(one) < CORRELATION_STEPS or not one.std() or not two.std():
        return None
    return float(np.corrcoef(one, two)[0, 1])


def _lean(d: np.ndarray) -> float:
    """Return how far differences [n] lean to one side: above 1, chance does not explain it (1 in
    1,000 at 32 steps).
    """
    share = max(np.mean(d > 0), np.mean(d < 0))
    return float(share / (0.5 + LEAN_OF_CHANCE / len(d) ** 0.5))


def _compare_norms(
    common: _Common, floors: Sequence[Curve], limit: np.ndarray | float, low: np.ndarray
) -> _NormChange:
    """Return the change of gradient norms; without a floor, `limit` is what rounding may change,
    relative.
    """
    old = common.old
    new = common.new
    if old.norm is None or new.norm is None or old.norm_unit is None or new.norm_unit is None:
        return _NormChange()
    old_norm = old.norm[common.at_old]
    new_norm = new.norm[common.at_new]
    old_unit = old.norm_unit[common.at_old]
    new_unit = new.norm_unit[common.at_new]
    unit = np.maximum(old_unit, new_unit)
    size = np.abs(_differences(old_norm, new_norm, unit_x=old_unit, unit_y=new_unit))
    scale = np.maximum(np.abs(old_norm), TINY)
    repeats = [(curve, curve.norm) for curve in (old, *floors) if curve.norm is not None]
    floor = _measure_floor(common.steps, curves=repeats, unit=unit, low=low * scale)
    beyond = np.flatnonzero(size > (limit * scale + unit if floor is None else floor.real)).tolist()
    place = beyond[0] if beyond else 0
    change = new_norm[place] - old_norm[place]
    return _NormChange(
        moved=len(beyond) >= min(NORM_STEPS, len(size)),
        text=(
            f"the gradient norm moves by {change:+.2g} ({size[place] / scale[place]:.1e}) "
            f"at step {common.steps[place]}"
        ),
        place=place,
        start=float(np.nan_to_num(size[0] / scale[0])),
    )
