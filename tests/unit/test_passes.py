"""A pass over generated text has every label once, in every approach, at every world size and after
a resumption.

Texts are distinct numbers, so that a label's id names its document and its place in it.
"""

import json
import math
import tempfile
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.corpora import joined, make_corpus, make_store, take
from tokenscale.cli.mixture import write_mixture
from tokenscale.data.batches import stored, streams
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.open import open_batches
from tokenscale.data.batches.trace import trace_step
from tokenscale.data.mixtures import open_order
from tokenscale.data.stores.documents import IGNORED
from tokenscale.data.tokenizers.load import build as build_tokenizer
from tokenscale.settings.data import CorpusSettings, TokenizerSettings
from tokenscale.settings.mixture import MixtureSettings, MixtureSource, MixtureStage
from tokenscale.settings.registry import BATCHES
from tokenscale.settings.run import APPROACHES, RunSettings

pytestmark = pytest.mark.slow(60)

NUMBERS = TokenizerSettings(name="numbers", kind="numbers", vocabulary_size=100_000)
NAMES = ("first", "second")
PASSES = 2


@dataclass(frozen=True)
class Reading:
    """A drawn text and how it is read: the run, and the world sizes before and after `stop`."""

    sources: list[list[int]]  # of each source the lengths of its documents, without BOS
    run: RunSettings
    stop: int
    worlds: tuple[int, int]
    chunk: int  # documents of a stream whose lengths are summed at once
    window: int  # batches of length-bucketed whose documents are sorted together


@st.composite
def readings(draw, approach):
    lengths = st.one_of(st.integers(0, 3), st.integers(0, 70))
    sources = [
        draw(st.lists(lengths, min_size=1, max_size=30)) for _ in range(draw(st.integers(1, 2)))
    ]
    changes = {}
    if len(sources) == 2:
        weight = draw(st.integers(1, 9)) / 10
        changes["corpus"] = CorpusSettings("mix")
        changes["mixture"] = MixtureSettings(
            stages=(MixtureStage(weights=(weight, 1 - weight)),),
            sources=tuple(MixtureSource(corpus=CorpusSettings(name)) for name in NAMES),
        )
    run = RunSettings(
        approach=approach,
        tokenizer=NUMBERS,
        sequence_length=draw(st.integers(1, 24)),
        global_batch=draw(st.integers(1, 9)),
        seed=draw(st.integers(0, 1 << 20)),
        eos=draw(st.booleans()),
        document_mask=draw(st.booleans()) if approach in MASKED else False,
        **changes,
    )
    worlds = (draw(st.integers(1, 7)), draw(st.integers(1, 7)))
    return Reading(
        sources=sources,
        run=run,
        stop=draw(st.integers(0, 12)),
        worlds=worlds,
        # mostly less than a source has, so that a pass has several of each
        chunk=draw(st.one_of(st.integers(1, 4), st.integers(1, 40))),
        window=draw(st.integers(1, 5)),
    )


#: approaches whose rows hold several documents
MASKED = [name for name, entry in BATCHES.items() if entry.streams or name == "packed"]
#: approaches whose rows hold one document, cut after the sequence length
CUT = [name for name in APPROACHES if name not in MASKED]


def write_texts(sources):
    """Return the texts of each source: numbers that occur nowhere else."""
    texts = []
    number = 0
    for lengths in sources:
        texts.append([])
        for length in lengths:
            texts[-1].append(" ".join(map(str, range(number, number + length))))
            number += length
    return texts


class Text:
    """A drawn text on disk: its corpora, tokenizer and stores."""

    def __init__(self, folder, reading):
        run = reading.run
        self.tokenizer = folder / "tokenizer"
        build_tokenizer(NUMBERS, self.tokenizer, None)
        texts = write_texts(reading.sources)
        corpora = {
            name: make_corpus(folder / "corpus" / name, of_source, name=name)
            for name, of_source in zip(NAMES, texts, strict=False)
        }
        self.corpus = self._one(corpora, folder / "corpora")
        self.store = None
        if run.store is not None:
            stores = {
                name: make_store(folder / "tokens" / name, corpus, self.tokenizer, run.store)
                for name, corpus in corpora.items()
            }
            self.store = self._one(stores, folder / "stores")

    @staticmethod
    def _one(folders, mixture):
        if len(folders) == 1:
            return folders["first"]
        path = mixture / "manifest.json"
        write_mixture({name: folder / "manifest.json" for name, folder in folders.items()}, path)
        return path.parent

    def open(self, run, rank=0, world_size=1):
        inputs = Inputs(self.corpus, self.tokenizer, self.store, rank=rank, world_size=world_size)
        return open_batches(run, inputs)


