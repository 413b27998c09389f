"""Global sample order, a pure function of (seed, epoch, index): ranks' shares of it, and digests of
batches.
"""

import numpy as np

_MASK = (1 << 64) - 1
_ROUNDS = 8
# constants of splitmix64 as NumPy scalars, to avoid conversions in hundreds of calls per block of
# the order
_ADD = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30 = np.uint64(30)
_S27 = np.uint64(27)
_S31 = np.uint64(31)
_SALTS = np.array(
    [(number * 0xD1342543DE82EF95) & _MASK for number in range(_ROUNDS)], dtype=np.uint64
)[:, None]
#: largest n that is shuffled as a whole: a Feistel network over so few bits favours some orders
SHUFFLED = 64
#: epochs that are shuffled at once, which bounds memory
_SHUFFLED_EPOCHS = 1 << 14


def mix64(x: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64 (Steele, Lea & Flood 2014), a bijective hash, to an array
    of uint64.
    """
    x = x + _ADD
    x ^= x >> _S30
    x *= _M1
    x ^= x >> _S27
    x *= _M2
    x ^= x >> _S31
    return x


def permute(index: np.ndarray | int, n: int, seed: int, epoch: np.ndarray | int = 0) -> np.ndarray:
    """Permute indices of range(n) by a keyed bijection; int64, in the shape of `index`.

    Up to `SHUFFLED` indices are sorted by keyed hashes, so that all n! orders are equally likely.
    More go through an alternating Feistel network over the next power of two, keyed by (seed,
    epoch, round), with cycle walking into range(n) (Black & Rogaway 2002). `epoch` is one number,
    or one per index. 1 <= n <= 2**62.
    """
    index = np.atleast_1d(np.asarray(index, dtype=np.int64))
    if not 1 <= n <= 1 << 62:
        raise ValueError(f"n = {n} is outside 1 … 2**62")
    if index.size and (index.min() < 0 or index.max() >= n):
        raise ValueError(f"an index is outside range({n})")
    epochs = np.asarray(epoch, dtype=np.int64)
    if epochs.size > 1 and epochs.min() == epochs.max():
        epochs = epochs.reshape(-1)[:1]  # one key for all indices is faster
    key = mix64(
        epochs.reshape(-1).astype(np.uint64) ^ mix64(np.array([seed & _MASK], dtype=np.uint64))
    )
    if n <= SHUFFLED:
        return _shuffle(index.ravel(), n, key=key).reshape(index.shape)
    bits = (n - 1).bit_length()
    keys = mix64(key + _SALTS)  # [rounds, 1 or indices]
    values = _feistel(index.ravel().astype(np.uint64), keys, bits=bits)
    outside = np.flatnonzero(values >= np.uint64(n))
    while outside.size:
        walked = _feistel(
            values[outside], keys=keys if key.size == 1 else keys[:, outside], bits=bits
        )
        values[outside] = walked
        outside = outside[walked >= np.uint64(n)]
    return values.astype(np.int64).reshape(index.shape)


def _shuffle(index: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Return the places of indices in range(n) sorted by 64-bit hashes; int64 [indices].

    `key` is uint64 [1] if shared, or [indices].
    """
    distinct, row = np.unique(key, return_inverse=True)
    hashed = mix64(np.arange(n, dtype=np.uint64))
    found = np.empty_like(index)
    for first in range(0, len(distinct), _SHUFFLED_EPOCHS):
        keys = distinct[first : first + _SHUFFLED_EPOCHS]
        orders = np.argsort(mix64(keys[:, None] ^ hashed), axis=1, kind="stable")
        if len(distinct) == 1:
            return orders[0][index]
        own = (row >= first) & (row < first + len(keys))
        found[own] = orders[row[own] - first, index[own]]
    return found


def _feistel(values: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """Apply the Feistel network once to `bits`-bit numbers. `keys` are [rounds, 1] if shared, or
    [rounds, values].
    """
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high = values >> low_bits
    low = values & low_mask
    for number, round_keys in enumerate(keys):
        if number % 2:
            high ^= mix64(low ^ round_keys) & high_mask
        else:
            low ^= mix64(high ^ round_keys) & low_mask
    return (high << low_bits) | low


def get_samples(positions: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Return the sample at each position p >= 0 of the endless order, index p % n of epoch p // n;
    int64.
    """
    positions = np.asarray(positions, dtype=np.int64)
    epochs, indices = np.divmod(positions, n)
    found = np.empty_like(positions)
    first, last = (int(epochs.min()), int(epochs.max())) if epochs.size else (0, -1)
    if last - first > 8:  # small data, many epochs
        return permute(
            indices,
            n,
            seed=seed,
            epoch=epochs,
        )
    for epoch in range(first, last + 1):  # one key per epoch is far cheaper than one per index
        in_epoch = slice(None) if first == last else epochs == epoch
        found[in_epoch] = permute(
            indices[in_epoch],
            n,
            seed=seed,
            epoch=epoch,
        ).reshape(found[in_epoch].shape)
    return found


class ShuffledOrder:
    """Endless order of one source of `rows` samples."""

    #: positions whose order is cheap enough to be computed together for batches read ahead
    positions_ahead = 1 << 62

    def __init__(self, rows: int, seed: int):
        self.rows = rows
        self._seed = seed

    def samples(self, positions: np.ndarray) -> np.ndarray:
        """Return the sample at each position p >= 0, int64 of the shape of `positions`."""
        return get_samples(positions, n=self.rows, seed=self._seed)

    def source_seed(self, source: int) -> int:
        """Return the seed of a source's own order."""
        return self._seed


#: digests are added modulo this number, which JSON and an IEEE double represent exactly
MODULUS = 1 << 52


def row_digest(step: int, slots: np.ndarray | range, *ids: np.ndarray) -> int:
    """Return the sum over slots of a 64-bit hash of (step, slot, ids...), modulo 2**52.

    `ids` are arrays [len(slots)] that identify the content of a slot: (row,), or (document,
    offset). The digests of all ranks add up, modulo 2**52, to the digest of the global batch, for
    every world size.
    """
    return row_digests(np.array([step]), slots, *(np.asarray(values)[None] for values in ids))[0]


def row_digests(steps: np.ndarray, slots: np.ndarray | range, *ids: np.ndarray) -> list[int]:
    """Return `row_digest` of several steps. `ids` are arrays [len(steps), len(slots)]."""
    slots = np.asarray(slots, dtype=np.int64)
    shape = (len(steps), len(slots))
    mixed = np.broadcast_to(
        mix64(np.asarray(steps, dtype=np.int64).astype(np.uint64))[:, None], shape
    )
    for values in (np.broadcast_to(slots, shape), *ids):
        mixed = mix64(mixed ^ mix64(np.asarray(values, dtype=np.int64).astype(np.uint64)))
    return (mixed.sum(axis=1, dtype=np.uint64) % np.uint64(MODULUS)).tolist()


def rank_slots(global_batch: int, rank: int, world_size: int) -> range:
    """Return the contiguous slots of a rank. Counts differ by at most one; the first ranks have
    more.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside range({world_size})")
    least, more = divmod(global_batch, world_size)
    start = rank * least + min(rank, more)
    return range(start, start + least + (rank < more))


def micro_steps(global_batch: int, world_size: int, micro_batch: int) -> int:
    """Return the forward passes per optimizer step, equal on all ranks; an empty micro-batch
    contributes zero.
    """
    largest = -(-global_batch // world_size)
    return -(-largest // micro_batch)


def shard_rows(rows: int, index: int, count: int) -> range:
    """Return the rows of shard `index` of `count`, as torch.chunk and FSDP2 split them: the last
    may be smaller.
    """
    each = -(-rows // count)
    return range(min(index * each, rows), min((index + 1) * each, rows))
