"""Readers of the store formats `padded` and `token-list`.

`padded` has one document per row, cut or right-padded to `sequence_length` + 1 tokens so that
inputs and labels have `sequence_length` positions, in the columns `input_ids` and `attention_mask`.
`token-list` has whole documents as lists of ids. Other programs read the Parquet shards. These
readers read records files, which hold the same documents without padding (see `data.records`): a
row group is the smallest decodable unit of a shard.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.data.stores.documents import Chunk, pad_documents
from tokenscale.data.stores.manifest import open_records

#: documents per chunk that is read in order
CHUNK_DOCUMENTS = 1000


class PaddedStore:
    """Random access to the rows of a `padded` store. `manifest` comes from
    `stores.manifest.open_store`.
    """

    def __init__(self, where: Path, manifest: dict[str, Any]):
        self.manifest = manifest
        self.sequence_length: int = manifest["sequence_length"]
        self._pad_id: int = manifest["padding"]["id"]
        self._records = open_records(where, manifest)

    def __len__(self) -> int:
        return self.manifest["rows"]

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and labels of rows, int64 [n, T]; labels are −100 on padding."""
        documents = [self._records.read(i) for i in np.asarray(indices).tolist()]
        return pad_documents(documents, width=self.sequence_length + 1, pad_id=self._pad_id)


class TokenListStore:
    """Random access to the documents of a `token-list` store. `manifest` comes from
    `stores.manifest.open_store`.
    """

    def __init__(self, where: Path, manifest: dict[str, Any]):
        self.manifest = manifest
        self.total_tokens: int = manifest["tokens_total"]
        self._records = open_records(where, manifest)

    def __len__(self) -> int:
        return self.manifest["rows"]

    def document(self, i: int) -> np.ndarray:
        """Return the ids of document i with BOS (and EOS), int32 [length]."""
        return self._records.read(i).astype(np.int32)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Lengths of all documents in tokens, int64 [documents]; read at first use."""
        return self._records.lengths()

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        return self.lengths[indices]

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        """Yield documents [first, last), at most `CHUNK_DOCUMENTS` at a time."""
        for begin in range(first, last, CHUNK_DOCUMENTS):
            found = [self.document(i) for i in range(begin, min(begin + CHUNK_DOCUMENTS, last))]
            yield Chunk(
                np.concatenate(found), lengths=np.array([len(ids) for ids in found], dtype=np.int64)
            )
