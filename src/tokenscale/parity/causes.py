"""Causes of a difference, by testing hypotheses: compute a recorded value again from its recorded inputs.

A module's output, a loss or an update is explained where a formula with certain settings reproduces it to the measured
floor. The cause is the setting in which the explanations of both models differ. Formulas run in float64.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenscale.parity.comparison import DIFFERENT, MULTIPLE, Comparison, Parity, read_kind
from tokenscale.parity.recording import Anchor, Match, Recording, difference

Settings = dict[str, Any]
#: An explanation: its settings, and how far its value is from the recorded one.
Explanation = tuple[Settings, float]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU, exact (erf)": F.gelu,
    "GELU, tanh approximation": lambda x: F.gelu(x, approximate="tanh"),
    "GELU, sigmoid approximation": lambda x: x * torch.sigmoid(1.702 * x),
    "SiLU": F.silu,
    "ReLU": F.relu,
    "squared ReLU": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "none": lambda x: x,
}
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0, 1e-10, 1e-9, 1e-7, 1e-4, 1e-3, 1e-2)
ROPE_BASES = (10_000.0, 500_000.0, 1_000_000.0, 5_000.0, 20_000.0, 50_000.0, 100_000.0, 1_000.0, 100.0)
#: Positions that attention may see, counted back from the query's own (0): first and last, where None is no limit.
MASKS = {"causal": (0, None), "causal, one position late": (1, None), "causal, one position early": (-1, None)}


def find_cause(parity: Parity, first: Comparison) -> dict[str, Any] | None:
    """Return {kind, setting, a, b, text, evidence} for the first difference; None where no hypothesis explains it."""
    if first.stage == "parameters":
        return _explain_parameters(parity)
    if first.stage == "tokens":
        fewer = "B" if first.b < first.a else "A"
        text = f"{fewer} drops sequences of the batch (a micro-batch?): {first.a} in A, {first.b} in B"
        return _cause("batch", "sequences per step", first.a, first.b, text)
    if first.stage.startswith("module"):
        return _explain_module(parity, first)
    if first.stage == "loss":
        return _explain_loss(parity, first)
    if first.stage == "gradient":
        return _explain_gradient(parity, first)
    if first.stage == "clipped gradient":
        return _explain_clipping(parity, first)
    if first.stage.startswith("setting"):
        return _explain_setting(parity, first)
    return _explain_update(parity, first)


def _cause(kind: str, setting: str, a: Any, b: Any, text: str, evidence: Iterable[str] = ()) -> dict[str, Any]:
    return {"kind": kind, "setting": setting, "a": a, "b": b, "text": text, "evidence": list(evidence)}


def _from_explanations(
    kind: str, where: str, a: Explanation, b: Explanation, crossed: float | None = None
) -> dict[str, Any] | None:
    """Return the cause: the settings in which two explanations differ."""
    keys = [key for key in {**a[0], **b[0]} if a[0].get(key) != b[0].get(key)]
    if not keys:
        return None
    key = keys[0]
    values = [", ".join(f"{_show(found.get(k))}" for k in keys) for found in (a[0], b[0])]
    evidence = [
        f"A's is reproduced to {a[1]:.2g} with {values[0]}",
        f"B's is reproduced to {b[1]:.2g} with {values[1]}",
    ]
    if crossed is not None:
        evidence.append(f"B's with A's settings is {crossed:.2g} away")
    text = f"{' and '.join(keys)} of {where}: {values[0]} in A, {values[1]} in B"
    return _cause(kind, " and ".join(keys), a[0].get(key), b[0].get(key), text, evidence)


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "absent" if value is None else str(value)


# --- parameters -----------------------------------------------------------------------------------------------------


def _explain_parameters(parity: Parity) -> dict[str, Any]:
    alignment = parity.alignment
    if alignment.untied:
        (name, partner), *_ = alignment.untied.items()
        tied = "B" if name in parity.a.parameters else "A"
        text = f"weight tying: {name} is a parameter of its own in {'AB'[tied == 'A']}, and tied to {partner} in {tied}"
        return _cause("parameters", "weight tying", tied == "A", tied == "B", text)
    if alignment.unequal:
        names = _few([name for match in alignment.unequal for name in match.a])
        return _cause("parameters", "initial weights", None, None, f"initial weights: {names} have other values in B")
    only, side = (alignment.only_a, "A") if alignment.only_a else (alignment.only_b, "B")
    described = (parity.a if side == "A" else parity.b).parameters
    bias = all(len(described[name]["shape"]) == 1 and "bias" in name for name in only)
    both = alignment.only_a and alignment.only_b
    setting = "initial weights" if both else "bias" if bias else "parameters"
    text = f"{setting}: {_few(only)} {'of A differ from those of B' if both else f'only in {side}'}"
    return _cause("parameters", setting, _few(alignment.only_a), _few(alignment.only_b), text)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


# --- modules --------------------------------------------------------------------------------------------------------


def _explain_module(parity: Parity, first: Comparison) -> dict[str, Any] | None:
    number = next(i for i, anchor in enumerate(parity.anchors) if anchor is first.anchor)
    floor = MULTIPLE * max(first.floor, 2.0**-24)
    output = first.stage == "module output"
    found = _explain_output(parity, first.anchor, floor) if output else _explain_region(parity, number, floor)
    if found is None:
        name = first.anchor.name("a")
        before = _common_parent([*parity.anchors[max(number - 1, 0) : number], first.anchor])
        where = name if output else f"{before}, before {name}"
        text = f"module {where}: no setting that was tried explains the difference"
        ran = {name for entry in parity.b.facts["trace"] for name in entry["parameters"]}
        if idle := [name for name in parity.b.parameters if name not in ran]:
            text += f"; B does not call the modules of {_few(idle)}"
        found = _cause("module", "unexplained", None, None, text)
    return found


def _best(candidates: Iterable[tuple[Settings, Tensor]], value: Tensor, enough: float) -> Explanation | None:
    """Return the first explanation closer than `enough`, in the order of the candidates."""
    for settings, predicted in candidates:
        distance = difference(value, predicted)
        if distance is not None and distance <= enough:
            return settings, distance
    return None


def _weights(parity: Parity, anchor: Anchor, side: str) -> dict[int, Tensor]:
    """Return the weights that a module owns by number of dimensions: 1 of norms, 2 matrices; 0 is the bias."""
    recording = parity.a if side == "a" else parity.b
    entries = anchor.a if side == "a" else anchor.b
    found = {}
    for name in entries[0]["parameters"]:
        shape = recording.parameters[name]["shape"]
        value = recording.detail("initial", "", name)
        if value.numel() == math.prod(shape):
            key = len(shape) if not name.endswith("bias") else 0
            found[key] = value.view(shape)
    return found


def _explain_output(parity: Parity, anchor: Anchor, floor: float) -> dict[str, Any] | None:
    """Explain an output that differs where the input agrees: norms, embeddings and linear layers."""
    found: list[Explanation] = []
    predictions = []
    for side in "ab":
        recording = parity.a if side == "a" else parity.b
        x, y = (anchor.tensor(recording, side, kind) for kind in ("inputs", "outputs"))
        weights = _weights(parity, anchor, side)
        if x is None or y is None or len(anchor.a) + len(anchor.b) > 2:
            return None
        candidates = list(_outputs(x, weights))
        if (explained := _best(candidates, y, floor)) is None:
            return None
        found.append(explained)
        predictions.append((candidates, y))
    crossed = next((difference(predictions[1][1], p) for s, p in predictions[1][0] if s == found[0][0]), None)
    cause = _from_explanations("module", anchor.name("a"), found[0], found[1], crossed)
    if cause is None:  # the same formula of the same inputs
        text = f"layout of the weights of {anchor.name('a')}: the same values are transposed or in another order in B"
        cause = _cause("module", "layout of the weights", None, None, text)
    return cause


def _outputs(x: Tensor, weights: dict[int, Tensor]) -> Iterator[tuple[Settings, Tensor]]:
    bias = weights.get(0)
    if not x.is_floating_point():
        rows = F.embedding(x, weights[2]) if 2 in weights else None
        for scale in (1.0, weights[2].shape[1] ** 0.5, weights[2].shape[1] ** -0.5) if rows is not None else ():
            yield {"scale of the embedding": scale}, rows * scale
    elif 2 in weights:
        for weight, turned in ((weights[2], "[out, in]"), (weights[2].T, "[in, out]")):
            if weight.shape[1] == x.shape[-1]:
                y = x @ weight.T
                yield {"weight": turned, "bias": None if bias is None else "added"}, y if bias is None else y + bias
                yield {"weight": turned, "bias": "left out"}, y
                rounded = x.bfloat16().double() @ weight.T.bfloat16().double() + (0 if bias is None else bias)
                yield {"precision": "bfloat16"}, rounded.bfloat16().double()
    elif 1 in weights and weights[1].shape[0] == x.shape[-1]:
        centred = x - x.mean(-1, keepdim=True)
        for kind, base, epsilon in ((k, v, e) for e in EPSILONS for k, v in (("RMS", x), ("layer", centred))):
            normed = base / (base.square().mean(-1, keepdim=True) + epsilon).sqrt()
            for name, weight in (("applied", weights[1]), ("plus one", 1 + weights[1]), ("left out", torch.ones(1))):
                settings = {"norm epsilon": epsilon, "kind of norm": kind, "weight of the norm": name}
                yield settings, normed * weight + (bias if bias is not None else 0)
    return


def _explain_region(parity: Parity, number: int, floor: float) -> dict[str, Any] | None:
    """Explain an input that differs where all modules before it agree: what is computed between modules."""
    anchor, before = parity.anchors[number], parity.anchors[:number]
    x = {"a": anchor.tensor(parity.a, "a", "inputs"), "b": anchor.tensor(parity.b, "b", "inputs")}
    if x["a"] is None or x["b"] is None:
        return None
    where = f"{_common_parent(before[-1:] + [anchor])} (input of {anchor.name('a')})"
    if not x["a"].is_floating_point():
        ours, theirs = (parity.rows(x[side], side) for side in "ab")
        shift = (theirs - ours).unique().tolist() if ours.shape == theirs.shape else []
        how = f"B's are A's {shift[0]:+d}" if len(shift) == 1 else "they are others"
        text = f"positions or ids that {anchor.name('a')} looks up: {how}"
        return _cause("module", "positions or ids", 0, shift[0] if len(shift) == 1 else None, text)
    for explain in (_activations, _attentions):
        if found := explain(parity, before, x, floor):
            return _from_explanations("module", where, *found)
    ours, theirs = (parity.rows(x[side], side) for side in "ab")
    kept = theirs != 0
    if bool((~kept & (ours != 0)).any()):
        scale = float((theirs[kept] / ours[kept]).median())
        if difference(theirs[kept], ours[kept] * scale) <= floor:
            rate = 1 - 1 / scale
            return _cause("module", "dropout", 0.0, rate, f"dropout in {where}: {rate:.3g} of the values in B are zero")
    return _explain_sum(parity, before, anchor, x, floor, where)


def _common_parent(anchors: list[Anchor]) -> str:
    parts = [anchor.a[0]["module"].split(".") for anchor in anchors]
    common = [words[0] for words in zip(*parts, strict=False) if len(set(words)) == 1]
    return ".".join(common) or "the model"


def _linear_outputs(parity: Parity, anchors: list[Anchor], side: str) -> list[Tensor]:
    """Return the outputs of the last anchors, latest first, up to the norm before them."""
    recording, found = parity.a if side == "a" else parity.b, []
    for anchor in reversed(anchors):
        value = anchor.tensor(recording, side, "outputs")
        shapes = [
            len(recording.parameters[n]["shape"]) for n in (anchor.a if side == "a" else anchor.b)[0]["parameters"]
        ]
        if value is None or max(shapes) < 2:
            break
        found.append(value)
    return found


def _activations(parity: Parity, before: list[Anchor], x: dict[str, Tensor], floor: float) -> Any:
    def candidates(side: str) -> Iterator[tuple[Settings, Tensor]]:
        last, width = _linear_outputs(parity, before, side), x[side].shape[-1]
        for name, function in ACTIVATIONS.items():
            if last and last[0].shape == x[side].shape:
                yield {"activation": name}, function(last[0])
            if len(last) > 1 and last[0].shape == last[1].shape == x[side].shape:
                yield {"activation": name, "gated": "by the first"}, function(last[1]) * last[0]
                yield {"activation": name, "gated": "by the second"}, function(last[0]) * last[1]
            elif last and last[0].shape[-1] == 2 * width:
                gate, up = last[0].chunk(2, dim=-1)
                yield {"activation": name, "gated": "by the first"}, function(gate) * up
                yield {"activation": name, "gated": "by the second"}, function(up) * gate

    return _explain_both(lambda side: _best(candidates(side), x[side], floor))


def _explain_both(explain: Callable[[str], Explanation | None]) -> tuple[Explanation, Explanation] | None:
    ours = explain("a")
    theirs = explain("b") if ours else None
    return (ours, theirs) if ours and theirs else None


def _attentions(parity: Parity, before: list[Anchor], x: dict[str, Tensor], floor: float) -> Any:
    """Explain the input of attention's output layer by queries, keys and values: first A's, then one change for B's."""

    def heads(side: str) -> tuple[Tensor, Tensor, Tensor] | None:
        last, width = _linear_outputs(parity, before, side), x[side].shape[-1]
        if last and last[0].shape[-1] > width and (last[0].shape[-1] - width) % 2 == 0:
            rest = (last[0].shape[-1] - width) // 2
            return last[0].split([width, rest, rest], dim=-1)
        if len(last) > 2 and last[2].shape[-1] == width and last[0].shape == last[1].shape:
            return last[2], last[1], last[0]
        return None

    ours, theirs = heads("a"), heads("b")
    if ours is None or theirs is None or x["a"].dim() != 3:
        return None
    widths = [
        n for n in range(2, ours[1].shape[-1] + 1, 2) if ours[1].shape[-1] % n == 0 and ours[0].shape[-1] % n == 0
    ]
    attributes = [entry["attributes"] for entry in parity.a.facts["trace"]]
    known = {a[k] for a in attributes for k in ("head_dim", "head_dimension") if isinstance(a.get(k), int)}
    widths.sort(key=lambda width: width not in known)
    length = x["a"].shape[1]
    values: dict[str, list[Any]] = {
        "head width": widths,
        "rope base": [None, *ROPE_BASES],
        "rope pairs": ["halves", "neighbours"],
        "mask": [*MASKS, "none", *(f"causal, window of {n}" for n in range(1, length))],
        "scale of the scores": ["1/sqrt(head width)", "1", "1/head width", "1/sqrt(width)"],
        "first position": [0, 1],
        "rotated share": [1.0, 0.5, 0.25],
    }
    default = {name: found[0] for name, found in values.items()}

    def explain(tensors: Any, value: Tensor, every: Iterable[Settings]) -> Explanation | None:
        return _best(((s, _attend(tensors, s)) for s in every), value, floor)

    def varied(start: Settings) -> Iterator[Settings]:
        yield start
        for name, found in values.items():
            yield from (start | {name: value} for value in found if value != start[name])

    first = itertools.product(values["head width"], values["rope base"], values["rope pairs"])
    starts = [default | dict(zip(("head width", "rope base", "rope pairs"), found, strict=True)) for found in first]
    a = explain(ours, x["a"], starts) or explain(ours, x["a"], (s for start in starts[:40] for s in varied(start)))
    b = a and explain(theirs, x["b"], varied(a[0]))
    return (a, b) if a and b else None


