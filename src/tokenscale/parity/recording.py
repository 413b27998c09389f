"""Recordings of `recorder.ParityRecorder`: whether two can be compared, and the parameters and
modules of two models aligned.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenscale.parity.recorder import FLOOR_VARIABLE, sample

RECORD_AGAIN = "record it again: run the training script to its end"
#: numbers of each step that are compared
SCALARS = ("loss", "gradient_norm", "gradient_norm_clipped", "update_norm")


class RecordingError(Exception):
    """Recordings that cannot be compared: one sentence, and facts as of a `UserError`."""

    def __init__(self, what: str, **facts: object):
        super().__init__(what)
        self.what = what
        self.facts = facts


@dataclass
class Recording:
    """One recorded training. `floors` are its repetitions with random rounding."""

    folder: Path
    facts: dict[str, Any]
    steps: list[dict[str, Any]]
    trace: dict[str, Tensor]
    details: dict[str, Tensor]
    floors: "list[Recording]" = field(default_factory=list)

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        return {parameter["name"]: parameter for parameter in self.facts["parameters"]}

    def detail(self, step: int | str, kind: str, name: str) -> Tensor | None:
        """Return values of a parameter, its gradient or its weight before or after an update; flat,
        in float64.
        """
        found = self.details.get(
            f"{step}.{kind}.{name}" if step != "initial" else f"initial.{name}"
        )
        return None if found is None else found.double()

    def group(self, name: str, step: int) -> dict[str, Any]:
        """Return the settings of a parameter's group at a step; none where no optimizer updates
        it.
        """
        groups = self.steps[step]["groups"]
        return next((group for group in groups if name in group["parameters"]), {})


def check_comparable(a: Recording, b: Recording) -> None:
    """Raise RecordingError for other numbers of steps, other batches, no floor, or a floor of another
    training.
    """
    for recording, floor in ((found, floor) for found in (a, b) for floor in found.floors):
        stated = [
            [(sorted(row["rows"]), row["groups"]) for row in found.steps]
            for found in (recording, floor)
        ]
        if stated[0] != stated[1] or list(recording.parameters) != list(floor.parameters):
            raise RecordingError(
                "a floor is of another training than its recording.",
                floor=floor.folder,
                expected="the same parameters, batches and settings of the optimizer in each step",
                next=f"run the script of this recording again with and without {FLOOR_VARIABLE}",
            )
    if (steps := a.facts["steps"]) != b.facts["steps"]:
        raise RecordingError(
            "the recordings have other numbers of steps.",
            a=steps,
            b=b.facts["steps"],
            next=RECORD_AGAIN,
        )
    if not a.floors and not b.floors:
        next = f"run A's training script twice more, with {FLOOR_VARIABLE}=1 and {FLOOR_VARIABLE}=2"
        raise RecordingError(
            "the rounding floor was not measured.", expected=f"{a.folder / 'floor-1'}", next=next
        )
    every = [set(step["rows"]) for step in a.steps]
    for step, rows, other in zip(a.steps, every, b.steps, strict=True):
        others = set(other["rows"])
        if not (rows <= others or others <= rows):
            earlier = f"; B has A's batch of step {every.index(others)}" if others in every else ""
            raise RecordingError(
                "the recordings have other batches.",
                step=step["step"],
                found=f"{len(rows & others)} of {len(rows)} sequences of A are in B{earlier}",
                expected="the same sequences of tokens in each step, in any order",
                next="give both loops the same batches",
            )


# --- parameters
# -----------------------------------------------------------------------------------------------------


@dataclass
class Match:
    """The same weights in both models: one parameter of each, or several that the other model has
    fused.
    """

    a: list[str]
    b: list[str]
    #: (A's is transposed, B's are transposed) to make rows equal; None where values are in another
    #: order
    layout: tuple[bool, bool] | None = None

    def values(self, recording: Recording, side: str, step: int | str, kind: str) -> Tensor | None:
        """Return the values of `Recording.detail` in the common layout, or None where they were not
        recorded.
        """
        names = getattr(self, side)
        found = [recording.detail(step, kind, name) for name in names]
        values = [value for value in found if value is not None]
        if self.layout is None or len(values) < len(found):
            return None
        shapes = [recording.parameters[name]["shape"] for name in names]
        turned = self.layout[side == "b"]
        if any(
            value.numel() != math.prod(shape) for value, shape in zip(values, shapes, strict=True)
        ):
            return None if turned or len(self.a) + len(self.b) > 2 else values[0]
        parts = [value.view(shape) for value, shape in zip(values, shapes, strict=True)]
        return torch.cat([part.T if turned else part for part in parts]).flatten()


@dataclass
class Alignment:
    """Parameters of two models. `untied` are parameters of one model that the other has tied to
    others.
    """

    matches: list[Match]
    only_a: list[str]
    only_b: list[str]
    untied: dict[str, str]
    #: matches by name whose initial values differ
    unequal: list[Match]


def order_of_execution(recording: Recording) -> list[str]:
    """Return the parameters' names in the order in which the modules that own them first ran."""
    first: dict[str, int] = {}
    for entry in recording.facts["trace"]:
        for name in entry["parameters"]:
            first.setdefault(name, entry["number"])
    last = 0
    # of a module that is not called itself: behind what is registered before it
    for name in recording.parameters:
        last = first.setdefault(name, last)
    return sorted(recording.parameters, key=first.__getitem__)


