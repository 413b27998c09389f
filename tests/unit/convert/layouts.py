"""The folders and pairs of the other formats, written and read by hand from their documented
layouts.

`write` and `parse` serve every layout in which documents lie in files beside an index:
test_contract.py uses them.
"""

import hashlib
import json
import struct

import numpy as np
import xxhash
import zstandard

from tests.unit.convert.conftest import write_hf, write_megatron

CODES = {"<u2": "no_header_tensor:20", "<i4": "no_header_tensor:16"}


def flatten(lists):
    return [value for values in lists for value in values]


def encode(value, encoding):
    """A value of a column of MDS by the documented layout."""
    kind, _, rest = encoding.partition(":")
    if kind == "str":
        return value.encode()
    if kind == "int":
        return struct.pack("<q", value)
    if kind == "bytes":
        return np.array(value, rest or "<i8").tobytes()
    dtype, _, length = rest.partition(":")
    ids = np.array(value, dtype)
    if length:
        return ids.tobytes()
    width = next(width for width in range(4) if len(value) < 1 << 8 * (1 << width))
    return bytes([4 + width]) + len(value).to_bytes(1 << width, "little") + ids.tobytes()


def find_size(encoding):
    """The bytes of a column if all its values have the same size."""
    if encoding == "int":
        return 8
    _, *array = encoding.split(":")
    return np.dtype(array[0]).itemsize * int(array[1]) if len(array) == 2 else None


def write_mds(folder, parts, columns, hashes=(), compression=None, **entry):
    """As MDSWriter does it. `parts` are the samples of each shard."""
    folder.mkdir()
    entries = []
    names = sorted(columns)
    encodings = [columns[name] for name in names]
    sizes = [find_size(encoding) for encoding in encodings]
    declared = ["bytes" if e.startswith("bytes") else e for e in encodings]
    config = {
        "column_encodings": declared,
        "column_names": names,
        "column_sizes": sizes,
        "version": 2,
        "format": "mds",
    }
    for number, samples in enumerate(parts):
        items = []
        for sample in samples:
            values = [
                encode(sample[name], encoding)
                for name, encoding in zip(names, encodings, strict=True)
            ]
            head = [len(value) for value, size in zip(values, sizes, strict=True) if size is None]
            items.append(np.array(head, "<u4").tobytes() + b"".join(values))
        text = json.dumps(config).encode()
        offsets = np.cumsum([4 * (len(items) + 2) + len(text), *map(len, items)])
        data = np.array([len(items), *offsets], "<u4").tobytes() + text + b"".join(items)
        name = f"shard.{number:05}.mds"
        files = {"raw_data": describe(name, data, hashes), "zip_data": None}
        if compression:
            data = zstandard.ZstdCompressor().compress(data)
            files["zip_data"] = describe(f"{name}.zstd", data, hashes)
            name += ".zstd"
        (folder / name).write_bytes(data)
        entries.append(
            {**config, **files, "compression": compression, "samples": len(items), **entry}
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return folder


def describe(name, data, hashes):
    known = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "xxh3_64": xxhash.xxh3_64_hexdigest(data),
        "md5": "unknown",
    }
    return {
        "basename": name,
        "bytes": len(data),
        "hashes": {algorithm: known[algorithm] for algorithm in hashes},
    }


def write_tokens(folder, parts, encoding="ndarray:uint16", **options):
    return write_mds(
        folder,
        [[{"tokens": ids} for ids in ids_of] for ids_of in parts],
        {"tokens": encoding},
        **options,
    )


def write_litdata(folder, chunks, form="no_header_tensor:18", dtype="<i8", **config):
    """As litdata's writer does it."""
    folder.mkdir()
    listed = []
    for number, documents in enumerate(chunks):
        items = [np.array(ids, dtype).tobytes() for ids in documents]
        offsets = np.cumsum([4 * (len(items) + 2), *map(len, items)])
        data = np.array([len(items), *offsets], "<u4").tobytes() + b"".join(items)
        name = f"chunk-0-{number}.bin"
        tokens = sum(map(len, documents))
        (folder / name).write_bytes(data)
        listed.append(
            {"chunk_bytes": len(data), "chunk_size": len(items), "dim": tokens, "filename": name}
        )
    config = {
        "compression": None,
        "data_format": [form],
        "encryption": None,
        "item_loader": "TokensLoader",
    } | config
    (folder / "index.json").write_text(json.dumps({"chunks": listed, "config": config}))
    return folder