def _attend(tensors: tuple[Tensor, Tensor, Tensor], settings: Settings) -> Tensor:
    """Return attention [B, T, q's width] of queries, keys and values [B, T, width] in float64."""
    q, k, v = tensors
    width, length = settings["head width"], q.shape[1]
    full = q.shape[-1]
    q, k, v = (value.unflatten(-1, (-1, width)).transpose(1, 2) for value in (q, k, v))
    if settings["rope base"] is not None:
        q, k = (_rotate(value, settings) for value in (q, k))
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scales = {"1": 1.0, "1/head width": 1 / width, "1/sqrt(width)": full**-0.5}
    scores = q @ k.transpose(-1, -2) * scales.get(settings["scale of the scores"], width**-0.5)
    back = torch.arange(length)[:, None] - torch.arange(length)[None, :]  # the query's position less the key's
    mask = settings["mask"]
    least, most = MASKS.get(mask, (0, int(mask.rsplit(" ", 1)[1]) - 1) if "window" in mask else (-length, None))
    seen = back >= least
    if most is not None:
        seen &= back <= most
    weights = torch.nan_to_num(scores.masked_fill(~seen, -math.inf).softmax(-1))
    return (weights @ v).transpose(1, 2).flatten(2)


def _rotate(x: Tensor, settings: Settings) -> Tensor:
    """Rotate the pairs of x [B, heads, T, width] by positions (rotary embedding, Su et al. 2021)."""
    rotated = int(x.shape[-1] * settings["rotated share"]) // 2 * 2
    part, rest = x[..., :rotated], x[..., rotated:]
    frequencies = settings["rope base"] ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    positions = torch.arange(x.shape[2], dtype=torch.float64) + settings["first position"]
    cosine, sine = (f(torch.outer(positions, frequencies)) for f in (torch.cos, torch.sin))
    if settings["rope pairs"] == "halves":
        one, two = part.chunk(2, dim=-1)
        turned = torch.cat((one * cosine - two * sine, two * cosine + one * sine), dim=-1)
    else:
        one, two = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((one * cosine - two * sine, two * cosine + one * sine), dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1)


