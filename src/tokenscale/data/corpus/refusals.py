"""Every reason for which a reader refuses the content of a file, and the error for it."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenscale.base.errors import UserError, find_nearest


class Refusal(NamedTuple):
    """A reason: the readers that check it, what is wrong with the file, and what to do next.

    In `next`, `{cat}` is the command that prints the file decompressed, and `{new}` a name for a
    corrected file.
    """

    readers: str
    what: str
    next: str


AGAIN = "copy the file again, or write it again"
SHARDS = "mds litdata convert-mds convert-litdata"
#: reason → `Refusal`; docs/generate.py makes the table of docs/data.md from it
REFUSALS = {
    "damaged": Refusal(
        readers=f"parquet jsonl tsv csv text {SHARDS}", what="is truncated or damaged", next=AGAIN
    ),
    "compression": Refusal(
        readers="jsonl tsv csv text mds litdata",
        what="has an ending of another compression than its content",
        next="rename it: .gz, .zst, or neither",
    ),
    "dictionary": Refusal(
        readers="jsonl tsv csv text mds litdata",
        what="was compressed with a dictionary, which is not in the file",
        next="decompress it: zstd -d --long=31 -D DICTIONARY FILE",
    ),
    "parquet": Refusal(
        readers="parquet",
        what="is not readable Parquet",
        next="replace it, or set `format` of the source",
    ),
    "rows": Refusal(
        readers="parquet", what="does not hold the rows that its footer counts", next=AGAIN
    ),
    "missing column": Refusal(
        readers="parquet jsonl tsv csv mds litdata stream", what="has no {kind} {name!r}", next=""
    ),
    "same columns": Refusal(
        readers="parquet tsv csv",
        what="has several columns {name!r}",
        next="write the file again with one of them",
    ),
    "no text": Refusal(
        readers="parquet jsonl mds litdata stream",
        what="does not hold text in the {kind} {name!r}",
        next="name a {kind} of strings; for ids: tokenscale convert --help",
    ),
    "utf-8": Refusal(
        readers="parquet jsonl tsv csv text mds",
        what="holds text that is not UTF-8",
        next="convert it (iconv -f ENCODING -t UTF-8), or correct or remove the text",
    ),
    "nul": Refusal(
        readers="jsonl tsv csv text",
        what="holds a NUL byte, as UTF-16 and binary files do",
        next=(
            "UTF-16: {cat} | iconv -f UTF-16LE -t UTF-8 > {new}\nstray NUL bytes: {cat} | tr -d "
            "'\\000' > {new}"
        ),
    ),
    "too long": Refusal(
        readers="parquet jsonl tsv csv text",
        what="holds a document that is too long",
        next="cut it, or set `separator` of the source to what stands between documents",
    ),
    "json": Refusal(
        readers="jsonl",
        what="holds a line that is not JSON",
        next="correct or remove the line; values of several lines: {cat} | jq -c . > {new}",
    ),
    "same keys": Refusal(
        readers="jsonl", what="repeats a key within one JSON object", next="keep one of them"
    ),
    "array": Refusal(
        readers="jsonl",
        what="is a JSON array that is not readable as a whole",
        next="correct it, or write JSON lines: {cat} | jq -c '.[]' > {new}",
    ),
    "fields": Refusal(
        readers="tsv csv",
        what="holds a line with more or fewer fields than its first line",
        next="correct or remove the line (of TSV: fields are separated by tabs, and quotes have no "
        "meaning; of CSV: by commas)",
    ),
    "quotes": Refusal(
        readers="csv",
        what="holds quotes that do not fit",
        next='write a quote within a quoted field twice (""), and close each field',
    ),
    "header": Refusal(
        readers="tsv csv",
        what="repeats its first line, as joined files do",
        next="name the files before they were joined, or remove this line",
    ),
    "line ends": Refusal(
        readers="tsv csv",
        what="ends its lines with \\r alone",
        next="{cat} | tr '\\r' '\\n' > {new}",
    ),
    "byte order mark": Refusal(
        readers="tsv csv",
        what="holds a byte order mark after its beginning, as joined files do",
        next="name the files before they were joined, or remove this header line",
    ),
    "pair": Refusal(
        readers="parquet jsonl tsv csv text mds litdata",
        what="holds {name!r}, which separates the two texts of a pair",
        next="replace that character",
    ),
    "lines": Refusal(
        readers="text",
        what="has another number of lines than its file of translations",
        next="name files in which line n of one translates line n of the other",
    ),
    "offsets": Refusal(
        readers=SHARDS, what="holds other items than its offsets and its index describe", next=AGAIN
    ),
    "index": Refusal(readers=SHARDS, what="does not have the expected content", next=AGAIN),
    "compressed items": Refusal(
        readers="litdata convert-litdata",
        what="is part of a litdata folder whose items are compressed or encrypted",
        next=(
            'write it again without, or with litdata.optimize(…, compression="zstd", '
            'compression_level="chunk") for text'
        ),
    ),
    "size": Refusal(
        readers="convert-mds convert-litdata",
        what="is missing, or has another size than its index says",
        next=AGAIN,
    ),
    "items": Refusal(
        readers="mds litdata convert-mds",
        what="holds an item that does not fit its columns",
        next=AGAIN,
    ),
    "ids": Refusal(
        readers="convert-mds convert-litdata convert-hf-datasets",
        what="has no column of ids, or several",
        next="--column NAME; text has to be tokenized first: tokenscale pretokenize --help",
    ),
    "no ids": Refusal(
        readers="convert-mds convert-litdata convert-hf-datasets",
        what="holds no lists of ids in the column {name!r}",
        next="--column NAME",
    ),
    "padding": Refusal(
        readers="convert-mds",
        what="has an attention mask: its samples are padded",
        next="write them without padding",
    ),
    "arrow": Refusal(
        readers="convert-hf-datasets",
        what="is not a complete Arrow stream",
        next="save it again with Dataset.save_to_disk",
    ),
    "mask": Refusal(
        readers="convert-hf-datasets",
        what="has attention masks of other lengths than its ids",
        next=AGAIN,
    ),
    "null": Refusal(
        readers="convert-hf-datasets",
        what="holds a null in the column {name!r}",
        next="filter such rows out",
    ),
    "hash": Refusal(
        readers="convert-mds", what="has changed since its index was written", next=AGAIN
    ),
}
#: compression of a source file → command that prints its content
_PRINT = {".gz": "gzip -dc", ".zst": "zstd -dc --long=31", ".zstd": "zstd -dc --long=31"}


def damaged(
    file: Path,
    what: str,
    found: object = None,
    expected: object = None,
    *,
    next: str | None = None,
    **names: object,
) -> UserError:
    """Return the error for a file that a reader refuses.

    `what` is a key of `REFUSALS`. `names` are `line`, `row`, `byte` or another place in the file,
    and `key`, the option that names it; `kind` and `name` fill the sentence.
    """
    refusal = REFUSALS[what]
    terms = {"kind": names.pop("kind", "column"), "name": names.pop("name", "")}
    shown = f"{file}, line {names.pop('line'):,}" if "line" in names else file
    if next is None:
        plain = file.with_suffix("") if file.suffix.lower() in _PRINT else file
        cat = f"{_PRINT.get(file.suffix.lower(), 'cat')} {shlex.quote(str(file))}"
        new = shlex.quote(str(plain.with_stem(f"{plain.stem}-new")))
        next = refusal.next.replace("{cat}", cat).replace("{new}", new)
        next = next.replace("{kind}", str(terms["kind"]))
    return UserError(
        f"a source file {refusal.what.format(**terms)}.",
        file=shown,
        **names,
        found=found,
        expected=expected,
        next=next,
    )


def missing_column(
    file: Path, name: str, names: Sequence[str], option: str, kind: str = "column", **place: object
) -> UserError:
    """Return the error for a missing column, with the nearest existing name."""
    near = find_nearest(name, words=names)
    next_step = f"set `{option}` of the source to the {kind} that holds the text"
    if near:
        next_step = f"did you mean {near!r}?"
    for separator, form in ((",", "csv"), ("\t", "tsv")):
        if len(names) == 1 and separator in names[0]:
            next_step = f"set `format: {form}` of the source: {separator!r} separates its columns"
    return damaged(
        file,
        what="missing column",
        kind=kind,
        name=name,
        key=f"source.{option}",
        has=", ".join(names) or "(none)",
        next=next_step,
        **place,
    )
