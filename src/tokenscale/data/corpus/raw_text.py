"""Raw text at rest: the documents of one split, by number, with bounded memory."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError
from tokenscale.base.files import check_file_name, check_types, read_manifest_file, report_malformed, sha256_file

#: the newest manifest this code reads
VERSION = 1
#: between the two parts of a document that is a pair, a source and its translation (U+241E)
PAIR = "␞"
#: decoded text kept for random access
CACHE_BYTES = 256 << 20


def rebuild_command(directory: Path) -> str:
    """The command that rebuilds a corpus."""
    return f"snakemake -f {Path(directory) / 'manifest.json'}"


def read_corpus_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a corpus. UserError where it is missing, broken, or newer than this code."""
    path = Path(directory) / "manifest.json"
    manifest = read_manifest_file(path, "corpus", VERSION, rebuild_command(directory))
    with report_malformed(path, "manifest of the corpus", rebuild_command(directory)):
        check_types(manifest, {"name": str, "splits": dict})
        for split in manifest["splits"].values():
            check_types(split, {"rows": int, "utf8_bytes": int, "text_sha256": str, "files": list})
            for file in split["files"]:
                check_types(file, {"name": str, "bytes": int, "sha256": str})
                check_file_name(file["name"])
    return manifest


def check_file(path: Path, size: int, sha256: str, *, what: str, next: str, content: bool) -> None:
    """Raise UserError where a file is missing or is not what its manifest says; sizes always, hashes if `content`."""
    try:
        found = path.stat().st_size
        if not path.is_file():
            raise FileNotFoundError
    except FileNotFoundError:
        raise UserError(f"a file of the {what} is missing.", file=path, expected=f"{size:,} bytes", next=next) from None
    if found != size:
        raise UserError(
            f"a file of the {what} has changed.",
            file=path,
            expected=f"{size:,} bytes  (manifest.json)",
            found=f"{found:,} bytes",
            next=next,
        )
    if content and (digest := sha256_file(path)) != sha256:
        raise UserError(
            f"a file of the {what} has changed.",
            file=path,
            expected=f"sha256 {sha256}  (manifest.json)",
            found=f"sha256 {digest}",
            next=next,
        )


class RawText:
    """One split of a corpus. Document i is the i-th of the split, over all shards in order.

    On opening, each shard is held against the manifest: its size always, its content unless `verify` is False.
    Random access decodes a row group (1,000 documents by default) and keeps the last ones, 256 MiB of text at most.
    """

    def __init__(self, directory: Path, split: str = "train", *, verify: bool = True):
        self.directory = Path(directory)
        self.manifest = read_corpus_manifest(directory)
        self.pairs: bool = self.manifest.get("pairs", False)
        self.split = self.manifest["splits"][split]
        self._paths = [self.directory / file["name"] for file in self.split["files"]]
        self._files: list[pq.ParquetFile] = []
        self._first_rows: list[int] = []
        self._groups: list[tuple[int, int]] = []
        rows = 0
        for file, path in zip(self.split["files"], self._paths, strict=True):
            check_file(
                path, file["bytes"], file["sha256"], what="corpus", next=rebuild_command(directory), content=verify
            )
            parquet = pq.ParquetFile(path, pre_buffer=False)  # else it keeps the bytes of all it has read
            for group in range(parquet.num_row_groups):
                self._first_rows.append(rows)
                self._groups.append((len(self._files), group))
                rows += parquet.metadata.row_group(group).num_rows
            self._files.append(parquet)
        self._rows = rows
        self._cache: OrderedDict[int, pa.ChunkedArray] = OrderedDict()
        self._cached_bytes = 0

    def __len__(self) -> int:
        """Documents in the split."""
        return self._rows

    def decode_all(self) -> None:
        """Where the whole split fits the cache, decode it now: the first documents then cost what all others cost."""
        if self.split["utf8_bytes"] <= CACHE_BYTES:
            for number in range(len(self._groups)):
                self._group(number)

    def text(self, i: int) -> str:
        """Document i, 0 <= i < len(self); IndexError otherwise."""
        if not 0 <= i < self._rows:
            raise IndexError(f"document {i} of {self._rows}")
        number = bisect_right(self._first_rows, i) - 1
        return self._group(number)[i - self._first_rows[number]].as_py()

    def batches(self, documents: int = 512) -> Iterator[list[str]]:
        """All documents in order, in lists of at most `documents`; memory holds about one row group."""
        for column in self.columns(documents):
            yield column.to_pylist()

    def columns(self, documents: int = 512, first: int = 0, last: int | None = None) -> Iterator[pa.Array]:
        """Documents `first` to `last` (not included) in order, as Arrow string arrays of at most `documents` each."""
        last = self._rows if last is None else last
        ends = [*self._first_rows[1:], self._rows]
        for number, parquet in enumerate(self._files):
            groups = [
                (group, start)
                for (file, group), start, end in zip(self._groups, self._first_rows, ends, strict=True)
                if file == number and start < last and end > first
            ]
            if not groups:
                continue
            at = groups[0][1]
            wanted = [group for group, _ in groups]
            for batch in parquet.iter_batches(
                batch_size=documents, row_groups=wanted, columns=["text"], use_threads=False
            ):
                column, start = batch.column(0), at
                at += len(column)
                if at > first and start < last:
                    yield column.slice(max(0, first - start), min(at, last) - max(start, first))

    def _group(self, number: int) -> pa.ChunkedArray:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        file, group = self._groups[number]
        column = self._files[file].read_row_group(group, columns=["text"], use_threads=False).column(0)
        self._cache[number] = column
        self._cached_bytes += column.nbytes
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return column
