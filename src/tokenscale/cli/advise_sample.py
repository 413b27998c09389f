"""What one's own text is like, measured on a sample: lengths in tokens, time to tokenize, bytes in every format."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.data.corpus.sample import Sample
from tokenscale.data.stores.documents import Chunk, Origin, frame_documents
from tokenscale.data.stores.manifest import load_format
from tokenscale.data.tokenizers.base import Tokenizer
from tokenscale.settings import flags
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.options import option
from tokenscale.settings.registry import FORMATS


@dataclass(frozen=True)
class AdviceSettings:
    """What a person says about the training."""

    tokenizer: str = option(
        "tekken",
        "a folder, a name below results/tokenizers, tekken, or NAME@COMMIT of the Hugging Face hub",
        metavar="NAME",
    )
    sequence_length: int = option(2048, "positions a row", ge=8)
    tokens_per_second: float | None = option(
        None, "what one rank trains on in a second, padding counted, when it never waits for data", gt=0
    )
    epochs: float = option(1.0, "passes over the data", gt=0)
    documents: int = option(5000, "how many to look at", ge=2, le=100_000)
    text_column: str = option("text", "Parquet and JSON lines: column or key of the text", metavar="NAME")
    separator: str | None = option(
        None, r"what stands between the documents of a text file, such as '<|endoftext|>' or '\n' (default: it is one)"
    )
    json: str | None = option(None, "write the same facts to this file", metavar="FILE")


FLAGS = flags.build_flags(AdviceSettings)


#: documents that the tokenizer gets at a time, as `pretokenize` does it
BATCH_DOCUMENTS = 100
#: files of a store that hardly grow with it; formats that are unpacked before a training reads them
BYTES_ONCE, NOT_READ = ("ranking.bin",), ("archive",)


@dataclass(frozen=True)
class Measured:
    """What was found on the sample. Lengths are tokens with the one BOS; times are seconds of one core."""

    sample: Sample
    tokenizer: Tokenizer
    lengths: np.ndarray  # int64 [documents]
    text_bytes: np.ndarray  # int64 [documents]
    batch_tokens: np.ndarray  # of each timed batch
    batch_s: np.ndarray
    stored: dict[str, "Stored"]


@dataclass(frozen=True)
class Stored:
    """A sample in one format."""

    bytes_each: np.ndarray  # [documents]; with `bytes_once`, their sum is what the files take
    bytes_once: int  # what more documents hardly add to
    write_s: float
    read_s: float | None  # None: trainings do not read it


class SampleDocuments:
    """A sample's ids, as the writers of formats take documents (see `formats.documents.Documents`)."""

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
        """Documents `first` to `last`, a row group at a time."""
        for start in range(first, last, 1000):
            yield self.chunk.part(start, min(start + 1000, last))

    def confirm(self) -> None:
        """Ids of a sample are kept by nobody."""


def measure(found: Sample, tokenizer: Tokenizer, sequence_length: int, folder: Path) -> Measured:
    """Tokenize the sample, and write it in every format with the format's own writer, below `folder`."""
    batches = [found.texts[i : i + BATCH_DOCUMENTS] for i in range(0, len(found.texts), BATCH_DOCUMENTS)]
    tokenizer.encode_batch(batches[0])  # what an engine does once
    documents: list[np.ndarray] = []
    batch_s, batch_tokens = [], []
    for batch in batches:
        start = time.process_time()
        ids = tokenizer.encode_batch(batch)
        batch_s.append(time.process_time() - start)
        batch_tokens.append(sum(map(len, ids)))
        documents += ids
    timed = slice(1, None) if len(batches) > 1 else slice(None)  # the first one was seen before
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    chunk = frame_documents(np.concatenate(documents).astype(np.int32), lengths, tokenizer.bos_id, None)
    return Measured(
        found,
        tokenizer,
        chunk.lengths,
        np.array([len(text.encode()) for text in found.texts], dtype=np.int64),
        np.array(batch_tokens[timed], dtype=float),
        np.maximum(batch_s[timed], 1e-9),
        {name: _stored(name, chunk, tokenizer, sequence_length, folder / name) for name in FORMATS},
    )


def _stored(name: str, chunk: Chunk, tokenizer: Tokenizer, sequence_length: int, folder: Path) -> Stored:
    """The sample in one format, measured.

    A document's share of the files: in `packed` that of its tokens, else that of its ids, each compressed alone.
    """
    store = StoreSettings(name, sequence_length=sequence_length)
    writer = load_format(name)
    seconds = []
    twice_two = (chunk.part(0, 2), chunk.part(0, 2))  # what is done once, and what any store takes
    for number, some in enumerate((*twice_two, chunk)):
        start = time.process_time()
        manifest = writer.write(store, SampleDocuments(some, tokenizer), folder / str(number))
        seconds.append(time.process_time() - start)
    folder, write_s = folder / "2", max(1e-9, seconds[2] - seconds[1])
    paths = [folder / file["name"] for file in manifest["files"]]
    start = time.process_time()
    for path in paths:
        if path.suffix == ".parquet":
            file = pq.ParquetFile(path)
            for number in range(file.num_row_groups):
                file.read_row_group(number, use_threads=False)
        else:
            np.fromfile(path, dtype=np.uint8)
    read_s = time.process_time() - start
    each = chunk.lengths.astype(float)
    if {"codec", "level"} & store.options().keys():  # else a document takes what its ids do
        codec = pa.Codec(store.codec, compression_level=store.codec_level)
        kept = sequence_length + 1 if name == "padded" else None
        each = np.array([len(codec.compress(ids[:kept], asbytes=True)) for ids in chunk.documents()], dtype=float)
    once = sum(path.stat().st_size for path in paths if path.name in BYTES_ONCE)
    size = sum(path.stat().st_size for path in paths)
    return Stored(each / each.sum() * (size - once), once, write_s, None if name in NOT_READ else read_s)


# -- estimates
