"""Documents as others wrote them → documents as we hold them: exactly one BOS before each, and EOS by option.

What others put around a document (BOS once or twice, an id that ends it) is taken off and counted; what lies inside one
is never touched. A control id inside a document means that it is none, and is refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.data.stores.documents import Chunk, Documents, Origin, frame_documents

#: tokens that are read at a time; a longer document is read alone
BLOCK_TOKENS = 1 << 20

Report = Callable[[int, int], None]


class Reader(Protocol):
    """Documents of a foreign format, as they lie there."""

    files: list[Path]
    dtype: str  # of the ids
    doubt: str | None  # what else a wrong id may come from, with the flag that mends it
    note: str | None  # what a person should hear about how it was read
    padding_dropped: int  # tokens left out, so far, because an attention mask says so

    def __len__(self) -> int: ...

    def chunks(self, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids of any integer type, one document after another; lengths int64), documents `first` to `last`."""
        ...


@dataclass(frozen=True)
class Framing:
    """Ids that stand around documents, and the vocabulary that all must lie in."""

    vocabulary_size: int
    bos_id: int
    eos_id: int | None
    document_end: int | None  # what ends a document in the source


@dataclass(frozen=True)
class Counts:
    """What a source holds, and what was taken off its documents."""

    documents: int = 0
    tokens: int = 0
    begin_with_bos: int = 0
    bos_stripped: int = 0
    document_ends_stripped: int = 0
    empty_documents: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


