"""Reader of texts in one file of a MosaicML Streaming (MDS) or litdata folder.

Both begin with little-endian uint32: number of items, byte at which each item begins and the last
one ends.

MDS: JSON of the columns follows the offsets. A sample is the uint32 size of each column whose size
varies, then the columns. A file has all that is needed to read it (streaming/base/format/mds,
mosaicml-streaming 0.13.0).

litdata: `index.json` of the folder has the type of each leaf of an item. An item is the uint32 size
of each leaf, then the leaves. Chunks of dictionaries have empty items, and end with an Arrow file
of them, its size as uint32, and the magic `LDARW01` (litdata/streaming/writer.py and
item_loader.py, litdata 0.2.76).
"""

import json
from collections.abc import Generator, Iterator
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
        raise damaged(
            file,
            what="size",
            found=found,
            expected=f"{expected:,} bytes  ({INDEX})",
        )


def read_offsets(data: np.ndarray, file: Path, items: int | None = None) -> np.ndarray:
    """Return the byte at which each item of a shard begins and the last one ends, int64 [items +
    1].

    `data` is the shard, uint8; `items` is their number in the index. Raises UserError if they
    contradict each other.
    """
    if items is not None:
        count = items
    elif len(data) >= 4:
        count = int.from_bytes(data[:4].tobytes(), "little")
    else:
        count = -1
    end = 4 * (count + 2)
    if count < 0 or len(data) < end:
        raise damaged(
            file,
            what="offsets",
            found=f"{len(data):,} bytes",
            expected=f"{end:,} or more for {count:,} items",
        )
    stored = data[:end].view("<u4").astype(np.int64)
    offsets = stored[1:]
    if (
        stored[0] != count
        or offsets[0] < end
        or offsets[-1] != len(data)
        or (np.diff(offsets) < 0).any()
    ):
        found = f"{stored[0]:,} items from byte {offsets[0]:,} to byte {offsets[-1]:,}"
        ordered = (
            f"{count:,} items one after another, from byte {end:,} or later to byte {len(data):,}"
        )
        raise damaged(
            file,
            what="offsets",
            found=found,
            expected=ordered,
        )
    return offsets


