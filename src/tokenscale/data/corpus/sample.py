"""Documents spread over a data set, without reading all of it: row groups of Parquet, stretches of lines and text.

Memory holds the sample and a part of one file, whatever the data set's size. Equal files, settings and seed give an
equal sample.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError
from tokenscale.data.corpus.columns import get_column
from tokenscale.data.corpus.read import COMPRESSION, detect_format, read_texts
from tokenscale.settings.data import SourceSettings

#: a sample's text, whatever number of documents is asked for
SAMPLE_BYTES = 24_000_000
#: a data set up to this size is read whole; of a larger one, so much
READ_BYTES = 256_000_000
#: what lies compressed can be entered at its beginning only; more text than this is not waited for
COMPRESSED_BYTES = 2_000_000_000
STRETCHES = 64
LEAST_GROUPS = 16


@dataclass(frozen=True)
class Sample:
    """Some documents of a data set."""

    texts: list[str]
    #: which independent draw each document belongs to, and how many there were
    units: np.ndarray
    unit_count: int
    #: documents of the data set: exact where `counted`, else scaled up from the sample
    documents: float
    counted: bool
    #: in words: what was looked at
    where: str


def draw_sample(paths: list[Path], source: SourceSettings, documents: int, seed: int = 0) -> Sample:
    """About so many documents of these files; all of them where there are fewer.

    Raises UserError for files that cannot be read, that are empty, or that hold fewer than two documents.
    """
    for path in paths:
        if path.stat().st_size == 0:
            raise UserError("the input file is empty.", file=path, next="name another")
    forms = {path: source.format if source.format != "auto" else detect_format(path) for path in paths}
    next(read_texts(paths[0], source), None)  # tells a wrong column and an unreadable file
    kinds = set(forms.values())
    packed = any(path.suffix.lower() in COMPRESSION for path in paths)
    size = sum(path.stat().st_size for path in paths)
    if kinds == {"parquet"}:
        found = _sample_row_groups(paths, source, documents, seed)
    elif kinds == {"text"} and source.separator is None:
        found = _sample_files(paths, source, documents, seed)
    elif size <= READ_BYTES or packed or len(kinds) > 1 or "tsv" in kinds:
        found = _sample_all(paths, source, documents, seed)
    else:
        found = _sample_stretches(paths, source, kinds.pop(), documents, seed)
    if len(found.texts) < 2:
        raise UserError(
            "the input holds no documents." if not found.texts else "the input is one document: nothing can be said.",
            file=paths[0],
            next="name more files"
            + (", or --separator TEXT, which stands between the documents" if "text" in forms.values() else ""),
        )
    return found


def _sample_row_groups(paths: list[Path], source: SourceSettings, documents: int, seed: int) -> Sample:
    """Rows drawn from all row groups, or from some that are spread evenly over the files."""
    generator = np.random.default_rng(seed)
    groups: list[tuple[Path, int, int]] = []
    sizes: list[int] = []
    for path in paths:
        next(read_texts(path, source), None)
        metadata = pq.read_metadata(path)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            columns = (group.column(i) for i in range(group.num_columns))
            column = next(c for c in columns if c.path_in_schema == source.text_column)
            if group.num_rows:
                groups.append((path, number, group.num_rows))
                sizes.append(column.total_uncompressed_size)
    rows = sum(n for _, _, n in groups)
    if not rows:
        return Sample([], np.zeros(0, int), 0, 0.0, True, "")
    chosen = np.arange(len(groups))
    wanted = max(LEAST_GROUPS, int(READ_BYTES / np.mean(sizes)))
    if sum(sizes) > READ_BYTES and wanted < len(groups):
        chosen = ((np.arange(wanted) + generator.random()) * len(groups) / wanted).astype(int)
    # of a giant row group its beginning: the share that may be read
    share = min(1.0, max(READ_BYTES / LEAST_GROUPS, READ_BYTES / len(chosen)) / max(float(np.mean(sizes)), 1.0))
    held = np.array([max(1, int(groups[g][2] * share)) for g in chosen])
    most = max(2, int(SAMPLE_BYTES / max(1.0, sum(sizes) / rows)))
    picked = np.sort(generator.choice(held.sum(), size=min(documents, most, held.sum()), replace=False))
    bounds = np.concatenate(([0], np.cumsum(held)))
    texts: list[str | None] = []
    units: list[int] = []
    for unit, g in enumerate(chosen):
        here = picked[(picked >= bounds[unit]) & (picked < bounds[unit + 1])] - bounds[unit]
        texts += _read_rows(*groups[g][:2], source.text_column, here)
        units += [unit] * len(here)
    kept = [i for i, text in enumerate(texts) if text is not None]
    where = f"{len(chosen):,} of {len(groups):,} row groups" + ("" if share == 1 else ", of each its beginning")
    every = len(chosen) == len(groups) and share == 1
    return Sample(
        [texts[i] for i in kept],
        np.arange(len(kept)) if every or len(chosen) < 8 else np.array(units)[kept],
        len(kept) if every or len(chosen) < 8 else len(chosen),
        rows * len(kept) / len(texts),
        len(kept) == len(texts),
        where,
    )


def _read_rows(path: Path, group: int, column: str, wanted: np.ndarray) -> Iterator[str | None]:
    """Some rows of a row group; decodes it a batch at a time, up to the last of them."""
    if not len(wanted):
        return
    first = 0
    try:
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=[column], use_threads=False):
            here = wanted[(wanted >= first) & (wanted < first + len(batch))] - first
            yield from get_column(batch, column).take(pa.array(here)).to_pylist()
            first += len(batch)
            if first > wanted[-1]:
                return
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            "a source file breaks off or is damaged.", file=path, reason=reason, next="replace it"
        ) from None


def _sample_files(paths: list[Path], source: SourceSettings, documents: int, seed: int) -> Sample:
    """Text files that are one document each: some of the files."""
    mean = sum(path.stat().st_size for path in paths) / len(paths)
    most = min(documents, max(2, int(SAMPLE_BYTES / mean)))
    chosen = random.Random(seed).sample(paths, min(most, len(paths)))
    texts = [text for path in sorted(chosen) for text in read_texts(path, source)]
    return Sample(texts, np.arange(len(texts)), len(texts), len(paths), True, f"{len(texts):,} of {len(paths):,} files")


def _sample_all(paths: list[Path], source: SourceSettings, documents: int, seed: int) -> Sample:
    """Every document is read, some are kept: reservoir sampling (Vitter 1985, algorithm R)."""
    draw = random.Random(seed)
    kept: list[tuple[int, str]] = []
    number = done = 0
    for text in (text for path in paths for text in read_texts(path, source)):
        if text is None:
            continue
        at = number if number < documents else draw.randrange(number + 1)
        if at < documents:
            kept[at : at + 1] = [(number, text)]
        number += 1
        done += len(text)
        if done > COMPRESSED_BYTES:
            raise UserError(
                "compressed text cannot be entered in the middle, and this is too much to read.",
                read=f"{done / 1e9:.1f} GB of text",
                next="unpack it, or name a part of the files",
            )
    share = SAMPLE_BYTES / max(1, sum(len(text) for _, text in kept))
    if share < 1:
        kept = draw.sample(kept, max(2, int(len(kept) * share)))
    texts = [text for _, text in sorted(kept)]
    return Sample(texts, np.arange(len(texts)), len(texts), number, True, "all of it read")


def _sample_stretches(paths: list[Path], source: SourceSettings, form: str, documents: int, seed: int) -> Sample:
    """Documents that begin in one of some stretches of bytes, one stretch in each equal part of the data set.

    Every byte is as likely as any other to lie in a stretch, so that long documents are not preferred.
    """
    separator = (source.separator or "\n").encode() if form == "text" else b"\n"
    total = sum(path.stat().st_size for path in paths)
    beginning = list(islice(_read_pieces(paths[0], 0, 1 << 18, separator), 1000))
    mean = max(1.0, sum(map(len, beginning)) / max(1, len(beginning)))
    part = total // STRETCHES
    span = int(min(part, max(1 << 14, min(documents * mean, SAMPLE_BYTES) / STRETCHES)))
    draw = random.Random(seed)
    texts: list[str] = []
    units: list[int] = []
    rows = 0
    for stretch in range(STRETCHES):
        first = stretch * part + draw.randrange(part - span + 1)
        for path in paths:
            size = path.stat().st_size
            a, b = max(first, 0), min(first + span, size)
            first -= size
            if a >= b:
                continue
            for data in _read_pieces(path, a, b, separator):
                text = _decode_document(data, path, form, source.text_column)
                if text is not None:
                    texts.append(text)
                    units.append(stretch)
                rows += 1
    estimated = len(texts) * total / (STRETCHES * span)
    where = f"{STRETCHES} stretches of {span / 1e3:,.0f} kB"
    return Sample(texts, np.array(units, dtype=int), STRETCHES, estimated, False, where)


def _read_pieces(path: Path, first: int, last: int, separator: bytes) -> Iterator[bytes]:
    """The pieces between separators whose first byte lies in [first, last), whole."""
    with path.open("rb") as file:
        file.seek(max(0, first - len(separator)))
        position = file.tell()  # of the buffer's first byte
        buffer = b""
        inside = first == 0
        while not inside or position < last:
            end = buffer.find(separator)
            if end < 0:
                more = file.read(1 << 18)
                if more:
                    buffer += more
                    continue
                if inside and buffer:
                    yield buffer
                return
            if inside:
                yield buffer[:end]
            inside = True
            position += end + len(separator)
            buffer = buffer[end + len(separator) :]


def _decode_document(data: bytes, path: Path, form: str, key: str) -> str | None:
    """A document's text; None for an empty line and for null."""
    try:
        text = data.decode()
        if form == "text":
            return text
        if not text.strip():
            return None
        row = json.loads(text)
    except UnicodeDecodeError as error:
        raise UserError(
            "a source file is not UTF-8.", file=path, reason=error.reason, begins=repr(data[:60]), next="convert it"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            "a line of a source file is not JSON.",
            file=path,
            reason=getattr(error, "msg", None) or str(error),
            begins=repr(text[:60]),
            next="mend or remove the line",
        ) from None
    found = row.get(key) if isinstance(row, dict) else row
    if found is not None and not isinstance(found, str) or not isinstance(row, dict) or key not in row:
        raise UserError(
            f"a line of a source file has no text under {key!r}.",
            file=path,
            begins=repr(text[:60]),
            next="--text-column NAME",
        )
    return found
