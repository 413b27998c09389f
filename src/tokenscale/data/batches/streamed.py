"""Approach `token-list`, and approaches of other document formats: endless streams of a store's documents."""

from tokenscale.data.batches.batch import BatchInputs
from tokenscale.data.batches.stored import open_run_stores
from tokenscale.data.batches.streams import StreamBatches
from tokenscale.data.stores.manifest import load_reader
from tokenscale.settings.run import RunSettings


def open_batches(run: RunSettings, inputs: BatchInputs) -> StreamBatches:
    """Open batches from the store, bit-identical to those of `padding-free`."""
    opened = open_run_stores(run, inputs)
    sources = [load_reader(manifest["format"])(where, manifest) for where, manifest in opened]
    return StreamBatches(sources, run, opened[0][1]["vocabulary_size"], inputs)
