"""Documents of one raw file: Parquet, JSON lines or text, the last two also compressed. Memory holds a part of it."""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.corpus.reader import PAIR
from tokenscale.errors import UserError, nearest
from tokenscale.settings.data import SourceSettings

#: endings → format; `.gz`, `.zst` and `.zstd` may follow those of lines and text
ENDINGS = {
    "parquet": (".parquet", ".pq"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "text": (".txt", ".text", ".md", ".rst"),
}
COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
CHUNK_BYTES = 1 << 20
BATCH_ROWS = 512


def read(path: Path, source: SourceSettings) -> Iterator[str | None]:
    """Texts of a file in its order; None where a row holds no text (null). With `target_column` a text is a pair, its
    two parts joined by `PAIR`.

    Raises UserError for an ending that says nothing, a column or key that is not there, and content that cannot be
    read, naming file and line or byte.
    """
    form = source.format if source.format != "auto" else format_of(path)
    if form == "parquet":
        yield from _paired(_parquet(path, _columns(source)), path)
    elif form == "jsonl":
        yield from _paired(_json_lines(path, _columns(source)), path)
    elif source.target_column is not None:
        raise UserError(
            "a text file has no columns to hold pairs.",
            file=path,
            key="source.target_column",
            next="write the pairs to Parquet or JSON lines, two strings a row",
        )
    else:
        yield from _text(path, source.separator)


def format_of(path: Path) -> str:
    """The format that a file's ending says; UserError where it says none.

    >>> format_of(Path("a/owt_train.txt.gz"))
    'text'
    """
    name = path.name.lower()
    for ending in COMPRESSION:
        name = name.removesuffix(ending)
    for form, endings in ENDINGS.items():
        if name.endswith(endings):
            return form
    raise UserError(
        "the ending of a source file does not say what it holds.",
        file=path,
        known=", ".join(e for endings in ENDINGS.values() for e in endings) + "; each but Parquet also .gz, .zst",
        next="set `format` of the source to parquet, jsonl or text",
    )


def _columns(source: SourceSettings) -> dict[str, str]:
    """Option → the column that it names."""
    names = {"text_column": source.text_column, "target_column": source.target_column}
    return {option: name for option, name in names.items() if name is not None}


def _paired(rows: Iterator[tuple[str | None, ...]], path: Path) -> Iterator[str | None]:
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


def _parquet(path: Path, columns: dict[str, str]) -> Iterator[tuple[str | None, ...]]:
    try:
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)  # else all of it lies in memory by the end
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            "a source file is not readable Parquet.",
            file=path,
            reason=str(error).splitlines()[0],
            begins=repr(path.open("rb").read(24)),
            next="replace it, or set `format` of the source",
        ) from None
    names = file.schema_arrow.names
    for option, column in columns.items():
        if column not in names:
            raise _no_such(column, names, path, "column", option)
        kind = file.schema_arrow.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise UserError(
                f"the column {column!r} does not hold text.",
                file=path,
                key=f"source.{option}",
                found=str(kind),
                expected="string",
                next="name a column of strings",
            )
    wanted = list(columns.values())
    try:
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted, use_threads=False):
            yield from zip(*(batch.column(name).to_pylist() for name in wanted), strict=True)
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise UserError(
            "a source file breaks off or is damaged.", file=path, reason=str(error).splitlines()[0], next="replace it"
        ) from None


def _json_lines(path: Path, keys: dict[str, str]) -> Iterator[tuple[str | None, ...]]:
    for number, line in enumerate(_pieces(path, "\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                "a line of a source file is not JSON.",
                file=f"{path}, line {number}",
                reason=error.msg,
                begins=repr(line[:60]),
                next="mend or remove the line",
            ) from None
        for option, key in keys.items():
            if not isinstance(row, dict) or key not in row:
                raise _no_such(key, list(row) if isinstance(row, dict) else [], f"{path}, line {number}", "key", option)
            if row[key] is not None and not isinstance(row[key], str):
                raise UserError(
                    f"the key {key!r} does not hold text.",
                    file=f"{path}, line {number}",
                    key=f"source.{option}",
                    found=type(row[key]).__name__,
                    expected="a string, or null",
                )
        yield tuple(row[key] for key in keys.values())


def _text(path: Path, separator: str | None) -> Iterator[str]:
    if separator is None:
        yield "".join(_characters(path))
        return
    yield from _pieces(path, separator)


def _pieces(path: Path, separator: str) -> Iterator[str]:
    """What lies between the separators; an empty last piece (the file ends with a separator) is none."""
    begun: list[str] = []
    rest = ""
    for characters in _characters(path):
        pieces = (rest + characters).split(separator)
        if len(pieces) == 1:  # the separator may stand across two chunks: its possible beginning waits
            cut = max(0, len(pieces[0]) - len(separator) + 1)
            begun.append(pieces[0][:cut])
            rest = pieces[0][cut:]
            continue
        yield "".join(begun) + pieces[0]
        yield from pieces[1:-1]
        begun, rest = [], pieces[-1]
    last = "".join(begun) + rest
    if last:
        yield last


def _characters(path: Path) -> Iterator[str]:
    """The file as UTF-8, a chunk at a time; a byte order mark at its beginning is dropped."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    done = 0
    with _opened(path) as file:
        while True:
            try:
                data = file.read(CHUNK_BYTES)
            except (EOFError, OSError, zlib.error) as error:
                raise UserError(
                    "a source file breaks off or is damaged.",
                    file=path,
                    byte=f"{done:,} (unpacked)",
                    reason=str(error).splitlines()[0],
                    next="replace it",
                ) from None
            waiting = len(decoder.getstate()[0])
            try:
                characters = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise UserError(
                    "a source file is not UTF-8.",
                    file=path,
                    byte=f"{done - waiting + error.start:,}",
                    reason=error.reason,
                    next="convert it (iconv), or remove what is broken",
                ) from None
            if characters:
                yield characters
            if not data:
                return
            done += len(data)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    kind = COMPRESSION.get(path.suffix.lower())
    if kind == "gzip":
        with gzip.open(path) as file:
            yield file
    elif kind == "zstd":
        with pa.OSFile(str(path)) as raw, pa.CompressedInputStream(raw, "zstd") as file:
            yield file
    else:
        with path.open("rb") as file:
            yield file


def _no_such(name: str, names: list[str], file: object, what: str, option: str) -> UserError:
    near = nearest(name, names)
    return UserError(
        f"a source file has no {what} {name!r}.",
        file=file,
        key=f"source.{option}",
        has=", ".join(names) or "(none)",
        next=f"did you mean {near!r}?" if near else f"set `{option}` of the source to the {what} that holds the text",
    )
