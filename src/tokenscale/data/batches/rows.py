"""Batches of rows in the global order; used by padded, pretokenized-padded and packed."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tokenscale.data.batches.batch import Batch, Batches, BatchInputs
from tokenscale.data.order.permutation import ShuffledOrder, rank_slots, row_digests
from tokenscale.settings.run import RunSettings

if TYPE_CHECKING:
    from tokenscale.data.order.mixture import MixtureOrder

#: steps whose order is computed at once, to share NumPy's overhead: BLOCK_STEPS after a seek, which must be fast, then
#: the steps of BLOCK_ROWS rows
BLOCK_STEPS, BLOCK_ROWS = 64, 8192


class RowOrder(Batches):
    """Rows of a source in the global order, from which subclasses build batches."""

    def __init__(
        self, order: "ShuffledOrder | MixtureOrder", run: RunSettings, vocabulary_size: int, inputs: BatchInputs
    ):
        self.vocabulary_size = vocabulary_size
        self.slots = np.array(rank_slots(run.global_batch, inputs.rank, inputs.world_size), dtype=np.int64)
        self._order, self._global_batch = order, run.global_batch
        self._first = 0
        self._digests: list[int] = []

    def prepare(self, indices: np.ndarray) -> None:
        """Set the rows of the next batches, int64 [batches, slots of this rank]."""
        raise NotImplementedError

    def batch(self, i: int, step: int, order_digest: int) -> Batch:
        """Return batch i of the prepared ones."""
        raise NotImplementedError

    def rows_per_epoch(self) -> float:
        return self._order.rows

    def next(self) -> Batch:
        """Return this rank's share of the next global batch."""
        step = self._step
        i = step - self._first
        if not 0 <= i < len(self._digests):
            self._prepare_block(step)
            i = 0
        batch = self.batch(i, step, self._digests[i])
        self._step = step + 1
        return batch

    def _prepare_block(self, step: int) -> None:
        continues = step == self._first + len(self._digests)
        count = max(BLOCK_STEPS, BLOCK_ROWS // max(1, len(self.slots))) if continues and step else BLOCK_STEPS
        count = max(1, min(count, self._order.positions_ahead // self._global_batch))
        steps = np.arange(step, step + count, dtype=np.int64)
        positions = steps[:, None] * self._global_batch + self.slots[None, :]
        indices = self._order.samples(positions)
        self.prepare(indices)
        self._first, self._digests = step, row_digests(steps, self.slots, indices)


class RowBatches(RowOrder):
    """Rows of a source with random access: `read(indices)` returns (tokens_bt, labels_bt), int64 [n, T]."""

    def __init__(
        self,
        read: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
        order: "ShuffledOrder | MixtureOrder",
        run: RunSettings,
        vocabulary_size: int,
        inputs: BatchInputs,
    ):
        super().__init__(order, run, vocabulary_size, inputs)
        self._read = read

    def prepare(self, indices: np.ndarray) -> None:
        self._indices = indices

    def batch(self, i: int, step: int, order_digest: int) -> Batch:
        return Batch.from_arrays(*self._read(self._indices[i]), order_digest)
