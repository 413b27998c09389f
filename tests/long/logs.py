"""Logs of the last run of each long check, in evidence/long-tests."""

import datetime
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "evidence/long-tests"


def today() -> str:
    """The date in UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def write(check: str, text: str) -> Path:
    """Print the log of a check and write it, below the date, to `CHECK.txt`."""
    print(text)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{check}.txt"
    path.write_text(f"{today()}\n{text}", encoding="utf-8")
    return path


def record_green(path: Path, stats: Mapping[str, Iterable[object]]) -> None:
    """Write date and commit to the line of each test whose cases all passed; keep other lines.

    `stats` are the reports of pytest's terminal, by outcome. Lines of tests that no longer exist
    are dropped.
    """
    found: dict[str, set[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in stats.get(outcome, ()):
            if isinstance(report, pytest.TestReport):
                found.setdefault(report.nodeid.partition("[")[0], set()).add(outcome)
    git = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    before = path.read_text("utf-8").splitlines() if path.is_file() else []
    lines = dict(reversed(line.rsplit("  ", 1)) for line in before)
    lines |= {name: f"{today()} {commit}" for name, seen in found.items() if seen == {"passed"}}
    kept = {name: run for name, run in lines.items() if is_test(name)}
    text = "".join(f"{run}  {name}\n" for name, run in sorted(kept.items()))
    path.write_text(text, encoding="utf-8")


def is_test(name: str) -> bool:
    """Whether a file has this test (`FILE::FUNCTION`)."""
    file, _, function = name.partition("::")
    path = ROOT / file
    return path.is_file() and f"def {function}(" in path.read_text("utf-8")
