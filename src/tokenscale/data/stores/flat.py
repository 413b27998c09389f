"""Temporary files of concatenated ids, for stores whose layout depends on all documents."""

from pathlib import Path

import numpy as np

from tokenscale.data.stores.documents import Chunk
from tokenscale.data.stores.writing import FinishedPart

IDS, LENGTHS = "documents.ids", "documents.lengths"


class FlatPart:
    """Writer that appends the documents of a part to the files `IDS` and `LENGTHS`; see `writing.PartWriter`."""

    def __init__(self, folder: Path, dtype: np.dtype):
        self._files = [open(folder / name, "ab") for name in (IDS, LENGTHS)]
        self._dtype = dtype

    def add(self, chunk: Chunk) -> None:
        ids = chunk.ids.view("<u4") if self._dtype.itemsize == 4 else chunk.ids.astype(self._dtype)
        self._files[0].write(ids)
        self._files[1].write(chunk.lengths.astype("<i8"))

    def close(self) -> FinishedPart:
        for file in self._files:
            file.close()
        return FinishedPart([], {})


def read_lengths(folder: Path) -> np.ndarray:
    """Return the tokens of every document, int64 [documents]."""
    return np.fromfile(folder / LENGTHS, dtype="<i8")
