"""The format `token-list`: whole documents, never cut, as lists of ids in Parquet."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.corpus.reader import RawText
from tokenscale.formats.documents import BATCH_DOCUMENTS, IdsDigest, encode_documents
from tokenscale.formats.manifest import SingleFile, no_documents, writing
from tokenscale.formats.parquet import ListColumns, ShardWriter
from tokenscale.settings.data import StoreSettings
from tokenscale.tokenizer.load import load


def write(
    store: StoreSettings,
    corpus_directory: Path,
    tokenizer_directory: Path,
    directory: Path,
    report: Callable[[int, int], None] | None = None,
    *,
    batch_documents: int = BATCH_DOCUMENTS,
    single: SingleFile | None = None,
) -> dict[str, Any]:
    """Write the store and return its manifest. Row i is document i of the split; memory holds one row group.

    The tokenizer gets `batch_documents` at a time. With `single` the store is that one file of `directory`.
    `report(documents, utf8_bytes)` hears of each batch. Raises UserError for a split without documents.
    """
    text = RawText(corpus_directory, store.split)
    if len(text) == 0:
        raise no_documents(store, corpus_directory)
    tokenizer = load(tokenizer_directory)
    digest = IdsDigest()
    tokens = 0
    with writing(store, corpus_directory, tokenizer, directory, single) as writer:
        metadata = {"tokenizer": tokenizer.name, "format": "token-list", "created": text.manifest["source_date"]}
        name = single.name if single else None
        shards = ShardWriter(writer.folder, store, {"tokens": store.dtype}, metadata, name)
        for texts in text.batches(batch_documents):
            for document in encode_documents(tokenizer, texts, store.eos):
                digest.add(document)
                shards.add(tokens=document)
                tokens += len(document)
            if report is not None:
                report(len(texts), sum(len(t.encode("utf-8")) for t in texts))
        facts = {
            "dtype": store.dtype,
            "rows": len(text),
            "documents": len(text),
            "tokens_useful": tokens - len(text),
            "tokens_total": tokens,
            "tokens_cut": 0,
            "documents_cut": 0,
            "ids_sha256": digest.hexdigest(),
        }
        return writer.finish(shards.close(), facts)


class TokenListStore:
    """Documents of a `token-list` store by number. Give it the manifest that `formats.manifest.open_store` checked."""

    def __init__(self, where: Path, manifest: dict[str, Any]):
        self.manifest = manifest
        self._columns = ListColumns(where, manifest["files"], ["tokens"])

    def __len__(self) -> int:
        """Documents."""
        return self._columns.rows

    def document(self, i: int) -> np.ndarray:
        """Ids of document i with its BOS (and EOS), int32 [length]."""
        group, row = self._columns.row(i)
        offsets, values = group["tokens"]
        return values[offsets[row] : offsets[row + 1]].astype(np.int32)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every document, int64 [documents]; read once, when first asked for."""
        return self._columns.lengths("tokens")

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of the given documents, int64 [n]."""
        return self.lengths[indices]
