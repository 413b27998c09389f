"""Store formats `padded` and `token-list`: Parquet shards, read through a bounded cache, and records files.

`padded` has one document per row, cut or right-padded to `sequence_length` + 1 tokens so that inputs and labels have
`sequence_length` positions, in the columns `input_ids` and `attention_mask`. `token-list` has whole documents as lists
of ids. Other programs read the shards. Training reads documents in random order from the records files, which hold the
same documents without padding (see `data.records`): a row group is the smallest decodable unit of a shard.

Ids go from Arrow to NumPy without Python ints. A store that fits the cache is decoded at opening.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.data.corpus.raw_text import check_file
from tokenscale.data.stores.documents import Chunk, make_labels
from tokenscale.data.stores.manifest import open_records, rebuild_command, resolve_store, vocabulary_error

#: default size of a reader's cache of decoded ids
CACHE_BYTES = 512 << 20
#: shards that one reader keeps open
OPEN_SHARDS = 128


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


def _decode_lists(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return (offsets, values) of a list column."""
    lists = column.combine_chunks()
    lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
    return lists.offsets.to_numpy(), lists.values.to_numpy()


def _group_bytes(group: dict[str, tuple[np.ndarray, np.ndarray]]) -> int:
    return sum(offsets.nbytes + values.nbytes for offsets, values in group.values())


class PaddedStore:
    """Random access to the rows of a `padded` store. `manifest` comes from `stores.manifest.open_store`.

    Rows come from the records files. A store without them, and any store if `cache_bytes` is given, is read from its
    Parquet shards, through a cache of that many bytes of row groups (512 MiB by default).
    """

    def __init__(self, where: Path, manifest: dict[str, Any], *, cache_bytes: int | None = None):
        self.manifest = manifest
        self.sequence_length: int = manifest["sequence_length"]
        self._pad_id: int = manifest["padding"]["id"]
        self._records = open_records(where, manifest) if cache_bytes is None else None
        self._columns = (
            None if self._records else ListColumns(where, manifest, ["input_ids", "attention_mask"], cache_bytes)
        )

    def __len__(self) -> int:
        return self.manifest["rows"]

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and labels of rows, int64 [n, T]; labels are −100 on padding."""
        width = self.sequence_length + 1
        tokens = np.empty((len(indices), width), dtype=np.int64)
        lengths = np.empty(len(indices), dtype=np.int64)
        for n, i in enumerate(np.asarray(indices).tolist()):
            if self._records is not None:
                own = self._records.read(i)
                lengths[n] = len(own)
                tokens[n, : len(own)], tokens[n, len(own) :] = own, self._pad_id
                continue
            group, row = self._columns.row(i)
            offsets, values = group["input_ids"]
            tokens[n] = values[offsets[row] : offsets[row + 1]]
            offsets, mask = group["attention_mask"]
            lengths[n] = np.count_nonzero(mask[offsets[row] : offsets[row + 1]])
        return tokens[:, :-1], make_labels(tokens, lengths=lengths)


class TokenListStore:
    """Random access to the documents of a `token-list` store. `manifest` comes from `stores.manifest.open_store`.

    Documents come from the records files. A store without them, and any store if `cache_bytes` is given, is read from
    its Parquet shards, through a cache of that many bytes of row groups (512 MiB by default).
    """

    def __init__(self, where: Path, manifest: dict[str, Any], *, cache_bytes: int | None = None):
        self.manifest = manifest
        self._where, self._cache_bytes = where, cache_bytes
        self._records = open_records(where, manifest) if cache_bytes is None else None
        self.total_tokens: int = manifest["tokens_total"]
        if self._records is None:
            self._columns  # noqa: B018  # open the shards now, not in the first batch

    def __len__(self) -> int:
        return self.manifest["rows"]

    @cached_property
    def _columns(self) -> ListColumns:
        preload = self._records is None
        return ListColumns(self._where, self.manifest, ["tokens"], self._cache_bytes, preload=preload)

    def document(self, i: int) -> np.ndarray:
        """Return the ids of document i with BOS (and EOS), int32 [length]."""
        if self._records is not None:
            return self._records.read(i).astype(np.int32)
        group, row = self._columns.row(i)
        offsets, values = group["tokens"]
        return values[offsets[row] : offsets[row + 1]].astype(np.int32)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Lengths of all documents in tokens, int64 [documents]; read at first use."""
        return self._columns.lengths("tokens") if self._records is None else self._records.lengths()

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        return self.lengths[indices]

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        """Yield documents [first, last), one row group at a time."""
        for group, start, end in self._columns.groups(first, last):
            offsets, values = group["tokens"]
            lengths = np.diff(offsets[start : end + 1]).astype(np.int64)
            yield Chunk(values[offsets[start] : offsets[end]].astype(np.int32), lengths)
