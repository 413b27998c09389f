"""Conversion of foreign documents to this project's framing: exactly one BOS before each, and
optionally EOS.

Ids around a document (one or more BOS, an id that ends it) are removed and counted. The text is
never changed. A control id inside a document is an error.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_manifest_file, write_sealed
from tokenscale.data.stores.documents import Chunk, Documents, Origin, frame_documents

#: tokens per read; a longer document is read alone
BLOCK_TOKENS = 1 << 20
#: vocabulary size below which Megatron stores ids as uint16, and we do so in shards
SMALL_VOCABULARY = 65_500

Report = Callable[[int, int], None]


class ForeignFormat:
    """Foreign format, and reader of a source's documents, unchanged.

    `detect(path)` says whether a source has this format, `write(documents, path, rule, count)`
    writes one and returns file → SHA-256. By default a source is one file, and the first file has
    ids of `_type` alone.
    """

    NAME: str
    KEEPS_BOS = True
    files: list[Path]
    dtype: str  # type of the ids
    _type: np.dtype
    doubt: str | None = None  # another possible cause of a wrong id, with the flag that corrects it
    note: str | None = None  # note for the user about how the source was read
    padding_dropped = 0  # tokens excluded by an attention mask so far
    # starts of documents and the end of the source, in tokens, int64 [documents + 1]
    _bounds: np.ndarray
    # number of documents up to the end of each file of `files`, ascending
    _firsts = np.zeros(0, dtype=np.int64)

    @staticmethod
    def list_outputs(path: Path) -> list[Path]:
        """Return what a conversion writes."""
        return [path]

    @staticmethod
    def record_path(path: Path) -> Path:
        return path.with_name(path.name + ".tokenscale.json")

    @staticmethod
    def notes(origin: Origin, ended: bool) -> list[str]:
        """Return notes for readers of what was written. `ended` says whether an id ends each
        document.
        """
        return []

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def find_file(self, document: int) -> Path:
        """Return the file that contains a document, for messages."""
        return self.files[int(np.searchsorted(self._firsts, document, side="right"))]

    def chunks(self, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (concatenated ids of any integer type, lengths int64) of documents [first,
        last).
        """
        for a, b in group_documents(self._bounds, first, last=last):
            yield self._ids(self._bounds[a], end=self._bounds[b]), np.diff(self._bounds[a : b + 1])

    def _ids(self, start: int, end: int) -> np.ndarray:
        return np.fromfile(
            self.files[0], self._type, end - start, offset=start * self._type.itemsize
        )


class ForeignFolder(ForeignFormat):
    """Foreign format whose sources are folders."""

    @staticmethod
    def record_path(path: Path) -> Path:
        return path / "tokenscale.json"


def end_note(origin: Origin, ended: bool, reason: str) -> list[str]:
    """Return the note that no id ends a document, unless one does or the tokenizer has none."""
    if ended or origin.eos_id is None:
        return []
    return [f"no id ends a document: --document-end {origin.eos_id} puts one, {reason}"]


@dataclass(frozen=True)
class Framing:
    """Ids around documents, and the size of the vocabulary that contains all ids."""

    vocabulary_size: int
    bos_id: int
    eos_id: int | None
    document_end: int | None  # id that ends a document in the source
    others: tuple[int, ...] = ()  # ids of PAD and MASK, if the tokenizer is known


@dataclass(frozen=True)
class Counts:
    """Counts of a source, and of the ids removed around its documents."""

    documents: int = 0
    tokens: int = 0
    begin_with_bos: int = 0
    bos_stripped: int = 0
    document_ends_stripped: int = 0
    empty_documents: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            **{name: value + getattr(other, name) for name, value in asdict(self).items()}
        )


