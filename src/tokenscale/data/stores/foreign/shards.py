"""Folders of shards with an index: MosaicML Streaming (MDS) and litdata's chunks of tokens.

A shard, little-endian: uint32 items, uint32 byte at which each item begins and the last one ends,
items. A document is one item.

MDS: `index.json` and `shard.*.mds`, with JSON of the columns before the items. An item: uint32 size
of each column whose size varies, then the columns. Ids are one column, in either encoding of LLM
Foundry: `ndarray:TYPE` (byte 4 + c, number of ids as an unsigned integer of 2**c bytes, ids), or
`bytes`, whose type the folder does not have (streaming/base/format/mds, mosaicml-streaming 0.13.0).

litdata, as `optimize` writes it with a `TokensLoader`: `index.json` has the files in order and the
type of the ids; an item is ids alone (litdata/streaming/writer.py and item_loader.py, litdata
0.2.76).
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import (
    HashedFile,
    check_file_name,
    check_relative_path,
    check_types,
    read_json,
    report_malformed,
    sha256_file,
    sync,
    sync_tree,
    write_json,
)
from tokenscale.data.corpus.read import RawFile, read_bytes
from tokenscale.data.corpus.refusals import AGAIN, damaged
from tokenscale.data.corpus.shards import (
    INDEX,
    check_items,
    check_size,
    find_columns,
    read_index,
    read_integers,
    read_offsets,
)
from tokenscale.data.stores.documents import Chunk, Documents, Origin
from tokenscale.data.stores.foreign.reframe import (
    SMALL_VOCABULARY,
    ExportCounts,
    ExportFraming,
    ForeignFolder,
    end_note,
    export_chunks,
    group_documents,
)

#: maximum size of a written shard, the default of both libraries; a longer document is a shard of
#: its own
SHARD_BYTES = 1 << 26
#: size that a shard's offsets cannot count
OFFSETS_END = 1 << 32
#: MDS: columns of ids, in the order in which they are looked for
COLUMNS = ("tokens", "input_ids")
#: MDS: encoding of a column of arrays; with its length, where all arrays have one
ARRAY = re.compile(r"ndarray:(u?int(?:8|16|32|64))(:\d+)?")
#: MDS: hashes in an index that are compared
HASHES = {"sha256": lambda data: hashlib.sha256(data).hexdigest(), "xxh3_64": xxh3_64_hexdigest}
KINDS = "ndarray:uint16, uint32, int32 or int64"
#: MDS: type of the ids in columns of bytes, which LLM Foundry reads
BYTES_TYPE = "int64"
#: litdata: serializer of items → code → type of the ids (litdata/constants.py); other codes are not
#: integers
TYPES = {
    "no_header_tensor": dict(
        zip(
            (*range(11, 19), 20),
            ["u1", "i1", "<i2", "<i2", "<i4", "<i4", "<i8", "<i8", "<u2"],
            strict=True,
        )
    ),
    "no_header_numpy": {
        0: "i1",
        1: "<i2",
        2: "<i4",
        3: "<i8",
        4: "u1",
        5: "<u2",
        6: "<u4",
        7: "<u8",
    },
}


@dataclass(frozen=True)
class _Shard:
    file: Path
    size: int  # bytes when it is decompressed
    starts: np.ndarray  # int64 [items]: byte of each item's first id
    lengths: np.ndarray  # int64 [items]: ids
    compressed: bool = False


class ShardFolder(ForeignFolder):
    """Folder of shards with an index. A subclass describes the items and the index of one library.

    `describe(dtype)` returns the index's configuration for ids of `dtype`, and the bytes between a
    shard's offsets and its items; `make_entry` the index's entry of a shard; `make_index` the
    index, given a hash of all shards.
    """

    SHARD: str  # name of shard number n
    describe: Any
    make_entry: Any
    make_index: Any
    _decompressed: tuple[Path, np.ndarray] | None = None

    def _use(self, index: Path, shards: list[_Shard]) -> None:
        """Set the shards of a source, after they have been checked."""
        self._shards = shards
        self.files = [index, *(shard.file for shard in shards)]
        self.dtype = self._type.name
        # the first file is the index
        self._firsts = np.cumsum([0, *(len(shard.lengths) for shard in shards)])
        self._bounds = np.cumsum(np.concatenate(([0], *(shard.lengths for shard in shards))))

    def _load(self, file: Path, size: int, compressed: bool = False) -> np.ndarray:
        """Return the bytes of a shard, uint8, from memory if it is the last decompressed one."""
        if not compressed:
            return np.asarray(np.memmap(file, np.uint8, "r")) if size else np.zeros(0, np.uint8)
        if self._decompressed is None or self._decompressed[0] != file:
            self._decompressed = None
            self._decompressed = file, _decompress(file, size)
        return self._decompressed[1]

    def chunks(self, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for shard, start, end in zip(
            self._shards, self._firsts[:-1], self._firsts[1:], strict=True
        ):
            for a, b in group_documents(
                self._bounds, first=max(first, int(start)), last=min(last, int(end))
            ):
                data = self._load(shard.file, shard.size, shard.compressed)
                items = slice(a - start, b - start)
                starts = shard.starts[items]
                lengths = shard.lengths[items]
                ends = starts + lengths * self._type.itemsize
                pieces = [data[i:j] for i, j in zip(starts.tolist(), ends.tolist(), strict=True)]
                yield np.concatenate(pieces).view(self._type), lengths

    @staticmethod
    # of items with these numbers of ids
    def item_bytes(lengths: np.ndarray, width: int) -> np.ndarray:
        return lengths * width

    @staticmethod
    def encode(chunk: Chunk) -> Any:  # bytes of consecutive items
        return chunk.ids

    @classmethod
    def write(
        cls, documents: Documents, path: Path, rule: ExportFraming, count: ExportCounts
    ) -> dict[Path, str]:
        dtype = np.dtype("<u2" if documents.origin.vocabulary_size < SMALL_VOCABULARY else "<i4")
        (config, head) = cls.describe(dtype)
        width = dtype.itemsize
        entries: list[dict[str, Any]] = []
        hashes: dict[str, str] = {}
        with replace_folder(path) as folder:
            chunks = export_chunks(documents, rule, count=count)
            for parts in split_shards(
                chunks,
                dtype,
                head_bytes=8 + len(head),
                item_bytes=lambda n: 4 + cls.item_bytes(n, width),
            ):
                name = cls.SHARD.format(len(entries))
                sizes = cls.item_bytes(np.concatenate([part.lengths for part in parts]), width)
                offsets = pack_offsets(sizes, gap=len(head), name=cls.NAME)
                with HashedFile(folder / name) as file:
                    file.write(offsets)
                    file.write(head)
                    for part in parts:
                        file.write(cls.encode(part))
                hashes[name] = file.sha256
                entries.append(
                    cls.make_entry(
                        name,
                        file.sha256,
                        offsets=offsets,
                        width=width,
                        config=config,
                    )
                )
            documents.confirm()
            content = hashlib.sha256("".join(hashes.values()).encode()).hexdigest()
            write_json(folder / INDEX, value=cls.make_index(entries, config, content))
            hashes[INDEX] = sha256_file(folder / INDEX)
        return {path / name: sha256 for name, sha256 in hashes.items()}


class Litdata(ShardFolder):
    """Reader of a folder. Raises UserError for compressed or encrypted chunks, and items that are
    not token arrays.
    """

    NAME = "a litdata folder"
    SHARD = "chunk-0-{}.bin"

    def __init__(self, path: Path, **_: object):
        index = path / INDEX
        facts = read_json(index, what="index of the litdata folder", next=AGAIN)
        with report_malformed(index, what="index of the litdata folder", next=AGAIN):
            check_types(facts, fields={"chunks": list, "config": {"data_format": list}})
            self._type = self._parse_config(facts["config"], index)
            for chunk in facts["chunks"]:
                check_types(chunk, fields={"chunk_bytes": int, "chunk_size": int, "dim": int})
            chunks = [
                (path / check_file_name(chunk["filename"]), chunk) for chunk in facts["chunks"]
            ]
        self._use(index, shards=[self._open(file, chunk) for file, chunk in chunks])

    @staticmethod
    def detect(path: Path) -> bool:
        index = read_index(path)
        return isinstance(index.get("chunks"), list) and isinstance(index.get("config"), dict)

    @staticmethod
    def list_files(path: Path) -> list[str]:
        return [
            INDEX,
            *(
                str(chunk.get("filename"))
                for chunk in read_index(path)["chunks"]
                if isinstance(chunk, dict)
            ),
        ]

    @staticmethod
    def notes(origin: Origin, ended: bool) -> list[str]:
        return end_note(origin, ended, reason="because TokensLoader joins documents")

    def _parse_config(self, config: dict[str, Any], index: Path) -> np.dtype:
        """Return the type of the ids. Raises UserError for items that are not plain token
        arrays.
        """
        for what in ("compression", "encryption"):
            if config.get(what):
                raise damaged(
                    index,
                    what="compressed items",
                    found=f"{what} {config[what]}",
                    expected=f"no {what}",
                )
        loader = config.get("item_loader", "TokensLoader")
        formats = config["data_format"]
        name, _, code = str(formats[0] if len(formats) == 1 else "").partition(":")
        found = TYPES.get(name, {}).get(int(code) if code.isdigit() else -1)
        if loader != "TokensLoader" or found is None:
            found = f"{', '.join(map(str, formats))} for {loader}"
            one = "one array of integers per item (no_header_tensor:CODE) for TokensLoader"
            raise damaged(
                index,
                what="no ids",
                found=found,
                expected=one,
                name="data_format",
                next="write 1-D tensors with TokensLoader()",
            )
        return np.dtype(found)

    def _open(self, file: Path, chunk: dict[str, Any]) -> _Shard:
        """Return a chunk whose size and offsets have been checked."""
        items = chunk["chunk_size"]
        width = self._type.itemsize
        begin = 4 * (chunk["chunk_size"] + 2)
        check_size(file, expected=chunk["chunk_bytes"])
        offsets = read_offsets(self._load(file, size=chunk["chunk_bytes"]), file, items=items)
        ends = offsets - begin
        if ends[0] or (ends % width).any() or ends[-1] // width != chunk["dim"]:
            found = f"bytes {offsets[0]:,} to {offsets[-1]:,} in {items:,} items"
            ids = f"{chunk['dim']:,} ids of {self._type.name} from byte {begin:,}  ({INDEX})"
            raise damaged(
                file,
                what="offsets",
                found=found,
                expected=ids,
            )
        return _Shard(
            file=file,
            size=chunk["chunk_bytes"],
            starts=offsets[:-1],
            lengths=np.diff(ends) // width,
        )

    @staticmethod
    def describe(dtype: np.dtype) -> tuple[dict[str, Any], bytes]:
        config = {
            "chunk_bytes": SHARD_BYTES,
            "chunk_size": None,
            "compression": None,
            "data_format": [f"no_header_tensor:{20 if dtype.itemsize == 2 else 16}"],
            "data_spec": json.dumps([1, {"type": None, "context": None, "children_spec": []}]),
            "encryption": None,
            "item_loader": "TokensLoader",
        }
        return config, b""

    @staticmethod
    def make_entry(
        name: str, sha256: str, offsets: np.ndarray, width: int, config: dict[str, Any]
    ) -> dict:
        tokens = int(offsets[-1] - offsets[1]) // width
        return {
            "chunk_bytes": int(offsets[-1]),
            "chunk_size": int(offsets[0]),
            "dim": tokens,
            "filename": name,
        }

    @staticmethod
    def make_index(
        entries: list[dict[str, Any]], config: dict[str, Any], content: str
    ) -> dict[str, Any]:
        # litdata names its cache of remote folders by `updated_at`
        return {"chunks": entries, "config": config, "updated_at": content[:16]}


def _read_encodings(shards: list[dict[str, Any]], index: Path) -> dict[str, str]:
    """Return the encoding of each column of an MDS folder. Raises UserError where shards differ."""
    found = {tuple(zip(s["column_names"], s["column_encodings"], strict=True)) for s in shards}
    if len(found) > 1:
        texts = sorted(
            ", ".join(f"{name} {encoding}" for name, encoding in columns) for columns in found
        )
        raise damaged(
            index,
            what="index",
            found="\n".join(texts),
            expected="the same columns in all shards",
        )
    return dict(found.pop()) if found else {"tokens": "bytes"}


def _find_ids(encodings: dict[str, str], index: Path, column: str | None) -> str:
    """Return the column of ids: the requested one, one of COLUMNS, or the only array."""
    if column is not None and column not in encodings:
        raise unknown(
            "column",
            word=column,
            words=encodings,
            flag="--column",
            file=index,
        )
    if column:
        return column
    for name in COLUMNS:
        if name in encodings:
            return name
    arrays = [name for name, encoding in encodings.items() if ARRAY.fullmatch(encoding)]
    if len(arrays) == 1:
        return arrays[0]
    listed = ", ".join(f"{name} ({encoding})" for name, encoding in encodings.items())
    raise damaged(
        index,
        what="ids",
        found=listed,
        expected=f"{' or '.join(COLUMNS)}, or one column of {KINDS}",
    )


class Mds(ShardFolder):
    """Reader of a folder.

    Raises UserError for shards that do not match the index and its hashes, for another compression
    than zstd, and for a folder without a column of ids.
    """

    NAME = "an MDS folder"
    SHARD = "shard.{:05}.mds"

    def __init__(
        self, path: Path, *, column: str | None = None, dtype: str | None = None, **_: object
    ):
        index = path / INDEX
        facts = read_json(index, what="index of the MDS folder", next=AGAIN)
        with report_malformed(index, what="index of the MDS folder", next=AGAIN):
            check_types(facts, fields={"shards": list})
            for shard in facts["shards"]:
                self._check_entry(shard, index)
            self.column, self._type, self._plain = self._choose_column(
                facts["shards"],
                index,
                column,
                dtype=dtype,
            )
            files = [self._find_file(path, shard) for shard in facts["shards"]]
        self._use(
            index,
            shards=[
                self._open(file, shard) for file, shard in zip(files, facts["shards"], strict=True)
            ],
        )

    @staticmethod
    def detect(path: Path) -> bool:
        shards = read_index(path).get("shards")
        return isinstance(shards, list) and all(
            isinstance(s, dict) and s.get("format") == "mds" for s in shards
        )

    @staticmethod
    def list_files(path: Path) -> list[str]:
        files = [
            shard.get(name)
            for shard in read_index(path)["shards"]
            for name in ("raw_data", "zip_data")
        ]
        return [INDEX, *(str(file.get("basename")) for file in files if isinstance(file, dict))]

    def _check_entry(self, shard: dict[str, Any], index: Path) -> None:
        """Raise UserError for a shard that this reader does not read, and as `report_malformed` for
        a broken entry.
        """
        if (shard["format"], shard["version"]) != ("mds", 2):
            raise damaged(
                index,
                what="index",
                found=f"{shard['format']}, version {shard['version']}",
                expected="mds, version 2",
            )
        check_types(shard, fields={"samples": int, "raw_data": {"basename": str, "bytes": int}})
        check_types(
            shard, fields={"column_names": list, "column_encodings": list, "column_sizes": list}
        )
        columns = zip(
            shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True
        )
        for name, encoding, size in columns:
            if not (
                isinstance(name, str)
                and isinstance(encoding, str)
                and (size is None or isinstance(size, int))
            ):
                raise TypeError(f"column {name!r} is {encoding!r} of {size!r} bytes")
        if shard.get("zip_data"):
            check_types(
                shard, fields={"compression": str, "zip_data": {"basename": str, "bytes": int}}
            )

    def _choose_column(
        self, shards: list[dict[str, Any]], index: Path, column: str | None, dtype: str | None
    ) -> tuple[str, np.dtype, bool]:
        """Return the column of ids, its type, and whether it has ids alone, without their
        number.
        """
        encodings = _read_encodings(shards, index)
        column = _find_ids(encodings, index, column=column)
        encoding = encodings[column]
        if "attention_mask" in encodings and column != "attention_mask":
            raise damaged(index, what="padding", found=", ".join(encodings))
        if encoding == "bytes":
            dtype = dtype or BYTES_TYPE
            other = "int32" if dtype == "int64" else "int64"
            self.doubt = f"bytes read as {dtype}: --dtype {other}, or the tokenizer that made them"
            return column, np.dtype(dtype).newbyteorder("<"), True
        match = ARRAY.fullmatch(encoding)
        if match is None:
            raise damaged(
                index,
                what="no ids",
                found=encoding,
                expected=f"{KINDS}, or bytes",
                name=column,
            )
        if dtype is not None and dtype != match[1]:
            what = "--dtype contradicts the column of the MDS folder."
            found_type = f"{column} is {encoding}"
            raise UserError(
                what, file=index, found=found_type, requested=dtype, next="leave it out"
            )
        return column, np.dtype(match[1]).newbyteorder("<"), match[2] is not None

    def _find_file(self, path: Path, shard: dict[str, Any]) -> Path:
        """Return the file of a shard: the uncompressed one if it is there."""
        raw = path / check_relative_path(shard["raw_data"]["basename"])
        if not shard.get("zip_data") or raw.is_file():
            return raw
        name = shard["compression"]
        zipped = path / check_relative_path(shard["zip_data"]["basename"])
        if name.split(":")[0] != "zstd":
            what = "a shard of the MDS folder has a compression that is not read here."
            next_step = (
                "decompress the files (shard.00000.mds.… → shard.00000.mds), or write them again "
                "without it"
            )
            raise UserError(
                what, file=zipped, found=name, expected="zstd, or no compression", next=next_step
            )
        return zipped

    def _open(self, file: Path, entry: dict[str, Any]) -> _Shard:
        """Return a shard whose size, hashes, offsets and samples have been checked."""
        raw = entry["raw_data"]
        compressed = file.name != Path(entry["raw_data"]["basename"]).name
        check_size(file, expected=(entry["zip_data"] if compressed else raw)["bytes"])
        if compressed:
            _check_hashes(np.fromfile(file, np.uint8), facts=entry["zip_data"], file=file)
        data = self._load(file, size=raw["bytes"], compressed=compressed)
        _check_hashes(data, facts=raw, file=file)
        starts, lengths = self._find_ids(
            data,
            offsets=read_offsets(data, file, items=entry["samples"]),
            entry=entry,
            file=file,
        )
        return _Shard(
            file=file,
            size=raw["bytes"],
            starts=starts,
            lengths=lengths,
            compressed=compressed,
        )

    def _find_ids(
        self, data: np.ndarray, offsets: np.ndarray, entry: dict[str, Any], file: Path
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (byte of the first id, number of ids) of each sample. Raises UserError for a
        broken sample.
        """
        columns = find_columns(
            data,
            offsets,
            sizes=[size or None for size in entry["column_sizes"]],
            file=file,
        )
        starts, size = columns[entry["column_names"].index(self.column)]
        width = self._type.itemsize
        if self._plain:
            next_step = (
                f"--dtype int32, if ids have 4 bytes; else {AGAIN}"
                if self.doubt and width == 8
                else None
            )
            problem = f"does not hold whole ids of {self._type.name} in the column {self.column}"
            check_items(
                size % width == 0,
                file,
                problem=problem,
                next=next_step,
            )
            return starts, size // width
        problem = (
            f"does not hold a one-dimensional array of {self._type.name} in the column "
            f"{self.column}"
        )
        check_items(size > 0, file, problem=problem)
        axes = data[starts] >> 2
        bytes_of_number = 1 << (data[starts] & 3).astype(np.int64)
        check_items((axes == 1) & (1 + bytes_of_number <= size), file, problem=problem)
        lengths = np.zeros(len(starts), np.int64)
        for number in (1, 2, 4, 8):
            chosen = bytes_of_number == number
            lengths[chosen] = read_integers(
                data,
                starts=starts[chosen] + 1,
                number=1,
                width=number,
            )[:, 0]
        check_items(1 + bytes_of_number + lengths * width == size, file, problem=problem)
        return starts + 1 + bytes_of_number, lengths

    @staticmethod
    def item_bytes(lengths: np.ndarray, width: int) -> np.ndarray:
        return 4 + 1 + _choose_width(lengths) + lengths * width

    @staticmethod
    def encode(chunk: Chunk) -> bytes:
        """Return consecutive samples with one column of arrays.

        >>> Mds.encode(Chunk(np.array([7, 8, 9], "<u2"), np.array([2, 1]))).hex(" ", 2)
        '0600 0000 0402 0700 0800 0400 0000 0401 0900'
        """
        pieces = []
        for document, width in zip(
            chunk.documents(), _choose_width(chunk.lengths).tolist(), strict=True
        ):
            number = bytes([4 + width // 2]) + len(document).to_bytes(width, "little")
            ids = document.tobytes()
            pieces += [(len(number) + len(ids)).to_bytes(4, "little"), number, ids]
        return b"".join(pieces)

    @staticmethod
    def describe(dtype: np.dtype) -> tuple[dict[str, Any], bytes]:
        config = {
            "column_encodings": [f"ndarray:{dtype.name}"],
            "column_names": ["tokens"],
            "column_sizes": [None],
            "compression": None,
            "format": "mds",
            "hashes": ["sha256"],
            "size_limit": SHARD_BYTES,
            "version": 2,
        }
        return config, json.dumps(config, sort_keys=True).encode()

    @staticmethod
    def make_entry(
        name: str, sha256: str, offsets: np.ndarray, width: int, config: dict[str, Any]
    ) -> dict:
        raw = {"basename": name, "bytes": int(offsets[-1]), "hashes": {"sha256": sha256}}
        return {**config, "samples": int(offsets[0]), "raw_data": raw, "zip_data": None}

    @staticmethod
    def make_index(
        entries: list[dict[str, Any]], config: dict[str, Any], content: str
    ) -> dict[str, Any]:
        return {"shards": entries, "version": 2}


def _check_hashes(data: np.ndarray, facts: dict[str, Any], file: Path) -> None:
    """Raise UserError if data do not have a hash of the index. Unknown algorithms are skipped."""
    for name, expected in (facts.get("hashes") or {}).items():
        if name in HASHES and (found := HASHES[name](data)) != expected:
            raise damaged(
                file,
                what="hash",
                found=f"{name} {found}",
                expected=f"{name} {expected}  ({INDEX})",
            )


def _decompress(file: Path, size: int) -> np.ndarray:
    """Return the decompressed bytes of a file, uint8 [size]. Raises UserError for broken zstd data
    or another size.
    """
    data = bytearray()
    for piece in read_bytes(RawFile(file)):
        data += piece
        if len(data) > size:
            break
    if len(data) != size:
        raise damaged(
            file,
            what="size",
            found=f"{len(data):,} bytes or more, decompressed",
            expected=f"{size:,} bytes  ({INDEX})",
        )
    return np.frombuffer(data, np.uint8)


def _choose_width(lengths: np.ndarray) -> np.ndarray:
    return 1 << np.searchsorted([1 << 8, 1 << 16], lengths, side="right")


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder next to `path`; it replaces `path` on success, and is removed on
    failure.
    """
    building = path.with_name(f".{path.name}.{os.getpid()}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        yield building
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        sync_tree(building)
        if path.exists():
            path.rename(old)
        building.rename(path)
        sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def split_shards(
    chunks: Iterable[Chunk],
    dtype: np.dtype,
    head_bytes: int,
    item_bytes: Callable[[np.ndarray], np.ndarray],
) -> Iterator[list[Chunk]]:
    """Yield the documents of each shard, with ids of `dtype`.

    `item_bytes` returns the bytes of documents in a shard, offset included, given their lengths.

    >>> documents = Chunk(np.zeros(SHARD_BYTES // 2, np.int32), np.array([1, SHARD_BYTES // 2 - 2, 1]))
    >>> shards = split_shards([documents], np.dtype("<u2"), 8, lambda lengths: 2 * lengths)
    >>> [[part.lengths.tolist() for part in parts] for parts in shards]
    [[[1]], [[33554430]], [[1]]]
    """
    parts: list[Chunk] = []
    room = SHARD_BYTES - head_bytes
    for int32 in chunks:
        chunk = Chunk(int32.ids.astype(dtype), lengths=int32.lengths)
        ends = np.concatenate(([0], np.cumsum(item_bytes(chunk.lengths))))
        first = 0
        documents = len(chunk.lengths)
        while first < documents:
            last = max(first, int(np.searchsorted(ends, ends[first] + room, side="right")) - 1)
            if last == first and not parts:
                last += 1
            if last > first:
                parts.append(chunk.part(first, last))
                room -= int(ends[last] - ends[first])
                first = last
            if first < documents:
                yield parts
                parts = []
                room = SHARD_BYTES - head_bytes
    if parts:
        yield parts


def pack_offsets(sizes: np.ndarray, gap: int, name: str) -> np.ndarray:
    """Return the beginning of a shard, uint32 [items + 2]: its number of items, and where each
    begins and ends.

    `gap` is the number of bytes between this array and the first item. Raise UserError for a shard
    of 4 GiB or more.
    """
    head = np.concatenate(([len(sizes), 0], np.cumsum(sizes)))
    head[1:] += 4 * len(head) + gap
    if head[-1] >= OFFSETS_END:
        found = f"{head[-1]:,} bytes"
        expected = f"fewer than {OFFSETS_END:,} bytes, which its offsets can count"
        next_step = "choose another format: --to megatron"
        raise UserError(
            f"a document is too long for {name}.", found=found, expected=expected, next=next_step
        )
    return head.astype("<u4")
