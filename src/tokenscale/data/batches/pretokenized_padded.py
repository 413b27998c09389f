"""Approach `pretokenized-padded`: rows of a `padded` store."""

from tokenscale.data.batches.batch import BatchInputs
from tokenscale.data.batches.rows import RowBatches
from tokenscale.data.batches.stored import open_run_stores
from tokenscale.data.batches.streams import join, open_order
from tokenscale.data.stores.parquet import PaddedStore
from tokenscale.settings.run import RunSettings


def open_batches(run: RunSettings, inputs: BatchInputs) -> RowBatches:
    """Open batches from the store, bit-identical to those of `padded`."""
    opened = open_run_stores(run, inputs)
    stores = [PaddedStore(where, manifest) for where, manifest in opened]
    order = open_order(run, [len(store) for store in stores])
    return RowBatches(join(stores).rows, order, run, opened[0][1]["vocabulary_size"], inputs)
