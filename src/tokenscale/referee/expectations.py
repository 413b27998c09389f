"""What recorded values must equal or lie within: one table, from which the validity of every run
follows.

An expectation states the value, what it must be, what that is known from, its tolerance, and the
word for a run that violates it. `invalid`: a number from the run would be wrong. `suspect`: the
numbers may be right, and a person should look. `caution`: the numbers are right, and a reader
should know. An expectation without its reference is listed as not checked. It never passes.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from tokenscale.analysis.recount import Recount
from tokenscale.analysis.steps import Steps
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.run import OURS, RunSettings

Row = dict[str, Any]
Find = Callable[[Any], Iterable[Any]]
Word = Literal["invalid", "suspect", "caution"]
WORDS: tuple[Word, ...] = ("invalid", "suspect", "caution")


class OneSource(NamedTuple):
    """A value that nothing at hand can contradict: the quantity that the page reports of it, its
    column in the queries `inventory` or `validation` (both empty for a label), and why.
    """

    quantity: str
    column: str
    why: str


#: why a run's steps show no slowdown, which readers look for without registering `steadiness`
TOO_NOISY = "its steps vary so much"
#: field of logs or run.json that no expectation compares with a second witness → its entry
ONE_SOURCE = {
    "run.json hardware.load_average_1min": OneSource(
        "load average", column="load_average", why="the machine's state, read once"
    ),
    "run.json git.changes_sha256": OneSource(
        "", column="", why="a label: the hashes of the source files are compared"
    ),
    "validation correct_tokens": OneSource(
        "validation accuracy", column="accuracy", why="counted by the validation alone"
    ),
    "run.json text_lost": OneSource(
        "lost text", column="text_lost", why="counted by the tokenizer's encoder alone"
    ),
    "run.json text_unknown": OneSource(
        "unknown ids", column="text_unknown", why="counted by the tokenizer's encoder alone"
    ),
}


class NotCheckedError(Exception):
    """The reference of an expectation is absent; the message says which."""


@dataclass(frozen=True)
class Expectation:
    """A line of the table. `find(evidence)` yields a sentence for each violation; between runs,
    (run id, sentence).

    `find` raises NotCheckedError where its reference is absent.
    """

    value: str
    must: str
    known_from: str
    tolerance: str
    word: Word
    find: Find


#: expectations of one run, and those between the runs of an experiment
OF_A_RUN: list[Expectation] = []
BETWEEN_RUNS: list[Expectation] = []


def expect(
    value: str,
    must: str,
    known_from: str,
    word: Word,
    tolerance: str = "none",
    of: list[Expectation] = OF_A_RUN,
) -> Callable[[Find], Find]:
    """Register the decorated function as the `find` of an expectation."""

    def register(find: Find) -> Find:
        of.append(
            Expectation(
                value=value,
                must=must,
                known_from=known_from,
                tolerance=tolerance,
                word=word,
                find=find,
            )
        )
        return find

    return register


between = functools.partial(expect, of=BETWEEN_RUNS)


@dataclass
class Findings:
    """Sentences about one run by word, and the values that were not checked by reason."""

    sentences: dict[Word, list[str]] = field(default_factory=lambda: {word: [] for word in WORDS})
    unchecked: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def describe_unchecked(self) -> list[str]:
        """Return in words which values were not checked, by reason."""
        return [
            f"{', '.join(dict.fromkeys(values))}: {reason}"
            for reason, values in self.unchecked.items()
        ]

    def encode(self) -> Row:
        """Return the findings as values of JSON."""
        return {"sentences": self.sentences, "unchecked": list(self.unchecked.items())}

    @classmethod
    def decode(cls, values: Row) -> "Findings":
        """Return the findings that `encode` took apart."""
        unchecked: dict[str, list[str]] = defaultdict(list, map(tuple, values["unchecked"]))
        return cls(sentences=values["sentences"], unchecked=unchecked)


def describe_findings(run_id: str, found: Sequence[Findings]) -> Row:
    """Return the row of the table `validity` of a run, by all that was found of it."""
    columns = {
        "reasons": [s for of in found for s in of.sentences["invalid"] + of.sentences["suspect"]],
        "cautions": [sentence for of in found for sentence in of.sentences["caution"]],
        "unchecked": [text for of in found for text in of.describe_unchecked()],
    }
    worst = (word for word in WORDS[:2] if any(of.sentences[word] for of in found))
    return {
        "run_id": run_id,
        "validity": next(worst, "valid"),
        **{column: "; ".join(dict.fromkeys(texts)) for column, texts in columns.items()},
    }


def judge(evidence: "Evidence") -> Findings:
    """Check one run's evidence against every expectation of a run."""
    found = Findings()
    for expectation in OF_A_RUN:
        try:
            for sentence in expectation.find(evidence) or ():
                found.sentences[expectation.word].append(sentence)
        except NotCheckedError as reason:
            found.unchecked[str(reason)].append(expectation.value)
    return found