def _explain_sum(
    parity: Parity, before: list[Anchor], anchor: Anchor, x: dict[str, Tensor], floor: float, where: str
) -> dict[str, Any] | None:
    """Explain the residual stream as a weighted sum: of the last norm's input, or embeddings, and outputs since."""
    found: list[dict[str, float]] = []
    for side in "ab":
        recording, terms = parity.a if side == "a" else parity.b, {}
        for earlier in reversed(before):
            value = earlier.tensor(recording, side, "outputs")
            owned = (earlier.a if side == "a" else earlier.b)[0]["parameters"]
            if value is not None and max(len(recording.parameters[name]["shape"]) for name in owned) < 2:
                kept = earlier.tensor(recording, side, "inputs")  # of a norm: the stream before
                terms[f"the input of {earlier.name('a')}"] = kept
                break
            if value is not None:
                terms[f"the output of {earlier.name('a')}"] = value
        usable = {}
        for name, value in terms.items():
            try:
                usable[name] = value.expand(x[side].shape).reshape(-1)
            except RuntimeError:
                continue
        if not usable:
            return None
        kept_terms = {n: usable[n] * w for n, w in found[0].items() if abs(w) > 1e-3} if side == "b" else {}
        if kept_terms and (dropped := _find_dropout(kept_terms, x["b"].reshape(-1), floor)):
            text = f"dropout of {dropped[0]} before the sum at {where}: {dropped[1]:.3g} of the values in B are zero"
            return _cause("module", "dropout", 0.0, dropped[1], text)
        columns = torch.stack(list(usable.values()), dim=1)
        weights = torch.linalg.lstsq(columns, x[side].reshape(-1, 1)).solution
        if difference(x[side].reshape(-1), (columns @ weights).reshape(-1)) > floor:
            return None
        found.append(dict(zip(usable, weights.flatten().tolist(), strict=True)))
    ours, theirs = found
    worst = max(ours, key=lambda name: abs(ours[name] - theirs.get(name, 0.0)))
    values = [round(weights.get(worst, 0.0), 5) + 0.0 for weights in found]  # no -0.0
    text = f"weight of {worst} in the sum at {where}: {values[0]:.5g} in A, {values[1]:.5g} in B"
    return _cause("module", "residual stream", values[0], values[1], text)


