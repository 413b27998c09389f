"""What a check of `doctor` finds, what each is given, and what several of them need.

Verdicts: `ok`; `note`, it works but there is something to know; `no`, it is not there or does not work. A `no` is a
fault only where something wanted depends on it: that is for `doctor` to say. No check imports a package at the top.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """What a check found: a verdict (ok, note, no), the fact, what to do next, and the fact as values."""

    verdict: str
    fact: str
    next: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """What the user asked for, and what `probe` tries meanwhile: several checks read it."""

    results: Path
    network: bool
    imports: Future
    ranks: Future


def noted(fact: str, notes: list[tuple[str, str]], values: dict[str, Any]) -> Finding:
    """`ok`, or `note` with each (reason, next step)."""
    fact = "; ".join([fact, *(why for why, _ in notes)])
    return Finding("note" if notes else "ok", fact, "; ".join(cure for _, cure in notes), values)


def stage_of(asked: Asked, name: str) -> tuple[dict[str, Any] | None, Finding | None]:
    """What the ranks say of a stage, or why they say nothing."""
    ranks = asked.ranks.result()
    if "version" not in ranks["stages"].get("torch", {}):
        return None, Finding("no", "not known without torch", "see trainer packages", {"without": "torch"})
    if name not in ranks["stages"]:
        fact = f"the processes that try it ended early: {endings(ranks)}"
        return None, Finding("no", fact, "try it again; if it stays, report it")
    return ranks["stages"][name], None


def endings(ranks: dict[str, Any]) -> str:
    """How the ranks ended that did not end well."""
    return ", ".join(dict.fromkeys(ranks["ended"])) or "no answer"
