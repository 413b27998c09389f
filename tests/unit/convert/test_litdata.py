"""litdata's folders: their bytes, every type of ids, and items of other kinds."""

import json

import numpy as np
import pytest

from tests.unit.convert.conftest import KNOWN, documents_of, refused, run, write_hf
from tests.unit.convert.layouts import write_litdata


def test_the_bytes_of_a_litdata_folder(tmp_path):
    run(write_hf(tmp_path / "hf", input_ids=[[0, 7, 8], [0, 9]]), tmp_path / "l", to="litdata", **KNOWN)
    assert sorted(p.name for p in (tmp_path / "l").iterdir()) == ["chunk-0-0.bin", "index.json", "tokenscale.json"]
    assert (tmp_path / "l/chunk-0-0.bin").read_bytes() == bytes.fromhex(
        "02000000"  # items
        "10000000 16000000 1a000000"  # where each begins, and where the last one ends
        "0000 0700 0800 0000 0900"
    )
    index = json.loads((tmp_path / "l/index.json").read_text())
    assert index["chunks"] == [{"chunk_bytes": 26, "chunk_size": 2, "dim": 5, "filename": "chunk-0-0.bin"}]
    assert index["config"]["data_format"] == ["no_header_tensor:20"]
    assert index["config"]["item_loader"] == "TokensLoader" and index["config"]["chunk_bytes"] == 2**26


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((f"no_header_tensor:{code}", dtype) for code, dtype in [(11, "u1"), (12, "i1"), (13, "<i2"), (14, "<i2")]),
        *((f"no_header_tensor:{code}", dtype) for code, dtype in [(15, "<i4"), (16, "<i4"), (17, "<i8"), (18, "<i8")]),
        *((f"no_header_numpy:{code}", dtype) for code, dtype in [(0, "i1"), (1, "<i2"), (2, "<i4"), (3, "<i8")]),
        *((f"no_header_numpy:{code}", dtype) for code, dtype in [(4, "u1"), (5, "<u2"), (6, "<u4"), (7, "<u8")]),
        ("no_header_tensor:20", "<u2"),
    ],
)
def test_every_integer_type_is_read(tmp_path, form, dtype):
    source = write_litdata(tmp_path / "l", [[[5, 6], [7, 1]], [[], [8]]], form, dtype)
    found = run(source, tmp_path / "s", to="token-list", **KNOWN)
    assert documents_of(tmp_path / "s") == [[0, 5, 6], [0, 7], [0], [0, 8]]
    assert f"ids of {np.dtype(dtype).name}" in found


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"compression": "zstd"}, "compression zstd"),
        ({"encryption": {"level": "chunk"}}, "encryption"),
        ({"item_loader": "PyTreeLoader"}, "holds no lists of ids"),
        ({"data_format": ["no_header_tensor:1"]}, "holds no lists of ids"),
        ({"data_format": ["tensor:18"]}, "holds no lists of ids"),
        ({"data_format": ["int"]}, "holds no lists of ids"),
        ({"data_format": ["no_header_tensor:18", "int"]}, "holds no lists of ids"),
        ({"data_format": []}, "holds no lists of ids"),
        ({"data_format": None}, "expected content"),
    ],
)
def test_folders_of_other_items_are_refused(tmp_path, config, words):
    source = write_litdata(tmp_path / "l", [[[5, 6], [7]]], **config)
    text = refused(source, tmp_path / "s", to="token-list", **KNOWN)
    assert words in text and "index.json" in text and "next" in text
