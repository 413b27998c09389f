"""Advice on formats for your own text: padding, cut text and bytes, from a sample that is written
in every format.
"""

import argparse
import shlex
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError, as_typed
from tokenscale.base.files import expand_path, write_json
from tokenscale.cli.pretokenize_file import (
    TextOptions,
    choose_text_column,
    list_columns,
    reword_for_flags,
)
from tokenscale.costs import data as costs
from tokenscale.costs.card import NEEDS, TextCard, choose_samples, count_packed
from tokenscale.data.corpus.files import expand_patterns
from tokenscale.data.corpus.read import detect_format, read_texts
from tokenscale.data.corpus.sample import count_repeated, draw_sample
from tokenscale.data.stores.documents import Chunk
from tokenscale.data.stores.manifest import load_writer
from tokenscale.data.stores.text import HeldDocuments, TextDoor, describe_origin
from tokenscale.data.stores.writing import list_files
from tokenscale.data.tokenizers import losses
from tokenscale.data.tokenizers.base import Tokenizer
from tokenscale.data.tokenizers.huggingface import BUILT, resolve_tokenizer
from tokenscale.data.tokenizers.load import build, load_tokenizer
from tokenscale.settings import flags
from tokenscale.settings.data import SourceSettings, StoreSettings
from tokenscale.settings.options import option, settings_class
from tokenscale.settings.registry import TOKEN_FORMATS

Log = Callable[[str], None]
#: sequence lengths that are compared, beside the requested one
LENGTHS = (512, 1024, 2048, 4096, 8192)
#: below this gain in useful tokens, and with fewer tokens cut, padded rows are as good as packed
#: ones
LEAST_GAIN = 0.02
LEAST_CUT = 0.001
#: approaches in the table, with the online ones that have the same rows
NAMES = {
    "token-list": "token-list, padding-free",
    "pretokenized-padded": "padded, both",
}
#: share of documents that are most of them
MOSTLY = 0.5
#: above this share of repeated texts, and below so many tokens, readers are cautioned
REPEATED = 0.05
FEW_TOKENS = 4
#: so many values are judged whether they are texts: they are not where at most `FEW_VALUES` of them
#: differ and most have at most `SHORT` characters, nor where `NEARLY_ALL` are numbers, dates or
#: identifiers
JUDGED = 20
FEW_VALUES = 0.05
SHORT = 40
NEARLY_ALL = 0.9
#: rows of each other column that are read to find the one that holds the text
FIRST_ROWS = 1000


@settings_class
class AdviceSettings(TextOptions):
    """Settings of the planned training, and of the sample."""

    sequence_length: int = option(2048, description="positions a row", ge=8)
    documents: int = option(
        5000,
        description="documents in the sample",
        ge=2,
        le=100_000,
    )
    json: str | None = option(
        None,
        description="write the same facts to this file",
        metavar="FILE",
        path=True,
    )


