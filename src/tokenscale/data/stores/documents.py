"""Documents as token ids: BOS, text, and optionally EOS; pairs have EOS after both parts."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128

from tokenscale.base.errors import UserError
from tokenscale.base.files import sha256_file
from tokenscale.data.corpus.raw_text import PAIR, RawText
from tokenscale.data.tokenizers.backends import REFERENCE, EngineTokenizer
from tokenscale.data.tokenizers.base import Texts, Tokenizer

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
        return Chunk(self.ids[start:end], self.lengths[first:last])


@dataclass(frozen=True)
class Origin:
    """Origin of ids as recorded in a store's manifest: equal ids and origin give an equal manifest."""

    tokenizer: dict[str, Any]  # name, kind, file_sha256
    vocabulary_size: int
    bos_id: int
    eos_id: int | None
    pad_id: int
    source: dict[str, Any]  # hashes of the text, or of converted files
    engine: str = ""  # tokenizer engine; for the build record, not for the manifest
    command: str | None = None  # command that writes the store again, without a workflow rule; for the build record


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
    """Documents of part k of n: consecutive documents, in whole groups of the digest; see `Documents`."""

    def __init__(self, documents: Documents, number: int, parts: int):
        self.documents, self.number, self.parts = documents, number, parts
        self.origin, self.report = documents.origin, documents.report
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


def encode_documents(tokenizer: Tokenizer, texts: Texts, eos: bool, pairs: bool = False) -> list[np.ndarray]:
    """Tokenize texts to [BOS] + ids (+ [EOS]), int32; pairs to BOS + source + EOS + target + EOS. Raises UserError as
    `check_eos` does.
    """
    return list(encode_chunk(tokenizer, texts, eos, pairs).documents())


def encode_chunk(tokenizer: Tokenizer, texts: Texts, eos: bool, pairs: bool = False) -> Chunk:
    """Tokenize texts to one chunk; see `encode_documents`."""
    check_eos(tokenizer, eos, pairs)
    ids, lengths = tokenizer.encode(split_pairs(texts) if pairs else texts)
    if pairs:
        return frame_pairs(ids, lengths, tokenizer.bos_id, tokenizer.eos_id)
    return frame_documents(ids, lengths, tokenizer.bos_id, tokenizer.eos_id if eos else None)


def split_pairs(pairs: Texts) -> Texts:
    """Split pairs at `PAIR` into source, target, source, target, …"""
    if isinstance(pairs, pa.Array):
        import pyarrow.compute as pc  # takes a while to import

        return pc.split_pattern(pairs, PAIR).flatten()
    return [part for pair in pairs for part in pair.split(PAIR)]


def check_eos(tokenizer: Tokenizer, eos: bool, pairs: bool = False) -> None:
    """Raise UserError if EOS is required and the tokenizer has none, or if pairs are encoded without EOS."""
    if pairs and not eos:
        raise UserError("pairs need EOS after both parts.", key="eos", found="false", next="set eos: true")
    if eos and tokenizer.eos_id is None:
        raise UserError(
            f"the tokenizer {tokenizer.name} has no end-of-document token.",
            key="eos",
            next="set `eos` of the tokenizer, or `eos: false` for the run",
        )


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
    return Chunk(result, lengths + more)


def frame_pairs(ids: np.ndarray, lengths: np.ndarray, bos_id: int, eos_id: int) -> Chunk:
    """Add control ids to pairs; `ids` int32 [sum(lengths)], `lengths` [2 * documents] of source, target, source, …

    >>> frame_pairs(np.array([5, 6, 7], np.int32), np.array([2, 1]), 0, 1).ids.tolist()
    [0, 5, 6, 1, 7, 1]
    """
    parts = frame_documents(ids, lengths, bos_id, eos_id)
    keep = np.ones(len(parts.ids), dtype=bool)
    keep[(np.cumsum(parts.lengths) - parts.lengths)[1::2]] = False  # drop the BOS of targets
    return Chunk(parts.ids[keep], parts.lengths[0::2] + parts.lengths[1::2] - 1)


