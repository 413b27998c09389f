"""Writer and reader of the Parquet formats: shards written by row group, read through a bounded cache.

Ids go from Arrow to NumPy without Python ints. A row group is the smallest decodable unit, so random access is
expensive until the groups are cached. A store that fits the cache is decoded at opening.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError
from tokenscale.data.corpus.raw_text import check_file
from tokenscale.data.stores.manifest import SingleFile, rebuild_command, resolve_store, vocabulary_error
from tokenscale.settings.data import StoreSettings

#: default size of a reader's cache of decoded ids
CACHE_BYTES = 512 << 20
#: shards that one reader keeps open
OPEN_SHARDS = 128
#: maximum values of a column in a row group, since Arrow's lists have int32 offsets
GROUP_VALUES = (1 << 31) - 1


class Shard:
    """One Parquet file of list columns. The caller fixes the schema's metadata, so that equal rows give equal bytes."""

    def __init__(self, path: Path, store: StoreSettings, columns: dict[str, str], metadata: dict[str, str]):
        self.path, self._group_rows = path, store.row_group_rows
        types = {
            name: pa.list_(pa.field("element", getattr(pa, dtype)(), nullable=False)) for name, dtype in columns.items()
        }
        fields = [pa.field(name, kind, nullable=False) for name, kind in types.items()]
        self.schema = pa.schema(fields, metadata=metadata)
        self._pending: list[dict[str, tuple[np.ndarray, np.ndarray]]] = []
        self._rows = 0
        self._writer = pq.ParquetWriter(
            path,
            self.schema,
            compression=store.codec,
            compression_level=store.codec_level if store.codec == "zstd" else None,
            use_dictionary=False,
        )

    def add(self, **columns: tuple[np.ndarray, np.ndarray]) -> None:
        """Add rows: for each column (concatenated values, lengths int64 [rows])."""
        rows = len(next(iter(columns.values()))[1])
        first = 0
        while first < rows:
            last = min(rows, first + self._group_rows - self._rows)
            self._pending.append({name: _slice_rows(values, n, first, last) for name, (values, n) in columns.items()})
            self._rows += last - first
            if self._rows == self._group_rows:
                self._flush()
            first = last

    def close(self) -> str:
        """Finish the file and return its name."""
        self._flush()
        self._writer.close()
        return self.path.name

    def _flush(self) -> None:
        if self._rows:
            arrays = [self._array(field) for field in self.schema]
            self._writer.write_table(pa.Table.from_arrays(arrays, schema=self.schema), row_group_size=self._rows)
        self._pending, self._rows = [], 0

    def _array(self, field: pa.Field) -> pa.ListArray:
        lengths = np.concatenate([part[field.name][1] for part in self._pending])
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] > GROUP_VALUES:
            raise UserError(
                "a row group has too many ids.",
                file=self.path,
                rows=f"{len(lengths):,} in a group, row_group_rows is {self._group_rows:,}",
                found=f"{offsets[-1]:,} ids in the column {field.name}",
                expected=f"at most {GROUP_VALUES:,}",
                next="set a lower `storage.row_group_rows`, or `cleaning.maximum_characters` of the corpus",
            )
        values = np.concatenate([part[field.name][0] for part in self._pending])
        values = values.astype(field.type.value_type.to_pandas_dtype(), copy=False)
        return pa.ListArray.from_arrays(_to_arrow(offsets.astype(np.int32)), _to_arrow(values), type=field.type)


