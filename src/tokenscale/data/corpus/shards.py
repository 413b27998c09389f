"""Reader of texts in one file of a MosaicML Streaming (MDS) or litdata folder.

Both begin with little-endian uint32: number of items, byte at which each item begins and the last one ends.

MDS: JSON of the columns follows the offsets. A sample is the uint32 size of each column whose size varies, then the
columns. A file has all that is needed to read it (streaming/base/format/mds, mosaicml-streaming 0.13.0).

litdata: `index.json` of the folder has the type of each leaf of an item. An item is the uint32 size of each leaf, then
the leaves. Chunks of dictionaries have empty items, and end with an Arrow file of them, its size as uint32, and
the magic `LDARW01` (litdata/streaming/writer.py and item_loader.py, litdata 0.2.76).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tokenscale.base.errors import UserError
from tokenscale.base.files import check_types, read_json, report_malformed
from tokenscale.data.corpus.columns import get_column, get_type
from tokenscale.data.corpus.refusals import AGAIN, damaged, missing_column

INDEX = "index.json"


def read_index(path: Path) -> dict[str, Any]:
    """Return the index of a folder, or an empty one if it is missing or broken."""
    try:
        found = read_json(path / INDEX)
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def check_size(file: Path, expected: int) -> None:
    """Raise UserError if a file of a folder is missing, or has another size than its index says."""
    size = file.stat().st_size if file.is_file() else None
    if size != expected:
        found = "no such file" if size is None else f"{size:,} bytes"
        raise damaged(file, "size", found, f"{expected:,} bytes  ({INDEX})")


def read_offsets(head: np.ndarray, size: int, items: int, file: Path) -> np.ndarray:
    """Return the byte at which each item begins and the last one ends, int64 [items + 1].

    `head` are the first bytes of the shard, uint8 [4 * (items + 2)], and `size` its bytes. Raise UserError if the shard
    does not hold `items` items, or if its offsets are inconsistent.
    """
    end = 4 * (items + 2)
    if items < 0 or size < end:
        raise damaged(file, "offsets", f"{size:,} bytes", f"{end:,} or more for {items:,} items  ({INDEX})")
    stored = np.frombuffer(head.tobytes(), "<u4").astype(np.int64)
    if stored[0] != items:
        raise damaged(file, "offsets", f"{stored[0]:,} items", f"{items:,}  ({INDEX})")
    offsets = stored[1:]
    decreasing = np.flatnonzero(np.diff(offsets) < 0)
    if decreasing.size:
        item = int(decreasing[0])
        found = f"item {item:,} from byte {offsets[item]:,} to byte {offsets[item + 1]:,}"
        raise damaged(file, "offsets", found, "each item to end where it begins, or later")
    if offsets[0] < end or offsets[-1] != size:
        found = f"items from byte {offsets[0]:,} to byte {offsets[-1]:,}"
        raise damaged(file, "offsets", found, f"from byte {end:,} or later to byte {size:,}")
    return offsets


ARROW_END = b"LDARW01\0"
#: types of litdata's leaves that are UTF-8
LITDATA_TEXT = ("str", "text")


def read_mds(data: bytes, columns: dict[str, str], path: Path) -> Iterator[tuple[str, ...]]:
    """Yield the texts of each sample of an MDS shard, in the order of `columns` (option → name).

    `data` is the decompressed shard, and `path` its file for messages. Raises UserError for a missing column, a column
    that is not text, a damaged shard, and malformed UTF-8.
    """
    offsets = _read_offsets(data, path)
    config_at = 4 * (len(offsets) + 1)
    with report_malformed(path, "description of the columns of the MDS shard", AGAIN):
        config = json.loads(data[config_at : offsets[0]])
        check_types(config, {"column_names": list, "column_encodings": list, "column_sizes": list})
        encodings = dict(zip(config["column_names"], config["column_encodings"], strict=True))
        sizes = [int(size) if size else None for size in config["column_sizes"]]
        if len(sizes) != len(encodings):
            raise ValueError(f"{len(sizes)} column_sizes for {len(encodings)} columns")
    places = [_find_text(name, option, encodings, ("str",), path) for option, name in columns.items()]
    yield from _read_items(data, offsets, sizes, places, path)


def read_litdata(data: bytes, columns: dict[str, str], path: Path) -> Iterator[tuple[str | None, ...]]:
    """Yield the texts of each item of a litdata chunk, in the order of `columns` (option → name).

    An item that is a string is its column `text`. Arguments and errors as in `read_mds`; also raises UserError without
    the folder's index, and for chunks that are compressed in themselves, or encrypted.
    """
    index = path.with_name(INDEX)
    config = read_json(index, "index of the litdata folder", f"put the folder's {INDEX} next to {path.name}")
    with report_malformed(index, "index of the litdata folder", AGAIN):
        check_types(config, {"config": {"data_format": list, "data_spec": str}})
        config = config["config"]
        formats = dict(zip(_list_leaves(json.loads(config["data_spec"])[1]), config["data_format"], strict=True))
    whole = path.name.endswith(".zstd.bin")
    if config.get("encryption") or (config.get("compression") and not whole):
        found = f"compression {config.get('compression')}, encryption {config.get('encryption')}  ({INDEX})"
        raise damaged(path, "compressed items", found, "no encryption, and compression of whole chunks or none")
    if data[-len(ARROW_END) :] == ARROW_END:
        yield from _read_arrow(data, columns, path)
        return
    places = [_find_text(name, option, formats, LITDATA_TEXT, path) for option, name in columns.items()]
    yield from _read_items(data, _read_offsets(data, path), [None] * len(formats), places, path)


def _read_offsets(data: bytes, path: Path) -> np.ndarray:
    items = int.from_bytes(data[:4], "little") if len(data) >= 4 else -1
    return read_offsets(np.frombuffer(data, np.uint8)[: 4 * (items + 2)], len(data), items, path)


def _find_text(name: str, option: str, encodings: dict[str, str], text: tuple[str, ...], path: Path) -> int:
    """Return the place of a column among all. Raises UserError if it is missing or has another type than `text`."""
    if name not in encodings:
        raise missing_column(path, name, list(encodings), option)
    if encodings[name] not in text:
        raise damaged(path, "no text", encodings[name], "str", name=name, key=f"source.{option}")
    return list(encodings).index(name)


def _read_items(
    data: bytes, offsets: np.ndarray, sizes: list[int | None], places: list[int], path: Path
) -> Iterator[tuple[str, ...]]:
    """Yield the columns `places` of each item. `sizes` are bytes of each column, None where the item has it."""
    head = 4 * sizes.count(None)
    for number, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        stored = iter(np.frombuffer(data[begin : min(end, begin + head)], "<u4", (min(end, begin + head) - begin) // 4))
        lengths = [int(next(stored, 0)) if size is None else size for size in sizes]
        if begin + head + sum(lengths) != end:
            found, expected = f"{end - begin:,} bytes", f"{head + sum(lengths):,} in its columns"
            raise damaged(path, "damaged", found, expected, row=f"{number:,}")
        bounds = np.cumsum([begin + head, *lengths]).tolist()
        try:
            yield tuple(data[bounds[place] : bounds[place + 1]].decode() for place in places)
        except UnicodeDecodeError as error:
            raise damaged(path, "utf-8", error.reason, row=f"{number:,}") from None


def _read_arrow(data: bytes, columns: dict[str, str], path: Path) -> Iterator[tuple[str | None, ...]]:
    """Yield the texts of a chunk that ends with an Arrow file of its items."""
    end = len(data) - len(ARROW_END) - 4
    start = end - int.from_bytes(data[end : end + 4], "little")
    if start < 0:
        raise damaged(
            path, "damaged", f"an Arrow file of {end - start:,} bytes", f"at most {end:,}, as the chunk holds"
        )
    try:
        file = pa.ipc.open_file(pa.py_buffer(data)[start:end])
        for option, name in columns.items():
            kind = get_type(file.schema, name)
            if kind is None:
                raise missing_column(path, name, file.schema.names, option)
            _find_text(name, option, {name: str(kind)}, ("string", "large_string", "null"), path)
        for number in range(file.num_record_batches):
            batch = file.get_batch(number)
            batch.validate(full=True)
            yield from zip(*(get_column(batch, name).to_pylist() for name in columns.values()), strict=True)
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise damaged(path, "damaged", str(error).splitlines()[0]) from None


def _list_leaves(spec: dict[str, Any], name: str = "") -> list[str]:
    """Return the names of the leaves of a tree of PyTorch (`torch.utils._pytree.treespec_dumps`).

    >>> leaf = {"type": None, "context": None, "children_spec": []}
    >>> _list_leaves({"type": "builtins.dict", "context": '["id", "text"]', "children_spec": [leaf, leaf]})
    ['id', 'text']
    >>> _list_leaves(leaf)
    ['text']
    """
    if spec["type"] is None:
        return [name or "text"]
    children = spec["children_spec"]
    keys = json.loads(spec["context"]) if spec["type"].endswith("ict") else range(len(children))
    named = zip(keys, children, strict=True)
    return [leaf for key, child in named for leaf in _list_leaves(child, f"{name}.{key}" if name else str(key))]
