"""Compression of token ids: short codes for frequent ids, then zstd. Works on bytes in memory, not on files.

An id is replaced by its rank, 0 for the most frequent id, and the rank by a code of one to three bytes:

| first byte | ranks             | code                                                                   |
|------------|-------------------|------------------------------------------------------------------------|
| 0–127      | 0–127             | the rank itself                                                        |
| 128–250    | 128–31,492        | q = rank − 128: first byte 128 + q // 255, second byte q % 255         |
| 251–254    | 31,493–292,612    | q = rank − 31,493: first byte 251 + q // 65,280, second byte q % 255,  |
|            |                   | third byte q // 255 % 256, stored apart                                |

First and second bytes are never 255, which marks a missing second byte while codes are assembled.

A block, all numbers little-endian:

| bytes    | content                                                                                      |
|----------|----------------------------------------------------------------------------------------------|
| 0–3      | uint32: c, bytes of codes (first and second bytes)                                           |
| 4–7      | uint32: t, third bytes                                                                       |
| 8–11     | uint32: f, bytes of the frame                                                                |
| 12–11+f  | one zstd frame of c + t bytes: first and second bytes in the order of the ids, then third    |
|          | bytes in the same order                                                                      |

A block contains neither the number of ids, nor the ranking, nor a checksum: the file around it does. Equal ids and
rankings give equal bytes under the same version of zstd. Blocks are independent of each other. `BLOCK_IDS` ids make a
block of up to 8 MiB of codes, and memory holds one block.

Byte codes are shorter than 16-bit ranks. zstd's cheapest search finds their repeats if it matches four bytes in a large
window. Arrow has no options for this, but the package `zstandard` has (`SETTINGS`). Arrow decompresses the frames of
both, so that reading needs no other package.
"""

import struct
from collections.abc import Callable
from functools import cache

import numpy as np
import pyarrow as pa

#: ids per block, which give at most 8 MiB of codes, apart from few third bytes
BLOCK_IDS = 4 << 20
#: rank of an id that does not occur
NO_RANK = 0xFFFFFFFF

ONE_BYTE = 128  # number of ranks with one byte; first bytes below it are whole codes
THREE_BYTES = 251  # first bytes from here on have a second and a third byte
NOTHING = 255  # marks a missing second byte; only a third byte can have this value
TWO_END = ONE_BYTE + (THREE_BYTES - ONE_BYTE) * NOTHING  # first rank with three bytes
#: maximum number of different ids
MAX_RANKS = TWO_END + (NOTHING - THREE_BYTES) * NOTHING * 256

#: zstd settings of the package `zstandard` by name: they match four bytes (two to three ids), which no level does
SETTINGS: dict[str, dict[str, int]] = {
    "fast": {"strategy": 1, "hash_log": 17},
    "small": {"strategy": 1, "hash_log": 20},
    "smallest": {"strategy": 4, "hash_log": 20, "chain_log": 20, "search_log": 4},
}
_SHARED = {"min_match": 4, "window_log": 23, "target_length": 0}

