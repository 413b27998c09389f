"""Approach `pretokenized-padded`: rows of a `padded` store."""

from pathlib import Path

from tokenscale.data.batches.rows import RowBatches
from tokenscale.data.batches.stored import open_run_store
from tokenscale.data.stores.padded import PaddedStore
from tokenscale.settings.run import RunSettings


def open_batches(
    run: RunSettings,
    *,
    corpus_directory: Path | None,
    tokenizer_directory: Path | None,
    store_directory: Path | None,
    rank: int,
    world_size: int,
) -> RowBatches:
    """Open batches from the store, bit-identical to those of `padded`."""
    manifest = open_run_store(run, store_directory, corpus_directory, tokenizer_directory)
    store = PaddedStore(store_directory, manifest)
    return RowBatches(store.rows, len(store), run, manifest["vocabulary_size"], rank, world_size)
