"""Writer of the format `packed`; see `stores.packed`. Documents are packed when all of them are on
disk.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from tokenscale.base.files import HashedFile, replace_file
from tokenscale.data.order.packing import concatenate, pack, split_documents
from tokenscale.data.order.permutation import permute
from tokenscale.data.records import smallest_dtype
from tokenscale.data.stores.documents import Documents
from tokenscale.data.stores.writing import open_store_writer
from tokenscale.settings.data import StoreSettings

#: seed of the stored order of rows; runs shuffle rows again with their own seed
STORAGE_SEED = 0x7061636B
#: rows per block
BLOCK_ROWS = 1024
STORE_FILES = (
    "tokens.bin",
    "checksums.npy",
    "pieces.npy",
    "rows.npy",
    "documents.npy",
    "starts.npy",
)
#: temporary file of the concatenated ids
IDS = "documents.ids"


def write_packed(store: StoreSettings, documents: Documents, directory: Path) -> dict[str, Any]:
    """Write the store and return its manifest. Memory holds about 50 bytes per document; ids are
    gathered on disk.
    """
    dtype = smallest_dtype(documents.origin.vocabulary_size)
    with open_store_writer(store, documents, directory=directory) as writer:
        lengths = []
        with replace_file(writer.folder / IDS) as ids:
            for chunk in writer.chunks():
                ids.write(chunk.ids.view("<u4") if dtype.itemsize == 4 else chunk.ids.astype(dtype))
                lengths.append(chunk.lengths)
        facts, sha256 = _write_rows(
            writer.folder,
            lengths=np.concatenate(lengths),
            dtype=dtype,
            store=store,
            pad_id=documents.origin.pad_id,
        )
        return writer.finish(
            list(STORE_FILES), facts, {"tokens.bin": sha256}, checks="checksums.npy"
        )


def _write_rows(
    folder: Path, lengths: np.ndarray, dtype: np.dtype, store: StoreSettings, pad_id: int
) -> tuple[dict[str, Any], str]:
    """Pack documents of these lengths, shuffle and write all files. Returns (facts, SHA-256 of
    tokens.bin).
    """
    sequence_length = store.sequence_length
    if store.packing == "concatenate":
        order = permute(
            np.arange(len(lengths)),
            n=len(lengths),
            seed=STORAGE_SEED,
            epoch=1,
        )
        document, starts, sizes, pointers = concatenate(lengths, sequence_length, order=order)
        packed = np.arange(len(sizes))
    else:
        document, starts, sizes = split_documents(lengths, sequence_length)
        packed, pointers = pack(sizes, capacity=sequence_length + 1)
    rows = len(pointers) - 1
    stored = permute(np.arange(rows), n=rows, seed=STORAGE_SEED)
    counts = np.diff(pointers)[stored]
    new_pointers = np.concatenate(([0], np.cumsum(counts)))
    order = (
        np.repeat(pointers[stored], counts)
        + np.arange(len(packed))
        - np.repeat(new_pointers[:-1], counts)
    )
    packed = packed[order]
    document = document[packed]
    starts = starts[packed]
    sizes = sizes[packed]
    origins = (np.cumsum(lengths) - lengths)[document] + starts
    checksums = np.empty(rows, dtype="<u8")
    with HashedFile(folder / "tokens.bin") as file, open(folder / IDS, "rb", buffering=0) as ids:
        for first in range(0, rows, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, rows)
            block = np.full((last - first, sequence_length + 1), pad_id, dtype=dtype)
            flat = memoryview(block).cast("B")
            width = block.strides[0]
            at = 0
            previous = -1
            row_of = np.repeat(
                np.arange(last - first), np.diff(new_pointers[first : last + 1])
            ).tolist()
            pieces = slice(new_pointers[first], new_pointers[last])
            for row, size, origin in zip(
                row_of, sizes[pieces].tolist(), origins[pieces].tolist(), strict=True
            ):
                at = row * width if row != previous else at
                previous = row
                size = size * dtype.itemsize
                # positioned reads, since a mapping would count as memory of the process
                if os.preadv(ids.fileno(), [flat[at : at + size]], origin * dtype.itemsize) != size:
                    raise OSError("the ids are shorter than their lengths say")
                at += size
            checksums[first:last] = [xxh3_64_intdigest(row) for row in block]
            file.write(block)
    tables = (
        checksums,
        sizes.astype("<i4"),
        *(values.astype("<i8") for values in (new_pointers, document, starts)),
    )
    for name, table in zip(STORE_FILES[1:], tables, strict=True):
        np.save(folder / name, table)
    facts = {
        "sequence_length": sequence_length,
        "dtype": dtype.name,
        "rows": rows,
        "pieces": len(sizes),
        "tokens_useful": int(sizes.sum()) - len(sizes),
        "tokens_total": rows * sequence_length,
        "tokens_stored": int(sizes.sum()),
        "places": rows * (sequence_length + 1),
        "tokens_cut": 0,
        "documents_cut": 0,
        "documents_split": int(np.count_nonzero(np.bincount(document) > 1)),
    }
    return facts, file.sha256
