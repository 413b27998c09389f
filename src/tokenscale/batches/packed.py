"""Approach `packed`: the full rows of a `packed` store."""

from pathlib import Path

from tokenscale.batches.rows import RowBatches
from tokenscale.batches.stored import checked_manifest
from tokenscale.formats.packed import PackedStore
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
    """Batches from the store."""
    manifest = checked_manifest(run, store_directory, corpus_directory, tokenizer_directory)
    store = PackedStore(store_directory, manifest)
    return RowBatches(store.rows, len(store), run, manifest["vocabulary_size"], rank, world_size)
