"""Comparison of two recorded trainings, quantity by quantity, with a measured rounding floor.

Quantities are compared in the order in which a training step computes them: parameters, tokens,
modules of the forward pass, loss, gradients, clipped gradients, settings of the optimizer, updates.
The cause lies where the first differs.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenscale.parity.recording import (
    SCALARS,
    Alignment,
    Anchor,
    Match,
    Recording,
    align,
    check_comparable,
    difference,
    find_anchors,
    select_rows,
    take_rows,
)

CERTIFICATE_VERSION = 1
EQUAL = "equal"
ROUNDING = "equal to rounding"
DIFFERENT = "different"
#: A difference is rounding up to this multiple of the measured floor. Runs at the floor are
#: independent draws of its size, and other orders of a sum have errors several times those of the
#: last place alone.
MULTIPLE = 10.0
#: What a recorded number in fp32 resolves: the smallest floor of a scalar, for two runs can agree
#: by chance.
RESOLUTION = 2.0**-24
#: settings of torch's optimizers that change the update; the others choose an implementation
SETTINGS = [
    "weight_decay",
    "decoupled_weight_decay",
    "betas",
    "eps",
    "momentum",
    "dampening",
    "nesterov",
    "amsgrad",
    "maximize",
]


@dataclass
class Comparison:
    """One quantity of both trainings. `difference` is relative to A; `floor` is the measured
    one.
    """

    stage: str
    step: int | None
    name: str
    difference: float
    floor: float
    a: Any = None
    b: Any = None
    match: Match | None = None
    anchor: Anchor | None = None

    @property
    def verdict(self) -> str:
        """Return the verdict of this quantity."""
        if self.difference == 0:
            return EQUAL
        return ROUNDING if self.difference <= MULTIPLE * self.floor else DIFFERENT


@dataclass
class Parity:
    """Two recordings, aligned, and their comparisons in the order of computation."""

    a: Recording
    b: Recording
    alignment: Alignment
    anchors: list[Anchor]
    comparisons: list[Comparison] = field(default_factory=list)
    #: hypotheses that were compared with recorded values in search of the cause
    tried: int = 0

    @property
    def first(self) -> Comparison | None:
        return next(
            (comparison for comparison in self.comparisons if comparison.verdict == DIFFERENT), None
        )

    def rows(self, tensor: Tensor | None, side: str) -> Tensor | None:
        """Return the rows of a traced tensor whose tokens both first micro-batches hold."""
        rows_a, rows_b, count_a, count_b = select_rows(self.a, b=self.b)
        return (
            take_rows(tensor, rows=rows_a, count=count_a)
            if side == "a"
            else take_rows(tensor, rows=rows_b, count=count_b)
        )


def compare(a: Recording, b: Recording, names: dict[str, str] | None = None) -> Parity:
    """Compare two recordings. Raises RecordingError where they cannot be compared."""
    check_comparable(a, b)
    alignment = align(a, b, names=names or {})
    parity = Parity(
        a=a,
        b=b,
        alignment=alignment,
        anchors=find_anchors(a, b, alignment=alignment),
    )
    parity.comparisons = list(_compare_all(parity))
    return parity


def _compare_all(parity: Parity) -> Iterator[Comparison]:
    alignment = parity.alignment
    for name in [*alignment.only_a, *alignment.only_b, *alignment.untied]:
        yield Comparison(
            stage="parameters",
            step=None,
            name=name,
            difference=math.inf,
            floor=0.0,
        )
    for match in alignment.unequal:
        yield Comparison(
            stage="parameters",
            step=None,
            name=", ".join(match.a),
            difference=math.inf,
            floor=0.0,
            match=match,
        )
    scalars = {name: _floor_of_scalar(parity, name) for name in SCALARS}
    floors: dict[tuple[str, str], float] = {}
    detailed = min(parity.a.facts["detailed_steps"], parity.b.facts["detailed_steps"])
    for step, (row, other) in enumerate(zip(parity.a.steps, parity.b.steps, strict=True)):

        def scalar(
            stage: str, name: str, step: int = step, row: Any = row, other: Any = other
        ) -> Comparison:
            distance = (
                abs(row[name] - other[name]) / abs(row[name])
                if row[name]
                else float(other[name] != 0)
            )
            return Comparison(
                stage=stage,
                step=step,
                name=name,
                difference=distance,
                floor=scalars[name][step],
                a=row[name],
                b=other[name],
            )

        repeated = sorted(row["rows"]) != sorted(other["rows"])
        yield Comparison(
            stage="tokens",
            step=step,
            name="sequences",
            difference=float(repeated),
            floor=0.0,
            a=len(row["rows"]),
            b=len(other["rows"]),
        )
        if step == 0:
            yield from _compare_modules(parity)
        yield scalar("loss", "loss")
        if step < detailed:
            yield from _compare_parameters(
                parity,
                step,
                kind="gradient",
                floors=floors,
            )
        yield scalar("gradient", "gradient_norm")
        if step < detailed:
            yield from _compare_parameters(
                parity,
                step,
                kind="gradient_clipped",
                floors=floors,
            )
        yield scalar("clipped gradient", "gradient_norm_clipped")
        yield from _compare_settings(parity, step)
        if step < detailed:
            yield from _compare_parameters(
                parity,
                step,
                kind="update",
                floors=floors,
            )
        yield scalar("update", "update_norm")


def _floor_of_scalar(parity: Parity, name: str) -> list[float]:
    """Return the floor of each step: the largest relative difference of any floor up to it."""
    found = []
    largest = RESOLUTION
    for step in range(len(parity.a.steps)):
        for recording in (parity.a, parity.b):
            value = recording.steps[step][name]
            for floor in recording.floors:
                largest = max(
                    largest, abs(floor.steps[step][name] - value) / abs(value) if value else 0.0
                )
        found.append(largest)
    return found


def _floor(parity: Parity, read: Callable[[Recording, str], Tensor | None]) -> float:
    """Return the largest difference between a recording and its floors of what `read` returns."""
    largest = 0.0
    for recording, side in ((parity.a, "a"), (parity.b, "b")):
        value = read(recording, side) if recording.floors else None
        for floor in recording.floors:
            largest = max(largest, difference(value, b=read(floor, side)) or 0.0)
    return largest


def _compare_modules(parity: Parity) -> Iterator[Comparison]:
    """Compare inputs and outputs of the modules that own the same weights, in A's order of
    execution.
    """
    if not select_rows(parity.a, b=parity.b)[0]:
        return
    for anchor in parity.anchors:
        if any(match.layout is None for match in anchor.matches):
            continue  # inputs or outputs are in another order, too
        for kind in ("inputs", "outputs"):
            read = partial(anchor.tensor, kind=kind)
            distance = difference(
                parity.rows(read(parity.a, "a"), "a"), b=parity.rows(read(parity.b, "b"), "b")
            )
            if distance is not None:
                floor = _floor(parity, read)
                yield Comparison(
                    stage=f"module {kind[:-1]}",
                    step=0,
                    name=anchor.name("a"),
                    difference=distance,
                    floor=floor,
                    anchor=anchor,
                )


def read_kind(match: Match, recording: Recording, side: str, step: int, kind: str) -> Tensor | None:
    """Return a gradient, or an update as the difference of recorded weights."""
    if kind != "update":
        return match.values(recording, side, step, kind)
    before, after = (match.values(recording, side, step, name) for name in ("before", "after"))
    return None if before is None or after is None else after - before


def _compare_parameters(
    parity: Parity, step: int, kind: str, floors: dict[tuple[str, str], float]
) -> Iterator[Comparison]:
    stage = kind.replace("gradient_clipped", "clipped gradient")
    for match in parity.alignment.matches:
        read = partial(read_kind, match, step=step, kind=kind)
        if (distance := difference(read(parity.a, "a"), b=read(parity.b, "b"))) is None:
            read = partial(_read_norm, match, step=step, kind=kind)
            if (distance := difference(read(parity.a, "a"), b=read(parity.b, "b"))) is None:
                continue
        here = _floor(parity, read)
        # the largest up to this step
        floors[kind, match.a[0]] = max(here, floors.get((kind, match.a[0]), 0.0))
        yield Comparison(
            stage=stage,
            step=step,
            name=", ".join(match.a),
            difference=distance,
            floor=floors[kind, match.a[0]],
            match=match,
        )


def _read_norm(
    match: Match, recording: Recording, side: str, step: int, kind: str
) -> Tensor | None:
    """Return the norm [1] of a gradient or an update: where values lie in other orders, or one side
    has no gradient.
    """
    norms = recording.steps[step].get("update_norms" if kind == "update" else "gradient_norms", {})
    found = [norms.get(name) or 0.0 for name in getattr(match, side)]
    return (
        None
        if kind == "gradient_clipped"
        else torch.tensor([math.hypot(*found)], dtype=torch.float64)
    )


def _compare_settings(parity: Parity, step: int) -> Iterator[Comparison]:
    """Compare what both optimizers state for each parameter: the learning rate in each step, other
    settings once.
    """
    for match in parity.alignment.matches:
        ours = parity.a.group(match.a[0], step)
        theirs = parity.b.group(match.b[0], step)
        for name in ("lr", *SETTINGS) if step == 0 else ("lr",):
            if name == "decoupled_weight_decay" and not (
                ours.get("weight_decay") and theirs.get("weight_decay")
            ):
                continue
            if name in ours and name in theirs:
                apart = float(not _nearly_equal(ours[name], b=theirs[name]))
                values = (ours[name], theirs[name])
                label = ", ".join(match.a)
                yield Comparison(f"setting {name}", step, label, apart, 0.0, *values, match=match)


def _nearly_equal(a: Any, b: Any) -> bool:
    """Return whether two settings are the same number, however it was computed: in fp32, too, as
    tensors are.
    """
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_nearly_equal, a, b))
    return math.isclose(a, b, rel_tol=RESOLUTION, abs_tol=0.0)