def find_texts(ids: np.ndarray, lengths: np.ndarray, bos_id: int, end_id: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(first, last) of each document's text in `ids`: every BOS in front and every `end_id` behind is left out.

    >>> [array.tolist() for array in find_texts(np.array([1, 1, 7, 8, 2, 9, 1, 2]), np.array([5, 1, 2]), 1, 2)]
    [[2, 5, 7], [4, 6, 7]]
    """
    last = np.cumsum(lengths)
    first = last - lengths
    if not ids.size:
        return first, last
    while end_id is not None and (ended := (last > first) & (ids[np.maximum(last, 1) - 1] == end_id)).any():
        last -= ended
    while (begun := (last > first) & (ids[np.minimum(first, len(ids) - 1)] == bos_id)).any():
        first += begun
    return first, last


class ReframedDocuments:
    """A foreign source as `documents.Documents`. `scan` must have been called: it checks everything before a byte is
    written anywhere."""

    def __init__(self, reader: Reader, framing: Framing, eos: bool, report: Report | None = None):
        self.reader, self.framing, self.eos, self.report = reader, framing, eos, report
        self.origin: Origin
        self._seen = [self._stamp(path) for path in reader.files]

    def __len__(self) -> int:
        return len(self.reader)

    def scan(self, report: Report | None = None) -> Counts:
        """Read all of it once. UserError for an id outside the vocabulary, for BOS or an end inside a
        document, and for BOS before some only."""
        counts, number = Counts(), 0
        for ids, lengths in self.reader.chunks(0, len(self)):
            counts += self._check(ids, lengths, number)
            number += len(lengths)
            if report is not None:
                report(len(lengths), ids.nbytes)
        if 0 < counts.begin_with_bos < counts.documents - counts.empty_documents:
            raise UserError(
                "some documents begin with BOS and others do not: is it that id?",
                source=self.reader.files[0],
                found=f"{counts.begin_with_bos:,} of {counts.documents:,} begin with id {self.framing.bos_id}",
                expected="all or none",
                next="mend --bos-id, or the source",
            )
        return counts

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        """See `documents.Documents`."""
        frame, eos_id = self.framing, self.framing.eos_id if self.eos else None
        for ids, lengths in self.reader.chunks(first, last):
            starts, ends = find_texts(ids, lengths, frame.bos_id, frame.document_end)
            keep = np.zeros(len(ids) + 1, dtype=np.int8)
            np.add.at(keep, starts, 1)
            np.add.at(keep, ends, -1)
            text = ids[np.cumsum(keep[:-1]) > 0].astype(np.int32)
            yield frame_documents(text, ends - starts, frame.bos_id, eos_id)
            if self.report is not None:
                self.report(len(lengths), ids.nbytes)

    def confirm(self) -> None:
        """Raise UserError where a file of the source has changed since it was checked."""
        for path, seen in zip(self.reader.files, self._seen, strict=True):
            if self._stamp(path) != seen:
                raise UserError(
                    "the source has changed while it was converted.", file=path, next="convert again, when it is whole"
                )

    @staticmethod
    def _stamp(path: Path) -> tuple[int, int]:
        stat = path.stat()
        return stat.st_size, stat.st_mtime_ns

    def _check(self, ids: np.ndarray, lengths: np.ndarray, number: int) -> Counts:
        frame = self.framing
        if ids.size and not 0 <= ids.min() <= ids.max() < frame.vocabulary_size:
            place = int(np.flatnonzero((ids < 0) | (ids >= frame.vocabulary_size))[0])
            raise self._refused(
                "an id of the source lies outside the vocabulary.",
                *(lengths, number, place),
                found=f"id {int(ids[place])}",
                expected=f"0 … {frame.vocabulary_size - 1}",
                next=self.reader.doubt or "name the tokenizer that made it: --tokenizer FOLDER, or --vocabulary-size N",
            )
        first, last = find_texts(ids, lengths, frame.bos_id, frame.document_end)
        control = [i for i in {frame.bos_id, frame.eos_id, frame.document_end} if i is not None]
        places = np.flatnonzero(np.isin(ids, control)) if ids.size else np.zeros(0, np.int64)
        document = np.searchsorted(np.cumsum(lengths), places, side="right")
        inside = places[(places >= first[document]) & (places < last[document])]
        if inside.size:
            place = int(inside[0])
            found = int(ids[place])
            name = "BOS" if found == frame.bos_id else "an id that ends documents"
            raise self._refused(
                f"{name} lies inside a document.",
                *(lengths, number, place),
                found=f"id {found}",
                expected=f"id {found} around documents only",
                next="convert what they were cut from, where rows are blocks of joined documents\n"
                "else mend --bos-id, --eos-id, --document-end",
            )
        starts = np.cumsum(lengths) - lengths
        return Counts(
            documents=len(lengths),
            tokens=len(ids),
            begin_with_bos=int(np.count_nonzero(first > starts)),
            bos_stripped=int((first - starts).sum()),
            document_ends_stripped=int((starts + lengths - last).sum()),
            empty_documents=int(np.count_nonzero(first == last)),
        )

    def _refused(self, what: str, lengths: np.ndarray, number: int, place: int, **facts: object) -> UserError:
        document = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
        inside = place - int(lengths[:document].sum())
        where = f"{number + document:,} of {len(self):,}, token {inside:,} of {int(lengths[document]):,} (from 0)"
        return UserError(what, source=self.reader.files[0], document=where, **facts)


# ------------------------------------------------------------------------------------------------------------ outgoing


@dataclass(frozen=True)
class ExportFraming:
    """How documents leave for a foreign format."""

    keep_bos: bool
    document_end: int | None  # appended to each document that does not end with it already


@dataclass
class ExportCounts:
    """What became of the documents."""

    documents: int = 0
    tokens: int = 0
    bos_dropped: int = 0
    document_ends_added: int = 0


def export_chunks(documents: Documents, rule: ExportFraming, count: ExportCounts) -> Iterator[Chunk]:
    """All documents as the foreign format shall hold them; `count` is kept up to date."""
    for chunk in documents.chunks(0, len(documents)):
        yield export_chunk(chunk, rule, count)


def export_chunk(chunk: Chunk, rule: ExportFraming, count: ExportCounts) -> Chunk:
    """Some of them.

    >>> chunk = Chunk(np.array([1, 7, 8, 2, 1], np.int32), np.array([4, 1]))
    >>> export_chunk(chunk, ExportFraming(keep_bos=False, document_end=2), ExportCounts()).ids.tolist()
    [7, 8, 2, 2]
    """
    ids, ends, lengths = chunk.ids, np.cumsum(chunk.lengths), chunk.lengths
    keep = np.ones(len(ids), dtype=bool)
    if not rule.keep_bos:
        keep[ends - lengths] = False
        lengths = lengths - 1
        count.bos_dropped += len(lengths)
    if rule.document_end is None:
        text = ids[keep]
    else:
        missing = (lengths == 0) | (ids[ends - 1] != rule.document_end)
        lengths = lengths + missing
        text = np.full(lengths.sum(), rule.document_end, dtype=np.int32)
        place = np.ones(len(text), dtype=bool)
        place[(np.cumsum(lengths) - 1)[missing]] = False
        text[place] = ids[keep]
        count.document_ends_added += int(np.count_nonzero(missing))
    count.documents += len(lengths)
    count.tokens += len(text)
    return Chunk(text, lengths)


def group_documents(bounds: np.ndarray, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Documents `first` to `last` in groups of about BLOCK_TOKENS tokens; `bounds` [documents + 1] in tokens.

    >>> list(group_documents(np.array([0, 5, 9, 9, BLOCK_TOKENS + 12]), 0, 4))
    [(0, 3), (3, 4)]
    """
    while first < last:
        end = int(np.searchsorted(bounds, bounds[first] + BLOCK_TOKENS, side="right")) - 1
        end = min(max(end, first + 1), last)
        yield first, end
        first = end
