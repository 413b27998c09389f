"""Batch of a training step, the interface of batch sources, and batches of rows in the global
order.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.data.order.mixture import MixtureOrder
from tokenscale.data.order.permutation import ShuffledOrder, rank_slots, row_digests
from tokenscale.data.stores.documents import IGNORED
from tokenscale.settings.manifests import list_manifests
from tokenscale.settings.run import RunSettings


def count_labels(labels_bt: np.ndarray) -> int:
    """Return the number of labels that are not ignored."""
    return int(np.count_nonzero(labels_bt != IGNORED))


@dataclass(frozen=True)
class Batch:
    """A rank's share of one global batch. A rank without rows has shapes [0, T]."""

    tokens_bt: np.ndarray  # int64 [rows, T]
    labels_bt: np.ndarray  # int64 [rows, T], −100 for ignored labels
    useful_tokens: int  # labels that are not ignored
    total_tokens: int  # rows * T
    order_digest: int  # summed over ranks modulo 2**52 (data/order/permutation.py)
    document_ids_bt: np.ndarray | None = None  # int32 [rows, T], if the run uses a document mask

    @classmethod
    def from_arrays(
        cls, tokens_bt: np.ndarray, labels_bt: np.ndarray, order_digest: int
    ) -> "Batch":
        return cls(tokens_bt, labels_bt, count_labels(labels_bt), tokens_bt.size, order_digest)

    def copy(self) -> "Batch":
        ids = None if self.document_ids_bt is None else self.document_ids_bt.copy()
        return replace(
            self,
            tokens_bt=self.tokens_bt.copy(),
            labels_bt=self.labels_bt.copy(),
            document_ids_bt=ids,
        )


@dataclass(frozen=True)
class Inputs:
    """Folders, or manifests in them, that a rank of a run reads; None for what its data-loading
    strategy does not need.

    `rank` and `world_size` count the ranks that read different rows.
    """

    corpus: Path | None = None
    tokenizer: Path | None = None
    store: Path | None = None
    validation_store: Path | None = None
    rank: int = 0
    world_size: int = 1
    #: share of each corpus's bytes that the tokenizer loses, as far as it is known; added when they
    #: are opened
    losses: list[dict[str, float]] = field(default_factory=list, compare=False)

    def require(self, role: str, run: RunSettings, user: str) -> Path:
        """Return the input with this role, which `user` needs. Raises UserError if it was not
        given.
        """
        if (where := getattr(self, role)) is None:
            what = f"{user} needs the {role.replace('_', ' ')} of the run, but none was given."
            raise UserError(what, run=run.identity, next=f"pass {list_manifests(run)[role]}")
        return Path(where)


class Batches:
    """A rank's shares of the endless sequence of global batches. The state is the next step."""

    #: largest shares of a corpus that the tokenizer loses (`LOST`); empty if they are not known
    lost: Mapping[str, float] = {}
    _step = 0

    def __init__(self, run: RunSettings, vocabulary_size: int, inputs: Inputs):
        self.vocabulary_size = vocabulary_size
        self._global_batch = run.global_batch
        #: places of this rank in each global batch, int64
        self.slots = np.array(
            rank_slots(run.global_batch, rank=inputs.rank, world_size=inputs.world_size),
            dtype=np.int64,
        )

    def rows_per_epoch(self) -> Fraction:
        """Return the rows of one pass over the data. Of a stream: tokens / sequence length."""
        raise NotImplementedError

    def next(self) -> Batch:
        """Return this rank's share of the next global batch, to be copied: the second next may
        overwrite its arrays.
        """
        raise NotImplementedError

    def count_cut(self) -> dict[str, float]:
        """Return corpus → share of its tokens that lie behind the end of rows, counted in documents
        from all over it.

        Empty if rows keep all tokens, or if this source does not see those that they cut.
        """
        return {}

    def state(self) -> dict[str, Any]:
        """Return the position of the next batch, as plain JSON."""
        return {"step": self._step}

    def seek(self, state: dict[str, Any]) -> None:
        """Continue at a state, which may come from any world size."""
        self._step = int(state["step"])


class WrappedBatches(Batches):
    """Batches made of another source's batches, at the positions of that source."""

    def __init__(self, batches: Batches):
        self.vocabulary_size = batches.vocabulary_size
        self.lost = batches.lost
        self._batches = batches

    def rows_per_epoch(self) -> Fraction:
        return self._batches.rows_per_epoch()

    def count_cut(self) -> dict[str, float]:
        return self._batches.count_cut()

    def state(self) -> dict[str, Any]:
        return self._batches.state()

    def seek(self, state: dict[str, Any]) -> None:
        self._batches.seek(state)


@dataclass(frozen=True)
class RowChange:
    """What a run predicts, as a change of the rows of any approach.

    `apply(tokens_bt, labels_bt, numbers)` returns the changed (tokens_bt, labels_bt), int64 [n, …];
    it may overwrite its arguments. `numbers`, int64 [n], are positions in the endless global order
    (step * global_batch + slot), or the numbers of held-out rows. Whatever is random depends on
    them, so that it is the same at every world size. `count(labels_bt)` returns the useful tokens,
    by which the sum of losses is divided. `vocabulary_size` is set if rows have ids beyond those of
    the tokenizer.
    """

    apply: Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
    count: Callable[[np.ndarray], int] = count_labels
    vocabulary_size: int | None = None


