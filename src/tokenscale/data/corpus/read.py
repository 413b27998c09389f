"""Reader of one raw file: Parquet, JSON lines or a JSON array, CSV, TSV, text, or a shard of MDS or
litdata.

All but Parquet may be compressed. Memory holds a part of the file, one whole shard, or one whole
array.
"""

import codecs
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tokenscale.base.errors import UserError, first_line
from tokenscale.base.files import RATIO, UNPACKED, naming, naming_anew, open_file
from tokenscale.data.corpus.columns import (
    get_column,
    get_type,
    get_value,
    join_pairs,
    list_columns,
    read_line_pairs,
    read_table,
    split_csv,
    split_tsv,
)
from tokenscale.data.corpus.refusals import damaged, missing_column
from tokenscale.data.corpus.shards import read_litdata, read_mds
from tokenscale.settings.data import SourceSettings

#: endings of source code, each file a document
CODE = (".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".go", ".java", ".js", ".ts", ".rs", ".sh")
COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
#: compression → pattern of the first bytes of its files
MAGIC = {"gzip": rb"\x1f\x8b", "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"}
CHUNK_BYTES = 1 << 20
#: compressed bytes decoded at once: a few KB can hold 128 MiB of zeros
ZSTD_BYTES = 1 << 14
BATCH_ROWS = 512
BATCH_BYTES = 64 << 20
#: maximum length of a document; tokenizer engines and id lists are unreliable beyond it
LONGEST_CHARACTERS = 1 << 30
#: maximum length of a JSON array, which is decoded as a whole
ARRAY_CHARACTERS = 1 << 28
Span = tuple[int, int]
Rows = Generator[tuple[str | None, ...], None, None]


class RawFile(NamedTuple):
    """File of a source: its path, whose ending says what it holds, and the file itself if it has
    been opened and checked: what is read is then that file, whatever the path leads to.
    """

    path: Path
    checked: BufferedReader | None = None

    def open(self) -> BufferedReader:
        """Open the file at its beginning. Raises UserError as `open_file` does."""
        if self.checked is None:
            return open(open_file(self.path), "rb")
        with naming_anew(self.path):
            return open(f"/dev/fd/{self.checked.fileno()}", "rb")

    def measure_size(self) -> int:
        return os.stat(self.path if self.checked is None else self.checked.fileno()).st_size


def read_texts(
    path: Path, source: SourceSettings, target: Path | None = None, span: Span | None = None
) -> Generator[str | None, None, None]:
    """Yield the texts of a file by its path; see `read_raw_file`."""
    translated = None if target is None else RawFile(target)
    return read_raw_file(RawFile(path), source, translated, span)


def read_first(path: Path, source: SourceSettings) -> str | None:
    """Return the first text of a file; None for null, and where there is none. Raises as
    `read_texts` does.
    """
    with closing(read_texts(path, source)) as texts:
        return next(texts, None)


def read_raw_file(
    file: RawFile, source: SourceSettings, target: RawFile | None = None, span: Span | None = None
) -> Generator[str | None, None, None]:
    """Yield the texts of a file in order, with None for null.

    With `target_column`, or with a `target` file of translations line by line, a text is a pair
    joined by `PAIR`. `span` restricts an uncompressed file of JSON lines or text to bytes [first,
    last), see `find_start`, and a Parquet file to row groups. Raises UserError for an unknown file
    ending, and as `refusals.REFUSALS` lists.
    """
    form = "pairs" if target is not None else detect_format(file.path, source)
    if target is not None:  # text whatever the file ending, such as europarl.de and europarl.en
        rows: Rows = read_line_pairs(
            _split_text(file, separator="\n"),
            second=_split_text(target, separator="\n"),
            path=file.path,
            target=target.path,
        )
    elif (read := FORMATS[form].read) is not None:
        rows = read(file, list_columns(source), span)
    elif source.target_column is not None:
        next_step = (
            "name the file of translations as target_files, or write the pairs to Parquet, JSON "
            "lines, CSV or TSV"
        )
        raise UserError(
            "a text file has no columns to hold pairs.",
            file=file.path,
            key="source.target_column",
            next=next_step,
        )
    elif source.separator is not None:
        yield from _split_text(file, separator=source.separator.replace("\r\n", "\n"), span=span)
        return
    else:
        yield _read_whole(file, what="too long", maximum=LONGEST_CHARACTERS)
        return
    with closing(rows):  # its file too, where not all are read
        yield from join_pairs(rows, file.path)


def read_usable_texts(
    path: Path, source: SourceSettings, span: Span | None = None
) -> Iterator[str]:
    """Yield the texts that a corpus keeps: all but null, and texts with lone surrogates, which
    UTF-8 cannot encode.
    """
    texts = read_texts(path, source, span=span)
    return (text for text in texts if text is not None and not re.search("[\ud800-\udfff]", text))


def has_documents(path: Path, source: SourceSettings, target: Path | None = None) -> bool:
    """Return whether a file has any document, from its footer or beginning. Raises UserError as
    `read_texts` does.
    """
    form = "pairs" if target is not None else detect_format(path, source)
    if form == "parquet":
        with _open_parquet(RawFile(path), columns=list_columns(source)) as file:
            return file.metadata.num_rows > 0
    if form == "text" and source.separator is None and source.target_column is None:
        return any(characters.strip() for characters in _read_characters(RawFile(path)))
    with closing(read_texts(path, source, target=target)) as texts:
        return any(True for _ in texts)


def detect_format(path: Path, source: SourceSettings | None = None) -> str:
    """Return the format of a file: the declared one, or that of its ending. Raises UserError for an
    unknown ending.

    >>> detect_format(Path("a/owt_train.txt.gz"))
    'text'
    """
    if source is not None and source.format != "auto":
        return source.format
    name = path.name.lower()
    for ending in COMPRESSION:
        name = name.removesuffix(ending)
    for form, endings in ENDINGS.items():
        if name.endswith(endings):
            return form
    what = "the ending of a source file does not say what it holds."
    next_step = "set `format` of the source to one of "
    known = (
        ", ".join(e for endings in ENDINGS.values() for e in endings)
        + "; each but Parquet also .gz, .zst"
    )
    raise UserError(what, file=path, known=known, next=next_step + ", ".join(ENDINGS))


# --------------------------------------------------------------------------------------------------
# Parquet


@contextmanager
def _open_parquet(raw: RawFile, columns: dict[str, str]) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. Raises UserError unless each of `columns` (option → name) occurs once
    and holds text.
    """
    path = raw.path
    with naming(path), raw.open() as opened:
        try:
            # pre-buffering keeps read bytes
            file = pq.ParquetFile(opened, pre_buffer=False, buffer_size=1 << 20)
            names = file.schema_arrow.names  # raises for a name that is not UTF-8
        except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            opened.seek(0)
            begins = repr(opened.read(24))
            raise damaged(
                path,
                what="parquet",
                reason=str(error).splitlines()[0],
                begins=begins,
            ) from None
        _check_columns(file, path, columns=columns, names=names)
        yield file


def _check_columns(
    file: pq.ParquetFile, path: Path, columns: dict[str, str], names: list[str]
) -> None:
    """Raise UserError unless each of `columns` occurs once among the `names` and holds text."""
    groups = range(file.metadata.num_row_groups)
    _check_rows(file, path, rows=sum(file.metadata.row_group(number).num_rows for number in groups))
    for option, column in columns.items():
        if names.count(column) > 1:
            raise damaged(
                path,
                what="same columns",
                found=", ".join(names),
                name=column,
                key=f"source.{option}",
            )
        kind = get_type(file.schema_arrow, name=column)
        if kind is None:
            raise missing_column(
                path,
                name=column,
                names=names,
                option=option,
            )
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (
            pa.types.is_string(kind)
            or pa.types.is_large_string(kind)
            or pa.types.is_string_view(kind)
        ):
            raise damaged(
                path,
                what="no text",
                found=kind,
                expected="string",
                name=column,
                key=f"source.{option}",
            )


def _check_rows(file: pq.ParquetFile, path: Path, rows: int) -> None:
    """Raise UserError unless the footer counts `rows`: a damaged count would be read as fewer
    documents, or none.
    """
    if file.metadata.num_rows != rows:
        raise damaged(
            path,
            what="rows",
            found=f"{rows:,} rows",
            expected=f"{file.metadata.num_rows:,} rows, as its footer counts",
        )


def _read_parquet(raw: RawFile, columns: dict[str, str], span: Span | None) -> Rows:
    with _open_parquet(raw, columns) as file:
        yield from _read_opened(file, raw, columns=columns, span=span)


def _read_opened(
    file: pq.ParquetFile, raw: RawFile, columns: dict[str, str], span: Span | None
) -> Rows:
    path = raw.path
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    first, last = span or (0, len(groups))
    names = list(columns.values())
    row = sum(group.num_rows for group in groups[:first])
    # fewer rows per batch for long documents
    mean = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    size = max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, mean)))
    most = UNPACKED + RATIO * raw.measure_size()
    unpacked = 0
    try:
        for batch in file.iter_batches(size, range(first, last), names, use_threads=False):
            yield from zip(
                *(_decode_texts(get_column(batch, name), first=row, path=path) for name in names),
                strict=True,
            )
            row += len(batch)
            unpacked += batch.nbytes
            if unpacked > most:  # a dictionary of one large text, for one
                raise OSError(f"it unpacks to more than {most:,} bytes")
        if last == len(groups):
            _check_rows(file, path, rows=row)
    except (pa.ArrowInvalid, pa.ArrowKeyError, OSError) as error:
        raise damaged(
            path,
            what="damaged",
            found=first_line(error),
            row=f"{row:,} or after",
        ) from None


def _decode_texts(column: pa.Array, first: int, path: Path) -> list[str | None]:
    """Return the texts of a column. Parquet does not check UTF-8: raises UserError with the row
    that is malformed.
    """
    try:
        texts = column.to_pylist()
        _check_length(
            max((len(text) for text in texts if text is not None), default=0), path, number=first
        )
        return texts
    except UnicodeDecodeError:
        for number, value in enumerate(column, start=first):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                begins = repr(value.as_buffer().to_pybytes()[:60])
                raise damaged(
                    path,
                    what="utf-8",
                    found=f"{error.reason}: {begins}",
                    row=f"{number:,}",
                ) from None
        raise


# --------------------------------------------------------------------------------------------------
# JSON


class _SameKeysError(ValueError):
    """A key occurs twice in one object."""


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _SameKeysError(f"{next(key for key in row if keys.count(key) > 1)!r} twice")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_make_object)


def is_array(file: RawFile) -> bool:
    """Return whether a file begins as a JSON array."""
    return next(_read_characters(file), "").lstrip()[:1] == "["


def _read_json(file: RawFile, keys: dict[str, str], span: Span | None) -> Rows:
    """Yield the texts under `keys` of each line, or of each element if the file is one array."""
    path = file.path
    if span is None and is_array(file):
        done = 0
        with suppress(ValueError, RecursionError):  # plans read the first element alone
            first = _DECODER.raw_decode(next(_read_characters(file)).lstrip()[1:].lstrip())[0]
            yield _get_texts(
                first,
                keys,
                path=path,
                label="element",
                number=1,
            )
            done = 1
        rows = _decode_json(
            _read_whole(file, what="array", maximum=ARRAY_CHARACTERS), path, what="array"
        )
        for number, row in enumerate(rows[done:], start=done + 1):
            yield _get_texts(
                row,
                keys,
                path=path,
                label="element",
                number=number,
            )
        return
    label = "line" if span is None else f"line after byte {span[0]:,}"
    for number, line in enumerate(_split_text(file, separator="\n", span=span), start=1):
        line = line.removeprefix("\ufeff")  # of files that were joined
        if line.strip():
            yield _get_texts(
                _decode_json(
                    line,
                    path,
                    what="json",
                    label=label,
                    number=number,
                ),
                keys,
                path=path,
                label=label,
                number=number,
            )


def _decode_json(text: str, path: Path, what: str, label: str = "", number: int = 0) -> Any:
    try:
        return _DECODER.decode(text)
    # also numbers with too many digits, and too deep nesting
    except (ValueError, RecursionError) as error:
        what = "same keys" if isinstance(error, _SameKeysError) else what
        place: dict[str, Any] = {label: number} if label else {}
        raise damaged(
            path,
            what,
            found=first_line(error),
            **place,
            begins=repr(text[:60]),
        ) from None


def _get_texts(
    row: Any, keys: dict[str, str], path: Path, label: str, number: int
) -> tuple[str | None, ...]:
    texts = []
    for option, key in keys.items():
        try:
            text = get_value(row, name=key)
        except (KeyError, TypeError):
            names = list(row) if isinstance(row, dict) else []
            place = {label: number}
            raise missing_column(
                path,
                name=key,
                names=names,
                option=option,
                kind="key",
                **place,
            ) from None
        if text is not None and not isinstance(text, str):
            terms: dict[str, Any] = {
                label: number,
                "kind": "key",
                "name": key,
                "key": f"source.{option}",
            }
            raise damaged(
                path,
                what="no text",
                found=type(text).__name__,
                expected="a string, or null",
                **terms,
            )
        texts.append(text)
    return tuple(texts)


# --------------------------------------------------------------------------------------------------
# text


def _read_whole(file: RawFile, what: str, maximum: int) -> str:
    """Return the text of a file. Raises the refusal `what` for more than `maximum` characters."""
    parts = []
    length = 0
    for characters in _read_characters(file):
        parts.append(characters)
        length += len(characters)
        _check_length(
            length,
            file.path,
            number=0,
            what=what,
            maximum=maximum,
        )
    return "".join(parts)


def _split_text(file: RawFile, separator: str, span: Span | None = None) -> Iterator[str]:
    """Yield the pieces between separators. An empty last piece, after a final separator, is
    skipped.
    """
    partial: list[str] = []
    rest = ""
    number = length = 0
    for characters in _read_characters(file, span, nul="\0" in separator):
        pieces = (rest + characters).split(separator)
        length = length + len(characters) if len(pieces) == 1 else len(pieces[-1])
        number += len(pieces) - 1
        _check_length(length, file.path, number=number)
        if len(pieces) == 1:  # the separator may span two chunks: keep its possible beginning
            cut = max(0, len(pieces[0]) - len(separator) + 1)
            partial.append(pieces[0][:cut])
            rest = pieces[0][cut:]
            continue
        yield "".join(partial) + pieces[0]
        yield from pieces[1:-1]
        partial = []
        rest = pieces[-1]
    last = "".join(partial) + rest
    if last:
        yield last


def find_start(path: Path, position: int, source: SourceSettings) -> int:
    """Return the first byte from `position` on at which a line, or a document of text, begins, or
    the file's size.
    """
    if not position:
        return 0
    text = "\n"
    if detect_format(path, source) == "text":
        assert source.separator is not None  # without one, a file is one document
        text = source.separator.replace("\r\n", "\n")
    separator = text.encode()
    pattern = re.compile(re.escape(separator).replace(b"\\\n", b"\r?\n"))
    longest = len(separator.replace(b"\n", b"\r\n"))
    with path.open("rb") as file:
        start = max(0, position - longest)  # of `data` in the file
        file.seek(start)
        data = b""
        while more := file.read(CHUNK_BYTES):
            data += more
            for found in pattern.finditer(data):
                if start + found.end() >= position:
                    return start + found.end()
            start = start + max(0, len(data) - longest)
            data = data[-longest:]
        return file.tell()


def _check_length(
    characters: int, path: Path, number: int, what: str = "too long", maximum: int | None = None
) -> None:
    """Raise UserError for a document that is too long, before it fills the memory."""
    maximum = LONGEST_CHARACTERS if maximum is None else maximum
    if characters > maximum:
        raise damaged(
            path, what, expected=f"at most {maximum:,} characters", document=f"{number:,}"
        )


def _read_characters(file: RawFile, span: Span | None = None, nul: bool = False) -> Iterator[str]:
    """Yield the file decoded from UTF-8 in chunks, without byte order mark and with "\r\n" replaced
    by "\n".

    Raises UserError for NUL bytes unless `nul`.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    newlines = io.IncrementalNewlineDecoder(None, translate=False)
    path = file.path
    done = span[0] if span else 0
    for data in chain(read_bytes(file, span), (b"",)):
        pending = len(decoder.getstate()[0])
        try:
            characters = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            compressed = path.suffix.lower() not in COMPRESSION and _detect_compression(file)
            what = "compression" if compressed else "utf-8"
            byte = f"{done - pending + error.start:,}"
            raise damaged(
                path,
                what,
                found=compressed or error.reason,
                byte=byte,
            ) from None
        if b"\0" in data and not nul:
            raise damaged(path, what="nul", byte=f"{done + data.index(0):,}")
        # holds back "\r" at the end of a chunk until the next character is known
        characters = newlines.decode(characters, final=not data).replace("\r\n", "\n")
        if characters:
            yield characters
        done += len(data)


# --------------------------------------------------------------------------------------------------
# bytes


def read_bytes(file: RawFile, span: Span | None = None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file in chunks, none of them empty; `span` is for
    uncompressed files.
    """
    path = file.path
    name = path.name.lower().removesuffix(".bin")  # litdata writes chunk.zstd.bin
    kind = COMPRESSION.get(Path(name).suffix)
    done = 0
    (first, last) = span or (0, sys.maxsize)
    try:
        if kind and not file.measure_size():
            raise EOFError("0 bytes")
        if kind:
            for data in unpack(file, kind):
                done += len(data)
                yield data
            return
        with file.open() as opened:
            opened.seek(first)
            while data := opened.read(min(CHUNK_BYTES, last - first - done)):
                done += len(data)
                yield data
    except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
        found = first_line(error)
        what = "dictionary" if found.endswith("Dictionary mismatch") else "damaged"
        if (
            not done
            and path.is_file()
            and file.measure_size()
            and _detect_compression(file) != kind
        ):
            what = "compression"
        raise damaged(path, what, found=found, byte=f"{done:,} (unpacked)") from None


def unpack(raw: RawFile, kind: str) -> Iterator[bytes]:
    """Yield the content of a file compressed as gzip or zstd. Raises EOFError for a file that is
    cut or unpacks to far more than its size, OSError, zlib.error and ZstdError.
    """
    most = UNPACKED + RATIO * raw.measure_size()
    done = 0
    with raw.open() as opened:
        file = cast(IO[bytes], gzip.GzipFile(fileobj=opened) if kind == "gzip" else opened)
        chunks = iter(lambda: file.read(CHUNK_BYTES), b"")
        for data in decompress_zstd(file) if kind == "zstd" else chunks:
            done += len(data)
            if done > most:
                raise EOFError(f"it unpacks to more than {most:,} bytes")
            yield data


def _detect_compression(file: RawFile) -> str | None:
    with file.open() as opened:
        begins = opened.read(4)
    return next((kind for kind, magic in MAGIC.items() if re.match(magic, begins)), None)


def decompress_zstd(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of all zstd frames, of windows up to 2 GiB. Raises EOFError for a cut
    frame, and ZstdError.
    """
    context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    rest = b""
    while data := rest or file.read(ZSTD_BYTES):
        frame = frame or context.decompressobj()
        if content := frame.decompress(data):
            yield content
        frame, rest = (None, frame.unused_data) if frame.eof else (frame, b"")
    if frame is not None:
        raise EOFError("the last zstd frame is not complete")


class Format(NamedTuple):
    """Format of source files: their endings, the reader of (file, columns, span), what the reader
    changes in a text or leaves out, and the counts of `build.clean` for texts that it cannot give.
    """

    endings: tuple[str, ...]
    read: Callable[[RawFile, dict[str, str], Span | None], Rows] | None
    changes: str
    counts: tuple[str, ...] = ()


_ENCODING = 'a byte order mark at the beginning is removed; "\\r\\n" becomes "\\n"'
#: format → its reader; all but Parquet may be followed by `.gz`, `.zst` or `.zstd`
FORMATS = {
    "parquet": Format(
        endings=(".parquet", ".pq"),
        read=_read_parquet,
        changes="",
        counts=("no_text",),
    ),
    "jsonl": Format(
        endings=(".jsonl", ".ndjson", ".json"),
        read=_read_json,
        changes=(
            "byte order marks before lines are removed; blank lines are skipped; keys that are not "
            "named are not read"
        ),
        counts=("no_text", "not_unicode"),
    ),
    "tsv": Format(
        endings=(".tsv",),
        read=lambda file, columns, _: read_table(
            split_tsv(_split_text(file, separator="\n"), file.path),
            names=columns,
            path=file.path,
        ),
        changes=f"{_ENCODING}; blank lines are skipped; quotes are text",
    ),
    "csv": Format(
        endings=(".csv",),
        read=lambda file, columns, _: read_table(
            split_csv(_split_text(file, separator="\n"), file.path),
            names=columns,
            path=file.path,
        ),
        changes=f"{_ENCODING}; blank lines are skipped; quotes around a field are removed",
    ),
    "text": Format(
        endings=(".txt", ".text", ".md", ".rst", *CODE),
        read=None,
        changes=f"{_ENCODING}; the separator is removed",
    ),
    "mds": Format(
        endings=(".mds",),
        read=lambda file, columns, _: read_mds(b"".join(read_bytes(file)), columns, path=file.path),
        changes="",
    ),
    "litdata": Format(
        endings=(".bin",),
        read=lambda file, columns, _: read_litdata(
            b"".join(read_bytes(file)), columns, path=file.path
        ),
        changes="",
        counts=("no_text",),
    ),
}
ENDINGS = {name: form.endings for name, form in FORMATS.items()}
