"""Tokens of a run's inputs, counted again: what reading hands to judging."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

#: field of `Counts` → column of the table `recounts`
COLUMNS = {
    "steps": "step",
    "useful": "useful_tokens",
    "total": "total_tokens",
    "digests": "order_digest",
}


@dataclass(frozen=True)
class Counts:
    """Counts of global batches by the inputs: int64 [steps] each, `digests` modulo 2**52."""

    steps: np.ndarray
    useful: np.ndarray
    total: np.ndarray
    digests: np.ndarray
    vocabulary_size: int
    rows_per_epoch: Fraction


@dataclass(frozen=True)
class Recount:
    """Tokens of a run's inputs, counted again; a text says why they were not."""

    counted: Counts | str = "the store or text that it trained on is not at hand"
    # corpus → (rows, useful tokens)
    held_out: dict[str, tuple[int, int]] | str = "the held-out store is not at hand"
    vocabulary_size: int | None = None
    # manifest → the SHA-256 that the run recorded
    inputs: Mapping[str, str | None] = field(default_factory=dict)
    # whether reading failed, so that another call may read what this one could not
    failed: bool = False


def encode(recount: Recount) -> tuple[dict[str, Any], pa.Table]:
    """Return (what JSON holds, the counts by step: columns of the table `recounts`)."""
    head = asdict(replace(recount, counted=""))
    counts = recount.counted
    if isinstance(counts, str):
        head["counted"] = counts
        return head, pa.table({column: pa.array([], pa.int64()) for column in COLUMNS.values()})
    epoch = counts.rows_per_epoch
    head["counted"] = {
        "vocabulary_size": counts.vocabulary_size,
        "rows_per_epoch": [epoch.numerator, epoch.denominator],
    }
    return head, pa.table({column: getattr(counts, name) for name, column in COLUMNS.items()})


def decode(head: Mapping[str, Any], rows: pa.Table) -> Recount:
    """Return the recount that `encode` took apart."""
    values = dict(head)
    if isinstance(values["held_out"], dict):
        values["held_out"] = {name: tuple(n) for name, n in values["held_out"].items()}
    if isinstance(values["counted"], dict):
        arrays: dict[str, np.ndarray] = {
            name: rows[column].to_numpy() for name, column in COLUMNS.items()
        }
        values["counted"] = Counts(
            **arrays,
            vocabulary_size=values["counted"]["vocabulary_size"],
            rows_per_epoch=Fraction(*values["counted"]["rows_per_epoch"]),
        )
    return Recount(**values)
