"""Reader of one split of a corpus: in order from Parquet, by index from records files."""

import itertools
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    check_relative_path,
    check_types,
    read_manifest_file,
    remove_manifest,
    remove_tree,
    report_malformed,
    sync_tree,
    write_sealed,
)
from tokenscale.base.manifests import check_file, check_hash, open_checked
from tokenscale.base.processes import map_processes
from tokenscale.data.records import Records, write_records

#: newest manifest version that this code reads
VERSION = 2
#: version of the manifest of records files
RECORDS_VERSION = 1
#: separator of source and translation in a document that is a pair (U+241E)
PAIR = "␞"
#: largest split without records files that is decoded into memory for random access
MEMORY_BYTES = 256 << 20
#: documents per batch while records files are written
RECORDS_BATCH = 4096


def rebuild_command(directory: Path, file: str = "") -> str:
    """Return the command that rebuilds a corpus, or the part of it that `file` of its manifest
    belongs to.
    """
    folder = Path(directory) / file
    return (
        "snakemake -f "
        f"{(folder.parent if file.startswith('parts/') else Path(directory)) / 'manifest.json'}"
    )


def read_corpus_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest of a corpus. Raises UserError if it is missing, malformed, or newer than
    this code.
    """
    path = Path(directory) / "manifest.json"
    manifest = read_manifest_file(
        path,
        what="corpus",
        newest=VERSION,
        next=rebuild_command(directory),
    )
    with report_malformed(path, what="manifest of the corpus", next=rebuild_command(directory)):
        check_types(manifest, fields={"name": str, "splits": {"train": dict, "validation": dict}})
        for split in manifest["splits"].values():
            check_types(
                split, fields={"rows": int, "utf8_bytes": int, "text_sha256": str, "files": list}
            )
            for file in split["files"]:
                check_types(file, fields={"name": str, "rows": int, "bytes": int, "sha256": str})
                check_relative_path(file["name"])
    return manifest


def records_manifest(directory: Path) -> Path:
    return Path(directory) / "records" / "manifest.json"


def write_text_records(directory: Path, processes: int = 1) -> dict[str, Any]:
    """Write the training documents of a corpus to records files, for approaches that tokenize while
    training.

    One file per shard, uncompressed UTF-8, written by `processes` processes. Returns and writes the
    manifest. Raises UserError for a changed corpus.
    """
    text = RawText(directory, split="train")
    path = records_manifest(directory)
    remove_manifest(path)
    remove_tree(path.parent)
    path.parent.mkdir(parents=True)
    files = list(
        map_processes(
            _write_records_of_shard,
            jobs=[(directory, text.split["text_sha256"], n) for n in range(len(text._first) - 1)],
            processes=processes,
        )
    )
    manifest = {
        "schema_version": RECORDS_VERSION,
        "text_sha256": text.split["text_sha256"],
        "files": files,
    }
    sync_tree(path.parent)
    write_sealed(path, record=manifest)
    return manifest


@cache
def _open_train_split(directory: Path, text_sha256: str) -> "RawText":
    """Open a corpus once for all of its shards; one with another text in its place is opened anew."""
    return RawText(directory, split="train")


def _write_records_of_shard(directory: Path, text_sha256: str, number: int) -> dict[str, Any]:
    text = _open_train_split(directory, text_sha256)
    first, last = text._first[number : number + 2]
    name = Path(text.split["files"][number]["name"].replace("/", "-")).with_suffix(".bin")
    target = records_manifest(directory).with_name(str(name))
    return write_records(
        target,
        parts=map(text_bytes, text.columns(RECORDS_BATCH, first, last)),
        dtype=np.dtype("u1"),
    )


def text_bytes(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return (UTF-8 bytes of all texts, uint8; length of each text, int64) of a string array
    without nulls.
    """
    _, offsets, data = column.buffers()
    width = np.int64 if pa.types.is_large_string(column.type) else np.int32
    ends = np.frombuffer(offsets, dtype=width)[
        column.offset : column.offset + len(column) + 1
    ].astype(np.int64)
    values = (
        np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, dtype=np.uint8)
    )
    return values[ends[0] : ends[-1]], np.diff(ends)


