"""What a run came to, from its own records: the lines that a person sees at its end."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tokenscale.runs.records.provenance import sealed


def outcome(directory: Path) -> dict[str, Any] | None:
    """Status, steps, last finite loss (nats a useful token), held-out loss, and tokens a second of a sealed run.

    Sums over all ranks, times of the slowest rank; the first step, which warms everything up, counts for no speed where
    there are others. None for a run that is not sealed.
    """
    record = sealed(directory / "run.json")
    if record is None:
        return None
    attempt = directory / f"attempt={record['attempt']:02d}"
    steps: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for path in sorted(attempt.glob("rank=*/steps.jsonl")):
        for line in _lines(path):
            if line.get("nonfinite"):
                continue
            step = steps[line["step"]]
            for name in ("loss_sum", "useful_tokens", "total_tokens"):
                step[name] += line[name] or 0
            step["step_s"] = max(step["step_s"], line["step_s"])
    numbers = sorted(steps)
    timed = [steps[k] for k in numbers[1:] or numbers]
    seconds = sum(step["step_s"] for step in timed)
    held_out = [e for e in _lines(attempt / "rank=00000" / "events.jsonl") if e["event"] == "validation"]
    return {
        "status": record["outcome"]["status"],
        "steps": record["outcome"]["steps"],
        "loss": _ratio(steps[numbers[-1]]["loss_sum"], steps[numbers[-1]]["useful_tokens"]) if numbers else None,
        "held_out_loss": _ratio(held_out[-1]["loss_sum"], held_out[-1]["useful_tokens"]) if held_out else None,
        "useful_tokens_per_s": _ratio(sum(step["useful_tokens"] for step in timed), seconds),
        "total_tokens_per_s": _ratio(sum(step["total_tokens"] for step in timed), seconds),
    }


def told(directory: Path) -> list[str]:
    """The same for a person: a line for the run, one for its loss, one for its speed."""
    found = outcome(directory)
    if found is None:
        return [f"run    {directory}  not sealed"]
    held_out = f", held out {found['held_out_loss']:.4f}" if found["held_out_loss"] is not None else ""
    lines = [f"run    {directory}  {found['status']} after {found['steps']} steps"]
    if found["loss"] is not None:
        lines.append(f"loss   {found['loss']:.4f} in the last step{held_out}  (nats a useful token)")
    if found["useful_tokens_per_s"] is not None:
        useful, total = found["useful_tokens_per_s"], found["total_tokens_per_s"]
        lines.append(f"speed  {useful:,.0f} useful tokens/s; {total:,.0f} with padding and starts of documents")
    return lines


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
