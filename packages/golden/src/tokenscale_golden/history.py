"""Floor runs of a file of golden losses from its earlier versions in git.

Somebody replaced the old losses by new ones again and again. Two such changes or more that are small,
and as large as one another, show how far rounding moves this training.
"""

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tokenscale_golden.reading import Curve, GoldenError, read

#: newest versions that are read
VERSIONS = 40
#: fewest changes that make a floor, and how many times the smallest of them the others may be
FEWEST = 2
RANGE = 3.0
#: rounding's largest relative difference at the first step, and at any
FIRST = 1e-3
LARGEST = 2e-3
#: share of the steps of OLD that an earlier change must have
COVERED = 0.5


@dataclass
class _Change:
    """A change from one version to the next: relative differences at the steps of OLD, NaN where
    one is not known [n].
    """

    loss: np.ndarray
    norm: np.ndarray | None

    @property
    def size(self) -> float:
        return float(np.nanmax(np.abs(self.loss)))


def list_versions(path: Path) -> list[Curve]:
    """Return the readable versions of a file in git up to the checked out commit, oldest first.

    `FILE::NAME` chooses a run of each. Raises GoldenError where git has none.
    """
    name, separator, chosen = str(path).partition("::")
    file = Path(name)
    log = _ask_git(file, "log", f"-{VERSIONS}", "--format=%H", "--", file.name)
    commits = log.decode().split()
    if not commits:
        raise GoldenError(f"git has no version of {file}: --history needs OLD as a tracked file.")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        for commit in reversed(commits):
            try:
                copy.write_bytes(_ask_git(file, "show", f"{commit}:./{file.name}"))
                found.append(read(f"{copy}{separator}{chosen}"))
            except GoldenError:
                continue  # the version that removed it, or one in another format
    if not found:
        raise GoldenError(f"no version of {file} in git is a file of losses.")
    return found


def _ask_git(file: Path, *arguments: str) -> bytes:
    command = ["git", "--literal-pathspecs", "-C", str(file.parent), *arguments]
    try:
        asked = subprocess.run(command, capture_output=True)
    except OSError as error:
        raise GoldenError(f"--history needs git: {error.strerror}.") from None
    if asked.returncode:
        said = asked.stderr.decode(errors="replace").strip()
        reason = (said.splitlines() or ["git failed"])[-1]
        raise GoldenError(f"git does not know {file}: {reason}")
    return asked.stdout


def derive_floors(old: Curve, versions: Sequence[Curve]) -> list[Curve]:
    """Return OLD moved as the earlier versions were by rounding; none where fewer than `FEWEST` of
    their changes are as large as one another.
    """
    changes = sorted(_list_changes(old, versions), key=lambda change: change.size)
    for first, smallest in enumerate(changes):
        alike = [change for change in changes[first:] if change.size <= RANGE * smallest.size]
        if len(alike) >= FEWEST:
            return [_move(old, change) for change in alike]
    return []


def _list_changes(old: Curve, versions: Sequence[Curve]) -> Iterator[_Change]:
    """Yield the changes that may be rounding."""
    for before, after in zip(versions, versions[1:], strict=False):
        loss = _measure_change(old.steps, before, after, before.loss, after.loss)
        known = np.flatnonzero(np.isfinite(loss))
        if len(known) < COVERED * len(old.steps) or not loss[known].any():
            continue
        norm = None
        if old.norm is not None and before.norm is not None and after.norm is not None:
            norm = _measure_change(old.steps, before, after, before.norm, after.norm)
        change = _Change(loss=loss, norm=norm)
        if change.size <= LARGEST and abs(loss[known[0]]) <= FIRST:
            yield change


def _measure_change(
    steps: np.ndarray, before: Curve, after: Curve, old: np.ndarray, new: np.ndarray
) -> np.ndarray:
    """Return the relative difference of two versions' values at `steps` [n]."""
    was = dict(zip(before.steps.tolist(), old, strict=True))
    now = dict(zip(after.steps.tolist(), new, strict=True))
    pairs = [(was.get(step, np.nan), now.get(step, np.nan)) for step in steps.tolist()]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.array([b / a - 1 if a else np.nan for a, b in pairs])


def _move(old: Curve, change: _Change) -> Curve:
    norm = old.norm
    if norm is not None and change.norm is not None:
        norm = norm * (1 + change.norm)
    return replace(old, loss=old.loss * (1 + change.loss), norm=norm, notes=[])