class RawText:
    """One split of a corpus. Document i is the i-th document of the split, over all shards in
    order.

    Opening checks the sizes of the shards. A shard's content is checked when it is first read,
    unless `verify` is False. Reading in order keeps one batch in memory.
    """

    def __init__(self, directory: Path, split: str = "train", *, verify: bool = True):
        self.directory = Path(directory)
        self.name = split
        self._verify = verify
        self.manifest = read_corpus_manifest(directory)
        self.pairs: bool = self.manifest.get("pairs", False)
        self.split = self.manifest["splits"][split]
        self._first = [0, *itertools.accumulate(file["rows"] for file in self.split["files"])]
        for file in self.split["files"]:
            with self._open(file):
                pass
        #: shard → device, inode and time of the file that was verified
        self._verified: dict[str, tuple[int, int, int]] = {}
        self._documents: Callable[[int], str] | None = None

    def __len__(self) -> int:
        return self._first[-1]

    def text(self, i: int) -> str:
        """Return document i, 0 <= i < len(self). Raises IndexError otherwise, UserError as
        `open_documents` does.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        return self.open_documents()(i)

    def open_documents(self) -> Callable[[int], str]:
        """Return a function that reads one document by its index, at a cost independent of the
        corpus size.

        It reads from the records files. Without them, a split of at most `MEMORY_BYTES` is decoded
        into memory. Raises UserError for a larger split without records files, and for changed
        records files.
        """
        if self._documents is None:
            records = self.open_records()
            decode = (
                self._decode_all()
                if records is None
                else lambda i: records.read(i).tobytes().decode("utf-8")
            )
            self._documents = decode
        return self._documents

    @property
    def needs_records(self) -> bool:
        """Whether the split is too large for memory and has no records files. It can then only be
        read in order.
        """
        return self.split["utf8_bytes"] > MEMORY_BYTES and self.open_records() is None

    def batches(self, documents: int = 512) -> Iterator[list[str]]:
        """Yield all documents in order, in lists of at most `documents`."""
        for column in self.columns(documents):
            yield column.to_pylist()

    def columns(
        self, documents: int = 512, first: int = 0, last: int | None = None
    ) -> Iterator[pa.Array]:
        """Yield documents [first, last) in order, as Arrow string arrays of at most `documents`
        each.
        """
        last = len(self) if last is None else last
        for number in range(bisect_right(self._first, first) - 1, len(self.split["files"])):
            at = self._first[number]
            if at >= last:
                return
            with self._open_shard(number) as parquet:
                groups = list(range(parquet.num_row_groups))
                while (
                    groups
                    and at + (rows := parquet.metadata.row_group(groups[0]).num_rows) <= first
                ):
                    at += rows
                    del groups[0]
                for batch in parquet.iter_batches(
                    documents, row_groups=groups, columns=["text"], use_threads=False
                ):
                    column = batch.column(0)
                    start = at
                    at += len(column)
                    if start >= last:
                        break
                    if at > first:
                        yield column.slice(max(0, first - start), min(at, last) - max(start, first))

    @contextmanager
    def _open_shard(self, number: int) -> Iterator[pq.ParquetFile]:
        """Open a shard; verify it when it is first read, and where another file has its name."""
        file = self.split["files"][number]
        name = file["name"]
        with self._open(file) as opened:
            facts = os.fstat(opened.fileno())
            identity = (facts.st_dev, facts.st_ino, facts.st_mtime_ns)
            if self._verify and self._verified.get(name) != identity:
                check_hash(
                    opened,
                    sha256=file["sha256"],
                    path=self.directory / name,
                    what="corpus",
                    next=rebuild_command(self.directory, file=name),
                )
                self._verified[name] = identity
            # pre-buffering keeps read bytes
            yield pq.ParquetFile(opened, pre_buffer=False)

    def _open(self, file: dict[str, Any]) -> AbstractContextManager[BufferedReader]:
        """Open a shard of the size that the manifest has."""
        return open_checked(
            self.directory,
            name=file["name"],
            size=file["bytes"],
            what="corpus",
            next=rebuild_command(self.directory, file=file["name"]),
        )

    def open_records(self) -> Records | None:
        """Open the records files, or return None if this split and build have none."""
        path = records_manifest(self.directory)
        if self.name != "train" or not path.exists():
            return None
        next_step = f"snakemake -f {path}"
        manifest = read_manifest_file(
            path,
            what="corpus records",
            newest=RECORDS_VERSION,
            next=next_step,
            sealed=True,
        )
        with report_malformed(path, what="manifest of the corpus records", next=next_step):
            if manifest["text_sha256"] != self.split["text_sha256"]:
                return None  # records of an earlier build of this corpus
            for entry in manifest["files"]:
                check_types(entry, fields={"name": str, "records": int, "bytes": int})
                check_file(
                    path.parent,
                    name=entry["name"],
                    size=entry["bytes"],
                    what="corpus",
                    next=next_step,
                )
            entries = manifest["files"]
        return Records(
            folder=path.parent,
            entries=entries,
            dtype=np.dtype("u1"),
            what="corpus",
            rebuild=lambda name: next_step,
        )

    def _decode_all(self) -> Callable[[int], str]:
        if self.needs_records:
            what = (
                "the corpus is too large to read documents in random order without its records "
                "files."
            )
            found = f"{self.split['utf8_bytes']:,} bytes of text; {MEMORY_BYTES:,} fit in memory"
            raise UserError(
                what,
                corpus=self.directory,
                found=found,
                next=f"snakemake {records_manifest(self.directory)}",
            )
        texts = pa.chunked_array(list(self.columns(RECORDS_BATCH)), pa.string()).combine_chunks()
        return lambda i: texts[i].as_py()