def align(a: Recording, b: Recording, names: dict[str, str]) -> Alignment:  # noqa: C901
    """Align parameters by their initial values in any layout; constant parameters by the modules
    that run before.

    `names` (A's → B's) goes first. Raises RecordingError where most weights differ.
    """
    of_a = a.parameters
    of_b = b.parameters
    left_a = order_of_execution(a)
    left_b = order_of_execution(b)
    orders = list(left_a), list(left_b)
    matches = []

    def match(found_a: list[str], found_b: list[str]) -> None:
        matches.append(Match(found_a, found_b))
        for name in found_a:
            left_a.remove(name)
        for name in found_b:
            left_b.remove(name)

    for name, other in names.items():
        if name not in left_a or other not in left_b:
            wrong = name if name not in left_a else other
            raise RecordingError(
                "a name in --names is no parameter, or is there twice.",
                name=wrong,
                next="correct the file",
            )
        match([name], [other])
    varied_b = [name for name in left_b if of_b[name]["constant"] is None]
    varied_a = [name for name in left_a if of_a[name]["constant"] is None]
    for name in list(varied_a):
        equal = (o for o in varied_b if o in left_b and same_values([of_a[name]], b=[of_b[o]]))
        if (same := next(equal, None)) is not None:
            match([name], [same])
    for fused, left_fused, parts, left_parts, turned in (
        (of_a, left_a, of_b, left_b, False),
        (of_b, left_b, of_a, left_a, True),
    ):
        for name in [name for name in left_fused if fused[name]["constant"] is None]:
            varied = [part for part in left_parts if parts[part]["constant"] is None]
            windows = [varied[i : i + n] for n in (2, 3, 4) for i in range(len(varied) - n + 1)]
            if found := next(
                (w for w in windows if same_values([fused[name]], b=[parts[p] for p in w])), None
            ):
                match(*((found, [name]) if turned else ([name], found)))
    if len(matches) < 0.5 * min(len(varied_a), len(varied_b)):
        raise RecordingError(
            "the recordings have other initial weights.",
            found=f"{len(matches)} of {len(varied_a)} varied parameters of A have equal values in B",
            next=(
                "load the same weights into both models, or name what belongs together: --names "
                "FILE"
            ),
        )
    untied = {}
    for left, described, others, side in ((left_a, of_a, of_b, "b"), (left_b, of_b, of_a, "a")):
        for name in [name for name in left if described[name]["constant"] is None]:
            for known in matches:
                partner = getattr(known, side)[0]
                if others[partner]["tied"] and same_values([described[name]], b=[others[partner]]):
                    untied[name] = partner
    if set(of_a) == set(of_b):  # versions of one program, of which one may not call a module
        for name in [
            name for name in left_a if name in left_b and of_a[name]["constant"] is not None
        ]:
            if (
                of_a[name]["shape"] == of_b[name]["shape"]
                and of_a[name]["constant"] == of_b[name]["constant"]
            ):
                match([name], [name])
    for constant in _match_constants(
        a,
        b,
        orders=orders,
        left=(left_a, left_b),
        matches=list(matches),
    ):
        match(constant.a, constant.b)
    for aligned in matches:
        aligned.layout = _find_layout(a, b, match=aligned)
    reordered = {
        name.rpartition(".")[0] for found in matches if found.layout is None for name in found.a
    }
    # equal values do not show their order: a bias is in that of its module's weight
    for aligned in matches:
        if aligned.a[0].rpartition(".")[0] in reordered:
            aligned.layout = None
    matches.sort(key=lambda found: orders[0].index(found.a[0]))
    unequal = [
        m for m in matches if not same_values([of_a[n] for n in m.a], b=[of_b[n] for n in m.b])
    ]
    only = [[name for name in left if name not in untied] for left in (left_a, left_b)]
    return Alignment(
        matches=matches,
        only_a=only[0],
        only_b=only[1],
        untied=untied,
        unequal=unequal,
    )


