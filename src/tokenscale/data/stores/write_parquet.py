"""Writers of the formats `padded` and `token-list`: Parquet shards, and records files from the finished shards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError
from tokenscale.data.records import smallest_dtype, write_records
from tokenscale.data.stores.documents import Chunk, Documents, IdsDigest
from tokenscale.data.stores.manifest import SingleFile
from tokenscale.data.stores.writing import FinishedPart, open_store_writer
from tokenscale.settings.data import StoreSettings

#: maximum values of a column in a row group, since Arrow's lists have int32 offsets
GROUP_VALUES = (1 << 31) - 1


def write_padded(
    store: StoreSettings, documents: Documents, directory: Path, *, single: SingleFile | None = None
) -> dict[str, Any]:
    """Write the store, or with `single` one file, and return its manifest. Row i is document i; memory holds one row
    group.
    """
    with open_store_writer(store, documents, directory, single) as writer:
        parts = writer.parts(
            lambda number: _PaddedPart(shard_path(writer.folder, number, single), store, documents, single is None)
        )
        facts = {
            "sequence_length": store.sequence_length,
            "dtype": store.dtype,
            "rows": len(documents),
            "tokens_total": len(documents) * store.sequence_length,
            "tokens_stored": parts.counts["tokens_useful"] + len(documents),
            "places": len(documents) * (store.sequence_length + 1),
            **parts.counts,
        }
        return writer.finish(parts.files, facts, records=parts.records)


class _PaddedPart:
    """See `writing.PartWriter`."""

    def __init__(self, path: Path, store: StoreSettings, documents: Documents, with_records: bool):
        origin = documents.origin
        self._path, self._dtype = path, smallest_dtype(origin.vocabulary_size)
        self._with_records = with_records
        metadata = {"tokenizer": origin.tokenizer["name"], "format": "padded"}
        types = {"input_ids": store.dtype, "attention_mask": "int8"}
        self._shard = Shard(path, store, types, metadata)
        self._width, self._pad_id = store.sequence_length + 1, origin.pad_id
        self._counts = {"tokens_useful": 0, "tokens_cut": 0, "documents_cut": 0}

    def add(self, chunk: Chunk) -> None:
        width, count = self._width, len(chunk.lengths)
        rows = np.full((count, width), self._pad_id, dtype=np.int32)
        for row, document in zip(rows, chunk.documents(), strict=True):
            row[: min(len(document), width)] = document[:width]
        lengths = np.minimum(chunk.lengths, width)
        mask = (np.arange(width) < lengths[:, None]).astype(np.int8)
        full = np.full(count, width, dtype=np.int64)
        self._shard.add(input_ids=(rows.ravel(), full), attention_mask=(mask.ravel(), full))
        self._counts["tokens_useful"] += int(lengths.sum()) - count
        self._counts["tokens_cut"] += int((chunk.lengths - lengths).sum())
        self._counts["documents_cut"] += int(np.count_nonzero(chunk.lengths > width))

    def close(self) -> FinishedPart:
        name, own = self._shard.close(), self._own_tokens()
        records = [write_records(self._path.with_suffix(".bin"), own, self._dtype)] if self._with_records else []
        return FinishedPart([name], self._counts, records)

    def _own_tokens(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows of the finished shard without padding."""
        for group in read_back(self._path, ["input_ids", "attention_mask"]):
            mask = group["attention_mask"][0].astype(bool)
            yield group["input_ids"][0][mask], np.count_nonzero(mask.reshape(-1, self._width), axis=1)


def write_token_list(
    store: StoreSettings, documents: Documents, directory: Path, *, single: SingleFile | None = None
) -> dict[str, Any]:
    """Write the store, or with `single` one file, and return its manifest. Row i is document i; memory holds one row
    group.
    """
    with open_store_writer(store, documents, directory, single) as writer:
        parts = writer.parts(
            lambda number: _TokenListPart(shard_path(writer.folder, number, single), store, documents, single is None)
        )
        facts = {
            "dtype": store.dtype,
            "rows": len(documents),
            "tokens_useful": parts.counts["tokens_total"] - len(documents),
            "tokens_stored": parts.counts["tokens_total"],
            "places": parts.counts["tokens_total"],
            "tokens_cut": 0,
            "documents_cut": 0,
            **parts.counts,
        }
        return writer.finish(parts.files, facts, records=parts.records)


class _TokenListPart:
    """See `writing.PartWriter`."""

    def __init__(self, path: Path, store: StoreSettings, documents: Documents, with_records: bool):
        origin = documents.origin
        metadata = {"tokenizer": origin.tokenizer["name"], "format": "token-list"}
        self._shard = Shard(path, store, {"tokens": store.dtype}, metadata)
        self._path, self._dtype = path, smallest_dtype(origin.vocabulary_size)
        self._with_records, self._tokens = with_records, 0

    def add(self, chunk: Chunk) -> None:
        self._shard.add(tokens=(chunk.ids, chunk.lengths))
        self._tokens += len(chunk.ids)

    def close(self) -> FinishedPart:
        name, digest = self._shard.close(), IdsDigest()
        groups = self._read_back(digest)
        records = [write_records(self._path.with_suffix(".bin"), groups, self._dtype)] if self._with_records else []
        for _ in groups:  # read the rest, which no records file has consumed
            pass
        digest.close()
        return FinishedPart([name], {"tokens_total": self._tokens}, records, digest.groups)

    def _read_back(self, digest: IdsDigest) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (ids, lengths) of each row group of the finished shard, and add them to `digest`."""
        for group in read_back(self._path, ["tokens"]):
            ids, lengths = group["tokens"]
            digest.add(Chunk(ids.astype(np.int32), lengths))
            yield ids, lengths


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


def _slice_rows(values: np.ndarray, lengths: np.ndarray, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    ends = np.cumsum(lengths)
    start = ends[first - 1] if first else 0
    return values[start : ends[last - 1] if last > first else start], lengths[first:last]


def read_back(path: Path, columns: list[str]) -> Iterator[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Yield each row group of a finished shard: column → (values, lengths int64 [rows])."""
    file = pq.ParquetFile(path, pre_buffer=False)
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, columns=columns, use_threads=False)
        lists = {name: table.column(name).combine_chunks() for name in columns}
        yield {
            name: (column.values.to_numpy(), np.diff(column.offsets.to_numpy()).astype(np.int64))
            for name, column in lists.items()
        }


def shard_path(folder: Path, number: int, single: SingleFile | None) -> Path:
    """Return the path of a part's file: `shard-00000.parquet`, or the only file of a single-file store."""
    return folder / f"{single.name if single else f'shard-{number:05d}'}.parquet"
