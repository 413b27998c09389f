"""Documents as ids: exactly one BOS, the text, and EOS where the run asks for it; of a pair, EOS behind both parts."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from tokenscale.base.errors import UserError
from tokenscale.base.files import xxh3_128
from tokenscale.data.corpus.raw_text import PAIR
from tokenscale.data.tokenizers.base import Texts, Tokenizer

#: documents whose ids are hashed together
GROUP_DOCUMENTS = 1000


@dataclass(frozen=True)
class Chunk:
    """Some whole documents, in order."""

    ids: np.ndarray  # int32 [sum(lengths)]: one document after another, each with its BOS (and EOS)
    lengths: np.ndarray  # int64 [documents], each at least 1

    def documents(self) -> Iterator[np.ndarray]:
        """One document after another, int32 views."""
        end = 0
        for length in self.lengths.tolist():
            yield self.ids[end : (end := end + length)]

    def part(self, first: int, last: int) -> "Chunk":
        """Documents `first` to `last`, the last one not included; views."""
        ends = np.cumsum(self.lengths)
        start = int(ends[first - 1]) if first else 0
        end = int(ends[last - 1]) if last > first else start
        return Chunk(self.ids[start:end], self.lengths[first:last])


@dataclass(frozen=True)
class Origin:
    """Where ids come from, as far as a store's manifest says it: equal ids of one origin give an equal manifest."""

    tokenizer: dict[str, Any]  # name, kind, file_sha256
    vocabulary_size: int
    bos_id: int
    eos_id: int | None
    pad_id: int
    source: dict[str, Any]  # hashes of the text, or of the files that were converted
    engine: str = ""  # what made the ids; for the build record, never for the manifest
    ids_digest: str | None = None  # of all documents, where it is known before they are written
    command: str | None = None  # what writes the store again, where no rule of the workflow does; for the build record


class Documents(Protocol):
    """What a format writes: documents in an order that does not change, from any of them on."""

    origin: Origin
    #: receives (documents, UTF-8 bytes) of each chunk
    report: Callable[[int, int], None] | None

    def __len__(self) -> int: ...

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        """Documents `first` to `last`, the last one not included."""
        ...

    def confirm(self) -> None:
        """Before the store is sealed: raise where these ids must not be trusted."""
        ...


def encode_documents(tokenizer: Tokenizer, texts: Texts, eos: bool, pairs: bool = False) -> list[np.ndarray]:
    """[BOS] + ids (+ [EOS]) of each text, int32; at least one token. Of a pair: BOS + source + EOS + target + EOS.
    UserError as `check_eos` says."""
    return list(encode_chunk(tokenizer, texts, eos, pairs).documents())


def encode_chunk(tokenizer: Tokenizer, texts: Texts, eos: bool, pairs: bool = False) -> Chunk:
    """The same documents as one chunk."""
    check_eos(tokenizer, eos, pairs)
    ids, lengths = tokenizer.encode(split_pairs(texts) if pairs else texts)
    if pairs:
        return frame_pairs(ids, lengths, tokenizer.bos_id, tokenizer.eos_id)
    return frame_documents(ids, lengths, tokenizer.bos_id, tokenizer.eos_id if eos else None)


def split_pairs(pairs: Texts) -> Texts:
    """Source, target, source, target, … of documents that are pairs; each holds `PAIR` once."""
    if isinstance(pairs, pa.Array):
        import pyarrow.compute as pc  # takes a while to import

        return pc.split_pattern(pairs, PAIR).flatten()
    return [part for pair in pairs for part in pair.split(PAIR)]


def check_eos(tokenizer: Tokenizer, eos: bool, pairs: bool = False) -> None:
    """UserError where documents shall end with EOS and the tokenizer has none; of pairs, where they shall not."""
    if pairs and not eos:
        raise UserError(
            "the parts of a pair end with EOS, and the run asks for none.", key="eos", found="false", next="eos: true"
        )
    if eos and tokenizer.eos_id is None:
        raise UserError(
            f"the tokenizer {tokenizer.name} has no end-of-document token.",
            key="eos",
            next="set `eos` of the tokenizer, or `eos: false` for the run",
        )


def frame_documents(ids: np.ndarray, lengths: np.ndarray, bos_id: int, eos_id: int | None) -> Chunk:
    """Documents with BOS before and, where given, EOS behind each; `ids` int32 [sum(lengths)].

    >>> frame_documents(np.array([5, 6, 7], np.int32), np.array([2, 0, 1]), 0, 1).ids.tolist()
    [0, 5, 6, 1, 0, 1, 0, 7, 1]
    """
    more = 1 if eos_id is None else 2
    result = np.empty(len(ids) + more * len(lengths), dtype=np.int32)
    read = written = 0
    for length in lengths.tolist():  # a slice a document is faster than any mask over all ids
        result[written] = bos_id
        result[written + 1 : written + 1 + length] = ids[read : read + length]
        read += length
        written += length + more
        if eos_id is not None:
            result[written - 1] = eos_id
    return Chunk(result, lengths + more)


def frame_pairs(ids: np.ndarray, lengths: np.ndarray, bos_id: int, eos_id: int) -> Chunk:
    """Documents of two parts each; `ids` int32 [sum(lengths)], `lengths` [2 * documents], source, target, source, …

    >>> frame_pairs(np.array([5, 6, 7], np.int32), np.array([2, 1]), 0, 1).ids.tolist()
    [0, 5, 6, 1, 7, 1]
    """
    parts = frame_documents(ids, lengths, bos_id, eos_id)
    keep = np.ones(len(parts.ids), dtype=bool)
    keep[(np.cumsum(parts.lengths) - parts.lengths)[1::2]] = False  # the BOS of targets
    return Chunk(parts.ids[keep], parts.lengths[0::2] + parts.lengths[1::2] - 1)


class IdsDigest:
    """One hash over all documents in order, uncut, whatever a format does with them.

    For every 1,000 documents: XXH3-128 of their ids (int32, little-endian), one after another, and of their lengths
    (int64); then SHA-256 over these. Groups can be hashed apart, so a store can be written in parts.
    """

    ALGORITHM = "sha256 of xxh3-128 of ids and lengths by 1,000 documents"

    def __init__(self) -> None:
        self.groups: list[bytes] = []
        self._ids = xxh3_128()
        self._lengths: list[np.ndarray] = []
        self._documents = 0

    def add(self, chunk: Chunk) -> None:
        """Take in the next documents."""
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

    def close(self) -> None:
        """End a group that is not full: at the end of all documents, or of a part of so many groups."""
        if self._documents:
            self._ids.update(np.ascontiguousarray(np.concatenate(self._lengths), dtype="<i8"))
            self.groups.append(self._ids.digest())
        self._ids, self._lengths, self._documents = xxh3_128(), [], 0

    @staticmethod
    def combine(groups: Sequence[bytes]) -> str:
        """The hash of all groups, in hex."""
        return hashlib.sha256(b"".join(groups)).hexdigest()
