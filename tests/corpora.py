"""Tiny corpora, tokenizers and stores for tests, built by the code that builds real ones."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenscale.data.batches.batch import Batch, Batches, Inputs
from tokenscale.data.batches.open import open_batches
from tokenscale.data.corpus.build import assign_split, build_from
from tokenscale.data.order.permutation import MODULUS
from tokenscale.data.stores.writing import write_store
from tokenscale.data.tokenizers.load import build as build_tokenizer
from tokenscale.settings.data import CleaningSettings, CorpusSettings, SourceSettings, StoreSettings, TokenizerSettings
from tokenscale.settings.run import RunSettings

GRAMMAR = Path(__file__).parents[1] / "config/corpora/grammar"
DESCRIPTION = {"kind": "test", "packages": [{"name": "texts", "version": "1"}]}

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
    """Texts of distinct letters whose token counts lie at every border of a row, with the byte tokenizer of 259 ids.

    Each letter below is a token of its own there, so a text of n letters makes a document of n + 1 tokens.
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    sizes = [*range(0, 4), *range(sequence_length - 3, sequence_length + 4), 2 * sequence_length - 1]
    sizes += [2 * sequence_length, 2 * sequence_length + 1, 3 * sequence_length, 7 * sequence_length + 5]
    return ["".join(letters[(n * 7 + k * k) % 26] for k in range(size)) for n, size in enumerate(sizes)]


def make_corpus(
    directory: Path,
    texts: Sequence[str],
    *,
    name: str = "tiny",
    validation_share: float = 1e-9,
    row_group_rows: int = 7,
    description: dict[str, Any] | None = None,
    cleaning: CleaningSettings | None = None,
) -> Path:
    """A corpus of these texts, none dropped or changed by default, nearly surely all in the training split."""
    settings = CorpusSettings(
        name=name,
        cleaning=cleaning or CleaningSettings(strip=False, minimum_characters=0, deduplicate=False),
        validation_share=validation_share,
        row_group_rows=row_group_rows,
    )
    documents = ((text, f"texts::{i}") for i, text in enumerate(texts))
    build_from(documents, settings, Path(directory), description or DESCRIPTION)
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


def make_tokenizer(directory: Path, corpus_directory: Path, vocabulary_size: int = 300, name: str = "bpe") -> Path:
    """A byte-level BPE of the corpus. Needs the package tokenizers; with little text it gets fewer ids."""
    settings = TokenizerSettings(name=name, kind="bpe", corpus="tiny", vocabulary_size=vocabulary_size)
    build_tokenizer(settings, Path(directory), corpus_directory)
    return Path(directory)


def make_store(directory: Path, corpus_directory: Path, tokenizer_directory: Path, store: StoreSettings | str) -> Path:
    """A store in `directory`/<its name>; the store by its settings or by its name."""
    store = StoreSettings.parse(store) if isinstance(store, str) else store
    path = Path(directory) / store.directory
    write_store(store, corpus_directory, tokenizer_directory, path)
    return path


def make_run(approach: str, sequence_length: int, **changes: Any) -> RunSettings:
    tokenizer = TokenizerSettings(name="bpe", kind="bpe", corpus="tiny", vocabulary_size=300)
    return RunSettings(approach=approach, sequence_length=sequence_length, tokenizer=tokenizer, **changes)


class Lab:
    """A corpus, its tokenizer, and stores made when first asked for, in one folder."""

    def __init__(self, directory: Path, texts: Sequence[str], vocabulary_size: int = 300, **corpus: Any):
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
            self.corpus, self.tokenizer, store, self.store(run.validation_store) if run.validation.rows else None
        )

    def batches(self, run: RunSettings, rank: int = 0, world_size: int = 1) -> Batches:
        store = self.store(run.store) if run.store else None
        return open_batches(run, Inputs(self.corpus, self.tokenizer, store, rank=rank, world_size=world_size))


def same(a: Batch, b: Batch) -> bool:
    """Whether two batches are equal bit for bit, types and counts included."""
    arrays = all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in ((a.tokens_bt, b.tokens_bt), (a.labels_bt, b.labels_bt))
    )
    counts = (a.useful_tokens, a.total_tokens, a.order_digest) == (b.useful_tokens, b.total_tokens, b.order_digest)
    return arrays and counts


def joined(parts: Sequence[Batch]) -> Batch:
    import numpy as np

    return Batch(
        np.concatenate([p.tokens_bt for p in parts]),
        np.concatenate([p.labels_bt for p in parts]),
        sum(p.useful_tokens for p in parts),
        sum(p.total_tokens for p in parts),
        sum(p.order_digest for p in parts) % MODULUS,
    )


def held_out(text: str, share: float) -> bool:
    return assign_split(hashlib.sha256(text.encode("utf-8")).digest(), share) == "validation"
