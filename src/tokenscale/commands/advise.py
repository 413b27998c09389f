"""What a person's own text asks for: how much of a row would be padding, what tokens cost, which format to choose.

All of it from a sample of documents, measured here: they are tokenized, packed, and written by each format's own writer
into a folder that is thrown away. What comes from the sample carries a 95 % interval: 200 resamples of documents (of
row groups or stretches of a file, where only some were looked at), shrunk by what share of all documents was seen.
"""

import importlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.commands.advice_words import Estimate, as_times, percent
from tokenscale.commands.pretokenize import in_flags, unescaped
from tokenscale.corpus.paths import expand
from tokenscale.corpus.sample import Sample, sample
from tokenscale.costs import data as costs
from tokenscale.errors import UserError
from tokenscale.formats.documents import Chunk, Origin, framed
from tokenscale.order.packing import best_fit_decreasing, cut
from tokenscale.settings import flags
from tokenscale.settings.data import SourceSettings, StoreSettings
from tokenscale.settings.options import option
from tokenscale.settings.registry import FORMATS
from tokenscale.tokenizer.base import Tokenizer
from tokenscale.tokenizer.build import build
from tokenscale.tokenizer.load import load
from tokenscale.tokenizer.named import BUILT, named

LENGTHS = (512, 1024, 2048, 4096, 8192)
RESAMPLES = 200
#: of the packing, which is done anew for each
PACKINGS = 50
SEED = 0
#: documents that the tokenizer gets at a time, as `pretokenize` does it
BATCH_DOCUMENTS = 100
#: of fewer long documents in the sample, resamples say too little: how many there could be is bounded by their count
FEW = 30
#: files of a store that hardly grow with it; formats that are unpacked before a training reads them
BYTES_ONCE, NOT_READ = ("ranking.bin",), ("archive",)
#: below this gain in useful tokens, and with fewer tokens cut, rows of one document are as good as packed ones
LEAST_GAIN, LEAST_CUT = 0.02, 0.001


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


FLAGS = flags.leaves(AdviceSettings)


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


def advise(settings: AdviceSettings, files: tuple[str, ...], say: Callable[[str], None] = print) -> dict[str, Any]:
    """Every fact, as `--json` writes it; `advice_words.render` makes text of it. `say` hears what takes long.

    Raises UserError for files and tokenizers that cannot be had, and for a data set of fewer than two documents.
    """
    source = SourceSettings(
        kind="files",
        files=files,
        text_column=settings.text_column,
        separator=None if settings.separator is None else unescaped(settings.separator),
    )
    try:
        paths = expand(files)
        found = sample(paths, source, settings.documents, SEED)
    except UserError as error:
        raise _in_flags(error) from None
    with tempfile.TemporaryDirectory(prefix="tokenscale-") as folder:
        tokenizer = _tokenizer(settings.tokenizer, Path(folder), say)
        measured = measure(found, tokenizer, settings.sequence_length, Path(folder))
    size = sum(path.stat().st_size for path in paths)
    return _facts(settings, [str(path) for path in paths], size, measured)


def _in_flags(error: UserError) -> UserError:
    error = in_flags(error)
    facts = {label: text for label, text in error.facts.items() if (label, text) != ("flag", "source.files")}
    what = error.what.replace("a source's", "the").replace("a source names", "the input names")
    return UserError(what.replace("a source file", "a file"), **facts)


def _tokenizer(name: str, folder: Path, say: Callable[[str], None]) -> Tokenizer:
    try:
        asked = named(name)
    except UserError as error:
        facts = {label: text.replace("--tokenizer-name", "--tokenizer") for label, text in error.facts.items()}
        raise UserError(error.what, **facts) from None
    if asked.note:
        say(asked.note)
    directory = asked.directory
    if directory is None or not (directory / "manifest.json").is_file():
        directory = folder / asked.settings.name
        say(f"making the tokenizer {asked.settings.name}: there is none in {BUILT}")
        build(asked.settings, directory)
    tokenizer = load(directory)
    for note in getattr(tokenizer, "notes", ()):  # which faster engines were passed over, and why
        say(note)
    return tokenizer