class IdsDigest:
    """Digest of all documents in order, independent of the storage format.

    XXH3-128 of the ids (int32, little-endian) and lengths (int64) of every 1,000 documents, then SHA-256 over these
    hashes. Groups are hashed independently, so that a store can be written in parts.
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

    def close(self) -> None:
        """End a partial group, at the end of all documents."""
        if self._documents:
            self._ids.update(np.ascontiguousarray(np.concatenate(self._lengths), dtype="<i8"))
            self.groups.append(self._ids.digest())
        self._ids, self._lengths, self._documents = xxh3_128(), [], 0

    @staticmethod
    def combine(groups: Sequence[bytes]) -> str:
        return hashlib.sha256(b"".join(groups)).hexdigest()


IGNORED = -100


def make_labels(
    rows: np.ndarray, starts: Iterable[np.ndarray] | None = None, lengths: np.ndarray | None = None
) -> np.ndarray:
    """Return labels [n, T], int64, of rows [n, T + 1]: label t is token t + 1, or −100 if that token

    - begins a document or a piece (BOS, or a token repeated from the previous piece). `starts` has the positions of
      such tokens for each row, with or without the row's first token, which is never a label;
    - is padding: at or after `lengths` [n], in tokens of the row. Ids are not compared, so a pad id that also occurs in
      documents remains a label there.

    `starts` None: only the first token of a row begins a document. `lengths` None: all rows are full. A document of n
    tokens has n − 1 labels in every approach that keeps it whole.
    """
    labels = rows.astype(np.int64)
    if starts is not None:
        for row, positions in zip(labels, starts, strict=True):
            row[positions] = IGNORED
    if lengths is not None:
        for row, length in zip(labels, np.asarray(lengths).tolist(), strict=True):
            row[length:] = IGNORED
    return labels[:, 1:]


#: bytes of text per call of an engine
BATCH_BYTES = 4 << 20
#: bytes and places of the sample on which an engine is compared with the reference
SAMPLE_BYTES = 128 << 10
SAMPLE_GROUPS = 8


class EngineDiffers(Exception):
    """Raised when an engine gives other ids than the reference."""

    def __init__(self, engine: str, found: dict[str, str]):
        super().__init__(engine)
        self.engine, self.found = engine, found


class TextDocuments:
    """Tokenized documents of a corpus split; see `documents.Documents`.

    While the first chunks are tokenized, a thread compares the engine with the reference on a sample of this text;
    `confirm` waits for the result. (The engine is compared on hostile texts, which do not depend on the corpus, when
    the tokenizer is built or loaded.)

    `report(documents, utf8_bytes)` is called for each batch.
    """

    def __init__(
        self,
        corpus_directory: Path,
        tokenizer: Tokenizer,
        split: str,
        eos: bool,
        report: Callable[[int, int], None] | None = None,
        batch_documents: int | None = None,
    ):
        self.text, self._split = RawText(corpus_directory, split), split
        check_eos(tokenizer, eos, self.text.pairs)
        self.tokenizer, self.eos, self.report = tokenizer, eos, report
        mean = max(1, self.text.split["utf8_bytes"] // max(1, len(self.text)))
        self.batch_documents = batch_documents or max(1, min(BATCH_BYTES // mean, 100_000))
        self.origin = Origin(
            tokenizer={"name": tokenizer.name, "kind": tokenizer.kind, "file_sha256": tokenizer.file_sha256},
            vocabulary_size=tokenizer.vocabulary_size,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            source={
                "corpus_manifest_sha256": sha256_file(Path(corpus_directory) / "manifest.json"),
                "text_sha256": self.text.split["text_sha256"],
                **({"document_parts": "source, EOS, target"} if self.text.pairs else {}),
            },
            engine=" ".join(filter(None, (tokenizer.engine, tokenizer.engine_version))),
        )
        self._comparison_pool = ThreadPoolExecutor(1, "gate")
        self._comparison: Future | None = None

    def __len__(self) -> int:
        return len(self.text)

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        """Yield documents [first, last). One batch is tokenized while the previous one is written."""
        if self._comparison is None:
            self._comparison = self._comparison_pool.submit(self._compare_engines)
        columns = self.text.columns(self.batch_documents, first, last)
        with ThreadPoolExecutor(1, "encode") as pool:
            ahead = [pool.submit(self._encode, column) for column in islice(columns, 1)]
            while ahead:
                ahead += [pool.submit(self._encode, column) for column in islice(columns, 1)]
                chunk, utf8_bytes = ahead.pop(0).result()
                yield chunk
                if self.report is not None:
                    self.report(len(chunk.lengths), utf8_bytes)

    def confirm(self) -> None:
        """Raise EngineDiffers if any id of the sample differs from the reference's."""
        found = self._comparison.result() if self._comparison is not None else self._compare_engines()
        if found is not None:
            raise EngineDiffers(self.tokenizer.engine, found)

    def _encode(self, column: pa.Array) -> tuple[Chunk, int]:
        return encode_chunk(self.tokenizer, column, self.eos, self.text.pairs), _utf8_bytes(column)

    def _compare_engines(self) -> dict[str, str] | None:
        """Compare the engine with the reference on the sample; None if there is no difference."""
        if not isinstance(self.tokenizer, EngineTokenizer) or self.tokenizer.engine == REFERENCE:
            return None
        return self.tokenizer.difference(self._draw_sample())

    def _draw_sample(self) -> list[str]:
        """Return documents from all over the split, at most 128 KiB in total."""
        found: list[str] = []
        rest = SAMPLE_BYTES
        text = RawText(self.text.directory, self._split, verify=False)  # a Parquet reader serves one thread
        for place in np.linspace(0, len(text), SAMPLE_GROUPS, endpoint=False, dtype=np.int64).tolist():
            share = SAMPLE_BYTES // SAMPLE_GROUPS
            for column in text.columns(32, place, min(place + 32, len(text))):
                for document in column.to_pylist():
                    size = len(document.encode("utf-8"))
                    if size <= min(share, rest):
                        found.append(document)
                        share, rest = share - size, rest - size
        return found


def engine_error(error: EngineDiffers, corpus: Path) -> UserError:
    """Return the error for a requested engine that is not exact."""
    return UserError(
        f"the engine {error.engine} gives other ids than {REFERENCE}: no store was written.",
        corpus=corpus,
        **error.found,
        next="use the engine auto, or tokenizers; and report it to the engine's authors",
    )


def _utf8_bytes(column: pa.Array) -> int:
    _, offsets, _ = column.buffers()
    width = np.int64 if pa.types.is_large_string(column.type) else np.int32
    ends = np.frombuffer(offsets, dtype=width)
    return int(ends[column.offset + len(column)] - ends[column.offset])
