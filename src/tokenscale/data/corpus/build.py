"""Build of a corpus: read the source, clean, split by document hash, write Parquet shards and a
manifest.

Equal documents and settings give equal bytes. The shards and `manifest.json` hold no time, host or
path; `build.json` does.
"""

import dataclasses
import hashlib
import importlib
import math
import platform
import re
import sys
import time
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale import __version__
from tokenscale.base.errors import UserError, few, unknown
from tokenscale.base.files import (
    canonical_json,
    move_files,
    naming,
    remove_manifest,
    remove_tree,
    sha256_file,
    sha256_text,
    utc_now,
    write_json,
    write_sealed,
)
from tokenscale.data.corpus import docstrings, dummy, files, stream
from tokenscale.data.parts import remove_surplus_parts
from tokenscale.settings.data import (
    FILE_LISTS,
    HELD_OUT_IN_TRAINING,
    CleaningSettings,
    CorpusSettings,
)
from tokenscale.settings.options import to_dict
from tokenscale.settings.registry import SOURCES

#: outcomes and changes that are counted
FATES = (
    *(
        "read",
        "no_text",
        "composed",
        "collapsed",
        "stripped",
        "not_unicode",
        "too_short",
        "too_long",
    ),
    *("duplicates", "kept"),
)
_SPACES = re.compile(r"[^\S\n]+")
_LINE_ENDS = re.compile(r" ?\n ?")
_EMPTY_LINES = re.compile(r"\n{3,}")


class Document(NamedTuple):
    """A cleaned document: its text, where it comes from, its UTF-8 bytes and their SHA-256."""

    text: str
    origin: str
    encoded: bytes
    sha256: bytes


def clean(
    documents: Iterable[tuple[str | None, str]],
    settings: CleaningSettings,
    counts: dict[str, int],
    seen: set[bytes] | None,
    trained: Set[bytes] = frozenset(),
) -> Iterator[Document]:
    """Yield the cleaned documents and add to `counts`, which has a number per outcome in `FATES`.

    Null texts are dropped, as are texts with lone surrogates, which cannot be encoded as UTF-8.
    Duplicates are found by the first 128 bits of their SHA-256, which are added to `seen` if it is
    not None: memory holds about 100 bytes per document, not the texts. Distinct texts that are in
    `trained` are counted as `HELD_OUT_IN_TRAINING`, and dropped as duplicates are. A corpus of many
    documents is built in parts (see `parts`).
    """
    changes: dict[str, Callable[[str], str]] = {"collapsed": collapse} if settings.collapse else {}
    changes |= {"stripped": str.strip} if settings.strip else {}
    for text, origin in documents:
        counts["read"] += 1
        if text is None:
            counts["no_text"] += 1
            continue
        if settings.nfc and not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
            counts["composed"] += 1
        for name, change in changes.items():
            changed = change(text)
            counts[name] += changed != text
            text = changed
        try:
            encoded = text.encode("utf-8")
        except UnicodeEncodeError:
            counts["not_unicode"] += 1
            continue
        if len(text) < settings.minimum_characters:
            counts["too_short"] += 1
            continue
        if settings.maximum_characters is not None and len(text) > settings.maximum_characters:
            counts["too_long"] += 1
            continue
        sha256 = hashlib.sha256(encoded).digest()
        if seen is not None:
            key = sha256[:16]
            again = key in seen
            if key in trained and not again:
                counts[HELD_OUT_IN_TRAINING] = counts.get(HELD_OUT_IN_TRAINING, 0) + 1
            seen.add(key)
            if settings.deduplicate and (again or key in trained):
                counts["duplicates"] += 1
                continue
        counts["kept"] += 1
        yield Document(
            text=text,
            origin=origin,
            encoded=encoded,
            sha256=sha256,
        )


def collapse(text: str) -> str:
    """Collapse white space: one space within a line, none at line ends, at most one empty line in a
    row.
    """
    return _EMPTY_LINES.sub("\n\n", _LINE_ENDS.sub("\n", _SPACES.sub(" ", text)))


#: called with numbers of documents and of UTF-8 bytes
Report = Callable[[int, int], None]
VERSION = 2
SPLITS = ("train", "validation")
SPLIT_RULE = "validation where the first 64 bits of the text's sha256 / 2**64 < validation_share"
OWN_SPLIT_RULE = (
    "validation is the source's own; what also stands in its training files was dropped if "
    "deduplicated"
)
SHARD_DOCUMENTS = 100_000
#: maximum bytes of text per row group, which is held in memory; long documents give groups of fewer
#: rows
GROUP_BYTES = 256 << 20
SCHEMA = pa.schema(
    [pa.field("text", pa.string(), nullable=False), pa.field("origin", pa.string(), nullable=False)]
)


