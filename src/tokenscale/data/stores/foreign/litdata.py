"""Folders of token chunks as litdata's `optimize` writes them with a `TokensLoader`.

`index.json` has the files in order and the type of the ids. A chunk, little-endian: uint32 items, uint32 byte at which
each item begins and the last one ends, concatenated ids of all items. A document is one item. The layout follows
litdata/streaming/writer.py and item_loader.py (litdata 0.2.76).
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.files import (
    HashedFile,
    check_file_name,
    check_types,
    read_json,
    report_malformed,
    sha256_file,
    write_json,
)
from tokenscale.data.corpus.refusals import AGAIN, damaged
from tokenscale.data.corpus.shards import INDEX, check_size, read_index, read_offsets
from tokenscale.data.stores.documents import Documents, Origin
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

NAME = "a litdata folder"
KEEPS_BOS = True
#: serializer of items → code → type of the ids (litdata/constants.py); other codes are not integers
TYPES = {
    "no_header_tensor": dict(zip((*range(11, 19), 20), "u1 i1 <i2 <i2 <i4 <i4 <i8 <i8 <u2".split(), strict=True)),
    "no_header_numpy": {0: "i1", 1: "<i2", 2: "<i4", 3: "<i8", 4: "u1", 5: "<u2", 6: "<u4", 7: "<u8"},
}


def detect(path: Path) -> bool:
    index = read_index(path)
    return isinstance(index.get("chunks"), list) and isinstance(index.get("config"), dict)


def list_files(path: Path) -> list[str]:
    """Return the names of the folder's files that its index has."""
    return [INDEX, *(str(chunk.get("filename")) for chunk in read_index(path)["chunks"] if isinstance(chunk, dict))]


def notes(origin: Origin, ended: bool) -> list[str]:
    """Return notes for readers of the folder. `ended` says whether an id ends each document."""
    if ended or origin.eos_id is None:
        return []
    return [f"no id ends a document: --document-end {origin.eos_id} puts one, because TokensLoader joins documents"]


class Reader(ForeignReader):
    """Reader of a folder. Raises UserError for compressed or encrypted chunks, and items that are not token arrays."""

    def __init__(self, path: Path, **_: object):
        index = path / INDEX
        facts = read_json(index, "index of the litdata folder", AGAIN)
        with report_malformed(index, "index of the litdata folder", AGAIN):
            check_types(facts, {"chunks": list, "config": {"data_format": list}})
            self._type = self._parse_config(facts["config"], index)
            for chunk in facts["chunks"]:
                check_types(chunk, {"chunk_bytes": int, "chunk_size": int, "dim": int})
            chunks = [(path / check_file_name(chunk["filename"]), chunk) for chunk in facts["chunks"]]
        self.dtype = self._type.name
        self.files = [index, *(file for file, _ in chunks)]
        ends = [self._read_ends(file, chunk) for file, chunk in chunks]
        # the first file is the index
        self._firsts = np.cumsum([0, *(len(end) for end in ends)])
        starts = np.cumsum([0, *(int(end[-1]) if len(end) else 0 for end in ends)])
        self._bounds = np.concatenate(([0], *(start + end for start, end in zip(starts[:-1], ends, strict=True))))

    def _parse_config(self, config: dict[str, Any], index: Path) -> np.dtype:
        """Return the type of the ids. Raises UserError for items that are not plain token arrays."""
        for what in ("compression", "encryption"):
            if config.get(what):
                raise damaged(index, "compressed items", f"{what} {config[what]}", f"no {what}")
        loader, formats = config.get("item_loader", "TokensLoader"), config["data_format"]
        name, _, code = str(formats[0] if len(formats) == 1 else "").partition(":")
        found = TYPES.get(name, {}).get(int(code) if code.isdigit() else -1)
        if loader != "TokensLoader" or found is None:
            found = f"{', '.join(map(str, formats))} for {loader}"
            one = "one array of integers per item (no_header_tensor:CODE) for TokensLoader"
            raise damaged(index, "no ids", found, one, name="data_format", next="write 1-D tensors with TokensLoader()")
        return np.dtype(found)

    def _read_ends(self, file: Path, chunk: dict[str, Any]) -> np.ndarray:
        """Return where each document of a chunk ends, in tokens. Raises UserError for an inconsistent chunk."""
        items = chunk["chunk_size"]
        check_size(file, chunk["chunk_bytes"])
        data = np.memmap(file, np.uint8, "r") if chunk["chunk_bytes"] else np.zeros(0, np.uint8)
        offsets = read_offsets(data, file, items)
        width = self._type.itemsize
        ends = offsets - 4 * (items + 2)
        if offsets[0] != 4 * (items + 2) or (ends % width).any() or ends[-1] // width != chunk["dim"]:
            found = f"bytes {offsets[0]:,} to {offsets[-1]:,} in {items:,} items"
            ids = f"{chunk['dim']:,} ids of {self._type.name} from byte {4 * (items + 2):,}  ({INDEX})"
            raise damaged(file, "offsets", found, ids)
        return ends[1:] // width

    def chunks(self, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for file, start, end in zip(self.files[1:], self._firsts[:-1], self._firsts[1:], strict=True):
            for a, b in group_documents(self._bounds, max(first, int(start)), min(last, int(end))):
                skipped, tokens = self._bounds[a] - self._bounds[start], self._bounds[b] - self._bounds[a]
                at = 4 * (end - start + 2) + skipped * self._type.itemsize
                yield np.fromfile(file, self._type, tokens, offset=at), np.diff(self._bounds[a : b + 1])


def write(documents: Documents, path: Path, rule: ExportFraming, count: ExportCounts) -> dict[Path, str]:
    """Write the folder, one item per document. Returns file → SHA-256."""
    small = documents.origin.vocabulary_size < SMALL_VOCABULARY
    code, dtype = (20, np.dtype("<u2")) if small else (16, np.dtype("<i4"))
    chunks: list[dict[str, Any]] = []
    hashes: dict[str, str] = {}
    with replace_folder(path) as folder:
        shards = split_shards(
            export_chunks(documents, rule, count), dtype, 8, lambda lengths: 4 + lengths * dtype.itemsize
        )
        for parts in shards:
            name, tokens = f"chunk-0-{len(chunks)}.bin", sum(len(part.ids) for part in parts)
            head = pack_offsets(np.concatenate([part.lengths for part in parts]) * dtype.itemsize, 0, NAME)
            with HashedFile(folder / name) as file:
                file.write(head)
                for part in parts:
                    file.write(part.ids)
            hashes[name] = file.sha256
            chunks.append({"chunk_bytes": int(head[-1]), "chunk_size": int(head[0]), "dim": tokens, "filename": name})
        documents.confirm()
        config = {
            "chunk_bytes": SHARD_BYTES,
            "chunk_size": None,
            "compression": None,
            "data_format": [f"no_header_tensor:{code}"],
            "data_spec": json.dumps([1, {"type": None, "context": None, "children_spec": []}]),
            "encryption": None,
            "item_loader": "TokensLoader",
        }
        content = hashlib.sha256("".join(hashes.values()).encode()).hexdigest()
        # litdata names its cache of remote folders by `updated_at`
        write_json(folder / INDEX, {"chunks": chunks, "config": config, "updated_at": content[:16]})
        hashes[INDEX] = sha256_file(folder / INDEX)
    return {path / name: sha256 for name, sha256 in hashes.items()}