# -- measuring


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
            created="undated",
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
    chunk = framed(np.concatenate(documents).astype(np.int32), lengths, tokenizer.bos_id, None)
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
    writer = importlib.import_module(FORMATS[name])
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
    if name != "packed":
        codec = pa.Codec(store.codec, compression_level=store.codec_level)
        kept = sequence_length + 1 if name == "padded" else None
        each = np.array([len(codec.compress(ids[:kept], asbytes=True)) for ids in chunk.documents()], dtype=float)
    once = sum(path.stat().st_size for path in paths if path.name in BYTES_ONCE)
    size = sum(path.stat().st_size for path in paths)
    return Stored(each / each.sum() * (size - once), once, write_s, None if name in NOT_READ else read_s)


# -- estimates


class _Estimator:
    """Estimates from the documents of a sample and resamples of them."""

    def __init__(self, measured: Measured):
        found = measured.sample
        self.measured, self.lengths = measured, measured.lengths
        self.weights = costs.resampled(found.units, found.unit_count, RESAMPLES, SEED)
        # finite population: what was seen is certain
        seen = len(found.texts) / found.documents if found.counted and found.unit_count == len(found.texts) else 0.0
        self.unseen = math.sqrt(max(0.0, 1 - seen))
        self.documents = found.documents
        count = len(measured.batch_s)
        batches = costs.resampled(np.arange(count), count, RESAMPLES, SEED + 1)
        #: tokens a second and core, and the same of each resample
        self.speed = float(costs.ratio(measured.batch_tokens, measured.batch_s))
        self.speeds = costs.ratio(measured.batch_tokens, measured.batch_s, batches)

    def of(self, function: Callable[[np.ndarray | None], Any]) -> Estimate:
        """Of a function of weights."""
        return self.spread(float(function(None)), function(self.weights))

    def total(self, per_document: np.ndarray) -> Estimate:
        """Of a sum over all documents of the data set."""
        mean = float(costs.mean(per_document))
        if self.measured.sample.counted:
            return self.spread(mean * self.documents, costs.mean(per_document, self.weights) * self.documents)
        scale = self.documents / len(per_document)  # how many documents there are is estimated, too
        return self.spread(mean * self.documents, self.weights @ np.asarray(per_document, dtype=float) * scale)

    def spread(self, value: float, values: np.ndarray, certain: bool = True) -> Estimate:
        """Value and interval; `certain`: known exactly where every document was seen."""
        low, high = costs.interval(values)
        if certain:
            low, high = (value + (bound - value) * self.unseen for bound in (low, high))
        return Estimate(value, min(low, value), max(high, value))

    def of_speed(self, function: Callable[[Any], Any]) -> Estimate:
        """Of a function of the tokenizer's tokens a second and core."""
        return self.spread(float(function(self.speed)), function(self.speeds), certain=False)

    def fill(self, sequence_length: int) -> Estimate:
        """Share of useful positions in packed rows.

        The more documents, the better they fit: what is left open falls about as one over their number. So what a half
        of the sample loses against the whole is what all documents gain (and a third of what a quarter loses); the
        upper end counts it three times more, up to rows without a free place.
        """
        lengths = self.lengths
        value = filled(lengths, sequence_length)
        if self.unseen == 0:
            return Estimate(value, value, value)
        lost = [value - np.mean([filled(lengths[i::k], sequence_length) for i in range(k)]) for k in (2, 4)]
        more = max(0.0, lost[0], lost[1] / 3) * max(0.0, 1 - len(lengths) / self.documents)
        drawn = (np.repeat(lengths, weights.astype(int)) for weights in self.weights[:PACKINGS])
        low, high = costs.interval([filled(some, sequence_length) for some in drawn])
        most = self.of(lambda w: costs.fill_at_most(lengths, sequence_length, w))
        row = sequence_length / (self.documents * max(1.0, float(np.mean(lengths - 1))))  # of all, one more or less
        value = min(most.value, value + more)
        return Estimate(value, min(value, low) - row, min(most.high, max(value, high) + 3 * more))


def filled(lengths: np.ndarray, sequence_length: int) -> float:
    """Share of useful positions where these documents are packed."""
    rows = len(best_fit_decreasing(cut(lengths, sequence_length)[2], sequence_length + 1)[1]) - 1
    return costs.fill(lengths, sequence_length, rows)


