"""Random samples of documents without reading the whole data set: Parquet row groups, byte ranges
of lines and text.

Memory holds the sample and a part of one file, independent of the size of the data set. Equal
files, settings and seed give equal samples.
"""

import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from xxhash import xxh3_64_intdigest

from tokenscale.base.errors import UserError
from tokenscale.base.files import naming
from tokenscale.data.corpus.read import (
    COMPRESSION,
    RawFile,
    detect_format,
    find_start,
    is_array,
    read_first,
    read_texts,
    read_usable_texts,
)
from tokenscale.settings.data import SourceSettings

#: maximum bytes of text in a sample, whatever the requested number of documents
SAMPLE_BYTES = 24_000_000
#: a data set up to this size is read completely; at most this much of a larger one
READ_BYTES = 256_000_000
#: compressed files can only be read from the start; more text than this is an error
COMPRESSED_BYTES = 2_000_000_000
STRETCHES = 64
LEAST_GROUPS = 16


@dataclass(frozen=True)
class Sample:
    """Random sample of the documents of a data set."""

    texts: list[str]
    #: documents in the data set: exact if `counted`, otherwise estimated from the sample
    documents: float
    counted: bool
    #: description of the sampled parts
    where: str


def draw_sample(paths: list[Path], source: SourceSettings, documents: int, seed: int = 0) -> Sample:
    """Sample about `documents` documents, or all. Raises UserError for bad files, and for files
    without documents.
    """
    for path in paths:
        if path.stat().st_size == 0:
            raise UserError("the input file is empty.", file=path, next="choose another")
    forms = {path: detect_format(path, source) for path in paths}
    read_first(paths[0], source)  # raises for a missing column or an unreadable file
    kinds = set(forms.values())
    packed = any(path.suffix.lower() in COMPRESSION for path in paths)
    arrays = any(form == "jsonl" and is_array(RawFile(path)) for path, form in forms.items())
    size = sum(path.stat().st_size for path in paths)
    if kinds == {"parquet"}:
        found = _sample_row_groups(
            paths,
            source,
            documents=documents,
            seed=seed,
        )
    elif kinds == {"text"} and source.separator is None:
        found = _sample_files(
            paths,
            source,
            documents=documents,
            seed=seed,
        )
    elif size <= READ_BYTES or packed or arrays or kinds not in ({"jsonl"}, {"text"}):
        found = _sample_all(
            paths,
            source,
            documents=documents,
            seed=seed,
        )
    else:
        found = _sample_stretches(
            paths,
            source,
            documents=documents,
            seed=seed,
        )
    if not found.texts:
        raise UserError("the input holds no documents.", file=paths[0], next="name other files")
    return found


def count_repeated(paths: list[Path], source: SourceSettings) -> float | None:
    """Return the share of documents that an earlier one repeats, from reading them all; None for
    more than `READ_BYTES` of files. White space around a document is no difference, as where a
    corpus drops duplicates.
    """
    if sum(path.stat().st_size for path in paths) > READ_BYTES:
        return None
    seen = set()
    documents = 0
    for path in paths:
        for text in read_usable_texts(path, source):
            seen.add(xxh3_64_intdigest(text.strip().encode("utf-8")))
            documents += 1
    return 1 - len(seen) / max(1, documents)