def read_batches(text, reading, steps):
    """Return the global batches of `steps` steps; after `stop` other ranks go on from the state."""
    run = reading.run
    found = []
    state = {"step": 0}
    ends = (min(reading.stop, steps), steps)
    for end, world in zip(ends, reading.worlds, strict=True):
        ranks = [text.open(run, rank, world) for rank in range(world)]
        for rank in ranks:
            rank.seek(state)
        found += [
            joined([rank.next().copy() for rank in ranks]) for _ in range(end - state["step"])
        ]
        states = [json.loads(json.dumps(rank.state())) for rank in ranks]
        assert states == [{"step": end}] * world
        state = states[0]
    return found


def labels_of(rows):
    """Count the ids of labels that are not ignored."""
    return Counter(id for row in rows for id in row.tolist() if id != IGNORED)


def documents_of(text, run):
    """Return the ids of the documents of each source, by their definition: BOS, numbers, EOS."""
    offset = 3  # ids of control tokens
    end = [1] if run.eos else []
    return [
        [[0, *(int(n) + offset for n in document.split()), *end] for document in of_source]
        for of_source in text
    ]


def check_reading(reading):
    run = reading.run
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(streams, "CHUNK_DOCUMENTS", reading.chunk),
        mock.patch.object(stored, "WINDOW", reading.window),
    ):
        text = Text(Path(folder), reading)
        documents = documents_of(write_texts(reading.sources), run)
        alone = text.open(run)
        rows_of = _rows_of_sources(alone, run, documents)
        assert alone.rows_per_epoch() == sum(rows_of)
        order = open_order(run, [math.ceil(rows) for rows in rows_of])
        steps = _steps_of_passes(order, run, rows_of)
        batches = read_batches(text, reading, steps)
        assert (
            sum(batch.useful_tokens for batch in batches)
            == labels_of(row for batch in batches for row in batch.labels_bt).total()
        )
        expected_digests = [batch.order_digest for batch in take(alone, steps)]
        assert [batch.order_digest for batch in batches] == expected_digests
        check_cut(alone, run, documents)
        step = min(reading.stop, steps - 1)
        check_trace(text, run, step, batches[step], documents)
        if run.approach == "length-bucketed":
            check_buckets(batches, order, run, documents)
        else:
            check_passes(batches, order, run, documents, rows_of)


def _rows_of_sources(batches, run, documents):
    if run.approach == "packed":
        return [Fraction(size) for size in batches._store.sizes]
    if BATCHES[run.approach].streams:
        return [Fraction(sum(map(len, each)), run.sequence_length) for each in documents]
    return [Fraction(len(each)) for each in documents]


def _steps_of_passes(order, run, rows_of):
    """Return the steps after which every source was read `PASSES` times."""
    steps = 1
    while True:
        if run.mixture is None:
            counts = [steps * run.global_batch]
        else:
            counts = order.count(steps * run.global_batch)
        if all(count >= PASSES * rows for count, rows in zip(counts, rows_of, strict=True)):
            return steps
        steps += 1


def cut(document, run):
    """Return the labels of a document that a row of the approach keeps."""
    return document[1 : run.sequence_length + 1] if run.approach in CUT else document[1:]


def check_passes(batches, order, run, documents, rows_of):
    """Each pass over each source has its labels, every one once."""
    rows = np.concatenate([batch.labels_bt for batch in batches])
    sources = np.zeros(len(rows), dtype=np.int64)
    if run.mixture is not None:
        sources = order.locate(np.arange(len(rows)))[0]
    for source, per_pass in enumerate(rows_of):
        expected = Counter(id for document in documents[source] for id in cut(document, run))
        labels = rows[sources == source].ravel()
        edges = [int(number * per_pass * run.sequence_length) for number in range(PASSES + 1)]
        for first, stop in zip(edges[:-1], edges[1:], strict=True):
            assert labels_of([labels[first:stop]]) == expected


