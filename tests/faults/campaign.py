"""Kills one after another, appended to a log; the next call goes on behind its last line.

    python -m tests.faults.campaign [--kills 300] [--minutes 20] [--log evidence/faults/kills.jsonl]
    [--folder LAB] [--whole]

A line of the log is a kill: what was killed, by which signal, when, and what was lost. The table of
all kills is then written into evidence/faults/kills.md.
"""

import argparse
import json
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.faults.kills import SIGNALS, STAGES, TRIES, Lab, drawn, trial

ROOT = Path(__file__).parents[2]
LOG = ROOT / "evidence/faults/kills.jsonl"
PAGE = ROOT / "evidence/faults/kills.md"
MARK = "<!-- kills -->"


def read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def with_table(page: str, rows: list[dict[str, Any]]) -> str:
    """The page with its table: a row a victim, how often it was killed by which signal, and how
    often that lost.
    """
    hit = [row for row in rows if row["injected"]]
    counts = Counter((row["victim"], row["signal"]) for row in hit)
    lost = Counter(row["victim"] for row in hit if row["lost"])
    lines = [
        f"| killed | {' | '.join(SIGNALS)} | survived | lost |",
        "|---|" + "---:|" * (len(SIGNALS) + 2),
    ]
    victims = dict.fromkeys(row["victim"] for row in hit)
    for name, among in [*((victim, [victim]) for victim in victims), ("together", list(victims))]:
        killed = [sum(counts[victim, number] for victim in among) for number in SIGNALS]
        gone = sum(lost[victim] for victim in among)
        lines.append(f"| {name} | {' | '.join(map(str, [*killed, sum(killed) - gone, gone]))} |")
    before, _, after = page.split(MARK)
    return "\n".join([before + MARK, *lines, MARK + after])


def campaign(
    log: Path, kills: int, minutes: float, seed: int, folder: Path, *, whole: bool
) -> list[dict[str, Any]]:
    """Kill so many times more, or until the time is up. Returns the rows of this call."""
    end = time.monotonic() + 60 * minutes
    rows = []
    lab = Lab(folder / "lab")
    lab.made()
    number = 1 + max((row["number"] for row in read(log)), default=-1)
    while sum(row["injected"] for row in rows) < kills and time.monotonic() < end:
        kill = drawn(number, seed)
        if whole:  # any victim by any signal, so that a short campaign has all of them
            any_pair = drawn(random.Random(f"{seed}-{number}").randrange(10**6), seed)
            kill = replace(any_pair, number=number, stage=next(iter(STAGES)))
        for _ in range(TRIES):
            row = trial(lab, kill, folder / "trial", seed)
            if row["injected"] or row["lost"]:
                break
            kill = replace(kill, moment=round(kill.moment / 2, 4))
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        rows.append(row)
        said = f"{row['victim']} {row['signal']} {row['seconds']} s" + "".join(
            f"\n  {text}" for text in row["lost"]
        )
        print(
            (
                f"{sum(r['injected'] for r in rows)}, {sum(bool(r['lost']) for r in rows)} lost: "
                f"{said}"
            ),
            flush=True,
        )
        number += 1
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--whole", action="store_true", help="each call has everything to build when it is killed"
    )
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument(
        "--folder", type=Path, help="kept, so that the next call need not build the project again"
    )
    asked = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup its jobs would ignore it, too
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary:
        rows = campaign(
            asked.log,
            asked.kills,
            asked.minutes,
            asked.seed,
            asked.folder or Path(temporary),
            whole=asked.whole,
        )
    if asked.log == LOG:
        PAGE.write_text(with_table(PAGE.read_text(), read(LOG)))
    raise SystemExit(any(row["lost"] for row in rows))


if __name__ == "__main__":
    main()
