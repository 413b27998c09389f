"""The storage benchmark for a terminal."""

from typing import Any

import numpy as np


def table(result: dict[str, Any]) -> str:
    """A line a store, the smallest first, then the engines on the fly: medians over rounds."""
    by_store: dict[str, list[dict[str, Any]]] = {}
    for record in result["records"]:
        by_store.setdefault(record["store"], []).append(record)
    width = max(map(len, by_store))
    lines = [
        f"{result['settings']['rounds']} rounds, {result['documents']:,} documents, one core, engine "
        f"{result['engine']}; us are of a useful token, ms of a row",
        f"{'store':<{width}} {'bytes/token':>11} {'x entropy':>9} {'write us':>9} {'read us':>9} {'shuffled':>9} "
        f"{'cold':>9} {'ms a row':>9}",
    ]
    stores = {name: records for name, records in by_store.items() if records[0]["format"] != "text"}
    for name, records in sorted(stores.items(), key=lambda item: item[1][0]["stored_bytes"]):
        first = records[0]
        size = first["stored_bytes"] / first["ids"]
        entropy = first["entropy_bits"] / 8
        times = [_us(records, key) for key in ("write_s", "sequential_s", "shuffled_s", "cold_s")]
        times.append(_median(records, "single_rows_s", 1e3 / max(1, first["single_rows"] or 1)))
        lines.append(f"{name:<{width}} {size:>11.2f} {size / entropy:>9.2f} " + " ".join(f"{t:>9}" for t in times))
    for name, records in by_store.items():
        if name not in stores:
            lines.append(
                f"{name:<{width}} on the fly {_us(records, 'sequential_s')} us, at once {_us(records, 'bulk_s')}"
            )
    lines += [f"left out: {name}: {reason}" for name, reason in result["left_out"].items()]
    warm = sorted({record["not_cold"] for record in result["records"] if record.get("not_cold")})
    lines += [f"not cold: {reason}" for reason in warm]
    return "\n".join(lines)


def _us(records: list[dict[str, Any]], key: str) -> str:
    return _median(records, key, 1e6 / records[0]["useful_tokens"])


def _median(records: list[dict[str, Any]], key: str, unit: float) -> str:
    values = [record[key] for record in records if record[key] is not None]
    return f"{np.median(values) * unit:.3f}" if values else "–"
