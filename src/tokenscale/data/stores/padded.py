"""Store format `padded`: one document per row, cut or right-padded to one length, with an attention mask.

Parquet with columns `input_ids` and `attention_mask`. Rows have `sequence_length` + 1 tokens, so that inputs and labels
have `sequence_length` positions. The manifest counts padding and cut tokens. Records files hold the rows again without
padding: training reads rows in random order from them (see `data.records`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.data.records import smallest_dtype, write_records
from tokenscale.data.stores.documents import Chunk, Documents, make_labels
from tokenscale.data.stores.manifest import SingleFile, open_records
from tokenscale.data.stores.parquet import ListColumns, Shard, read_back, shard_path
from tokenscale.data.stores.writing import FinishedPart, open_store_writer
from tokenscale.settings.data import StoreSettings

COLUMNS = ("input_ids", "attention_mask")


def write(
    store: StoreSettings, documents: Documents, directory: Path, *, single: SingleFile | None = None
) -> dict[str, Any]:
    """Write the store, or with `single` one file, and return its manifest. Row i is document i; memory holds one row
    group.
    """
    with open_store_writer(store, documents, directory, single) as writer:
        parts = writer.parts(
            lambda number: _PartWriter(shard_path(writer.folder, number, single), store, documents, single is None)
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


class _PartWriter:
    """See `writing.PartWriter`."""

    def __init__(self, path: Path, store: StoreSettings, documents: Documents, with_records: bool):
        origin = documents.origin
        self._path, self._dtype = path, smallest_dtype(origin.vocabulary_size)
        self._with_records = with_records
        metadata = {"tokenizer": origin.tokenizer["name"], "format": "padded"}
        types = dict(zip(COLUMNS, (store.dtype, "int8"), strict=True))
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
        for group in read_back(self._path, list(COLUMNS)):
            mask = group["attention_mask"][0].astype(bool)
            yield group["input_ids"][0][mask], np.count_nonzero(mask.reshape(-1, self._width), axis=1)


def pad_document(document: np.ndarray, width: int, pad_id: int) -> tuple[np.ndarray, int]:
    """Return a document cut or right-padded to `width` tokens, int32, and its number of own tokens."""
    length = min(len(document), width)
    row = np.full(width, pad_id, dtype=np.int32)
    row[:length] = document[:length]
    return row, length


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
        self._columns = None if self._records else ListColumns(where, manifest, list(COLUMNS), cache_bytes)

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