def _facts(settings: AdviceSettings, files: list[str], file_bytes: int, measured: Measured) -> dict[str, Any]:
    estimator = _Estimator(measured)
    lengths, wanted = measured.lengths, settings.sequence_length
    of_length = {t: _of_length(estimator, t) for t in sorted({*LENGTHS, wanted})}
    facts: dict[str, Any] = {
        "files": files,
        "file_bytes": file_bytes,
        "sampled": {
            "documents": len(lengths),
            "text_bytes": int(measured.text_bytes.sum()),
            "where": measured.sample.where,
            "every_document": estimator.unseen == 0.0,
        },
        "tokenizer": {
            "name": measured.tokenizer.name,
            "engine": " ".join(filter(None, (measured.tokenizer.engine, measured.tokenizer.engine_version))),
        },
        "sequence_length": wanted,
        "tokens_per_second": settings.tokens_per_second,
        "epochs": settings.epochs,
        "documents": estimator.total(np.ones(len(lengths))),
        "text_bytes": estimator.total(measured.text_bytes),
        "tokens": estimator.total(lengths),
        "tokens_per_document": estimator.of(lambda w: costs.mean(lengths, w)),
        "sequence_lengths": {str(t): row for t, row in of_length.items()},
        "formats": _of_formats(estimator, wanted, of_length[wanted]["fill_packed"]),
        "tokenizing": _of_tokenizing(estimator, settings.tokens_per_second),
    }
    if settings.tokens_per_second:
        facts["approaches"] = _of_approaches(estimator, settings, of_length[wanted]["fill_packed"].value)
    facts["choice"], facts["reason"] = _choice(of_length[wanted])
    facts["next"] = _next(facts, settings)
    return facts


def _of_length(estimator: _Estimator, t: int) -> dict[str, Any]:
    lengths = estimator.lengths
    fill = estimator.fill(t)
    padding = estimator.of(lambda w: costs.padding_share(lengths, t, w))
    cut_tokens = estimator.of(lambda w: costs.cut_share(lengths, t, w))
    cut_documents = estimator.of(lambda w: costs.cut_documents_share(lengths, t, w))
    seen = int(np.count_nonzero(lengths - 1 > t))
    if seen == 0:  # resamples of a sample without long documents hold none
        share, tokens = costs.unseen_cut(lengths)
        cut_tokens = Estimate(0.0, 0.0, tokens * estimator.unseen)
        cut_documents = Estimate(0.0, 0.0, share * estimator.unseen)
    elif seen < FEW:
        cut_tokens, cut_documents = (
            Estimate(
                e.value, e.low, max(e.high, e.value * (1 + (costs.count_at_most(seen) / seen - 1) * estimator.unseen))
            )
            for e in (cut_tokens, cut_documents)
        )
    gain = estimator.of(lambda w: fill.value / (1 - costs.padding_share(lengths, t, w)))
    return {
        "padding": padding,
        "cut": cut_tokens,
        "cut_documents": cut_documents,
        "fill_packed": fill,
        "gain": Estimate(gain.value, gain.low * fill.low / fill.value, gain.high * fill.high / fill.value),
    }


def _of_formats(estimator: _Estimator, t: int, fill: Estimate) -> dict[str, Any]:
    lengths, measured = estimator.lengths, estimator.measured
    tokens = float(lengths.sum())
    useful, kept = lengths - 1, np.minimum(lengths - 1, t)
    packed = estimator.total(useful)
    ends = (packed.low / fill.high, packed.high / fill.low)
    positions = {
        "padded": estimator.total(np.full(len(lengths), t)),
        "token-list": estimator.total(lengths),
        "packed": Estimate(packed.value / fill.value, *ends),
    }
    found = {}
    for name, stored in measured.stored.items():
        size, write_s, read_s = estimator.total(stored.bytes_each), stored.write_s, stored.read_s
        size = Estimate(*(n + stored.bytes_once for n in (size.value, size.low, size.high)))
        found[name] = {
            "tokens": positions.get(name, positions["token-list"]),
            "useful_tokens": estimator.total(kept if name == "padded" else useful),
            "bytes": size,
            "core_s_to_tokenize_and_write": estimator.spread(
                estimator.documents * (tokens / estimator.speed + write_s) / len(lengths),
                estimator.documents * (tokens / estimator.speeds + write_s) / len(lengths),
                certain=False,
            ),
        }
        if read_s is not None:
            found[name]["core_s_to_read"] = estimator.documents * read_s / len(lengths)
            found[name]["break_even_epochs"] = estimator.of_speed(
                lambda s, w=write_s, r=read_s: costs.break_even_epochs(tokens / s + w, tokens / s, r)
            )
    return found


