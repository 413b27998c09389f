"""Batches of stored or made rows: padded, pretokenized-padded and packed."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tokenscale.batches.batch import Batch
from tokenscale.order.digest import row_digest
from tokenscale.order.permutation import samples_at
from tokenscale.order.shares import share
from tokenscale.settings.run import RunSettings

#: steps whose order is worked out at once: NumPy's cost a call is then shared
BLOCK_STEPS = 64


class RowBatches:
    """Rows of a source in the global order. `read(indices)` gives (tokens_bt, labels_bt) of n rows, int64 [n, T].

    The state is the step alone; seeking costs nothing.
    """

    def __init__(
        self,
        read: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
        rows: int,
        run: RunSettings,
        vocabulary_size: int,
        rank: int,
        world_size: int,
    ):
        self.vocabulary_size = vocabulary_size
        self._read, self._rows = read, rows
        self._global_batch, self._seed = run.global_batch, run.effective_seed
        self._slots = np.array(share(run.global_batch, rank, world_size), dtype=np.int64)
        self._step = 0
        self._block_start, self._block = 0, np.zeros((0, len(self._slots)), dtype=np.int64)

    def next(self) -> Batch:
        """This rank's share of the next global batch."""
        step = self._step
        indices = self._order(step)
        tokens, labels = self._read(indices)
        batch = Batch.of(tokens, labels, row_digest(step, self._slots, indices))
        self._step = step + 1
        return batch

    def state(self) -> dict[str, Any]:
        """{"step": the next step}."""
        return {"step": self._step}

    def seek(self, state: dict[str, Any]) -> None:
        """Go to a step."""
        self._step = int(state["step"])

    def _order(self, step: int) -> np.ndarray:
        if not self._block_start <= step < self._block_start + len(self._block):
            steps = np.arange(step, step + BLOCK_STEPS, dtype=np.int64)
            positions = steps[:, None] * self._global_batch + self._slots[None, :]
            self._block_start, self._block = step, samples_at(positions, self._rows, self._seed)
        return self._block[step - self._block_start]
