"""Store format `packed`: memory-mapped full rows without dropped tokens.

- `tokens.bin`: consecutive rows of `sequence_length` + 1 ids, uint16 if the vocabulary allows, else
  uint32;
- `checksums.npy`: uint64 [rows], XXH3-64 of each row's bytes, verified when the row is first read;
- `pieces.npy`: int32 [pieces], lengths of the pieces, row by row; the rest of a row is padding on
  the right;
- `rows.npy`: int64 [rows + 1]; row r has pieces[rows[r]:rows[r + 1]];
- `documents.npy`, `starts.npy`: int64 [pieces], the document of each piece and the offset of its
  first token.

Documents longer than a row are split into pieces that overlap by one token, so every label appears
exactly once. Rows are packed by best-fit-decreasing and stored in shuffled order with a fixed seed,
so that sequential reads are shuffled. With the option `packing=concatenate`, shuffled documents are
concatenated and cut at row ends.
"""

import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from tokenscale.base.errors import UserError
from tokenscale.base.manifests import changed_error, open_checked
from tokenscale.data.records import OpenFiles, map_array, vocabulary_error
from tokenscale.data.stores.documents import IGNORED, Chunk
from tokenscale.data.stores.manifest import rebuild_command, resolve_store

#: name of the file of the rows in each folder of a store
TOKENS = "tokens.bin"
#: files up to this size are mapped completely at opening
POPULATE_BYTES = 1 << 30
#: sampled rows of a larger store, one a batch, that must be in the page cache before read-ahead is
#: no longer requested
RESIDENT_ROWS = 64
MADV_POPULATE_READ = 22
#: rows per block that is verified
BLOCK_ROWS = 1024
#: tokens per chunk of reassembled documents
CHUNK_TOKENS = 1 << 20


def _map_file(descriptor: int) -> mmap.mmap:
    """Map an open file.

    Files of up to `POPULATE_BYTES` are read completely on Linux: page faults would cost about 5 us
    per batch in the first epoch. For larger files the kernel's read-around of 128 KiB per fault is
    disabled: rows are read in random order, so a batch would cost 70 times its size.
    """
    memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    if sys.platform == "linux":
        with suppress(OSError):  # before Linux 5.14
            memory.madvise(mmap.MADV_RANDOM if len(memory) > POPULATE_BYTES else MADV_POPULATE_READ)
    return memory


class Buffers:
    """Reusable memory for batches of n rows."""

    def __init__(self, rows: int, sequence_length: int, dtype: np.dtype, out: type = np.int64):
        self.ids = np.empty((rows, sequence_length + 1), dtype=dtype)
        self.tokens_bt: np.ndarray = np.empty((rows, sequence_length), dtype=out)
        self.labels_bt: np.ndarray = np.empty((rows, sequence_length), dtype=out)
        self.inputs = self.ids[:, :-1]
        self.targets = self.ids[:, 1:]
        self.labels = self.labels_bt.reshape(-1)
        self.row_bytes = [memoryview(row) for row in self.ids]


class Plan:
    """Rows of the next batches, computed at once to share NumPy's overhead.

    `indices` are [batches, n]. `checksums[i]` are the checksums of batch i's rows; None if all were
    verified.
    """

    def __init__(
        self,
        indices: np.ndarray,
        ignored: np.ndarray,
        ends: list[int],
        checksums: list[list[int]] | None,
    ):
        self.indices = indices
        self.checksums = checksums
        self._ignored = ignored
        self._ends = ends

    def ignored(self, i: int) -> np.ndarray:
        """Return the ignored labels of batch i, as indices into the flattened [n, T]."""
        return self._ignored[self._ends[i] : self._ends[i + 1]]