_DOWNLOADED = SimpleNamespace(
    describe=files.describe_downloads,
    documents=files.documents,
    validation_documents=files.validation_documents,
)
#: kind of source → its functions, see `find_source`
KINDS: dict[str, Any] = {"docstrings": docstrings, "files": files, "stream": stream, "dummy": dummy}
KINDS |= dict.fromkeys(("url", "bucket", "hub"), _DOWNLOADED)


def find_source(kind: str) -> Any:
    """Return the functions of a kind: those of `KINDS`, or a user's own module with functions of
    the same names.

    They are called with (source settings, folder of downloads), and with (number, parts) of a part
    if the source is splittable. `describe` returns the manifest entry, `documents` and
    `validation_documents`, which is only needed for a source with its own held-out documents, yield
    (text, origin).
    """
    if kind in KINDS:
        return KINDS[kind]
    module = SOURCES[kind].module
    assert module is not None  # as of every kind of a user
    return importlib.import_module(module)


class Source(NamedTuple):
    """Documents of a corpus or of a part, (text, origin), their manifest entry, and the source's
    own held-out ones.

    `stamps` are (size, modification time in ns) of the source files by list and name before they
    are read.
    """

    documents: Iterable[tuple[str | None, str]]
    description: dict[str, Any]
    validation: Iterable[tuple[str | None, str]] | None = None
    list_stamps: Callable[[], dict[tuple[str, str], tuple[int, int]]] = dict
    stamps: Mapping[tuple[str, str], tuple[int, int]] = {}

    def list_read_files(self) -> list[dict[str, Any]]:
        """Return the files' entries in `build.json`. Raises UserError if a file has changed since
        it was listed.
        """
        if changed := sorted(
            {name for (_, name), _ in self.stamps.items() ^ self.list_stamps().items()}
        ):
            next_step = "run this command again when the files are complete"
            raise UserError(
                "a source file changed while it was read.",
                files=few(changed, shown=8),
                next=next_step,
            )
        hashes = {
            (key, file["name"]): file["sha256"]
            for key in FILE_LISTS
            for file in self.description.get(key, [])
        }
        return [
            {
                "key": key,
                "name": name,
                "bytes": size,
                "mtime_ns": mtime,
                "sha256": hashes[key, name],
            }
            for (key, name), (size, mtime) in self.stamps.items()
        ]


def open_source(
    settings: CorpusSettings, downloads: Path | None, part: tuple[int, int] | None = None
) -> Source:
    source = settings.source
    if source.kind not in SOURCES:
        raise unknown(
            "corpus source",
            word=source.kind,
            words=SOURCES,
            key="corpus.source.kind",
        )

    def list_stamps() -> dict[tuple[str, str], tuple[int, int]]:
        lists = (
            {key: files.list_files(source, key, part) for key in FILE_LISTS}
            if source.kind == "files"
            else {}
        )
        stats = {(key, name): path.stat() for key, listed in lists.items() for name, path in listed}
        return {key: (stat.st_size, stat.st_mtime_ns) for key, stat in stats.items()}

    functions = find_source(source.kind)
    stamps = list_stamps()
    arguments = (source, downloads, *([part] if part is not None else []))
    description = functions.describe(*arguments)
    documents = functions.documents(*arguments)
    validation = functions.validation_documents(*arguments) if source.has_own_validation else None
    return Source(
        documents=documents,
        description=description,
        validation=validation,
        list_stamps=list_stamps,
        stamps=stamps,
    )


def build(
    settings: CorpusSettings,
    directory: Path,
    report: Report | None = None,
    downloads: Path | None = None,
    content: str = "",
) -> dict[str, Any]:
    """Build one corpus from its declared source into `directory` and return its manifest.

    `downloads` is the folder written by the command `download`. `report(documents, utf8_bytes)` is
    called for each kept document. `content` is the fingerprint of the source files at planning,
    which is recorded. Raises UserError for an unknown source, missing or unreadable files or
    packages, a source file that changes while it is read, or an empty training split.
    """
    return write_corpus(
        open_source(settings, downloads),
        settings,
        directory=directory,
        report=report,
        content=content,
    )


