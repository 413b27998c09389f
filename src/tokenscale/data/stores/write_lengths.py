"""Writer of the format `lengths`; see `stores.lengths`."""

from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.costs.data import measure_quantiles
from tokenscale.data.stores.documents import Documents
from tokenscale.data.stores.writing import open_store_writer
from tokenscale.settings.data import StoreSettings

FILE = "lengths.npy"


def write_lengths(store: StoreSettings, documents: Documents, directory: Path) -> dict[str, Any]:
    """Write the store and return its manifest: 4 bytes a document, 8 where one has more than 2**32
    tokens.
    """
    with open_store_writer(store, documents, directory=directory) as writer:
        lengths = np.concatenate([chunk.lengths.astype(np.uint64) for chunk in writer.chunks()])
        smallest = np.uint32 if int(lengths.max()) < 1 << 32 else np.uint64
        np.save(writer.folder / FILE, lengths.astype(smallest))
        tokens = int(writer.occurrences.sum())
        facts = {
            "rows": len(documents),
            "tokens_useful": tokens - len(documents),
            "tokens_total": tokens,
            "tokens_stored": 0,
            "places": tokens,
            "tokens_cut": 0,
            "documents_cut": 0,
            "quantiles": measure_quantiles(lengths),
        }
        return writer.finish([FILE], facts)
