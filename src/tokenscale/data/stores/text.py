"""Documents of a corpus, tokenized."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tokenscale.base.errors import UserError
from tokenscale.base.files import sha256_file
from tokenscale.data.corpus.raw_text import PAIR, RawText, text_bytes
from tokenscale.data.stores.documents import Chunk, Origin, frame_documents, frame_pairs
from tokenscale.data.tokenizers.backends import REFERENCE, EngineTokenizer
from tokenscale.data.tokenizers.base import Texts, Tokenizer
from tokenscale.data.tokenizers.losses import draw_sample, measure, take_sample

#: bytes of text per call of an engine
BATCH_BYTES = 4 << 20
#: every so many documents of the sample, the engine is compared with the reference, which is slow
COMPARED = 4


def encode_documents(
    tokenizer: Tokenizer, texts: Texts, eos: bool, pairs: bool = False
) -> list[np.ndarray]:
    """Tokenize texts to [BOS] + ids (+ [EOS]), int32; pairs to BOS + source + EOS + target + EOS;
    see `check_eos`.
    """
    return list(
        encode_chunk(
            tokenizer,
            texts,
            eos=eos,
            pairs=pairs,
        ).documents()
    )


def encode_chunk(tokenizer: Tokenizer, texts: Texts, eos: bool, pairs: bool = False) -> Chunk:
    """Tokenize texts to one chunk; see `encode_documents`."""
    check_eos(tokenizer, eos, pairs=pairs)
    ids, lengths = tokenizer.encode(split_pairs(texts) if pairs else texts)
    if pairs:
        assert tokenizer.eos_id is not None  # checked above: pairs need EOS
        return frame_pairs(
            ids,
            lengths,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
        )
    return frame_documents(
        ids,
        lengths,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id if eos else None,
    )


def split_pairs(pairs: Texts) -> Texts:
    """Split pairs at `PAIR` into source, target, source, target, …"""
    if isinstance(pairs, pa.Array):
        import pyarrow.compute as pc  # takes a while to import

        return pc.split_pattern(pairs, PAIR).flatten()
    return [part for pair in pairs for part in pair.split(PAIR)]


def check_eos(tokenizer: Tokenizer, eos: bool, pairs: bool = False) -> None:
    """Raise UserError if EOS is required and the tokenizer has none, or if pairs are encoded
    without EOS.
    """
    if pairs and not eos:
        raise UserError(
            "pairs need EOS after both parts.", key="eos", found="false", next="set eos: true"
        )
    if eos and tokenizer.eos_id is None:
        next_step = "set `eos` of the tokenizer, or `eos: false` for the run"
        raise UserError(
            f"the tokenizer {tokenizer.name} has no end-of-document token.",
            key="eos",
            next=next_step,
        )


@dataclass(frozen=True)
class TextDoor:
    """The way from a text to ids that every reader of text takes: writers of stores, approaches that
    tokenize while training, `evaluate`, `generate`, BLEU and `advise`.

    Opening it measures what the tokenizer loses of a sample of the text (`losses`), and raises
    UserError as `tokenizers.losses.measure`: by the same bounds and in the same words for every
    reader. `check_eos` is called, too.
    """

    tokenizer: Tokenizer
    eos: bool
    pairs: bool
    #: counts of `tokenizers.losses.measure`
    losses: dict[str, Any]

    def __post_init__(self) -> None:
        check_eos(self.tokenizer, eos=self.eos, pairs=self.pairs)

    @classmethod
    def of_corpus(cls, tokenizer: Tokenizer, text: RawText, eos: bool) -> "TextDoor":
        """Measure documents from all over a split of a corpus."""
        sample = draw_sample(text.directory, text.name)
        losses = measure(tokenizer, sample, corpus=text.manifest["name"])
        return cls(tokenizer, eos, text.pairs, losses)

    @classmethod
    def of_texts(
        cls, tokenizer: Tokenizer, texts: Iterable[str], name: str, eos: bool = False
    ) -> "TextDoor":
        """Measure pieces from all over the texts, which `name` is shown for in messages."""
        losses = measure(tokenizer, take_sample(texts), corpus=name)
        return cls(tokenizer, eos, False, losses)

    def encode(self, texts: Texts) -> Chunk:
        return encode_chunk(self.tokenizer, texts, eos=self.eos, pairs=self.pairs)


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[str], name: str, eos: bool = False
) -> list[np.ndarray]:
    """Return the ids of each prompt, BOS first, int32. Each is a text of its own: none may be lost
    because others are kept. Raises UserError as `TextDoor`.
    """
    doors = [TextDoor.of_texts(tokenizer, [prompt], name, eos) for prompt in prompts]
    return [door.encode([prompt]).ids for door, prompt in zip(doors, prompts, strict=True)]


class EngineDiffers(UserError):
    """Raised when an engine gives other ids than the reference."""


def _no_documents(manifest: dict[str, Any], split: str, corpus: Path) -> UserError:
    """Return the error for a split without documents, with the key that gives it some."""
    counts = manifest["cleaning"]["documents"]
    share = manifest["validation_share"]
    key = f"corpora.{manifest['name']}"
    kept = sum(each["rows"] for each in manifest["splits"].values())
    found = (
        f"{kept} documents, of {counts['read']} that were read; {counts['duplicates']} "
        "duplicates were dropped"
    )
    following = "add documents to the files of this split"
    if share is not None:  # the source has no files for validation
        following = (
            f"set {key}.validation_share above {share:g}, to 0.5 for example"
            if kept > 1
            else "add documents"
        )
    if counts["duplicates"]:
        following += f"; {key}.cleaning.deduplicate: false keeps duplicates"
    key = f"{key}.validation_share" if share is not None else f"{key}.source.validation_files"
    return UserError(
        f"the corpus has no {split} documents.", corpus=corpus, key=key, found=found, next=following
    )


def describe_origin(tokenizer: Tokenizer, source: dict[str, Any]) -> Origin:
    """Return the origin of ids that this tokenizer made from a source."""
    return Origin(
        tokenizer={
            "name": tokenizer.name,
            "kind": tokenizer.kind,
            "file_sha256": tokenizer.file_sha256,
        },
        **{
            name: getattr(tokenizer, name)
            for name in ("vocabulary_size", "bos_id", "eos_id", "pad_id")
        },
        source=source,
        engine=" ".join(filter(None, (tokenizer.engine, tokenizer.engine_version))),
    )


class HeldDocuments:
    """Tokenized documents in memory, as input of every format's writer; see
    `documents.Documents`.
    """

    def __init__(self, chunk: Chunk, origin: Origin):
        self.chunk = chunk
        self.origin = origin
        self.report: Callable[[int, int], None] | None = None

    def __len__(self) -> int:
        return len(self.chunk.lengths)

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        yield self.chunk.part(first, last)

    def confirm(self) -> None:
        """Do nothing, since the engine is exact."""


class TextDocuments:
    """Tokenized documents of a corpus split; see `documents.Documents`.

    Opening them raises UserError if the tokenizer loses too much of this text (`TextDoor`). While
    the first chunks are tokenized, a thread compares the engine with the reference on a sample;
    `confirm` waits for the result. (It is compared on fuzz texts when the tokenizer is built or
    loaded.)

    `report(documents, utf8_bytes)` is called for each batch.
    """

    def __init__(
        self,
        corpus_directory: Path,
        tokenizer: Tokenizer,
        split: str,
        eos: bool,
        report: Callable[[int, int], None] | None = None,
        batch_documents: int | None = None,
    ):
        self.text = RawText(corpus_directory, split)
        if len(self.text) == 0:
            raise _no_documents(self.text.manifest, split, corpus=corpus_directory)
        self._door = TextDoor.of_corpus(tokenizer, self.text, eos)
        self.tokenizer = tokenizer
        self.report = report
        mean = max(1, self.text.split["utf8_bytes"] // max(1, len(self.text)))
        self.batch_documents = batch_documents or max(1, min(BATCH_BYTES // mean, 100_000))
        source = {
            "corpus_manifest_sha256": sha256_file(Path(corpus_directory) / "manifest.json"),
            "text_sha256": self.text.split["text_sha256"],
            **({"document_parts": "source, EOS, target"} if self.text.pairs else {}),
            "text_sample": self._door.losses,
        }
        self.origin = describe_origin(tokenizer, source)
        self._comparison_pool = ThreadPoolExecutor(1, "gate")
        self._comparison: Future | None = None

    def __len__(self) -> int:
        return len(self.text)

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        """Yield documents [first, last). One batch is tokenized while the previous one is
        written.
        """
        if self._comparison is None:
            self._comparison = self._comparison_pool.submit(self._compare_engines)
        columns = self.text.columns(self.batch_documents, first, last)
        with ThreadPoolExecutor(1, "encode") as pool:
            ahead = [pool.submit(self._encode, column) for column in islice(columns, 1)]
            while ahead:
                ahead += [pool.submit(self._encode, column) for column in islice(columns, 1)]
                chunk, utf8_bytes = ahead.pop(0).result()
                yield chunk
                if self.report is not None:
                    self.report(len(chunk.lengths), utf8_bytes)

    def confirm(self) -> None:
        """Raise EngineDiffers if any id of the sample differs from the reference's."""
        found = (
            self._comparison.result() if self._comparison is not None else self._compare_engines()
        )
        if found is not None:
            raise EngineDiffers(
                (
                    f"the engine {self.tokenizer.engine} gives other ids than {REFERENCE}: no "
                    "store "
                    "was written."
                ),
                corpus=self.text.directory,
                **found,
                next="use the engine auto, or tokenizers; and report it to the engine's authors",
            )

    def _encode(self, column: pa.Array) -> tuple[Chunk, int]:
        return self._door.encode(column), len(text_bytes(column)[0])

    def _compare_engines(self) -> dict[str, str] | None:
        """Compare the engine with the reference on the sample; None if there is no difference."""
        if not isinstance(self.tokenizer, EngineTokenizer) or self.tokenizer.engine == REFERENCE:
            return None
        sample = draw_sample(self.text.directory, self.text.name)
        return self.tokenizer.difference(sample[::COMPARED])