def _to_arrow(values: np.ndarray) -> pa.Array:
    """Return an Arrow array that shares the memory. (`pa.array` does so too, but imports pandas.)"""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def read_back(path: Path, columns: list[str]) -> Iterator[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Yield each row group of a finished shard: column → (values, lengths int64 [rows])."""
    file = pq.ParquetFile(path, pre_buffer=False)
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, columns=columns, use_threads=False)
        decoded = {name: _decode_lists(table.column(name)) for name in columns}
        yield {name: (values, np.diff(offsets).astype(np.int64)) for name, (offsets, values) in decoded.items()}


def _decode_lists(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return (offsets, values) of a list column."""
    lists = column.combine_chunks()
    lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
    return lists.offsets.to_numpy(), lists.values.to_numpy()


def shard_path(folder: Path, number: int, single: SingleFile | None) -> Path:
    """Return the path of a part's file: `shard-00000.parquet`, or the only file of a single-file store."""
    return folder / f"{single.name if single else f'shard-{number:05d}'}.parquet"


def _slice_rows(values: np.ndarray, lengths: np.ndarray, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    ends = np.cumsum(lengths)
    start = ends[first - 1] if first else 0
    return values[start : ends[last - 1] if last > first else start], lengths[first:last]


class ListColumns:
    """List columns of all shards of a store, read by row number through an LRU cache of decoded row groups.

    The first column contains ids. Shards are verified by hash at opening, and ids when their group is first decoded.
    Raises UserError for a changed shard or an id outside of the manifest's vocabulary.

    The cache has at most `cache_bytes` (`CACHE_BYTES` by default), but at least one group. With `preload`, a store that
    fits the cache is decoded at opening, so that the first batches are not slower than later ones.
    """

    def __init__(
        self,
        where: Path,
        manifest: dict[str, Any],
        columns: list[str],
        cache_bytes: int | None = None,
        *,
        preload: bool = True,
    ):
        self.columns = columns
        self._where, self._vocabulary_size = where, manifest["vocabulary_size"]
        self._cache_bytes = CACHE_BYTES if cache_bytes is None else cache_bytes
        self._paths = [resolve_store(where)[0] / file["name"] for file in manifest["files"]]
        for path, file in zip(self._paths, manifest["files"], strict=True):
            next = rebuild_command(where, file["name"])
            check_file(path, file["bytes"], file["sha256"], what="token store", next=next, content=True)
        self._metadata = [pq.read_metadata(path) for path in self._paths]
        self._open_shard = lru_cache(OPEN_SHARDS)(self._open)
        self._unseen: set[int] = set()
        self._groups: list[tuple[int, int]] = []
        self.first_rows: list[int] = []
        self.rows = 0
        for number, metadata in enumerate(self._metadata):
            for group in range(metadata.num_row_groups):
                self._unseen.add(len(self._groups))
                self._groups.append((number, group))
                self.first_rows.append(self.rows)
                self.rows += metadata.row_group(group).num_rows
        self._cache: OrderedDict[int, dict[str, tuple[np.ndarray, np.ndarray]]] = OrderedDict()
        self._cached_bytes = 0
        if preload and self._decoded_bytes() <= self._cache_bytes:
            for first in self.first_rows:
                self.row(first)

    def lengths(self, column: str) -> np.ndarray:
        """Return the list length of every row, int64 [rows]. Decodes each group once, without caching it."""
        found = [np.diff(self._decode(number, [column])[column][0]) for number in range(len(self._groups))]
        return np.concatenate(found).astype(np.int64) if found else np.zeros(0, dtype=np.int64)

    def groups(self, first: int, last: int) -> Iterator[tuple[dict[str, tuple[np.ndarray, np.ndarray]], int, int]]:
        """Yield (decoded group, start, end) for rows [first, last); start and end are rows in the group."""
        for number, start in enumerate(self.first_rows):
            end = self.first_rows[number + 1] if number + 1 < len(self.first_rows) else self.rows
            if start < last and end > first:
                yield self._decode(number, self.columns), max(0, first - start), min(end, last) - start

    def row(self, i: int) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], int]:
        """Return (decoded group with row i, row number in the group). A group is column → (offsets, values)."""
        if not 0 <= i < self.rows:
            raise IndexError(f"row {i} of {self.rows}")
        number = bisect_right(self.first_rows, i) - 1
        group = self._cache.get(number)
        if group is None:
            group = self._cache[number] = self._decode(number, self.columns)
            self._cached_bytes += _group_bytes(group)
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                self._cached_bytes -= _group_bytes(self._cache.popitem(last=False)[1])
        else:
            self._cache.move_to_end(number)
        return group, i - self.first_rows[number]

    def _open(self, number: int) -> pq.ParquetFile:
        return pq.ParquetFile(self._paths[number], metadata=self._metadata[number], pre_buffer=False)

    def _decoded_bytes(self) -> int:
        """Estimate the bytes of the decoded columns from the files' metadata, without the offsets, which are small."""
        total = 0
        for file, group in self._groups:
            schema, row_group = self._metadata[file].schema.to_arrow_schema(), self._metadata[file].row_group(group)
            for column in map(row_group.column, range(row_group.num_columns)):
                name = column.path_in_schema.split(".")[0]
                if name in self.columns:  # width from the Arrow type: Parquet has no int8
                    total += column.num_values * schema.field(name).type.value_type.bit_width // 8
        return total

    def _decode(self, number: int, columns: list[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Decode columns of a row group. Raises UserError for an id outside of the vocabulary."""
        file, group = self._groups[number]
        table = self._open_shard(file).read_row_group(group, columns=columns, use_threads=False)
        found = {name: _decode_lists(table.column(name)) for name in columns}
        if number in self._unseen and self.columns[0] in found:
            ids = found[self.columns[0]][1]
            if ids.size and not 0 <= ids.min() <= ids.max() < self._vocabulary_size:
                wrong = ids.min() if ids.min() < 0 else ids.max()
                raise vocabulary_error(self._where, self._paths[file], int(wrong), self._vocabulary_size)
            self._unseen.discard(number)
        return found


def _group_bytes(group: dict[str, tuple[np.ndarray, np.ndarray]]) -> int:
    return sum(offsets.nbytes + values.nbytes for offsets, values in group.values())
