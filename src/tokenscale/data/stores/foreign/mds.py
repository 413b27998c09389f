"""Folders of MosaicML Streaming (MDS): `index.json` and shards `shard.*.mds`.

A shard, little-endian: uint32 samples, uint32 byte at which each sample begins and the last one ends, JSON of its
columns, samples. A sample: uint32 size of each column whose size varies, then the columns. A document is the column of
ids of one sample, in either encoding of LLM Foundry: `ndarray:TYPE` (byte 4 + c, number of ids as an unsigned integer
of 2**c bytes, ids), or `bytes`, whose type the folder does not have. The layout follows streaming/base/format/mds
(mosaicml-streaming 0.13.0).
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import (
    HashedFile,
    check_relative_path,
    check_types,
    read_json,
    report_malformed,
    sha256_file,
    write_json,
)
from tokenscale.data.corpus.read import read_bytes
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
from tokenscale.data.stores.foreign.megatron import SMALL_VOCABULARY
from tokenscale.data.stores.foreign.reframe import (
    ExportCounts,
    ExportFraming,
    ForeignReader,
    export_chunks,
    group_documents,
)
from tokenscale.data.stores.foreign.shards import SHARD_BYTES, pack_offsets, replace_folder, split_shards
from tokenscale.data.stores.foreign.shards import list_outputs as list_outputs
from tokenscale.data.stores.foreign.shards import record_path as record_path

NAME = "an MDS folder"
KEEPS_BOS = True
#: columns of ids, in the order in which they are looked for
COLUMNS = ("tokens", "input_ids")
#: encoding of a column of arrays; with its length, where all arrays have one
ARRAY = re.compile(r"ndarray:(u?int(?:8|16|32|64))(:\d+)?")
KINDS = "ndarray:uint16, uint32, int32 or int64"
#: type of the ids in columns of bytes, which LLM Foundry reads
BYTES_TYPE = "int64"


def detect(path: Path) -> bool:
    shards = read_index(path).get("shards")
    return isinstance(shards, list) and all(isinstance(s, dict) and s.get("format") == "mds" for s in shards)


def list_files(path: Path) -> list[str]:
    """Return the names of the folder's files that its index has."""
    files = [shard.get(name) for shard in read_index(path)["shards"] for name in ("raw_data", "zip_data")]
    return [INDEX, *(str(file.get("basename")) for file in files if isinstance(file, dict))]


def notes(origin: Origin, ended: bool) -> list[str]:
    return []


@dataclass(frozen=True)
class _Shard:
    file: Path
    size: int  # bytes when it is decompressed
    compressed: bool
    starts: np.ndarray  # int64 [samples]: byte of each sample's first id
    lengths: np.ndarray  # int64 [samples]: ids


