"""Formulas of what a training computes, and the search for the settings that reproduce a recorded
value.

Formulas run in float64.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenscale.parity.comparison import MULTIPLE, Parity
from tokenscale.parity.recording import Match, Recording

Settings = dict[str, Any]

#: number of local minima on the grid that are refined, the lowest first
REFINED_MINIMA = 3
#: distance that rounding alone causes; 1 is the largest that counts as rounding
ROUNDING_DISTANCE = 1 / MULTIPLE
#: iterations of a search in an interval; each shrinks it by a third or a half
NARROWINGS = 30
#: most significant digits of a solved number
MOST_DIGITS = 9


def _linear(inputs: tuple[Tensor, dict[int, Tensor]], settings: Settings) -> Tensor | None:
    x, weights = inputs
    weight = weights[2] if settings["weight"] == "[out, in]" else weights[2].T
    if weight.shape[1] != x.shape[-1]:
        return None
    if settings["precision"] == "bfloat16":
        return (
            (x.bfloat16().double() @ weight.T.bfloat16().double() + weights.get(0, 0))
            .bfloat16()
            .double()
        )
    return x @ weight.T + weights.get(0, 0)


def _norm(inputs: tuple[Tensor, dict[int, Tensor]], settings: Settings) -> Tensor | None:
    x, weights = inputs
    if weights[1].shape[0] != x.shape[-1]:
        return None
    base = x if settings["kind of norm"] == "RMS" else x - x.mean(-1, keepdim=True)
    normed = base / (base.square().mean(-1, keepdim=True) + settings["norm epsilon"]).sqrt()
    return normed * (weights[1] + (settings["weight of the norm"] == "plus one")) + weights.get(
        0, 0
    )


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU, exact (erf)": F.gelu,
    "GELU, tanh approximation": lambda x: F.gelu(x, approximate="tanh"),
    "SiLU": F.silu,
    "none": lambda x: x,
}


def _activation(inputs: tuple[list[Tensor], torch.Size], settings: Settings) -> Tensor | None:
    """Return the activation of the last linear layer's output, or of one of the last two times the
    other.
    """
    last, shape = inputs
    function = ACTIVATIONS[settings["activation"]]
    gate = settings["gated"]
    if not last or any(value.shape != shape for value in last[: 1 if gate == "no" else 2]):
        return None
    if gate == "no":
        return function(last[0])
    if len(last) < 2:
        return None
    return function(last[1]) * last[0] if gate == "by the first" else function(last[0]) * last[1]


#: the usual scale of attention's scores
ROOT_OF_WIDTH = "1/sqrt(head width)"


def _attention(inputs: tuple[Tensor, Tensor, Tensor], settings: Settings) -> Tensor:
    """Return attention [B, T, q's width] of queries, keys and values [B, T, width]."""
    width = settings["head width"]
    length = inputs[0].shape[1]
    q, k, v = (value.unflatten(-1, (-1, width)).transpose(1, 2) for value in inputs)
    if settings["rope base"] is not None:
        q = _rotate(q, settings)
        k = _rotate(k, settings)
    queries_a_head = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(queries_a_head, dim=1)
    v = v.repeat_interleave(queries_a_head, dim=1)
    scale = settings["scale of the scores"]
    scale = width**-0.5 if scale == ROOT_OF_WIDTH else scale
    scores = q @ k.transpose(-1, -2) * scale
    seen = _find_seen(settings["mask"], length)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def _logits(a: Tensor, settings: Settings) -> Tensor:
    """Return A's logits times a factor, and then softly capped: cap · tanh(logits / cap)."""
    cap = settings["soft cap"]
    scaled = a * settings["factor"]
    if cap is None:
        return scaled
    return cap * (scaled / cap).tanh()


def _find_seen(mask: str, length: int) -> Tensor:
    """Return which keys each query sees [T, T]."""
    positions = torch.arange(length)
    # the query's position less the key's
    back = positions[:, None] - positions[None, :]
    if mask == "none":
        return torch.ones_like(back, dtype=torch.bool)
    seen = back >= (-1 if mask == "causal, one position early" else 0)
    if "window" in mask:
        window = int(mask.rsplit(" ", 1)[1])
        seen &= back < window
    return seen


def _rotate(x: Tensor, settings: Settings) -> Tensor:
    """Rotate the pairs of x [B, heads, T, width] by positions (rotary embedding, Su et al.
    2021).
    """
    length = x.shape[2]
    width = x.shape[-1]
    exponents = -torch.arange(0, width, 2, dtype=torch.float64) / width
    frequencies = settings["rope base"] ** exponents
    positions = torch.arange(length, dtype=torch.float64)
    angles = torch.outer(positions, frequencies)
    halves = settings["rope pairs"] == "halves"
    pairs = (2, -1) if halves else (-1, 2)
    axis = -2 if halves else -1
    one, two = x.unflatten(-1, pairs).unbind(axis)
    turned_one = one * angles.cos() - two * angles.sin()
    turned_two = two * angles.cos() + one * angles.sin()
    return torch.stack((turned_one, turned_two), dim=axis).flatten(-2)


#: value of a setting: the number that the group of parameters in the optimizer declares
AS_DECLARED = "as declared"


def _read_declared(group: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of Adam that a group of parameters declares, by default those of torch."""
    beta1, beta2 = group.get("betas", (0.9, 0.999))
    return {
        "beta1": beta1,
        "beta2": beta2,
        "size of epsilon": group.get("eps", 1e-8),
        "learning rate": group["lr"],
        "weight decay": group.get("weight_decay", 0.0),
    }


def _update(inputs: tuple[Recording, Match, str, int], settings: Settings) -> Tensor | None:
    """Return the update of Adam or AdamW (Kingma & Ba 2015, Loshchilov & Hutter 2019) from the
    recorded gradients.
    """
    recording, match, side, step = inputs
    group = recording.group(getattr(match, side)[0], step)
    steps = range(step + 1)
    gradients = [match.values(recording, side, number, "gradient_clipped") for number in steps]
    weights = [match.values(recording, side, number, "before") for number in steps]
    pairs = [
        (gradient, weight)
        for gradient, weight in zip(gradients, weights, strict=True)
        if gradient is not None and weight is not None
    ]
    if "lr" not in group or len(pairs) < len(steps):
        return None
    declared = _read_declared(group)
    changed = {name: settings[name] for name in declared if settings[name] != AS_DECLARED}
    beta1, beta2, epsilon, rate, decay = (declared | changed).values()
    rounded = settings["constants"] == "rounded to fp32"
    one, two = torch.tensor([beta1, beta2], dtype=torch.float32 if rounded else torch.float64)
    coupled = not group.get("decoupled_weight_decay", True)
    first = second = torch.zeros(())
    for gradient, weight in pairs:
        gradient = gradient + decay * weight if coupled else gradient
        first = beta1 * first + float(1 - one) * gradient
        second = beta2 * second + float(1 - two) * gradient.square()
    if settings["bias correction"] == "on":
        first = first / float(1 - one ** (step + 1))
    second = second / float(1 - two ** (step + 1))
    inside = settings["epsilon"] == "inside the root"
    root = (second + epsilon).sqrt() if inside else second.sqrt() + epsilon
    update = -rate * first / root
    if decay and not coupled:
        shrink = decay if settings["decay times learning rate"] == "no" else rate * decay
        _, latest = pairs[-1]
        update = update - shrink * latest
    return update


@dataclass(frozen=True)
class Span:
    """The numbers that are searched for a setting, evenly in the logarithm of the number, or of
    what it lacks to 1 (`below_one`): first in `intervals`, so many that each has one minimum.
    """

    least: float
    most: float
    intervals: int = 32
    below_one: bool = False

    def place(self, share: float) -> float:
        """Return the number at a share of the way, 0 to 1."""
        found = self.least * (self.most / self.least) ** share
        return 1 - found if self.below_one else found


@dataclass(frozen=True)
class Formula:
    """A formula and the values that are tried of each of its settings, the usual one first.

    A's value is searched among all combinations of the first `combined` settings, then with one of
    the others changed, then with one of the `numbers` solved for; B's among the same single changes
    of A's settings.
    """

    compute: Callable[[Any, Settings], Tensor | None]
    combined: int
    settings: dict[str, tuple[Any, ...]]
    numbers: dict[str, Span] = field(default_factory=dict)


@dataclass(frozen=True)
class Explanation:
    """Settings that reproduce a value. `near` is the distance over what rounding allows; where a
    number was solved for, all in `between` do.
    """

    settings: Settings
    near: float
    between: tuple[float, float] | None = None


#: planted differences or their programs need each value (`tests/parity_cases.py`,
#: `tests/arm_cases.py`); llm.c needs "rounded to fp32"
FORMULAS = {
    "linear": Formula(
        compute=_linear,
        combined=1,
        settings={"weight": ("[out, in]", "[in, out]"), "precision": ("fp32", "bfloat16")},
    ),
    "norm": Formula(
        compute=_norm,
        combined=3,
        settings={
            "norm epsilon": (1e-5,),
            "kind of norm": ("RMS", "layer"),
            "weight of the norm": ("applied", "plus one"),
        },
        numbers={"norm epsilon": Span(1e-14, 1.0)},
    ),
    "activation": Formula(
        compute=_activation,
        combined=2,
        settings={
            "gated": ("no", "by the first", "by the second"),
            "activation": tuple(ACTIVATIONS),
        },
    ),
    "attention": Formula(
        compute=_attention,
        combined=3,
        settings={
            "head width": (),  # the divisors of the width
            "rope base": (None, 10_000.0),
            "rope pairs": ("halves", "neighbours"),
            # and the window that B may have
            "mask": ("causal", "causal, one position early", "none"),
            "scale of the scores": (ROOT_OF_WIDTH,),
        },
        numbers={
            "rope base": Span(10.0, 1e9, intervals=200),
            "scale of the scores": Span(1e-3, 1e2),
        },
    ),
    "logits": Formula(
        compute=_logits,
        combined=0,
        settings={"factor": (1.0,), "soft cap": (None,)},
        numbers={"factor": Span(1e-3, 1e3), "soft cap": Span(0.1, 1e4)},
    ),
    "update": Formula(
        compute=_update,
        combined=0,
        settings={
            "constants": ("exact", "rounded to fp32"),
            "bias correction": ("on", "of the second moment only"),
            "decay times learning rate": ("yes", "no"),
            "epsilon": ("outside the root", "inside the root"),
            "beta1": (AS_DECLARED,),
            "beta2": (AS_DECLARED,),
            "size of epsilon": (AS_DECLARED,),
            "learning rate": (AS_DECLARED,),
            "weight decay": (AS_DECLARED,),
        },
        numbers={
            "beta1": Span(1e-5, 1.0, below_one=True),
            "beta2": Span(1e-6, 1.0, below_one=True),
            "size of epsilon": Span(1e-16, 1.0),
            "learning rate": Span(1e-9, 10.0),
            "weight decay": Span(1e-6, 10.0),
        },
    ),
}


def search_settings(
    parity: Parity, formula: Formula, distance: Callable[[str, Settings], float], **known: Any
) -> tuple[Explanation, Explanation] | None:
    """Return (settings that reproduce the value of run A, settings that reproduce that of run B);
    None where a value is not reproduced.

    `distance(side, settings)` is relative to what rounding allows. `known` has values of settings,
    with _ for spaces.
    """
    values = formula.settings | {
        name.replace("_", " "): tuple(found) for name, found in known.items()
    }
    names = list(values)

    def measure(side: str, settings: Settings) -> float:
        parity.tried += 1
        found = distance(side, settings)
        return found if math.isfinite(found) else math.inf

    def first(side: str, candidates: Iterable[Settings]) -> Explanation | None:
        for settings in candidates:
            if (found := measure(side, settings)) <= 1:
                return Explanation(settings, found)
        return None

    def solve(side: str, starts: Iterable[Settings]) -> Explanation | None:
        for name, span in formula.numbers.items():
            usual = values[name][0]
            # starts that differ only in this number lead to the same search
            distinct = dict.fromkeys(tuple((start | {name: usual}).items()) for start in starts)
            for start in map(dict, distinct):
                if found := _solve_number(partial(measure, side), start, name, span):
                    return found
        return None

    def vary(start: Settings, changed: list[str]) -> Iterator[Settings]:
        return (
            start | {name: value}
            for name in changed
            for value in values[name]
            if value != start[name]
        )

    combined = names[: formula.combined]
    others = names[formula.combined :]
    usual = {name: values[name][0] for name in others}
    starts = [
        dict(zip(combined, found, strict=True)) | usual
        for found in itertools.product(*(values[name] for name in combined))
    ]
    changed = (settings for start in starts for settings in vary(start, others))
    a = first("a", itertools.chain(starts, changed)) or solve("a", starts)
    if a is None:
        return None
    start = a.settings
    b = first("b", itertools.chain([start], vary(start, names))) or solve("b", [start])
    return (a, b) if b else None


def _solve_number(
    distance: Callable[[Settings], float], start: Settings, name: str, span: Span
) -> Explanation | None:
    """Return `start` with the number that brings the distance to 1 or less, as few digits of it as
    that takes; None where no number does.
    """

    def at(share: float) -> float:
        return distance(start | {name: span.place(share)})

    step = 1 / span.intervals
    grid = [at(number * step) for number in range(span.intervals + 1)]
    around = [math.inf, *grid, math.inf]
    minima = [
        number
        for number, found in enumerate(grid)
        if math.isfinite(found) and found <= min(around[number], around[number + 2])
    ]
    for number in sorted(minima, key=grid.__getitem__)[:REFINED_MINIMA]:
        share = _find_fit(at, least=(number - 1) * step, most=(number + 1) * step)
        if share is None:
            continue
        ends = (_find_end(at, inside=share, step=sign * step) for sign in (-1, 1))
        least, most = sorted(span.place(end) for end in ends)
        value = _round_number(
            lambda value: distance(start | {name: value}),
            value=span.place(share),
            most=max(ROUNDING_DISTANCE, at(share)),
        )
        settings = start | {name: value}
        return Explanation(settings, distance(settings), between=(least, most))
    return None


def _find_fit(function: Callable[[float], float], least: float, most: float) -> float | None:
    """Return where a function with one minimum is `ROUNDING_DISTANCE` or less, else 1 or less; None where it is
    neither (golden section, Kiefer 1953). It is defined from 0 to 1.
    """
    ratio = (math.sqrt(5) - 1) / 2
    least = max(least, 0.0)
    most = min(most, 1.0)
    one = most - ratio * (most - least)
    two = least + ratio * (most - least)
    at_one = function(one)
    at_two = function(two)
    for _ in range(NARROWINGS):
        if min(at_one, at_two) <= ROUNDING_DISTANCE:
            break
        if at_one < at_two:
            most, two, at_two = two, one, at_one
            one = most - ratio * (most - least)
            at_one = function(one)
        else:
            least, one, at_one = one, two, at_two
            two = least + ratio * (most - least)
            at_two = function(two)
    best, found = min((at_one, one), (at_two, two))
    return found if best <= 1 else None


def _find_end(function: Callable[[float], float], inside: float, step: float) -> float:
    """Return how far from `inside` a function stays at 1 or less, in the direction of `step`."""
    outside = inside
    while function(outside) <= 1:
        if outside in (0.0, 1.0):
            return outside
        inside = outside
        outside = min(max(outside + step, 0.0), 1.0)
        step *= 2
    for _ in range(NARROWINGS):
        middle = (inside + outside) / 2
        if function(middle) <= 1:
            inside = middle
        else:
            outside = middle
    return inside


def _round_number(function: Callable[[float], float], value: float, most: float) -> float:
    """Return a number with as few significant digits as keep a function at `most`, or as it is."""
    for digits in range(1, MOST_DIGITS + 1):
        rounded = float(f"{value:.{digits}g}")
        if function(rounded) <= most:
            return rounded
    return value
