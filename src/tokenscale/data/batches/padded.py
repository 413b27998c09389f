"""Approach `padded`: one document per row, tokenized while training, cut or padded to the sequence length."""

import numpy as np

from tokenscale.data.batches.batch import BatchInputs
from tokenscale.data.batches.online import open_documents
from tokenscale.data.batches.rows import RowBatches
from tokenscale.data.batches.streams import join, open_order
from tokenscale.data.stores.documents import make_labels, pad_document
from tokenscale.settings.run import RunSettings


def open_batches(run: RunSettings, inputs: BatchInputs) -> RowBatches:
    """Open batches from raw text, bit-identical to those of `pretokenized-padded`."""
    sources = open_documents(run, inputs)
    documents, tokenizer = join(sources), sources[0].tokenizer
    width, pad_id = run.sequence_length + 1, tokenizer.pad_id

    def read(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.empty((len(indices), width), dtype=np.int64)
        lengths = np.empty(len(indices), dtype=np.int64)
        for n, document in enumerate(documents.documents(indices)):
            tokens[n], lengths[n] = pad_document(document, width, pad_id)
        return tokens[:, :-1], make_labels(tokens, lengths=lengths)

    order = open_order(run, [len(source) for source in sources])
    return RowBatches(read, order, run, tokenizer.vocabulary_size, inputs)
