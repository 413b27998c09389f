"""Foreign formats of bare ids in files: Megatron-LM's pair and nanoGPT's `.bin`.

Megatron-LM, `PREFIX.bin` and `PREFIX.idx` (IndexedDataset, version 1). `.bin`: concatenated ids of
all sequences. `.idx`, little-endian: `MMIDIDX\\0\\0`, uint64 version 1, uint8 code of the ids'
type, uint64 sequences, uint64 document bounds (documents + 1); int32 length of each sequence; int64
byte at which each begins in `.bin`; int64 document bounds as sequence numbers, from 0. A document
is usually one sequence (megatron/core/datasets/indexed_dataset.py, NVIDIA/Megatron-LM, 00caa53).

nanoGPT, `.bin`: concatenated ids of all documents, uint16 or uint32, without a header. A special id
ends each document (`<|endoftext|>`, 50256 in GPT-2's tokenizer; karpathy/nanoGPT,
data/openwebtext/prepare.py, 04cc18e).
"""

import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import HashedFile, atomic, open_file
from tokenscale.data.records import smallest_dtype
from tokenscale.data.stores.documents import Documents, Origin
from tokenscale.data.stores.foreign.reframe import (
    BLOCK_TOKENS,
    SMALL_VOCABULARY,
    ExportCounts,
    ExportFraming,
    ForeignFormat,
    end_note,
    export_chunks,
)

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
#: code → type of the ids; 6 and 7 are floating point
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
AGAIN = "copy both files again, or rebuild them with Megatron-LM's preprocess_data.py"
#: first int32 of the files of llm.c and modded-nanogpt, which have a header
HEADERS = (20240520, 20240801)
#: kind of file → pattern of the bytes that it begins with, which as ids would be text
OTHER_FORMS = {
    "NumPy": rb"\x93NUMPY",
    "zip": rb"PK(?:\x03\x04|\x05\x06)",
    "gzip": rb"\x1f\x8b\x08",
    "zstd": rb"\x28\xb5\x2f\xfd",
    "xz": rb"\xfd7zXZ\x00",
    "bzip2": rb"BZh[1-9]1AY&SY",
    "Parquet": rb"PAR1",
    "Arrow": rb"ARROW1",
    "HDF5": rb"\x89HDF\r\n\x1a\n",
    "GGUF": rb"GGUF[\x01-\x09]\x00{3}",
    "SQLite": rb"SQLite format 3",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "PDF": rb"%PDF-",
    "ELF": rb"\x7fELF[\x01\x02]{2}",
    "Git LFS pointer": rb"version https://",
    "HTML": rb"(?i:<!doctype html|<html)",
    "pickle": rb"\x80(?:[\x02\x03][\]}(c]|[\x04\x05]\x95)",
    "safetensors": rb".{5}\x00{3}\{[\" }]",
}


def _add_ending(path: Path, ending: str) -> Path:
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return prefix.with_name(prefix.name + ending)


