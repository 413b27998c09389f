"""Temporary files of concatenated ids, for stores whose layout depends on all documents."""

import itertools
import os
from bisect import bisect_right
from pathlib import Path

import numpy as np

from tokenscale.data.records import OpenFiles
from tokenscale.data.stores.documents import Chunk
from tokenscale.data.stores.writing import FinishedPart


class FlatPart:
    """Writer of the concatenated documents of a part, `part-NNNNN.ids` and `.lengths`; see `writing.PartWriter`."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype):
        self._paths = [folder / f"part-{number:05d}.ids", folder / f"part-{number:05d}.lengths"]
        self._files = [open(path, "wb") for path in self._paths]
        self._dtype = dtype

    def add(self, chunk: Chunk) -> None:
        ids = chunk.ids.view("<u4") if self._dtype.itemsize == 4 else chunk.ids.astype(self._dtype)
        self._files[0].write(ids)
        self._files[1].write(chunk.lengths.astype("<i8"))

    def close(self) -> FinishedPart:
        for file in self._files:
            file.close()
        return FinishedPart([path.name for path in self._paths], {})


def read_lengths(folder: Path, parts: list[str]) -> np.ndarray:
    """Return the tokens of every document, int64 [documents]. `parts` are the names of the files."""
    return np.concatenate([np.fromfile(folder / name, dtype="<i8") for name in parts if name.endswith(".lengths")])


def list_id_files(folder: Path, parts: list[str]) -> list[Path]:
    return [folder / name for name in parts if name.endswith(".ids")]


class Flat:
    """Files read by position as if they were one file.

    Positioned reads are used since a mapping would count as memory of the process.
    """

    def __init__(self, paths: list[Path]):
        self._files = OpenFiles(paths)
        self._starts = [0, *itertools.accumulate(path.stat().st_size for path in paths)]

    def __enter__(self) -> "Flat":
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def read(self, target: memoryview, position: int) -> None:
        """Fill `target` from byte `position` on, which must not cross a file. Pieces of documents never do.

        Raises OSError for a file that is too short.
        """
        number = bisect_right(self._starts, position) - 1
        if os.preadv(self._files[number], [target], position - self._starts[number]) != len(target):
            raise OSError(f"part {number} of the ids is shorter than its lengths say")
