"""Hundreds of kills, one after another, with a log that the next call goes on from.

    python -m tests.faults.campaign evidence/faults/kills.jsonl --kills 200

A line of the log is a kill: what was killed, by which signal, when, and what was lost. `--table` prints the table that
stands in the README.
"""

import argparse
import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.faults.kills import SIGNALS, TRIES, Lab, drawn, trial


def read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row a victim; how often it was killed by which signal, and how often something was lost."""
    hit = [row for row in rows if row["injected"]]
    counts = Counter((row["victim"], row["signal"]) for row in hit)
    lost = Counter(row["victim"] for row in hit if row["lost"])
    lines = [f"| killed | {' | '.join(SIGNALS)} | survived | lost |", "|---|" + "---:|" * (len(SIGNALS) + 2)]
    victims = dict.fromkeys(row["victim"] for row in hit)
    for victim in victims:
        killed = [counts[victim, name] for name in SIGNALS]
        cells = [*killed, sum(killed) - lost[victim], lost[victim]]
        lines.append(f"| {victim} | {' | '.join(map(str, cells))} |")
    sums = [sum(counts[victim, name] for victim in victims) for name in SIGNALS]
    lines.append(f"| together | {' | '.join(map(str, [*sums, len(hit) - lost.total(), lost.total()]))} |")
    return "\n".join(lines)


def campaign(log: Path, kills: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Go on until so many kills were injected; returns the log's rows, with those of earlier calls."""
    rows = read(log)
    log.parent.mkdir(parents=True, exist_ok=True)
    lab = Lab(folder / "lab")
    lab.made()
    number = 1 + max((row["number"] for row in rows), default=-1)
    while sum(row["injected"] for row in rows) < kills:
        kill = drawn(number, seed)
        for _ in range(TRIES):
            row = trial(lab, kill, folder / "trial", seed)
            if row["injected"] or row["lost"]:
                break
            kill = replace(kill, moment=round(kill.moment / 2, 4))
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        rows.append(row)
        injected, lost = sum(r["injected"] for r in rows), sum(bool(r["lost"]) for r in rows)
        said = f"{row['victim']} {row['signal']} {row['seconds']} s" + "".join(f"\n  {text}" for text in row["lost"])
        print(f"{injected}/{kills}, {lost} lost: {said}", flush=True)
        number += 1
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="kept, so that the next call need not build the project again")
    parser.add_argument("--table", action="store_true", help="print the table of the log, and inject nothing")
    asked = parser.parse_args()
    if asked.table:
        return print(table(read(asked.log)))
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary:
        rows = campaign(asked.log, asked.kills, asked.seed, asked.folder or Path(temporary))
    print(table(rows))
    raise SystemExit(any(row["lost"] for row in rows))


if __name__ == "__main__":
    main()
