"""Source `dummy`: random numbers as text, in documents with a configured length distribution.

The tokenizer `numbers` maps each number to one token, so this is a corpus of random tokens with
known lengths. It needs no data and no network, and tests every format and approach on any shape.
"""

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from tokenscale.settings.data import LengthSettings, SourceSettings
from tokenscale.settings.options import to_dict


def describe(source: SourceSettings, downloads: Path | None = None) -> dict[str, Any]:
    return {"kind": "dummy", "settings": to_dict(source)}


def documents(source: SourceSettings, downloads: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield (text, origin) of each document: decimal numbers below `vocabulary_size`, separated by
    one space.
    """
    return islice(_documents(source), source.maximum_documents)


def _documents(source: SourceSettings) -> Iterator[tuple[str, str]]:
    # The raw stream of a bit generator is fixed across NumPy versions; distributions are not.
    bits = np.random.PCG64(source.seed)
    assert source.documents is not None  # the kind needs it
    for i in range(source.documents):
        length = length_at((int(bits.random_raw()) >> 11) / 2.0**53, lengths=source.lengths)
        # high 32 bits: the bias of the remainder is below vocabulary_size / 2**32
        numbers = (bits.random_raw(length) >> np.uint64(32)) % np.uint64(source.vocabulary_size)
        yield " ".join(map(str, numbers.tolist())), f"dummy::{i}"


def length_at(u: float, lengths: LengthSettings) -> int:
    """Return the document length at quantile u in [0, 1), clipped to the bounds."""
    if lengths.distribution == "constant":
        value = lengths.mean
    elif lengths.distribution == "uniform":
        return lengths.minimum + int(u * (lengths.maximum - lengths.minimum + 1))
    else:
        # so that the mean, not the median, is `mean`
        mu = math.log(lengths.mean) - lengths.sigma**2 / 2
        value = math.exp(
            mu + lengths.sigma * NormalDist().inv_cdf(min(max(u, 2.0**-53), 1 - 2.0**-53))
        )
    return min(max(round(value), lengths.minimum), lengths.maximum)
