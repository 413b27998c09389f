"""Data-loading strategies that read a token store, without a tokenizer package."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from tokenscale.base.files import sha256_file
from tokenscale.costs.data import BUCKET_MULTIPLE, cut_share
from tokenscale.data.batches.batch import Batch, Batches, Inputs, RowBatches, document_ids
from tokenscale.data.batches.streams import StreamBatches, join
from tokenscale.data.mixtures import list_sources, manifest_path, open_order
from tokenscale.data.order.permutation import permute
from tokenscale.data.stores.documents import pad_documents
from tokenscale.data.stores.manifest import load_reader, open_store, rebuild_command
from tokenscale.data.stores.packed import PackedStore
from tokenscale.data.tokenizers.base import read_tokenizer_manifest
from tokenscale.settings.registry import FORMATS
from tokenscale.settings.run import RunSettings

if TYPE_CHECKING:
    from tokenscale.data.stores.parquet import TokenListStore


def open_run_stores(run: RunSettings, inputs: Inputs) -> list[tuple[Path, dict[str, Any]]]:
    """Check the run's store, or the stores of its mixture, and return each with its manifest.

    `inputs.store` is the folder of the store or of the mixture, or the path of the manifest. Corpus
    and tokenizer are compared if their folders are given. Raises UserError for any mismatch (see
    `stores.manifest.open_store`).
    """
    stores = list_sources(run, where=inputs.require("store", run, f"approach {run.approach}"))
    tokenizer_sha256 = None
    if _exists(inputs.tokenizer):
        tokenizer_sha256 = read_tokenizer_manifest(inputs.tokenizer)["file"]["sha256"]
    corpora: list[Path | None] = [None] * len(stores)
    if _exists(inputs.corpus):
        corpora = [manifest_path(path) for path in list_sources(run, where=inputs.corpus)]
    assert run.store is not None  # the approach reads one
    opened: list[tuple[Path, dict[str, Any]]] = []
    for where, corpus in zip(stores, corpora, strict=True):
        manifest = open_store(
            where,
            expected=run.store,
            requested_by=run.identity,
            tokenizer_name=run.tokenizer.name,
            # the stores of a mixture have the same tokenizer
            tokenizer_sha256=tokenizer_sha256
            or (opened[0][1]["tokenizer"]["file_sha256"] if opened else None),
            vocabulary_size=run.model.vocabulary_size,
            corpus_manifest_sha256=sha256_file(corpus) if corpus is not None else None,
        )
        opened.append((where, manifest))
        inputs.losses.extend([manifest["text_sample"]] if "text_sample" in manifest else [])
    return opened


def _exists(directory: Path | None) -> TypeGuard[Path]:
    return directory is not None and (Path(directory) / "manifest.json").exists()


def _open_readers(run: RunSettings, inputs: Inputs) -> tuple[list[Any], int]:
    """Return the readers of the run's stores, and their vocabulary size. Only the run's own format
    is imported.
    """
    opened = open_run_stores(run, inputs)
    assert run.store is not None  # else it is refused above
    load = load_reader(run.store.format)
    return [load(*store) for store in opened], opened[0][1]["vocabulary_size"]


def open_pretokenized_padded(run: RunSettings, inputs: Inputs) -> RowBatches:
    """Open the rows of a `padded` store, bit-identical to those of the approach `padded`."""
    stores, vocabulary_size = _open_readers(run, inputs)
    order = open_order(run, sizes=[len(store) for store in stores])
    return RowBatches(
        read=join(stores).rows,
        order=order,
        run=run,
        vocabulary_size=vocabulary_size,
        inputs=inputs,
    )


def open_streamed(run: RunSettings, inputs: Inputs) -> StreamBatches:
    """Open the endless stream of a store's documents, bit-identical to that of `padding-free`."""
    stores, vocabulary_size = _open_readers(run, inputs)
    folders = list_sources(run, where=inputs.require("store", run, f"approach {run.approach}"))
    return StreamBatches(
        sources=stores,
        run=run,
        vocabulary_size=vocabulary_size,
        inputs=inputs,
        rebuild=[rebuild_command(folder) for folder in folders],
    )


#: batches that the kernel reads ahead from a large store
AHEAD = 8


