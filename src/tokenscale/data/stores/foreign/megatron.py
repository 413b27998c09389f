"""Megatron-LM's pair of files `PREFIX.bin` and `PREFIX.idx` (IndexedDataset, version 1).

`.bin`: concatenated ids of all sequences. `.idx`, little-endian: `MMIDIDX\\0\\0`, uint64 version 1, uint8 code of
the ids' type, uint64 sequences, uint64 document bounds (documents + 1); int32 length of each sequence; int64 byte at
which each begins in `.bin`; int64 document bounds as sequence numbers, from 0. A document is usually one sequence. The
layout follows megatron/core/datasets/indexed_dataset.py (NVIDIA/Megatron-LM, 00caa53).
"""

import struct
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import HashedFile, atomic
from tokenscale.data.stores.documents import Documents, Origin
from tokenscale.data.stores.foreign.reframe import (
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


def _add_ending(path: Path, ending: str) -> Path:
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return prefix.with_name(prefix.name + ending)


class Megatron(ForeignFormat):
    """Reader of a pair. Raises UserError for an inconsistent index, and for one that does not match its `.bin`."""

    NAME = "Megatron-LM's .bin and .idx"

    @staticmethod
    def list_outputs(path: Path) -> list[Path]:
        """Return `.bin` and `.idx`, given their prefix or either file. `.idx` marks the pair, so it is written last.

        >>> [str(file) for file in Megatron.list_outputs(Path("data/owt_text_document.idx"))]
        ['data/owt_text_document.bin', 'data/owt_text_document.idx']
        """
        return [_add_ending(path, ending) for ending in (".bin", ".idx")]

    @staticmethod
    def record_path(path: Path) -> Path:
        return _add_ending(path, ".tokenscale.json")

    @staticmethod
    def detect(path: Path) -> bool:
        try:
            with open(_add_ending(path, ".idx"), "rb") as file:
                return file.read(len(MAGIC)) == MAGIC
        except OSError:
            return False

    @staticmethod
    def notes(origin: Origin, ended: bool) -> list[str]:
        return end_note(origin, ended, "as preprocess_data.py --append-eod does")

    def __init__(self, path: Path, **_: object):
        self.files = self.list_outputs(path)
        for file in self.files:
            if not file.is_file():
                raise UserError("a file of the pair is missing.", file=file, next="name both files by their prefix")
        binary, index = self.files
        size = index.stat().st_size
        with open(index, "rb") as header:
            head = header.read(HEADER.size)
        if head[: len(MAGIC)] != MAGIC[: len(head)] or len(head) < len(MAGIC):
            raise self._error("is no Megatron index", repr(head[: len(MAGIC)]), f"{MAGIC!r} at its beginning")
        if len(head) < HEADER.size:
            raise self._error("ends inside its header", f"{size} bytes", f"at least {HEADER.size} bytes")
        _, version, code, sequences, bounds = HEADER.unpack(head)
        if version != 1:
            raise self._error("has another version", f"version {version}", "version 1")
        if code not in TYPES:
            raise self._error("holds no integers of a known type", f"type code {code}", f"one of {sorted(TYPES)}")
        whole = HEADER.size + 12 * sequences + 8 * bounds
        if size == whole + sequences and sequences:
            raise self._error("is of a multimodal data set", f"{sequences} modes at its end", f"{whole} bytes: text")
        if size != whole:
            requested = f"{whole:,} bytes for {sequences:,} sequences and {bounds:,} document bounds"
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
            raise self._error("holds a negative length", f"{lengths[at]} for sequence {at:,}", "0 or more")
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
            raise self._error("has document bounds out of order", found, f"0 … {sequences}, never less than before")
        if (size := binary.stat().st_size) != ends[-1] * self._type.itemsize:
            raise UserError(
                "Megatron's .bin has another size than its index says.",
                file=binary,
                found=f"{size:,} bytes",
                expected=f"{ends[-1] * self._type.itemsize:,} bytes  ({ends[-1]:,} ids of {self.dtype}, {index.name})",
                next=AGAIN,
            )
        self._bounds = ends[documents]

    def _error(self, what: str, found: str, expected: str) -> UserError:
        return UserError(f"Megatron's .idx {what}.", file=self.files[1], found=found, expected=expected, next=AGAIN)

    @staticmethod
    def write(documents: Documents, path: Path, rule: ExportFraming, count: ExportCounts) -> dict[Path, str]:
        """Write the pair, one sequence per document. Returns file → SHA-256."""
        size = documents.origin.vocabulary_size
        code, dtype = (8, "<u2") if size < SMALL_VOCABULARY else (4, "<i4")
        binary, index = Megatron.list_outputs(path)
        lengths = []
        with ExitStack() as stack:  # renamed in the reverse order: the index appears last
            temporary_index, temporary_binary = stack.enter_context(atomic(index)), stack.enter_context(atomic(binary))
            with HashedFile(temporary_binary) as bin_file:
                for chunk in export_chunks(documents, rule, count):
                    bin_file.write(chunk.ids.astype(dtype))
                    lengths.append(chunk.lengths)
            documents.confirm()
            sizes = np.concatenate(lengths)
            with HashedFile(temporary_index) as idx_file:
                idx_file.write(HEADER.pack(MAGIC, 1, code, len(sizes), len(sizes) + 1))
                idx_file.write(sizes.astype("<i4"))
                idx_file.write(((np.cumsum(sizes) - sizes) * np.dtype(dtype).itemsize).astype("<i8"))
                idx_file.write(np.arange(len(sizes) + 1, dtype="<i8"))
            index.unlink(missing_ok=True)  # an old index must not be read with the new ids
        return {binary: bin_file.sha256, index: idx_file.sha256}