class Megatron(ForeignFormat):
    """Reader of a pair. Raises UserError for an inconsistent index, and for one that does not match
    its `.bin`.
    """

    NAME = "Megatron-LM's .bin and .idx"

    @staticmethod
    def list_outputs(path: Path) -> list[Path]:
        """Return `.bin` and `.idx`, given their prefix or either file. `.idx` marks the pair, so it
        is written last.

        >>> [str(file) for file in Megatron.list_outputs(Path("data/owt_text_document.idx"))]
        ['data/owt_text_document.bin', 'data/owt_text_document.idx']
        """
        return [_add_ending(path, ending) for ending in (".bin", ".idx")]

    @staticmethod
    def record_path(path: Path) -> Path:
        return _add_ending(path, ending=".tokenscale.json")

    @staticmethod
    def detect(path: Path) -> bool:
        try:
            with open(open_file(_add_ending(path, ending=".idx")), "rb") as file:
                return file.read(len(MAGIC)) == MAGIC
        except (OSError, UserError):
            return False

    @staticmethod
    def notes(origin: Origin, ended: bool) -> list[str]:
        return end_note(origin, ended, reason="as preprocess_data.py --append-eod does")

    def __init__(self, path: Path, **_: object):
        self.files = self.list_outputs(path)
        for file in self.files:
            if not file.is_file():
                raise UserError(
                    "a file of the pair is missing.",
                    file=file,
                    next="name both files by their prefix",
                )
        binary, index = self.files
        size = index.stat().st_size
        with open(index, "rb") as header:
            head = header.read(HEADER.size)
        if head[: len(MAGIC)] != MAGIC[: len(head)] or len(head) < len(MAGIC):
            raise self._error(
                "is no Megatron index", repr(head[: len(MAGIC)]), f"{MAGIC!r} at its beginning"
            )
        if len(head) < HEADER.size:
            raise self._error(
                "ends inside its header", f"{size} bytes", f"at least {HEADER.size} bytes"
            )
        _, version, code, sequences, bounds = HEADER.unpack(head)
        if version != 1:
            raise self._error("has another version", f"version {version}", "version 1")
        if code not in TYPES:
            raise self._error(
                "holds no integers of a known type", f"type code {code}", f"one of {sorted(TYPES)}"
            )
        whole = HEADER.size + 12 * sequences + 8 * bounds
        if size == whole + sequences and sequences:
            raise self._error(
                "is of a multimodal data set",
                f"{sequences} modes at its end",
                f"{whole} bytes: text",
            )
        if size != whole:
            requested = (
                f"{whole:,} bytes for {sequences:,} sequences and {bounds:,} document bounds"
            )
            raise self._error("has another size than its header says", f"{size:,} bytes", requested)
        if bounds < 2:
            raise self._error("holds no document", f"{bounds} document bounds", "at least 2")
        self._type = np.dtype(TYPES[code])
        self.dtype = self._type.name
        lengths = np.fromfile(index, "<i4", sequences, offset=HEADER.size).astype(np.int64)
        pointers = np.fromfile(index, "<i8", sequences, offset=HEADER.size + 4 * sequences)
        documents = np.fromfile(index, "<i8", bounds, offset=HEADER.size + 12 * sequences)
        if lengths.size and lengths.min() < 0:
            at = int(lengths.argmin())
            raise self._error(
                "holds a negative length", f"{lengths[at]} for sequence {at:,}", "0 or more"
            )
        ends = np.concatenate(([0], np.cumsum(lengths)))
        expected = ends[:-1] * self._type.itemsize
        if not np.array_equal(pointers, expected):
            at = int(np.flatnonzero(pointers != expected)[0])
            found = f"byte {pointers[at]:,} for sequence {at:,}"
            end = f"byte {expected[at]:,}, where the one before ends"
            raise self._error("points elsewhere than its lengths do", found, end)
        decreasing = bool((np.diff(documents) < 0).any())
        if documents[0] != 0 or documents[-1] != sequences or decreasing:
            found = f"{documents[0]} … {documents[-1]}" + (", not ascending" if decreasing else "")
            raise self._error(
                "has document bounds out of order",
                found,
                f"0 … {sequences}, never less than before",
            )
        if (size := binary.stat().st_size) != ends[-1] * self._type.itemsize:
            what = "Megatron's .bin has another size than its index says."
            whole = ends[-1] * self._type.itemsize
            expected_size = f"{whole:,} bytes  ({ends[-1]:,} ids of {self.dtype}, {index.name})"
            raise UserError(
                what, file=binary, found=f"{size:,} bytes", expected=expected_size, next=AGAIN
            )
        self._bounds = ends[documents]

    def _error(self, what: str, found: str, expected: str) -> UserError:
        return UserError(
            f"Megatron's .idx {what}.",
            file=self.files[1],
            found=found,
            expected=expected,
            next=AGAIN,
        )

    @staticmethod
    def write(
        documents: Documents, path: Path, rule: ExportFraming, count: ExportCounts
    ) -> dict[Path, str]:
        """Write the pair, one sequence per document. Returns file → SHA-256."""
        size = documents.origin.vocabulary_size
        code, dtype = (8, "<u2") if size < SMALL_VOCABULARY else (4, "<i4")
        binary, index = Megatron.list_outputs(path)
        lengths = []
        with ExitStack() as stack:  # renamed in the reverse order: the index appears last
            temporary_index = stack.enter_context(atomic(index))
            temporary_binary = stack.enter_context(atomic(binary))
            with HashedFile(temporary_binary) as bin_file:
                for chunk in export_chunks(documents, rule, count=count):
                    bin_file.write(chunk.ids.astype(dtype))
                    lengths.append(chunk.lengths)
            documents.confirm()
            sizes = np.concatenate(lengths)
            with HashedFile(temporary_index) as idx_file:
                idx_file.write(HEADER.pack(MAGIC, 1, code, len(sizes), len(sizes) + 1))
                idx_file.write(sizes.astype("<i4"))
                idx_file.write(
                    ((np.cumsum(sizes) - sizes) * np.dtype(dtype).itemsize).astype("<i8")
                )
                idx_file.write(np.arange(len(sizes) + 1, dtype="<i8"))
            index.unlink(missing_ok=True)  # an old index must not be read with the new ids
        return {binary: bin_file.sha256, index: idx_file.sha256}


