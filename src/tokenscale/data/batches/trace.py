"""The text of a global batch: its documents, the tokens of each, and how many labels count.

Which document lies where follows from the run's settings, the lengths in its store and the order.
The tokens are made from the text again, and compared with those of the batch.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError
from tokenscale.base.files import naming
from tokenscale.base.manifests import open_checked
from tokenscale.data.batches.batch import Batch, Batches, Inputs, RowBatches, count_labels
from tokenscale.data.batches.online import OnlineDocuments, open_documents
from tokenscale.data.batches.open import open_batches
from tokenscale.data.batches.stored import open_run_stores
from tokenscale.data.batches.streams import StreamBatches
from tokenscale.data.corpus.raw_text import RawText, rebuild_command
from tokenscale.data.stores.packed import PackedStore
from tokenscale.settings.run import RunSettings


class Span(NamedTuple):
    """Tokens of a document in one row of a global batch, before the document is read."""

    slot: int  # row of the global batch
    place: int  # column of the first token
    document: int  # among those of all sources
    first: int  # first token in the document
    most: int  # tokens, if the document has as many


@dataclass(frozen=True)
class Origin:
    """Where a document lies."""

    file: str  # below the folder of the corpus
    row: int
    source: str  # where the text came from, in the words of the corpus


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a document in one row of a global batch."""

    slot: int  # row of the global batch
    place: int  # column of the first token
    corpus: str
    document: int  # in the training split of its corpus
    origin: Origin
    first: int  # first token in the document, where BOS is 0
    tokens: int  # inputs of the row
    length: int  # tokens of the whole document
    labels: int  # of those tokens, that count in the loss
    text: str  # of the whole document


@dataclass(frozen=True)
class StepTrace:
    """The text of one global batch."""

    digest: int  # modulo 2**52, as all ranks log it together
    labels: int
    pieces: tuple[Piece, ...]


def trace_step(run: RunSettings, inputs: Inputs, step: int) -> StepTrace:
    """Return the text of a step's global batch. `inputs` needs corpus, tokenizer, and the store that
    the run reads, for one rank alone.

    Raises UserError for inputs that are missing or changed, and for a batch with other tokens than
    those of its text.
    """
    # what the tokenizer loses was measured when the run began
    sources = open_documents(run, inputs, losses=[{}] * len(run.trained_corpora))
    firsts = [0, *accumulate(map(len, sources))]
    plain = replace(run, objective="causal", labels="all")
    batches = open_batches(plain, inputs)
    batches.seek({"step": step})
    spans = _list_spans(plain, inputs, batches, step, firsts)
    batches.seek({"step": step})
    tokens_bt = batches.next().copy().tokens_bt
    learned = open_batches(run, inputs)
    learned.seek({"step": step})
    batch = learned.next()
    pieces = _read_pieces(run, sources, spans, firsts, batch)
    for piece, ids in pieces:
        place = slice(piece.place, piece.place + piece.tokens)
        if not np.array_equal(tokens_bt[piece.slot, place], ids):
            raise UserError(
                "the text of a document gives other tokens than the batch has.",
                document=f"{piece.document:,} of the corpus {piece.corpus}",
                file=f"{piece.origin.file}, row {piece.origin.row:,}",
                next="rebuild the token store: its text or its tokenizer changed since",
            )
    return StepTrace(
        digest=batch.order_digest,
        labels=batch.useful_tokens,
        pieces=tuple(piece for piece, _ in pieces),
    )


def _read_pieces(
    run: RunSettings,
    sources: list[OnlineDocuments],
    spans: list[Span],
    firsts: list[int],
    batch: Batch,
) -> list[tuple[Piece, np.ndarray]]:
    """Return the pieces of a batch, each with its tokens by its text, int32 [tokens]. `firsts` are
    the first documents of the sources among those of all.
    """
    found = []
    for number, source in enumerate(sources):
        own = [span for span in spans if bisect_right(firsts, span.document) - 1 == number]
        documents = sorted({span.document - firsts[number] for span in own})
        if not documents:
            continue
        ids = dict(zip(documents, source.documents(np.array(documents)), strict=True))
        origins = find_origins(source.text, documents)
        for span in own:
            document = span.document - firsts[number]
            tokens = ids[document][span.first : span.first + span.most]
            labels = batch.labels_bt[span.slot, span.place : span.place + len(tokens)]
            piece = Piece(
                slot=span.slot,
                place=span.place,
                corpus=run.trained_corpora[number].name,
                document=document,
                origin=origins[document],
                first=span.first,
                tokens=len(tokens),
                length=len(ids[document]),
                labels=count_labels(labels),
                text=source.text.text(document),
            )
            found.append((piece, tokens))
    return sorted(found, key=lambda each: (each[0].slot, each[0].place))


def find_origins(text: RawText, documents: list[int]) -> dict[int, Origin]:
    """Return document → where it lies. Raises UserError for a Parquet file that is missing or
    changed.
    """
    files = text.split["files"]
    firsts = [0, *accumulate(file["rows"] for file in files)]
    found = {}
    for number, file in enumerate(files):
        own = [i for i in documents if firsts[number] <= i < firsts[number + 1]]
        if not own:
            continue
        opened = open_checked(
            text.directory,
            name=file["name"],
            size=file["bytes"],
            sha256=file["sha256"],
            what="corpus",
            next=rebuild_command(text.directory, file=file["name"]),
        )
        with opened as shard, naming(text.directory / file["name"]):
            column = pq.read_table(shard, columns=["origin"])["origin"]
        for i in own:
            row = i - firsts[number]
            found[i] = Origin(file["name"], row, column[row].as_py())
    return found


def _list_spans(
    run: RunSettings, inputs: Inputs, batches: Batches, step: int, firsts: list[int]
) -> list[Span]:
    if isinstance(batches, StreamBatches):
        return list(_list_spans_of_stream(batches, run.sequence_length, firsts))
    assert isinstance(batches, RowBatches)  # as of the other approaches
    steps, rows = batches.choose(step)
    numbers = rows[step - int(steps[0])].tolist()
    if run.approach != "packed":
        return [
            Span(slot, place=0, document=document, first=0, most=run.sequence_length)
            for slot, document in enumerate(numbers)
        ]
    store, *others = open_run_stores(run, inputs)
    reader = PackedStore(*store, others=others)
    return [
        span
        for slot, row in enumerate(numbers)
        for span in _list_spans_of_row(slot, reader.list_pieces(row), run.sequence_length)
    ]


def _list_spans_of_row(
    slot: int, pieces: list[tuple[int, int, int]], sequence_length: int
) -> Iterator[Span]:
    place = 0
    for document, first, tokens in pieces:
        # the last token of a full row is a label alone
        most = min(tokens, sequence_length - place)
        if most > 0:
            yield Span(slot, place, document, first, most)
        place += tokens


def _list_spans_of_stream(
    batches: StreamBatches, sequence_length: int, firsts: list[int]
) -> Iterator[Span]:
    for source, places, window in batches.windows():
        slots = batches.slots[places].tolist()
        begins = window.begins.tolist()
        # the last token of a window is a label alone
        ends = [*begins[1:], len(slots) * sequence_length]
        for document, begin, end in zip(window.documents.tolist(), begins, ends, strict=True):
            first_row = max(begin, 0) // sequence_length
            for row in range(first_row, min(-(-end // sequence_length), len(slots))):
                start = max(begin, row * sequence_length)
                stop = min(end, (row + 1) * sequence_length)
                yield Span(
                    slot=slots[row],
                    place=start - row * sequence_length,
                    document=firsts[source] + document,
                    first=start - begin,
                    most=stop - start,
                )
