"""Cause of a difference, by testing hypotheses: compute a recorded value again from its recorded
inputs.

A formula (`formulas.py`) with certain settings must reproduce A's value to the measured floor, and
B's with one setting changed: that setting is the cause. `Parity.tried` counts comparisons.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenscale.parity.comparison import (
    DIFFERENT,
    MULTIPLE,
    RESOLUTION,
    Comparison,
    Parity,
    read_kind,
)
from tokenscale.parity.formulas import (
    FORMULAS,
    Explanation,
    Formula,
    Settings,
    search_settings,
)
from tokenscale.parity.recording import Anchor, Match, Recording, difference

Cause = dict[str, Any]

#: weights of a z-loss that are believed; PaLM's is 1e-4 (Chowdhery et al. 2022)
Z_LOSS = (1e-7, 1e-1)
#: gradients that rounding changes by more, relative, explain nothing
USABLE_FLOOR = 1e-2
#: all choices are tried among at most that many micro-batches
MOST_MICRO_BATCHES = 8
#: terms of a sum with a smaller weight are not searched for dropout
LEAST_WEIGHT = 1e-3
#: a value at least that share of its term was kept by dropout
KEPT = 0.5


def _test_hypothesis(
    parity: Parity, found: Tensor | None, predicted: Tensor | None, allowed: float
) -> bool:
    """Return whether one hypothesis reproduces a value."""
    parity.tried += 1
    distance = difference(found, b=predicted)
    return distance is not None and distance <= allowed


# --- causes
# ---------------------------------------------------------------------------------------------------------


def find_cause(parity: Parity, first: Comparison) -> Cause | None:
    """Return {setting, a, b, text, evidence} for the first difference; None where no hypothesis
    explains it.
    """
    if first.stage == "tokens":
        fewer = "B" if first.b < first.a else "A"
        text = (
            f"{fewer} drops sequences of the batch (a micro-batch?): {first.a} in A, {first.b} in B"
        )
        return _make_cause(
            "sequences per step",
            a=first.a,
            b=first.b,
            text=text,
        )
    return EXPLAIN[first.stage.split()[0]](parity, first)


def _make_cause(
    setting: str,
    a: object,
    b: object,
    text: str | None = None,
    *,
    where: str = "",
    evidence: Iterable[str] = (),
) -> Cause:
    text = (
        text
        or f"{setting}{where and f' of {where}'}: {_format_value(a)} in A, {_format_value(b)} in B"
    )
    return {"setting": setting, "a": a, "b": b, "text": text, "evidence": list(evidence)}


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "absent" if value is None else str(value)


def _list_few(names: list[str]) -> str:
    if len(names) > 3:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return ", ".join(names) or "none"


def _name_cause(where: str, found: tuple[Explanation, Explanation]) -> Cause | None:
    """Return the setting in which two explanations differ as the cause; None where they are the
    same.
    """
    a, b = found
    names = [name for name in a.settings if a.settings[name] != b.settings[name]]
    if not names:
        return None
    name = names[0]
    return _make_cause(
        name,
        a=a.settings[name],
        b=b.settings[name],
        where=where,
        evidence=[_describe_fit("A", a, name), _describe_fit("B", b, name)],
    )


def _describe_fit(side: str, explanation: Explanation, name: str) -> str:
    value = _format_value(explanation.settings[name])
    if explanation.between:
        least, most = explanation.between
        value += f" (by all from {least:.6g} to {most:.6g})"
    return (
        f"{side}'s value is reproduced with {value}: {explanation.near:.2g} times what rounding "
        "allows"
    )


def _explain_parameters(parity: Parity, first: Comparison) -> Cause:
    alignment = parity.alignment
    for name, partner in alignment.untied.items():
        own, tied = ("A", "B") if name in parity.a.parameters else ("B", "A")
        text = (
            f"weight tying: {name} is a parameter of its own in {own}, and tied to {partner} in "
            f"{tied}"
        )
        return _make_cause(
            "weight tying",
            a=tied == "A",
            b=tied == "B",
            text=text,
        )
    if alignment.unequal:
        names = _list_few([name for match in alignment.unequal for name in match.a])
        return _make_cause(
            "initial weights",
            a=None,
            b=None,
            text=f"initial weights: {names} have other values in B",
        )
    a = alignment.only_a
    b = alignment.only_b
    setting = "bias" if all("bias" in name for name in a + b) else "parameters"
    text = (
        f"{setting}: "
        f"{' and '.join(f'{_list_few(only)} only in {side}' for only, side in ((a, 'A'), (b, 'B')) if only)}"
    )
    return _make_cause(
        setting,
        a=_list_few(a),
        b=_list_few(b),
        text=text,
    )


# --- modules
# --------------------------------------------------------------------------------------------------------


def _explain_module(parity: Parity, first: Comparison) -> Cause:
    differing = first.anchor
    assert differing is not None  # as in every comparison of modules
    before = list(itertools.takewhile(lambda anchor: anchor is not differing, parity.anchors))
    where = differing.name("a")
    allowed = MULTIPLE * max(first.floor, RESOLUTION)
    if first.stage == "module output":
        cause = _explain_output(
            parity,
            anchor=differing,
            where=where,
            allowed=allowed,
        )
    else:
        parts = [anchor.a[0]["module"].split(".") for anchor in (*before[-1:], differing)]
        common = [words[0] for words in zip(*parts, strict=False) if len(set(words)) == 1]
        where = f"{'.'.join(common) or 'the model'} (input of {where})"
        cause = _explain_input(
            parity,
            anchor=differing,
            before=before,
            where=where,
            allowed=allowed,
        )
    if cause:
        return cause
    text = f"module {where}: no setting that was tried explains the difference"
    ran = {name for entry in parity.b.facts["trace"] for name in entry["parameters"]}
    if idle := [name for name in parity.b.parameters if name not in ran]:
        text += f"; B does not call the modules of {_list_few(idle)}"
    return _make_cause(
        "unexplained",
        a=None,
        b=None,
        text=text,
    )


def _read_sides(parity: Parity, anchor: Anchor, kind: str) -> dict[str, Any]:
    return {side: anchor.tensor(getattr(parity, side), side, kind) for side in "ab"}


def _explain_value(
    parity: Parity,
    formula: Formula,
    where: str,
    inputs: dict[str, Any],
    values: dict[str, Any],
    allowed: float,
    **known: Any,
) -> Cause | None:
    """Explain values of modules by a formula; the cause is empty where the same settings reproduce
    both.
    """

    def distance(side: str, settings: Settings) -> float:
        found = difference(values[side], b=formula.compute(inputs[side], settings))
        return math.inf if found is None else found / allowed

    found = search_settings(parity, formula, distance=distance, **known)
    if found is None:
        return None
    return _name_cause(where, found) or {}


def _explain_output(parity: Parity, anchor: Anchor, where: str, allowed: float) -> Cause | None:
    """Explain an output that differs where the input agrees: of norms and linear layers."""
    x = _read_sides(parity, anchor, kind="inputs")
    y = _read_sides(parity, anchor, kind="outputs")
    inputs = {}
    if (
        any(x[side] is None or y[side] is None for side in "ab")
        or len(anchor.a) + len(anchor.b) > 2
    ):
        return None
    for side in "ab":
        recording: Recording = getattr(parity, side)
        weights = {}  # by number of dimensions: 1 of norms, 2 matrices; 0 is the bias
        for name in getattr(anchor, side)[0]["parameters"]:
            shape = recording.parameters[name]["shape"]
            value = recording.detail("initial", kind="", name=name)
            if value is not None and value.numel() == math.prod(shape):  # else a sample
                weights[0 if name.endswith("bias") else len(shape)] = value.view(shape)
        inputs[side] = x[side], weights
    known = set(inputs["a"][1]) & set(inputs["b"][1]) & {1, 2}
    if not known or not x["a"].is_floating_point():
        return None
    formula = FORMULAS["linear" if 2 in known else "norm"]
    cause = _explain_value(
        parity,
        formula,
        where=where,
        inputs=inputs,
        values=y,
        allowed=allowed,
    )
    if cause != {}:
        return cause
    text = (
        f"layout of the weights of {where}: the same values are transposed or in another order in B"
    )
    return _make_cause(
        "layout of the weights",
        a=None,
        b=None,
        text=text,
    )


def _explain_input(
    parity: Parity, anchor: Anchor, before: list[Anchor], where: str, allowed: float
) -> Cause | None:
    """Explain an input that differs where all modules before it agree: what is computed between
    modules.
    """
    x = _read_sides(parity, anchor, kind="inputs")
    if x["a"] is None or x["b"] is None:
        return None
    if not x["a"].is_floating_point():
        ours, theirs = (parity.rows(x[side], side) for side in "ab")
        assert ours is not None and theirs is not None
        shift = (theirs - ours).unique().tolist() if ours.shape == theirs.shape else []
        how = f"B's are A's {shift[0]:+d}" if len(shift) == 1 else "they are others"
        return _make_cause(
            "positions or ids",
            a=None,
            b=None,
            text=f"positions or ids that {anchor.name('a')} looks up: {how}",
        )
    last = {side: _linear_outputs(parity, anchors=before, side=side) for side in "ab"}
    inputs = {side: (last[side], x[side].shape) for side in "ab"}
    return (
        _explain_value(
            parity,
            formula=FORMULAS["activation"],
            where=where,
            inputs=inputs,
            values=x,
            allowed=allowed,
        )
        or _explain_attention(
            parity,
            last,
            x=x,
            where=where,
            allowed=allowed,
        )
        or _explain_sum(
            parity,
            before,
            x=x,
            where=where,
            allowed=allowed,
        )
    )


def _linear_outputs(parity: Parity, anchors: list[Anchor], side: str) -> list[Tensor]:
    """Return the outputs of the last linear layers, latest first, up to the norm before them."""
    found = []
    for anchor in reversed(anchors):
        value = _read_sides(parity, anchor, kind="outputs")[side]
        if value is None or _is_norm(parity, anchor, side=side):
            break
        found.append(value)
    return found


def _is_norm(parity: Parity, anchor: Anchor, side: str) -> bool:
    described = getattr(parity, side).parameters
    owned = getattr(anchor, side)[0]["parameters"]
    return max(len(described[name]["shape"]) for name in owned) < 2


def _explain_attention(
    parity: Parity, last: dict[str, list[Tensor]], x: dict[str, Tensor], where: str, allowed: float
) -> Cause | None:
    """Explain the input of attention's output layer by queries, keys and values, in one output or
    in three.
    """
    width = x["a"].shape[-1]
    a = _split_projections(last["a"], width)
    b = _split_projections(last["b"], width)
    if a is None or b is None or any(value.dim() != 3 for value in (*x.values(), *a, *b)):
        return None
    width_of_keys = a[1].shape[-1]
    if width % width_of_keys:
        return None
    formula = FORMULAS["attention"]
    mask = (*formula.settings["mask"], *_list_windows(parity, x, allowed=allowed))
    return _explain_value(
        parity,
        formula,
        where=where,
        inputs={"a": a, "b": b},
        values=x,
        allowed=allowed,
        head_width=_list_head_widths(parity, width_of_keys),
        mask=mask,
    )


def _split_projections(last: list[Tensor], width: int) -> tuple[Tensor, ...] | None:
    """Return queries, keys and values: parts of the last output, or the last three outputs."""
    if not last:
        return None
    rest = last[0].shape[-1] - width
    if rest > 0 and rest % 2 == 0:
        return last[0].split([width, rest // 2, rest // 2], dim=-1)
    if len(last) < 3 or last[2].shape[-1] != width or last[0].shape != last[1].shape:
        return None
    return last[2], last[1], last[0]


def _list_head_widths(parity: Parity, width_of_keys: int) -> list[int]:
    """Return the even divisors of the width, those that attributes of A's modules state first."""
    stated = set()
    for entry in parity.a.facts["trace"]:
        for name in ("head_dim", "head_dimension"):
            value = entry["attributes"].get(name)
            if isinstance(value, int):
                stated.add(value)
    widths = [n for n in range(2, width_of_keys + 1, 2) if width_of_keys % n == 0]
    return sorted(widths, key=lambda width: width not in stated)


