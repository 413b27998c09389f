"""Store format `token-list`: whole documents as lists of ids in Parquet."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.data.stores.documents import Chunk, Documents
from tokenscale.data.stores.manifest import SingleFile
from tokenscale.data.stores.parquet import ListColumns, Shard, shard_path
from tokenscale.data.stores.writing import open_store_writer
from tokenscale.settings.data import StoreSettings


def write(
    store: StoreSettings, documents: Documents, directory: Path, *, single: SingleFile | None = None
) -> dict[str, Any]:
    """Write the store and return its manifest. Row i is document i; memory holds one row group.

    With `single` the store is this one file in `directory`.
    """
    with open_store_writer(store, documents, directory, single) as writer:
        parts = writer.parts(lambda number: _PartWriter(shard_path(writer.folder, number, single), store, documents))
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
        return writer.finish(parts.files, facts)


class _PartWriter:
    """See `writing.PartWriter`."""

    def __init__(self, path: Path, store: StoreSettings, documents: Documents):
        origin = documents.origin
        metadata = {"tokenizer": origin.tokenizer["name"], "format": "token-list"}
        self._shard = Shard(path, store, {"tokens": store.dtype}, metadata)
        self._tokens = 0

    def add(self, chunk: Chunk) -> None:
        self._shard.add(tokens=(chunk.ids, chunk.lengths))
        self._tokens += len(chunk.ids)

    def close(self) -> tuple[list[str], dict[str, int]]:
        return [self._shard.close()], {"tokens_total": self._tokens}


class TokenListStore:
    """Random access to the documents of a `token-list` store. `manifest` comes from `stores.manifest.open_store`."""

    def __init__(self, where: Path, manifest: dict[str, Any], *, cache_bytes: int | None = None):
        self.manifest = manifest
        self._columns = ListColumns(where, manifest, ["tokens"], cache_bytes)

    def __len__(self) -> int:
        """Return the number of documents."""
        return self._columns.rows

    def document(self, i: int) -> np.ndarray:
        """Return the ids of document i with BOS (and EOS), int32 [length]."""
        group, row = self._columns.row(i)
        offsets, values = group["tokens"]
        return values[offsets[row] : offsets[row + 1]].astype(np.int32)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Lengths of all documents in tokens, int64 [documents]; read at first use."""
        return self._columns.lengths("tokens")

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the lengths of documents in tokens, int64 [n]."""
        return self.lengths[indices]

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        """Yield documents [first, last), one row group at a time."""
        for group, start, end in self._columns.groups(first, last):
            offsets, values = group["tokens"]
            lengths = np.diff(offsets[start : end + 1]).astype(np.int64)
            yield Chunk(values[offsets[start] : offsets[end]].astype(np.int32), lengths)
