"""Tokens of a run's inputs, counted again: what reading hands to judging."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np


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