def _sample_row_groups(
    paths: list[Path], source: SourceSettings, documents: int, seed: int
) -> Sample:
    """Sample rows from all row groups of Parquet files, or from some that are spread evenly."""
    generator = np.random.default_rng(seed)
    groups: list[tuple[Path, int, int]] = []
    sizes: list[int] = []
    for path in paths:
        read_first(path, source)
        with naming(path):
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
        return Sample(
            texts=[],
            documents=0.0,
            counted=True,
            where="",
        )
    chosen = np.arange(len(groups))
    wanted = max(LEAST_GROUPS, int(READ_BYTES / np.mean(sizes)))
    if sum(sizes) > READ_BYTES and wanted < len(groups):
        chosen = ((np.arange(wanted) + generator.random()) * len(groups) / wanted).astype(int)
    # read only the beginning of giant row groups: this share of each
    share = min(
        1.0,
        max(READ_BYTES / LEAST_GROUPS, READ_BYTES / len(chosen)) / max(float(np.mean(sizes)), 1.0),
    )
    readable_rows = np.array([max(1, int(groups[g][2] * share)) for g in chosen])
    limit = max(2, int(SAMPLE_BYTES / max(1.0, sum(sizes) / rows)))
    sampled = np.sort(
        generator.choice(
            readable_rows.sum(), size=min(documents, limit, readable_rows.sum()), replace=False
        )
    )
    bounds = np.concatenate(([0], np.cumsum(readable_rows)))
    texts: list[str | None] = []
    for unit, g in enumerate(chosen):
        group_rows = (
            sampled[(sampled >= bounds[unit]) & (sampled < bounds[unit + 1])] - bounds[unit]
        )
        path, number, _ = groups[g]
        first_texts = islice(
            read_texts(path, source, span=(number, number + 1)), int(group_rows.max(initial=-1)) + 1
        )
        chosen_rows = set(group_rows.tolist())
        texts += [text for row, text in enumerate(first_texts) if row in chosen_rows]
    kept = [text for text in texts if text is not None]
    where = f"{len(chosen):,} of {len(groups):,} row groups" + (
        "" if share == 1 else ", of each its beginning"
    )
    return Sample(
        texts=kept,
        documents=rows * len(kept) / len(texts),
        counted=len(kept) == len(texts),
        where=where,
    )


def _sample_files(paths: list[Path], source: SourceSettings, documents: int, seed: int) -> Sample:
    """Sample files, each of which is one document."""
    mean = sum(path.stat().st_size for path in paths) / len(paths)
    limit = min(documents, max(2, int(SAMPLE_BYTES / mean)))
    chosen = random.Random(seed).sample(paths, min(limit, len(paths)))
    texts = [
        text for path in sorted(chosen) for text in read_texts(path, source) if text is not None
    ]
    return Sample(
        texts=texts,
        documents=len(paths),
        counted=True,
        where=f"{len(texts):,} of {len(paths):,} files",
    )


def _sample_all(paths: list[Path], source: SourceSettings, documents: int, seed: int) -> Sample:
    """Read all documents and keep some by reservoir sampling (Vitter 1985, algorithm R)."""
    draw = random.Random(seed)
    kept: list[tuple[int, str]] = []
    number = done = 0
    for text in (text for path in paths for text in read_usable_texts(path, source)):
        at = number if number < documents else draw.randrange(number + 1)
        if at < documents:
            kept[at : at + 1] = [(number, text)]
        number += 1
        done += len(text)
        if done > COMPRESSED_BYTES:
            what = "compressed text can only be read from the start, and this is too much to read."
            raise UserError(
                what,
                read=f"{done / 1e9:.1f} GB of text",
                next="unpack it, or name a part of the files",
            )
    share = SAMPLE_BYTES / max(1, sum(len(text) for _, text in kept))
    if share < 1:
        kept = draw.sample(kept, max(2, int(len(kept) * share)))
    texts = [text for _, text in sorted(kept)]
    return Sample(
        texts=texts,
        documents=number,
        counted=True,
        where="all of it read",
    )


def _sample_stretches(
    paths: list[Path], source: SourceSettings, documents: int, seed: int
) -> Sample:
    """Sample the documents that begin in byte ranges, one in each equal part, without preferring
    long documents.
    """
    total = sum(path.stat().st_size for path in paths)
    beginning = find_start(paths[0], position=1 << 18, source=source)
    mean = beginning / max(1, sum(1 for _ in read_texts(paths[0], source, span=(0, beginning))))
    part = total // STRETCHES
    length = int(min(part, max(1 << 14, min(documents * mean, SAMPLE_BYTES) / STRETCHES)))
    draw = random.Random(seed)
    texts: list[str] = []
    for stretch in range(STRETCHES):
        first = stretch * part + draw.randrange(part - length + 1)
        for path in paths:
            size = path.stat().st_size
            begin = max(first, 0)
            end = min(first + length, size)
            first -= size
            if begin < end:
                span = (
                    find_start(path, position=begin, source=source),
                    find_start(path, position=end, source=source),
                )
                texts += read_usable_texts(path, source, span=span)
    estimated = len(texts) * total / (STRETCHES * length)
    where = f"{STRETCHES} stretches of {length / 1e3:,.0f} kB"
    return Sample(
        texts=texts,
        documents=estimated,
        counted=False,
        where=where,
    )
