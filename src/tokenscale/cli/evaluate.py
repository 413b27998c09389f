"""Measure a checkpoint's perplexity, bits per byte and next-token accuracy on any text, or its BLEU
on pairs.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.analysis.bleu import bleu as bleu_of
from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import read_json, report_malformed
from tokenscale.cli.generate import add_checkpoint_arguments, naming_option
from tokenscale.cli.pretokenize_file import reword_for_flags
from tokenscale.data.batches.batch import Inputs, document_ids
from tokenscale.data.batches.objectives import open_change
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.data.corpus.read import read_usable_texts
from tokenscale.data.stores.manifest import open_store, read_store_manifest, resolve_store
from tokenscale.data.stores.packed import PackedStore
from tokenscale.data.stores.text import TextDoor, encode_prompts
from tokenscale.data.tokenizers.base import Tokenizer, read_tokenizer_manifest
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.data.tokenizers.losses import describe
from tokenscale.settings.data import SourceSettings, StoreSettings
from tokenscale.settings.options import decode
from tokenscale.settings.run import RunSettings
from tokenscale.train.checkpoint import RECORD
from tokenscale.train.checkpoint_models import CheckpointModel, is_published, open_checkpoint
from tokenscale.train.evaluation.generation import Translation, held_out_pairs, translate
from tokenscale.train.evaluation.validation import Rows, Scores, rows_of_documents, scores, windows
from tokenscale.train.optimizer import autocast_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the checkpoint and the data; by default the held-out documents of
    its corpus.
    """
    add_checkpoint_arguments(parser)
    data = parser.add_mutually_exclusive_group()
    text = (
        "corpus by its name or folder, or a file (Parquet, JSON lines, text); documents are "
        "scored separately"
    )
    data.add_argument("--corpus", metavar="NAME", help=text)
    text = "packed store, scored by rows as in a training's validation"
    data.add_argument("--store", type=Path, metavar="MANIFEST", help=text)
    parser.add_argument(
        "--split", choices=("train", "validation"), default="validation", help="split of the corpus"
    )
    text = "text column of a Parquet or JSON lines file"
    parser.add_argument("--text-column", default="text", metavar="NAME", help=text)
    parser.add_argument(
        "--rows", type=int, metavar="N", help="stop after N rows (default: read all)"
    )
    parser.add_argument(
        "--bleu", type=int, metavar="N", help="translate N held-out pairs instead, and report BLEU"
    )


def run(arguments: argparse.Namespace) -> None:
    """Evaluate the checkpoint and print the result."""

    def report(rows: int) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{rows:,} rows", end="", file=sys.stderr, flush=True)

    text = evaluate(report=report, **vars(arguments))
    print(("\r\033[K" if sys.stderr.isatty() else "") + text)


#: documents per call of the tokenizer
BATCH_DOCUMENTS = 64
Report = Callable[[int], None]
CORPORA = Path("results/corpus")


def evaluate(
    checkpoint: Path,
    *,
    corpus: str | None = None,
    store: Path | None = None,
    split: str = "validation",
    text_column: str = "text",
    bleu: int | None = None,
    **options: Any,
) -> str:
    """Evaluate on a store, a corpus or a file; by default on the corpus of the training. Return the
    report as text.

    With `bleu`, translate that many pairs of a corpus instead.
    """
    rows = options.get("rows")
    if rows is not None and rows < 1:
        raise UserError(
            "--rows must be at least 1.", found=rows, next="leave --rows out to read all rows"
        )
    if bleu is not None:
        if store is not None or rows is not None:
            other = "--rows" if store is None else "--store"
            next_step = "--bleu N, with --corpus NAME for another corpus"
            raise UserError(
                "--bleu cannot be combined with --store or --rows.", found=other, next=next_step
            )
        opened, translated = evaluate_bleu(
            checkpoint,
            corpus,
            pairs=bleu,
            split=split,
            **options,
        )
        return format_bleu(
            opened, found=translated, data=f"{corpus or opened.run.corpus.name}, split {split}"
        )
    if store is not None:
        opened, found = evaluate_store(checkpoint, store, **options)
        return format_scores(opened, found, data=str(resolve_store(store)[0]))
    corpus = corpus or _read_training_corpus(checkpoint)
    try:
        opened, found = evaluate_text(
            checkpoint,
            where=corpus,
            split=split,
            text_column=text_column,
            **options,
        )
    except UserError as error:
        raise (
            reword_for_flags(error) if "source." in error.facts.get("key", "") else error
        ) from None
    return format_scores(
        opened, found, data=corpus if Path(corpus).is_file() else f"{corpus}, split {split}"
    )


def format_scores(opened: CheckpointModel, found: Scores, data: str) -> str:
    causal = opened.run.objective == "causal"
    per_byte = found.bits_per_byte
    if per_byte is not None:
        bits = f"{per_byte:.4f}  ({found.text_bytes:,} bytes of text)"
    else:
        stores = "not measured for stores and pairs; --corpus NAME reads text"
        bits = stores if causal else "not defined for a masked model"
    lines = {
        "checkpoint": opened.name,
        "data": f"{data}: {found.rows:,} rows, {found.useful_tokens:,} predicted tokens",
        "loss": f"{found.loss:.4f} nats a token",
        "perplexity": f"{found.perplexity:,.2f}",
        "bits per byte": bits,
        ("next-token" if causal else "masked-token") + " accuracy": f"{found.accuracy:.2%}",
    }
    if found.text_sample:
        lines["text"] = describe(load_tokenizer(opened.tokenizer), found.text_sample)
    return _align(lines)


