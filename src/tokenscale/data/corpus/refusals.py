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
    "damaged": Refusal(f"parquet jsonl tsv text {SHARDS}", "is truncated or damaged", AGAIN),
    "compression": Refusal(
        "jsonl tsv text mds litdata",
        "has an ending of another compression than its content",
        "rename it: .gz, .zst, or neither",
    ),
    "dictionary": Refusal(
        "jsonl tsv text mds litdata",
        "was compressed with a dictionary, which is not in the file",
        "decompress it: zstd -d --long=31 -D DICTIONARY FILE",
    ),
    "parquet": Refusal(
        "parquet", "is not readable Parquet", "replace it, or set `format` of the source"
    ),
    "rows": Refusal("parquet", "does not hold the rows that its footer counts", AGAIN),
    "missing column": Refusal("parquet jsonl tsv mds litdata stream", "has no {kind} {name!r}", ""),
    "same columns": Refusal(
        "parquet tsv", "has several columns {name!r}", "write the file again with one of them"
    ),
    "no text": Refusal(
        "parquet jsonl mds litdata stream",
        "does not hold text in the {kind} {name!r}",
        "name a {kind} of strings; for ids: tokenscale convert --help",
    ),
    "utf-8": Refusal(
        "parquet jsonl tsv text mds",
        "holds text that is not UTF-8",
        "convert it (iconv -f ENCODING -t UTF-8), or correct or remove the text",
    ),
    "nul": Refusal(
        "jsonl tsv text",
        "holds a NUL byte, as UTF-16 and binary files do",
        (
            "UTF-16: {cat} | iconv -f UTF-16LE -t UTF-8 > {new}\nstray NUL bytes: {cat} | tr -d "
            "'\\000' > {new}"
        ),
    ),
    "too long": Refusal(
        "parquet jsonl tsv text",
        "holds a document that is too long",
        "cut it, or set `separator` of the source to what stands between documents",
    ),
    "json": Refusal(
        "jsonl",
        "holds a line that is not JSON",
        "correct or remove the line; values of several lines: {cat} | jq -c . > {new}",
    ),
    "same keys": Refusal("jsonl", "repeats a key within one JSON object", "keep one of them"),
    "array": Refusal(
        "jsonl",
        "is a JSON array that is not readable as a whole",
        "correct it, or write JSON lines: {cat} | jq -c '.[]' > {new}",
    ),
    "fields": Refusal(
        "tsv",
        "holds a line with more or fewer fields than its first line",
        "correct or remove the line: fields are separated by tabs, and quotes have no meaning",
    ),
    "line ends": Refusal("tsv", "ends its lines with \\r alone", "{cat} | tr '\\r' '\\n' > {new}"),
    "byte order mark": Refusal(
        "tsv",
        "holds a byte order mark after its beginning, as joined files do",
        "name the files before they were joined, or remove this header line",
    ),
    "pair": Refusal(
        "parquet jsonl tsv text mds litdata",
        "holds {name!r}, which separates the two texts of a pair",
        "replace that character",
    ),
    "lines": Refusal(
        "text",
        "has another number of lines than its file of translations",
        "name files in which line n of one translates line n of the other",
    ),
    "offsets": Refusal(SHARDS, "holds other items than its offsets and its index describe", AGAIN),
    "index": Refusal(SHARDS, "does not have the expected content", AGAIN),
    "compressed items": Refusal(
        "litdata convert-litdata",
        "is part of a litdata folder whose items are compressed or encrypted",
        (
            'write it again without, or with litdata.optimize(…, compression="zstd", '
            'compression_level="chunk") for text'
        ),
    ),
    "size": Refusal(
        "convert-mds convert-litdata", "is missing, or has another size than its index says", AGAIN
    ),
    "items": Refusal(
        "mds litdata convert-mds", "holds an item that does not fit its columns", AGAIN
    ),
    "ids": Refusal(
        "convert-mds convert-litdata convert-hf-datasets",
        "has no column of ids, or several",
        "--column NAME; text has to be tokenized first: tokenscale pretokenize --help",
    ),
    "no ids": Refusal(
        "convert-mds convert-litdata convert-hf-datasets",
        "holds no lists of ids in the column {name!r}",
        "--column NAME",
    ),
    "padding": Refusal(
        "convert-mds", "has an attention mask: its samples are padded", "write them without padding"
    ),
    "arrow": Refusal(
        "convert-hf-datasets",
        "is not a complete Arrow stream",
        "save it again with Dataset.save_to_disk",
    ),
    "mask": Refusal(
        "convert-hf-datasets", "has attention masks of other lengths than its ids", AGAIN
    ),
    "null": Refusal(
        "convert-hf-datasets", "holds a null in the column {name!r}", "filter such rows out"
    ),
    "hash": Refusal("convert-mds", "has changed since its index was written", AGAIN),
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
    near = find_nearest(name, names)
    return damaged(
        file,
        "missing column",
        kind=kind,
        name=name,
        key=f"source.{option}",
        has=", ".join(names) or "(none)",
        next=f"did you mean {near!r}?"
        if near
        else f"set `{option}` of the source to the {kind} that holds the text",
        **place,
    )
