"""Approach `length-bucketed`: one document per row, batched with documents of similar length and padded to the longest.

The documents of every 64 global batches are sorted by length, split into batches again, and the batches are shuffled.
The global order remains a pure function of (seed, step) and there is little padding. In return, the documents of a
batch have about the same length, and batches differ in shape. Documents longer than the sequence length are cut.
"""

import numpy as np

from tokenscale.data.batches.batch import Batch, Batches, BatchInputs
from tokenscale.data.batches.stored import open_run_stores
from tokenscale.data.batches.streams import join, open_order
from tokenscale.data.order.permutation import permute, rank_slots, row_digest
from tokenscale.data.stores.documents import make_labels
from tokenscale.data.stores.parquet import TokenListStore
from tokenscale.settings.run import RunSettings

#: global batches whose documents are sorted together
WINDOW = 64
#: row lengths are multiples of this, which bounds the number of shapes
MULTIPLE = 64


class BucketedBatches(Batches):
    """Batches of documents of similar length."""

    def __init__(self, stores: list[TokenListStore], run: RunSettings, inputs: BatchInputs):
        self.vocabulary_size: int = stores[0].manifest["vocabulary_size"]
        self._pad_id: int = stores[0].manifest["padding"]["id"]
        self._store, self._sequence_length = join(stores), run.sequence_length
        self._order = open_order(run, [len(store) for store in stores])
        self._global_batch, self._seed = run.global_batch, run.effective_seed
        self._slots = np.array(rank_slots(run.global_batch, inputs.rank, inputs.world_size), dtype=np.int64)
        self._window = -1
        for store in stores:
            store.lengths_of(np.zeros(0, dtype=np.int64))  # load lengths now, not in the first batch

    def rows_per_epoch(self) -> float:
        return len(self._store)

    def next(self) -> Batch:
        """Return this rank's share of the next global batch, as wide as its longest document over all ranks."""
        step = self._step
        if step // WINDOW != self._window:
            self._compute_window(step // WINDOW)
        documents, lengths = self._documents[step % WINDOW], self._lengths[step % WINDOW]
        width = min(self._sequence_length, -(-(int(lengths.max()) - 1) // MULTIPLE) * MULTIPLE or MULTIPLE) + 1
        tokens = np.full((len(self._slots), width), self._pad_id, dtype=np.int64)
        for row, document in zip(tokens, documents[self._slots].tolist(), strict=True):
            ids = self._store.document(document)[:width]
            row[: len(ids)] = ids
        labels = make_labels(tokens, lengths=np.minimum(lengths[self._slots], width))
        self._step = step + 1
        return Batch.from_arrays(tokens[:, :-1], labels, row_digest(step, self._slots, documents[self._slots]))

    def _compute_window(self, window: int) -> None:
        """Compute the batches of a window: sort its documents by length, split and shuffle."""
        positions = window * WINDOW * self._global_batch + np.arange(WINDOW * self._global_batch, dtype=np.int64)
        documents = self._order.samples(positions)
        lengths = self._store.lengths_of(documents)
        by_length = np.argsort(lengths, kind="stable").reshape(WINDOW, self._global_batch)
        shuffled = by_length[permute(np.arange(WINDOW), WINDOW, self._seed, epoch=window)]
        self._documents, self._lengths, self._window = documents[shuffled], lengths[shuffled], window


def open_batches(run: RunSettings, inputs: BatchInputs) -> BucketedBatches:
    opened = open_run_stores(run, inputs)
    return BucketedBatches([TokenListStore(*store) for store in opened], run, inputs)