FLAGS = flags.build_flags(AdviceSettings, aliases={"tokenizer_name": ("--tokenizer",)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s FILE … [--tokenizer NAME] [options]"
    text = "Parquet, JSON lines, CSV, TSV or text; also patterns ('*.jsonl')"
    parser.add_argument("files", nargs="+", type=expand_path, metavar="FILE", help=text)
    flags.add_flags(parser, flags=FLAGS)


def run(arguments: argparse.Namespace) -> None:
    """Print the advice, and write the facts if --json is given."""
    settings = AdviceSettings(**flags.parse_flags(arguments, flags=FLAGS))
    facts = advise(settings, files=tuple(arguments.files), log=print)
    print(render(facts))
    if settings.json:
        write_json(Path(settings.json), value=facts)


def advise(settings: AdviceSettings, files: tuple[str, ...], log: Log = print) -> dict[str, Any]:
    """Return all facts, as `--json` writes them and `render` prints them. `log` receives a line
    before each long step.

    Counts and bytes are those of the sample times the number of documents over that of the sample;
    shares are those of the sample. Raise UserError for files and tokenizers that cannot be read,
    and for a column whose values are no texts.
    """
    source = SourceSettings(kind="files", files=files, separator=settings.unescaped_separator)
    try:
        paths = expand_patterns(files)
        source = choose_text_column(
            paths[0],
            source,
            given=settings.text_column,
            log=log,
        )
        found = draw_sample(paths, source, settings.documents)
    except UserError as error:
        raise _name_column(reword_for_flags(error), source, _spell(settings, files)) from None
    _require_texts(found.texts, source, paths[0], command=_spell(settings, files))
    wanted = settings.sequence_length
    with tempfile.TemporaryDirectory(prefix="tokenscale-") as folder:
        tokenizer = _load_tokenizer(settings.tokenizer_name, folder=Path(folder), log=log)
        door = TextDoor.of_texts(tokenizer, found.texts, name=files[0])
        log(losses.describe(tokenizer, found=door.losses))
        chunk = door.encode(found.texts)
        stores = {
            name: _write_store(
                name,
                sequence_length=wanted,
                chunk=chunk,
                tokenizer=tokenizer,
                folder=Path(folder),
            )
            for name in TOKEN_FORMATS
        }
    scale = found.documents / len(found.texts)
    text_bytes = sum(len(text.encode()) for text in found.texts)
    facts: dict[str, Any] = {
        "files": [str(path) for path in paths],
        "text_column": None if detect_format(paths[0]) == "text" else source.text_column,
        "sampled": {"documents": len(found.texts), "text_bytes": text_bytes, "where": found.where},
        "tokenizer": tokenizer.name,
        "sequence_length": wanted,
        "documents": found.documents,
        "text_bytes": text_bytes * scale,
        "tokens": int(chunk.lengths.sum()) * scale,
        "sequence_lengths": {
            str(t): compare_rows(chunk.lengths, t) for t in sorted({*LENGTHS, wanted})
        },
        "formats": {
            name: {key: count * scale for key, count in of.items()} for name, of in stores.items()
        },
    }
    facts["sampled"]["every_document"] = found.counted and scale == 1
    card = TextCard(
        documents=len(found.texts),
        text_bytes=text_bytes,
        lengths=chunk.lengths,
        samples=[found.texts[i] for i in choose_samples(len(found.texts))],
    )
    facts["texts"] = describe_texts(found.texts, card, repeated=count_repeated(paths, source))
    facts["approaches"] = card.compare(wanted)
    facts["choice"], facts["reason"] = choose_approach(
        chunk.lengths, t=wanted, approaches=facts["approaches"]
    )
    facts["next"] = _name_next(settings, facts)
    return facts


def _require_texts(
    texts: Sequence[str], source: SourceSettings, path: Path, command: Sequence[str]
) -> None:
    """Raise UserError if the values are no texts, with the other columns of the file and the
    command that advises on the likeliest of them.
    """
    wrong = find_no_texts(texts)
    if wrong is None:
        return
    columns = list_columns(path, source)
    likeliest = _find_likeliest(path, source, columns)
    if not columns:
        what = "the documents do not look like text."
        following = "name the file that holds the text"
        if source.separator is not None:
            following += ", or another --separator"
    else:
        what = f"the column {source.text_column!r} does not look like the text."
        following = "name the file that holds the text: no column of this one looks like it"
    if likeliest is not None:
        following = shlex.join([*command, "--text-column", likeliest])
    raise UserError(
        what,
        file=path,
        found=wrong,
        columns=", ".join(columns) or None,
        next=following,
    )


def _name_column(error: UserError, source: SourceSettings, command: Sequence[str]) -> UserError:
    """Return the error of a missing column with the command that names the likeliest one."""
    if error.facts.get("next") != "--text-column NAME":
        return error
    path = expand_patterns(source.files)[0]
    likeliest = _find_likeliest(path, source, list_columns(path, source))
    if likeliest is None:
        return error
    facts = error.facts | {"next": shlex.join([*command, "--text-column", likeliest])}
    return UserError(error.what, **facts)


def _find_likeliest(path: Path, source: SourceSettings, columns: Sequence[str]) -> str | None:
    """Return the column whose first rows hold most text, None if none looks like text."""
    lengths: dict[str, int] = {}
    for name in columns:
        values: list[str | None] = []
        with suppress(UserError):
            rows = read_texts(path, replace(source, text_column=name))
            values = list(islice(rows, FIRST_ROWS))
        texts = [value for value in values if value is not None]
        if any(texts) and find_no_texts(texts) is None:
            lengths[name] = sum(map(len, texts))
    return max(lengths, key=lengths.__getitem__, default=None)


def find_no_texts(values: Sequence[str]) -> str | None:
    """Return why the values of a column are no texts, or None: few of them differ, all of them
    short, or nearly all are numbers, dates or identifiers.

    >>> find_no_texts(["en", "de"] * 50)
    "2 different values in 100, such as 'de', 'en'"
    >>> find_no_texts([str(number) for number in range(100)])
    "numbers, dates or identifiers, such as '0', '1', '10'"
    >>> find_no_texts(["Emma", "Olivia", "Ava", "Isabella"] * 5), find_no_texts(["en"] * 9)
    (None, None)
    """
    if len(values) < JUDGED:
        return None
    different = {value.strip() for value in values}
    examples = "such as " + ", ".join(repr(value) for value in sorted(different)[:3])
    short = float(np.median([len(value) for value in values])) <= SHORT
    if short and len(different) <= FEW_VALUES * len(values):
        return f"{len(different):,} different values in {len(values):,}, {examples}"
    named = sum(map(_is_identifier, values))
    if named >= NEARLY_ALL * len(values):
        return f"numbers, dates or identifiers, {examples}"
    return None


def _is_identifier(value: str) -> bool:
    """Whether a value is one word of ASCII with a digit, as a number, a date or a hash has."""
    if len(value) > SHORT or not value.isascii() or len(value.split()) != 1:
        return False
    return any(character.isdigit() for character in value)


def _spell(settings: AdviceSettings, files: Sequence[str]) -> list[str]:
    """Return the words of this command, without the text column."""
    words = ["tokenscale", "advise", *files]
    for flag in FLAGS:
        value = getattr(settings, flag.key)
        if value != flag.default and flag.key != "text_column":
            words += [flag.name, str(value)]
    return words


def _load_tokenizer(name: str, folder: Path, log: Log) -> Tokenizer:
    requested = resolve_tokenizer(name)
    directory = requested.directory or BUILT / requested.settings.name
    if not (directory / "manifest.json").is_file():
        log(f"building the tokenizer {requested.settings.name}, which is not in {BUILT}")
        directory = folder / requested.settings.name
        build(requested.settings, directory)
    tokenizer = load_tokenizer(directory)
    # such as a slower engine, and why
    for note in filter(None, (requested.note, *getattr(tokenizer, "notes", ()))):
        log(note)
    return tokenizer


def _write_store(
    name: str, sequence_length: int, chunk: Chunk, tokenizer: Tokenizer, folder: Path
) -> dict[str, int]:
    """Write the sample in a format with the format's own writer, and return its tokens and
    bytes.
    """
    store = StoreSettings(name, sequence_length=sequence_length)
    documents = HeldDocuments(
        chunk, origin=describe_origin(tokenizer, source={"sample": "of advise"})
    )
    manifest = load_writer(name)(store, documents, folder / f"store-{name}")
    size = sum(file["bytes"] for file in list_files(manifest))
    return {
        "tokens": manifest["tokens_total"],
        "useful_tokens": manifest["tokens_useful"],
        "bytes": size,
    }


def compare_rows(lengths: np.ndarray, t: int) -> dict[str, float]:
    """Return the shares of padding and of cut text with one document a row, and the useful share of
    packed rows.

    `lengths` are tokens of whole documents with BOS, `t` positions a row.
    """
    padding = costs.padding_share(lengths, sequence_length=t)
    rows = count_packed(lengths, sequence_length=t)[1]
    fill = costs.fill_share(lengths, sequence_length=t, rows=rows)
    cut = {
        "cut": costs.cut_share(lengths, sequence_length=t),
        "cut_documents": costs.cut_documents_share(lengths, sequence_length=t),
    }
    return {"padding": padding, **cut, "fill_packed": fill}


def describe_texts(
    texts: Sequence[str], card: TextCard, repeated: float | None = None
) -> dict[str, Any]:
    """Return the lines of the sampled texts' card, the tokens of a document in the median, and the
    share of documents that an earlier one repeats: `repeated`, or that of the sample.
    """
    assert card.lengths is not None  # the sample is tokenized
    return {
        "card": list(card.describe()),
        "median_tokens": float(np.median(card.lengths)),
        "repeated": 1 - len(set(texts)) / len(texts) if repeated is None else repeated,
        "repeated_of": "sampled texts" if repeated is None else "documents",
    }


def choose_approach(
    lengths: np.ndarray, t: int, approaches: Mapping[str, Mapping[str, float]]
) -> tuple[str, str]:
    """Return the advised approach, and the reason with the alternatives in one sentence each."""
    packed = approaches["packed"]
    padded = approaches["pretokenized-padded"]
    bucketed = approaches["length-bucketed"]
    if len(lengths) == 1:
        return "packed", _explain_one_document(int(lengths[0]), t)
    packing_gains = packed["useful"] >= padded["useful"] * (1 + LEAST_GAIN)
    padding_cuts = padded["cut"] >= LEAST_CUT
    if not packing_gains and not padding_cuts:
        return (
            "pretokenized-padded",
            f"documents fill their rows: {_format_percent(padded['useful'])} of the positions "
            f"count, and {_format_percent(padded['cut'])} of the tokens are cut. If documents of "
            "other lengths will come, use packed.",
        )
    longer = costs.cut_documents_share(lengths, sequence_length=t)
    if longer >= MOSTLY:
        return (
            "token-list",
            f"{_format_percent(longer)} of the documents are longer than a row, so that every "
            "approach that keeps all text cuts them into pieces; its rows can have any length, "
            "without building it again. Rows of one document follow one another: if a batch must "
            f"mix documents, or {NEEDS['packed']}, use packed.",
        )
    together = t / float(np.mean(lengths))
    digits = 0 if together >= 10 else 1
    row_contents = f"A row holds about {together:,.{digits}f} documents"
    if together < 1.5:
        row_contents = "Some rows hold pieces of several documents"
    apart = (
        f"rows with one document each would count {_format_percent(bucketed['useful'])} "
        f"(length-bucketed) or {_format_percent(padded['useful'])} (padded)"
    )
    if bucketed["cut"] >= LEAST_CUT:
        apart += f" and drop {_format_percent(bucketed['cut'])} of the tokens"
    return (
        "packed",
        f"{_format_percent(packed['useful'])} of its positions count and nothing is dropped; "
        f"{apart}. {row_contents}, which see each other: set "
        f"document_mask: true if they must not. If {NEEDS['token-list']}, use token-list.",
    )


def _explain_one_document(tokens: int, t: int) -> str:
    """Return why one document of `tokens`, with BOS, is read as packed rows of `t` positions."""
    rows = -(-(tokens - 1) // t)
    if rows == 1:
        return (
            f"the text is one document that fits into one row of {t:,}, so that every step reads "
            "the same row: this is too little text for more than a trial. If more documents will "
            "come, ask again with them."
        )
    return (
        f"the text is one document of {rows:,} rows, which packed reads in random order, each once "
        "a pass. token-list reads them from the beginning to the end, so that a batch holds "
        f"neighbouring pages, and padded reads the first row only. If {NEEDS['token-list']}, use "
        "token-list."
    )


def _name_next(settings: AdviceSettings, facts: dict[str, Any]) -> str:
    """Return the command that trains on the file in the advised format; of several files, the
    settings.
    """
    approach = facts["choice"]
    if len(facts["files"]) > 1:
        wanted = f"{{approach: {approach}, sequence_length: {settings.sequence_length}}}"
        return f"runs: {wanted} in the configuration that names these files as a corpus"
    words = [
        "--dataset",
        facts["files"][0],
        "--approach",
        approach,
        "--sequence-length",
        settings.sequence_length,
    ]
    # else a file of tokens
    if facts["text_column"] and (facts["text_column"] != "text" or approach != "packed"):
        words += ["--text-column", facts["text_column"]]
    words += ["--separator", settings.separator] if settings.separator else []
    words += (
        ["--tokenizer-name", settings.tokenizer_name] if settings.tokenizer_name != "tekken" else []
    )
    return shlex.join(["tokenscale", "train", *map(str, words)])


def render(facts: dict[str, Any]) -> str:
    """Format the facts for a terminal of 100 columns."""
    sampled = facts["sampled"]
    exact = facts["sampled"]["every_document"]

    def count(number: float) -> str:
        return f"{number if exact else float(f'{number:.3g}'):,.0f}"

    more = f" and {len(facts['files']) - 1:,} more" if len(facts["files"]) > 1 else ""
    documents = f"{facts['documents']:,.0f} document{'s' * (facts['documents'] != 1)}"
    size = f"{documents}, {_format_bytes(facts['text_bytes'])} of text"
    part = f"{sampled['documents']:,} documents ({_format_bytes(sampled['text_bytes'])}; {sampled['where']})"
    columns = f"{'padding':>9}  {'tokens cut':>11}  {'documents cut':>14}  {'useful':>11}"
    texts = facts["texts"]
    lines = [
        (
            f"{Path(facts['files'][0]).name}{more}: {size}, {count(facts['tokens'])} tokens of "
            f"{facts['tokenizer']}"
        ),
        "every document was read" if exact else f"estimated from {part}",
        *texts["card"],
        *list_cautions(texts, facts["documents"], unsplit=facts["text_column"] is None),
        "",
        "one document a row, cut or padded:             packed rows:",
        f"{'row':>6}  {columns}",
    ]
    for t, of in facts["sequence_lengths"].items():
        padded = (
            f"{_format_percent(of['padding']):>9}  {_format_percent(of['cut']):>11}  "
            f"{_format_percent(of['cut_documents']):>14}"
        )
        lines.append(f"{t:>6}  {padded}  {_format_percent(of['fill_packed'], digits=2):>11}")
    lines += ["", f"rows of {facts['sequence_length']}:"]
    lines += [f"{'format':<11} {'tokens':>16} {'of them useful':>16} {'on disk':>13}"]
    for name, of in facts["formats"].items():
        tokens = count(of["tokens"])
        useful = count(of["useful_tokens"])
        lines.append(f"{name:<11} {tokens:>16} {useful:>16} {_format_bytes(of['bytes']):>13}")
    lines += ["", f"{'approach':<24} {'positions that count':>20} {'tokens cut':>12}"]
    for name, of in facts["approaches"].items():
        shares = f"{_format_percent(of['useful']):>20} {_format_percent(of['cut']):>12}"
        lines.append(f"{NAMES.get(name, name):<24} {shares}")
    choice = f"use     {facts['choice']}, because {facts['reason']}"
    lines += ["", *textwrap.wrap(choice, 98, subsequent_indent=" " * 8), f"next    {facts['next']}"]
    lines.append("time    snakemake tokenization  (reading and tokenizing, by approach)")
    return as_typed("\n".join(lines))


def list_cautions(
    texts: Mapping[str, Any], documents: float, unsplit: bool = False
) -> Iterator[str]:
    """Yield what a user must know of the sampled texts: that there is one (`unsplit`: the text of a
    file), that they repeat, and that they are hardly documents.
    """
    if documents == 1:
        yield (
            "caution: a validation loss needs further documents (validation_files of the corpus), "
            "since the only document is trained on"
        )
        if unsplit:
            yield "caution: if the file holds several documents, --separator TEXT parts them"
    if texts["repeated"] >= REPEATED:
        yield (
            f"caution: {_format_percent(texts['repeated'])} of the {texts['repeated_of']} repeat "
            "earlier ones; a corpus drops these, unless cleaning.deduplicate is false"
        )
    if texts["median_tokens"] < FEW_TOKENS:
        yield "caution: most texts have hardly a token: is --text-column the right one?"


def _format_bytes(number: float) -> str:
    return f"{number / 1e3:,.1f} kB" if number < 1e6 else f"{number / 1e6:,.1f} MB"


def _format_percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"