class ChangedBatches(WrappedBatches):
    """Batches with a change of their rows."""

    def __init__(self, batches: Batches, change: RowChange, run: RunSettings, inputs: Inputs):
        Batches.__init__(self, run, change.vocabulary_size or batches.vocabulary_size, inputs)
        self._batches = batches
        self._change = change

    def next(self) -> Batch:
        numbers = self._batches.state()["step"] * self._global_batch + self.slots
        batch = self._batches.next()
        tokens, labels = self._change.apply(batch.tokens_bt, batch.labels_bt, numbers)
        return replace(
            batch, tokens_bt=tokens, labels_bt=labels, useful_tokens=self._change.count(labels)
        )


def document_ids(starts_bt: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return the number of each token's piece in its row, from 0; int32 [n, T], written to `out` if
    given.
    """
    if starts_bt.dtype != bool or not starts_bt[:, :1].all():
        raise ValueError("starts are bool [n, T], and every row begins with one")
    ids = np.cumsum(starts_bt, axis=1, dtype=np.int32, out=out)
    ids -= 1
    return ids


class Prefetcher(WrappedBatches):
    """Batches and states of a source, read by a thread one batch ahead.

    Sources reuse their buffers, so the thread copies each batch. The thread starts at the first
    `next`. `close` ends it and resets the source to the consumer's state, so that no batch is lost.
    Call all methods from one thread.
    """

    def __init__(self, batches: Batches):
        super().__init__(batches)
        self._state = batches.state()
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: Future[tuple[Batch, dict[str, Any]]]

    def next(self) -> Batch:
        """Return the next batch. After an error, another call continues at the source's state, in a
        new thread.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "tokenscale-prefetch")
            self._ahead = self._pool.submit(self._read)
        if (error := self._ahead.exception()) is not None:
            self._stop()
            raise error
        batch, self._state = self._ahead.result()
        self._ahead = self._pool.submit(self._read)
        return batch

    def _read(self) -> tuple[Batch, dict[str, Any]]:
        return self._batches.next().copy(), self._batches.state()

    def state(self) -> dict[str, Any]:
        return self._state

    def seek(self, state: dict[str, Any]) -> None:
        """Continue at a state. Batches read ahead are dropped."""
        self._stop()
        self._batches.seek(state)
        self._state = self._batches.state()

    def close(self) -> None:
        """End the thread after its current batch. `next` would start another one."""
        if self._pool is not None:
            self.seek(self._state)

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


#: steps whose order is computed at once, to share NumPy's overhead: BLOCK_STEPS after a seek, which
#: must be fast, then the steps of BLOCK_ROWS rows
BLOCK_STEPS = 64
BLOCK_ROWS = 8192


class RowBatches(Batches):
    """Rows of a source in the global order. `read(indices)` returns (tokens_bt, labels_bt), int64
    [n, T].

    Subclasses that read batches in another way replace `batch`, and `prepare` or `choose`.
    """

    def __init__(
        self,
        read: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None,
        order: ShuffledOrder | MixtureOrder,
        run: RunSettings,
        vocabulary_size: int,
        inputs: Inputs,
    ):
        super().__init__(run, vocabulary_size, inputs)
        self._read: Any = read
        self._order = order
        self._first = 0
        self._digests: list[int] = []

    def choose(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, rows of this rank [steps, slots]) of a block of batches with this step;
        both int64.
        """
        continues = step == self._first + len(self._digests)
        count = (
            max(BLOCK_STEPS, BLOCK_ROWS // max(1, len(self.slots)))
            if continues and step
            else BLOCK_STEPS
        )
        count = max(1, min(count, self._order.positions_ahead // self._global_batch))
        steps = np.arange(step, step + count, dtype=np.int64)
        return steps, self._order.samples(steps[:, None] * self._global_batch + self.slots[None, :])

    def prepare(self, indices: np.ndarray) -> None:
        """Set the rows of the next batches, int64 [batches, slots of this rank]."""
        self._indices = indices

    def batch(self, i: int, step: int, order_digest: int) -> Batch:
        tokens_bt, labels_bt = self._read(self._indices[i])
        return Batch.from_arrays(tokens_bt, labels_bt, order_digest)

    def rows_per_epoch(self) -> Fraction:
        return Fraction(self._order.rows)

    def next(self) -> Batch:
        step = self._step
        i = step - self._first
        if not 0 <= i < len(self._digests):
            steps, indices = self.choose(step)
            self.prepare(indices)
            self._digests = row_digests(steps, self.slots, indices)
            self._first = int(steps[0])
            i = step - self._first
        batch = self.batch(i, step, order_digest=self._digests[i])
        self._step = step + 1
        return batch