def _find_dropout(terms: dict[str, Tensor], value: Tensor, floor: float) -> tuple[str, float] | None:
    """Return the term of a sum of which values are zero and the others scaled alike, and the share of zeros."""
    total = torch.stack(list(terms.values())).sum(0)
    for name, term in terms.items():
        ratio = (value - (total - term)) / term
        scale = float(ratio[ratio > 0.5].median()) if bool((ratio > 0.5).any()) else 0.0
        kept = (ratio > 0.5).double() * scale
        rate = float((kept == 0).double().mean())
        if 0 < rate < 1 and scale > 1 and difference(value, total - term + kept * term) <= floor:
            return name, rate
    return None


# --- loss, gradients, clipping --------------------------------------------------------------------------------------


def _agrees(parity: Parity, stage: str, step: int) -> bool:
    found = [c for c in parity.comparisons if c.stage == stage and c.step == step]
    return bool(found) and all(c.verdict != DIFFERENT for c in found)


def _explain_loss(parity: Parity, first: Comparison) -> dict[str, Any] | None:
    if first.step:
        return None
    calls = [(r, r.facts["cross_entropy"][0] if r.facts["cross_entropy"] else None) for r in (parity.a, parity.b)]
    floor = MULTIPLE * first.floor
    if all(call and len(call["tensors"]) == 2 for _, call in calls):
        targets = [r.trace[call["tensors"][1]["key"]].flatten() for r, call in calls]
        logits = [
            r.trace[call["tensors"][0]["key"]].double().reshape(len(t), -1)
            for (r, call), t in zip(calls, targets, strict=True)
        ]
        if cause := _explain_targets(parity, targets, [call for _, call in calls]):
            return cause
        for name, default in (("label_smoothing", 0.0), ("reduction", "mean"), ("ignore_index", -100)):
            ours, theirs = (call.get(name, default) for _, call in calls)
            if ours != theirs:
                text = f"{name} of the cross-entropy: {ours} in A, {theirs} in B"
                return _cause("loss", name, ours, theirs, text)
        if logits[0].shape == logits[1].shape and (difference(*logits) or 0) > floor:
            scale = float((logits[0] * logits[1]).sum() / logits[0].square().sum())
            exact = difference(logits[1], scale * logits[0]) <= floor
            text = "logits are changed between the output head and the loss" + (
                f": times {scale:.5g} in B" if exact else ""
            )
            return _cause("loss", "logits", 1.0, scale if exact else None, text)
        ours, theirs = first.a, first.b
        squares = float(logits[0].logsumexp(-1).square()[targets[0] >= 0].mean())
        for weight in (1e-4, 1e-3, 1e-5, 1e-2):
            if abs(theirs - ours - weight * squares) <= floor * abs(ours):
                return _cause("loss", "z-loss", 0.0, weight, f"z-loss: {weight:g} · mean(logsumexp²) is added in B")
    return _explain_ratio(parity, first, "loss", "the loss")


