"""Approach `padding-free`: endless streams of whole documents, tokenized while training."""

from pathlib import Path

from tokenscale.data.batches.online import open_documents
from tokenscale.data.batches.streams import StreamBatches
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
    sources = open_documents(run, corpus_directory, tokenizer_directory)
    return StreamBatches(sources, run, sources[0].tokenizer.vocabulary_size, rank, world_size)
