"""Approach `pretokenized-padded`: the rows of a `padded` store."""

from pathlib import Path

from tokenscale.data.batches.rows import RowBatches
from tokenscale.data.batches.stored import checked_manifest
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
    """Batches from the store; bit for bit those of `padded`."""
    manifest = checked_manifest(run, store_directory, corpus_directory, tokenizer_directory)
    store = PaddedStore(store_directory, manifest)
    return RowBatches(store.rows, len(store), run, manifest["vocabulary_size"], rank, world_size)
