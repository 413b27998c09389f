"""Writers of the formats `padded` and `token-list`: Parquet shards, and records files from the
finished shards.

Memory holds one row group.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError
from tokenscale.base.files import naming
from tokenscale.data.records import smallest_dtype, write_records
from tokenscale.data.stores.documents import Chunk, Documents, IdsDigest
from tokenscale.data.stores.manifest import SingleFile
from tokenscale.data.stores.writing import StoreWriter, open_store_writer
from tokenscale.settings.data import StoreSettings

#: rows per shard
SHARD_ROWS = 100_000
#: maximum values of a column in a row group, since Arrow's lists have int32 offsets
GROUP_VALUES = (1 << 31) - 1

#: lists of one column: their concatenated values, and the length of each, int64 [rows]
Lists = tuple[np.ndarray, np.ndarray]


def write_padded(
    store: StoreSettings, documents: Documents, directory: Path, *, single: SingleFile | None = None
) -> dict[str, Any]:
    """Write the store, or with `single` one file, and return its manifest. Row i is document i."""
    width = store.sequence_length + 1
    pad_id = documents.origin.pad_id
    counts = {"tokens_useful": 0, "tokens_cut": 0, "documents_cut": 0}

    def pad(chunk: Chunk) -> dict[str, Lists]:
        count = len(chunk.lengths)
        rows = np.full((count, width), pad_id, dtype=np.int32)
        for row, document in zip(rows, chunk.documents(), strict=True):
            row[: min(len(document), width)] = document[:width]
        lengths = np.minimum(chunk.lengths, width)
        mask = (np.arange(width) < lengths[:, None]).astype(np.int8)
        counts["tokens_useful"] += int(lengths.sum()) - count
        counts["tokens_cut"] += int((chunk.lengths - lengths).sum())
        counts["documents_cut"] += int(np.count_nonzero(chunk.lengths > width))
        full = np.full(count, width, dtype=np.int64)
        return {"input_ids": (rows.ravel(), full), "attention_mask": (mask.ravel(), full)}

    def strip_padding(group: dict[str, Lists]) -> Lists:
        mask = group["attention_mask"][0].astype(bool)
        return group["input_ids"][0][mask], np.count_nonzero(mask.reshape(-1, width), axis=1)

    with open_store_writer(
        store,
        documents,
        directory=directory,
        single=single,
    ) as writer:
        types = {"input_ids": store.dtype, "attention_mask": "int8"}
        names, records = _write_shards(
            writer,
            single,
            types=types,
            to_columns=pad,
            to_documents=strip_padding,
        )
        facts = {
            "sequence_length": store.sequence_length,
            "dtype": store.dtype,
            "rows": len(documents),
            "tokens_total": len(documents) * store.sequence_length,
            "tokens_stored": counts["tokens_useful"] + len(documents),
            "places": len(documents) * width,
            **counts,
        }
        return writer.finish(names, facts, records=records)


def write_token_list(
    store: StoreSettings, documents: Documents, directory: Path, *, single: SingleFile | None = None
) -> dict[str, Any]:
    """As `write_padded`. Raises UserError for ids that are not read back as they were written."""
    read = IdsDigest()

    def add_to_digest(group: dict[str, Lists]) -> Lists:
        ids, lengths = group["tokens"]
        read.add(Chunk(ids.astype(np.int32), lengths))
        return ids, lengths

    with open_store_writer(
        store,
        documents,
        directory=directory,
        single=single,
    ) as writer:
        names, records = _write_shards(
            writer,
            single,
            types={"tokens": store.dtype},
            to_columns=lambda chunk: {"tokens": (chunk.ids, chunk.lengths)},
            to_documents=add_to_digest,
        )
        if read.close() != writer.digest.close():
            next_step = "check the disk and the memory of this machine, and build the store again"
            raise UserError(
                "the token store is not read back as it was written.",
                folder=directory,
                next=next_step,
            )
        tokens = int(writer.occurrences.sum())
        facts = {
            "dtype": store.dtype,
            "rows": len(documents),
            "tokens_useful": tokens - len(documents),
        }
        facts |= dict.fromkeys(("tokens_total", "tokens_stored", "places"), tokens)
        return writer.finish(names, facts | {"tokens_cut": 0, "documents_cut": 0}, records=records)


def _write_shards(
    writer: StoreWriter,
    single: SingleFile | None,
    types: dict[str, str],
    to_columns: Callable[[Chunk], dict[str, Lists]],
    to_documents: Callable[[dict[str, Lists]], Lists],
) -> tuple[list[str], list[dict[str, Any]]]:
    """Write Parquet shards, and a records file from each finished shard.

    `types` are the dtypes of the columns. `to_columns` makes columns of a chunk, `to_documents` the
    ids of documents of the columns that are read back. Returns the names of the shards, and the
    entries of records files.
    """
    dtype = smallest_dtype(writer.documents.origin.vocabulary_size)
    count = len(writer.documents)
    names = []
    records = []
    for number, first in enumerate(range(0, count, count if single else SHARD_ROWS)):
        path = writer.folder / f"{single.name if single else f'shard-{number:05d}'}.parquet"
        shard = Shard(
            path=path,
            store=writer.store,
            columns=types,
            tokenizer=writer.documents.origin.tokenizer["name"],
        )
        for chunk in writer.chunks(first, count if single else min(first + SHARD_ROWS, count)):
            shard.add(**to_columns(chunk))
        shard.close()
        # FILE.bin would be the name of a file of nanoGPT's
        target = path.with_suffix(".records" if single else ".bin")
        records.append(
            write_records(
                target, parts=map(to_documents, read_back(path, columns=list(types))), dtype=dtype
            )
        )
        names.append(path.name)
    return names, records


class Shard:
    """One Parquet file of list columns. The caller fixes the schema's metadata, so that equal rows
    give equal bytes.
    """

    def __init__(self, path: Path, store: StoreSettings, columns: dict[str, str], tokenizer: str):
        self.path = path
        self._group_rows = store.row_group_rows
        fields = [
            pa.field(
                name,
                pa.list_(pa.field("element", getattr(pa, dtype)(), nullable=False)),
                nullable=False,
            )
            for name, dtype in columns.items()
        ]
        self.schema = pa.schema(fields, metadata={"tokenizer": tokenizer, "format": store.format})
        self._pending: list[dict[str, Chunk]] = []
        self._rows = 0
        with naming(path):
            self._writer = pq.ParquetWriter(
                path,
                self.schema,
                compression=store.codec,
                compression_level=store.codec_level if store.codec == "zstd" else None,
                use_dictionary=False,
            )

    def add(self, **columns: Lists) -> None:
        """Add rows: the lists of each column."""
        rows = len(next(iter(columns.values()))[1])
        first = 0
        while first < rows:
            last = min(rows, first + self._group_rows - self._rows)
            self._pending.append(
                {name: Chunk(*lists).part(first, last) for name, lists in columns.items()}
            )
            self._rows += last - first
            if self._rows == self._group_rows:
                self._flush()
            first = last

    def close(self) -> None:
        """Finish the file."""
        self._flush()
        with naming(self.path):
            self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            arrays = [self._array(field) for field in self.schema]
            table = pa.Table.from_arrays(arrays, schema=self.schema)
            with naming(self.path):
                self._writer.write_table(table, row_group_size=self._rows)
        self._pending = []
        self._rows = 0

    def _array(self, field: pa.Field) -> pa.ListArray:
        lengths = np.concatenate([part[field.name].lengths for part in self._pending])
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        if offsets[-1] > GROUP_VALUES:
            rows = f"{len(lengths):,} in a group, row_group_rows is {self._group_rows:,}"
            found = f"{offsets[-1]:,} ids in the column {field.name}"
            expected = f"at most {GROUP_VALUES:,}"
            facts = {"file": self.path, "rows": rows, "found": found, "expected": expected}
            next_step = (
                "set a lower `storage.row_group_rows`, or `cleaning.maximum_characters` of the "
                "corpus"
            )
            raise UserError("a row group has too many ids.", **facts, next=next_step)
        values = np.concatenate([part[field.name].ids for part in self._pending])
        values = values.astype(field.type.value_type.to_pandas_dtype(), copy=False)
        return pa.ListArray.from_arrays(
            _to_arrow(offsets.astype(np.int32)), _to_arrow(values), type=field.type
        )


def _to_arrow(values: np.ndarray) -> pa.Array:
    """Return an Arrow array that shares the memory. (`pa.array` does so too, but imports
    pandas.)
    """
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)]
    )


def read_back(path: Path, columns: list[str]) -> Iterator[dict[str, Lists]]:
    """Yield the columns of each row group of a finished shard."""
    file = pq.ParquetFile(path, pre_buffer=False)
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, columns=columns, use_threads=False)
        lists = {name: table.column(name).combine_chunks() for name in columns}
        yield {
            name: (column.values.to_numpy(), np.diff(column.offsets.to_numpy()).astype(np.int64))
            for name, column in lists.items()
        }
