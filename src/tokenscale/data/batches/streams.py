"""Batches of endless token streams, without padding or cutting: padding-free and token-list.

Each slot s of the global batch (B slots) is a stream over documents s, s + B, s + 2B, … of the
endless shuffled order. A row is the next T tokens of its slot's stream, plus the following token as
the last label: a window of T + 1 tokens that advances by T.

With a mixture of k sources each slot has k such streams. A row is the next row of the stream of its
source.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tokenscale.data.batches.batch import Batch, Batches, Inputs
from tokenscale.data.mixtures import open_order
from tokenscale.data.order.permutation import get_samples, row_digest
from tokenscale.data.stores.documents import make_labels
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


#: documents per slot, and steps of a mixture, whose order is computed at once
BLOCK_DOCUMENTS = 256
BLOCK_STEPS = 64


class StreamBatches(Batches):
    """Streams of a rank's slots.

    The state contains the step and, for each slot of the rank, (document, offset) of the next row's
    first token; `document` counts along the endless order. With a mixture it is a list of these
    positions, one for each source. The position of a slot that a state lacks is computed from
    document lengths: quickly for a store, by tokenizing all previous documents for raw text.
    """

    def __init__(
        self, sources: Sequence[Any], run: RunSettings, vocabulary_size: int, inputs: Inputs
    ):
        super().__init__(run, vocabulary_size, inputs)
        self._sources = sources
        self._sequence_length = run.sequence_length
        sizes = [len(documents) for documents in sources]
        order = open_order(run, sizes)
        #: None without a mixture
        self._order: Any = order if run.mixture is not None else None
        firsts = np.cumsum([0, *sizes]).tolist()
        #: streams of each slot, one for each source
        self._streams = [
            [
                _Stream(
                    documents=documents,
                    slot=slot,
                    global_batch=run.global_batch,
                    seed=order.source_seed(number),
                    first_document=firsts[number],
                )
                for number, documents in enumerate(sources)
            ]
            for slot in self.slots.tolist()
        ]
        self._block_start = 0
        self._block = np.zeros((0, len(self.slots)), dtype=np.int64)

    def rows_per_epoch(self) -> float:
        return sum(documents.total_tokens for documents in self._sources) / self._sequence_length

    def next(self) -> Batch:
        rows = len(self._streams)
        tokens = np.empty((rows, self._sequence_length + 1), dtype=np.int64)
        chosen = self._choose_streams()
        first = np.array([(*s.position(), s.document()) for s in chosen], dtype=np.int64).reshape(
            rows, 3
        )
        starts = [stream.fill(row) for stream, row in zip(chosen, tokens, strict=True)]
        digest = row_digest(self._step, self.slots, *first.T)
        self._step += 1
        return Batch.from_arrays(tokens[:, :-1], make_labels(tokens, starts), digest)

    def state(self) -> dict[str, Any]:
        """Return {"step": the next step, "slots": {slot: [document, offset]}}."""
        slots: dict[str, Any] = {}
        for slot, streams in zip(self.slots.tolist(), self._streams, strict=True):
            positions = [list(stream.position()) for stream in streams]
            slots[str(slot)] = positions[0] if self._order is None else positions
        return {"step": self._step, "slots": slots}

    def seek(self, state: dict[str, Any]) -> None:
        """Continue at a state of any world size, or at a step: {"step": k}."""
        super().seek(state)
        known = state.get("slots", {})
        unknown = []
        for n, slot in enumerate(self.slots.tolist()):
            if (positions := known.get(str(slot))) is None:
                unknown.append(n)
                continue
            for stream, position in zip(
                self._streams[n], positions if self._order else [positions], strict=True
            ):
                stream.seek(*position)
        rows = np.full((len(unknown), 1), self._step, dtype=np.int64)
        if unknown and self._order:
            rows = self._order.count_by_slot(
                self._step, self._global_batch, slots=self.slots[unknown]
            )
        for n, counts in zip(unknown, rows.tolist(), strict=True):
            for stream, count in zip(self._streams[n], counts, strict=True):
                stream.seek_token(count * self._sequence_length)

    def _choose_streams(self) -> list["_Stream"]:
        """Return the stream of each slot that has the slot's row of this step."""
        if self._order is None:
            return [stream for (stream,) in self._streams]
        if not self._block_start <= self._step < self._block_start + len(self._block):
            steps = np.arange(self._step, self._step + BLOCK_STEPS, dtype=np.int64)
            self._block_start = self._step
            self._block = self._order.locate(
                steps[:, None] * self._global_batch + self.slots[None, :]
            )[0]
        numbers = self._block[self._step - self._block_start].tolist()
        return [streams[number] for streams, number in zip(self._streams, numbers, strict=True)]


