"""Source `dummy`: random numbers as text, in documents of a stated length distribution.

With the tokenizer `numbers` each number is one token, so this is a corpus of random tokens whose lengths are known; no
data and no network are needed, and every format and approach can be tried on any shape.
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

#: equal settings give equal documents, now and later
KEEP_EARLIER = False


def describe(source: SourceSettings, downloads: Path | None = None) -> dict[str, Any]:
    """The distribution, for the manifest."""
    return {"kind": "dummy", "settings": to_dict(source)}


def documents(source: SourceSettings, downloads: Path | None = None) -> Iterator[tuple[str, str]]:
    """(text, origin) of each document: decimal numbers below `vocabulary_size`, with one space between."""
    return islice(_documents(source), source.maximum_documents)


def _documents(source: SourceSettings) -> Iterator[tuple[str, str]]:
    # A bit generator's raw stream is fixed for all versions of NumPy; those of its distributions are not.
    bits = np.random.PCG64(source.seed)
    for i in range(source.documents):
        length = length_at((int(bits.random_raw()) >> 11) / 2.0**53, source.lengths)
        # the high halves: the bias of the remainder is below vocabulary_size / 2**32
        numbers = (bits.random_raw(length) >> np.uint64(32)) % np.uint64(source.vocabulary_size)
        yield " ".join(map(str, numbers.tolist())), f"dummy::{i}"


def length_at(u: float, lengths: LengthSettings) -> int:
    """The length at quantile u in [0, 1): inverse transform sampling (Devroye 1986, II.2), then the bounds.

    >>> length_at(0.5, LengthSettings("lognormal", mean=100, sigma=0))
    100
    """
    if lengths.distribution == "constant":
        value = lengths.mean
    elif lengths.distribution == "uniform":
        return lengths.minimum + int(u * (lengths.maximum - lengths.minimum + 1))
    else:
        mu = math.log(lengths.mean) - lengths.sigma**2 / 2  # so that the mean, not the median, is `mean`
        value = math.exp(mu + lengths.sigma * NormalDist().inv_cdf(min(max(u, 2.0**-53), 1 - 2.0**-53)))
    return min(max(round(value), lengths.minimum), lengths.maximum)