class _Part:
    """Files of a folder of a store, `files` of its manifest. A table is opened, and verified unless
    `verify` is False, when it is first read:

    `checksums`, XXH3-64 of each row, uint64 [rows]; `rows`, first piece of each row, int64 [rows +
    1]; `pieces`, tokens of each piece, int32 [pieces]; `documents` and `starts`, document of each
    piece and offset in it, int64 [pieces].
    """

    checksums: np.ndarray
    rows: np.ndarray
    pieces: np.ndarray
    documents: np.ndarray
    starts: np.ndarray

    def __init__(
        self,
        root: Path,
        folder: str,
        files: list[dict[str, Any]],
        first_row: int,
        first_document: int,
        *,
        verify: bool,
    ):
        self._root = root
        self.where = root / folder
        self.first_row = first_row
        self.first_document = first_document
        self.tokens_path = self.where / TOKENS
        self._files = {Path(file["name"]).name: file for file in files}
        self._verify = verify

    def __getattr__(self, name: str) -> np.ndarray:
        if name not in self.__annotations__:
            raise AttributeError(name)
        with self._open(f"{name}.npy", verify=self._verify) as opened:
            table = map_array(opened)
            # indexing that object costs many times as much as a plain view
            mapped = _map_file(opened.fileno())
            view = np.frombuffer(mapped, table.dtype, table.size, table.offset)
        self.__dict__[name] = view
        return view

    def open_tokens(self) -> int:
        """Return the descriptor of the file of the rows, which `checksums` verify."""
        with self._open(TOKENS, verify=False) as opened:
            return os.dup(opened.fileno())

    def _open(self, name: str, *, verify: bool) -> AbstractContextManager[BufferedReader]:
        next_step = rebuild_command(self.where)
        if name not in self._files:
            what = "a file of the token store is missing."
            expected = "an entry in the manifest"
            raise UserError(what, file=self.where / name, expected=expected, next=next_step)
        file = self._files[name]
        return open_checked(
            self._root,
            name=file["name"],
            size=file["bytes"],
            sha256=file["sha256"] if verify else None,
            what="token store",
            next=next_step,
        )

    @cached_property
    def views(self) -> tuple[memoryview, memoryview]:
        """Return `rows` and `pieces` as memoryviews, of which single values are read faster than of
        arrays.
        """
        return memoryview(self.rows), memoryview(self.pieces)


