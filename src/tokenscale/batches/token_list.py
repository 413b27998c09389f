"""Approach `token-list`: endless streams of the whole documents of a `token-list` store."""

from pathlib import Path

from tokenscale.batches.stored import checked_manifest
from tokenscale.batches.streams import StreamBatches
from tokenscale.formats.token_list import TokenListStore
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
    return StreamBatches(TokenListStore(store_directory, manifest), run, manifest["vocabulary_size"], rank, world_size)