def _list_windows(parity: Parity, x: dict[str, Tensor], allowed: float) -> list[str]:
    """Return the mask of the window that B may have: one of n leaves the first n positions as they
    are.
    """
    ours = parity.rows(x["a"], "a")
    theirs = parity.rows(x["b"], "b")
    assert ours is not None and theirs is not None  # as in `_explain_attention`
    differs = (ours - theirs).abs() > allowed * ours.abs().mean()
    positions = differs.any(-1).any(0).nonzero()
    if not len(positions) or not int(positions[0]):
        return []
    return [f"causal, window of {int(positions[0])}"]


def _explain_sum(
    parity: Parity, before: list[Anchor], x: dict[str, Tensor], where: str, allowed: float
) -> Cause | None:
    """Explain the residual stream as a weighted sum: of the last norm's input, or embeddings, and
    outputs since.
    """
    found: list[dict[str, float]] = []
    for side in "ab":
        terms: dict[str, Tensor] = {}
        for earlier in reversed(before):
            norm = _is_norm(parity, anchor=earlier, side=side)
            kind = "inputs" if norm else "outputs"  # of a norm: the stream before
            value = _read_sides(parity, anchor=earlier, kind=kind)[side]
            target = x[side].reshape(-1)
            if value is not None and value.shape[-2:] == x[side].shape[-2:]:
                terms[f"the {kind[:-1]} of {earlier.name('a')}"] = value.expand(
                    x[side].shape
                ).reshape(-1)
            if norm:
                break
        if not terms:
            return None
        if found and (
            dropped := _find_dropout(
                parity,
                terms,
                weights=found[0],
                value=target,
                allowed=allowed,
            )
        ):
            text = (
                f"dropout of {dropped[0]} in the sum at {where}: {dropped[1]:.3g} of the values "
                "in B are zero"
            )
            return _make_cause(
                "dropout",
                a=0.0,
                b=dropped[1],
                text=text,
            )
        columns = torch.stack(list(terms.values()), dim=1)
        weights = torch.linalg.lstsq(columns, target[:, None]).solution
        if not _test_hypothesis(
            parity,
            found=target,
            predicted=(columns @ weights).reshape(-1),
            allowed=allowed,
        ):
            return None
        found.append(dict(zip(terms, weights.flatten().tolist(), strict=True)))
    ours, theirs = found
    worst = max(ours, key=lambda name: abs(ours[name] - theirs.get(name, 0.0)))
    values = [round(weights.get(worst, 0.0), 5) + 0.0 for weights in found]  # no -0.0
    text = f"weight of {worst} in the sum at {where}: {values[0]:.5g} in A, {values[1]:.5g} in B"
    return _make_cause(
        "residual stream",
        a=values[0],
        b=values[1],
        text=text,
    )


