"""Measure a sample of text: lengths in tokens, tokenization time, and bytes in every format."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from tokenscale.data.corpus.sample import Sample
from tokenscale.data.stores.documents import Chunk, Origin, frame_documents
from tokenscale.data.stores.manifest import load_writer
from tokenscale.data.tokenizers.base import Tokenizer
from tokenscale.settings import flags
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.options import option, settings_class
from tokenscale.settings.registry import FORMATS


@settings_class
class AdviceSettings:
    """Settings of the planned training, and of the sample."""

    tokenizer: str = option(
        "tekken",
        "folder, name below results/tokenizers, tekken, or NAME@COMMIT of the Hugging Face hub",
        metavar="NAME",
        path=True,
    )
    sequence_length: int = option(2048, "positions a row", ge=8)
    tokens_per_second: float | None = option(
        None, "tokens that one rank trains on per second, padding included, if it never waits for data", gt=0
    )
    documents: int = option(5000, "documents in the sample", ge=2, le=100_000)
    text_column: str = option("text", "Parquet and JSON lines: column or key of the text", metavar="NAME")
    separator: str | None = option(
        None,
        r"what stands between the documents of a text file, such as '<|endoftext|>' or '\n' (default: it is one)",
        min_length=1,
    )
    json: str | None = option(None, "write the same facts to this file", metavar="FILE", path=True)


FLAGS = flags.build_flags(AdviceSettings)


#: documents per call of the tokenizer, as in `pretokenize`
BATCH_DOCUMENTS = 100


@dataclass(frozen=True)
class SampleMeasurements:
    """Measurements of the sample. Lengths are in tokens with one BOS; times are seconds of one core."""

    sample: Sample
    tokenizer: Tokenizer
    lengths: np.ndarray  # int64 [documents]
    text_bytes: np.ndarray  # int64 [documents]
    batch_tokens: np.ndarray  # of each timed batch
    batch_s: np.ndarray
    #: format → bytes of each document; their sum is what the files take
    stored: dict[str, np.ndarray]


class SampleDocuments:
    """Ids of a sample, with the interface that the writers of formats read (see `data.stores.documents.Documents`)."""

    def __init__(self, chunk: Chunk, tokenizer: Tokenizer):
        self.chunk = chunk
        self.origin = Origin(
            tokenizer={"name": tokenizer.name, "kind": tokenizer.kind, "file_sha256": tokenizer.file_sha256},
            vocabulary_size=tokenizer.vocabulary_size,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            source={"sample": "of advise"},
        )

    def __len__(self) -> int:
        return len(self.chunk.lengths)

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        """Yield documents `first` to `last`, one row group at a time."""
        for start in range(first, last, 1000):
            yield self.chunk.part(start, min(start + 1000, last))

    def confirm(self) -> None:
        """Do nothing: a sample's ids are not kept."""


def measure(found: Sample, tokenizer: Tokenizer, sequence_length: int, folder: Path) -> SampleMeasurements:
    """Tokenize the sample and write it in every format with the format's own writer, below `folder`."""
    batches = [found.texts[i : i + BATCH_DOCUMENTS] for i in range(0, len(found.texts), BATCH_DOCUMENTS)]
    tokenizer.encode_batch(batches[0])  # warm-up of the engine
    documents: list[np.ndarray] = []
    batch_s, batch_tokens = [], []
    for batch in batches:
        start = time.process_time()
        ids = tokenizer.encode_batch(batch)
        batch_s.append(time.process_time() - start)
        batch_tokens.append(sum(map(len, ids)))
        documents += ids
    timed = slice(1, None) if len(batches) > 1 else slice(None)  # the first batch was encoded in the warm-up
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    chunk = frame_documents(np.concatenate(documents).astype(np.int32), lengths, tokenizer.bos_id, None)
    return SampleMeasurements(
        found,
        tokenizer,
        chunk.lengths,
        np.array([len(text.encode()) for text in found.texts], dtype=np.int64),
        np.array(batch_tokens[timed], dtype=float),
        np.maximum(batch_s[timed], 1e-9),
        {name: _measure_format(name, chunk, tokenizer, sequence_length, folder / name) for name in FORMATS},
    )


def _measure_format(name: str, chunk: Chunk, tokenizer: Tokenizer, sequence_length: int, folder: Path) -> np.ndarray:
    """Write the sample in one format and return the bytes of each document.

    The bytes of a file are divided among the documents: in `packed` and in records files by their tokens, otherwise by
    their separately compressed ids.
    """
    store = StoreSettings(name, sequence_length=sequence_length)
    manifest = load_writer(name)(store, SampleDocuments(chunk, tokenizer), folder)
    paths = [folder / file["name"] for file in manifest["files"]]
    each = chunk.lengths.astype(float)
    if "codec" in store.options():  # otherwise bytes are proportional to ids
        codec = pa.Codec(store.codec, compression_level=store.codec_level)
        kept = sequence_length + 1 if name == "padded" else None
        each = np.array([len(codec.compress(ids[:kept], asbytes=True)) for ids in chunk.documents()], dtype=float)
    size = sum(path.stat().st_size for path in paths)
    bytes_each = each / each.sum() * size
    records = sum(file["bytes"] for file in manifest.get("records", {}).get("files", []))
    bytes_each += chunk.lengths / chunk.lengths.sum() * records
    return bytes_each