def _explain_targets(parity: Parity, targets: list[Tensor], calls: list[Any]) -> dict[str, Any] | None:
    """Explain labels that differ: shifted labels, or ignored labels that count."""
    ours, theirs = targets
    ignored = [call.get("ignore_index", -100) for call in calls]
    if len(ours) == len(theirs):
        if torch.equal(ours, theirs):
            return None
        both = (ours != ignored[0]) & (theirs != ignored[1])
        if torch.equal(ours[both], theirs[both]):
            counted = [int((t != i).sum()) for t, i in zip(targets, ignored, strict=True)]
            text = f"ignored labels: {counted[0]} labels count in A, {counted[1]} in B"
            return _cause("loss", "ignored labels", counted[0], counted[1], text)
    tokens = [
        next(_first_input(r, entry) for entry in r.facts["trace"] if entry["inputs"]) for r in (parity.a, parity.b)
    ]
    shifts = [_find_shift(t, found) for t, found in zip(tokens, targets, strict=True)]
    if shifts[0] != shifts[1]:
        shown = ["another" if shift is None else f"{shift} positions ahead" for shift in shifts]
        text = f"label shift: labels are the tokens {shown[0]} in A, {shown[1]} in B"
        return _cause("loss", "label shift", shifts[0], shifts[1], text)
    return (
        _cause("loss", "labels", None, None, "labels differ, in another way than a shift")
        if len(ours) == len(theirs)
        else None
    )


def _first_input(recording: Recording, entry: dict[str, Any]) -> Tensor:
    return recording.trace[entry["inputs"][0]["key"]].reshape(entry["inputs"][0]["shape"])


def _find_shift(tokens: Tensor, targets: Tensor) -> int | None:
    """Return by how many positions labels are ahead of the tokens; None where they are not."""
    rows, length = tokens.shape[0], tokens.shape[-1]
    if targets.numel() % rows:
        return None
    labels = targets.reshape(rows, -1)
    for shift in (1, 0, 2, -1, 3):
        first = max(shift, 0)
        count = min(length - first, labels.shape[1] + min(shift, 0))
        moved, found = tokens[:, first : first + count], labels[:, max(-shift, 0) : max(-shift, 0) + count]
        useful = found >= 0
        if moved.shape == found.shape and bool(useful.any()) and torch.equal(moved[useful], found[useful]):
            return shift
    return None


def _explain_ratio(parity: Parity, first: Comparison, kind: str, what: str) -> dict[str, Any] | None:
    """Explain two numbers whose ratio is a small integer or its inverse, such as the number of micro-batches."""
    floor = MULTIPLE * first.floor
    ratio = first.b / first.a if first.a else math.inf
    for top, bottom in (fraction for n in range(2, 257) for fraction in ((1, n), (n, 1))):
        if abs(ratio * bottom / top - 1) <= floor:
            counts = [len(row.steps[first.step]["losses"]) for row in (parity.a, parity.b)]
            why = (
                "gradient accumulation"
                if max(top, bottom) in counts
                else "a mean in place of a sum, or of another count"
            )
            text = f"scale of {what}: B's is {top}/{bottom} of A's ({why})"
            return _cause(
                kind, f"scale ({why})", 1.0, ratio, text, [f"micro-batches: {counts[0]} in A, {counts[1]} in B"]
            )
    return None