def _find_dropout(
    parity: Parity,
    terms: dict[str, Tensor],
    weights: dict[str, float],
    value: Tensor,
    allowed: float,
) -> tuple[str, float] | None:
    """Return the term of a sum of which values are zero and the others scaled alike, and the share
    of zeros.
    """
    terms = {
        name: terms[name] * weight
        for name, weight in weights.items()
        if abs(weight) > LEAST_WEIGHT and name in terms
    }
    total = sum(terms.values(), torch.zeros_like(value))
    for name, term in (terms | {"all terms": total}).items():
        ratio = (value - (total - term)) / term
        kept = ratio > KEPT
        scale = float(ratio[kept].median()) if bool(kept.any()) else 0.0
        if (
            scale > 1
            and not bool(kept.all())
            and _test_hypothesis(
                parity,
                found=value,
                predicted=total - term + kept * scale * term,
                allowed=allowed,
            )
        ):
            return name, 1 - float(kept.double().mean())
    return None


# --- loss, gradients, clipping
# --------------------------------------------------------------------------------------


def _explain_loss(parity: Parity, first: Comparison) -> Cause | None:
    if first.step:
        return None
    return (
        _explain_cross_entropy(parity, first)
        or _explain_z_loss(parity)
        or _explain_accumulation(parity, first)
    )


