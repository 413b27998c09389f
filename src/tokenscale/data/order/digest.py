"""Digest of the samples in a global batch, independent of the world size."""

import numpy as np

from tokenscale.data.order.permutation import mix64

#: digests are added modulo this number, which JSON and an IEEE double represent exactly
MODULUS = 1 << 52


def row_digest(step: int, slots: np.ndarray | range, *ids: np.ndarray) -> int:
    """Return the sum over slots of a 64-bit hash of (step, slot, ids...), modulo 2**52.

    `ids` are arrays [len(slots)] that identify the content of a slot: (row,), or (document, offset). The digests of all
    ranks add up, modulo 2**52, to the digest of the global batch, for every world size.
    """
    return row_digests(np.array([step]), slots, *(np.asarray(values)[None] for values in ids))[0]


def row_digests(steps: np.ndarray, slots: np.ndarray | range, *ids: np.ndarray) -> list[int]:
    """Return `row_digest` of several steps. `ids` are arrays [len(steps), len(slots)]."""
    slots = np.asarray(slots, dtype=np.int64)
    shape = (len(steps), len(slots))
    mixed = np.broadcast_to(mix64(np.asarray(steps, dtype=np.int64).astype(np.uint64))[:, None], shape)
    for values in (np.broadcast_to(slots, shape), *ids):
        mixed = mix64(mixed ^ mix64(np.asarray(values, dtype=np.int64).astype(np.uint64)))
    return (mixed.sum(axis=1, dtype=np.uint64) % np.uint64(MODULUS)).tolist()
