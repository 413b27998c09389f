"""Normal random numbers that depend on (seed, parameter name, row, column) alone, so that any part
can be made alone.

Each parameter has its own stream of NumPy's Philox (Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3"), keyed by SHA-256 of seed and name. Each row begins 2**128 counts behind the one
before, and is drawn whole: a normal number takes one word of the stream or several. Rows are made by
the host in fp64, so that every device, thread count and slicing gives the same bits.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

#: numbers that a thread draws at once
CHUNK = 1 << 20
#: base-2 logarithm of the counts between rows
ROW_BITS = 128


def fill_normal(
    into: Tensor,
    seed: int,
    name: str,
    deviation: float,
    offsets: Sequence[int],
    whole: Sequence[int],
) -> None:
    """Fill `into` with the part [offsets, offsets + shape) of a matrix of shape `whole`: mean 0,
    `deviation`, rounded to fp32.
    """
    into = into.detach()
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    rows, columns = into.shape
    taken = slice(offsets[1], offsets[1] + columns)
    at_once = max(1, CHUNK // whole[1])

    def fill_rows(begin: int) -> None:
        part = into[begin : begin + at_once]
        values = np.empty(part.shape, np.float32)
        for row, drawn in enumerate(values, start=offsets[0] + begin):
            stream = np.random.Philox(key=key, counter=row << ROW_BITS)
            normal = np.random.Generator(stream).standard_normal(whole[1])
            np.multiply(normal[taken], deviation, out=drawn, casting="same_kind")
        part.copy_(torch.from_numpy(values))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill_rows, range(0, rows, at_once)))