@dataclass(frozen=True)
class CrossEntropy:
    """The first call in the first micro-batch: its options, logits [positions, vocabulary] and
    labels [positions].
    """

    call: dict[str, Any]
    logits: Tensor
    labels: Tensor


def _read_cross_entropy(recording: Recording) -> CrossEntropy | None:
    """Return None where there was no call, or samples of its tensors alone are kept."""
    call = next(iter(recording.facts["cross_entropy"]), {"tensors": ()})
    tensors = [recording.trace[kept["key"]] for kept in call["tensors"]]
    if len(tensors) != 2 or tensors[0].dim() <= tensors[1].dim():
        return None
    return CrossEntropy(call, tensors[0].double().flatten(0, -2), tensors[1].flatten())


def _explain_cross_entropy(parity: Parity, first: Comparison) -> Cause | None:
    """Explain a loss by labels, options and logits of the first cross-entropy."""
    ours = _read_cross_entropy(parity.a)
    theirs = _read_cross_entropy(parity.b)
    if ours is None or theirs is None:
        return None
    calls = [ours.call, theirs.call]
    return (
        _explain_targets(parity, [ours.labels, theirs.labels], calls=calls)
        or _explain_options(calls)
        or _explain_logits(parity, ours.logits, b=theirs.logits, allowed=MULTIPLE * first.floor)
    )


def _explain_options(calls: list[dict[str, Any]]) -> Cause | None:
    for name, default in (("label_smoothing", 0.0), ("reduction", "mean")):
        ours, theirs = (call.get(name, default) for call in calls)
        if ours != theirs:
            return _make_cause(
                name,
                a=ours,
                b=theirs,
                where="the cross-entropy",
            )
    return None


def _explain_logits(parity: Parity, a: Tensor, b: Tensor, allowed: float) -> Cause | None:
    """Explain logits that change behind the output head: by a factor, or a soft cap (Gemma 2)."""
    if a.shape != b.shape or _test_hypothesis(parity, found=b, predicted=a, allowed=allowed):
        return None

    compute = FORMULAS["logits"].compute
    for side, changed, plain in (("B", b, a), ("A", a, b)):

        def distance(of: str, settings: Settings, changed=changed, plain=plain) -> float:
            found = difference(plain if of == "a" else changed, b=compute(plain, settings))
            return math.inf if found is None else found / allowed

        if found := search_settings(parity, FORMULAS["logits"], distance=distance):
            return _name_change_of_logits(side, found[1])
    return _make_cause(
        "logits",
        a=None,
        b=None,
        text="logits are changed between the output head and the loss",
    )


def _name_change_of_logits(side: str, found: Explanation) -> Cause:
    """Name what makes one side's logits of the other's, which are plain in this comparison."""
    factor = found.settings["factor"]
    cap = found.settings["soft cap"]
    name = "factor" if cap is None else "soft cap"
    value = factor if cap is None else cap
    how = f"{value:g} times the other's" if cap is None else f"softly capped at {value:g}"
    plain = 1.0 if cap is None else None
    a, b = (plain, value) if side == "B" else (value, plain)
    return _make_cause(
        f"{name} of the logits",
        a,
        b=b,
        text=f"{name} of the logits: {side}'s are {how}",
        evidence=[_describe_fit(side, found, name)],
    )


