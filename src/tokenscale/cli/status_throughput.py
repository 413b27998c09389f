"""How fast a run is going just now, from the ends of its ranks' logs."""

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

#: so much of the end of each rank's log is read: about a hundred steps
END_BYTES = 50_000


@dataclass(frozen=True)
class Pace:
    """Of the steps at the end of the logs that all ranks have written: their median time, and tokens over time."""

    step_s: float
    useful_tokens_per_s: float


def pace(attempt: Path) -> Pace | None:
    """Of the attempt in a folder; None before two steps of all ranks are there. The first step, which warms up, is left
    out where others are there."""
    ranks = [_steps(path) for path in sorted(attempt.glob("rank=*/steps.jsonl"))]
    shared = set.intersection(*(set(steps) for steps in ranks)) if ranks else set()
    shared -= {min(shared)} if len(shared) > 1 else shared
    if not shared:
        return None
    times, tokens = defaultdict(float), 0
    for steps in ranks:
        for step in shared:
            seconds, useful = steps[step]
            times[step] = max(times[step], seconds)  # everybody waits for the slowest
            tokens += useful
    total = sum(times.values())
    return Pace(statistics.median(times.values()), tokens / total) if total > 0 else None


def _steps(path: Path) -> dict[int, tuple[float, int]]:
    """Step → (seconds, useful tokens) of the whole lines at the end of a log; a line that says neither is left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - END_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    found = {}
    for line in lines[size > END_BYTES : -1]:
        try:
            row = json.loads(line)
            found[int(row["step"])] = float(row["step_s"]), int(row["useful_tokens"])
        except (ValueError, KeyError, TypeError):
            continue
    return found