def _align(lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join(f"{label:<{width}}  {text}" for label, text in lines.items())


def format_bleu(opened: CheckpointModel, found: list[Translation], data: str) -> str:
    """Format the BLEU score of translations, and the first of them."""
    score = bleu_of([t.hypothesis for t in found], references=[t.pair.reference for t in found])
    lines = {
        "checkpoint": opened.name,
        "data": f"{data}: the first {len(found):,} pairs",
        "BLEU": str(score),
        "signature": score.signature,
        "time": f"{sum(t.duration_s for t in found):.1f} s",
    }
    for translation in found[:3]:
        lines |= {f"{translation.pair.number} source": translation.pair.source}
        lines |= {f"{translation.pair.number} found": translation.hypothesis or "(nothing)"}
        lines |= {f"{translation.pair.number} reference": translation.pair.reference}
    return _align(lines)


def evaluate_bleu(
    checkpoint: Path,
    corpus: str | None,
    pairs: int,
    *,
    split: str = "validation",
    rows: None = None,
    report: Report | None = None,
    **opening: Any,
) -> tuple[CheckpointModel, list[Translation]]:
    """Translate the first pairs of a corpus, given by name or folder; by default of the training's
    corpus.

    `opening`: device and tokenizer, as for `open_checkpoint`. Raise UserError as it does, for a
    corpus without pairs, and for a model that was not trained on pairs.
    """
    if pairs < 1:
        raise UserError("--bleu must be at least 1.", bleu=pairs, next="--bleu 100, for example")
    opened = open_checkpoint(checkpoint, **opening, document_mask=False)
    if opened.run.objective != "causal" or not opened.run.eos:
        what = "the model cannot translate: it was not trained on pairs."
        next_step = "name the checkpoint of a causal run"
        raise UserError(
            what, checkpoint=opened.name, next=f"{next_step} with eos, on a corpus of pairs"
        )
    folder = _find_corpus(corpus or opened.run.corpus.name)
    if folder is None:
        raise _unknown_corpus("corpus", where=corpus or opened.run.corpus.name)
    found = []
    engine = load_tokenizer(opened.tokenizer)
    held_out = held_out_pairs(folder, count=pairs, split=split)
    sources = [pair.source for pair in held_out]
    with naming_option():
        prompts = encode_prompts(engine, prompts=sources, name=str(folder), eos=True)
    for translation in translate(
        opened.model,
        pairs=held_out,
        prompts=prompts,
        tokenizer=engine,
        positions=opened.positions,
        device=opened.device,
    ):
        found.append(translation)
        if report is not None:
            report(len(found))
    return opened, sorted(found, key=lambda translation: translation.pair.number)


def _read_training_corpus(checkpoint: Path) -> str:
    if is_published(checkpoint):
        what = "a model of transformers names no corpus: name the text to evaluate on."
        next_step = "--corpus FILE or NAME"
        raise UserError(what, checkpoint=checkpoint, next=f"{next_step}, or --store MANIFEST")
    path = checkpoint / RECORD
    hint = "--checkpoint results/runs/RUN_ID/checkpoints/final, say"
    record = read_json(path, what="checkpoint's record", next=hint)
    with report_malformed(path, what="checkpoint's record", next=hint):
        run = decode(RunSettings, values=record["run"])
    if run.mixture is not None:
        what = "the checkpoint was trained on a mixture: name the corpus to evaluate on."
        names = run.mixture.names
        mixture = f"{run.corpus.name}: {', '.join(names)}"
        raise UserError(what, checkpoint=checkpoint, mixture=mixture, next=f"--corpus {names[0]}")
    return run.corpus.name


def evaluate_store(
    checkpoint: Path,
    store: Path,
    *,
    rows: int | None = None,
    report: Report | None = None,
    **opening: Any,
) -> tuple[CheckpointModel, Scores]:
    """Score the first `rows` rows of a packed store (None: all), as a training's validation does.

    `opening` as in `evaluate_bleu`. Raise UserError for a store of another format or tokenizer.
    """
    manifest = read_store_manifest(store)
    if manifest["format"] != "packed":
        what = "only packed stores can be evaluated: they contain every token."
        found = resolve_store(store)[0]
        next_step = "name a packed store with --store, or the text itself with --corpus"
        raise UserError(what, store=f"{found} has the format {manifest['format']}", next=next_step)
    opened = open_checkpoint(checkpoint, **opening, sequence_length=manifest["sequence_length"])
    facts: dict[str, Any] = {
        "tokenizer_sha256": read_tokenizer_manifest(opened.tokenizer)["file"]["sha256"]
    }
    facts |= {"vocabulary_size": opened.model.settings.vocabulary_size}
    settings = StoreSettings("packed", **manifest["options"])
    manifest = open_store(
        store,
        expected=settings,
        requested_by="the checkpoint",
        **facts,
    )
    reader = PackedStore(store, manifest)
    last = len(reader) if rows is None else min(rows, len(reader))

    def batches() -> Iterator[Rows]:
        for begin in range(0, last, opened.run.micro_batch):
            numbers = np.arange(begin, min(begin + opened.run.micro_batch, last))
            ids = document_ids(reader.starts(numbers)) if opened.takes_bounds else None
            yield Rows(*reader.rows(numbers), ids, numbers)

    return opened, _score(
        opened,
        batches=batches(),
        stored=manifest,
        where=store,
        report=report,
    )


def _score(
    opened: CheckpointModel,
    batches: Iterator[Rows],
    stored: dict[str, Any],
    where: object,
    report: Report | None,
) -> Scores:
    """Score rows with the labels and the masks that the run was trained with. `stored`: facts of
    the rows' ids.
    """
    change = open_change(
        opened.run,
        inputs=Inputs(tokenizer=opened.tokenizer),
        manifests=[stored],
        held_out=True,
    )

    def requested() -> Iterator[Rows]:
        for rows in batches:
            assert rows.numbers is not None  # every source of rows here counts them
            tokens, labels = change.apply(rows.tokens_bt, rows.labels_bt, rows.numbers)
            yield replace(rows, tokens_bt=tokens, labels_bt=labels)

    found = scores(
        opened.model,
        batches=requested(),
        device=opened.device,
        autocast=autocast_of(opened.run.precision, device=opened.device),
        report=report,
    )
    if found.useful_tokens == 0:
        raise UserError(
            "this text holds no tokens to predict.", data=where, next="name another text"
        )
    return found


def evaluate_text(
    checkpoint: Path,
    where: str,
    *,
    split: str = "validation",
    text_column: str = "text",
    rows: int | None = None,
    report: Report | None = None,
    **opening: Any,
) -> tuple[CheckpointModel, Scores]:
    """Score whole documents separately, tokenized with the checkpoint's tokenizer.

    `where` is a corpus by name or folder, or a file (Parquet, JSON lines, text). Documents longer
    than a row are cut into windows, as in packed rows. `rows`: stop after the document that
    completes this number. `opening` as in `evaluate_bleu`. Raise UserError for unreadable text, and
    for text that the tokenizer loses.
    """
    opened = open_checkpoint(checkpoint, **opening, document_mask=False)
    run = opened.run
    causal = opened.run.objective == "causal"
    engine = load_tokenizer(opened.tokenizer)
    with naming_option():
        batches, door = _open_texts(
            where, split, text_column=text_column, engine=engine, eos=run.eos
        )
    text_bytes = 0

    def documents() -> Iterator[np.ndarray]:
        nonlocal text_bytes
        made = 0
        for texts in batches:
            for text, ids in zip(texts, door.encode(texts).documents(), strict=True):
                if rows is not None and made >= rows:
                    return
                made += len(list(windows(ids, sequence_length=run.sequence_length)))
                text_bytes += len(text.encode("utf-8"))
                yield ids

    facts = {"document_parts": door.pairs, "bos_id": engine.bos_id, "eos_id": engine.eos_id}
    # causal attention does not see padding, which comes last; bidirectional attention would
    requested = rows_of_documents(
        documents(),
        sequence_length=run.sequence_length,
        rows=run.micro_batch,
        padded=causal,
    )
    found = _score(
        opened,
        batches=requested,
        stored=facts,
        where=where,
        report=report,
    )
    found.text_sample = door.losses
    if causal and not door.pairs:
        found.text_bytes = text_bytes
    return opened, found


def _open_texts(
    where: str, split: str, text_column: str, engine: Tokenizer, eos: bool
) -> tuple[Iterator[list[str]], TextDoor]:
    """Return (batches of texts, the way to their ids) of a corpus by name or folder, or of a file."""
    if folder := _find_corpus(where):
        text = RawText(folder, split)
        return text.batches(BATCH_DOCUMENTS), TextDoor.of_corpus(engine, text, eos)
    if not Path(where).is_file():
        raise _unknown_corpus("corpus or file", where)
    source = SourceSettings("files", files=(where,), text_column=text_column)
    door = TextDoor.of_texts(engine, read_usable_texts(Path(where), source), name=where, eos=eos)
    whole = read_usable_texts(Path(where), source)
    return iter(lambda: list(itertools.islice(whole, BATCH_DOCUMENTS)), []), door


def _find_corpus(where: str) -> Path | None:
    """Return the folder of a corpus, given by its name, its folder or its manifest."""
    folder = Path(where).parent if Path(where).name == "manifest.json" else Path(where)
    return next(
        (f for f in (CORPORA / where, folder) if f.name and (f / "manifest.json").is_file()), None
    )


def _unknown_corpus(kind: str, where: str) -> UserError:
    return unknown(
        kind,
        word=where,
        words=[path.parent.name for path in CORPORA.glob("*/manifest.json")],
        folder=CORPORA,
    )
