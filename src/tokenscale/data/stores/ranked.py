"""Token ids in few bytes, quickly: frequent ids get short codes, zstd does the rest. Bytes in, bytes out, no files.

An id is replaced by its rank, 0 for the most frequent id, and the rank by a code of one to three bytes:

| first byte | ranks             | code                                                                   |
|------------|-------------------|------------------------------------------------------------------------|
| 0–127      | 0–127             | the rank itself                                                        |
| 128–250    | 128–31,492        | q = rank − 128: first byte 128 + q // 255, second byte q % 255         |
| 251–254    | 31,493–292,612    | q = rank − 31,493: first byte 251 + q // 65,280, second byte q % 255,  |
|            |                   | third byte q // 255 % 256, kept apart                                  |

No first or second byte is 255: it stands for "no second byte" while codes are put together.

A block, all numbers little-endian:

| bytes    | content                                                                                      |
|----------|----------------------------------------------------------------------------------------------|
| 0–3      | uint32: c, bytes of codes (first and second bytes)                                           |
| 4–7      | uint32: t, third bytes                                                                       |
| 8–11     | uint32: f, bytes of the frame                                                                |
| 12–11+f  | one zstd frame of c + t bytes: first and second bytes in the order of the ids, then third    |
|          | bytes in the same order                                                                      |

Neither the number of ids nor the ranking is in a block, nor a checksum: these belong to the file around it. Equal ids
and rankings give equal bytes under the same version of zstd. Blocks are independent of each other; `BLOCK_IDS` ids make
one of up to 8 MiB of codes, and memory holds one block.

Codes of bytes are shorter than ranks of 16 bits, and their repeats are found by zstd's cheapest search once that looks
for four bytes and remembers enough of them. Arrow can not be told so; the package `zstandard` can (`SETTINGS`). Arrow
reads either's frames, so whoever only reads needs no other package.
"""

import struct
from collections.abc import Callable
from functools import cache

import numpy as np
import pyarrow as pa

#: ids a block: as many bytes of codes at most as 8 MiB, since few have a third byte
BLOCK_IDS = 4 << 20
#: the rank of an id that does not occur
NO_RANK = 0xFFFFFFFF

ONE_BYTE = 128  # first bytes that are whole codes, and so many ranks
THREE_BYTES = 251  # from here first bytes that have a second and a third one
NOTHING = 255  # no byte of a code but a third one
TWO_END = ONE_BYTE + (THREE_BYTES - ONE_BYTE) * NOTHING  # the first rank of three bytes
#: how many different ids there can be
MAX_RANKS = TWO_END + (NOTHING - THREE_BYTES) * NOTHING * 256

#: settings of zstd by name, for the package `zstandard`: what its levels do not offer is a search for matches of four
#: bytes, two to three ids
SETTINGS: dict[str, dict[str, int]] = {
    "fast": {"strategy": 1, "hash_log": 17},
    "small": {"strategy": 1, "hash_log": 20},
    "smallest": {"strategy": 4, "hash_log": 20, "chain_log": 20, "search_log": 4},
}
_SHARED = {"min_match": 4, "window_log": 23, "target_length": 0}

