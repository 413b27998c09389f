"""Writing of folders of shards with an index, as MosaicML Streaming and litdata have them."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import sync, sync_tree
from tokenscale.data.stores.documents import Chunk

#: maximum size of a written shard, the default of both libraries; a longer document is a shard of its own
SHARD_BYTES = 1 << 26
#: size that a shard's offsets cannot count
OFFSETS_END = 1 << 32


def list_outputs(path: Path) -> list[Path]:
    """Return what a conversion to a folder writes."""
    return [path]


def record_path(path: Path) -> Path:
    return path / "tokenscale.json"


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder next to `path`; it replaces `path` on success, and is removed on failure."""
    building = path.with_name(f".{path.name}.{os.getpid()}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        yield building
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        sync_tree(building)
        if path.exists():
            path.rename(old)
        building.rename(path)
        sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def split_shards(
    chunks: Iterable[Chunk], dtype: np.dtype, head_bytes: int, item_bytes: Callable[[np.ndarray], np.ndarray]
) -> Iterator[list[Chunk]]:
    """Yield the documents of each shard, with ids of `dtype`.

    `item_bytes` returns the bytes of documents in a shard, offset included, given their lengths.

    >>> documents = Chunk(np.zeros(SHARD_BYTES // 2, np.int32), np.array([1, SHARD_BYTES // 2 - 2, 1]))
    >>> shards = split_shards([documents], np.dtype("<u2"), 8, lambda lengths: 2 * lengths)
    >>> [[part.lengths.tolist() for part in parts] for parts in shards]
    [[[1]], [[33554430]], [[1]]]
    """
    parts: list[Chunk] = []
    room = SHARD_BYTES - head_bytes
    for int32 in chunks:
        chunk = Chunk(int32.ids.astype(dtype), int32.lengths)
        ends = np.concatenate(([0], np.cumsum(item_bytes(chunk.lengths))))
        first, documents = 0, len(chunk.lengths)
        while first < documents:
            last = max(first, int(np.searchsorted(ends, ends[first] + room, side="right")) - 1)
            if last == first and not parts:
                last += 1
            if last > first:
                parts.append(chunk.part(first, last))
                room -= int(ends[last] - ends[first])
                first = last
            if first < documents:
                yield parts
                parts, room = [], SHARD_BYTES - head_bytes
    if parts:
        yield parts


def pack_offsets(sizes: np.ndarray, gap: int, name: str) -> np.ndarray:
    """Return the beginning of a shard, uint32 [items + 2]: its number of items, and where each begins and ends.

    `gap` is the number of bytes between this array and the first item. Raise UserError for a shard of 4 GiB or more.
    """
    head = np.concatenate(([len(sizes), 0], np.cumsum(sizes)))
    head[1:] += 4 * len(head) + gap
    if head[-1] >= OFFSETS_END:
        raise UserError(
            f"a document is too long for {name}.",
            found=f"{head[-1]:,} bytes",
            expected=f"fewer than {OFFSETS_END:,} bytes, which its offsets can count",
            next="choose another format: --to megatron",
        )
    return head.astype("<u4")
