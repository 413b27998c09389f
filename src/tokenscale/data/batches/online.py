"""Data-loading strategies that tokenize the documents of the training split while training."""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.costs.data import cut_share
from tokenscale.data.batches.batch import Batches, Inputs, RowBatches
from tokenscale.data.batches.stored import open_run_stores
from tokenscale.data.batches.streams import StreamBatches, join
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.data.mixtures import list_sources, manifest_path, open_order
from tokenscale.data.stores.documents import Chunk, pad_documents
from tokenscale.data.stores.lengths import LengthsStore
from tokenscale.data.stores.manifest import rebuild_command
from tokenscale.data.stores.text import TextDoor
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.settings.run import RunSettings

#: documents tokenized per call to count what rows cut
CUT_BATCH = 64
#: UTF-8 bytes of a corpus that are tokenized to count what rows cut
CUT_BYTES = 4 << 20


def open_documents(
    run: RunSettings, inputs: Inputs, losses: Sequence[dict[str, Any] | None] | None = None
) -> list["OnlineDocuments"]:
    """Open the documents of each corpus of the run. `losses` are what the tokenizer loses of each,
    as far as its stores say; else that is measured. Raises UserError as `Inputs.require` and `TextDoor`.
    """
    user = f"approach {run.approach}, which tokenizes while training,"
    corpus, tokenizer = (inputs.require(role, run, user) for role in ("corpus", "tokenizer"))
    loaded = load_tokenizer(tokenizer, engine=run.engine)
    paths = list_sources(run, where=corpus)
    found = []
    for path, known in zip(paths, losses or repeat(None, len(paths)), strict=True):
        text = RawText(manifest_path(path).parent, split="train")
        if known is None:
            door = TextDoor.of_corpus(loaded, text, run.eos)
        else:
            door = TextDoor(loaded, eos=run.eos, pairs=text.pairs, losses=known)
        found.append(OnlineDocuments(run, text, door))
    return found


class OnlineDocuments:
    """Whole documents, tokenized on the fly."""

    def __init__(self, run: RunSettings, text: RawText, door: TextDoor):
        self.text = text
        self.door = door
        self.tokenizer = door.tokenizer
        self._read_text = text.open_documents()
        self._sequence_length = run.sequence_length
        model_size = run.model.vocabulary_size
        if model_size is not None and model_size < self.tokenizer.vocabulary_size:
            what = "the model's vocabulary is smaller than the tokenizer's."
            next_step = "remove model.vocabulary_size, or raise it"
            has = f"{self.tokenizer.name} has {self.tokenizer.vocabulary_size} ids"
            raise UserError(
                what,
                run=run.identity,
                model=f"vocabulary_size {model_size}",
                tokenizer=has,
                next=next_step,
            )

    def __len__(self) -> int:
        return len(self.text)

    def document(self, i: int) -> np.ndarray:
        """Return the ids of one document."""
        return self.documents(np.array([i]))[0]

    def documents(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return the ids of several documents, tokenized in one call."""
        return list(self._encode(indices).documents())

    def _encode(self, indices: np.ndarray) -> Chunk:
        return self.door.encode([self._read_text(i) for i in np.asarray(indices).tolist()])

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and labels of rows, int64 [n, T]; labels are −100 on padding."""
        return pad_documents(
            self.documents(indices), width=self._sequence_length + 1, pad_id=self.tokenizer.pad_id
        )

    def count_tokens(self, indices: np.ndarray) -> np.ndarray:
        """Return the lengths of documents in tokens, int64 [n], by tokenizing them."""
        parts = (indices[k : k + CUT_BATCH] for k in range(0, len(indices), CUT_BATCH))
        return np.concatenate([self._encode(part).lengths for part in parts])


class PaddedBatches(RowBatches):
    """Batches from raw text, bit-identical to those of `pretokenized-padded`."""

    def __init__(self, run: RunSettings, inputs: Inputs):
        sources = open_documents(run, inputs)
        inputs.losses.extend(source.door.losses for source in sources)
        order = open_order(run, sizes=[len(source) for source in sources])
        super().__init__(
            join(sources).rows, order, run, sources[0].tokenizer.vocabulary_size, inputs
        )
        self._run = run
        self._sources = sources

    def count_cut(self) -> dict[str, float]:
        """Return the shares in documents with `CUT_BYTES` of text; see `Batches`."""
        found = {}
        for corpus, source in zip(self._run.trained_corpora, self._sources, strict=True):
            most = len(source) * CUT_BYTES // max(1, source.text.split["utf8_bytes"])
            numbers = np.linspace(
                0, len(source) - 1, min(len(source), max(1, most)), dtype=np.int64
            )
            found[corpus.name] = float(
                cut_share(source.count_tokens(numbers), sequence_length=self._run.sequence_length)
            )
        return found


class CountedDocuments:
    """Documents that are tokenized when a stream reads them, with the lengths that their store has
    counted.
    """

    def __init__(self, documents: OnlineDocuments, lengths: LengthsStore):
        self.documents = documents.documents
        self.lengths_of = lengths.lengths_of
        self.total_tokens = lengths.total_tokens
        self._count = len(documents)

    def __len__(self) -> int:
        return self._count


def open_padding_free(run: RunSettings, inputs: Inputs) -> StreamBatches:
    """Open the stream of the documents, laid out by the lengths in the run's store."""
    stores = open_run_stores(run, inputs)
    losses = [manifest["text_sample"] for _, manifest in stores]
    documents = open_documents(run, inputs, losses=losses)
    lengths = [LengthsStore(*store) for store in stores]
    return StreamBatches(
        sources=list(map(CountedDocuments, documents, lengths)),
        run=run,
        vocabulary_size=documents[0].tokenizer.vocabulary_size,
        inputs=inputs,
        rebuild=[rebuild_command(where) for where, _ in stores],
        read=lambda source, numbers: source.documents(numbers),
    )


#: approach → function that opens its batches
OPENERS: dict[str, Callable[[RunSettings, Inputs], Batches]] = {
    "padded": PaddedBatches,
    "padding-free": open_padding_free,
}
