"""Dated logs of the long checks, in evidence/long-tests."""

import datetime
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "evidence/long-tests"


def today() -> str:
    """The date in UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def write(check: str, text: str) -> Path:
    """Print the log of a check and write it to `CHECK-DATE.txt`; a second run on one day replaces the first."""
    print(text)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{check}-{today()}.txt"
    path.write_text(text, encoding="utf-8")
    return path
