"""The fixed held-out slice: the same rows for every approach, layout and step."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.data.batches.batch import document_ids
from tokenscale.data.order.shares import share
from tokenscale.data.stores.manifest import open_store
from tokenscale.data.stores.packed import PackedStore
from tokenscale.settings.registry import LABELS, OBJECTIVES
from tokenscale.settings.run import RunSettings


@dataclass(frozen=True)
class Slice:
    """One rank's rows of the held-out slice: tokens and labels [rows, T], int64; the rows of all ranks; and where the
    run asks for a document mask, document ids int32 [rows, T]."""

    tokens_bt: np.ndarray
    labels_bt: np.ndarray
    global_rows: int
    document_ids_bt: np.ndarray | None = None


def read_slice(
    run: RunSettings,
    directory: Path | None,
    vocabulary_size: int,
    rank: int,
    world_size: int,
    tokenizer_directory: Path | None = None,
) -> Slice:
    """The first rows of the packed validation store (its rows are stored shuffled), shared among the ranks.

    The objective `masked` masks them by their number in the store, the same in every run, and reads the tokenizer's
    manifest for it. Raises UserError when the store is missing, changed, or not the one that the run asks for.
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
        requested_by=run.identity,
        tokenizer_name=run.tokenizer.name,
        vocabulary_size=vocabulary_size,
    )
    store = PackedStore(directory, manifest)
    rows = min(run.validation.rows, len(store))
    mine = share(rows, rank, world_size)
    numbers = np.arange(mine.start, mine.stop)
    tokens_bt, labels_bt = store.rows(numbers)
    tokens_bt, labels_bt = as_requested(tokens_bt, labels_bt, numbers, manifest, run, tokenizer_directory)
    ids = document_ids(store.starts(numbers)) if run.document_mask else None
    return Slice(tokens_bt, labels_bt, rows, ids)


def as_requested(
    tokens_bt: np.ndarray,
    labels_bt: np.ndarray,
    numbers: np.ndarray,
    manifest: dict[str, Any],
    run: RunSettings,
    tokenizer_directory: Path | None,
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, labels) of rows as the run trains on them: which labels count, and what is masked, by the rows' numbers.

    `manifest` is that of the rows' store, or says the same of their documents (document_parts, bos_id, eos_id).
    """
    if run.labels in LABELS:
        importlib.import_module(LABELS[run.labels]).of_rows(tokens_bt, labels_bt, manifest, run)
    module = OBJECTIVES[run.objective].module
    if module is None:
        return tokens_bt, labels_bt
    return importlib.import_module(module).of_rows(tokens_bt, labels_bt, numbers, run, tokenizer_directory)