def _of_tokenizing(estimator: _Estimator, rate: float | None) -> dict[str, Any]:
    measured = estimator.measured
    text_bytes_per_token = measured.text_bytes.sum() / max(1, (measured.lengths - 1).sum())
    found: dict[str, Any] = {
        "tokens_per_core_s": estimator.of_speed(lambda s: s),
        "text_bytes_per_core_s": estimator.of_speed(lambda s: s * text_bytes_per_token),
        "rate_at_stall_0.01": estimator.of_speed(lambda s: costs.rate_at_stall(0.01, s)),
        "rate_at_stall_0.1": estimator.of_speed(lambda s: costs.rate_at_stall(0.1, s)),
    }
    if rate:
        found["core_share"] = estimator.of_speed(lambda s: costs.core_share(rate, s))
        found["step_share"] = estimator.of_speed(lambda s: costs.stall_share(rate, s))
    return found


def _of_approaches(estimator: _Estimator, settings: AdviceSettings, fill: float) -> dict[str, Any]:
    """Times of each approach on one rank that does its data work in the training thread."""
    t, rate, lengths = settings.sequence_length, settings.tokens_per_second, estimator.lengths
    n, documents = len(lengths), estimator.documents
    stored = estimator.measured.stored
    rows = {  # (positions of each document, format that is read, useful tokens of each document)
        "padded": (np.full(n, t), None, np.minimum(lengths - 1, t)),
        "padding-free": (lengths, None, lengths - 1),
        "pretokenized-padded": (np.full(n, t), "padded", np.minimum(lengths - 1, t)),
        "token-list": (lengths, "token-list", lengths - 1),
        "packed": ((lengths - 1) / fill, "packed", lengths - 1),
    }
    found = {}
    for approach, (positions, form, useful) in rows.items():

        def times(weights, speed, positions=positions, form=form):
            count, tokens = costs.mean(positions, weights) * documents, costs.mean(lengths, weights) * documents
            if form is None:
                data_s, once_s = tokens / speed, 0.0 * tokens
            else:
                data_s, once_s = (
                    documents * stored[form].read_s / n,
                    tokens / speed + documents * stored[form].write_s / n,
                )
            epoch = costs.epoch_s(count, rate, data_s)
            return data_s / epoch, epoch, once_s + settings.epochs * epoch

        values, resamples = times(None, estimator.speed), times(estimator.weights, estimator.speeds)
        stall, epoch, all_s = (
            estimator.spread(float(v), r, certain=False) for v, r in zip(values, resamples, strict=True)
        )
        found[approach] = {
            "stall": stall,
            "epoch_s": epoch,
            "total_s": all_s,
            "useful_tokens_per_s": estimator.spread(
                float(costs.mean(useful)) * documents / values[1],
                costs.mean(useful, estimator.weights) * documents / resamples[1],
                certain=False,
            ),
        }
    return found


def _choice(at: dict[str, Estimate]) -> tuple[str, str]:
    """The format, and why, in a sentence."""
    if at["gain"].value - 1 < LEAST_GAIN and at["cut"].value < LEAST_CUT:
        return "padded", (
            f"documents fill their rows: padding takes {percent(at['padding'])} of the positions and "
            f"{percent(at['cut'])} of the tokens are cut, so packing would gain less than {LEAST_GAIN:.0%}"
        )
    cuts = f", where padded rows also drop {percent(at['cut'])} of them" if at["cut"].value >= LEAST_CUT else ""
    return "packed", (
        f"{as_times(at['gain'])} as many useful tokens from the same step as padded rows{cuts}; nothing is dropped"
    )


def _next(facts: dict[str, Any], settings: AdviceSettings) -> str:
    store = StoreSettings(facts["choice"], sequence_length=settings.sequence_length).directory
    if facts["choice"] == "padded":
        return (
            f"python -m tokenscale pretokenize --input-path {facts['files'][0]} --output-dir OUT "
            f"--max-length {settings.sequence_length} --format padded"
        )
    return f"name the data in config/config.yaml, then: snakemake results/tokens/CORPUS/TOKENIZER/{store}/manifest.json"


def to_json(value: Any) -> Any:
    """The facts as plain values."""
    if isinstance(value, Estimate):
        return value.to_dict()
    return {key: to_json(v) for key, v in value.items()} if isinstance(value, dict) else value
