"""Records by position: documents of any length in files that are read one document at a time.

A Parquet row group is the smallest part that can be decoded, so a document in random order costs
1,000 documents. A records file holds the same documents uncompressed, one after another, and behind
them a table: one document costs two reads. It is derived from a Parquet shard, by reading that
shard back.

File: the values of all records (little-endian), zeros up to a multiple of 8 bytes, then uint64
[records + 1, 2]: the first value of each record and the XXH3-64 of its bytes, seeded with the
record's number in the file. The last row holds the number of values and the XXH3-64 of the table,
computed with 0 in its place.
"""

import os
import struct
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from xxhash import xxh3_64_intdigest

from tokenscale.base.errors import UserError
from tokenscale.base.files import replace_file
from tokenscale.base.manifests import changed_error, open_checked

#: files that a reader keeps open
OPEN_FILES = 128
#: tables of all files together that a reader keeps in memory
TABLE_BYTES = 64 << 20
#: bytes of a table's row, and what a read needs of two of them: start, checksum, end
_ROW = 16
_ENTRY = struct.Struct("<QQQ")


def smallest_dtype(vocabulary_size: int) -> np.dtype:
    """Return the smaller of uint16 and uint32 that holds every id; little-endian."""
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")


def write_records(
    path: Path, parts: Iterable[tuple[np.ndarray, np.ndarray]], dtype: np.dtype
) -> dict[str, Any]:
    """Write a records file of (values of some records, lengths int64) and return its entry for a
    manifest.
    """
    table: list[np.ndarray] = []
    first = number = 0
    with replace_file(path) as file:
        for values, lengths in parts:
            data = memoryview(np.ascontiguousarray(values, dtype=dtype)).cast("B")
            file.write(data)
            rows = np.zeros((len(lengths), 2), dtype="<u8")
            ends = np.cumsum(lengths)
            rows[:, 0] = first + ends - lengths
            end = 0
            for n, length in enumerate((lengths * dtype.itemsize).tolist()):
                rows[n, 1] = xxh3_64_intdigest(data[end : (end := end + length)], number + n)
            table.append(rows)
            first = first + int(lengths.sum())
            number = number + len(lengths)
        file.write(b"\0" * (-file.tell() % 8))
        table.append(np.array([[first, 0]], dtype="<u8"))
        whole = np.concatenate(table)
        whole[-1, 1] = xxh3_64_intdigest(whole)
        file.write(memoryview(whole).cast("B"))
        size = file.tell()
    return {"name": path.name, "records": number, "bytes": size}


def map_array(file: BinaryIO) -> np.memmap:
    """Map the array in an open `.npy` file. Raises ValueError for another file."""
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read_header = np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    return np.memmap(file, dtype, "r", offset=file.tell(), shape=shape)


class OpenFiles:
    """Descriptors of files that are read at any position, by number; at most `OPEN_FILES` are open
    at a time. `open_number` returns the descriptor of a file.
    """

    def __init__(self, open_number: Callable[[int], int]):
        self._open_number = open_number
        self._open: OrderedDict[int, int] = OrderedDict()
        # at exit before modules are cleared, unlike __del__
        weakref.finalize(self, _close_all, self._open)

    def __getitem__(self, number: int) -> int:
        """Return the descriptor of a file."""
        descriptor = self._open.get(number)
        if descriptor is not None:
            self._open.move_to_end(number)
            return descriptor
        if len(self._open) == OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        descriptor = self._open[number] = self._open_number(number)
        if hasattr(os, "posix_fadvise"):  # without the kernel's read-ahead
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor


def _close_all(descriptors: OrderedDict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def _open_entry(
    folder: Path,
    entries: Sequence[dict[str, Any]],
    what: str,
    rebuild: Callable[[str], str],
    number: int,
) -> int:
    """Return the descriptor of a file. Raises UserError where it is not as the manifest has it."""
    file = entries[number]
    opened = open_checked(
        folder,
        name=file["name"],
        size=file["bytes"],
        what=what,
        next=rebuild(file["name"]),
    )
    with opened as checked:
        return os.dup(checked.fileno())


class Records:
    """Records of several files by number, verified whenever they are read.

    `entries` describe the files of a folder, as `write_records` returns them, and `rebuild` returns
    the command that rebuilds one of them. Opening reads nothing. A reader keeps at most
    `OPEN_FILES` files open, and the tables of all files up to `TABLE_BYTES`; larger ones are read
    row by row. A reader serves one thread. A changed record is a UserError with `what`, as is a
    value of `vocabulary_size` or more.
    """

    def __init__(
        self,
        folder: Path,
        entries: Sequence[dict[str, Any]],
        dtype: np.dtype,
        *,
        what: str,
        rebuild: Callable[[str], str],
        vocabulary_size: int | None = None,
    ):
        self._files = entries
        self._dtype = np.dtype(dtype)
        self._what = what
        self._rebuild = rebuild
        self._width = self._dtype.itemsize
        self._folder = folder
        self._first = [0, *accumulate(entry["records"] for entry in entries)]
        # not a method: a reader that nobody uses any more closes its files at once
        self._open = OpenFiles(partial(_open_entry, folder, entries, what, rebuild))
        small = len(self) * _ROW <= TABLE_BYTES
        self._tables: dict[int, memoryview] | None = {} if small else None
        self._limit = vocabulary_size

    def __len__(self) -> int:
        return self._first[-1]

    def read(self, i: int) -> np.ndarray:
        """Return the values of record i. Raises IndexError outside of 0 … len − 1, UserError for a
        changed record.
        """
        if not 0 <= i < self._first[-1]:
            raise IndexError(f"record {i} of {self._first[-1]}")
        number = bisect_right(self._first, i) - 1
        row = i - self._first[number]
        file = self._files[number]
        width = self._width
        descriptor = self._open[number]
        if self._tables is None:
            position = file["bytes"] - (file["records"] + 1 - row) * _ROW
            start, checksum, end = _ENTRY.unpack(os.pread(descriptor, _ENTRY.size, position))
        else:
            if (table := self._tables.get(number)) is None:
                table = self._tables[number] = memoryview(self._read_table(number)).cast("B")
            start, checksum, end = _ENTRY.unpack_from(table, row * _ROW)
        if not 0 <= start <= end <= file["bytes"] // width:
            raise self._changed(
                number,
                expected=None,
                found="impossible positions",
                record=f"{row:,} of {file['records']:,}",
            )
        values = np.empty(end - start, dtype=self._dtype)
        os.preadv(descriptor, [values], start * width)
        if (found := xxh3_64_intdigest(values, row)) != checksum:
            place = f"{row:,} of {file['records']:,}, byte {start * width:,} on"
            raise self._changed(
                number,
                expected=f"XXH3 {checksum:016x}",
                found=f"XXH3 {found:016x}",
                record=place,
            )
        # faster than max()
        if self._limit and end > start and values[values.argmax()] >= self._limit:
            raise vocabulary_error(
                self._folder / file["name"],
                found=int(values.max()),
                vocabulary_size=self._limit,
                next=self._rebuild(file["name"]),
            )
        return values

    def verify(self) -> Iterator[UserError]:
        """Read all records; yield the error of the first changed record of each file."""
        for first, last in pairwise(self._first):
            try:
                for i in range(first, last):
                    self.read(i)
            except UserError as error:
                yield error

    def lengths(self) -> np.ndarray:
        """Return the lengths of all records in values, int64 [records]. Raises UserError for a
        changed table.
        """
        found = np.empty(len(self), dtype=np.int64)
        for number, (first, last) in enumerate(pairwise(self._first)):
            starts = self._read_table(number)[:, 0].astype(np.int64)
            np.subtract(starts[1:], starts[:-1], out=found[first:last])
        return found

    def _read_table(self, number: int) -> np.ndarray:
        file = self._files[number]
        position = file["bytes"] - (file["records"] + 1) * _ROW
        table = np.empty((file["records"] + 1, 2), dtype="<u8")
        os.preadv(self._open[number], [table], position)
        checksum = int(table[-1, 1])
        table[-1, 1] = 0
        if (found := xxh3_64_intdigest(table)) != checksum:
            expected = f"XXH3 {checksum:016x}"
            place = f"from byte {position:,} on"
            raise self._changed(
                number,
                expected,
                found=f"XXH3 {found:016x}",
                table=place,
            )
        return table

    def _changed(self, number: int, expected: str | None, found: str, **place: str) -> UserError:
        name = self._files[number]["name"]
        return changed_error(
            f"a file of the {self._what}",
            file=self._folder / name,
            expected=expected,
            found=found,
            next=self._rebuild(name),
            **place,
        )


def vocabulary_error(file: Path, found: int, vocabulary_size: int, next: str) -> UserError:
    """Return the error for an id outside of the manifest's vocabulary in a file with a valid
    hash.
    """
    what = "the token store has ids outside of its vocabulary."
    expected = f"below {vocabulary_size:,}  (vocabulary_size of the manifest)"
    return UserError(what, file=file, expected=expected, found=f"{found:,}", next=next)
