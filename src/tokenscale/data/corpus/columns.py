"""Access to the text columns of Parquet, CSV and TSV files and the text keys of JSON lines."""

import csv
from collections.abc import Generator, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from tokenscale.base.errors import UserError
from tokenscale.data.corpus.raw_text import PAIR
from tokenscale.data.corpus.refusals import damaged, missing_column
from tokenscale.settings.data import SourceSettings

#: characters of a field of CSV at most: quotes that never end would fill the memory
LONGEST_FIELD = 1 << 28


def list_columns(source: SourceSettings) -> dict[str, str]:
    """Return {option: column name} for the column options that are set."""
    names = {"text_column": source.text_column, "target_column": source.target_column}
    return {option: name for option, name in names.items() if name is not None}


def get_type(schema: pa.Schema, name: str) -> pa.DataType | None:
    """Return the type of a Parquet column, or None if it is missing. `a.b` is field `b` of struct
    column `a`.
    """
    if name in schema.names:
        return schema.field(name).type
    parent, _, field = name.rpartition(".")
    parent_type = get_type(schema, name=parent) if parent else None
    if (
        parent_type is None
        or not pa.types.is_struct(parent_type)
        or parent_type.get_field_index(field) < 0
    ):
        return None
    return parent_type.field(field).type


def get_column(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return a column of the batch, with names as in `get_type`."""
    if name in batch.schema.names:
        return batch.column(name)
    parent, _, field = name.rpartition(".")
    return pc.struct_field(get_column(batch, name=parent), field)


def get_value(row: dict[str, Any], name: str) -> Any:
    """Return the value of a key of a JSON object; `a.b` is key `b` of object `a`. Raises KeyError
    if it is missing.
    """
    if name in row:
        return row[name]
    parent, _, field = name.rpartition(".")
    if not parent:
        raise KeyError(name)
    value = get_value(row, name=parent)
    return None if value is None else value[field]


#: a line's number, from 1, and its cells
Line = tuple[int, list[str]]


def split_tsv(lines: Iterator[str], path: Path) -> Iterator[Line]:
    """Split the lines of a TSV file without quoting. Raises UserError for lines that end with "\\r"
    alone.
    """
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if number == 1 and "\r" in line:
            raise damaged(path, what="line ends", found=repr(line[:60]))
        yield number, line.split("\t")


def split_csv(lines: Iterator[str], path: Path) -> Iterator[Line]:
    """Split the lines of a CSV file as RFC 4180 has them: commas, and quotes around fields with
    commas, quotes or line breaks. Raises UserError for quotes that do not fit.
    """
    csv.field_size_limit(LONGEST_FIELD)
    rows = csv.reader((f"{line}\n" for line in lines), strict=True)
    try:
        for cells in rows:
            yield rows.line_num, cells or [""]
    except csv.Error as error:
        what = "line ends" if str(error).startswith("new-line") else "quotes"
        raise damaged(path, what, found=str(error), line=rows.line_num) from None


def read_table(
    lines: Iterator[Line], names: dict[str, str], path: Path
) -> Generator[tuple[str, ...], None, None]:
    """Yield the cells of the named columns of each line.

    The first line is the header, unless all names are column numbers (from 1). Blank lines are
    skipped. Raises UserError for a missing column, for a line with more or fewer cells than the
    first, and for a second header.
    """
    numbered = all(name.isascii() and name.isdigit() and int(name) > 0 for name in names.values())
    positions: list[int] = []
    first: list[str] = []
    for number, cells in lines:
        if cells == [""] and (first or numbered):
            continue
        if first and cells[0].startswith("\ufeff"):
            raise damaged(path, what="byte order mark", found=repr(cells[0][:60]), line=number)
        if not first:
            first = cells
            header = [str(n) for n in range(1, len(cells) + 1)] if numbered else cells
            positions = [
                _find_column(header, option, name=name, path=path, line=number)
                for option, name in names.items()
            ]
            if not numbered:
                continue
        elif cells == first and not numbered:
            raise damaged(path, what="header", found=", ".join(cells), line=number)
        if len(cells) != len(first):
            raise damaged(
                path,
                what="fields",
                found=f"{len(cells)}, beginning with {cells[0][:60]!r}",
                expected=f"{len(first)}, as in the first line",
                line=number,
            )
        yield tuple(cells[position] for position in positions)


def _find_column(header: list[str], option: str, name: str, path: Path, line: int) -> int:
    if header.count(name) > 1:
        raise damaged(
            path,
            what="same columns",
            found=", ".join(header),
            name=name,
            key=f"source.{option}",
        )
    if name not in header:
        raise missing_column(path, name, names=header, option=option, line=line)
    return header.index(name)


Named = TypeVar("Named")


def select_part(files: Sequence[Named], part: tuple[int, int] | None) -> Sequence[Named]:
    """Return the files of part k of n, `part` = (k, n), or all files for None.

    A part has consecutive files. The numbers of files of two parts differ by at most one.

    >>> select_part(["a", "b", "c", "d", "e"], (1, 2))
    ['c', 'd', 'e']
    """
    if part is None:
        return files
    k, n = part
    return files[len(files) * k // n : len(files) * (k + 1) // n]


def join_pairs(rows: Iterator[tuple[str | None, ...]], path: Path) -> Iterator[str | None]:
    """Yield single texts unchanged, and two joined by `PAIR`; None for nulls. Raises UserError for
    `PAIR` in a text.
    """
    for number, row in enumerate(rows):
        if len(row) == 1:
            yield row[0]
            continue
        texts = [text for text in row if text is not None]
        if len(texts) < len(row):
            yield None
            continue
        if PAIR in "".join(texts):
            raise damaged(
                path,
                what="pair",
                name=PAIR,
                document=f"{number:,}",
            )
        yield PAIR.join(texts)


def read_line_pairs(
    first: Iterator[str], second: Iterator[str], path: Path, target: Path
) -> Generator[tuple[str | None, str | None], None, None]:
    """Yield the lines of two files by number; blank lines become None. Raises UserError for other
    line counts.
    """
    for count, (line, translation) in enumerate(zip_longest(first, second)):
        if line is None or translation is None:
            longer = count + 1 + sum(1 for _ in (second if line is None else first))
            counts = (count, longer) if line is None else (longer, count)
            raise damaged(
                path,
                what="lines",
                found=f"{counts[0]:,} lines",
                expected=f"{counts[1]:,} lines, as in {target}",
            )
        source = line.removesuffix("\r")
        target_text = translation.removesuffix("\r")
        yield source if source.strip() else None, target_text if target_text.strip() else None


def match_targets(
    files: Sequence[Named], targets: Sequence[Path], key: str
) -> Iterator[tuple[Named, Path | None]]:
    """Yield each file and its translation, or None. Raises UserError if the numbers of files and
    targets differ.
    """
    if targets and len(files) != len(targets):
        what = "each file of texts goes with one of translations."
        next_step = "name as many, in the same order"
        raise UserError(
            what,
            key=f"source.{key}",
            found=f"{len(targets)} for {len(files)} files",
            next=next_step,
        )
    if targets:
        yield from zip(files, targets, strict=True)
    else:
        yield from ((file, None) for file in files)
