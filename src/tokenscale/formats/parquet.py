"""What the Parquet formats share: shards written a row group at a time, and read with a bounded cache.

Ids go from Arrow to NumPy without a Python int in between. A row group is the smallest thing that can be decoded, so
single rows in random order are dear until their groups are in the cache; a store that fits it is decoded at opening.
"""

from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.formats.manifest import located
from tokenscale.settings.data import StoreSettings

SHARD_ROWS = 100_000
#: decoded ids kept by one reader
CACHE_BYTES = 512 << 20


class ShardWriter:
    """Rows of list columns into `shard-00000.parquet`, `shard-00001.parquet`, … of at most 100,000 rows each; all rows
    into `<name>.parquet` where a name is given.

    The schema's metadata is given, so equal rows give equal bytes.
    """

    def __init__(
        self,
        folder: Path,
        store: StoreSettings,
        columns: dict[str, str],
        metadata: dict[str, str],
        name: str | None = None,
    ):
        self.folder, self.store, self.name = folder, store, name
        types = {
            name: pa.list_(pa.field("element", getattr(pa, dtype)(), nullable=False)) for name, dtype in columns.items()
        }
        fields = [pa.field(name, kind, nullable=False) for name, kind in types.items()]
        self.schema = pa.schema(fields, metadata=metadata)
        self.names: list[str] = []
        self._rows: dict[str, list[np.ndarray]] = {name: [] for name in columns}
        self._shard_rows = 0
        self._writer: pq.ParquetWriter | None = None
        self._row_group_rows = store.row_group_rows if name else min(store.row_group_rows, SHARD_ROWS)

    def add(self, **row: np.ndarray) -> None:
        """One row: an array for each column."""
        if self.name is None and self._shard_rows + self._pending == SHARD_ROWS:
            self._close_shard()
        for name, values in row.items():
            self._rows[name].append(values)
        if self._pending == self._row_group_rows:
            self._flush()

    def close(self) -> list[str]:
        """Finish the last shard; the names of all."""
        self._close_shard()
        return self.names

    @property
    def _pending(self) -> int:
        return len(next(iter(self._rows.values())))

    def _flush(self) -> None:
        rows = self._pending
        if rows == 0:
            return
        if self._writer is None:
            self.names.append(f"{self.name or f'shard-{len(self.names):05d}'}.parquet")
            self._writer = pq.ParquetWriter(
                self.folder / self.names[-1],
                self.schema,
                compression=self.store.codec,
                compression_level=self.store.codec_level if self.store.codec == "zstd" else None,
                use_dictionary=False,
            )
        arrays = [self._array(field) for field in self.schema]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self.schema), row_group_size=rows)
        self._shard_rows += rows
        for values in self._rows.values():
            values.clear()

    def _array(self, field: pa.Field) -> pa.ListArray:
        rows = self._rows[field.name]
        offsets = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        values = np.concatenate(rows).astype(field.type.value_type.to_pandas_dtype())
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=field.type)

    def _close_shard(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
        self._writer, self._shard_rows = None, 0


class ListColumns:
    """List columns of all shards of a store, read by row number through a cache of decoded row groups.

    The cache holds `CACHE_BYTES` at most (one group at least) and drops the group that was read longest ago. A store
    that fits into it is decoded here, so that the first batches cost what all others cost.
    """

    def __init__(self, where: Path, files: list[dict[str, Any]], columns: list[str]):
        self.columns = columns
        self._files = [pq.ParquetFile(located(where)[0] / file["name"]) for file in files]
        self._groups: list[tuple[int, int]] = []
        self.first_rows: list[int] = []
        self.rows = 0
        for number, parquet in enumerate(self._files):
            for group in range(parquet.num_row_groups):
                self._groups.append((number, group))
                self.first_rows.append(self.rows)
                self.rows += parquet.metadata.row_group(group).num_rows
        self._cache: OrderedDict[int, dict[str, tuple[np.ndarray, np.ndarray]]] = OrderedDict()
        self._cached_bytes = 0
        if self._decoded_bytes() <= CACHE_BYTES:
            for first in self.first_rows:
                self.row(first)

    def lengths(self, column: str) -> np.ndarray:
        """Length of every row's list, int64 [rows]; decodes each group once, and keeps none of them."""
        found = [np.diff(self._decode(number, [column])[column][0]) for number in range(len(self._groups))]
        return np.concatenate(found).astype(np.int64) if found else np.zeros(0, dtype=np.int64)

    def row(self, i: int) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], int]:
        """The decoded group that holds row i, as (offsets, values) for each column, and the row's number in it."""
        if not 0 <= i < self.rows:
            raise IndexError(f"row {i} of {self.rows}")
        number = bisect_right(self.first_rows, i) - 1
        group = self._cache.get(number)
        if group is None:
            group = self._cache[number] = self._decode(number, self.columns)
            self._cached_bytes += _bytes(group)
            while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= _bytes(self._cache.popitem(last=False)[1])
        else:
            self._cache.move_to_end(number)
        return group, i - self.first_rows[number]

    def _decoded_bytes(self) -> int:
        """What the columns take when decoded, from the files' metadata (values; offsets are small beside them)."""
        total = 0
        for file, group in self._groups:
            row_group = self._files[file].metadata.row_group(group)
            chunks = [row_group.column(c) for c in range(row_group.num_columns)]
            total += sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in self.columns)
        return total

    def _decode(self, number: int, columns: list[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        file, group = self._groups[number]
        table = self._files[file].read_row_group(group, columns=columns, use_threads=False)
        found = {}
        for name in columns:
            lists = table.column(name).combine_chunks()
            lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
            found[name] = (lists.offsets.to_numpy(), lists.values.to_numpy())
        return found


def _bytes(group: dict[str, tuple[np.ndarray, np.ndarray]]) -> int:
    return sum(offsets.nbytes + values.nbytes for offsets, values in group.values())