class _Stream:
    """Endless stream of a slot. Its document j is document `slot` + j * `global_batch` of the
    source's global order.

    `first_document` is the number of the source's first document among the documents of all
    sources.
    """

    def __init__(
        self, documents: Any, slot: int, global_batch: int, seed: int, first_document: int
    ):
        self._documents = documents
        self._slot = slot
        self._stride = global_batch
        self._seed = seed
        self._first_document = first_document
        self._block_start = 0
        self._block = np.zeros(0, dtype=np.int64)
        self._ids: np.ndarray | None = None
        # document of this stream, and the next row's first token in it
        self._number = self._offset = 0

    def position(self) -> tuple[int, int]:
        """Return (document along the global order, offset within the document) of the next row's
        first token.
        """
        return self._slot + self._number * self._stride, self._offset

    def document(self) -> int:
        """Return the number, among the documents of all sources, of the document with the next
        row's first token.
        """
        return self._first_document + int(self._order(self._number)[0])

    def seek(self, document: int, offset: int) -> None:
        number, other = divmod(document - self._slot, self._stride)
        if other or number < 0:
            raise ValueError(
                f"document {document} is not in the stream of slot {self._slot} of {self._stride}"
            )
        self._number = number
        self._offset = offset
        self._ids = None

    def seek_token(self, position: int) -> None:
        """Continue at token `position` of the stream, found from document lengths."""
        number = 0
        while True:
            lengths = self._documents.lengths_of(self._order(number))
            ends = np.cumsum(lengths)
            if position < ends[-1]:
                inside = int(np.searchsorted(ends, position, side="right"))
                before = int(ends[inside] - lengths[inside])
                self._number = number + inside
                self._offset = position - before
                self._ids = None
                return
            position -= int(ends[-1])
            number += len(lengths)

    def fill(self, tokens: np.ndarray) -> np.ndarray:
        """Write the next T + 1 tokens and advance by T. Returns the starts of documents."""
        filled = 0
        width = len(tokens)
        starts: list[int] = []
        number = self._number
        offset = self._offset
        ids = self._ids if self._ids is not None else self._document(number)
        while True:
            if offset == 0:
                starts.append(filled)
            count = min(len(ids) - offset, width - filled)
            tokens[filled : filled + count] = ids[offset : offset + count]
            filled += count
            if filled == width:
                self._number = number
                self._offset = offset + count - 1
                self._ids = ids
                return np.array(starts, dtype=np.int64)
            number = number + 1
            offset = 0
            ids = self._document(number)

    def _document(self, number: int) -> np.ndarray:
        return self._documents.document(int(self._order(number)[0]))

    def _order(self, number: int) -> np.ndarray:
        """Return documents of this stream from `number` on: at least one."""
        if not self._block_start <= number < self._block_start + len(self._block):
            numbers = np.arange(number, number + BLOCK_DOCUMENTS, dtype=np.int64)
            positions = self._slot + numbers * self._stride
            self._block = get_samples(positions, n=len(self._documents), seed=self._seed)
            self._block_start = number
        return self._block[number - self._block_start :]
