"""Approach `length-bucketed`: one document a row, beside documents of about its length, padded to the longest of them.

Of every 64 global batches the documents are sorted by length and dealt out again; the batches' order is then shuffled.
So the global order stays a pure function of (seed, step), and little is padded; what is paid for it is that a batch
holds documents of one length, and that batches differ in shape. Documents longer than the sequence length are cut.
"""

from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.data.batches.batch import Batch
from tokenscale.data.batches.stored import checked_manifest
from tokenscale.data.order.digest import row_digest
from tokenscale.data.order.permutation import permute, samples_at
from tokenscale.data.order.shares import share
from tokenscale.data.stores.labels import labels_of
from tokenscale.data.stores.token_list import TokenListStore
from tokenscale.settings.run import RunSettings

#: global batches whose documents are sorted together
WINDOW = 64
#: positions of a row are a multiple of this, so that few shapes occur
MULTIPLE = 64


class BucketedBatches:
    """See `batch.Batches`. The state is the step alone."""

    def __init__(self, store: TokenListStore, run: RunSettings, rank: int, world_size: int):
        self.vocabulary_size: int = store.manifest["vocabulary_size"]
        self._pad_id: int = store.manifest["padding"]["id"]
        self._store, self._sequence_length = store, run.sequence_length
        self._global_batch, self._seed = run.global_batch, run.effective_seed
        self._slots = np.array(share(run.global_batch, rank, world_size), dtype=np.int64)
        self._step, self._window = 0, -1
        store.lengths_of(np.zeros(0, dtype=np.int64))  # read here, not by the first batch

    def rows_per_epoch(self) -> float:
        """See `batch.Batches`."""
        return len(self._store)

    def next(self) -> Batch:
        """This rank's share of the next global batch; as wide as the longest document of the global batch needs."""
        step = self._step
        if step // WINDOW != self._window:
            self._sort(step // WINDOW)
        documents, lengths = self._documents[step % WINDOW], self._lengths[step % WINDOW]
        width = min(self._sequence_length, -(-(int(lengths.max()) - 1) // MULTIPLE) * MULTIPLE or MULTIPLE) + 1
        tokens = np.full((len(self._slots), width), self._pad_id, dtype=np.int64)
        for row, document in zip(tokens, documents[self._slots].tolist(), strict=True):
            ids = self._store.document(document)[:width]
            row[: len(ids)] = ids
        labels = labels_of(tokens, lengths=np.minimum(lengths[self._slots], width))
        self._step = step + 1
        return Batch.of(tokens[:, :-1], labels, row_digest(step, self._slots, documents[self._slots]))

    def state(self) -> dict[str, Any]:
        """{"step": the next step}."""
        return {"step": self._step}

    def seek(self, state: dict[str, Any]) -> None:
        """Go to a step."""
        self._step = int(state["step"])

    def _sort(self, window: int) -> None:
        places = window * WINDOW * self._global_batch + np.arange(WINDOW * self._global_batch, dtype=np.int64)
        documents = samples_at(places, len(self._store), self._seed)
        lengths = self._store.lengths_of(documents)
        by_length = np.argsort(lengths, kind="stable").reshape(WINDOW, self._global_batch)
        shuffled = by_length[permute(np.arange(WINDOW), WINDOW, self._seed, epoch=window)]
        self._documents, self._lengths, self._window = documents[shuffled], lengths[shuffled], window


def open_batches(
    run: RunSettings,
    *,
    corpus_directory: Path | None,
    tokenizer_directory: Path | None,
    store_directory: Path | None,
    rank: int,
    world_size: int,
) -> BucketedBatches:
    """Batches from the store."""
    manifest = checked_manifest(run, store_directory, corpus_directory, tokenizer_directory)
    return BucketedBatches(TokenListStore(store_directory, manifest), run, rank, world_size)