def _explain_gradient(parity: Parity, first: Comparison) -> dict[str, Any] | None:
    """Explain gradients that differ where the loss agrees: scale, micro-batches left out, parameters left out."""
    step = first.step
    compared = [c for c in parity.comparisons if c.stage == "gradient" and c.step == step and c.match]
    pairs = [
        (c, read_kind(c.match, parity.a, "a", step, "gradient"), read_kind(c.match, parity.b, "b", step, "gradient"))
        for c in compared
    ]
    absent = [c for c, a, b in pairs if (a is None or not bool(a.any())) != (b is None or not bool(b.any()))]
    if absent:
        side = "B" if any(b is None or not bool(b.any()) for c, a, b in pairs if c in absent) else "A"
        text = f"parameters without a gradient in {side}: {_few([c.name for c in absent])}"
        return _cause("gradient", "parameters without a gradient", None, side, text)
    usable = [(c, a, b) for c, a, b in pairs if a is not None and b is not None and c.floor < 1e-2]
    if usable:
        ours, theirs = torch.cat([a for _, a, _ in usable]), torch.cat([b for _, _, b in usable])
        scale = float((ours * theirs).sum() / ours.square().sum())
        floor = MULTIPLE * max(c.floor for c, _, _ in usable)
        counts = [len(r.steps[step]["losses"]) for r in (parity.a, parity.b)]
        if abs(scale - 1) > floor and difference(theirs, scale * ours) <= floor:
            text = f"scale of the gradient: B's is {scale:.5g} of A's for every parameter"
            return _cause(
                "gradient",
                "scale of the gradient",
                1.0,
                scale,
                text,
                [f"micro-batches: {counts[0]} in A, {counts[1]} in B"],
            )
        if step == 0 and (cause := _explain_micro_batches(parity, usable, theirs, floor, counts)):
            return cause
        if step and (cause := _explain_uncleared(parity, usable, ours, theirs, step, floor)):
            return cause
    wrong = [c for c in compared if c.verdict == DIFFERENT]
    if wrong:
        text = f"backward pass: the last parameter in order of execution whose gradient differs is {wrong[-1].name}"
        return _cause("gradient", "backward pass", None, wrong[-1].name, text)
    return None


def _explain_uncleared(
    parity: Parity, usable: list[Any], ours: Tensor, theirs: Tensor, step: int, floor: float
) -> dict[str, Any] | None:
    """Explain one model's gradient as the other's plus its own of the step before."""
    for side, recording, more, fewer in (("a", parity.a, ours, theirs), ("b", parity.b, theirs, ours)):
        earlier = [read_kind(c.match, recording, side, step - 1, "gradient_clipped") for c, _, _ in usable]
        if all(value is not None for value in earlier) and difference(more, fewer + torch.cat(earlier)) <= floor:
            text = f"gradients not cleared in {side.upper()}: those of the step before are added"
            return _cause("gradient", "gradients cleared", side == "b", side == "a", text)
    return None


def _explain_micro_batches(
    parity: Parity, usable: list[Any], theirs: Tensor, floor: float, counts: list[int]
) -> dict[str, Any] | None:
    """Explain B's gradient as A's of some micro-batches."""
    sums: list[Tensor] = []
    for number in range(counts[0]):
        found = [c.match.values(parity.a, "a", 0, f"micro-batch-{number}") for c, _, _ in usable]
        if any(value is None for value in found):
            return None
        sums.append(torch.cat(found))
    parts = [sums[0], *(later - earlier for earlier, later in itertools.pairwise(sums))]
    if len(parts) < 2 or len(parts) > 8:
        return None
    for kept in itertools.chain.from_iterable(
        itertools.combinations(range(len(parts)), n) for n in range(1, len(parts))
    ):
        total = torch.stack([parts[number] for number in kept]).sum(0)
        scale = float((total * theirs).sum() / total.square().sum())
        if difference(theirs, scale * total) <= floor:
            numbers = ", ".join(map(str, kept))
            text = f"dropped micro-batch: B's gradient is that of A's micro-batches {numbers} of 0 to {len(parts) - 1}"
            return _cause("gradient", "dropped micro-batch", len(parts), len(kept), text)
    return None


def _explain_clipping(parity: Parity, first: Comparison) -> dict[str, Any] | None:
    step, words, limits = first.step, [], []
    for recording in (parity.a, parity.b):
        row = recording.steps[step]
        before, after = row["gradient_norm"], row["gradient_norm_clipped"]
        clipped = abs(after - before) > MULTIPLE * 2.0**-24 * before
        limits.append(after if clipped else None)
        words.append(f"to {after:.4g}" if clipped else "off")
    if limits[0] is not None and limits[1] is not None and abs(limits[0] - limits[1]) < 1e-3 * limits[0]:
        words = ["by the norm", "in another way (by value, of each parameter, or with another epsilon)"]
    for number, side in enumerate("ab"):
        if limits[number] is not None and (largest := _find_clipped_value(parity, step, side, MULTIPLE * first.floor)):
            words[number] = f"by value, to {largest:.4g}"
    evidence = [f"norm before clipping {parity.a.steps[step]['gradient_norm']:.6g} in both"]
    text = f"gradient clipping: {words[0]} in A, {words[1]} in B"
    return _cause("optimizer", "gradient clipping", limits[0], limits[1], text, evidence)


def _find_clipped_value(parity: Parity, step: int, side: str, floor: float) -> float | None:
    """Return the largest gradient if larger ones were clipped to it and the others were left as they are."""
    recording = parity.a if side == "a" else parity.b
    pairs = [
        [read_kind(match, recording, side, step, kind) for kind in ("gradient", "gradient_clipped")]
        for match in parity.alignment.matches
    ]
    known = [(before, after) for before, after in pairs if before is not None and after is not None]
    if not known:
        return None
    before, after = (torch.cat(values) for values in zip(*known, strict=True))
    largest = float(after.abs().max())
    return largest if difference(after, before.clamp(-largest, largest)) <= floor else None


# --- optimizer ------------------------------------------------------------------------------------------------------


def _roles(parity: Parity, matches: list[Match]) -> str:
    def role(match: Match) -> str:
        facts = parity.a.parameters[match.a[0]]
        if len(facts["shape"]) < 2:
            return "biases" if match.a[0].endswith("bias") else "norms"
        entries = [entry for entry in parity.a.facts["trace"] if match.a[0] in entry["parameters"] and entry["inputs"]]
        looked_up = any(not parity.a.trace[entry["inputs"][0]["key"]].is_floating_point() for entry in entries)
        return "embeddings" if looked_up else "matrices"

    every: dict[str, list[Match]] = {}
    for match in parity.alignment.matches:
        every.setdefault(role(match), []).append(match)
    whole = [name for name, found in every.items() if all(match in matches for match in found)]
    covered = sum(len(every[name]) for name in whole)
    if covered == len(parity.alignment.matches):
        return "all parameters"
    return " and ".join(whole) if covered == len(matches) else _few([", ".join(match.a) for match in matches])


