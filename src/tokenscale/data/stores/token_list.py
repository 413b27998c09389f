"""Store format `token-list`: whole documents as lists of ids in Parquet, and again in records files.

The Parquet shards are what other programs read. Training reads documents in random order from the records files (see
`data.records`), which are written from the finished shards.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.data.records import smallest_dtype, write_records
from tokenscale.data.stores.documents import Chunk, Documents, IdsDigest
from tokenscale.data.stores.manifest import SingleFile, open_records
from tokenscale.data.stores.parquet import ListColumns, Shard, read_back, shard_path
from tokenscale.data.stores.writing import FinishedPart, open_store_writer
from tokenscale.settings.data import StoreSettings


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


class _PartWriter:
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
