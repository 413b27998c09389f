"""Folders of shards with an `index.json`: the common part of litdata's and MosaicML Streaming's formats.

A shard of either format begins with little-endian uint32: the number of its items, and the byte at which each item
begins and the last one ends (items + 1).
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, sync, sync_tree
from tokenscale.data.stores.documents import Chunk

INDEX = "index.json"
#: maximum size of a written shard, the default of both libraries; a longer document is a shard of its own
SHARD_BYTES = 1 << 26
#: size that a shard's offsets cannot count
OFFSETS_END = 1 << 32


def read_index(path: Path) -> dict[str, Any]:
    """Return the index of a folder, or an empty one if it is missing or broken."""
    try:
        found = read_json(path / INDEX)
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


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


def check_size(file: Path, expected: int, what: str, next: str) -> None:
    """Raise UserError if a file of a folder is missing, or has another size than its index says."""
    if not file.is_file():
        raise UserError(f"{what} is missing.", file=file, next=next)
    if (size := file.stat().st_size) != expected:
        raise UserError(
            f"{what} has another size than its index says.",
            file=file,
            found=f"{size:,} bytes",
            expected=f"{expected:,} bytes  ({INDEX})",
            next=next,
        )


def read_offsets(head: np.ndarray, size: int, items: int, file: Path, what: str, next: str) -> np.ndarray:
    """Return the byte at which each item begins and the last one ends, int64 [items + 1].

    `head` are the first bytes of the shard, uint8 [4 * (items + 2)], and `size` its bytes. Raise UserError if the shard
    does not hold `items` items, or if its offsets are inconsistent.
    """

    def error(problem: str, found: str, expected: str) -> UserError:
        return UserError(f"{what} {problem}.", file=file, found=found, expected=expected, next=next)

    end = 4 * (items + 2)
    if items < 0 or size < end:
        raise error("ends inside its offsets", f"{size:,} bytes", f"{end:,} or more for {items:,} items  ({INDEX})")
    stored = np.frombuffer(head.tobytes(), "<u4").astype(np.int64)
    if stored[0] != items:
        raise error("holds another number of items than its index says", f"{stored[0]:,}", f"{items:,}  ({INDEX})")
    offsets = stored[1:]
    decreasing = np.flatnonzero(np.diff(offsets) < 0)
    if decreasing.size:
        item = int(decreasing[0])
        found = f"item {item:,} from byte {offsets[item]:,} to byte {offsets[item + 1]:,}"
        raise error("has offsets that decrease", found, "each item to end where it begins, or later")
    if offsets[0] < end or offsets[-1] != size:
        found = f"items from byte {offsets[0]:,} to byte {offsets[-1]:,}"
        raise error("has offsets outside of the file", found, f"from byte {end:,} or later to byte {size:,}")
    return offsets