class PackedStore:
    """Random access to the rows of a `packed` store. `manifest` comes from
    `stores.manifest.open_store`.

    Each row is verified when it is first read, unless `verify` is False. A table beside the rows is
    opened and verified when it is first read. `others` are further stores (folder or manifest,
    content) of the same tokenizer and sequence length, whose rows follow.
    """

    def __init__(
        self,
        where: Path,
        manifest: dict[str, Any],
        *,
        verify: bool = True,
        others: Sequence[tuple[Path, dict[str, Any]]] = (),
    ):
        stores = [(where, manifest), *others]
        #: rows of each store
        self.sizes: list[int] = [content["rows"] for _, content in stores]
        self.where = where
        self.manifest = manifest | {
            name: sum(content[name] for _, content in stores) for name in ("rows", "documents")
        }
        self.sequence_length: int = manifest["sequence_length"]
        self._dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self._row_bytes = (self.sequence_length + 1) * self._dtype.itemsize
        self._parts: list[_Part] = []
        row = document = 0
        for folder, content in stores:
            self._parts += _list_parts(
                folder,
                manifest=content,
                verify=verify,
                row=row,
                document=document,
            )
            row = row + content["rows"]
            document = document + content["documents"]
        self._first_rows = np.array([part.first_row for part in self._parts], dtype=np.intp)
        parts = self._parts  # not self, which would then be collected late
        self._open = OpenFiles(lambda number: parts[number].open_tokens())
        self._small = len(self._parts) == 1 and os.fstat(self._open[0]).st_size <= POPULATE_BYTES
        #: sampled rows in a row that were in the page cache
        self._resident = self._calls = 0
        self._sample = [bytearray(self._row_bytes)]
        if self._small:
            self._tokens  # noqa: B018  # map them now, not in the first batch
        #: a bit for each row that has not been verified
        self._unseen = np.full(-(-len(self) // 8), 255 * verify, np.uint8)

    def __len__(self) -> int:
        return self.manifest["rows"]

    def buffers(self, rows: int, out: type = np.int64) -> Buffers:
        """Return buffers for batches of `rows` rows; use `out` int32 to widen ids later, on a
        device.
        """
        return Buffers(
            rows=rows,
            sequence_length=self.sequence_length,
            dtype=self._dtype,
            out=out,
        )

    def plan(self, indices: np.ndarray) -> Plan:
        """Prepare reading batches of rows, `indices` [batches, n]. Raises IndexError for a row that
        does not exist.
        """
        indices = np.ascontiguousarray(indices, dtype=np.intp)
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"a row outside 0 … {len(self) - 1}")
        batches, rows = indices.shape
        flat, pointers = self._ignored(indices.reshape(-1), batch=rows)
        ends = pointers[::rows].tolist() if rows else [0] * (batches + 1)
        fresh = bool(self._is_unseen(indices).any())
        return Plan(
            indices=indices,
            ignored=flat,
            ends=ends,
            checksums=self._row_checksums(indices).tolist() if fresh else None,
        )

    def read(self, plan: Plan, i: int, into: Buffers) -> None:
        """Read batch i of a plan into the buffers; labels are −100 on padding and on each piece's
        first token.

        Raises UserError for a changed row.
        """
        indices = plan.indices[i]
        if self._in_memory and len(self._parts) == 1:
            self._tokens.take(indices, axis=0, out=into.ids, mode="clip")  # other modes copy twice
        else:  # page faults of a mapping would read a row's pages one by one
            for (number, position), target in zip(
                self._places(indices, size=self._row_bytes), into.row_bytes, strict=True
            ):
                os.preadv(self._open[number], [target], position)
        if plan.checksums is not None:
            if (hashes := list(map(xxh3_64_intdigest, into.row_bytes))) != plan.checksums[i]:
                raise self._changed_row_error(indices, hashes, right=plan.checksums[i])
            if (largest := int(into.ids.max(initial=0))) >= self.manifest["vocabulary_size"]:
                part = self._parts[self._part_numbers(indices[into.ids.max(axis=1).argmax()])]
                size = self.manifest["vocabulary_size"]
                next_step = rebuild_command(part.where)
                raise vocabulary_error(
                    part.tokens_path,
                    found=largest,
                    vocabulary_size=size,
                    next=next_step,
                )
            np.bitwise_and.at(self._unseen, indices >> 3, ~(1 << (indices & 7)).astype(np.uint8))
        into.tokens_bt[...] = into.inputs
        into.labels_bt[...] = into.targets
        into.labels[plan.ignored(i)] = IGNORED

    def will_read(self, indices: np.ndarray) -> None:
        """Request read-ahead of rows of a large store, without waiting for them.

        One row of each call is sampled: where the last `RESIDENT_ROWS` samples were in the page
        cache, nothing is requested, which would cost as much as reading, and only every eighth call
        is sampled.
        """
        if self._small or not len(indices) or not hasattr(os, "posix_fadvise"):
            return
        self._calls += 1
        if self._in_memory and self._calls % 8:
            return
        place = next(self._places(indices[:1], size=self._row_bytes))
        self._resident = self._resident + 1 if self._is_resident(*place) else 0
        if not self._in_memory:
            for number, position in self._places(indices, size=self._row_bytes):
                os.posix_fadvise(
                    self._open[number], position, self._row_bytes, os.POSIX_FADV_WILLNEED
                )

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and labels of rows as `read` does, as new arrays."""
        buffers = self._read_once(indices)
        return buffers.tokens_bt, buffers.labels_bt

    def stored(self, indices: np.ndarray) -> np.ndarray:
        """Return rows as stored, verified, [n, T + 1]."""
        return self._read_once(indices).ids

    def _read_once(self, indices: np.ndarray) -> Buffers:
        buffers = self.buffers(len(indices))
        self.read(self.plan(np.asarray(indices)[None]), 0, buffers)
        return buffers

    def unmask_first_tokens(self, indices: np.ndarray, into: Buffers) -> int:
        """Let first tokens of documents count as labels of the rows just read. Return the labels
        that count.
        """
        into.labels_bt[...] = into.targets
        counts, ends = self._piece_ends(np.asarray(indices, dtype=np.intp))
        filled = ends[np.cumsum(counts) - 1]  # tokens of each row, without padding
        padding = np.arange(1, self.sequence_length + 1) >= filled[:, None]
        into.labels_bt[padding] = IGNORED
        return int(padding.size - np.count_nonzero(padding))

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """Return where pieces begin in the inputs of rows, bool [n, T], for a document mask.
        Padding is a piece.
        """
        counts, ends = self._piece_ends(np.asarray(indices, dtype=np.intp))
        marks = np.zeros((len(indices), self.sequence_length + 2), dtype=bool)
        marks[np.repeat(np.arange(len(indices)), counts), ends] = True
        marks[:, 0] = True
        return marks[:, : self.sequence_length]

    def list_pieces(self, row: int) -> list[tuple[int, int, int]]:
        """Return (document, offset of its first token, tokens) of each piece of a row."""
        ((number, place),) = self._places(np.array([row]))
        part = self._parts[number]
        span = slice(*part.rows[place : place + 2].tolist())
        documents = part.documents[span] + part.first_document
        found = (documents, part.starts[span], part.pieces[span])
        return list(zip(*(values.tolist() for values in found), strict=True))

    def chunks(self, first: int, last: int) -> Iterator[Chunk]:
        """Yield documents [first, last), reassembled. Raises UserError for a changed row."""
        ends = [*(part.first_document for part in self._parts[1:]), self.manifest["documents"]]
        for number, (part, end) in enumerate(zip(self._parts, ends, strict=True)):
            if part.first_document < last and end > first:
                begin = part.first_document
                yield from self._chunks_of(
                    number, first=max(0, first - begin), last=min(end, last) - begin
                )

    def _chunks_of(self, number: int, first: int, last: int) -> Iterator[Chunk]:
        part = self._parts[number]
        all_pieces = part.pieces
        pointers = part.rows
        documents = part.documents
        starts = part.starts
        order = np.lexsort((starts, documents))
        bounds = np.searchsorted(np.asarray(documents)[order], np.arange(first, last + 1))
        order = order[bounds[0] : bounds[-1]]
        bounds -= bounds[0]
        # consecutive pieces of a document share one token, which is counted once
        shared = np.diff(documents[order], prepend=-1) == 0
        sizes = all_pieces[order] - shared
        row_of = np.repeat(np.arange(len(pointers) - 1), np.diff(pointers))
        ends = np.cumsum(all_pieces, dtype=np.int64)
        in_row = ends - all_pieces - (ends - all_pieces)[pointers[:-1]][row_of]
        rows = row_of[order]
        begins = (row_of * (self.sequence_length + 1) + in_row)[order] + shared
        flat = np.frombuffer(_map_file(self._open[number]), dtype=self._dtype)
        lengths = (
            np.add.reduceat(sizes, bounds[:-1], dtype=np.int64)
            if last > first
            else np.zeros(0, np.int64)
        )
        ends = np.cumsum(lengths)
        begin = 0
        while begin < len(lengths):
            limit = (ends[begin - 1] if begin else 0) + CHUNK_TOKENS
            end = max(begin + 1, int(np.searchsorted(ends, limit, side="right")))
            pieces = slice(bounds[begin], bounds[end])
            self._verify(np.unique(rows[pieces]) + part.first_row)
            piece_sizes = sizes[pieces]
            # position in the token file of each token of these pieces: begin of its piece + offset
            # in the piece
            offsets = np.cumsum(piece_sizes) - piece_sizes
            positions = np.repeat(begins[pieces] - offsets, piece_sizes) + np.arange(
                piece_sizes.sum()
            )
            yield Chunk(flat[positions].astype(np.int32), lengths=lengths[begin:end])
            begin = end

    @cached_property
    def _tokens(self) -> np.ndarray:
        """The mapped tokens of a store of one part, [rows, T + 1]."""
        return np.frombuffer(_map_file(self._open[0]), self._dtype).reshape(
            -1, self.sequence_length + 1
        )

    @property
    def _in_memory(self) -> bool:
        return self._small or self._resident >= RESIDENT_ROWS

    def _is_resident(self, number: int, position: int) -> bool:
        """Return whether a row is in the page cache; False where the file system cannot tell."""
        try:
            return (
                os.preadv(self._open[number], self._sample, position, os.RWF_NOWAIT)
                == self._row_bytes
            )
        except (AttributeError, OSError):  # not Linux; would wait, or is not supported
            return False

    def _part_numbers(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._first_rows, indices, side="right") - 1

    def _places(self, indices: np.ndarray, size: int = 1) -> Iterator[tuple[int, int]]:
        """Yield (part, place in it) of each row, in rows or in rows of `size` bytes."""
        numbers = self._part_numbers(indices)
        return zip(
            numbers.tolist(), ((indices - self._first_rows[numbers]) * size).tolist(), strict=True
        )

    def _row_checksums(self, indices: np.ndarray) -> np.ndarray:
        """Return the stored checksums of rows, uint64 of the shape of `indices`."""
        if len(self._parts) == 1:
            return self._parts[0].checksums[indices]
        found = [
            self._parts[number].checksums[row] for number, row in self._places(indices.reshape(-1))
        ]
        return np.array(found, dtype="<u8").reshape(indices.shape)

    def _is_unseen(self, indices: np.ndarray) -> np.ndarray:  # bool of the shape of `indices`
        return (self._unseen[indices >> 3] >> (indices & 7).astype(np.uint8) & 1).astype(bool)

    def _verify(self, indices: np.ndarray) -> None:
        """Verify the checksums of rows that have not been read before."""
        unseen = indices[self._is_unseen(indices)]
        for first in range(0, len(unseen), BLOCK_ROWS):
            self.stored(unseen[first : first + BLOCK_ROWS])

    def _ignored(self, indices: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ignored labels of n rows as indices into the flattened [batch, T], their offsets
        per row [n + 1]).
        """
        n = len(indices)
        T = self.sequence_length
        counts, ends = self._piece_ends(indices)
        final = np.cumsum(counts) - 1
        # after each piece one label is ignored: the next first token
        following = np.ones(len(ends), dtype=np.int64)
        following[final] = T + 1 - ends[final]  # after a row's last piece: padding
        row_of = np.repeat(np.arange(n) % max(1, batch), counts)
        skipped = np.cumsum(following)
        flat = np.repeat(row_of * T + ends - 1 - (skipped - following), following) + np.arange(
            following.sum()
        )
        return flat, np.concatenate(([0], skipped[final]))

    def _piece_ends(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (pieces of each row [n], end of each of these pieces in its row [pieces])."""
        if len(self._parts) == 1:
            pieces = self._parts[0].pieces
            pointers = self._parts[0].rows
            first = pointers[indices]
            counts = pointers[indices + 1] - first
            begins = np.cumsum(counts) - counts
            sizes = pieces[np.repeat(first - begins, counts) + np.arange(counts.sum())].astype(
                np.int64
            )
        else:
            counts, sizes = self._gather_pieces(indices)
            begins = np.cumsum(counts) - counts
        ends = np.cumsum(sizes)
        return counts, ends - np.repeat((ends - sizes)[begins], counts)

    def _gather_pieces(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (pieces of each row [n], their lengths, row by row [pieces]) of rows of several
        parts.
        """
        counts: list[int] = []
        sizes: list[int] = []
        for number, row in self._places(indices):  # a few rows of each of many parts
            pointers, pieces = self._parts[number].views
            first = pointers[row]
            last = pointers[row + 1]
            counts.append(last - first)
            sizes += pieces[first:last]
        return np.array(counts, dtype=np.int64), np.array(sizes, dtype=np.int64)

    def _changed_row_error(
        self, indices: np.ndarray, hashes: list[int], right: list[int]
    ) -> UserError:
        n = int(np.flatnonzero(np.array(hashes, np.uint64) != np.array(right, np.uint64))[0])
        row = int(indices[n])
        part = self._parts[self._part_numbers(indices[n])]
        place = f"{row:,} of {len(self):,}, byte {(row - part.first_row) * self._row_bytes:,} on"
        expected = f"XXH3 {right[n]:016x}  (checksums.npy)"
        found = f"XXH3 {hashes[n]:016x}"
        next_step = rebuild_command(part.where)
        return changed_error(
            "a row of the token store",
            file=part.tokens_path,
            expected=expected,
            found=found,
            next=next_step,
            row=place,
        )


def _list_parts(
    where: Path, manifest: dict[str, Any], verify: bool, row: int, document: int
) -> list[_Part]:
    """Return the folders of a store whose first row and document have these numbers, in the order
    of rows.
    """
    files: dict[str, list[dict[str, Any]]] = {}
    for file in manifest["files"]:
        files.setdefault(str(Path(file["name"]).parent), []).append(file)
    parts = []
    for part in manifest.get("parts", [manifest | {"folder": "."}]):
        parts.append(
            _Part(
                root=resolve_store(where)[0],
                folder=part["folder"],
                files=files.get(part["folder"], []),
                first_row=row,
                first_document=document,
                verify=verify,
            )
        )
        row = row + part["rows"]
        document = document + part["documents"]
    return parts
