"""Approach `token-list`, and approaches of other document formats: endless streams of a store's documents."""

from pathlib import Path

from tokenscale.data.batches.stored import open_run_stores
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
    opened = open_run_stores(run, store_directory, corpus_directory, tokenizer_directory)
    sources = [load_reader(manifest["format"])(where, manifest) for where, manifest in opened]
    return StreamBatches(sources, run, opened[0][1]["vocabulary_size"], rank, world_size)
