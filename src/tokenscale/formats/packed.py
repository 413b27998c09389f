"""The format `packed`: full rows, nothing dropped, memory-mapped.

- `tokens.bin`: rows of `sequence_length` + 1 ids, one after another, uint16 where the vocabulary allows, else uint32;
- `pieces.npy`: lengths of the pieces, row by row; the rest of a row is padding on the right;
- `rows.npy`: int64 [rows + 1]; row r holds pieces[rows[r]:rows[r + 1]].

Documents longer than a row are cut into pieces that overlap by one token, so every label appears exactly once. Rows are
filled by best-fit-decreasing and stored in a shuffled order of fixed seed, so that reading ahead is reading forward.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.corpus.reader import RawText
from tokenscale.formats.documents import BATCH_DOCUMENTS, IdsDigest, encode_documents
from tokenscale.formats.labels import labels_of
from tokenscale.formats.manifest import located, no_documents, writing
from tokenscale.order.packing import best_fit_decreasing, cut
from tokenscale.order.permutation import permute
from tokenscale.settings.data import StoreSettings
from tokenscale.tokenizer.load import load

#: of the order in which rows are stored; runs shuffle on top of it with their own
STORAGE_SEED = 0x7061636B
BLOCK_ROWS = 4096


def write(
    store: StoreSettings,
    corpus_directory: Path,
    tokenizer_directory: Path,
    directory: Path,
    report: Callable[[int, int], None] | None = None,
    *,
    batch_documents: int = BATCH_DOCUMENTS,
) -> dict[str, Any]:
    """Write the store and return its manifest. Ids go to disk first, rows are gathered from there: memory holds the
    lengths of all documents (8 bytes each, and as much for the packing) and a block of rows.

    The tokenizer gets `batch_documents` at a time; `report(documents, utf8_bytes)` hears of each batch. Raises
    UserError for a split without documents.
    """
    text = RawText(corpus_directory, store.split)
    if len(text) == 0:
        raise no_documents(store, corpus_directory)
    tokenizer = load(tokenizer_directory)
    dtype = np.dtype("<u2" if tokenizer.vocabulary_size <= 1 << 16 else "<u4")
    digest = IdsDigest()
    lengths = np.empty(len(text), dtype=np.int64)
    with writing(store, corpus_directory, tokenizer, directory) as writer:
        unpacked = writer.folder / "documents.bin"
        number = 0
        with open(unpacked, "wb") as file:
            for texts in text.batches(batch_documents):
                for document in encode_documents(tokenizer, texts, store.eos):
                    digest.add(document)
                    lengths[number] = len(document)
                    number += 1
                    file.write(document.astype(dtype).tobytes())
                if report is not None:
                    report(len(texts), sum(len(t.encode("utf-8")) for t in texts))
        rows, pieces = _write_rows(writer.folder, unpacked, dtype, lengths, store.sequence_length, tokenizer.pad_id)
        unpacked.unlink()
        facts = {
            "sequence_length": store.sequence_length,
            "dtype": dtype.name,
            "rows": rows,
            "pieces": len(pieces),
            "documents": len(text),
            "tokens_useful": int(pieces.sum()) - len(pieces),
            "tokens_total": rows * store.sequence_length,
            "tokens_cut": 0,
            "documents_cut": 0,
            "documents_split": int(np.count_nonzero(lengths > store.sequence_length + 1)),
            "ids_sha256": digest.hexdigest(),
        }
        return writer.finish(["tokens.bin", "pieces.npy", "rows.npy"], facts)


def _write_rows(
    folder: Path, unpacked: Path, dtype: np.dtype, lengths: np.ndarray, sequence_length: int, pad_id: int
) -> tuple[int, np.ndarray]:
    """Pack, shuffle and write; returns the number of rows and the pieces' lengths in stored order."""
    documents = np.asarray(np.memmap(unpacked, dtype=dtype, mode="r"))
    document, starts, sizes = cut(lengths, sequence_length)
    origins = (np.cumsum(lengths) - lengths)[document] + starts
    packed, pointers = best_fit_decreasing(sizes, sequence_length + 1)
    rows = len(pointers) - 1
    stored = permute(np.arange(rows), rows, STORAGE_SEED)
    counts = np.diff(pointers)[stored]
    new_pointers = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(counts, out=new_pointers[1:])
    order = np.repeat(pointers[stored], counts) + np.arange(len(packed)) - np.repeat(new_pointers[:-1], counts)
    packed = packed[order]
    sizes, origins = sizes[packed], origins[packed]
    np.save(folder / "pieces.npy", sizes.astype("<i4"))
    np.save(folder / "rows.npy", new_pointers.astype("<i8"))
    with open(folder / "tokens.bin", "wb") as file:
        for first in range(0, rows, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, rows)
            block = np.full((last - first, sequence_length + 1), pad_id, dtype=dtype)
            for row in range(first, last):
                at = 0
                for piece in range(new_pointers[row], new_pointers[row + 1]):
                    size, origin = int(sizes[piece]), int(origins[piece])
                    block[row - first, at : at + size] = documents[origin : origin + size]
                    at += size
            file.write(block.tobytes())
    return rows, sizes


class PackedStore:
    """Rows of a `packed` store by number. Give it the manifest that `formats.manifest.open_store` checked."""

    def __init__(self, where: Path, manifest: dict[str, Any]):
        directory = located(where)[0]
        self.manifest = manifest
        self.sequence_length: int = manifest["sequence_length"]
        dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        mapped = np.memmap(directory / "tokens.bin", dtype=dtype, mode="r")
        self._tokens = np.asarray(mapped).reshape(-1, self.sequence_length + 1)
        self._pointers = np.load(directory / "rows.npy")
        pieces = np.load(directory / "pieces.npy")
        ends = np.cumsum(pieces, dtype=np.int64)
        before = np.concatenate(([0], ends))[self._pointers[:-1]]  # tokens in all rows before each row
        self._ends = (ends - np.repeat(before, np.diff(self._pointers))).astype(np.int32)  # in its row, 4 bytes a piece

    def __len__(self) -> int:
        """Rows."""
        return len(self._tokens)

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of the given rows: (tokens_bt, labels_bt), int64 [n, T].

        Labels are −100 on padding and on each piece's first token.
        """
        tokens = self._tokens[indices].astype(np.int64)
        ends = self._row_ends(indices)
        lengths = np.array([e[-1] for e in ends], dtype=np.int64)
        return tokens[:, :-1], labels_of(tokens, [e[:-1] for e in ends], lengths)

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """Where a piece begins among the inputs of the given rows, bool [n, T]: the bounds of a document mask."""
        marks = np.zeros((len(indices), self.sequence_length + 1), dtype=bool)
        marks[:, 0] = True
        for row, ends in zip(marks, self._row_ends(indices), strict=True):
            row[ends[:-1]] = True
        return marks[:, :-1]

    def _row_ends(self, indices: np.ndarray) -> list[np.ndarray]:
        """For each row, where its pieces end; the last end is the row's length without padding."""
        indices = np.asarray(indices, dtype=np.int64)
        bounds = zip(self._pointers[indices].tolist(), self._pointers[indices + 1].tolist(), strict=True)
        return [self._ends[first:last] for first, last in bounds]
