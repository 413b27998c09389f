"""Logs of the last run of each long check, in evidence/long-tests."""

import datetime
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "evidence/long-tests"


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
