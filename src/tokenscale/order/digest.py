"""A number that says which samples a global batch held, whoever held them."""

import numpy as np

from tokenscale.order.permutation import mix64

#: digests add up modulo this; it fits a JSON number and an IEEE double exactly
MODULUS = 1 << 52


def row_digest(step: int, slots: np.ndarray | range, *ids: np.ndarray) -> int:
    """Sum over the slots of a 64-bit mix of (step, slot, ids...), modulo 2**52.

    `ids` are arrays [len(slots)] that name what a slot holds: (row,), or (document, offset). The digests of all ranks
    add up, modulo 2**52, to that of the global batch, for every world size.
    """
    slots = np.asarray(slots, dtype=np.int64)
    mixed = mix64(np.full(slots.shape, step, dtype=np.uint64))
    for values in (slots, *ids):
        mixed = mix64(mixed ^ mix64(np.asarray(values, dtype=np.int64).astype(np.uint64)))
    return int(mixed.sum(dtype=np.uint64)) % MODULUS
