"""Batch of a training step, and the interface of batch sources."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from tokenscale.data.stores.labels import IGNORED


@dataclass(frozen=True)
class Batch:
    """A rank's share of one global batch. A rank without rows has shapes [0, T]."""

    tokens_bt: np.ndarray  # int64 [rows, T]
    labels_bt: np.ndarray  # int64 [rows, T], −100 for ignored labels
    useful_tokens: int  # labels that are not ignored
    total_tokens: int  # rows * T
    order_digest: int  # summed over ranks modulo 2**52 (data/order/digest.py)
    document_ids_bt: np.ndarray | None = None  # int32 [rows, T], if the run uses a document mask

    @classmethod
    def from_arrays(cls, tokens_bt: np.ndarray, labels_bt: np.ndarray, order_digest: int) -> "Batch":
        """Return a batch of these arrays, with useful tokens counted."""
        useful = int(np.count_nonzero(labels_bt != IGNORED))
        return cls(tokens_bt, labels_bt, useful, tokens_bt.size, order_digest)

    def copy(self) -> "Batch":
        """The same batch in memory of its own."""
        ids = None if self.document_ids_bt is None else self.document_ids_bt.copy()
        return replace(self, tokens_bt=self.tokens_bt.copy(), labels_bt=self.labels_bt.copy(), document_ids_bt=ids)


class Batches(Protocol):
    """The endless sequence of global batches, as one rank sees it."""

    vocabulary_size: int

    def rows_per_epoch(self) -> float:
        """Rows of one pass over the data; of a stream, its tokens divided by the sequence length. Where documents are
        tokenized while training, a stream has to tokenize them all to say so."""
        ...

    def next(self) -> Batch:
        """This rank's share of the next global batch. Its arrays may be written anew when the next but one is asked
        for (`Batch.copy` keeps one longer)."""
        ...

    def state(self) -> dict[str, Any]:
        """Where the next batch begins, as plain JSON."""
        ...

    def seek(self, state: dict[str, Any]) -> None:
        """Go to where `state` says. States of any world size fit."""
        ...


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One state of what all ranks returned at the same step; it serves every rank of every later world size.

    Raises ValueError where the ranks stood at different steps: such a checkpoint was never valid.
    """
    if len({state["step"] for state in states}) != 1:
        raise ValueError(f"ranks at different steps: {sorted(state['step'] for state in states)}")
    slots = {slot: where for state in states for slot, where in state.get("slots", {}).items()}
    return {"step": states[0]["step"], **({"slots": slots} if slots else {})}


def document_ids(starts_bt: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Which piece of its row each token belongs to, counted from 0; int32 [n, T], written to `out` where it is given.

    Numbers are those of the row, not of the corpus: tokens see each other where row and number are equal.

    >>> document_ids(np.array([[True, False, True], [True, True, True]])).tolist()
    [[0, 0, 1], [0, 1, 2]]
    """
    _check_starts(starts_bt)
    ids = np.cumsum(starts_bt, axis=1, dtype=np.int32, out=out)
    ids -= 1
    return ids


def cu_seqlens(starts_bt: np.ndarray) -> tuple[np.ndarray, int]:
    """(cumulative lengths of the pieces of the batch flattened to n * T tokens, int32 [pieces + 1]; the longest piece).

    FlashAttention's convention for `flash_attn_varlen_func`: the first is 0, the last n * T, piece i is tokens
    [cu[i], cu[i + 1]); no piece goes on in the next row.

    >>> bounds, longest = cu_seqlens(np.array([[True, False, True], [True, False, False]]))
    >>> bounds.tolist(), longest
    ([0, 2, 3, 6], 3)
    """
    _check_starts(starts_bt)
    if starts_bt.size > np.iinfo(np.int32).max:
        raise ValueError(f"{starts_bt.size:,} tokens are more than int32 bounds can say")
    bounds = np.append(np.flatnonzero(starts_bt), starts_bt.size).astype(np.int32)
    return bounds, int(np.diff(bounds).max(initial=0))


def _check_starts(starts_bt: np.ndarray) -> None:
    if starts_bt.dtype != bool or not starts_bt[:, :1].all():
        raise ValueError("starts are bool [n, T], and every row begins with one")
