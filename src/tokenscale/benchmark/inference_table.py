"""The inference benchmark for a terminal."""

from typing import Any

import numpy as np


def table(result: dict[str, Any]) -> str:
    """A line a model and cell, medians over rounds, with the cache beside without; then the answers."""
    names = {model["of_run"]: model["model"] for model in result["models"]}
    cells: dict[tuple, dict[bool, list[dict[str, Any]]]] = {}
    for record in result["records"]:
        key = (names[record["of_run"]], record["batch"], record["prompt_tokens"], record["new_tokens"])
        cells.setdefault(key, {True: [], False: []})[record["cached"]].append(record)
    width = max(map(len, [*names.values(), "model"]))
    lines = [
        f"{'model':<{width}} {'batch':>5} {'prompt':>6} {'new':>5} {'first token ms':>14} {'tokens/s':>9} "
        f"{'no cache':>9} {'x':>6} {'cache KiB':>9} {'texts':>9}"
    ]
    for (name, batch, prompt, new), by in sorted(cells.items()):
        with_cache, without = (np.median([_speed(record) for record in by[cached]]) for cached in (True, False))
        same = all(r["rows_equal"] == batch for records in by.values() for r in records)
        first_ms = 1e3 * np.median([r["parts"][0]["seconds"] for r in by[True]])
        speed_up = f"{with_cache / without:.1f}" if same else "–"
        lines.append(
            f"{name:<{width}} {batch:>5} {prompt:>6} {new:>5} {first_ms:>14.2f} {with_cache:>9,.0f} {without:>9,.0f} "
            f"{speed_up:>6} {by[True][0]['cache_bytes'] / 1024:>9,.0f} {'equal' if same else 'differ':>9}"
        )
    lines += [f"left out: {names[run_id]}: {why}" for run_id, why in result["left_out"].items()]
    for answer in result["generations"]:
        way = f"temperature {answer['temperature']:g}, top_p {answer['top_p']:g}, seed {answer['seed']}"
        lines.append(f"{names[answer['of_run']]}, {way}: {answer['prompt']!r} -> {answer['text']!r}")
    return "\n".join(lines)


def _speed(record: dict[str, Any]) -> float:
    decoded = [part for part in record["parts"] if part["part"] == "decode"]
    return record["batch"] * sum(part["tokens"] for part in decoded) / sum(part["seconds"] for part in decoded)