_HEADER = struct.Struct("<III")
_CHUNK = 1 << 16  # ids or bytes per pass, few enough for the CPU cache
_EVEN = int.from_bytes(b"\x55" * (_CHUNK // 8 + 1), "little")  # bits 0, 2, 4, …
_ODD = _EVEN << 1


def rank_ids(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rank ids by descending count. Returns (ids_by_rank uint32 [ids that occur], rank_of_id uint32 [V]).

    `counts` are the occurrences of each id, [V] of any integer type. Equally frequent ids are ranked in ascending
    order. Ids that do not occur are missing in the first array and have `NO_RANK` in the second. Raises ValueError for
    negative counts and for more than `MAX_RANKS` ids that occur.

    >>> ids_by_rank, rank_of_id = rank_ids(np.array([0, 5, 9, 5]))
    >>> ids_by_rank.tolist(), rank_of_id[1:].tolist(), int(rank_of_id[0]) == NO_RANK
    ([2, 1, 3], [1, 0, 2], True)
    """
    counts = np.asarray(counts, dtype=np.int64)
    if counts.ndim != 1 or (counts < 0).any():
        raise ValueError("counts are one number ≥ 0 for each id")
    occurring = np.flatnonzero(counts)
    if len(occurring) > MAX_RANKS:
        raise ValueError(f"{len(occurring):,} different ids; codes of three bytes tell {MAX_RANKS:,} apart")
    ids_by_rank = occurring[np.argsort(-counts[occurring], kind="stable")].astype(np.uint32)
    rank_of_id = np.full(len(counts), NO_RANK, dtype=np.uint32)
    rank_of_id[ids_by_rank] = np.arange(len(ids_by_rank), dtype=np.uint32)
    return ids_by_rank, rank_of_id


def count_ids(ids: np.ndarray, counts: np.ndarray) -> None:
    """Add the occurrences of each id to `counts`, int64 [V]. `ids` are uint8, uint16 or uint32 [n], all below V."""
    _check_ids(ids)
    for first in range(0, len(ids), _CHUNK * 4):
        found = np.bincount(ids[first : first + _CHUNK * 4].astype(np.intp), minlength=len(counts))
        if len(found) > len(counts):
            raise ValueError(f"id {len(found) - 1} in a vocabulary of {len(counts)}")
        counts += found


def make_compressor(level: int | str) -> Callable[[np.ndarray], bytes]:
    """Return a function that compresses uint8 [n] to a zstd frame.

    An integer level uses Arrow, a name in `SETTINGS` the package `zstandard`.
    """
    if isinstance(level, int):
        codec = pa.Codec("zstd", level)
        return lambda content: codec.compress(content, asbytes=True)
    import zstandard  # integer levels and reading work without it

    parameters = zstandard.ZstdCompressionParameters(**_SHARED, **SETTINGS[level])
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return lambda content: compressor.compress(content.data)


def decompress(frame: memoryview, size: int) -> np.ndarray:
    """Decompress a zstd frame to uint8 [size]. Raises ValueError for a damaged frame or another size."""
    # Arrow does not report the decompressed size; zstd checks the size in the frame's header (RFC 8878, 3.1.1.1)
    magic, descriptor = bytes(frame[:4]), frame[4] if len(frame) > 4 else 0
    single, kind = descriptor >> 5 & 1, descriptor >> 6
    width = (single, 2, 4, 8)[kind]
    first = 6 - single
    frame_size = int.from_bytes(frame[first : first + width], "little") + (256 if kind == 1 else 0)
    if magic != b"\x28\xb5\x2f\xfd" or descriptor & 0b1011 or width == 0 or frame_size != size:
        raise ValueError(f"not a zstd frame of {size} bytes")
    try:
        content = pa.Codec("zstd").decompress(frame, decompressed_size=size)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"a damaged zstd frame: {error}") from None
    return np.frombuffer(content, dtype=np.uint8)


def pack(ids: np.ndarray, rank_of_id: np.ndarray, level: int | str) -> bytes:
    """Compress ids to a block. `ids` are uint8, uint16 or uint32 [n]; `level` as for `make_compressor`.

    Raises ValueError for ids without a rank.

    >>> ids_by_rank, rank_of_id = rank_ids(np.array([0, 5, 9, 5]))
    >>> block = pack(np.array([3, 2, 2], dtype=np.uint32), rank_of_id, level=4)
    >>> unpack(block, ids_by_rank, 3)
    array([3, 2, 2], dtype=uint32)
    """
    _check_ids(ids)
    code_of_id = np.take(_code_of_rank(), rank_of_id, mode="clip")  # ids without a rank are detected below
    content = np.empty(3 * len(ids), dtype=np.uint8)
    thirds = []
    end = 0
    for first in range(0, len(ids), _CHUNK):
        chunk = ids[first : first + _CHUNK].astype(np.intp)
        try:
            words = np.take(code_of_id, chunk)
        except IndexError:
            raise ValueError(f"id {chunk.max()} in a vocabulary of {len(rank_of_id)}") from None
        both = words.view(np.uint8)
        used = np.flatnonzero(both != NOTHING)
        np.take(both, used, out=content[end : end + len(used)], mode="clip")  # in range; mode "raise" would copy
        end += len(used)
        rare = np.flatnonzero((words & 255) >= THREE_BYTES)  # faster than a strided slice of first bytes
        if len(rare):
            ranks = rank_of_id[chunk[rare]]
            if (ranks >= MAX_RANKS).any():
                raise ValueError(f"id {chunk[rare[ranks >= MAX_RANKS]][0]} has no rank")
            thirds.append(((ranks - TWO_END) // NOTHING).astype(np.uint8))
    third_bytes = sum(len(t) for t in thirds)
    if thirds:
        np.concatenate(thirds, out=content[end : end + third_bytes])
    frame = make_compressor(level)(content[: end + third_bytes])
    return _HEADER.pack(end, third_bytes, len(frame)) + frame


def unpack(data: bytes, ids_by_rank: np.ndarray, n: int) -> np.ndarray:
    """Decode the n ids of a block, uint32 [n].

    Raises ValueError for anything that `pack` cannot have written: missing or trailing bytes, a frame that is damaged
    or of another size, truncated or too many codes, ranks without an id. Memory is bounded by n for any input. A
    damaged block may still decode to n valid ranks, which only a checksum detects.
    """
    if len(data) < _HEADER.size:
        raise ValueError(f"a block of {len(data)} bytes; its header takes {_HEADER.size}")
    code_bytes, third_bytes, frame_bytes = _HEADER.unpack_from(data)
    frame = memoryview(data)[_HEADER.size :]
    if len(frame) != frame_bytes:
        raise ValueError(f"a frame of {len(frame)} bytes; the block's header says {frame_bytes}")
    if not n <= code_bytes <= 2 * n or third_bytes > code_bytes - n:
        raise ValueError(f"{code_bytes} + {third_bytes} bytes of codes cannot be {n} ids")
    content = decompress(frame, code_bytes + third_bytes)
    codes, thirds = content[:code_bytes], content[code_bytes:].astype(np.int64)
    if (codes == NOTHING).any():
        raise ValueError(f"a byte {NOTHING} among the codes")
    id_of_code = _ids_of_codes(ids_by_rank)
    ids = np.empty(n, dtype=np.uint32)
    at = done = third = 0
    while at < code_bytes:
        chunk = codes[at : at + _CHUNK]
        starts, end = _find_starts(chunk >= ONE_BYTE)
        if end == 0 or done + len(starts) > n:
            raise ValueError(f"codes that are cut, or not {n} of them")
        firsts = np.take(chunk, starts)
        both = np.take(chunk, starts + 1, mode="clip").astype(np.uint16)
        both <<= 8
        both |= firsts
        found = ids[done : done + len(starts)]
        np.take(id_of_code, both, out=found, mode="clip")
        rare = np.flatnonzero(firsts >= THREE_BYTES)
        if len(rare):
            if third + len(rare) > third_bytes:
                raise ValueError(f"third bytes are missing: {third_bytes} in all")
            first, second = firsts[rare].astype(np.int64), both[rare] >> 8
            ranks = TWO_END + ((first - THREE_BYTES) * 256 + thirds[third : third + len(rare)]) * NOTHING + second
            if ranks.max() >= len(ids_by_rank):
                raise ValueError(f"rank {ranks.max()} of {len(ids_by_rank)} different ids")
            found[rare] = ids_by_rank[ranks]
            third += len(rare)
        if found.max() == NO_RANK:
            raise ValueError(f"a rank that none of {len(ids_by_rank)} different ids has")
        at += end
        done += len(starts)
    if done != n or third != third_bytes:
        raise ValueError(f"{done} ids with {third} third bytes; expected {n} with {third_bytes}")
    return ids


def _check_ids(ids: np.ndarray) -> None:
    if ids.ndim != 1 or ids.dtype.kind != "u" or ids.dtype.itemsize > 4:
        raise ValueError(f"ids are uint8, uint16 or uint32 [n], not {ids.dtype} {list(ids.shape)}")


@cache
def _code_of_rank() -> np.ndarray:
    """Return first byte + 256 × second byte (or `NOTHING`) of each rank's code, little-endian uint16 [MAX_RANKS]."""
    two, three = np.arange(TWO_END - ONE_BYTE), np.arange(MAX_RANKS - TWO_END)
    codes = [
        np.arange(ONE_BYTE) + 256 * NOTHING,
        ONE_BYTE + two // NOTHING + two % NOTHING * 256,
        THREE_BYTES + three // NOTHING // 256 + three % NOTHING * 256,
    ]
    return np.concatenate(codes).astype("<u2")


def _ids_of_codes(ids_by_rank: np.ndarray) -> np.ndarray:
    """Return the id of each first byte + 256 × second byte, uint32 [65536]; `NO_RANK` for codes of three bytes."""
    padded = np.full(TWO_END, NO_RANK, dtype=np.uint32)
    padded[: len(ids_by_rank)] = ids_by_rank[:TWO_END]
    ids = np.full((256, 256), NO_RANK, dtype=np.uint32)  # [second, first]
    ids[:, :ONE_BYTE] = padded[:ONE_BYTE]
    ids[:NOTHING, ONE_BYTE:THREE_BYTES] = padded[ONE_BYTE:].reshape(-1, NOTHING).T
    return ids.ravel()


def _find_starts(long: np.ndarray) -> tuple[np.ndarray, int]:
    """Return (starts of the codes in at most `_CHUNK` bytes, end of the last whole code). The bytes begin with a code.

    `long` marks bytes of at least 128. The byte after a long first byte is a second byte. So every other byte of a run
    of long bytes is a second byte, and so is the short byte after a run of odd length. Adding a run's first bit to the
    run carries into the bit after it, so one addition of integers with one bit per byte resolves all runs (Langdale
    and Lemire 2019, "Parsing gigabytes of JSON per second", find escaped quotes this way).

    >>> starts, end = _find_starts(np.array([1, 1, 0, 1, 0, 0, 1], dtype=bool))
    >>> starts.tolist(), end
    ([0, 2, 3, 5], 6)
    """
    bits = int.from_bytes(np.packbits(long, bitorder="little").tobytes(), "little")
    firsts = bits ^ (bits & bits << 1)
    seconds = (bits ^ bits + (firsts & _EVEN)) & _ODD | (bits ^ bits + (firsts & _ODD)) & _EVEN
    packed = np.frombuffer(seconds.to_bytes(len(long) // 8 + 2, "little"), dtype=np.uint8)
    second = np.unpackbits(packed, count=len(long) + 1, bitorder="little").view(bool)
    starts = np.flatnonzero(~second[:-1])
    if second[-1]:  # the last code continues after these bytes
        return starts[:-1], len(long) - 1
    return starts, len(long)