def _explain_z_loss(parity: Parity) -> Cause | None:
    """Explain the loss of B's first micro-batch as A's and a z-loss of its logits. One loss fits any
    term of its size; only usual weights are believed.
    """
    found = _read_cross_entropy(parity.a)
    if found is None or not found.call["value"]:
        return None
    parity.tried += 1
    ours = parity.a.steps[0]["losses"][0]
    theirs = parity.b.steps[0]["losses"][0]
    # what a loop multiplies a micro-batch's loss by
    share = ours / found.call["value"]
    squares = found.logits[found.labels >= 0].logsumexp(-1).square()
    weight = (theirs - ours) / (share * float(squares.mean()))
    if not Z_LOSS[0] <= weight <= Z_LOSS[1]:
        return None
    weight = float(f"{weight:.3g}")
    return _make_cause(
        "z-loss",
        a=0.0,
        b=weight,
        text=(
            f"z-loss: {weight:g} · mean(logsumexp²) is added in B, or another term of "
            f"{theirs - ours:.3g}"
        ),
    )


def _explain_accumulation(parity: Parity, first: Comparison) -> Cause | None:
    """Explain B's loss as A's times, or divided by, the number of micro-batches of either."""
    counts = {len(recording.steps[0]["losses"]) for recording in (parity.a, parity.b)}
    for count in counts - {1}:
        for factor in (float(count), 1 / count):
            parity.tried += 1
            if first.a and abs(first.b / first.a / factor - 1) <= MULTIPLE * first.floor:
                text = f"scale of the loss (gradient accumulation): B's is {factor:.5g} times A's"
                return _make_cause(
                    "gradient accumulation",
                    a=1.0,
                    b=factor,
                    text=text,
                )
    return None


def _explain_targets(parity: Parity, targets: list[Tensor], calls: list[Any]) -> Cause | None:
    """Explain labels that differ: shifted labels, or ignored labels that count."""
    if torch.equal(*targets):
        return None
    same = len(targets[0]) == len(targets[1])
    counts = [
        target != call.get("ignore_index", -100)
        for target, call in zip(targets, calls, strict=True)
    ]
    if same and torch.equal(*(target[counts[0] & counts[1]] for target in targets)):
        a, b = (int(count.sum()) for count in counts)
        return _make_cause(
            "ignored labels",
            a,
            b=b,
            text=f"ignored labels: {a} labels count in A, {b} in B",
        )
    shifts = []
    for recording, target in zip((parity.a, parity.b), targets, strict=True):
        kept = next(entry for entry in recording.facts["trace"] if entry["inputs"])["inputs"][0]
        shifts.append(
            _find_shift(recording.trace[kept["key"]].reshape(kept["shape"]), targets=target)
        )
    if shifts[0] != shifts[1]:
        shown = ["another" if shift is None else f"{shift} positions ahead" for shift in shifts]
        text = f"label shift: labels are the tokens {shown[0]} in A, {shown[1]} in B"
        return _make_cause(
            "label shift",
            a=shifts[0],
            b=shifts[1],
            text=text,
        )
    return (
        _make_cause(
            "labels",
            a=None,
            b=None,
            text="labels differ, in another way than a shift",
        )
        if same
        else None
    )


def _find_shift(tokens: Tensor, targets: Tensor) -> int | None:
    """Return by how many positions labels are ahead of the tokens; None where they are not."""
    rows = tokens.shape[0]
    length = tokens.shape[-1]
    labels = (
        targets.reshape(rows, -1) if targets.numel() % rows == 0 else targets[:0].reshape(rows, 0)
    )
    for shift in (1, 0, 2):
        count = min(length - shift, labels.shape[1])
        moved = tokens[:, shift : shift + count]
        found = labels[:, :count]
        useful = found >= 0
        if bool(useful.any()) and torch.equal(moved[useful], found[useful]):
            return shift
    return None


def _concatenate_gradients(
    parity: Parity, matches: list[Match], side: str, step: int, kind: str
) -> Tensor | None:
    """Return gradients of parameters, one after the other; None where one of them was not
    recorded.
    """
    found = [
        read_kind(
            match,
            recording=getattr(parity, side),
            side=side,
            step=step,
            kind=kind,
        )
        for match in matches
    ]
    recorded = [value for value in found if value is not None]
    return torch.cat(recorded) if len(recorded) == len(found) else None


def _explain_gradient(parity: Parity, first: Comparison) -> Cause | None:
    """Explain gradients that differ where the loss agrees: scale, micro-batches left out,
    parameters left out.
    """
    compared = [
        comparison
        for comparison in parity.comparisons
        if comparison.stage == "gradient" and comparison.step == first.step and comparison.match
    ]
    assert first.step is not None  # as of every gradient
    changed = None if first.step else _explain_cross_entropy(parity, first)
    return (
        changed
        or _explain_absent_gradients(parity, compared)
        or _explain_gradient_values(parity, compared, step=first.step)
        or _explain_backward(compared)
    )