def _match_constants(
    a: Recording,
    b: Recording,
    orders: tuple[list[str], list[str]],
    left: tuple[list[str], list[str]],
    matches: Any,
) -> list[Match]:
    """Match parameters whose values are all equal: biases by their module's weight, norms by what
    runs before them.
    """
    sides: list[tuple[list[list[str]], dict[Any, list[str]]]] = []
    for recording, order, names, side in zip((a, b), orders, left, "ab", strict=True):
        described = recording.parameters
        constants = [
            name for name in order if name in names and described[name]["constant"] is not None
        ]
        beside: list[list[str]] = [[] for _ in matches]
        modules: dict[str, list[str]] = {}
        for name in order:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        for owned in (names for names in modules.values() if len(names) == 2):
            for number, found in enumerate(matches):
                if set(owned) & set(getattr(found, side)):
                    beside[number] += [name for name in owned if name in constants]
        context = -1
        groups = {}  # type: ignore[var-annotated]
        taken = {name for names in beside for name in names}
        for name in order:
            context = next(
                (i for i, found in enumerate(matches) if name in getattr(found, side)), context
            )
            if name in constants and name not in taken:
                groups.setdefault((context, described[name]["constant"]), []).append(name)
        sides.append((beside, groups))
    (beside_a, groups_a), (beside_b, groups_b) = sides
    pairs = list(zip(beside_a, beside_b, strict=True))
    pairs += [(groups_a[key], groups_b[key]) for key in groups_a if key in groups_b]
    found = []
    for ours, theirs in pairs:
        shapes_a, shapes_b = (
            [r.parameters[n]["shape"] for n in names] for r, names in ((a, ours), (b, theirs))
        )
        size_a, size_b = (
            sum(math.prod(shape) for shape in shapes) for shapes in (shapes_a, shapes_b)
        )
        if shapes_a != shapes_b and size_a == size_b and 1 in (len(ours), len(theirs)):
            found.append(Match(ours, b=theirs))
            continue
        free = list(theirs)
        for name, shape in zip(ours, shapes_a, strict=True):
            if other := next((o for o in free if b.parameters[o]["shape"] == shape), None):
                free.remove(other)
                found.append(Match([name], b=[other]))
    return found


