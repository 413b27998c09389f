"""Store format `archive`: compressed whole documents for storage and transfer; `unpack` turns it into `packed`.

- `blocks.bin`: concatenated ids of all documents in blocks of 4 Mi ids (`ranked.BLOCK_IDS`); a document may span
  blocks. `data/stores/ranked.py` defines a block: ids replaced by their frequency rank, encoded in bytes, compressed by
  zstd;
- `blocks.npy`: uint64 [blocks, 3], the bytes, the ids and the XXH3-64 of each block, verified at every read;
- `ranking.bin`: ids by descending frequency, and `lengths.bin`: tokens per document. 32-bit numbers as four byte
  planes, lowest first, in one zstd frame (ranking: differences modulo 2³²; equally frequent ids ascend).

Stores made from an archive copy the manifest's `origin`. Equal ids give equal bytes under the same version of zstd; the
unpacked store is the same under all versions.
"""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import HashedFile, xxh3_64_intdigest
from tokenscale.data.corpus.raw_text import check_file
from tokenscale.data.records import smallest_dtype
from tokenscale.data.stores import ranked
from tokenscale.data.stores.documents import Chunk, Documents, Origin
from tokenscale.data.stores.flat import FlatPart, list_id_files, read_lengths
from tokenscale.data.stores.manifest import (
    changed_block_error,
    open_store,
    read_store_manifest,
    rebuild_command,
    resolve_store,
    vocabulary_error,
)
from tokenscale.data.stores.writing import open_store_writer
from tokenscale.settings.data import StoreSettings

STORE_FILES = ("blocks.bin", "blocks.npy", "ranking.bin", "lengths.bin")
#: zstd level for ranking and lengths: level 19 takes twenty times as long and saves 3 %
NUMBERS_LEVEL = 9


def write(store: StoreSettings, documents: Documents, directory: Path) -> dict[str, Any]:
    """Write the store and return its manifest. Raises UserError without the package zstandard.

    Ids are written to disk first, then ranked and compressed: memory holds 16 bytes per document, and a block.
    """
    if importlib.util.find_spec("zstandard") is None:
        raise UserError(
            "writing archives needs the package zstandard, which is not installed.",
            store=Path(directory) / "manifest.json",
            next="pip install zstandard   (reading and unpacking do not need it)",
        )
    dtype = smallest_dtype(documents.origin.vocabulary_size)
    with open_store_writer(store, documents, directory) as writer:
        folder = writer.folder
        parts = writer.parts(lambda number: FlatPart(folder, number, dtype))
        ids_by_rank, rank_of_id = ranked.rank_ids(writer.occurrences)
        blocks = []
        with HashedFile(folder / "blocks.bin") as file:
            for ids in _read_blocks(list_id_files(folder, parts.files), dtype):
                block = ranked.pack(ids, rank_of_id, store.level)
                blocks.append((len(block), len(ids), xxh3_64_intdigest(block)))
                file.write(block)
        np.save(folder / "blocks.npy", np.array(blocks, dtype="<u8"))
        lengths = read_lengths(folder, parts.files)
        if lengths.max() >= 1 << 32:
            raise ValueError(f"a document of {lengths.max():,} tokens")
        (folder / "ranking.bin").write_bytes(_compress_numbers(np.diff(ids_by_rank, prepend=np.uint32(0))))
        (folder / "lengths.bin").write_bytes(_compress_numbers(lengths))
        tokens = int(lengths.sum())
        facts = {
            "rows": len(documents),
            "blocks": len(blocks),
            "different_ids": len(ids_by_rank),
            "tokens_useful": tokens - len(documents),
            "tokens_total": tokens,
            "tokens_stored": tokens,
            "places": tokens,
            "tokens_cut": 0,
            "documents_cut": 0,
            "origin": {"source": documents.origin.source},
        }
        return writer.finish(list(STORE_FILES), facts, {"blocks.bin": file.sha256}, checks="blocks.npy")