def find_texts(
    ids: np.ndarray, lengths: np.ndarray, bos_id: int, end_id: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (first, last) of each document's text in `ids`, without any BOS before and any
    `end_id` after it.
    """
    last = np.cumsum(lengths)
    first = last - lengths
    if not ids.size:
        return first, last
    while (
        end_id is not None
        and (ended := (last > first) & (ids[np.maximum(last, 1) - 1] == end_id)).any()
    ):
        last -= ended
    while (begun := (last > first) & (ids[np.minimum(first, len(ids) - 1)] == bos_id)).any():
        first += begun
    return first, last


class ReframedDocuments:
    """Documents of a foreign source. Call `scan` first: it checks the whole source before anything
    is written.
    """

    def __init__(
        self, reader: ForeignFormat, framing: Framing, eos: bool, report: Report | None = None
    ):
        self.reader = reader
        self.framing = framing
        self.eos = eos
        self.report = report
        self.origin: Origin
        self._seen = [self._stamp(path) for path in reader.files]

    def __len__(self) -> int:
        return len(self.reader)

    def scan(self, report: Report | None = None) -> Counts:
        """Read the whole source once and return its counts.

        Raises UserError for an id outside of the vocabulary, for BOS or an end id inside a
        document, and if only some documents begin with BOS.
        """
        counts = Counts()
        number = 0
        for ids, lengths in self.reader.chunks(0, len(self)):
            counts += self._check_chunk(ids, lengths, number)
            number += len(lengths)
            if report is not None:
                report(len(lengths), ids.nbytes)
        if 0 < counts.begin_with_bos < counts.documents - counts.empty_documents:
            what = "some documents begin with BOS and others do not: the BOS id may be wrong."
            found = (
                f"{counts.begin_with_bos:,} of {counts.documents:,} begin with id "
                f"{self.framing.bos_id}"
            )
            source = self.reader.files[0]
            next_step = "correct --bos-id, or the source"
            raise UserError(
                what, source=source, found=found, expected="all or none", next=next_step
            )
        return counts

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        frame = self.framing
        eos_id = self.framing.eos_id if self.eos else None
        for ids, lengths in self.reader.chunks(first, last):
            starts, ends = find_texts(
                ids,
                lengths,
                bos_id=frame.bos_id,
                end_id=frame.document_end,
            )
            keep = np.zeros(len(ids) + 1, dtype=np.int8)
            np.add.at(keep, starts, 1)
            np.add.at(keep, ends, -1)
            text = ids[np.cumsum(keep[:-1]) > 0].astype(np.int32)
            yield frame_documents(
                text,
                lengths=ends - starts,
                bos_id=frame.bos_id,
                eos_id=eos_id,
            )
            if self.report is not None:
                self.report(len(lengths), ids.nbytes)

    def confirm(self) -> None:
        """Raise UserError if a file of the source has changed since it was checked."""
        for path, seen in zip(self.reader.files, self._seen, strict=True):
            if self._stamp(path) != seen:
                raise UserError(
                    "the source has changed while it was converted.",
                    file=path,
                    next="convert again, when it is whole",
                )

    @staticmethod
    def _stamp(path: Path) -> tuple[int, int]:
        stat = path.stat()
        return stat.st_size, stat.st_mtime_ns

    def _check_chunk(self, ids: np.ndarray, lengths: np.ndarray, number: int) -> Counts:
        """Check a chunk whose first document is `number`, and return its counts. Raises UserError
        as `scan` does.
        """
        frame = self.framing
        if ids.size and not 0 <= ids.min() <= ids.max() < frame.vocabulary_size:
            place = int(np.flatnonzero((ids < 0) | (ids >= frame.vocabulary_size))[0])
            raise self._document_error(
                "an id of the source lies outside the vocabulary.",
                *(lengths, number, place),
                found=f"id {int(ids[place])}",
                expected=f"0 … {frame.vocabulary_size - 1}",
                next=self.reader.doubt
                or "name the tokenizer that made it: --tokenizer FOLDER, or --vocabulary-size N",
            )
        first, last = find_texts(
            ids,
            lengths,
            bos_id=frame.bos_id,
            end_id=frame.document_end,
        )
        control = [
            i
            for i in {frame.bos_id, frame.eos_id, frame.document_end, *frame.others}
            if i is not None
        ]
        places = np.flatnonzero(np.isin(ids, control)) if ids.size else np.zeros(0, np.int64)
        document = np.searchsorted(np.cumsum(lengths), places, side="right")
        inside = places[(places >= first[document]) & (places < last[document])]
        if inside.size:
            place = int(inside[0])
            found = int(ids[place])
            name = "PAD or MASK" if found in frame.others else "an id that ends documents"
            name = "BOS" if found == frame.bos_id else name
            raise self._document_error(
                f"{name} lies inside a document.",
                *(lengths, number, place),
                found=f"id {found}",
                expected=f"id {found} around documents only",
                next="convert what they were cut from, where rows are blocks of joined documents\n"
                "else correct --bos-id, --eos-id, --document-end",
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

    def _document_error(
        self, what: str, lengths: np.ndarray, number: int, place: int, **facts: object
    ) -> UserError:
        document = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
        inside = place - int(lengths[:document].sum())
        where = (
            f"{number + document:,} of {len(self):,}, token {inside:,} of "
            f"{int(lengths[document]):,} (from 0)"
        )
        return UserError(
            what, source=self.reader.find_file(number + document), document=where, **facts
        )


# --------------------------------------------------------------------------------------------------
# outgoing


@dataclass(frozen=True)
class ExportFraming:
    """Ids around documents in an exported file."""

    keep_bos: bool
    document_end: int | None  # appended to each document that does not end with it


@dataclass
class ExportCounts:
    """Counts of exported documents, and of dropped and added ids."""

    documents: int = 0
    tokens: int = 0
    bos_dropped: int = 0
    document_ends_added: int = 0


def export_chunks(
    documents: Documents, rule: ExportFraming, count: ExportCounts
) -> Iterator[Chunk]:
    """Yield all documents with the framing of the foreign format. Updates `count`."""
    for chunk in documents.chunks(0, len(documents)):
        yield export_chunk(chunk, rule, count=count)


def export_chunk(chunk: Chunk, rule: ExportFraming, count: ExportCounts) -> Chunk:
    """Return a chunk with the framing of the foreign format. Updates `count`."""
    ids = chunk.ids
    ends = np.cumsum(chunk.lengths)
    lengths = chunk.lengths
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
    """Yield documents [first, last) as ranges of about BLOCK_TOKENS tokens. `bounds` [documents +
    1] are in tokens.

    >>> list(group_documents(np.array([0, 5, 9, 9, BLOCK_TOKENS + 12]), 0, 4))
    [(0, 3), (3, 4)]
    """
    while first < last:
        end = int(np.searchsorted(bounds, bounds[first] + BLOCK_TOKENS, side="right")) - 1
        end = min(max(end, first + 1), last)
        yield first, end
        first = end


class StoreDocuments:
    """Documents of a store with or without EOS after each; see `documents.Documents`."""

    def __init__(self, reader: Any, manifest: dict[str, Any], eos: bool):
        self._reader = reader
        self._manifest = manifest
        self._eos = eos
        self.report: Callable[[int, int], None] | None = None
        source_keys = (
            *(
                "corpus_manifest_sha256",
                "text_sha256",
                "text_sample",
                "special_token_policy",
                "converted_from",
            ),
        )
        self.origin = Origin(
            tokenizer=manifest["tokenizer"],
            vocabulary_size=manifest["vocabulary_size"],
            bos_id=manifest["bos_id"],
            eos_id=manifest["eos_id"],
            pad_id=manifest["padding"]["id"],
            source={name: manifest[name] for name in source_keys if name in manifest},
            engine=f"the store {manifest['ids_digest']['value'][:12]}",
        )

    def __len__(self) -> int:
        return self._manifest["documents"]

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        has_eos = self._manifest["options"]["eos"]
        for chunk in self._reader.chunks(first, last):
            if self._eos and not has_eos:
                chunk = export_chunk(
                    chunk,
                    rule=ExportFraming(True, document_end=self.origin.eos_id),
                    count=ExportCounts(),
                )
            elif has_eos and not self._eos:
                keep = np.ones(len(chunk.ids), dtype=bool)
                keep[chunk.lengths.cumsum() - 1] = False
                chunk = Chunk(chunk.ids[keep], lengths=chunk.lengths - 1)
            yield chunk
            if self.report is not None:
                self.report(len(chunk.lengths), chunk.ids.nbytes)

    def confirm(self) -> None:
        """Do nothing, since the store's reader has verified its checksums."""


VERSION = 1


def write_record(path: Path, hashes: dict[Path, str], facts: dict[str, Any]) -> None:
    """Write the record of exported files. `hashes` are file → SHA-256."""
    files = {file.name: sha256 for file, sha256 in hashes.items()}
    write_sealed(path, record={"schema_version": VERSION, **facts, "files": files})


def read_record(path: Path) -> dict[str, Any] | None:
    """Read the record, or return None if there is none. Raises UserError for a broken record."""
    if not path.is_file():
        return None
    return read_manifest_file(
        path,
        what="record of a conversion",
        newest=VERSION,
        next=f"rm {path}",
        oldest=VERSION,
        sealed=True,
    )


def check_record(record: dict[str, Any], hashes: dict[Path, str], path: Path) -> None:
    """Raise UserError if a file's hash is not in the record. `hashes` are file → SHA-256; files may
    be renamed.
    """
    known = record["files"]
    for file, sha256 in hashes.items():
        if sha256 not in known.values():
            same = [
                known[n] for n in (file.name, *known) if n in known and n[-4:] == file.name[-4:]
            ]
            what = "the source is not what its record describes."
            expected = same[0] if same else "(none of this kind)"
            hashes_of = {"expected": f"sha256 {expected}", "found": f"sha256 {sha256}"}
            next_step = "convert it again; or remove the record, if the file was changed on purpose"
            raise UserError(what, record=path, file=file.name, **hashes_of, next=next_step)
