"""Approach `token-list`, and approaches of other document formats: endless streams of a store's documents."""

from pathlib import Path

from tokenscale.data.batches.stored import open_run_store
from tokenscale.data.batches.streams import StreamBatches
from tokenscale.data.stores.manifest import load_reader
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
    """Open batches from the store, bit-identical to those of `padding-free`."""
    manifest = open_run_store(run, store_directory, corpus_directory, tokenizer_directory)
    documents = load_reader(manifest["format"])(store_directory, manifest)
    return StreamBatches(documents, run, manifest["vocabulary_size"], rank, world_size)
