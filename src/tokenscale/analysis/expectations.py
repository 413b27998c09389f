"""What recorded values must equal or lie within: one table, from which every run's validity follows.

An expectation states the value, what it must be, what that is known from, its tolerance, and the word for a run that
does not meet it. `invalid`: a number from the run would be wrong. `suspect`: its numbers may be right, and a person
should look. `caution`: its numbers are right, and a reader should know. An expectation whose reference is absent is
listed as not checked, and never passes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from tokenscale.settings.model import ModelSettings
from tokenscale.settings.run import RunSettings

Row = dict[str, Any]
Word = Literal["invalid", "suspect", "caution"]
WORDS: tuple[Word, ...] = ("invalid", "suspect", "caution")


#: steps at the beginning of each attempt that no rate counts (`warmup_steps` of the queries)
WARM_UP_STEPS = 3


class NotCheckedError(Exception):
    """The reference of an expectation is absent; the message says which."""


@dataclass(frozen=True)
class Expectation:
    """A line of the table. `find(evidence)` yields a sentence for each violation; between runs, (run id, sentence).

    `find` raises NotCheckedError where its reference is absent.
    """

    value: str
    must: str
    known_from: str
    tolerance: str
    word: Word
    find: Callable[[Any], Iterable[Any]]


#: expectations of one run, and those between the runs of an experiment
OF_A_RUN: list[Expectation] = []
BETWEEN_RUNS: list[Expectation] = []


def expect(
    value: str, must: str, known_from: str, word: Word, tolerance: str = "none", *, between: bool = False
) -> Callable[[Callable[[Any], Iterable[Any]]], Callable[[Any], Iterable[Any]]]:
    """Register the decorated function as the `find` of an expectation."""

    def register(find: Callable[[Any], Iterable[Any]]) -> Callable[[Any], Iterable[Any]]:
        (BETWEEN_RUNS if between else OF_A_RUN).append(Expectation(value, must, known_from, tolerance, word, find))
        return find

    return register


@dataclass
class Findings:
    """Sentences about one run by word, and the values that were not checked, with the reasons."""

    sentences: dict[Word, list[str]] = field(default_factory=lambda: {word: [] for word in WORDS})
    unchecked: list[str] = field(default_factory=list)

    def add_to(self, row: Row) -> Row:
        """Return a row of the table `runs` with validity, reasons, cautions and unchecked values extended by these."""
        if row.get("validity") == "missing":
            return row
        worst = next((word for word in WORDS[:2] if self.sentences[word] or row.get("validity") == word), "valid")
        reasons = [*self.sentences["invalid"], *self.sentences["suspect"]]
        columns = {"reasons": reasons, "cautions": self.sentences["caution"], "unchecked": self.unchecked}
        return row | {"validity": worst} | {c: _join(row.get(c), texts) for c, texts in columns.items()}


def _join(before: str | None, texts: list[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, [before, *texts])))


def judge(evidence: "Evidence") -> Findings:
    """Check one run's evidence against every expectation of a run."""
    found = Findings()
    for expectation in OF_A_RUN:
        try:
            found.sentences[expectation.word] += expectation.find(evidence)
        except NotCheckedError as reason:
            found.unchecked.append(f"{expectation.value} ({reason})")
    return found


def judge_together(evidence: Any, run_ids: Iterable[str]) -> dict[str, Findings]:
    """Check the runs of an experiment against every expectation between runs. Return run id → findings.

    An expectation between runs that was not checked is listed with every run.
    """
    found = {run_id: Findings() for run_id in run_ids}
    for expectation in BETWEEN_RUNS:
        try:
            for run_id, sentence in expectation.find(evidence):
                found[run_id].sentences[expectation.word].append(sentence)
        except NotCheckedError as reason:
            for findings in found.values():
                findings.unchecked.append(f"{expectation.value} ({reason})")
    return found


@dataclass(frozen=True)
class Evidence:
    """What is at hand of one run."""

    row: Row  # of the table `runs`
    record: Row  # run.json; empty where it is not readable
    run: RunSettings | None
    shape: ModelSettings | None  # the model with its vocabulary
    raw: "Steps"  # of all merged attempts, by attempt and rank in the order of the files
    steps: "Steps"  # merged
    events: list[Row]
    spans: pa.Table


class Steps:
    """Columns of step rows as float64 arrays, null as NaN; sums per step over the ranks that reported it."""

    def __init__(self, rows: pa.Table):
        self._rows = rows
        self._cache: dict[str, np.ndarray] = {}
        self.numbers, self._place = np.unique(self["step"].astype(np.int64), return_inverse=True)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._cache:
            column = self._rows[name]
            column = column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column
            self._cache[name] = column.cast(pa.float64(), safe=False).to_numpy().astype(np.float64)
        return self._cache[name]

    def sums(self, name: str) -> np.ndarray:
        """Sum over ranks, null as 0; one value for each of `numbers`."""
        weights = np.nan_to_num(self[name], posinf=0.0, neginf=0.0)
        return np.bincount(self._place, weights=weights, minlength=len(self.numbers))

    def largest(self, name: str) -> np.ndarray:
        """Maximum over ranks; one value for each of `numbers`, NaN where no rank has one."""
        result = np.full(len(self.numbers), np.nan)
        np.fmax.at(result, self._place, self[name])
        return result

    def whole(self) -> np.ndarray:
        """For each of `numbers`: has every rank of its attempt's world size reported it?"""
        return np.bincount(self._place, minlength=len(self.numbers)) == self.largest("world_size")

    def totals(self) -> tuple[float, float]:
        """(total tokens, seconds) of the complete steps that have a time, all ranks together."""
        times = self.largest("step_s")
        timed = self.whole() & (times > 0)
        return float(self.sums("total_tokens")[timed].sum()), float(times[timed].sum())


def complete_steps(steps: Steps) -> int:
    """Number of steps that have a row of every rank."""
    return int(steps.whole().sum()) if len(steps) else 0