_HEADER = struct.Struct("<III")
_CHUNK = 1 << 16  # ids, or bytes, worked on at a time: what they take stays in the cache
_EVEN = int.from_bytes(b"\x55" * (_CHUNK // 8 + 1), "little")  # bits 0, 2, 4, …
_ODD = _EVEN << 1


def rank_ids(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids by descending count, and what undoes it: (ids_by_rank uint32 [ids that occur], rank_of_id uint32 [V]).

    `counts` is how often each id occurs, [V] of any integer type. Of equally frequent ids the smaller comes first. Ids
    that do not occur have no place in the first array and `NO_RANK` in the second. Raises ValueError for negative
    counts and for more than `MAX_RANKS` ids that occur.

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
    """Add how often each id occurs to `counts`, int64 [V]. `ids`: uint8, uint16 or uint32 [n], all below V."""
    _check_ids(ids)
    for first in range(0, len(ids), _CHUNK * 4):
        found = np.bincount(ids[first : first + _CHUNK * 4].astype(np.intp), minlength=len(counts))
        if len(found) > len(counts):
            raise ValueError(f"id {len(found) - 1} in a vocabulary of {len(counts)}")
        counts += found


def make_compressor(level: int | str) -> Callable[[np.ndarray], bytes]:
    """uint8 [any] to a zstd frame: by Arrow at one of zstd's levels, or by `zstandard` with one of `SETTINGS`."""
    if isinstance(level, int):
        codec = pa.Codec("zstd", level)
        return lambda content: codec.compress(content, asbytes=True)
    import zstandard  # only here: levels do without it, and so does reading

    parameters = zstandard.ZstdCompressionParameters(**_SHARED, **SETTINGS[level])
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return lambda content: compressor.compress(content.data)


def decompress(frame: memoryview, size: int) -> np.ndarray:
    """The content of a zstd frame, uint8 [size]. Raises ValueError if it is damaged or of another size."""
    # Arrow does not tell how much it decompressed; zstd checks what the frame says of itself (RFC 8878, 3.1.1.1)
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
    """One block of the given ids: uint8, uint16 or uint32 [n], all ranked. `level` is a level of zstd or a name in
    `SETTINGS`.

    Raises ValueError for ids that have no rank.

    >>> ids_by_rank, rank_of_id = rank_ids(np.array([0, 5, 9, 5]))
    >>> block = pack(np.array([3, 2, 2], dtype=np.uint32), rank_of_id, level=4)
    >>> unpack(block, ids_by_rank, 3)
    array([3, 2, 2], dtype=uint32)
    """
    _check_ids(ids)
    code_of_id = np.take(_code_of_rank(), rank_of_id, mode="clip")  # ids without a rank get the last, and are found
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
        np.take(both, used, out=content[end : end + len(used)], mode="clip")  # in range; "raise" would copy
        end += len(used)
        rare = np.flatnonzero((words & 255) >= THREE_BYTES)  # quicker than a slice of first bytes
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
    """The n ids of a block, uint32 [n].

    Raises ValueError for whatever `pack` cannot have written: missing or trailing bytes, a frame that is damaged or of
    another size, codes that are cut or too many, ranks that no id has. Memory is bounded by n, whatever the block says.
    A damaged block may still hold n good ranks: only a checksum can tell.
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
    """First byte + 256 × second byte (or `NOTHING`) of each rank's code, little-endian uint16 [MAX_RANKS]."""
    two, three = np.arange(TWO_END - ONE_BYTE), np.arange(MAX_RANKS - TWO_END)
    codes = [
        np.arange(ONE_BYTE) + 256 * NOTHING,
        ONE_BYTE + two // NOTHING + two % NOTHING * 256,
        THREE_BYTES + three // NOTHING // 256 + three % NOTHING * 256,
    ]
    return np.concatenate(codes).astype("<u2")


def _ids_of_codes(ids_by_rank: np.ndarray) -> np.ndarray:
    """The id of each first byte + 256 × second byte, uint32 [65536]; `NO_RANK` where a code means nothing by itself."""
    padded = np.full(TWO_END, NO_RANK, dtype=np.uint32)
    padded[: len(ids_by_rank)] = ids_by_rank[:TWO_END]
    ids = np.full((256, 256), NO_RANK, dtype=np.uint32)  # [second, first]
    ids[:, :ONE_BYTE] = padded[:ONE_BYTE]
    ids[:NOTHING, ONE_BYTE:THREE_BYTES] = padded[ONE_BYTE:].reshape(-1, NOTHING).T
    return ids.ravel()


def _find_starts(long: np.ndarray) -> tuple[np.ndarray, int]:
    """Where codes start among at most `_CHUNK` bytes that begin with one, and where the last whole one ends.

    `long`: which bytes are from 128. A byte behind a long first byte is a second one; so in a run of long bytes every
    other one is, and so is the short byte behind a run of odd length. Adding a run's first bit to the run carries into
    the bit behind it: one addition of numbers of as many bits as there are bytes settles all runs (Langdale and Lemire
    2019, "Parsing gigabytes of JSON per second", tell escaped quotes that way).

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
    if second[-1]:  # the last code goes on beyond these bytes
        return starts[:-1], len(long) - 1
    return starts, len(long)
