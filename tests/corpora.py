"""Tiny corpora, tokenizers and stores for tests, built by the code that builds real ones."""

import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenscale.data.batches.batch import Batch, Batches, Inputs
from tokenscale.data.batches.open import open_batches
from tokenscale.data.corpus.build import assign_split, build, build_from
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.data.order.permutation import MODULUS
from tokenscale.data.stores.text import encode_documents
from tokenscale.data.stores.writing import write_store
from tokenscale.data.tokenizers import backends
from tokenscale.data.tokenizers.load import build as build_tokenizer
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.settings.data import (
    CleaningSettings,
    CorpusSettings,
    SourceSettings,
    StoreSettings,
    TokenizerSettings,
)
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import (
    BudgetSettings,
    OptimizerSettings,
    RunSettings,
    ScheduleSettings,
    ValidationSettings,
)

GRAMMAR = Path(__file__).parents[1] / "config/corpora/grammar"
DESCRIPTION = {"kind": "test", "packages": [{"name": "texts", "version": "1"}]}

WORDS = [
    "the",
    "loss",
    "of",
    "a",
    "model",
    "falls",
    "when",
    "it",
    "reads",
    "what",
    "it",
    "has",
    "read",
    "before",
    "and",
    "then",
    "some",
    "more",
    "of",
    "it",
]
#: documents that went wrong somewhere, some day
HOSTILE = (
    "",
    " ",
    "<s>",
    "</s> and <s> and <pad> in the middle <s>",
    "\x00NUL\x00",
    "👩‍👩‍👧‍👦 family, e\u0301 combining, \u202eRTL שלום\u202c, مرحبا",
    "\ufeffBOM and \u2028 line separator",
    "a" * 500,
    "日本語のテキスト" * 30,
    "x",
)