def build_from(
    documents: Iterable[tuple[str | None, str]],
    settings: CorpusSettings,
    directory: Path,
    description: dict[str, Any],
) -> dict[str, Any]:
    """Build a corpus from any (text, origin) pairs. `description` is the source's entry in the
    manifest.
    """
    return write_corpus(Source(documents, description), settings, directory=directory)


@contextmanager
def building_folder(directory: Path) -> Iterator[Path]:
    """Make an empty folder in `directory` for what is being built, and remove it afterwards."""
    building = directory / ".building"
    remove_tree(building)
    building.mkdir(parents=True)
    try:
        yield building
    finally:
        remove_tree(building)


def describe_corpus(
    settings: CorpusSettings,
    description: dict[str, Any],
    counts: dict[str, int],
    splits: dict[str, dict[str, Any]],
    directory: Path,
) -> dict[str, Any]:
    """Return the manifest of a corpus. Raises UserError if there are no training documents."""
    if splits["train"]["rows"] == 0:
        found = ", ".join(f"{k} {v}" for k, v in counts.items())
        next_step = "check corpus.source and corpus.cleaning"
        raise UserError(
            "the corpus has no training documents.",
            corpus=directory,
            documents=found,
            next=next_step,
        )
    own = settings.source.has_own_validation
    return {
        "schema_version": VERSION,
        "name": settings.name,
        "source": description,
        "cleaning": dataclasses.asdict(settings.cleaning) | {"documents": counts},
        "split_rule": OWN_SPLIT_RULE if own else SPLIT_RULE,
        "validation_share": None if own else settings.validation_share,
        "row_group_rows": settings.row_group_rows,
        **({"pairs": True} if settings.source.pairs else {}),
        "splits": splits,
    }


def write_manifest(
    directory: Path,
    manifest: dict[str, Any],
    settings: CorpusSettings,
    started: float,
    **facts: Any,
) -> None:
    """Write `build.json`: when, where and with which versions a corpus or a part was built; then
    the manifest.
    """
    facts |= {
        "manifest": manifest,
        "manifest_sha256": sha256_text(canonical_json(manifest)),
        "settings": to_dict(settings),
        "created_utc": utc_now(),
        "duration_s": time.monotonic() - started,
        "tokenscale": __version__,
        "python": sys.version,
        "pyarrow": pa.__version__,
        "machine": platform.node(),
        "platform": platform.platform(),
    }
    write_sealed(directory / "build.json", record=facts)
    write_json(directory / "manifest.json", value=manifest)


def assign_split(sha256: bytes, validation_share: float) -> str:
    """Return `train` or `validation` from the SHA-256 of the text: adding documents never moves
    others.
    """
    number = int.from_bytes(sha256[:8], "big")
    return "validation" if number < validation_share * 2.0**64 else "train"


