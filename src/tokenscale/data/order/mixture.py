"""Order of samples of a weighted mixture of sources: a pure function of (seed, position).

A mixture's stage is divided into blocks of one length. Each block has a fixed number of samples of
each source, in proportion to the weights, and spreads them evenly: sample i of a source that has c
of them lies at (i + u) / c of the block, where u is a random number below 1. After any number of
samples, a source with share w among k sources has therefore been drawn within 1 + k w of its share.

The samples of a source are numbered through all stages, and come in the source's own global order:
a mixture reads the whole source once before it reads anything twice.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

from tokenscale.data.order.permutation import get_samples, mix64

#: shortest block. A longer one is used if the smallest weight would have less than `LEAST` samples
#: in it
BLOCK = 1000
LEAST = 10
#: between the seeds of sources, so that sources of equal size are in different orders
SEED_STEP = 0x632BE59BD9B4E019
#: positions whose order is computed at once: in one call, and for batches read ahead
CHUNK = 1 << 20
AHEAD = 1 << 17


@cache
def block_counts(weights: tuple[float, ...]) -> np.ndarray:
    """Return the samples of each source in a block, int64 [sources], for weights that add up to 1.

    The length of the block, their sum, is chosen among `BLOCK` lengths so that the shares are as
    close to the weights as possible. Weights that are fractions with a common denominator of up to
    1000 are kept exactly.
    """
    shares = np.asarray(weights, dtype=np.float64)
    shortest = max(BLOCK, int(np.ceil(LEAST / shares[shares > 0].min() - 1e-6)))
    lengths = np.arange(shortest, shortest + BLOCK)
    ideal = shares[:, None] * lengths
    errors = (np.abs(np.rint(ideal) - ideal) / lengths).max(axis=0)
    length = int(lengths[np.argmax(errors <= errors.min() + 1e-12)])
    counts = np.floor(shares * length + 1e-6).astype(np.int64)
    rest = np.where(shares > 0, shares * length - counts, -1)
    counts[np.argsort(-rest, kind="stable")[: length - int(counts.sum())]] += 1
    return counts


class _Stage:
    """Stage of a mixture: its first position, and the samples of each source before it."""

    def __init__(
        self, number: int, first: int, weights: Sequence[float], before: np.ndarray, seed: int
    ):
        self.first = first
        self.before = before
        self.counts = block_counts(tuple(weights))
        self.length = int(self.counts.sum())
        # sample of a block → its source, and its number among the source's samples in the block
        self._source = np.repeat(np.arange(len(self.counts)), self.counts)
        self._number = np.arange(self.length) - np.repeat(
            np.cumsum(self.counts) - self.counts, self.counts
        )
        self._divisor = self.counts[self._source]
        key = mix64(np.array([(seed ^ 0x6D69787475726531) & ((1 << 64) - 1)], dtype=np.uint64))
        self._key = mix64(key ^ np.uint64(number))

    def arrange(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, number within the block) of each place of blocks, both int64 [blocks,
        length].
        """
        keys = mix64(self._key ^ blocks.astype(np.uint64))[:, None]
        bits = mix64(keys ^ mix64(np.arange(self.length, dtype=np.uint64))[None, :])
        random = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        order = np.argsort((self._number + random) / self._divisor, axis=1, kind="stable")
        return self._source[order], self._number[order]

    def count(self, samples: int) -> np.ndarray:
        """Return how many of the first `samples` samples of the stage come from each source, int64
        [sources].
        """
        blocks, rest = divmod(samples, self.length)
        sources, _ = self.arrange(np.array([blocks]))
        return blocks * self.counts + np.bincount(sources[0, :rest], minlength=len(self.counts))


class MixtureOrder:
    """Order of a mixture of sources with `sizes` samples.

    `stages` are (first position, weights that add up to 1). The first one begins at position 0. A
    source whose weights are 0 may be empty. Raises ValueError for an empty source with a weight.
    """

    positions_ahead = AHEAD

    def __init__(
        self, sizes: Sequence[int], stages: Sequence[tuple[int, Sequence[float]]], seed: int
    ):
        self.sizes = np.array(sizes, dtype=np.int64)
        self._seed = seed
        #: sample of the first sample of each source
        self.first_samples = np.concatenate(([0], np.cumsum(self.sizes)[:-1]))
        self.rows = int(self.sizes.sum())
        self._stages: list[_Stage] = []
        before = np.zeros(len(sizes), dtype=np.int64)
        for number, (first, weights) in enumerate(stages):
            if any(weight and not size for weight, size in zip(weights, sizes, strict=True)):
                raise ValueError("a source with a weight has no samples")
            if self._stages:
                before = before + self._stages[-1].count(first - self._stages[-1].first)
            self._stages.append(
                _Stage(
                    number=number,
                    first=first,
                    weights=weights,
                    before=before,
                    seed=seed,
                )
            )
        self._firsts = np.array([stage.first for stage in self._stages], dtype=np.int64)

    def source_seed(self, source: int) -> int:
        return self._seed + source * SEED_STEP

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, number of the sample among all samples of the source) of positions; int64
        of their shape.
        """
        flat = np.asarray(positions, dtype=np.int64).reshape(-1)
        sources = np.empty_like(flat)
        numbers = np.empty_like(flat)
        stages = np.searchsorted(self._firsts, flat, side="right") - 1
        for number in np.unique(stages).tolist():
            stage = self._stages[number]
            places = np.flatnonzero(stages == number)
            blocks, inside = np.divmod(flat[places] - stage.first, stage.length)
            found, rows = np.unique(blocks, return_inverse=True)
            at_once = max(1, CHUNK // stage.length)
            for first in range(0, len(found), at_once):
                source_of, number_of = stage.arrange(found[first : first + at_once])
                own = (
                    slice(None)
                    if len(found) <= at_once
                    else (rows >= first) & (rows < first + at_once)
                )
                row = rows[own] - first
                place = inside[own]
                chosen = source_of[row, place]
                sources[places[own]] = chosen
                base = stage.before[chosen] + blocks[own] * stage.counts[chosen]
                numbers[places[own]] = base + number_of[row, place]
        return sources.reshape(np.shape(positions)), numbers.reshape(np.shape(positions))

    def samples(self, positions: np.ndarray) -> np.ndarray:
        sources, numbers = self.locate(positions)
        found = np.empty_like(numbers)
        for source in np.unique(sources).tolist():
            own = sources == source
            found[own] = self.first_samples[source] + get_samples(
                numbers[own], n=int(self.sizes[source]), seed=self.source_seed(source)
            )
        return found

    def count(self, positions: int) -> np.ndarray:
        """Return how many of the first `positions` samples come from each source, int64
        [sources].
        """
        stage = self._stages[int(np.searchsorted(self._firsts, positions, side="right")) - 1]
        return stage.before + stage.count(positions - stage.first)