def texts_around(sequence_length: int) -> list[str]:
    """Texts of distinct letters whose token counts lie at every border of a row, with the byte
    tokenizer of 259 ids.
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    sizes = [
        *range(4),
        *range(sequence_length - 3, sequence_length + 4),
        2 * sequence_length - 1,
    ]
    sizes += [
        2 * sequence_length,
        2 * sequence_length + 1,
        3 * sequence_length,
        7 * sequence_length + 5,
    ]
    return [
        "".join(letters[(n * 7 + k * k) % 26] for k in range(size)) for n, size in enumerate(sizes)
    ]


def make_corpus(
    directory: Path,
    texts: Sequence[str],
    *,
    name: str = "tiny",
    validation_share: float = 1e-9,
    row_group_rows: int = 7,
    cleaning: CleaningSettings | None = None,
) -> Path:
    """A corpus of these texts, none dropped or changed by default, nearly surely all in the
    training split.
    """
    settings = CorpusSettings(
        name=name,
        cleaning=cleaning or CleaningSettings(strip=False, minimum_characters=0, deduplicate=False),
        validation_share=validation_share,
        row_group_rows=row_group_rows,
    )
    documents = ((text, f"texts::{i}") for i, text in enumerate(texts))
    build_from(documents, settings, Path(directory), DESCRIPTION)
    return Path(directory)


def pairs_source(documents: int) -> SourceSettings:
    """The first pairs of the corpus `grammar`, with its 500 held-out pairs."""
    return SourceSettings(
        "files",
        files=(str(GRAMMAR / "train.parquet"),),
        validation_files=(str(GRAMMAR / "validation.parquet"),),
        text_column="german",
        target_column="english",
        maximum_documents=documents,
    )


def make_tokenizer(
    directory: Path, corpus_directory: Path, vocabulary_size: int = 300, name: str = "bpe"
) -> Path:
    """A byte-level BPE of the corpus. Needs the package tokenizers; with little text it gets fewer
    ids.

    Its engines are compared on 200 fuzz texts, which takes a tenth of the time of all.
    """
    settings = TokenizerSettings(
        name=name, kind="bpe", corpus="tiny", vocabulary_size=vocabulary_size
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            backends, "make_fuzz_texts", functools.partial(backends.make_fuzz_texts, count=200)
        )
        build_tokenizer(settings, Path(directory), corpus_directory)
    return Path(directory)


def make_store(
    directory: Path, corpus_directory: Path, tokenizer_directory: Path, store: StoreSettings | str
) -> Path:
    """A store in `directory`/<its name>; the store by its settings or by its name."""
    store = StoreSettings.parse(store) if isinstance(store, str) else store
    path = Path(directory) / store.directory
    write_store(store, corpus_directory, tokenizer_directory, path)
    return path


def make_run(approach: str, sequence_length: int, **changes: Any) -> RunSettings:
    tokenizer = TokenizerSettings(name="bpe", kind="bpe", corpus="tiny", vocabulary_size=300)
    return RunSettings(
        approach=approach, sequence_length=sequence_length, tokenizer=tokenizer, **changes
    )


def small_run(
    approach: str = "packed", world_size: int = 1, steps: int = 8, **changes: Any
) -> RunSettings:
    """A run of a model of which a step takes milliseconds, on the texts of `words_lab`."""
    settings = {
        "model": PRESETS["llama-micro"],
        "global_batch": 6,
        "micro_batch": 2,
        "layout": LayoutSettings(data=world_size),
        "budget": BudgetSettings(steps=steps),
        "schedule": ScheduleSettings(warmup_steps=2),
        "optimizer": OptimizerSettings(learning_rate=3e-3),
        "validation": ValidationSettings(rows=4),
    }
    return make_run(approach, 32, **settings | changes)


class Lab:
    """A corpus, its tokenizer, and stores made when first asked for, in one folder."""

    def __init__(
        self, directory: Path, texts: Sequence[str], vocabulary_size: int = 300, **corpus: Any
    ):
        self.directory = Path(directory)
        self.corpus = make_corpus(self.directory / "corpus", texts, **corpus)
        self.tokenizer = make_tokenizer(self.directory / "tokenizer", self.corpus, vocabulary_size)

    def store(self, store: StoreSettings) -> Path:
        path = self.directory / "tokens" / store.directory
        if not (path / "manifest.json").exists():
            make_store(path.parent, self.corpus, self.tokenizer, store)
        return path

    def inputs(self, run: RunSettings) -> Inputs:
        store = self.store(run.store) if run.store else None
        return Inputs(
            self.corpus,
            self.tokenizer,
            store,
            self.store(run.validation_store) if run.validation.rows else None,
        )

    def batches(self, run: RunSettings, rank: int = 0, world_size: int = 1) -> Batches:
        store = self.store(run.store) if run.store else None
        return open_batches(
            run, Inputs(self.corpus, self.tokenizer, store, rank=rank, world_size=world_size)
        )


class GrammarLab(Lab):
    """As `Lab`, of sentences of the grammar and their translations."""

    def __init__(self, directory: Path, settings: CorpusSettings, vocabulary_size: int):
        self.directory = directory
        self.corpus = directory / "corpus"
        build(settings, self.corpus)
        self.tokenizer = make_tokenizer(directory / "tokenizer", self.corpus, vocabulary_size)


def words_lab(directory: Path, texts: int = 120, share: float = 0.2) -> Lab:
    """Texts that a model can learn: few words, lengths from nothing to several rows."""
    pick = random.Random(0)
    texts = [
        " ".join(pick.choices(WORDS, k=pick.choice([0, 3, 10, 30, 200]))) for _ in range(texts)
    ]
    return Lab(directory, texts, validation_share=share)


def sentence_lab(directory: Path, texts: int, longest: int) -> Lab:
    """Documents that begin anywhere in one sentence said again and again: what a tiny model learns
    in a few steps.
    """
    words = [
        "a",
        "model",
        "learns",
        "which",
        "word",
        "comes",
        "next",
        "because",
        "the",
        "same",
        "words",
        "come",
        "again",
        "in",
        "the",
        "same",
        "order",
    ]
    pick = random.Random(0)
    texts = [
        " ".join((words * 9)[(k := pick.randrange(16)) : k + pick.randrange(2, longest)])
        for _ in range(texts)
    ]
    return Lab(directory, texts, validation_share=0.2)


def same(a: Batch, b: Batch) -> bool:
    """Whether two batches are equal bit for bit, types and counts included."""
    arrays = all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in ((a.tokens_bt, b.tokens_bt), (a.labels_bt, b.labels_bt))
    )
    counts = (a.useful_tokens, a.total_tokens, a.order_digest) == (
        b.useful_tokens,
        b.total_tokens,
        b.order_digest,
    )
    ids = [ids for ids in (a.document_ids_bt, b.document_ids_bt) if ids is not None]
    return arrays and counts and (len(ids) < 2 or np.array_equal(*ids))


def take(batches: Batches, steps: int) -> list[Batch]:
    return [batches.next().copy() for _ in range(steps)]


def check_order(
    opened: Callable[[int, int], Batches], worlds: Iterable[int], stop: int, wrap=lambda x: x
) -> None:
    """Any number of ranks reads on as one, from the state of each of three that stopped (JSON)."""
    alone = opened(0, 1)
    ranks = [wrap(opened(rank, 3)) for rank in range(3)]
    for each in (alone, *ranks):
        take(each, stop)
    states = [json.loads(json.dumps(rank.state())) for rank in ranks]
    assert states == [alone.state()] * 3 == [{"step": stop}] * 3
    expected = take(alone, 12)
    for ended in (rank for rank in ranks if hasattr(rank, "close")):
        ended.close()
    for world in worlds:
        resumed = [opened(rank, world) for rank in range(world)]
        for rank in resumed:
            rank.seek(states[0])
        assert [rank.state() for rank in resumed] == states[:1] * world
        for batch in expected:
            parts = [rank.next() for rank in resumed]
            sizes = [part.tokens_bt.shape for part in parts]
            assert same(joined(parts), batch) and max(sizes)[0] - min(sizes)[0] <= 1


def joined(parts: Sequence[Batch]) -> Batch:
    ids = [part.document_ids_bt for part in parts]
    return Batch(
        np.concatenate([p.tokens_bt for p in parts]),
        np.concatenate([p.labels_bt for p in parts]),
        sum(p.useful_tokens for p in parts),
        sum(p.total_tokens for p in parts),
        sum(p.order_digest for p in parts) % MODULUS,
        None if ids[0] is None else np.concatenate(ids),
    )


def flip_bit(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def texts_of(corpus: Path, split: str = "train") -> list[str]:
    text = RawText(corpus, split)
    return [text.text(i) for i in range(len(text))]


def documents_of(lab: Lab, eos: bool = False) -> list[np.ndarray]:
    """The ids of each training document."""
    return encode_documents(load_tokenizer(lab.tokenizer), texts_of(lab.corpus), eos)


def held_out(text: str, share: float) -> bool:
    return assign_split(hashlib.sha256(text.encode("utf-8")).digest(), share) == "validation"
