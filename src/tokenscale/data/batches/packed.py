"""Approach `packed`: rows of a `packed` store."""

import numpy as np

from tokenscale.data.batches.batch import Batch, BatchInputs, document_ids
from tokenscale.data.batches.rows import RowOrder
from tokenscale.data.batches.stored import open_run_stores
from tokenscale.data.batches.streams import open_order
from tokenscale.data.stores.packed import PackedStore
from tokenscale.settings.run import RunSettings

#: batches that the kernel reads ahead from a large store
AHEAD = 8


class PackedBatches(RowOrder):
    """Rows of the store in the global order, read into two alternating sets of buffers.

    The arrays of a batch are overwritten by the second next batch; copy them to keep them longer. Use `out` int32 to
    widen ids later, on a device.
    """

    def __init__(self, store: PackedStore, run: RunSettings, inputs: BatchInputs, out: type = np.int64):
        order = open_order(run, store.sizes)
        super().__init__(order, run, store.manifest["vocabulary_size"], inputs)
        self._store = store
        self._buffers = [store.buffers(len(self.slots), out) for _ in range(2)]
        self._ids: list[np.ndarray | None] = [None, None]
        if run.document_mask:
            self._ids = [np.empty((len(self.slots), store.sequence_length), dtype=np.int32) for _ in range(2)]
        self._total = len(self.slots) * store.sequence_length
        self._whole_stream = run.labels == "stream"

    def prepare(self, indices: np.ndarray) -> None:
        self._plan = self._store.plan(indices)
        for rows in indices[:AHEAD]:
            self._store.will_read(rows)

    def batch(self, i: int, step: int, order_digest: int) -> Batch:
        for rows in self._plan.indices[i + AHEAD : i + AHEAD + 1]:
            self._store.will_read(rows)
        into = self._buffers[step & 1]
        self._store.read(self._plan, i, into)
        useful = self._total - len(self._plan.ignored(i))
        if self._whole_stream:
            useful = self._store.unmask_first_tokens(self._plan.indices[i], into)
        ids = self._ids[step & 1]
        if ids is not None:
            document_ids(self._store.starts(self._plan.indices[i]), out=ids)
        return Batch(into.tokens_bt, into.labels_bt, useful, self._total, order_digest, ids)


def open_batches(run: RunSettings, inputs: BatchInputs) -> PackedBatches:
    (first, *others) = open_run_stores(run, inputs)
    return PackedBatches(PackedStore(*first, others=others), run, inputs)