def write(layout, path, parts, **options):
    """Write documents of wide ids, each part in a file of its own where the layout has several."""
    if layout == "mds":
        return write_tokens(path, parts, **{"encoding": "ndarray:int64", **options})
    if layout == "litdata":
        return write_litdata(path, parts, **options)
    if layout == "hf-datasets":
        return write_hf(path, input_ids=flatten(parts))
    return write_megatron(path, flatten(parts), **{"code": 5, "dtype": "<i8", **options})


def file_of(layout, path, number):
    """The file that holds the ids of a part."""
    if layout == "megatron":
        return path.with_name(path.name + ".bin")
    return path / {
        "mds": f"shard.{number:05}.mds",
        "litdata": f"chunk-0-{number}.bin",
        "hf-datasets": f"data-{number:05}-of-00002.arrow",
    }.get(layout, "")


def parse(layout, path):
    """Return (dtype, documents of each file) of what was written by us."""
    if layout == "megatron":
        index = path.with_name(path.name + ".idx").read_bytes()
        dtype = {4: "<i4", 8: "<u2"}[index[17]]
        lengths = np.frombuffer(index, "<i4", int.from_bytes(index[18:26], "little"), 34)
        ids = np.fromfile(file_of(layout, path, 0), dtype)
        return dtype, [[part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]]
    index = json.loads((path / "index.json").read_text())
    return _parse_litdata(path, index) if layout == "litdata" else _parse_mds(path, index)


def _parse_litdata(folder, index):
    assert index["config"]["item_loader"] == "TokensLoader" and not index["config"]["compression"]
    dtype = {code: dtype for dtype, code in CODES.items()}[index["config"]["data_format"][0]]
    chunks = []
    for chunk in index["chunks"]:
        data = (folder / chunk["filename"]).read_bytes()
        assert len(data) == chunk["chunk_bytes"]
        offsets = np.frombuffer(data, "<u4", 1 + chunk["chunk_size"], offset=4)
        assert int.from_bytes(data[:4], "little") == chunk["chunk_size"]
        chunks.append(
            [
                np.frombuffer(data[a:b], dtype).tolist()
                for a, b in zip(offsets[:-1], offsets[1:], strict=True)
            ]
        )
        assert sum(map(len, chunks[-1])) == chunk["dim"]
    return dtype, chunks


def _parse_mds(folder, index):
    assert index["version"] == 2
    found = []
    for entry in index["shards"]:
        data = (folder / entry["raw_data"]["basename"]).read_bytes()
        assert len(data) == entry["raw_data"]["bytes"]
        assert hashlib.sha256(data).hexdigest() == entry["raw_data"]["hashes"]["sha256"]
        number, *offsets = struct.unpack(
            f"<{entry['samples'] + 2}I", data[: 4 * (entry["samples"] + 2)]
        )
        assert number == entry["samples"] and offsets[-1] == len(data)
        own = json.loads(data[4 * (number + 2) : offsets[0]])
        assert own == {name: value for name, value in entry.items() if name in own}
        dtype = np.dtype(entry["column_encodings"][0].removeprefix("ndarray:")).str
        documents = []
        for a, b in zip(offsets[:-1], offsets[1:], strict=True):
            assert int.from_bytes(data[a : a + 4], "little") == b - a - 4
            width = 1 << data[a + 4] - 4
            start = a + 5 + width
            documents.append(np.frombuffer(data[start:b], dtype).tolist())
            assert int.from_bytes(data[a + 5 : start], "little") == len(documents[-1])
        found.append(documents)
    return dtype, found
