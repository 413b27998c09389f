"""Approach `padding-free`: endless streams of whole documents, tokenized while training."""

from tokenscale.data.batches.batch import BatchInputs
from tokenscale.data.batches.online import open_documents
from tokenscale.data.batches.streams import StreamBatches
from tokenscale.settings.run import RunSettings


def open_batches(run: RunSettings, inputs: BatchInputs) -> StreamBatches:
    sources = open_documents(run, inputs)
    return StreamBatches(sources, run, sources[0].tokenizer.vocabulary_size, inputs)