class PackedBatches(RowBatches):
    """Rows of the store in the global order, read into two alternating sets of buffers.

    The arrays of a batch are overwritten by the second next batch; copy them to keep them longer.
    Use `out` int32 to widen ids later, on a device.
    """

    def __init__(self, store: PackedStore, run: RunSettings, inputs: Inputs, out: type = np.int64):
        super().__init__(
            None, open_order(run, sizes=store.sizes), run, store.manifest["vocabulary_size"], inputs
        )
        self._store = store
        self._buffers = [store.buffers(len(self.slots), out) for _ in range(2)]
        self._ids: list[np.ndarray | None] = [None, None]
        if run.document_mask:
            self._ids = [
                np.empty((len(self.slots), store.sequence_length), dtype=np.int32) for _ in range(2)
            ]
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
        return Batch(
            tokens_bt=into.tokens_bt,
            labels_bt=into.labels_bt,
            useful_tokens=useful,
            total_tokens=self._total,
            order_digest=order_digest,
            document_ids_bt=ids,
        )


def open_packed(run: RunSettings, inputs: Inputs) -> PackedBatches:
    (first, *others) = open_run_stores(run, inputs)
    return PackedBatches(store=PackedStore(*first, others=others), run=run, inputs=inputs)


#: global batches whose documents are sorted together
WINDOW = 64


class BucketedBatches(RowBatches):
    """One document per row, batched with documents of similar length and padded to the longest.

    The documents of a window, which is 64 global batches or what a pass has left, are sorted by
    length, split into batches again, and the batches are shuffled. The global order remains a pure
    function of (seed, step) and there is little padding. In return, the documents of a batch have
    about the same length, and batches differ in shape. Documents longer than the sequence length
    are cut. A pass over a mixture is as many documents as its corpora have together: one that is
    drawn more often than the others may come several times in a window.
    """

    def __init__(
        self, stores: "list[TokenListStore]", vocabulary_size: int, run: RunSettings, inputs: Inputs
    ):
        super().__init__(
            None,
            open_order(run, sizes=[len(store) for store in stores]),
            run,
            vocabulary_size,
            inputs,
        )
        self._pad_id: int = stores[0].manifest["padding"]["id"]
        self._store = join(stores)
        self._sequence_length = run.sequence_length
        self._seed = run.effective_seed
        self._lengths_by_corpus = {
            c.name: s.lengths for c, s in zip(run.trained_corpora, stores, strict=True)
        }

    def count_cut(self) -> dict[str, float]:
        length = self._sequence_length
        return {
            corpus: float(cut_share(lengths, sequence_length=length))
            for corpus, lengths in self._lengths_by_corpus.items()
        }

    def choose(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the batches of a step's window: its documents sorted by length, split and
        shuffled.
        """
        steps, number = self._find_window(step)
        documents = self._order.samples(
            (steps[:, None] * self._global_batch + np.arange(self._global_batch)).ravel()
        )
        lengths = self._store.lengths_of(documents)
        by_length = np.argsort(lengths, kind="stable").reshape(len(steps), self._global_batch)
        places = permute(np.arange(len(steps)), n=len(steps), seed=self._seed, epoch=number)
        shuffled = by_length[places]
        self._lengths = lengths[shuffled]
        return steps, documents[shuffled][:, self.slots]

    def _find_window(self, step: int) -> tuple[np.ndarray, int]:
        """Return the steps of the window with this step, int64, and a number of its own.

        Windows end with each pass over the documents, so that a pass reads every one: pass e begins
        at step ceil(e * documents / batch).
        """
        number = step * self._global_batch // self._order.rows
        begin, end = (
            -(-epoch * self._order.rows // self._global_batch) for epoch in (number, number + 1)
        )
        first = begin + (step - begin) // WINDOW * WINDOW
        stop = min(first + WINDOW, end)
        return np.arange(first, stop, dtype=np.int64), number + first // WINDOW

    def batch(self, i: int, step: int, order_digest: int) -> Batch:
        """Return a batch as wide as its longest document over all ranks."""
        lengths = self._lengths[i]
        width = (
            min(
                self._sequence_length,
                -(-(int(lengths.max()) - 1) // BUCKET_MULTIPLE) * BUCKET_MULTIPLE
                or BUCKET_MULTIPLE,
            )
            + 1
        )
        documents = [self._store.document(document) for document in self._indices[i].tolist()]
        return Batch.from_arrays(
            *pad_documents(documents, width, pad_id=self._pad_id), order_digest
        )


Opener = Callable[[RunSettings, Inputs], Batches]
#: approach → function that opens its batches
OPENERS: dict[str, Opener] = {
    "pretokenized-padded": open_pretokenized_padded,
    "packed": open_packed,
    "length-bucketed": lambda run, inputs: BucketedBatches(
        *_open_readers(run, inputs), run, inputs
    ),
    **{name: open_streamed for name, form in FORMATS.items() if form.streamed},
}
