"""Parity certificate: the verdict, the first difference and its cause, as plain values and as
text.
"""

import math
from typing import Any

from tokenscale.parity.causes import find_cause
from tokenscale.parity.comparison import (
    CERTIFICATE_VERSION,
    DIFFERENT,
    EQUAL,
    MULTIPLE,
    ROUNDING,
    Comparison,
    Parity,
)
from tokenscale.parity.recording import SCALARS, Recording


def certify(parity: Parity) -> dict[str, Any]:
    """Return the certificate as plain values, for JSON."""
    first = parity.first
    verdicts = {comparison.verdict for comparison in parity.comparisons}
    verdict = next(word for word in (DIFFERENT, ROUNDING, EQUAL) if word in verdicts)
    cause = find_cause(parity, first) if first else None
    by_step: dict[int | None, dict[str, Any]] = {}
    stages: dict[str, dict[str, Any]] = {}
    for comparison in parity.comparisons:
        if comparison.name in SCALARS:
            by_step.setdefault(comparison.step, {"step": comparison.step})[comparison.name] = {
                name: getattr(comparison, name)
                for name in ("a", "b", "difference", "floor", "verdict")
            }
        row = stages.setdefault(
            comparison.stage, {"compared": 0, "largest_ratio_to_floor": 0.0, "verdict": EQUAL}
        )
        row["compared"] += 1
        order = (EQUAL, ROUNDING, DIFFERENT)
        row["verdict"] = max(row["verdict"], comparison.verdict, key=order.index)
        if comparison.floor:
            ratio = min(comparison.difference / comparison.floor, 1e300)
            row["largest_ratio_to_floor"] = max(row["largest_ratio_to_floor"], ratio)
    return {
        "schema_version": CERTIFICATE_VERSION,
        "verdict": verdict,
        "multiple_of_floor": MULTIPLE,
        "steps": len(parity.a.steps),
        "first_difference": first and _describe(first),
        "cause": cause,
        "hypotheses_tried": parity.tried,
        "stages": stages,
        "by_step": list(by_step.values()),
        "parameters": {
            "matched": len(parity.alignment.matches),
            "only_a": parity.alignment.only_a,
            "only_b": parity.alignment.only_b,
            "untied": parity.alignment.untied,
        },
        "recordings": {
            side: _describe_recording(r) for side, r in (("a", parity.a), ("b", parity.b))
        },
    }


def _describe(comparison: Comparison) -> dict[str, Any]:
    name_in_b = None
    if comparison.anchor:
        name_in_b = comparison.anchor.name("b")
    elif comparison.match:
        name_in_b = ", ".join(comparison.match.b)
    return {
        "stage": comparison.stage,
        "step": comparison.step,
        "name": comparison.name,
        "name_in_b": name_in_b,
        "difference": comparison.difference if math.isfinite(comparison.difference) else None,
        "floor": comparison.floor,
    }


def _describe_recording(recording: Recording) -> dict[str, Any]:
    kept = ("model", "optimizer", "versions", "device", "threads")
    return {
        "folder": recording.folder.name,
        "floors": len(recording.floors),
        **{name: recording.facts[name] for name in kept},
        "weights": {name: facts["digest"] for name, facts in recording.parameters.items()},
        "sequences": [row["rows"] for row in recording.steps],
    }


def summarise(certificate: dict[str, Any]) -> str:
    """Return the text that the command prints."""
    first = certificate["first_difference"]
    cause = certificate["cause"]
    lines = [f"verdict: {certificate['verdict']}   ({certificate['steps']} steps)"]
    lines += [f"  {'quantity':<30} {'compared':>8}  {'largest difference / floor':>26}  verdict"]
    for stage, row in certificate["stages"].items():
        ratio = f"{row['largest_ratio_to_floor']:.3g}" if row["largest_ratio_to_floor"] else "-"
        lines.append(f"  {stage:<30} {row['compared']:>8}  {ratio:>26}  {row['verdict']}")
    ends = certificate["by_step"][0], certificate["by_step"][-1]
    floors = [f"{row['loss']['floor']:.2g} at step {row['step']}" for row in ends]
    lines.append(f"rounding floor of the loss, relative: {', '.join(floors)}")
    if first:
        where = f"step {first['step']}: " if first["step"] is not None else ""
        other = (
            f" (B: {first['name_in_b']})" if first["name_in_b"] not in (None, first["name"]) else ""
        )
        lines.append(f"first difference: {where}{first['stage']} of {first['name']}{other}")
        if first["difference"] is not None:
            lines.append(
                f"  {first['difference']:.3g} relative to A; rounding floor {first['floor']:.3g}"
            )
    if cause:
        lines.append(f"cause: {cause['text']}")
        lines += [f"  {line}" for line in cause["evidence"]]
    elif first:
        lines.append("cause: no tested hypothesis explains the difference")
    if tried := certificate["hypotheses_tried"]:
        lines.append(f"  {tried} hypotheses were compared with recorded values")
    return "\n".join(lines)
