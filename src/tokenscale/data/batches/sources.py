"""Sources of a run: its corpus or token store, or those of the corpora of its mixture."""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenscale.data.order.permutation import ShuffledOrder
from tokenscale.settings.registry import MIXTURES
from tokenscale.settings.run import RunSettings

if TYPE_CHECKING:
    from tokenscale.data.order.mixture import MixtureOrder


def list_sources(run: RunSettings, where: Path, *, held_out: bool = False) -> list[Path]:
    """Return the folders or manifests that the run reads at `where`, one for each corpus with a weight; with
    `held_out`, for all.
    """
    if run.mixture is None:
        return [where]
    return importlib.import_module(MIXTURES).list_sources(run, where, held_out=held_out)


def open_order(run: RunSettings, sizes: list[int]) -> "ShuffledOrder | MixtureOrder":
    """Return the global order of samples, from the number of samples of each source."""
    if run.mixture is None:
        return ShuffledOrder(sizes[0], run.effective_seed)
    return importlib.import_module(MIXTURES).mixture_order(run, sizes)


def join(sources: Sequence[Any]) -> Any:
    """Return sources as one: a single source itself, several as `JoinedSources`."""
    return sources[0] if len(sources) == 1 else JoinedSources(sources)


class JoinedSources:
    """Several sources, documents or rows of `padded` stores, whose samples are numbered one source after the other."""

    def __init__(self, sources: Sequence[Any]):
        self.sources = sources
        self._firsts = np.cumsum([0, *map(len, sources)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @property
    def total_tokens(self) -> int:
        return sum(source.total_tokens for source in self.sources)

    def document(self, i: int) -> np.ndarray:
        source = int(np.searchsorted(self._firsts, i, side="right")) - 1
        return self.sources[source].document(i - int(self._firsts[source]))

    def documents(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return the ids of several documents."""
        found: list[np.ndarray | None] = [None] * len(indices)
        for source, places, own in self._split(indices):
            for place, document in zip(places.tolist(), source.documents(own), strict=True):
                found[place] = document
        return found  # type: ignore[return-value]

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the lengths of documents in tokens, int64 [n]."""
        found = np.empty(len(indices), dtype=np.int64)
        for source, places, own in self._split(indices):
            found[places] = source.lengths_of(own)
        return found

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and labels of rows, int64 [n, T]."""
        parts = [(places, source.rows(own)) for source, places, own in self._split(indices)]
        if not parts:
            return self.sources[0].rows(indices)
        tokens, labels = (np.empty((len(indices), parts[0][1][0].shape[1]), dtype=np.int64) for _ in range(2))
        for places, (own_tokens, own_labels) in parts:
            tokens[places], labels[places] = own_tokens, own_labels
        return tokens, labels

    def _split(self, indices: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """Yield (source, places in `indices` of its samples, numbers of these samples within the source)."""
        numbers = np.searchsorted(self._firsts, indices, side="right") - 1
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            yield self.sources[number], places, np.asarray(indices)[places] - self._firsts[number]
