"""Two texts as one document: columns of a row, or lines of two files."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from tokenscale.base.errors import UserError
from tokenscale.data.corpus.raw_text import PAIR

Named = TypeVar("Named")


def joined(rows: Iterator[tuple[str | None, ...]], path: Path) -> Iterator[str | None]:
    """Rows of one text as they are, rows of two joined by `PAIR`; None where a text is missing (null).

    Raises UserError where a text of two holds that character itself.
    """
    for number, row in enumerate(rows):
        if None in row:
            yield None
            continue
        if len(row) > 1 and PAIR in "".join(row):
            raise UserError(
                f"a text holds {PAIR!r}, which stands between the two parts of a pair.",
                file=path,
                document=f"{number:,}",
                next="replace that character in it",
            )
        yield PAIR.join(row)


def lines(
    first: Iterator[str], second: Iterator[str], path: Path, target: Path
) -> Iterator[tuple[str | None, str | None]]:
    """Line n of one file with line n of the other; a blank line says that there is none, and is None.

    Raises UserError at the end of the shorter file, with both counts.
    """
    count = 0
    for line, translation in zip_longest(first, second):
        if line is None or translation is None:
            longer = count + 1 + sum(1 for _ in (second if line is None else first))
            counts = (count, longer) if line is None else (longer, count)
            raise UserError(
                "the two files of a pair have different numbers of lines.",
                file=f"{path}: {counts[0]:,} lines",
                target=f"{target}: {counts[1]:,} lines",
                next="name files in which line n of one translates line n of the other",
            )
        count += 1
        yield tuple(
            text if text.strip() else None for text in (line.removesuffix("\r"), translation.removesuffix("\r"))
        )


def beside(files: Sequence[Named], targets: Sequence[Path], key: str) -> Iterator[tuple[Named, Path | None]]:
    """Each file with that of its translations; with None where there are none. UserError where some lack theirs."""
    if targets and len(files) != len(targets):
        raise UserError(
            "each file of texts goes with one of translations.",
            key=f"source.{key}",
            found=f"{len(targets)} for {len(files)} files",
            next="name as many, in the same order",
        )
    yield from zip(files, targets or [None] * len(files), strict=True)
