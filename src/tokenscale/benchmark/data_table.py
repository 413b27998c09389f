"""The data benchmark for people: a table for a terminal, and a figure."""

from pathlib import Path
from typing import Any

import numpy as np

LIMIT = "memcpy"
OURS = ("packed", "packed, first touch", "packed, int32", "packed, cold")


class Table:
    """The records of a result by arm: seconds a batch of each round."""

    def __init__(self, result: dict[str, Any]):
        self.records: dict[str, list[dict[str, Any]]] = {}
        for record in result["records"]:
            self.records.setdefault(record["arm"], []).append(record)
        self.batch_s = {
            arm: np.array([r["seconds"] / r["batches"] for r in sorted(records, key=lambda r: r["round"])])
            for arm, records in self.records.items()
        }

    def ratio(self, arm: str, to: str) -> tuple[float, float, float]:
        """(median, least, most) over rounds of one arm's time a batch over that of another in the same round."""
        found = self.batch_s[arm] / self.batch_s[to]
        return float(np.median(found)), float(found.min()), float(found.max())


def table(result: dict[str, Any]) -> str:
    """The result for a terminal: medians over rounds with the range of the rounds; then the ratios that matter."""
    found = Table(result)
    width = max(map(len, found.records))
    lines = [
        heading(result),
        f"{'arm':<{width}} {'open s':>7} {'MB held':>8} {'us a batch':>11} {'range of rounds':>21} {'useful':>7} "
        f"{'x memcpy':>9}",
    ]
    for arm in sorted(found.records, key=lambda arm: float(np.median(found.batch_s[arm]))):
        records, us = found.records[arm], found.batch_s[arm] * 1e6
        useful = sum(r["useful_tokens"] for r in records) / sum(r["total_tokens"] for r in records)
        opening, held = (float(np.median([r[key] for r in records])) for key in ("open_s", "memory_bytes"))
        lines.append(
            f"{arm:<{width}} {opening:>7.3f} {held / 1e6:>8.1f} {np.median(us):>11,.1f} {us.min():>9,.1f} – "
            f"{us.max():>9,.1f} {useful:>7.1%} {found.ratio(arm, LIMIT)[0]:>9,.2f}"
        )
    lines += ["", "ratios in the same round, median (least – most):"]
    for name, (mid, low, high) in sorted(ratios(found).items(), key=lambda item: item[1]):
        lines.append(f"  {name:<{width + 9}} {mid:>9,.2f}  ({low:,.2f} – {high:,.2f})")
    if {"packed", "packed, first touch"} <= found.records.keys():
        extra = (found.batch_s["packed, first touch"] - found.batch_s["packed"]) * 1e6
        spread = f"({extra.min():.2f} – {extra.max():.2f})"
        lines.append(f"  {'checksums on first touch, us a batch':<{width + 9}} {np.median(extra):>9.2f}  {spread}")
    lines += [f"left out: {arm}: {reason}" for arm, reason in result["left_out"].items()]
    return "\n".join(lines)


def heading(result: dict[str, Any]) -> str:
    """What was measured, in a line."""
    settings = result["settings"]
    return (
        f"{settings['rounds']} rounds, batches of {settings['rows']} x {settings['sequence_length']}, one core, "
        f"token file {result['token_file_bytes'] / 1e6:.0f} MB; engine {result['engine']}"
    )


def ratios(found: Table) -> dict[str, tuple[float, float, float]]:
    """What ours is against the limit, and everything else against ours."""
    named = {f"{arm} / {LIMIT}": found.ratio(arm, LIMIT) for arm in OURS[:3] if arm in found.records}
    others = [arm for arm in found.records if arm not in OURS and arm != LIMIT]
    return named | {f"{arm} / packed": found.ratio(arm, "packed") for arm in others}


def draw(result: dict[str, Any], path: Path) -> None:
    """Every round of every arm as a dot, on a logarithmic axis; the limit as a line."""
    from tokenscale.report.style import GREY, dots, figure, jitter, plain, style

    found = Table(result)
    arms = sorted(found.records, key=lambda arm: -float(np.median(found.batch_s[arm])))
    with style():
        made, (axes,) = figure(height=1.4 + 0.3 * len(arms))
        axes.set_xscale("log")
        for y, arm in enumerate(arms):
            us = np.sort(found.batch_s[arm]) * 1e6
            axes.plot(us, [y + o for o in jitter(len(us))], **dots(arm))
        limit = float(np.median(found.batch_s[LIMIT])) * 1e6
        axes.axvline(limit, color=GREY, linestyle=":", linewidth=1.8)
        axes.set_yticks(range(len(arms)), arms)
        axes.grid(False, axis="y")
        axes.set_xlabel("µs a batch (log scale); the dotted line copies ready batches")
        axes.set_title(heading(result), fontsize=8)
        plain(axes.xaxis, log=True)
        made.savefig(path, bbox_inches="tight", facecolor="white")