def check_buckets(batches, order, run, documents):
    """Each batch has whole documents; those of a pass are all documents of its global order."""
    flat = [document for each in documents for document in each]
    total = len(flat)
    for number in range(1, PASSES + 1):
        steps = -(-number * total // run.global_batch)
        samples = order.samples(np.arange(steps * run.global_batch))
        expected = Counter(id for i in samples.tolist() for id in cut(flat[i], run))
        found = labels_of(row for batch in batches[:steps] for row in batch.labels_bt)
        assert found == expected
        if run.mixture is None:
            every = Counter(id for document in flat for id in cut(document, run))
            assert all(found[id] >= number * count for id, count in every.items())


def check_cut(batches, run, documents):
    """What the rows lose is what `count_cut` says."""
    if run.approach not in ("padded", "length-bucketed"):
        assert batches.count_cut() == {}
        return
    lost = [
        sum(len(document) - 1 - len(cut(document, run)) for document in each) for each in documents
    ]
    labels = [sum(len(document) - 1 for document in each) for each in documents]
    expected = [part / whole if whole else 0.0 for part, whole in zip(lost, labels, strict=True)]
    assert list(batches.count_cut().values()) == pytest.approx(expected)


def check_trace(text, run, step, batch, documents):
    """A step's trace has every token and label of its batch, by the definition of the documents."""
    inputs = Inputs(text.corpus, text.tokenizer, text.store)
    found = trace_step(run, inputs, step)
    assert (found.digest, found.labels) == (batch.order_digest, batch.useful_tokens)
    assert sum(piece.labels for piece in found.pieces) == batch.useful_tokens
    names = [corpus.name for corpus in run.trained_corpora]
    inside = np.zeros(batch.tokens_bt.shape, dtype=bool)
    for piece in found.pieces:
        document = documents[names.index(piece.corpus)][piece.document]
        ids = document[piece.first : piece.first + piece.tokens]
        place = (piece.slot, slice(piece.place, piece.place + piece.tokens))
        assert batch.tokens_bt[place].tolist() == ids
        assert not inside[place].any()
        inside[place] = True
        assert piece.length == len(document) and piece.origin.row == piece.document
    padding = 2  # the third control token
    assert np.array_equal(inside, batch.tokens_bt != padding)


GENERATED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


@pytest.mark.parametrize("approach", APPROACHES)
@given(data=st.data())
@settings(max_examples=20, **GENERATED)
def test_a_pass_has_every_label_once(approach, data):
    """One approach at a time: of 200 examples of all of them, none may be a stream in several chunks."""
    check_reading(data.draw(readings(approach)))


@pytest.mark.parametrize("approach", APPROACHES)
@pytest.mark.parametrize("tokens", [1, 200])
def test_a_corpus_of_one_document_is_read_by_more_ranks_than_it_has_rows(approach, tokens):
    """Rows are longer than the text, or the text is longer than all rows of a batch."""
    run = RunSettings(
        approach=approach, tokenizer=NUMBERS, sequence_length=24, global_batch=2, eos=False
    )
    check_reading(Reading(sources=[[tokens]], run=run, stop=1, worlds=(7, 3), chunk=40, window=2))


def test_a_document_of_a_billion_tokens_is_read_where_a_window_lies():
    """Its ids take no memory here: every one is the same number."""
    lengths = np.array([3, 1_000_000_000, 5])

    class Source:
        total_tokens = int(lengths.sum())

        def __len__(self):
            return len(lengths)

        def lengths_of(self, indices):
            return lengths[indices]

    def read(source, numbers):
        return [np.broadcast_to(np.int32(n), lengths[n]) for n in numbers.tolist()]

    stream = streams.TokenStream(Source(), seed=0, read=read, rebuild="")
    seen = Counter()
    for first in (0, 999_999_990, 1_000_000_000 - 4, 7 * Source.total_tokens + 500_000_000):
        window = stream.read(first, 16)
        assert len(window.tokens) == 16
        seen.update(window.tokens.tolist())
    assert seen.total() == 64 and seen[1] >= 16
    pass_end = stream.read(Source.total_tokens - 16, 32)
    assert (
        pass_end.tokens.tolist()
        == np.concatenate(
            [stream.read(Source.total_tokens - 16 + k, 1).tokens for k in range(32)]
        ).tolist()
    )


@pytest.mark.long
@pytest.mark.parametrize("approach", APPROACHES)
@given(data=st.data())
@settings(max_examples=3_400, **GENERATED)
def test_a_pass_has_every_label_once_in_many_texts(approach, data):
    check_reading(data.draw(readings(approach)))
