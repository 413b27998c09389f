"""nanoGPT's `.bin`: concatenated ids of all documents, uint16 or uint32, without a header.

A special id ends each document (`<|endoftext|>`, 50256 in GPT-2's tokenizer; karpathy/nanoGPT,
data/openwebtext/prepare.py, 04cc18e).
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import HashedFile, atomic
from tokenscale.data.records import smallest_dtype
from tokenscale.data.stores.documents import Documents, Origin
from tokenscale.data.stores.foreign.reframe import (
    BLOCK_TOKENS,
    ExportCounts,
    ExportFraming,
    ForeignFormat,
    export_chunks,
)

#: first int32 of the files of llm.c and modded-nanogpt, which have a header
HEADERS = (20240520, 20240801)


class NanoGpt(ForeignFormat):
    """Reader of a `.bin`; finds the documents in one pass over the file.

    Raises UserError for a file whose last document does not end, or in which no document ends.
    """

    NAME, KEEPS_BOS = "nanoGPT's .bin", False

    @staticmethod
    def detect(path: Path) -> bool:
        return path.is_file() and path.suffix == ".bin" and not path.with_suffix(".idx").exists()

    @staticmethod
    def notes(origin: Origin, ended: bool) -> list[str]:
        if smallest_dtype(origin.vocabulary_size).itemsize == 2:
            return []
        return ["ids are uint32: nanoGPT's train.py reads uint16, so change its np.memmap to dtype=np.uint32"]

    def __init__(
        self, path: Path, *, vocabulary_size: int, document_end: int | None, dtype: str | None = None, **_: object
    ):
        if not path.is_file():
            raise UserError("the source is not a file.", file=path, next="name the .bin")
        if document_end is None:
            raise UserError(
                f"{self.NAME} does not say which id ends a document.",
                file=path,
                next="--document-end ID (50256 for GPT-2's tokenizer), or a tokenizer that has one: --tokenizer FOLDER",
            )
        self._type = np.dtype(dtype).newbyteorder("<") if dtype else smallest_dtype(vocabulary_size)
        self.files, self.dtype = [path], self._type.name
        other = "uint32" if self.dtype == "uint16" else "uint16"
        self.doubt = f"read as {self.dtype}: --dtype {other}, or the tokenizer that made it (--tokenizer FOLDER)"
        size, width = path.stat().st_size, self._type.itemsize
        if size == 0 or size % width:
            expected = f"a multiple of {width}, for ids of {self.dtype}" + (", and some" if size == 0 else "")
            raise self._error(
                f"{self.NAME} is cut short.", f"{size:,} bytes", expected, "copy it again, or correct --dtype"
            )
        with open(path, "rb") as file:
            head = int.from_bytes(file.read(4), "little")
        if head in HEADERS:
            raise self._error(
                "the file has a header: it is of llm.c or modded-nanogpt.",
                f"{head} at its beginning",
                "ids from the first byte on",
                "take its 1,024 bytes of header off: tail -c +1025 FILE > NEW.bin",
            )
        self._ends_come_first = False
        self._bounds = self._find_documents(size // width, document_end)

    def _find_documents(self, tokens: int, end_id: int) -> np.ndarray:
        """Return the starts of documents and the end of the file, in tokens, int64 [documents + 1]."""
        found = []
        for start in range(0, tokens, BLOCK_TOKENS):
            block = self._ids(start, min(tokens, start + BLOCK_TOKENS))
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
            self._ends_come_first, self.note = True, f"id {end_id} stands before each document, not behind it"
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
    def write(documents: Documents, path: Path, rule: ExportFraming, count: ExportCounts) -> dict[Path, str]:
        """Write the file. Returns file → SHA-256. Raises UserError if the id that ends documents occurs inside one."""
        dtype = smallest_dtype(documents.origin.vocabulary_size)
        with atomic(path) as temporary:
            with HashedFile(temporary) as file:
                for chunk in export_chunks(documents, rule, count):
                    ends = np.flatnonzero(chunk.ids == rule.document_end)
                    if len(ends) != len(chunk.lengths):
                        document = int(np.flatnonzero(ends[: len(chunk.lengths)] != np.cumsum(chunk.lengths) - 1)[0])
                        raise UserError(
                            "the id that ends documents lies inside one: readers would split it there.",
                            document=f"{count.documents - len(chunk.lengths) + document:,} of {len(documents):,}",
                            found=f"id {rule.document_end}",
                            next="--document-end with an id that no document holds",
                        )
                    file.write(chunk.ids.astype(dtype))
            documents.confirm()
        return {path: file.sha256}