def _explain_setting(parity: Parity, first: Comparison) -> dict[str, Any]:
    """Describe a stated setting that differs, and for a learning rate how the schedules differ."""
    setting = first.stage.removeprefix("setting ")
    same = [
        c for c in parity.comparisons if c.stage == first.stage and c.difference and (c.a, c.b) == (first.a, first.b)
    ]
    which = _roles(parity, [c.match for c in same if c.step == first.step])
    if setting != "lr":
        names = {
            "weight_decay": "weight decay",
            "eps": "epsilon of the optimizer",
            "decoupled_weight_decay": "decoupled weight decay",
        }
        name = names.get(setting, setting)
        text = f"{name} of {which}: {_show(first.a)} in A, {_show(first.b)} in B"
        return _cause("optimizer", f"{name} of {which}", first.a, first.b, text)
    name = first.match.a[0]
    ours, theirs = (
        [float(r.group(n, s)["lr"]) for s in range(len(r.steps))]
        for r, n in ((parity.a, name), (parity.b, first.match.b[0]))
    )
    how, setting = _compare_schedules(ours, theirs)
    text = f"learning rate of {which}: {how}; at step {first.step} {first.a:.6g} in A, {first.b:.6g} in B"
    return _cause("optimizer", setting, first.a, first.b, text)


def _compare_schedules(a: list[float], b: list[float]) -> tuple[str, str]:
    """Return how two schedules differ, and the setting that this shows.

    >>> _compare_schedules([1.0, 1.0, 1.0], [1.0, 0.75, 0.5])
    ('they differ from step 1 on (decay of the learning rate)', 'decay of the learning rate')
    >>> _compare_schedules([0.0, 1.0, 1.0, 1.0], [0.0, 0.5, 1.0, 0.9])[1]
    'warm-up'
    """

    def close(x: list[float], y: list[float]) -> bool:
        return len(x) > 1 and all(math.isclose(i, j, rel_tol=1e-6, abs_tol=1e-15) for i, j in zip(x, y, strict=True))

    if close(a[:-1], b[1:]):
        return "B's schedule is one step late", "learning rate one step late"
    if close(a[1:], b[:-1]):
        return "B's schedule is one step early", "learning rate one step early"
    ratios = [y / x for x, y in zip(a, b, strict=True) if x]
    if ratios and close(ratios, [ratios[0]] * len(ratios)):
        return f"B's is {ratios[0]:.6g} times A's in every step", "learning rate"
    differing = [step for step, (x, y) in enumerate(zip(a, b, strict=True)) if not math.isclose(x, y, rel_tol=1e-6)]
    if differing[-1] < len(a) - 1 and differing[0] < len(a) / 2:
        return f"they differ up to step {differing[-1]} only (warm-up)", "warm-up"
    rising = [sum(y > x for x, y in itertools.pairwise(found)) for found in (a, b)]
    if differing[0] > 1 or (differing[0] == 1 and rising[0] == rising[1]):
        return f"they differ from step {differing[0]} on (decay of the learning rate)", "decay of the learning rate"
    if rising[0] != rising[1]:
        return f"they rise for {rising[0]} steps in A and {rising[1]} in B (warm-up)", "warm-up"
    return "B follows another schedule", "shape of the schedule"


def simulate(recording: Recording, match: Match, side: str, step: int, change: Settings) -> Tensor | None:
    """Return the update of Adam or AdamW (Kingma & Ba 2015, Loshchilov & Hutter 2019) from the recorded gradients.

    `change` overrides the settings that the optimizer states.
    """
    names = match.a if side == "a" else match.b
    group = recording.group(names[0], step) | change
    if not group or "lr" not in group:
        return None
    before = match.values(recording, side, step, "before")
    beta1, beta2 = group.get("betas", (0.9, 0.999))
    one_minus_1, one_minus_2, count = 1 - beta1, 1 - beta2, step + 1
    corrections = 1 - beta1**count, 1 - beta2**count
    if group.get("constants") == "rounded to fp32":
        single = torch.tensor([beta1, beta2])
        one_minus_1, one_minus_2 = (1 - single).tolist()
        corrections = tuple((1 - single**count).tolist())
    first = second = torch.zeros(())
    decay = group.get("weight_decay", 0.0)
    coupled = group.get("coupled", "decoupled_weight_decay" in group and not group["decoupled_weight_decay"])
    for number in range(step + 1):
        gradient = match.values(recording, side, number, "gradient_clipped")
        if gradient is None:
            return None
        if coupled and decay:
            gradient = gradient + decay * match.values(recording, side, number, "before")
        first = beta1 * first + one_minus_1 * gradient
        second = beta2 * second + one_minus_2 * gradient.square()
    correction = group.get("bias correction", "on")
    one = corrections[0] if correction in ("on", "of the first moment only") else 1.0
    two = corrections[1] if correction in ("on", "of the second moment only") else 1.0
    epsilon = group.get("eps", 1e-8)
    root = (
        (second / two + epsilon).sqrt()
        if group.get("epsilon", "outside") == "inside the root"
        else (second / two).sqrt() + epsilon
    )
    update = -group["lr"] * (first / one) / root
    if decay and not coupled:
        update = update - (decay if group.get("decay times learning rate") == "no" else group["lr"] * decay) * before
    return update