class Reader(ForeignReader):
    """Reader of a folder.

    Raises UserError for shards that do not match the index and its hashes, for another compression than zstd, and for
    a folder without a column of ids.
    """

    def __init__(self, path: Path, *, column: str | None = None, dtype: str | None = None, **_: object):
        index = path / INDEX
        facts = read_json(index, "index of the MDS folder", AGAIN)
        with report_malformed(index, "index of the MDS folder", AGAIN):
            check_types(facts, {"shards": list})
            for shard in facts["shards"]:
                self._check_entry(shard, index)
            self.column, self._type, self._plain = self._choose_column(facts["shards"], index, column, dtype)
            files = [self._find_file(path, shard) for shard in facts["shards"]]
        self.dtype = self._type.name
        self.files = [index, *files]
        self._decompressed: tuple[Path, np.ndarray] | None = None
        self._shards = [self._open(file, shard) for file, shard in zip(files, facts["shards"], strict=True)]
        self._firsts = np.cumsum([0, *(len(shard.lengths) for shard in self._shards)])
        self._bounds = np.cumsum(np.concatenate(([0], *(shard.lengths for shard in self._shards))))

    def _check_entry(self, shard: dict[str, Any], index: Path) -> None:
        """Raise UserError for a shard that this reader does not read, and as `report_malformed` for a broken entry."""
        if (shard["format"], shard["version"]) != ("mds", 2):
            raise damaged(index, "index", f"{shard['format']}, version {shard['version']}", "mds, version 2")
        check_types(shard, {"samples": int, "raw_data": {"basename": str, "bytes": int}})
        check_types(shard, {"column_names": list, "column_encodings": list, "column_sizes": list})
        columns = zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True)
        for name, encoding, size in columns:
            if not (isinstance(name, str) and isinstance(encoding, str) and (size is None or isinstance(size, int))):
                raise TypeError(f"column {name!r} is {encoding!r} of {size!r} bytes")
        if shard.get("zip_data"):
            check_types(shard, {"compression": str, "zip_data": {"basename": str, "bytes": int}})

    def _choose_column(
        self, shards: list[dict[str, Any]], index: Path, column: str | None, dtype: str | None
    ) -> tuple[str, np.dtype, bool]:
        """Return the column of ids, its type, and whether it has ids alone, without their number."""
        found = {tuple(zip(s["column_names"], s["column_encodings"], strict=True)) for s in shards}
        if len(found) > 1:
            texts = sorted(", ".join(f"{name} {encoding}" for name, encoding in columns) for columns in found)
            raise damaged(index, "index", "\n".join(texts), "the same columns in all shards")
        encodings = dict(found.pop()) if found else {"tokens": "bytes"}
        if column is not None and column not in encodings:
            raise unknown("column", column, encodings, flag="--column", file=index)
        arrays = [name for name, encoding in encodings.items() if ARRAY.fullmatch(encoding)]
        named = [name for name in COLUMNS if name in encodings]
        if column is None and not named and len(arrays) != 1:
            listed = ", ".join(f"{name} ({encoding})" for name, encoding in encodings.items())
            raise damaged(index, "ids", listed, f"{' or '.join(COLUMNS)}, or one column of {KINDS}")
        column = column or (named or arrays)[0]
        encoding = encodings[column]
        if "attention_mask" in encodings and column != "attention_mask":
            raise damaged(index, "padding", ", ".join(encodings))
        if encoding == "bytes":
            other = "int32" if (dtype or BYTES_TYPE) == "int64" else "int64"
            self.doubt = f"bytes read as {dtype or BYTES_TYPE}: --dtype {other}, or the tokenizer that made them"
            return column, np.dtype(dtype or BYTES_TYPE).newbyteorder("<"), True
        match = ARRAY.fullmatch(encoding)
        if match is None:
            raise damaged(index, "no ids", encoding, f"{KINDS}, or bytes", name=column)
        if dtype is not None and dtype != match[1]:
            raise UserError(
                "--dtype contradicts the column of the MDS folder.",
                file=index,
                found=f"{column} is {encoding}",
                requested=dtype,
                next="leave it out",
            )
        return column, np.dtype(match[1]).newbyteorder("<"), match[2] is not None

    def _find_file(self, path: Path, shard: dict[str, Any]) -> Path:
        """Return the file of a shard: the uncompressed one if it is there."""
        raw = path / check_relative_path(shard["raw_data"]["basename"])
        if not shard.get("zip_data") or raw.is_file():
            return raw
        name = shard["compression"]
        if name.split(":")[0] != "zstd":
            raise UserError(
                "a shard of the MDS folder has a compression that is not read here.",
                file=path / check_relative_path(shard["zip_data"]["basename"]),
                found=name,
                expected="zstd, or no compression",
                next="decompress the files (shard.00000.mds.… → shard.00000.mds), or write them again without it",
            )
        return path / check_relative_path(shard["zip_data"]["basename"])

    def _open(self, file: Path, entry: dict[str, Any]) -> _Shard:
        """Return a shard whose size, hashes, offsets and samples have been checked."""
        raw, compressed = entry["raw_data"], file.name != Path(entry["raw_data"]["basename"]).name
        if compressed:
            check_size(file, entry["zip_data"]["bytes"])
            _check_hashes(np.fromfile(file, np.uint8), entry["zip_data"], file)
        else:
            check_size(file, raw["bytes"])
        data = self._load(file, raw["bytes"], compressed)
        _check_hashes(data, raw, file)
        offsets = read_offsets(data, file, entry["samples"])
        starts, lengths = self._find_ids(data, offsets, entry, file)
        return _Shard(file, raw["bytes"], compressed, starts, lengths)

    def _load(self, file: Path, size: int, compressed: bool) -> np.ndarray:
        """Return the bytes of a shard, uint8, from memory if it is the last decompressed one."""
        if not compressed:
            return np.asarray(np.memmap(file, np.uint8, "r")) if size else np.zeros(0, np.uint8)
        if self._decompressed is None or self._decompressed[0] != file:
            self._decompressed = None
            self._decompressed = file, _decompress(file, size)
        return self._decompressed[1]

    def _find_ids(
        self, data: np.ndarray, offsets: np.ndarray, entry: dict[str, Any], file: Path
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (byte of the first id, number of ids) of each sample. Raises UserError for a broken sample."""
        columns = find_columns(data, offsets, [size or None for size in entry["column_sizes"]], file)
        starts, size = columns[entry["column_names"].index(self.column)]
        width = self._type.itemsize
        if self._plain:
            next_step = f"--dtype int32, if ids have 4 bytes; else {AGAIN}" if self.doubt and width == 8 else None
            problem = f"does not hold whole ids of {self._type.name} in the column {self.column}"
            check_items(size % width == 0, file, problem, next_step)
            return starts, size // width
        problem = f"does not hold a one-dimensional array of {self._type.name} in the column {self.column}"
        check_items(size > 0, file, problem)
        axes, bytes_of_number = data[starts] >> 2, 1 << (data[starts] & 3).astype(np.int64)
        check_items((axes == 1) & (1 + bytes_of_number <= size), file, problem)
        lengths = np.zeros(len(starts), np.int64)
        for number in (1, 2, 4, 8):
            chosen = bytes_of_number == number
            lengths[chosen] = read_integers(data, starts[chosen] + 1, 1, number)[:, 0]
        check_items(1 + bytes_of_number + lengths * width == size, file, problem)
        return starts + 1 + bytes_of_number, lengths

    def chunks(self, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for shard, start, end in zip(self._shards, self._firsts[:-1], self._firsts[1:], strict=True):
            for a, b in group_documents(self._bounds, max(first, int(start)), min(last, int(end))):
                data = self._load(shard.file, shard.size, shard.compressed)
                lengths = shard.lengths[a - start : b - start]
                starts = shard.starts[a - start : b - start]
                ends = starts + lengths * self._type.itemsize
                pieces = [data[i:j] for i, j in zip(starts.tolist(), ends.tolist(), strict=True)]
                yield np.concatenate(pieces).view(self._type), lengths


def _check_hashes(data: np.ndarray, facts: dict[str, Any], file: Path) -> None:
    """Raise UserError if data do not have a hash of the index. Unknown algorithms are skipped."""
    hashes = facts.get("hashes") or {}
    for name, expected in hashes.items():
        if name == "sha256":
            found = hashlib.sha256(data).hexdigest()
        elif name == "xxh3_64":
            found = f"{xxh3_64_intdigest(data):016x}"
        else:
            continue
        if found != expected:
            raise damaged(file, "hash", f"{name} {found}", f"{name} {expected}  ({INDEX})")


def _decompress(file: Path, size: int) -> np.ndarray:
    """Return the decompressed bytes of a file, uint8 [size]. Raises UserError for broken zstd data or another size."""
    data = bytearray()
    for piece in read_bytes(file):
        data += piece
        if len(data) > size:
            break
    if len(data) != size:
        raise damaged(file, "size", f"{len(data):,} bytes or more, decompressed", f"{size:,} bytes  ({INDEX})")
    return np.frombuffer(data, np.uint8)


def write(documents: Documents, path: Path, rule: ExportFraming, count: ExportCounts) -> dict[Path, str]:
    """Write the folder, one sample per document with a column `tokens`. Returns file → SHA-256."""
    dtype = np.dtype("<u2" if documents.origin.vocabulary_size < SMALL_VOCABULARY else "<i4")
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
    columns = json.dumps(config, sort_keys=True).encode()
    entries: list[dict[str, Any]] = []
    hashes: dict[str, str] = {}

    def count_bytes(lengths: np.ndarray) -> np.ndarray:
        return 4 + 1 + _choose_width(lengths) + lengths * dtype.itemsize

    with replace_folder(path) as folder:
        shards = split_shards(
            export_chunks(documents, rule, count), dtype, 8 + len(columns), lambda lengths: 4 + count_bytes(lengths)
        )
        for parts in shards:
            name = f"shard.{len(entries):05}.mds"
            sizes = count_bytes(np.concatenate([part.lengths for part in parts]))
            head = pack_offsets(sizes, len(columns), NAME)
            with HashedFile(folder / name) as file:
                file.write(head)
                file.write(columns)
                for part in parts:
                    file.write(_encode_samples(part))
            hashes[name] = file.sha256
            raw = {"basename": name, "bytes": int(head[-1]), "hashes": {"sha256": file.sha256}}
            entries.append({**config, "samples": len(sizes), "raw_data": raw, "zip_data": None})
        documents.confirm()
        write_json(folder / INDEX, {"shards": entries, "version": 2})
        hashes[INDEX] = sha256_file(folder / INDEX)
    return {path / name: sha256 for name, sha256 in hashes.items()}


def _choose_width(lengths: np.ndarray) -> np.ndarray:
    return 1 << np.searchsorted([1 << 8, 1 << 16], lengths, side="right")


def _encode_samples(chunk: Chunk) -> bytes:
    """Return consecutive samples with one column of arrays.

    >>> _encode_samples(Chunk(np.array([7, 8, 9], "<u2"), np.array([2, 1]))).hex(" ", 2)
    '0600 0000 0402 0700 0800 0400 0000 0401 0900'
    """
    pieces = []
    for document, width in zip(chunk.documents(), _choose_width(chunk.lengths).tolist(), strict=True):
        number = bytes([4 + width // 2]) + len(document).to_bytes(width, "little")
        ids = document.tobytes()
        pieces += [(len(number) + len(ids)).to_bytes(4, "little"), number, ids]
    return b"".join(pieces)