def _read_blocks(paths: list[Path], dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the ids of all files in blocks, in a reused buffer."""
    block = np.empty(ranked.BLOCK_IDS, dtype=dtype)
    room = memoryview(block).cast("B")
    filled = 0
    for path in paths:
        with open(path, "rb") as file:
            while read := file.readinto(room[filled:]):
                filled += read
                if filled == len(room):
                    yield block
                    filled = 0
    if filled:
        yield block[: filled // dtype.itemsize]


def _compress_numbers(values: np.ndarray) -> bytes:
    """Compress 32-bit numbers as byte planes, lowest bytes first, in a zstd frame."""
    planes = values.astype("<u4").view(np.uint8).reshape(-1, 4).T
    return ranked.make_compressor(NUMBERS_LEVEL)(np.ascontiguousarray(planes))


def _read_numbers(path: Path, n: int) -> np.ndarray:
    """Read the n numbers that `_compress_numbers` wrote, uint32 [n]."""
    planes = ranked.decompress(memoryview(path.read_bytes()), 4 * n).reshape(4, n)
    return np.ascontiguousarray(planes.T).view("<u4").reshape(n)


class ArchiveStore:
    """Sequential access to the documents of an `archive`. `manifest` comes from `stores.manifest.open_store`.

    Each block is verified at every read (without the package xxhash: the whole file by SHA-256, at opening). Memory
    holds 16 bytes per document, and a block.
    """

    def __init__(self, where: Path, manifest: dict[str, Any]):
        self.where, self.manifest = where, manifest
        folder = resolve_store(where)[0]
        self._path = folder / "blocks.bin"
        if xxh3_64_intdigest is None:
            file = manifest["files"][0]
            check_file(
                self._path, file["bytes"], file["sha256"], what="token store", next=rebuild_command(where), content=True
            )
        blocks = np.load(folder / "blocks.npy")
        self._checksums = blocks[:, 2].tolist()
        self._bytes, self._ids = (np.concatenate(([0], np.cumsum(blocks[:, i].astype(np.int64)))) for i in (0, 1))
        differences = _read_numbers(folder / "ranking.bin", manifest["different_ids"])
        self._ids_by_rank = np.cumsum(differences, dtype=np.uint32)
        if (largest := int(self._ids_by_rank.max(initial=0))) >= manifest["vocabulary_size"]:
            raise vocabulary_error(where, folder / "ranking.bin", largest, manifest["vocabulary_size"])
        #: tokens of each document, int64 [documents]
        self.lengths = _read_numbers(folder / "lengths.bin", manifest["documents"]).astype(np.int64)
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.lengths)

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        """Yield documents [first, last), one chunk for the documents that end in the same block.

        Raises UserError for a changed block.
        """
        number = int(np.searchsorted(self._ids, self._start(first), side="right")) - 1
        unfinished: list[np.ndarray] = []  # pieces of a document that ends in a later block
        with open(self._path, "rb") as file:
            while first < last:
                ids = self._read_block(file, number)
                after = min(last, int(np.searchsorted(self._ends, self._ids[number + 1], side="right")))
                start, end = (max(0, self._start(document) - int(self._ids[number])) for document in (first, after))
                if after > first:
                    yield Chunk(np.concatenate([*unfinished, ids[start:end]]).view(np.int32), self.lengths[first:after])
                    unfinished, start = [], end
                unfinished.append(ids[start:])
                first, number = after, number + 1

    def _start(self, document: int) -> int:
        """Return the position of a document's first token in the whole archive."""
        return int(self._ends[document - 1]) if document else 0

    def _read_block(self, file: BinaryIO, number: int) -> np.ndarray:
        """Read, verify and decode one block; uint32 [ids]."""
        first, last = self._bytes[number : number + 2].tolist()
        file.seek(first)
        block = file.read(last - first)
        if xxh3_64_intdigest is not None and (found := xxh3_64_intdigest(block)) != self._checksums[number]:
            right, count = self._checksums[number], len(self._checksums)
            raise changed_block_error(self.where, self._path, "block", number, count, first, right, found, "blocks.npy")
        return ranked.unpack(block, self._ids_by_rank, int(self._ids[number + 1] - self._ids[number]))


class ArchiveDocuments:
    """Documents of an archive for the writer of another format; see `documents.Documents`.

    The written store has the same origin as one written from the text. `report(documents, bytes of ids)` is called for
    each block. Raises UserError for a store that is not an archive or differs from its manifest.
    """

    def __init__(self, where: Path, report: Callable[[int, int], None] | None = None):
        manifest = read_store_manifest(where)
        if manifest["format"] != "archive":
            raise UserError(
                "only archives can be unpacked.",
                store=where,
                expected="format archive",
                found=f"format {manifest['format']}",
                next="python -m tokenscale pretokenize --store archive …   makes one",
            )
        self.settings = StoreSettings("archive", **manifest["options"])
        self.manifest = open_store(where, self.settings, requested_by="unpack")
        self._store, self.report = ArchiveStore(where, self.manifest), report
        self.origin = Origin(
            tokenizer=manifest["tokenizer"],
            vocabulary_size=manifest["vocabulary_size"],
            bos_id=manifest["bos_id"],
            eos_id=manifest["eos_id"],
            pad_id=manifest["padding"]["id"],
            source=manifest["origin"]["source"],
            engine="archive",
            ids_digest=manifest["ids_digest"]["value"],
        )

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._store)

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        """Yield documents [first, last), one block at a time."""
        for chunk in self._store.chunks(first, last):
            yield chunk
            if self.report is not None:
                self.report(len(chunk.lengths), chunk.ids.nbytes)

    def confirm(self) -> None:
        """Do nothing, since the writer compares its digest with the origin's."""