def judge_together(evidence: object, run_ids: Iterable[str]) -> dict[str, Findings]:
    """Check the runs of an experiment against every expectation between runs. Return run id →
    findings.

    An expectation between runs that was not checked is listed with every run.
    """
    found = {run_id: Findings() for run_id in run_ids}
    for expectation in BETWEEN_RUNS:
        try:
            for run_id, sentence in expectation.find(evidence) or ():
                found[run_id].sentences[expectation.word].append(sentence)
        except NotCheckedError as reason:
            for findings in found.values():
                findings.unchecked[str(reason)].append(expectation.value)
    return found


@dataclass(frozen=True)
class Evidence:
    """Logs and records of one run. A text in place of a recount says why it is missing."""

    row: Row  # of the table `runs`
    record: Row  # run.json; empty where it is not readable
    run: RunSettings | None
    raw: Steps  # of all merged attempts, by attempt and rank in the order of the files
    steps: Steps  # merged
    events: list[Row]
    spans: pa.Table
    planned: RunSettings | None = None  # settings in the run table
    trouble: str | None = None  # why run.json is not readable
    changed: tuple[str, ...] = ()  # logs that differ from their sealed hashes
    copies: tuple[str, ...] = ()  # logs that repeat another one, in words
    recount: Recount = Recount()

    @property
    def settings(self) -> RunSettings:
        """Settings of a run that this project's code logged."""
        if self.row.get("external"):
            raise NotCheckedError("another program's run has no settings")
        if self.run is None:
            raise NotCheckedError("the settings are not readable")
        return self.run

    @property
    def own(self) -> RunSettings:
        """Settings of a run of this project's trainer."""
        if self.settings.arm != OURS:
            raise NotCheckedError("an arm's trainer does not log it")
        return self.settings

    @property
    def shape(self) -> ModelSettings:
        """Model with its vocabulary."""
        model = self.settings.model.with_positions(self.settings.sequence_length)
        if model.transformers is not None:
            raise NotCheckedError("a model of a library is counted by the library")
        if model.vocabulary_size is not None:
            return model
        if self.recount.vocabulary_size is None:
            raise NotCheckedError("the vocabulary size is not at hand")
        return model.with_vocabulary(self.recount.vocabulary_size)

    def get(self, path: str) -> Any:
        """Return a field of run.json by its dotted path; None where there is none."""
        value: Any = self.record
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def recorded(self, path: str) -> Any:
        """Return a field of run.json. Raises NotCheckedError where there is none."""
        if (value := self.get(path)) is None:
            raise NotCheckedError("run.json does not have it")
        return value

    def column(self, name: str) -> np.ndarray:
        """Return a column of the merged step rows. Raises NotCheckedError where no row has a
        value.
        """
        if np.isnan(values := self.steps[name]).all():
            raise NotCheckedError("the logs do not have it")
        return values

    def named(self, event: str) -> list[Row]:
        """Return the events of a name, in the order of the logs."""
        return [found for found in self.events if found["event"] == event]


def at_step(
    steps: Steps, name: str, wrong: np.ndarray, must: np.ndarray | float | str
) -> Iterator[str]:
    """Yield a sentence on the first of the rows that are `wrong`."""
    places = np.flatnonzero(wrong)
    if len(places):
        found = steps[name][places[0]]
        at = int(steps["step"][places[0]])
        expected = (
            must
            if isinstance(must, str)
            else f"{np.broadcast_to(must, len(steps))[places[0]]:.12g}"
        )
        yield (
            f"{name} is {found:.12g} at step {at}, expected {expected} ({len(places)} of "
            f"{len(steps)} rows)"
        )


def differ(what: str, found: Any, expected: Any, tolerance: float = 0.0) -> Iterator[str]:
    """Yield a sentence if a recorded value is not the expected one."""
    numbers = all(
        isinstance(value, (int, float)) and not isinstance(value, bool)
        for value in (found, expected)
    )
    same = (
        math.isclose(found, expected, rel_tol=tolerance)
        if numbers and tolerance
        else found == expected
    )
    if not same:
        yield f"{what} {found}, expected {expected}"