def _changes(recording: Recording, other: Recording, match: Match, step: int) -> Iterator[Settings]:
    """Yield single changes to stated settings: first the settings of the other optimizer, then usual mistakes."""
    stated, theirs = recording.group(match.b[0], step), other.group(match.a[0], step)
    yield {}
    for name in ("weight_decay", "eps", "betas", "lr"):
        if name in theirs and theirs[name] != stated.get(name):
            yield {name: theirs[name]}
    yield {"constants": "rounded to fp32"}
    for correction in ("off", "of the first moment only", "of the second moment only"):
        yield {"bias correction": correction}
    yield {"coupled": True}
    yield {"coupled": False}
    for decay in (0.0, 0.1, 0.01, 0.05, 0.2, 0.001):
        yield {"weight_decay": decay}
    yield {"decay times learning rate": "no"}
    for epsilon in EPSILONS:
        yield {"eps": epsilon}
    yield {"epsilon": "inside the root"}
    for betas in itertools.product((0.9, 0.8, 0.95, 0.0, 0.99), (0.999, 0.95, 0.99, 0.98, 0.9)):
        yield {"betas": betas}
    for at in (step - 1, step + 1):
        if 0 <= at < len(recording.steps) and "lr" in (group := recording.group(match.b[0], at)):
            yield {"lr": group["lr"]}
    for factor in (0.1, 0.5, 2.0, 10.0):
        yield {"lr": stated.get("lr", 0.0) * factor}


def _explain_update(parity: Parity, first: Comparison) -> dict[str, Any] | None:
    """Explain updates that differ where gradients and stated settings agree, by Adam with one changed setting."""
    step = first.step
    compared = [c for c in parity.comparisons if c.stage == "update" and c.step == step and c.match]
    wrong = [c for c in compared if c.verdict == DIFFERENT]
    together = not wrong and first.name == "update_norm"  # too little in each parameter, and systematic
    if together:
        wrong = compared
    if not wrong:
        return None
    which = _roles(parity, [c.match for c in wrong])
    still = [
        r
        for r in (parity.a, parity.b)
        if all(
            r.steps[step]["update_norms"].get(n) == 0
            for c in wrong
            for n in (c.match.a if r is parity.a else c.match.b)
        )
    ]
    if len(still) == 1:
        side = "A" if still[0] is parity.a else "B"
        return _cause("optimizer", f"{which} not updated", None, None, f"{which}: not updated in {side}")

    def error(recording: Recording, side: str, change: Settings) -> float:
        """Return the largest ratio of an error to what is allowed: of the norm of all updates, or of each."""
        worst = 0.0
        if together:
            sizes = []
            recorded = [read_kind(c.match, recording, side, step, "update") for c in wrong]
            for values in (recorded, [simulate(recording, c.match, side, step, change) for c in wrong]):
                if any(value is None for value in values):
                    return math.inf
                sizes.append(math.hypot(*(float(value.norm()) for value in values)))
            return abs(sizes[1] / sizes[0] - 1) / (MULTIPLE * first.floor)
        for comparison in wrong:
            match = comparison.match
            actual, before = (
                read_kind(match, recording, side, step, "update"),
                match.values(recording, side, step, "before"),
            )
            distance = difference(actual, simulate(recording, match, side, step, change))
            if distance is None or before is None or not bool(actual.any()):
                return math.inf
            kept = recording.details[f"{step}.before.{(match.a if side == 'a' else match.b)[0]}"].dtype
            resolved = float(torch.finfo(kept).eps / 2 * before.norm() / actual.norm())  # weights are rounded to it
            worst = max(worst, distance / (MULTIPLE * max(comparison.floor, resolved)))
        return worst

    found: list[tuple[Settings, float] | None] = []
    for recording, side, other in ((parity.a, "a", parity.b), (parity.b, "b", parity.a)):
        best = None
        for change in _changes(recording, other, wrong[0].match, step):
            if (distance := error(recording, side, change)) <= 1:
                best = change, distance
                break
        found.append(best)
    ours, theirs = found
    words = [
        "what its settings state" if f == {} else "none of the tried" if f is None else _name_change(f)
        for f in (o and o[0] for o in found)
    ]
    if ours is None or theirs is None or ours[0] == theirs[0]:
        text = f"update of {which}: A's follows {words[0]}, B's {words[1]}"
        return _cause("optimizer", f"update of {which}", words[0], words[1], text)
    name = next(iter(theirs[0] or ours[0]))
    label = {
        "coupled": "decoupled weight decay",
        "weight_decay": "weight decay",
        "eps": "epsilon",
        "lr": "learning rate",
    }.get(name, name)
    text = f"{label} of {which}: A's update follows {words[0]}, B's {words[1]}"
    crossed = error(parity.b, "b", ours[0])
    evidence = [
        f"B's update with A's rule is {crossed:.3g} times further away than rounding",
        f"with the cause named, {theirs[1]:.2g} times",
    ]
    return _cause("optimizer", f"{label} of {which}", words[0], words[1], text, evidence)


def _name_change(change: Settings) -> str:
    ((name, value),) = change.items()
    if name == "coupled":
        return "weight decay in the gradient (Adam with L2)" if value else "decoupled weight decay (AdamW)"
    return f"{name.replace('_', ' ')} {_show(value)}"
