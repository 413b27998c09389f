"""Columns of step rows as arrays, and sums over ranks."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokenscale.data.order.permutation import MODULUS


class Steps:
    """Columns of step rows as float64 arrays, null as NaN; sums per step over the ranks that
    reported it.

    `numbers` are the steps, ascending, and `place` is the index of each row's step in them.
    """

    def __init__(self, rows: pa.Table):
        self._rows = rows
        self._cache: dict[str, np.ndarray] = {}
        numbers = self["step"].astype(np.int64)
        self.numbers, self.place = np.unique(numbers, return_inverse=True)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._cache:
            column = self._rows[name]
            column = column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column
            self._cache[name] = column.cast(pa.float64(), safe=False).to_numpy().astype(np.float64)
        return self._cache[name]

    def sums(self, name: str) -> np.ndarray:
        """Sum over ranks, null as 0; one value for each of `numbers`."""
        weights = np.nan_to_num(self[name], posinf=0.0, neginf=0.0)
        return np.bincount(self.place, weights=weights, minlength=len(self.numbers))

    def digests(self) -> np.ndarray:
        """Order digest of the global batch for each of `numbers`, int64."""
        found = np.zeros(len(self.numbers), dtype=np.int64)
        np.add.at(found, self.place, pc.fill_null(self._rows["order_digest"], 0).to_numpy())
        return found % MODULUS

    def largest(self, name: str) -> np.ndarray:
        """Maximum over ranks; one value for each of `numbers`, NaN where no rank has one."""
        result = np.full(len(self.numbers), np.nan)
        np.fmax.at(result, self.place, self[name])
        return result

    def whole(self) -> np.ndarray:
        """For each of `numbers`: has every rank of its attempt's world size reported it?"""
        return np.bincount(self.place, minlength=len(self.numbers)) == self.largest("world_size")

    def totals(self) -> tuple[float, float]:
        """(total tokens, seconds) of the complete steps that have a time, all ranks together."""
        times = self.largest("step_s")
        timed = self.whole() & (times > 0)
        return float(self.sums("total_tokens")[timed].sum()), float(times[timed].sum())

    def logs(self) -> Iterator[tuple[int, int, slice]]:
        """Yield (attempt, rank, its rows) of rows by attempt and rank."""
        attempt = self["attempt"]
        rank = self["rank"]
        edges = np.flatnonzero((np.diff(attempt) != 0) | (np.diff(rank) != 0)) + 1
        for first, last in zip([0, *edges], [*edges, len(attempt)], strict=True):
            if last > first:
                yield int(attempt[first]), int(rank[first]), slice(first, last)
