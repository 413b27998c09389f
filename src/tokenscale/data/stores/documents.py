"""Documents as token ids: BOS, text, and optionally EOS; pairs have EOS after both parts."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from xxhash import xxh3_128

#: documents per hashed group
GROUP_DOCUMENTS = 1000


@dataclass(frozen=True)
class Chunk:
    """Consecutive whole documents."""

    ids: np.ndarray  # int32 [sum(lengths)]: concatenated documents, each with BOS (and EOS)
    lengths: np.ndarray  # int64 [documents], each at least 1

    def documents(self) -> Iterator[np.ndarray]:
        """Yield the documents as int32 views."""
        end = 0
        for length in self.lengths.tolist():
            yield self.ids[end : (end := end + length)]

    def part(self, first: int, last: int) -> "Chunk":
        """Return documents [first, last) as views."""
        ends = np.cumsum(self.lengths)
        start = int(ends[first - 1]) if first else 0
        end = int(ends[last - 1]) if last > first else start
        return Chunk(self.ids[start:end], lengths=self.lengths[first:last])


@dataclass(frozen=True)
class Origin:
    """Origin of ids as recorded in a store's manifest: equal ids and origin give an equal
    manifest.
    """

    tokenizer: dict[str, Any]  # name, kind, file_sha256
    vocabulary_size: int
    bos_id: int
    eos_id: int | None
    pad_id: int
    source: dict[str, Any]  # hashes of the text, or of converted files
    engine: str = ""  # tokenizer engine; for the build record, not for the manifest
    # command that writes the store again, without a workflow rule; for the build record
    command: str | None = None


class Documents(Protocol):
    """Source of documents in a fixed order, readable from any document on."""

    origin: Origin
    #: receives (documents, UTF-8 bytes) of each chunk
    report: Callable[[int, int], None] | None

    def __len__(self) -> int: ...

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        """Yield documents [first, last)."""
        ...

    def confirm(self) -> None:
        """Raise if the ids are wrong. Called before the store is sealed."""
        ...


class DocumentRange:
    """Documents of part k of n: consecutive documents, in whole groups of the digest; see
    `Documents`.
    """

    def __init__(self, documents: Documents, number: int, parts: int):
        self.documents = documents
        self.number = number
        self.parts = parts
        self.origin = documents.origin
        self.report = documents.report
        groups = -(-len(documents) // GROUP_DOCUMENTS)
        self.first, self.last = (
            min(len(documents), groups * k // parts * GROUP_DOCUMENTS) for k in (number, number + 1)
        )

    def __len__(self) -> int:
        return self.last - self.first

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        return self.documents.chunks(self.first + first, self.first + last)

    def confirm(self) -> None:
        self.documents.confirm()


def frame_documents(ids: np.ndarray, lengths: np.ndarray, bos_id: int, eos_id: int | None) -> Chunk:
    """Add BOS before and optionally EOS after each document; `ids` int32 [sum(lengths)]."""
    more = 1 if eos_id is None else 2
    result = np.empty(len(ids) + more * len(lengths), dtype=np.int32)
    read = written = 0
    for length in lengths.tolist():  # slices per document are faster than masks over all ids
        result[written] = bos_id
        result[written + 1 : written + 1 + length] = ids[read : read + length]
        read += length
        written += length + more
        if eos_id is not None:
            result[written - 1] = eos_id
    return Chunk(result, lengths=lengths + more)


def frame_pairs(ids: np.ndarray, lengths: np.ndarray, bos_id: int, eos_id: int) -> Chunk:
    """Add control ids to pairs; `ids` int32 [sum(lengths)], `lengths` [2 * documents] of source,
    target, source, …

    >>> frame_pairs(np.array([5, 6, 7], np.int32), np.array([2, 1]), 0, 1).ids.tolist()
    [0, 5, 6, 1, 7, 1]
    """
    parts = frame_documents(
        ids,
        lengths,
        bos_id=bos_id,
        eos_id=eos_id,
    )
    keep = np.ones(len(parts.ids), dtype=bool)
    keep[(np.cumsum(parts.lengths) - parts.lengths)[1::2]] = False  # drop the BOS of targets
    return Chunk(parts.ids[keep], lengths=parts.lengths[0::2] + parts.lengths[1::2] - 1)


class IdsDigest:
    """Digest of all documents in order, independent of the storage format.

    XXH3-128 of the ids (int32, little-endian) and lengths (int64) of every 1,000 documents, then
    SHA-256 over these hashes. Groups are hashed independently, so that a store can be written in
    parts.
    """

    ALGORITHM = "sha256 of xxh3-128 of ids and lengths by 1,000 documents"

    def __init__(self) -> None:
        self.groups: list[bytes] = []
        self._ids = xxh3_128()
        self._lengths: list[np.ndarray] = []
        self._documents = 0

    def add(self, chunk: Chunk) -> None:
        """Add the next documents."""
        first = 0
        while first < len(chunk.lengths):
            last = min(len(chunk.lengths), first + GROUP_DOCUMENTS - self._documents)
            part = chunk.part(first, last)
            self._ids.update(np.ascontiguousarray(part.ids, dtype="<i4"))
            self._lengths.append(part.lengths)
            self._documents += last - first
            if self._documents == GROUP_DOCUMENTS:
                self.close()
            first = last

    def close(self) -> list[bytes]:
        """End a partial group, at the end of all documents, and return the groups."""
        if self._documents:
            self._ids.update(np.ascontiguousarray(np.concatenate(self._lengths), dtype="<i8"))
            self.groups.append(self._ids.digest())
        self._ids = xxh3_128()
        self._lengths = []
        self._documents = 0
        return self.groups

    @staticmethod
    def combine(groups: Sequence[bytes]) -> str:
        return hashlib.sha256(b"".join(groups)).hexdigest()


IGNORED = -100


def make_labels(
    rows: np.ndarray, starts: Iterable[np.ndarray] | None = None, lengths: np.ndarray | None = None
) -> np.ndarray:
    """Return labels [n, T], int64, of rows [n, T + 1]: label t is token t + 1, or −100 if that
    token

    - begins a document or a piece (BOS, or a token repeated from the previous piece). `starts` has
      the positions of such tokens for each row, with or without the row's first token, which is
      never a label;
    - is padding: at or after `lengths` [n], in tokens of the row. Ids are not compared, so a pad id
      that also occurs in documents remains a label there.

    `starts` None: only the first token of a row begins a document. `lengths` None: all rows are
    full. A document of n tokens has n − 1 labels in every approach that keeps it whole.
    """
    labels = rows.astype(np.int64)
    if starts is not None:
        for row, positions in zip(labels, starts, strict=True):
            row[positions] = IGNORED
    if lengths is not None:
        for row, length in zip(labels, np.asarray(lengths).tolist(), strict=True):
            row[length:] = IGNORED
    return labels[:, 1:]


def pad_documents(
    documents: Sequence[np.ndarray], width: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and labels, int64 [n, width − 1], of documents cut or right-padded to `width`
    tokens.
    """
    tokens = np.full((len(documents), width), pad_id, dtype=np.int64)
    lengths = [min(len(document), width) for document in documents]
    for row, document, length in zip(tokens, documents, lengths, strict=True):
        row[:length] = document[:length]
    return tokens[:, :-1], make_labels(tokens, lengths=np.array(lengths, dtype=np.int64))
