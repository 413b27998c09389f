"""Batches of one endless token stream, without padding or cutting: padding-free and token-list.

The stream of a source is the documents of each pass in their shuffled order, end to end, one pass
after another. Row n of the source is a window of T + 1 tokens from token n * T on: T inputs, and
the T tokens after them as labels. A pass of a source therefore reads each token once as an input
and once as a label, in total_tokens / T rows. Its last batch reads the beginning of the next pass,
fewer than global_batch * T tokens.

With a mixture, each row is the next row of its source's stream.
"""

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.data.batches.batch import Batch, Batches, Inputs, document_ids
from tokenscale.data.mixtures import open_order
from tokenscale.data.order.mixture import MixtureOrder
from tokenscale.data.order.permutation import get_samples, row_digest
from tokenscale.data.stores.documents import IGNORED
from tokenscale.settings.run import RunSettings


def join(sources: Sequence[Any]) -> Any:
    """Return sources as one: a single source itself, several as `JoinedSources`."""
    return sources[0] if len(sources) == 1 else JoinedSources(sources)


class JoinedSources:
    """Several sources of documents or rows, whose samples are numbered one source after the
    other.
    """

    def __init__(self, sources: Sequence[Any]):
        self.sources = sources
        self._firsts = np.cumsum([0, *map(len, sources)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def document(self, i: int) -> np.ndarray:
        source = int(np.searchsorted(self._firsts, i, side="right")) - 1
        return self.sources[source].document(i - int(self._firsts[source]))

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the lengths of documents in tokens, int64 [n]."""
        found = np.empty(len(indices), dtype=np.int64)
        for source, places, own in self._split(indices):
            found[places] = source.lengths_of(own)
        return found

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and labels of rows, int64 [n, T]."""
        parts = [(places, source.rows(own)) for source, places, own in self._split(indices)]
        if not parts:
            return self.sources[0].rows(indices)
        tokens, labels = (
            np.empty((len(indices), parts[0][1][0].shape[1]), dtype=np.int64) for _ in range(2)
        )
        for places, (own_tokens, own_labels) in parts:
            tokens[places] = own_tokens
            labels[places] = own_labels
        return tokens, labels

    def _split(self, indices: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """Yield (source, places in `indices` of its samples, numbers of these samples within the
        source).
        """
        numbers = np.searchsorted(self._firsts, indices, side="right") - 1
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            yield self.sources[number], places, np.asarray(indices)[places] - self._firsts[number]


#: documents whose order and lengths are computed at once, and steps of a mixture
CHUNK_DOCUMENTS = 1 << 13
BLOCK_STEPS = 64

#: (documents of a source, their numbers int64 [n]) → ids of each
ReadDocuments = Callable[[Any, np.ndarray], list[np.ndarray]]


def read_one_by_one(documents: Any, numbers: np.ndarray) -> list[np.ndarray]:
    return [documents.document(number) for number in numbers.tolist()]


@dataclasses.dataclass(frozen=True)
class Window:
    """Consecutive tokens of a stream, with the documents that they belong to."""

    tokens: np.ndarray  # int64 [tokens]
    documents: np.ndarray  # int64 [documents]: their numbers in the source
    begins: np.ndarray  # int64 [documents]: places of their first tokens, the first at or before 0


class TokenStream:
    """Endless stream of a source's documents in shuffled order.

    All passes have the same number of tokens, so a position's pass is a division. Inside of a pass,
    lengths are summed in chunks of `CHUNK_DOCUMENTS`, when they are first needed: memory holds the
    sums of one chunk, and the ends of the chunks of one pass. Passes of few documents are taken
    together, as many as fit in a chunk. `rebuild` is the command for a source that contradicts
    itself.
    """

    def __init__(self, documents: Any, seed: int, read: ReadDocuments, rebuild: str):
        self.total_tokens: int = documents.total_tokens
        self._source = documents
        self._seed = seed
        self._read = read
        self._rebuild = rebuild
        passes = max(1, CHUNK_DOCUMENTS // len(documents))
        #: documents and tokens of a lap: one pass, or several of few documents
        self._lap_documents = passes * len(documents)
        self._lap_tokens = passes * self.total_tokens
        self._lap = -1
        #: tokens of the lap before each of its chunks, as far as they are known
        self._chunk_firsts: list[int] = []
        self._chunk = -1
        #: documents of the chunk, and the positions of their first tokens and of the chunk's end
        self._documents = np.zeros(0, dtype=np.int64)
        self._begins = np.zeros(1, dtype=np.int64)
        #: document that the last window ended in
        self._last: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=np.int32))

    def read(self, first: int, count: int) -> Window:
        """Return tokens `first` … `first` + `count` - 1 of the stream.

        Raises UserError for a document of another length than its source says.
        """
        stop = first + count
        position = first
        documents = []
        edges = []
        while position < stop:
            self._load(position)
            low = int(np.searchsorted(self._begins, position, side="right")) - 1
            high = min(int(np.searchsorted(self._begins, stop)), len(self._documents))
            documents.append(self._documents[low:high])
            edges.append(self._begins[low:high])
            position = int(self._begins[high])
        edges.append(np.array([position], dtype=np.int64))
        numbers = np.concatenate(documents)
        begins = np.concatenate(edges) - first
        ids = self._read_documents(numbers)
        self._check_lengths(numbers, ids, expected=np.diff(begins))
        self._last = (int(numbers[-1]), ids[-1])
        ids[-1] = ids[-1][: count - int(begins[-2])]
        ids[0] = ids[0][-int(begins[0]) :]
        return Window(np.concatenate(ids, dtype=np.int64), documents=numbers, begins=begins[:-1])

    def _read_documents(self, numbers: np.ndarray) -> list[np.ndarray]:
        known, ids = self._last
        if numbers[0] != known:
            return self._read(self._source, numbers)
        others = self._read(self._source, numbers[1:]) if len(numbers) > 1 else []
        return [ids, *others]

    def _check_lengths(
        self, numbers: np.ndarray, ids: list[np.ndarray], expected: np.ndarray
    ) -> None:
        found = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        if np.array_equal(found, expected):
            return
        place = int(np.flatnonzero(found != expected)[0])
        raise UserError(
            "a document has another length than the one its stream was laid out by.",
            document=f"{numbers[place]:,} of the training documents",
            expected=f"{expected[place]:,} tokens",
            found=f"{found[place]:,}",
            next=self._rebuild,
        )

    def _load(self, position: int) -> None:
        """Load the chunk with a position."""
        lap, inside = divmod(position, self._lap_tokens)
        if lap != self._lap:
            self._lap = lap
            self._chunk_firsts = [0]
        while self._chunk_firsts[-1] <= inside:
            self._load_chunk(len(self._chunk_firsts) - 1)
            self._chunk_firsts.append(int(self._begins[-1]) - lap * self._lap_tokens)
        chunk = bisect_right(self._chunk_firsts, inside) - 1
        if chunk != self._chunk:
            self._load_chunk(chunk)

    def _load_chunk(self, chunk: int) -> None:
        """Load the order and the lengths of a chunk of the lap, whose first token is known."""
        first = chunk * CHUNK_DOCUMENTS
        stop = min(first + CHUNK_DOCUMENTS, self._lap_documents)
        places = self._lap * self._lap_documents + np.arange(first, stop, dtype=np.int64)
        self._documents = get_samples(places, n=len(self._source), seed=self._seed)
        self._begins = np.zeros(len(places) + 1, dtype=np.int64)
        np.cumsum(self._source.lengths_of(self._documents), out=self._begins[1:])
        self._begins += self._lap * self._lap_tokens + self._chunk_firsts[chunk]
        self._chunk = chunk
        end = int(self._begins[-1]) - self._lap * self._lap_tokens
        if stop == self._lap_documents and end != self._lap_tokens:
            passes = self._lap_documents // len(self._source)
            raise UserError(
                "the lengths of the documents do not add up to the tokens of the manifest.",
                documents=f"{len(self._source):,}",
                expected=f"{self.total_tokens:,} tokens  (tokens_total)",
                found=f"{end // passes:,}",
                next=self._rebuild,
            )


class StreamBatches(Batches):
    """Rows of a stream, or of the streams of a mixture. The state is the step.

    `rebuild` has the command that builds each source again.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        run: RunSettings,
        vocabulary_size: int,
        inputs: Inputs,
        rebuild: Sequence[str],
        read: ReadDocuments = read_one_by_one,
    ):
        super().__init__(run, vocabulary_size, inputs)
        self._sequence_length = run.sequence_length
        self._document_mask = run.document_mask
        sizes = [len(documents) for documents in sources]
        self._order = open_order(run, sizes)
        self._streams = [
            TokenStream(
                documents,
                seed=self._order.source_seed(number),
                read=read,
                rebuild=rebuild[number],
            )
            for number, documents in enumerate(sources)
        ]
        #: number of each source's first document among those of all sources
        self._first_documents = np.cumsum([0, *sizes]).tolist()
        self._block_start = 0
        self._block: tuple[np.ndarray, np.ndarray] | None = None

    def rows_per_epoch(self) -> Fraction:
        tokens = sum(stream.total_tokens for stream in self._streams)
        return Fraction(tokens, self._sequence_length)

    def next(self) -> Batch:
        shape = (len(self.slots), self._sequence_length)
        tokens = np.empty(shape, dtype=np.int64)
        labels = np.empty(shape, dtype=np.int64)
        starts = np.zeros(shape, dtype=bool)
        ids = np.empty((2, len(self.slots)), dtype=np.int64)
        for source, places, window in self.windows():
            count = len(tokens[places])
            following = window.tokens[1:].copy()
            begun = window.begins[window.begins > 0]
            following[begun - 1] = IGNORED
            inside = np.zeros(len(following), dtype=bool)
            inside[begun[begun < len(inside)]] = True
            tokens[places] = window.tokens[:-1].reshape(count, -1)
            labels[places] = following.reshape(count, -1)
            starts[places] = inside.reshape(count, -1)
            ids[:, places] = self._identify_rows(source, window, count)
        digest = row_digest(self._step, self.slots, *ids)
        self._step += 1
        batch = Batch.from_arrays(tokens, labels, digest)
        if not self._document_mask:
            return batch
        starts[:, 0] = True
        return dataclasses.replace(batch, document_ids_bt=document_ids(starts))

    def windows(self) -> Iterator[tuple[int, np.ndarray | slice, Window]]:
        """Yield (source, places in this rank's share, window) of the next batch. A window is the rows
        of a source, end to end, and one token more.
        """
        for source, places, first_row in self._choose_rows():
            first = first_row * self._sequence_length
            count = len(self.slots[places]) * self._sequence_length
            yield source, places, self._streams[source].read(first, count + 1)

    def _identify_rows(
        self, source: int, window: Window, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (document among those of all sources, offset in it) of each row's first token."""
        firsts = np.arange(count, dtype=np.int64) * self._sequence_length
        indices = np.searchsorted(window.begins, firsts, side="right") - 1
        documents = self._first_documents[source] + window.documents[indices]
        return documents, firsts - window.begins[indices]

    def _choose_rows(self) -> Iterator[tuple[int, np.ndarray | slice, int]]:
        """Yield (source, places in this rank's share, first row of the source) of this step.

        The rows of a source in a rank's share follow one another: they are read at once.
        """
        if not len(self.slots):
            return
        if not isinstance(self._order, MixtureOrder):
            yield 0, slice(None), self._step * self._global_batch + int(self.slots[0])
            return
        if not 0 <= self._step - self._block_start < BLOCK_STEPS or self._block is None:
            steps = np.arange(self._step, self._step + BLOCK_STEPS, dtype=np.int64)
            self._block_start = self._step
            self._block = self._order.locate(
                steps[:, None] * self._global_batch + self.slots[None, :]
            )
        sources, rows = (part[self._step - self._block_start] for part in self._block)
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            yield source, places, int(rows[places[0]])