def _join_gradients(
    parity: Parity, compared: list[Comparison], step: int
) -> dict[str, Tensor | None]:
    """Return both models' gradients of compared parameters, one after the other."""
    return {
        side: _concatenate_gradients(
            parity,
            matches=[comparison.match for comparison in compared if comparison.match],
            side=side,
            step=step,
            kind="gradient",
        )
        for side in "ab"
    }


def _explain_absent_gradients(parity: Parity, compared: list[Comparison]) -> Cause | None:
    """Explain gradients that are absent, or all zero, in one model."""
    absent: dict[str, list[str]] = {"B": [], "A": []}
    for comparison in compared:
        assert comparison.step is not None  # as of every gradient
        gradients = _join_gradients(parity, compared=[comparison], step=comparison.step)
        in_a, in_b = (value is not None and bool(value.any()) for value in gradients.values())
        if in_a != in_b:
            absent["B" if in_a else "A"].append(comparison.name)
    for side, names in absent.items():
        if names:
            text = f"parameters without a gradient in {side}: {_list_few(names)}"
            return _make_cause(
                "parameters without a gradient",
                a=None,
                b=side,
                text=text,
            )
    return None


def _explain_gradient_values(parity: Parity, compared: list[Comparison], step: int) -> Cause | None:
    """Explain the gradients of all parameters that both models have beyond rounding: one factor,
    or gradients of other steps or micro-batches.
    """
    usable = []
    for comparison in compared:
        found = _join_gradients(parity, compared=[comparison], step=step).values()
        if comparison.floor < USABLE_FLOOR and all(value is not None for value in found):
            usable.append(comparison)
    if not usable:
        return None
    allowed = MULTIPLE * max(comparison.floor for comparison in usable)
    gradients = {
        side: gradient
        for side, gradient in _join_gradients(parity, compared=usable, step=step).items()
        if gradient is not None  # each alone has both
    }
    ours = gradients["a"]
    theirs = gradients["b"]
    scale = float((ours * theirs).sum() / ours.square().sum())
    if abs(scale - 1) > allowed and _test_hypothesis(
        parity,
        found=theirs,
        predicted=scale * ours,
        allowed=allowed,
    ):
        text = f"scale of the gradient: B's is {scale:.5g} of A's for every parameter"
        return _make_cause(
            "scale of the gradient",
            a=1.0,
            b=scale,
            text=text,
        )
    matches = [comparison.match for comparison in usable if comparison.match]
    explain = _explain_uncleared if step else _explain_micro_batches
    return explain(parity, matches, gradients, step, allowed)


def _explain_backward(compared: list[Comparison]) -> Cause | None:
    """Name the last parameter in order of execution whose gradient differs."""
    wrong = [comparison for comparison in compared if comparison.verdict == DIFFERENT]
    if not wrong:
        return None
    text = (
        "backward pass: the last parameter in order of execution whose gradient differs is "
        f"{wrong[-1].name}"
    )
    return _make_cause(
        "backward pass",
        a=None,
        b=wrong[-1].name,
        text=text,
    )


def _explain_uncleared(
    parity: Parity, matches: list[Match], gradients: dict[str, Tensor], step: int, allowed: float
) -> Cause | None:
    """Explain one model's gradient as the other's plus its own of the step before."""
    for side, other in ("ab", "ba"):
        earlier = _concatenate_gradients(
            parity,
            matches,
            side=side,
            step=step - 1,
            kind="gradient_clipped",
        )
        if earlier is not None and _test_hypothesis(
            parity,
            found=gradients[side],
            predicted=gradients[other] + earlier,
            allowed=allowed,
        ):
            text = f"gradients not cleared in {side.upper()}: those of the step before are added"
            return _make_cause(
                "gradients not cleared",
                a=side == "a",
                b=side == "b",
                text=text,
            )
    return None


def _explain_micro_batches(
    parity: Parity, matches: list[Match], gradients: dict[str, Tensor], step: int, allowed: float
) -> Cause | None:
    """Explain B's gradient as A's of some micro-batches."""
    count = len(parity.a.steps[0]["losses"])
    sums = [
        _concatenate_gradients(
            parity,
            matches,
            side="a",
            step=0,
            kind=f"micro-batch-{number}",
        )
        for number in range(count)
    ]
    recorded = [value for value in sums if value is not None]
    if count > MOST_MICRO_BATCHES or len(recorded) < len(sums):
        return None
    parts = [recorded[0], *(later - earlier for earlier, later in itertools.pairwise(recorded))]
    for kept in (
        kept for n in range(1, len(parts)) for kept in itertools.combinations(range(len(parts)), n)
    ):
        total = torch.stack([parts[number] for number in kept]).sum(0)
        scale = float((total * gradients["b"]).sum() / total.square().sum())
        if _test_hypothesis(
            parity,
            found=gradients["b"],
            predicted=scale * total,
            allowed=allowed,
        ):
            numbers = ", ".join(map(str, kept))
            text = (
                f"dropped micro-batch: B's gradient is that of A's micro-batches {numbers} of 0 "
                f"to {len(parts) - 1}"
            )
            return _make_cause(
                "dropped micro-batch",
                a=len(parts),
                b=len(kept),
                text=text,
            )
    return None


