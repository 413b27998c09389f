"""Reader of one raw file: Parquet, JSON lines, TSV, text, or a shard of MDS or litdata.

All but Parquet may be compressed. Memory holds a part of the file, or one whole shard.
"""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError
from tokenscale.data.corpus.columns import (
    get_column,
    get_type,
    get_value,
    join_pairs,
    list_columns,
    missing_column_error,
    read_line_pairs,
    read_tsv,
)
from tokenscale.data.corpus.shards import read_litdata, read_mds
from tokenscale.settings.data import SourceSettings

#: format → file endings; all but Parquet may be followed by `.gz`, `.zst` or `.zstd`
ENDINGS = {
    "parquet": (".parquet", ".pq"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "tsv": (".tsv",),
    "text": (".txt", ".text", ".md", ".rst"),
    "mds": (".mds",),
    "litdata": (".bin",),
}
COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
CHUNK_BYTES = 1 << 20
BATCH_ROWS, BATCH_BYTES = 512, 64 << 20
#: format of shards → function that yields the texts of a decompressed shard
SHARDS = {"mds": read_mds, "litdata": read_litdata}
#: maximum length of a document; tokenizer engines and id lists are unreliable beyond it
LONGEST_CHARACTERS = 1 << 30


def read_texts(path: Path, source: SourceSettings, target: Path | None = None) -> Iterator[str | None]:
    """Yield the texts of a file in order, with None for null.

    With `target_column`, or with a `target` file of translations line by line, a text is a pair joined by `PAIR`.
    Raises UserError for an unknown file ending, a missing column or key, and unreadable content, with the file and
    line or byte.
    """
    if target is not None:  # text whatever the file ending, such as europarl.de and europarl.en
        yield from join_pairs(read_line_pairs(_split_text(path, "\n"), _split_text(target, "\n"), path, target), path)
        return
    form = source.format if source.format != "auto" else detect_format(path)
    if form == "parquet":
        yield from join_pairs(_read_parquet(path, list_columns(source)), path)
    elif form == "jsonl":
        yield from join_pairs(_read_json_lines(path, list_columns(source)), path)
    elif form == "tsv":
        yield from join_pairs(read_tsv(_split_text(path, "\n"), list_columns(source), path), path)
    elif form in SHARDS:
        yield from join_pairs(SHARDS[form](_read_shard(path), list_columns(source), path), path)
    elif source.target_column is not None:
        raise UserError(
            "a text file has no columns to hold pairs.",
            file=path,
            key="source.target_column",
            next="name the file of translations as target_files, or write the pairs to Parquet, JSON lines or TSV",
        )
    else:
        yield from _read_text(path, source.separator)


def has_documents(path: Path, source: SourceSettings, target: Path | None = None) -> bool:
    """Return whether a file has any document, from its Parquet footer or its beginning. Raises UserError as
    `read_texts` does.
    """
    form = source.format if source.format != "auto" or target is not None else detect_format(path)
    if target is None and form == "parquet":
        return _open_parquet(path, list_columns(source)).metadata.num_rows > 0
    if target is None and form == "text" and source.separator is None and source.target_column is None:
        return any(characters.strip() for characters in _read_characters(path))
    return any(True for _ in read_texts(path, source, target))


def detect_format(path: Path) -> str:
    """Return the format of a file from its ending. Raises UserError for an unknown ending.

    >>> detect_format(Path("a/owt_train.txt.gz"))
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
        next="set `format` of the source to one of " + ", ".join(ENDINGS),
    )


def _open_parquet(path: Path, columns: dict[str, str]) -> pq.ParquetFile:
    """Open a Parquet file. Raises UserError unless each of `columns` (option → name) occurs once and holds text."""
    try:
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)  # pre-buffering keeps read bytes
        _ = file.schema_arrow.names  # raises for a name that is not UTF-8
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise UserError(
            "a source file is not readable Parquet.",
            file=path,
            reason=str(error).splitlines()[0],
            begins=repr(path.open("rb").read(24)),
            next="replace it, or set `format` of the source",
        ) from None
    groups = range(file.metadata.num_row_groups)
    _check_rows(file, path, sum(file.metadata.row_group(number).num_rows for number in groups))
    for option, column in columns.items():
        if file.schema_arrow.names.count(column) > 1:
            raise UserError(
                f"a source file has several columns {column!r}.",
                file=path,
                key=f"source.{option}",
                has=", ".join(file.schema_arrow.names),
                next="write the file again with one of them",
            )
        kind = get_type(file.schema_arrow, column)
        if kind is None:
            raise missing_column_error(column, file.schema_arrow.names, path, "column", option)
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
    return file


def _check_rows(file: pq.ParquetFile, path: Path, rows: int) -> None:
    """Raise UserError unless the footer counts `rows`: a damaged count would be read as fewer documents, or none."""
    if file.metadata.num_rows != rows:
        raise UserError(
            "the footer of a source file contradicts its content.",
            file=path,
            found=f"{rows:,} rows",
            expected=f"{file.metadata.num_rows:,} rows, as its footer counts",
            next="replace it",
        )


def _read_parquet(path: Path, columns: dict[str, str]) -> Iterator[tuple[str | None, ...]]:
    file = _open_parquet(path, columns)
    names, row = list(columns.values()), 0
    try:
        for batch in file.iter_batches(batch_size=_choose_batch_rows(file), columns=names, use_threads=False):
            yield from zip(*(_decode_texts(get_column(batch, name), row, path) for name in names), strict=True)
            row += len(batch)
        _check_rows(file, path, row)
    except (pa.ArrowInvalid, pa.ArrowKeyError, OSError) as error:
        raise damaged_error(path, error, row=f"{row:,} or after") from None


def _choose_batch_rows(file: pq.ParquetFile) -> int:
    """Return the number of rows per decoded batch, fewer for long documents."""
    groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
    mean = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, mean)))


def _decode_texts(column: pa.Array, first: int, path: Path) -> list[str | None]:
    """Return the texts of a column. Parquet does not check UTF-8: raises UserError with the row that is malformed."""
    try:
        texts = column.to_pylist()
        longest = max((len(text) for text in texts if text is not None), default=0)
        _check_length(longest, path, first)
        return texts
    except UnicodeDecodeError:
        for number, value in enumerate(column, start=first):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                raise UserError(
                    "a text of a source file is not UTF-8.",
                    file=path,
                    row=f"{number:,}",
                    reason=error.reason,
                    begins=repr(value.as_buffer().to_pybytes()[:60]),
                    next="correct or remove the row",
                ) from None
        raise


def damaged_error(path: Path, error: Exception, **where: str) -> UserError:
    """Return the error for a source file that cannot be read to its end."""
    what = "a source file is truncated or damaged."
    return UserError(what, file=path, **where, reason=_first_line(error), next="replace it")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read_json_lines(path: Path, keys: dict[str, str]) -> Iterator[tuple[str | None, ...]]:
    for number, line in enumerate(_split_text(path, "\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # also numbers with too many digits, and too deep nesting
            raise UserError(
                "a line of a source file is not JSON.",
                file=f"{path}, line {number}",
                reason=getattr(error, "msg", None) or _first_line(error),
                begins=repr(line[:60]),
                next="correct or remove the line",
            ) from None
        texts = []
        for option, key in keys.items():
            try:
                text = get_value(row, key)
            except (KeyError, TypeError):
                names = list(row) if isinstance(row, dict) else []
                raise missing_column_error(key, names, f"{path}, line {number}", "key", option) from None
            if text is not None and not isinstance(text, str):
                raise UserError(
                    f"the key {key!r} does not hold text.",
                    file=f"{path}, line {number}",
                    key=f"source.{option}",
                    found=type(text).__name__,
                    expected="a string, or null",
                    next="name another key, or correct this line",
                )
            texts.append(text)
        yield tuple(texts)


def _read_text(path: Path, separator: str | None) -> Iterator[str]:
    if separator is not None:
        yield from _split_text(path, separator.replace("\r\n", "\n"))
        return
    parts, length = [], 0
    for characters in _read_characters(path):
        parts.append(characters)
        length += len(characters)
        _check_length(length, path, 0)
    yield "".join(parts)


def _split_text(path: Path, separator: str) -> Iterator[str]:
    """Yield the pieces between separators. An empty last piece, after a final separator, is skipped."""
    partial: list[str] = []
    rest = ""
    number = length = 0
    for characters in _read_characters(path):
        pieces = (rest + characters).split(separator)
        length = length + len(characters) if len(pieces) == 1 else len(pieces[-1])
        number += len(pieces) - 1
        _check_length(length, path, number)
        if len(pieces) == 1:  # the separator may span two chunks: keep its possible beginning
            cut = max(0, len(pieces[0]) - len(separator) + 1)
            partial.append(pieces[0][:cut])
            rest = pieces[0][cut:]
            continue
        yield "".join(partial) + pieces[0]
        yield from pieces[1:-1]
        partial, rest = [], pieces[-1]
    last = "".join(partial) + rest
    if last:
        yield last


def _check_length(characters: int, path: Path, number: int) -> None:
    """Raise UserError for a document that is too long, before it fills the memory."""
    if characters > LONGEST_CHARACTERS:
        raise UserError(
            "a document is too long.",
            file=path,
            document=f"{number:,}",
            expected=f"at most {LONGEST_CHARACTERS:,} characters",
            next="cut it, or set `separator` of the source to what stands between documents",
        )


def _read_characters(path: Path) -> Iterator[str]:
    """Yield the file decoded from UTF-8 in chunks, without byte order mark and with "\r\n" replaced by "\n"."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    newlines = io.IncrementalNewlineDecoder(None, translate=False)
    done = 0
    with _open_binary(path) as file:
        while True:
            try:
                data = file.read(CHUNK_BYTES)
            except (EOFError, OSError, zlib.error) as error:
                raise damaged_error(path, error, byte=f"{done:,} (unpacked)") from None
            pending = len(decoder.getstate()[0])
            try:
                characters = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise UserError(
                    "a source file is not UTF-8.",
                    file=path,
                    byte=f"{done - pending + error.start:,}",
                    reason=error.reason,
                    next="convert it (iconv), or remove what is broken",
                ) from None
            # holds back "\r" at the end of a chunk until the next character is known
            characters = newlines.decode(characters, final=not data).replace("\r\n", "\n")
            if characters:
                yield characters
            if not data:
                return
            done += len(data)


def _read_shard(path: Path) -> bytes:
    try:
        with _open_binary(path) as file:
            return file.read()
    except (EOFError, OSError, zlib.error) as error:
        raise damaged_error(path, error) from None


@contextmanager
def _open_binary(path: Path) -> Iterator[Any]:
    name = path.name.lower().removesuffix(".bin")  # litdata writes chunk.zstd.bin
    kind = COMPRESSION.get(Path(name).suffix)
    if kind == "gzip":
        with gzip.open(path) as file:
            yield file
    elif kind == "zstd":
        with pa.OSFile(str(path)) as raw, pa.CompressedInputStream(raw, "zstd") as file:
            yield file
    else:
        with path.open("rb") as file:
            yield file
