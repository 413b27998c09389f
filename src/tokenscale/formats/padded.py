"""The format `padded`: one document a row, cut or padded on the right to one length, with its attention mask.

Parquet, columns `input_ids` and `attention_mask`, each row `sequence_length` + 1 long, so that inputs and labels of a
row have `sequence_length` positions. What this costs in padding and in cut text is counted in the manifest.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.corpus.reader import RawText
from tokenscale.formats.documents import BATCH_DOCUMENTS, IdsDigest, encode_documents
from tokenscale.formats.labels import labels_of
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
    width = store.sequence_length + 1
    digest = IdsDigest()
    useful = tokens_cut = documents_cut = 0
    with writing(store, corpus_directory, tokenizer, directory, single) as writer:
        metadata = {"tokenizer": tokenizer.name, "format": "padded", "created": text.manifest["source_date"]}
        name = single.name if single else None
        shards = ShardWriter(writer.folder, store, {"input_ids": store.dtype, "attention_mask": "int8"}, metadata, name)
        for texts in text.batches(batch_documents):
            for document in encode_documents(tokenizer, texts, store.eos):
                digest.add(document)
                row, length = pad(document, width, tokenizer.pad_id)
                shards.add(input_ids=row, attention_mask=(np.arange(width) < length).astype(np.int8))
                useful += length - 1
                tokens_cut += len(document) - length
                documents_cut += len(document) > length
            if report is not None:
                report(len(texts), sum(len(t.encode("utf-8")) for t in texts))
        facts = {
            "sequence_length": store.sequence_length,
            "dtype": store.dtype,
            "rows": len(text),
            "documents": len(text),
            "tokens_useful": useful,
            "tokens_total": len(text) * store.sequence_length,
            "tokens_cut": tokens_cut,
            "documents_cut": documents_cut,
            "ids_sha256": digest.hexdigest(),
        }
        return writer.finish(shards.close(), facts)


def pad(document: np.ndarray, width: int, pad_id: int) -> tuple[np.ndarray, int]:
    """A document cut or padded on the right to `width` tokens, int32, and how many of them are its own."""
    length = min(len(document), width)
    row = np.full(width, pad_id, dtype=np.int32)
    row[:length] = document[:length]
    return row, length


class PaddedStore:
    """Rows of a `padded` store by number. Give it the manifest that `formats.manifest.open_store` checked."""

    def __init__(self, where: Path, manifest: dict[str, Any]):
        self.manifest = manifest
        self.sequence_length: int = manifest["sequence_length"]
        self._columns = ListColumns(where, manifest["files"], ["input_ids", "attention_mask"])

    def __len__(self) -> int:
        """Rows, which are documents."""
        return self._columns.rows

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of the given rows: (tokens_bt, labels_bt), int64 [n, T]; −100 on padding."""
        width = self.sequence_length + 1
        tokens = np.empty((len(indices), width), dtype=np.int64)
        lengths = np.empty(len(indices), dtype=np.int64)
        for n, i in enumerate(np.asarray(indices).tolist()):
            group, row = self._columns.row(i)
            offsets, values = group["input_ids"]
            tokens[n] = values[offsets[row] : offsets[row + 1]]
            offsets, mask = group["attention_mask"]
            lengths[n] = np.count_nonzero(mask[offsets[row] : offsets[row + 1]])
        return tokens[:, :-1], labels_of(tokens, lengths=lengths)
