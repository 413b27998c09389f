"""Approach `token-list`, and that of any format of whole documents: endless streams of a store's documents."""

from pathlib import Path

from tokenscale.data.batches.stored import checked_manifest
from tokenscale.data.batches.streams import StreamBatches
from tokenscale.data.stores.manifest import reader_of
from tokenscale.settings.run import RunSettings


def open_batches(
    run: RunSettings,
    *,
    corpus_directory: Path | None,
    tokenizer_directory: Path | None,
    store_directory: Path | None,
    rank: int,
    world_size: int,
) -> StreamBatches:
    """Batches from the store; bit for bit those of `padding-free`."""
    manifest = checked_manifest(run, store_directory, corpus_directory, tokenizer_directory)
    documents = reader_of(manifest["format"])(store_directory, manifest)
    return StreamBatches(documents, run, manifest["vocabulary_size"], rank, world_size)