def same_values(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    """Return whether parameters have the same values, in any order: size, sum and sum of
    squares.
    """
    size_a, size_b = (sum(math.prod(p["shape"]) for p in side) for side in (a, b))
    squares_a, squares_b = (sum(p["squares"] for p in side) for side in (a, b))
    sum_a, sum_b = (sum(p["sum"] for p in side) for side in (a, b))
    shapes = len(a) + len(b) > 2 or sorted(a[0]["shape"]) == sorted(b[0]["shape"])
    close = (
        abs(squares_a - squares_b) <= 1e-9 * squares_a
        and abs(sum_a - sum_b) <= 1e-9 * (size_a * squares_a) ** 0.5
    )
    return size_a == size_b and shapes and close


def _find_layout(a: Recording, b: Recording, match: Match) -> tuple[bool, bool] | None:
    plain = all(
        len(r.parameters[n]["shape"]) == 2
        for r, names in ((a, match.a), (b, match.b))
        for n in names
    )
    for layout in (
        [(False, False), (False, True), (True, False), (True, True)] if plain else [(False, False)]
    ):
        match.layout = layout
        try:
            values = [
                match.values(recording, side, "initial", "")
                for recording, side in ((a, "a"), (b, "b"))
            ]
        except RuntimeError:  # widths that cannot be concatenated this way
            continue
        ours, theirs = values
        if ours is None or theirs is None or ours.shape != theirs.shape:
            continue
        if torch.allclose(ours, theirs, rtol=1e-6, atol=0):
            return layout
    return None


# --- modules
# --------------------------------------------------------------------------------------------------------


@dataclass
class Anchor:
    """One use of the modules that own the same weights in both models: one, or several where
    weights are fused.
    """

    matches: list[Match]
    a: list[dict[str, Any]]
    b: list[dict[str, Any]]

    def tensor(self, recording: Recording, side: str, kind: str) -> Tensor | None:
        """Return the input, or the outputs side by side, in the trace of a recording. float64; ids
        as int64.
        """
        entries = getattr(self, side)
        found = []
        for entry in entries[: 1 if kind == "inputs" else None]:
            if not entry.get(kind):
                return None
            kept = entry[kind][0]
            value = recording.trace[kept["key"]]
            if value.numel() != math.prod(kept["shape"]):
                return value.double() if len(entries) == 1 else None  # a sample
            found.append(value.reshape(kept["shape"]))
        joined = found[0] if len(found) == 1 else torch.cat(found, dim=-1)
        return joined.double() if joined.is_floating_point() else joined.long()

    def name(self, side: str) -> str:
        return ", ".join(entry["module"] for entry in getattr(self, side))


def find_anchors(a: Recording, b: Recording, alignment: Alignment) -> list[Anchor]:
    """Return the modules that own the same weights, in A's order of execution."""
    uses: list[dict[Any, list[dict[str, Any]]]] = []
    for recording, side in ((a, "a"), (b, "b")):
        found: dict[Any, list[dict[str, Any]]] = {}
        counts: dict[Any, int] = {}
        order = [name for m in alignment.matches for name in getattr(m, side)] + list(
            alignment.untied
        )
        for entry in recording.facts["trace"]:
            owned = [
                i
                for i, m in enumerate(alignment.matches)
                if set(entry["parameters"]) & set(getattr(m, side))
            ]
            if entry["parameters"] and all(
                name in alignment.untied for name in entry["parameters"]
            ):
                partner = alignment.untied[entry["parameters"][0]]
                owned = [i for i, m in enumerate(alignment.matches) if partner in (*m.a, *m.b)]
            if owned and entry["inputs"]:
                first = recording.trace[entry["inputs"][0]["key"]]
                key = (tuple(owned), first.is_floating_point())
                use = counts[key, entry["module"]] = counts.get((key, entry["module"]), 0) + 1
                found.setdefault((*key, use), []).append(entry)
        for entries in found.values():  # as the weights are concatenated
            entries.sort(
                key=lambda entry: min(
                    order.index(name) for name in entry["parameters"] if name in order
                )
            )
        uses.append(found)
    shared = [key for key in uses[0] if key in uses[1]]
    return [
        Anchor(matches=[alignment.matches[i] for i in key[0]], a=uses[0][key], b=uses[1][key])
        for key in shared
    ]


def select_rows(a: Recording, b: Recording) -> tuple[list[int], list[int], int, int]:
    """Return which rows of A's and of B's first micro-batch hold the same tokens, and both numbers
    of rows.
    """
    counts = []
    for recording in (a, b):
        root = next((entry for entry in recording.facts["trace"] if entry["inputs"]), None)
        counts.append(root["inputs"][0]["shape"][0] if root else 0)
    rows_a, rows_b = (r.steps[0]["rows"][:count] for r, count in zip((a, b), counts, strict=True))
    pairs = [(i, rows_b.index(row)) for i, row in enumerate(rows_a) if row in rows_b]
    return [i for i, _ in pairs], [j for _, j in pairs], counts[0], counts[1]


def take_rows(tensor: Tensor | None, rows: Iterable[int], count: int) -> Tensor | None:
    """Return some rows of a tensor [rows, …] or [rows * positions, …]; others as they are."""
    rows = list(rows)
    if (
        tensor is None
        or rows == list(range(count))
        or not tensor.dim()
        or count == 0
        or tensor.shape[0] % count
    ):
        return tensor
    return tensor.reshape(count, -1, *tensor.shape[1:])[rows].reshape(-1, *tensor.shape[1:])


def difference(a: Tensor | None, b: Tensor | None) -> float | None:
    """Return ‖a − b‖ / ‖a‖; None where they cannot be compared."""
    if a is None or b is None:
        return None
    if a.numel() != b.numel():
        a = sample(a)
        b = sample(b)
        if a.numel() != b.numel():
            return None
    if not a.is_floating_point() or not b.is_floating_point():
        return float(not torch.equal(a.reshape(-1), b.reshape(-1)))
    a = a.reshape(-1).double()
    b = b.reshape(-1).double()
    distance = float((a - b).norm())
    size = float(a.norm())
    return 0.0 if distance == 0 else distance / size if size else math.inf