def _explain_clipping(parity: Parity, first: Comparison) -> Cause:
    step = first.step
    assert step is not None  # as of every norm
    words: list[str] = []
    limits: list[float | None] = []
    for side in "ab":
        row = getattr(parity, side).steps[step]
        before = row["gradient_norm"]
        after = row["gradient_norm_clipped"]
        if not abs(after - before) > MULTIPLE * 2.0**-24 * before:
            limits.append(None)
            words.append("off")
            continue
        limits.append(after)
        value = _find_clipped_value(
            parity,
            step,
            side=side,
            allowed=MULTIPLE * first.floor,
        )
        words.append(f"by value, to {value:.4g}" if value else f"to {after:.4g}")
    evidence = [f"norm before clipping {parity.a.steps[step]['gradient_norm']:.6g} in both"]
    text = f"gradient clipping: {words[0]} in A, {words[1]} in B"
    return _make_cause(
        "gradient clipping",
        a=limits[0],
        b=limits[1],
        text=text,
        evidence=evidence,
    )


def _find_clipped_value(parity: Parity, step: int, side: str, allowed: float) -> float | None:
    """Return the largest gradient if larger ones were clipped to it and the others were left as
    they are.
    """
    matches = [
        m
        for m in parity.alignment.matches
        if _concatenate_gradients(
            parity,
            matches=[m],
            side=side,
            step=step,
            kind="gradient",
        )
        is not None
    ]
    before, after = (
        _concatenate_gradients(
            parity,
            matches,
            side=side,
            step=step,
            kind=kind,
        )
        for kind in ("gradient", "gradient_clipped")
    )
    if not matches or before is None or after is None:
        return None
    largest = float(after.abs().max())
    return (
        largest
        if _test_hypothesis(
            parity,
            found=after,
            predicted=before.clamp(-largest, largest),
            allowed=allowed,
        )
        else None
    )


# --- optimizer
# ------------------------------------------------------------------------------------------------------


def _find_roles(parity: Parity, matches: list[Match]) -> str:
    """Return what parameters are: all, embeddings, matrices, norms, biases; or their names."""

    def role(match: Match) -> str:
        if len(parity.a.parameters[match.a[0]]["shape"]) < 2:
            return "biases" if match.a[0].endswith("bias") else "norms"
        entries = [
            entry
            for entry in parity.a.facts["trace"]
            if match.a[0] in entry["parameters"] and entry["inputs"]
        ]
        looked_up = any(
            not parity.a.trace[entry["inputs"][0]["key"]].is_floating_point() for entry in entries
        )
        return "embeddings" if looked_up else "matrices"

    every = parity.alignment.matches
    roles = dict.fromkeys(role(match) for match in every)
    whole = [
        name for name in roles if all(match in matches for match in every if role(match) == name)
    ]
    if len(whole) == len(roles):
        return "all parameters"
    covered = all(role(match) in whole for match in matches)
    return " and ".join(whole) if covered else _list_few([", ".join(match.a) for match in matches])


def _explain_setting(parity: Parity, first: Comparison) -> Cause:
    """Describe a stated setting that differs, and for a learning rate how the schedules differ."""
    setting = first.stage.removeprefix("setting ")
    same = [
        c
        for c in parity.comparisons
        if c.stage == first.stage and c.step == first.step and c.difference
    ]
    matches = [c.match for c in same if c.match and (c.a, c.b) == (first.a, first.b)]
    which = _find_roles(parity, matches=matches)
    if setting != "lr":
        name = "epsilon of the optimizer" if setting == "eps" else setting.replace("_", " ")
        return _make_cause(name, a=first.a, b=first.b, where=which)
    assert first.match is not None  # a setting is that of parameters
    rates = [
        [float(recording.group(names[0], step)["lr"]) for step in range(len(recording.steps))]
        for recording, names in ((parity.a, first.match.a), (parity.b, first.match.b))
    ]
    how = _compare_schedules(*rates)
    text = (
        f"learning rate of {which}: {how}; at step {first.step} {first.a:.6g} in A, "
        f"{first.b:.6g} in B"
    )
    return _make_cause(
        "learning rate",
        a=first.a,
        b=first.b,
        text=text,
    )