def describe_split(
    rows: int, utf8_bytes: int, text_sha256: str, lengths: Counter[int], files: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the manifest entry of a split. `lengths` has the number of documents of each length in
    characters; their quantiles are those of the method "lower" of `numpy.quantile`.
    """
    levels = {
        "minimum": 0,
        "p05": 0.05,
        "p25": 0.25,
        "median": 0.5,
        "p75": 0.75,
        "p95": 0.95,
        "maximum": 1,
    }
    ordered = sorted(lengths)
    ends = list(accumulate(lengths[length] for length in ordered))
    places = {name: math.floor(level * (rows - 1)) for name, level in levels.items() if rows}
    return {
        "rows": rows,
        "utf8_bytes": utf8_bytes,
        "text_sha256": text_sha256,
        "characters": {name: ordered[bisect_right(ends, place)] for name, place in places.items()},
        "files": files,
    }


class SplitWriter:
    """Writer of one split's shards. A thread compresses a row group while the next one is
    collected.
    """

    #: whether held-out documents are compared with training documents while they are written
    compares_splits = True

    def __init__(self, directory: Path, name: str, row_group_rows: int):
        self.directory = directory
        self.name = name
        self.row_group_rows = min(row_group_rows, SHARD_DOCUMENTS)
        self.texts: list[str] = []
        self.origins: list[str] = []
        self.lengths = Counter[int]()
        self.utf8_bytes = self.shard_rows = self.group_bytes = 0
        self.digest = hashlib.sha256()
        self.writer: pq.ParquetWriter | None = None
        self.files: list[dict[str, Any]] = []
        self._pool = ThreadPoolExecutor(1, "compress")
        self._written: Future[Any] = self._pool.submit(int)

    def add(self, document: Document) -> None:
        """Add the next document."""
        if self.shard_rows + len(self.texts) == SHARD_DOCUMENTS:
            self._close_shard()
        self.texts.append(document.text)
        self.origins.append(document.origin)
        self.lengths[len(document.text)] += 1
        self.utf8_bytes += len(document.encoded)
        self.group_bytes += len(document.encoded)
        self.digest.update(document.sha256)
        if len(self.texts) == self.row_group_rows or self.group_bytes >= GROUP_BYTES:
            self._flush()

    def close(self) -> dict[str, Any]:
        """Close the last shard and return the manifest entry of this split."""
        self._close_shard()
        self._pool.shutdown()
        rows = sum(file["rows"] for file in self.files)
        return describe_split(
            rows,
            utf8_bytes=self.utf8_bytes,
            text_sha256=self.digest.hexdigest(),
            lengths=self.lengths,
            files=self.files,
        )

    def _flush(self) -> None:
        if not self.texts:
            return
        if self.writer is None:
            self.writer = open_shard(self.directory / f"{self.name}-{len(self.files):05d}.parquet")
        table = pa.Table.from_pydict({"text": self.texts, "origin": self.origins}, schema=SCHEMA)
        with naming(self.directory):
            self._written.result()
        self._written = self._pool.submit(
            self.writer.write_table, table, row_group_size=len(self.texts)
        )
        self.shard_rows += len(self.texts)
        self.texts = []
        self.origins = []
        self.group_bytes = 0

    def _close_shard(self) -> None:
        self._flush()
        if self.writer is None:
            return
        path = self.directory / f"{self.name}-{len(self.files):05d}.parquet"
        with naming(path):
            self._written.result()
            self.writer.close()
        self.files.append(
            {
                "name": path.name,
                "rows": self.shard_rows,
                "bytes": path.stat().st_size,
                "sha256": sha256_file(path),
            }
        )
        self.writer = None
        self.shard_rows = 0


def open_shard(path: Path) -> pq.ParquetWriter:
    with naming(path):
        return pq.ParquetWriter(
            path, SCHEMA, compression="zstd", compression_level=3, use_dictionary=False
        )


def replace_files(building: Path, directory: Path, names: list[str], parts: int = 1) -> None:
    """Delete the manifest and the files of an earlier build, all but its first `parts`, and move
    the new ones in.
    """
    remove_manifest(directory / "manifest.json")
    for path in directory.iterdir():
        if path.suffix in (".parquet", ".documents"):
            path.unlink()
    for folder in ("deduplicated", *(["parts"] if parts == 1 else [])):
        remove_tree(directory / folder)
    remove_surplus_parts(directory, parts)
    move_files(building, directory, names=names)


def write_corpus(
    source: Source,
    settings: CorpusSettings,
    directory: Path,
    report: Report | None = None,
    content: str = "",
    writer: type[SplitWriter] = SplitWriter,
    describe: Callable[..., dict[str, Any]] = describe_corpus,
) -> dict[str, Any]:
    """Write a corpus, or a part with another `writer` and `describe`, in a temporary folder, then
    to `directory`.
    """
    started = time.monotonic()
    counts = dict.fromkeys(FATES, 0)
    by_hash = source.validation is None
    trained = set[bytes]()
    with building_folder(directory) as building:
        writers = {name: writer(building, name, settings.row_group_rows) for name in SPLITS}
        for split, texts in (("train", source.documents), ("validation", source.validation or ())):
            seen = set[bytes]() if settings.cleaning.deduplicate or not by_hash else None
            for document in clean(
                texts,
                settings=settings.cleaning,
                counts=counts,
                seen=seen,
                trained=trained,
            ):
                if by_hash:
                    split = assign_split(
                        document.sha256, validation_share=settings.validation_share
                    )
                writers[split].add(document)
                if report is not None:
                    report(1, len(document.encoded))
            trained = seen if seen is not None and writer.compares_splits else trained
        splits = {name: of_split.close() for name, of_split in writers.items()}
        manifest = describe(settings, source.description, counts, splits, directory)
        read = source.list_read_files()
        replace_files(building, directory, names=sorted(path.name for path in building.iterdir()))
    write_manifest(
        directory,
        manifest,
        settings=settings,
        started=started,
        files=read,
        content=content,
    )
    return manifest