class NanoGpt(ForeignFormat):
    """Reader of a `.bin`; finds the documents in one pass over the file.

    Raises UserError for a file whose last document does not end, or in which no document ends.
    """

    NAME = "nanoGPT's .bin"
    KEEPS_BOS = False

    @staticmethod
    def detect(path: Path) -> bool:
        return path.is_file() and path.suffix == ".bin" and not path.with_suffix(".idx").exists()

    @staticmethod
    def notes(origin: Origin, ended: bool) -> list[str]:
        if smallest_dtype(origin.vocabulary_size).itemsize == 2:
            return []
        return [
            (
                "ids are uint32: nanoGPT's train.py reads uint16, so change its np.memmap to "
                "dtype=np.uint32"
            )
        ]

    def __init__(
        self,
        path: Path,
        *,
        vocabulary_size: int,
        document_end: int | None,
        dtype: str | None = None,
        **_: object,
    ):
        if not path.is_file():
            raise UserError("the source is not a file.", file=path, next="name the .bin")
        if document_end is None:
            next_step = (
                "--document-end ID (50256 for GPT-2's tokenizer), or a tokenizer that has one: "
                "--tokenizer FOLDER"
            )
            raise UserError(
                f"{self.NAME} does not say which id ends a document.", file=path, next=next_step
            )
        self._type = np.dtype(dtype).newbyteorder("<") if dtype else smallest_dtype(vocabulary_size)
        self.files = [path]
        self.dtype = self._type.name
        other = "uint32" if self.dtype == "uint16" else "uint16"
        self.doubt = (
            f"read as {self.dtype}: --dtype {other}, or the tokenizer that made it (--tokenizer "
            "FOLDER)"
        )
        size = path.stat().st_size
        width = self._type.itemsize
        if size == 0 or size % width:
            expected = f"a multiple of {width}, for ids of {self.dtype}" + (
                ", and some" if size == 0 else ""
            )
            raise self._error(
                f"{self.NAME} is cut short.",
                f"{size:,} bytes",
                expected,
                "copy it again, or correct --dtype",
            )
        with open(path, "rb") as file:
            beginning = file.read(16)
        for form, first in OTHER_FORMS.items():
            if found := re.match(first, beginning, re.DOTALL):
                raise self._error(
                    f"the file begins as a {form} file does.",
                    f"{found[0]!r}",
                    "ids from the first byte on",
                    "write its ids without a header, such as numpy.load(FILE).tofile(NEW)",
                )
        head = int.from_bytes(beginning[:4], "little")
        if head in HEADERS:
            raise self._error(
                "the file has a header: it is of llm.c or modded-nanogpt.",
                f"{head} at its beginning",
                "ids from the first byte on",
                "take its 1,024 bytes of header off: tail -c +1025 FILE > NEW.bin",
            )
        self._ends_come_first = False
        self._bounds = self._find_documents(size // width, end_id=document_end)

    def _find_documents(self, tokens: int, end_id: int) -> np.ndarray:
        """Return the starts of documents and the end of the file, in tokens, int64 [documents +
        1].
        """
        found = []
        for start in range(0, tokens, BLOCK_TOKENS):
            block = self._ids(start, end=min(tokens, start + BLOCK_TOKENS))
            found.append(np.flatnonzero(block == end_id) + start)
        ends = np.concatenate(found)
        if not ends.size:
            raise self._error(
                "no document ends in the file.",
                f"{tokens:,} ids of {self.dtype}, none of them {end_id}",
                f"id {end_id} behind each document",
                f"correct --document-end; {self.doubt}",
            )
        if ends[-1] == tokens - 1:
            return np.concatenate(([0], ends + 1))
        if ends[0] == 0:
            self._ends_come_first = True
            self.note = f"id {end_id} stands before each document, not behind it"
            return np.concatenate((ends, [tokens]))
        raise self._error(
            "the file's last document does not end: it is cut short.",
            f"{tokens - 1 - ends[-1]:,} ids behind the last {end_id}",
            f"id {end_id} at the end",
            "copy it again, or correct --document-end and --dtype",
        )

    def chunks(self, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for ids, lengths in super().chunks(first, last):
            yield np.roll(ids, -1) if self._ends_come_first else ids, lengths

    def _error(self, what: str, found: str, expected: str, next: str) -> UserError:
        return UserError(what, file=self.files[0], found=found, expected=expected, next=next)

    @staticmethod
    def write(
        documents: Documents, path: Path, rule: ExportFraming, count: ExportCounts
    ) -> dict[Path, str]:
        """Write the file. Returns file → SHA-256. Raises UserError if the id that ends documents
        occurs inside one.
        """
        dtype = smallest_dtype(documents.origin.vocabulary_size)
        with atomic(path) as temporary:
            with HashedFile(temporary) as file:
                for chunk in export_chunks(documents, rule, count=count):
                    ends = np.flatnonzero(chunk.ids == rule.document_end)
                    if len(ends) != len(chunk.lengths):
                        document = int(
                            np.flatnonzero(
                                ends[: len(chunk.lengths)] != np.cumsum(chunk.lengths) - 1
                            )[0]
                        )
                        raise UserError(
                            (
                                "the id that ends documents lies inside one: readers would split "
                                "it "
                                "there."
                            ),
                            document=(
                                f"{count.documents - len(chunk.lengths) + document:,} of "
                                f"{len(documents):,}"
                            ),
                            found=f"id {rule.document_end}",
                            next="--document-end with an id that no document holds",
                        )
                    file.write(chunk.ids.astype(dtype))
            documents.confirm()
        return {path: file.sha256}
