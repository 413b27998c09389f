"""Say what kind of change separates two loss curves. docs/golden.md explains the rules and their
limits.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

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
MULTIPLE = 10.0  # differences beyond that many times the largest among floor runs are real
RESOLUTION = 2.0**-24  # relative spacing of fp32: the smallest floor of a loss or a norm
#: without floor runs, relative: fp32 rounding at step 1 (measured: 2e-7), its growth a step, more
#: than bf16's (5e-4)
FP32 = 1e-6
GROWTH = 1.1
BF16 = 1e-3
#: later differences of one sign are real from this size on; batches whose losses correlate less are
#: others (or at once)
SYSTEMATIC = 1e-2
SIMILAR = 0.75
OTHER_BATCHES = 0.5
RATES = json.loads((Path(__file__).parent / "rates.json").read_text(encoding="utf-8"))


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

    @property
    def title(self) -> str:
        return f"{self.kind} from step {self.step}" if self.kind == DATA else self.kind

    @property
    def sure(self) -> str:
        """How often this answer was right on labelled cases, with floor runs or without."""
        right, answered = RATES[
            {"given": "floor", "fp32 ": "fp32"}.get(self.floor[:5], "none")
        ].get(self.kind, (0, 0))
        return (
            f"right in {right} of {answered} labelled cases with this answer ({RATES['source']})"
            if answered
            else ""
        )


@np.errstate(invalid="ignore", over="ignore")
def judge(old: Curve, new: Curve, floors: Sequence[Curve] = (), fp32: bool = False) -> Verdict:
    """Compare common steps. `floors` differ from OLD by rounding only; `fp32`: nothing was rounded
    to fewer bits.
    """
    notes = [
        f"{name}: {note}" for name, curve in (("OLD", old), ("NEW", new)) for note in curve.notes
    ]
    if shift := _find_shift(old, new):
        notes.append(
            f"steps of NEW are counted from {new.steps[0]}, those of OLD from {old.steps[0]}: "
            "shifted"
        )
    steps, a, b = np.intersect1d(old.steps, new.steps + shift, return_indices=True)
    if len(steps) < max(len(old.steps), len(new.steps)):
        notes.append(f"{len(steps)} steps in common of {len(old.steps)} and {len(new.steps)}")
    finite = np.isfinite(old.loss[a]) | np.isfinite(new.loss[b])
    notes += [] if finite.all() else [f"losses are not finite in both at {np.sum(~finite)} steps"]
    if not finite.any():
        return Verdict(
            kind=UNKNOWN,
            reason=f"no loss in common: OLD begins at {old.steps[0]}, NEW at {new.steps[0]}",
            notes=notes,
        )
    steps = steps[finite]
    a = a[finite]
    b = b[finite]
    floors = [replace(floor, steps=floor.steps + _find_shift(old, new=floor)) for floor in floors]
    others = {
        n: v
        for n, f in enumerate(floors, 1)
        if (v := judge(old, f)).kind in (DIVERGED, WEIGHTS, DATA)
    }
    notes += [
        f"floor run {n} does not repeat OLD and is left out: {v.title}" for n, v in others.items()
    ]
    floors = [floor for n, floor in enumerate(floors, 1) if n not in others]
    verdict = _judge_losses(
        steps,
        old,
        new=new,
        a=a,
        b=b,
        floors=floors,
        fp32=fp32,
    )
    verdict.notes = notes + verdict.notes
    if old.time is not None and new.time is not None:
        verdict.speed = compare_speed(old.time, new=new.time)
        verdict.notes += [] if verdict.speed else ["too few times of steps to compare speed"]
        if verdict.speed and verdict.speed.moved and verdict.kind in (IDENTICAL, ROUNDING):
            verdict.kind, verdict.reason = SPEED, f"losses are {verdict.kind}: {verdict.reason}"
    return verdict


def _find_shift(old: Curve, new: Curve) -> int:
    """Return what to add to the steps of `new`: 1 or -1 where one curve counts from 0 and losses
    then fit, else 0.
    """
    gaps = []
    shift = int(old.steps[0] - new.steps[0])
    for by in (0, shift) if abs(shift) == 1 else ():
        _, x, y = np.intersect1d(old.steps, new.steps + by, return_indices=True)
        gap = np.nan_to_num(np.abs(old.loss[x] - new.loss[y]), nan=np.inf)
        gaps.append((len(x), np.median(gap) if len(x) else np.inf))
    return shift if gaps and gaps[1][0] >= gaps[0][0] and not gaps[1][1] > 0.5 * gaps[0][1] else 0


def _differences(
    x: np.ndarray, y: np.ndarray, unit_x: np.ndarray, unit_y: np.ndarray
) -> np.ndarray:
    """Return y - x, 0 where both are equal in the digits of the coarser print, NaN where one is not
    finite.
    """
    slack = np.where(unit_x == unit_y, 0.0, 0.5 * np.maximum(unit_x, unit_y) * (1 + 1e-6))
    d = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, y - x)
    return np.where(np.abs(d) <= slack, 0.0, np.where(np.isfinite(d), d, np.nan))


def _measure_floor(
    steps, curves: list[tuple[Curve, np.ndarray]], unit, low: np.ndarray
) -> tuple[Any, Any]:
    """Return the largest difference among runs so far [n] and the smallest that is real [n]; None
    if within `low`.
    """
    tables = [dict(zip(curve.steps, values, strict=True)) for curve, values in curves]
    runs = np.array([[table.get(step, math.nan) for step in steps] for table in tables])
    largest = np.nan_to_num(np.abs(runs[:, None] - runs[None]), nan=0.0, posinf=0.0).max((0, 1))
    ahead = np.array(
        [np.append(largest, [0.0] * 2)[shift : shift + len(steps)] for shift in range(3)]
    ).max(0)
    floor = (
        np.maximum.accumulate(ahead) + RESOLUTION * np.abs(np.nan_to_num(runs[0])) + unit / MULTIPLE
    )
    # rounding may reach its level at any step, and one run shows less of it
    real = np.maximum(
        MULTIPLE * floor, floor[-1] * (MULTIPLE if len(np.unique(runs, axis=0)) < 3 else 1.0)
    )
    return (floor, real) if (largest > low).any() else (None, None)


def _judge_losses(  # noqa: C901
    steps, old: Curve, new: Curve, a, b, floors: Sequence[Curve], fp32: bool
) -> Verdict:
    x = old.loss[a]
    y = new.loss[b]
    unit = np.maximum(old.unit[a], new.unit[b])
    d = _differences(
        x,
        y,
        unit_x=old.unit[a],
        unit_y=new.unit[b],
    )
    scale = np.maximum(np.abs(np.nan_to_num(x)), 1e-30)
    r = np.abs(np.nan_to_num(d)) / scale
    k = next(iter(np.flatnonzero(d).tolist()), None)
    growth = FP32 * GROWTH ** np.minimum(np.arange(len(d)), 100)
    low = growth * (not fp32)  # smaller floors are fp32's
    floor, real = _measure_floor(
        steps,
        curves=[(old, old.loss), *((f, f.loss) for f in floors)],
        unit=unit,
        low=low * scale,
    )
    moved, norm, at, start = _judge_norms(
        steps,
        old,
        new=new,
        a=a,
        b=b,
        floors=floors,
        limit=growth if fp32 else BF16,
        low=low,
    )

    def say(kind: str, reason: str, place: int | None = k) -> Verdict:
        step = None if place is None else int(steps[place])
        source = "fp32 rounding" if fp32 else "digits, first steps"
        if floor is not None and place is not None:
            source = (
                f"given: {len(floors)} run(s), which differ by {floor[place]:.1e} at step {step}"
            )
        notes = (
            ["floor runs that differ as fp32 rounds tell nothing of bf16"]
            if floors and floor is None
            else []
        )
        return Verdict(
            kind=kind,
            reason=reason,
            step=step,
            first=float(r[place or 0]),
            largest=float(r.max()),
            floor=source if k is not None else "",
            notes=notes,
        )

    for i in np.flatnonzero(np.isnan(d)).tolist():
        return say(
            DIVERGED,
            f"{'NEW' if np.isfinite(x[i]) else 'OLD'}'s loss is not finite at step {steps[i]}",
            i,
        )
    digits = (
        f" in the {max(0, round(-math.log10(unit.max())))} decimals printed" if unit.any() else ""
    )
    sizes = f"{len(d)} losses are equal{digits}"
    if k is None:
        return say(NORM, f"{sizes}; {norm}", at) if moved else say(IDENTICAL, sizes)
    if (peak := int(np.nanargmax(y))) > k and y[peak] > 1.25 * max(y[0], np.nanmax(x), 0.0):
        return say(
            DIVERGED,
            f"the loss of NEW rises from {y[0]:.4g} to {y[peak]:.4g} at step {steps[peak]}",
        )
    sizes = (
        f"step {steps[k]} differs by {d[k]:+.2g} ({r[k]:.1e} of the loss), at most {r.max():.1e}"
    )
    if floor is not None:
        beyond = np.flatnonzero(np.abs(d) > real)
        ratio = float((np.abs(d) / (floor + unit)).max())
        sizes += f"; {ratio:.3g} times the floor at most"
        if not len(beyond):
            why = (
                ("in few steps" if len(d) < 3 else "")
                or ("beyond it" if ratio > 1 else "")
                or ("with one sign" if _lean(d) > 1 else "")
            )
            near = (
                say(UNKNOWN, f"{sizes}, {why}: give more floor runs or steps")
                if why
                else say(ROUNDING, sizes)
            )
            return say(NORM, f"{sizes}; {norm}", at) if moved else near
    else:
        beyond = np.flatnonzero(np.abs(d) > growth * scale + unit)
        if (unit / scale).max() > 2e-5 and np.all(np.abs(d) <= 2.01 * unit):
            return say(UNKNOWN, f"{sizes}: too few digits are printed; print 7 digits of the loss")
        if not len(beyond):
            moved, norm, *_ = _judge_norms(
                steps,
                old,
                new=new,
                a=a,
                b=b,
                floors=floors,
                limit=growth,
                low=low,
            )
            sizes = f"{sizes}: as small as rounding in fp32"
            but = norm * moved or ("over few steps" if len(d) < 5 else "")
            return (
                say(UNKNOWN, f"{sizes}, but {but}; give --floor runs")
                if but
                else say(ROUNDING, sizes)
            )
    first = k or int(beyond[0])
    lean = _lean(d[first:])
    c = _correlate(x[first:], y=y[first:])
    # rounding grows from far below
    jump = np.median(r[first : first + 3]) / max(np.median(r[first:]), 1e-30)
    others = c is not None and (
        (c < SIMILAR and lean < 1 and jump > 0.03) or (c < OTHER_BATCHES and jump >= 0.3)
    )
    others = others and np.median(r[first:]) > BF16
    sizes += "" if c is None else f"; losses of batches correlate by {c:.2f}"
    if (
        floor is None
        and not fp32
        and not (r[first] > BF16 or others or (lean > 1 and r.max() > SYSTEMATIC))
    ):
        return say(
            UNKNOWN,
            (
                f"{sizes}: rounding in bf16 or a small change? Give --floor runs, or --fp32 if "
                "it is "
                "so"
            ),
        )
    small = len(x) > 4 and r[first] * scale[first] <= 0.3 * np.median(np.abs(np.diff(x, 2)))
    few = (
        others
        and c is not None
        and len(r) - first < 16
        and (first == 0 or c > OTHER_BATCHES / 2 or small)
    )
    if others:
        return (
            say(UNKNOWN, f"{sizes}: other data or not? Compare 16 steps", first)
            if few
            else say(DATA, sizes, first)
        )
    if first == 0 and steps[0] > 1:
        return say(
            UNKNOWN,
            f"{sizes}: beyond rounding; a model or an update? Log from step 1 on, not {steps[0]}",
        )
    if first == 0:
        even = len(r) > 5 and r[:3].max() >= 0.2 * np.median(r[3:11])
        weights = (
            c is not None and even and 2e-3 <= r[:3].max() <= 0.05 and lean < 1 and start < 0.14
        )
        return (
            say(WEIGHTS, f"{sizes}; with both signs, not growing") if weights else say(MODEL, sizes)
        )
    if k == 0 and ((floor is not None and abs(d[0]) > floor[0]) or (moved and at == 0)):
        return say(
            UNKNOWN,
            f"{sizes}: step {steps[0]} is not equal: a small change of the model, or an update",
        )
    if c is None and not small:
        return say(
            UNKNOWN,
            f"{sizes}: another update or data? Compare 6 steps from step {steps[first]} on",
            first,
        )
    reason = f"step {steps[0]} is {'within the floor' if k == 0 else 'equal'}; {sizes}"
    return say(UPDATE, reason + (f"; {norm}" if moved and at < first else ""), first)


def _correlate(x: np.ndarray, y: np.ndarray) -> float | None:
    """Return how losses of batches correlate, without the trend (second differences); None for
    fewer than 6 steps.
    """
    one = np.diff(x, 2)
    two = np.diff(y, 2)
    return float(np.corrcoef(one, two)[0, 1]) if len(one) >= 4 and one.std() and two.std() else None


def _lean(d: np.ndarray) -> float:
    """Return how far differences [n] lean to one side: above 1, chance does not explain it (1 in
    1,000 at 32 steps).
    """
    return float(max(np.mean(d > 0), np.mean(d < 0)) / (0.5 + 1.7 / len(d) ** 0.5))


def _judge_norms(
    steps, old: Curve, new: Curve, a, b, floors, limit, low
) -> tuple[bool, str, int, float]:
    """Return whether gradient norms moved beyond rounding, a sentence, the place, and the change at
    the first step.
    """
    if old.norm is None or new.norm is None or old.norm_unit is None or new.norm_unit is None:
        return False, "", 0, 0.0
    x = old.norm[a]
    y = new.norm[b]
    unit = np.maximum(old.norm_unit[a], new.norm_unit[b])
    d = np.abs(
        _differences(
            x,
            y,
            unit_x=old.norm_unit[a],
            unit_y=new.norm_unit[b],
        )
    )
    scale = np.maximum(np.abs(x), 1e-30)
    floor, real = _measure_floor(
        steps,
        curves=[(c, c.norm) for c in (old, *floors) if c.norm is not None],
        unit=unit,
        low=low * scale,
    )
    beyond = np.flatnonzero(d > (limit * scale + unit if floor is None else real)).tolist()
    at = next(iter(beyond), 0)
    start = float(np.nan_to_num(d[0] / scale[0]))
    text = (
        f"the gradient norm moves by {y[at] - x[at]:+.2g} ({d[at] / scale[at]:.1e}) at step "
        f"{steps[at]}"
    )
    return len(beyond) >= min(2, len(d)), text, at, start
