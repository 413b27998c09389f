"""Records files: every record is read by position, whatever the number of files, and every change
is found.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from tokenscale.base.errors import UserError
from tokenscale.data import records
from tokenscale.data.records import Records, write_records


def make_parts(seed, count, dtype):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, 40, count)
    lengths[:2] = 0, 1
    return draw.integers(0, np.iinfo(dtype).max, int(lengths.sum())).astype(dtype), lengths


def open_files(folder, entries, dtype):
    return Records(folder, entries, dtype, what="token store", rebuild="snakemake -f {}".format)


@pytest.mark.parametrize("table_bytes", [0, 1 << 20])
@pytest.mark.parametrize("dtype", ["u1", "<u2", "<u4"])
def test_records_of_several_files_are_read_by_number(tmp_path, monkeypatch, dtype, table_bytes):
    monkeypatch.setattr(records, "TABLE_BYTES", table_bytes)
    dtype = np.dtype(dtype)
    entries = []
    expected = []
    for number, count in enumerate([7, 1, 30]):
        groups = [
            make_parts(number * 10 + part, max(2, count), dtype) for part in range(number + 1)
        ]
        entries.append(write_records(tmp_path / f"{number}.bin", groups, dtype))
        for values, lengths in groups:
            expected += np.split(values, np.cumsum(lengths)[:-1])
    before = len(os.listdir("/proc/self/fd"))
    found = open_files(tmp_path, entries, dtype)
    assert len(found) == len(expected)
    for i in np.random.default_rng(0).permutation(len(expected)).tolist():
        assert np.array_equal(found.read(i), expected[i]) and found.read(i).dtype == dtype
    assert found.lengths().tolist() == [len(values) for values in expected]
    for i in (-1, len(expected)):
        with pytest.raises(IndexError):
            found.read(i)
    del found
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_record_in_another_ones_place_is_found(tmp_path):
    """Two records of equal length, exchanged with their checksums: each is whole, but not the one
    asked for.
    """
    values = np.arange(8, dtype="<u2")
    entry = write_records(tmp_path / "a.bin", [(values, np.array([4, 4]))], np.dtype("<u2"))
    content = bytearray((tmp_path / "a.bin").read_bytes())
    content[:8], content[8:16] = content[8:16], content[:8]
    content[24:32], content[40:48] = content[40:48], content[24:32]
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(UserError, match="a file of the token store has changed"):
        open_files(tmp_path, [entry], np.dtype("<u2")).read(0)


@pytest.mark.parametrize("table_bytes", [0, 1 << 20])
def test_lengths_of_a_changed_table_are_refused(tmp_path, monkeypatch, table_bytes):
    """Lengths place a resumed stream without reading its documents, so the table has a checksum of
    its own.
    """
    monkeypatch.setattr(records, "TABLE_BYTES", table_bytes)
    dtype = np.dtype("<u2")
    path = tmp_path / "a.bin"
    entry = write_records(path, [(np.arange(8, dtype=dtype), np.array([4, 4]))], dtype)
    good = path.read_bytes()
    assert open_files(tmp_path, [entry], dtype).lengths().tolist() == [4, 4]
    for at in range(16, len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(UserError, match="a file of the token store has changed"):
            open_files(tmp_path, [entry], dtype).lengths()


def test_one_record_costs_one_record(tmp_path):
    """Bytes that the process asks the system for, per record of 200 bytes in a file of 2 MB."""
    parts = [(np.arange(10**6, dtype="<u2"), np.full(10**4, 100))]
    found = open_files(
        tmp_path, [write_records(tmp_path / "a.bin", parts, np.dtype("<u2"))], np.dtype("<u2")
    )
    found.read(0)
    before = int(Path("/proc/self/io").read_text().split()[1])
    for i in range(0, 10**4, 10):
        found.read(i)
    assert (int(Path("/proc/self/io").read_text().split()[1]) - before) / 1000 < 300