def find_columns(
    data: np.ndarray, offsets: np.ndarray, sizes: list[int | None], file: Path
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (first byte, number of bytes) of each column in each item, int64 [items].

    `sizes` are the bytes of each column, None where each item begins with its uint32 size. Raises
    UserError for items of another size.
    """
    starts = offsets[:-1] + 4 * sizes.count(None)
    head = 4 * sizes.count(None)
    check_items(starts <= offsets[1:], file, problem="ends inside the sizes of its columns")
    stored = iter(
        read_integers(
            data,
            starts=offsets[:-1],
            number=head // 4,
            width=4,
        ).T
    )
    columns = []
    for size in sizes:
        lengths = next(stored) if size is None else np.full(len(starts), size)
        columns.append((starts, lengths))
        starts = starts + lengths
    check_items(
        starts == offsets[1:],
        file,
        problem="does not have the bytes that the sizes of its columns describe",
    )
    return columns


def read_integers(data: np.ndarray, starts: np.ndarray, number: int, width: int) -> np.ndarray:
    """Return `number` unsigned integers of `width` bytes from each start, int64 [starts,
    number].
    """
    found = data[starts[:, None] + np.arange(number * width)]
    return np.ascontiguousarray(found).view(f"<u{width}").astype(np.int64)


def check_items(right: np.ndarray, file: Path, problem: str, next: str | None = None) -> None:
    """Raise UserError with the first item of a shard that is not `right`."""
    if not right.all():
        place = f"{int(np.flatnonzero(~right)[0]):,} of {len(right):,} in this shard (from 0)"
        raise damaged(
            file,
            what="items",
            found=problem,
            item=place,
            next=next,
        )


ARROW_END = b"LDARW01\0"
#: types of litdata's leaves that are UTF-8
LITDATA_TEXT = ("str", "text")


def read_mds(
    data: bytes, columns: dict[str, str], path: Path
) -> Generator[tuple[str, ...], None, None]:
    """Yield the texts of each sample of an MDS shard, in the order of `columns` (option → name).

    `data` is the decompressed shard, and `path` its file for messages. Raises UserError for a
    missing column, a column that is not text, a damaged shard, and malformed UTF-8.
    """
    offsets = read_offsets(np.frombuffer(data, np.uint8), file=path)
    config_at = 4 * (len(offsets) + 1)
    with report_malformed(path, what="description of the columns of the MDS shard", next=AGAIN):
        config = json.loads(data[config_at : offsets[0]])
        check_types(
            config, fields={"column_names": list, "column_encodings": list, "column_sizes": list}
        )
        encodings = dict(zip(config["column_names"], config["column_encodings"], strict=True))
        sizes = [int(size) if size else None for size in config["column_sizes"]]
        if len(sizes) != len(encodings):
            raise ValueError(f"{len(sizes)} column_sizes for {len(encodings)} columns")
    places = [
        _find_text(
            name,
            option,
            encodings=encodings,
            text=("str",),
            path=path,
        )
        for option, name in columns.items()
    ]
    yield from _read_items(
        data,
        offsets,
        sizes=sizes,
        places=places,
        path=path,
    )


def read_litdata(
    data: bytes, columns: dict[str, str], path: Path
) -> Generator[tuple[str | None, ...], None, None]:
    """Yield the texts of each item of a litdata chunk, in the order of `columns` (option → name).

    An item that is a string is its column `text`. Arguments and errors as in `read_mds`; also
    raises UserError without the folder's index, and for chunks that are compressed in themselves,
    or encrypted.
    """
    index = path.with_name(INDEX)
    config = read_json(
        index,
        what="index of the litdata folder",
        next=f"put the folder's {INDEX} next to {path.name}",
    )
    with report_malformed(index, what="index of the litdata folder", next=AGAIN):
        check_types(config, fields={"config": {"data_format": list, "data_spec": str}})
        config = config["config"]
        formats = dict(
            zip(
                _list_leaves(json.loads(config["data_spec"])[1]), config["data_format"], strict=True
            )
        )
    whole = path.name.endswith(".zstd.bin")
    if config.get("encryption") or (config.get("compression") and not whole):
        found = (
            f"compression {config.get('compression')}, encryption {config.get('encryption')}  "
            f"({INDEX})"
        )
        raise damaged(
            path,
            what="compressed items",
            found=found,
            expected="no encryption, and compression of whole chunks or none",
        )
    if data[-len(ARROW_END) :] == ARROW_END:
        yield from _read_arrow(data, columns, path=path)
        return
    places = [
        _find_text(
            name,
            option,
            encodings=formats,
            text=LITDATA_TEXT,
            path=path,
        )
        for option, name in columns.items()
    ]
    yield from _read_items(
        data,
        offsets=read_offsets(np.frombuffer(data, np.uint8), file=path),
        sizes=[None] * len(formats),
        places=places,
        path=path,
    )


def _find_text(
    name: str, option: str, encodings: dict[str, str], text: tuple[str, ...], path: Path
) -> int:
    """Return the place of a column among all. Raises UserError if it is missing or has another type
    than `text`.
    """
    if name not in encodings:
        raise missing_column(
            path,
            name,
            names=list(encodings),
            option=option,
        )
    if encodings[name] not in text:
        raise damaged(
            path,
            what="no text",
            found=encodings[name],
            expected="str",
            name=name,
            key=f"source.{option}",
        )
    return list(encodings).index(name)


def _read_items(
    data: bytes, offsets: np.ndarray, sizes: list[int | None], places: list[int], path: Path
) -> Iterator[tuple[str, ...]]:
    """Yield the columns `places` of each item; `sizes` as in `find_columns`."""
    columns = find_columns(
        np.frombuffer(data, np.uint8),
        offsets,
        sizes=sizes,
        file=path,
    )
    spans = [
        zip(a.tolist(), (a + size).tolist(), strict=True)
        for a, size in (columns[place] for place in places)
    ]
    for number, row in enumerate(zip(*spans, strict=True)):
        try:
            yield tuple(data[begin:end].decode() for begin, end in row)
        except UnicodeDecodeError as error:
            raise damaged(
                path,
                what="utf-8",
                found=error.reason,
                row=f"{number:,}",
            ) from None


def _read_arrow(
    data: bytes, columns: dict[str, str], path: Path
) -> Iterator[tuple[str | None, ...]]:
    """Yield the texts of a chunk that ends with an Arrow file of its items."""
    end = len(data) - len(ARROW_END) - 4
    start = end - int.from_bytes(data[end : end + 4], "little")
    if start < 0:
        raise damaged(
            path,
            what="damaged",
            found=f"an Arrow file of {end - start:,} bytes",
            expected=f"at most {end:,} bytes",
        )
    try:
        file = pa.ipc.open_file(pa.py_buffer(data)[start:end])
        for option, name in columns.items():
            kind = get_type(file.schema, name)
            if kind is None:
                raise missing_column(
                    path,
                    name,
                    names=file.schema.names,
                    option=option,
                )
            _find_text(
                name,
                option,
                encodings={name: str(kind)},
                text=("string", "large_string", "null"),
                path=path,
            )
        for number in range(file.num_record_batches):
            batch = file.get_batch(number)
            batch.validate(full=True)
            yield from zip(
                *(get_column(batch, name).to_pylist() for name in columns.values()), strict=True
            )
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise damaged(path, what="damaged", found=str(error).splitlines()[0]) from None


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
    return [
        leaf
        for key, child in named
        for leaf in _list_leaves(child, name=f"{name}.{key}" if name else str(key))
    ]
