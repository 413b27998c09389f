"""The fixed held-out slice: the same rows for every approach, layout and step."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenscale.errors import UserError
from tokenscale.formats.manifest import open_store
from tokenscale.formats.packed import PackedStore
from tokenscale.order.shares import share
from tokenscale.settings.run import RunSettings


@dataclass(frozen=True)
class Slice:
    """One rank's rows of the held-out slice: tokens and labels [rows, T], int64; and the rows of all ranks."""

    tokens_bt: np.ndarray
    labels_bt: np.ndarray
    global_rows: int


def read_slice(run: RunSettings, directory: Path | None, vocabulary_size: int, rank: int, world_size: int) -> Slice:
    """The first rows of the packed validation store (its rows are stored shuffled), shared among the ranks.

    Raises UserError when the store is missing, changed, or not the one that the run asks for.
    """
    if directory is None:
        raise UserError(
            "the run validates, and no validation store was given.",
            run=run.identity,
            next=f"name results/tokens/{run.corpus.name}/{run.tokenizer.name}/{run.validation_store.directory}",
        )
    manifest = open_store(
        directory,
        run.validation_store,
        asked_by=run.identity,
        tokenizer_name=run.tokenizer.name,
        vocabulary_size=vocabulary_size,
    )
    store = PackedStore(directory, manifest)
    rows = min(run.validation.rows, len(store))
    mine = share(rows, rank, world_size)
    tokens_bt, labels_bt = store.rows(np.arange(mine.start, mine.stop))
    return Slice(tokens_bt, labels_bt, rows)
