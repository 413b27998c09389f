"""Recordings of `recorder.ParityRecorder`: whether two can be compared, and the parameters and
modules of two models aligned.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenscale.parity.recorder import FLOOR_VARIABLE, sample

RECORD_AGAIN = "record it again: run the training script to its end"
#: numbers of each step that are compared
SCALARS = ("loss", "gradient_norm", "gradient_norm_clipped", "update_norm")
#: sums of the same values in another order differ by less, relative
SAME_SUMS = 1e-9
#: numbers of parameters that another model may have fused: key and value, or query, key and value ...
FUSED_COUNTS = (2, 3, 4)
#: recordings with a smaller share of equal parameters began from other weights
LEAST_MATCHED = 0.5
#: parameters of a module whose constant one goes with the other
WEIGHT_AND_BIAS = 2


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
        next_step = (
            f"run A's training script twice more, with {FLOOR_VARIABLE}=1 and {FLOOR_VARIABLE}=2"
        )
        raise RecordingError(
            "the rounding floor was not measured.",
            expected=f"{a.folder / 'floor-1'}",
            next=next_step,
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

    def names(self, side: str) -> list[str]:
        """Return the names in recording "a" or "b"."""
        return self.a if side == "a" else self.b

    def values(self, recording: Recording, side: str, step: int | str, kind: str) -> Tensor | None:
        """Return the values of `Recording.detail` in the common layout, or None where they were not
        recorded.
        """
        names = self.names(side)
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


class _Aligner:
    """The matches of parameters so far, and the names that are left, in order of execution."""

    def __init__(self, a: Recording, b: Recording):
        self.recordings = {"a": a, "b": b}
        self.described = {"a": a.parameters, "b": b.parameters}
        self.orders = {"a": order_of_execution(a), "b": order_of_execution(b)}
        self.left = {side: list(order) for side, order in self.orders.items()}
        self.matches: list[Match] = []

    def match(self, names_a: list[str], names_b: list[str]) -> None:
        self.matches.append(Match(names_a, b=names_b))
        for name in names_a:
            self.left["a"].remove(name)
        for name in names_b:
            self.left["b"].remove(name)

    def is_varied(self, side: str, name: str) -> bool:
        return self.described[side][name]["constant"] is None

    def varied(self, side: str) -> list[str]:
        """Return the names left whose values are not all equal."""
        return [name for name in self.left[side] if self.is_varied(side, name)]

    def same_values(self, names_a: list[str], names_b: list[str]) -> bool:
        return same_values(
            [self.described["a"][name] for name in names_a],
            b=[self.described["b"][name] for name in names_b],
        )

    def match_named(self, names: dict[str, str]) -> None:
        """Match what the user named. Raises RecordingError for an unknown name."""
        for name, other in names.items():
            if name not in self.left["a"] or other not in self.left["b"]:
                raise RecordingError(
                    "a name in --names is no parameter, or is there twice.",
                    name=name if name not in self.left["a"] else other,
                    next="correct the file",
                )
            self.match([name], [other])

    def match_equal(self) -> None:
        """Match parameters of the same initial values."""
        for name in self.varied("a"):
            for other in self.varied("b"):
                if self.same_values([name], [other]):
                    self.match([name], [other])
                    break

    def match_fused(self) -> None:
        """Match a parameter with neighbours of the other model whose values it joins."""
        for name in self.varied("a"):
            if parts := self._find_parts(name, side="a", side_of_parts="b"):
                self.match([name], parts)
        for name in self.varied("b"):
            if parts := self._find_parts(name, side="b", side_of_parts="a"):
                self.match(parts, [name])

    def _find_parts(self, name: str, side: str, side_of_parts: str) -> list[str] | None:
        fused = self.described[side][name]
        parts = self.described[side_of_parts]
        varied = self.varied(side_of_parts)
        for count in FUSED_COUNTS:
            for start in range(len(varied) - count + 1):
                window = varied[start : start + count]
                if same_values([fused], b=[parts[part] for part in window]):
                    return window
        return None

    def find_untied(self) -> dict[str, str]:
        """Return names left of one model, with the parameter that the other has tied."""
        untied = {}
        for side, other_side in (("a", "b"), ("b", "a")):
            others = self.described[other_side]
            for name in self.varied(side):
                described = self.described[side][name]
                for known in self.matches:
                    partner = known.names(other_side)[0]
                    if others[partner]["tied"] and same_values([described], b=[others[partner]]):
                        untied[name] = partner
        return untied

    def match_constants_by_name(self) -> None:
        """Match constants of two versions of one program, of which one may not call a module."""
        of_a = self.described["a"]
        of_b = self.described["b"]
        if set(of_a) != set(of_b):
            return
        for name in [name for name in self.left["a"] if name in self.left["b"]]:
            same_shape = of_a[name]["shape"] == of_b[name]["shape"]
            same_value = of_a[name]["constant"] == of_b[name]["constant"]
            if not self.is_varied("a", name) and same_shape and same_value:
                self.match([name], [name])

    def match_constants(self) -> None:
        """Match parameters whose values are all equal: biases by their module's weight, norms by
        what runs before them.
        """
        constants_a = self._place_constants("a")
        constants_b = self._place_constants("b")
        pairs = list(zip(constants_a.beside, constants_b.beside, strict=True))
        for key, names in constants_a.behind.items():
            if key in constants_b.behind:
                pairs.append((names, constants_b.behind[key]))
        for names_a, names_b in pairs:
            for found in self._pair_by_shape(names_a, names_b):
                self.match(found.a, found.b)

    def _place_constants(self, side: str) -> "_Constants":
        constants = {name for name in self.left[side] if not self.is_varied(side, name)}
        modules: dict[str, list[str]] = {}
        for name in self.orders[side]:
            modules.setdefault(_module_of(name), []).append(name)
        pairs = [owned for owned in modules.values() if len(owned) == WEIGHT_AND_BIAS]
        beside = []
        for match in self.matches:
            weights = set(match.names(side))
            owned = [name for pair in pairs if weights & set(pair) for name in pair]
            beside.append([name for name in owned if name in constants])
        taken = {name for names in beside for name in names}
        return _Constants(
            beside=beside,
            behind=self._group_by_match_before(side, names=constants - taken),
        )

    def _group_by_match_before(
        self, side: str, names: set[str]
    ) -> dict[tuple[int, float], list[str]]:
        """Group names by the number of the match that runs before them, and their constant."""
        number_of = {
            name: number
            for number, found in reversed([*enumerate(self.matches)])
            for name in found.names(side)
        }
        before = -1
        groups: dict[tuple[int, float], list[str]] = {}
        for name in self.orders[side]:
            before = number_of.get(name, before)
            if name in names:
                constant = self.described[side][name]["constant"]
                groups.setdefault((before, constant), []).append(name)
        return groups

    def _pair_by_shape(self, names_a: list[str], names_b: list[str]) -> list[Match]:
        """Pair names in their order: all where one model has fused them, else those of one
        shape.
        """
        shapes_a = [self.described["a"][name]["shape"] for name in names_a]
        shapes_b = [self.described["b"][name]["shape"] for name in names_b]
        same_size = sum(map(math.prod, shapes_a)) == sum(map(math.prod, shapes_b))
        if shapes_a != shapes_b and same_size and 1 in (len(names_a), len(names_b)):
            return [Match(names_a, b=names_b)]
        free = list(names_b)
        found = []
        for name, shape in zip(names_a, shapes_a, strict=True):
            fitting = [other for other in free if self.described["b"][other]["shape"] == shape]
            if fitting:
                free.remove(fitting[0])
                found.append(Match([name], b=[fitting[0]]))
        return found

    def find_layouts(self) -> None:
        for match in self.matches:
            match.layout = _find_layout(self.recordings["a"], b=self.recordings["b"], match=match)
        reordered = {
            _module_of(name) for match in self.matches if match.layout is None for name in match.a
        }
        # equal values do not show their order: a bias is in that of its module's weight
        for match in self.matches:
            if _module_of(match.a[0]) in reordered:
                match.layout = None


def align(a: Recording, b: Recording, names: dict[str, str]) -> Alignment:
    """Align parameters by their initial values in any layout; constant parameters by the modules
    that run before.

    `names` (A's → B's) goes first. Raises RecordingError where most weights differ.
    """
    aligner = _Aligner(a, b)
    aligner.match_named(names)
    varied = len(aligner.varied("a"))
    fewer = min(varied, len(aligner.varied("b")))
    aligner.match_equal()
    aligner.match_fused()
    matches = aligner.matches
    if len(matches) < LEAST_MATCHED * fewer:
        raise RecordingError(
            "the recordings have other initial weights.",
            found=f"{len(matches)} of {varied} varied parameters of A have equal values in B",
            next=(
                "load the same weights into both models, or name what belongs together: --names "
                "FILE"
            ),
        )
    untied = aligner.find_untied()
    aligner.match_constants_by_name()
    aligner.match_constants()
    aligner.find_layouts()
    matches.sort(key=lambda match: aligner.orders["a"].index(match.a[0]))
    return Alignment(
        matches=matches,
        only_a=[name for name in aligner.left["a"] if name not in untied],
        only_b=[name for name in aligner.left["b"] if name not in untied],
        untied=untied,
        unequal=[match for match in matches if not aligner.same_values(match.a, match.b)],
    )


@dataclass
class _Constants:
    """Parameters of one model whose values are all equal.

    `beside` has, for each match, those of the same module; `behind` the others, by the number of
    the match that runs before and their value.
    """

    beside: list[list[str]]
    behind: dict[tuple[int, float], list[str]]


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def same_values(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    """Return whether parameters have the same values, in any order: size, sum and sum of
    squares.
    """
    one_each = len(a) + len(b) == 2
    if one_each and sorted(a[0]["shape"]) != sorted(b[0]["shape"]):
        return False
    size = sum(math.prod(parameter["shape"]) for parameter in a)
    if size != sum(math.prod(parameter["shape"]) for parameter in b):
        return False
    squares = sum(parameter["squares"] for parameter in a)
    gap_of_squares = abs(squares - sum(parameter["squares"] for parameter in b))
    gap_of_sums = abs(
        sum(parameter["sum"] for parameter in a) - sum(parameter["sum"] for parameter in b)
    )
    return (
        gap_of_squares <= SAME_SUMS * squares and gap_of_sums <= SAME_SUMS * (size * squares) ** 0.5
    )


def _find_layout(a: Recording, b: Recording, match: Match) -> tuple[bool, bool] | None:
    shapes = [a.parameters[name]["shape"] for name in match.a]
    shapes += [b.parameters[name]["shape"] for name in match.b]
    layouts = [(False, False)]
    if all(len(shape) == 2 for shape in shapes):
        layouts += [(False, True), (True, False), (True, True)]
    for layout in layouts:
        match.layout = layout
        try:
            ours = match.values(a, "a", "initial", kind="")
            theirs = match.values(b, "b", "initial", kind="")
        except RuntimeError:  # widths that cannot be concatenated this way
            continue
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
    uses_a = _list_uses(a, side="a", alignment=alignment)
    uses_b = _list_uses(b, side="b", alignment=alignment)
    return [
        Anchor(
            matches=[alignment.matches[number] for number in use.matches],
            a=entries,
            b=uses_b[use],
        )
        for use, entries in uses_a.items()
        if use in uses_b
    ]


class _Use(NamedTuple):
    """What calls of modules in both models share: numbers of matches, the kind of their input, and
    the how-manieth such call of the module.
    """

    matches: tuple[int, ...]
    floating_point: bool
    call: int


def _list_uses(
    recording: Recording, side: str, alignment: Alignment
) -> dict[_Use, list[dict[str, Any]]]:
    """Return the calls of modules that own matched weights, in the order in which weights are
    concatenated.
    """
    found: dict[_Use, list[dict[str, Any]]] = {}
    calls: dict[Any, int] = {}
    for entry in recording.facts["trace"]:
        owned = _find_owned(entry["parameters"], side, alignment=alignment)
        if not owned or not entry["inputs"]:
            continue
        first_input = recording.trace[entry["inputs"][0]["key"]]
        floating_point = first_input.is_floating_point()
        same = (owned, floating_point, entry["module"])
        calls[same] = calls.get(same, 0) + 1
        found.setdefault(_Use(owned, floating_point, calls[same]), []).append(entry)
    order = [name for match in alignment.matches for name in match.names(side)]
    order += alignment.untied

    def first_place(entry: dict[str, Any]) -> int:
        return min(order.index(name) for name in entry["parameters"] if name in order)

    for entries in found.values():
        entries.sort(key=first_place)
    return found


def _find_owned(parameters: list[str], side: str, alignment: Alignment) -> tuple[int, ...]:
    """Return the numbers of the matches of a module's parameters."""
    if parameters and all(name in alignment.untied for name in parameters):
        partner = alignment.untied[parameters[0]]
        owned = [partner in (*match.a, *match.b) for match in alignment.matches]
    else:
        owned = [not set(parameters).isdisjoint(match.names(side)) for match in alignment.matches]
    return tuple(number for number, owns in enumerate(owned) if owns)


def select_rows(a: Recording, b: Recording) -> tuple[list[int], list[int], int, int]:
    """Return which rows of A's and of B's first micro-batch hold the same tokens, and both numbers
    of rows.
    """
    count_a = _count_rows(a)
    count_b = _count_rows(b)
    rows_a = a.steps[0]["rows"][:count_a]
    rows_b = b.steps[0]["rows"][:count_b]
    taken_a = [place for place, row in enumerate(rows_a) if row in rows_b]
    taken_b = [rows_b.index(rows_a[place]) for place in taken_a]
    return taken_a, taken_b, count_a, count_b


def _count_rows(recording: Recording) -> int:
    """Return the number of rows of the first micro-batch."""
    for entry in recording.facts["trace"]:
        if entry["inputs"]:
            return entry["inputs"][0]["shape"][0]
    return 0


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
    if distance == 0:
        return 0.0
    size = float(a.norm())
    return distance / size if size else math.inf
