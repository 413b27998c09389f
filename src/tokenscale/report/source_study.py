"""What the source studies did beside what an experiment does: for its page, and for the first page of a report."""

from collections.abc import Iterable, Mapping
from typing import Any

from tokenscale.report.table import Table
from tokenscale.settings.experiments import STUDIES

#: key of an experiment's `original` → what its page calls it
HEADINGS = {
    "measured": "the study measured",
    "wrong": "what was wrong with it",
    "ours": "what is measured here, and why the numbers differ",
}


def words(original: Mapping[str, Any]) -> dict[str, str]:
    """Heading → text, of what the experiment's file says; empty where it says nothing."""
    studies = "; ".join(f"{number}: {STUDIES.get(number, 'unknown')}" for number in original.get("studies") or ())
    texts = {"studies": studies} | {heading: original.get(key) or "" for key, heading in HEADINGS.items()}
    return {heading: text for heading, text in texts.items() if text}


def table(parts: Iterable[Mapping[str, Any]]) -> Table:
    """A row for each experiment that has an original, of what `words` said of it."""
    columns = [("experiment", False), *((heading, False) for heading in HEADINGS.values())]
    rows = [
        [part["name"], *(part["original"].get(heading, "") for heading in HEADINGS.values())]
        for part in parts
        if part["original"]
    ]
    return Table(columns, rows)