def _compare_schedules(a: list[float], b: list[float]) -> str:
    """Return how two schedules differ.

    >>> _compare_schedules([1.0, 1.0, 1.0], [1.0, 0.75, 0.5])
    'they differ from step 1 on (decay of the learning rate)'
    >>> _compare_schedules([0.0, 1.0, 1.0, 1.0], [0.0, 0.5, 1.0, 1.0])
    'they differ up to step 1 only (warm-up)'
    >>> _compare_schedules([0.5, 1.0, 1.0], [1.0, 2.0, 2.0])
    "B's is 2 times A's in every step"
    """

    def close(x: list[float], y: list[float]) -> bool:
        return len(x) > 1 and all(
            math.isclose(i, j, rel_tol=1e-6, abs_tol=1e-15) for i, j in zip(x, y, strict=True)
        )

    if close(a[:-1], b[1:]):
        return "B's schedule is one step late"
    if close(a[1:], b[:-1]):
        return "B's schedule is one step early"
    ratios = [y / x for x, y in zip(a, b, strict=True) if x]
    if close(ratios, ratios[:1] * len(ratios)):
        return f"B's is {ratios[0]:.6g} times A's in every step"
    differing = [
        step
        for step, (x, y) in enumerate(zip(a, b, strict=True))
        if not math.isclose(x, y, rel_tol=1e-6)
    ]
    if differing[-1] < len(a) - 1 and differing[0] < len(a) / 2:
        return f"they differ up to step {differing[-1]} only (warm-up)"
    rising = [sum(y > x for x, y in itertools.pairwise(rates)) for rates in (a, b)]
    if differing[0] > 1 or (differing[0] == 1 and rising[0] == rising[1]):
        return f"they differ from step {differing[0]} on (decay of the learning rate)"
    return "B follows another schedule"


def _explain_update(parity: Parity, first: Comparison) -> Cause | None:
    """Explain updates that differ where gradients and stated settings agree, by Adam with one
    changed setting.
    """
    step = first.step
    assert step is not None  # as of every update
    compared = [
        (c, c.match)
        for c in parity.comparisons
        if c.stage == "update" and c.step == step and c.match
    ]
    wrong = [(c, match) for c, match in compared if c.verdict == DIFFERENT]
    # too little in each parameter, and systematic
    together = not wrong and first.name == "update_norm"
    wrong = compared if together else wrong
    if not wrong:
        return None
    # one norm of all updates fits any number
    formula = replace(FORMULAS["update"], numbers={}) if together else FORMULAS["update"]
    recorded = {
        s: [
            read_kind(
                match,
                recording=getattr(parity, s),
                side=s,
                step=step,
                kind="update",
            )
            for _, match in wrong
        ]
        for s in "ab"
    }

    def distance(side: str, settings: Settings) -> float:
        """Return the largest error over what rounding allows: of the norm of all updates, or of
        each.
        """
        recording: Recording = getattr(parity, side)
        found = [formula.compute((recording, match, side, step), settings) for _, match in wrong]
        if any(
            a is None or b is None or not bool(a.any())
            for a, b in zip(recorded[side], found, strict=True)
        ):
            return math.inf
        if together:
            sizes = [
                math.hypot(*(float(value.norm()) for value in values if value is not None))
                for values in (recorded[side], found)
            ]
            return abs(sizes[1] / sizes[0] - 1) / (MULTIPLE * first.floor)
        worst = 0.0
        for (comparison, match), actual, predicted in zip(
            wrong, recorded[side], found, strict=True
        ):
            kept = recording.details[f"{step}.before.{getattr(match, side)[0]}"].dtype
            before = match.values(recording, side, step, "before")
            apart = difference(actual, b=predicted)
            if before is None or actual is None or apart is None or not math.isfinite(apart):
                return math.inf
            # weights are rounded to it
            resolved = float(torch.finfo(kept).eps / 2 * before.norm() / actual.norm())
            worst = max(worst, apart / (MULTIPLE * max(comparison.floor, resolved)))
        return worst

    which = _find_roles(parity, matches=[match for _, match in wrong])
    found = search_settings(parity, formula, distance=distance)
    if cause := found and _name_cause(which, found):
        return cause
    norms = [
        math.hypot(*(float(value.norm()) for value in recorded[side] if value is not None))
        for side in "ab"
    ]
    text = (
        f"update of {which}: norm {norms[0]:.6g} in A, {norms[1]:.6g} in B; no rule that was "
        "tried explains both"
    )
    return _make_cause(
        "update",
        a=norms[0],
        b=norms[1],
        text=text,
    )


#: first word of the stage in which quantities differ first → explanation
EXPLAIN: dict[str, Callable[[Parity, Comparison], Cause | None]] = {
    "parameters": _explain_parameters,
    "module": _explain_module,
    "loss": _explain_loss,
    "gradient": _explain_gradient,
    "clipped": _explain_clipping,
    "setting": _explain_setting,
    "update": _explain_update,
}
